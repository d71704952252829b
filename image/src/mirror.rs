//! The Debian mirror that this host is configured with.
//!
//! This repository does not name a mirror: the host's administrator chose one, or the
//! caller names one.

use crate::{
    error::{Error, Result},
    lock::Origin,
    program,
};

/// The format in which apt prints each index that it knows.
const FORMAT: &str = "$(SITE) $(RELEASE) $(COMPONENT) $(ORIGIN)";

/// Suites by which Debian's archive is known before its lists are fetched.
const SUITES: &[&str] =
    &["bullseye", "bookworm", "trixie", "forky", "stable", "testing", "sid", "unstable"];

/// The roots of Debian's two archives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mirror {
    pub(crate) archive: String,
    pub(crate) security: String,
}

impl Mirror {
    /// Returns the caller's mirror, or else the host's.
    pub(crate) fn find(named: Option<&str>) -> Result<Self> {
        if let Some(url) = named {
            return Ok(Self::new(url, None));
        }
        let output =
            program::run(program::host("apt-get").args(["indextargets", "--format", FORMAT]))?;
        Self::parse(&String::from_utf8_lossy(&output)).ok_or(Error::NoMirror)
    }

    /// Picks the archive, and its security part, from apt's own list.
    fn parse(targets: &str) -> Option<Self> {
        let mut archive = None;
        let mut security = None;
        for line in targets.lines() {
            let mut words = line.split(' ');
            let (Some(site), Some(release), Some("main")) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let suite = release.split(['-', '/']).next().unwrap_or(release);
            let debian = match words.next() {
                Some(origin) if !origin.is_empty() => origin == "Debian",
                _ => true,
            };
            if !debian || !SUITES.contains(&suite) {
                continue;
            }
            let place = if release.contains("security") { &mut security } else { &mut archive };
            place.get_or_insert(site);
        }
        archive.map(|archive| Self::new(archive, security))
    }

    /// An archive by the URL of its root, and where its security archive is; by
    /// convention that lies beside it.
    pub(crate) fn new(archive: &str, security: Option<&str>) -> Self {
        let archive = archive.trim_end_matches('/').to_owned();
        let security = match security {
            Some(security) => security.trim_end_matches('/').to_owned(),
            None => beside(&archive),
        };
        Self { archive, security }
    }

    /// The root for packages of this origin.
    pub(crate) fn base(&self, origin: Origin) -> &str {
        match origin {
            Origin::Archive => &self.archive,
            Origin::Security => &self.security,
        }
    }

    /// Returns the archive that a URI points into, and the path in it.
    pub(crate) fn split<'a>(&self, uri: &'a str) -> Option<(Origin, &'a str)> {
        // The security archive's root may extend the other's: try it first.
        [Origin::Security, Origin::Archive].into_iter().find_map(|origin| {
            let path = uri.strip_prefix(self.base(origin))?.strip_prefix('/')?;
            Some((origin, path))
        })
    }
}

/// The security archive of `archive`: the folder `debian-security` where that has
/// `debian`, which an archive of old versions has before a date.
fn beside(archive: &str) -> String {
    let mut folders: Vec<&str> = archive.split('/').collect();
    match folders.iter_mut().rfind(|folder| **folder == "debian") {
        Some(folder) => {
            *folder = "debian-security";
            folders.join("/")
        }
        None => format!("{archive}-security"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_own_archive_and_security_archive_are_taken() {
        let targets = "\
https://packages.example/apt other main Example
http://mirror.example/debian bookworm main Debian
http://mirror.example/debian bookworm-updates main Debian
http://security.example/debian-security/ bookworm-security main Debian
";
        let mirror = Mirror::parse(targets).unwrap();
        assert_eq!(mirror.archive, "http://mirror.example/debian");
        assert_eq!(mirror.security, "http://security.example/debian-security");
    }

    #[test]
    fn lists_that_were_never_fetched_name_no_origin_and_do() {
        let mirror = Mirror::parse("http://mirror.example/debian trixie main \n").unwrap();
        assert_eq!(mirror.security, "http://mirror.example/debian-security");
    }

    #[test]
    fn another_distribution_is_no_mirror_of_debian() {
        assert_eq!(Mirror::parse("http://a.example/ubuntu noble main Ubuntu\n"), None);
        assert_eq!(Mirror::parse("http://a.example/x sid main Example\n"), None);
    }

    #[test]
    fn an_archive_of_old_versions_has_a_security_archive_of_the_same_date() {
        let mirror =
            Mirror::new("http://old.example/debian/archive/debian/20260101T000000Z/", None);
        assert_eq!(
            mirror.security,
            "http://old.example/debian/archive/debian-security/20260101T000000Z"
        );
        assert_eq!(Mirror::new("file:/srv/old", None).security, "file:/srv/old-security");
    }

    #[test]
    fn a_uri_is_recognised_by_its_archive() {
        let mirror = Mirror::new("http://m.example/debian/", None);
        assert_eq!(
            mirror.split("http://m.example/debian-security/pool/a.deb"),
            Some((Origin::Security, "pool/a.deb"))
        );
        assert_eq!(
            mirror.split("http://m.example/debian/pool/a.deb"),
            Some((Origin::Archive, "pool/a.deb"))
        );
        assert_eq!(mirror.split("http://evil.example/pool/a.deb"), None);
    }
}
