//! The content of a request: nothing, or pieces of a known length in total.
//!
//! Invariants:
//! - Fewer or more bytes than announced end the connection: the store keeps nothing of it.
//! - One piece waits at most: the disk is read as fast as the store takes it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use http_body::{Body, Frame, SizeHint};
use hyper::body::Bytes;
use tokio::sync::mpsc;

/// The sender of the pieces sent more or less than it announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the content was not of the announced length: {left} bytes are left")]
pub(super) struct Cut {
    left: u64,
}

/// The content to send.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// Nothing.
    Empty,
    /// These pieces.
    Pieces {
        pieces: mpsc::Receiver<Vec<u8>>,
        /// Bytes that are not sent yet.
        left: u64,
        /// Counts those that are.
        moved: Arc<AtomicU64>,
    },
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let Self::Pieces { pieces, left, moved } = &mut *self else { return Poll::Ready(None) };
        if *left == 0 {
            return Poll::Ready(None);
        }
        let piece = ready!(pieces.poll_recv(cx));
        let length = piece.as_ref().map_or(0, Vec::len) as u64;
        match (piece, left.checked_sub(length)) {
            (Some(piece), Some(rest)) => {
                *left = rest;
                moved.fetch_add(length, Ordering::Relaxed);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from(piece)))))
            }
            _ => Poll::Ready(Some(Err(Cut { left: *left }))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Empty | Self::Pieces { left: 0, .. })
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Pieces { left, .. } => SizeHint::with_exact(*left),
        }
    }
}
