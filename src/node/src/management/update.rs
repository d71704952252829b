//! The calls `Update`, `StoreBundle` and `FetchBundle`: passes the pieces of a bundle on to the
//! thread that writes them and reports its progress, and passes on those of one that is kept.
//!
//! ```text
//! caller --pieces--> [4 pieces] --> the thread that installs or keeps the bundle
//!        <-progress----------------/
//!
//! the bundle that is kept --pieces--> a node whose turn it is
//! ```
//!
//! The first message is read before the answer begins, since it may ask where the transfer
//! continues: the metadata of the answer says so.
//!
//! Invariants:
//! - A caller that sends nothing for [`STALL`], or no first message within [`FIRST`], loses its
//!   turn.
//! - The thread asks for the pieces: a slow disk slows the caller down, and no more than the
//!   queue is in memory.

use std::fs::File;
use std::io::{self, Read as _, SeekFrom};
use std::time::Duration;

use futures::Stream;
use polis_bundle::{ClusterVersion, EtcdTarget};
use polis_proto::v1;
use polis_proto::v1::update_progress::Phase as Reported;
use tokio::io::AsyncSeekExt as _;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::metadata::MetadataValue;
use tonic::{Code, Response, Status, Streaming};

use polis_machine::update::{
    Error, Installed, PIECES, Phase, Pieces, Progress, Purpose, Store, Turn, Unfinished,
};
use polis_runtime::supervisor::attempt;
use polis_wire::rpc::{REASON, resume_at};

/// How much of a bundle is sent at once; a caller takes at most sixteen times that.
const PIECE: usize = 256 << 10;
/// Longest that a caller may send nothing.
const STALL: Duration = Duration::from_secs(60);
/// The progress between two reports of an update.
const STEP: u64 = 1 << 20;

/// A bundle on its way.
struct Upload {
    incoming: Streaming<v1::UpdateRequest>,
    /// `None` once everything was received.
    pieces: Option<mpsc::Sender<Vec<u8>>>,
    progress: watch::Receiver<Progress>,
    reported: Progress,
    work: JoinHandle<Result<v1::UpdateProgress, Error>>,
}

/// Installs the bundle that comes in; every change of the progress, then the outcome. `runs` is
/// the cluster version of etcd, where this node has a member that knows it.
///
/// # Errors
///
/// The caller sends nothing.
pub(super) async fn install(
    turn: Turn,
    runs: Option<ClusterVersion>,
    incoming: Streaming<v1::UpdateRequest>,
) -> Result<Response<impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send>, Status> {
    let begun = begin(&turn, Purpose::Install, incoming).await?;
    let (at, etcd) = (begun.at, EtcdTarget { runs, one_way: begun.one_way });
    Ok(received(begun, move |pieces, reported| {
        let Installed { version, slot } = turn.install(pieces, at, etcd, reported)?;
        let phase = Reported::Installed.into();
        let (version, slot) = (version.to_string(), slot.to_owned());
        Ok(v1::UpdateProgress { phase, version, slot, ..Default::default() })
    }))
}

/// Keeps the bundle that comes in for other nodes; every change of the progress, then the
/// outcome.
///
/// # Errors
///
/// The caller sends nothing.
pub(super) async fn keep(
    turn: Turn,
    store: Store,
    incoming: Streaming<v1::UpdateRequest>,
) -> Result<Response<impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send>, Status> {
    let begun = begin(&turn, Purpose::Keep, incoming).await?;
    let at = begun.at;
    Ok(received(begun, move |pieces, reported| {
        let version = turn.keep(pieces, at, &store, reported)?.version.to_string();
        Ok(v1::UpdateProgress { phase: Reported::Stored.into(), version, ..Default::default() })
    }))
}

/// The pieces of the bundle that this node keeps.
///
/// # Errors
///
/// NOT_FOUND where it is another one, or none; INTERNAL where the disk fails.
pub(super) async fn fetch(
    store: &Store,
    request: v1::FetchBundleRequest,
) -> Result<Response<impl Stream<Item = Result<v1::UpdateRequest, Status>> + Send + use<>>, Status>
{
    let v1::FetchBundleRequest { image, at } = request;
    let store = store.clone();
    // A disk that hangs delays this caller, and nothing else of the node.
    let opened = attempt(move || store.open(&image)).await.unwrap_or(Err(Error::Lost));
    let file = opened.map_err(|error| refused(&error))?.ok_or_else(|| {
        let mut status = Status::not_found("this node does not keep that bundle");
        status.metadata_mut().insert(REASON, MetadataValue::from_static("no-bundle"));
        status
    })?;
    let unreadable =
        |error: io::Error| Status::internal(format!("cannot read the bundle: {error}"));
    let mut file = tokio::fs::File::from_std(file);
    let size = file.metadata().await.map_err(unreadable)?.len();
    // A caller that has more than there is has something else.
    let at = if at <= size { at } else { 0 };
    file.seek(SeekFrom::Start(at)).await.map_err(unreadable)?;
    let file = file.into_std().await;
    let pieces = futures::stream::unfold(Some(file), move |file| async move {
        let file = file?;
        match attempt(move || piece(file)).await {
            Ok(Ok((data, _end))) if data.is_empty() => None,
            Ok(Ok((data, rest))) => {
                Some((Ok(v1::UpdateRequest { data, ..Default::default() }), Some(rest)))
            }
            Ok(Err(error)) => Some((Err(unreadable(error)), None)),
            Err(_lost) => Some((Err(refused(&Error::Lost)), None)),
        }
    });
    Ok(resume_at(Response::new(pieces), at))
}

