//! Accounting of request and answer bodies: memory, duration, stalls and outcome.
//!
//! Invariants:
//! - A request is never buffered beyond its bound.
//! - The requests of a connection together are never buffered beyond theirs: one that never ends
//!   keeps its bytes until its deadline.
//! - A stalled answer is detected: hyper asks for the next piece only once the caller
//!   has made room for it.
//! - The streams of a caller together have a bounded number of long messages on their way.
//! - A stream of a caller counts as open until its answer is dropped, with all that it keeps.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, PollSemaphore, WaitForCancellationFutureOwned};
use tonic::{Code, Status};

use super::access_list::Fallen;
use super::metrics::Metrics;

/// The bytes of the requests of one connection that are being received. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Load {
    bytes: Arc<AtomicUsize>,
    max: usize,
}

impl Load {
    pub(super) fn new(max: usize) -> Self {
        Self { bytes: Arc::default(), max }
    }

    /// Adds bytes that have arrived; false if that makes too many.
    fn add(&self, bytes: usize) -> bool {
        self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= self.max
    }

    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A request, up to a length.
#[derive(Debug)]
pub(super) struct Bounded<B> {
    inner: B,
    max: usize,
    seen: usize,
    /// The requests beside it; `None` for an upload, of which one message is buffered at a time.
    load: Option<Load>,
}

impl<B> Bounded<B> {
    pub(super) fn new(inner: B, max: usize, load: Option<Load>) -> Self {
        Self { inner, max, seen: 0, load }
    }
}

impl<B> Drop for Bounded<B> {
    fn drop(&mut self) {
        if let Some(load) = &self.load {
            load.remove(self.seen);
        }
    }
}

impl<B> Body for Bounded<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(Status::from_error(error.into())))),
            None => return Poll::Ready(None),
        };
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        self.seen = self.seen.saturating_add(bytes);
        let fits = self.load.as_ref().is_none_or(|load| load.add(bytes));
        if self.seen > self.max {
            let max = self.max;
            let text = format!("the request is longer than {max} bytes");
            return Poll::Ready(Some(Err(Status::out_of_range(text))));
        }
        if !fits {
            let text = "the requests that this connection has begun to send are too long together; \
                        end some of them first";
            return Poll::Ready(Some(Err(Status::resource_exhausted(text))));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The calls of one connection.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    next: u64,
    calls: BTreeMap<u64, Option<Instant>>,
    last: Instant,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        let state = State { next: 0, calls: BTreeMap::new(), last: Instant::now() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn enter(&self) -> u64 {
        self.with(|state| {
            state.next += 1;
            state.calls.insert(state.next, None);
            state.next
        })
    }

    fn leave(&self, call: u64) {
        self.with(|state| {
            state.calls.remove(&call);
            state.last = Instant::now();
        });
    }

    /// Records since when the call has an unread piece.
    fn handed_on(&self, call: u64, since: Option<Instant>) {
        self.with(|state| state.calls.insert(call, since));
    }

    /// How long the oldest piece has been unread.
    pub(super) fn stalled(&self) -> Duration {
        let oldest = self.with(|state| state.calls.values().filter_map(|since| *since).min());
        oldest.map(|since| since.elapsed()).unwrap_or_default()
    }

    /// How long the connection has been without a call.
    pub(super) fn idle(&self) -> Duration {
        self.with(|state| match state.calls.is_empty() {
            true => state.last.elapsed(),
            false => Duration::ZERO,
        })
    }
}

/// A call under way; dropping it counts it, and gives its stream back.
#[derive(Debug)]
pub(super) struct Open {
    /// The stream of a known caller.
    stream: Option<OwnedSemaphorePermit>,
    metrics: Arc<Metrics>,
    path: String,
    began: Instant,
    /// Until the answer began.
    took: Option<Duration>,
    code: Option<Code>,
    activity: Arc<Activity>,
    call: u64,
}

impl Open {
    pub(super) fn new(metrics: &Arc<Metrics>, path: &str, activity: &Arc<Activity>) -> Self {
        Self {
            stream: None,
            metrics: Arc::clone(metrics),
            path: path.to_owned(),
            began: Instant::now(),
            took: None,
            code: None,
            activity: Arc::clone(activity),
            call: activity.enter(),
        }
    }

    /// Keeps the stream until the call ends.
    pub(super) fn keep(&mut self, stream: Option<OwnedSemaphorePermit>) {
        self.stream = stream;
    }

    /// The answer begins; records how the call ended if that is known already.
    pub(super) fn answered(&mut self, code: Option<Code>) {
        self.took = Some(self.began.elapsed());
        self.code = code;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let took = self.took.unwrap_or_else(|| self.began.elapsed());
        // A caller that went away before the end has cancelled the call.
        self.metrics.called(&self.path, self.code.unwrap_or(Code::Cancelled), took);
        self.activity.leave(self.call);
        drop(self.stream.take());
    }
}

/// Ends the streams of a connection, with a reason.
#[derive(Debug)]
pub(super) struct End {
    token: CancellationToken,
    fallen: OnceLock<Fallen>,
}

impl End {
    /// Ends with the server, at the latest.
    pub(super) fn new(stopping: &CancellationToken) -> Arc<Self> {
        Arc::new(Self { token: stopping.child_token(), fallen: OnceLock::new() })
    }

    /// Ends the streams of a peer that has lost its access.
    pub(super) fn cut(&self, fallen: Fallen) {
        // The first loss is the reason.
        let _first = self.fallen.set(fallen);
        self.token.cancel();
    }

    /// Waits until the streams have to end. Cancel-safe.
    pub(super) async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    fn status(&self) -> Status {
        match self.fallen.get() {
            Some(fallen) => fallen.clone().into(),
            None => Status::unavailable("this server is stopping; retry"),
        }
    }
}

/// How an endless answer ends for a caller that has lost its access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// With the reason in its trailers, as gRPC has it.
    Trailers,
    /// In the middle, so that it does not look complete.
    Abort,
}

