//! The rules of an installation that concern more than one of its steps.

use std::os::unix::fs::FileExt as _;

use uuid::Uuid;

use super::*;
use polis_base::trapdoor::code;

const ID: [u8; 16] = [7; 16];
const SIZE: u64 = 8 << 30;

/// A folder like `/dev` with one disk.
struct Dev(tempfile::TempDir);

impl Dev {
    fn new(fill: impl FnOnce(&File)) -> Self {
        let dev = tempfile::tempdir().unwrap();
        let disk = File::create_new(dev.path().join("sda")).unwrap();
        disk.set_len(SIZE).unwrap();
        fill(&disk);
        Self(dev)
    }

    fn admitted(&self, wipe: Wipe) -> Result<Content, Error> {
        let disk = Disk { name: "sda".to_owned(), ..Disk::default() };
        admitted(self.0.path(), &disk, &ID, wipe)
    }
}

fn table(id: &[u8]) -> table::Table {
    plan::plan(SIZE, 512, 1 << 20, Uuid::from_u128(5), id).unwrap().table
}

/// The disk of a node that another installation has made.
fn member(disk: &File) {
    let mut table = table(&[8; 16]);
    let last = table.partitions.last().unwrap().clone();
    table.partitions.push(table::Partition {
        number: 4,
        name: storage::plan::NAME.to_owned(),
        type_id: storage::plan::TYPE_ID,
        first: last.last + 1,
        last: last.last + 2048,
        ..last
    });
    table::create(disk, &table).unwrap();
}

const WORDS: [Wipe; 3] = [Wipe::Nothing, Wipe::AnyData, Wipe::Member];

#[test]
fn an_empty_disk_and_an_unfinished_one_need_no_words() {
    let empty = Dev::new(|_disk| {});
    let unfinished = Dev::new(|disk| table::create(disk, &table(&[9; 16])).unwrap());
    for wipe in WORDS {
        assert_eq!(empty.admitted(wipe).unwrap(), Content::Empty);
        assert_eq!(unfinished.admitted(wipe).unwrap(), Content::Unfinished);
    }
}

#[test]
fn data_is_given_up_only_by_the_words_for_it() {
    let data = Dev::new(|disk| disk.write_all_at(b"\x53\xef", 0x438).unwrap());
    let node = Dev::new(member);
    for (dev, needed, found) in
        [(data, Wipe::AnyData, "data (ext)"), (node, Wipe::Member, "the data of a node")]
    {
        for wipe in WORDS {
            let admitted = dev.admitted(wipe);
            if wipe == needed {
                admitted.unwrap();
                continue;
            }
            let error = admitted.unwrap_err();
            assert!(error.to_string().contains(found), "{error}");
            let report = error.report();
            assert_eq!(report.code, code::INSTALL_OCCUPIED);
            let word = needed.name().unwrap();
            assert!(report.next.contains(&format!("`--install-wipe {word}`")), "{}", report.next);
        }
    }
}

#[test]
fn no_words_install_again_over_what_this_installation_has_made() {
    let dev = Dev::new(|disk| {
        table::create(disk, &table(&ID)).unwrap();
        disk.write_all_at(b"\xeb\x58\x90", polis_layout::partitions::ALIGNMENT).unwrap();
    });
    for wipe in WORDS {
        assert_eq!(dev.admitted(wipe).unwrap(), Content::Installed);
    }
}

