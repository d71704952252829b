//! A terminal device: opened raw, asked for its size and restored when dropped.
//!
//! Each terminal is used through its own descriptor, so one process can serve several
//! (`tty1`, `hvc0`, a serial port), and they never become a controlling terminal.
//! `crossterm` has one terminal for the whole process, so it does not fit; `polisctl` uses
//! this type and no second way to raw mode.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::termios::{
    self, InputModes, LocalModes, OptionalActions, OutputModes, QueueSelector, SpecialCodeIndex,
    Termios,
};

use super::poll::{self, Interest};
use super::signal::{Signals, uninterrupted};

/// The assumed size of a terminal that does not report one, as on serial lines.
pub const SIZE_DEFAULT: Size = Size { columns: 80, rows: 24 };

/// Baud of a serial port, the same as of the port with the log lines.
const SPEED: u32 = 115_200;

/// How long the end of a serial port may take, in hundredths of a second: as long as
/// the kernel's buffer takes at [`SPEED`]. If the far end does not read, a process that
/// ends, even one that is killed, would wait for half a minute, and the machine for it.
const CLOSING_WAIT: u16 = 50;

/// Bytes of `struct serial_struct` of the kernel, and where its `closing_wait` is: behind
/// eight integers, two bytes of half an integer, two bytes, and one integer.
const SETTINGS: usize = 72;
const CLOSING_WAIT_AT: usize = 40;

/// `struct serial_struct`, in words of its alignment.
type Settings = [u64; SETTINGS / size_of::<u64>()];

/// The request for the settings of a serial port: see `ioctl_tty(2)`.
#[derive(Clone, Copy)]
enum SettingsRequest {
    Get,
    Set,
}

#[expect(unsafe_code, reason = "ioctls that rustix does not have")]
fn serial_settings(
    terminal: BorrowedFd<'_>,
    request: SettingsRequest,
    settings: &mut Settings,
) -> io::Result<()> {
    let request = match request {
        SettingsRequest::Get => libc::TIOCGSERIAL,
        SettingsRequest::Set => libc::TIOCSSERIAL,
    };
    // SAFETY: the descriptor is open while it is borrowed; both requests take a `struct
    // serial_struct`, which has the size and the alignment of `settings`, and any bytes
    // are one.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), request, settings.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Columns and rows of characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Characters a row.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

/// The handling of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every byte passes unchanged, both ways: for screens.
    Raw,
    /// Keys arrive one by one and are not echoed; a written line feed returns
    /// the carriage too: for a log that also listens.
    Keys,
}

/// An open terminal. Reads and writes never block. Restores its modes when dropped.
#[derive(Debug)]
pub struct Terminal {
    file: File,
    before: Termios,
}

