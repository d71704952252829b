//! How containerd reaches registries of images: the files of its directory of hosts, from
//! the registries of the cluster.
//!
//! ```text
//! certs.d/HOST_PORT_/hosts.toml     the mirrors in their order, then the registry
//!                    HOST_PORT_.pem  the authorities of each host that the file names
//! certs.d/_default/hosts.toml       of `*`
//! ```
//!
//! containerd reads them at each pull, so a change needs no restart. Credentials are a
//! header in `hosts.toml`: containerd sends it to that host, and to the service of tokens that
//! the host names, and neither kubelet nor a pod receives it. The other two ways are worse:
//! those in containerd's own configuration are deprecated and need a restart, and those of
//! kubelet's credential providers go to every mirror of the registry, too.
//!
//! Invariants:
//! - A file of hosts is written after the authorities that it names, and removed before them.
//! - The files of one registry are replaced whole, each by a rename.
//!
//! What this module does not do: learn the registries (`worker::registries`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use base64ct::{Base64, Encoding as _};
use polis_base::files::{Dir, Error, File};
use polis_wire::registry::{Authority, Credentials, EVERY, Mirror, Registry};
use zeroize::Zeroizing;

use crate::certificates::replace;

/// The file that containerd looks for in the directory of a registry.
const HOSTS: &str = "hosts.toml";
/// The directory of every registry without one of its own.
const DEFAULT: &str = "_default";
/// The registry of names without a host, and the host that serves it.
const DOCKER: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// The content of each file, by the directory and its own name.
pub type Files = BTreeMap<String, BTreeMap<String, Zeroizing<String>>>;

/// The name of a directory: containerd writes a port between underscores.
fn directory(host: &str) -> String {
    match host.split_once(':') {
        _ if host == EVERY => DEFAULT.to_owned(),
        Some((name, port)) => format!("{name}_{port}_"),
        None => host.to_owned(),
    }
}

/// The files for these registries.
#[must_use]
pub fn files(registries: &[Registry]) -> Files {
    let known: BTreeMap<_, _> = registries.iter().map(|one| (&*one.host, one)).collect();
    registries.iter().map(|one| (directory(&one.host), of(one, &known))).collect()
}

fn of(
    registry: &Registry,
    known: &BTreeMap<&str, &Registry>,
) -> BTreeMap<String, Zeroizing<String>> {
    let mut files = BTreeMap::new();
    // With room for all of it: a text that grows leaves copies of the password behind.
    let mut text = Zeroizing::new(String::with_capacity(64 << 10));
    let mut trust = |host: &Registry| {
        let name = format!("{}.pem", directory(&host.host));
        let pem: String = host.authorities.iter().map(Authority::pem).collect();
        files.insert(name.clone(), Zeroizing::new(pem));
        format!("ca = \"{name}\"\n")
    };
    if registry.host != EVERY {
        let host = if registry.host == DOCKER.0 { DOCKER.1 } else { &registry.host };
        text.push_str("server = \"https://");
        text.push_str(host);
        text.push_str("\"\n");
        if !registry.authorities.is_empty() {
            text.push_str(&trust(registry));
        }
        if let Some(credentials) = &registry.credentials {
            text.push_str("\n[header]\n");
            authorize(&mut text, credentials);
        }
    }
    for mirror in &registry.mirrors {
        let table = format!("host.\"{}\"", address(mirror));
        let _written = write!(text, "\n[{table}]\ncapabilities = [\"pull\", \"resolve\"]\n");
        if !mirror.path.is_empty() {
            text.push_str("override_path = true\n");
        }
        let Some(host) = known.get(&*mirror.host) else { continue };
        if !host.authorities.is_empty() {
            text.push_str(&trust(host));
        }
        if let Some(credentials) = &host.credentials {
            let _written = write!(text, "\n[{table}.header]\n");
            authorize(&mut text, credentials);
        }
    }
    files.insert(HOSTS.to_owned(), text);
    files
}

/// Where a mirror has its copies: the root of its API, or a repository below it.
fn address(mirror: &Mirror) -> String {
    match &*mirror.path {
        "" => format!("https://{}", mirror.host),
        path => format!("https://{}/v2/{path}", mirror.host),
    }
}

/// The user as a header of HTTP (RFC 7617).
fn authorize(text: &mut String, credentials: &Credentials) {
    let Credentials { username, password } = credentials;
    let pair = Zeroizing::new([username, ":", password].concat());
    let encoded = Zeroizing::new(Base64::encode_string(pair.as_bytes()));
    text.push_str("Authorization = \"Basic ");
    text.push_str(&encoded);
    text.push_str("\"\n");
}

