//! `polisctl console`: the console of a node in this terminal.
//!
//! Snapshots come from the node; pages, keys and scrolling are local to this terminal.
//!
//! ```text
//! node --snapshots--> feed --watch--> screen --pictures--> standard output
//!                      |                ^
//!                      +- broken: again +---- keys ------- /dev/tty
//! ```
//!
//! Invariants:
//! - After a lost connection the console reconnects; the last picture stays and shows its
//!   age.
//! - The result of a reboot or power-off command is shown until the next key. Until the node has
//!   answered, only Ctrl-] leaves: it may drop the command.

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_tui::{Command, Key, READ, Snapshot, View};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::Global;
use super::error::Error;
use super::node::At;
use super::screen::{Input, Screen, until_ended, write};
use super::session::{PATIENCE, Session, Target, refused};
use polis_base::canvas::{Canvas, Colours};
use polis_base::sys::terminal::Size;

/// Arguments of `console`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The node [default: the leader].
    node: Option<String>,
    #[command(flatten)]
    at: At,
}

/// Between two attempts to reach the node.
const RETRY: Duration = Duration::from_secs(2);
/// Log entries kept: more than the node sends at once.
const LOGS_MAX: usize = 4096;

const OPEN: &str = "open the console";

/// The notice while the node has still to answer a command.
const SENDING: &str = "Sending the command .. (Ctrl-] leaves without its answer)";

/// Silence after which a node counts as silent: it sends a picture each second.
const SILENT: Duration = Duration::from_secs(3);
/// How often the screen updates the duration of the silence.
const TICK: Duration = Duration::from_secs(1);

/// The snapshot on the screen, and its source.
#[derive(Clone, Debug)]
struct Shown {
    snapshot: Snapshot,
    /// When the node sent it.
    heard: Instant,
    /// Why it is not current; empty while it is.
    trouble: String,
}

impl Shown {
    fn new() -> Self {
        Self { snapshot: Snapshot::default(), heard: Instant::now(), trouble: String::new() }
    }

    fn is_silent(&self) -> bool {
        !self.trouble.is_empty() || self.heard.elapsed() >= SILENT
    }

    /// The notice about a silent node.
    fn silence(&self) -> Option<String> {
        let seconds = self.heard.elapsed().as_secs();
        let since = match seconds {
            0..120 => format!("{seconds} s"),
            _ => format!("{} min", seconds / 60),
        };
        self.is_silent().then(|| match &*self.trouble {
            "" => format!("No data from the node for {since}."),
            trouble => format!("No data from the node for {since}, reconnecting: {trouble}"),
        })
    }
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Error::new("the console needs a terminal")
            .or_help("`polisctl cluster status` prints the state without one"));
    }
    let work = async {
        let mut session = Session::prepare(global, PATIENCE)?;
        let target = session.target(arguments.node.as_deref(), arguments.at.at.as_ref()).await?;
        attach(&mut session, &target, global.colours).await
    };
    until_ended(Box::pin(work)).await
}

/// Shows the console of a node until the operator leaves it.
pub(super) async fn attach(
    session: &mut Session,
    target: &Target,
    colours: Colours,
) -> Result<(), Error> {
    let (shown, newest) = watch::channel(Shown::new());
    // An error of the first connection is printed as plain text, since the alternate screen
    // would close at once.
    let mut first = open(session, target).await?;
    let taken = async { take(&mut first, &shown).await.map_err(Broken::into_error) };
    session.in_time(OPEN, taken).await?;
    session.go_on();
    let session = &*session;
    let mut terminal = Terminal::open(colours)?;
    tokio::select! {
        // Cancel-safe: dropping the future cancels the call.
        error = feed(session, target, first, &shown) => Err(error),
        // Cancel-safe: the terminal is restored when the screen is dropped.
        ended = terminal.drive(newest, session, target) => ended,
    }
}

/// The present screen of a node.
pub(super) async fn glance(session: &Session, target: &Target) -> Result<Snapshot, Error> {
    let (shown, newest) = watch::channel(Shown::new());
    let mut frames = open(session, target).await?;
    take(&mut frames, &shown).await.map_err(Broken::into_error)?;
    Ok(newest.borrow().snapshot.clone())
}

type Frames = tonic::Streaming<v1::ConsoleFrame>;

async fn open(session: &Session, target: &Target) -> Result<Frames, Error> {
    let channel = session.node(target).await?;
    let mut client = NodeManagementClient::new(channel);
    let opened = client.console(v1::ConsoleRequest {});
    Ok(session.within(OPEN, opened).await?.into_inner())
}

/// Keeps `shown` up to date; ends only on an error that a retry cannot mend.
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
        let trouble = broken.summary();
        shown.send_modify(|shown| shown.trouble = trouble);
        sleep(RETRY).await;
    }
}

