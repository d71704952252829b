//! The keys of all terminals: commands, and the recovery key of the disk.

use std::path::Path;
use std::time::Duration;

use polis_tui::Command;
use polis_tui::guru::{Guru, View};
use polis_tui::keys::{Key, Parser};
use zeroize::Zeroizing;

use polis_base::recovery;
use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_base::sys::terminal::Terminal;

use crate::machine::Machine;
use crate::screen::{SILENCE, Screen};

/// Drops the keys that are not read yet: those of a serial port since the start of the machine, and
/// those of a screen since `node` hangs.
pub(super) fn forget_typed(machine: &Machine) {
    machine.port.forget_typed();
    for name in &machine.terminals {
        if let Ok(terminal) = Terminal::open(&Path::new("/dev").join(name)) {
            terminal.forget_typed().ok();
        }
    }
}

/// Reads the keys of all terminals: commands, and a recovery key if one is complete.
pub(super) fn received(
    machine: &mut Machine,
    screens: &mut Vec<Screen>,
    line: &mut Line,
    shown: &Guru,
) -> (Vec<Command>, Option<recovery::Text>) {
    let (mut commands, mut typed) = (Vec::new(), None);
    let now = clock::uptime();
    screens.retain_mut(|screen| {
        let Ok(asked) = screen.commands(shown, now) else { return false };
        if asked.contains(&Command::Unlock) {
            typed = screen.take_typed();
        }
        // A screen that was overwritten is redrawn.
        if asked.contains(&Command::Redraw) {
            screen.clear();
        }
        commands.extend(asked);
        true
    });
    let asked = line.commands(machine, shown);
    if asked.contains(&Command::Unlock) {
        typed = line.view.take_typed();
    }
    commands.extend(asked);
    // The prompt accepts only characters that a text may have.
    (commands, typed.and_then(|typed| recovery::Text::new(typed.as_bytes()).ok()))
}

/// A person at the other end of the serial port: without a screen, but with keys.
pub(super) struct Line {
    view: View,
    parser: Parser,
    received: Duration,
}

impl Line {
    pub(super) fn new() -> Self {
        Self { view: View::default(), parser: Parser::default(), received: Duration::ZERO }
    }

    fn commands(&mut self, machine: &mut Machine, shown: &Guru) -> Vec<Command> {
        let typed = Zeroizing::new(machine.port.typed());
        let now = clock::uptime();
        let mut keys = self.parser.feed(&typed);
        if !typed.is_empty() {
            self.received = now;
        } else if now >= self.received + SILENCE {
            keys.extend(self.parser.idle());
        }
        keys.into_iter().filter_map(|key| self.key(machine, key, shown)).collect()
    }

    fn key(&mut self, machine: &mut Machine, key: Key, shown: &Guru) -> Option<Command> {
        let before = self.view.asks();
        if let (None, Key::Char('l' | 'L')) = (before, key) {
            for line in &shown.log {
                machine.port.log(Severity::Info, line);
            }
            return None;
        }
        let command = self.view.key(key, shown);
        match (before, self.view.asks()) {
            (None, Some(_)) => machine.port.log(
                Severity::Info,
                "type the recovery key; Enter opens the disk, Esc goes back; each character is \
                 shown as a star",
            ),
            // The log goes on below.
            (Some(_), None) => machine.port.echo("\n"),
            (Some(_), Some(_)) if command.is_some() => machine.port.echo("\n"),
            (Some(had), Some(has)) if has > had => machine.port.echo(&"*".repeat(has - had)),
            (Some(had), Some(has)) => machine.port.echo(&"\x08 \x08".repeat(had - has)),
            (None, None) => {}
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    use polis_base::sys::poll::{self, Interest};
    use polis_base::sys::terminal::Mode;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    #[test]
    fn a_key_that_was_pressed_before_a_failure_is_shown_ends_no_machine() {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&far).unwrap();
        unlockpt(&far).unwrap();
        let path = ptsname(&far, Vec::new()).unwrap().into_string().unwrap();
        let mut terminal = Terminal::open(Path::new(&path)).unwrap();
        terminal.set_mode(Mode::Raw).unwrap();
        let name = path.strip_prefix("/dev/").unwrap().to_owned();
        let mut machine = Machine::default();
        machine.terminals = vec!["no/terminal".to_owned(), name];
        rustix::io::write(&far, b"RP").unwrap();
        forget_typed(&machine);
        rustix::io::write(&far, b"h").unwrap();
        assert_eq!(poll::wait(&[(terminal.as_fd(), Interest::Read)], None).unwrap(), [true]);
        let mut typed = [0; 8];
        let length = terminal.read(&mut typed).unwrap();
        assert_eq!(&typed[..length], b"h");
    }
}
