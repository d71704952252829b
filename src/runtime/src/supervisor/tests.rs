//! The rules of the supervisor, in paused time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::*;
use crate::event::until;
use polis_base::serial::EventLine;

type Ended = Result<(), anyhow::Error>;

/// A tree whose root starts the given children, and then waits.
fn start(
    children: impl Fn(&Context) + Send + Sync + 'static,
) -> (Supervisor, mpsc::Receiver<String>) {
    let (lines, written) = Lines::channel();
    let board = Board::new(BTreeMap::new(), lines.clone());
    let supervisor = Supervisor::start(board, lines, logtree::Tree::new(None), move |ctx| {
        children(&ctx);
        ctx.healthy();
        async move {
            ctx.cancelled().await;
            Ok::<_, anyhow::Error>(())
        }
    });
    (supervisor, written)
}

async fn idle(ctx: Context) -> Ended {
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}

async fn wait_for(tree: &mut watch::Receiver<Tree>, name: &str, state: State) -> Entry {
    let found =
        until(tree, "tree", |tree| tree.get(name).filter(|entry| entry.state == state).cloned());
    found.await.unwrap()
}

/// A log of what happened, shared between services and their test.
#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<String>>>);

impl Diary {
    fn note(&self, text: impl Into<String>) {
        self.0.lock().unwrap().push(text.into());
    }

