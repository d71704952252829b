//! The places that were looked at, and the decision between them. Pure.
//!
//! ```text
//! Place, Place, ... --decide--> Loaded, with warnings | Failed, with the place
//! ```
//!
//! Invariants:
//! - The first place that has anything is the one that counts, even if it cannot be used.
//!
//! What this module does not do: look (`places`, `config_disk`, `metadata`).

use super::config_disk::{Found, Seen};
use super::places::{FwCfg, Places};
use super::{BYTES_MAX, Error, Loaded, Source, message, parse};

/// Parameters that cannot be used.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: Error,
    pub(super) source: Source,
    pub(super) tried: Vec<String>,
}

/// The message in a place, if there is one.
pub(super) type Read = Result<Option<Vec<u8>>, Error>;

/// A place that was looked at.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) source: Source,
    /// Its name for people.
    pub(super) place: String,
    pub(super) read: Read,
    /// Something else to say than how many bytes were there.
    pub(super) note: Option<&'static str>,
}

impl Place {
    pub(super) fn new(source: Source, read: Read) -> Self {
        let read = read.and_then(|bytes| bytes.map(message).transpose());
        Self { source, place: source.place(), read, note: None }
    }

    pub(super) fn disk(found: Found) -> Self {
        let looked = Self::new(found.source, found.read);
        let place = format!("{} ({})", looked.place, found.device);
        Self { place, note: found.note, ..looked }
    }

    /// A place that was not looked at, or that has something else, and why.
    pub(super) fn without(
        source: Source,
        place: impl Into<String>,
        note: Option<&'static str>,
    ) -> Self {
        Self { source, place: place.into(), read: Ok(None), note }
    }

    /// Whether the place has something, which may not be of use.
    pub(super) fn has_any(&self) -> bool {
        !matches!(self.read, Ok(None))
    }

    /// The result, in one sentence.
    pub(super) fn result(&self) -> String {
        let place = &self.place;
        match (self.note, &self.read) {
            (Some(note), _) => format!("{place}: {note}"),
            (None, Ok(None)) => format!("{place}: absent"),
            (None, Ok(Some(bytes))) => format!("{place}: {} bytes", bytes.len()),
            (None, Err(Error::TooLarge)) => format!("{place}: more than {BYTES_MAX} bytes"),
            (None, Err(Error::NotBase64)) => format!("{place}: not base64"),
            (None, Err(_)) => format!("{place}: unreadable"),
        }
    }
}

/// The meaning of a driver that did not start.
pub(super) const NO_DRIVER: &str = "the driver of the device did not start";

/// The meaning of disks that hang.
pub(super) const NO_ANSWER: &str = "a disk of this machine does not answer";

/// The meaning of given parameters that do not count any more.
pub(super) const OUTDATED: &str = "given before polis/parameters.pb was changed";

/// Looks at the places that the machine has from its start, the first one first.
pub(super) fn of_machine(places: &Places, fw_cfg: FwCfg) -> Vec<Place> {
    let from_fw_cfg = match fw_cfg {
        FwCfg::Ready => Place::new(Source::FwCfg, places.read(Source::FwCfg)),
        FwCfg::Missing => Place::new(Source::FwCfg, Ok(None)),
        FwCfg::Starting => Place { note: Some(NO_DRIVER), ..Place::new(Source::FwCfg, Ok(None)) },
    };
    let others = [Source::Given, Source::Esp, Source::Smbios];
    let mut others = others.map(|source| Place::new(source, places.read(source)));
    others[0].note = places.is_given_outdated().then_some(OUTDATED);
    std::iter::once(from_fw_cfg).chain(others).collect()
}

/// Looks at what the disks have given.
pub(super) fn of_disks(Seen { found, silent }: Seen) -> Vec<Place> {
    let mut looked: Vec<Place> = found.into_iter().map(Place::disk).collect();
    if !silent.is_empty() {
        let place = format!("disk labelled cidata or config-2, perhaps {}", silent.join(" or "));
        looked.push(Place::without(Source::NoCloud, place, Some(NO_ANSWER)));
    } else if looked.is_empty() {
        looked.push(Place::without(Source::NoCloud, "disk labelled cidata or config-2", None));
    }
    looked
}

