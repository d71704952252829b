//! Requests to end the machine: the power button, Ctrl-Alt-Del and signals.

use rustix::process::Signal;

use polis_base::sys::reboot::Reason;

use crate::machine::Machine;

/// The request of the button, Ctrl-Alt-Del or a signal.
#[must_use]
pub fn requested(machine: &mut Machine) -> Option<Reason> {
    if machine.buttons.pressed() {
        return Some(Reason::PowerOff);
    }
    machine.received().into_iter().find_map(reason_of)
}

/// The meaning of a signal to process 1.
#[must_use]
pub fn reason_of(signal: i32) -> Option<Reason> {
    let reboot = [Signal::INT, Signal::TERM];
    let power_off = [Signal::USR2, Signal::POWER];
    if reboot.iter().any(|one| one.as_raw() == signal) {
        Some(Reason::Reboot)
    } else {
        power_off.iter().any(|one| one.as_raw() == signal).then_some(Reason::PowerOff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_ask_for_an_end_are_distinguished() {
        assert_eq!(reason_of(Signal::INT.as_raw()), Some(Reason::Reboot));
        assert_eq!(reason_of(Signal::POWER.as_raw()), Some(Reason::PowerOff));
        assert_eq!(reason_of(Signal::CHILD.as_raw()), None);
    }
}
