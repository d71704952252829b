//! The difference between a lock file and the packages of a payload.
//!
//! A Debian mirror keeps the current version of a package only, so a lock file ages.
//! The builder then continues with the archive's current packages (`payload`), and
//! reports the differences: to the person, in the manifest, and in the package list
//! that the image carries.

use std::collections::BTreeMap;

use crate::{
    lock::{Lock, Package},
    moved::Moved,
    packages::Category,
};

/// The field of an image's package list that marks a package as different from the
/// lock.
const MARK: &str = " locked=";

/// The packages of `used` that `lock` has in another version or not at all, in the
/// order of `used`.
pub(crate) fn between(lock: &Lock, used: &Lock) -> Vec<Moved> {
    let locked: BTreeMap<_, _> =
        lock.packages.iter().map(|package| (identity(package), package)).collect();
    used.packages
        .iter()
        .filter_map(|package| {
            let before = locked.get(&identity(package));
            if before.is_some_and(|before| before.sha256 == package.sha256) {
                return None;
            }
            Some(Moved {
                package: package.name.clone(),
                locked: before.map(|before| before.version.clone()),
                used: Some(package.version.clone()),
            })
        })
        .collect()
}

/// The replacements of locked packages that are `gone`, from the archive's packages of
/// `today`.
pub(crate) fn replaced(gone: &[&Package], today: Option<&Lock>) -> Vec<Moved> {
    gone.iter()
        .map(|package| {
            let packages = today.map_or(&[][..], |today| &today.packages);
            let now = packages.iter().find(|now| identity(now) == identity(package));
            Moved {
                package: package.name.clone(),
                locked: Some(package.version.clone()),
                used: now.map(|now| now.version.clone()),
            }
        })
        .collect()
}

/// The name of a package in two locks: the kernel's package name contains its version.
fn identity(package: &Package) -> &str {
    if package.category == Category::Kernel { "" } else { &package.name }
}

/// The package list of an image: a line each, with a mark at those that differ from the
/// lock.
pub(crate) fn listing(used: &Lock, moved: &[Moved]) -> String {
    used.packages.iter().fold(String::new(), |text, package| {
        let Package { category, name, version, sha256, .. } = package;
        let mark = moved.iter().find(|moved| moved.package == *name);
        let mark = mark.map_or_else(String::new, |moved| {
            format!("{MARK}{}", moved.locked.as_deref().unwrap_or("-"))
        });
        text + &format!("{category} {name} {version} {sha256}{mark}\n")
    })
}

/// The version of a package in a list.
pub(crate) fn version<'a>(listing: &'a str, package: &str) -> Option<&'a str> {
    listing.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        words.next().filter(|name| *name == package)?;
        words.next()
    })
}

/// The packages that a list marks as different from the lock.
pub(crate) fn marked(listing: &str) -> Vec<Moved> {
    let read = |line: &str| {
        let (package, locked) = line.split_once(MARK)?;
        let mut words = package.split(' ').skip(1);
        Some(Moved {
            package: words.next()?.to_owned(),
            locked: (locked != "-").then(|| locked.to_owned()),
            used: words.next().map(str::to_owned),
        })
    };
    listing.lines().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Origin;

    fn package(category: Category, name: &str, version: &str) -> Package {
        Package {
            category,
            name: name.to_owned(),
            version: version.to_owned(),
            origin: Origin::Archive,
            size: 1,
            sha256: crate::digest::hash(format!("{name} {version}").as_bytes()),
            path: format!("pool/{name}_{version}.deb"),
        }
    }

    #[test]
    fn a_list_says_again_what_it_was_marked_with() {
        let lock = Lock {
            packages: vec![
                package(Category::Kernel, "linux-image-1", "1"),
                package(Category::Node, "same", "3"),
                package(Category::Library, "libmoved", "4"),
            ],
        };
        let used = Lock {
            packages: vec![
                package(Category::Kernel, "linux-image-2", "2"),
                package(Category::Node, "same", "3"),
                package(Category::Library, "libmoved", "5"),
                package(Category::Library, "libnew", "6"),
            ],
        };
        let moved = between(&lock, &used);
        let shown: Vec<_> = moved.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            ["linux-image-2 1 -> 2", "libmoved 4 -> 5", "libnew (not in the lock) -> 6"]
        );
        assert_eq!(marked(&listing(&used, &moved)), moved);
        assert!(marked(&listing(&lock, &[])).is_empty());
        let listing = listing(&used, &moved);
        assert_eq!(version(&listing, "libmoved"), Some("5"));
        assert_eq!(version(&listing, "libmove"), None);
    }

    #[test]
    fn a_package_that_only_lies_elsewhere_has_not_moved() {
        let lock = Lock { packages: vec![package(Category::Node, "same", "3")] };
        let mut used = lock.clone();
        used.packages[0].path = "pool/updates/same_3.deb".to_owned();
        assert!(between(&lock, &used).is_empty());
    }
}
