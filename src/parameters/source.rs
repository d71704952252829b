//! Fetches the bytes of the parameters from the two places that may carry them.
//!
//! fw_cfg is how a hypervisor hands files to its guest. The kernel shows them in
//! sysfs once a driver is loaded, which `init` does while it goes through the
//! devices; until then an empty folder says nothing. So the question has three
//! answers:
//!
//! ```text
//! driver initialised, or built in ---------------> the item is there or it is not
//! no driver, and no device in the ACPI tables ---> no fw_cfg on this machine
//! no driver, but the device is there ------------> not known yet: ask again
//! ```
//!
//! What this module does not do: load the driver (`boot`) or understand the
//! bytes (`validate`).

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::error::Error;

/// The most bytes that parameters may have. The kernel reads fw_cfg through
/// sysfs in quadratic time: 64 KiB take 0.15 s, a megabyte takes 40 s.
pub const BYTES_MAX: u64 = 64 * 1024;

/// The name of the fw_cfg item.
pub(super) const FW_CFG_ITEM: &str = "opt/polis/parameters.pb";

/// The file on the ESP.
const ESP_FILE: &str = "polis/parameters.pb";

/// A place that may carry parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The hypervisor.
    FwCfg,
    /// The EFI system partition.
    Esp,
}

impl Source {
    /// The place, for a person who is to look there.
    #[must_use]
    pub fn place(self) -> String {
        match self {
            Self::FwCfg => format!("fw_cfg item {FW_CFG_ITEM}"),
            Self::Esp => format!("{ESP_FILE} on the ESP"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FwCfg => "fw_cfg",
            Self::Esp => "the ESP",
        })
    }
}

/// Where the kernel shows things; another folder in tests.
#[derive(Clone, Debug)]
pub(super) struct Places {
    sys: PathBuf,
    esp: PathBuf,
}

/// What is known of fw_cfg at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FwCfg {
    /// This machine has none.
    Missing,
    /// There is one, and its driver is not done with it.
    Starting,
    /// Every item shows.
    Ready,
}

impl Places {
    /// `sys` is where sysfs is mounted, `esp` where the ESP is.
    pub(super) fn new(sys: &Path, esp: &Path) -> Self {
        Self { sys: sys.to_owned(), esp: esp.to_owned() }
    }

    /// Looks at what the kernel knows of fw_cfg.
    pub(super) fn fw_cfg(&self) -> FwCfg {
        // A module is `live` only after its probe of the device, which adds the items, returned.
        let module = self.sys.join("module/qemu_fw_cfg/initstate");
        match std::fs::read(module) {
            Ok(state) if state.trim_ascii() == b"live" => return FwCfg::Ready,
            Ok(_) => return FwCfg::Starting,
            Err(_) => {}
        }
        if self.sys.join("firmware/qemu_fw_cfg").exists() {
            // No module, yet there it is: built in, and older than this process.
            return FwCfg::Ready;
        }
        let devices = std::fs::read_dir(self.sys.join("bus/acpi/devices"));
        let found = devices.is_ok_and(|mut devices| {
            devices.any(|device| {
                device.is_ok_and(|d| d.file_name().as_encoded_bytes().starts_with(b"QEMU0002:"))
            })
        });
        if found { FwCfg::Starting } else { FwCfg::Missing }
    }

    /// Reads what `source` carries; `None` if it carries nothing.
    pub(super) fn read(&self, source: Source) -> Result<Option<Vec<u8>>, Error> {
        match source {
            Source::FwCfg => {
                let item = self.sys.join("firmware/qemu_fw_cfg/by_name").join(FW_CFG_ITEM);
                // The size of `raw` itself is always shown as 0.
                let size = match std::fs::read_to_string(item.join("size")) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    other => other.map_err(Error::Unreadable)?,
                };
                let size = size.trim().parse().map_err(|_digits| {
                    Error::Unreadable(io::Error::other("the kernel shows no size"))
                })?;
                if size > BYTES_MAX {
                    return Err(Error::TooLarge { size });
                }
                bounded(&item.join("raw"))
            }
            Source::Esp => bounded(&self.esp.join(ESP_FILE)),
        }
    }
}

