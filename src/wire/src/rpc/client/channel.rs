//! A way to make calls over one connection, which all end with it.
//!
//! The library below now and then loses a call that it receives at the moment when its
//! connection ends: the call never completes. So the end of the connection, which is
//! the end of its socket, is watched here as well.
//!
//! Invariants:
//! - A call without an answer fails within [`GRACE`] of the end of its connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::StdError;
use tonic::transport;
use tower::Service;

/// How long the library may take to end the calls of a lost connection.
const GRACE: Duration = Duration::from_secs(1);

/// Makes calls over one connection.
#[derive(Clone, Debug)]
pub struct Channel {
    inner: transport::Channel,
    gone: CancellationToken,
}

impl Channel {
    /// Makes calls by `inner`, until `gone`.
    pub(super) fn new(inner: transport::Channel, gone: CancellationToken) -> Self {
        Self { inner, gone }
    }
}

/// Cancels `gone` when `io` is dropped.
pub(super) fn watched<T: AsyncRead + AsyncWrite>(
    io: T,
    gone: &CancellationToken,
) -> impl AsyncRead + AsyncWrite + use<T> {
    let guard = gone.clone().drop_guard();
    // It looks at no byte: it only lives as long as the socket does.
    InspectReader::new(io, move |_bytes: &[u8]| {
        let _held = &guard;
    })
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = StdError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, StdError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        Service::poll_ready(&mut self.inner, cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.inner.call(request);
        let gone = self.gone.clone();
        Box::pin(async move {
            let mut answer = std::pin::pin!(answer);
            tokio::select! {
                // Cancel-safe: the answer is only borrowed, and a token waits.
                answered = &mut answer => return answered.map_err(Into::into),
                () = gone.cancelled() => {}
            }
            match timeout(GRACE, answer).await {
                Ok(answered) => answered.map_err(Into::into),
                Err(_elapsed) => {
                    let text = "the connection ended before the call was answered";
                    Err(io::Error::new(io::ErrorKind::ConnectionAborted, text).into())
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};
    use tonic::transport::Endpoint;

    use super::*;

    #[tokio::test]
    async fn a_call_ends_soon_after_its_connection() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let gone = CancellationToken::new();
        let io = watched(TcpStream::connect(at).await.unwrap(), &gone);
        drop(io);
        assert!(gone.is_cancelled());
        // A server that accepts and stays silent, so that the library does not end the
        // call.
        let inner = Endpoint::from_shared(format!("http://{at}")).unwrap().connect().await.unwrap();
        let mut channel = Channel::new(inner, gone);
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
        let error = channel.call(Request::new(Body::empty())).await.unwrap_err();
        let error = error.downcast::<io::Error>().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }
}
