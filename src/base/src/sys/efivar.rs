//! Small values in the variables of the firmware: kept on the board, not on a disk.
//!
//! The kernel shows each variable as a file: four bytes of attributes, then the
//! content. It marks unknown variables as immutable, since deleting the wrong one has
//! broken machines; variables of Polis have a vendor of their own.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use zeroize::Zeroizing;

/// The directory where the kernel shows them.
pub const DIRECTORY: &str = "/sys/firmware/efi/efivars";

/// The vendor of these variables: a random number of Polis.
const VENDOR: &str = "7b0f5cf7-8a1c-4f3e-9d0c-5d1f6a2e94b3";

/// The vendor of the variables that the loader and the boot stub set: systemd's boot loader
/// interface.
const LOADER: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";

/// The vendor of the variables that the UEFI specification names.
const UEFI: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Kept without power, and readable by loaders and the running system: a variable
/// that the system may write must have all three.
const ATTRIBUTES: [u8; 4] = 7_u32.to_le_bytes();

/// The bound of one variable; firmware has some ten kilobytes for all.
const SIZE_MAX: u64 = 4096;

/// A variable of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    directory: PathBuf,
    path: PathBuf,
}

impl Variable {
    /// The variable `name` in `directory`, usually [`DIRECTORY`].
    #[must_use]
    pub fn new(directory: &Path, name: &str) -> Self {
        let path = directory.join(format!("{name}-{VENDOR}"));
        Self { directory: directory.to_owned(), path }
    }

