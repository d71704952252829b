//! The choice of the disk that a system is installed to. Pure.
//!
//! Invariants:
//! - Exactly one disk fits, or the installation is refused with every disk and the reason why
//!   it does not fit.
//! - The disk that the machine was started from is never chosen.

use polis_wire::parameters::Selector;

use super::disks::Disk;

/// Why no disk is chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No disk fits.
    #[error("no disk of this machine fits the selector {selector}")]
    NoDisk {
        /// The selector.
        selector: String,
    },
    /// The only one is that of the running system.
    #[error(
        "the only disk that fits the selector {selector} is {name}, from which this machine was \
         started"
    )]
    Medium {
        /// The selector.
        selector: String,
        /// The kernel's name of the disk.
        name: String,
    },
    /// Several fit.
    #[error("{} disks fit the selector {selector}: {}", names.len(), names.join(", "))]
    Several {
        /// The selector.
        selector: String,
        /// The kernel's names of the disks.
        names: Vec<String>,
    },
    /// The disk takes no writes.
    #[error("the disk {name} is read-only")]
    ReadOnly {
        /// The kernel's name of the disk.
        name: String,
    },
    /// Something is built on the disk.
    #[error("the disk {name} is in use by {}", users.join(", "))]
    InUse {
        /// The kernel's name of the disk.
        name: String,
        /// Its users.
        users: Vec<String>,
    },
    /// The disk hangs.
    #[error("the disk {name} does not answer; check it and its cable, or pull it")]
    Silent {
        /// The kernel's name of the disk.
        name: String,
    },
}

/// Chooses the disk that fits.
pub(crate) fn choose<'a>(disks: &'a [Disk], selector: &Selector) -> Result<&'a Disk, Refusal> {
    let fit = |disk: &&Disk| differences(disk, selector).is_empty();
    let (mediums, fitting): (Vec<_>, Vec<_>) = disks.iter().filter(fit).partition(|d| d.medium);
    let name = |disk: &Disk| disk.name.clone();
    match (&fitting[..], &mediums[..]) {
        ([disk], _) if disk.read_only => Err(Refusal::ReadOnly { name: name(disk) }),
        ([disk], _) if !disk.users.is_empty() => {
            Err(Refusal::InUse { name: name(disk), users: disk.users.clone() })
        }
        ([disk], _) if disk.silent => Err(Refusal::Silent { name: name(disk) }),
        ([disk], _) => Ok(disk),
        ([], []) => Err(Refusal::NoDisk { selector: selector.to_string() }),
        ([], [medium, ..]) => {
            Err(Refusal::Medium { selector: selector.to_string(), name: name(medium) })
        }
        (several, _) => {
            let names = several.iter().map(|disk| name(disk)).collect();
            Err(Refusal::Several { selector: selector.to_string(), names })
        }
    }
}

/// The names of the disks that do not answer, and that may be the one.
pub(crate) fn silent<'a>(disks: &'a [Disk], selector: &Selector) -> Vec<&'a str> {
    // Its serial number is not known.
    let selector = Selector { serial: None, ..selector.clone() };
    let may_be =
        |disk: &&Disk| disk.silent && !disk.medium && differences(disk, &selector).is_empty();
    disks.iter().filter(may_be).map(|disk| disk.name.as_str()).collect()
}

/// A line for each disk: what it is, and why it does not fit.
pub(crate) fn explain(disks: &[Disk], selector: &Selector) -> Vec<String> {
    if disks.is_empty() {
        return vec!["this machine has no disk".to_owned()];
    }
    let explain = |disk: &Disk| {
        let mut reasons = differences(disk, selector);
        if disk.medium {
            reasons.insert(0, "this machine was started from it".to_owned());
        }
        let reasons = if reasons.is_empty() { "fits".to_owned() } else { reasons.join("; ") };
        format!("{disk}: {reasons}")
    };
    disks.iter().map(explain).collect()
}

/// In what a disk differs from the selector.
fn differences(disk: &Disk, selector: &Selector) -> Vec<String> {
    let Selector { transport, model, serial, wwid, path, size_min, size_max } = selector;
    let mut found = Vec::new();
    if let Some(transport) = transport.filter(|wanted| disk.transport != Some(*wanted)) {
        found.push(format!("its transport is not {transport}"));
    }
    for (name, wanted, has) in [
        ("model", model, &disk.model),
        ("serial", serial, &disk.serial),
        ("wwid", wwid, &disk.wwid),
    ] {
        if let Some(wanted) = wanted.as_ref().filter(|wanted| *wanted != has) {
            found.push(match name {
                "serial" if disk.silent => "its serial is not known".to_owned(),
                name => format!("its {name} is not {wanted}"),
            });
        }
    }
    if let Some(path) = path.as_ref().filter(|path| !begins(&disk.path, path)) {
        found.push(format!("its path does not begin with {path}"));
    }
    if let Some(min) = size_min.filter(|min| disk.size < *min) {
        found.push(format!("it has {} bytes, fewer than {min}", disk.size));
    }
    if let Some(max) = size_max.filter(|max| disk.size > *max) {
        found.push(format!("it has {} bytes, more than {max}", disk.size));
    }
    found
}

