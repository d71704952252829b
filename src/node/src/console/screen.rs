//! The screen on one terminal: opens it, draws on it, reads its keys.
//!
//! ```text
//!            opened                       size known, or asked for
//! [absent] ----------> [attached] --> draw <--+-- snapshot, key, size, answer
//!     ^                    |            |     |
//!     +---- RETRY ---------+            +-----+
//!           hung up, read or write failed
//! ```
//!
//! A serial line does not report its size, nor that a person plugged in at its other
//! end. So the screen asks such a terminal now and then where its cursor is after a jump
//! to the far corner: the answer is the size, and an answer after a long silence means
//! a new reader, who needs the whole picture. A line that is merely slow
//! answers late, and is not such a case.
//!
//! A virtual terminal reports its size, and its characters can be read back. A screen's
//! driver that takes over from the firmware's throws them away silently, and the kernel's
//! last words are written over them: so they are compared with the picture now and then,
//! and redrawn where they differ. Any other terminal is painted over once a minute, and
//! redrawn at Ctrl-L.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use polis_tui::keys::Parser;
use polis_tui::{Command, Key, READ, Snapshot, View};
use tokio::io::Interest;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info, warn};

use super::attention::Attention;
use super::writer::Writer;
use polis_base::canvas::{ABSENT_AFTER, Canvas, REPAINT, WHERE};
use polis_base::sys::reboot::Reason;
use polis_base::sys::terminal::{Mode, SIZE_DEFAULT, Size, Terminal};
use polis_base::sys::vt;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_runtime::sys::readiness;

/// Between two attempts to open a terminal that is not there.
const RETRY: Duration = Duration::from_secs(2);
/// How often the size is looked at, or asked for.
const SIZE_PACE: Duration = Duration::from_secs(2);
/// The same at rest, without changes or keys; the first key looks at once.
const SIZE_PACE_AT_REST: Duration = Duration::from_secs(10);
/// Looks in a row that must find other characters: one may fall between a
/// picture and the moment when the terminal has it.
const OVERWRITTEN: u32 = 2;
/// Keys that one picture answers: a person does not type more blindly, and a line that
/// echoes what it is sent keeps no processor busy.
const KEYS_MAX: usize = 100;
/// Silence after which an Escape is the key, and not the start of a sequence.
const ESCAPE: Duration = Duration::from_millis(50);
/// Makes a virtual terminal draw dark grey lighter than its default: on black, the
/// default cannot be read from a step away. Only there: any other terminal would take
/// the following text for a part of this.
const LIGHTER: &[u8] = b"\x1b]P8858585";

/// One terminal. Holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// Its name under `/dev`.
    pub(super) name: String,
    /// The snapshot to draw.
    pub(super) snapshot: watch::Receiver<Arc<Snapshot>>,
    /// How a person ends the machine.
    pub(super) end: watch::Sender<Option<Reason>>,
    /// Set when a person is there.
    pub(super) attention: Attention,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(self, ctx: Context) -> Result<(), Closed> {
        let path = Path::new("/dev").join(&self.name);
        let mut logged = None;
        loop {
            match Attached::open(&path, &self) {
                Ok(mut attached) => {
                    info!("the console is on {}", path.display());
                    logged = None;
                    ctx.healthy();
                    let mut snapshot = self.snapshot.clone();
                    snapshot.mark_changed();
                    let work = attached.drive(&mut snapshot);
                    match ctx.until_cancelled(work).await {
                        None => return Ok(()),
                        Some(Ended::Closed(closed)) => return Err(closed),
                        Some(Ended::Lost(error)) => {
                            info!(%error, "the console lost {}", path.display());
                        }
                    }
                }
                // Once for each reason: most machines lack some terminal.
                Err(error) if logged != Some(error.kind()) => {
                    debug!(%error, "no console on {}", path.display());
                    logged = Some(error.kind());
                    // Waiting for a terminal is what it is for.
                    ctx.healthy();
                }
                Err(_) => {}
            }
            if ctx.until_cancelled(sleep(RETRY)).await.is_none() {
                return Ok(());
            }
        }
    }
}

/// Why a terminal is not driven any more.
enum Ended {
    Closed(Closed),
    Lost(io::Error),
}

/// The event.
enum Event {
    Snapshot,
    Typed(Vec<u8>),
    Silence,
    LookAtSize,
}

