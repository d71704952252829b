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
//! Invariants:
//! - A caller that sends nothing for [`STALL`] loses its turn.
//! - The thread asks for the pieces: a slow disk slows the caller down, and no more than the
//!   queue is in memory.

use std::time::Duration;

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::update_progress::Phase as Reported;
use tokio::io::AsyncReadExt as _;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status, Streaming};

use polis_machine::update::{Error, Installed, PIECES, Phase, Pieces, Progress, Store, Turn};
use polis_wire::rpc::REASON;

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

/// Installs the bundle that comes in; every change of the progress, then the outcome.
pub(super) fn install(
    turn: Turn,
    incoming: Streaming<v1::UpdateRequest>,
) -> impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send {
    received(incoming, move |pieces, reported| {
        let Installed { version, slot } = turn.install(pieces, reported)?;
        let phase = Reported::Installed.into();
        let (version, slot) = (version.to_string(), slot.to_owned());
        Ok(v1::UpdateProgress { phase, version, slot, ..Default::default() })
    })
}

/// Keeps the bundle that comes in for other nodes; every change of the progress, then the
/// outcome.
pub(super) fn keep(
    turn: Turn,
    store: Store,
    incoming: Streaming<v1::UpdateRequest>,
) -> impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send {
    received(incoming, move |pieces, reported| {
        let version = turn.keep(pieces, &store, reported)?.version.to_string();
        Ok(v1::UpdateProgress { phase: Reported::Stored.into(), version, ..Default::default() })
    })
}

/// The pieces of the bundle that this node keeps.
///
/// # Errors
///
/// NOT_FOUND where it is another one, or none.
pub(super) async fn fetch(
    store: &Store,
    image: &str,
) -> Result<impl Stream<Item = Result<v1::UpdateRequest, Status>> + Send + use<>, Status> {
    let file = store.open(image).map_err(|error| refused(&error))?.ok_or_else(|| {
        let mut status = Status::not_found("this node does not keep that bundle");
        status.metadata_mut().insert(REASON, MetadataValue::from_static("no-bundle"));
        status
    })?;
    Ok(futures::stream::unfold(Some(tokio::fs::File::from_std(file)), |file| async move {
        let mut file = file?;
        let mut data = vec![0; PIECE];
        match file.read(&mut data).await {
            Ok(0) => None,
            Ok(count) => {
                data.truncate(count);
                Some((Ok(v1::UpdateRequest { data }), Some(file)))
            }
            Err(error) => {
                Some((Err(Status::internal(format!("cannot read the bundle: {error}"))), None))
            }
        }
    }))
}

/// Passes the pieces that come in to a thread that does `work` with them.
fn received(
    incoming: Streaming<v1::UpdateRequest>,
    work: impl FnOnce(Pieces, &watch::Sender<Progress>) -> Result<v1::UpdateProgress, Error>
    + Send
    + 'static,
) -> impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send {
    let (pieces, received) = mpsc::channel(PIECES);
    let (reported, progress) = watch::channel(Progress::default());
    let span = tracing::Span::current();
    let work = tokio::task::spawn_blocking(move || {
        span.in_scope(|| work(Pieces::new(received), &reported))
    });
    let reported = Progress::default();
    let upload = Upload { incoming, pieces: Some(pieces), progress, reported, work };
    futures::stream::unfold(Some(upload), |upload| async move {
        let mut upload = upload?;
        match upload.next().await {
            Ok(Next::Progress(reported)) => Some((Ok(reported), Some(upload))),
            Ok(Next::Done(reported)) => Some((Ok(reported), None)),
            Err(status) => Some((Err(status), None)),
        }
    })
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
    let silent = |_elapsed| {
        let text = format!("nothing was received for {} s", STALL.as_secs());
        Status::deadline_exceeded(text)
    };
    match timeout(STALL, incoming.message()).await.map_err(silent)?? {
        Some(v1::UpdateRequest { data }) => {
            room.send(data);
            Ok(true)
        }
        None => Ok(false),
    }
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
        let pieces: Vec<_> = fetch(&store, "00ff").await.unwrap().collect().await;
        let pieces = pieces.into_iter().map(|piece| piece.unwrap().data);
        assert!(pieces.collect::<Vec<_>>().concat() == whole);
        for other in ["", "00fe", "unfinished", "../update/00ff"] {
            let refused = fetch(&store, other).await.err().unwrap();
            let word = refused.metadata().get(REASON).unwrap();
            assert!(refused.code() == Code::NotFound && word == "no-bundle", "{other}");
        }
    }

    #[test]
    fn an_update_that_is_not_installed_says_why_with_a_word() {
        for (error, code, word) in [
            (Error::NoKey, Code::FailedPrecondition, "update-no-key"),
            (Error::Busy, Code::Aborted, "update-busy"),
            (Error::Differs(polis_bundle::PartName::System), Code::Internal, "update-failed"),
            (polis_bundle::Refusal::Foreign.into(), Code::FailedPrecondition, "update-refused"),
        ] {
            let status = refused(&error);
            assert_eq!((status.code(), status.message()), (code, &*error.to_string()));
            assert_eq!(status.metadata().get(REASON).unwrap(), word);
        }
    }
}