/// Whether `path` begins with the whole parts of `start`.
fn begins(path: &str, start: &str) -> bool {
    let start = start.trim_matches('/');
    path.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use polis_wire::parameters::Transport;

    use super::*;

    fn disk(name: &str, transport: Transport, size: u64) -> Disk {
        Disk {
            name: name.to_owned(),
            transport: Some(transport),
            path: format!("pci0000:00/0000:00:04.0/{name}"),
            serial: format!("serial-{name}"),
            size,
            ..Disk::default()
        }
    }

    fn disks() -> Vec<Disk> {
        let medium = Disk { medium: true, ..disk("sda", Transport::Usb, 8 << 30) };
        vec![
            disk("nvme0n1", Transport::Nvme, 100 << 30),
            disk("nvme1n1", Transport::Nvme, 200 << 30),
            medium,
        ]
    }

    fn selector(change: impl FnOnce(&mut Selector)) -> Selector {
        let mut selector = Selector::default();
        change(&mut selector);
        selector
    }

    #[test]
    fn the_one_disk_that_fits_every_field_is_chosen() {
        let disks = disks();
        for (wanted, name) in [
            (selector(|it| it.serial = Some("serial-nvme1n1".to_owned())), "nvme1n1"),
            (selector(|it| it.size_max = Some(150 << 30)), "nvme0n1"),
            (
                selector(|it| it.path = Some("/pci0000:00/0000:00:04.0/nvme0n1".to_owned())),
                "nvme0n1",
            ),
        ] {
            assert_eq!(choose(&disks, &wanted).unwrap().name, name, "{wanted}");
        }
    }

    #[test]
    fn several_disks_or_none_are_refused_with_a_reason_for_each() {
        let disks = disks();
        let nvme = selector(|it| it.transport = Some(Transport::Nvme));
        let several = choose(&disks, &nvme).unwrap_err().to_string();
        assert_eq!(several, "2 disks fit the selector transport=nvme: nvme0n1, nvme1n1");
        let large = selector(|it| it.size_min = Some(1 << 40));
        assert!(matches!(choose(&disks, &large), Err(Refusal::NoDisk { .. })));
        let lines = explain(&disks, &large);
        assert!(lines[0].ends_with(": it has 107374182400 bytes, fewer than 1099511627776"));
        assert!(lines[2].contains("this machine was started from it; it has"), "{lines:?}");
        let part = selector(|it| it.path = Some("pci0000:00/0000:00:04".to_owned()));
        assert!(choose(&disks, &part).is_err(), "a part of a name does not fit a path");
        assert_eq!(explain(&[], &nvme), ["this machine has no disk"]);
    }

    #[test]
    fn the_medium_is_never_chosen_and_does_not_count() {
        let disks = disks();
        let usb = selector(|it| it.transport = Some(Transport::Usb));
        assert!(matches!(choose(&disks, &usb), Err(Refusal::Medium { name, .. }) if name == "sda"));
        let small = selector(|it| it.size_max = Some(150 << 30));
        assert_eq!(choose(&disks, &small).unwrap().name, "nvme0n1");
    }

    #[test]
    fn a_disk_that_is_in_use_or_takes_no_writes_is_refused() {
        let mut disks = disks();
        let wanted = selector(|it| it.serial = Some("serial-nvme0n1".to_owned()));
        disks[0].users = vec!["dm-3".to_owned()];
        let refused = choose(&disks, &wanted).unwrap_err().to_string();
        assert_eq!(refused, "the disk nvme0n1 is in use by dm-3");
        disks[0].read_only = true;
        assert!(matches!(choose(&disks, &wanted), Err(Refusal::ReadOnly { .. })));
    }

    #[test]
    fn a_disk_that_does_not_answer_is_not_chosen_and_not_taken_for_another_one() {
        let mut disks = disks();
        disks[0] = Disk { serial: String::new(), silent: true, ..disks[0].clone() };
        let small = selector(|it| it.size_max = Some(150 << 30));
        let refused = choose(&disks, &small).unwrap_err().to_string();
        assert_eq!(refused, "the disk nvme0n1 does not answer; check it and its cable, or pull it");
        let wanted = selector(|it| it.serial = Some("serial-nvme0n1".to_owned()));
        assert!(matches!(choose(&disks, &wanted), Err(Refusal::NoDisk { .. })));
        let line = &explain(&disks, &wanted)[0];
        assert!(line.ends_with(": its serial is not known"), "{line}");
        // Neither another kind of disk nor the medium is waited for.
        disks[2].silent = true;
        for wanted in [&small, &wanted] {
            assert_eq!(silent(&disks, wanted), ["nvme0n1"], "{wanted}");
        }
        let usb = selector(|it| it.transport = Some(Transport::Usb));
        assert_eq!(silent(&disks, &usb), [""; 0]);
        let other = selector(|it| it.serial = Some("serial-nvme1n1".to_owned()));
        assert_eq!(choose(&disks, &other).unwrap().name, "nvme1n1");
    }
}
