//! A private apt root: Debian's packages, verified by apt, without installing
//! anything on the host and without root.
//!
//! Three jobs. [`Apt::resolve`] asks the signed indices which version of each package
//! is current; it runs when the lock file is renewed, and when the mirror no longer has
//! a locked version. [`Apt::dependencies`] then names the dependencies of those
//! versions. [`Apt::fetch`] downloads one file, which apt compares with the hash in the
//! lock or in the index.
//!
//! Invariants:
//! - An index that is not signed by one of Debian's keys yields no package.
//! - The host's own apt is not changed, and its data is not trusted: only the address
//!   of its mirror is read (`mirror`).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At as _, Error, Result},
    lock::{Lock, Package},
    manifest::Variant,
    mirror::Mirror,
    packages::{Category, KERNEL},
    program,
};

/// The suite that everything comes from, but what [`Variant::Full`] needs newer.
const SUITE: &str = "trixie";
/// The component of Debian with the firmware that devices load, most of which has no source.
const FIRMWARE: &str = "non-free-firmware";
/// Debian's keys, as its own package installs them.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The program of apt that downloads one file.
const FETCHER: &str = "/usr/lib/apt/apt-helper";

/// The source of trust in an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// One of Debian's keys has signed it.
    Debian,
    /// The test that has written it.
    #[cfg(test)]
    Test,
}

/// The outcome of a request for one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetched {
    /// It is downloaded, with the required hash.
    Here,
    /// The archive does not have it.
    Gone,
}

/// An apt root of our own.
#[derive(Debug)]
pub(crate) struct Apt {
    configuration: PathBuf,
}

impl Apt {
    /// Sets up `root` for the packages of a variant; existing files are used.
    pub(crate) fn open(
        root: &Path,
        mirror: &Mirror,
        trust: Trust,
        variant: Variant,
    ) -> Result<Self> {
        for folder in [
            "etc/apt/apt.conf.d",
            "etc/apt/preferences.d",
            "etc/apt/sources.list.d",
            "var/lib/dpkg",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
        ] {
            let folder = root.join(folder);
            fs::create_dir_all(&folder).at("make", &folder)?;
        }
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::write(&path, text).at("write", &path)
        };
        // This root never has an installed package.
        write("var/lib/dpkg/status", "")?;
        write("etc/apt/sources.list.d/debian.sources", &sources(mirror, trust, variant))?;
        write("apt.conf", &configuration(root))?;
        Ok(Self { configuration: root.join("apt.conf") })
    }

    /// Fetches the indices and locks the current version of each of these packages.
    pub(crate) fn resolve(
        &self,
        mirror: &Mirror,
        packages: impl Iterator<Item = (Category, &'static str)>,
    ) -> Result<Lock> {
        program::run(self.command("apt-get").arg("update")).map_err(|error| match error {
            Error::Program { output, .. } => Error::Indices { output },
            other => other,
        })?;
        let mut wanted = Vec::new();
        for (category, name) in packages {
            let name = if name == KERNEL { self.kernel()? } else { name.to_owned() };
            wanted.push((category, name));
        }
        let names: Vec<&str> = wanted.iter().map(|(_, name)| name.as_str()).collect();
        let of_devices = |name: &str| wanted.contains(&(Category::Device, name.to_owned()));
        // For apt, an archive without the component is one without its packages.
        let output = self.print_uris("download", &names).map_err(|error| match error {
            Error::NoPackage { package } if of_devices(&package) => {
                Error::NoComponent { mirror: mirror.archive.clone(), package, component: FIRMWARE }
            }
            other => other,
        })?;
        let mut packages = wanted
            .iter()
            .map(|(category, name)| find(&output, mirror, *category, name))
            .collect::<Result<Vec<_>>>()?;
        packages.sort_by(|a, b| (a.category, &a.name).cmp(&(b.category, &b.name)));
        Ok(Lock { packages })
    }

    /// Everything that apt would install for these packages on an empty machine,
    /// themselves included. The indices are those of the last [`Self::resolve`].
    pub(crate) fn dependencies(&self, mirror: &Mirror, names: &[&str]) -> Result<Vec<Package>> {
        let output = self.print_uris("install", names)?;
        Ok(output.lines().filter_map(|line| parse(line, mirror, Category::Library)).collect())
    }

    /// The downloads that apt plans, a line each.
    fn print_uris(&self, command: &str, names: &[&str]) -> Result<String> {
        let mut apt = self.command("apt-get");
        apt.args(["--quiet=2", "--yes", "--print-uris", command]).args(names);
        match program::run(&mut apt) {
            Ok(output) => Ok(String::from_utf8_lossy(&output).into_owned()),
            Err(Error::Program { program, status, output }) => Err(match unknown(&output) {
                Some(package) => Error::NoPackage { package },
                None => Error::Program { program, status, output },
            }),
            Err(other) => Err(other),
        }
    }

    /// Downloads one package to `target`; apt checks its hash.
    pub(crate) fn fetch(
        &self,
        mirror: &Mirror,
        package: &Package,
        target: &Path,
    ) -> Result<Fetched> {
        let uri = format!("{}/{}", mirror.base(package.origin), package.path);
        let mut command = self.command(FETCHER);
        command.arg("download-file").arg(uri).arg(target);
        command.arg(format!("SHA256:{}", package.sha256));
        match program::run(&mut command) {
            Ok(_) => Ok(Fetched::Here),
            Err(Error::Program { output, .. }) => failure(package, &output),
            Err(other) => Err(other),
        }
    }

    /// The package that the kernel's metapackage depends on.
    fn kernel(&self) -> Result<String> {
        let output = program::run(self.command("apt-cache").args(["depends", KERNEL]))?;
        String::from_utf8_lossy(&output)
            .lines()
            .find_map(|line| line.trim().strip_prefix("Depends: "))
            .filter(|name| name.starts_with("linux-image-"))
            .map(str::to_owned)
            .ok_or_else(|| Error::NoPackage { package: KERNEL.to_owned() })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = program::host(program);
        command.env("APT_CONFIG", &self.configuration);
        command
    }
}

