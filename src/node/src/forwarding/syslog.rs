//! A connection to a syslog receiver (RFC 5425).
//!
//! The protocol has no acknowledgement. A batch counts as taken when the receiver's kernel has
//! acknowledged all of its bytes and the connection is still open; `deliver` sends the last
//! ones again after a lost connection.

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use polis_base::sys::socket;
use polis_wire::outside::{self, Server};
use polis_wire::parameters::LogTarget;
use tokio::io::{AsyncRead as _, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;

use super::line::{Batch, Subject};
use super::rfc5424;

/// A receiver that takes no byte for so long is gone.
const TAKE_MAX: Duration = Duration::from_secs(60);
/// Between two looks at the send queue.
const LOOK: Duration = Duration::from_millis(20);

/// Why a batch was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Connect(#[from] outside::Error),
    #[error("the connection to {url} was lost")]
    Lost { url: String, source: io::Error },
    #[error("{url} has not taken a batch within {} seconds", TAKE_MAX.as_secs())]
    Stalled { url: String },
}

/// An open connection.
pub(super) struct Connection {
    url: String,
    /// Large, beside the state of HTTP.
    stream: Box<TlsStream<TcpStream>>,
}

impl Connection {
    /// Connects to a target at this server.
    pub(super) async fn open(
        target: &LogTarget,
        server: &Server,
        bundle: &Path,
    ) -> Result<Self, Error> {
        let stream = Box::new(outside::connect(server, bundle, &[]).await?);
        Ok(Self { url: target.url(), stream })
    }

    /// Sends lines, and waits until the receiver's kernel has them.
    pub(super) async fn send(&mut self, subject: &Subject, batch: &Batch) -> Result<(), Error> {
        let mut frames = Vec::new();
        for line in &batch.lines {
            rfc5424::put(&mut frames, subject, &batch.recorder, line);
        }
        let url = self.url.clone();
        match timeout(TAKE_MAX, self.take(&frames)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(Error::Lost { url, source }),
            Err(_elapsed) => Err(Error::Stalled { url }),
        }
    }

    async fn take(&mut self, frames: &[u8]) -> io::Result<()> {
        self.stream.write_all(frames).await?;
        self.stream.flush().await?;
        while socket::unacknowledged(self.stream.get_ref().0)? > 0 {
            tokio::select! {
                // Cancel-safe: the text of a receiver is not kept.
                lost = closed(&mut self.stream) => return Err(lost),
                // Cancel-safe: only waits.
                () = sleep(LOOK) => {}
            }
        }
        // The queue of a connection that was reset is empty, too.
        let lost = poll_fn(|cx| Poll::Ready(poll_closed(&mut self.stream, cx))).await;
        lost.map_or(Ok(()), Err)
    }

    /// Waits until the connection is lost. Cancel-safe.
    pub(super) async fn lost(&mut self) -> Error {
        let source = closed(&mut self.stream).await;
        Error::Lost { url: self.url.clone(), source }
    }
}

impl Drop for Connection {
    /// Ends it as the RFC asks for, as far as that takes no time.
    fn drop(&mut self) {
        let (tcp, tls) = self.stream.get_mut();
        tls.send_close_notify();
        let mut bytes = Vec::new();
        // Memory takes all of it, and the receiver may be gone.
        let _ended = tls.write_tls(&mut bytes).and_then(|_length| tcp.try_write(&bytes));
    }
}

/// Waits for the end of a connection.
async fn closed(stream: &mut TlsStream<TcpStream>) -> io::Error {
    poll_fn(|cx| poll_closed(stream, cx).map_or(Poll::Pending, Poll::Ready)).await
}

/// Why the connection has ended, if it has. A receiver says nothing; any text of it is dropped.
fn poll_closed(
    stream: &mut TlsStream<TcpStream>,
    cx: &mut std::task::Context<'_>,
) -> Option<io::Error> {
    loop {
        let mut bytes = [0; 256];
        let mut read = ReadBuf::new(&mut bytes);
        match Pin::new(&mut *stream).poll_read(cx, &mut read) {
            Poll::Pending => return None,
            Poll::Ready(Err(error)) => return Some(error),
            Poll::Ready(Ok(())) if read.filled().is_empty() => {
                let text = "the receiver closed it";
                return Some(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
            Poll::Ready(Ok(())) => {}
        }
    }
}
