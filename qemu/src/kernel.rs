//! The unpacked kernel of an image, which boots a sixth cheaper than the packed one.
//!
//! A distribution's kernel is a `bzImage`: a boot stub, and behind it the kernel
//! itself, packed. Under translation the unpacking alone is a third of the
//! instructions until `init` starts. QEMU also takes the unpacked kernel, an ELF
//! file with a PVH entry point, and this module takes that out of the `bzImage`.
//!
//! Such a boot skips the boot stub and the random address of the kernel (KASLR): the
//! stories of UEFI and of the kinds of disks boot the packed one.
//!
//! What this module does not do: keep the result (`cache`).

use std::io::Read as _;

use ruzstd::decoding::StreamingDecoder;

/// Five times the size of Debian's unpacked kernel.
const UNPACKED_MAX: u32 = 256 << 20;

/// Fields of the header of a `bzImage`, by their offset: see
/// `Documentation/arch/x86/boot.rst` of the kernel.
mod field {
    /// Sectors of the boot stub's first part, without the boot sector.
    pub(super) const SETUP_SECTORS: usize = 0x1f1;
    /// [`super::MAGIC`].
    pub(super) const MAGIC: usize = 0x202;
    /// Version of this header.
    pub(super) const VERSION: usize = 0x206;
    /// First byte of the packed kernel, counted from the end of the first part.
    pub(super) const PAYLOAD_OFFSET: usize = 0x248;
    /// Bytes of the packed kernel and of [`super::SIZE`].
    pub(super) const PAYLOAD_LENGTH: usize = 0x24c;
}

/// Where every `bzImage` has these four bytes.
const MAGIC: &[u8; 4] = b"HdrS";

/// The first version of the header that gives the place of the payload.
const VERSION_MIN: u16 = 0x0208;

/// A header with zero sectors means four.
const SETUP_SECTORS_DEFAULT: u8 = 4;

const SECTOR: usize = 512;

/// Bytes behind the packed kernel, which hold its unpacked size.
const SIZE: usize = 4;

/// The first bytes of a kernel packed by zstd.
const ZSTD: &[u8; 4] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The first bytes of an ELF file.
const ELF: &[u8; 4] = b"\x7fELF";

/// Why a kernel cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The header is missing, or older than its field about the payload.
    #[error("the kernel is not a bzImage with the place of its payload")]
    Header,
    /// The header names a place outside of the file.
    #[error("the kernel ends before its payload does")]
    Short,
    /// Another format than Debian's kernel uses.
    #[error("the kernel's payload is not packed by zstd")]
    Format,
    /// The size is larger than any kernel.
    #[error("the kernel states {0} bytes when unpacked")]
    Size(u32),
    /// The payload is damaged.
    #[error("cannot unpack the kernel's payload: {0}")]
    Unpack(String),
    /// It can be unpacked, but differs from its header.
    #[error("the kernel's payload is not an ELF file of the size that it gives")]
    Content,
}

/// The ELF file in a `bzImage`.
///
/// # Errors
/// When `image` is not a `bzImage` with a zstd payload, or is damaged.
pub fn unpack(image: &[u8]) -> Result<Vec<u8>, Error> {
    let (packed, size) = payload(image)?;
    if !packed.starts_with(ZSTD) {
        return Err(Error::Format);
    }
    let damaged = |error: &dyn std::fmt::Display| Error::Unpack(error.to_string());
    let decoder = StreamingDecoder::new(packed).map_err(|error| damaged(&error))?;
    let mut kernel = Vec::new();
    // One byte more than announced: enough to detect that it is too long.
    decoder.take(u64::from(size) + 1).read_to_end(&mut kernel).map_err(|error| damaged(&error))?;
    if kernel.len() as u64 != u64::from(size) || !kernel.starts_with(ELF) {
        return Err(Error::Content);
    }
    Ok(kernel)
}

