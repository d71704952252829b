//! The installation that node parameters ask for: to which disk, and over which data.
//!
//! The selector has one form more than the message, for an operator's command line:
//! `transport=nvme,min-size=100G`.
//!
//! Invariants:
//! - A selector has one field at least: one that every disk fits is refused.
//! - The parameters of the installed node ([`Install::node`]) are the whole message without
//!   the installation, so an installed disk installs nothing.
//!
//! What this module does not do: look at disks (`install` of the machine).

use std::fmt;

use polis_proto::v1;
use prost::Message as _;
use zeroize::Zeroizing;

use super::error::Error;
use super::text::{At as _, Refusal};

/// Bytes of the ID of an installation.
pub const ID_BYTES: usize = 16;

/// Longest text of a selector: the kernel's names of disks are far shorter.
const TEXT_MAX: usize = 128;

/// An installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Install {
    /// The disk.
    pub disk: Selector,
    /// The data that may be lost on it.
    pub wipe: Wipe,
    /// A disk that was installed with the same ID is left alone.
    pub id: [u8; ID_BYTES],
    /// The parameters of the installed node, encoded.
    pub node: Message,
}

/// Encoded node parameters. `Debug` does not show them: they may have a ticket.
#[derive(Clone, PartialEq, Eq)]
pub struct Message(pub Zeroizing<Vec<u8>>);

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Message(…)")
    }
}

/// The data that an installation may overwrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// No data: the disk must be empty.
    Nothing,
    /// Data of any kind but a node's.
    AnyData,
    /// The data of a node.
    Member,
}

impl Wipe {
    /// Its word on a command line; a disk that must be empty has none.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Nothing => None,
            Self::AnyData => Some("any-data"),
            Self::Member => Some("member"),
        }
    }
}

/// How a disk is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// An NVMe controller.
    Nvme,
    /// SATA, or the older ATA.
    Sata,
    /// SAS, a RAID controller, or a hypervisor's SCSI.
    Scsi,
    /// USB.
    Usb,
    /// `virtio-blk`.
    Virtio,
    /// SD cards and eMMC.
    Mmc,
}

impl Transport {
    /// All of them, with their words.
    pub const ALL: [(Self, &'static str); 6] = [
        (Self::Nvme, "nvme"),
        (Self::Sata, "sata"),
        (Self::Scsi, "scsi"),
        (Self::Usb, "usb"),
        (Self::Virtio, "virtio"),
        (Self::Mmc, "mmc"),
    ];

    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(transport, _)| *transport == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A disk by what it is; `None` fits every disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// How it is connected.
    pub transport: Option<Transport>,
    /// Its model.
    pub model: Option<String>,
    /// Its serial number.
    pub serial: Option<String>,
    /// The identifier that its maker gave it.
    pub wwid: Option<String>,
    /// The beginning of the way to it through the buses.
    pub path: Option<String>,
    /// Its least size in bytes.
    pub size_min: Option<u64>,
    /// Its greatest size in bytes.
    pub size_max: Option<u64>,
}

/// As on a command line.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = [
            ("transport", self.transport.map(|transport| transport.to_string())),
            ("model", self.model.clone()),
            ("serial", self.serial.clone()),
            ("wwid", self.wwid.clone()),
            ("path", self.path.clone()),
            ("min-size", self.size_min.map(size)),
            ("max-size", self.size_max.map(size)),
        ];
        let set = texts.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        f.write_str(&set.collect::<Vec<_>>().join(","))
    }
}

/// The units of a size, as the makers of disks count them.
const UNITS: [(&str, u64); 4] =
    [("T", 1_000_000_000_000), ("G", 1_000_000_000), ("M", 1_000_000), ("", 1)];

/// A size with the largest unit that it is a multiple of.
fn size(bytes: u64) -> String {
    let (unit, of) =
        UNITS.into_iter().find(|(_, of)| bytes.is_multiple_of(*of)).unwrap_or(UNITS[3]);
    format!("{}{unit}", bytes / of)
}

/// Reads a size: `100G`, `2T`, `512M`, or bytes.
fn bytes(text: &str) -> Option<u64> {
    let (unit, of) = UNITS.into_iter().find(|(unit, _)| text.ends_with(unit))?;
    let number = text.strip_suffix(unit)?;
    let plain = !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
    plain.then(|| number.parse::<u64>().ok()?.checked_mul(of))?.filter(|bytes| *bytes > 0)
}

/// The keys of a selector on a command line.
const KEYS: &str = "transport, model, serial, wwid, path, min-size, max-size";

