//! The check that programs of the payload find their libraries.
//!
//! Packages are listed by hand without following dependencies, so this check keeps the
//! list complete: from each program on, every `DT_NEEDED` name must be a file of the
//! payload.

use std::{
    collections::{BTreeSet, VecDeque},
    fs,
    path::Path,
};

use object::{
    Endianness,
    elf::FileHeader64,
    read::elf::{Dyn as _, FileHeader as _, SectionHeader as _},
};

use crate::{
    error::{At as _, Error, Result},
    program::LIBRARIES,
};

/// The libraries (names below [`LIBRARIES`]) that these programs need, directly or not.
/// Programs are files of `root`, or of the host where their paths are absolute.
pub(crate) fn closure(root: &Path, programs: &[&str]) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut queue: VecDeque<String> = programs.iter().map(|path| (*path).to_owned()).collect();
    while let Some(file) = queue.pop_front() {
        for library in needed(&root.join(&file))? {
            let path = format!("{LIBRARIES}/{library}");
            if !root.join(&path).exists() {
                return Err(Error::Library { file, library });
            }
            if found.insert(library) {
                queue.push_back(path);
            }
        }
    }
    Ok(found)
}

/// The libraries that one file needs.
fn needed(path: &Path) -> Result<Vec<String>> {
    let bytes = fs::read(path).at("read", path)?;
    parse(&bytes).map_err(|error| Error::Malformed {
        path: path.to_owned(),
        expected: "program or library",
        reason: error.to_string(),
    })
}

fn parse(bytes: &[u8]) -> object::read::Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let mut names = Vec::new();
    for section in sections.iter() {
        let Some((entries, link)) = section.dynamic(endian, bytes)? else { continue };
        let strings = sections.strings(endian, bytes, link)?;
        for entry in entries {
            if entry.tag(endian) == object::elf::DT_NEEDED {
                names.push(String::from_utf8_lossy(entry.string(endian, strings)?).into_owned());
            }
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_static_program_needs_nothing() {
        // The tests themselves are static programs.
        let own = fs::read("/proc/self/exe").unwrap();
        assert_eq!(parse(&own).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_library_that_no_package_brings_is_named() {
        let host = Path::new("/usr/bin/env");
        let root = tempfile::tempdir().unwrap();
        fs::copy(host, root.path().join("env")).unwrap();
        let error = closure(root.path(), &["env"]).unwrap_err();
        assert_eq!(error.to_string(), "env needs libc.so.6, which is in no package of the payload");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_and_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            prop_assert!(parse(&bytes).is_err());
        }
    }
}
