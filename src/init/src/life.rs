//! The state machine of `init`: its reaction to each event of `node`.
//!
//! Pure: the main loop in `stage2` turns descriptors into events and carries
//! the effects out.
//!
//! ```text
//!             ask (button, Ctrl-Alt-Del, signal)
//! [Running] ------------------------------------> [Stopping until deadline]
//!    |  |                                             | off, node's end, deadline
//!    |  +-- off ----------------------------------> [Over: off]
//!    +----- guru, node's end, its silence --------> [Over: guru]
//! ```
//!
//! Invariants:
//! - `node` never ends without a consequence.
//! - Once someone asked for the end, the machine ends: no failure on the way
//!   opens the trapdoor any more.

use std::time::Duration;

use polis_base::sys::reboot::Reason;
use polis_base::sys::spawn::Ended;
use polis_base::trapdoor::Report;

/// How long `node` may take to stop everything in order.
pub const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// How much longer it takes where it moves pods away first.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(60);

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `node` reports that this boot is good.
    Ready,
    /// `node` moves pods away before it stops.
    Draining,
    /// `node` has stopped everything and asks for the machine's end.
    Off(Reason),
    /// `node` can't go on.
    Guru(Report),
    /// `node` is gone.
    NodeEnded(Ended),
    /// `node` has given no sign of life for so long.
    Hung(Duration),
    /// A person or a signal asks for the machine's end.
    Asked(Reason),
    /// Time has passed.
    Tick,
}

/// The state of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// `node` runs.
    Running,
    /// `node` was asked to stop.
    Stopping {
        /// Why.
        reason: Reason,
        /// Seconds since the kernel started at which it has had its time.
        deadline: Duration,
        /// What it does about its pods.
        pods: Pods,
    },
    /// The run is over.
    Over(Outcome),
}

/// What a `node` that stops does about its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pods {
    /// It has not said that it moves any.
    Unknown,
    /// It moves them away.
    Leave,
    /// It was asked again, and waits for them no more.
    Stay,
}

/// How the run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// In order.
    Off(Reason),
    /// By a report.
    Guru(Report),
    /// `node` ended without a report.
    Death(Ended),
    /// `node` hangs.
    Hung(Duration),
}

/// An effect that must be carried out now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Forget the failed attempts.
    ResetAttempts,
    /// Ask `node` to stop.
    AskToStop(Reason),
    /// Write a warning to the log.
    Warn(String),
}

impl State {
    /// The state and the effects after `event` at `now`.
    #[must_use]
    pub fn step(self, event: Event, now: Duration) -> (Self, Vec<Effect>) {
        match (self, event) {
            (Self::Running, Event::Ready) => (Self::Running, vec![Effect::ResetAttempts]),
            (Self::Running, Event::Off(reason)) => over(Outcome::Off(reason)),
            (Self::Running, Event::Guru(report)) => over(Outcome::Guru(report)),
            (Self::Running, Event::NodeEnded(ended)) => over(Outcome::Death(ended)),
            (Self::Running, Event::Hung(silent)) => over(Outcome::Hung(silent)),
            (Self::Running, Event::Asked(reason)) => {
                let deadline = now + STOP_DEADLINE;
                let pods = Pods::Unknown;
                (Self::Stopping { reason, deadline, pods }, vec![Effect::AskToStop(reason)])
            }
            // The console asked, which needs no deadline: a person may ask again.
            (Self::Running, Event::Tick | Event::Draining) => (Self::Running, Vec::new()),
            (Self::Stopping { reason, deadline, pods: Pods::Unknown }, Event::Draining) => {
                let deadline = deadline + DRAIN_DEADLINE;
                (Self::Stopping { reason, deadline, pods: Pods::Leave }, Vec::new())
            }
            (Self::Stopping { reason, pods: Pods::Leave, .. }, Event::Asked(_)) => {
                let deadline = now + STOP_DEADLINE;
                let stopping = Self::Stopping { reason, deadline, pods: Pods::Stay };
                (stopping, vec![Effect::AskToStop(reason)])
            }
            (Self::Stopping { reason, .. }, Event::Off(_) | Event::NodeEnded(_)) => {
                over(Outcome::Off(reason))
            }
            (Self::Stopping { reason, .. }, Event::Guru(report)) => {
                let text = format!("node failed while stopping: {}", report.cause());
                (Self::Over(Outcome::Off(reason)), vec![Effect::Warn(text)])
            }
            (Self::Stopping { reason, deadline, .. }, Event::Tick) if now >= deadline => {
                let text = "node has not stopped in its time".to_owned();
                (Self::Over(Outcome::Off(reason)), vec![Effect::Warn(text)])
            }
            // The first request counts: a second press of the button changes nothing, unless
            // pods are waited for.
            // Beats stop while everything stops: the stop has a deadline of its own.
            (
                stopping @ Self::Stopping { .. },
                Event::Tick | Event::Asked(_) | Event::Ready | Event::Hung(_) | Event::Draining,
            ) => (stopping, Vec::new()),
            (done @ Self::Over(_), _) => (done, Vec::new()),
        }
    }

