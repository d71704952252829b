//! The screens of the guru meditation: one per terminal, each painted at its own pace.
//!
//! A terminal that does not accept output (a serial line at 9,600 baud, a console
//! without a client) gets the next picture after this one: it is late, and the other
//! terminals do not wait for it.
//!
//! Only the border and the countdown change, so foreign output over the text would stay
//! there. A virtual terminal is asked for its characters, and painted over where they
//! differ; any other terminal is painted over once a minute. A terminal of unknown size
//! is asked for it, and an answer after a long silence comes from a new client, which
//! needs the whole picture.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_tui::Command;
use polis_tui::guru::{self, Guru, View};
use polis_tui::keys::{Key, Parser};
use zeroize::{Zeroize as _, Zeroizing};

use polis_base::canvas::{ABSENT_AFTER, Canvas, REPAINT, WHERE};
use polis_base::sys::terminal::{Mode, SIZE_DEFAULT, Size, Terminal};
use polis_base::sys::vt;

/// A sequence of bytes that means one key comes faster than this, even at 300 baud.
pub const SILENCE: Duration = Duration::from_millis(100);

/// How often a terminal is checked: whether it is present, what it shows, how large it
/// is.
pub const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// One terminal with a guru meditation on it.
#[derive(Debug)]
pub struct Screen {
    path: PathBuf,
    terminal: Terminal,
    canvas: Canvas,
    view: View,
    parser: Parser,
    /// When the last key arrived.
    received: Duration,
    /// Whether the last key was a digit: see [`Self::press`].
    digit: bool,
    pending: Vec<u8>,
    /// Where the kernel shows the characters of a virtual terminal.
    characters: Option<PathBuf>,
    /// The size that the terminal reported, where its driver does not know it.
    declared: Option<Size>,
    /// When the first unanswered question about the size was sent.
    unanswered: Option<Duration>,
    /// When the next check is due.
    look: Duration,
    /// When the next repaint is due.
    repaint: Duration,
}

impl Screen {
    /// Opens the terminal `path` and takes it over.
    ///
    /// # Errors
    ///
    /// When it is missing or not a terminal.
    pub fn open(path: &Path, now: Duration) -> io::Result<Self> {
        let terminal = Terminal::open(path)?;
        terminal.set_mode(Mode::Raw)?;
        terminal.set_up_if_serial(path)?;
        let canvas = Canvas::new(terminal.size());
        let Size { columns, rows } = canvas.size();
        Ok(Self {
            path: path.to_owned(),
            terminal,
            canvas,
            view: View::new(columns, rows),
            parser: Parser::default(),
            received: Duration::ZERO,
            digit: false,
            pending: Vec::new(),
            characters: vt::characters(path),
            declared: None,
            unanswered: None,
            look: now,
            repaint: now + REPAINT,
        })
    }

    /// Opens those of the terminals `names` under `/dev` that are not among `screens`;
    /// returns the errors by name.
    pub fn open_missing(
        names: &[String],
        screens: &mut Vec<Self>,
        now: Duration,
    ) -> Vec<(String, io::Error)> {
        let mut failed = Vec::new();
        for name in names {
            let path = Path::new("/dev").join(name);
            if screens.iter().all(|screen| screen.path != path) {
                match Self::open(&path, now) {
                    Ok(screen) => screens.push(screen),
                    Err(error) => failed.push((name.clone(), error)),
                }
            }
        }
        failed
    }

