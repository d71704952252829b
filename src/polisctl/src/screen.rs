//! The terminal of this program while it shows a screen: `console` and `dashboard`.
//!
//! ```text
//! open --> raw modes, alternate screen --input--> keys, another size --> drop: as before
//!  |  ^                  |
//!  |  +------- fg -------+-- stopped, and continued in the background
//!  +-- in the background: stopped until `fg`
//! ```
//!
//! Invariants:
//! - In the background the kernel stops the program, as it stops `less`, before the terminal is
//!   changed: the modes that come back at the end are never those of another program.
//! - At the end, the modes and the content of the terminal are restored, also after a signal that
//!   ends programs; the signal acts then.
//!
//! What this module does not do: draw.

use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use polis_tui::Key;
use polis_tui::keys::Parser;
use rustix::io::Errno;
use rustix::process::Signal as Number;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until};

use super::error::{Error, Explain as _};
use polis_base::sys::signal::{Signals, unblock_all};
use polis_base::sys::terminal::{self, Mode, Size, Terminal};
use polis_runtime::sys::readiness;

/// The terminal of this process.
const TERMINAL: &str = "/dev/tty";
/// The alternate screen, so that the content of the terminal is restored at the end.
const ENTER: &[u8] = b"\x1b[?1049h";
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
/// Silence after which an Escape is the key, and not the start of a sequence.
const ESCAPE: Duration = Duration::from_millis(50);
/// Ctrl-], as in telnet and in `cargo xtask run`.
const CTRL_BRACKET: u8 = 0x1d;

/// This terminal, while a screen is on it.
pub(super) struct Screen {
    terminal: Terminal,
    readable: AsyncFd<OwnedFd>,
    resized: Signal,
    continued: Signal,
    parser: Parser,
    /// When a pending Escape counts as the key.
    escape: Option<Instant>,
}

/// What happens on the terminal.
pub(super) enum Input {
    /// These keys were typed, if any.
    Keys(Vec<Key>),
    /// It has another size, or others have used it: all of it has to be drawn.
    Redraw,
    /// Ctrl-] was typed, or the terminal is gone.
    Leave,
}

impl Screen {
    /// Takes the terminal.
    pub(super) fn open() -> Result<Self, Error> {
        let failed = || "cannot use this terminal".to_owned();
        foreground().doing(failed)?;
        let terminal = Terminal::open(Path::new(TERMINAL)).doing(failed)?;
        let continued = SignalKind::from_raw(Number::CONT.as_raw());
        let screen = Self {
            readable: readiness::watch(&terminal, Interest::READABLE).doing(failed)?,
            resized: signal(SignalKind::window_change()).doing(failed)?,
            continued: signal(continued).doing(failed)?,
            terminal,
            parser: Parser::default(),
            escape: None,
        };
        screen.take().doing(failed)?;
        Ok(screen)
    }

    fn take(&self) -> Result<(), Error> {
        self.terminal.set_mode(Mode::Raw)?;
        write(ENTER)
    }

    /// Its size now.
    pub(super) fn size(&self) -> Size {
        self.terminal.size()
    }

    /// The next input. Cancel-safe.
    pub(super) async fn input(&mut self) -> Result<Input, Error> {
        let escape = self.escape;
        tokio::select! {
            // Keys first: the rest of a sequence may have come while this program was busy.
            biased;
            // Cancel-safe: nothing is read before the branch is taken.
            ready = self.readable.readable() => {
                let mut ready = ready?;
                let mut buffer = [0; 256];
                match rustix::io::read(&self.terminal, &mut buffer) {
                    Ok(0) => Ok(Input::Leave),
                    Ok(length) if buffer[..length].contains(&CTRL_BRACKET) => Ok(Input::Leave),
                    Ok(length) => {
                        self.escape = Some(Instant::now() + ESCAPE);
                        Ok(Input::Keys(self.parser.feed(&buffer[..length])))
                    }
                    Err(Errno::AGAIN) => {
                        ready.clear_ready();
                        Ok(Input::Keys(Vec::new()))
                    }
                    Err(error) => Err(io::Error::from(error)).doing(closed),
                }
            }
            // Cancel-safe: only waits.
            () = sleep_until(escape.unwrap_or_else(Instant::now)), if escape.is_some() => {
                self.escape = None;
                Ok(Input::Keys(self.parser.idle().into_iter().collect()))
            }
            // Cancel-safe per the docs of `recv`.
            _signal = self.resized.recv() => Ok(Input::Redraw),
            // Cancel-safe per the docs of `recv`.
            _signal = self.continued.recv() => {
                // A shell has used the terminal, with its own modes.
                foreground().doing(closed)?;
                self.take()?;
                Ok(Input::Redraw)
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A closed terminal needs no restore.
        let _lost = write(LEAVE);
    }
}

fn closed() -> String {
    "the terminal was closed".to_owned()
}

/// Waits for the foreground of this terminal.
fn foreground() -> io::Result<()> {
    terminal::foreground(Path::new(TERMINAL))
}

/// Writes to the terminal.
pub(super) fn write(bytes: &[u8]) -> Result<(), Error> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).doing(closed)
}

