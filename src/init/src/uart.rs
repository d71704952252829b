//! Which serial ports carry the lines of a machine.
//!
//! `ttyS0` always does, if it is there. A management controller often forwards another one
//! (serial over LAN is mostly the second port), and a machine may have no first:
//!
//! ```text
//! ttyS0 ---------------------------------+
//! consoles of the kernel command line ---+--> the ports
//! the console of the firmware (SPCR) ----+
//! the first that is there ---------------+    only without all of these
//! ```
//!
//! The table of the firmware is parsed as foreign bytes: lengths, checksum, and an address that
//! counts only when a port of the kernel has it.
//!
//! What this module does not do: open a port (`port`), or move the kernel's own console, which
//! its command line fixes before anything of this runs.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

/// The port that always carries the lines.
pub const FIRST: &str = "ttyS0";

/// Ports at most; a machine has more only on a card for modems.
const PORTS_MAX: usize = 4;

/// Where the kernel shows the serial console that the firmware names, below `/sys`.
const TABLE: &str = "firmware/acpi/tables/SPCR";
/// With the name of its device, the table is a few hundred bytes.
const TABLE_MAX: u64 = 4096;
/// The shortest one: up to the segment of its PCI device, in revision 1.
const TABLE_MIN: usize = 80;

/// Why a port carries lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It always does.
    Always,
    /// The kernel command line has it as a console.
    Kernel,
    /// The firmware has it as its console.
    Firmware,
    /// It is the first of the machine.
    Only,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Always => "it is the first",
            Self::Kernel => "the kernel command line names it",
            Self::Firmware => "the firmware names it (ACPI SPCR)",
            Self::Only => "the machine has none before it",
        })
    }
}

/// A port that carries lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uart {
    /// Below `/dev`.
    pub name: String,
    /// The speed that the firmware has set, in baud.
    pub baud: Option<u32>,
    /// Why it was chosen.
    pub why: Why,
}

/// Where a port is on its bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Address {
    Port(u64),
    Memory(u64),
}

/// The console that the firmware names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Console {
    address: Address,
    baud: Option<u32>,
}

impl Console {
    /// Reads the table: Serial Port Console Redirection, revisions 1 to 4, by the layout that
    /// Microsoft publishes. `None` unless it is sound and names a port of the kind of `ttyS`.
    fn parse(table: &[u8]) -> Option<Self> {
        let length = u32::from_le_bytes(table.get(4..8)?.try_into().ok()?);
        let table = table.get(..usize::try_from(length).ok()?)?;
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        if table.len() < TABLE_MIN || !table.starts_with(b"SPCR") || sum != 0 {
            return None;
        }
        // Compatible with 16550, a part of it, and with the layout that the address says.
        if ![0x00, 0x01, 0x12].contains(&table[36]) {
            return None;
        }
        let base = u64::from_le_bytes(table.get(44..52)?.try_into().ok()?);
        // Zero: the firmware redirects nothing.
        let address = match (table[40], base) {
            (_, 0) => return None,
            (0, base) => Address::Memory(base),
            (1, base) => Address::Port(base),
            _ => return None,
        };
        let baud = match table[58] {
            3 => Some(9_600),
            4 => Some(19_200),
            6 => Some(57_600),
            7 => Some(115_200),
            _ => None,
        };
        Some(Self { address, baud })
    }
}

/// The ports that carry lines, [`FIRST`] at the beginning even where there is none. `sys` is
/// where sysfs is mounted.
#[must_use]
pub fn ports(sys: &Path) -> Vec<Uart> {
    let present = present(sys);
    let name = |number: u32| format!("ttyS{number}");
    let mut ports = vec![Uart { name: FIRST.to_owned(), baud: None, why: Why::Always }];
    let mut add = |name: String, baud, why| {
        if ports.len() < PORTS_MAX && ports.iter().all(|known| known.name != name) {
            ports.push(Uart { name, baud, why });
        }
    };
    let active = fs::read_to_string(sys.join("class/tty/console/active")).unwrap_or_default();
    for number in active.split_whitespace().filter_map(number) {
        if present.contains_key(&number) {
            add(name(number), None, Why::Kernel);
        }
    }
    if let Some(console) = console(sys)
        && let Some((number, _)) = present.iter().find(|(_, at)| **at == Some(console.address))
    {
        add(name(*number), console.baud, Why::Firmware);
    }
    let there = |port: &Uart| number(&port.name).is_some_and(|port| present.contains_key(&port));
    if !ports.iter().any(there)
        && let Some(first) = present.keys().next()
    {
        ports.push(Uart { name: name(*first), baud: None, why: Why::Only });
    }
    ports
}

/// The number of a serial port of the machine, by its name.
fn number(name: &str) -> Option<u32> {
    let number = name.strip_prefix("ttyS")?;
    // Not `+1`, and no number that no driver gives.
    (number.len() <= 3 && number.bytes().all(|b| b.is_ascii_digit()))
        .then(|| number.parse().ok())?
}

/// The ports with hardware behind them, and where that is.
fn present(sys: &Path) -> BTreeMap<u32, Option<Address>> {
    let entries = fs::read_dir(sys.join("class/tty")).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let number = number(entry.file_name().to_str()?)?;
        let read = |name| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        // The kernel has names for ports that nothing was found at.
        if matches!(read("type").trim(), "" | "0") {
            return None;
        }
        let hexadecimal = |text: String| {
            let digits = text.trim().trim_start_matches("0x").to_owned();
            u64::from_str_radix(&digits, 16).ok().filter(|at| *at != 0)
        };
        let port = hexadecimal(read("port")).map(Address::Port);
        Some((number, port.or_else(|| hexadecimal(read("iomem_base")).map(Address::Memory))))
    });
    found.collect()
}