/// Makes the directory `registries` what it should be; returns whether it changed. Blocks.
///
/// # Errors
///
/// [`Error`]; the next call goes on.
pub fn write(registries: &Dir, files: &Files) -> Result<bool, Error> {
    registries.create()?;
    let mut changed = false;
    for (name, files) in files {
        let directory = Dir::private(registries.path().join(name));
        directory.create()?;
        let (hosts, authorities): (Vec<_>, _) = files.iter().partition(|(name, _)| *name == HOSTS);
        for (name, content) in authorities.into_iter().chain(hosts) {
            let file = File::private(directory.path().join(name));
            changed |= replace(&file, content.as_bytes())?;
        }
        for name in names(directory.path())?.difference(&files.keys().cloned().collect()) {
            File::private(directory.path().join(name)).remove()?;
            changed = true;
        }
    }
    for name in names(registries.path())?.difference(&files.keys().cloned().collect()) {
        let gone = registries.path().join(name);
        File::private(gone.join(HOSTS)).remove()?;
        fs::remove_dir_all(&gone).map_err(|error| Error::io("remove", &gone, error))?;
        changed = true;
    }
    Ok(changed)
}

/// The files of a directory.
fn names(directory: &Path) -> Result<BTreeSet<String>, Error> {
    let fail = |error| Error::io("list", directory, error);
    let entries = fs::read_dir(directory).map_err(fail)?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect::<Result<_, _>>().map_err(fail)
}

#[cfg(test)]
mod tests {
    use polis_proto::v1;

    use super::*;

    /// An authority of the tests, in PEM.
    fn authority() -> String {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
    }

    fn registry(host: &str, mirrors: &[&str], ca: &str, username: &str) -> Registry {
        let message = v1::Registry {
            host: host.to_owned(),
            mirrors: mirrors.iter().map(|&mirror| mirror.to_owned()).collect(),
            ca: ca.to_owned(),
            username: username.to_owned(),
            password: username.to_owned(),
        };
        Registry::read(&message).unwrap()
    }

    #[test]
    fn a_registry_is_reached_by_its_mirrors_with_their_own_authorities_and_users() {
        let ca = authority();
        let registries = [
            registry("docker.io", &["mirror.example:5000/hub", "mirror.example"], "", "bob"),
            registry("mirror.example:5000", &[], &ca, "ann"),
        ];
        let files = files(&registries);
        let hub = &files["docker.io"];
        insta::assert_snapshot!(hub["hosts.toml"].as_str(), @r#"
        server = "https://registry-1.docker.io"

        [header]
        Authorization = "Basic Ym9iOmJvYg=="

        [host."https://mirror.example:5000/v2/hub"]
        capabilities = ["pull", "resolve"]
        override_path = true
        ca = "mirror.example_5000_.pem"

        [host."https://mirror.example:5000/v2/hub".header]
        Authorization = "Basic YW5uOmFubg=="

        [host."https://mirror.example"]
        capabilities = ["pull", "resolve"]
        "#);
        assert_eq!(hub["mirror.example_5000_.pem"].trim(), ca.replace("\r\n", "\n").trim());
        let mirror = &files["mirror.example_5000_"];
        insta::assert_snapshot!(mirror["hosts.toml"].as_str(), @r#"
        server = "https://mirror.example:5000"
        ca = "mirror.example_5000_.pem"

        [header]
        Authorization = "Basic YW5uOmFubg=="
        "#);
    }

    #[test]
    fn every_other_registry_has_mirrors_and_keeps_its_own_host() {
        let files = files(&[registry("*", &["mirror.example"], "", "")]);
        insta::assert_snapshot!(files["_default"]["hosts.toml"].as_str(), @r#"

        [host."https://mirror.example"]
        capabilities = ["pull", "resolve"]
        "#);
    }

    #[test]
    fn what_is_not_wanted_any_more_goes() {
        let base = tempfile::tempdir().unwrap();
        let directory = Dir::private(base.path().join("certs.d"));
        let ca = authority();
        let both = [registry("a.example", &[], &ca, ""), registry("b.example", &[], "", "ann")];
        assert!(write(&directory, &files(&both)).unwrap());
        assert!(!write(&directory, &files(&both)).unwrap());
        let all = |at: &str| names(&directory.path().join(at)).unwrap();
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(all("a.example"), set(&["a.example.pem", "hosts.toml"]));
        let mode = |at: &str| {
            use std::os::unix::fs::MetadataExt as _;
            fs::metadata(directory.path().join(at)).unwrap().mode() & 0o777
        };
        assert_eq!((mode("b.example"), mode("b.example/hosts.toml")), (0o700, 0o600));
        assert!(write(&directory, &files(&[registry("a.example", &[], "", "")])).unwrap());
        assert_eq!((all(""), all("a.example")), (set(&["a.example"]), set(&["hosts.toml"])));
        assert!(write(&directory, &Files::new()).unwrap());
        assert_eq!(all(""), set(&[]));
    }
}