/// An open terminal with the view of a person.
struct Attached {
    /// Its path, for the log.
    name: String,
    terminal: Terminal,
    readable: tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>,
    writer: Writer,
    canvas: Canvas,
    view: View,
    parser: Parser,
    /// The time of the first unanswered question about the size.
    unanswered: Option<Instant>,
    /// Where the kernel shows the characters of a virtual terminal.
    characters: Option<PathBuf>,
    /// How many looks in a row found other characters than were drawn.
    overwritten: u32,
    look_at_size: Instant,
    /// When it is painted over; never where its characters can be read.
    repaint: Option<Instant>,
    /// When a lone Escape becomes a key.
    escape: Option<Instant>,
    /// Keys since the last picture.
    keys: usize,
    /// When the first picture since the last key went to the terminal.
    stood: Option<Instant>,
    /// Whether there is something to draw.
    stale: bool,
    /// The snapshot that the page was drawn from; `None` forces a redraw.
    page: Option<Arc<Snapshot>>,
    end: watch::Sender<Option<Reason>>,
    /// Set when a person is there.
    attention: Attention,
}

impl Attached {
    fn open(path: &Path, service: &Service) -> io::Result<Self> {
        let terminal = Terminal::open(path)?;
        terminal.set_mode(Mode::Raw)?;
        terminal.set_up_if_serial(path)?;
        let size = terminal.reported_size().unwrap_or(SIZE_DEFAULT);
        let canvas = Canvas::new(size);
        let Size { columns, rows } = canvas.size();
        let writer = Writer::start(terminal.try_clone_file()?)?;
        if vt::characters(path).is_some() {
            // The queue is empty.
            let _taken = writer.offer(LIGHTER);
        }
        Ok(Self {
            readable: readiness::watch(&terminal, Interest::READABLE)?,
            writer,
            name: path.display().to_string(),
            terminal,
            view: View::new(columns, rows),
            canvas,
            parser: Parser::default(),
            unanswered: None,
            characters: vt::characters(path),
            repaint: vt::characters(path).is_none().then(|| Instant::now() + REPAINT),
            overwritten: 0,
            look_at_size: Instant::now(),
            escape: None,
            keys: 0,
            stood: None,
            stale: true,
            page: None,
            end: service.end.clone(),
            attention: service.attention.clone(),
        })
    }

    async fn drive(&mut self, snapshot: &mut watch::Receiver<Arc<Snapshot>>) -> Ended {
        loop {
            if let Err(ended) = self.step(snapshot).await {
                return ended;
            }
        }
    }

    async fn step(&mut self, snapshot: &mut watch::Receiver<Arc<Snapshot>>) -> Result<(), Ended> {
        let Some(event) = self.next_event(snapshot).await? else {
            let newest = snapshot.borrow_and_update().clone();
            self.draw(newest);
            return Ok(());
        };
        match event {
            // Without another look at everything else, where there is room for it.
            Event::Snapshot if self.writer.has_room() => {
                let newest = snapshot.borrow_and_update().clone();
                self.draw(newest);
            }
            Event::Snapshot => self.stale = true,
            Event::Typed(bytes) => {
                let keys = self.parser.feed(&bytes);
                self.escape = Some(Instant::now() + ESCAPE);
                self.press(keys, snapshot);
            }
            Event::Silence => {
                self.escape = None;
                let keys = self.parser.idle().into_iter().collect();
                self.press(keys, snapshot);
            }
            Event::LookAtSize => {
                if let Some(due) = self.repaint.filter(|due| *due <= Instant::now()) {
                    self.repaint = Some(due + REPAINT);
                    self.canvas.forget();
                    self.draw_page();
                }
                match self.terminal.reported_size() {
                    Some(size) => {
                        self.resize(size);
                        self.look_at_characters(size);
                    }
                    None => self.ask_for_size(),
                }
                // Other characters once are looked at again soon, at rest too.
                let soon = self.overwritten > 0 || !self.attention.is_at_rest();
                let pace = if soon { SIZE_PACE } else { SIZE_PACE_AT_REST };
                self.look_at_size = Instant::now() + pace;
            }
        }
        Ok(())
    }

