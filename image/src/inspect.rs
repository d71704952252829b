//! The inspection of an image file, from the file alone.
//!
//! It reads no other output of the build, so it works on an image that came from
//! elsewhere; and it hashes the system again, so that *intact* means the same as for
//! the machine.

use std::{
    env,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::FileTypeExt as _,
    path::Path,
};

use gpt::{GptConfig, partition::Partition};
use polis_bundle::Registers;
use polis_layout::Window;
use semver::Version;

use crate::{
    boot_files::{self, Signature},
    difference,
    digest::hex,
    error::{At as _, Error, Result},
    esp, etcd,
    layout::{self, SECTOR},
    manifest::{self, Kind, Variant},
    microcode::{self, Microcode},
    moved::Moved,
    signing, uki,
    verity::{self, BLOCK},
};

/// The first bytes of files of QEMU's format.
const QCOW2: &[u8] = b"QFI\xfb";
/// The largest system that is read into memory to be hashed.
const SYSTEM_MAX: u64 = 8 << 30;
/// How much of an ESP is read for one file: it has room for three kernel images, and a damaged
/// file system may have circles.
const ESP_READ_MAX: u64 = layout::ESP_SIZE / 3;

/// The content of an image file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The partitions, in order.
    pub partitions: Vec<Part>,
    /// Sections of the unified kernel image: name and length.
    pub sections: Vec<(String, usize)>,
    /// The image's `os-release`.
    pub os_release: String,
    /// The purpose of the image, if it is recorded.
    pub kind: Option<Kind>,
    /// Its programs, if the image says so in a word that is known.
    pub variant: Option<Variant>,
    /// Release of the kernel.
    pub kernel_release: String,
    /// The kernel's command line.
    pub cmdline: String,
    /// The packages, a line each: category, name, version, SHA-256, and for those that
    /// differ from the lock, the locked version.
    pub packages: String,
    /// The version of its etcd, if the list of packages has one.
    pub etcd: Option<Version>,
    /// The microcode that the kernel finds before the initramfs, at most one a vendor.
    pub microcode: Vec<Microcode>,
    /// The packages that differ from the lock.
    pub moved: Vec<Moved>,
    /// Length of the parameters file on the ESP, if present.
    pub parameters: Option<usize>,
    /// Whether the system matches the command line.
    pub system: System,
    /// The registers of the machine's TPM after a start of the image.
    pub registers: Registers,
    /// The hash by which firmware knows the unified kernel image (Authenticode, SHA-256), if that
    /// is a program that can be signed.
    pub authenticode: Option<[u8; 32]>,
    /// The programs that the machine starts from the ESP, by their paths there: the unified
    /// kernel image last, and before it the loader that starts it, if there is one.
    pub signatures: Vec<(String, Signature)>,
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
    /// It does, but the hash tree on the disk, by which the machine checks each block, is another.
    TreeDamaged,
}

/// Whether [`inspect`] of this file needs `qemu-img`.
///
/// # Errors
///
/// The file cannot be read, is empty, or is neither a file nor a disk.
pub fn is_qcow2(path: &Path) -> Result<bool> {
    let foreign =
        |reason: &str| Error::Foreign { path: path.to_owned(), reason: reason.to_owned() };
    let kind = fs::metadata(path).at("open", path)?.file_type();
    // A pipe would be waited for, and is read once only.
    if kind.is_fifo() || kind.is_char_device() || kind.is_socket() {
        return Err(foreign("it is neither a file nor a disk"));
    }
    let mut magic = Vec::new();
    let file = File::open(path).at("open", path)?;
    file.take(QCOW2.len() as u64).read_to_end(&mut magic).at("read", path)?;
    if magic.is_empty() {
        return Err(foreign("it is empty"));
    }
    Ok(magic == QCOW2)
}

/// Looks into a raw or qcow2 image.
///
/// # Errors
///
/// The file cannot be read, or is not an image of Polis.
pub fn inspect(path: &Path) -> Result<Inspection> {
    if !is_qcow2(path)? {
        return inspect_raw(path, path);
    }
    // With a name that no other user of this host can foresee, and link to something else.
    let raw = tempfile::Builder::new()
        .prefix("polis-inspect-")
        .tempfile()
        .at("make a file in", env::temp_dir())?;
    manifest::convert(path, raw.path(), "raw")?;
    inspect_raw(path, raw.path())
}

