//! A registry of container images: the checked form of [`v1::Registry`].
//!
//! The leader checks what an owner sets before it stores it, each worker checks it again
//! before it becomes configuration of containerd, and `polisctl` shows the end of each
//! authority.
//!
//! Invariants:
//! - Names of hosts and of paths have no character that has a meaning in a file name, an
//!   address or TOML.
//! - A password is in no text that can be printed.
//!
//! What this module does not do: ask a registry, or write files (`workload::runtime` of the
//! node).

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::time::SystemTime;

use polis_base::serial::is_control;
use polis_proto::v1;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use zeroize::Zeroizing;

use crate::endpoint::Endpoint;
use crate::pki;

/// The host that stands for every registry without an entry.
pub const EVERY: &str = "*";
/// Registries of a cluster: all of them, with the longest of everything, fit into one value of
/// etcd.
pub const REGISTRIES_MAX: usize = 32;
/// Mirrors of one registry.
const MIRRORS_MAX: usize = 8;
/// Bytes of the authorities of one registry: a handful of certificates.
const CA_BYTES_MAX: usize = 16 << 10;
/// Bytes of a name of a user.
const USERNAME_MAX: usize = 256;
/// Bytes of a password: tokens of cloud providers have about 2500.
const PASSWORD_MAX: usize = 4096;
/// Bytes of the path of a mirror.
const PATH_MAX: usize = 128;
/// Characters of a subject.
const SUBJECT_MAX: usize = 120;
/// The port that names of images and mirrors leave out.
const HTTPS: u16 = 443;

/// Which field is not valid, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct Invalid {
    field: String,
    why: String,
}

fn invalid(field: impl Into<String>, why: impl Into<String>) -> Invalid {
    Invalid { field: field.into(), why: why.into() }
}

/// A registry, and how workers reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registry {
    /// Its host as names of images have it, or [`EVERY`].
    pub host: String,
    /// Where copies of its images are, in the order of the attempts.
    pub mirrors: Vec<Mirror>,
    /// The authorities for its certificate.
    pub authorities: Vec<Authority>,
    /// The user that it is asked as.
    pub credentials: Option<Credentials>,
}

/// A registry with copies of the images of another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mirror {
    /// Its host, with a port where that is not 443.
    pub host: String,
    /// The repository that has the copies below it, without slashes around; may be empty.
    pub path: String,
}

impl fmt::Display for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, path } = self;
        if path.is_empty() { f.write_str(host) } else { write!(f, "{host}/{path}") }
    }
}

/// An authority that the certificate of a registry, or of another server outside of the cluster,
/// may be of, or that certificate itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// Its subject, in one line.
    pub subject: String,
    /// It ends then.
    pub not_after: SystemTime,
    der: Vec<u8>,
}

impl Authority {
    /// It in DER.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// It in PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        pki::certificate_pem(&self.der)
    }
}

/// A user of a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The name, without a colon.
    pub username: String,
    /// The password.
    pub password: Zeroizing<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