    /// The next event; `None` when there is something to draw and room for it.
    /// Cancel-safe.
    async fn next_event(
        &self,
        snapshot: &mut watch::Receiver<Arc<Snapshot>>,
    ) -> Result<Option<Event>, Ended> {
        let silence = self.escape;
        tokio::select! {
            // Keys first: a person waits for them.
            biased;
            // Cancel-safe: nothing is read before the branch is taken.
            ready = self.readable.readable() => {
                let mut ready = ready.map_err(Ended::Lost)?;
                let mut buffer = [0; 256];
                match self.read(&mut buffer) {
                    Ok(0) => Err(Ended::Lost(io::ErrorKind::UnexpectedEof.into())),
                    Ok(length) => Ok(Some(Event::Typed(buffer[..length].to_vec()))),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready.clear_ready();
                        Ok(Some(Event::Typed(Vec::new())))
                    }
                    Err(error) => Err(Ended::Lost(error)),
                }
            }
            // Cancel-safe: only waits.
            () = sleep_until(silence.unwrap_or(self.look_at_size)), if silence.is_some() => {
                Ok(Some(Event::Silence))
            }
            // Cancel-safe: only waits.
            () = sleep_until(self.look_at_size) => Ok(Some(Event::LookAtSize)),
            // Cancel-safe: a place in the queue that is not used is given back.
            there_is_room = self.writer.ready(), if self.stale => match there_is_room {
                true => Ok(None),
                false => Err(Ended::Lost(io::ErrorKind::BrokenPipe.into())),
            },
            // Cancel-safe: waits for an event value.
            changed = snapshot.changed(), if !self.stale => match changed {
                Ok(()) => Ok(Some(Event::Snapshot)),
                Err(_closed) => Err(Ended::Closed(Closed("the snapshot"))),
            },
        }
    }

    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        rustix::io::read(&self.terminal, buffer).map_err(Into::into)
    }

    fn press(&mut self, keys: Vec<Key>, snapshot: &watch::Receiver<Arc<Snapshot>>) {
        for key in keys {
            if let Key::Cursor { row, column } = key {
                self.receive_size(Size { columns: column, rows: row });
                continue;
            }
            // An answer about the size is not a key, and does not restart this.
            if self.stood.take().is_some_and(|since| since.elapsed() >= READ) {
                self.view.was_read();
            }
            self.keys += 1;
            if self.keys > KEYS_MAX {
                continue;
            }
            if self.attention.is_at_rest() {
                // Perhaps somebody new, at a terminal that was not used for a while.
                self.look_at_size = Instant::now();
            }
            self.attention.call();
            self.draw_page();
            match self.view.key(key, &snapshot.borrow()) {
                Some(Command::Redraw) => self.redraw(self.canvas.size()),
                Some(Command::Reboot) => self.end(Reason::Reboot),
                Some(Command::PowerOff) => self.end(Reason::PowerOff),
                // Only the guru meditation has something to hold or to unlock, and
                // only a console elsewhere can be left.
                Some(Command::Hold | Command::Unlock | Command::Leave) | None => {}
            }
        }
    }

    fn end(&self, reason: Reason) {
        warn!(actor = "console", terminal = self.name, "a {} was requested", reason.name());
        self.end.send_replace(Some(reason));
    }

    /// Asks a terminal that does not know its size. A question that the terminal does
    /// not take is dropped: it has enough to do.
    fn ask_for_size(&mut self) {
        if self.writer.offer(WHERE) {
            self.unanswered.get_or_insert_with(Instant::now);
        }
    }

    fn receive_size(&mut self, size: Size) {
        let silence = self.unanswered.take().map(|since| since.elapsed());
        if self.terminal.reported_size().is_none() {
            self.resize(size);
        }
        if silence.is_some_and(|silence| silence >= ABSENT_AFTER) {
            // Painted over: the former content is gone, and nothing flickers.
            self.canvas.forget();
            self.draw_page();
        }
    }

    fn resize(&mut self, size: Size) {
        if Canvas::bounded(size) != self.canvas.size() {
            self.redraw(size);
        }
    }

    fn look_at_characters(&mut self, size: Size) {
        let Some(path) = &self.characters else { return };
        // The file has no length, and every read of it delays the drawing.
        let mut cells = Vec::with_capacity(usize::from(size.columns) * usize::from(size.rows));
        if File::open(path).and_then(|mut file| file.read_to_end(&mut cells)).is_err() {
            return;
        }
        self.overwritten =
            if self.canvas.differs(&cells, size) { self.overwritten.saturating_add(1) } else { 0 };
        if self.overwritten >= OVERWRITTEN {
            self.overwritten = 0;
            self.redraw(self.canvas.size());
        }
    }

    /// Starts from an empty screen.
    fn redraw(&mut self, size: Size) {
        self.canvas = Canvas::new(size);
        let Size { columns, rows } = self.canvas.size();
        self.view.resize(columns, rows);
        self.draw_page();
    }

    /// Forces a redraw of the page.
    fn draw_page(&mut self) {
        self.page = None;
        self.stale = true;
    }

    /// Draws the changes for the person who looks: mostly only the time.
    fn draw(&mut self, snapshot: Arc<Snapshot>) {
        // A driver that takes over at boot changes the size without a notice.
        if let Some(size) = self.terminal.reported_size() {
            self.resize(size);
        }
        let view = &self.view;
        let page = self.page.as_deref().filter(|page| !view.sees_change(page, &snapshot));
        let picture = if page.is_some() {
            let clock = polis_tui::clock_of(self.canvas.area());
            self.canvas.draw_part(clock, |buffer| polis_tui::render_clock(&snapshot, buffer))
        } else {
            self.canvas.draw(|buffer| polis_tui::render(&snapshot, view, buffer))
        };
        if page.is_none() {
            self.page = Some(snapshot);
        }
        (self.stale, self.keys) = (false, 0);
        if !picture.is_empty() && !self.writer.send(picture) {
            // The picture is lost, and the state of the canvas with it.
            return self.redraw(self.canvas.size());
        }
        self.stood.get_or_insert_with(Instant::now);
    }
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
