//! The places that may carry node parameters, and how many bytes they may have.

use std::fmt;

use super::platform::Platform;

/// The most bytes that parameters may have, in any place. The kernel reads
/// fw_cfg through sysfs in quadratic time: 64 KiB take 0.15 s, a megabyte 40 s.
pub const BYTES_MAX: u64 = 64 << 10;

/// The name of the fw_cfg item.
pub const FW_CFG_ITEM: &str = "opt/polis/parameters.pb";

/// A place that may carry parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The hypervisor, by fw_cfg.
    FwCfg,
    /// A caller of the machine in maintenance, who had them written to the EFI system partition.
    Given,
    /// The EFI system partition.
    Esp,
    /// The hypervisor or the firmware, by an OEM string of the SMBIOS table.
    Smbios,
    /// A disk with user data for a machine without a cloud, as cloud-init calls it.
    NoCloud,
    /// The disk on which OpenStack gives user data.
    ConfigDrive,
    /// The metadata service of a cloud.
    Metadata(Platform),
    /// The copy of what a metadata service gave to this machine before it had a home.
    Kept,
}

impl Source {
    /// The place, for a person who is to look there.
    #[must_use]
    pub fn place(self) -> String {
        match self {
            Self::FwCfg => format!("fw_cfg item {FW_CFG_ITEM}"),
            Self::Given => "polis/given_parameters.pb on the ESP, from maintenance".to_owned(),
            Self::Esp => "polis/parameters.pb on the ESP".to_owned(),
            Self::Smbios => "SMBIOS OEM string (type 11)".to_owned(),
            Self::NoCloud => "user-data on a disk labelled cidata".to_owned(),
            Self::ConfigDrive => {
                "openstack/latest/user_data on a disk labelled config-2".to_owned()
            }
            Self::Metadata(platform) => format!("user data of {platform} (metadata service)"),
            Self::Kept => "polis/user_data.pb on the ESP, kept from a metadata service".to_owned(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Metadata(platform) => return write!(f, "the metadata service of {platform}"),
            Self::Kept => "the copy on the ESP of the user data of a metadata service",
            Self::FwCfg => "fw_cfg",
            Self::Given => "the ESP, given in maintenance",
            Self::Esp => "the ESP",
            Self::Smbios => "an SMBIOS OEM string",
            Self::NoCloud => "a NoCloud disk",
            Self::ConfigDrive => "a config drive",
        })
    }
}