/// Distinguishes an archive that lacks a file from one that was not reached.
fn failure(package: &Package, output: &str) -> Result<Fetched> {
    let last = output.split("; ").find(|line| line.starts_with("E: ")).unwrap_or(output);
    // The status is the server's; apt repeats it in every language.
    if last.contains(" 404 ") {
        return Ok(Fetched::Gone);
    }
    Err(Error::Fetch {
        package: package.name.clone(),
        version: package.version.clone(),
        output: last.trim_start_matches("E: ").to_owned(),
    })
}

/// The package that is missing in every index, by apt's error message.
fn unknown(output: &str) -> Option<String> {
    // A package that others only refer to is known, but has no version.
    ["E: Unable to locate package ", "E: Can't select candidate version from package "]
        .iter()
        .find_map(|complaint| output.split("; ").find_map(|line| line.strip_prefix(complaint)))
        .and_then(|rest| rest.split(' ').next())
        .map(str::to_owned)
}

/// The whole configuration of apt: replaces each default that would read the host's.
fn configuration(root: &Path) -> String {
    let root = root.display();
    format!(
        r#"Dir "{root}";
Dir::State::status "{root}/var/lib/dpkg/status";
Dir::Etc::Trusted "/dev/null";
Dir::Etc::TrustedParts "/dev/null";
Dir::Bin::Methods "/usr/lib/apt/methods";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Install-Recommends "false";
APT::Get::AllowUnauthenticated "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
Acquire::ForceHash "SHA256";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::http::Proxy::127.0.0.1 "DIRECT";
"#
    )
}

fn sources(mirror: &Mirror, trust: Trust, variant: Variant) -> String {
    let trust = match trust {
        Trust::Debian => format!("Signed-By: {KEYRING}"),
        #[cfg(test)]
        Trust::Test => "Trusted: yes".to_owned(),
    };
    let stanza = |uri: &str, suites: &str| {
        format!("Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main {FIRMWARE}\n{trust}\n")
    };
    // Apt takes from backports only what no other suite has.
    let backports = match variant {
        Variant::Base => String::new(),
        Variant::Full => format!(" {SUITE}-backports"),
    };
    format!(
        "{}\n{}",
        stanza(&mirror.archive, &format!("{SUITE} {SUITE}-updates{backports}")),
        stanza(&mirror.security, &format!("{SUITE}-security"))
    )
}