    fn read(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    /// A service that notes its start and its end.
    async fn keep(self, ctx: Context) -> Ended {
        self.note(format!("+{}", ctx.name()));
        ctx.healthy();
        ctx.cancelled().await;
        self.note(format!("-{}", ctx.name()));
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_a_panic_and_a_return_are_deaths_and_each_is_restarted() {
    let (supervisor, _lines) = start(|ctx| {
        ctx.spawn("error", Policy::forever(), |_ctx| async {
            Err::<(), _>(anyhow::anyhow!("full").context("cannot write"))
        });
        ctx.spawn("panic", Policy::forever(), |_ctx| async { panic!("number {}", 7) as Ended });
        ctx.spawn("early", Policy::forever(), |_ctx| -> std::future::Ready<Ended> {
            panic!("before the first wait")
        });
        ctx.spawn("return", Policy::forever(), |_ctx| async { Ended::Ok(()) });
    });
    let mut tree = supervisor.tree();
    for (name, cause) in [
        ("root.error", "cannot write: full"),
        ("root.panic", "panicked: number 7"),
        ("root.early", "panicked: before the first wait"),
        ("root.return", "returned without being done"),
    ] {
        let again =
            until(&mut tree, "tree", |tree| tree.get(name).filter(|it| it.restarts >= 3).cloned());
        assert_eq!(again.await.unwrap().cause.as_deref(), Some(cause));
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_says_done_is_left_in_peace() {
    let (supervisor, _lines) = start(|ctx| {
        ctx.spawn("once", Policy::never(), |ctx| async move {
            ctx.spawn("child", Policy::forever(), idle);
            ctx.done();
            Ended::Ok(())
        });
    });
    let mut tree = supervisor.tree();
    wait_for(&mut tree, "root.once", State::Done).await;
    sleep(Duration::from_secs(600)).await;
    let tree = tree.borrow().clone();
    assert_eq!(tree["root.once"].restarts, 0);
    assert_eq!(tree["root.once.child"].state, State::Healthy);
}

/// A service whose first run dies.
async fn dies_once(ctx: Context, runs: Arc<AtomicU32>) -> Ended {
    if runs.fetch_add(1, Ordering::Relaxed) == 0 {
        anyhow::bail!("no disk")
    }
    idle(ctx).await
}

/// The event lines of services, each with its fields.
fn service_lines(lines: &mut mpsc::Receiver<String>) -> Vec<String> {
    let mut seen = Vec::new();
    while let Ok(line) = lines.try_recv() {
        let line = EventLine::parse(&line).unwrap();
        let get = |key| line.get(key).unwrap().to_owned();
        assert!(line.get("t").is_some());
        seen.push(
            [line.word().to_owned(), get("name"), get("state"), get("restarts"), get("cause")]
                .join(" "),
        );
    }
    seen
}

#[tokio::test(start_paused = true)]
async fn a_death_and_a_recovery_are_each_one_event_line() {
    let runs = Arc::new(AtomicU32::new(0));
    let (supervisor, mut lines) = start(move |ctx| {
        let runs = Arc::clone(&runs);
        ctx.spawn("a", Policy::forever(), move |ctx| dies_once(ctx, Arc::clone(&runs)));
    });
    wait_for(&mut supervisor.tree(), "root.a", State::Healthy).await;
    assert_eq!(
        service_lines(&mut lines),
        ["service root.a dead 0 no disk", "service root.a healthy 1 no disk"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_start_after_a_stop_on_purpose_is_no_recovery() {
    let runs = Arc::new(AtomicU32::new(0));
    let (supervisor, mut lines) = start(move |ctx| {
        let runs = Arc::clone(&runs);
        ctx.spawn("parent", Policy::forever(), move |ctx| {
            let runs = Arc::clone(&runs);
            async move {
                let mut tree = ctx.tree();
                for _ in 0..2 {
                    let runs = Arc::clone(&runs);
                    let run = move |ctx| dies_once(ctx, Arc::clone(&runs));
                    let child = ctx.spawn("a", Policy::forever(), run);
                    wait_for(&mut tree, "root.parent.a", State::Healthy).await;
                    child.stop().await;
                }
                idle(ctx).await
            }
        });
    });
    wait_for(&mut supervisor.tree(), "root.parent", State::Healthy).await;
    assert_eq!(
        service_lines(&mut lines),
        ["service root.parent.a dead 0 no disk", "service root.parent.a healthy 1 no disk"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_death_ends_its_own_subtree_and_nothing_else() {
    let diary = Diary::default();
    let notes = diary.clone();
    let (kill, killed) = watch::channel(false);
    let (supervisor, _lines) = start(move |ctx| {
        let diary = diary.clone();
        let beside = diary.clone();
        ctx.spawn("beside", Policy::forever(), move |ctx| beside.clone().keep(ctx));
        let killed = killed.clone();
        ctx.spawn("a", Policy::forever(), move |ctx| {
            let (diary, mut killed) = (diary.clone(), killed.clone());
            killed.mark_unchanged();
            async move {
                ctx.spawn("child", Policy::forever(), move |ctx| diary.clone().keep(ctx));
                killed.changed().await?;
                anyhow::bail!("requested")
            }
        });
    });
    let mut tree = supervisor.tree();
    wait_for(&mut tree, "root.a.child", State::Healthy).await;
    kill.send_replace(true);
    wait_for(&mut tree, "root.a.child", State::Stopped).await;
    assert_eq!(tree.borrow()["root.a"].state, State::Dead);
    wait_for(&mut tree, "root.a.child", State::Healthy).await;
    assert_eq!(notes.read(), ["+root.beside", "+root.a.child", "-root.a.child", "+root.a.child"]);
}

#[tokio::test(start_paused = true)]
async fn a_group_dies_and_starts_again_together() {
    let diary = Diary::default();
    let notes = diary.clone();
    let (kill, killed) = watch::channel(false);
    let (supervisor, _lines) = start(move |ctx| {
        let (one, two) = (diary.clone(), diary.clone());
        let killed = killed.clone();
        ctx.group(Policy::forever())
            .service("one", move |ctx| one.clone().keep(ctx))
            .service("frail", move |ctx| {
                let mut killed = killed.clone();
                killed.mark_unchanged();
                async move {
                    ctx.healthy();
                    killed.changed().await?;
                    anyhow::bail!("requested")
                }
            })
            .service("two", move |ctx| two.clone().keep(ctx))
            .start();
    });
    let mut tree = supervisor.tree();
    wait_for(&mut tree, "root.two", State::Healthy).await;
    kill.send_replace(true);
    wait_for(&mut tree, "root.two", State::Stopped).await;
    wait_for(&mut tree, "root.two", State::Healthy).await;
    assert_eq!(
        notes.read(),
        ["+root.one", "+root.two", "-root.two", "-root.one", "+root.one", "+root.two"]
    );
    assert_eq!(tree.borrow()["root.one"].cause, None);
    assert_eq!(tree.borrow()["root.frail"].cause.as_deref(), Some("requested"));
}

#[tokio::test(start_paused = true)]
async fn one_death_too_many_is_the_parent_s() {
    let (supervisor, _lines) = start(|ctx| {
        ctx.spawn("parent", Policy::forever(), |ctx| async move {
            let policy = Policy::at_most(1, Duration::from_secs(60));
            ctx.spawn("flaps", policy, |_ctx| async { Err::<(), _>(anyhow::anyhow!("no")) });
            idle(ctx).await
        });
    });
    let mut tree = supervisor.tree();
    let dead = wait_for(&mut tree, "root.parent", State::Dead).await;
    assert_eq!(dead.cause.as_deref(), Some("root.parent.flaps died 2 times: no"));
    // And the parent starts again, with it.
    wait_for(&mut tree, "root.parent", State::Healthy).await;
}

#[tokio::test(start_paused = true)]
async fn past_the_root_a_death_opens_the_trapdoor() {
    let (supervisor, mut lines) = start(|ctx| {
        ctx.stage(polis_base::stage::Stage::Network, polis_base::stage::State::Started);
        let policy = Policy::at_most(2, Duration::from_secs(60));
        ctx.spawn("flaps", policy, |_ctx| async { panic!("again") as Ended });
    });
    let report = supervisor.trapdoor().await;
    assert_eq!(report.code, polis_base::trapdoor::code::SERVICE_GAVE_UP);
    assert_eq!(report.stage, polis_base::stage::Stage::Network);
    assert_eq!(report.cause(), "root.flaps died 3 times: panicked: again");
    let mut states = Vec::new();
    while let Ok(line) = lines.try_recv() {
        let line = EventLine::parse(&line).unwrap();
        states.extend(
            line.get("name").zip(line.get("state")).map(|(name, state)| format!("{name} {state}")),
        );
    }
    assert_eq!(
        states,
        [
            "network started",
            "root.flaps dead",
            "root.flaps dead",
            "root.flaps failed",
            "root failed",
            "network failed"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn delays_grow_until_a_healthy_minute_resets_them() {
    let starts = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&starts);
    let (_supervisor, _lines) = start(move |ctx| {
        let starts = Arc::clone(&starts);
        ctx.spawn("a", Policy::forever(), move |ctx| {
            let mut starts = starts.lock().unwrap();
            starts.push(Instant::now());
            let healthy = starts.len() == 12;
            async move {
                if healthy {
                    ctx.healthy();
                    sleep(restart::HEALTHY_AFTER).await;
                }
                Ended::Ok(())
            }
        });
    });
    sleep(Duration::from_secs(600)).await;
    let starts = noted.lock().unwrap();
    let delay = |n: usize| starts[n] - starts[n - 1];
    // Half of 0.5 s x 1.5^10, the least that jitter leaves.
    assert!(delay(11) >= Duration::from_secs(14));
    let after = delay(12) - restart::HEALTHY_AFTER;
    assert!(after <= Duration::from_millis(751), "not reset: {after:?}");
}

#[tokio::test(start_paused = true)]
async fn what_was_started_last_is_stopped_first_and_children_before_parents() {
    let diary = Diary::default();
    let notes = diary.clone();
    let (supervisor, _lines) = start(move |ctx| {
        for name in ["storage", "network"] {
            let diary = diary.clone();
            ctx.spawn(name, Policy::forever(), move |ctx| diary.clone().keep(ctx));
        }
        let diary = diary.clone();
        ctx.spawn("roles", Policy::forever(), move |ctx| {
            let child = diary.clone();
            ctx.spawn("child", Policy::forever(), move |ctx| child.clone().keep(ctx));
            diary.clone().keep(ctx)
        });
    });
    wait_for(&mut supervisor.tree(), "root.roles.child", State::Healthy).await;
    supervisor.stop().await;
    let stopped: Vec<_> = notes.read().into_iter().filter(|note| note.starts_with('-')).collect();
    assert_eq!(stopped, ["-root.roles.child", "-root.roles", "-root.network", "-root.storage"]);
    assert!(supervisor.tree().borrow().values().all(|it| it.state == State::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_service_that_does_not_stop_is_aborted_after_the_deadline() {
    struct Dropped(Diary);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.note("dropped");
        }
    }
    let diary = Diary::default();
    let notes = diary.clone();
    let (supervisor, _lines) = start(move |ctx| {
        let diary = diary.clone();
        ctx.spawn("deaf", Policy::forever(), move |ctx| {
            let dropped = Dropped(diary.clone());
            async move {
                ctx.healthy();
                std::future::pending::<()>().await;
                drop(dropped);
                Ended::Ok(())
            }
        });
    });
    wait_for(&mut supervisor.tree(), "root.deaf", State::Healthy).await;
    let begin = Instant::now();
    supervisor.stop().await;
    assert!(begin.elapsed() >= STOP_DEADLINE);
    assert!(begin.elapsed() < STOP_DEADLINE + Duration::from_secs(1));
    assert_eq!(notes.read(), ["dropped"]);
}

#[tokio::test(start_paused = true)]
async fn a_death_while_stopping_is_ignored() {
    let (supervisor, mut lines) = start(|ctx| {
        let policy = Policy::never();
        ctx.spawn("sore", policy, |ctx| async move {
            ctx.healthy();
            ctx.cancelled().await;
            Err::<(), _>(anyhow::anyhow!("lost something"))
        });
    });
    wait_for(&mut supervisor.tree(), "root.sore", State::Healthy).await;
    supervisor.stop().await;
    assert_eq!(supervisor.tree().borrow()["root.sore"].state, State::Stopped);
    assert_eq!(lines.try_recv().ok(), None);
}

#[tokio::test(start_paused = true)]
async fn a_child_can_be_stopped_and_started_again_by_its_parent() {
    let (child_is_there, mut child) = watch::channel(None);
    let (supervisor, _lines) = start(move |ctx| {
        child_is_there.send_replace(Some((ctx.clone(), ctx.spawn("a", Policy::forever(), idle))));
    });
    let mut tree = supervisor.tree();
    wait_for(&mut tree, "root.a", State::Healthy).await;
    let (ctx, running) = until(&mut child, "child", Clone::clone).await.unwrap();
    running.stop().await;
    assert_eq!(tree.borrow()["root.a"].state, State::Stopped);
    ctx.spawn("a", Policy::forever(), idle);
    wait_for(&mut tree, "root.a", State::Healthy).await;
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_below_a_run_that_ends() {
    let (ctx, handles) = Context::for_test();
    ctx.spawn("before", Policy::forever(), idle);
    let mut tree = handles.tree.clone();
    wait_for(&mut tree, "test.before", State::Healthy).await;
    handles.cancel().await;
    let late = ctx.spawn("late", Policy::forever(), idle);
    late.stop().await;
    assert_eq!(tree.borrow()["test.before"].state, State::Stopped);
    assert!(!tree.borrow().contains_key("test.late"));
}

fn never(nothing: std::convert::Infallible) -> Ended {
    match nothing {}
}

#[tokio::test(start_paused = true)]
async fn the_first_report_is_the_one_that_counts() {
    let report = |text: &str| Report {
        code: polis_base::trapdoor::code::SERVICE_GAVE_UP,
        stage: polis_base::stage::Stage::System,
        causes: vec![text.to_owned()],
        tried: Vec::new(),
        next: "look".to_owned(),
        unlock: false,
    };
    let (first, second) = (report("first"), report("second"));
    let (supervisor, _lines) = start(move |ctx| {
        let first = first.clone();
        ctx.spawn("a", Policy::forever(), move |ctx| {
            let first = first.clone();
            async move { never(ctx.trapdoor(first).await) }
        });
        let second = second.clone();
        ctx.spawn("b", Policy::forever(), move |ctx| {
            let second = second.clone();
            async move {
                sleep(Duration::from_secs(1)).await;
                never(ctx.trapdoor(second).await)
            }
        });
    });
    sleep(Duration::from_secs(5)).await;
    assert_eq!(supervisor.trapdoor().await.cause(), "first");
}