/// The packed kernel, and its size when unpacked.
fn payload(image: &[u8]) -> Result<(&[u8], u32), Error> {
    if bytes(image, field::MAGIC).ok_or(Error::Header)? != *MAGIC {
        return Err(Error::Header);
    }
    let version = u16::from_le_bytes(bytes(image, field::VERSION).ok_or(Error::Header)?);
    if version < VERSION_MIN {
        return Err(Error::Header);
    }
    let [sectors] = bytes(image, field::SETUP_SECTORS).ok_or(Error::Header)?;
    let sectors = if sectors == 0 { SETUP_SECTORS_DEFAULT } else { sectors };
    let number = |at| {
        let number = u32::from_le_bytes(bytes(image, at).ok_or(Error::Header)?);
        usize::try_from(number).map_err(|_wide| Error::Short)
    };
    let offset = number(field::PAYLOAD_OFFSET)?;
    let length = number(field::PAYLOAD_LENGTH)?;
    let start = (usize::from(sectors) + 1) * SECTOR;
    let rest = image.get(start..).and_then(|rest| rest.get(offset..)).ok_or(Error::Short)?;
    let payload = rest.get(..length).ok_or(Error::Short)?;
    let (packed, size) = payload.split_last_chunk::<SIZE>().ok_or(Error::Short)?;
    match u32::from_le_bytes(*size) {
        size @ 0..=UNPACKED_MAX => Ok((packed, size)),
        size => Err(Error::Size(size)),
    }
}

fn bytes<const N: usize>(image: &[u8], at: usize) -> Option<[u8; N]> {
    image.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    /// A `bzImage` with this payload and this word about its size.
    fn image(packed: &[u8], size: u32) -> Vec<u8> {
        let mut image = vec![0; 3 * SECTOR + 7];
        image[field::SETUP_SECTORS] = 1;
        image[field::MAGIC..][..4].copy_from_slice(MAGIC);
        image[field::VERSION..][..2].copy_from_slice(&0x020f_u16.to_le_bytes());
        // The payload lies 519 bytes behind the two sectors of the first part.
        image[field::PAYLOAD_OFFSET..][..4].copy_from_slice(&519_u32.to_le_bytes());
        let length = u32::try_from(packed.len() + SIZE).unwrap();
        image[field::PAYLOAD_LENGTH..][..4].copy_from_slice(&length.to_le_bytes());
        image.extend(packed);
        image.extend(size.to_le_bytes());
        image.extend(b"the stub goes on");
        image
    }

    fn kernel() -> Vec<u8> {
        [ELF.as_slice(), &b"some code ".repeat(1000)].concat()
    }

    fn packed() -> Vec<u8> {
        compress_to_vec(kernel().as_slice(), CompressionLevel::Fastest)
    }

    #[test]
    fn the_payload_is_found_and_unpacked() {
        assert_eq!(unpack(&image(&packed(), 10_004)).unwrap(), kernel());
    }

    #[test]
    fn a_payload_of_another_size_than_it_says_is_refused() {
        for size in [0, 10_003, 10_005] {
            let unpacked = unpack(&image(&packed(), size));
            assert!(matches!(unpacked, Err(Error::Content)), "{size}: {unpacked:?}");
        }
        assert!(matches!(unpack(&image(&packed(), UNPACKED_MAX + 1)), Err(Error::Size(_))));
    }

    #[test]
    fn what_is_not_such_a_kernel_is_refused_by_name() {
        assert!(matches!(unpack(b""), Err(Error::Header)));
        assert!(matches!(unpack(&[0; 4096]), Err(Error::Header)));
        let mut old = image(&packed(), 10_004);
        old[field::VERSION] = 7;
        assert!(matches!(unpack(&old), Err(Error::Header)));
        assert!(matches!(unpack(&image(b"\x1f\x8b\x08", 3)), Err(Error::Format)));
        let whole = image(&packed(), 10_004);
        let without_its_size = &whole[..whole.len() - b"the stub goes on".len() - 1];
        assert!(matches!(unpack(without_its_size), Err(Error::Short)));
        let text = compress_to_vec(b"no kernel".as_slice(), CompressionLevel::Fastest);
        assert!(matches!(unpack(&image(&text, 9)), Err(Error::Content)));
    }

    proptest! {
        #[test]
        fn a_damaged_kernel_is_refused_or_unpacked_and_never_a_panic(
            at in 0_usize..2500, byte in any::<u8>(), end in 0_usize..2500,
        ) {
            let mut image = image(&packed(), 10_004);
            let at = at % image.len();
            image[at] = byte;
            image.truncate(end.max(1));
            let _outcome = unpack(&image);
        }
    }
}
