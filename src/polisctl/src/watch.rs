//! `--watch`: asks again and again, and shows what changes.
//!
//! On a terminal the screen is redrawn; elsewhere, and with `--output json`, each change is
//! printed once, a document a line.
//!
//! Invariants:
//! - A value that moves by itself, such as an age, is not a change.
//! - An outage does not end a watch once it had an answer: the last answer stays, with its age
//!   and the reason.
//!
//! What this module does not do: handle Ctrl-C. The terminal keeps its mode, so the
//! signal may end the program at any moment.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use super::Global;
use super::error::Error;
use super::output::{Document, Format};
use super::units;
use polis_base::sys::clock;

/// Between two queries: a leader notices a dead node only after twelve seconds.
const PACE: Duration = Duration::from_secs(2);

/// Values that differ in every answer of a cluster in which nothing happens: ages, and what
/// each write to etcd moves.
const MOVING: [&str; 9] = [
    "clock_offset_us",
    "heartbeat_age_ms",
    "told_age_ms",
    "uptime_seconds",
    "index",
    "applied_index",
    "revision",
    "db_bytes",
    "db_used_bytes",
];

/// The option of commands that print a state.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Watch {
    /// Ask again every two seconds and show each change, until Ctrl-C or the end of --timeout.
    #[arg(short, long)]
    watch: bool,
}

impl Watch {
    /// Whether the command goes on.
    pub(super) fn is_on(self) -> bool {
        self.watch
    }

    /// Prints what `ask` answers: once, or as often as it changes.
    ///
    /// # Errors
    ///
    /// The first answer's; later ones are shown and do not end the watch.
    pub(super) async fn run(
        self,
        global: &Global,
        mut ask: impl AsyncFnMut() -> Result<Document, Error>,
    ) -> Result<(), Error> {
        if !self.watch {
            return global.out.print(&Box::pin(ask()).await?);
        }
        // On the heap: the futures of every command that can watch contain this one.
        let mut shown = Shown::default();
        let Some(total) = global.timeout else {
            return Box::pin(follow(global, ask, &mut shown)).await;
        };
        match timeout(total, Box::pin(follow(global, ask, &mut shown))).await {
            Ok(ended) => ended,
            // A watch that a person has limited ends as it was asked to.
            Err(_elapsed) if shown.last.is_some() => Ok(()),
            Err(_elapsed) => {
                let what = format!("no answer within {}", units::span(total));
                Err(Error::timed_out(what).or_help("allow more time: --timeout"))
            }
        }
    }
}

async fn follow(
    global: &Global,
    mut ask: impl AsyncFnMut() -> Result<Document, Error>,
    shown: &mut Shown,
) -> Result<(), Error> {
    loop {
        match Box::pin(ask()).await {
            Ok(document) => shown.answer(document, global)?,
            Err(error) if shown.last.is_none() => return Err(error),
            Err(error) => shown.failure(&error, global)?,
        }
        sleep(PACE).await;
    }
}

/// An answer, and when it came.
type Answer = (Document, Instant);

/// The output that the reader has seen.
#[derive(Debug, Default)]
struct Shown {
    last: Option<Answer>,
    /// Why a newer answer is missing.
    trouble: Option<String>,
}

impl Shown {
    fn answer(&mut self, document: Document, global: &Global) -> Result<(), Error> {
        let recovered = self.trouble.take().is_some();
        let is_new = self.last.as_ref().is_none_or(|(last, _)| differ(last, &document));
        let out = &global.out;
        if out.is_screen() {
            let head = format!("Every {} s, last at {}; Ctrl-C ends.", PACE.as_secs(), now());
            out.redraw(&head, &document)?;
        } else {
            if recovered {
                out.remark("answers again");
            }
            if is_new {
                if out.format == Format::Table {
                    out.raw(format!("{}\n", now()).as_bytes())?;
                }
                out.stream(&document)?;
            }
        }
        self.last = Some((document, Instant::now()));
        Ok(())
    }

    fn failure(&mut self, error: &Error, global: &Global) -> Result<(), Error> {
        let trouble = error.summary();
        let out = &global.out;
        if let (true, Some((last, at))) = (out.is_screen(), &self.last) {
            let age = units::span(at.elapsed());
            out.redraw(&format!("No newer answer for {age}: {trouble}"), last)?;
        } else if self.trouble.as_ref() != Some(&trouble) {
            out.remark(&format!("no newer answer: {trouble}"));
        }
        self.trouble = Some(trouble);
        Ok(())
    }
}

fn now() -> String {
    units::date(clock::now())
}

fn differ(one: &Document, other: &Document) -> bool {
    steady(one.value()) != steady(other.value())
}

