//! The serial ports, written without ever waiting for one.
//!
//! `init` is the only writer: `node` hands its lines to `init`, and the kernel is
//! silenced except for a panic. Every port gets every line, at its own pace; which ports these
//! are, [`uart`](super::uart) says.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use zeroize::Zeroize as _;

use polis_base::serial::{EventLine, Severity, log_line};
use polis_base::sys::clock;
use polis_base::sys::poll::{self, Interest};
use polis_base::sys::terminal::{Mode, Terminal};

use super::relay::Relay;
use super::uart::{self, Uart};

/// Where the kernel shows its devices.
pub(super) const SYS: &str = "/sys";

/// The longest time for the driver to send a full buffer: 4 KiB at 115,200 baud. A port
/// is considered dead if it sends nothing for so long.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// The longest time for all pending output: a full buffer needs six seconds.
const DRAIN_ALL_MAX: Duration = Duration::from_secs(10);

/// The serial ports; without one, the lines are only remembered.
#[derive(Debug, Default)]
pub struct Port {
    /// That of [`uart::FIRST`], which also remembers the lines.
    first: Outlet,
    others: Vec<Outlet>,
}

/// One port, or the place of one.
#[derive(Debug, Default)]
struct Outlet {
    name: String,
    terminal: Option<Terminal>,
    relay: Relay,
    /// A screen is drawn there, which has the keys, too.
    drawn: bool,
}

impl Port {
    /// Opens the ports. A machine without one works as well.
    pub fn open(&mut self) {
        let ports = uart::ports(Path::new(SYS));
        let mut outlets = ports.iter().map(Outlet::open);
        if let Some(first) = outlets.next() {
            // The lines from before it was open.
            let relay = std::mem::take(&mut self.first.relay);
            self.first = Outlet { relay, ..first };
        }
        self.others = outlets.filter(|outlet| outlet.terminal.is_some()).collect();
        self.flush();
        for Uart { name, why, .. } in ports.iter().skip(1) {
            self.log(Severity::Info, &format!("the serial port {name} has these lines: {why}"));
        }
    }

    fn all(&self) -> impl Iterator<Item = &Outlet> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn each(&mut self, mut act: impl FnMut(&mut Outlet)) {
        std::iter::once(&mut self.first).chain(&mut self.others).for_each(|outlet| {
            act(outlet);
            outlet.flush();
        });
    }

    /// Writes one line, as it is.
    pub fn line(&mut self, line: &str) {
        let now = clock::uptime();
        self.each(|outlet| outlet.relay.put(now, line));
    }

    /// Writes an event line that happened now.
    pub fn event(&mut self, line: EventLine) {
        self.line(&line.at(clock::uptime()).to_string());
    }

    /// Writes an event line that must be sent even if the port is far behind: the
    /// reason why the machine stops.
    pub fn force(&mut self, line: EventLine) {
        let now = clock::uptime();
        let line = line.at(now).to_string();
        self.each(|outlet| outlet.relay.force(now, &line));
    }

    /// Writes a log line of `init`'s own.
    pub fn log(&mut self, severity: Severity, text: &str) {
        self.log_as(severity, "init", text);
    }

    /// Writes a log line under the name of another.
    pub fn log_as(&mut self, severity: Severity, name: &str, text: &str) {
        self.line(&log_line(clock::uptime(), severity, name, text));
    }

    /// Writes text that is not a whole line yet: the echo of typed keys. It is not
    /// remembered.
    pub fn echo(&mut self, text: &str) {
        self.each(|outlet| outlet.relay.echo(text));
    }

    /// The lines that were written last, the oldest first.
    pub fn kept(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.first.relay.kept()
    }

    /// Stops writing lines to the ports among these terminals: a screen is drawn there.
    pub fn leave(&mut self, terminals: &[String]) {
        self.each(|outlet| {
            outlet.drawn = terminals.contains(&outlet.name);
            outlet.relay.mute(outlet.drawn);
        });
    }

    /// Writes lines to every port again, also to those with a screen, where they start below
    /// the cursor.
    pub fn come_back(&mut self) {
        self.each(|outlet| {
            if outlet.relay.mute(false) {
                outlet.relay.echo("\n");
            }
        });
    }

    /// Gives the ports as many bytes as they accept at once.
    pub fn flush(&mut self) {
        self.each(|_outlet| {});
    }

    /// The descriptors to wait for, of the ports that lines wait for.
    pub fn waiting(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all().filter_map(Outlet::waiting)
    }

    /// The descriptors on which keys arrive.
    pub fn keys(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all().filter(|outlet| !outlet.drawn).filter_map(Outlet::fd)
    }

