//! Lends this terminal to a console of the guest.
//!
//! Bytes go both ways untouched, so the guest draws here exactly what it would
//! draw on a terminal of its own. Two keys stay ours, and end the loan: Ctrl-C,
//! which ends any other command, and Ctrl-], which no program uses.
//!
//! ```text
//! [lent] --Ctrl-C, Ctrl-]-------> Quit
//!    |----SIGINT TERM HUP QUIT--> Quit
//!    +----guest closes it-------> Closed
//! ```
//!
//! Invariants:
//! - However the loan ends (also by a panic), the terminal gets back the modes
//!   that it had.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::low_level::pipe;

/// Ctrl-C, and Ctrl-] as in telnet and in most console programs. The console of a
/// node has its own ways to leave a prompt.
const QUIT_KEYS: [u8; 2] = [0x03, 0x1d];

/// What a person is told about them.
pub(crate) const QUIT: &str = "Ctrl-C or Ctrl-]";

/// A screen of its own for the guest, which may clear it or not: what was there
/// before comes back at the end.
const BORROW: &[u8] = b"\x1b[?1049h\x1b[2J";

/// Leaves the alternate screen, shows the cursor, resets colours and modes: a
/// guest that was cut off could not do it.
const RESTORE: &[u8] = b"\x1b[?1049l\x1b[?25h\x1b[0m\x1b[?1000l\r\n";

/// Why the loan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The person, or a signal, wants to leave.
    Quit,
    /// The guest's end is gone.
    Closed,
}

/// Whether a person sits in front of both ends of this process.
pub(crate) fn is_interactive() -> bool {
    isatty(io::stdin()) && isatty(io::stdout())
}

/// Tells something in the title of the terminal, beside a console that has all of it.
pub(crate) fn title(text: &str) {
    let plain: String = text.chars().filter(|c| !c.is_control()).collect();
    let mut stdout = io::stdout();
    // Whoever has no title misses nothing that the console does not say, too.
    let _told = write!(stdout, "\x1b]2;{plain}\x07").and_then(|()| stdout.flush());
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
        // A terminal that is gone needs no restoring.
        let _restored = stdout.write_all(RESTORE).and_then(|()| stdout.flush());
        let _restored = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

/// Lends the terminal to `console` until the person or the guest ends it.
///
/// # Errors
/// When the terminal or the console fails.
pub(crate) fn lend(console: &UnixStream) -> Result<End> {
    let (signals, raised) = UnixStream::pair().context("cannot make a pipe for signals")?;
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        let raised = raised.try_clone().context("cannot make a pipe for signals")?;
        pipe::register(signal, raised).context("cannot catch signals")?;
    }
    let _raw = Raw::enter()?;
    carry(&io::stdin(), &mut io::stdout(), console, &signals).context("the console broke off")
}

/// The loop of [`lend`], between any two ends.
fn carry(
    keys: &impl AsFd,
    screen: &mut impl Write,
    mut console: &UnixStream,
    signals: &UnixStream,
) -> io::Result<End> {
    let mut buffer = [0; 16 * 1024];
    loop {
        let mut fds = [
            PollFd::new(keys, PollFlags::IN),
            PollFd::new(console, PollFlags::IN),
            PollFd::new(signals, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let ready = fds.map(|fd| !fd.revents().is_empty());
        if ready[2] {
            return Ok(End::Quit);
        }
        if ready[1] {
            match console.read(&mut buffer) {
                Ok(0) => return Ok(End::Closed),
                Ok(count) => {
                    screen.write_all(&buffer[..count])?;
                    screen.flush()?;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(End::Closed);
                }
                Err(error) => return Err(error),
            }
        }
        if ready[0] {
            let count = rustix::io::read(keys, &mut buffer)?;
            let typed = &buffer[..count];
            let quit = count == 0 || typed.iter().any(|key| QUIT_KEYS.contains(key));
            if quit {
                return Ok(End::Quit);
            }
            match console.write_all(typed) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(End::Closed),
                other => other?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        Loan { keys, person, console, guest, signals, raised }
    }

    #[test]
    fn bytes_go_both_ways_until_the_quit_key() {
        let Loan { keys, mut person, console, mut guest, signals, raised: _raised } = loan();
        guest.write_all(b"\x1b[2Jhello").unwrap();
        person.write_all(b"abc").unwrap();
        // Presses the quit key once the guest has heard what was typed before.
        let guest = std::thread::spawn(move || {
            let mut heard = [0; 3];
            guest.read_exact(&mut heard).unwrap();
            person.write_all(&[QUIT_KEYS[0]]).unwrap();
            (heard, guest)
        });
        let mut screen = Vec::new();
        assert_eq!(carry(&keys, &mut screen, &console, &signals).unwrap(), End::Quit);
        assert_eq!(screen, b"\x1b[2Jhello");
        assert_eq!(&guest.join().unwrap().0, b"abc");
    }

    #[test]
    fn a_guest_that_ends_closes_the_loan() {
        let Loan { keys, person: _person, console, guest, signals, raised: _raised } = loan();
        drop(guest);
        assert_eq!(carry(&keys, &mut Vec::new(), &console, &signals).unwrap(), End::Closed);
    }

    #[test]
    fn a_signal_ends_the_loan() {
        let Loan { keys, person: _person, console, guest: _guest, signals, mut raised } = loan();
        raised.write_all(&[1]).unwrap();
        assert_eq!(carry(&keys, &mut Vec::new(), &console, &signals).unwrap(), End::Quit);
    }
}
