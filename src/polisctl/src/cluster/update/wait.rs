//! `polisctl cluster update wait`, and `--wait` of `cluster update FILE`: follow an update of the
//! cluster until it ends.
//!
//! ```text
//!           +-- loading, running, paused; no answer <--+
//!           v                                          |
//! look --> a line for each turn that began or ended ---+--> done:             exit status 0
//!                                                      +--> failed, aborted:                1
//!                                                      +--> --timeout ran out:              3
//! ```
//!
//! Invariants:
//! - An outage does not end a wait that had an answer: the leader restarts in its own turn.
//! - The lines go to standard error: standard output has the document at the end and nothing else.
//!
//! What this module does not do: change the update, which goes on when the wait ends for another
//! reason, as by Ctrl-C.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1;
use tokio::time::{Instant, sleep};

use super::{View, read};
use crate::error::{Error, Exit};
use crate::session::{Session, at_most};
use crate::text::clean;
use crate::{Global, units};

/// Between two looks.
const PACE: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 1000 });
/// Longest that one look searches for a leader: an election takes ten seconds.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// Grace for a look after its time, so that its own error, which says what was tried, comes first.
const GRACE: Duration = Duration::from_millis(500);
/// This many looks in a row that fail other than by a timeout end the wait. One is not enough: a
/// connection that breaks when the leader restarts looks like a refusal.
const FAILURES: u32 = 3;

/// Waits for the end of the update that goes on, or shows how the last one ended.
pub(super) async fn run(global: &Global) -> Result<(), Error> {
    let mut session = Session::open(global).await?;
    let first = read(&session).await?;
    // Without names, the lines have IDs.
    let nodes = session.nodes(&[]).await.unwrap_or_default();
    until_ended(&mut session, &first, nodes, global).await
}

/// Follows the update `first` until it ends, and prints it.
pub(super) async fn until_ended(
    session: &mut Session,
    first: &v1::GetUpdateResponse,
    mut nodes: Vec<v1::NodeInfo>,
    global: &Global,
) -> Result<(), Error> {
    let (first, end) = (View::of(first, &nodes), session.end());
    let look = async |time: Duration| {
        session.limit_calls(time);
        let read = read(session).await?;
        if nodes.is_empty() {
            nodes = session.nodes(&[]).await.unwrap_or_default();
        }
        Ok::<_, Error>(View::of(&read, &nodes))
    };
    // On the heap: the future of `cluster update` contains this one.
    Box::pin(follow(first, end, look, global)).await
}

/// The same; `look` reads the update, in at most the time that it is given.
async fn follow(
    first: View,
    end: Option<Instant>,
    mut look: impl AsyncFnMut(Duration) -> Result<View, Error>,
    global: &Global,
) -> Result<(), Error> {
    let progress = global.out.progress();
    let mut printed = Printed::default();
    let (mut last, mut trouble, mut failures) = (first, None, 0);
    loop {
        let remarks = printed.news(&last);
        progress.suspend(|| remarks.iter().for_each(|line| global.out.remark(line)));
        if let Some(ended) = ended(&last) {
            drop(progress);
            let printed = last.document().and_then(|document| global.out.print(&document));
            // The result of the update counts: a closed output alone has status 0.
            return ended.and(printed);
        }
        progress.says(&format!("waiting: {}", last.summary()));
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if let Some(left) = left.filter(|left| *left <= PACE + GRACE) {
            // Too short for a look: it would report an outage of a cluster that answers.
            sleep(left).await;
            return Err(late(&last, trouble, global));
        }
        sleep(PACE).await;
        let time = left.map_or(LOOK_MAX, |left| LOOK_MAX.min(left.saturating_sub(PACE)));
        match at_most(time + GRACE, look(time)).await {
            Ok(view) if !view.is_same(&last) => return Err(another(&last, &view)),
            Ok(view) => {
                if trouble.take().is_some() {
                    progress.suspend(|| global.out.remark("answers again"));
                }
                (last, failures) = (view, 0);
            }
            Err(error) => {
                failures = if error.exit() == Exit::TimedOut { 0 } else { failures + 1 };
                if failures == FAILURES {
                    let error = error.context("the update goes on without this command");
                    let next = "see how far it is: `polisctl cluster update status`";
                    return Err(error.or_help(next));
                }
                let summary = error.summary();
                if trouble.is_none() {
                    let remark = format!("no newer answer: {summary}");
                    progress.suspend(|| global.out.remark(&remark));
                }
                trouble = Some(summary);
            }
        }
    }
}