fn console(sys: &Path) -> Option<Console> {
    let mut table = Vec::new();
    File::open(sys.join(TABLE)).ok()?.take(TABLE_MAX).read_to_end(&mut table).ok()?;
    Console::parse(&table)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A table of the firmware that names a port of 16550's kind.
    pub(super) fn table(space: u8, address: u64, baud: u8) -> Vec<u8> {
        let mut table = vec![0; TABLE_MIN];
        table[..4].copy_from_slice(b"SPCR");
        table[4..8].copy_from_slice(&80_u32.to_le_bytes());
        table[8] = 2;
        table[40] = space;
        table[44..52].copy_from_slice(&address.to_le_bytes());
        table[58] = baud;
        sealed(table)
    }

    /// With its checksum.
    pub(super) fn sealed(mut table: Vec<u8>) -> Vec<u8> {
        table[9] = 0;
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        table[9] = sum.wrapping_neg();
        table
    }

    /// A sysfs with these ports, given as name, type and address, and these consoles.
    fn sys(ports: &[(&str, u32, u64)], active: &str, table: Option<&[u8]>) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, content: &[u8]| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        write("class/tty/console/active", active.as_bytes());
        for (name, kind, address) in ports {
            write(&format!("class/tty/{name}/type"), format!("{kind}\n").as_bytes());
            write(&format!("class/tty/{name}/port"), format!("0x{address:X}\n").as_bytes());
            write(&format!("class/tty/{name}/iomem_base"), b"0x0\n");
        }
        table.into_iter().for_each(|table| write(TABLE, table));
        sys
    }

    fn names(sys: &tempfile::TempDir) -> Vec<(String, Why)> {
        ports(sys.path()).into_iter().map(|port| (port.name, port.why)).collect()
    }

    const TWO: [(&str, u32, u64); 4] =
        [("ttyS0", 4, 0x3f8), ("ttyS1", 4, 0x2f8), ("ttyS2", 0, 0x3e8), ("ttyS3", 0, 0x2e8)];

    fn first() -> (String, Why) {
        (FIRST.to_owned(), Why::Always)
    }

    fn second(why: Why) -> (String, Why) {
        ("ttyS1".to_owned(), why)
    }

    #[test]
    fn a_usual_machine_has_its_lines_on_its_first_port_alone() {
        assert_eq!(names(&sys(&TWO, "tty0 ttyS0\n", None)), [first()]);
        let named = table(1, 0x3f8, 7);
        assert_eq!(names(&sys(&TWO, "tty0 ttyS0\n", Some(&named))), [first()]);
    }

    #[test]
    fn the_console_of_the_firmware_carries_them_too_at_its_speed() {
        let sys = sys(&TWO, "tty0 ttyS0\n", Some(&table(1, 0x2f8, 6)));
        assert_eq!(names(&sys), [first(), second(Why::Firmware)]);
        assert_eq!(ports(sys.path())[1].baud, Some(57_600));
    }

    #[test]
    fn a_console_of_the_command_line_carries_them_too() {
        let sys = sys(&TWO, "ttyS1 tty0 ttyS0 ttyS3 ttyS9 hvc0\n", None);
        assert_eq!(names(&sys), [first(), second(Why::Kernel)]);
    }

    #[test]
    fn a_machine_without_a_first_port_has_them_on_the_one_that_it_has() {
        assert_eq!(names(&sys(&TWO[1..], "tty0\n", None)), [first(), second(Why::Only)]);
        assert_eq!(names(&sys(&[], "", None)), [first()]);
    }

    #[test]
    fn a_table_that_is_damaged_or_names_no_port_of_the_machine_counts_for_nothing() {
        let whole = table(1, 0x2f8, 7);
        let changed = |at: usize, byte: u8| {
            let mut table = whole.clone();
            table[at] = byte;
            table
        };
        let mut other_kind = changed(36, 3);
        other_kind = sealed(other_kind);
        let bad = [
            changed(50, 1),
            sealed(changed(0, b'X')),
            sealed(changed(4, 200)),
            sealed(changed(4, 60)),
            sealed(changed(40, 7)),
            whole[..70].to_vec(),
            other_kind,
            table(1, 0, 7),
            table(0, 0x2f8, 7),
            table(1, 0x9f8, 7),
            Vec::new(),
        ];
        for table in bad {
            assert_eq!(names(&sys(&TWO, "tty0 ttyS0", Some(&table))), [first()], "{table:?}");
        }
    }

    #[test]
    fn a_port_in_memory_is_found_by_its_address() {
        let sys = sys(&TWO[..1], "tty0 ttyS0", Some(&table(0, 0xfe03_4000, 0)));
        let directory = sys.path().join("class/tty/ttyS4");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("type"), "4\n").unwrap();
        fs::write(directory.join("port"), "0x0\n").unwrap();
        fs::write(directory.join("iomem_base"), "0xFE034000\n").unwrap();
        let port = ports(sys.path()).pop().unwrap();
        assert_eq!(port, Uart { name: "ttyS4".to_owned(), baud: None, why: Why::Firmware });
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            noise in prop::collection::vec(any::<u8>(), 0..200), at in 36_usize..80, byte: u8,
        ) {
            let _console = Console::parse(&noise);
            let mut changed = table(1, 0x2f8, 7);
            changed[at] = byte;
            let _console = Console::parse(&sealed(changed));
        }
    }
}

#[cfg(test)]
#[path = "uart_fuzz_tests.rs"]
mod fuzz_tests;