/// Takes the first place that has anything, even if that cannot be used, and compares the rest
/// with it.
pub(super) fn decide(looked: Vec<Place>) -> Result<Loaded, Failed> {
    let tried: Vec<String> = looked.iter().map(Place::result).collect();
    let mut warnings: Vec<String> = looked
        .iter()
        .filter(|one| one.note.is_some_and(|note| [NO_DRIVER, NO_ANSWER, OUTDATED].contains(&note)))
        .map(|one| format!("{}; node parameters there are ignored", one.result()))
        .collect();
    let mut looked = looked.into_iter().filter(Place::has_any);
    let Some(used) = looked.next() else {
        return Ok(Loaded { found: None, warning: joined(&warnings), tried });
    };
    let (place, source) = (used.place, used.source);
    for other in looked {
        match (&used.read, &other.read) {
            (Ok(used), Ok(same)) if used == same => warnings
                .push(format!("{place} is used; {} has the same and is ignored", other.place)),
            (Ok(_), Err(error)) => warnings
                .push(format!("{place} is used; {} could not be compared: {error}", other.place)),
            _ => warnings.push(format!(
                "{place} takes precedence over {}, which differs and is ignored",
                other.place
            )),
        }
    }
    match used.read.and_then(|bytes| parse(&bytes.unwrap_or_default())) {
        Ok(parameters) => {
            Ok(Loaded { found: Some((parameters, source)), warning: joined(&warnings), tried })
        }
        Err(error) => Err(Failed { error, source, tried }),
    }
}

