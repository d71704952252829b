//! The board of boot stages: where services report the stage that they work on.
//!
//! A change is an event value for the console and a line on the serial port.
//!
//! Invariants:
//! - The boot is over once the node is ready: a stage that was done by then stays done on
//!   the board, with its time. A service that starts or waits again after that has a line
//!   on the serial port and a page of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use polis_base::stage::{Entry, Stage, Stages, State, line};
use tokio::sync::watch;

use crate::lines::Lines;

/// The board where services report the stage that they work on. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Board {
    stages: watch::Sender<Stages>,
    lines: Lines,
    /// The state of each stage in its last line.
    printed: Arc<Mutex<BTreeMap<Stage, State>>>,
}

impl Board {
    /// A board that already shows the stages of `init`.
    #[must_use]
    pub fn new(before: Stages, lines: Lines) -> Self {
        let printed = before.iter().map(|(stage, entry)| (*stage, entry.state.clone())).collect();
        let printed = Arc::new(Mutex::new(printed));
        Self { stages: watch::Sender::new(before), lines, printed }
    }

    /// Records that `stage` is now in `state`, and prints a line when that is new. Once the
    /// node is ready, a stage that was done only has the line, unless it fails.
    pub fn set(&self, stage: Stage, state: State) {
        // Around both, so that the last line of a stage is what the board shows.
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        let now = polis_base::sys::clock::uptime();
        self.stages.send_if_modified(|stages| {
            let is_done = |entry: &Entry| entry.state == State::Done;
            let ready = stages.get(&Stage::Roles).is_some_and(is_done);
            match stages.get_mut(&stage) {
                Some(entry) if entry.state == state => false,
                Some(entry) if ready && is_done(entry) && state != State::Failed => false,
                Some(entry) => {
                    entry.state = state.clone();
                    entry.changed = now;
                    true
                }
                None => {
                    let entry = Entry { state: state.clone(), started: now, changed: now };
                    stages.insert(stage, entry);
                    true
                }
            }
        });
        if printed.get(&stage) != Some(&state) {
            self.lines.put(line(stage, &state, now).to_string());
            printed.insert(stage, state);
        }
    }

    /// The board as an event value.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Stages> {
        self.stages.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_does_not_begin_again_once_the_node_is_ready() {
        let (lines, mut written) = Lines::channel();
        let board = Board::new(Stages::new(), lines);
        let stages = board.watch();
        let waits = || State::Waiting("a quorum".to_owned());
        // Before the node is ready, a stage may be done and begin again.
        for state in [State::Started, State::Done, waits(), State::Done] {
            board.set(Stage::Consensus, state.clone());
            assert_eq!(stages.borrow()[&Stage::Consensus].state, state);
        }
        board.set(Stage::Roles, State::Done);
        let before = stages.borrow().clone();
        while written.try_recv().is_ok() {}
        board.set(Stage::Consensus, waits());
        board.set(Stage::Consensus, waits());
        board.set(Stage::Consensus, State::Done);
        assert_eq!(*stages.borrow(), before);
        // The serial port has both, once each.
        let lines: Vec<String> = std::iter::from_fn(|| written.try_recv().ok()).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("state=waiting") && lines[1].contains("state=done"), "{lines:?}");
        // A stage that begins for the first time, and one that fails, are on the board.
        board.set(Stage::Curator, State::Started);
        board.set(Stage::Consensus, State::Failed);
        assert_eq!(stages.borrow()[&Stage::Curator].state, State::Started);
        assert_eq!(stages.borrow()[&Stage::Consensus].state, State::Failed);
    }

    #[test]
    fn of_two_services_that_report_a_stage_at_once_the_last_line_is_what_the_board_shows() {
        for _ in 0..500 {
            let (lines, mut written) = Lines::channel();
            let board = Board::new(Stages::new(), lines);
            std::thread::scope(|scope| {
                for state in [State::Started, State::Done] {
                    let board = &board;
                    scope.spawn(move || board.set(Stage::Consensus, state));
                }
            });
            let last = std::iter::from_fn(|| written.try_recv().ok()).last().unwrap();
            let shown = board.watch().borrow()[&Stage::Consensus].state.name();
            assert!(last.contains(&format!(" state={shown} ")), "{last}, and not {shown}");
        }
    }
}
