//! The lock file: which version of each package an image is built from.
//!
//! ```text
//! # category package version origin size sha256 path
//! node etcd-server 3.5.16-4 archive 11302964 0875... pool/main/e/etcd/....deb
//! ```
//!
//! The hashes come from indices that apt has verified against Debian's keys, so a
//! matching file is as trustworthy as one that apt itself would install.

use std::{collections::BTreeSet, fmt::Write as _};

use crate::{
    error::{Error, Result},
    manifest::Variant,
    packages::{Category, KERNEL, Selection},
};

const HEAD: &str = "\
# The Debian packages that images are built from and with.
# Written by `cargo xtask image --update-payload`; do not edit.
# category package version origin size sha256 path
";

/// Which of Debian's two archives has a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Archive,
    Security,
}

impl Origin {
    fn word(self) -> &'static str {
        match self {
            Self::Archive => "archive",
            Self::Security => "security",
        }
    }
}

/// One locked package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// Its purpose.
    pub category: Category,
    /// Its name.
    pub name: String,
    /// Its exact version.
    pub version: String,
    pub(crate) origin: Origin,
    pub(crate) size: u64,
    /// SHA-256 of the package file.
    pub sha256: String,
    pub(crate) path: String,
}

/// The packages in order of category and name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lock {
    /// All of them.
    pub packages: Vec<Package>,
}

impl Lock {
    /// Reads the text of a lock file.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut packages = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let package =
                parse_line(line).map_err(|reason| Error::Lock { line: index + 1, reason })?;
            packages.push(package);
        }
        Ok(Self { packages })
    }

    /// The text of the lock file.
    pub(crate) fn print(&self) -> String {
        let mut text = HEAD.to_owned();
        for package in &self.packages {
            let Package { category, name, version, origin, size, sha256, path } = package;
            let origin = origin.word();
            // Writing to a string cannot fail.
            writeln!(text, "{category} {name} {version} {origin} {size} {sha256} {path}")
                .unwrap_or_default();
        }
        text
    }

    /// The packages of one variant.
    pub(crate) fn of(mut self, selection: Selection, variant: Variant) -> Self {
        let wanted: BTreeSet<_> = selection.packages(variant).collect();
        self.packages.retain(|package| wanted.contains(&identity(package)));
        self
    }

    /// Whether the lock names exactly the builder's packages, of all variants, each once: of two
    /// versions, the one that is unpacked last would count.
    pub(crate) fn check(&self, selection: Selection) -> Result<()> {
        let wanted: BTreeSet<_> = selection.packages(Variant::Full).collect();
        let mut locked = BTreeSet::new();
        let again = self.packages.iter().map(identity).filter(|package| !locked.insert(*package));
        let again: Vec<_> = again.map(|(_, name)| name).collect();
        if !again.is_empty() {
            return Err(Error::Stale { difference: format!("locked twice: {}", again.join(" ")) });
        }
        let only = |set: &BTreeSet<(Category, &str)>, other: &BTreeSet<(Category, &str)>| {
            set.difference(other).map(|(_, name)| *name).collect::<Vec<_>>().join(" ")
        };
        let difference = match (only(&wanted, &locked), only(&locked, &wanted)) {
            (missing, extra) if missing.is_empty() && extra.is_empty() => return Ok(()),
            (missing, extra) if extra.is_empty() => format!("not locked: {missing}"),
            (missing, extra) if missing.is_empty() => format!("locked but unused: {extra}"),
            (missing, extra) => format!("not locked: {missing}; locked but unused: {extra}"),
        };
        Err(Error::Stale { difference })
    }
}

/// The entry of the package list that stands for a package.
fn identity(package: &Package) -> (Category, &str) {
    match package.category {
        Category::Kernel => (Category::Kernel, KERNEL),
        other => (other, &package.name),
    }
}

fn parse_line(line: &str) -> Result<Package, String> {
    let fields: Vec<&str> = line.split(' ').collect();
    let [category, name, version, origin, size, sha256, path] = fields[..] else {
        return Err(format!("it has {} fields instead of 7", fields.len()));
    };
    let category = Category::ALL
        .into_iter()
        .find(|known| known.word() == category)
        .ok_or_else(|| format!("{category:?} is not a category"))?;
    let origin = [Origin::Archive, Origin::Security]
        .into_iter()
        .find(|known| known.word() == origin)
        .ok_or_else(|| format!("{origin:?} is neither archive nor security"))?;
    let size = size.parse().map_err(|_err| format!("{size:?} is not a size"))?;
    if sha256.len() != 64 || !sha256.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(format!("{sha256:?} is not a SHA-256"));
    }
    if !path.starts_with("pool/") || path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(format!("{path:?} is not the path of a package"));
    }
    Ok(Package {
        category,
        name: name.to_owned(),
        version: version.to_owned(),
        origin,
        size,
        sha256: sha256.to_owned(),
        path: path.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packages::POLIS;

    fn lock() -> Lock {
        let packages = POLIS
            .packages(Variant::Full)
            .map(|(category, name)| Package {
                category,
                name: name.to_owned(),
                version: "1:2.3-4".to_owned(),
                origin: Origin::Security,
                size: 12,
                sha256: "ab".repeat(32),
                path: format!("pool/main/x/{name}.deb"),
            })
            .collect();
        Lock { packages }
    }

    #[test]
    fn what_is_printed_is_read_again() {
        let read = Lock::parse(&lock().print()).unwrap();
        assert_eq!(read, lock());
        read.check(POLIS).unwrap();
    }

    #[test]
    fn a_lock_without_a_wanted_package_is_stale() {
        let mut lock = lock();
        let gone = lock.packages.remove(3).name;
        let error = lock.check(POLIS).unwrap_err();
        assert!(matches!(&error, Error::Stale { difference } if difference.contains(&gone)));
        assert!(error.help().unwrap().contains("--update-payload"));
    }

    #[test]
    fn a_lock_with_a_package_twice_is_stale() {
        let mut lock = lock();
        let again = Package { version: "1:2.3-5".to_owned(), ..lock.packages[3].clone() };
        let twice = format!("locked twice: {}", again.name);
        lock.packages.push(again);
        let error = lock.check(POLIS).unwrap_err();
        assert!(matches!(&error, Error::Stale { difference } if *difference == twice), "{error}");
    }

    #[test]
    fn an_image_without_workloads_has_no_package_of_theirs() {
        let base = lock().of(POLIS, Variant::Base);
        assert!(base.packages.iter().any(|package| package.name == "etcd-server"));
        assert!(base.packages.iter().all(|package| !package.name.starts_with("golang")));
        assert_eq!(lock().of(POLIS, Variant::Full), lock());
    }

    #[test]
    fn a_path_that_leaves_the_archive_is_refused() {
        let text = lock().print().replacen("pool/main", "pool/../..", 1);
        assert!(matches!(Lock::parse(&text), Err(Error::Lock { line: 4, .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_and_never_panic(text in "\\PC*") {
            let lock = Lock::parse(&text);
            prop_assert!(lock.and_then(|lock| lock.check(POLIS)).is_err());
        }
    }
}
