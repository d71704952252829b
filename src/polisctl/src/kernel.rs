//! The kernel image in a file: of an update bundle, of a disk image, or the file itself.
//!
//! ```text
//! POLIS-UPDATE  update bundle  its first part, checked with the whole bundle
//! MZ            kernel image   the whole file
//! else          disk image     the ESP: EFI/BOOT/BOOTX64.EFI, or behind a loader the only
//!                              file in EFI/Linux
//! ```

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use fatfs::{FileSystem, FsOptions, LossyOemCpConverter, NullTimeProvider, StdIoWrapper};
use polis_bundle::{Bundle, Registers};
use polis_layout::Window;

use super::error::{Error, Explain as _};
use super::update;

/// Bytes of the largest kernel image, and of all that is read of an ESP to find one.
const KERNEL_MAX: u64 = 256 << 20;
const READ_MAX: u64 = 4 * KERNEL_MAX;

/// The type of an ESP in a partition table.
const ESP: &str = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B";

/// The file that firmware starts, and the folder in which a loader looks.
const FIRST: &str = "EFI/BOOT/BOOTX64.EFI";
const KERNELS: &str = "EFI/Linux";

/// The registers of a TPM after a start of the system in this file.
pub(super) fn registers(file: &Path) -> Result<Registers, Error> {
    let what = || format!("cannot use {}", file.display());
    let mut head = Vec::new();
    let opened = File::open(file).doing(what)?;
    opened.take(12).read_to_end(&mut head).doing(what)?;
    let kernel = match &*head {
        b"POLIS-UPDATE" => of_bundle(file)?,
        [b'M', b'Z', ..] => whole(&mut File::open(file).doing(what)?).doing(what)?,
        _ => return of_disk(file).doing(what).help(|| HELP.to_owned()),
    };
    polis_bundle::registers(&kernel).doing(what).help(|| HELP.to_owned())
}

/// The file to name instead.
const HELP: &str = "name an update bundle, a raw disk image, or a kernel image (.efi)";

fn of_bundle(file: &Path) -> Result<Vec<u8>, Error> {
    let mut kernel = Vec::new();
    let mut read = || {
        let opened = File::open(file).map_err(polis_bundle::Error::Read)?;
        let bundle = Bundle::open(BufReader::new(opened), None)?;
        bundle.parts([&mut kernel, &mut io::sink()], &mut |_bytes| ())
    };
    read().map_err(|fault| update::explained(file, fault))?;
    Ok(kernel)
}

/// The rest of a file that is not larger than a kernel image may be.
fn whole(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(KERNEL_MAX + 1).read_to_end(&mut content)?;
    if content.len() as u64 > KERNEL_MAX {
        return Err(io::Error::other("it is larger than a kernel image"));
    }
    Ok(content)
}