    /// The path of the terminal.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Draws, unless the terminal is still receiving the last picture.
    ///
    /// # Errors
    ///
    /// When the terminal is gone.
    pub fn draw(&mut self, guru: &Guru, phase: bool, now: Duration) -> io::Result<()> {
        self.flush()?;
        if !self.pending.is_empty() {
            return Ok(());
        }
        let reported = self.terminal.reported_size();
        let size = Canvas::bounded(reported.or(self.declared).unwrap_or(SIZE_DEFAULT));
        if size != self.canvas.size() {
            self.view.resize(size.columns, size.rows);
            self.canvas = Canvas::new(size);
        }
        let looks = now >= self.look;
        if looks {
            self.look = now + POLL_INTERVAL;
            self.look_after(reported, now);
        }
        let view = &self.view;
        self.pending = self.canvas.draw(|buffer| guru::render(guru, view, phase, buffer));
        // A torn answer would be typed into the recovery key.
        if looks && reported.is_none() && self.view.asks().is_none() {
            self.unanswered.get_or_insert(now);
            self.pending.extend(WHERE);
        }
        self.flush()
    }

    /// Makes the next picture a whole one, where that is due.
    fn look_after(&mut self, size: Option<Size>, now: Duration) {
        let overwritten = match (&self.characters, size) {
            (Some(path), Some(size)) => {
                std::fs::read(path).is_ok_and(|cells| self.canvas.differs(&cells, size))
            }
            _ => now >= self.repaint,
        };
        if overwritten {
            self.repaint = now + REPAINT;
            self.canvas.forget();
        }
    }

    /// Handles a report of the far corner's position.
    fn receive_size(&mut self, size: Size, now: Duration) {
        self.declared = Some(size);
        let since = self.unanswered.take();
        if since.is_some_and(|since| now.saturating_sub(since) >= ABSENT_AFTER) {
            self.canvas.forget();
        }
    }

    /// Starts from an empty screen, over any previous content.
    pub fn clear(&mut self) {
        self.canvas = Canvas::new(self.canvas.size());
    }

    /// Gives the terminal as many bytes as it accepts at once.
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

    /// Whether the terminal has pending output.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Reads the keys; returns their commands. After a short silence, a lone Escape is
    /// the Escape key, and a torn sequence is dropped: but only then, since the rest of
    /// it may have been waiting to be read.
    ///
    /// # Errors
    ///
    /// When the terminal is gone.
    pub fn commands(&mut self, guru: &Guru, now: Duration) -> io::Result<Vec<Command>> {
        let mut bytes = [0; 64];
        let length = match self.terminal.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.idle(guru, now);
                return Ok(Vec::new());
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let keys = self.parser.feed(&bytes[..length]);
        // The typed bytes may contain a recovery key.
        bytes.zeroize();
        self.received = now;
        let mut commands = Vec::new();
        for key in keys {
            match key {
                Key::Cursor { row, column } => {
                    self.receive_size(Size { columns: column, rows: row }, now);
                }
                key => commands.extend(self.press(key, guru)),
            }
        }
        Ok(commands)
    }

    /// A line that loses the beginning of an answer about the size leaves `24;80R`: an
    /// R that ends a number does not request a reboot.
    fn press(&mut self, key: Key, guru: &Guru) -> Option<Command> {
        let after_digit = std::mem::replace(&mut self.digit, is_digit(key));
        if after_digit && key == Key::Char('R') && self.view.asks().is_none() {
            return None;
        }
        self.view.key(key, guru)
    }

    /// The recovery key that was typed here; asked for after `Command::Unlock`.
    pub fn take_typed(&mut self) -> Option<Zeroizing<String>> {
        self.view.take_typed()
    }

    /// Handles a silence, if there is one: a lone Escape is the Escape key.
    fn idle(&mut self, guru: &Guru, now: Duration) {
        if now >= self.received + SILENCE
            && let Some(key) = self.parser.idle()
        {
            self.press(key, guru);
        }
    }
}

