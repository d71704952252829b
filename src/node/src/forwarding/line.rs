//! Lines on their way to a target: the records of the ring with what both protocols say of
//! them.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_runtime::logtree::ring::{Recorder, Stretch};
use polis_runtime::logtree::{Body, Entry, Item, Levelled, Origin};

/// The name under which lines about the log itself are sent.
const OWN_NAME: &str = "root.logs";

/// The node, as lines name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject {
    /// The ID of the node.
    pub(super) id: String,
    /// Its name beside the ID; empty: none.
    pub(super) name: String,
    /// The domain of the cluster; empty: not known.
    pub(super) cluster: String,
    /// The version of the system that sends.
    pub(super) version: String,
}

impl Subject {
    /// The name, where it has one, else the ID.
    pub(super) fn host(&self) -> &str {
        if self.name.is_empty() { &self.id } else { &self.name }
    }
}

/// One line.
#[derive(Clone, Debug)]
pub(super) struct Line {
    /// The number of its record; `None`: it says what is missing.
    pub(super) number: Option<u64>,
    /// When it was written; `None` where no clock can say it.
    pub(super) time: Option<SystemTime>,
    pub(super) entry: Arc<Entry>,
}

/// Lines of one process.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) recorder: Recorder,
    pub(super) lines: Vec<Line>,
}

impl Batch {
    /// The lines of a part of the ring.
    pub(super) fn of(stretch: &Stretch) -> Self {
        let recorder = stretch.recorder.clone();
        let started = if recorder.is_now {
            // Better than the clock of the start, which may not have been set yet.
            clock::now().checked_sub(clock::uptime())
        } else {
            UNIX_EPOCH.checked_add(Duration::from_secs(recorder.started))
        };
        let mut at = stretch.records.iter().find_map(|(_, item)| match item {
            Item::Entry(entry) => Some(entry.at),
            Item::Lost(_) => None,
        });
        let mut lines = Vec::with_capacity(stretch.records.len() + 1);
        let mut put = |number, entry: Arc<Entry>| {
            let time = started.and_then(|started| started.checked_add(entry.at));
            lines.push(Line { number, time, entry });
        };
        if stretch.missing > 0 {
            let text = "lines of the log are missing here: they were overwritten or damaged \
                        before they could be delivered";
            put(None, notice(stretch.missing, text, at));
        }
        for (number, item) in &stretch.records {
            match item {
                Item::Entry(entry) => {
                    at = Some(entry.at);
                    put(Some(*number), Arc::clone(entry));
                }
                Item::Lost(count) => {
                    let text = "lines of the log are missing here: the disk did not take them";
                    put(Some(*number), notice(*count, text, at));
                }
            }
        }
        Self { recorder, lines }
    }
}

fn notice(count: u64, text: &str, at: Option<Duration>) -> Arc<Entry> {
    let message = format!("{count} {text}");
    Arc::new(Entry {
        number: 0,
        at: at.unwrap_or_default(),
        name: OWN_NAME.into(),
        origin: Origin::Service,
        body: Body::Levelled(Levelled::new(Severity::Warning, message)),
    })
}
