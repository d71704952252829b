//! The version of etcd in an image, from the list of its packages.

use semver::Version;

use crate::difference;

/// Debian's package with the program that runs.
pub(crate) const PACKAGE: &str = "etcd-server";

/// The version of etcd that a list of packages names: `node etcd-server 3.5.16-4 …`. Debian adds
/// an epoch before the version, and behind it its own revision.
pub(crate) fn version(packages: &str) -> Option<Version> {
    let version = difference::version(packages, PACKAGE)?;
    let upstream = version.split_once(':').map_or(version, |(_epoch, rest)| rest);
    Version::parse(upstream.split(['-', '+', '~']).next()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_etcd_without_what_debian_adds() {
        let of = |version: &str| {
            super::version(&format!("node e2fsprogs 9.9.9 00\nnode etcd-server {version} 00\n"))
        };
        for text in ["3.5.16-4", "3.5.16", "1:3.5.16-4", "3.5.16+dfsg-1", "3.5.16~rc1-2+b3"] {
            assert_eq!(of(text), Some(Version::new(3, 5, 16)), "{text}");
        }
        for wrong in ["", "3.5-4", "x"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert_eq!(super::version("node etcd-client 3.5.16-4 00\n"), None);
        assert_eq!(super::version("node etcd-server\n"), None);
    }

    #[test]
    fn the_locked_etcd_has_a_version() {
        assert!(super::version(include_str!("../payload.lock")).is_some());
    }
}
