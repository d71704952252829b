//! The restart policy: whether a service that died runs again, and after what delay.
//!
//! This module only computes: it holds no timer, starts nothing and never reads a
//! clock, so each rule below is a plain test.
//!
//! ```text
//! death --ran healthy for a minute?--> count starts again at 0
//!   |
//!   +--more than N within T?--> give up: the death is the parent's
//!   +--else--> wait 0.5 s x 1.5^count, +-50 %, at most a minute
//! ```
//!
//! Invariants:
//! - The delay is never zero: a service that dies at once cannot spin.
//! - The delay is never above `DELAY_MAX`: nothing waits for an operator.

use std::collections::VecDeque;
use std::time::Duration;

/// The delay after the first death.
const DELAY_MIN: Duration = Duration::from_millis(500);
/// No delay is longer.
const DELAY_MAX: Duration = Duration::from_secs(60);
/// How much longer each delay is than the one before.
const GROWTH: f64 = 1.5;
/// Delays vary by this share in either direction, so that services that died together
/// do not restart together.
const JITTER: f64 = 0.5;
/// A run that was healthy for so long does not count as a failed start.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// How often a service may die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    bound: Option<(u32, Duration)>,
}

impl Policy {
    /// It is restarted without limit: its dependency may come back at any time.
    #[must_use]
    pub const fn forever() -> Self {
        Self { bound: None }
    }

    /// It is restarted at most `restarts` times within any period of `within`; the next
    /// death is passed on to its parent.
    #[must_use]
    pub const fn at_most(restarts: u32, within: Duration) -> Self {
        Self { bound: Some((restarts, within)) }
    }

    /// Its first death is passed on to its parent.
    #[must_use]
    pub const fn never() -> Self {
        Self::at_most(0, Duration::MAX)
    }
}

/// The decision after a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Start again after this delay.
    Restart(Duration),
    /// It died so often within the period of its bound: pass the death on.
    GiveUp(u32),
}

/// The deaths of one service or group.
#[derive(Clone, Debug, Default)]
pub struct History {
    in_a_row: i32,
    /// When the deaths happened that still count for the bound.
    deaths: VecDeque<Duration>,
}

impl History {
    /// Records a death at `now` (since any fixed moment) of a run that had been
    /// healthy for `healthy`; `random` is in `0.0..1.0`.
    pub fn died(
        &mut self,
        policy: Policy,
        now: Duration,
        healthy: Option<Duration>,
        random: f64,
    ) -> Verdict {
        if let Some((restarts, within)) = policy.bound {
            self.deaths.push_back(now);
            while self.deaths.front().is_some_and(|death| now.saturating_sub(*death) > within) {
                self.deaths.pop_front();
            }
            let deaths = u32::try_from(self.deaths.len()).unwrap_or(u32::MAX);
            if deaths > restarts {
                return Verdict::GiveUp(deaths);
            }
        }
        if healthy.is_some_and(|healthy| healthy >= HEALTHY_AFTER) {
            self.in_a_row = 0;
        }
        let spread = 1.0 - JITTER + 2.0 * JITTER * random.clamp(0.0, 1.0);
        let seconds = DELAY_MIN.as_secs_f64() * GROWTH.powi(self.in_a_row) * spread;
        self.in_a_row = self.in_a_row.saturating_add(1);
        Verdict::Restart(Duration::from_secs_f64(seconds.min(DELAY_MAX.as_secs_f64())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The middle of the jitter.
    const MIDDLE: f64 = 0.5;

    fn delay(verdict: Verdict) -> Duration {
        match verdict {
            Verdict::Restart(delay) => delay,
            Verdict::GiveUp(deaths) => panic!("gave up after {deaths} deaths"),
        }
    }

    #[test]
    fn delays_grow_by_half_from_half_a_second() {
        let mut history = History::default();
        let delays: Vec<_> = (0..4)
            .map(|_| delay(history.died(Policy::forever(), Duration::ZERO, None, MIDDLE)))
            .map(|delay| delay.as_millis())
            .collect();
        assert_eq!(delays, [500, 750, 1125, 1687]);
    }

    #[test]
    fn a_healthy_minute_resets_the_count_and_a_second_less_does_not() {
        for (healthy, expected) in [(60, 500), (59, 750)] {
            let mut history = History::default();
            history.died(Policy::forever(), Duration::ZERO, None, MIDDLE);
            let healthy = Some(Duration::from_secs(healthy));
            let verdict = history.died(Policy::forever(), Duration::ZERO, healthy, MIDDLE);
            assert_eq!(delay(verdict).as_millis(), expected);
        }
    }

    #[test]
    fn the_death_after_the_last_allowed_restart_is_passed_on() {
        let policy = Policy::at_most(2, Duration::from_secs(10));
        let mut history = History::default();
        let mut died = |at| history.died(policy, Duration::from_secs(at), None, MIDDLE);
        delay(died(0));
        delay(died(5));
        // The first is out of the window by now.
        delay(died(11));
        assert_eq!(died(12), Verdict::GiveUp(3));
    }

    #[test]
    fn never_means_the_first_death() {
        let verdict = History::default().died(Policy::never(), Duration::ZERO, None, MIDDLE);
        assert_eq!(verdict, Verdict::GiveUp(1));
    }

    proptest! {
        #[test]
        fn a_delay_is_within_its_limits_whatever_happens(
            deaths in prop::collection::vec((0_u64..100, prop::option::of(0_u64..200), 0.0..1.0), 1..200)
        ) {
            let mut history = History::default();
            let mut now = Duration::ZERO;
            for (pause, healthy, random) in deaths {
                now += Duration::from_secs(pause);
                let healthy = healthy.map(Duration::from_secs);
                let delay = delay(history.died(Policy::forever(), now, healthy, random));
                prop_assert!(delay >= DELAY_MIN.mul_f64(1.0 - JITTER));
                prop_assert!(delay <= DELAY_MAX);
            }
        }

        #[test]
        fn a_bound_holds_in_every_window(
            pauses in prop::collection::vec(0_u64..8, 1..60), restarts in 0_u32..5
        ) {
            let within = Duration::from_secs(10);
            let policy = Policy::at_most(restarts, within);
            let mut history = History::default();
            let mut forgiven = Vec::new();
            let mut now = Duration::ZERO;
            for pause in pauses {
                now += Duration::from_secs(pause);
                let recent = forgiven.iter().filter(|at| now - **at <= within).count();
                match history.died(policy, now, None, MIDDLE) {
                    Verdict::Restart(_) => prop_assert!(recent < restarts as usize),
                    Verdict::GiveUp(_) => {
                        prop_assert!(recent >= restarts as usize);
                        break;
                    }
                }
                forgiven.push(now);
            }
        }
    }
}