/// Bytes of one piece of a long message: a frame of HTTP/2, unless both ends agree on more.
const PIECE: usize = 16 << 10;

/// The long messages of an answer over HTTP/2, which hyper receives in pieces.
///
/// hyper takes what a body yields once the caller has room for one byte, and asks for the next at
/// once. So a whole message would wait in its buffers, where nothing counts it. What a handler
/// allocates before it waits for something else is not counted here either, nor is the buffer of
/// tonic: it keeps the room of the longest message until its stream ends. The number of streams
/// bounds both ([`STREAMS_MAX`](super::limits::STREAMS_MAX)).
#[derive(Debug)]
pub(super) struct Pieces {
    /// What is left of the message that has begun.
    rest: Bytes,
    /// Places for the long messages of the caller. A stream makes a message only once it has one,
    /// and keeps it while a long message is sent. `None`: a single answer, which has been made
    /// already.
    places: Option<PollSemaphore>,
    /// The place of the message that has begun.
    place: Option<OwnedSemaphorePermit>,
}

impl Pieces {
    pub(super) fn new(places: Option<Arc<Semaphore>>) -> Self {
        Self { rest: Bytes::new(), places: places.map(PollSemaphore::new), place: None }
    }

    /// The next piece of the message that has begun. Without one, its place is given back.
    fn next_piece(&mut self) -> Option<Bytes> {
        if self.rest.is_empty() {
            drop(self.place.take());
            return None;
        }
        Some(self.cut())
    }

    /// Waits for a place for one more message.
    fn poll_place(&mut self, cx: &mut Context<'_>) -> Poll<Option<OwnedSemaphorePermit>> {
        match &mut self.places {
            Some(places) => places.poll_acquire(cx),
            None => Poll::Ready(None),
        }
    }