impl Selector {
    /// Reads the form of a command line into the message; its values are checked with the
    /// message.
    ///
    /// # Errors
    ///
    /// The text that says which part is wrong, and what is allowed.
    pub fn message(text: &str) -> Result<v1::DiskSelector, String> {
        let mut message = v1::DiskSelector::default();
        let mut seen = Vec::new();
        for part in text.split(',') {
            let (key, value) = part
                .split_once('=')
                .filter(|(_, value)| !value.is_empty())
                .ok_or_else(|| format!("{part:?} is not KEY=VALUE; the keys are {KEYS}"))?;
            if seen.contains(&key) {
                return Err(format!("{key} is there twice; allowed is each key once"));
            }
            seen.push(key);
            let number = || {
                bytes(value).ok_or_else(|| {
                    format!("{key} is {value:?}; allowed is a size such as 500M, 100G or 2T")
                })
            };
            match key {
                "transport" => message.transport = transport(value)?.into(),
                "model" => value.clone_into(&mut message.model),
                "serial" => value.clone_into(&mut message.serial),
                "wwid" => value.clone_into(&mut message.wwid),
                "path" => value.clone_into(&mut message.path),
                "min-size" => message.size_min = number()?,
                "max-size" => message.size_max = number()?,
                _ => return Err(format!("{key:?} is not a key; the keys are {KEYS}")),
            }
        }
        Ok(message)
    }
}

fn transport(value: &str) -> Result<v1::disk_selector::Transport, String> {
    let words = Transport::ALL.map(|(_, name)| name);
    let number = words.iter().position(|name| *name == value).and_then(|at| i32::try_from(at).ok());
    number
        .and_then(|number| v1::disk_selector::Transport::try_from(number + 1).ok())
        .ok_or_else(|| format!("transport is {value:?}; allowed is {}", words.join(", ")))
}

impl Install {
    /// Checks a message; `node` are the parameters without it.
    pub(super) fn read(
        message: &v1::Installation,
        node: &v1::NodeParameters,
    ) -> Result<Self, Error> {
        let disk = selector(message.disk.as_ref(), "install.disk")?;
        let unknown = |value: i32| Refusal::described(value, "a number from 0 to 2");
        let wipe = match v1::installation::Wipe::try_from(message.wipe) {
            Ok(v1::installation::Wipe::Unspecified) => Wipe::Nothing,
            Ok(v1::installation::Wipe::AnyData) => Wipe::AnyData,
            Ok(v1::installation::Wipe::Member) => Wipe::Member,
            Err(_) => return Err(unknown(message.wipe)).at("install.wipe", 2),
        };
        let id = message.id.as_slice().try_into().map_err(|_length| {
            let value = format!("{} bytes", message.id.len());
            Refusal::described(value, format!("{ID_BYTES} random bytes"))
        });
        let node = Message(Zeroizing::new(node.encode_to_vec()));
        Ok(Self { disk, wipe, id: id.at("install.id", 3)?, node })
    }
}

/// Checks a selector; `path` is its position as errors report it.
pub(super) fn selector(message: Option<&v1::DiskSelector>, path: &str) -> Result<Selector, Error> {
    let message = &message.cloned().unwrap_or_default();
    let number = message.transport;
    let transport = match usize::try_from(number) {
        Ok(0) => None,
        Ok(number) if number <= Transport::ALL.len() => Some(Transport::ALL[number - 1].0),
        Ok(_) | Err(_) => {
            let allowed = format!("a number from 0 to {}", Transport::ALL.len());
            return Err(Refusal::described(number, allowed)).at(format!("{path}.transport"), 1);
        }
    };
    let text = |value: &str, key: &str, number| {
        text(value).at(format!("{path}.{key}"), number)?;
        Ok::<_, Error>((!value.is_empty()).then(|| value.to_owned()))
    };
    let size = |bytes: u64| (bytes != 0).then_some(bytes);
    let selector = Selector {
        transport,
        model: text(&message.model, "model", 2)?,
        serial: text(&message.serial, "serial", 3)?,
        wwid: text(&message.wwid, "wwid", 4)?,
        path: text(&message.path, "path", 5)?,
        size_min: size(message.size_min),
        size_max: size(message.size_max),
    };
    if selector == Selector::default() {
        let allowed = "a field of the disk at least: transport, model, serial, wwid, path, size_min \
                       or size_max";
        return Err(Refusal::described("empty", allowed)).at(path, 1);
    }
    if let (Some(min), Some(max)) = (selector.size_min, selector.size_max)
        && min > max
    {
        let allowed = format!("{min} bytes, which is size_min, or more");
        return Err(Refusal::described(format!("{max} bytes"), allowed))
            .at(format!("{path}.size_max"), 7);
    }
    Ok(selector)
}

