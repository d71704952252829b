//! Sending an update bundle to a node, with the progress that the node reports.
//!
//! ```text
//! head --> node: which byte is the next? --> the bytes from there on
//! ```
//!
//! A node that has nothing of the bundle, or whose version cannot go on, gets all of it.

use std::io::{self, SeekFrom};
use std::path::Path;

use futures::channel::oneshot;
use futures::{SinkExt as _, StreamExt as _};
use polis_bundle::Bundle;
use polis_proto::v1;
use polis_proto::v1::update_progress::Phase;
use polis_tui::bytes;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
use tonic::{Response, Status, Streaming};

use super::error::{Error, Explain as _};
use super::session::refused;
use super::{Global, update};
use polis_wire::rpc::{REASON, resumes_at};

/// How much is sent at once; a node takes at most sixteen times that.
const PIECE: usize = 256 << 10;
/// Pieces that wait to be sent.
const PIECES: usize = 4;

/// The next step after a transfer that broke.
const AGAIN: &str = "run the command again: it continues where this transfer broke";

/// The pieces of a bundle, as a call takes them.
pub(super) type Pieces = futures::channel::mpsc::Receiver<v1::UpdateRequest>;

/// Sends a bundle by `call`; returns the last word of the node: INSTALLED or STORED. `one_way`
/// allows the node what cannot be undone.
pub(super) async fn send<C>(
    what: &str,
    file: &Path,
    one_way: bool,
    global: &Global,
    call: impl FnOnce(Pieces) -> C,
) -> Result<v1::UpdateProgress, Error>
where
    C: Future<Output = Result<Response<Streaming<v1::UpdateProgress>>, Status>>,
{
    let reading = || format!("cannot read {}", file.display());
    let mut bundle = tokio::fs::File::open(file).await.doing(reading)?;
    let total = bundle.metadata().await.doing(reading)?.len();
    let head = head(file)?;
    let (mut pieces, sent) = futures::channel::mpsc::channel(PIECES);
    let (continues, next) = oneshot::channel();
    let sending = async move {
        let begin = head.len() as u64;
        // A node that has an answer takes no more, here and below.
        let first = v1::UpdateRequest { data: head, resume: true, one_way };
        if pieces.send(first).await.is_err() {
            return io::Result::Ok(());
        }
        let Ok(at) = next.await else { return Ok(()) };
        bundle.seek(SeekFrom::Start(begin.max(at))).await?;
        loop {
            let mut data = vec![0; PIECE];
            let count = bundle.read(&mut data).await?;
            data.truncate(count);
            let piece = v1::UpdateRequest { data, ..Default::default() };
            if count == 0 || pieces.send(piece).await.is_err() {
                return Ok(());
            }
        }
    };
    let progress = global.out.progress();
    progress.says(&format!("sending {}", bytes(total)));
    let receiving = async {
        let answers = call(sent).await.map_err(|status| refused(what, &status))?;
        let at = resumes_at(answers.metadata());
        if at > 0 {
            let left = bytes(total.saturating_sub(at));
            progress.says(&format!("the node has a part of it: sending the last {left}"));
        }
        // Where the file cannot be read, the error of that is on its way.
        continues.send(at).unwrap_or_default();
        let mut answers = answers.into_inner();
        while let Some(report) = answers.next().await {
            let report = report.map_err(|status| ended(what, &status))?;
            match report.phase() {
                Phase::Installed | Phase::Stored => return Ok(report),
                Phase::Verify => progress.says(&line("reading back", &report)),
                Phase::Write | Phase::Unspecified => progress.says(&line("writing", &report)),
            }
        }
        Err(Error::new("the node has ended the connection before the update was whole")
            .or_help(AGAIN))
    };
    let sending = async { sending.await.doing(reading) };
    tokio::pin!(sending, receiving);
    tokio::select! {
        // Cancel-safe: both are polled on below.
        sent = &mut sending => sent?,
        report = &mut receiving => return report,
    }
    receiving.await
}

/// The error of a transfer that has begun. A node that refuses it has a word for the reason;
/// without one, the way to the node broke.
fn ended(what: &str, status: &Status) -> Error {
    let error = refused(what, status);
    match status.metadata().contains_key(REASON) {
        true => error,
        false => error.help_if_late(AGAIN).or_help(AGAIN),
    }
}

/// The bytes of a bundle before its parts.
fn head(file: &Path) -> Result<Vec<u8>, Error> {
    let opened = std::fs::File::open(file).map_err(polis_bundle::Error::Read);
    let bundle = opened.and_then(|file| Bundle::open(io::BufReader::new(file), None));
    Ok(bundle.map_err(|fault| update::explained(file, fault))?.head().to_vec())
}

/// How far an update is.
fn line(what: &str, report: &v1::UpdateProgress) -> String {
    let percent = report.bytes.saturating_mul(100).checked_div(report.total).unwrap_or_default();
    let filled = usize::try_from(percent / 5).unwrap_or_default().min(20);
    let bar = format!("{}{}", "#".repeat(filled), "-".repeat(20 - filled));
    format!("{what} [{bar}] {percent} % of {}", bytes(report.total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn a_node_that_has_a_part_of_the_bundle_gets_the_rest() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let key = |seed| ed25519_dalek::SigningKey::from_bytes(&[seed; 32]);
        let bundle = update::tests::bundle(&key(3));
        crate::contexts::write(&world.path("update"), &bundle).unwrap();
        let sends = || {
            world.runs(&["node", "update", "web-1", "@update", "--no-reboot", "--yes"]);
            let asked = cluster.asked();
            asked.into_iter().filter(|asked| asked.starts_with("Update ")).collect::<Vec<_>>()
        };
        assert_eq!(sends(), ["Update 1.0.0"]);
        *cluster.part.lock().unwrap() = bundle[..bundle.len() - 100].to_vec();
        assert_eq!(sends(), [format!("Update 1.0.0 from {}", bundle.len() - 100)]);
        // A part of another bundle does not count.
        *cluster.part.lock().unwrap() = update::tests::bundle(&key(4));
        assert_eq!(sends(), ["Update 1.0.0"]);
    }

    #[test]
    fn a_transfer_that_broke_says_that_it_may_be_continued_and_one_that_is_refused_does_not() {
        for broke in [Status::unknown("the connection broke"), Status::deadline_exceeded("")] {
            let text = ended("update the node", &broke).render();
            assert!(text.contains(AGAIN), "{text}");
        }
        let mut refused = Status::failed_precondition("its system was changed");
        refused.metadata_mut().insert(REASON, "update-refused".parse().unwrap());
        let text = ended("update the node", &refused).render();
        assert!(!text.contains(AGAIN), "{text}");
    }

    #[test]
    fn a_line_says_how_far_an_update_is() {
        let report = v1::UpdateProgress { bytes: 25 << 20, total: 100 << 20, ..Default::default() };
        assert_eq!(line("writing", &report), "writing [#####---------------] 25 % of 100.0 MiB");
        let none = line("writing", &v1::UpdateProgress::default());
        assert_eq!(none, "writing [--------------------] 0 % of 0 B");
    }
}
