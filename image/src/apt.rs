//! A private apt root: Debian's packages, verified by apt, without installing
//! anything on the host and without root.
//!
//! Two jobs. [`Apt::resolve`] asks the signed indices which version of each
//! package is current; it runs when the lock file is renewed. [`Apt::fetch`]
//! downloads one locked file, which apt compares with the hash in the lock.
//!
//! Invariants:
//! - An index that is not signed by one of Debian's keys yields no package.
//! - The host's own apt is not changed, and nothing of it is believed: only the
//!   address of its mirror is read (`mirror`).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At as _, Error, Result},
    lock::{Lock, Package},
    mirror::Mirror,
    packages::{Category, KERNEL, PACKAGES},
    program,
};

/// The suite that everything comes from.
const SUITE: &str = "trixie";
/// Debian's keys, as its own package installs them.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Where apt has the program that downloads one file.
const FETCHER: &str = "/usr/lib/apt/apt-helper";

/// An apt root of our own.
#[derive(Debug)]
pub(crate) struct Apt {
    configuration: PathBuf,
}

impl Apt {
    /// Sets up `root`; what is there already is used.
    pub(crate) fn open(root: &Path, mirror: &Mirror) -> Result<Self> {
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
        // Nothing is installed in this root, and nothing ever will be.
        write("var/lib/dpkg/status", "")?;
        write("etc/apt/sources.list.d/debian.sources", &sources(mirror))?;
        write("apt.conf", &configuration(root))?;
        Ok(Self { configuration: root.join("apt.conf") })
    }

    /// Fetches the indices and locks the current version of every package.
    pub(crate) fn resolve(&self, mirror: &Mirror) -> Result<Lock> {
        program::run(self.command("apt-get").arg("update"))?;
        let kernel = self.kernel()?;
        let names: Vec<&str> = PACKAGES
            .iter()
            .map(|(_, name)| if *name == KERNEL { kernel.as_str() } else { name })
            .collect();
        let output = program::run(
            self.command("apt-get").args(["--quiet=2", "--print-uris", "download"]).args(&names),
        )?;
        let output = String::from_utf8_lossy(&output);
        let mut packages = PACKAGES
            .iter()
            .zip(&names)
            .map(|((category, _), name)| find(&output, mirror, *category, name))
            .collect::<Result<Vec<_>>>()?;
        packages.sort_by(|a, b| (a.category, &a.name).cmp(&(b.category, &b.name)));
        Ok(Lock { packages })
    }

    /// Downloads one locked package to `target`; apt checks its hash.
    pub(crate) fn fetch(&self, mirror: &Mirror, package: &Package, target: &Path) -> Result<()> {
        let uri = format!("{}/{}", mirror.base(package.origin), package.path);
        let mut command = self.command(FETCHER);
        command.arg("download-file").arg(uri).arg(target);
        command.arg(format!("SHA256:{}", package.sha256));
        match program::run(&mut command) {
            Ok(_) => Ok(()),
            Err(Error::Program { output, .. }) => Err(failure(package, &output)),
            Err(other) => Err(other),
        }
    }

    /// The package that the kernel's metapackage stands for.
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

/// Tells an archive that has moved on from one that was not reached.
fn failure(package: &Package, output: &str) -> Error {
    let last = output.split("; ").find(|line| line.starts_with("E: ")).unwrap_or(output);
    let output = last.trim_start_matches("E: ").to_owned();
    let (package, version) = (package.name.clone(), package.version.clone());
    // The status is the server's; apt repeats it in every language.
    if output.contains(" 404 ") {
        Error::Vanished { package, version, output }
    } else {
        Error::Fetch { package, version, output }
    }
}

/// The whole of apt's configuration: each default that would look at the host is replaced.
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
"#
    )
}

fn sources(mirror: &Mirror) -> String {
    let stanza = |uri: &str, suites: &str| {
        format!(
            "Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\nSigned-By: {KEYRING}\n"
        )
    };
    format!(
        "{}\n{}",
        stanza(&mirror.archive, &format!("{SUITE} {SUITE}-updates")),
        stanza(&mirror.security, &format!("{SUITE}-security"))
    )
}

/// Finds a package in what `--print-uris` printed: `'URI' FILE SIZE SHA256:HASH` a line.
fn find(output: &str, mirror: &Mirror, category: Category, name: &str) -> Result<Package> {
    output
        .lines()
        .find_map(|line| parse(line, mirror, category, name))
        .ok_or_else(|| Error::NoPackage { package: name.to_owned() })
}

fn parse(line: &str, mirror: &Mirror, category: Category, name: &str) -> Option<Package> {
    let mut words = line.split(' ');
    let uri = words.next()?.trim_matches('\'');
    let file = words.next()?;
    let size = words.next()?.parse().ok()?;
    let sha256 = words.next()?.strip_prefix("SHA256:")?;
    let mut parts = file.split('_');
    if parts.next()? != name {
        return None;
    }
    // The epoch's colon cannot stand in a file name.
    let version = parts.next()?.replace("%3a", ":");
    let (origin, path) = mirror.split(uri)?;
    Some(Package {
        category,
        name: name.to_owned(),
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
    fn an_archive_that_moved_on_is_told_from_one_out_of_reach() {
        let mirror = Mirror { archive: "a".to_owned(), security: "s".to_owned() };
        let line = "'a/pool/x/ab_1_amd64.deb' ab_1_amd64.deb 3 SHA256:00";
        let package = parse(line, &mirror, Category::Tool, "ab").unwrap();
        let gone =
            failure(&package, "Err:1 a; E: Failed to fetch a  404  Not Found; E: Download Failed");
        assert!(gone.help().unwrap().contains("--update-payload"), "{gone}");
        let away = failure(&package, "E: Failed to fetch a  Could not connect; E: Download Failed");
        assert!(matches!(away, Error::Fetch { .. }));
        assert!(away.to_string().ends_with("Could not connect"), "{away}");
    }

    #[test]
    fn every_source_names_the_keys_that_must_have_signed_it() {
        let mirror = Mirror { archive: "a".to_owned(), security: "s".to_owned() };
        let sources = sources(&mirror);
        assert_eq!(sources.matches("Signed-By: /usr/share/keyrings/").count(), 2);
        assert!(configuration(Path::new("/r")).contains(r#"Trusted "/dev/null""#));
    }
}
