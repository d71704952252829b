//! `polisctl console`: a node's screen in this terminal.
//!
//! Snapshots come from the node; pages, keys and scrolling are local, so what a
//! person looks at here is theirs alone.
//!
//! ```text
//! node --snapshots--> feed --watch--> screen --pictures--> standard output
//!                      |                ^
//!                      +- broken: again +---- keys ------- /dev/tty
//! ```
//!
//! Invariants:
//! - However it ends, the terminal gets back its modes and what it showed.
//! - A node that goes away is waited for; the last picture stays, and says so.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_tui::keys::Parser;
use polis_tui::{Command, Key, Snapshot, View};
use tokio::io::Interest;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::Global;
use super::error::{Error, Explain as _};
use super::node::At;
use super::output::clean;
use super::session::{PATIENCE, Session, Target, refused};
use crate::canvas::Canvas;
use crate::sys::readiness;
use crate::sys::terminal::{Mode, Size, Terminal};

/// Arguments of `console`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The node [default: the one that leads].
    node: Option<String>,
    #[command(flatten)]
    at: At,
}

/// Between two attempts to reach the node.
const RETRY: Duration = Duration::from_secs(2);
/// Silence after which an Escape is the key, and not the start of a sequence.
const ESCAPE: Duration = Duration::from_millis(50);
/// Log entries that are kept: more than the node sends at once.
const LOGS_MAX: usize = 4096;
/// Another screen, so that what was in the terminal comes back.
const ENTER: &[u8] = b"\x1b[?1049h";
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
/// Ctrl-], as in telnet and in `cargo xtask run`.
const CTRL_BRACKET: u8 = 0x1d;

/// What is shown.
#[derive(Clone, Debug, Default)]
struct Shown {
    snapshot: Snapshot,
    /// Why it is not the newest; empty while it is.
    trouble: String,
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Error::new("the console needs a terminal, and this is none")
            .or_help("`polisctl cluster status` prints how the cluster is"));
    }
    let session = Session::prepare(global, PATIENCE)?;
    let target = session.target(arguments.node.as_deref(), arguments.at.at.as_ref()).await?;
    let (shown, newest) = watch::channel(Shown::default());
    // What goes wrong at first is told in plain text, not on a screen that is gone at once.
    let mut first = open(&session, &target).await?;
    take(&mut first, &shown).await.map_err(Broken::into_error)?;
    let mut screen = Screen::open()?;
    tokio::select! {
        // Cancel-safe: what it holds is dropped, and with it the call.
        error = feed(&session, &target, first, &shown) => Err(error),
        // Cancel-safe: the terminal is restored when the screen is dropped.
        ended = screen.drive(newest, &shown, &session, &target) => ended,
    }
}

type Frames = tonic::Streaming<v1::ConsoleFrame>;

async fn open(session: &Session, target: &Target) -> Result<Frames, Error> {
    let channel = session.node(target).await?;
    let opened = NodeManagementClient::new(channel).console(v1::ConsoleRequest {}).await;
    Ok(opened.map_err(|status| refused("open the console", &status))?.into_inner())
}

/// Keeps `shown` up to date; ends only if the node will not serve us again.
async fn feed(
    session: &Session,
    target: &Target,
    first: Frames,
    shown: &watch::Sender<Shown>,
) -> Error {
    let mut stream = Some(first);
    loop {
        let broken = match stream.take() {
            Some(mut frames) => follow(&mut frames, shown).await,
            None => match open(session, target).await {
                Ok(frames) => {
                    stream = Some(frames);
                    continue;
                }
                Err(error) => Broken::Link(error),
            },
        };
        let broken = match broken {
            Broken::Unreadable(error) => return error,
            Broken::Link(error) => error,
        };
        let trouble = format!("no word from the node, trying again: {}", broken.summary());
        shown.send_modify(|shown| shown.trouble = trouble);
        sleep(RETRY).await;
    }
}

/// Why frames end.
enum Broken {
    /// The node may be back.
    Link(Error),
    /// What it says makes no sense, and will not.
    Unreadable(Error),
}

/// Asks the node to end; a refusal is shown, and the console goes on.
async fn end(session: &Session, target: &Target, power_off: bool, shown: &watch::Sender<Shown>) {
    let asked = async {
        let channel = session.node(target).await?;
        let what = if power_off { "power the machine off" } else { "reboot the machine" };
        let request = v1::RebootRequest { power_off };
        let ended = NodeManagementClient::new(channel).reboot(request).await;
        ended.map_err(|status| refused(what, &status))
    };
    if let Err(error) = asked.await {
        shown.send_modify(|shown| shown.trouble = error.summary());
    }
}

impl Broken {
    fn into_error(self) -> Error {
        match self {
            Self::Link(error) | Self::Unreadable(error) => error,
        }
    }
}

/// Takes in frames until they end; says why.
async fn follow(frames: &mut Frames, shown: &watch::Sender<Shown>) -> Broken {
    loop {
        if let Err(broken) = take(frames, shown).await {
            return broken;
        }
    }
}

/// Takes in one frame.
async fn take(frames: &mut Frames, shown: &watch::Sender<Shown>) -> Result<(), Broken> {
    let frame = match frames.message().await {
        Ok(Some(frame)) => frame,
        Ok(None) => return Err(Broken::Link(Error::new("the node ended the stream"))),
        Err(status) => return Err(Broken::Link(refused("go on with the console", &status))),
    };
    let mut snapshot: Snapshot = serde_json::from_slice(&frame.snapshot).map_err(|error| {
        let error = Error::from(error).context("the node's screen cannot be read");
        Broken::Unreadable(error.or_help("use the polisctl of the node's version"))
    })?;
    shown.send_modify(|shown| {
        Arc::make_mut(&mut snapshot.logs).put_before(&shown.snapshot.logs, LOGS_MAX);
        *shown = Shown { snapshot, trouble: String::new() };
    });
    Ok(())
}

