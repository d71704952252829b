//! What a machine in maintenance tells of itself: its disks, its logs, its parameters.
//!
//! Everything here blocks on files; `serve` calls it where that is allowed.

use std::fs;
use std::path::Path;

use polis_base::files::{Esp, File};
use polis_base::serial::{Severity, log_line};
use polis_base::sys::kmsg;
use polis_proto::v1;

/// Bytes of a sector in `/sys/block/*/size`.
const SECTOR: u64 = 512;
/// Bytes of text that a device may report of itself.
const TEXT_MAX: usize = 128;

/// The disks of this machine; `system` is the device that it was started from.
pub(super) fn disks(sys: &Path, system: &Path) -> Vec<v1::MachineDisk> {
    let Ok(folder) = fs::read_dir(sys.join("block")) else { return Vec::new() };
    let names = folder.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut disks: Vec<_> = names
        .filter_map(|name| {
            let block = sys.join("block").join(&name);
            // Loop devices, memory and mapped devices have no device below them.
            block.join("device").exists().then(|| v1::MachineDisk {
                bytes: text(&block.join("size")).parse().map_or(0, |size: u64| size * SECTOR),
                model: text(&block.join("device/model")),
                serial: [block.join("device/serial"), block.join("serial")]
                    .iter()
                    .map(|path| text(path))
                    .find(|serial| !serial.is_empty())
                    .unwrap_or_default(),
                system: system.file_name().is_some_and(|own| own == name.as_str()),
                name,
            })
        })
        .collect();
    disks.sort_by(|a, b| a.name.cmp(&b.name));
    disks
}

/// The printable part of a file of sysfs; empty if it cannot be read.
fn text(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let printed = text.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(TEXT_MAX);
    printed.collect::<String>().trim().to_owned()
}

/// Whether this machine is a member of a cluster, or was: also where that cannot be read.
pub(super) fn has_home(esp: &Esp) -> bool {
    !matches!(esp.sealed_configuration.read(), Ok(None))
}

/// The kernel's log, as far as its memory has it.
pub(super) fn kernel_log() -> String {
    let mut text = String::new();
    let Ok(mut reader) = kmsg::Reader::open(kmsg::From::Start) else { return text };
    while let Ok(Some(record)) = reader.next_record() {
        let severity = match record.level {
            0..=2 => Severity::Fatal,
            3 => Severity::Error,
            4 => Severity::Warning,
            5 | 6 => Severity::Info,
            _ => Severity::Debug,
        };
        text.push_str(&log_line(record.time, severity, "kernel", &record.text));
        text.push('\n');
    }
    text
}

/// The reports of failures on the ESP, the oldest first.
pub(super) fn reports(reports: &[File]) -> String {
    let read = reports.iter().filter_map(|report| {
        let text = String::from_utf8_lossy(&report.read().ok()??).into_owned();
        let number = text.lines().find_map(|line| line.strip_prefix("number: ")?.parse().ok());
        Some((number.unwrap_or(0_u64), text))
    });
    let mut read: Vec<_> = read.collect();
    read.sort();
    read.into_iter().map(|(_, text)| text + "\n").collect()
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;

    use super::*;

    #[test]
    fn disks_are_those_with_a_device_below_them() {
        let sys = tempfile::tempdir().unwrap();
        let block = sys.path().join("block");
        for (file, content) in [
            ("vda/size", "2048\n"),
            ("vda/serial", "polis\0"),
            ("vda/device/x", ""),
            ("sda/size", "4096\n"),
            ("sda/device/model", "Ultra \u{1b}[2J\n"),
            ("loop0/size", "8\n"),
        ] {
            let path = block.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let disks = disks(sys.path(), Path::new("/dev/vda"));
        let names: Vec<_> = disks.iter().map(|disk| (&*disk.name, disk.bytes)).collect();
        assert_eq!(names, [("sda", 2 << 20), ("vda", 1 << 20)]);
        assert_eq!((&*disks[0].model, disks[0].system), ("Ultra [2J", false));
        assert_eq!((&*disks[1].serial, disks[1].system), ("polis", true));
    }

    #[test]
    fn reports_come_in_the_order_of_their_numbers() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.create().unwrap();
        let folder = root.esp.guru.reports[0].path().parent().unwrap();
        fs::create_dir_all(folder).unwrap();
        for (place, number) in [(0, 8), (1, 1), (7, 7)] {
            let text = format!("number: {number}\nbody");
            root.esp.guru.reports[place].write(text.as_bytes()).unwrap();
        }
        let text = reports(&root.esp.guru.reports);
        let numbers: Vec<_> = text.lines().filter(|line| line.starts_with("number")).collect();
        assert_eq!(numbers, ["number: 1", "number: 7", "number: 8"]);
    }

    #[test]
    fn a_sealed_configuration_is_a_home_even_if_it_is_damaged() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        root.create().unwrap();
        assert!(!has_home(&root.esp));
        root.esp.sealed_configuration.write(b"sealed").unwrap();
        assert!(has_home(&root.esp));
        fs::write(root.esp.sealed_configuration.path(), b"damaged").unwrap();
        assert!(has_home(&root.esp));
    }
}
