//! Looks into an image file: what is in it, from the file alone.
//!
//! Nothing that the build left beside the image is read, so this works on an
//! image that came from elsewhere; and the system is hashed again, so that
//! *intact* means what the machine will find.

use std::{
    env,
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
};

use gpt::{GptConfig, partition::Partition};

use crate::{
    digest::hex,
    disk::Window,
    error::{At as _, Error, Result},
    esp,
    layout::{self, SECTOR},
    manifest, uki,
    verity::{self, BLOCK},
};

/// How files of QEMU's format begin.
const QCOW2: &[u8] = b"QFI\xfb";
/// The largest system that is read into memory to be hashed.
const SYSTEM_MAX: u64 = 8 << 30;

/// What an image file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The partitions, in order.
    pub partitions: Vec<Part>,
    /// Sections of the unified kernel image: name and length.
    pub sections: Vec<(String, usize)>,
    /// The image's `os-release`.
    pub os_release: String,
    /// Release of the kernel.
    pub kernel_release: String,
    /// The kernel's command line.
    pub cmdline: String,
    /// The packages, a line each: category, name, version, SHA-256.
    pub packages: String,
    /// Length of the parameters file on the ESP, if there is one.
    pub parameters: Option<usize>,
    /// Whether the system is what the command line says.
    pub system: System,
}

/// One partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the table.
    pub name: String,
    /// Type and own GUID, as text.
    pub guids: (String, String),
    /// First byte and length.
    pub place: (u64, u64),
}

/// Outcome of hashing the system again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum System {
    /// It has the root hash that the command line names.
    Intact,
    /// It does not.
    Damaged {
        /// The root hash that it has.
        root_hash: String,
    },
}

/// Looks into a raw or qcow2 image.
///
/// # Errors
///
/// The file cannot be read, or is no image of Polis.
pub fn inspect(path: &Path) -> Result<Inspection> {
    let mut magic = [0; 4];
    let mut file = File::open(path).at("open", path)?;
    file.read_exact(&mut magic).at("read", path)?;
    if magic != QCOW2 {
        return inspect_raw(path, path);
    }
    let raw = env::temp_dir().join(format!("polis-inspect-{}.raw", std::process::id()));
    let inspection = manifest::convert(path, &raw, "raw").and_then(|()| inspect_raw(path, &raw));
    if raw.exists() {
        fs::remove_file(&raw).at("remove", &raw)?;
    }
    inspection
}

/// Reads `path`; errors speak of `named`.
fn inspect_raw(named: &Path, path: &Path) -> Result<Inspection> {
    let foreign =
        |reason: &str| Error::Foreign { path: named.to_owned(), reason: reason.to_owned() };
    let disk = GptConfig::new()
        .open(path)
        .map_err(|source| Error::Gpt { path: named.to_owned(), source })?;
    let find = |kind: layout::Kind| {
        disk.partitions().values().find(|entry| entry.part_type_guid.guid == kind.type_guid)
    };
    let esp = find(layout::ESP).ok_or_else(|| foreign("it has no ESP"))?;
    let system = find(layout::SYSTEM_A).ok_or_else(|| foreign("it has no POLIS-SYSTEM-A"))?;
    let window = |entry: &Partition| -> Result<_> {
        let (start, length) =
            place(entry).ok_or_else(|| foreign("a partition ends before it starts"))?;
        Ok(Window::new(File::open(path).at("open", path)?, start, length))
    };
    let image = esp::read(window(esp)?, esp::LOADER)?
        .ok_or_else(|| foreign("its ESP has nothing to start"))?;
    let parameters = esp::read(window(esp)?, esp::PARAMETERS)?.map(|bytes| bytes.len());
    let sections = uki::sections(&PathBuf::from(esp::LOADER), &image)?;
    let text = |name: &str| {
        let section = sections.iter().find(|section| section.name == name);
        section.map(|section| String::from_utf8_lossy(&section.content).into_owned())
    };
    let cmdline =
        text(".cmdline").ok_or_else(|| foreign("its kernel image has no command line"))?;
    let verity = Expected::parse(&cmdline).map_err(|reason| foreign(&reason))?;
    Ok(Inspection {
        partitions: disk.partitions().values().filter_map(part).collect(),
        os_release: text(".osrel").unwrap_or_default(),
        kernel_release: text(".uname").unwrap_or_default(),
        packages: text(".pkgs").unwrap_or_default(),
        sections: sections
            .into_iter()
            .map(|section| (section.name, section.content.len()))
            .collect(),
        parameters,
        system: verity.check(window(system)?, path)?,
        cmdline,
    })
}

fn place(entry: &Partition) -> Option<(u64, u64)> {
    let sectors = entry.last_lba.checked_sub(entry.first_lba)?.checked_add(1)?;
    Some((entry.first_lba.checked_mul(SECTOR)?, sectors.checked_mul(SECTOR)?))
}

fn part(entry: &Partition) -> Option<Part> {
    let guids = (entry.part_type_guid.guid.to_string(), entry.part_guid.to_string());
    Some(Part { name: entry.name.clone(), guids, place: place(entry)? })
}

/// What the command line says of the system.
#[derive(Debug)]
struct Expected {
    root_hash: String,
    salt: Vec<u8>,
    length: u64,
}

impl Expected {
    fn parse(cmdline: &str) -> Result<Self, String> {
        let value = |key: &str| {
            cmdline
                .split_whitespace()
                .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
                .ok_or_else(|| format!("its command line has no {key}"))
        };
        let salt =
            verity::bytes(value("polis.verity-salt")?).ok_or("its salt is not in hexadecimal")?;
        let length = value("polis.verity-blocks")?
            .parse::<u64>()
            .ok()
            .and_then(|blocks| blocks.checked_mul(BLOCK as u64))
            .filter(|length| (1..SYSTEM_MAX).contains(length))
            .ok_or("its number of blocks makes no sense")?;
        Ok(Self { root_hash: value("polis.verity")?.to_owned(), salt, length })
    }

    fn check(&self, window: Window<File>, path: &Path) -> Result<System> {
        let mut data = Vec::new();
        window.take(self.length).read_to_end(&mut data).at("read", path)?;
        data.resize(data.len().next_multiple_of(BLOCK), 0);
        let root_hash = hex(&verity::tree(&data, &self.salt).0);
        Ok(if root_hash == self.root_hash { System::Intact } else { System::Damaged { root_hash } })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_file_that_is_no_disk_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("noise");
        fs::write(&path, vec![0xa5; 1 << 20]).unwrap();
        assert!(matches!(inspect(&path), Err(Error::Gpt { .. })));
    }

    #[test]
    fn the_command_line_says_how_the_system_is_checked() {
        let line = "quiet polis.verity=ab polis.verity-salt=0aff polis.verity-blocks=3";
        let expected = Expected::parse(line).unwrap();
        assert_eq!(expected.salt, [0x0a, 0xff]);
        assert_eq!(expected.length, 12288);
    }

    proptest! {
        #[test]
        fn a_strange_command_line_is_refused_and_never_a_panic(
            salt in "\\PC{0,6}", blocks in any::<u64>(),
        ) {
            let line = format!("polis.verity=a polis.verity-salt={salt} polis.verity-blocks={blocks}");
            let _outcome = Expected::parse(&line);
        }
    }
}
