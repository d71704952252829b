//! Early microcode: the updates of x86 processors that the kernel loads before it does anything
//! else.
//!
//! The kernel looks for a file of its processor's vendor in an uncompressed archive at the start
//! of the initramfs, long before it can unpack anything, and loads the newest update that fits.
//!
//! ```text
//! intel-microcode  intel-ucode/*     --> kernel/x86/microcode/GenuineIntel.bin --+
//! amd64-microcode  amd-ucode/*.bin   --> kernel/x86/microcode/AuthenticAMD.bin --+--> archive
//!
//! .initrd of the kernel image: | archive | initramfs |
//! ```
//!
//! Invariants:
//! - The archive has each update of both packages, once, in the order of the files' names.
//! - The kernel can read each file to its end: at a fault it ignores the whole file of Intel, and
//!   the rest of that of AMD.
//! - A file begins at a multiple of 16 bytes, and with it each update of Intel: a processor of
//!   Intel requires that.
//!
//! What this module does not do: select updates by processor (the kernel does), or check their
//! signatures (the processor does).

use std::{
    collections::BTreeSet,
    fmt, fs,
    path::{Path, PathBuf},
};

use crate::{
    cpio,
    difference::version,
    error::{At as _, Error, MICROCODE, Result},
    firmware::FOLDER,
    tree::Tree,
};

/// Where the content of a file begins in the archive: at a multiple of this.
const ALIGNMENT: usize = 16;

/// Bytes of the header of an update of Intel: numbers of 32 bits.
const HEADER: usize = 48;
/// Where that header has the version of its format and that of the loader, the bytes of the data
/// after it, and those of the whole update.
const NUMBERS: [usize; 4] = [0, 20, 28, 32];
/// The bytes of the data and of the whole update where the header has none.
const OLD: (usize, usize) = (2000, 2048);
/// The bytes of an update of Intel are a multiple of this.
const BLOCK: usize = 1024;
/// Bytes of a table of further processors before its entries: their number, and others.
const TABLE_HEADER: usize = 20;
/// Bytes of an entry: the signature of a processor, its platforms, and the checksum that the
/// update would have for it.
const TABLE_ENTRY: usize = 12;

/// The first number of a container of AMD, "DMA" with a zero after it.
const CONTAINER: usize = 0x0041_4d44;
/// The kind of a container's first section, the table of processors.
const TABLE: usize = 0;
/// The kind of its other sections.
const UPDATE: usize = 1;
/// The fewest bytes of a container's table, which has one entry, and of an update, which has only
/// its header.
const SMALLEST: (usize, usize) = (16, 64);

/// A vendor of processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// Intel.
    Intel,
    /// AMD.
    Amd,
}

impl Vendor {
    /// Both.
    const ALL: [Self; 2] = [Self::Intel, Self::Amd];

    /// The package of Debian with its updates.
    #[must_use]
    pub fn package(self) -> &'static str {
        match self {
            Self::Intel => "intel-microcode",
            Self::Amd => "amd64-microcode",
        }
    }

    /// The folder of the package's files in [`FOLDER`].
    fn folder(self) -> &'static str {
        match self {
            Self::Intel => "intel-ucode",
            Self::Amd => "amd-ucode",
        }
    }

    /// The path in the archive, where the kernel looks.
    fn path(self) -> &'static str {
        match self {
            Self::Intel => "kernel/x86/microcode/GenuineIntel.bin",
            Self::Amd => "kernel/x86/microcode/AuthenticAMD.bin",
        }
    }

    /// Whether a file in the folder has updates: a package of AMD may have signatures beside them.
    fn has(self, file: &Path) -> bool {
        match self {
            Self::Intel => true,
            Self::Amd => file.extension().is_some_and(|extension| extension == "bin"),
        }
    }

    /// The updates in a file.
    fn updates(self, file: &[u8]) -> Result<Vec<&[u8]>, String> {
        let updates = match self {
            Self::Intel => of_intel(file)?,
            Self::Amd => of_amd(file)?,
        };
        match updates.is_empty() {
            true => Err("it has no update".to_owned()),
            false => Ok(updates),
        }
    }

    /// The file that the kernel takes, from those of the package.
    fn joined(self, payload: &Path) -> Result<Vec<u8>> {
        let mut joined = Vec::new();
        let mut seen = BTreeSet::new();
        for path in self.files(payload)? {
            let file = fs::read(&path).at("read", &path)?;
            let updates = self.updates(&file).map_err(|reason| wrong(path, reason))?;
            match self {
                // The package has a file for each processor, and some share an update.
                Self::Intel => {
                    for update in updates {
                        if seen.insert(update.to_owned()) {
                            joined.extend_from_slice(update);
                        }
                    }
                }
                Self::Amd => joined.extend_from_slice(&file),
            }
        }
        Ok(joined)
    }

    /// The files of the package, in the order of their names.
    fn files(self, payload: &Path) -> Result<BTreeSet<PathBuf>> {
        let folder = payload.join(FOLDER).join(self.folder());
        let mut files = BTreeSet::new();
        for entry in fs::read_dir(&folder).at("read", &folder)? {
            let path = entry.at("read", &folder)?.path();
            if self.has(&path) {
                files.insert(path);
            }
        }
        Ok(files)
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Intel => "Intel",
            Self::Amd => "AMD",
        })
    }
}