/// A text that a disk may report. No comma, so that the form of a command line has one
/// reading.
fn text(value: &str) -> Result<(), Refusal> {
    let printable = |c: u8| (b' '..=b'~').contains(&c) && c != b',';
    let good = value.len() <= TEXT_MAX && value.bytes().all(printable) && value.trim() == value;
    if good {
        return Ok(());
    }
    let allowed = format!(
        "at most {TEXT_MAX} printable ASCII characters without a comma and without blanks around \
         them"
    );
    Err(Refusal::of(value, allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> v1::Installation {
        let disk = Some(Selector::message(text).unwrap());
        v1::Installation { disk, wipe: 0, id: vec![7; ID_BYTES] }
    }

    fn read(message: &v1::Installation) -> Result<Install, String> {
        let node = v1::NodeParameters::default();
        Install::read(message, &node).map_err(|error| error.to_string())
    }

    #[test]
    fn a_selector_reads_back_as_it_was_typed() {
        for typed in [
            "transport=nvme",
            "transport=mmc,max-size=2T",
            "model=INTEL SSDPE2KX010T8,serial=BTLJ,wwid=eui.01,path=pci0000:00/0000:00:04.0",
            "min-size=100G,max-size=512M",
            "min-size=4294967297",
        ] {
            match read(&message(typed)) {
                Ok(install) => assert_eq!(install.disk.to_string(), typed),
                Err(error) => {
                    assert!(typed.contains("100G"), "{typed}: {error}");
                    let expected = "install.disk.size_max is 512000000 bytes; allowed is \
                                    100000000000 bytes, which is size_min, or more";
                    assert_eq!(error, expected);
                }
            }
        }
    }

    #[test]
    fn a_wrong_part_of_a_selector_is_named_with_what_is_allowed() {
        for (typed, words) in [
            ("", "is not KEY=VALUE; the keys are transport, model"),
            ("transport", "is not KEY=VALUE"),
            ("serial=", "is not KEY=VALUE"),
            ("vendor=x", "\"vendor\" is not a key; the keys are transport, model"),
            ("transport=fibre", "\"fibre\"; allowed is nvme, sata, scsi, usb, virtio, mmc"),
            ("min-size=100GB", "\"100GB\"; allowed is a size such as"),
            ("min-size=0", "\"0\"; allowed"),
            ("min-size=-1", "\"-1\"; allowed"),
            ("min-size=99999999999T", "allowed"),
            ("serial=a,serial=b", "serial is there twice"),
        ] {
            let error = Selector::message(typed).unwrap_err();
            assert!(error.contains(words), "{typed}: {error}");
        }
    }

    #[test]
    fn a_wrong_field_of_the_message_is_named_with_what_is_allowed() {
        let good = message("transport=usb");
        let disk = |change: fn(&mut v1::DiskSelector)| {
            let mut message = good.clone();
            change(message.disk.as_mut().unwrap());
            message
        };
        for (message, words) in [
            (v1::Installation { disk: None, ..good.clone() }, "install.disk is empty; allowed is"),
            (disk(|disk| *disk = v1::DiskSelector::default()), "install.disk is empty"),
            (disk(|disk| disk.transport = 7), "install.disk.transport is 7; allowed is a number"),
            (disk(|disk| disk.transport = -1), "install.disk.transport is -1"),
            (disk(|disk| disk.serial = "a,b".to_owned()), "install.disk.serial is \"a,b\""),
            (disk(|disk| disk.model = " a".to_owned()), "install.disk.model is \" a\""),
            (disk(|disk| disk.path = "a".repeat(129)), "install.disk.path is"),
            (v1::Installation { wipe: 3, ..good.clone() }, "install.wipe is 3; allowed is"),
            (
                v1::Installation { id: vec![1; 15], ..good.clone() },
                "install.id is 15 bytes; allowed",
            ),
        ] {
            let error = read(&message).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(read(&good).unwrap().disk.transport, Some(Transport::Usb));
    }

    #[test]
    fn the_installed_node_has_the_parameters_without_the_installation() {
        let node = v1::NodeParameters {
            cluster: Some(v1::node_parameters::Cluster::ClusterBootstrap(v1::ClusterBootstrap {
                owner_public_key: ed25519_dalek::SigningKey::from_bytes(&[1; 32])
                    .verifying_key()
                    .to_bytes()
                    .to_vec(),
                ..v1::ClusterBootstrap::default()
            })),
            ..v1::NodeParameters::default()
        };
        let install = Some(message("transport=virtio"));
        let whole = v1::NodeParameters { install, ..node.clone() };
        let read = crate::parameters::parse(&whole.encode_to_vec()).unwrap();
        let install = read.install.unwrap();
        assert_eq!(*install.node.0, node.encode_to_vec());
        assert_eq!(crate::parameters::parse(&install.node.0).unwrap().install, None);
        assert_eq!(format!("{:?}", install.node), "Message(…)");
    }
}