/// The states that were printed.
#[derive(Debug, Default)]
struct Printed {
    /// Of the update.
    state: &'static str,
    /// Of each node, by its ID.
    steps: BTreeMap<String, &'static str>,
}

impl Printed {
    /// A line for each change since the last call; none for turns that ended before the first one.
    fn news(&mut self, view: &View) -> Vec<String> {
        let mut lines = Vec::new();
        for step in &view.steps {
            let before = self.steps.insert(step.node.clone(), step.state);
            let (called, version) = (&step.called, &view.version);
            let line = match step.state {
                state if before == Some(state) => continue,
                "turn" => format!("{called} has its turn"),
                _ if before.is_none() => continue,
                "done" => format!("{called} keeps version {version}; {}", view.progress()),
                "failed" => format!("{called} did not take version {version}: {}", step.cause),
                "gone" => format!("{called} left the cluster"),
                _ => continue,
            };
            lines.push(clean(&line));
        }
        match (std::mem::replace(&mut self.state, view.state), view.state) {
            (before, now) if before == now => {}
            (_, "paused") => lines.push(
                "the update is paused: no further node gets its turn until `polisctl cluster \
                 update resume`"
                    .to_owned(),
            ),
            ("paused", "running") => lines.push("the update is resumed".to_owned()),
            _ => {}
        }
        lines
    }
}

/// How the wait ends with an update in this state; `None`: the update goes on.
fn ended(view: &View) -> Option<Result<(), Error>> {
    let version = &view.version;
    match view.state {
        "done" => Some(Ok(())),
        "failed" => {
            let failed = view.steps.iter().find(|step| step.state == "failed");
            let (called, cause) = match failed {
                Some(step) => (step.called.as_str(), step.cause.as_str()),
                None => ("a node", "the leader does not say why"),
            };
            let error = Error::new(cause)
                .context(format!("the update stopped: {called} did not take version {version}"))
                .or_help(
                    "`polisctl cluster update status` shows each node; repair the cause, then go \
                     on: `polisctl cluster update resume`, or end the update: `polisctl cluster \
                     update abort`",
                );
            Some(Err(error))
        }
        "aborted" => {
            let error = Error::new(format!("the update to version {version} was aborted"));
            Some(Err(error.or_help(
                "nodes that have the new version keep it: `polisctl cluster update status` shows \
                 which; begin again: `polisctl cluster update FILE`",
            )))
        }
        _ => None,
    }
}

/// The error of a wait that ran out of time, with the reason why the last look had no answer.
fn late(view: &View, trouble: Option<String>, global: &Global) -> Error {
    let total = units::span(global.timeout.unwrap_or_default());
    Error::timed_out(trouble.unwrap_or_else(|| view.summary()))
        .context(format!("the update has not ended after {total}, and goes on"))
        .or_help(
            "see how far it is: `polisctl cluster update status`, or wait again: `polisctl \
             cluster update wait`",
        )
}

