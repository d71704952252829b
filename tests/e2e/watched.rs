//! A person who watches an outage: `cluster status`, the dashboard, and the page Cluster of a
//! console, each asked of `polisctl`, and how long each takes until it is right.
//!
//! ```text
//! polisctl dashboard  --terminal--> vt100 --+
//! polisctl console, 2 --terminal--> vt100 --+--judged--> Trail: what it said, since when
//! polisctl cluster status, again and again -+
//! ```
//!
//! A view that is right says of the node that is gone, and of no other, that it is gone.
//!
//! Invariants:
//! - A view that no longer says that all is well does not come back to it while the node is gone.
//! - All three views are right at once within [`RIGHT_MAX`], and still at the end.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZero;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::deadline::Deadline;
use polis_qemu::{Fleet, Operator};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use crate::world::SOON;

/// Longest until every view is right, from the moment at which the node went.
const RIGHT_MAX: Duration = Duration::from_secs(15);

/// Rows and columns of a person's terminal.
const SIZE: [NonZero<u16>; 2] = [NonZero::new(40).unwrap(), NonZero::new(120).unwrap()];

/// Between two questions of the watcher, and two looks at what it noted.
const PAUSE: Duration = Duration::from_millis(200);

/// The cluster in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    /// It is healthy.
    Well,
    /// Something is wrong, or not known, and not yet what.
    Trouble,
    /// The node that is gone is gone, and no other.
    Right,
}

/// Each change of what a view says, with its time.
#[derive(Debug, Default)]
struct Trail {
    said: Vec<(Option<Instant>, Says)>,
    /// The view that came back to *all is well*, if one did.
    again: Option<String>,
}

impl Trail {
    /// Nothing but *all is well*, which does not count as a change.
    fn well() -> Self {
        Self { said: vec![(None, Says::Well)], again: None }
    }

    /// `text` is what a person reads.
    fn note(&mut self, says: Says, text: &str) {
        if self.now() == Some(says) {
            return;
        }
        self.said.push((Some(Instant::now()), says));
        if self.is_well_again() {
            self.again.get_or_insert_with(|| text.to_owned());
        }
    }

    fn now(&self) -> Option<Says> {
        self.said.last().map(|(_, says)| *says)
    }

    /// When it became right for good; `None` while it is not.
    fn right_since(&self) -> Option<Instant> {
        let (at, says) = self.said.last()?;
        at.filter(|_| *says == Says::Right)
    }

    /// Whether it said that all is well after it had said something else.
    fn is_well_again(&self) -> bool {
        let mut said = self.said.iter().map(|(_, says)| *says);
        said.any(|says| says != Says::Well) && said.any(|says| says == Says::Well)
    }
}

type Shared<T> = Arc<Mutex<T>>;