/// Finds a package in what `--print-uris` printed: `'URI' FILE SIZE SHA256:HASH` a line.
fn find(output: &str, mirror: &Mirror, category: Category, name: &str) -> Result<Package> {
    output
        .lines()
        .filter_map(|line| parse(line, mirror, category))
        .find(|package| package.name == name)
        .ok_or_else(|| Error::NoPackage { package: name.to_owned() })
}

fn parse(line: &str, mirror: &Mirror, category: Category) -> Option<Package> {
    let mut words = line.split(' ');
    let uri = words.next()?.trim_matches('\'');
    let file = words.next()?;
    let size = words.next()?.parse().ok()?;
    let sha256 = words.next()?.strip_prefix("SHA256:")?;
    let mut parts = file.split('_');
    let name = parts.next()?.to_owned();
    // The epoch's colon cannot stand in a file name.
    let version = parts.next()?.replace("%3a", ":");
    let (origin, path) = mirror.split(uri)?;
    Some(Package {
        category,
        name,
        version,
        origin,
        size,
        sha256: sha256.to_owned(),
        path: path.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Origin;

    #[test]
    fn a_line_of_uris_becomes_a_locked_package() {
        let mirror = Mirror {
            archive: "http://m.example/debian".to_owned(),
            security: "http://m.example/debian-security".to_owned(),
        };
        let output = "\
'http://m.example/debian/pool/main/a/ab/abc_1.0_amd64.deb' abc_1.0_amd64.deb 3 SHA256:00
'http://m.example/debian-security/pool/updates/main/z/zlib/ab_1.3%2b1_amd64.deb' ab_1%3a1.3+1_amd64.deb 88 SHA256:8c
";
        let package = find(output, &mirror, Category::Tool, "ab").unwrap();
        assert_eq!(package.version, "1:1.3+1");
        assert_eq!(package.origin, Origin::Security);
        assert_eq!(package.path, "pool/updates/main/z/zlib/ab_1.3%2b1_amd64.deb");
        assert!(matches!(
            find(output, &mirror, Category::Tool, "zz"),
            Err(Error::NoPackage { package }) if package == "zz"
        ));
    }

    #[test]
    fn a_missing_file_differs_from_an_unreachable_archive() {
        let mirror = Mirror { archive: "a".to_owned(), security: "s".to_owned() };
        let line = "'a/pool/x/ab_1_amd64.deb' ab_1_amd64.deb 3 SHA256:00";
        let package = parse(line, &mirror, Category::Tool).unwrap();
        let gone = "Err:1 a; E: Failed to fetch a  404  Not Found; E: Download Failed";
        assert_eq!(failure(&package, gone).unwrap(), Fetched::Gone);
        let away = "E: Failed to fetch a  Could not connect; E: Download Failed";
        let away = failure(&package, away).unwrap_err();
        assert!(matches!(away, Error::Fetch { .. }));
        assert!(away.to_string().ends_with("Could not connect"), "{away}");
    }

    #[test]
    fn every_source_names_the_keys_that_must_have_signed_it() {
        let mirror = Mirror { archive: "a".to_owned(), security: "s".to_owned() };
        let base = sources(&mirror, Trust::Debian, Variant::Base);
        let full = sources(&mirror, Trust::Debian, Variant::Full);
        for sources in [&base, &full] {
            assert_eq!(sources.matches("Signed-By: /usr/share/keyrings/").count(), 2);
            assert_eq!(sources.matches("Components: main non-free-firmware\n").count(), 2);
            assert!(!sources.contains("Trusted"));
        }
        assert!(!base.contains("-backports") && full.contains("-backports\n"));
        assert!(configuration(Path::new("/r")).contains(r#"Trusted "/dev/null""#));
    }
}
