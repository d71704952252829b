//! The service on a real disk: a loop device, `mkfs.xfs`, the kernel's XFS.
//!
//! Needs root and the programs; where one is missing, the test prints that and ends.
//! The stories in QEMU run the same code on every machine.

use std::path::Path;
use std::time::Duration;

use rustix::mount::UnmountFlags;

use super::super::table::tests::{MIB, image_at};
use super::super::table::{self, Partition};
use super::*;
use crate::storage::Make;
use polis_runtime::supervisor::testing::Handles;
use polis_runtime::sys::process::Command;

/// Longer than any test may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A loop device with everything that is mounted from it; gone at the end.
struct Disk {
    directory: tempfile::TempDir,
    device: PathBuf,
}

impl Disk {
    /// `None` where this machine cannot have one.
    async fn new(size: u64) -> Option<Self> {
        let needed = ["/usr/sbin/mkfs.xfs", "/usr/sbin/losetup", "/dev/loop-control"];
        let missing = needed.iter().find(|path| !Path::new(path).exists());
        if missing.is_some() || !rustix::process::geteuid().is_root() {
            println!("not tested: needs root and {needed:?}");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        image_at(&directory.path().join("disk.img"), 64 * MIB, size);
        let mut disk = Self { directory, device: PathBuf::new() };
        match disk.attach().await {
            Ok(()) => Some(disk),
            Err(error) => {
                println!("not tested: {error}");
                None
            }
        }
    }

    async fn attach(&mut self) -> Result<(), polis_runtime::sys::process::Error> {
        let image = self.directory.path().join("disk.img");
        let attach =
            Command::new("/usr/sbin/losetup").args(["--find", "--show", "--partscan"]).arg(image);
        let output = attach.run().await?;
        self.device = PathBuf::from(String::from_utf8(output).unwrap().trim());
        Ok(())
    }

    /// A machine that is switched off, with a larger disk when it is on again.
    async fn enlarge(&mut self, size: u64) {
        let detach = Command::new("/usr/sbin/losetup").arg("--detach").arg(&self.device);
        detach.run().await.unwrap();
        let image =
            std::fs::File::options().write(true).open(self.directory.path().join("disk.img"));
        image.unwrap().set_len(size).unwrap();
        self.attach().await.unwrap();
    }

    fn root(&self) -> Root {
        Root::at(self.directory.path())
    }

    /// Starts the service; `wanted` carries the requests of the cluster manager.
    fn boot(&self, wanted: Option<Wanted>) -> Boot {
        let root = self.root();
        for mount_point in [&root.esp.mount, &root.data.mount, &root.ephemeral.mount] {
            mount_point.create().unwrap();
        }
        let status = watch::Sender::new(Status::Starting);
        let seen = status.subscribe();
        let wanted = watch::Sender::new(wanted);
        let config = Config {
            disk: self.device.clone(),
            root,
            // The kernel of a build machine may have XFS without quotas.
            mount_options: "",
        };
        let service = Service {
            config,
            wanted: wanted.subscribe(),
            status,
            health: watch::Sender::default(),
            backing: watch::Sender::new(Some(Backing::Partition)).subscribe(),
        };
        let (ctx, handles) = Context::for_test();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(service.run(ctx));
        Boot { status: seen, wanted, handles, tasks }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A process that still uses it does so only until the test ends.
        let mounted = self.root().data.mount;
        let _unmounted = rustix::mount::unmount(mounted.path(), UnmountFlags::DETACH);
        #[expect(clippy::disallowed_methods, reason = "nothing can be awaited here")]
        let mut detach = std::process::Command::new("/usr/sbin/losetup");
        let _detached = detach.arg("--detach").arg(&self.device).status();
    }
}

struct Boot {
    status: watch::Receiver<Status>,
    wanted: watch::Sender<Option<Wanted>>,
    handles: Handles,
    tasks: tokio::task::JoinSet<Result<(), RunError>>,
}

impl Boot {
    async fn until<T>(&mut self, pick: impl FnMut(&Status) -> Option<T>) -> T {
        let found = event::until(&mut self.status, "storage", pick);
        let found = tokio::time::timeout(PATIENCE, found).await;
        match found {
            Ok(found) => found.unwrap(),
            Err(_elapsed) => panic!("{:?}", self.handles.trapdoor.borrow()),
        }
    }

