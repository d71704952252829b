//! The service beside a metadata service on loopback, with the files of a machine in a folder.

use std::path::Path;

use polis_base::files::Root;
use polis_base::trapdoor::code;
use polis_runtime::event::until;
use polis_runtime::supervisor::Handles;

use super::super::decide::tests::{EXTRA, valid};
use super::super::metadata::tests::{Answer, Heads, answer, served};
use super::*;
use crate::parameters::{Platform, Source};

const ABSENT: storage::Status = storage::Status::Absent { partition: uuid::Uuid::nil() };

/// The service on a machine whose files are below `base`, and the ends of its values.
fn service(base: &Path, status: storage::Status, metadata: SocketAddr) -> (Service, Ends) {
    let root = Root::at(base);
    root.esp.create().unwrap();
    let (sys, dev) = (base.join("sys"), base.join("dev"));
    let (esp, kept) = (root.esp.parameters, root.esp.user_data);
    let given = root.esp.given_parameters;
    let config = Config { sys, dev, esp, given, kept, metadata, metadata_v6: |_| None };
    let (disk, storage) = watch::channel(status);
    let (asks, asking) = watch::channel(false);
    let (known, found) = watch::channel(None);
    (Service { config, storage, asks, known }, Ends { disk, asking, known: found })
}

struct Ends {
    disk: watch::Sender<storage::Status>,
    asking: watch::Receiver<Asking>,
    known: watch::Receiver<Known>,
}

/// No service answers there, and no test gets there.
const NOWHERE: SocketAddr = crate::parameters::METADATA_ADDRESS;

/// Runs the service in an empty sysfs with `content` on the ESP.
async fn run(content: Option<&[u8]>, story: impl AsyncFnOnce(watch::Receiver<Known>, Handles)) {
    let base = tempfile::tempdir().unwrap();
    let (service, ends) = service(base.path(), storage::Status::GivenUp, NOWHERE);
    if let Some(content) = content {
        service.config.esp.write(content).unwrap();
    }
    let (ctx, handles) = Context::for_test();
    tokio::select! {
        ended = service.run(ctx) => panic!("{ended:?}"),
        () = story(ends.known.clone(), handles) => {}
    }
}

#[tokio::test]
async fn what_was_found_is_published_and_the_stage_is_done() {
    run(Some(&valid(&[])), async |mut known, handles| {
        let loaded = until(&mut known, "known", Clone::clone).await.unwrap();
        assert!(loaded.parameters().is_some());
        // The stage follows the value, and nothing after it waits.
        tokio::task::yield_now().await;
        assert_eq!(handles.stages.borrow()[&Stage::Parameters].state, State::Done);
        assert!(handles.is_healthy());
    })
    .await;
}

#[tokio::test]
async fn parameters_that_cannot_be_used_open_the_trapdoor_and_are_not_published() {
    run(Some(b"noise"), async |known, mut handles| {
        let report = until(&mut handles.trapdoor, "trapdoor", Clone::clone);
        let report = report.await.unwrap();
        assert_eq!(report.code, code::PARAMETERS_MALFORMED);
        assert_eq!(report.tried.len(), 5);
        assert_eq!(*known.borrow(), None);
    })
    .await;
}