/// The next piece of a bundle, empty at its end, and the rest. A file of tokio would keep a second
/// buffer of a piece until the stream ends.
fn piece(mut file: File) -> io::Result<(Vec<u8>, File)> {
    let mut data = Vec::with_capacity(PIECE);
    file.by_ref().take(PIECE as u64).read_to_end(&mut data)?;
    Ok((data, file))
}

/// A transfer whose first message is here.
struct Begun {
    /// What it begins with; `None` where the bytes are here already.
    first: Option<Vec<u8>>,
    /// The byte of the bundle at which it continues; zero: it begins there.
    at: u64,
    /// Whether its owner allows what cannot be undone.
    one_way: bool,
    incoming: Streaming<v1::UpdateRequest>,
}

/// Longest until the first message: the server ends a call that has no answer after 30 s.
const FIRST: Duration = Duration::from_secs(25);

/// Reads the first message, and finds where the transfer continues.
async fn begin(
    turn: &Turn,
    purpose: Purpose,
    mut incoming: Streaming<v1::UpdateRequest>,
) -> Result<Begun, Status> {
    let v1::UpdateRequest { data, resume, one_way } =
        message(&mut incoming, FIRST).await?.unwrap_or_default();
    let unfinished =
        turn.unfinished(purpose).filter(|unfinished| resume && unfinished.is_of(&data));
    let at = unfinished.map_or(0, Unfinished::at);
    Ok(Begun { first: (at == 0).then_some(data), at, one_way, incoming })
}

/// Passes the pieces that come in to a thread that does `work` with them.
fn received(
    begun: Begun,
    work: impl FnOnce(Pieces, &watch::Sender<Progress>) -> Result<v1::UpdateProgress, Error>
    + Send
    + 'static,
) -> Response<impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send> {
    let Begun { first, at, incoming, .. } = begun;
    let (pieces, received) = mpsc::channel(PIECES);
    if let Some(first) = first {
        pieces.try_send(first).expect("an empty queue has room");
    }
    let (reported, progress) = watch::channel(Progress::default());
    let span = tracing::Span::current();
    let work = tokio::task::spawn_blocking(move || {
        span.in_scope(|| work(Pieces::new(received), &reported))
    });
    let reported = Progress::default();
    let upload = Upload { incoming, pieces: Some(pieces), progress, reported, work };
    let answers = futures::stream::unfold(Some(upload), |upload| async move {
        let mut upload = upload?;
        match upload.next().await {
            Ok(Next::Progress(reported)) => Some((Ok(reported), Some(upload))),
            Ok(Next::Done(reported)) => Some((Ok(reported), None)),
            Err(status) => Some((Err(status), None)),
        }
    });
    resume_at(Response::new(answers), at)
}

/// The next report of an upload.
enum Next {
    Progress(v1::UpdateProgress),
    Done(v1::UpdateProgress),
}

impl Upload {
    async fn next(&mut self) -> Result<Next, Status> {
        loop {
            tokio::select! {
                // Cancel-safe, all of them: a piece is taken only once there is room for it.
                done = &mut self.work => {
                    let done = done.unwrap_or(Err(Error::Lost));
                    return done.map(Next::Done).map_err(|error| refused(&error));
                }
                Ok(()) = self.progress.changed() => {
                    let now = *self.progress.borrow_and_update();
                    if now.phase != self.reported.phase || now.bytes >= self.reported.bytes + STEP {
                        self.reported = now;
                        return Ok(Next::Progress(progress(now)));
                    }
                }
                more = feed(&mut self.incoming, self.pieces.as_ref()), if self.pieces.is_some() => {
                    if !more? {
                        self.pieces = None;
                    }
                }
            }
        }
    }
}

/// Passes one piece on; `false` after the last one.
async fn feed(
    incoming: &mut Streaming<v1::UpdateRequest>,
    pieces: Option<&mpsc::Sender<Vec<u8>>>,
) -> Result<bool, Status> {
    let Some(pieces) = pieces else { return Ok(false) };
    // The thread wants no more: it has an outcome.
    let Ok(room) = pieces.reserve().await else { return Ok(false) };
    match message(incoming, STALL).await? {
        Some(v1::UpdateRequest { data, .. }) => {
            room.send(data);
            Ok(true)
        }
        None => Ok(false),
    }
}