/// Why frames end.
enum Broken {
    /// The connection failed; a retry may help.
    Link(Error),
    /// The node sent invalid data; a retry does not help.
    Unreadable(Error),
}

/// A command to end the machine.
#[derive(Clone, Copy, Debug)]
enum End {
    Reboot,
    PowerOff,
}

/// Requests the end of the machine; returns the text for the screen.
async fn end(session: &Session, target: &Target, end: End) -> String {
    let (power_off, what, command) = match end {
        End::Reboot => (false, "reboot the machine", "reboot"),
        End::PowerOff => (true, "power the machine off", "poweroff"),
    };
    let asked = async {
        let channel = session.node(target).await?;
        let request = v1::RebootRequest { power_off };
        let ended = NodeManagementClient::new(channel).reboot(request).await;
        ended.map_err(|status| refused(what, &status))
    };
    match asked.await {
        Ok(_accepted) => {
            format!("The node accepted the command `{command}`; it stops its services first.")
        }
        Err(error) => error.summary(),
    }
}

impl Broken {
    fn into_error(self) -> Error {
        match self {
            Self::Link(error) | Self::Unreadable(error) => error,
        }
    }
}

/// Receives frames until the stream ends; returns the reason.
async fn follow(frames: &mut Frames, shown: &watch::Sender<Shown>) -> Broken {
    loop {
        if let Err(broken) = take(frames, shown).await {
            return broken;
        }
    }
}

/// Applies one frame.
async fn take(frames: &mut Frames, shown: &watch::Sender<Shown>) -> Result<(), Broken> {
    let frame = match frames.message().await {
        Ok(Some(frame)) => frame,
        Ok(None) => return Err(Broken::Link(Error::new("the node ended the stream"))),
        Err(status) => return Err(Broken::Link(refused("continue the console", &status))),
    };
    let mut snapshot: Snapshot = serde_json::from_slice(&frame.snapshot).map_err(|error| {
        let error = Error::from(error).context("the node's screen cannot be read");
        Broken::Unreadable(error.or_help("use the polisctl of the node's version"))
    })?;
    shown.send_modify(|shown| {
        // A new boot numbers its entries from the start.
        if snapshot.header.uptime >= shown.snapshot.header.uptime {
            Arc::make_mut(&mut snapshot.logs).put_before(&shown.snapshot.logs, LOGS_MAX);
        }
        *shown = Shown { snapshot, ..Shown::new() };
    });
    Ok(())
}

/// This terminal, while the console of a node is on it.
struct Terminal {
    screen: Screen,
    picture: Picture,
    /// When the last picture was drawn.
    drawn: Instant,
    stale: bool,
}

/// An event of the loop.
enum Event {
    Snapshot,
    Input(Input),
    Replied(String),
}

/// A pending command to end the machine; yields its result.
type Order<'a> = Option<BoxFuture<'a, String>>;

impl Terminal {
    fn open(colours: Colours) -> Result<Self, Error> {
        let screen = Screen::open()?;
        let picture = Picture::new(screen.size(), colours);
        Ok(Self { screen, picture, drawn: Instant::now(), stale: true })
    }

    /// Draws and reads keys until the operator leaves.
    async fn drive(
        &mut self,
        mut shown: watch::Receiver<Shown>,
        session: &Session,
        target: &Target,
    ) -> Result<(), Error> {
        let mut order: Order<'_> = None;
        loop {
            if self.stale {
                (self.stale, self.drawn) = (false, Instant::now());
                let bytes = self.picture.draw(&shown.borrow_and_update());
                write(&bytes)?;
            }
            let keys = match self.next_event(&mut shown, &mut order).await? {
                Event::Input(Input::Leave) => return Ok(()),
                Event::Input(Input::Keys(keys)) => keys,
                Event::Input(Input::Redraw) => {
                    self.anew();
                    Vec::new()
                }
                Event::Snapshot => {
                    self.stale = true;
                    Vec::new()
                }
                Event::Replied(outcome) => {
                    (order, self.stale) = (None, true);
                    self.picture.show_reply(outcome);
                    Vec::new()
                }
            };
            self.stale |= !keys.is_empty();
            let asked = self.picture.press(&keys, &shown.borrow().snapshot);
            for command in asked {
                let asked = match command {
                    Command::Leave => return Ok(()),
                    Command::Redraw => {
                        self.anew();
                        continue;
                    }
                    Command::Reboot => End::Reboot,
                    Command::PowerOff => End::PowerOff,
                    Command::Hold | Command::Unlock => continue,
                };
                order = Some(end(session, target, asked).boxed());
            }
        }
    }