    async fn ready(&mut self) -> Arc<Ready> {
        self.until(|status| match status {
            Status::Ready(ready) => Some(Arc::clone(ready)),
            _ => None,
        })
        .await
    }

    async fn off(mut self) {
        self.handles.cancel().await;
        self.tasks.join_next().await.unwrap().unwrap().unwrap();
        assert_eq!(*self.status.borrow(), Status::Starting, "it is still mounted");
    }
}

fn capacity(root: &Root) -> u64 {
    let stat = rustix::fs::statvfs(root.data.mount.path()).unwrap();
    stat.f_blocks * stat.f_frsize
}

#[tokio::test]
async fn a_partition_is_made_once_kept_and_grows_with_its_disk() {
    let Some(mut disk) = Disk::new(1024 * MIB).await else { return };
    // As the mounted ESP does: the kernel's cache of the disk stays.
    let open = std::fs::File::open(&disk.device).unwrap();

    let mut first = disk.boot(None);
    first.until(|status| matches!(status, Status::Absent { .. }).then_some(())).await;
    first.wanted.send_replace(Some(Wanted::Make(Make::Insecure)));
    let ready = first.ready().await;
    assert_eq!(ready.size, 974 * MIB);
    ready.root.data.etcd.peer_pki.key.write(b"precious").unwrap();
    let options = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mounted = ready.root.data.mount.path().to_string_lossy().into_owned();
    let options = options.lines().find(|line| line.contains(&mounted)).unwrap();
    for option in ["xfs", "nosuid", "nodev", "noatime"] {
        assert!(options.contains(option), "{options}");
    }
    first.off().await;

    // Without any request: the partition exists, so it is mounted.
    let mut second = disk.boot(None);
    let ready = second.ready().await;
    let key = ready.root.data.etcd.peer_pki.key.clone();
    assert_eq!(key.read().unwrap().as_deref(), Some(&b"precious"[..]));
    let before = capacity(&ready.root);
    second.off().await;

    drop(open);
    disk.enlarge(2048 * MIB).await;
    let mut third = disk.boot(None);
    let ready = third.ready().await;
    assert_eq!(ready.size, 1998 * MIB);
    assert!(capacity(&ready.root) > before + 900 * MIB);
    assert_eq!(key.read().unwrap().as_deref(), Some(&b"precious"[..]));
    third.off().await;
}

#[tokio::test]
async fn a_partition_that_is_given_up_is_empty_and_another_one_at_the_next_boot() {
    let Some(disk) = Disk::new(1024 * MIB).await else { return };
    let mut first = disk.boot(Some(Wanted::Make(Make::Insecure)));
    let before = first.ready().await;
    before.root.data.etcd.peer_pki.key.write(b"precious").unwrap();
    first.wanted.send_replace(Some(Wanted::GiveUp));
    first.until(|status| matches!(status, Status::GivenUp).then_some(())).await;
    let key = before.root.data.etcd.peer_pki.key.clone();
    assert!(key.read().unwrap().is_some(), "nothing is wiped while it is in use");
    first.off().await;

    let mut second = disk.boot(None);
    let absent = second.until(|status| match status {
        Status::Absent { partition } => Some(*partition),
        _ => None,
    });
    let made = absent.await;
    assert_ne!(made, before.partition);
    second.wanted.send_replace(Some(Wanted::Make(Make::Insecure)));
    let ready = second.ready().await;
    assert_eq!((ready.partition, ready.size), (made, before.size));
    assert_eq!(key.read().unwrap(), None);
    second.off().await;
}

#[tokio::test]
async fn a_disk_that_is_too_small_opens_the_trapdoor_with_numbers() {
    let Some(disk) = Disk::new(256 * MIB).await else { return };
    let boot = disk.boot(Some(Wanted::Make(Make::Insecure)));
    let mut trapdoor = boot.handles.trapdoor.clone();
    let report = event::until(&mut trapdoor, "trapdoor", Clone::clone);
    let report = tokio::time::timeout(PATIENCE, report).await.unwrap().unwrap();
    assert_eq!(report.code, polis_base::trapdoor::code::STORAGE_TOO_SMALL);
    assert!(report.cause().contains("206 MiB free"), "{}", report.cause());
}

#[test]
fn an_image_written_over_a_disk_does_not_cost_the_data_behind_a_smaller_system() {
    use std::os::unix::fs::FileExt as _;

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let disk = image_at(&path, 64 * MIB, 1024 * MIB);
    let mut image = vec![0; 34 * 512];
    disk.read_exact_at(&mut image, 0).unwrap();
    // The former system was 32 MiB larger, so the data began behind what is free now.
    let mut table = machine::read_table(&path).unwrap();
    let place = plan::place(&table, new_id()).unwrap();
    let first = 96 * MIB / 512;
    let former = Partition { first, attributes: 0, ..place.partition().clone() };
    table.partitions.push(former);
    table::write(&disk, &table).unwrap();
    disk.write_all_at(&image, 0).unwrap();

    let (_table, plan) = look(path.clone(), &Backing::Partition, new_id()).unwrap();
    assert!(matches!(plan, Plan::Create { .. }), "{plan:?}");
    disk.write_all_at(b"XFSB", 96 * MIB).unwrap();
    let refused = look(path.clone(), &Backing::Partition, new_id()).unwrap_err();
    assert!(matches!(refused, Error::Refused(plan::Refusal::Occupied { .. })), "{refused:?}");
    assert_eq!(machine::read_table(&path).unwrap().partitions.len(), 2);
}

#[test]
fn a_mirror_whose_other_disk_is_too_small_gets_no_partition() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    image_at(&path, 64 * MIB, 2048 * MIB);
    let table = machine::read_table(&path).unwrap();
    let first = plan::place(&table, new_id()).unwrap().partition().first;
    let with_room_for = |size: u64| {
        let last = Some(first + size / 512 - 1);
        let backing = Backing::Mirror { last, alone: None, disks: Vec::new() };
        look(path.clone(), &backing, new_id())
    };
    let (_table, made) = with_room_for(plan::SIZE_MIN).unwrap();
    assert!(matches!(made, Plan::Create { .. }), "{made:?}");
    assert_eq!(made.partition().blocks() * 512, plan::SIZE_MIN);
    let refused = with_room_for(plan::SIZE_MIN - MIB).unwrap_err();
    assert!(matches!(refused, Error::Refused(plan::Refusal::OtherTooSmall { .. })), "{refused:?}");
    assert_eq!(refused.code(), polis_base::trapdoor::code::STORAGE_TOO_SMALL);
}

