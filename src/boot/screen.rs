//! Paints the guru meditation on terminals, each at its own pace.
//!
//! A terminal that does not take what is drawn (a serial line at 9,600 baud, a
//! console that nobody is connected to) gets the next picture when it has taken
//! this one: it is late, and nobody waits for it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_tui::Command;
use polis_tui::guru::{self, Guru, View};
use polis_tui::keys::Parser;
use zeroize::{Zeroize as _, Zeroizing};

use crate::canvas::Canvas;
use crate::sys::clock;
use crate::sys::terminal::{Mode, Size, Terminal};

/// A sequence of bytes that means one key comes faster than this, even at 300 baud.
pub const SILENCE: Duration = Duration::from_millis(100);

/// One terminal with a guru meditation on it.
#[derive(Debug)]
pub struct Screen {
    path: PathBuf,
    terminal: Terminal,
    canvas: Canvas,
    view: View,
    parser: Parser,
    /// When something was typed last.
    heard: Duration,
    pending: Vec<u8>,
}

impl Screen {
    /// Opens the terminal `path` and makes it ours.
    ///
    /// # Errors
    ///
    /// When it is not there or not a terminal.
    pub fn open(path: &Path) -> io::Result<Self> {
        let terminal = Terminal::open(path)?;
        terminal.set_mode(Mode::Raw)?;
        let canvas = Canvas::new(terminal.size());
        let Size { columns, rows } = canvas.size();
        Ok(Self {
            path: path.to_owned(),
            terminal,
            canvas,
            view: View::new(columns, rows),
            parser: Parser::default(),
            heard: Duration::ZERO,
            pending: Vec::new(),
        })
    }

    /// Which terminal it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Draws, unless the terminal is not through with the last picture.
    ///
    /// # Errors
    ///
    /// When the terminal is gone.
    pub fn draw(&mut self, guru: &Guru, phase: bool) -> io::Result<()> {
        self.flush()?;
        if !self.pending.is_empty() {
            return Ok(());
        }
        let size = Canvas::bounded(self.terminal.size());
        if size != self.canvas.size() {
            self.view.resize(size.columns, size.rows);
            self.canvas = Canvas::new(size);
        }
        let view = &self.view;
        self.pending = self.canvas.draw(|buffer| guru::render(guru, view, phase, buffer));
        self.flush()
    }

    /// Starts from an empty screen, whatever is on it.
    pub fn clear(&mut self) {
        self.canvas = Canvas::new(self.canvas.size());
    }

    /// Gives the terminal as much as it takes at once.
    ///
    /// # Errors
    ///
    /// When the terminal is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            match self.terminal.write(&self.pending) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.pending.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the terminal has yet to take something.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Reads what was typed; returns what it asks for.
    ///
    /// # Errors
    ///
    /// When the terminal is gone.
    pub fn commands(&mut self, guru: &Guru) -> io::Result<Vec<Command>> {
        let mut bytes = [0; 64];
        let length = match self.terminal.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Vec::new()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let keys = self.parser.feed(&bytes[..length]);
        // What was typed may be a key of another kind.
        bytes.zeroize();
        self.heard = clock::uptime();
        Ok(keys.into_iter().filter_map(|key| self.view.key(key, guru)).collect())
    }

    /// The recovery key that was typed here; asked for after `Command::Unlock`.
    pub fn take_typed(&mut self) -> Option<Zeroizing<String>> {
        self.view.take_typed()
    }

    /// Nothing was typed for a while, if that is so: an Escape was the key.
    pub fn idle(&mut self, guru: &Guru) {
        if clock::uptime() >= self.heard + SILENCE
            && let Some(key) = self.parser.idle()
        {
            self.view.key(key, guru);
        }
    }
}

impl AsFd for Screen {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.terminal.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    fn pseudo() -> (OwnedFd, PathBuf) {
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        rustix::io::ioctl_fionbio(&far, true).unwrap();
        grantpt(&far).unwrap();
        unlockpt(&far).unwrap();
        let name = ptsname(&far, Vec::new()).unwrap().into_string().unwrap();
        (far, PathBuf::from(name))
    }

    fn all(far: &OwnedFd) -> String {
        let (mut text, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = rustix::io::read(far, &mut bytes) {
            text.extend(&bytes[..length]);
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    #[test]
    fn a_guru_is_painted_and_a_key_comes_back() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path).unwrap();
        let guru = Guru { code: "#0601.0000".to_owned(), ..Guru::default() };
        let mut text = String::new();
        // The far end is as slow as a terminal: a picture goes through in parts.
        while {
            screen.draw(&guru, true).unwrap();
            text.push_str(&all(&far));
            screen.is_behind()
        } {}
        assert!(text.contains("#0601.0000"), "{text}");
        assert!(!text.contains("\x1b[22m"), "the end of bold darkens what follows: {text}");
        rustix::io::write(&far, b"\x1b[Ah").unwrap();
        assert_eq!(screen.commands(&guru).unwrap(), [Command::Hold]);
    }

    #[test]
    fn a_terminal_that_takes_nothing_is_not_waited_for_and_holds_one_picture_at_most() {
        let (_far, path) = pseudo();
        let mut screen = Screen::open(&path).unwrap();
        for turn in 0..50 {
            screen.draw(&Guru::default(), turn % 2 == 0).unwrap();
        }
        assert!(screen.pending.len() < 64 << 10, "{}", screen.pending.len());
    }
}
