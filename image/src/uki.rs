//! The unified kernel image: building one, and taking one apart.
//!
//! systemd's stub is a small UEFI program that looks for sections in its own
//! file: the kernel, the initramfs, the command line. Those are appended here.
//!
//! ```text
//! | headers, section table | the stub's sections | ours, each at the next page of the image |
//!            ^ new entries, in the room before the first section
//! ```
//!
//! Written by hand rather than with `objcopy`, which Rust cannot call and which moves
//! sections without need; `object` checks and reads the patched file.
//!
//! Invariants:
//! - The stub's own sections, their addresses and the headers' size stay as they are.

use std::path::Path;

use object::{
    LittleEndian as LE,
    pe::{IMAGE_SCN_CNT_INITIALIZED_DATA, IMAGE_SCN_MEM_READ, ImageNtHeaders64},
    read::pe::{ImageNtHeaders as _, ImageOptionalHeader as _, PeFile64},
};

use polis_base::hex;

use crate::{
    command_line::release_key,
    error::{Error, Result},
    layout,
};

/// The largest kernel image in bytes: an ESP has room for three, and for what a machine writes
/// beside them.
const SIZE_MAX: u64 = layout::ESP_SIZE / 4;

/// Length of an entry of the section table.
const ENTRY: usize = 40;
/// Offsets of fields in the headers, from the PE signature on (the optional
/// header follows the signature and the 20 bytes of the file header).
const SECTION_COUNT: usize = 6;
const OPTIONAL: usize = 24;
const SIZE_OF_INITIALIZED_DATA: usize = OPTIONAL + 8;
const SIZE_OF_IMAGE: usize = OPTIONAL + 56;
const CHECKSUM: usize = OPTIONAL + 64;

/// A section to append, or one that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    /// At most eight bytes, with the dot.
    pub(crate) name: String,
    /// Its bytes.
    pub(crate) content: Vec<u8>,
}

impl Section {
    pub(crate) fn new(name: &str, content: impl Into<Vec<u8>>) -> Self {
        Self { name: name.to_owned(), content: content.into() }
    }
}

/// Appends sections to a stub, or to what was built from one.
pub(crate) fn build(stub: &[u8], sections: &[Section]) -> Result<Vec<u8>> {
    let wrong = |reason: &str| Error::Uki { reason: reason.to_owned() };
    let parsed = PeFile64::parse(stub).map_err(|error| wrong(&error.to_string()))?;
    let headers: &ImageNtHeaders64 = parsed.nt_headers();
    let optional = headers.optional_header();
    let alignment =
        Alignment { section: optional.section_alignment(), file: optional.file_alignment() };
    if !alignment.section.is_power_of_two() || !alignment.file.is_power_of_two() {
        return Err(wrong("the stub's alignments are not powers of two"));
    }
    let signature = usize::try_from(parsed.dos_header().nt_headers_offset())
        .map_err(|_err| wrong("the stub's headers lie too far"))?;
    let table =
        signature + OPTIONAL + usize::from(headers.file_header().size_of_optional_header.get(LE));
    let count = usize::from(headers.file_header().number_of_sections.get(LE));
    let room =
        table + count * ENTRY..usize::try_from(optional.size_of_headers()).unwrap_or(usize::MAX);
    if stub.get(room.clone()).is_none_or(|room| {
        room.len() < sections.len() * ENTRY || room.iter().any(|byte| *byte != 0)
    }) {
        return Err(wrong("the stub has no room for more sections"));
    }
    let end = parsed.section_table().iter().map(|section| {
        section.virtual_address.get(LE).saturating_add(section.virtual_size.get(LE))
    });
    let mut address = end.max().unwrap_or(0);

    let mut image = stub.to_vec();
    let mut added: u32 = 0;
    for (index, section) in sections.iter().enumerate() {
        alignment.pad(&mut image);
        address = address.next_multiple_of(alignment.section);
        let entry = entry(section, address, image.len(), alignment)?;
        let place = room.start + index * ENTRY;
        image[place..place + ENTRY].copy_from_slice(&entry);
        image.extend_from_slice(&section.content);
        let size =
            u32::try_from(section.content.len()).map_err(|_err| wrong("a section is too large"))?;
        added += size.next_multiple_of(alignment.file);
        address += size;
    }
    alignment.pad(&mut image);

    let total = u16::try_from(count + sections.len())
        .map_err(|_err| wrong("there are too many sections"))?;
    let patch = |image: &mut [u8], at: usize, value: u32| {
        image[signature + at..signature + at + 4].copy_from_slice(&value.to_le_bytes());
    };
    image[signature + SECTION_COUNT..signature + SECTION_COUNT + 2]
        .copy_from_slice(&total.to_le_bytes());
    patch(&mut image, SIZE_OF_INITIALIZED_DATA, optional.size_of_initialized_data() + added);
    patch(&mut image, SIZE_OF_IMAGE, address.next_multiple_of(alignment.section));
    // Firmware does not check it, and a zero is better than a wrong value.
    patch(&mut image, CHECKSUM, 0);
    Ok(image)
}