/// The registers of the system on a raw disk image.
fn of_disk(file: &Path) -> Result<Registers, anyhow::Error> {
    let disk = gpt::GptConfig::new()
        .open(file)
        .map_err(|_error| io::Error::other("it is neither of these, nor a disk image"))?;
    let esp = disk
        .partitions()
        .values()
        .find(|entry| entry.part_type_guid.guid.to_string().eq_ignore_ascii_case(ESP));
    let esp = esp.ok_or_else(|| io::Error::other("the disk image has no ESP"))?;
    let block = disk.logical_block_size();
    let (start, length) = (esp.bytes_start(*block)?, esp.bytes_len(*block)?);
    let window = Window::new(File::open(file)?, start, length).at_most(READ_MAX);
    let options = FsOptions::new().time_provider(NullTimeProvider::new()).strict(false);
    let fat: FileSystem<StdIoWrapper<Window<File>>, NullTimeProvider, LossyOemCpConverter> =
        FileSystem::new(window, options)?;
    let read = |path: &str| -> io::Result<Vec<u8>> {
        let mut file = fat.root_dir().open_file(path)?;
        let mut content = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        loop {
            match fatfs::Read::read(&mut file, &mut chunk)? {
                0 => return Ok(content),
                count => content.extend_from_slice(&chunk[..count]),
            }
            if content.len() as u64 > KERNEL_MAX {
                return Err(io::Error::other("it is larger than a kernel image"));
            }
        }
    };
    // A loader has no kernel in it.
    if let Ok(registers) = polis_bundle::registers(&read(FIRST)?) {
        return Ok(registers);
    }
    let mut names = Vec::new();
    for entry in fat.root_dir().open_dir(KERNELS)?.iter() {
        let entry = entry?;
        names.extend(entry.is_file().then(|| entry.file_name()));
    }
    let [name] = &*names else {
        let count = names.len();
        anyhow::bail!("{count} kernel images are on its ESP");
    };
    Ok(polis_bundle::registers(&read(&format!("{KERNELS}/{name}"))?)?)
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{Seek as _, SeekFrom, Write as _};

    use ed25519_dalek::SigningKey;
    use gpt::mbr::ProtectiveMBR;

    use super::*;
    use crate::testing::World;

    /// A kernel image with this kernel.
    pub(crate) fn kernel(content: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 0x200];
        image[..2].copy_from_slice(b"MZ");
        image[0x3c] = 0x40;
        image[0x40..0x44].copy_from_slice(b"PE\0\0");
        image[0x46] = 1;
        image[0x58..0x5e].copy_from_slice(b".linux");
        let length = u32::try_from(content.len()).unwrap().to_le_bytes();
        image[0x60..0x64].copy_from_slice(&length);
        image[0x68..0x6c].copy_from_slice(&length);
        image[0x6c..0x70].copy_from_slice(&0x200_u32.to_le_bytes());
        image.extend(content);
        image
    }

    /// A bundle with this kernel image.
    fn bundle(kernel: &[u8]) -> Vec<u8> {
        let part = |bytes: &[u8]| serde_json::to_string(&polis_bundle::Part::of(bytes).unwrap());
        let text = format!(
            r#"{{"version":"1.0.0","security_level":1,"architecture":"x86_64","variant":"base",
            "image":"00","from":"0.9.0","etcd":"3.5.16","kernel":{},"system":{}}}"#,
            part(kernel).unwrap(),
            part(&[2; 500]).unwrap(),
        );
        let manifest = serde_json::from_str(&text).unwrap();
        let key = SigningKey::from_bytes(&[3; 32]);
        let mut bundle = Vec::new();
        let parts: [&mut dyn Read; 2] = [&mut &*kernel, &mut &[2; 500][..]];
        polis_bundle::write(&mut bundle, &manifest, &key, parts).unwrap();
        bundle
    }

    /// A disk image whose ESP has these files.
    fn disk(path: &Path, files: &[(&str, &[u8])]) {
        const MIB: u64 = 1 << 20;
        let mut file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(40 * MIB).unwrap();
        ProtectiveMBR::with_lb_size(40 * 2048 - 1).overwrite_lba0(&mut file).unwrap();
        let mut disk = gpt::GptConfig::new()
            .writable(true)
            .logical_block_size(gpt::disk::LogicalBlockSize::Lb512)
            .create_from_device(file, None)
            .unwrap();
        let kind = gpt::partition_types::EFI;
        disk.add_partition("ESP", 34 * MIB, kind, 0, Some(2048)).unwrap();
        let entry = disk.partitions().values().next().unwrap();
        let start = entry.first_lba * 512;
        let mut file = disk.write().unwrap();
        let mut esp = io::Cursor::new(vec![0; 34 * 1024 * 1024]);
        let mut storage = StdIoWrapper::new(esp.clone());
        fatfs::format_volume(&mut storage, fatfs::FormatVolumeOptions::new()).unwrap();
        esp = storage.into_inner();
        esp.set_position(0);
        {
            let options = FsOptions::new().time_provider(NullTimeProvider::new());
            let fat: FileSystem<StdIoWrapper<_>, NullTimeProvider, LossyOemCpConverter> =
                FileSystem::new(&mut esp, options).unwrap();
            for folder in ["EFI", "EFI/BOOT", "EFI/Linux"] {
                fat.root_dir().create_dir(folder).unwrap();
            }
            for (name, content) in files {
                let mut file = fat.root_dir().create_file(name).unwrap();
                fatfs::Write::write_all(&mut file, content).unwrap();
            }
            fat.unmount().unwrap();
        }
        file.seek(SeekFrom::Start(start)).unwrap();
        file.write_all(esp.get_ref()).unwrap();
    }

    #[test]
    fn a_system_has_the_same_registers_in_every_kind_of_file() {
        let world = World::new();
        let image = kernel(b"a kernel");
        let expected = polis_bundle::registers(&image).unwrap();
        let write = |name: &str, content: &[u8]| {
            let path = world.path(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        assert_eq!(registers(&write("kernel.efi", &image)).unwrap(), expected);
        assert_eq!(registers(&write("bundle", &bundle(&image))).unwrap(), expected);
        disk(&world.path("disk"), &[(FIRST, &image)]);
        assert_eq!(registers(&world.path("disk")).unwrap(), expected);
        let loader = b"MZ and no kernel";
        let behind = [(FIRST, &loader[..]), ("EFI/Linux/polis-1.efi", &image)];
        disk(&world.path("loaded"), &behind);
        assert_eq!(registers(&world.path("loaded")).unwrap(), expected);
        let two = [behind[0], behind[1], ("EFI/Linux/polis-2.efi", &image)];
        disk(&world.path("two"), &two);
        for (name, said) in [("two", "2 kernel images"), ("none", "none")] {
            let refused = registers(&world.path(name)).unwrap_err().render();
            assert!(refused.contains(said), "{refused}");
        }
        let mut changed = bundle(&image);
        changed[300] ^= 1;
        for (name, content) in [("changed", &*changed), ("noise", b"noise"), ("cut", &image[..90])]
        {
            let refused = registers(&write(name, content)).unwrap_err().render();
            assert!(refused.contains("help: "), "{refused}");
        }
    }
}