impl Terminal {
    /// Opens the terminal `path`, for example `/dev/tty1`.
    ///
    /// # Errors
    ///
    /// `ENOTTY` if it is not a terminal; `EIO` for a serial port without hardware.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        let before = termios::tcgetattr(&file)?;
        Ok(Self { file, before })
    }

    /// Changes the mode. Takes effect at once and drops no output.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub fn set_mode(&self, mode: Mode) -> io::Result<()> {
        let mut modes = self.before.clone();
        modes.make_raw();
        // A read returns what is there, if only one byte.
        modes.special_codes[SpecialCodeIndex::VMIN] = 1;
        modes.special_codes[SpecialCodeIndex::VTIME] = 0;
        if mode == Mode::Keys {
            modes.output_modes.insert(OutputModes::OPOST | OutputModes::ONLCR);
            modes.input_modes.insert(InputModes::ICRNL);
            modes.local_modes.remove(LocalModes::ISIG);
        }
        Ok(termios::tcsetattr(&self.file, OptionalActions::Now, &modes)?)
    }

    /// The size, or [`SIZE_DEFAULT`] if the terminal does not report one.
    #[must_use]
    pub fn size(&self) -> Size {
        self.reported_size().unwrap_or(SIZE_DEFAULT)
    }

    /// The size, if the terminal reports it.
    #[must_use]
    pub fn reported_size(&self) -> Option<Size> {
        let size = termios::tcgetwinsize(&self.file).ok()?;
        let known = size.ws_col > 0 && size.ws_row > 0;
        known.then_some(Size { columns: size.ws_col, rows: size.ws_row })
    }

    /// Sets the expected speed of a serial port, if `path` is one, and shortens the
    /// wait at its end: see [`CLOSING_WAIT`].
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub fn set_up_if_serial(&self, path: &Path) -> io::Result<()> {
        if !is_serial(path) {
            return Ok(());
        }
        // An adapter's driver may not support it, and then only its end takes longer.
        self.set_closing_wait(CLOSING_WAIT).ok();
        self.set_speed(SPEED)
    }

    /// How long the kernel waits for the unsent bytes of a serial port when the last
    /// descriptor of it is closed, in hundredths of a second.
    fn set_closing_wait(&self, wait: u16) -> io::Result<()> {
        let mut settings = Settings::default();
        serial_settings(self.file.as_fd(), SettingsRequest::Get, &mut settings)?;
        let (word, shift) = (CLOSING_WAIT_AT / 8, CLOSING_WAIT_AT % 8 * 8);
        settings[word] &= !(u64::from(u16::MAX) << shift);
        settings[word] |= u64::from(wait) << shift;
        serial_settings(self.file.as_fd(), SettingsRequest::Set, &mut settings)
    }

    /// Sets the speed of a serial port, in baud. Takes effect at once.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub fn set_speed(&self, baud: u32) -> io::Result<()> {
        let mut modes = termios::tcgetattr(&self.file)?;
        modes.set_speed(baud)?;
        Ok(termios::tcsetattr(&self.file, OptionalActions::Now, &modes)?)
    }

    /// Drops what was typed and not read yet.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub fn forget_typed(&self) -> io::Result<()> {
        Ok(termios::tcflush(&self.file, QueueSelector::IFlush)?)
    }

    /// A second descriptor of the same terminal, for a thread of its own.
    ///
    /// # Errors
    ///
    /// When the process has too many descriptors.
    pub fn try_clone_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that is gone needs no modes.
        termios::tcsetattr(&self.file, OptionalActions::Now, &self.before).ok();
    }
}

impl AsFd for Terminal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Read for Terminal {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer)
    }
}