impl Registry {
    /// Checks a message.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn read(message: &v1::Registry) -> Result<Self, Invalid> {
        let host = message.host.clone();
        check_name(&host)?;
        if message.mirrors.len() > MIRRORS_MAX {
            let count = message.mirrors.len();
            let why = format!("{count} are given; allowed are at most {MIRRORS_MAX}");
            return Err(invalid("mirrors", why));
        }
        let mirror = |text: &String| mirror(text, &host);
        let mirrors = message.mirrors.iter().map(mirror).collect::<Result<Vec<_>, _>>()?;
        let mut seen = BTreeSet::new();
        if let Some(twice) = mirrors.iter().find(|mirror| !seen.insert(*mirror)) {
            return Err(invalid("mirrors", format!("{twice} is there twice")));
        }
        let authorities = authorities(&message.ca)?;
        let credentials = credentials(&message.username, &message.password)?;
        if host == EVERY {
            // They would be sent to any registry that a pod names.
            if !authorities.is_empty() {
                let why = "an authority belongs to one registry; set it there, or for the mirror";
                return Err(invalid("ca", why));
            }
            if credentials.is_some() {
                let why = "a user belongs to one registry; set it there, or for the mirror";
                return Err(invalid("username", why));
            }
            if mirrors.is_empty() {
                return Err(invalid("mirrors", format!("{EVERY} needs at least one")));
            }
        }
        Ok(Self { host, mirrors, authorities, credentials })
    }

    /// Checks a message from an owner at `now`: authorities that have ended are refused.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn read_at(message: &v1::Registry, now: SystemTime) -> Result<Self, Invalid> {
        let read = Self::read(message)?;
        match read.authorities.iter().find(|authority| authority.not_after <= now) {
            Some(Authority { subject, .. }) => {
                let why = format!("the certificate {subject:?} has ended; give its successor");
                Err(invalid("ca", why))
            }
            None => Ok(read),
        }
    }

    /// As it is stored.
    #[must_use]
    pub fn to_message(&self) -> v1::Registry {
        let credentials = self.credentials.clone();
        let (username, password) = match credentials {
            Some(Credentials { username, password }) => (username, password.to_string()),
            None => Default::default(),
        };
        v1::Registry {
            host: self.host.clone(),
            mirrors: self.mirrors.iter().map(ToString::to_string).collect(),
            ca: self.authorities.iter().map(Authority::pem).collect(),
            username,
            password,
        }
    }
}

/// Checks the name of an entry: a host, or `*`.
///
/// # Errors
///
/// [`Invalid`].
pub fn check_name(host: &str) -> Result<(), Invalid> {
    if host == EVERY { Ok(()) } else { check_host(host, "host") }
}

/// Without its password: every reader of the cluster may read it.
#[must_use]
pub fn shown(registry: &v1::Registry) -> v1::Registry {
    let v1::Registry { host, mirrors, ca, username, password: _ } = registry.clone();
    v1::Registry { host, mirrors, ca, username, password: String::new() }
}

/// A host as names of images have it: containerd takes the first part of a name for a host
/// only with a dot or a port in it.
fn check_host(text: &str, field: &str) -> Result<(), Invalid> {
    let shown = || text.chars().take(64).collect::<String>();
    if text.contains("://") || text.contains('/') {
        let why = format!("{:?} has more than a host; allowed is HOST or HOST:PORT", shown());
        return Err(invalid(field, why));
    }
    let refused = || {
        invalid(
            field,
            format!(
                "{:?} is not allowed; allowed are a DNS name in lower case, or an IPv4 address, \
                 with a port after a colon where it is not 443",
                shown()
            ),
        )
    };
    let endpoint = Endpoint::parse(text, HTTPS).map_err(|_invalid| refused())?;
    if !is_name(&endpoint.host) && endpoint.host.parse::<Ipv4Addr>().is_err() {
        return Err(refused());
    }
    // Each registry has one text, so that no two entries mean the same.
    if text != endpoint.host && text != format!("{}:{}", endpoint.host, endpoint.port) {
        return Err(refused());
    }
    if text.contains('.') || text.contains(':') || text == "localhost" {
        return Ok(());
    }
    let why = format!(
        "{text:?} has no dot and no port, so names of images take it for a folder of docker.io; \
         use the full name, or add the port: {text}:{HTTPS}"
    );
    Err(invalid(field, why))
}

/// A name that DNS can have, in lower case. Digits and dots alone are a mistyped address.
fn is_name(text: &str) -> bool {
    let label = |label: &str| {
        let known = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        let inner = !label.starts_with('-') && !label.ends_with('-');
        (1..=63).contains(&label.len()) && inner && label.bytes().all(known)
    };
    let numeric = text.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    !numeric && text.len() <= 253 && text.split('.').all(label)
}