    /// The next event. Cancel-safe.
    async fn next_event(
        &mut self,
        shown: &mut watch::Receiver<Shown>,
        order: &mut Order<'_>,
    ) -> Result<Event, Error> {
        let tick = {
            let shown = shown.borrow();
            if shown.is_silent() { self.drawn + TICK } else { shown.heard + SILENT }
        };
        let reply = async {
            match order {
                Some(order) => order.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Cancel-safe per its documentation.
            input = self.screen.input() => input.map(Event::Input),
            // Cancel-safe: only waits.
            () = sleep_until(tick) => Ok(Event::Snapshot),
            // Cancel-safe: the pending command is kept and polled again.
            outcome = reply => Ok(Event::Replied(outcome)),
            // Cancel-safe: waits for an event value. Closed only at the end of the program.
            changed = shown.changed() => Ok(match changed.is_ok() {
                true => Event::Snapshot,
                false => Event::Input(Input::Leave),
            }),
        }
    }

    /// Starts from an empty screen of the size that the terminal has now.
    fn anew(&mut self) {
        self.picture.resize(self.screen.size());
        self.stale = true;
    }
}

/// The picture on the screen.
struct Picture {
    canvas: Canvas,
    colours: Colours,
    view: View,
    /// When the first picture since the last key was drawn.
    stood: Option<Instant>,
    /// The result of the last command, until the next key.
    notice: Option<String>,
    /// Whether the node has still to answer a command.
    sending: bool,
}

impl Picture {
    fn new(size: Size, colours: Colours) -> Self {
        let canvas = Canvas::whole(size, colours);
        let Size { columns, rows } = canvas.size();
        let view = View::new(columns, rows).that_can_be_left();
        Self { canvas, colours, view, stood: None, notice: None, sending: false }
    }

    fn resize(&mut self, size: Size) {
        self.canvas = Canvas::whole(size, self.colours);
        let Size { columns, rows } = self.canvas.size();
        self.view.resize(columns, rows);
    }

    /// Passes keys to the view; returns every command that they give, in their order.
    fn press(&mut self, keys: &[Key], snapshot: &Snapshot) -> Vec<Command> {
        if !keys.is_empty() {
            if !self.sending {
                self.notice = None;
            }
            if self.stood.take().is_some_and(|since| since.elapsed() >= READ) {
                self.view.was_read();
            }
        }
        let mut asked = Vec::new();
        for key in keys {
            match self.view.key(*key, snapshot) {
                // The console would end before the node has the command.
                Some(Command::Leave) if self.sending => {}
                Some(command) => {
                    if matches!(command, Command::Reboot | Command::PowerOff) {
                        self.sending = true;
                        self.notice = Some(SENDING.to_owned());
                    }
                    asked.push(command);
                }
                None => {}
            }
        }
        asked
    }

    /// Shows the result of the command.
    fn show_reply(&mut self, outcome: String) {
        (self.notice, self.sending) = (Some(outcome), false);
    }