/// A thread that panicked has noted all that it saw.
fn locked<T>(shared: &Shared<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names by which views call a node: its ID, the beginning of it, or its name.
#[derive(Clone, Debug)]
struct Names {
    id: String,
    name: Option<String>,
}

impl Names {
    fn of(node: &Value) -> Option<Self> {
        let text = |key: &str| node[key].as_str().map(str::to_owned);
        Some(Self { id: text("id")?, name: text("name") })
    }

    /// Whether a row of a screen is about this node.
    fn begins(&self, row: &str) -> bool {
        let short = &self.id[..self.id.len().min("polis-".len() + 8)];
        let first = row.split_whitespace().next().unwrap_or_default();
        first.starts_with(short) || self.name.as_deref() == Some(first)
    }
}

/// The nodes of the cluster, and which of them goes.
#[derive(Clone, Debug)]
struct Cast {
    gone: Names,
    others: Vec<Names>,
}

impl Cast {
    /// `is_well`: whether it says that nothing is wrong with the node that goes.
    fn verdict(&self, is_well: bool, is_accused: impl Fn(&Names) -> bool) -> Says {
        match (is_accused(&self.gone), self.others.iter().any(is_accused)) {
            (true, false) => Says::Right,
            (false, false) if is_well => Says::Well,
            (_, _) => Says::Trouble,
        }
    }

    /// The verdict of a screen: a row is a mark, the node, and facts, and the mark `!` accuses.
    fn screen(&self, text: &str) -> Says {
        let rows: Vec<_> =
            text.lines().filter_map(|line| line.trim_start().split_once(' ')).collect();
        let accused =
            |names: &Names| rows.iter().any(|(mark, row)| *mark == "!" && names.begins(row));
        // The dashboard has the health of each; warnings keep its headline from *all healthy*.
        let is_healthy = |(_, row): &(&str, &str)| self.gone.begins(row) && row.contains("healthy");
        self.verdict(text.contains("all healthy") || rows.iter().any(is_healthy), accused)
    }

    fn status(&self, status: &Value) -> Says {
        let problems = status["problems"].as_array().map(Vec::as_slice).unwrap_or_default();
        let accused = |names: &Names| {
            problems.iter().filter_map(Value::as_str).any(|problem| {
                let is_gone = ["overdue", "does not answer"].iter().any(|it| problem.contains(it));
                is_gone && problem.contains(&names.id)
            })
        };
        self.verdict(status["healthy"] == true, accused)
    }
}

/// `polisctl` on a terminal, and what is on it.
struct Screen {
    child: Child,
    keyboard: File,
    shown: Shared<vt100::Parser>,
    trail: Shared<Trail>,
}

impl Screen {
    /// Starts the program. A thread reads the terminal until the program ends, and notes what
    /// the screen says while `page` is on it.
    #[expect(clippy::disallowed_methods, reason = "the rule is for the node; this is the host")]
    fn start(operator: &Operator, args: &[&str], page: &'static str, cast: &Cast) -> Result<Self> {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&terminal)?;
        unlockpt(&terminal)?;
        let [rows, columns] = SIZE;
        let size =
            Winsize { ws_row: rows.get(), ws_col: columns.get(), ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let line = rustix::fs::open(ptsname(&terminal, Vec::new())?, flags, Mode::empty())?;
        let stdio = || line.try_clone().map(Stdio::from);
        // The screens open /dev/tty: the terminal of their own group of processes.
        let mut command = Command::new("setsid");
        command.arg("--ctty").args(operator.words(args));
        command.stdin(stdio()?).stdout(stdio()?).stderr(stdio()?);
        let child = command.spawn().context("cannot start polisctl on a terminal")?;
        let shown = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let trail = Shared::<Trail>::default();
        let (mut output, keyboard) = (File::from(terminal.try_clone()?), File::from(terminal));
        let (written, noted, cast) = (Arc::clone(&shown), Arc::clone(&trail), cast.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 65536];
            // The terminal has no more to read once the program has ended.
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                let mut shown = locked(&written);
                shown.process(&bytes[..length]);
                let text = shown.screen().contents();
                drop(shown);
                let says = if text.contains(page) { cast.screen(&text) } else { Says::Trouble };
                locked(&noted).note(says, &text);
            }
        });
        Ok(Self { child, keyboard, shown, trail })
    }

    fn text(&self) -> String {
        locked(&self.shown).screen().contents()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // `setsid` has become the program.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// `cluster status`, again and again.
struct Asked {
    trail: Shared<Trail>,
    newest: Shared<String>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Asked {
    fn start(operator: Operator, cast: Cast) -> Self {
        let (trail, newest) = (Shared::<Trail>::default(), Shared::<String>::default());
        let over = Arc::new(AtomicBool::new(false));
        let (noted, answer, ends) = (Arc::clone(&trail), Arc::clone(&newest), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let (says, text) = match operator.document(&["cluster", "status"]) {
                    Ok(status) => (cast.status(&status), status["problems"].to_string()),
                    Err(error) => (Says::Trouble, error.to_string()),
                };
                locked(&noted).note(says, &text);
                *locked(&answer) = text;
                pause();
            }
        });
        Self { trail, newest, over, thread: Some(thread) }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // The last question ends by its own time.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

/// A person who watches one node go.
pub(crate) struct Watch {
    dashboard: Screen,
    page: Screen,
    asked: Asked,
    began: Instant,
}

const VIEWS: [&str; 3] = ["cluster status", "dashboard", "F2"];

impl Watch {
    /// Opens the screens, and waits until all say that the cluster is healthy. `gone` is the
    /// node that will go, `beside` the one whose console is open.
    pub(crate) fn open(cluster: &Fleet, gone: usize, beside: usize) -> Result<Self> {
        let operator = &cluster.operator;
        let nodes = operator.document(&["--timeout", "2m", "node", "list"])?;
        let nodes: Vec<_> = nodes.as_array().into_iter().flatten().filter_map(Names::of).collect();
        let is_gone = |names: &Names| names.id == cluster.nodes[gone].id;
        let (mut gone, others): (Vec<_>, Vec<_>) = nodes.into_iter().partition(is_gone);
        let cast = Cast { gone: gone.pop().context("the node is not listed")?, others };
        let node = &cluster.nodes[beside].id;
        let patient = ["--timeout", "2m"];
        let screen = |args: &[&str], page| {
            Screen::start(operator, &[&patient[..], args].concat(), page, &cast)
        };
        let dashboard = screen(&["dashboard"], "Up, Down: choose")?;
        let page = screen(&["console", node], "[F2 Cluster]")?;
        let asked = Asked::start(operator.clone(), cast.clone());
        let mut watch = Self { dashboard, page, asked, began: Instant::now() };
        let mut end = Deadline::within(SOON);
        while watch.says() != [Some(Says::Well); 3] {
            ensure!(!end.is_over(), "not healthy before the node goes:\n{}", watch.shown());
            watch.page.keyboard.write_all(b"2")?;
            pause();
        }
        // The screens are not judged while they open.
        for trail in watch.trails() {
            *locked(trail) = Trail::well();
        }
        watch.began = Instant::now();
        Ok(watch)
    }

    fn trails(&self) -> [&Shared<Trail>; 3] {
        [&self.asked.trail, &self.dashboard.trail, &self.page.trail]
    }

    fn says(&self) -> [Option<Says>; 3] {
        self.trails().map(|trail| locked(trail).now())
    }

    fn shown(&self) -> String {
        let (dashboard, page) = (self.dashboard.text(), self.page.text());
        let status = locked(&self.asked.newest).clone();
        format!("{:?}\n{status}\n{dashboard}\n{page}", self.says())
    }

    /// Waits until all three views are right.
    pub(crate) fn is_right_in_time(&self) -> Result<()> {
        let mut late = Deadline::within(RIGHT_MAX);
        while self.says() != [Some(Says::Right); 3] {
            ensure!(!late.is_over(), "not right within {RIGHT_MAX:?}:\n{}", self.shown());
            // Keys do not keep a screen from asking again.
            for screen in [&self.dashboard, &self.page] {
                (&screen.keyboard).write_all(b"jk")?;
            }
            pause();
        }
        Ok(())
    }

    /// Ends the watch while the node is still gone, and prints when each view became right:
    /// seconds on the wall, so a busy host has more of them.
    pub(crate) fn was_never_well(self, what: &str) -> Result<()> {
        let mut told = Vec::new();
        for (view, trail) in VIEWS.into_iter().zip(self.trails()) {
            let trail = locked(trail);
            let said: Vec<_> = trail
                .said
                .iter()
                .map(|(at, says)| {
                    let at = at.map_or(0.0, |at| (at - self.began).as_secs_f64());
                    format!("{says:?} {at:.1}")
                })
                .collect();
            let said = said.join(", ");
            if let Some(text) = &trail.again {
                bail!("{what}: {view} was well again: {said}\n{text}");
            }
            let right = trail.right_since().with_context(|| {
                format!("{what}: {view} is not right any more: {said}\n{}", self.shown())
            })?;
            told.push(format!("{view} {:.1} s ({said})", (right - self.began).as_secs_f64()));
        }
        eprintln!("{what}; right after: {}", told.join("; "));
        Ok(())
    }
}

/// Between two looks.
#[expect(clippy::disallowed_methods, reason = "a story's thread may wait between two looks")]
fn pause() {
    std::thread::sleep(PAUSE);
}
