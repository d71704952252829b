//! The call `Update`: passes the pieces of a bundle on to the thread that writes them, and
//! tells how far it is.
//!
//! ```text
//! caller --pieces--> [4 pieces] --> the thread of the update
//!        <-progress----------------/
//! ```
//!
//! Invariants:
//! - A caller that sends nothing for [`STALL`] loses its turn.
//! - The thread asks for the pieces: a slow disk slows the caller down, and no more than the
//!   queue is in memory.

use std::io::{self, Read};
use std::time::Duration;

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::update_progress::Phase as Told;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

use polis_machine::update::{Error, Installed, Phase, Progress, Turn};
use polis_wire::rpc::REASON;

/// Pieces on the way to the thread: enough that neither side waits for the other's next step.
const PIECES: usize = 4;
/// Longest that a caller may send nothing.
const STALL: Duration = Duration::from_secs(60);
/// How much further an update is when it tells so.
const STEP: u64 = 1 << 20;

/// A bundle on its way.
struct Upload {
    incoming: Streaming<v1::UpdateRequest>,
    /// `None` once everything was received.
    pieces: Option<mpsc::Sender<Vec<u8>>>,
    progress: watch::Receiver<Progress>,
    told: Progress,
    work: JoinHandle<Result<Installed, Error>>,
}

/// Installs the bundle that comes in; every change of the progress, then the outcome.
pub(super) fn install(
    turn: Turn,
    incoming: Streaming<v1::UpdateRequest>,
) -> impl Stream<Item = Result<v1::UpdateProgress, Status>> + Send {
    let (pieces, received) = mpsc::channel(PIECES);
    let (told, progress) = watch::channel(Progress::default());
    let span = tracing::Span::current();
    let work = tokio::task::spawn_blocking(move || {
        span.in_scope(|| turn.install(Pieces { received, piece: Vec::new(), at: 0 }, &told))
    });
    let told = Progress::default();
    let upload = Upload { incoming, pieces: Some(pieces), progress, told, work };
    futures::stream::unfold(Some(upload), |upload| async move {
        let mut upload = upload?;
        match upload.next().await {
            Ok(Next::Progress(told)) => Some((Ok(told), Some(upload))),
            Ok(Next::Installed(told)) => Some((Ok(told), None)),
            Err(status) => Some((Err(status), None)),
        }
    })
}

/// What an upload tells next.
enum Next {
    Progress(v1::UpdateProgress),
    Installed(v1::UpdateProgress),
}

impl Upload {
    async fn next(&mut self) -> Result<Next, Status> {
        loop {
            tokio::select! {
                // Cancel-safe, all of them: a piece is taken only once there is room for it.
                done = &mut self.work => return finished(done.unwrap_or(Err(Error::Lost))),
                Ok(()) = self.progress.changed() => {
                    let now = *self.progress.borrow_and_update();
                    if now.phase != self.told.phase || now.bytes >= self.told.bytes + STEP {
                        self.told = now;
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

/// Passes one piece on; `false` once there are no more.
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
        Phase::Write => Told::Write,
        Phase::Verify => Told::Verify,
    };
    v1::UpdateProgress { phase: phase.into(), bytes, total, ..Default::default() }
}

fn finished(outcome: Result<Installed, Error>) -> Result<Next, Status> {
    let Installed { version, slot } = outcome.map_err(|error| refused(&error))?;
    let phase = Told::Installed.into();
    let (version, slot) = (version.to_string(), slot.to_owned());
    Ok(Next::Installed(v1::UpdateProgress { phase, version, slot, ..Default::default() }))
}

/// The answer for an update that is not installed.
pub(super) fn refused(error: &Error) -> Status {
    let code = match error {
        Error::Busy => Code::Aborted,
        Error::Io { .. } | Error::Differs(_) | Error::Lost => Code::Internal,
        _ => Code::FailedPrecondition,
    };
    let mut status = Status::new(code, polis_base::cause::line(error));
    let word = tonic::metadata::MetadataValue::from_static(error.word());
    status.metadata_mut().insert(REASON, word);
    status
}

/// The pieces as the thread reads them.
struct Pieces {
    received: mpsc::Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() {
            // A sender that is gone ends the bundle; one that is cut short is refused.
            let Some(piece) = self.received.blocking_recv() else { return Ok(0) };
            (self.piece, self.at) = (piece, 0);
        }
        let count = buffer.len().min(self.piece.len() - self.at);
        buffer[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_are_one_text() {
        let (sender, received) = mpsc::channel(PIECES);
        for piece in [&b"ab"[..], b"", b"cdefg", b"h"] {
            sender.blocking_send(piece.to_vec()).unwrap();
        }
        drop(sender);
        let mut pieces = Pieces { received, piece: Vec::new(), at: 0 };
        let mut three = [0; 3];
        assert_eq!((pieces.read(&mut three).unwrap(), &three[..2]), (2, &b"ab"[..]));
        let mut rest = Vec::new();
        pieces.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"cdefgh");
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