fn joined(warnings: &[String]) -> Option<String> {
    (!warnings.is_empty()).then(|| warnings.join("; "))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use polis_base::trapdoor::code;

    /// The least that is valid: a bootstrap with the base point as the owner's key.
    pub(in super::super) fn valid(extra: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x0a, 34, 0x0a, 32, 0x58];
        bytes.extend([0x66; 31]);
        bytes.extend(extra);
        bytes
    }

    /// An empty `network`, which changes the bytes and nothing else.
    pub(in super::super) const EXTRA: &[u8] = &[0x1a, 0];

    #[test]
    fn two_disks_that_differ_are_both_named() {
        let disk = |device: &str, content: Vec<u8>| {
            let (device, read) = (device.to_owned(), Ok(Some(content)));
            Place::disk(Found { source: Source::NoCloud, device, read, note: None })
        };
        let loaded = decide(vec![disk("sdb", valid(&[])), disk("sdc", valid(EXTRA))]).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::NoCloud);
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("(sdb)") && warning.contains("(sdc)"), "{warning}");
    }

    #[test]
    fn disks_that_do_not_answer_are_named_beside_one_that_has_parameters() {
        let disk = Found {
            source: Source::ConfigDrive,
            device: "sr0".to_owned(),
            read: Ok(Some(valid(&[]))),
            note: None,
        };
        let silent = || vec!["sdb".to_owned(), "sdc".to_owned()];
        let loaded = decide(of_disks(Seen { found: vec![disk], silent: silent() })).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::ConfigDrive);
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("perhaps sdb or sdc: a disk of this machine"), "{warning}");
        assert!(warning.ends_with("node parameters there are ignored"), "{warning}");
        let looked = of_disks(Seen { found: Vec::new(), silent: silent() });
        assert!(decide(looked).unwrap().warning.is_some());
        let loaded = decide(of_disks(Seen::default())).unwrap();
        assert_eq!(loaded.tried, ["disk labelled cidata or config-2: absent"]);
        assert_eq!(loaded.warning, None);
    }

    fn three(fw_cfg: Read, esp: Read, smbios: Read) -> Vec<Place> {
        vec![
            Place::new(Source::FwCfg, fw_cfg),
            Place::new(Source::Esp, esp),
            Place::new(Source::Smbios, smbios),
        ]
    }

    #[test]
    fn a_machine_looks_in_fw_cfg_then_on_its_esp_then_in_smbios() {
        let root = tempfile::tempdir().unwrap();
        let esp = polis_base::files::Root::at(root.path()).esp;
        let places = Places::new(&root.path().join("sys"), &esp.parameters, &esp.given_parameters);
        for fw_cfg in [FwCfg::Ready, FwCfg::Missing, FwCfg::Starting] {
            let looked = of_machine(&places, fw_cfg);
            let sources: Vec<_> = looked.into_iter().map(|looked| looked.source).collect();
            assert_eq!(sources, [Source::FwCfg, Source::Given, Source::Esp, Source::Smbios]);
        }
    }

    #[test]
    fn given_parameters_count_until_the_file_on_the_esp_changes() {
        let root = tempfile::tempdir().unwrap();
        let esp = polis_base::files::Root::at(root.path()).esp;
        std::fs::create_dir_all(esp.parameters.path().parent().unwrap()).unwrap();
        let places = Places::new(&root.path().join("sys"), &esp.parameters, &esp.given_parameters);
        let loaded = || decide(of_machine(&places, FwCfg::Missing)).unwrap();
        // The owner of the machine wants others than those that are there.
        std::fs::write(esp.parameters.path(), valid(EXTRA)).unwrap();
        let content = super::super::given::content(&valid(&[]), &places.read(Source::Esp));
        esp.given_parameters.write(&content).unwrap();
        let first = loaded();
        assert_eq!(first.found.unwrap().1, Source::Given);
        let warning = first.warning.unwrap();
        assert!(warning.contains("takes precedence over polis/parameters.pb"), "{warning}");
        // A person writes the file anew.
        std::fs::write(esp.parameters.path(), valid(&[])).unwrap();
        let second = loaded();
        assert_eq!(second.found.unwrap().1, Source::Esp);
        let warning = second.warning.unwrap();
        assert!(warning.contains("given_parameters.pb") && warning.contains(OUTDATED), "{warning}");
        // Without that file, the given ones are all that the machine has.
        std::fs::remove_file(esp.parameters.path()).unwrap();
        assert_eq!(loaded().found.unwrap().1, Source::Given);
        std::fs::write(esp.parameters.path(), valid(&[])).unwrap();
        // One of an earlier version counts in any case.
        esp.given_parameters.write(&valid(&[])).unwrap();
        assert_eq!(loaded().found.unwrap().1, Source::Given);
    }

    #[test]
    fn the_first_place_wins_and_every_difference_is_named() {
        let (ours, theirs) = (Ok(Some(valid(&[]))), || Ok(Some(valid(EXTRA))));
        let loaded = decide(three(ours, theirs(), theirs())).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::FwCfg);
        let warning = loaded.warning.unwrap();
        for place in ["opt/polis/parameters.pb", "SMBIOS", "polis/parameters.pb on the ESP"] {
            assert!(warning.contains(place), "{warning}");
        }
        let loaded = decide(three(Ok(None), Ok(Some(valid(&[]))), theirs())).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::Esp);
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("SMBIOS") && warning.contains("on the ESP"), "{warning}");
        assert!(!warning.contains("fw_cfg"), "{warning}");
    }

    #[test]
    fn the_same_content_at_a_second_place_is_named_in_either_form() {
        // The text of `valid(&[])`.
        let text = b"polis-parameters-v1:CiIKIFhmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZm".to_vec();
        let loaded = decide(three(Ok(Some(valid(&[]))), Ok(None), Ok(Some(text)))).unwrap();
        let warning = loaded.warning.unwrap();
        assert!(warning.contains("opt/polis/parameters.pb"), "{warning}");
        assert!(warning.contains("SMBIOS") && warning.contains("has the same"), "{warning}");
    }

    #[test]
    fn the_esp_is_used_when_the_other_places_have_nothing() {
        let loaded = decide(three(Ok(None), Ok(Some(valid(&[]))), Ok(None))).unwrap();
        assert_eq!(loaded.found.unwrap().1, Source::Esp);
        assert_eq!(loaded.warning, None);
    }

    #[test]
    fn bad_bytes_do_not_fall_back_to_a_later_place() {
        let later = || Ok(Some(valid(&[])));
        let failed = decide(three(Ok(Some(vec![])), Ok(None), later())).unwrap_err();
        assert!(matches!(failed.error, Error::NothingChosen));
        assert_eq!(failed.source, Source::FwCfg);
        let noise = Ok(Some(b"polis-parameters-v1:%%".to_vec()));
        let failed = decide(three(Ok(None), noise, later())).unwrap_err();
        assert!(matches!(failed.error, Error::NotBase64));
        let report = failed.error.report(failed.source, failed.tried);
        assert_eq!(report.code, code::PARAMETERS_MALFORMED);
        assert!(report.next.contains("on the ESP"), "{}", report.next);
    }

    #[test]
    fn a_bad_file_on_the_esp_is_a_warning_while_fw_cfg_is_used() {
        let esp = Err(Error::TooLarge);
        let loaded = decide(three(Ok(Some(valid(&[]))), esp, Ok(None))).unwrap();
        assert!(loaded.warning.unwrap().contains("65536"));
    }

    #[test]
    fn nothing_anywhere_is_not_a_failure_and_says_where_it_looked() {
        let loaded = decide(three(Ok(None), Ok(None), Ok(None))).unwrap();
        assert_eq!(loaded.found, None);
        assert_eq!(loaded.tried.len(), 3);
        let report = crate::parameters::absent(&loaded);
        assert_eq!(report.code, polis_base::trapdoor::code::PARAMETERS_ABSENT);
        assert_eq!(report.tried, loaded.tried);
    }

    #[test]
    fn a_driver_that_never_starts_is_a_warning() {
        let mut looked = three(Ok(None), Ok(Some(valid(&[]))), Ok(None));
        looked[0].note = Some(NO_DRIVER);
        let loaded = decide(looked).unwrap();
        assert!(loaded.warning.unwrap().contains("driver"));
    }
}
