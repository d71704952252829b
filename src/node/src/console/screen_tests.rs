//! One pseudo terminal, with the test at its master end.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use futures::FutureExt as _;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::unix::AsyncFd;

use super::*;

/// The master end of a pseudo terminal, and the name of the other end under `/dev`.
struct Pty {
    fd: AsyncFd<OwnedFd>,
    name: String,
    seen: Vec<u8>,
}

impl Pty {
    fn new(size: Option<Size>) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let fd = openpt(flags).unwrap();
        grantpt(&fd).unwrap();
        unlockpt(&fd).unwrap();
        if let Some(Size { columns, rows }) = size {
            let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
            tcsetwinsize(&fd, size).unwrap();
        }
        rustix::io::ioctl_fionbio(&fd, true).unwrap();
        let path = PathBuf::from(ptsname(&fd, Vec::new()).unwrap().into_string().unwrap());
        let name = path.strip_prefix("/dev").unwrap().to_str().unwrap().to_owned();
        let fd = readiness::watch(fd, Interest::READABLE).unwrap();
        Self { fd, name, seen: Vec::new() }
    }

    fn press(&self, keys: &[u8]) {
        rustix::io::write(&self.fd, keys).unwrap();
    }

    /// Reads the output so far.
    fn read(&mut self) {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = rustix::io::read(&self.fd, &mut buffer) {
            self.seen.extend(&buffer[..length]);
        }
    }

    /// How often `text` is in the output.
    fn count(&self, text: &str) -> usize {
        self.seen.windows(text.len()).filter(|it| *it == text.as_bytes()).count()
    }

    /// Reads until `text` was drawn; forgets what came before it.
    async fn wait_for(&mut self, text: &str) {
        loop {
            if let Some(at) = self.seen.windows(text.len()).position(|it| it == text.as_bytes()) {
                self.seen.drain(..at + text.len());
                return;
            }
            let mut ready = self.fd.readable().await.unwrap();
            let mut buffer = [0; 4096];
            match rustix::io::read(&self.fd, &mut buffer) {
                Ok(length) => self.seen.extend(&buffer[..length]),
                // The other end is not open yet, or not any more.
                Err(rustix::io::Errno::IO) => tokio::task::yield_now().await,
                Err(_again) => ready.clear_ready(),
            }
        }
    }
}

/// A terminal that a test drives itself, step by step.
fn attach(pty: &Pty) -> Attached {
    let service = Service {
        name: pty.name.clone(),
        snapshot: watch::channel(named("first")).1,
        end: watch::Sender::default(),
        attention: Attention::default(),
    };
    Attached::open(&Path::new("/dev").join(&pty.name), &service).unwrap()
}

fn named(version: &str) -> Arc<Snapshot> {
    let mut snapshot = Snapshot::default();
    version.clone_into(&mut snapshot.header.version);
    Arc::new(snapshot)
}

fn start(pty: &Pty) -> (watch::Sender<Arc<Snapshot>>, Context, polis_runtime::supervisor::Handles) {
    let (sender, snapshot) = watch::channel(named("first"));
    let (ctx, handles) = Context::for_test();
    let service = Service {
        name: pty.name.clone(),
        snapshot,
        end: watch::Sender::default(),
        attention: Attention::default(),
    };
    let policy = polis_runtime::supervisor::Policy::forever();
    ctx.spawn("screen", policy, move |ctx| service.clone().run(ctx));
    (sender, ctx, handles)
}

#[tokio::test]
async fn what_changes_is_drawn_and_keys_turn_pages() {
    let mut pty = Pty::new(Some(Size { columns: 80, rows: 24 }));
    let (snapshot, _ctx, handles) = start(&pty);
    pty.wait_for("\x1b[2J").await;
    pty.wait_for("first").await;
    snapshot.send_replace(named("other"));
    pty.wait_for("other").await;
    pty.press(b"\x0c");
    pty.wait_for("\x1b[2J").await;
    pty.wait_for("other").await;
    handles.cancel().await;
}

