//! The places of the machine itself that may carry the parameters: fetches their bytes.
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

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use polis_base::files::{self, File};
use polis_wire::parameters::{ARMOUR, BYTES_MAX, Error, FW_CFG_ITEM, Source};

use super::{given, smbios};

/// Where the kernel shows things; another folder in tests.
#[derive(Clone, Debug)]
pub(super) struct Places {
    sys: PathBuf,
    esp: File,
    given: File,
}

/// The known state of fw_cfg at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FwCfg {
    /// The machine does not have this place.
    Missing,
    /// The device exists, and its driver is not done with it.
    Starting,
    /// Every item shows.
    Ready,
}

impl Places {
    /// `sys` is where sysfs is mounted, `esp` the file on the ESP, `given` that of maintenance.
    pub(super) fn new(sys: &Path, esp: &File, given: &File) -> Self {
        Self { sys: sys.to_owned(), esp: esp.clone().at_most(BYTES_MAX), given: given.clone() }
    }

    /// Reads the kernel's state of fw_cfg.
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

    /// Reads the content of `source`; `None` if it is empty.
    pub(super) fn read(&self, source: Source) -> Result<Option<Vec<u8>>, Error> {
        match source {
            Source::FwCfg => {
                let item = self.sys.join("firmware/qemu_fw_cfg/by_name").join(FW_CFG_ITEM);
                // The size of `raw` itself is always shown as 0.
                let size = match std::fs::read_to_string(item.join("size")) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    other => other.map_err(Error::Unreadable)?,
                };
                let size: u64 = size.trim().parse().map_err(|_digits| {
                    Error::Unreadable(io::Error::other("the kernel shows no size"))
                })?;
                if size > BYTES_MAX {
                    return Err(Error::TooLarge);
                }
                raw(&item.join("raw")).map(Some)
            }
            Source::Smbios => self.oem_string(),
            // Disks are found by their labels: `config_disk`; `cloud` looks at the rest.
            Source::NoCloud | Source::ConfigDrive | Source::Metadata(_) | Source::Kept => Ok(None),
            Source::Given => {
                let content = read(&self.given)?;
                Ok(content.and_then(|content| given::message(content, &read(&self.esp))))
            }
            Source::Esp => read(&self.esp),
        }
    }

    /// Whether parameters were given in maintenance instead of another file on the ESP than the
    /// one that is there now.
    pub(super) fn is_given_outdated(&self) -> bool {
        let is_there = matches!(self.given.read(), Ok(Some(_)));
        is_there && matches!(self.read(Source::Given), Ok(None))
    }

    /// The OEM string that begins as the text of parameters does. Other strings belong to others.
    fn oem_string(&self) -> Result<Option<Vec<u8>>, Error> {
        let table = match start(&self.sys.join("firmware/dmi/tables/DMI"), smbios::TABLE_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(Error::Unreadable)?,
        };
        let strings = smbios::oem_strings(&table);
        let mut ours = strings.iter().filter(|text| text.starts_with(ARMOUR.as_bytes()));
        let Some(text) = ours.next() else { return Ok(None) };
        if ours.any(|other| other != text) {
            let several = format!("several OEM strings begin with `{ARMOUR}`; allowed is one");
            return Err(Error::Unreadable(io::Error::other(several)));
        }
        if text.len() as u64 > BYTES_MAX { Err(Error::TooLarge) } else { Ok(Some(text.to_vec())) }
    }
}

fn read(file: &File) -> Result<Option<Vec<u8>>, Error> {
    file.read().map_err(|error| match error {
        files::Error::TooLarge { .. } => Error::TooLarge,
        other => Error::Unreadable(other.into_io()),
    })
}

/// Reads the start of a file that may be longer.
fn start(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads an item of any size, even if its stated size was different.
fn raw(path: &Path) -> Result<Vec<u8>, Error> {
    let item = std::fs::File::open(path).map_err(Error::Unreadable)?;
    let mut bytes = Vec::new();
    item.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::Unreadable)?;
    if bytes.len() as u64 > BYTES_MAX { Err(Error::TooLarge) } else { Ok(bytes) }
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
        let esp = polis_base::files::Root::at(root.path()).esp;
        let places = Places::new(&root.path().join("sys"), &esp.parameters, &esp.given_parameters);
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
        assert!(matches!(places.read(Source::Smbios), Ok(None)));
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
        assert!(matches!(places.read(Source::FwCfg), Err(Error::TooLarge)));
    }

    #[test]
    fn a_large_file_is_refused() {
        let (_root, places) = places(&[("esp/polis/parameters.pb", &vec![7; 65_537])]);
        assert!(matches!(places.read(Source::Esp), Err(Error::TooLarge)));
    }

    #[test]
    fn what_is_there_is_read_whole() {
        let (_root, places) =
            places(&[(SIZE, b"3\n"), (RAW, b"abc"), ("esp/polis/parameters.pb", &vec![7; 65_536])]);
        assert_eq!(places.read(Source::FwCfg).unwrap(), Some(b"abc".to_vec()));
        assert_eq!(places.read(Source::Esp).unwrap(), Some(vec![7; 65_536]));
    }

    const DMI: &str = "sys/firmware/dmi/tables/DMI";

    /// A table with these OEM strings.
    fn table(strings: &[&str]) -> Vec<u8> {
        let mut bytes = vec![11, 5, 0, 0, u8::try_from(strings.len()).unwrap()];
        for string in strings {
            bytes.extend([string.as_bytes(), &[0]].concat());
        }
        bytes.push(0);
        bytes
    }

    #[test]
    fn the_oem_string_with_our_first_word_counts_and_others_do_not() {
        let other = "io.systemd.credential:x=y";
        let (_root, none) = places(&[(DMI, &table(&[other]))]);
        assert!(matches!(none.read(Source::Smbios), Ok(None)));
        let ours = "polis-parameters-v1:YWJj";
        let (_root, places) = self::places(&[(DMI, &table(&[other, ours]))]);
        assert_eq!(places.read(Source::Smbios).unwrap(), Some(ours.into()));
    }

    #[test]
    fn two_different_oem_strings_are_refused() {
        let (_root, twice) = places(&[(DMI, &table(&["polis-parameters-v1:YWJj"; 2]))]);
        assert!(matches!(twice.read(Source::Smbios), Ok(Some(_))));
        let strings = ["polis-parameters-v1:YWJj", "polis-parameters-v1:YWJk"];
        let (_root, places) = self::places(&[(DMI, &table(&strings))]);
        let Err(Error::Unreadable(error)) = places.read(Source::Smbios) else { panic!() };
        assert!(error.to_string().contains("allowed is one"), "{error}");
    }

    #[test]
    fn a_large_oem_string_is_refused() {
        let large = format!("polis-parameters-v1:{}", "A".repeat(65_536));
        let (_root, places) = places(&[(DMI, &table(&[&large]))]);
        assert!(matches!(places.read(Source::Smbios), Err(Error::TooLarge)));
    }

    #[test]
    fn a_folder_in_place_of_the_file_is_unreadable() {
        let (_root, places) = places(&[("esp/polis/parameters.pb/file", b"")]);
        assert!(matches!(places.read(Source::Esp), Err(Error::Unreadable(_))));
    }
}
