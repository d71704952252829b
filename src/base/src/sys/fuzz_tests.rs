//! Fuzz targets of what the kernel and the firmware hand over: log records, announcements of
//! devices and of routers, ARP messages, variables of the firmware, the kernel command line.

use std::cell::RefCell;
use std::fs;

use polis_fuzz::{Accepted, Target};

use super::{arp, command_line, efivar, kmsg, router, uevent};

#[test]
fn kernel_log_records() {
    let samples = [
        &b"3,412,1234567,-;virtio_blk virtio1: [vda] 1024\n SUBSYSTEM=virtio\n DEVICE=+v"[..],
        b"30,18446744073709551615,18446744073709551615,c;text",
    ];
    Target::new("base.kmsg").samples(samples).run(|input| {
        let Some(record) = kmsg::Record::parse(input) else { return Accepted::No };
        assert!(record.level < 8 && !record.text.contains('\n'));
        Accepted::Yes
    });
}

#[test]
fn announcements_of_devices() {
    let samples =
        [&b"add@/devices/virtio0\0ACTION=add\0SUBSYSTEM=virtio\0MODALIAS=virtio:d1v2\0"[..]];
    Target::new("base.uevent")
        .samples(samples)
        .run(|input| uevent::Event::parse(input).is_some().into());
}

#[test]
fn announcements_of_routers() {
    Target::new("base.router").samples([router::tests::sample()]).run(|input| {
        let found = router::NameServers::parse(input);
        assert!(found.iter().all(|found| !found.servers.is_empty()));
        (!found.is_empty()).into()
    });
}

#[test]
fn messages_of_arp() {
    Target::new("base.arp").samples([arp::tests::announcement()]).run(|input| {
        let claim = arp::Claim::parse(7, input);
        assert!(claim.is_none_or(|claim| !claim.address.is_unspecified()));
        claim.is_some().into()
    });
}

#[test]
fn variables_of_the_loader() {
    /// The vendor of `efivar::image`.
    const VENDOR: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("{}-{VENDOR}", efivar::IMAGE));
    let units = "\\EFI\\Linux\\polis.efi\0".encode_utf16().flat_map(u16::to_le_bytes);
    let variable: Vec<u8> = [6, 0, 0, 0].into_iter().chain(units).collect();
    // A write is a system call: fewer inputs than elsewhere, in a second.
    let file = RefCell::new(path);
    Target::new("base.efivar").samples([variable]).length_max(512).run(|input| {
        fs::write(&*file.borrow(), input).unwrap();
        let text = efivar::image(folder.path()).unwrap();
        text.is_some_and(|text| !text.is_empty() && !text.contains('\0')).into()
    });
}

#[test]
fn words_of_the_kernel_command_line() {
    let line = "root=/dev/vda2 polis.verity=00ff quiet polis.verity=11 polis.console=off";
    Target::new("base.command_line").samples([line]).run(|input| {
        let line = String::from_utf8_lossy(input);
        let found = command_line::value(&line, "polis.verity");
        found.is_some_and(|value| !value.contains(' ')).into()
    });
}
