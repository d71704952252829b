//! Lends this terminal to a console of the guest.
//!
//! Bytes pass both ways unchanged, so the guest draws here exactly as on a terminal of its
//! own. Two keys are not passed on: they ask whether to end the loan, which also stops the
//! machines: Ctrl-C, which ends any other command, and Ctrl-], which no program uses.
//!
//! ```text
//!          Ctrl-C, Ctrl-]              y, Ctrl-C, Ctrl-]
//! [lent] ------------------> [asking] ------------------> Quit
//!    |  <--any other key---------+
//!    |
//!    |--guest closes it, the only machine---------------> Closed
//!    +--guest closes it--> [ended] --y, Ctrl-C, Ctrl-]--> Closed
//!
//! any --SIGINT TERM HUP QUIT, terminal closed-----------> Quit
//! ```
//!
//! The question has the number of the machines that run: one that ends meanwhile is not
//! counted any more.
//!
//! Invariants:
//! - During the question the guest does not wait for the terminal: its output is dropped,
//!   and it redraws its screen after the answer *no*.
//! - However the loan ends (also by a panic), the modes of the terminal are restored.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::low_level::pipe;

/// Ctrl-C, and Ctrl-] as in telnet and in most console programs. The console of a node has
/// other keys to leave a prompt.
const QUIT_KEYS: [u8; 2] = [0x03, 0x1d];

/// Makes the console of a node redraw its screen (Ctrl-L).
const REDRAW: &[u8] = b"\x0c";

/// Clears what the guest drew, for a question.
const CLEAR: &str = "\x1b[0m\x1b[?25h\x1b[2J\x1b[H";

/// The keys that end a loan of a console, among this number of machines.
pub(crate) fn hint(machines: usize) -> String {
    let question = question(machines);
    format!("Ctrl-C or Ctrl-] asks `{question}`; y or the same key again stops")
}

fn question(machines: usize) -> String {
    let plural = if machines == 1 { "" } else { "s" };
    format!("stop {machines} machine{plural}? [y/N]")
}

/// The alternate screen for the guest: the former content is restored at the end.
const BORROW: &[u8] = b"\x1b[?1049h\x1b[2J";

/// Leaves the alternate screen, shows the cursor, resets colours and modes, since a guest
/// that was cut off cannot.
const RESTORE: &[u8] = b"\x1b[?1049l\x1b[?25h\x1b[0m\x1b[?1000l\r\n";

/// Why the loan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The operator or a signal ended it.
    Quit,
    /// The guest closed its end.
    Closed,
}

/// Whether input and output of this process are a terminal.
pub(crate) fn is_interactive() -> bool {
    isatty(io::stdin()) && isatty(io::stdout())
}

/// The title of the terminal, next to a console that uses the whole screen.
struct Title {
    /// Its text; `None` after the end of the loan.
    shown: Option<String>,
}

static TITLE: Mutex<Title> = Mutex::new(Title { shown: Some(String::new()) });

impl Title {
    /// Writes only changes, since each write is mixed into the bytes of the guest.
    fn show(&mut self, text: &str, screen: &mut impl Write) -> io::Result<()> {
        let plain: String = text.chars().filter(|c| !c.is_control()).collect();
        let Some(shown) = self.shown.as_mut().filter(|shown| **shown != plain) else {
            return Ok(());
        };
        write!(screen, "\x1b]2;{plain}\x07")?;
        *shown = plain;
        screen.flush()
    }

    fn end(&mut self, screen: &mut impl Write) -> io::Result<()> {
        self.show("", screen)?;
        self.shown = None;
        Ok(())
    }
}

/// Sets the title of the terminal.
pub(crate) fn title(text: &str) {
    let mut title = TITLE.lock().unwrap_or_else(PoisonError::into_inner);
    // The console and the end of the command show the same state on a terminal without a
    // title.
    let _shown = title.show(text, &mut io::stdout());
}

