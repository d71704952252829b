//! The volumes of further disks that node parameters ask for: a name, and the disk.
//!
//! Invariants:
//! - A name is one part of a path, and of a name of the device mapper.
//! - No two volumes have the same name.
//!
//! What this module does not do: look at disks (`volumes` of the machine).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use polis_proto::v1;

use super::error::Error;
use super::install::{Selector, selector};
use super::text::{At as _, Refusal, at_most};

/// Most volumes of a machine.
const VOLUMES_MAX: usize = 16;
/// Longest name: with what the node puts before and behind it, one of the device mapper.
const NAME_MAX: usize = 32;

/// The allowed form of a name.
const NAME_ALLOWED: &str = "1 to 32 of a-z, 0-9 and dash, which neither begins nor ends the name";

/// The name of a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeName(String);

impl VolumeName {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for VolumeName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        let good = (1..=NAME_MAX).contains(&text.len())
            && text.bytes().all(plain)
            && !text.starts_with('-')
            && !text.ends_with('-');
        if good { Ok(Self(text.to_owned())) } else { Err(format!("allowed is {NAME_ALLOWED}")) }
    }
}

/// A further disk for a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskVolume {
    /// The name of the volume.
    pub name: VolumeName,
    /// The disk.
    pub disk: Selector,
}

impl DiskVolume {
    /// Reads the form of a command line, `NAME:KEY=VALUE[,...]`, into the message.
    ///
    /// # Errors
    ///
    /// The text that says which part is wrong, and what is allowed.
    pub fn message(text: &str) -> Result<v1::DiskVolume, String> {
        let (name, disk) = text
            .split_once(':')
            .ok_or_else(|| format!("{text:?} is not NAME:KEY=VALUE[,KEY=VALUE]"))?;
        let named: VolumeName = name.parse().map_err(|allowed| format!("{name:?}: {allowed}"))?;
        Ok(v1::DiskVolume { name: named.0, disk: Some(Selector::message(disk)?) })
    }

    /// Checks the messages.
    pub(super) fn read_all(messages: &[v1::DiskVolume]) -> Result<Vec<Self>, Error> {
        at_most(messages.len(), VOLUMES_MAX, "volumes").at("volumes", 7)?;
        let mut names = BTreeSet::new();
        let read = |(at, message): (usize, &v1::DiskVolume)| {
            let path = format!("volumes[{at}]");
            let refused = |_| Refusal::of(&message.name, NAME_ALLOWED.to_owned());
            let name = message.name.parse::<VolumeName>().map_err(refused);
            let name = name.at(format!("{path}.name"), 1)?;
            if !names.insert(name.clone()) {
                let allowed = "a name that no other volume has";
                return Err(Refusal::described(name, allowed)).at(format!("{path}.name"), 1);
            }
            let disk = selector(message.disk.as_ref(), &format!("{path}.disk"))?;
            Ok(Self { name, disk })
        };
        messages.iter().enumerate().map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(texts: &[&str]) -> Result<Vec<DiskVolume>, String> {
        let messages: Vec<_> =
            texts.iter().map(|text| DiskVolume::message(text).unwrap()).collect();
        DiskVolume::read_all(&messages).map_err(|error| error.to_string())
    }

    #[test]
    fn a_volume_has_a_name_and_a_disk() {
        let volumes = read(&["db:serial=S1", "log-2:transport=nvme,min-size=1T"]).unwrap();
        let shown: Vec<_> =
            volumes.iter().map(|volume| format!("{}:{}", volume.name, volume.disk)).collect();
        assert_eq!(shown, ["db:serial=S1", "log-2:transport=nvme,min-size=1T"]);
    }

    #[test]
    fn a_name_is_one_part_of_a_path() {
        for text in ["", "-a", "a-", "A", "a/b", ".", "a.b", "ä", &"a".repeat(33)] {
            assert!(text.parse::<VolumeName>().is_err(), "{text}");
            let message = v1::DiskVolume {
                name: text.to_owned(),
                disk: Some(Selector::message("serial=1").unwrap()),
            };
            let error = DiskVolume::read_all(&[message]).unwrap_err().to_string();
            assert!(error.contains("volumes[0].name"), "{error}");
        }
        assert!("a".repeat(32).parse::<VolumeName>().is_ok());
    }

    #[test]
    fn a_second_volume_of_a_name_and_one_without_a_disk_are_refused() {
        let error = read(&["db:serial=1", "db:serial=2"]).unwrap_err();
        assert!(error.contains("volumes[1].name is db"), "{error}");
        let message = v1::DiskVolume { name: "db".to_owned(), disk: None };
        let error = DiskVolume::read_all(&[message]).unwrap_err().to_string();
        assert!(error.contains("volumes[0].disk is empty"), "{error}");
        let many: Vec<_> = (0..17).map(|n| format!("v{n}:serial=1")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert!(read(&many).unwrap_err().contains("volumes"));
    }

    #[test]
    fn the_form_of_a_command_line_names_what_is_wrong() {
        assert!(DiskVolume::message("db").unwrap_err().contains("NAME:KEY=VALUE"));
        assert!(DiskVolume::message("D:serial=1").unwrap_err().contains("1 to 32"));
        assert!(DiskVolume::message("db:vendor=1").unwrap_err().contains("the keys are"));
    }
}