/// The microcode of a vendor in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Microcode {
    /// The vendor.
    pub vendor: Vendor,
    /// The bytes of the file that the kernel reads.
    pub bytes: usize,
    /// How many updates are in it, or why the kernel cannot read it to its end.
    pub updates: Result<usize, String>,
    /// The version of its package, if the list of packages has it.
    pub version: Option<String>,
}

/// The microcode at the start of an initramfs, and its versions in a list of packages.
pub(crate) fn of(initramfs: &[u8], packages: &str) -> Vec<Microcode> {
    let found = |vendor: Vendor| {
        let file = cpio::find(initramfs, vendor.path())?;
        Some(Microcode {
            vendor,
            bytes: file.len(),
            updates: vendor.updates(file).map(|updates| updates.len()),
            version: version(packages, vendor.package()).map(str::to_owned),
        })
    };
    Vendor::ALL.into_iter().filter_map(found).collect()
}

/// The archive with the microcode of both packages. Its length is a multiple of 4, so that
/// another archive may follow.
///
/// # Errors
///
/// A package has no file, or one that is not of the format; the error names it.
pub(crate) fn archive(payload: &Path) -> Result<Vec<u8>> {
    let mut tree = Tree::default();
    for vendor in Vendor::ALL {
        tree.text(vendor.path(), vendor.joined(payload)?);
    }
    let archive = tree.aligned_archive(ALIGNMENT)?;
    check(&archive)?;
    Ok(archive)
}

/// Checks that the archive has both files, and that the kernel can read each to its end.
fn check(archive: &[u8]) -> Result<()> {
    let missing = || "it is not in the archive".to_owned();
    for vendor in Vendor::ALL {
        let file = cpio::find(archive, vendor.path()).ok_or_else(missing);
        let updates = file.and_then(|file| vendor.updates(file));
        updates.map_err(|reason| wrong(vendor.path().into(), reason))?;
    }
    Ok(())
}

fn wrong(path: PathBuf, reason: String) -> Error {
    Error::Malformed { path, expected: MICROCODE, reason }
}

/// The number of 32 bits at a place.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let number = bytes.get(at..)?.first_chunk::<4>()?;
    usize::try_from(u32::from_le_bytes(*number)).ok()
}

/// The sum of the numbers of 32 bits, as the kernel adds them up.
fn sum(bytes: &[u8]) -> u32 {
    let (numbers, _none) = bytes.as_chunks::<4>();
    numbers.iter().fold(0, |sum, number| sum.wrapping_add(u32::from_le_bytes(*number)))
}

/// The updates of Intel in a file, one after the other.
fn of_intel(file: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut updates = Vec::new();
    let mut at = 0;
    while at < file.len() {
        let rest = &file[at..];
        let wrong = |reason: &str| format!("its update at byte {at} {reason}");
        let numbers = NUMBERS.map(|place| number(rest, place));
        let [Some(format), Some(loader), Some(data), Some(total)] = numbers else {
            return Err(wrong("is cut short"));
        };
        if (format, loader) != (1, 1) {
            return Err(wrong("has no header of version 1"));
        }
        let (data, total) = if data == 0 { OLD } else { (data, total) };
        if !data.is_multiple_of(4) || !total.is_multiple_of(BLOCK) || total < HEADER + data {
            return Err(wrong("has lengths that do not fit together"));
        }
        let update = rest.get(..total).ok_or_else(|| wrong("is cut short"))?;
        // After the data, some have a table of further processors.
        let (own, table) = update.split_at(HEADER + data);
        if sum(own) != 0 || sum(table) != 0 {
            return Err(wrong("is damaged: its numbers do not add up to 0"));
        }
        if !is_table(table, own) {
            return Err(wrong("has a table of processors that does not fit it"));
        }
        updates.push(update);
        at += total;
    }
    Ok(updates)
}

/// Whether the kernel takes this table of further processors, or none, after an update.
fn is_table(table: &[u8], update: &[u8]) -> bool {
    let Some((header, entries)) = table.split_at_checked(TABLE_HEADER) else {
        return table.is_empty();
    };
    let (entries, rest) = entries.as_chunks::<TABLE_ENTRY>();
    // Of the update's own header: the signature and the checksum, and the platforms.
    let [Some(first), Some(second)] = [12..20, 24..28].map(|place| update.get(place)) else {
        return false;
    };
    let own = sum(first).wrapping_add(sum(second));
    rest.is_empty()
        && number(header, 0) == Some(entries.len())
        && entries.iter().all(|entry| sum(entry) == own)
}

/// The updates of AMD in a file: in containers, one after the other.
fn of_amd(file: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut updates = Vec::new();
    let mut at = 0;
    while at < file.len() {
        let rest = &file[at..];
        let wrong = |reason: &str| format!("its section at byte {at} {reason}");
        let [Some(first), Some(second)] = [0, 4].map(|place| number(rest, place)) else {
            return Err(wrong("is cut short"));
        };
        let is_update = first == UPDATE && at > 0;
        let length = match (first, second) {
            (CONTAINER, TABLE) => {
                number(rest, 8).filter(|table| *table >= SMALLEST.0).map(|table| 12 + table)
            }
            _ if is_update => Some(second).filter(|size| *size >= SMALLEST.1).map(|size| 8 + size),
            _ => return Err(wrong("is neither an update nor the start of a container")),
        };
        let section = length.and_then(|length| rest.get(..length));
        let section = section.ok_or_else(|| wrong("is cut short"))?;
        if is_update {
            updates.push(section);
        }
        at += section.len();
    }
    Ok(updates)
}

#[cfg(test)]
#[path = "microcode_tests.rs"]
pub(crate) mod tests;