    /// When the passing of time alone changes the state.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match self {
            Self::Stopping { deadline, .. } => Some(*deadline),
            Self::Running | Self::Over(_) => None,
        }
    }
}

fn over(outcome: Outcome) -> (State, Vec<Effect>) {
    (State::Over(outcome), Vec::new())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use polis_base::stage::Stage;
    use polis_base::trapdoor::code;

    const NOW: Duration = Duration::from_secs(100);

    fn report() -> Report {
        Report {
            code: code::PARAMETERS_ABSENT,
            stage: Stage::Parameters,
            causes: vec!["none".to_owned()],
            tried: Vec::new(),
            next: "put them there".to_owned(),
            unlock: false,
        }
    }

    #[test]
    fn node_s_death_opens_the_trapdoor_whatever_its_status() {
        for ended in [Ended::Status(0), Ended::Status(101), Ended::Signal(9)] {
            let (state, _) = State::Running.step(Event::NodeEnded(ended), NOW);
            assert_eq!(state, State::Over(Outcome::Death(ended)));
        }
    }

    #[test]
    fn a_stop_ends_with_a_message_an_exit_or_its_deadline() {
        let (stopping, effects) = State::Running.step(Event::Asked(Reason::PowerOff), NOW);
        assert_eq!(effects, [Effect::AskToStop(Reason::PowerOff)]);
        let off = State::Over(Outcome::Off(Reason::PowerOff));
        let after = |event, now| stopping.clone().step(event, now).0;
        assert_eq!(after(Event::Off(Reason::PowerOff), NOW), off);
        assert_eq!(after(Event::NodeEnded(Ended::Status(0)), NOW), off);
        assert_eq!(after(Event::Guru(report()), NOW), off);
        assert_eq!(after(Event::Tick, NOW + STOP_DEADLINE), off);
        let before = NOW + STOP_DEADLINE - Duration::from_millis(1);
        assert_eq!(after(Event::Tick, before), stopping);
        assert_eq!(after(Event::Asked(Reason::Reboot), NOW), stopping);
    }

    #[test]
    fn pods_have_a_minute_more_and_none_once_the_button_is_pressed_again() {
        let asked = Event::Asked(Reason::PowerOff);
        let (stopping, _) = State::Running.step(asked.clone(), NOW);
        let (draining, effects) = stopping.step(Event::Draining, NOW);
        assert_eq!(effects, []);
        let all = NOW + STOP_DEADLINE + DRAIN_DEADLINE;
        assert_eq!(draining.deadline(), Some(all));
        assert_eq!(draining.clone().step(Event::Draining, NOW).0, draining, "once");
        let later = NOW + Duration::from_secs(10);
        let (urged, effects) = draining.clone().step(asked.clone(), later);
        assert_eq!(effects, [Effect::AskToStop(Reason::PowerOff)]);
        assert_eq!(urged.deadline(), Some(later + STOP_DEADLINE));
        for event in [Event::Draining, asked] {
            assert_eq!(urged.clone().step(event, all).0, urged);
        }
        let off = State::Over(Outcome::Off(Reason::PowerOff));
        assert_eq!(draining.step(Event::Tick, all).0, off);
    }

    #[test]
    fn a_hung_node_opens_the_trapdoor_unless_it_was_asked_to_stop() {
        let hung = Event::Hung(Duration::from_secs(60));
        let (state, _) = State::Running.step(hung.clone(), NOW);
        assert_eq!(state, State::Over(Outcome::Hung(Duration::from_secs(60))));
        let (stopping, _) = State::Running.step(Event::Asked(Reason::Reboot), NOW);
        assert_eq!(stopping.clone().step(hung, NOW).0, stopping);
    }

    #[test]
    fn a_good_boot_resets_the_attempts() {
        let (state, effects) = State::Running.step(Event::Ready, NOW);
        assert_eq!((state, effects), (State::Running, vec![Effect::ResetAttempts]));
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Ready),
            Just(Event::Off(Reason::Reboot)),
            Just(Event::Guru(report())),
            any::<i32>().prop_map(|status| Event::NodeEnded(Ended::Status(status))),
            Just(Event::Asked(Reason::PowerOff)),
            Just(Event::Tick),
            Just(Event::Hung(NOW)),
            Just(Event::Draining),
        ]
    }

    proptest! {
        #[test]
        fn what_is_over_stays_over_and_node_s_end_is_always_the_end(
            events in prop::collection::vec(any_event(), 0..20)
        ) {
            let mut state = State::Running;
            for event in events {
                let was_over = matches!(state, State::Over(_)).then(|| state.clone());
                let asked = matches!(state, State::Stopping { .. });
                let ended = matches!(event, Event::NodeEnded(_));
                state = state.step(event, NOW).0;
                if let Some(before) = was_over {
                    prop_assert_eq!(&state, &before);
                }
                if asked {
                    prop_assert!(!matches!(&state, State::Over(
                        Outcome::Guru(_) | Outcome::Death(_) | Outcome::Hung(_)
                    )));
                }
                prop_assert!(!ended || matches!(state, State::Over(_)));
            }
        }
    }
}