    /// Whether the machine has variables at all. Some firmware does not; a kernel that
    /// was started without firmware shows an empty directory, or does not have the
    /// directory.
    #[must_use]
    pub fn possible(&self) -> bool {
        fs::read_dir(&self.directory).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Its content, or `None` if the variable does not exist.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn read(&self) -> io::Result<Option<Vec<u8>>> {
        match fs::metadata(&self.path) {
            Ok(metadata) if metadata.len() > SIZE_MAX => Err(io::ErrorKind::FileTooLarge.into()),
            Ok(_) => {
                let mut content = fs::read(&self.path)?;
                // Without attributes it was deleted, and the kernel still shows its name.
                if content.len() < ATTRIBUTES.len() {
                    return Ok(None);
                }
                Ok(Some(content.split_off(ATTRIBUTES.len())))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces its content, and reads it back: some firmware reports success and loses
    /// the value.
    ///
    /// # Errors
    ///
    /// The error of the kernel, or that the content does not read back.
    pub fn write(&self, content: &[u8]) -> io::Result<()> {
        self.unlock()?;
        // One call is one change of the variable, all or nothing.
        let mut file = File::options().write(true).create(true).truncate(false).open(&self.path)?;
        let whole = Zeroizing::new([&ATTRIBUTES, content].concat());
        let written = file.write(&whole)?;
        drop(file);
        if written != whole.len() || self.read()?.as_deref() != Some(content) {
            return Err(io::Error::other("the firmware did not store the variable"));
        }
        Ok(())
    }

    /// Removes it; a missing variable is not an error.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn remove(&self) -> io::Result<()> {
        self.unlock()?;
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Clears the mark that protects foreign variables.
    fn unlock(&self) -> io::Result<()> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        // Not every file system has such marks: then nothing needs to be cleared.
        let Ok(flags) = ioctl_getflags(&file) else { return Ok(()) };
        if flags.contains(IFlags::IMMUTABLE) {
            ioctl_setflags(&file, flags - IFlags::IMMUTABLE)?;
        }
        Ok(())
    }
}

/// The text of the boot stub with the path of the kernel image that runs.
pub const IMAGE: &str = "StubImageIdentifier";

/// The path of the kernel image that the loader started, as the boot stub in it has set
/// [`IMAGE`] in `directory`: UTF-16, perhaps closed by a NUL. `None` without a boot stub, or where
/// the content is not text.
///
/// # Errors
///
/// The kernel's error.
pub fn image(directory: &Path) -> io::Result<Option<String>> {
    text(directory, IMAGE)
}

/// The text of the loader with the path of the kernel image whose try it took last.
pub const COUNTED: &str = "LoaderBootCountPath";

/// The path of the kernel image whose try the loader took last since the machine was switched on
/// or reset, by [`COUNTED`] in `directory`. Where another one runs, the firmware refused that one:
/// the loader returned, and was started once more.
///
/// # Errors
///
/// The kernel's error.
pub fn counted(directory: &Path) -> io::Result<Option<String>> {
    text(directory, COUNTED)
}

/// Has the firmware begin the next start with the boot option of this one (`BootNext`), and go
/// through its list of options after that, in which that option is again: a loader that returns
/// is started a second time, and the firmware does not come to the next option, which may be a
/// shell that waits for a person.
///
/// False if the variables in `directory` do not say how this start began (`BootCurrent`).
///
/// # Errors
///
/// The kernel's error, or that the firmware did not store the variable.
pub fn repeat_start(directory: &Path) -> io::Result<bool> {
    let variable = |name: &str| uefi(directory, name);
    let Some(option) = variable("BootCurrent").read()? else { return Ok(false) };
    if option.len() != OPTION {
        return Ok(false);
    }
    variable("BootNext").write(&option)?;
    Ok(true)
}

/// Bytes of the number of a boot option.
const OPTION: usize = 2;

/// A partition, as a boot option names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Counted from 1.
    pub number: u32,
    /// Its first block.
    pub first: u64,
    /// Its length in blocks.
    pub blocks: u64,
    /// Its GUID, as it is in the partition table.
    pub id: [u8; 16],
}

/// Has the firmware begin the next start with the program `file` on the partition `place`
/// (`BootNext`), by the boot option `number`, which is not in its list.
///
/// # Errors
///
/// The kernel's error, or that the firmware did not store a variable.
pub fn start_once(
    directory: &Path,
    number: u16,
    description: &str,
    place: &Place,
    file: &str,
) -> io::Result<()> {
    option(directory, number).write(&load_option(description, place, file))?;
    uefi(directory, "BootNext").write(&number.to_le_bytes())
}

/// Removes the boot option `number`; a missing one is not an error.
///
/// # Errors
///
/// The kernel's error.
pub fn forget_option(directory: &Path, number: u16) -> io::Result<()> {
    option(directory, number).remove()
}

fn option(directory: &Path, number: u16) -> Variable {
    uefi(directory, &format!("Boot{number:04X}"))
}

fn uefi(directory: &Path, name: &str) -> Variable {
    Variable { directory: directory.to_owned(), path: directory.join(format!("{name}-{UEFI}")) }
}

/// `EFI_LOAD_OPTION` of the UEFI specification: attributes, length of the path, description, and
/// the path: a partition of a GPT disk, and a file on it.
fn load_option(description: &str, place: &Place, file: &str) -> Vec<u8> {
    const ACTIVE: u32 = 1;
    // Type, subtype and length of each part of the path.
    const PARTITION: [u8; 4] = [4, 1, 42, 0];
    const FILE: [u8; 2] = [4, 4];
    const END: [u8; 4] = [0x7f, 0xff, 4, 0];
    // A table of GPT, and a GUID.
    const FORMAT: [u8; 2] = [2, 2];
    let text = |text: &str| -> Vec<u8> {
        text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect()
    };
    let length = |bytes: usize| u16::try_from(bytes).unwrap_or(u16::MAX).to_le_bytes();
    let file = text(file);
    let path = [
        &PARTITION[..],
        &place.number.to_le_bytes(),
        &place.first.to_le_bytes(),
        &place.blocks.to_le_bytes(),
        &place.id,
        &FORMAT,
        &FILE,
        &length(file.len() + 4),
        &file,
        &END,
    ]
    .concat();
    [&ACTIVE.to_le_bytes()[..], &length(path.len()), &text(description), &path].concat()
}

/// A text of the loader or the boot stub.
fn text(directory: &Path, name: &str) -> io::Result<Option<String>> {
    let variable = Variable {
        directory: directory.to_owned(),
        path: directory.join(format!("{name}-{LOADER}")),
    };
    let Some(content) = variable.read()? else { return Ok(None) };
    let units: Vec<u16> = content
        .chunks_exact(2)
        .map(|unit| u16::from_le_bytes([unit[0], unit[1]]))
        .take_while(|unit| *unit != 0)
        .collect();
    Ok(String::from_utf16(&units).ok().filter(|text| !text.is_empty()))
}

/// Whether the loader counted this start as the one try of the running kernel image, by the
/// variables in `directory`. A loader that could not count it starts the same system again.
#[must_use]
pub fn on_trial(directory: &Path) -> bool {
    image(directory).ok().flatten().is_some_and(|image| image.contains("+0-"))
}

/// Whether the machine may go back from the running kernel image to another one, by the variables
/// in `directory`: its name has a counter, also one that the loader could not count down, or
/// cannot be read.
#[must_use]
pub fn may_be_left(directory: &Path) -> bool {
    match image(directory) {
        Ok(image) => image.is_some_and(|image| image.contains('+')),
        Err(_unknown) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_option_is_started_once() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place { number: 1, first: 2048, blocks: 0x10_0000, id: [7; 16] };
        let start = |place: &Place| start_once(folder.path(), 0x7150, "P", place, r"\A").unwrap();
        start(&Place { first: 4096, ..place });
        start(&place);
        let next = uefi(folder.path(), "BootNext").read().unwrap();
        assert_eq!(next.as_deref(), Some(&[0x50, 0x71][..]));
        let option = uefi(folder.path(), "Boot7150").read().unwrap().unwrap();
        // Active, a path of 42 + 10 + 4 bytes, "P".
        assert_eq!(option[..10], [1, 0, 0, 0, 56, 0, b'P', 0, 0, 0]);
        assert_eq!(option[10..22], [4, 1, 42, 0, 1, 0, 0, 0, 0, 8, 0, 0]);
        assert_eq!(option[34..54], [&[7; 16][..], &[2, 2, 4, 4]].concat());
        assert_eq!(option[54..], [10, 0, b'\\', 0, b'A', 0, 0, 0, 0x7f, 0xff, 4, 0]);
        forget_option(folder.path(), 0x7150).unwrap();
        assert!(uefi(folder.path(), "Boot7150").read().unwrap().is_none());
    }

    #[test]
    fn the_loader_says_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let read = || image(directory.path()).unwrap();
        assert_eq!(read(), None);
        let text = r"\EFI\Linux\polis-1.efi";
        let units = text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
        let content: Vec<u8> = [6, 0, 0, 0].into_iter().chain(units).collect();
        let path = directory.path().join(format!("{IMAGE}-{LOADER}"));
        fs::write(&path, &content).unwrap();
        assert_eq!(read().as_deref(), Some(text));
        assert!(!on_trial(directory.path()) && !may_be_left(directory.path()));
        let tried = r"\EFI\Linux\polis-1+0-1.efi".encode_utf16().flat_map(u16::to_le_bytes);
        fs::write(&path, [6, 0, 0, 0].into_iter().chain(tried).collect::<Vec<u8>>()).unwrap();
        assert!(on_trial(directory.path()) && may_be_left(directory.path()));
        let uncounted = r"\EFI\Linux\polis-1+1.efi".encode_utf16().flat_map(u16::to_le_bytes);
        fs::write(&path, [6, 0, 0, 0].into_iter().chain(uncounted).collect::<Vec<u8>>()).unwrap();
        assert!(!on_trial(directory.path()) && may_be_left(directory.path()));
        // An odd byte, half a surrogate, nothing.
        fs::write(&path, [6, 0, 0, 0, 0x41, 0, 7]).unwrap();
        assert_eq!(read().as_deref(), Some("A"));
        fs::write(&path, [6, 0, 0, 0, 0, 0xd8]).unwrap();
        assert_eq!(read(), None);
        fs::write(&path, [6, 0, 0, 0]).unwrap();
        assert_eq!(read(), None);
    }

    #[test]
    fn the_next_start_begins_as_this_one_did() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(format!("{name}-{UEFI}"));
        assert!(!repeat_start(directory.path()).unwrap());
        for wrong in [&[6, 0, 0, 0, 1][..], &[6, 0, 0, 0, 1, 0, 0]] {
            fs::write(file("BootCurrent"), wrong).unwrap();
            assert!(!repeat_start(directory.path()).unwrap(), "{wrong:?}");
        }
        assert!(!file("BootNext").exists());
        fs::write(file("BootCurrent"), [6, 0, 0, 0, 3, 0]).unwrap();
        assert!(repeat_start(directory.path()).unwrap());
        assert_eq!(fs::read(file("BootNext")).unwrap(), [7, 0, 0, 0, 3, 0]);
        fs::remove_file(file("BootNext")).unwrap();
        fs::create_dir(file("BootNext")).unwrap();
        assert!(repeat_start(directory.path()).is_err());
    }

    #[test]
    fn a_variable_reads_back_and_goes() {
        let directory = tempfile::tempdir().unwrap();
        let variable = Variable::new(directory.path(), "PolisTest");
        assert!(!variable.possible());
        assert_eq!(variable.read().unwrap(), None);
        variable.write(b"first").unwrap();
        assert!(variable.possible());
        assert_eq!(variable.read().unwrap().unwrap(), b"first");
        // Here a file; in the kernel's directory each write replaces all.
        variable.write(b"other").unwrap();
        assert_eq!(variable.read().unwrap().unwrap(), b"other");
        variable.remove().unwrap();
        variable.remove().unwrap();
        assert_eq!(variable.read().unwrap(), None);
    }

    #[test]
    fn a_machine_without_firmware_variables_has_none() {
        let directory = tempfile::tempdir().unwrap();
        let variable = Variable::new(&directory.path().join("efivars"), "PolisTest");
        assert!(!variable.possible());
        assert_eq!(variable.read().unwrap(), None);
        assert!(variable.write(b"x").is_err());
    }
}
