//! The heartbeat of `node`: decides from its signs of life whether it hangs.
//!
//! `node` sends `beat` every few seconds, from a task of the runtime that every service
//! runs in ([`crate::node::heartbeat`]). Pure: the main loop passes in the beats and
//! the times of its checks.
//!
//! ```text
//! [starting] --first beat--> [beating] --deadline without a beat--> hangs
//!     |                       ^  |
//!     |                       +--+ beat, or a time without a chance to beat
//!     +--START and the deadline without a beat--> hangs
//! ```
//!
//! Invariants:
//! - A `node` that never sends a beat hangs, too: its start has a bound.
//! - Time in which `init` did not run does not count: on a machine that was paused, or
//!   that starves all its processes, `node` does not hang.

use std::time::Duration;

use super::deadline;

/// How much longer than the deadline the first beat may take: `node` reads its program from the
/// disk of the system until then, which has that long for each step of the boot.
const START: Duration = deadline::SYSTEM;
/// The longest interval between checks; in a longer gap no process ran.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The interval of the beats, `node`'s own (`daemon::heartbeat`).
const BEAT: Duration = Duration::from_secs(5);
/// A beat that comes after twice the interval is late, and worth a line of the log.
const BEAT_LATE: Duration = BEAT.saturating_mul(2);
/// How late a check may be on a machine that is merely busy.
const LATE: Duration = Duration::from_secs(5);

/// The state of `node`'s heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    deadline: Duration,
    /// Whether a beat has come.
    beats: bool,
    /// The time of the last beat, or of the start.
    since: Duration,
    looked: Duration,
}

impl Heartbeat {
    /// A `node` that starts at `now` and may be silent for `deadline`, and longer before its first
    /// beat.
    #[must_use]
    pub fn new(deadline: Duration, now: Duration) -> Self {
        Self { deadline, beats: false, since: now, looked: now }
    }

    /// Records a beat; returns how long `node` was silent before it, if the beat is late.
    pub fn received(&mut self, now: Duration) -> Option<Duration> {
        let silent = now.saturating_sub(self.since);
        let late = self.beats && silent > BEAT_LATE;
        (self.beats, self.since) = (true, now);
        late.then_some(silent)
    }

    /// Checks the clock; returns how long `node` has been silent if that is too long.
    pub fn look(&mut self, now: Duration) -> Option<Duration> {
        let gap = now.saturating_sub(self.looked);
        self.looked = now;
        if gap > POLL_INTERVAL + LATE {
            self.since += gap;
        }
        let silent = now.saturating_sub(self.since);
        (silent >= self.silence_max()).then_some(silent)
    }

    /// When the next check is due: always after the last one, since a machine that stops goes on
    /// with a `node` that hangs.
    #[must_use]
    pub fn next(&self) -> Duration {
        let (deadline, check) = (self.since + self.silence_max(), self.looked + POLL_INTERVAL);
        if deadline > self.looked { deadline.min(check) } else { check }
    }

    fn silence_max(&self) -> Duration {
        if self.beats { self.deadline } else { START + self.deadline }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Checks as often as required until something happens or `until` has come.
    fn watch(heartbeat: &mut Heartbeat, from: Duration, until: Duration) -> Option<Duration> {
        let mut now = from;
        while now < until {
            if heartbeat.look(now).is_some() {
                return Some(now);
            }
            now = heartbeat.next().max(now + at(1));
        }
        None
    }

    #[test]
    fn a_node_that_falls_silent_is_found_at_its_deadline() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        heartbeat.received(at(12));
        assert_eq!(watch(&mut heartbeat, at(12), at(500)), Some(at(72)));
    }

    #[test]
    fn a_node_that_hangs_while_the_machine_stops_does_not_keep_init_busy() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        heartbeat.received(at(12));
        assert_eq!(watch(&mut heartbeat, at(12), at(500)), Some(at(72)));
        assert_eq!(heartbeat.next(), at(77));
        assert_eq!(heartbeat.look(at(77)), Some(at(65)));
    }

    #[test]
    fn a_heartbeat_after_twice_its_interval_is_late() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        assert_eq!(heartbeat.received(at(100)), None, "the first");
        assert_eq!(heartbeat.received(at(110)), None);
        assert_eq!(heartbeat.received(at(121)), Some(at(11)));
        heartbeat.look(at(121));
        heartbeat.look(at(4000));
        assert_eq!(heartbeat.received(at(4001)), None, "a machine that was paused");
    }

    #[test]
    fn a_node_that_never_beats_is_found_once_its_start_has_had_its_time() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        assert_eq!(watch(&mut heartbeat, at(10), at(500)), Some(at(10 + 90 + 60)));
    }

    #[test]
    fn a_slow_start_is_not_a_hang_and_the_deadline_counts_from_the_first_heartbeat() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        assert_eq!(watch(&mut heartbeat, at(10), at(159)), None);
        assert_eq!(heartbeat.received(at(159)), None, "the first is never late");
        assert_eq!(watch(&mut heartbeat, at(159), at(500)), Some(at(219)));
    }

    #[test]
    fn a_node_that_beats_is_left_alone() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        for second in (20..500).step_by(5) {
            heartbeat.received(at(second));
            assert_eq!(heartbeat.look(at(second + 4)), None);
        }
    }

    #[test]
    fn a_machine_that_was_paused_has_no_node_that_hangs() {
        let mut heartbeat = Heartbeat::new(DEADLINE, at(10));
        heartbeat.received(at(12));
        assert_eq!(heartbeat.look(at(15)), None);
        assert_eq!(heartbeat.look(at(4000)), None, "an hour without a run");
        assert_eq!(watch(&mut heartbeat, at(4000), at(5000)), Some(at(4057)));

        let mut starting = Heartbeat::new(DEADLINE, at(10));
        assert_eq!(starting.look(at(15)), None);
        assert_eq!(starting.look(at(4000)), None, "an hour without a run, before the first beat");
        assert_eq!(watch(&mut starting, at(4000), at(5000)), Some(at(4145)));
    }

    proptest! {
        #[test]
        fn a_process_with_a_heartbeat_within_the_deadline_is_not_hung(
            steps in prop::collection::vec((0_u64..100, any::<bool>()), 0..60)
        ) {
            let mut heartbeat = Heartbeat::new(DEADLINE, Duration::ZERO);
            let (mut now, mut last) = (Duration::ZERO, None);
            for (seconds, beat) in steps {
                now += at(seconds);
                if beat {
                    heartbeat.received(now);
                    last = Some(now);
                }
                if let Some(silent) = heartbeat.look(now) {
                    let bound = if last.is_some() { DEADLINE } else { START + DEADLINE };
                    prop_assert!(silent >= bound);
                    // It starts at zero.
                    prop_assert!(now - last.unwrap_or_default() >= bound);
                }
                prop_assert!(heartbeat.next() <= now + POLL_INTERVAL);
            }
        }
    }
}
