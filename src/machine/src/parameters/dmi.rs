//! The fields of the SMBIOS table by which a cloud is known, as the kernel shows them.
//!
//! ```text
//! /sys/class/dmi/id/{bios_vendor, sys_vendor, product_name, chassis_asset_tag} --> Dmi
//! ```
//!
//! A field that cannot be read is empty: it names no cloud then, and nothing is asked.
//!
//! What this module does not do: know a cloud (`platform` of `polis-wire`).

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use polis_wire::parameters::Dmi;

/// Bytes of a field that are read. A string of SMBIOS ends with a zero and has no limit; the names
/// of clouds are short.
const FIELD_MAX: u64 = 256;

/// Reads the fields; `sys` is where sysfs is mounted.
pub(super) fn read(sys: &Path) -> Dmi {
    let field = |name: &str| -> String {
        let mut bytes = Vec::new();
        let path = sys.join("class/dmi/id").join(name);
        let read = File::open(path).and_then(|file| file.take(FIELD_MAX).read_to_end(&mut bytes));
        match read {
            Ok(_length) => String::from_utf8_lossy(&bytes).trim().to_owned(),
            Err(_absent) => String::new(),
        }
    };
    Dmi {
        bios_vendor: field("bios_vendor"),
        sys_vendor: field("sys_vendor"),
        product_name: field("product_name"),
        chassis_asset_tag: field("chassis_asset_tag"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_trimmed_and_bounded_and_a_missing_one_is_empty() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(read(sys.path()), Dmi::default());
        let id = sys.path().join("class/dmi/id");
        std::fs::create_dir_all(&id).unwrap();
        std::fs::write(id.join("sys_vendor"), "Hetzner \n").unwrap();
        std::fs::write(id.join("bios_vendor"), b"\xff\n").unwrap();
        std::fs::write(id.join("product_name"), "x".repeat(10_000)).unwrap();
        let dmi = read(sys.path());
        assert_eq!(dmi.sys_vendor, "Hetzner");
        assert_eq!(dmi.bios_vendor, "\u{fffd}");
        assert_eq!(dmi.product_name.len(), 256);
        assert_eq!(dmi.chassis_asset_tag, "");
    }
}
