//! The layer around a service that makes entries of its calls, so no handler can forget its
//! own.
//!
//! What this module does not do: decide which calls have an entry, or write one (an [`Audit`]).

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use polis_proto::v1::AuditEntry;
use prost::bytes::Bytes;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::{Code, Status};

/// Bytes of a gRPC frame before its message: whether it is compressed, and its length.
const FRAME_HEAD: usize = 5;

/// The answer of a handler: a status is an answer, too.
pub type Answer = Result<Response<Body>, Infallible>;

/// The handlers of a service.
pub trait Handler:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + 'static
{
}

impl<S> Handler for S where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static
{
}

/// Makes the entries of the calls of a service.
pub trait Audit: Clone + Send + 'static {
    /// Serves a call by `handler`, and makes its entry if it has one.
    fn serve(
        self,
        handler: impl Handler,
        request: Request<Body>,
    ) -> impl Future<Output = Answer> + Send;
}

/// A service, each of whose calls passes `audit`.
#[derive(Clone, Debug)]
pub struct Audited<S, A> {
    handler: S,
    audit: A,
}

impl<S: Handler, A: Audit> Audited<S, A> {
    /// Puts `audit` around `handler`.
    pub fn new(handler: S, audit: A) -> Self {
        Self { handler, audit }
    }
}

impl<S: NamedService, A> NamedService for Audited<S, A> {
    const NAME: &'static str = S::NAME;
}

impl<S: Handler, A: Audit> Service<Request<Body>> for Audited<S, A> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.handler.poll_ready(task)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The clone that was made ready serves this call.
        let waiting = self.handler.clone();
        let handler = std::mem::replace(&mut self.handler, waiting);
        Box::pin(self.audit.clone().serve(handler, request))
    }
}

/// Reads the message of a call that has one, which the server layer bounds: returns it, and the
/// request as it was. `None`: a frame without a message.
///
/// # Errors
///
/// The caller did not send all of it.
pub async fn message(request: Request<Body>) -> Result<(Request<Body>, Option<Bytes>), Status> {
    let (parts, body) = request.into_parts();
    let frame = body.collect().await?.to_bytes();
    let message = (frame.len() >= FRAME_HEAD).then(|| frame.slice(FRAME_HEAD..));
    Ok((Request::from_parts(parts, Body::new(Full::new(frame))), message))
}

/// The entry of a call under way. It is reported if the call ends without an answer: its caller
/// has left, or its time is over.
pub struct UnderWay<F: FnMut(AuditEntry)> {
    entry: Option<AuditEntry>,
    report: F,
}

impl<F: FnMut(AuditEntry)> UnderWay<F> {
    /// A call with this entry; `report` takes it if the call is cut off.
    pub fn new(entry: AuditEntry, report: F) -> Self {
        Self { entry: Some(entry), report }
    }

    /// Adds a text of the handler behind the object of the call.
    pub fn add(&mut self, found: &str) {
        if let Some(entry) = &mut self.entry {
            entry.what.push_str(found);
        }
    }

    /// The entry, for a step after which the call may still be cut off.
    #[must_use]
    pub fn entry(&self) -> AuditEntry {
        self.entry.clone().unwrap_or_default()
    }

    /// The entry of a call that has its answer.
    #[must_use]
    pub fn end(mut self) -> AuditEntry {
        self.entry.take().unwrap_or_default()
    }
}

impl<F: FnMut(AuditEntry)> fmt::Debug for UnderWay<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UnderWay").field(&self.entry).finish()
    }
}

impl<F: FnMut(AuditEntry)> Drop for UnderWay<F> {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            let reason = "it ended without an answer; what it asked for may have been done";
            let (code, reason) = (Code::Cancelled.into(), reason.to_owned());
            (self.report)(AuditEntry { code, reason, ..entry });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_reported_only_if_it_ends_without_an_answer() {
        let call = AuditEntry { call: "Reboot".to_owned(), ..AuditEntry::default() };
        let mut reported = Vec::new();
        assert_eq!(UnderWay::new(call.clone(), |entry| reported.push(entry)).end(), call);
        drop(UnderWay::new(call, |entry| reported.push(entry)));
        let codes: Vec<_> = reported.iter().map(|it| (it.call.as_str(), it.code)).collect();
        assert_eq!(codes, [("Reboot", Code::Cancelled.into())]);
    }

    #[test]
    fn an_entry_has_what_the_handler_found_also_if_its_call_is_cut_off() {
        let entry = AuditEntry { what: "polis-1".to_owned(), ..AuditEntry::default() };
        let mut reported = Vec::new();
        let mut call = UnderWay::new(entry, |entry| reported.push(entry));
        call.add(", new certificate");
        assert_eq!(call.entry().what, "polis-1, new certificate");
        drop(call);
        assert_eq!(reported[0].what, "polis-1, new certificate");
    }

    #[tokio::test]
    async fn a_message_is_read_and_the_request_stays_as_it_was() {
        for (frame, expected) in [(&b"\0\0\0\0\x02ab"[..], Some(&b"ab"[..])), (b"\0\0", None)] {
            let request = Request::new(Body::new(Full::new(Bytes::from_static(frame))));
            let (request, read) = message(request).await.unwrap();
            assert_eq!(read.as_deref(), expected);
            assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), frame);
        }
    }
}