/// Reads `path`; errors name `named`.
fn inspect_raw(named: &Path, path: &Path) -> Result<Inspection> {
    let foreign =
        |reason: &str| Error::Foreign { path: named.to_owned(), reason: reason.to_owned() };
    let disk = GptConfig::new()
        .open(path)
        .map_err(|error| foreign(&format!("it has no partition table ({error})")))?;
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
    let damaged = |error: esp::Error| foreign(&format!("{error}: {}", error.source));
    let esp = || -> Result<_> { Ok(window(esp)?.at_most(ESP_READ_MAX)) };
    let read = |name: &str| -> Result<_> { esp::read(esp()?, name).map_err(damaged) };
    let sections_of = |name: &str, image: &[u8]| {
        uki::sections(Path::new(name), image).map_err(|error| foreign(&error.to_string()))
    };
    let first = read(esp::LOADER)?.ok_or_else(|| foreign("its ESP has no boot file"))?;
    let mut signatures = vec![(esp::LOADER.to_owned(), Signature::of(&first))];
    let mut sections = sections_of(esp::LOADER, &first)?;
    let mut kernel = first;
    if !sections.iter().any(|section| section.name == ".cmdline") {
        let names = esp::list(esp()?, boot_files::KERNELS).map_err(damaged)?;
        let [name] = &names[..] else {
            return Err(foreign(&format!("{} kernel images are on its ESP", names.len())));
        };
        let path = format!("{}/{name}", boot_files::KERNELS);
        let image = read(&path)?.ok_or_else(|| foreign("its kernel image is gone"))?;
        sections = sections_of(&path, &image)?;
        signatures.push((path, Signature::of(&image)));
        kernel = image;
    }
    let parameters = read(esp::PARAMETERS)?.map(|bytes| bytes.len());
    let text = |name: &str| {
        let section = sections.iter().find(|section| section.name == name);
        section.map(|section| String::from_utf8_lossy(&section.content).into_owned())
    };
    let cmdline =
        text(".cmdline").ok_or_else(|| foreign("its kernel image has no command line"))?;
    let verity = Expected::parse(&cmdline).map_err(|reason| foreign(&reason))?;
    let os_release = text(".osrel").unwrap_or_default();
    let packages = text(".pkgs").unwrap_or_default();
    let initrd = sections.iter().find(|section| section.name == ".initrd");
    let microcode =
        initrd.map_or_else(Vec::new, |section| microcode::of(&section.content, &packages));
    Ok(Inspection {
        partitions: disk.partitions().values().filter_map(part).collect(),
        kind: kind(&os_release),
        variant: variant(&os_release),
        os_release,
        kernel_release: text(".uname").unwrap_or_default(),
        moved: difference::marked(&packages),
        etcd: etcd::version(&packages),
        microcode,
        packages,
        sections: sections
            .into_iter()
            .map(|section| (section.name, section.content.len()))
            .collect(),
        parameters,
        system: verity.check(window(system)?, named)?,
        registers: polis_bundle::registers(&kernel)
            .map_err(|unmeasurable| foreign(&unmeasurable.to_string()))?,
        authenticode: signing::authenticode_hash(&kernel).ok(),
        signatures,
        cmdline,
    })
}

fn kind(os_release: &str) -> Option<Kind> {
    let word = os_release.lines().find_map(|line| line.strip_prefix("VARIANT_ID="))?;
    Kind::ALL.into_iter().find(|kind| kind.word() == word)
}

fn variant(os_release: &str) -> Option<Variant> {
    let Some(word) = os_release.lines().find_map(|line| line.strip_prefix(manifest::VARIANT))
    else {
        return Some(Variant::Base);
    };
    Variant::ALL.into_iter().find(|variant| variant.word() == word)
}

fn place(entry: &Partition) -> Option<(u64, u64)> {
    let sectors = entry.last_lba.checked_sub(entry.first_lba)?.checked_add(1)?;
    Some((entry.first_lba.checked_mul(SECTOR)?, sectors.checked_mul(SECTOR)?))
}

fn part(entry: &Partition) -> Option<Part> {
    let guids = (entry.part_type_guid.guid.to_string(), entry.part_guid.to_string());
    Some(Part { name: entry.name.clone(), guids, place: place(entry)? })
}

/// The words of the command line about the system.
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
            .ok_or("its number of blocks is invalid")?;
        Ok(Self { root_hash: value("polis.verity")?.to_owned(), salt, length })
    }

    fn check(&self, mut window: Window<File>, path: &Path) -> Result<System> {
        let mut data = Vec::new();
        window.by_ref().take(self.length).read_to_end(&mut data).at("read", path)?;
        data.resize(data.len().next_multiple_of(BLOCK), 0);
        let (root, tree) = verity::tree(&data, &self.salt);
        let root_hash = hex(&root);
        if root_hash != self.root_hash {
            return Ok(System::Damaged { root_hash });
        }
        // The machine reads the tree from the disk.
        let mut kept = Vec::new();
        window.take(tree.len() as u64).read_to_end(&mut kept).at("read", path)?;
        Ok(if kept == tree { System::Intact } else { System::TreeDamaged })
    }
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
pub(crate) mod tests;