/// This terminal.
struct Screen {
    terminal: Terminal,
    readable: tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>,
    resized: Signal,
    ended: Signal,
    canvas: Canvas,
    view: View,
    parser: Parser,
    /// When a lone Escape becomes a key.
    escape: Option<Instant>,
    stale: bool,
}

/// What happened.
enum Event {
    Snapshot,
    Typed(Vec<u8>),
    Silence,
    Resized,
    Ended,
}

impl Screen {
    fn open() -> Result<Self, Error> {
        let failed = || "cannot use this terminal".to_owned();
        let terminal = Terminal::open(Path::new("/dev/tty")).doing(failed)?;
        terminal.set_mode(Mode::Raw).doing(failed)?;
        let canvas = Canvas::new(terminal.size());
        let Size { columns, rows } = canvas.size();
        write(ENTER)?;
        Ok(Self {
            readable: readiness::watch(&terminal, Interest::READABLE).doing(failed)?,
            terminal,
            resized: signal(SignalKind::window_change()).doing(failed)?,
            ended: signal(SignalKind::terminate()).doing(failed)?,
            view: View::new(columns, rows).that_can_be_left(),
            canvas,
            parser: Parser::default(),
            escape: None,
            stale: true,
        })
    }

    /// Draws and listens until the person leaves.
    async fn drive(
        &mut self,
        mut shown: watch::Receiver<Shown>,
        sender: &watch::Sender<Shown>,
        session: &Session,
        target: &Target,
    ) -> Result<(), Error> {
        loop {
            if self.stale {
                self.draw(&shown.borrow_and_update().clone())?;
            }
            match self.next_event(&mut shown).await? {
                Event::Snapshot => self.stale = true,
                Event::Resized => self.anew(),
                Event::Ended => return Ok(()),
                Event::Silence => {
                    self.escape = None;
                    let keys: Vec<Key> = self.parser.idle().into_iter().collect();
                    let _nothing = self.press(&keys, &shown);
                }
                Event::Typed(bytes) if bytes.contains(&CTRL_BRACKET) => return Ok(()),
                Event::Typed(bytes) => {
                    let keys = self.parser.feed(&bytes);
                    self.escape = Some(Instant::now() + ESCAPE);
                    match self.press(&keys, &shown) {
                        Some(Command::Leave) => return Ok(()),
                        Some(Command::Reboot) => end(session, target, false, sender).await,
                        Some(Command::PowerOff) => end(session, target, true, sender).await,
                        _ => {}
                    }
                }
            }
        }
    }

    /// What happens next. Cancel-safe.
    async fn next_event(&mut self, shown: &mut watch::Receiver<Shown>) -> Result<Event, Error> {
        let silence = self.escape;
        tokio::select! {
            // Cancel-safe: nothing is read before the branch is taken.
            ready = self.readable.readable() => {
                let mut ready = ready?;
                let mut buffer = [0; 256];
                match rustix::io::read(&self.terminal, &mut buffer) {
                    Ok(0) => Ok(Event::Ended),
                    Ok(length) => Ok(Event::Typed(buffer[..length].to_vec())),
                    Err(rustix::io::Errno::AGAIN) => {
                        ready.clear_ready();
                        Ok(Event::Typed(Vec::new()))
                    }
                    Err(error) => Err(io::Error::from(error)).doing(|| "the terminal is gone".to_owned()),
                }
            }
            // Cancel-safe: only waits.
            () = sleep_until(silence.unwrap_or_else(Instant::now)), if silence.is_some() => {
                Ok(Event::Silence)
            }
            // Cancel-safe per the docs of `recv`.
            _signal = self.resized.recv() => Ok(Event::Resized),
            // Cancel-safe per the docs of `recv`.
            _signal = self.ended.recv() => Ok(Event::Ended),
            // Cancel-safe: waits for an event value. Closed only when we end.
            changed = shown.changed() => Ok(if changed.is_ok() { Event::Snapshot } else { Event::Ended }),
        }
    }

    /// Hands keys to the view; the last thing that one of them asks for is left to
    /// the caller.
    fn press(&mut self, keys: &[Key], shown: &watch::Receiver<Shown>) -> Option<Command> {
        let mut asked = None;
        for key in keys {
            self.stale = true;
            match self.view.key(*key, &shown.borrow().snapshot) {
                Some(Command::Redraw) => self.anew(),
                command => asked = command.or(asked),
            }
        }
        asked
    }

    /// Starts from an empty screen of the size that the terminal has now.
    fn anew(&mut self) {
        self.canvas = Canvas::new(self.terminal.size());
        let Size { columns, rows } = self.canvas.size();
        self.view.resize(columns, rows);
        self.stale = true;
    }

    fn draw(&mut self, shown: &Shown) -> Result<(), Error> {
        self.stale = false;
        let view = &self.view;
        let mut picture =
            self.canvas.draw(|buffer| polis_tui::render(&shown.snapshot, view, buffer));
        if !shown.trouble.is_empty() {
            let Size { columns, rows } = self.canvas.size();
            let line: String = clean(&shown.trouble).chars().take(usize::from(columns)).collect();
            picture.extend(format!("\x1b7\x1b[{rows};1H\x1b[0;7m{line}\x1b[K\x1b[0m\x1b8").bytes());
            // What the canvas believes of that line is wrong now.
            self.canvas = Canvas::new(self.canvas.size());
        }
        write(&picture)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing back.
        let _lost = write(LEAVE);
    }
}

fn write(bytes: &[u8]) -> Result<(), Error> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .doing(|| "the terminal is gone".to_owned())
}
