//! The countdown of a guru meditation: the next action of the machine, its time, and how commands
//! and calls change both.

use std::time::Duration;

use polis_tui::Command;
use polis_tui::guru;

use polis_base::sys::reboot::Reason;

/// How long after a call the machine does not reboot by itself.
pub(super) const AFTER_CALL: Duration = Duration::from_secs(600);

/// The machine's next action if no person acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Countdown {
    /// The machine reboots at that time.
    Until(Duration),
    /// The machine holds, because a person asked for it.
    Held,
    /// The machine holds, because it rebooted too often.
    Exhausted,
    /// The machine holds, because the reboots can't be counted.
    Uncounted,
}

impl Countdown {
    pub(super) fn countdown(self, now: Duration) -> guru::Countdown {
        match self {
            Self::Until(end) => {
                // Rounded up: the last thing that is shown is a 1.
                let left = end.saturating_sub(now) + Duration::from_millis(999);
                let seconds = u32::try_from(left.as_secs()).unwrap_or(u32::MAX);
                guru::Countdown::Reboot { seconds }
            }
            Self::Held => guru::Countdown::Held,
            Self::Exhausted => guru::Countdown::Exhausted,
            Self::Uncounted => guru::Countdown::Uncounted,
        }
    }

    /// The effect of a call from outside: the caller has some minutes for the next one.
    pub(super) fn called(self, now: Duration) -> Self {
        match self {
            Self::Until(end) => Self::Until(end.max(now + AFTER_CALL)),
            held @ (Self::Held | Self::Exhausted | Self::Uncounted) => held,
        }
    }

    pub(super) fn is_over(self, now: Duration) -> bool {
        matches!(self, Self::Until(end) if now >= end)
    }

    /// The effect of a person's command: a new countdown, or the end.
    pub(super) fn command(self, command: Command) -> Result<Self, Reason> {
        match (self, command) {
            (_, Command::Reboot) => Err(Reason::Reboot),
            (_, Command::PowerOff) => Err(Reason::PowerOff),
            (Self::Until(_), Command::Hold) => Ok(Self::Held),
            (countdown, Command::Hold | Command::Redraw | Command::Unlock | Command::Leave) => {
                Ok(countdown)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_countdown_ends_at_its_time_and_shows_one_before() {
        let end = Duration::from_secs(70);
        let countdown = Countdown::Until(end);
        let before = end - Duration::from_millis(1);
        assert_eq!(countdown.countdown(before), guru::Countdown::Reboot { seconds: 1 });
        assert_eq!(
            countdown.countdown(Duration::from_secs(10)),
            guru::Countdown::Reboot { seconds: 60 }
        );
        assert!(!countdown.is_over(before));
        assert!(countdown.is_over(end));
    }

    #[test]
    fn a_call_puts_a_reboot_off_and_brings_none() {
        let now = Duration::from_secs(10);
        let soon = Countdown::Until(now + Duration::from_secs(5));
        assert_eq!(soon.called(now), Countdown::Until(now + AFTER_CALL));
        let late = Countdown::Until(now + AFTER_CALL * 2);
        assert_eq!(late.called(now), late);
        for holds in [Countdown::Held, Countdown::Exhausted, Countdown::Uncounted] {
            assert_eq!(holds.called(now), holds);
        }
    }

    #[test]
    fn a_held_machine_waits_for_ever_and_still_takes_a_command() {
        let held = Countdown::Until(Duration::ZERO).command(Command::Hold).unwrap();
        assert_eq!(held, Countdown::Held);
        assert!(!held.is_over(Duration::MAX));
        assert_eq!(held.command(Command::Reboot), Err(Reason::Reboot));
        let exhausted = Countdown::Exhausted.command(Command::Hold).unwrap();
        assert_eq!(exhausted, Countdown::Exhausted);
        assert_eq!(exhausted.command(Command::PowerOff), Err(Reason::PowerOff));
    }

    #[test]
    fn a_machine_that_cannot_count_reports_that_and_not_a_request() {
        let now = Duration::from_secs(10);
        assert_eq!(Countdown::Uncounted.countdown(now), guru::Countdown::Uncounted);
        assert_eq!(Countdown::Held.countdown(now), guru::Countdown::Held);
        assert_eq!(Countdown::Exhausted.countdown(now), guru::Countdown::Exhausted);
    }
}