/// The next message; `None` after the last one.
async fn message(
    incoming: &mut Streaming<v1::UpdateRequest>,
    longest: Duration,
) -> Result<Option<v1::UpdateRequest>, Status> {
    let silent = |_elapsed| {
        let text = format!("nothing was received for {} s", longest.as_secs());
        Status::deadline_exceeded(text)
    };
    timeout(longest, incoming.message()).await.map_err(silent)?
}

fn progress(Progress { phase, bytes, total }: Progress) -> v1::UpdateProgress {
    let phase = match phase {
        Phase::Write => Reported::Write,
        Phase::Verify => Reported::Verify,
    };
    v1::UpdateProgress { phase: phase.into(), bytes, total, ..Default::default() }
}

/// The answer for an update that is not installed.
pub(super) fn refused(error: &Error) -> Status {
    let code = match error {
        Error::Busy => Code::Aborted,
        Error::Space { .. } => Code::ResourceExhausted,
        Error::Io { .. } | Error::Differs(_) | Error::Lost => Code::Internal,
        _ => Code::FailedPrecondition,
    };
    let mut status = Status::new(code, polis_base::cause::line(error));
    let word = MetadataValue::from_static(error.word());
    status.metadata_mut().insert(REASON, word);
    status
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::*;

    #[tokio::test]
    async fn a_bundle_that_is_kept_is_handed_on_whole_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let dir = polis_base::files::Root::at(folder.path()).data.update;
        let whole: Vec<u8> = (0..PIECE * 2 + 7).map(|at| at.to_le_bytes()[0]).collect();
        std::fs::create_dir_all(dir.path()).unwrap();
        std::fs::write(dir.path().join("00ff.bundle"), &whole).unwrap();
        std::fs::write(dir.path().join("unfinished"), "").unwrap();
        let store = Store::new(dir);
        let asked = |image: &str, at| v1::FetchBundleRequest { image: image.to_owned(), at };
        let size = whole.len() as u64;
        for (at, from) in [(0, 0), (7, 7), (size, size), (size + 1, 0), (u64::MAX, 0)] {
            let answer = fetch(&store, asked("00ff", at)).await.unwrap();
            assert_eq!(polis_wire::rpc::resumes_at(answer.metadata()), from);
            let pieces: Vec<_> = answer.into_inner().collect().await;
            let pieces = pieces.into_iter().map(|piece| piece.unwrap().data);
            let rest = &whole[usize::try_from(from).unwrap()..];
            assert!(pieces.collect::<Vec<_>>().concat() == rest, "{at}");
        }
        for other in ["", "00fe", "unfinished", "../update/00ff"] {
            let refused = fetch(&store, asked(other, 0)).await.err().unwrap();
            let word = refused.metadata().get(REASON).unwrap();
            assert!(refused.code() == Code::NotFound && word == "no-bundle", "{other}");
        }
    }

    #[tokio::test]
    async fn a_disk_that_hangs_stops_no_worker_of_the_runtime() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let folder = tempfile::tempdir().unwrap();
        let dir = polis_base::files::Root::at(folder.path()).data.update;
        std::fs::create_dir_all(dir.path()).unwrap();
        // To open one end waits for the other.
        let pipe = dir.path().join("00ff.bundle");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let request = v1::FetchBundleRequest { image: "00ff".to_owned(), at: 0 };
        let store = Store::new(dir);
        let mut fetched = std::pin::pin!(fetch(&store, request));
        let early = timeout(Duration::from_millis(100), &mut fetched).await;
        assert!(early.is_err(), "it was opened");
        // The thread goes on; waited for, so that it does not find the pipe closed again.
        let _both = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
        assert!(fetched.await.is_err(), "a pipe has no place to begin at");
    }

    #[test]
    fn an_update_that_is_not_installed_says_why_with_a_word() {
        let runs = Some("3.5".parse().unwrap());
        let target = EtcdTarget { runs, one_way: false };
        let one_way = target.takes(&semver::Version::new(3, 6, 0)).unwrap_err();
        for (error, code, word) in [
            (Error::NoKey, Code::FailedPrecondition, "update-no-key"),
            (Error::Busy, Code::Aborted, "update-busy"),
            (Error::Differs(polis_bundle::PartName::System), Code::Internal, "update-failed"),
            (polis_bundle::Refusal::Foreign.into(), Code::FailedPrecondition, "update-refused"),
            (
                polis_bundle::Refusal::from(one_way).into(),
                Code::FailedPrecondition,
                "update-one-way",
            ),
        ] {
            let status = refused(&error);
            assert_eq!((status.code(), status.message()), (code, &*error.to_string()));
            assert_eq!(status.metadata().get(REASON).unwrap(), word);
        }
    }
}