fn mirror(text: &str, of: &str) -> Result<Mirror, Invalid> {
    let field = "mirrors";
    if text.starts_with("http://") {
        let why = format!(
            "{text:?} is not encrypted, and anyone on the way could change images; mirrors are \
             reached by HTTPS: give the mirror a certificate, and set its authority with the \
             registry of its host"
        );
        return Err(invalid(field, why));
    }
    if text.contains("://") {
        return Err(invalid(field, format!("{text:?}: leave out the scheme, it is always https")));
    }
    let (host, path) = text.split_once('/').unwrap_or((text, ""));
    check_host(host, field)?;
    let known = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"._-".contains(&c);
    let part =
        |part: &str| !part.is_empty() && ![".", ".."].contains(&part) && part.bytes().all(known);
    let has_path = text.contains('/');
    if has_path && (path.len() > PATH_MAX || !path.split('/').all(part)) {
        let why = format!(
            "{text:?} has the path {path:?}; allowed is a repository without slashes around it, \
             of a-z, 0-9, dot, dash, underscore and slashes, at most {PATH_MAX} characters"
        );
        return Err(invalid(field, why));
    }
    if host == of && path.is_empty() {
        return Err(invalid(field, format!("{text} is the registry itself")));
    }
    Ok(Mirror { host: host.to_owned(), path: path.to_owned() })
}

/// The authorities in a text of PEM.
pub(crate) fn authorities(text: &str) -> Result<Vec<Authority>, Invalid> {
    let field = "ca";
    if text.len() > CA_BYTES_MAX {
        let size = text.len();
        let why = format!("it has {size} bytes; allowed are at most {CA_BYTES_MAX}");
        return Err(invalid(field, why));
    }
    if text.contains("PRIVATE KEY-----") {
        let why = "it holds a private key, which must stay with its server; give certificates";
        return Err(invalid(field, why));
    }
    let mut found = Vec::new();
    for (at, der) in CertificateDer::pem_slice_iter(text.as_bytes()).enumerate() {
        let place = format!("{field}[{at}]");
        let der = der.map_err(|error| invalid(&place, format!("it is not PEM: {error}")))?;
        found.push(authority(&der).ok_or_else(|| {
            invalid(&place, "it is not a certificate (X.509); give the authority in PEM")
        })?);
    }
    if found.is_empty() && !text.trim().is_empty() {
        let why = "the text has no certificate in it; give the authority in PEM, which begins \
                   with -----BEGIN CERTIFICATE-----";
        return Err(invalid(field, why));
    }
    // They are stored in this form, which has more line ends than an owner's may have.
    let size: usize = found.iter().map(|authority| authority.pem().len()).sum();
    if size > CA_BYTES_MAX {
        let why = format!("its certificates take {size} bytes; allowed are at most {CA_BYTES_MAX}");
        return Err(invalid(field, why));
    }
    Ok(found)
}

fn authority(der: &[u8]) -> Option<Authority> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    if !rest.is_empty() {
        return None;
    }
    let subject = certificate.subject().to_string();
    let subject = subject.chars().filter(|c| !is_control(*c)).take(SUBJECT_MAX).collect();
    let not_after = pki::system_time(certificate.validity().not_after);
    Some(Authority { subject, not_after, der: der.to_vec() })
}