    /// The bytes typed at the other ends, but for those of a screen. Never blocks.
    pub fn typed(&mut self) -> Vec<u8> {
        let mut typed = Vec::new();
        self.each(|outlet| {
            if !outlet.drawn {
                outlet.read(&mut typed);
            }
        });
        typed
    }

    /// Drops what was typed at the other ends and not read yet, also at that of a screen.
    pub fn forget_typed(&self) {
        self.all().filter_map(|outlet| outlet.terminal.as_ref()).for_each(|terminal| {
            terminal.forget_typed().ok();
        });
    }

    /// Waits until every line is sent, for a bounded time. The machine ends after it.
    pub fn drain(&mut self) {
        let until = clock::uptime() + DRAIN_ALL_MAX;
        loop {
            self.flush();
            let Some(left) = until.checked_sub(clock::uptime()) else { return };
            let waited: Vec<_> = self.waiting().map(|port| (port, Interest::Write)).collect();
            if waited.is_empty() {
                break;
            }
            match poll::wait(&waited, Some(left.min(DRAIN_MAX))) {
                Ok(ready) if ready.contains(&true) => {}
                Ok(_) | Err(_) => break,
            }
        }
        // The drivers still have some of it, and their own wait has no deadline.
        let (done, drained) = mpsc::channel();
        let sent = self.all().filter(|outlet| outlet.waiting().is_none());
        for file in sent.filter_map(|outlet| outlet.terminal.as_ref()?.try_clone_file().ok()) {
            let done = done.clone();
            let drain = move || {
                rustix::termios::tcdrain(&file).ok();
                done.send(()).ok();
            };
            thread::Builder::new().name("drain".to_owned()).spawn(drain).ok();
        }
        drop(done);
        let until = clock::uptime() + DRAIN_MAX;
        // Ends when the last one has sent everything, and at the latest at that time.
        while let Some(left) = until.checked_sub(clock::uptime()) {
            if drained.recv_timeout(left).is_err() {
                return;
            }
        }
    }
}

/// Writes a line to the port at `path`, for a panic: behind what the driver has, so it waits for
/// that, for a bounded time.
pub fn line_now(path: &Path, line: &str) {
    let Ok(mut terminal) = Terminal::open(path) else { return };
    let line = format!("{line}\n");
    let mut rest = line.as_bytes();
    let until = clock::uptime() + DRAIN_MAX;
    while !rest.is_empty() {
        match terminal.write(rest) {
            Ok(written) if written > 0 => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let Some(left) = until.checked_sub(clock::uptime()) else { return };
                poll::wait(&[(terminal.as_fd(), Interest::Write)], Some(left)).ok();
            }
            Ok(_) | Err(_) => return,
        }
    }
}

impl Outlet {
    fn open(uart: &Uart) -> Self {
        let path = Path::new("/dev").join(&uart.name);
        let terminal = Terminal::open(&path).ok();
        if let Some(terminal) = &terminal {
            // Keys come one by one: someone may answer the guru from here.
            terminal.set_mode(Mode::Keys).ok();
            // The kernel has set up those that are its consoles.
            if uart.name != uart::FIRST && uart.why != uart::Why::Kernel {
                terminal.set_up_if_serial(&path).ok();
                uart.baud.map(|baud| terminal.set_speed(baud).ok());
            }
        }
        Self { name: uart.name.clone(), terminal, ..Self::default() }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.terminal.as_ref().map(AsFd::as_fd)
    }