    /// The first piece of a long message, which keeps `place`; any other frame as it is.
    fn begin(&mut self, frame: Frame<Bytes>, place: Option<OwnedSemaphorePermit>) -> Frame<Bytes> {
        match frame.into_data() {
            Ok(data) if data.len() > PIECE => {
                self.rest = data;
                self.place = place;
                Frame::data(self.cut())
            }
            Ok(data) => Frame::data(data),
            Err(frame) => frame,
        }
    }

    /// A copy: a slice of the message would keep all of it in memory.
    fn cut(&mut self) -> Bytes {
        let piece = self.rest.split_to(PIECE.min(self.rest.len()));
        Bytes::copy_from_slice(&piece)
    }

    fn has_begun(&self) -> bool {
        !self.rest.is_empty()
    }
}

/// An answer on its way.
pub(super) struct Outgoing {
    inner: tonic::body::Body,
    open: Open,
    /// Ends an endless stream.
    end: Option<(Pin<Box<WaitForCancellationFutureOwned>>, Arc<End>, Ending)>,
    /// `None` over HTTP/1, where each connection has one answer at a time.
    pieces: Option<Pieces>,
    ended: bool,
}

impl Outgoing {
    pub(super) fn new(
        inner: tonic::body::Body,
        open: Open,
        end: Option<(Arc<End>, Ending)>,
        pieces: Option<Pieces>,
    ) -> Self {
        let end =
            end.map(|(end, ending)| (Box::pin(end.token.clone().cancelled_owned()), end, ending));
        Self { inner, open, end, pieces, ended: false }
    }

    /// Whether a part of a message is left to send.
    fn has_begun(&self) -> bool {
        self.pieces.as_ref().is_some_and(Pieces::has_begun)
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        this.open.activity.handed_on(this.open.call, None);
        // First of all: a caller cannot read trailers in the middle of a message.
        if let Some(piece) = this.pieces.as_mut().and_then(Pieces::next_piece) {
            this.open.activity.handed_on(this.open.call, Some(Instant::now()));
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if let Some((waits, end, ending)) = &mut this.end
            && waits.as_mut().poll(cx).is_ready()
        {
            let status = end.status();
            this.ended = true;
            this.open.code = Some(status.code());
            if *ending == Ending::Abort {
                return Poll::Ready(Some(Err(status)));
            }
            let mut trailers = HeaderMap::new();
            let added = status.add_header(&mut trailers);
            return Poll::Ready(added.is_ok().then(|| Ok(Frame::trailers(trailers))));
        }
        let place = match &mut this.pieces {
            Some(pieces) => ready!(pieces.poll_place(cx)),
            None => None,
        };
        // Without a message, the place is free again at once.
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_ref() {
                    this.open.code = status_code(trailers);
                }
                this.open.activity.handed_on(this.open.call, Some(Instant::now()));
            }
            Some(Err(status)) => this.open.code = Some(status.code()),
            None => this.ended = true,
        }
        let Some(pieces) = &mut this.pieces else { return Poll::Ready(frame) };
        Poll::Ready(frame.map(|frame| frame.map(|frame| pieces.begin(frame, place))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended || (!self.has_begun() && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.has_begun() { SizeHint::default() } else { self.inner.size_hint() }
    }
}

/// How a call ended, if the headers say.
pub(super) fn status_code(headers: &HeaderMap) -> Option<Code> {
    let code = headers.get("grpc-status")?.to_str().ok()?.parse::<i32>().ok()?;
    Some(Code::from(code))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::poll_fn;

    use futures::StreamExt as _;
    use futures::stream::{iter, pending};
    use http_body_util::StreamBody;

    use super::*;
    use crate::rpc::Table;

    fn outgoing(inner: tonic::body::Body, places: &Arc<Semaphore>) -> Outgoing {
        let metrics = Arc::new(Metrics::new(&Table::polis().unwrap()));
        let open = Open::new(&metrics, "/test", &Activity::new());
        let pieces = Pieces::new(Some(Arc::clone(places)));
        Outgoing::new(inner, open, None, Some(pieces))
    }

    /// A stream of one message.
    fn stream(text: String, places: &Arc<Semaphore>) -> Outgoing {
        outgoing(tonic::body::Body::new(text), places)
    }

    #[tokio::test]
    async fn a_stream_makes_a_message_once_a_long_one_of_another_has_been_sent() {
        let places = Arc::new(Semaphore::new(1));
        let long = "x".repeat(2 * PIECE + 1);
        let mut first = stream(long.clone(), &places);
        let mut second = stream(long, &places);
        let begun = poll_fn(|cx| Pin::new(&mut first).poll_frame(cx)).await;
        assert_eq!(begun.unwrap().unwrap().into_data().unwrap().len(), PIECE);
        assert_eq!(places.available_permits(), 0);
        assert!(!first.is_end_stream());

        let order = RefCell::new(Vec::new());
        let read = async |name: &'static str, body: &mut Outgoing| {
            while let Some(frame) = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
                order.borrow_mut().push((name, frame.unwrap().into_data().unwrap().len()));
            }
        };
        tokio::join!(read("second", &mut second), read("first", &mut first));
        let expected =
            [("first", PIECE), ("first", 1), ("second", PIECE), ("second", PIECE), ("second", 1)];
        assert_eq!(*order.borrow(), expected);
        assert_eq!(places.available_permits(), 1);
    }