fn credentials(username: &str, password: &str) -> Result<Option<Credentials>, Invalid> {
    if username.is_empty() && password.is_empty() {
        return Ok(None);
    }
    if username.is_empty() {
        return Err(invalid("password", "it is given without a username"));
    }
    if password.is_empty() {
        return Err(invalid("username", "it is given without a password"));
    }
    // A colon ends the name in the header of HTTP.
    let control = |text: &str| text.contains(is_control);
    if username.len() > USERNAME_MAX || username.contains(':') || control(username) {
        let why = format!(
            "allowed are at most {USERNAME_MAX} bytes, without colons and control characters"
        );
        return Err(invalid("username", why));
    }
    if password.len() > PASSWORD_MAX || control(password) {
        let why = format!(
            "allowed are at most {PASSWORD_MAX} bytes, without control characters such as a line \
             break"
        );
        return Err(invalid("password", why));
    }
    let (username, password) = (username.to_owned(), Zeroizing::new(password.to_owned()));
    Ok(Some(Credentials { username, password }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn registry(host: &str) -> v1::Registry {
        v1::Registry { host: host.to_owned(), ..Default::default() }
    }

    fn why(message: &v1::Registry) -> String {
        Registry::read(message).unwrap_err().to_string()
    }

    fn certificate() -> String {
        named_certificate("Registries")
    }

    fn named_certificate(name: &str) -> String {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        params.self_signed(&key).unwrap().pem()
    }

    #[test]
    fn a_registry_is_stored_as_it_was_read() {
        let message = v1::Registry {
            host: "registry.example:5000".to_owned(),
            mirrors: vec!["mirror.example/a/b".to_owned(), "192.0.2.1:443".to_owned()],
            ca: format!("# a remark\n{}{}", certificate(), certificate()),
            username: "ann".to_owned(),
            password: "s:ecret".to_owned(),
        };
        let read = Registry::read(&message).unwrap();
        assert_eq!(read.authorities.len(), 2);
        assert_eq!(read.authorities[0].subject, "CN=Registries");
        let stored = read.to_message();
        assert!(!stored.ca.contains("remark"));
        assert_eq!(Registry::read(&stored).unwrap(), read);
        assert_eq!(stored.mirrors, message.mirrors);
        for text in [format!("{read:?}"), format!("{stored:?}"), format!("{:?}", shown(&stored))] {
            assert!(!text.contains("ecret"), "{text}");
        }
        assert_eq!(shown(&stored).password, "");
        let end = read.authorities[0].not_after;
        assert!(Registry::read_at(&stored, end - Duration::from_secs(1)).is_ok());
        let ended = Registry::read_at(&stored, end).unwrap_err().to_string();
        assert!(ended.contains("\"CN=Registries\" has ended"), "{ended}");
    }

    #[test]
    fn what_is_accepted_is_accepted_as_it_is_stored() {
        let mut edges = 0;
        for length in 1..=64 {
            let pem = named_certificate(&"R".repeat(length));
            let [begin, body @ .., end] = &pem.trim().lines().collect::<Vec<_>>()[..] else {
                panic!("{pem}")
            };
            // All on one line: shorter than it is stored.
            let line = format!("{begin}\n{}\n{end}\n", body.concat());
            let ca = line.repeat(CA_BYTES_MAX / line.len());
            match Registry::read(&v1::Registry { ca, ..registry("a.b") }) {
                Ok(read) => assert_eq!(Registry::read(&read.to_message()).unwrap(), read),
                Err(refused) => {
                    edges += 1;
                    assert!(refused.to_string().contains("at most 16384"), "{refused}");
                }
            }
        }
        assert!(edges > 0, "no certificates fit only on one line");
    }

    #[test]
    fn a_host_is_what_names_of_images_have() {
        for good in ["a.b", "docker.io", "a:5000", "10.0.0.1", "10.0.0.1:5000", "localhost"] {
            Registry::read(&registry(good)).unwrap();
        }
        let bad = [
            "",
            "a",
            "A.b",
            "a.b:0",
            "a.b:70000",
            "a.b:",
            "a.b:05000",
            "-a.b",
            "a..b",
            "1.2.3",
            "[fd00::1]:5000",
            "fd00::1",
            "https://a.b",
            "a.b/c",
            "a_b.c",
            "..",
            "*.a.b",
            "a.b\n",
        ];
        for bad in bad {
            let why = why(&registry(bad));
            assert!(why.starts_with("host: "), "{bad}: {why}");
        }
        assert!(why(&registry("a")).contains("folder of docker.io"));
    }

    #[test]
    fn a_mirror_is_a_host_and_perhaps_a_repository() {
        let with = |mirrors: &[&str]| v1::Registry {
            mirrors: mirrors.iter().map(|&text| text.to_owned()).collect(),
            ..registry("a.b")
        };
        Registry::read(&with(&["c.d", "c.d/a_b/c-d", "a.b/proxy"])).unwrap();
        for (bad, said) in [
            (&["http://c.d"][..], "not encrypted"),
            (&["https://c.d"], "leave out the scheme"),
            (&["c.d/"], "path"),
            (&["c.d/../x"], "path"),
            (&["c.d/x\"y"], "path"),
            (&["a.b"], "the registry itself"),
            (&["c.d", "c.d"], "twice"),
            (&["c.d"; 9], "at most 8"),
        ] {
            let why = why(&with(bad));
            assert!(why.starts_with("mirrors: ") && why.contains(said), "{bad:?}: {why}");
        }
    }

    #[test]
    fn what_is_for_one_registry_is_not_for_every_one() {
        let every = v1::Registry { mirrors: vec!["c.d".to_owned()], ..registry(EVERY) };
        Registry::read(&every).unwrap();
        assert!(why(&registry(EVERY)).starts_with("mirrors: "));
        let user = ("u".to_owned(), "p".to_owned());
        let (username, password) = user;
        let known = v1::Registry { username, password, ..every.clone() };
        assert!(why(&known).contains("belongs to one registry"));
        let trusted = v1::Registry { ca: certificate(), ..every };
        assert!(why(&trusted).contains("belongs to one registry"));
    }

    #[test]
    fn an_authority_is_a_certificate_in_pem() {
        let with = |ca: &str| v1::Registry { ca: ca.to_owned(), ..registry("a.b") };
        let good = certificate();
        Registry::read(&with(&good)).unwrap();
        Registry::read(&with(" \n")).unwrap();
        let cut = good.replace("-----END CERTIFICATE-----", "");
        let damaged = good.replacen("MII", "MIA", 1);
        let key = format!("{good}-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n");
        let long = "x".repeat(CA_BYTES_MAX + 1);
        for (bad, said) in [
            ("noise", "no certificate"),
            (&*cut, "PEM"),
            (&*damaged, "not"),
            (&*key, "private key"),
            (&*long, "at most 16384"),
        ] {
            let why = why(&with(bad));
            assert!(why.starts_with("ca") && why.contains(said), "{why}");
        }
    }

    #[test]
    fn a_name_and_a_password_come_together() {
        let with = |username: &str, password: &str| {
            let (username, password) = (username.to_owned(), password.to_owned());
            v1::Registry { username, password, ..registry("a.b") }
        };
        assert!(why(&with("u", "")).contains("without a password"));
        assert!(why(&with("", "p")).contains("without a username"));
        assert!(why(&with("u:v", "p")).starts_with("username: "));
        let secret = why(&with("u", "hidden\n"));
        assert!(secret.starts_with("password: ") && !secret.contains("hidden"), "{secret}");
        for mark in ['\u{202e}', '\u{200e}', '\u{2028}'] {
            assert!(why(&with(&format!("u{mark}v"), "p")).starts_with("username: "), "{mark:?}");
            assert!(why(&with("u", &format!("p{mark}"))).starts_with("password: "), "{mark:?}");
        }
    }

    #[test]
    fn the_subject_of_an_authority_cannot_look_like_another_one() {
        let ca = named_certificate("Reg\u{202e}ist\u{2028}ries");
        let read = Registry::read(&v1::Registry { ca, ..registry("a.b") }).unwrap();
        assert_eq!(read.authorities[0].subject, "CN=Registries");
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_has_no_character_with_a_meaning_elsewhere(
            host in "[a-z0-9.:*/\"\\\\ -]{0,20}", mirror in "[a-z0-9.:/\"\\\\_ -]{0,20}",
        ) {
            let message = v1::Registry { mirrors: vec![mirror], ..registry(&host) };
            if let Ok(read) = Registry::read(&message) {
                let text = format!("{}{}", read.host, read.mirrors[0]);
                prop_assert!(!text.contains(['"', '\\', ' ']), "{}", text);
                prop_assert!(!read.host.contains('/') && !text.contains(".."), "{}", text);
            }
        }
    }
}

#[cfg(test)]
#[path = "registry_fuzz_tests.rs"]
mod fuzz_tests;
