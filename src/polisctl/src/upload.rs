//! Sending an update bundle to a node, with the progress that the node reports.

use std::io;
use std::path::Path;

use futures::{SinkExt as _, StreamExt as _};
use polis_proto::v1;
use polis_proto::v1::update_progress::Phase;
use polis_tui::bytes;
use tokio::io::AsyncReadExt as _;
use tonic::{Response, Status, Streaming};

use super::Global;
use super::error::{Error, Explain as _};
use super::session::refused;

/// How much is sent at once; a node takes at most sixteen times that.
const PIECE: usize = 256 << 10;
/// Pieces that wait to be sent.
const PIECES: usize = 4;

/// The pieces of a bundle, as a call takes them.
pub(super) type Pieces = futures::channel::mpsc::Receiver<v1::UpdateRequest>;

/// Sends a bundle by `call`; returns the last word of the node: INSTALLED or STORED.
pub(super) async fn send<C>(
    what: &str,
    file: &Path,
    global: &Global,
    call: impl FnOnce(Pieces) -> C,
) -> Result<v1::UpdateProgress, Error>
where
    C: Future<Output = Result<Response<Streaming<v1::UpdateProgress>>, Status>>,
{
    let reading = || format!("cannot read {}", file.display());
    let mut bundle = tokio::fs::File::open(file).await.doing(reading)?;
    let total = bundle.metadata().await.doing(reading)?.len();
    let (mut pieces, sent) = futures::channel::mpsc::channel(PIECES);
    let sending = async move {
        loop {
            let mut data = vec![0; PIECE];
            let count = bundle.read(&mut data).await?;
            data.truncate(count);
            // A node that has an answer takes no more.
            if count == 0 || pieces.send(v1::UpdateRequest { data }).await.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let progress = global.out.progress();
    progress.says(&format!("sending {}", bytes(total)));
    let receiving = async {
        let answers = call(sent).await.map_err(|status| refused(what, &status))?;
        let mut answers = answers.into_inner();
        while let Some(report) = answers.next().await {
            let report = report.map_err(|status| refused(what, &status))?;
            match report.phase() {
                Phase::Installed | Phase::Stored => return Ok(report),
                Phase::Verify => progress.says(&line("reading back", &report)),
                Phase::Write | Phase::Unspecified => progress.says(&line("writing", &report)),
            }
        }
        Err(Error::new("the node has ended the connection before the update was whole")
            .or_help("run the command again: it continues where the node has the bundle"))
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

    #[test]
    fn a_line_says_how_far_an_update_is() {
        let report = v1::UpdateProgress { bytes: 25 << 20, total: 100 << 20, ..Default::default() };
        assert_eq!(line("writing", &report), "writing [#####---------------] 25 % of 100.0 MiB");
        let none = line("writing", &v1::UpdateProgress::default());
        assert_eq!(none, "writing [--------------------] 0 % of 0 B");
    }
}
