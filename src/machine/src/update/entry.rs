//! The kernel images that the loader may start, by their names on the ESP.
//!
//! | name | standing |
//! |---|---|
//! | `polis-1.2.0.efi` | good |
//! | `polis-1.2.0+1.efi` | untried: the loader has one try |
//! | `polis-1.2.0+0-1.efi` | tried: it runs, or it did not get ready |
//! | `polis-1.2.0+0-2.efi` | tried, and the system before has reported that it did not stay |
//!
//! The loader itself counts: it renames a file with a try before it starts it. The
//! specification is systemd's Automatic Boot Assessment. Behind the tries that are left it has the
//! number of those that were made; the loader looks at that number only to order images without
//! a try among each other, and the report counts as one more.
//!
//! Invariants:
//! - The boot stub inside of the running kernel image names it (`StubImageIdentifier`).
//!   The loader's own variable still names one that the firmware refused before.

use std::cmp::Reverse;
use std::fmt;
use std::fs;
use std::path::Path;

use semver::Version;

use super::Error;
use polis_base::sys::efivar;

/// The folder of the loader, as firmware writes it.
const FOLDER: &str = r"\EFI\Linux\";
/// The name of a kernel image that is being written: the loader lists `*.efi`.
pub(super) const UNFINISHED: &str = "polis.new";

const START: &str = "polis-";
const END: &str = ".efi";

/// What became of a system, by the name of its kernel image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It was ready once, or came with the image.
    Good,
    /// The loader has a try for it.
    Untried,
    /// Its try was taken. It is not started again while there is another.
    Tried,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "good",
            Self::Untried => "untried",
            Self::Tried => "failed",
        })
    }
}

/// A kernel image of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its file.
    pub file: String,
    /// The version of its system.
    pub version: Version,
    /// What became of it.
    pub standing: Standing,
    /// Whether it was reported that it did not stay.
    pub reported: bool,
}

impl Entry {
    /// Reads a name; `None` for what is not ours.
    pub(super) fn parse(file: &str) -> Option<Self> {
        let name = file.strip_prefix(START)?.strip_suffix(END)?;
        let (version, standing, reported) = match name.rsplit_once('+') {
            None => (name, Standing::Good, false),
            Some((version, tries)) => {
                let (left, done) = tries.split_once('-').unwrap_or((tries, "0"));
                let (left, done): (u32, u32) = (left.parse().ok()?, done.parse().ok()?);
                let standing = if left == 0 { Standing::Tried } else { Standing::Untried };
                (version, standing, left == 0 && done > 1)
            }
        };
        let version = Version::parse(version).ok()?;
        Some(Self { file: file.to_owned(), version, standing, reported })
    }

    /// The name without a counter.
    pub(super) fn good(version: &Version) -> String {
        format!("{START}{version}{END}")
    }

    /// The name after the report that it did not stay.
    pub(super) fn reported(version: &Version) -> String {
        format!("{START}{version}+0-2{END}")
    }

    /// The name with one try. A loader that the firmware refuses to start the file for does
    /// not go on to the next, so a second try would end the machine.
    pub(super) fn untried(version: &Version) -> String {
        format!("{START}{version}+1{END}")
    }
}

/// The kernel images in a folder, the newest first.
pub(super) fn list(folder: &Path) -> Result<Vec<Entry>, Error> {
    let failed = || Error::io(format!("list {}", folder.display()));
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed())? {
        let name = entry.map_err(failed())?.file_name();
        entries.extend(name.to_str().and_then(Entry::parse));
    }
    entries.sort_by(|one, other| one.file.cmp(&other.file));
    entries.sort_by_key(|entry| Reverse(entry.version.clone()));
    Ok(entries)
}

/// The kernel image that runs, by its present name: the stub's variable keeps the name with
/// which it was started, and a system that was kept has another one since.
///
/// One that was started on trial and is not in the folder is on trial: the disk with its name
/// does not answer or was lost, and a system is kept only by its new name.
///
/// # Errors
///
/// [`Error::NoLoader`] also where the folder has no such good kernel image: the machine was
/// started from another disk. [`Error::Io`] where the disk fails.
pub(super) fn running(efivars: &Path, kernels: &Path) -> Result<Entry, Error> {
    let started = started(efivars)?;
    let kept = Entry {
        file: Entry::good(&started.version),
        version: started.version.clone(),
        standing: Standing::Good,
        reported: false,
    };
    for entry in [&started, &kept] {
        let path = kernels.join(&entry.file);
        // A disk that fails is not another disk.
        let found = path.try_exists().map_err(Error::io(format!("look for {}", path.display())));
        if found? {
            return Ok(entry.clone());
        }
    }
    match started.standing {
        Standing::Good => Err(Error::NoLoader(started.file)),
        Standing::Untried | Standing::Tried => Ok(started),
    }
}

/// The kernel image that the loader started, by its name at that time.
fn started(efivars: &Path) -> Result<Entry, Error> {
    let text = efivar::image(efivars).map_err(Error::io("read what the loader has started"))?;
    let Some(text) = text else { return Err(Error::NoLoader("no firmware".to_owned())) };
    at(&text).ok_or(Error::NoLoader(text))
}

/// Whether the firmware refused this kernel image in the present start of the machine: the loader
/// took its try, and another one runs. Not known once the machine was started again.
pub(super) fn was_refused(efivars: &Path, entry: &Entry) -> bool {
    // Only words for a person depend on it.
    let counted = efivar::counted(efivars).ok().flatten();
    let counted = counted.and_then(|text| at(&text));
    counted.is_some_and(|counted| counted.file.eq_ignore_ascii_case(&entry.file))
}