#[test]
fn the_mirror_is_first_to_name_a_disk_that_stalls() {
    let fault = |what| Fault { what, device: "dm-0".to_owned(), sector: None };
    let mirror = |alone: Option<&str>| Backing::Mirror {
        last: None,
        alone: alone.map(str::to_owned),
        disks: Vec::new(),
    };
    let both = mirror(None);
    assert!(mirror_first(&fault(What::Hung), &both) > Duration::from_secs(10));
    assert_eq!(mirror_first(&fault(What::Write), &both), Duration::ZERO);
    for backing in [mirror(Some("vda")), Backing::Partition] {
        assert_eq!(mirror_first(&fault(What::Hung), &backing), Duration::ZERO);
    }
}

#[tokio::test]
async fn a_disk_of_a_mirror_is_not_used_without_the_mirror() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    image_at(&path, 64 * MIB, 2048 * MIB);
    let plain = machine::read_table(&path).unwrap();
    let (mirrored, _records) = plan::reserve(&plain, new_id()).unwrap();
    let mirror = Backing::Mirror { last: None, alone: None, disks: vec![path.clone()] };
    for (table, backing, allowed) in [
        (&plain, &Backing::Partition, true),
        (&mirrored, &mirror, true),
        (&mirrored, &Backing::Partition, false),
    ] {
        let known = watch::Sender::new(Some(backing.clone()));
        let config =
            Config { disk: path.clone(), root: Root::at(directory.path()), mount_options: "" };
        let mut service = Service {
            config,
            wanted: watch::Sender::new(None).subscribe(),
            status: watch::Sender::new(Status::Starting),
            health: watch::Sender::default(),
            backing: known.subscribe(),
        };
        match service.backing(table).await {
            Ok(used) => assert!(allowed && used == *backing, "{used:?}"),
            Err(Stop::Trapdoor(refused)) => {
                assert!(!allowed && matches!(refused, Error::Unmirrored { .. }), "{refused}");
                let code = polis_base::trapdoor::code::STORAGE_PARTITION_TABLE;
                assert_eq!(refused.code(), code);
            }
            Err(Stop::Closed(closed)) => panic!("{closed}"),
        }
    }
}