#[test]
fn a_refusal_lists_every_disk() {
    let source = Refusal::NoDisk { selector: "transport=nvme".to_owned() };
    let error = Error::Select { source, disks: vec!["sda".to_owned(), "sdb".to_owned()] };
    let report = error.report();
    assert_eq!(report.code, code::INSTALL_DISK);
    assert_eq!(report.tried, ["sda", "sdb"]);
    assert!(report.cause().ends_with("no disk of this machine fits the selector transport=nvme"));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_is_named_within_a_bounded_time() {
    let (vda, vdb) = ("vda".to_owned(), "vdb".to_owned());
    let mut disks = [Disk { name: vda, ..Disk::default() }, Disk { name: vdb, ..Disk::default() }];
    let any = Selector::default();
    assert!(awaited(&disks, &any).starts_with("the disks of this machine to appear"));
    disks[1].silent = true;
    assert_eq!(awaited(&disks, &any), "vdb to answer; check the disk and its cable, or pull it");
    let refusal = || Refusal::Silent { name: "vdb".to_owned() };
    let silent = || Error::Select { source: refusal(), disks: Vec::new() };
    let hung = std::future::pending::<io::Result<Result<Content, Error>>>();
    let report = in_time(hung, silent).await.unwrap_err().report();
    assert_eq!(report.code, code::INSTALL_DISK);
    assert!(report.cause().contains("the disk vdb does not answer"), "{}", report.cause());
    let empty = in_time(async { Ok(Ok(Content::Empty)) }, silent).await;
    assert_eq!(empty.unwrap(), Content::Empty);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_stops_answering_is_named_and_given_up() {
    let (ctx, handles) = Context::for_test();
    let mut announcer = Announcer { ctx, disk: "sda".to_owned(), last: None };
    let (tell, reports) = mpsc::channel(REPORTS_MAX);
    let report = async |bytes| {
        tell.send(Progress { phase: Phase::Write, bytes, total: 100 }).await.unwrap();
    };
    let shown = || match &handles.stages.borrow()[&Stage::Cluster].state {
        State::Waiting(what) => what.clone(),
        other => panic!("{other:?}"),
    };
    let story = async {
        report(10).await;
        sleep(SOON + POLL).await;
        let what = shown();
        assert!(what.starts_with("the disk sda or the medium to answer: check both"), "{what}");
        report(20).await;
        sleep(POLL).await;
        assert_eq!(shown(), "the installation to sda: 20 % written");
        // The same tenth again is progress, too.
        sleep(SOON).await;
        assert!(shown().starts_with("the disk sda"));
        let last = Instant::now();
        report(21).await;
        sleep(POLL).await;
        assert_eq!(shown(), "the installation to sda: 20 % written");
        last
    };
    let hung = std::future::pending::<io::Result<()>>();
    let (ended, last) = tokio::join!(announcer.follow(reports, hung), story);
    let waited = last.elapsed();
    assert!(waited >= REPORT_MAX && waited < REPORT_MAX + SOON, "{waited:?}");
    let report = ended.unwrap_err().report();
    assert_eq!(report.code, code::INSTALL_FAILED);
    assert!(report.cause().contains("the disk sda, or the medium"), "{}", report.cause());
}

#[tokio::test]
async fn the_end_of_the_writes_follows_every_report_of_them() {
    let (ctx, mut handles) = Context::for_test();
    let mut announcer = Announcer { ctx, disk: "sda".to_owned(), last: None };
    let (tell, reports) = mpsc::channel(REPORTS_MAX);
    for bytes in [0, 50, 100] {
        tell.send(Progress { phase: Phase::Write, bytes, total: 100 }).await.unwrap();
    }
    drop(tell);
    announcer.follow(reports, async { io::Result::Ok(()) }).await.unwrap();
    let lines = handles.take_lines();
    let reports: Vec<_> = lines.iter().filter(|it| it.starts_with("POLIS install ")).collect();
    assert!(reports.last().unwrap().contains("result=running percent=100"), "{lines:?}");
}

#[test]
fn a_small_disk_is_refused_with_what_it_has_and_needs() {
    let source = plan::plan(1 << 30, 512, 1 << 20, Uuid::nil(), &ID).unwrap_err();
    let report = Error::Place { disk: "sda".to_owned(), source }.report();
    assert_eq!(report.code, code::INSTALL_DISK);
    let cause = report.cause();
    assert!(cause.contains("1073741824 bytes") && cause.contains("needs 3223322624"), "{cause}");
}

#[tokio::test]
async fn the_serial_line_has_each_phase_and_each_tenth_once() {
    let (ctx, mut handles) = Context::for_test();
    let mut announcer = Announcer { ctx, disk: "sda".to_owned(), last: None };
    for (phase, bytes) in [
        (Phase::Write, 0),
        (Phase::Write, 5),
        (Phase::Write, 55),
        (Phase::Write, 56),
        (Phase::Write, 100),
        (Phase::Verify, 0),
        (Phase::Verify, 100),
        (Phase::Boot, 1),
    ] {
        announcer.progress(Progress { phase, bytes, total: 100 });
    }
    announcer.failed(&Error::Differs("system"));
    let lines = handles.take_lines();
    let lines = lines.iter().filter_map(|line| line.strip_prefix("POLIS install "));
    let lines: Vec<&str> = lines.map(|line| line.split(" t=").next().unwrap()).collect();
    let expected = [
        "phase=write disk=sda result=started",
        "phase=write disk=sda result=running percent=50",
        "phase=write disk=sda result=running percent=100",
        "phase=write disk=sda result=done",
        "phase=verify disk=sda result=started",
        "phase=verify disk=sda result=running percent=100",
        "phase=verify disk=sda result=done",
        "phase=boot disk=sda result=started",
        "phase=boot disk=sda result=failed cause=\"the system reads back from the disk other than \
         it must be\"",
    ];
    assert_eq!(lines, expected);
}