    /// The bytes to send to the terminal.
    fn draw(&mut self, shown: &Shown) -> Vec<u8> {
        let notice = match (&self.notice, shown.silence()) {
            (None, silence) => silence,
            (Some(notice), None) => Some(notice.clone()),
            (Some(notice), Some(silence)) => Some(format!("{notice} {silence}")),
        };
        let view = &self.view;
        let bytes = self.canvas.draw(|buffer| {
            polis_tui::render(&shown.snapshot, view, buffer);
            if let Some(notice) = &notice {
                polis_tui::render_notice(notice, buffer);
            }
        });
        self.stood.get_or_insert_with(Instant::now);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terminal(rows: u16, columns: u16) -> vt100::Parser {
        vt100::Parser::new(rows.try_into().unwrap(), columns.try_into().unwrap(), 0)
    }

    /// The screen of a terminal that received all of `sent`.
    fn seen(sent: &[Vec<u8>]) -> String {
        let mut parser = terminal(24, 80);
        sent.iter().for_each(|bytes| parser.process(bytes));
        parser.screen().contents()
    }

    fn at(second: u64) -> Shown {
        let mut shown = Shown::new();
        shown.snapshot.header.clock = format!("12:00:{second:02}");
        shown
    }

    #[tokio::test]
    async fn a_refusal_stands_there_until_the_next_key_whatever_the_node_sends() {
        let mut picture = Picture::new(Size { columns: 80, rows: 24 }, Colours::On);
        let mut sent = vec![picture.draw(&at(0))];
        picture.notice = Some("cannot reboot the machine: viewers may not".to_owned());
        sent.extend((1..10).map(|second| picture.draw(&at(second))));
        let screen = seen(&sent);
        assert!(screen.contains("viewers may not") && screen.contains("12:00:09"), "{screen}");
        let cleared = |bytes: &Vec<u8>| bytes.windows(4).any(|it| it == b"\x1b[2J");
        assert_eq!(sent.iter().filter(|bytes| cleared(bytes)).count(), 1, "it flickers");
        assert_eq!(picture.press(&[Key::F(2)], &at(9).snapshot), []);
        sent.push(picture.draw(&at(10)));
        let screen = seen(&sent);
        assert!(!screen.contains("may not") && screen.contains("[2 Cluster]"), "{screen}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_text_that_is_pasted_ends_no_machine_however_its_pieces_come() {
        let mut picture = Picture::new(Size { columns: 80, rows: 24 }, Colours::On);
        let shown = at(0);
        let mut press = async |letters: &str, pause| {
            let mut asked = Vec::new();
            for letter in letters.chars() {
                picture.draw(&shown);
                tokio::time::advance(pause).await;
                picture.draw(&shown);
                asked.extend(picture.press(&[Key::Char(letter)], &shown.snapshot));
            }
            asked
        };
        assert_eq!(press("PRYPryPOYPoy", READ / 2).await, []);
        assert_eq!(press("x", READ).await, []);
        assert_eq!(press("PRY", READ).await, [Command::Reboot]);
    }

    /// Presses `keys` once a person could read the question whether to reboot.
    async fn confirm(picture: &mut Picture, keys: &[Key]) -> Vec<Command> {
        let shown = at(0);
        picture.press(&[Key::Char('P'), Key::Char('R')], &shown.snapshot);
        picture.draw(&shown);
        tokio::time::advance(READ).await;
        picture.press(keys, &shown.snapshot)
    }

    #[tokio::test(start_paused = true)]
    async fn each_command_of_keys_that_come_together_counts() {
        let mut picture = Picture::new(Size { columns: 80, rows: 24 }, Colours::On);
        let shown = at(0);
        let keys = [Key::Char('Y'), Key::Ctrl('l')];
        assert_eq!(confirm(&mut picture, &keys).await, [Command::Reboot, Command::Redraw]);
        picture.show_reply("The node accepted it.".to_owned());
        // Without an answer, the command is not sent yet.
        let keys = [Key::Char('Y'), Key::Char('q')];
        assert_eq!(confirm(&mut picture, &keys).await, [Command::Reboot]);
        assert_eq!(picture.press(&[Key::Char('q')], &shown.snapshot), []);
        assert_eq!(picture.notice.as_deref(), Some(SENDING));
        picture.show_reply("viewers may not".to_owned());
        assert_eq!(picture.notice.as_deref(), Some("viewers may not"));
        assert_eq!(picture.press(&[Key::Char('q')], &shown.snapshot), [Command::Leave]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_node_is_marked_with_the_duration() {
        let mut picture = Picture::new(Size { columns: 80, rows: 24 }, Colours::On);
        let mut shown = at(0);
        let mut sent = vec![picture.draw(&shown)];
        assert!(!seen(&sent).contains("No data"));
        tokio::time::advance(Duration::from_secs(14)).await;
        sent.push(picture.draw(&shown));
        assert!(seen(&sent).contains("No data from the node for 14 s."), "{}", seen(&sent));
        shown.trouble = "connection refused".to_owned();
        tokio::time::advance(Duration::from_secs(3)).await;
        sent.push(picture.draw(&shown));
        let screen = seen(&sent);
        assert!(screen.contains("for 17 s, reconnecting: connection refused"), "{screen}");
        sent.push(picture.draw(&at(17)));
        let screen = seen(&sent);
        assert!(!screen.contains("No data") && screen.contains("[1 Boot]"), "{screen}");
    }

    #[tokio::test]
    async fn the_whole_of_a_large_terminal_is_drawn_on() {
        let mut picture = Picture::new(Size { columns: 320, rows: 90 }, Colours::On);
        let mut parser = terminal(90, 320);
        parser.process(&picture.draw(&at(0)));
        let last = parser.screen().rows(0, 320).last().unwrap();
        assert!(last.contains("[F1 Boot]"), "{last}");
    }

    #[tokio::test]
    async fn without_colours_a_screen_is_so_in_its_next_size_too() {
        let mut picture = Picture::new(Size { columns: 100, rows: 30 }, Colours::Off);
        let sent = picture.draw(&at(0));
        picture.resize(Size { columns: 80, rows: 24 });
        for bytes in [sent, picture.draw(&at(1))] {
            let mut parser = terminal(30, 100);
            parser.process(&bytes);
            let screen = parser.screen();
            let places = (0..30).flat_map(|row| (0..100).map(move |column| (row, column)));
            let mut cells = places.filter_map(|(row, column)| screen.cell(row, column));
            let plain = (vt100::Color::Default, vt100::Color::Default);
            assert!(cells.all(|cell| (cell.fgcolor(), cell.bgcolor()) == plain));
        }
    }
}
