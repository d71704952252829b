//! The choice of the disk of a volume, on files in the place of disks.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use polis_runtime::supervisor::Context;

const SIZE: u64 = 640 << 20;

/// How long a disk may take to answer here: far longer than a file takes.
const PATIENCE: Duration = Duration::from_secs(2);

struct World {
    base: tempfile::TempDir,
    machine: Machine,
}

fn disk(name: &str) -> Disk {
    Disk { name: name.to_owned(), serial: name.to_owned(), size: SIZE, ..Disk::default() }
}

fn selector(serial: &str) -> Selector {
    Selector { serial: Some(serial.to_owned()), ..Selector::default() }
}

impl World {
    /// A machine with these empty disks.
    fn new(disks: &[&str]) -> Self {
        let base = tempfile::tempdir().unwrap();
        for name in disks {
            File::create(base.path().join(name)).unwrap().set_len(SIZE).unwrap();
        }
        let (ctx, _handles) = Context::for_test();
        let machine = Machine {
            sys: base.path().to_owned(),
            dev: base.path().to_owned(),
            medium: "vda".into(),
            disks: Dir::private(base.path().join("disks")),
            record: Record::new(files::File::private(base.path().join("volumes.json"))),
            log: ctx.sink("disk", polis_runtime::logtree::Parser::Tool),
            reads: Reads { tables: Pending::within(PATIENCE), ..Reads::default() },
            steps: Steps::default(),
        };
        Self { base, machine }
    }

    /// Adds a disk that never answers: to open a pipe without a writer waits.
    fn hang(&self, name: &str) {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let mode = Mode::from_raw_mode(0o600);
        mknodat(CWD, self.base.path().join(name), FileType::Fifo, mode, 0).unwrap();
    }

    async fn find(
        &self,
        wanted: Option<&str>,
        disks: &[Disk],
        settled: bool,
    ) -> Result<Option<(PathBuf, Entry)>, Error> {
        let wanted = wanted.map(selector);
        let name = "db".parse().unwrap();
        self.machine.find(&name, wanted.as_ref(), Kind::Encrypted, disks, settled).await
    }

    /// Whether nothing was ever written to this disk.
    fn is_untouched(&self, name: &str) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        self.base.path().join(name).metadata().unwrap().blocks() == 0
    }

    /// The first and the last bytes of this disk.
    fn ends(&self, name: &str) -> Vec<u8> {
        use std::os::unix::fs::FileExt as _;
        let file = File::open(self.base.path().join(name)).unwrap();
        let mut bytes = vec![0; 4 << 20];
        let (head, tail) = bytes.split_at_mut(2 << 20);
        file.read_exact_at(head, 0).unwrap();
        file.read_exact_at(tail, SIZE - tail.len() as u64).unwrap();
        bytes
    }
}

#[tokio::test]
async fn an_empty_disk_is_taken_once_and_found_by_its_identity_later() {
    let world = World::new(&["vdb", "vdc"]);
    let disks = [disk("vdb"), disk("vdc")];
    assert!(world.find(Some("vdc"), &disks, false).await.unwrap().is_none(), "more may appear");
    let (path, entry) = world.find(Some("vdc"), &disks, true).await.unwrap().unwrap();
    assert_eq!(path, world.base.path().join("vdc"));
    // The record has it, and the partition is marked: a power cut now is followed by a boot
    // that finishes, whatever the selector would choose then.
    let (_table, plan) = look(&path, entry.partition).unwrap();
    assert!(matches!(plan, Plan::Finish { .. }), "{plan:?}");
    for wanted in [Some("vdb"), Some("none"), None] {
        let (again, found) = world.find(wanted, &disks, false).await.unwrap().unwrap();
        assert_eq!((again, found), (path.clone(), entry.clone()));
    }
    assert!(world.is_untouched("vdb"), "the other disk has changed");
}

#[tokio::test]
async fn a_whole_volume_is_never_made_again() {
    let world = World::new(&["vdb", "vdc"]);
    let disks = [disk("vdb"), disk("vdc")];
    let (_path, mut entry) = world.find(Some("vdb"), &disks, true).await.unwrap().unwrap();
    entry.whole = true;
    world.machine.record.put(&entry).unwrap();
    // Its disk was pulled, and the selector fits an empty one.
    let error = world.find(Some("vdc"), &disks[1..], true).await.unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    assert!(world.is_untouched("vdc"), "an empty disk was taken");
}

#[test]
fn pods_see_no_volume_before_the_record_has_it_as_whole() {
    let base = tempfile::tempdir().unwrap();
    let (name, content) = ("db".parse().unwrap(), base.path().join(CONTENT));
    let entry = Entry::new(&name, Kind::Insecure);
    // The data partition takes no file.
    let none = Record::new(files::File::private(base.path().join("none/volumes.json")));
    let refused = show(&none, entry.clone(), &content).unwrap_err();
    assert!(matches!(refused, Error::Record(_)), "{refused}");
    assert!(!content.exists(), "an empty disk may be taken for it, and pods write to it");
    let record = Record::new(files::File::private(base.path().join("volumes.json")));
    show(&record, entry, &content).unwrap();
    assert!(content.is_dir() && record.get(&name).unwrap().unwrap().whole);
}

#[test]
fn a_volume_that_no_disk_has_names_the_disks_that_cannot_be_read() {
    let failing = || io::Error::from_raw_os_error(libc::EIO);
    let unread = found(Err(table::Error::Io { operation: "read", source: failing() }));
    assert_eq!(unread, Some(Err(failing().to_string())));
    assert_eq!(found(Err(table::Error::TooSmall(7))), None, "it reads, and has no table");
    let missing = |unread| Error::Missing { partition: Uuid::nil(), unread }.to_string();
    assert!(missing(Vec::new()).ends_with("; put its disk back"));
    let text = missing(vec!["vdb (Input/output error)".to_owned()]);
    assert!(text.ends_with("or check what cannot be read: vdb (Input/output error)"), "{text}");
}