/// Reads a file that may be absent and must not be large.
fn bounded(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let file = match File::open(path) {
        Err(error) if is_absent(&error) => return Ok(None),
        other => other.map_err(Error::Unreadable)?,
    };
    let size = file.metadata().map_err(Error::Unreadable)?.len();
    let mut bytes = Vec::new();
    // One more than allowed: whatever `size` says, more than that is never read.
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::Unreadable)?;
    let read = bytes.len() as u64;
    if read > BYTES_MAX {
        return Err(Error::TooLarge { size: size.max(read) });
    }
    Ok(Some(bytes))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn places(files: &[(&str, &[u8])]) -> (tempfile::TempDir, Places) {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let places = Places::new(&root.path().join("sys"), &root.path().join("esp"));
        (root, places)
    }

    const RAW: &str = "sys/firmware/qemu_fw_cfg/by_name/opt/polis/parameters.pb/raw";
    const SIZE: &str = "sys/firmware/qemu_fw_cfg/by_name/opt/polis/parameters.pb/size";
    const DEVICE: &str = "sys/bus/acpi/devices/QEMU0002:00/path";
    const STATE: &str = "sys/module/qemu_fw_cfg/initstate";

    #[test]
    fn a_machine_without_the_device_has_no_fw_cfg() {
        let (_root, places) = places(&[("sys/bus/acpi/devices/PNP0501:00/path", b"")]);
        assert_eq!(places.fw_cfg(), FwCfg::Missing);
        assert!(matches!(places.read(Source::FwCfg), Ok(None)));
        assert!(matches!(places.read(Source::Esp), Ok(None)));
    }

    #[test]
    fn a_device_without_its_driver_is_waited_for() {
        let (_root, places) = places(&[(DEVICE, b"")]);
        assert_eq!(places.fw_cfg(), FwCfg::Starting);
    }

    #[test]
    fn a_driver_that_still_adds_items_is_waited_for() {
        let (_root, places) = places(&[(DEVICE, b""), (STATE, b"coming\n"), (SIZE, b"1\n")]);
        assert_eq!(places.fw_cfg(), FwCfg::Starting);
    }

    #[test]
    fn a_driver_that_is_done_shows_every_item() {
        let (_root, places) = places(&[(DEVICE, b""), (STATE, b"live\n")]);
        assert_eq!(places.fw_cfg(), FwCfg::Ready);
        let (_root, built_in) = self::places(&[(DEVICE, b""), (SIZE, b"1\n")]);
        assert_eq!(built_in.fw_cfg(), FwCfg::Ready);
    }

    #[test]
    fn a_large_item_is_refused_by_its_size_and_never_read() {
        // `raw` is absent: reading it would be another error.
        let (_root, places) = places(&[(SIZE, b"100000\n")]);
        assert!(matches!(places.read(Source::FwCfg), Err(Error::TooLarge { size: 100_000 })));
    }

    #[test]
    fn a_large_file_is_refused() {
        let (_root, places) = places(&[("esp/polis/parameters.pb", &vec![7; 65_537])]);
        assert!(matches!(places.read(Source::Esp), Err(Error::TooLarge { size: 65_537 })));
    }

    #[test]
    fn what_is_there_is_read_whole() {
        let (_root, places) =
            places(&[(SIZE, b"3\n"), (RAW, b"abc"), ("esp/polis/parameters.pb", &vec![7; 65_536])]);
        assert_eq!(places.read(Source::FwCfg).unwrap(), Some(b"abc".to_vec()));
        assert_eq!(places.read(Source::Esp).unwrap(), Some(vec![7; 65_536]));
    }

    #[test]
    fn a_folder_in_place_of_the_file_is_unreadable() {
        let (_root, places) = places(&[("esp/polis/parameters.pb/file", b"")]);
        assert!(matches!(places.read(Source::Esp), Err(Error::Unreadable(_))));
    }
}