/// The kernel image at a path, as firmware writes it.
fn at(path: &str) -> Option<Entry> {
    let folder = path.get(..FOLDER.len()).filter(|start| start.eq_ignore_ascii_case(FOLDER))?;
    Entry::parse(&path[folder.len()..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_says_what_became_of_a_system() {
        let standing = |file: &str| Entry::parse(file).map(|entry| entry.standing);
        assert_eq!(standing("polis-1.2.0.efi"), Some(Standing::Good));
        assert_eq!(standing("polis-1.2.0-rc.1.efi"), Some(Standing::Good));
        assert_eq!(standing("polis-1.2.0+1.efi"), Some(Standing::Untried));
        assert_eq!(standing("polis-1.2.0+2-1.efi"), Some(Standing::Untried));
        assert_eq!(standing("polis-1.2.0+0-1.efi"), Some(Standing::Tried));
        assert_eq!(standing("polis-1.2.0-rc.1+0-3.efi"), Some(Standing::Tried));
        for other in ["polis.new", "polis-1.efi", "polis-1.2.0+.efi", "polis-1.2.0+x.efi", "x.efi"]
        {
            assert_eq!(standing(other), None, "{other}");
        }
        let version = Version::new(1, 2, 0);
        let untried = Entry::parse(&Entry::untried(&version)).unwrap();
        assert_eq!((untried.version, untried.standing), (version.clone(), Standing::Untried));
        assert_eq!(standing(&Entry::good(&version)), Some(Standing::Good));
        let reported = |file: &str| Entry::parse(file).is_some_and(|entry| entry.reported);
        assert!(reported(&Entry::reported(&version)));
        assert_eq!(standing(&Entry::reported(&version)), Some(Standing::Tried));
        for file in ["polis-1.2.0.efi", "polis-1.2.0+1.efi", "polis-1.2.0+2-2.efi"] {
            assert!(!reported(file), "{file}");
        }
        assert!(!reported("polis-1.2.0+0-1.efi"));
    }

    #[test]
    fn kernel_images_are_listed_newest_first_and_others_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["polis-1.9.0.efi", "polis-1.10.0+0-1.efi", "windows.efi", UNFINISHED] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let listed = list(folder.path()).unwrap();
        let files: Vec<&str> = listed.iter().map(|entry| entry.file.as_str()).collect();
        assert_eq!(files, ["polis-1.10.0+0-1.efi", "polis-1.9.0.efi"]);
        assert!(list(&folder.path().join("absent")).is_err());
    }

    #[test]
    fn the_stub_says_which_one_runs() {
        let folder = tempfile::tempdir().unwrap();
        let says = |text: &str| {
            let content: Vec<u8> = [6, 0, 0, 0]
                .into_iter()
                .chain(text.encode_utf16().flat_map(u16::to_le_bytes))
                .collect();
            let name = format!("{}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f", efivar::IMAGE);
            fs::write(folder.path().join(name), content).unwrap();
            started(folder.path())
        };
        let refused = |outcome: Result<Entry, Error>| outcome.unwrap_err().to_string();
        assert!(refused(started(folder.path())).contains("started by no firmware"));
        let found = says(r"\EFI\LINUX\polis-1.0.0+0-1.efi").unwrap();
        assert_eq!((found.version, found.standing), (Version::new(1, 0, 0), Standing::Tried));
        let other = refused(says(r"\EFI\BOOT\BOOTX64.EFI"));
        assert!(
            other.contains(r"started by \EFI\BOOT\BOOTX64.EFI, and not by the loader"),
            "{other}"
        );
        assert!(says(r"\EFI\Linux\..\polis-1.0.0.efi").is_err());

        // By the name that the file has now.
        let kernels = tempfile::tempdir().unwrap();
        let now = || running(folder.path(), kernels.path());
        says(r"\EFI\Linux\polis-1.0.0.efi").unwrap();
        assert!(matches!(now(), Err(Error::NoLoader(_))), "another disk");
        let file = tempfile::NamedTempFile::new().unwrap();
        let failed = running(folder.path(), file.path());
        assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
        // A trial is not over since its disk was lost; the other one of a mirror has another name.
        for name in ["polis-1.0.0+0-1.efi", "polis-1.0.0+1.efi"] {
            says(&format!(r"\EFI\Linux\{name}")).unwrap();
            let lost = now().unwrap();
            assert!(lost.file == name && lost.standing != Standing::Good, "{lost:?}");
        }
        says(r"\EFI\Linux\polis-1.0.0+0-1.efi").unwrap();
        fs::write(kernels.path().join("polis-1.0.0.efi"), "").unwrap();
        let kept = now().unwrap();
        assert_eq!((kept.file.as_str(), kept.standing), ("polis-1.0.0.efi", Standing::Good));
        fs::write(kernels.path().join("polis-1.0.0+0-1.efi"), "").unwrap();
        assert_eq!(now().unwrap().standing, Standing::Tried);
    }

    proptest! {
        #[test]
        fn any_name_is_read_or_not(name in "\\PC{0,40}") {
            let _entry = Entry::parse(&name);
            let _entry = Entry::parse(&format!("polis-1.0.0+{name}.efi"));
        }
    }
}

#[cfg(test)]
#[path = "entry_fuzz_tests.rs"]
mod fuzz_tests;