/// Refuses a kernel image that would leave a machine no room for its next one.
pub(crate) fn check_size(bytes: u64) -> Result<()> {
    if bytes <= SIZE_MAX {
        return Ok(());
    }
    let reason = format!(
        "it has {bytes} bytes, and at most {SIZE_MAX} are allowed, since the ESP of a machine \
         holds three"
    );
    Err(Error::Uki { reason })
}

#[derive(Clone, Copy, Debug)]
struct Alignment {
    section: u32,
    file: u32,
}

impl Alignment {
    fn pad(self, image: &mut Vec<u8>) {
        let length = image.len().next_multiple_of(usize::try_from(self.file).unwrap_or(1));
        image.resize(length, 0);
    }
}

/// One entry of the section table.
fn entry(
    section: &Section,
    address: u32,
    offset: usize,
    alignment: Alignment,
) -> Result<[u8; ENTRY]> {
    let name = section.name.as_bytes();
    let too_large = |_err| Error::Uki { reason: format!("section {} does not fit", section.name) };
    let size = u32::try_from(section.content.len()).map_err(too_large)?;
    let offset = u32::try_from(offset).map_err(too_large)?;
    if name.len() > 8 {
        return Err(Error::Uki {
            reason: format!("the name {} is longer than 8 bytes", section.name),
        });
    }
    let mut entry = [0; ENTRY];
    entry[..name.len()].copy_from_slice(name);
    let fields = [size, address, size.next_multiple_of(alignment.file), offset];
    for (index, field) in fields.into_iter().enumerate() {
        entry[8 + index * 4..12 + index * 4].copy_from_slice(&field.to_le_bytes());
    }
    let kind = IMAGE_SCN_CNT_INITIALIZED_DATA.0 | IMAGE_SCN_MEM_READ.0;
    entry[36..].copy_from_slice(&kind.to_le_bytes());
    Ok(entry)
}

/// The sections of a unified kernel image, in their order.
pub(crate) fn sections(path: &Path, image: &[u8]) -> Result<Vec<Section>> {
    let wrong = |reason: String| Error::Malformed {
        path: path.to_owned(),
        expected: "unified kernel image",
        reason,
    };
    let parsed = PeFile64::parse(image).map_err(|error| wrong(error.to_string()))?;
    parsed
        .section_table()
        .iter()
        .map(|section| {
            let name = String::from_utf8_lossy(section.raw_name()).into_owned();
            let data = section.pe_data(image).map_err(|error| wrong(error.to_string()))?;
            let size = usize::try_from(section.virtual_size.get(LE)).unwrap_or(usize::MAX);
            Ok(Section { name, content: data[..data.len().min(size)].to_vec() })
        })
        .collect()
}

