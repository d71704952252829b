//! Bundles that are installed to a file in the place of a disk.

use std::path::PathBuf;

use ed25519_dalek::SigningKey;
use polis_bundle::{PartName, Refusal};
use polis_runtime::lines::Lines;
use tempfile::TempDir;
use tokio::sync::mpsc::Receiver;

use super::*;
use crate::storage::slot::tests::disk;
use crate::update::{Door, Purpose};

const KERNEL: &[u8] = &[7; 30_000];
const SYSTEM: &[u8] = &[9; 3 << 20];

pub(crate) fn key() -> SigningKey {
    SigningKey::from_bytes(&[1; 32])
}

/// A bundle of version `version`.
pub(crate) fn bundle(version: &str, key: &SigningKey) -> Vec<u8> {
    let manifest = Manifest {
        version: version.parse().unwrap(),
        security_level: SECURITY_LEVEL,
        architecture: std::env::consts::ARCH.to_owned(),
        variant: "base".to_owned(),
        image: "0123456789abcdef".to_owned(),
        from: Version::new(0, 1, 0),
        etcd: Version::new(3, 5, 16),
        kubernetes: Some(Version::new(1, 38, 0)),
        kernel: Part::of(KERNEL).unwrap(),
        system: Part::of(SYSTEM).unwrap(),
    };
    let mut bundle = Vec::new();
    polis_bundle::write(&mut bundle, &manifest, key, [&mut &*KERNEL, &mut &*SYSTEM]).unwrap();
    bundle
}

/// A machine in a folder, which runs `running` from slot A.
pub(crate) struct Machine {
    folder: TempDir,
    pub(crate) config: Config,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) door: Door,
    lines: Lines,
    said: Receiver<String>,
}

impl Machine {
    pub(crate) fn new(running: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (kernels, efivars) = (path("kernels"), path("efivars"));
        for folder in [&kernels, &efivars] {
            fs::create_dir(folder).unwrap();
        }
        for name in [running, "polis-0.9.0.efi", "other.efi", UNFINISHED] {
            fs::write(kernels.join(name), name).unwrap();
        }
        let text = format!(r"\EFI\Linux\{running}");
        let text = text.encode_utf16().flat_map(u16::to_le_bytes);
        let variable = "StubImageIdentifier-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
        let content: Vec<u8> = [6, 0, 0, 0].into_iter().chain(text).collect();
        fs::write(efivars.join(variable), content).unwrap();
        disk(&path("disk"));
        // The kernel's devices of its partitions.
        fs::write(path("disk2"), "running").unwrap();
        fs::write(path("disk3"), "other").unwrap();
        let tree = polis_base::files::Root::at(folder.path()).data.node;
        fs::create_dir_all(tree.dir.path()).unwrap();
        let config = Config {
            disk: path("disk"),
            slot: "A".to_owned(),
            version: "1.0.0".to_owned(),
            variant: "base".to_owned(),
            kubernetes: None,
            release_key: Some(key().verifying_key()),
            kernels,
            efivars,
            before: tree.trial,
        };
        let status = watch::Sender::default();
        let workload = workload::tests::with(&[("kubelet", ""), ("dns", "no port")]);
        let workload = watch::Sender::new(workload).subscribe();
        let door = Door::new(config.clone(), workload, status.clone());
        let (lines, said) = Lines::channel();
        Self { folder, config, status, door, lines, said }
    }

    pub(crate) fn enter(&self) -> Turn {
        self.door.enter(self.lines.clone()).unwrap()
    }

    fn take(&self, bundle: &[u8]) -> Result<Installed, Error> {
        let progress = watch::Sender::default();
        let entered = self.door.enter(self.lines.clone())?;
        let installed = entered.install(bundle, 0, EtcdTarget::default(), &progress)?;
        let total = (KERNEL.len() + SYSTEM.len()) as u64;
        let end = Progress { phase: Phase::Verify, bytes: total, total };
        assert_eq!(*progress.borrow(), end);
        Ok(installed)
    }