    #[tokio::test]
    async fn a_stream_that_rests_after_a_long_message_keeps_no_place() {
        let places = Arc::new(Semaphore::new(1));
        let long = Frame::data(Bytes::from(vec![0_u8; PIECE + 1]));
        let frames = iter([Ok::<_, Status>(long)]).chain(pending());
        let mut body = outgoing(tonic::body::Body::new(StreamBody::new(frames)), &places);
        for length in [PIECE, 1] {
            let sent = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
            assert_eq!(sent.unwrap().unwrap().into_data().unwrap().len(), length);
            assert_eq!(places.available_permits(), 0);
        }
        let rests = poll_fn(|cx| Poll::Ready(Pin::new(&mut body).poll_frame(cx).is_pending()));
        assert!(rests.await);
        assert_eq!(places.available_permits(), 1);
    }

    #[tokio::test]
    async fn a_short_message_keeps_no_place() {
        let places = Arc::new(Semaphore::new(1));
        let mut body = stream("x".repeat(PIECE), &places);
        let sent = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        assert_eq!(sent.unwrap().unwrap().into_data().unwrap().len(), PIECE);
        assert_eq!(places.available_permits(), 1);
    }

    #[tokio::test]
    async fn the_requests_of_a_connection_are_bounded_together_and_an_end_makes_room() {
        let load = Load::new(8);
        let request =
            |text: &str, load: &Load| Bounded::new(text.to_owned(), 8, Some(load.clone()));
        let read = async |body: &mut Bounded<String>| {
            let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await;
            frame.unwrap().map(drop).map_err(|status| status.code())
        };
        let (mut first, mut second) = (request("abcde", &load), request("abcd", &load));
        assert_eq!(read(&mut first).await, Ok(()));
        assert_eq!(read(&mut second).await, Err(Code::ResourceExhausted));
        assert_eq!(read(&mut request("abcdefgh", &Load::new(8))).await, Ok(()), "another one");
        drop(first);
        assert_eq!(read(&mut request("abcd", &load)).await, Ok(()), "the refused one counts");
        drop(second);
        let mut whole = request("abcdefgh", &load);
        assert_eq!(read(&mut whole).await, Ok(()));
        let mut upload = Bounded::new("abcdefgh".to_owned(), usize::MAX, None);
        assert_eq!(read(&mut upload).await, Ok(()));
        assert_eq!(read(&mut request("abcdefghi", &load)).await, Err(Code::OutOfRange));
    }
}