#[tokio::test]
async fn while_only_time_passes_no_page_is_laid_out() {
    let mut pty = Pty::new(Some(Size { columns: 80, rows: 24 }));
    let snapshot = watch::channel(named("first")).1;
    let mut attached = attach(&pty);
    let first = named("first");
    attached.draw(Arc::clone(&first));
    for second in 10..60 {
        let mut snapshot = Snapshot::clone(&first);
        snapshot.header.clock = format!("12:00:{second}");
        assert!(attached.writer.ready().await);
        attached.draw(Arc::new(snapshot));
        assert!(Arc::ptr_eq(attached.page.as_ref().unwrap(), &first), "a page was drawn");
    }
    pty.wait_for("12:00:10").await;
    attached.press(vec![Key::Cursor { row: 24, column: 80 }], &snapshot);
    assert!(attached.page.is_some(), "an answer about the size is not a key");
    attached.press(vec![Key::F(2)], &snapshot);
    assert!(attached.stale && attached.page.is_none(), "a key turns a page");
    assert!(attached.writer.ready().await);
    attached.draw(named("other"));
    pty.wait_for("other").await;
}

#[tokio::test]
async fn a_terminal_without_a_size_is_asked_for_it() {
    let mut pty = Pty::new(None);
    let (_snapshot, _ctx, handles) = start(&pty);
    pty.wait_for("\x1b[6n").await;
    pty.press(b"\x1b[50;160R");
    // A larger screen starts over.
    pty.wait_for("\x1b[2J").await;
    handles.cancel().await;
}

#[tokio::test]
async fn a_line_that_echoes_presses_few_keys_and_ends_no_machine() {
    let mut pty = Pty::new(Some(Size { columns: 80, rows: 24 }));
    let mut attached = attach(&pty);
    let snapshot = watch::channel(named("first")).1;
    attached.draw(named("first"));
    let input = "PRYPOYy".repeat(1000).chars().map(Key::Char).collect();
    attached.press(input, &snapshot);
    assert_eq!(*attached.end.borrow(), None, "a log line that acts");
    // A key after the next picture counts again.
    assert!(attached.writer.ready().await);
    attached.draw(named("other"));
    pty.wait_for("other").await;
    attached.press(vec![Key::Esc, Key::F(2)], &snapshot);
    assert_eq!(attached.view.page(), polis_tui::Page::Cluster);
}

#[tokio::test(start_paused = true)]
async fn a_text_that_comes_letter_by_letter_ends_no_machine_and_a_person_who_reads_does() {
    let mut pty = Pty::new(Some(Size { columns: 80, rows: 24 }));
    let mut attached = attach(&pty);
    let snapshot = watch::channel(named("first")).1;
    let mut press = async |letters: &str, pause| {
        for letter in letters.chars() {
            for version in ["first", "other"] {
                while attached.writer.ready().now_or_never().is_none() {
                    pty.read();
                    tokio::task::yield_now().await;
                }
                attached.draw(named(version));
                tokio::time::advance(pause / 2).await;
            }
            // The size may be asked for while somebody reads.
            attached.press(vec![Key::Cursor { row: 24, column: 80 }], &snapshot);
            attached.press(vec![Key::Char(letter)], &snapshot);
        }
        *attached.end.borrow()
    };
    assert_eq!(press("PRYPryPOYPoy", READ / 2).await, None);
    assert_eq!(press("x", READ).await, None);
    assert_eq!(press("PRY", READ).await, Some(Reason::Reboot));
}

/// The answer of a terminal of 80 x 24.
const CORNER: Size = Size { columns: 80, rows: 24 };