    /// What is in the folder of kernel images.
    pub(crate) fn kernels(&self) -> Vec<String> {
        let names = fs::read_dir(&self.config.kernels).unwrap();
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn device(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The events, without their times.
    fn said(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        while let Ok(line) = self.said.try_recv() {
            said.push(line.split(" t=").next().unwrap().to_owned());
        }
        said
    }

    fn is_as_it_was(&self) -> bool {
        fs::read(self.device("disk2")).unwrap() == b"running"
            && fs::read(self.config.kernels.join("polis-1.0.0.efi")).unwrap() == b"polis-1.0.0.efi"
    }
}

#[test]
fn a_system_is_written_beside_the_one_that_runs_and_gets_one_try() {
    let mut machine = Machine::new("polis-1.0.0.efi");
    let installed = machine.take(&bundle("1.1.0", &key())).unwrap();
    assert_eq!(installed, Installed { version: Version::new(1, 1, 0), slot: "B" });
    assert!(fs::read(machine.device("disk3")).unwrap() == SYSTEM);
    assert!(fs::read(machine.config.kernels.join("polis-1.1.0+1.efi")).unwrap() == KERNEL);
    // Earlier entries of the slot are not offered any more; foreign entries stay.
    assert_eq!(machine.kernels(), ["other.efi", "polis-1.0.0.efi", "polis-1.1.0+1.efi"]);
    assert!(machine.is_as_it_was());
    let other = machine.status.borrow().other.clone().unwrap();
    assert_eq!(other.to_string(), "1.1.0 in slot B, untried");
    let event = |phase: &str, result: &str| {
        format!("POLIS update phase={phase} version=1.1.0 slot=B result={result}")
    };
    let expected = ["started", "done"].map(|result| event("write", result));
    let expected = [expected, ["started", "done"].map(|result| event("verify", result))];
    assert_eq!(machine.said(), expected.concat());
    // And again, with another one: the last counts.
    machine.take(&bundle("1.2.0", &key())).unwrap();
    assert_eq!(machine.kernels(), ["other.efi", "polis-1.0.0.efi", "polis-1.2.0+1.efi"]);
    // The trial knows what was ready before it.
    let before = |version| workload::before(&machine.config.before, &version);
    assert_eq!(before(Version::new(1, 2, 0)), ["kubelet"]);
    assert!(before(Version::new(1, 1, 0)).is_empty());
}

#[test]
fn the_firmware_starts_the_loader_again_if_it_refuses_the_new_system() {
    let machine = Machine::new("polis-1.0.0.efi");
    let vendor = "8be4df61-93ca-11d2-aa0d-00e098032b8c";
    let variable = |name: &str| machine.config.efivars.join(format!("{name}-{vendor}"));
    fs::write(variable("BootCurrent"), [6, 0, 0, 0, 1, 0]).unwrap();
    let whole = bundle("1.1.0", &key());
    machine.take(&whole[..whole.len() - 1]).unwrap_err();
    assert!(!variable("BootNext").exists(), "there is no new system");
    machine.take(&whole).unwrap();
    assert_eq!(fs::read(variable("BootNext")).unwrap(), [7, 0, 0, 0, 1, 0]);
    // Firmware that does not store it is no reason against the system.
    fs::remove_file(variable("BootNext")).unwrap();
    fs::create_dir(variable("BootNext")).unwrap();
    machine.take(&bundle("1.2.0", &key())).unwrap();
}

/// The stub's variable has the name with which the system was started until the next boot.
#[test]
fn a_system_that_was_kept_takes_the_next_update_in_the_same_boot() {
    let machine = Machine::new("polis-1.1.0+0-1.efi");
    let next = bundle("1.2.0", &key());
    assert!(matches!(machine.take(&next), Err(Error::OnTrial)));
    let kernel = |name: &str| machine.config.kernels.join(name);
    fat::rename(&kernel("polis-1.1.0+0-1.efi"), &kernel("polis-1.1.0.efi")).unwrap();
    machine.take(&next).unwrap();
    assert_eq!(machine.kernels(), ["other.efi", "polis-1.1.0.efi", "polis-1.2.0+1.efi"]);
}

#[test]
fn a_machine_that_runs_from_another_disk_removes_no_kernel_image() {
    let machine = Machine::new("polis-1.0.0.efi");
    let kernels = &machine.config.kernels;
    fs::rename(kernels.join("polis-1.0.0.efi"), kernels.join("polis-0.8.0.efi")).unwrap();
    let before = machine.kernels();
    let refused = machine.take(&bundle("1.1.0", &key()));
    assert!(matches!(refused, Err(Error::NoLoader(_))), "{refused:?}");
    assert_eq!(machine.kernels(), before);
}

#[test]
fn a_bundle_that_is_refused_by_its_manifest_changes_nothing() {
    let mut machine = Machine::new("polis-1.0.0.efi");
    let before = machine.kernels();
    let foreign = bundle("1.1.0", &SigningKey::from_bytes(&[2; 32]));
    let mut forged = bundle("1.1.0", &key());
    forged[150] ^= 1;
    let same = bundle("1.0.0", &key());
    let refused = |bundle: &[u8]| match machine.take(bundle) {
        Err(Error::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert!(matches!(refused(&foreign), Refusal::Signer { .. }));
    assert_eq!(refused(&forged), Refusal::Signature);
    assert!(matches!(refused(&same), Refusal::Older { .. }));
    assert!(matches!(refused(&forged[..100]), Refusal::Short { .. }));
    // Its etcd is one minor version newer, and no owner has allowed that.
    let etcd = EtcdTarget { runs: Some("3.4".parse().unwrap()), one_way: false };
    let (newer, progress) = (bundle("1.1.0", &key()), watch::Sender::default());
    let one_way = machine.enter().install(&*newer, 0, etcd, &progress).unwrap_err();
    assert_eq!(one_way.word(), "update-one-way");
    let allowed = EtcdTarget { one_way: true, ..etcd };
    // An API server would skip a minor version of Kubernetes. kubelet alone may.
    let config = Config { kubernetes: Some(Version::new(1, 36, 2)), ..machine.config.clone() };
    let [with, without] = [true, false].map(|api_server| {
        let workload = workload::Workload { api_server, ..machine.door.workload.borrow().clone() };
        let workload = watch::Sender::new(workload).subscribe();
        let door = Door::new(config.clone(), workload, machine.status.clone());
        door.enter(machine.lines.clone()).unwrap()
    });
    let skips = with.install(&*newer, 0, allowed, &progress).unwrap_err();
    assert!(matches!(skips, Error::Refused(Refusal::Kubernetes(_))), "{skips}");
    assert_eq!(machine.kernels(), before);
    assert_eq!(fs::read(machine.device("disk3")).unwrap(), b"other");
    assert!(machine.is_as_it_was() && machine.said().is_empty());
    without.install(&*newer, 0, allowed, &progress).unwrap();
}

#[test]
fn a_system_whose_name_cannot_be_removed_is_still_known() {
    let machine = Machine::new("polis-1.0.0.efi");
    let (version, standing) = (Version::new(0, 9, 0), Standing::Good);
    let other = Other { version, image: None, slot: "B", standing, cause: None };
    machine.status.send_modify(|status| status.other = Some(other.clone()));
    let kept = machine.config.kernels.join("polis-0.9.0.efi");
    fs::remove_file(&kept).unwrap();
    fs::create_dir(&kept).unwrap();
    let error = machine.take(&bundle("1.1.0", &key())).unwrap_err();
    assert!(error.to_string().starts_with("cannot remove"), "{error}");
    assert_eq!(machine.status.borrow().other, Some(other));
    assert_eq!(fs::read(machine.device("disk3")).unwrap(), b"other");
    // It is gone, and so is what was known of it.
    fs::remove_dir(&kept).unwrap();
    let whole = bundle("1.1.0", &key());
    machine.take(&whole[..whole.len() - 1]).unwrap_err();
    assert_eq!(machine.status.borrow().other, None);
}

#[test]
fn a_system_that_did_not_come_whole_is_not_offered_to_the_loader() {
    let mut machine = Machine::new("polis-1.0.0.efi");
    let whole = bundle("1.1.0", &key());
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for bundle in [&flipped[..], &[&whole[..], &[0]].concat()] {
        let error = machine.take(bundle).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
        assert_eq!(machine.kernels(), ["other.efi", "polis-1.0.0.efi"]);
        assert!(machine.is_as_it_was());
        assert_eq!(machine.status.borrow().other, None);
        let said = machine.said();
        let [_, failed] = &said[..] else { panic!("{said:?}") };
        assert!(failed.contains("phase=write") && failed.contains("result=failed cause="));
    }
    machine.take(&whole).unwrap();
}

#[test]
fn a_transfer_that_broke_goes_on_where_it_was_and_its_bytes_are_checked_again() {
    let machine = Machine::new("polis-1.0.0.efi");
    let whole = bundle("1.1.0", &key());
    let progress = watch::Sender::default();
    let left = || machine.enter().unfinished(Purpose::Install).cloned();
    let sends = |from: u64, to: usize| {
        let piece = &whole[usize::try_from(from).unwrap()..to];
        machine.enter().install(piece, from, EtcdTarget::default(), &progress)
    };
    let breaks = |from: u64, to: usize| {
        let error = sends(from, to).unwrap_err();
        assert!(matches!(error, Error::Refused(Refusal::Short { .. })), "{error:?}");
        assert_eq!(machine.kernels(), ["other.efi", "polis-1.0.0.efi", UNFINISHED]);
        assert!(machine.is_as_it_was());
        let left = left().unwrap();
        assert!(left.at() > from && left.at() <= to as u64, "{left:?}");
        assert!(left.is_of(Bundle::open(&*whole, None).unwrap().head()));
        left.at()
    };
    assert!(sends(0, 100).is_err() && left().is_none());
    let first = breaks(0, whole.len() - SYSTEM.len());
    let second = breaks(first, whole.len() - 10);
    // The rest of it alone, at another byte than it begins at, is no bundle.
    assert!(sends(second - 1, whole.len()).is_err() && left().is_some());
    sends(second, whole.len()).unwrap();
    assert!(fs::read(machine.device("disk3")).unwrap() == SYSTEM);
    assert!(fs::read(machine.config.kernels.join("polis-1.1.0+1.efi")).unwrap() == KERNEL);
    assert_eq!(left(), None);
    // Bytes that changed on the disk, or are gone, do not become a system.
    let unfinished = machine.config.kernels.join(UNFINISHED);
    let change = || fs::write(machine.device("disk3"), vec![8; 3 << 20]).unwrap();
    let empty = || fs::write(&unfinished, "").unwrap();
    for spoil in [&change as &dyn Fn(), &empty] {
        let from = breaks(0, whole.len() - 10);
        spoil();
        let error = sends(from, whole.len()).unwrap_err();
        assert_eq!(error.word(), "update-failed", "{error:?}");
        assert_eq!((left(), machine.kernels().len()), (None, 2));
    }
    // Another bundle begins anew.
    breaks(0, whole.len() - 10);
    machine.take(&bundle("1.2.0", &key())).unwrap();
    assert_eq!(machine.kernels(), ["other.efi", "polis-1.0.0.efi", "polis-1.2.0+1.efi"]);
}

#[test]
fn what_reads_back_otherwise_is_not_offered_either() {
    let machine = Machine::new("polis-1.0.0.efi");
    let place = Place {
        slot: Slot::beside("A", &machine.config.disk).unwrap(),
        kernels: &machine.config.kernels,
        running: "polis-1.0.0.efi",
    };
    let progress = watch::Sender::default();
    let bundle = bundle("1.1.0", &key());
    let bundle = Bundle::open(&*bundle, None).unwrap();
    let manifest = bundle.manifest().clone();
    place.clear(false).unwrap();
    place.write(bundle, &mut 0, &progress).unwrap();
    place.verify(&manifest, &progress).unwrap();
    let unfinished = machine.config.kernels.join(UNFINISHED);
    for (part, path) in
        [(PartName::System, machine.device("disk3")), (PartName::Kernel, unfinished)]
    {
        let mut bytes = fs::read(&path).unwrap();
        bytes[1000] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = place.verify(&manifest, &progress).unwrap_err();
        assert!(matches!(&error, Error::Differs(found) if *found == part), "{error:?}");
    }
}

#[test]
fn one_update_at_a_time_and_none_for_an_image_without_keys_or_on_trial() {
    let machine = Machine::new("polis-1.0.0.efi");
    let turn = machine.door.enter(machine.lines.clone()).unwrap();
    let busy = machine.door.clone().enter(machine.lines.clone()).unwrap_err();
    assert!(matches!(busy, Error::Busy));
    drop(turn);
    assert!(machine.door.enter(machine.lines.clone()).is_ok());
    let unsigned = Config { release_key: None, ..machine.config.clone() };
    let unsigned = Door::new(unsigned, machine.door.workload.clone(), machine.status.clone());
    assert!(matches!(unsigned.enter(machine.lines.clone()), Err(Error::NoKey)));
    let trial = Machine::new("polis-1.0.0+0-1.efi");
    let before = trial.kernels();
    let outcome = trial.take(&bundle("1.1.0", &key()));
    assert!(matches!(outcome, Err(Error::OnTrial)), "{outcome:?}");
    assert_eq!(trial.kernels(), before);
}
