//! The clouds whose metadata service may have node parameters, and how a machine knows its own.
//!
//! The firmware names the cloud in the SMBIOS table. Nothing is asked of the network to find out:
//! on another network, any neighbour could answer at the address of a metadata service.
//!
//! | cloud | field | value |
//! |---|---|---|
//! | Amazon EC2 | `bios_vendor`, `sys_vendor` | `Amazon EC2` |
//! | Google Compute Engine | `product_name` | `Google Compute Engine` |
//! | Microsoft Azure | `chassis_asset_tag` | `7783-7084-3265-9085-8269-3286-77` |
//! | Oracle Cloud | `chassis_asset_tag` | `OracleCloud.com` |
//! | Hetzner Cloud, `DigitalOcean`, Vultr | `sys_vendor` | `Hetzner`, `DigitalOcean`, `Vultr` |
//! | `OpenStack` | `product_name`, `chassis_asset_tag` | `OpenStack Nova`, `OpenStack Compute` |
//! | the same | `chassis_asset_tag` | `OpenTelekomCloud`, `HUAWEICLOUD` and others |
//!
//! What this module does not do: read the fields, or ask (`parameters` of the node).

use std::fmt;

/// The names of `OpenStack`, as product or asset tag.
const OPENSTACK: [&str; 2] = ["OpenStack Nova", "OpenStack Compute"];

/// Asset tags of clouds of `OpenStack` under names of their own.
const OPENSTACK_TAGS: [&str; 4] =
    ["OpenTelekomCloud", "HUAWEICLOUD", "SAP CCloud VM", "Samsung Cloud Platform"];

/// A cloud with a metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// Amazon EC2, on Nitro instances.
    Ec2,
    /// Google Compute Engine.
    Gce,
    /// Microsoft Azure, second generation.
    Azure,
    /// Oracle Cloud Infrastructure.
    Oracle,
    /// Hetzner Cloud.
    Hetzner,
    /// `DigitalOcean`.
    DigitalOcean,
    /// Vultr.
    Vultr,
    /// A cloud of `OpenStack`.
    OpenStack,
}

impl Platform {
    /// All of them, in the order in which a machine takes the first that its firmware names. The
    /// general one is last: its clouds may have a name of their own, too.
    pub const ALL: [Self; 8] = [
        Self::Ec2,
        Self::Gce,
        Self::Azure,
        Self::Oracle,
        Self::Hetzner,
        Self::DigitalOcean,
        Self::Vultr,
        Self::OpenStack,
    ];

    /// Whether the firmware names this cloud.
    #[must_use]
    pub fn is_named(self, dmi: &Dmi) -> bool {
        let Dmi { bios_vendor, sys_vendor, product_name, chassis_asset_tag } = dmi;
        match self {
            Self::Ec2 => [bios_vendor, sys_vendor].iter().any(|vendor| **vendor == "Amazon EC2"),
            Self::Gce => product_name == "Google Compute Engine",
            // Hyper-V outside of Azure does not have it.
            Self::Azure => chassis_asset_tag == "7783-7084-3265-9085-8269-3286-77",
            Self::Oracle => chassis_asset_tag == "OracleCloud.com",
            Self::Hetzner => sys_vendor == "Hetzner",
            Self::DigitalOcean => sys_vendor == "DigitalOcean",
            Self::Vultr => sys_vendor == "Vultr",
            Self::OpenStack => {
                OPENSTACK.iter().any(|name| product_name == name || chassis_asset_tag == name)
                    || OPENSTACK_TAGS.iter().any(|tag| chassis_asset_tag == tag)
            }
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ec2 => "Amazon EC2",
            Self::Gce => "Google Compute Engine",
            Self::Azure => "Microsoft Azure",
            Self::Oracle => "Oracle Cloud",
            Self::Hetzner => "Hetzner Cloud",
            Self::DigitalOcean => "DigitalOcean",
            Self::Vultr => "Vultr",
            Self::OpenStack => "OpenStack",
        })
    }
}

/// The fields of the SMBIOS table by which clouds are known, as the kernel names them; empty where
/// the firmware has none. Spaces around them do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dmi {
    /// The maker of the firmware (type 0).
    pub bios_vendor: String,
    /// The maker of the machine (type 1).
    pub sys_vendor: String,
    /// The model of the machine (type 1).
    pub product_name: String,
    /// The number of the chassis in somebody's list (type 3).
    pub chassis_asset_tag: String,
}

impl Dmi {
    /// The clouds that the firmware names; the first counts.
    #[must_use]
    pub fn platforms(&self) -> Vec<Platform> {
        Platform::ALL.into_iter().filter(|platform| platform.is_named(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dmi(field: &str, value: &str) -> Dmi {
        let mut dmi = Dmi {
            bios_vendor: "SeaBIOS".to_owned(),
            sys_vendor: "QEMU".to_owned(),
            product_name: "Standard PC (Q35 + ICH9, 2009)".to_owned(),
            chassis_asset_tag: String::new(),
        };
        *match field {
            "bios_vendor" => &mut dmi.bios_vendor,
            "sys_vendor" => &mut dmi.sys_vendor,
            "product_name" => &mut dmi.product_name,
            "chassis_asset_tag" => &mut dmi.chassis_asset_tag,
            other => panic!("{other}"),
        } = value.to_owned();
        dmi
    }

    #[test]
    fn each_cloud_is_known_by_the_fields_of_its_firmware() {
        for (field, value, platform) in [
            ("bios_vendor", "Amazon EC2", Platform::Ec2),
            ("sys_vendor", "Amazon EC2", Platform::Ec2),
            ("product_name", "Google Compute Engine", Platform::Gce),
            ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", Platform::Azure),
            ("chassis_asset_tag", "OracleCloud.com", Platform::Oracle),
            ("sys_vendor", "Hetzner", Platform::Hetzner),
            ("sys_vendor", "DigitalOcean", Platform::DigitalOcean),
            ("sys_vendor", "Vultr", Platform::Vultr),
            ("product_name", "OpenStack Nova", Platform::OpenStack),
            ("product_name", "OpenStack Compute", Platform::OpenStack),
            ("chassis_asset_tag", "OpenStack Nova", Platform::OpenStack),
            ("chassis_asset_tag", "OpenTelekomCloud", Platform::OpenStack),
        ] {
            assert_eq!(dmi(field, value).platforms(), [platform], "{field} {value}");
        }
    }

    #[test]
    fn no_other_machine_is_taken_for_a_cloud() {
        for (field, value) in [
            ("sys_vendor", ""),
            ("sys_vendor", "hetzner"),
            ("sys_vendor", "Hetzner Online"),
            ("sys_vendor", "Microsoft Corporation"),
            ("product_name", "Virtual Machine"),
            ("product_name", "Amazon EC2"),
            ("bios_vendor", "Google"),
            ("chassis_asset_tag", "No Asset Tag"),
        ] {
            assert_eq!(dmi(field, value).platforms(), [], "{field} {value}");
        }
        assert_eq!(Dmi::default().platforms(), []);
    }

    #[test]
    fn where_two_are_named_the_more_special_one_counts() {
        let both = Dmi { sys_vendor: "Vultr".to_owned(), ..dmi("product_name", "OpenStack Nova") };
        assert_eq!(both.platforms(), [Platform::Vultr, Platform::OpenStack]);
    }
}