#[tokio::test]
async fn two_disks_with_the_same_volume_are_not_chosen_between() {
    let world = World::new(&["vdb", "vdc"]);
    let disks = [disk("vdb"), disk("vdc")];
    world.find(Some("vdb"), &disks, true).await.unwrap().unwrap();
    std::fs::copy(world.base.path().join("vdb"), world.base.path().join("vdc")).unwrap();
    let error = world.find(Some("vdb"), &disks, true).await.unwrap_err();
    assert!(matches!(&error, Error::Several { disks, .. } if disks.len() == 2), "{error}");
}

#[tokio::test]
async fn a_disk_with_data_or_without_room_is_refused_and_stays_as_it_is() {
    use std::os::unix::fs::FileExt as _;
    let world = World::new(&["vdb"]);
    let file = File::options().write(true).open(world.base.path().join("vdb")).unwrap();
    for at in [0, SIZE - 4] {
        file.write_all_at(b"data", at).unwrap();
        let before = world.ends("vdb");
        let error = world.find(Some("vdb"), &[disk("vdb")], true).await.unwrap_err();
        assert!(matches!(error, Error::Occupied { .. }), "{at}: {error}");
        assert!(world.ends("vdb") == before, "{at}: the disk has changed");
        file.write_all_at(&[0; 4], at).unwrap();
    }
    assert_eq!(world.machine.record.get(&"db".parse().unwrap()).unwrap(), None);
    file.set_len(plan::SIZE_MIN - 1).unwrap();
    let error = world.find(Some("vdb"), &[disk("vdb")], true).await.unwrap_err();
    let too_small = |error: &Error| {
        matches!(error, Error::Refused { source: plan::Refusal::TooSmall { .. }, .. })
    };
    assert!(too_small(&error) && error.to_string().contains("vdb"), "{error}");
}

#[tokio::test]
async fn a_disk_that_the_machine_runs_from_or_that_does_not_fit_is_not_taken() {
    let world = World::new(&["vda", "vdb"]);
    let medium = Disk { medium: true, ..disk("vda") };
    for wanted in ["vda", "none"] {
        let error =
            world.find(Some(wanted), &[medium.clone(), disk("vdb")], true).await.unwrap_err();
        assert!(matches!(error, Error::Select { .. }), "{error}");
        assert!(error.to_string().contains("vdb"), "{error}");
    }
}

#[tokio::test]
async fn a_disk_that_does_not_answer_keeps_only_a_volume_waiting_that_no_other_disk_has() {
    let world = World::new(&["vdc", "vdd"]);
    world.hang("vdb");
    let disks = [disk("vdb"), disk("vdc"), disk("vdd")];
    // A new volume takes the disk that fits, and is found there later.
    let (path, mut entry) = world.find(Some("vdc"), &disks, true).await.unwrap().unwrap();
    assert_eq!(path, world.base.path().join("vdc"));
    let (again, _entry) = world.find(Some("vdc"), &disks, false).await.unwrap().unwrap();
    assert_eq!(again, path);
    // Without its disk, the one that is silent may be it, whether the volume is whole or not.
    let without = [disk("vdb"), disk("vdd")];
    for (whole, wanted) in [(false, Some("vdd")), (true, None)] {
        entry.whole = whole;
        world.machine.record.put(&entry).unwrap();
        let error = world.find(wanted, &without, true).await.unwrap_err();
        assert!(matches!(&error, Error::Silent { disks } if *disks == ["vdb"]), "{error}");
    }
    assert!(world.is_untouched("vdd"), "an empty disk was taken");
}

#[tokio::test]
async fn a_new_volume_waits_for_its_disk_to_answer() {
    let world = World::new(&[]);
    world.hang("vdb");
    let error = world.find(Some("vdb"), &[disk("vdb")], true).await.unwrap_err();
    assert!(matches!(&error, Error::Silent { disks } if *disks == ["vdb"]), "{error}");
    assert_eq!(world.machine.record.get(&"db".parse().unwrap()).unwrap(), None);
}

#[tokio::test]
async fn a_volume_that_is_not_mounted_does_not_stay_open() {
    for (mounted, closes) in [(Ok(7), 0), (Err("a step failed"), 1)] {
        let closed = Cell::new(0);
        let close = || {
            closed.set(closed.get() + 1);
            // That is logged, and changes nothing.
            std::future::ready(Err(io::ErrorKind::ResourceBusy.into()))
        };
        assert_eq!(or_closed(mounted, close).await, mounted);
        assert_eq!(closed.get(), closes);
    }
}

#[test]
fn a_step_that_hangs_holds_no_thread_that_the_node_saves_a_file_with() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.max_blocking_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let world = World::new(&[]);
        // The partition of a disk that never answers.
        world.hang("vdb1");
        let live = Live {
            disk: world.base.path().join("vdb"),
            target: world.machine.target(&"db".parse().unwrap()),
            mount_options: MOUNT_OPTIONS,
            backing: Backing::Partition,
            block_size: 512,
            kind: Kind::Insecure,
            keys: None,
            log: world.machine.log.clone(),
        };
        let table = planned(SIZE, 512, Uuid::nil()).unwrap();
        let hung = timeout(PATIENCE / 10, live.room(&table.partitions[0])).await;
        assert!(hung.is_err(), "the disk has answered");
        assert_eq!(timeout(PATIENCE, blocking(|| 7)).await, Ok(7));
    });
}