fn is_digit(key: Key) -> bool {
    matches!(key, Key::Char('0'..='9'))
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

    /// Time since the kernel started when a test begins.
    const START: Duration = Duration::from_secs(5);

    /// A person at the far end.
    struct Person {
        far: OwnedFd,
        screen: vt100::Parser,
        /// How often the terminal was cleared.
        cleared: usize,
    }

    impl Person {
        fn new(far: OwnedFd, [rows, columns]: [u16; 2]) -> Self {
            let (rows, columns) = (rows.try_into().unwrap(), columns.try_into().unwrap());
            Self { far, screen: vt100::Parser::new(rows, columns, 0), cleared: 0 }
        }

        /// Draws until the person has the whole picture; returns its text.
        fn watch(&mut self, screen: &mut Screen, now: Duration) -> String {
            let guru = Guru { code: "#0601.0000".to_owned(), ..Guru::default() };
            while {
                screen.draw(&guru, true, now).unwrap();
                let text = all(&self.far);
                self.cleared += text.matches("\x1b[2J").count();
                self.screen.process(text.as_bytes());
                screen.is_behind()
            } {}
            self.screen.screen().contents()
        }
    }

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
        let mut screen = Screen::open(&path, START).unwrap();
        let guru = Guru { code: "#0601.0000".to_owned(), ..Guru::default() };
        let mut text = String::new();
        // The far end is as slow as a terminal: a picture goes through in parts.
        while {
            screen.draw(&guru, true, START).unwrap();
            text.push_str(&all(&far));
            screen.is_behind()
        } {}
        assert!(text.contains("#0601.0000"), "{text}");
        assert!(!text.contains("\x1b[22m"), "the end of bold darkens what follows: {text}");
        rustix::io::write(&far, b"\x1b[Ah").unwrap();
        assert_eq!(screen.commands(&guru, START).unwrap(), [Command::Hold]);
    }

    #[test]
    fn a_terminal_that_takes_nothing_is_not_waited_for_and_holds_one_picture_at_most() {
        let (_far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        for turn in 0..50 {
            screen.draw(&Guru::default(), turn % 2 == 0, START).unwrap();
        }
        assert!(screen.pending.len() < 64 << 10, "{}", screen.pending.len());
    }

    #[test]
    fn a_line_that_does_not_know_its_size_is_asked_and_filled_to_its_corner() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        let mut person = Person::new(far, [40, 120]);
        person.watch(&mut screen, START);
        rustix::io::write(&person.far, b"\x1b[40;120R").unwrap();
        assert_eq!(screen.commands(&Guru::default(), START).unwrap(), []);
        person.watch(&mut screen, START);
        let last = person.screen.screen().rows(0, 120).last().unwrap();
        assert_eq!(last, "█".repeat(120));
    }

    #[test]
    fn an_answer_about_the_size_reboots_nothing_however_it_is_torn_or_damaged() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        let (guru, mut now) = (Guru::default(), START);
        let mut hear = |bytes: &[u8]| {
            rustix::io::write(&far, bytes).unwrap();
            let mut commands = screen.commands(&guru, now).unwrap();
            now += SILENCE;
            commands.extend(screen.commands(&guru, now).unwrap());
            now += SILENCE;
            commands
        };
        let answer = b"\x1b[24;80R";
        for at in 1..answer.len() {
            assert_eq!(hear(&answer[..at]), [], "torn at {at}");
            assert_eq!(hear(&answer[at..]), [], "torn at {at}");
        }
        for damaged in [&b"[24;80R"[..], b"24;80R", b"0R", b"\x9b24;80R", b"\x1b24;80R"] {
            assert_eq!(hear(damaged), [], "{damaged:?}");
        }
        assert_eq!(hear(b"R"), [Command::Reboot], "a typed key is read at once");
        assert_eq!(hear(b"24r"), [Command::Reboot], "no answer ends like this");
    }

    #[test]
    fn the_rest_of_an_answer_that_was_read_late_is_read_before_it_is_given_up() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        rustix::io::write(&far, b"\x1b[40").unwrap();
        assert_eq!(screen.commands(&Guru::default(), START).unwrap(), []);
        rustix::io::write(&far, b";120R").unwrap();
        let later = START + Duration::from_secs(1);
        assert_eq!(screen.commands(&Guru::default(), later).unwrap(), []);
        assert_eq!(screen.declared, Some(Size { columns: 120, rows: 40 }));
    }

    #[test]
    fn no_question_is_sent_while_a_recovery_key_is_typed() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        let guru = Guru { unlock: true, ..Guru::default() };
        let drawn = |screen: &mut Screen, now| {
            let mut text = String::new();
            while {
                screen.draw(&guru, true, now).unwrap();
                text.push_str(&all(&far));
                screen.is_behind()
            } {}
            text
        };
        let asks = |text: &str| text.contains("\x1b[6n");
        assert!(asks(&drawn(&mut screen, START)));
        rustix::io::write(&far, b"u").unwrap();
        screen.commands(&guru, START).unwrap();
        assert!(!asks(&drawn(&mut screen, START + POLL_INTERVAL)));
        rustix::io::write(&far, b"1R\x03").unwrap();
        assert_eq!(screen.commands(&guru, START + POLL_INTERVAL).unwrap(), []);
        assert!(asks(&drawn(&mut screen, START + 2 * POLL_INTERVAL)));
    }

    #[test]
    fn what_something_wrote_over_the_text_is_gone_after_a_minute_and_nothing_flickers() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        let mut person = Person::new(far, [24, 80]);
        assert!(person.watch(&mut screen, START).contains("#0601.0000"));
        person.screen.process(b"\x1b[2;1Hsomething else wrote this over the code, and more");
        let soon = person.watch(&mut screen, START + POLL_INTERVAL);
        assert!(!soon.contains("#0601.0000"), "this is not known yet: {soon}");
        let later = person.watch(&mut screen, START + REPAINT);
        assert!(later.contains("#0601.0000") && !later.contains("something"), "{later}");
        assert_eq!(person.cleared, 1);
    }

    #[test]
    fn a_client_that_connects_later_sees_the_text_at_once() {
        let (far, path) = pseudo();
        let mut screen = Screen::open(&path, START).unwrap();
        let mut nobody = Person::new(far, [24, 80]);
        nobody.watch(&mut screen, START);
        let later = START + ABSENT_AFTER;
        nobody.watch(&mut screen, later);
        let mut person = Person::new(nobody.far, [24, 80]);
        rustix::io::write(&person.far, b"\x1b[24;80R").unwrap();
        screen.commands(&Guru::default(), later).unwrap();
        let seen = person.watch(&mut screen, later);
        assert!(seen.contains("#0601.0000"), "{seen}");
        assert_eq!(person.cleared, 0);
    }

    #[test]
    fn a_virtual_terminal_that_shows_other_characters_is_painted_over() {
        let (far, path) = pseudo();
        let size = rustix::termios::Winsize { ws_col: 80, ws_row: 24, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&far, size).unwrap();
        let mut screen = Screen::open(&path, START).unwrap();
        let characters = tempfile::NamedTempFile::new().unwrap();
        screen.characters = Some(characters.path().to_owned());
        let mut person = Person::new(far, [24, 80]);
        person.watch(&mut screen, START);
        // As after a driver took over from the firmware's.
        std::fs::write(characters.path(), vec![b' '; 80 * 24]).unwrap();
        person.screen.process(b"\x1b[2J");
        assert!(!person.watch(&mut screen, START).contains("#0601.0000"));
        assert!(person.watch(&mut screen, START + POLL_INTERVAL).contains("#0601.0000"));
    }

    #[test]
    fn a_terminal_that_appears_later_gets_the_picture_too_and_once() {
        let mut screens = Vec::new();
        let failed = Screen::open_missing(&["no/terminal".to_owned()], &mut screens, START);
        assert_eq!((failed.len(), screens.len()), (1, 0));
        let (_far, path) = pseudo();
        let name = path.strip_prefix("/dev").unwrap().to_str().unwrap().to_owned();
        for _ in 0..2 {
            let failed = Screen::open_missing(std::slice::from_ref(&name), &mut screens, START);
            assert_eq!((failed.len(), screens.len()), (0, 1));
        }
    }
}
