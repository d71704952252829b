//! The lookup of kernel modules by the modaliases of devices.
//!
//! `modules.alias` of a kernel has 27,000 patterns, and a machine has a hundred
//! modaliases. One pass compares each pattern only with the modaliases of the
//! same bus: that takes milliseconds and needs no index on the disk.
//!
//! What this module does not do: read files or load modules (`modules`).

use std::collections::{BTreeMap, BTreeSet};

/// Finds the modules of each of `wanted` in the text of a `modules.alias` file.
#[must_use]
pub fn find<'a>(file: &str, wanted: &BTreeSet<&'a str>) -> BTreeMap<&'a str, Vec<String>> {
    let mut buckets: BTreeMap<&str, Vec<&'a str>> = BTreeMap::new();
    for alias in wanted {
        buckets.entry(bus(alias)).or_default().push(alias);
    }
    let mut found: BTreeMap<&'a str, Vec<String>> = BTreeMap::new();
    for line in file.lines() {
        let Some(rest) = line.strip_prefix("alias ") else { continue };
        let own = bus(rest);
        let bucket = buckets.get(own);
        // A pattern with a wildcard in its bus (`acpi*:`) may fit any bus that starts so.
        let wild = own.bytes().position(|byte| b"*?[".contains(&byte)).map(|end| &own[..end]);
        // Most lines are of buses that the machine does not have.
        if bucket.is_none() && wild.is_none() {
            continue;
        }
        let Some((pattern, module)) = rest.rsplit_once(' ') else { continue };
        let others = buckets
            .iter()
            .filter(|(bus, _)| wild.is_some_and(|start| **bus != own && bus.starts_with(start)))
            .map(|(_, aliases)| aliases);
        for alias in bucket.into_iter().chain(others).flatten() {
            if matches(pattern.as_bytes(), alias.as_bytes()) {
                found.entry(alias).or_default().push(module.to_owned());
            }
        }
    }
    found
}

/// The part of an alias before the first colon; empty without a colon.
fn bus(alias: &str) -> &str {
    alias.split_once(':').map_or("", |(bus, _rest)| bus)
}

/// Whether `text` fits `pattern`, which may contain `*`, `?` and `[a-z]`.
/// A hyphen and an underscore are the same, as they are in names of modules.
#[must_use]
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // The position to resume at when the last star must take one more character.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&b'*') {
            retry = Some((p + 1, t));
            p += 1;
            continue;
        }
        let step = match (pattern.get(p), text.get(t)) {
            (None, None) => return true,
            (Some(_), Some(letter)) => one(&pattern[p..], *letter),
            (Some(_), None) | (None, Some(_)) => None,
        };
        match (step, retry) {
            (Some(length), _) => {
                p += length;
                t += 1;
            }
            (None, Some((after_star, taken))) if taken < text.len() => {
                retry = Some((after_star, taken + 1));
                (p, t) = (after_star, taken + 1);
            }
            (None, _) => return false,
        }
    }
}

/// How much of the pattern's start `letter` uses up; `None` if it does not fit.
fn one(pattern: &[u8], letter: u8) -> Option<usize> {
    match pattern.first()? {
        b'?' => Some(1),
        b'[' => match pattern.iter().position(|byte| *byte == b']') {
            Some(end) => within(&pattern[1..end], letter).then_some(end + 1),
            // A bracket that is never closed is a letter like any other.
            None => (letter == b'[').then_some(1),
        },
        other => (same(*other) == same(letter)).then_some(1),
    }
}

fn same(letter: u8) -> u8 {
    if letter == b'-' { b'_' } else { letter }
}

/// Whether `letter` is in the set, for example `0-9a`.
fn within(set: &[u8], letter: u8) -> bool {
    let mut rest = set;
    loop {
        rest = match rest {
            [low, b'-', high, rest @ ..] => {
                if (*low..=*high).contains(&letter) {
                    return true;
                }
                rest
            }
            [one, rest @ ..] => {
                if *one == letter {
                    return true;
                }
                rest
            }
            [] => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FILE: &str = "# Aliases extracted from modules themselves.\n\
        alias virtio:d00000002v* virtio_blk\n\
        alias virtio:d00000001v* virtio_net\n\
        alias acpi*:QEMU0002:* qemu_fw_cfg\n\
        alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio_pci\n\
        alias pci:v*d*sv*sd*bc01sc06i01* ahci\n\
        alias fs-xfs xfs\n\
        alias i8042 no\n\
        alias usb:v0B95p772[A-B]d*dc*dsc*dp*ic*isc*ip*in* asix\n";

    #[test]
    fn each_device_finds_its_module_and_others_find_none() {
        let wanted = BTreeSet::from([
            "virtio:d00000002v00001AF4",
            "acpi:QEMU0002:",
            "pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01",
            "fs_xfs",
            "usb:v0B95p772Bd0001dc00dsc00dp00icFFiscFFip00in00",
            "platform:none",
        ]);
        let found = find(FILE, &wanted);
        let modules: Vec<&str> = found.values().flatten().map(String::as_str).collect();
        assert_eq!(modules, ["qemu_fw_cfg", "xfs", "ahci", "asix", "virtio_blk"]);
        assert!(!found.contains_key("platform:none"));
    }

    #[test]
    fn stars_take_as_little_or_as_much_as_they_must() {
        assert!(matches(b"a*b*c", b"axxbxxbc"));
        assert!(matches(b"*", b""));
        assert!(matches(b"a*", b"a"));
        assert!(!matches(b"a*b", b"axxc"));
        assert!(!matches(b"a", b"ab"));
        assert!(matches(b"acpi*:PNP0C0C:*", b"acpi:LNXPWRBN:PNP0C0C:"));
    }

    #[test]
    fn a_bracket_that_is_never_closed_is_a_letter() {
        assert!(matches(b"a[b", b"a[b"));
        assert!(!matches(b"a[b", b"ab"));
    }

    proptest! {
        #[test]
        fn every_text_without_wildcards_fits_itself_and_a_star(text in "[a-z0-9:_-]{0,30}") {
            prop_assert!(matches(text.as_bytes(), text.as_bytes()));
            prop_assert!(matches(b"*", text.as_bytes()));
            let longer = format!("{text}*");
            prop_assert!(matches(longer.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn arbitrary_bytes_never_panic(pattern in "[a\\[\\]*?-]{0,12}", text in "[a\\[-]{0,20}") {
            let _fits = matches(pattern.as_bytes(), text.as_bytes());
        }
    }
}