/// A unified kernel image with this release key on its command line, which has a place for
/// it: nothing moves.
pub(crate) fn with_release_key(image: &[u8], key: &[u8; 32]) -> Result<Vec<u8>> {
    let wrong = |reason: &str| Error::Uki { reason: reason.to_owned() };
    let parsed = PeFile64::parse(image).map_err(|error| wrong(&error.to_string()))?;
    let line = parsed.section_table().iter().find(|section| section.raw_name() == b".cmdline");
    let (start, length) = line.ok_or_else(|| wrong("it has no command line"))?.pe_file_range();
    let (start, length) = (usize::try_from(start), usize::try_from(length));
    let line = start
        .ok()
        .zip(length.ok())
        .and_then(|(start, length)| Some((start, image.get(start..start.checked_add(length)?)?)));
    let (start, line) = line.ok_or_else(|| wrong("its command line is outside of it"))?;
    let place = release_key(line).ok_or_else(|| wrong("it has no place for a release key"))?;
    let mut image = image.to_vec();
    image[start + place.start..start + place.end].copy_from_slice(hex::encode(key).as_bytes());
    Ok(image)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The smallest valid stub: headers, room, and one section.
    pub(crate) fn stub() -> Vec<u8> {
        let mut stub = vec![0; 0x600];
        stub[..2].copy_from_slice(b"MZ");
        stub[0x3c] = 0x40;
        let mut put = |at: usize, bytes: &[u8]| {
            stub[0x40 + at..0x40 + at + bytes.len()].copy_from_slice(bytes);
        };
        put(0, b"PE\0\0");
        put(4, &0x8664_u16.to_le_bytes());
        put(SECTION_COUNT, &1_u16.to_le_bytes());
        put(20, &240_u16.to_le_bytes());
        put(OPTIONAL, &0x20b_u16.to_le_bytes());
        put(OPTIONAL + 32, &0x1000_u32.to_le_bytes());
        put(OPTIONAL + 36, &0x200_u32.to_le_bytes());
        put(OPTIONAL + 60, &0x400_u32.to_le_bytes());
        put(OPTIONAL + 108, &16_u32.to_le_bytes());
        let code = Section::new(".text", [1; 0x1f0]);
        let alignment = Alignment { section: 0x1000, file: 0x200 };
        put(OPTIONAL + 240, &entry(&code, 0x1000, 0x400, alignment).unwrap());
        stub[0x400..0x5f0].fill(1);
        stub
    }

    #[test]
    fn appended_sections_are_read_back_and_the_stubs_own_stay() {
        let added = [Section::new(".cmdline", "quiet"), Section::new(".linux", vec![7; 5000])];
        let image = build(&stub(), &added).unwrap();
        let sections = sections(Path::new("x"), &image).unwrap();
        assert_eq!(sections[0], Section::new(".text", [1; 0x1f0]));
        assert_eq!(sections[1..], added);
        assert!(image.len().is_multiple_of(0x200));
        let parsed = PeFile64::parse(&*image).unwrap();
        let addresses: Vec<_> =
            parsed.section_table().iter().map(|section| section.virtual_address.get(LE)).collect();
        assert_eq!(addresses, [0x1000, 0x2000, 0x3000]);
        assert_eq!(parsed.nt_headers().optional_header.size_of_image.get(LE), 0x5000);
    }

    #[test]
    fn the_release_key_takes_its_place_and_nothing_moves() {
        let line = format!("a polis.release-key={} b", "0".repeat(64));
        let added = [Section::new(".cmdline", line.as_str()), Section::new(".linux", [7; 5000])];
        let image = build(&stub(), &added).unwrap();
        let keyed = with_release_key(&image, &[0xab; 32]).unwrap();
        assert_eq!(keyed.len(), image.len());
        let sections = sections(Path::new("x"), &keyed).unwrap();
        let expected = format!("a polis.release-key={} b", "ab".repeat(32));
        assert_eq!(sections[1], Section::new(".cmdline", expected));
        assert_eq!(sections[2], added[1]);
        // A key is never replaced.
        assert!(with_release_key(&keyed, &[1; 32]).is_err());
        assert!(with_release_key(&stub(), &[1; 32]).is_err());
    }

    #[test]
    fn a_stub_without_room_is_refused() {
        let mut stub = stub();
        stub[0x3ff] = 1;
        assert!(build(&stub, &[Section::new(".x", "")]).is_err());
    }

    #[test]
    fn a_kernel_image_of_which_an_esp_does_not_hold_three_is_refused() {
        check_size(SIZE_MAX).unwrap();
        let error = check_size(SIZE_MAX + 1).unwrap_err().to_string();
        assert!(error.contains("134217729 bytes, and at most 134217728"), "{error}");
    }

    #[test]
    fn a_long_name_is_refused() {
        assert!(build(&stub(), &[Section::new(".too-long", "")]).is_err());
    }

    proptest! {
        #[test]
        fn a_damaged_stub_is_refused_or_used_and_never_a_panic(at in 0..0x200_usize, byte in any::<u8>()) {
            let mut stub = stub();
            stub[at] = byte;
            let _outcome = build(&stub, &[Section::new(".linux", "x")]);
            let _outcome = sections(Path::new("x"), &stub);
        }
    }
}