    fn waiting(&self) -> Option<BorrowedFd<'_>> {
        self.fd().filter(|_fd| !self.relay.pending().is_empty())
    }

    fn flush(&mut self) {
        while !self.relay.pending().is_empty() {
            let Some(terminal) = &mut self.terminal else {
                let length = self.relay.pending().len();
                self.relay.written(clock::uptime(), length);
                continue;
            };
            match terminal.write(self.relay.pending()) {
                Ok(written) if written > 0 => self.relay.written(clock::uptime(), written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A port without hardware: its lines go nowhere from now on.
                Ok(_) | Err(_) => self.terminal = None,
            }
        }
    }

    fn read(&mut self, typed: &mut Vec<u8>) {
        let mut buffer = [0; 64];
        match self.terminal.as_mut().map(|terminal| terminal.read(&mut buffer)) {
            Some(Ok(length)) if length > 0 => typed.extend_from_slice(&buffer[..length]),
            // The end of the input is a port that has hung up.
            Some(Ok(_)) => self.terminal = None,
            Some(Err(_)) | None => {}
        }
        // It may be a recovery key.
        buffer.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::path::PathBuf;

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use polis_base::sys::reboot::Reason;

    use super::super::machine::Machine;
    use super::*;

    /// The far end and the path of a terminal.
    fn pseudo() -> (OwnedFd, PathBuf) {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        rustix::io::ioctl_fionbio(&far, true).unwrap();
        grantpt(&far).unwrap();
        unlockpt(&far).unwrap();
        let path = ptsname(&far, Vec::new()).unwrap().into_string().unwrap();
        (far, path.into())
    }

    /// A port with its far end.
    fn outlet(name: &str) -> (OwnedFd, Outlet) {
        let (far, path) = pseudo();
        let terminal = Terminal::open(&path).unwrap();
        terminal.set_mode(Mode::Keys).unwrap();
        (far, Outlet { name: name.to_owned(), terminal: Some(terminal), ..Outlet::default() })
    }

    fn received(far: &OwnedFd) -> String {
        let (mut buffer, mut text) = ([0; 256], String::new());
        while let Ok(length) = rustix::io::read(far, &mut buffer) {
            text.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        text
    }

    #[test]
    fn every_port_has_every_line_but_one_with_a_screen() {
        let ((far_first, first), (far_other, other)) = (outlet("ttyS0"), outlet("ttyS1"));
        let mut port = Port { first, others: vec![other] };
        port.line("one");
        assert_eq!((received(&far_first), received(&far_other)), both("one\r\n"));
        port.leave(&["tty1".to_owned(), "ttyS1".to_owned()]);
        port.line("two");
        assert_eq!(received(&far_first), "two\r\n");
        assert_eq!(received(&far_other), "");
        // The keys of a screen are its own.
        rustix::io::write(&far_first, b"a").unwrap();
        rustix::io::write(&far_other, b"b").unwrap();
        assert_eq!(port.typed(), b"a");
        assert_eq!(port.keys().count(), 1);
        port.come_back();
        port.come_back();
        port.line("three");
        assert_eq!(received(&far_first), "three\r\n");
        // Once, where a screen had left the cursor in a line.
        assert_eq!(received(&far_other), "\r\nthree\r\n");
        assert_eq!(port.kept().collect::<Vec<_>>(), ["one", "two", "three"]);
    }

    fn both(text: &str) -> (String, String) {
        (text.to_owned(), text.to_owned())
    }

    #[test]
    fn the_closing_line_is_on_every_port_also_where_a_screen_was() {
        let ((far_first, first), (far_other, other)) = (outlet("ttyS0"), outlet("ttyS1"));
        let mut machine = Machine::default();
        machine.port = Port { first, others: vec![other] };
        machine.port.leave(&["ttyS0".to_owned()]);
        machine.port.line("one");
        assert_eq!(received(&far_first), "");
        machine.off(Reason::PowerOff);
        let (first, other) = (received(&far_first), received(&far_other));
        assert!(first.starts_with("\r\nPOLIS off reason=poweroff t="), "{first:?}");
        assert!(other.starts_with("one\r\nPOLIS off reason=poweroff t="), "{other:?}");
    }

    #[test]
    fn what_was_typed_before_a_failure_is_no_answer_to_it() {
        let ((far_first, first), (far_other, other)) = (outlet("ttyS0"), outlet("ttyS1"));
        let mut port = Port { first, others: vec![other] };
        rustix::io::write(&far_first, b"reboot\r").unwrap();
        rustix::io::write(&far_other, b"p").unwrap();
        port.forget_typed();
        assert_eq!(port.typed(), b"");
        rustix::io::write(&far_first, b"h").unwrap();
        let waited: Vec<_> = port.keys().take(1).map(|keys| (keys, Interest::Read)).collect();
        assert_eq!(poll::wait(&waited, None).unwrap(), [true]);
        assert_eq!(port.typed(), b"h");
    }

    #[test]
    fn the_line_of_a_panic_waits_for_no_port_that_takes_nothing() {
        let (far, path) = pseudo();
        let mut terminal = Terminal::open(&path).unwrap();
        line_now(&path, "init has a bug");
        assert_eq!(received(&far), "init has a bug\r\n");
        while terminal.write(&[b'x'; 1024]).is_ok() {}
        line_now(&path, "init has a bug");
        line_now(Path::new("/nowhere"), "init has a bug");
    }

    #[test]
    fn without_a_port_lines_are_remembered_and_nothing_waits() {
        let mut port = Port::default();
        port.line("one");
        assert_eq!(port.kept().collect::<Vec<_>>(), ["one"]);
        assert_eq!(port.waiting().count(), 0);
        assert!(port.typed().is_empty());
        port.drain();
    }
}