/// Clears the title of the terminal, and ignores later ones.
pub(crate) fn no_title() {
    let mut title = TITLE.lock().unwrap_or_else(PoisonError::into_inner);
    let _shown = title.end(&mut io::stdout());
}

/// Puts the modes of a terminal back when dropped.
struct Raw {
    before: Termios,
}

impl Raw {
    fn enter() -> Result<Self> {
        let before = tcgetattr(io::stdin()).context("cannot read the terminal's modes")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw)
            .context("cannot change the terminal's modes")?;
        let raw = Self { before };
        let mut stdout = io::stdout();
        stdout
            .write_all(BORROW)
            .and_then(|()| stdout.flush())
            .context("cannot write to the terminal")?;
        Ok(raw)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let mut stdout = io::stdout();
        // A closed terminal needs no restore.
        let _restored = stdout.write_all(RESTORE).and_then(|()| stdout.flush());
        let _restored = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

/// Lends the terminal to `console` until the operator or the guest ends it. The machine of the
/// console and the `others`, whose number may fall meanwhile, stop with the loan.
///
/// # Errors
/// When the terminal or the console fails.
pub(crate) fn lend(console: &UnixStream, others: &AtomicUsize) -> Result<End> {
    let (signals, raised) = UnixStream::pair().context("cannot make a pipe for signals")?;
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        let raised = raised.try_clone().context("cannot make a pipe for signals")?;
        pipe::register(signal, raised).context("cannot catch signals")?;
    }
    let _raw = Raw::enter()?;
    carry(&io::stdin(), &mut io::stdout(), console, &signals, others)
        .context("the console was interrupted")
}

/// How often the question looks whether a machine has ended.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The content of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// The guest's screen.
    Guest,
    /// The question whether to stop the machines.
    Question,
    /// The same question, after the machine of this console ended while others still run.
    Ended,
}

impl Shown {
    /// `others` are the machines that run, beside that of the console.
    fn draw(self, others: usize, screen: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Guest => screen.write_all(BORROW)?,
            Self::Question => write!(screen, "{CLEAR}{} ", question(others + 1))?,
            Self::Ended => {
                let others = question(others);
                write!(screen, "{CLEAR}the machine of this console has ended\r\n{others} ")?;
            }
        }
        screen.flush()
    }
}