/// A value without what moves by itself.
fn steady(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let stays = fields.iter().filter(|(name, _)| !MOVING.contains(&name.as_str()));
            Value::Object(stays.map(|(name, value)| (name.clone(), steady(value))).collect())
        }
        Value::Array(values) => Value::Array(values.iter().map(steady).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::loopback::{Cluster, NAME, NODE};
    use crate::output::{Out, Streams};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn what_moves_by_itself_is_no_change() {
        let document = |value: Value| Document::new(&value, "").unwrap();
        let node = |age: u32, state: &str| {
            document(json!({ "nodes": [{ "heartbeat_age_ms": age, "state": state }], "term": 1 }))
        };
        assert!(!differ(&node(1, "up"), &node(900, "up")));
        assert!(differ(&node(1, "up"), &node(1, "new")));
        assert!(differ(&node(1, "up"), &document(json!({ "nodes": [], "term": 1 }))));
    }

    #[test]
    fn every_command_that_shows_a_state_can_watch_it() {
        fn states(command: &clap::Command, path: &str, found: &mut Vec<(String, bool)>) {
            for below in command.get_subcommands() {
                let path = format!("{path} {}", below.get_name());
                let watches = below.get_arguments().any(|one| one.get_id() == "watch");
                found.push((path.trim().to_owned(), watches));
                states(below, &path, found);
            }
        }
        let mut found = Vec::new();
        states(&crate::command(), "", &mut found);
        let state = ["status", "list", "nodes", "services", "firewall", "members", "top"];
        for (path, watches) in found {
            // Contexts are files of the person who would watch them, and a bucket is outside of
            // the cluster.
            let elsewhere = ["context list", "snapshot list"].contains(&path.as_str());
            let shows = state.iter().any(|word| path.ends_with(word)) && !elsewhere;
            assert_eq!(shows, watches, "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_renewed_has_its_age_on_the_screen() {
        let world = World::new();
        let file = std::fs::File::create(world.path("screen")).unwrap();
        let streams = Streams::new(file, std::io::sink()).with_columns(80);
        let global = Global { out: Out { format: Format::Table, streams }, ..world.global() };
        let mut shown = Shown::default();
        shown.answer(Document::new(&"value", "the table").unwrap(), &global).unwrap();
        for (seconds, age) in [(15, "15 s"), (60, "1 min 15 s")] {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            shown.failure(&Error::new("no leader answers"), &global).unwrap();
            let screen = std::fs::read_to_string(world.path("screen")).unwrap();
            let head = format!("No newer answer for {age}: no leader answers\n\nthe table\n");
            assert!(screen.ends_with(&head), "{screen:?}");
        }
    }

    /// Three queries.
    const LIMIT: &str = "4500ms";

    #[test]
    fn a_program_reads_a_document_a_change_and_a_terminal_is_redrawn() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        std::thread::scope(|scope| {
            let watch = |line: &'static [&str]| {
                let world = &world;
                scope.spawn(move || world.run(line))
            };
            let json = watch(&["node", "list", "-w", "-o", "json", "--timeout", LIMIT]);
            let node = watch(&["node", "status", NAME, "-w", "-o", "json", "--timeout", LIMIT]);
            let screen =
                scope.spawn(|| world.run_in(80, &["node", "list", "--watch", "--timeout", LIMIT]));
            for ended in [json.join().unwrap(), node.join().unwrap()] {
                assert_eq!((ended.status, &*ended.stderr), (0, ""), "{}", ended.stdout);
                let lines: Vec<Value> =
                    ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
                assert_eq!(lines.len(), 1, "nothing has changed: {}", ended.stdout);
                let said = lines[0].get(0).unwrap_or(&lines[0]);
                assert_eq!(said["id"], *id);
            }
            let ended = screen.join().unwrap();
            assert_eq!((ended.status, &*ended.stderr), (0, ""));
            let frames = ended.stdout.matches("\u{1b}[H\u{1b}[2J").count();
            assert!((2..=4).contains(&frames), "{frames}: {:?}", ended.stdout);
            assert_eq!(ended.stdout.matches("NODE ").count(), frames);
        });
        assert!(cluster.asked().iter().filter(|call| *call == "GetStatus").count() >= 2);
    }

    #[test]
    fn an_outage_is_shown_and_does_not_end_a_watch_and_a_first_failure_does() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let line = ["etcd", "status", "-w", "-o", "json", "--timeout", "6s"];
        let ended = std::thread::scope(|scope| {
            let watch = scope.spawn(|| world.run(&line));
            cluster.until_etcd_is_read();
            cluster.etcd_is_silent();
            watch.join().unwrap()
        });
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        let answers: Vec<Value> =
            ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(answers.len(), 2, "{}", ended.stdout);
        assert_eq!(answers[0]["members"][0]["answers"], true);
        assert_eq!(answers[1]["members"][0]["answers"], false);

        let ended = world.run(&["node", "status", "web-9", "-w"]);
        assert_eq!((ended.status, &*ended.stdout), (1, ""), "{}", ended.stderr);
    }
}