/// The error of a wait for an update that has ended unseen, since another one has begun.
fn another(last: &View, now: &View) -> Error {
    Error::new(format!("an update to version {} has begun since", now.version))
        .context(format!("it is not known how the update to version {} ended", last.version))
        .or_help("`polisctl node list` shows the version of each node")
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::fs::File;
    use std::io;

    use polis_proto::v1::cluster_update::State;
    use polis_proto::v1::cluster_update::step::State as Progress;

    use super::*;
    use crate::loopback::Cluster;
    use crate::output::{Format, Out, Streams};
    use crate::testing::World;

    /// An update to version 1.1.0 whose steps are those of `a`, `b` and so on.
    fn update(state: State, steps: &[Progress]) -> v1::GetUpdateResponse {
        let step = |(name, state): (char, &Progress)| v1::cluster_update::Step {
            node_id: name.to_string(),
            state: (*state).into(),
            cause: if *state == Progress::Failed { "guru 0310".to_owned() } else { String::new() },
            ..Default::default()
        };
        let bundle = v1::UpdateBundle { version: "1.1.0".to_owned(), ..Default::default() };
        let update = v1::ClusterUpdate {
            bundle: Some(bundle),
            state: state.into(),
            steps: ('a'..).zip(steps).map(step).collect(),
            began_at: 1_700_000_000,
            ..Default::default()
        };
        v1::GetUpdateResponse {
            update: Some(update),
            waits_for: "its disk".to_owned(),
            ..Default::default()
        }
    }

    fn view(state: State, steps: &[Progress]) -> View {
        View::of(&update(state, steps), &[])
    }

    fn paused(steps: &[Progress]) -> View {
        let mut read = update(State::Running, steps);
        read.update.as_mut().unwrap().paused = true;
        View::of(&read, &[])
    }

    /// How a wait ended.
    struct Ended {
        result: Result<(), Error>,
        document: String,
        lines: Vec<String>,
        took: Duration,
    }

    /// Waits from the update `first` on; each look finds the next of `looks`, or fails in this way,
    /// and all later ones find what the last one found.
    async fn waited(
        first: View,
        looks: Vec<Result<View, Exit>>,
        timeout: Option<Duration>,
        format: Format,
    ) -> Ended {
        let world = World::new();
        let (stdout, stderr) = (world.path("stdout"), world.path("stderr"));
        let files = [&stdout, &stderr].map(|file| File::create(file).unwrap());
        let [to_stdout, to_stderr] = files;
        let streams = Streams::new(to_stdout, to_stderr);
        let out = Out { format, streams };
        let global = Global { out, timeout, ..world.global() };
        let mut looks = VecDeque::from(looks);
        let look = async |time: Duration| {
            assert!(time > GRACE, "a look has {time:?}");
            let next = looks.front().cloned().unwrap();
            if looks.len() > 1 {
                looks.pop_front();
            }
            next.map_err(|exit| match exit {
                Exit::TimedOut => Error::timed_out("no leader was found"),
                Exit::Failed | Exit::Usage => Error::new("this user was revoked"),
            })
        };
        let begun = Instant::now();
        let end = timeout.map(|total| begun + total);
        let result = follow(first, end, look, &global).await;
        let read = |file| std::fs::read_to_string(file).unwrap();
        Ended {
            result,
            document: read(stdout),
            lines: read(stderr).lines().map(str::to_owned).collect(),
            took: begun.elapsed(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_turn_has_a_line_as_it_begins_and_as_it_ends() {
        use Progress::{Done, Gone, Turn, Waiting};
        let first = view(State::Loading, &[Waiting; 3]);
        let looks = [
            view(State::Running, &[Turn, Waiting, Waiting]),
            view(State::Running, &[Turn, Waiting, Waiting]),
            view(State::Running, &[Done, Turn, Waiting]),
            // The turn of the last one is over before the next look.
            view(State::Running, &[Done, Gone, Done]),
            view(State::Done, &[Done, Gone, Done]),
        ];
        let looks = looks.into_iter().map(Ok).collect();
        let ended = waited(first, looks, None, Format::Json).await;
        ended.result.unwrap();
        let expected = [
            "a has its turn",
            "a keeps version 1.1.0; 1 of 3 nodes done",
            "b has its turn",
            "b left the cluster",
            "c keeps version 1.1.0; 2 of 3 nodes done",
        ];
        assert_eq!(ended.lines, expected);
        let value: serde_json::Value = serde_json::from_str(&ended.document).unwrap();
        assert_eq!((&value["state"], &value["version"]), (&"done".into(), &"1.1.0".into()));

        // One that waits for an update that goes on already reads of the turn of now.
        let first = view(State::Running, &[Done, Turn]);
        let looks = vec![Ok(view(State::Done, &[Done, Done]))];
        let ended = waited(first, looks, None, Format::Table).await;
        ended.result.unwrap();
        assert_eq!(ended.lines, ["b has its turn", "b keeps version 1.1.0; 2 of 2 nodes done"]);
        // And one whose update has ended does not wait.
        let ended = waited(view(State::Done, &[Done]), Vec::new(), None, Format::Table).await;
        ended.result.unwrap();
        assert_eq!((ended.lines.len(), ended.took), (0, Duration::ZERO));
        assert!(ended.document.contains("done, 1 of 1 nodes done"), "{}", ended.document);
    }

    #[tokio::test(start_paused = true)]
    async fn an_update_that_stops_is_a_failure_with_the_node_the_cause_and_the_next_step() {
        use Progress::{Done, Failed, Turn, Waiting};
        let first = view(State::Running, &[Done, Turn, Waiting]);
        let failed = view(State::Failed, &[Done, Failed, Waiting]);
        let ended = waited(first.clone(), vec![Ok(failed)], None, Format::Json).await;
        let error = ended.result.unwrap_err();
        assert_eq!(error.exit(), Exit::Failed);
        let text = error.render();
        let said = "error: the update stopped: b did not take version 1.1.0\ncause: guru 0310\n";
        assert!(text.starts_with(said), "{text}");
        for next in ["status", "resume", "abort"] {
            assert!(text.contains(&format!("`polisctl cluster update {next}`")), "{text}");
        }
        assert_eq!(ended.lines, ["b has its turn", "b did not take version 1.1.0: guru 0310"]);
        let value: serde_json::Value = serde_json::from_str(&ended.document).unwrap();
        assert_eq!(value["steps"][1]["cause"], "guru 0310");

        let aborted = view(State::Aborted, &[Done, Turn, Waiting]);
        let ended = waited(first, vec![Ok(aborted)], None, Format::Table).await;
        let error = ended.result.unwrap_err();
        assert_eq!(error.exit(), Exit::Failed);
        assert!(error.render().contains("the update to version 1.1.0 was aborted"));
    }

    /// A standard output whose reader has left.
    struct Closed;

    impl io::Write for Closed {
        fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_closed_output_does_not_hide_how_the_update_ended() {
        let world = World::new();
        let out = Out { format: Format::Json, streams: Streams::new(Closed, io::sink()) };
        let global = Global { out, ..world.global() };
        for (state, is_closed) in
            [(State::Failed, false), (State::Aborted, false), (State::Done, true)]
        {
            let look = async |_time: Duration| Err::<View, _>(Error::new("no look was needed"));
            let error = follow(view(state, &[]), None, look, &global).await.unwrap_err();
            assert_eq!(error.is_output_closed(), is_closed, "{}", error.render());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_and_an_outage_are_printed_once_and_do_not_end_the_wait() {
        use Progress::{Done, Turn, Waiting};
        let first = view(State::Running, &[Turn, Waiting]);
        let looks = vec![
            Err(Exit::TimedOut),
            // A connection that breaks.
            Err(Exit::Failed),
            Err(Exit::Failed),
            Ok(paused(&[Done, Waiting])),
            Ok(paused(&[Done, Waiting])),
            Err(Exit::Failed),
            Ok(view(State::Running, &[Done, Turn])),
            Ok(view(State::Done, &[Done, Done])),
        ];
        let ended = waited(first, looks, None, Format::Table).await;
        ended.result.unwrap();
        let paused = "the update is paused: no further node gets its turn until `polisctl cluster \
                      update resume`";
        let expected = [
            "a has its turn",
            "no newer answer: no leader was found",
            "answers again",
            "a keeps version 1.1.0; 1 of 2 nodes done",
            paused,
            "no newer answer: this user was revoked",
            "answers again",
            "b has its turn",
            "the update is resumed",
            "b keeps version 1.1.0; 2 of 2 nodes done",
        ];
        assert_eq!(ended.lines, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_runs_out_of_time_says_that_the_update_goes_on() {
        let first = view(State::Running, &[Progress::Turn]);
        let total = Duration::from_secs(3);
        for (looks, cause) in [
            (vec![Ok(first.clone())], "running to version 1.1.0, 0 of 1 nodes done; waits for"),
            (vec![Err(Exit::TimedOut)], "no leader was found"),
        ] {
            let ended = waited(first.clone(), looks, Some(total), Format::Json).await;
            let error = ended.result.unwrap_err();
            assert_eq!(error.exit(), Exit::TimedOut);
            let text = error.render();
            assert!(text.starts_with("error: the update has not ended after 3.0 s, and goes on\n"));
            assert!(text.contains(&format!("cause: {cause}")), "{text}");
            assert!(text.contains("`polisctl cluster update wait`"), "{text}");
            assert_eq!(ended.document, "");
            assert!((total..total + PACE).contains(&ended.took), "{:?}", ended.took);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_user_who_is_refused_again_and_again_waits_no_longer() {
        let first = view(State::Running, &[Progress::Turn]);
        let ended = waited(first, vec![Err(Exit::Failed)], None, Format::Table).await;
        let error = ended.result.unwrap_err();
        assert_eq!((error.exit(), &*ended.document), (Exit::Failed, ""));
        let text = error.render();
        assert!(text.contains("goes on without this command\ncause: this user was rev"), "{text}");
        assert!(text.contains("`polisctl cluster update status`"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_another_update_is_not_taken_for_that_of_this_one() {
        let first = view(State::Running, &[Progress::Turn]);
        let mut later = update(State::Done, &[Progress::Done]);
        later.update.as_mut().unwrap().began_at += 1;
        let looks = vec![Ok(View::of(&later, &[]))];
        let ended = waited(first, looks, None, Format::Table).await;
        let error = ended.result.unwrap_err();
        assert_eq!((error.exit(), &*ended.document), (Exit::Failed, ""));
        assert!(error.render().contains("has begun since"), "{}", error.render());
    }

    #[test]
    fn a_command_that_waits_for_an_update_ends_with_it_or_with_its_time() {
        use Progress::{Done, Failed, Turn};
        let world = World::new();
        let cluster = Cluster::new(&world);
        let release = ed25519_dalek::SigningKey::from_bytes(&[3; 32]);
        let bundle = crate::update::tests::bundle(&release);
        crate::contexts::write(&world.path("update"), &bundle).unwrap();
        let update = ["cluster", "update", "@update", "--yes", "--wait"];
        cluster.update_goes_on(&[
            (State::Running, Turn, ""),
            (State::Running, Done, ""),
            (State::Done, Done, ""),
        ]);
        let ended = world.run(&[&update[..], &["--output", "json"]].concat());
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(value["state"], "done");
        assert!(ended.stderr.contains("web-1 (polis-"), "{}", ended.stderr);
        assert!(ended.stderr.contains("keeps version 1.0.0; 1 of 1 nodes done"));
        let asked = ["PlanUpdate 1.0.0", "BeginUpdate 1.0.0", "StoreBundle 1.0.0"];
        assert_eq!(cluster.asked(), asked);

        cluster.update_goes_on(&[(State::Running, Turn, ""), (State::Failed, Failed, "a guru")]);
        let ended = world.run(&update);
        assert_eq!(ended.status, 1, "{}", ended.stderr);
        assert!(ended.stderr.contains("\ncause: a guru\nhelp: "), "{}", ended.stderr);
        assert!(ended.stdout.contains("failed, 0 of 1 nodes done"), "{}", ended.stdout);

        cluster.update_goes_on(&[(State::Running, Turn, "")]);
        let wait = ["cluster", "update", "wait", "--timeout", "2s"];
        let ended = world.run(&wait);
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("not ended after 2.0 s, and goes on"), "{}", ended.stderr);
        cluster.update_goes_on(&[(State::Running, Turn, ""), (State::Done, Done, "")]);
        world.runs(&wait[..3]);
    }
}