/// Does the work of a command with a screen. Ctrl-C at a moment without one, `kill` or the end of
/// the terminal end the work first, with which the terminal is as before, and act then.
pub(super) async fn until_ended(
    work: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    let failed = || "cannot wait for signals".to_owned();
    // While a signal still ends this process.
    foreground().doing(|| "cannot use this terminal".to_owned())?;
    // No other thread has begun, in which they would act at once.
    let ended = Signals::receive(&[Number::INT, Number::TERM, Number::HUP]).doing(failed)?;
    let done = unless(&ended, work).await;
    // A signal that has arrived was not read, so it acts now.
    unblock_all().doing(failed)?;
    done
}

/// Does `work`, which ends once `ended` is readable.
async fn unless(
    ended: impl AsFd,
    work: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    let ended = readiness::watch(ended, Interest::READABLE);
    let ended = ended.doing(|| "cannot wait for signals".to_owned())?;
    tokio::select! {
        // Cancel-safe: all that it holds is the terminal, which is restored.
        done = work => done,
        // Cancel-safe: only waits.
        _signal = ended.readable() => Err(Error::new("a signal has ended the command")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::mem::ManuallyDrop;
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::process::Stdio;

    use rustix::fs::OFlags;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::*;
    use polis_base::sys::poll;

    /// Tells this test that a shell has started it.
    const STARTED: &str = "POLIS_TEST_STARTED";

    /// Starts the program in the background while another one has the modes, and brings it to the
    /// foreground once the kernel has stopped it.
    const SHELL: &str = r#"
        set -m
        stty -echo
        "$@" >/dev/null &
        until grep -qs '^State:[[:space:]]*T' /proc/$!/status; do
            kill -0 $! || exit 9
            sleep 0.02
        done
        stty echo
        fg >/dev/null
    "#;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// The far end of a pseudoterminal, and the path of the near one.
    fn line() -> (OwnedFd, String) {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&far).unwrap();
        unlockpt(&far).unwrap();
        let path = ptsname(&far, Vec::new()).unwrap().into_string().unwrap();
        (far, path)
    }

    #[tokio::test]
    async fn the_rest_of_a_sequence_that_is_read_late_belongs_to_it() {
        let (far, path) = line();
        let terminal = Terminal::open(Path::new(&path)).unwrap();
        terminal.set_mode(Mode::Raw).unwrap();
        // Its end would write to the terminal of the tests.
        let mut screen = ManuallyDrop::new(Screen {
            readable: readiness::watch(&terminal, Interest::READABLE).unwrap(),
            resized: signal(SignalKind::window_change()).unwrap(),
            continued: signal(SignalKind::from_raw(Number::CONT.as_raw())).unwrap(),
            terminal,
            parser: Parser::default(),
            escape: None,
        });
        // Each time, the order of the branches could be another one.
        for _ in 0..10 {
            rustix::io::write(&far, b"\x1b").unwrap();
            while screen.escape.is_none() {
                assert!(matches!(screen.input().await, Ok(Input::Keys(keys)) if keys.is_empty()));
            }
            rustix::io::write(&far, b"[A").unwrap();
            // The kernel passes it on later.
            poll::wait(&[(screen.terminal.as_fd(), poll::Interest::Read)], None).unwrap();
            tokio::time::sleep(2 * ESCAPE).await;
            let input = screen.input().await.unwrap();
            assert!(matches!(input, Input::Keys(keys) if keys == [Key::Up]));
            screen.escape = None;
        }
    }

    #[test]
    fn a_screen_in_the_background_is_stopped_and_leaves_the_modes_of_the_foreground() {
        const NAME: &str = "screen::tests::\
            a_screen_in_the_background_is_stopped_and_leaves_the_modes_of_the_foreground";
        if std::env::var_os(STARTED).is_some() {
            runtime().block_on(async { drop(Screen::open().unwrap()) });
            let modes = tcgetattr(File::open(TERMINAL).unwrap()).unwrap();
            assert!(modes.local_modes.contains(LocalModes::ECHO | LocalModes::ICANON));
            return;
        }
        let (_far, path) = line();
        let flags = OFlags::NOCTTY.bits().cast_signed();
        let line = File::options().read(true).write(true).custom_flags(flags).open(path).unwrap();
        #[expect(clippy::disallowed_methods, reason = "a test asks a real shell")]
        let mut shell = std::process::Command::new("env");
        // The parent of the tests may have had the signal ignored.
        shell.args(["--default-signal=TTOU", "setsid", "--ctty", "--wait"]);
        shell.args(["bash", "-c", SHELL, "bash"]);
        shell.arg(std::env::current_exe().unwrap()).args(["--exact", NAME, "--nocapture"]);
        shell.env(STARTED, "1").stdin(line.try_clone().unwrap()).stdout(Stdio::null());
        // The terminal of a shell without a prompt is its standard error.
        let ended = shell.stderr(line).status().unwrap();
        assert_eq!(ended.code(), Some(0));
    }

    #[test]
    fn work_is_dropped_once_a_signal_has_arrived() {
        struct Held<'a>(&'a std::cell::Cell<bool>);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.set(true);
            }
        }
        let is_restored = std::cell::Cell::new(false);
        let (ended, end) = rustix::pipe::pipe().unwrap();
        let work = async {
            let _held = Held(&is_restored);
            rustix::io::write(&end, b"!").unwrap();
            std::future::pending().await
        };
        let error = runtime().block_on(unless(&ended, work)).unwrap_err();
        assert!(error.render().contains("a signal has ended"), "{}", error.render());
        assert!(is_restored.get());
        let (still, _end) = rustix::pipe::pipe().unwrap();
        runtime().block_on(unless(&still, async { Ok(()) })).unwrap();
    }
}