/// Asks until a question is taken: the writer is through with all before it.
async fn ask(attached: &mut Attached) {
    loop {
        let taken = attached.unanswered.is_some();
        attached.ask_for_size();
        if taken || attached.unanswered.is_some() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_of_a_line_does_not_look_like_a_new_client() {
    let mut pty = Pty::new(None);
    let mut attached = attach(&pty);
    attached.draw(named("first"));
    for _ in 0..20 {
        // Three questions are on their way before the first is answered.
        for _ in 0..3 {
            ask(&mut attached).await;
            tokio::time::advance(SIZE_PACE).await;
        }
        attached.receive_size(CORNER);
        assert!(attached.page.is_some(), "drawn whole for somebody who was there before");
    }
    pty.wait_for("\x1b[2J").await;
    pty.read();
    assert_eq!(pty.count("\x1b[2J"), 0, "the terminal was cleared again");
}

#[tokio::test(start_paused = true)]
async fn a_question_that_waits_behind_a_picture_is_not_asked() {
    let pty = Pty::new(None);
    let mut attached = attach(&pty);
    // More than a pseudo terminal holds: the thread is stuck with it.
    assert!(attached.writer.send(vec![b'x'; 1 << 20]));
    for _ in 0..10 {
        attached.ask_for_size();
        tokio::time::advance(SIZE_PACE).await;
    }
    assert_eq!(attached.unanswered, None);
}

#[tokio::test(start_paused = true)]
async fn a_new_client_after_a_silence_gets_the_whole_picture_without_flicker() {
    let mut pty = Pty::new(None);
    let mut attached = attach(&pty);
    attached.draw(named("first"));
    ask(&mut attached).await;
    tokio::time::advance(ABSENT_AFTER).await;
    attached.ask_for_size();
    pty.wait_for("first").await;
    pty.wait_for("\x1b[6n").await;
    attached.receive_size(CORNER);
    assert!(attached.stale && attached.page.is_none());
    assert!(attached.writer.ready().await);
    attached.draw(named("first"));
    pty.wait_for("first").await;
    pty.wait_for("[1 Boot]").await;
    assert_eq!(pty.count("\x1b[2J"), 0, "what is there needs no clearing");
    // The same answer again is nothing new.
    attached.receive_size(CORNER);
    assert!(!attached.stale);
}

/// The picture at a master end of 80 x 24.
fn seen(bytes: &[u8]) -> String {
    let mut parser = vt100::Parser::new(24.try_into().unwrap(), 80.try_into().unwrap(), 0);
    parser.process(bytes);
    parser.screen().contents()
}

#[tokio::test]
async fn two_terminals_have_a_page_each_and_one_that_is_not_read_holds_up_neither() {
    let [mut first, second] = [(); 2].map(|()| Pty::new(Some(Size { columns: 80, rows: 24 })));
    let (snapshot, _ctx, handles) = start(&first);
    let (other, _other_ctx, other_handles) = start(&second);
    first.wait_for("[1 Boot]").await;
    first.press(b"2");
    first.wait_for("[2 Cluster]").await;
    for version in ["second", "third"] {
        snapshot.send_replace(named(version));
        other.send_replace(named(version));
        first.wait_for(version).await;
    }
    let mut second = second;
    second.wait_for("third").await;
    assert_eq!(second.count("[2 Cluster]"), 0, "a key on one screen changed the other");
    handles.cancel().await;
    other_handles.cancel().await;
}

/// The bytes that a slow line takes while one snapshot follows another: at ten a
/// second, two hundred bytes a second.
const SLOW: usize = 20;
/// Snapshots that come while the line is slow.
const FLOOD: usize = 2000;
/// The bytes that may be on the way to the reader: the picture that is being written,
/// the one that waits, and what a pseudo terminal holds.
const BACKLOG: usize = 64 << 10;

/// A snapshot whose first page has another number in most of its rows.
fn full(number: usize) -> Snapshot {
    let warning = polis_tui::snapshot::Warning {
        text: format!("{number:05} ").repeat(60),
        ..Default::default()
    };
    let mut snapshot = Snapshot { warnings: vec![warning; 4], ..Snapshot::default() };
    snapshot.header.version = format!("v{number}");
    snapshot
}

#[tokio::test]
async fn a_slow_line_skips_pictures_and_has_the_newest_whole_once_it_is_fast() {
    let mut pty = Pty::new(Some(CORNER));
    let (snapshot, _ctx, handles) = start(&pty);
    let (mut last, mut reads) = (0, 0);
    // A busy kernel delivers earlier output late: such a look does not count.
    while reads < FLOOD {
        last += 1;
        // The task that makes the snapshots shares its only thread with the screen: a
        // screen that waited for its terminal would end this here.
        snapshot.send_replace(Arc::new(full(last)));
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let mut buffer = [0; SLOW];
        if let Ok(length) = rustix::io::read(&pty.fd, &mut buffer) {
            pty.seen.extend(&buffer[..length]);
            reads += 1;
        }
    }
    assert!(pty.seen.len() > SLOW * FLOOD / 2, "{} bytes: nothing was slow", pty.seen.len());
    let (mut canvas, view) = (Canvas::new(CORNER), View::new(CORNER.columns, CORNER.rows));
    let mut drawn = |number| {
        let newest = full(number);
        canvas.draw(|buffer| polis_tui::render(&newest, &view, buffer))
    };
    let wanted = seen(&drawn(last));
    let all = drawn(last - 1).len() * last;
    assert!(all > 10 * (SLOW * FLOOD + BACKLOG), "{all} bytes are not a flood");
    while seen(&pty.seen) != wanted {
        let before = pty.seen.len();
        pty.read();
        assert!(pty.seen.len() <= SLOW * FLOOD + BACKLOG, "{} bytes: no skips", pty.seen.len());
        if pty.seen.len() == before {
            tokio::task::yield_now().await;
        }
    }
    handles.cancel().await;
}

#[tokio::test]
async fn a_terminal_that_shrinks_is_drawn_on_to_its_new_corner_and_not_beyond() {
    let mut pty = Pty::new(Some(Size { columns: 120, rows: 40 }));
    let mut attached = attach(&pty);
    attached.draw(named("first"));
    pty.wait_for("[F1 Boot]").await;
    let size = Winsize { ws_col: 80, ws_row: 24, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&pty.fd, size).unwrap();
    assert!(attached.writer.ready().await);
    attached.draw(named("other"));
    pty.wait_for("\x1b[2J").await;
    while pty.count("Workloads") == 0 {
        pty.read();
        tokio::task::yield_now().await;
    }
    let screen = seen(&pty.seen);
    assert!(screen.lines().next_back().unwrap().contains("[1 Boot]"), "{screen}");
    assert!(screen.lines().next().unwrap().contains("POLIS"), "{screen}");
}

#[tokio::test(start_paused = true)]
async fn a_picture_that_was_scribbled_over_comes_back_after_two_looks() {
    let mut pty = Pty::new(Some(Size { columns: 80, rows: 24 }));
    let mut attached = attach(&pty);
    let characters = tempfile::NamedTempFile::new().unwrap();
    attached.characters = Some(characters.path().to_owned());
    attached.draw(named("first"));
    pty.wait_for("[1 Boot]").await;
    std::fs::write(characters.path(), vec![b'x'; 80 * 24]).unwrap();
    attached.look_at_characters(CORNER);
    assert!(attached.page.is_some(), "one look may fall between a picture and its showing");
    attached.look_at_characters(CORNER);
    assert!(attached.stale && attached.page.is_none());
    assert!(attached.writer.ready().await);
    attached.draw(named("first"));
    pty.wait_for("first").await;
    pty.wait_for("[1 Boot]").await;
}

#[tokio::test(start_paused = true)]
async fn at_rest_a_terminal_is_looked_at_rarely_and_the_first_key_has_it_looked_at() {
    let pty = Pty::new(Some(CORNER));
    let mut attached = attach(&pty);
    let mut snapshot = watch::channel(named("first")).1;
    attached.draw(named("first"));
    let characters = tempfile::NamedTempFile::new().unwrap();
    attached.characters = Some(characters.path().to_owned());
    let mut look = async |attached: &mut Attached| {
        attached.stale = false;
        tokio::time::advance(attached.look_at_size - Instant::now()).await;
        assert!(attached.step(&mut snapshot).await.is_ok());
        attached.look_at_size - Instant::now()
    };
    assert_eq!(look(&mut attached).await, SIZE_PACE);
    while !attached.attention.is_at_rest() {
        look(&mut attached).await;
    }
    assert_eq!(look(&mut attached).await, SIZE_PACE_AT_REST);
    std::fs::write(characters.path(), vec![b'x'; 80 * 24]).unwrap();
    assert_eq!(look(&mut attached).await, SIZE_PACE, "is that so a second time?");
    assert!(attached.page.is_some());
    assert_eq!(look(&mut attached).await, SIZE_PACE_AT_REST);
    assert!(attached.page.is_none(), "it is redrawn");
    attached.press(vec![Key::F(2)], &watch::channel(named("first")).1);
    assert_eq!(attached.look_at_size, Instant::now());
}

#[tokio::test]
async fn a_terminal_that_hangs_up_is_opened_again() {
    let pty = Pty::new(Some(Size { columns: 80, rows: 24 }));
    let (_snapshot, ctx, mut handles) = start(&pty);
    let mut tree = handles.tree.clone();
    polis_runtime::event::until(&mut tree, "tree", |tree| {
        let state = tree.get("test.screen").map(|it| it.state);
        (state == Some(polis_runtime::supervisor::State::Healthy)).then_some(())
    })
    .await
    .unwrap();
    drop(pty);
    // It goes on looking for the terminal, and does not die of it.
    handles.cancel().await;
    assert_eq!(ctx.tree().borrow()["test.screen"].cause, None);
    assert!(handles.take_lines().is_empty());
}