impl Write for Terminal {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Without NONBLOCK the open of a serial port waits for a carrier.
    let flags = OFlags::NOCTTY | OFlags::NONBLOCK;
    OpenOptions::new().read(true).write(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Waits until this process is in the foreground of its terminal `path`: in the background the
/// kernel stops it here, since it wants to use the terminal, and a shell's `fg` continues it.
///
/// # Errors
///
/// When this process has no terminal.
pub fn foreground(path: &Path) -> io::Result<()> {
    Ok(termios::tcdrain(open(path)?)?)
}

/// Shows `prompt` on the terminal of this process, and does `work` with it while a secret is typed.
/// The modes are back before Ctrl-C, `kill` or the end of the terminal ends this process, even if
/// `work` sends itself the signal of a Ctrl-C that it reads.
///
/// # Errors
///
/// When this process has no terminal; the error of `work`.
pub fn without_echo<T>(
    prompt: &str,
    work: impl FnOnce(NoEcho<Signals>) -> io::Result<T>,
) -> io::Result<T> {
    without_echo_at(Path::new("/dev/tty"), prompt, work)
}

fn without_echo_at<T>(
    path: &Path,
    prompt: &str,
    work: impl FnOnce(NoEcho<Signals>) -> io::Result<T>,
) -> io::Result<T> {
    // First: a signal still ends this process, and it has not yet taken the modes of the program
    // in the foreground for its own.
    foreground(path)?;
    let terminal = Terminal::open(path)?;
    uninterrupted(|ended| work(NoEcho::new(terminal, ended, prompt)?)).flatten()
}

/// A terminal while a secret is typed: it shows no key. A read of it ends once the descriptor
/// `ended` is ready, and its modes come back when it is dropped.
#[derive(Debug)]
pub struct NoEcho<E> {
    terminal: Terminal,
    ended: E,
}

impl<E: AsFd> NoEcho<E> {
    fn new(terminal: Terminal, ended: E, prompt: &str) -> io::Result<Self> {
        terminal.set_mode(Mode::Keys)?;
        let mut typed = Self { terminal, ended };
        typed.terminal.write_all(prompt.as_bytes())?;
        Ok(typed)
    }
}

impl<E: AsFd> Read for NoEcho<E> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let [ended, typed] = [self.ended.as_fd(), self.terminal.as_fd()];
            let ready = poll::wait(&[(ended, Interest::Read), (typed, Interest::Read)], None)?;
            if ready.first().is_some_and(|ended| *ended) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            match self.terminal.read(buffer) {
                // Its reader would take the part that was typed for all of it.
                Ok(0) if !buffer.is_empty() => {
                    return Err(io::Error::other("the terminal is gone"));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

impl<E> Drop for NoEcho<E> {
    fn drop(&mut self) {
        // The end of the line was not shown either.
        self.terminal.write_all(b"\n").ok();
    }
}

fn is_serial(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    ["ttyS", "ttyUSB", "ttyAMA"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::PathBuf;

    use rustix::process::{Pid, Signal, WaitOptions, kill_process, setpgid, setsid, waitpid};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::Winsize;

    use super::*;

    /// The far end and the path of a terminal whose far end is not read.
    fn pseudo() -> (OwnedFd, PathBuf) {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&far).unwrap();
        unlockpt(&far).unwrap();
        let name = ptsname(&far, Vec::new()).unwrap().into_string().unwrap();
        (far, PathBuf::from(name))
    }

    /// The next line that arrives at the far end.
    fn line(far: &OwnedFd) -> Vec<u8> {
        // The line discipline may split a write into any number of pieces.
        let (mut arrived, mut buffer) = (Vec::new(), [0; 8]);
        while !arrived.ends_with(b"\n") {
            let read = rustix::io::read(far, &mut buffer).unwrap();
            arrived.extend_from_slice(&buffer[..read]);
        }
        arrived
    }

    #[test]
    fn a_terminal_without_a_size_is_taken_for_a_small_one() {
        let (far, path) = pseudo();
        let terminal = Terminal::open(&path).unwrap();
        assert_eq!(terminal.size(), SIZE_DEFAULT);
        let size = Winsize { ws_col: 160, ws_row: 50, ws_xpixel: 0, ws_ypixel: 0 };
        termios::tcsetwinsize(&far, size).unwrap();
        assert_eq!(terminal.size(), Size { columns: 160, rows: 50 });
    }

    #[test]
    fn a_key_arrives_alone_and_silently_and_a_read_never_blocks() {
        let (far, path) = pseudo();
        let mut terminal = Terminal::open(&path).unwrap();
        terminal.set_mode(Mode::Keys).unwrap();
        let mut buffer = [0; 8];
        let nothing = terminal.read(&mut buffer).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        rustix::io::write(&far, b"r").unwrap();
        assert_eq!(terminal.read(&mut buffer).unwrap(), 1);
        terminal.write_all(b"a\n").unwrap();
        assert_eq!(line(&far), b"a\r\n");
    }

    #[test]
    fn what_was_typed_before_is_forgotten_and_the_next_key_is_not() {
        let (far, path) = pseudo();
        let mut terminal = Terminal::open(&path).unwrap();
        terminal.set_mode(Mode::Keys).unwrap();
        rustix::io::write(&far, b"root\r").unwrap();
        terminal.forget_typed().unwrap();
        rustix::io::write(&far, b"h").unwrap();
        let waited = [(terminal.as_fd(), Interest::Read)];
        assert_eq!(poll::wait(&waited, None).unwrap(), [true]);
        let mut buffer = [0; 8];
        let length = terminal.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"h");
    }

    #[test]
    fn the_modes_come_back_when_the_terminal_is_closed() {
        let (_far, path) = pseudo();
        let watcher = Terminal::open(&path).unwrap();
        let before = termios::tcgetattr(&watcher).unwrap().local_modes;
        let terminal = Terminal::open(&path).unwrap();
        terminal.set_mode(Mode::Raw).unwrap();
        assert_ne!(termios::tcgetattr(&watcher).unwrap().local_modes, before);
        drop(terminal);
        assert_eq!(termios::tcgetattr(&watcher).unwrap().local_modes, before);
    }

    #[test]
    fn a_secret_is_not_shown_and_its_read_ends_with_the_process() {
        let (far, path) = pseudo();
        let watcher = Terminal::open(&path).unwrap();
        let modes = || termios::tcgetattr(&watcher).unwrap().local_modes;
        let before = modes();
        assert!(before.contains(LocalModes::ECHO));
        let (ended, end) = rustix::pipe::pipe().unwrap();
        let mut typed = NoEcho::new(Terminal::open(&path).unwrap(), ended, "Key: ").unwrap();
        assert!(!modes().contains(LocalModes::ECHO));
        rustix::io::write(&far, b"x").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(typed.read(&mut buffer).unwrap(), 1);
        rustix::io::write(&end, b"!").unwrap();
        let interrupted = typed.read(&mut buffer).unwrap_err();
        assert_eq!(interrupted.kind(), io::ErrorKind::Interrupted);
        drop(typed);
        assert_eq!(modes(), before);
        assert_eq!(line(&far), b"Key: \r\n");
    }

    #[test]
    fn a_secret_has_no_end_where_its_terminal_is_gone() {
        let (far, path) = pseudo();
        let (ended, _end) = rustix::pipe::pipe().unwrap();
        let mut typed = NoEcho::new(Terminal::open(&path).unwrap(), ended, "").unwrap();
        drop(far);
        assert!(typed.read(&mut [0; 8]).is_err());
    }

    /// Does `work` in a child without other threads, which might take its signals.
    #[expect(unsafe_code, reason = "the standard library has no fork")]
    fn fork(work: impl FnOnce()) -> Pid {
        // SAFETY: the C library keeps the heap of the child usable, the child waits for no lock
        // of another thread, and it ends below.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes numbers. The parent of the tests may have had the signal ignored.
            unsafe { libc::signal(libc::SIGTTOU, libc::SIG_DFL) };
            let done = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: takes a number and does not return.
            unsafe { libc::_exit(i32::from(done.is_err())) };
        }
        Pid::from_raw(child).unwrap()
    }

    /// Asks for a secret in the background, where the process stops, and does `then` in the
    /// foreground, with that process, the terminal, and the program whose modes it has.
    fn in_the_background(then: impl FnOnce(Pid, &File, Terminal)) {
        let (_far, path) = pseudo();
        let session = fork(|| {
            setsid().unwrap();
            // Without `NOCTTY`, it becomes the terminal of the session.
            let line = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            let program = Terminal::open(&path).unwrap();
            program.set_mode(Mode::Raw).unwrap();
            let asks = fork(|| {
                setpgid(None, None).unwrap();
                without_echo_at(&path, "Key: ", |_typed| Ok(())).unwrap();
            });
            let (_asks, stopped) = waitpid(Some(asks), WaitOptions::UNTRACED).unwrap().unwrap();
            assert!(stopped.stopped());
            then(asks, &line, program);
        });
        let (_session, ended) = waitpid(Some(session), WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(ended.exit_status(), Some(0));
    }

    #[test]
    fn a_process_that_asks_for_a_secret_in_the_background_can_be_ended() {
        in_the_background(|asks, _line, _program| {
            kill_process(asks, Signal::TERM).unwrap();
            kill_process(asks, Signal::CONT).unwrap();
            let (_asks, ended) = waitpid(Some(asks), WaitOptions::UNTRACED).unwrap().unwrap();
            assert_eq!(ended.terminating_signal(), Some(Signal::TERM.as_raw()));
        });
    }

    #[test]
    fn a_secret_that_was_asked_for_in_the_background_leaves_the_modes_of_the_foreground() {
        in_the_background(|asks, line, program| {
            // The shell takes its own modes back before it brings a process to the foreground.
            drop(program);
            let before = termios::tcgetattr(line).unwrap().local_modes;
            assert!(before.contains(LocalModes::ECHO));
            termios::tcsetpgrp(line, asks).unwrap();
            kill_process(asks, Signal::CONT).unwrap();
            let (_asks, ended) = waitpid(Some(asks), WaitOptions::UNTRACED).unwrap().unwrap();
            assert_eq!(ended.exit_status(), Some(0));
            assert_eq!(termios::tcgetattr(line).unwrap().local_modes, before);
        });
    }

    #[test]
    fn what_is_not_a_terminal_is_refused() {
        let error = Terminal::open(Path::new("/dev/null")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NOTTY.raw_os_error()));
    }

    #[test]
    fn a_serial_port_differs_from_a_screen() {
        assert!(is_serial(Path::new("/dev/ttyS1")));
        assert!(!is_serial(Path::new("/dev/tty1")));
        assert!(!is_serial(Path::new("/dev/hvc0")));
    }
}