/// The loop of [`lend`], between any two ends.
fn carry(
    keys: &impl AsFd,
    screen: &mut impl Write,
    mut console: &UnixStream,
    signals: &UnixStream,
    others: &AtomicUsize,
) -> io::Result<End> {
    let mut buffer = [0; 16 * 1024];
    let mut shown = Shown::Guest;
    let mut counted = others.load(Ordering::Relaxed);
    loop {
        let running = others.load(Ordering::Relaxed);
        if shown == Shown::Ended && running == 0 {
            return Ok(End::Closed);
        }
        if shown != Shown::Guest && running != counted {
            shown.draw(running, screen)?;
        }
        counted = running;
        let mut fds = vec![PollFd::new(keys, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        if shown != Shown::Ended {
            fds.push(PollFd::new(console, PollFlags::IN));
        }
        let look = (shown != Shown::Guest).then_some(&LOOK);
        match poll(&mut fds, look) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let ready = |number: usize| fds.get(number).is_some_and(|fd| !fd.revents().is_empty());
        let (typed, raised, drawn) = (ready(0), ready(1), ready(2));
        if raised {
            return Ok(End::Quit);
        }
        let mut closed = false;
        if drawn {
            match console.read(&mut buffer) {
                Ok(0) => closed = true,
                Ok(count) if shown == Shown::Guest => {
                    screen.write_all(&buffer[..count])?;
                    screen.flush()?;
                }
                Ok(_dropped) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => closed = true,
                Err(error) => return Err(error),
            }
        }
        if typed && !closed {
            let count = rustix::io::read(keys, &mut buffer)?;
            if count == 0 {
                return Ok(End::Quit);
            }
            let mut typed = &buffer[..count];
            if shown == Shown::Guest {
                let quit = typed.iter().position(|key| QUIT_KEYS.contains(key));
                let (before, after) = typed.split_at(quit.unwrap_or(count));
                closed = send(console, before)?;
                if quit.is_some() {
                    shown = Shown::Question;
                    shown.draw(running, screen)?;
                }
                // Without the key that asked.
                typed = after.get(1..).unwrap_or_default();
            }
            match (shown, typed.first()) {
                (Shown::Guest, _) | (_, None) => {}
                (_, Some(key)) if b"yY".contains(key) || QUIT_KEYS.contains(key) => {
                    return Ok(if shown == Shown::Ended { End::Closed } else { End::Quit });
                }
                // The rest of an answer, such as of an arrow key, is not passed to the
                // guest.
                (Shown::Question, Some(_no)) => {
                    shown = Shown::Guest;
                    shown.draw(running, screen)?;
                    closed |= send(console, REDRAW)?;
                }
                (Shown::Ended, Some(_no)) => shown.draw(running, screen)?,
            }
        }
        if closed {
            if running == 0 {
                return Ok(End::Closed);
            }
            shown = Shown::Ended;
            shown.draw(running, screen)?;
        }
    }
}

/// Sends keys to the guest; returns whether the guest closed its end.
fn send(mut console: &UnixStream, keys: &[u8]) -> io::Result<bool> {
    match console.write_all(keys) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(true),
        other => other.map(|()| false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loan that ends too early fails a test that would otherwise wait for its bytes
    /// without end.
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

    /// No machine beside that of the console.
    static NONE: AtomicUsize = AtomicUsize::new(0);

    struct Loan {
        keys: UnixStream,
        person: UnixStream,
        console: UnixStream,
        guest: UnixStream,
        signals: UnixStream,
        raised: UnixStream,
    }

    fn loan() -> Loan {
        let (keys, person) = UnixStream::pair().unwrap();
        let (console, guest) = UnixStream::pair().unwrap();
        let (signals, raised) = UnixStream::pair().unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        Loan { keys, person, console, guest, signals, raised }
    }

    #[test]
    fn bytes_go_both_ways_until_the_quit_key() {
        let Loan { keys, mut person, console, mut guest, signals, raised: _raised } = loan();
        guest.write_all(b"\x1b[2Jhello").unwrap();
        person.write_all(b"abc").unwrap();
        // Presses the quit key once the guest has received the earlier keys.
        let guest = std::thread::spawn(move || {
            let mut heard = [0; 3];
            guest.read_exact(&mut heard).unwrap();
            person.write_all(&[QUIT_KEYS[0], b'y']).unwrap();
            (heard, guest)
        });
        let mut screen = Vec::new();
        assert_eq!(carry(&keys, &mut screen, &console, &signals, &NONE).unwrap(), End::Quit);
        assert!(screen.starts_with(b"\x1b[2Jhello"));
        assert_eq!(&guest.join().unwrap().0, b"abc");
    }

    #[test]
    fn a_guest_that_ends_closes_the_loan() {
        let Loan { keys, person: _person, console, guest, signals, raised: _raised } = loan();
        drop(guest);
        assert_eq!(carry(&keys, &mut Vec::new(), &console, &signals, &NONE).unwrap(), End::Closed);
    }

    #[test]
    fn a_signal_ends_the_loan() {
        let Loan { keys, person: _person, console, guest: _guest, signals, mut raised } = loan();
        raised.write_all(&[1]).unwrap();
        assert_eq!(carry(&keys, &mut Vec::new(), &console, &signals, &NONE).unwrap(), End::Quit);
    }

    #[test]
    fn leaving_asks_first_and_any_other_key_returns_to_the_guest() {
        for yes in [b"y", b"Y", &QUIT_KEYS[..1], &QUIT_KEYS[1..]] {
            let Loan { keys, mut person, console, mut guest, signals, raised: _raised } = loan();
            // An arrow key is not an answer, and no part of it is passed to the guest.
            person.write_all(b"a\x03").unwrap();
            let guest = std::thread::spawn(move || {
                let mut heard = [0; 1];
                guest.read_exact(&mut heard).unwrap();
                person.write_all(b"\x1b[A").unwrap();
                let mut redraw = [0; 1];
                guest.read_exact(&mut redraw).unwrap();
                person.write_all(b"\x03").unwrap();
                person.write_all(yes).unwrap();
                // Both live until the loan has ended.
                (heard, redraw, guest, person)
            });
            let mut screen = Vec::new();
            let others = AtomicUsize::new(2);
            assert_eq!(carry(&keys, &mut screen, &console, &signals, &others).unwrap(), End::Quit);
            let (heard, redraw, mut guest, _person) = guest.join().unwrap();
            assert_eq!((&heard[..], &redraw[..]), (&b"a"[..], REDRAW));
            let screen = String::from_utf8(screen).unwrap();
            assert_eq!(screen.matches("stop 3 machines? [y/N]").count(), 2, "{screen:?}");
            drop(console);
            let mut rest = Vec::new();
            guest.read_to_end(&mut rest).unwrap();
            assert_eq!(rest, b"");
        }
    }

    #[test]
    fn the_end_of_one_of_several_machines_asks_before_the_others_end() {
        let Loan { keys, mut person, console, guest, signals, raised: _raised } = loan();
        let (mut screen, mut seen) = UnixStream::pair().unwrap();
        seen.set_read_timeout(Some(PATIENCE)).unwrap();
        drop(guest);
        let question = "has ended\r\nstop 2 machines? [y/N]";
        let others = &AtomicUsize::new(2);
        std::thread::scope(|scope| {
            let loan =
                scope.spawn(move || carry(&keys, &mut screen, &console, &signals, others).unwrap());
            let mut text = String::new();
            // One answer a question.
            for (asked, answer) in [(1, b"n"), (2, b"y")] {
                while text.matches(question).count() < asked {
                    let mut byte = [0; 1];
                    seen.read_exact(&mut byte).unwrap();
                    text.push(char::from(byte[0]));
                }
                person.write_all(answer).unwrap();
            }
            assert_eq!(loan.join().unwrap(), End::Closed);
        });
    }

    #[test]
    fn a_machine_that_ends_meanwhile_is_not_counted() {
        let Loan { keys, mut person, console, guest: _guest, signals, raised: _raised } = loan();
        let (mut screen, mut seen) = UnixStream::pair().unwrap();
        seen.set_read_timeout(Some(PATIENCE)).unwrap();
        let others = &AtomicUsize::new(3);
        std::thread::scope(|scope| {
            let loan =
                scope.spawn(move || carry(&keys, &mut screen, &console, &signals, others).unwrap());
            let mut text = String::new();
            let mut until = |wanted: &str| {
                while !text.contains(wanted) {
                    let mut byte = [0; 1];
                    seen.read_exact(&mut byte).unwrap();
                    text.push(char::from(byte[0]));
                }
            };
            person.write_all(b"\x03").unwrap();
            until("stop 4 machines? [y/N]");
            // The question is put again, without a key.
            others.store(2, Ordering::Relaxed);
            until("stop 3 machines? [y/N]");
            others.store(0, Ordering::Relaxed);
            until("stop 1 machine? [y/N]");
            person.write_all(b"y").unwrap();
            assert_eq!(loan.join().unwrap(), End::Quit);
        });
    }

    #[test]
    fn a_title_is_written_when_it_changes_and_never_after_its_end() {
        let mut title = Title { shown: Some(String::new()) };
        let mut screen = Vec::new();
        for text in ["healthy", "healthy", "node 2\x07 is late"] {
            title.show(text, &mut screen).unwrap();
        }
        title.end(&mut screen).unwrap();
        title.show("healthy", &mut screen).unwrap();
        assert_eq!(screen, b"\x1b]2;healthy\x07\x1b]2;node 2 is late\x07\x1b]2;\x07");
    }
}