#[tokio::test]
async fn a_machine_without_parameters_reports_that() {
    run(None, async |mut known, _handles| {
        let loaded = until(&mut known, "known", Clone::clone).await.unwrap();
        assert_eq!(loaded.found, None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn only_a_machine_without_a_home_and_without_parameters_waits_for_a_disk() {
    let base = tempfile::tempdir().unwrap();
    for (status, other, waits) in [
        (ABSENT, false, true),
        (storage::Status::Starting, false, true),
        (storage::Status::GivenUp, false, false),
        (ABSENT, true, false),
    ] {
        let (service, _ends) = service(base.path(), status, NOWHERE);
        let (ctx, _handles) = Context::for_test();
        let start = Instant::now();
        let looked = service.disks(other, &ctx).await.unwrap();
        assert_eq!(looked[0].result(), "disk labelled cidata or config-2: absent");
        assert_eq!(start.elapsed() >= DISK_WAIT, waits, "{other}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_is_waited_for_while_drivers_still_load() {
    let base = tempfile::tempdir().unwrap();
    let driver = base.path().join("sys/module/sr_mod");
    std::fs::create_dir_all(&driver).unwrap();
    let state = driver.join("initstate");
    std::fs::write(&state, "coming\n").unwrap();
    let (service, _ends) = service(base.path(), ABSENT, NOWHERE);
    let waits = async || {
        let start = Instant::now();
        let (ctx, _handles) = Context::for_test();
        service.disks(false, &ctx).await.unwrap();
        start.elapsed()
    };

    // The driver of a disk that never answers.
    let waited = waits().await;
    assert!(waited >= DRIVERS_WAIT && waited < DRIVERS_WAIT + PATIENCE, "{waited:?}");

    // The driver of a slow drive.
    let ready = Duration::from_secs(30);
    let driver = async {
        tokio::time::sleep(ready).await;
        std::fs::write(&state, "live\n").unwrap();
    };
    let (waited, ()) = tokio::join!(waits(), driver);
    assert!(waited >= ready + DISK_WAIT && waited < ready + DISK_WAIT + PATIENCE, "{waited:?}");
}

/// Makes the firmware name a cloud.
fn in_cloud(base: &Path, vendor: &str) {
    let id = base.join("sys/class/dmi/id");
    std::fs::create_dir_all(&id).unwrap();
    std::fs::write(id.join("sys_vendor"), format!("{vendor}\n")).unwrap();
}

/// A boot of a machine below `base`, beside a metadata service. Returns what was asked for.
async fn boot(
    base: &Path,
    status: storage::Status,
    respond: impl Fn(&str) -> Answer,
    story: impl AsyncFnOnce(&mut Ends, Handles, Heads),
) -> Vec<String> {
    let (ctx, handles) = Context::for_test();
    let story = async |address, heads| {
        let (service, mut ends) = service(base, status, address);
        tokio::select! {
            ended = service.run(ctx) => panic!("{ended:?}"),
            () = story(&mut ends, handles, heads) => {}
        }
    };
    served(respond, story).await.1
}

async fn loaded(ends: &mut Ends) -> Arc<crate::parameters::Loaded> {
    until(&mut ends.known, "known", Clone::clone).await.unwrap()
}

/// No disk is waited for: time stands still only where nothing else moves.
#[tokio::test(start_paused = true)]
async fn a_machine_in_a_cloud_takes_its_user_data_and_does_not_ask_again_with_a_home() {
    let base = tempfile::tempdir().unwrap();
    in_cloud(base.path(), "Hetzner");
    let text = crate::parameters::text(&valid(EXTRA));
    let heads = boot(
        base.path(),
        ABSENT,
        |_| answer(200, &text),
        async |ends, _, _| {
            until(&mut ends.asking, "asking", |asks| asks.then_some(())).await.unwrap();
            assert!(ends.known.borrow().is_none(), "the network is asked for before the answer");
            let loaded = loaded(ends).await;
            assert_eq!(loaded.found.as_ref().unwrap().1, Source::Metadata(Platform::Hetzner));
            until(&mut ends.asking, "asking", |asks| (!asks).then_some(())).await.unwrap();
        },
    );
    assert_eq!(heads.await.len(), 1);
    let root = Root::at(base.path());
    assert_eq!(root.esp.user_data.read().unwrap(), Some(valid(EXTRA)));

    let home = storage::Status::GivenUp;
    let heads = boot(
        base.path(),
        home.clone(),
        |_| answer(500, ""),
        async |ends, _, _| {
            let loaded = loaded(ends).await;
            assert_eq!(loaded.found.as_ref().unwrap().1, Source::Kept);
            assert!(!*ends.asking.borrow());
        },
    );
    assert_eq!(heads.await, [""; 0]);

    // Another source, before there is a home: the copy leads to no home any more.
    root.esp.parameters.path().parent().map(std::fs::create_dir_all).unwrap().unwrap();
    std::fs::write(root.esp.parameters.path(), valid(&[])).unwrap();
    let heads = boot(
        base.path(),
        home,
        |_| answer(500, ""),
        async |ends, _, _| {
            assert_eq!(loaded(ends).await.found.as_ref().unwrap().1, Source::Esp);
        },
    );
    assert_eq!(heads.await, [""; 0]);
    assert!(root.esp.user_data.read().unwrap().is_some(), "it has a home");
    let heads = boot(
        base.path(),
        ABSENT,
        |_| answer(500, ""),
        async |ends, _, _| {
            assert_eq!(loaded(ends).await.found.as_ref().unwrap().1, Source::Esp);
        },
    );
    assert_eq!(heads.await, [""; 0]);
    assert_eq!(root.esp.user_data.read().unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_machine_whose_firmware_names_no_cloud_asks_nothing() {
    let base = tempfile::tempdir().unwrap();
    in_cloud(base.path(), "QEMU");
    let heads = boot(
        base.path(),
        ABSENT,
        |_| answer(200, "x"),
        async |ends, _, _| {
            let loaded = loaded(ends).await;
            assert_eq!(loaded.found, None);
            let last = loaded.tried.last().unwrap();
            assert_eq!(last, "metadata service: not asked, as the firmware names no cloud");
        },
    );
    assert_eq!(heads.await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_cloud_that_has_no_user_data_for_it_leaves_it_without_parameters() {
    for (status, body, why) in [
        (404, "", "absent"),
        (200, "", "absent"),
        (200, "#cloud-config\n", "for cloud-init, not node parameters"),
    ] {
        let base = tempfile::tempdir().unwrap();
        in_cloud(base.path(), "Vultr");
        let heads = boot(
            base.path(),
            ABSENT,
            |_| answer(status, body),
            async |ends, _, _| {
                let loaded = loaded(ends).await;
                assert_eq!(loaded.found, None);
                let last = loaded.tried.last().unwrap();
                assert_eq!(last, &format!("user data of Vultr (metadata service): {why}"));
            },
        );
        assert_eq!(heads.await.len(), 1);
        assert_eq!(Root::at(base.path()).esp.user_data.read().unwrap(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn user_data_that_cannot_be_used_names_the_service_and_is_not_kept() {
    let base = tempfile::tempdir().unwrap();
    in_cloud(base.path(), "DigitalOcean");
    let mut short = valid(&[]);
    short.remove(10);
    (short[1], short[3]) = (33, 31);
    let wrong: [(Vec<u8>, _); 3] = [
        (short, code::PARAMETERS_OWNER_KEY),
        (b"<html>".to_vec(), code::PARAMETERS_MALFORMED),
        (vec![0; 65_537], code::PARAMETERS_TOO_LARGE),
    ];
    for (body, code) in wrong {
        boot(
            base.path(),
            ABSENT,
            |_| answer(200, &body),
            async |ends, mut handles, _| {
                let report = until(&mut handles.trapdoor, "trapdoor", Clone::clone).await.unwrap();
                assert_eq!(report.code.with_detail(0), code.with_detail(0), "{report:?}");
                assert!(report.next.contains("user data of DigitalOcean"), "{}", report.next);
                assert!(ends.known.borrow().is_none());
            },
        )
        .await;
    }
    assert_eq!(Root::at(base.path()).esp.user_data.read().unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_does_not_answer_is_asked_until_it_does_and_the_stage_says_so() {
    let base = tempfile::tempdir().unwrap();
    in_cloud(base.path(), "Hetzner");
    let count = std::cell::Cell::new(0);
    let respond = |_head: &str| {
        count.set(count.get() + 1);
        if count.get() < 9 { answer(503, "later") } else { answer(200, valid(&[])) }
    };
    let heads = boot(base.path(), ABSENT, respond, async |ends, mut handles, _| {
        let waiting = until(&mut handles.stages, "stages", |stages| {
            match &stages.get(&Stage::Parameters)?.state {
                State::Waiting(what) if what.contains("metadata") => Some(what.clone()),
                _ => None,
            }
        });
        let waiting = waiting.await.unwrap();
        for part in ["Hetzner Cloud", "503", "since second", "cidata"] {
            assert!(waiting.contains(part), "{part}: {waiting}");
        }
        assert!(loaded(ends).await.found.is_some());
    });
    assert_eq!(heads.await.len(), 9);
}

#[tokio::test(start_paused = true)]
async fn a_machine_asks_only_once_its_disk_says_that_it_has_no_home() {
    let base = tempfile::tempdir().unwrap();
    in_cloud(base.path(), "Hetzner");
    let starting = storage::Status::Starting;
    let heads = boot(
        base.path(),
        starting,
        |_| answer(404, ""),
        async |ends, mut handles, heads| {
            until(&mut handles.stages, "stages", |stages| {
                let state = &stages.get(&Stage::Parameters)?.state;
                matches!(state, State::Waiting(what) if what.contains("has a home")).then_some(())
            })
            .await
            .unwrap();
            assert!(heads.lock().unwrap().is_empty() && !*ends.asking.borrow());
            ends.disk.send_replace(ABSENT);
            assert_eq!(loaded(ends).await.found, None);
        },
    );
    assert_eq!(heads.await.len(), 1);
}

/// The address of the service by IPv6, as far as the next test goes.
static BY_IPV6: std::sync::OnceLock<SocketAddr> = std::sync::OnceLock::new();

#[tokio::test(start_paused = true)]
async fn a_machine_without_ipv4_asks_by_ipv6_and_only_after_a_while() {
    let base = tempfile::tempdir().unwrap();
    in_cloud(base.path(), "Hetzner");
    let (ctx, _handles) = Context::for_test();
    let story = async |address, _heads| {
        BY_IPV6.set(address).unwrap();
        // No kernel has a way there for TCP.
        let unreachable = SocketAddr::from(([224, 0, 0, 1], 80));
        let (mut service, mut ends) = service(base.path(), ABSENT, unreachable);
        service.config.metadata_v6 = |_platform| BY_IPV6.get().copied();
        let began = Instant::now();
        tokio::select! {
            ended = service.run(ctx) => panic!("{ended:?}"),
            loaded = loaded(&mut ends) => {
                assert_eq!(loaded.found.as_ref().unwrap().1, Source::Metadata(Platform::Hetzner));
            }
        }
        assert!(began.elapsed() >= Duration::from_secs(5), "{:?}", began.elapsed());
    };
    let (_, heads) = served(|_| answer(200, valid(&[])), story).await;
    assert_eq!(heads.len(), 1);
}
