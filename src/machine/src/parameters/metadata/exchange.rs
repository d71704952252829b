//! One exchange of HTTP/1.1 in the clear, within bounds: what a metadata service speaks.
//!
//! ```text
//! stream --hyper--> status, and with 200 a body of at most `body_max` bytes
//! ```
//!
//! Invariants:
//! - No redirect is followed: a status is handed to the caller as it is.
//! - A body beyond its bound is not read to its end, and no head larger than [`HEAD_MAX`].
//!
//! What this module does not do: bound the time (`metadata`).

use http::header::{ACCEPT, HOST, HeaderValue, USER_AGENT};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// Bytes of the head of an answer, and of a piece of its body that is kept at a time.
const HEAD_MAX: usize = 16 << 10;

/// Lines in the head of an answer. Real ones have ten.
const HEADERS_MAX: usize = 64;

/// A request without a body.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) method: Method,
    pub(super) path: &'static str,
    /// The names in lower case, each with its value.
    pub(super) headers: Vec<(&'static str, HeaderValue)>,
    /// Bytes that the body of the answer may have.
    pub(super) body_max: usize,
}

/// Why there is no whole answer.
#[derive(Debug, thiserror::Error)]
pub(in crate::parameters) enum Error {
    /// The body is longer than its bound.
    #[error("its answer is too large")]
    TooLarge,
    /// The request cannot be written.
    #[error("the request cannot be made")]
    Request(#[from] http::Error),
    /// Not HTTP, cut short, or the connection was lost.
    #[error("its answer cannot be read as HTTP")]
    Http(#[from] hyper::Error),
    /// The body broke off.
    #[error("its answer breaks off")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Sends a request to `host` on a connection of its own, and reads the whole answer; of one with
/// another status than 200 not the body.
pub(super) async fn exchange<S>(
    stream: S,
    host: &str,
    ask: &Ask,
) -> Result<(StatusCode, Bytes), Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut builder = hyper::client::conn::http1::Builder::new();
    builder.max_buf_size(HEAD_MAX).max_headers(HEADERS_MAX);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
    let mut request = Request::builder()
        .method(&ask.method)
        .uri(ask.path)
        .header(HOST, host)
        .header(ACCEPT, "*/*")
        .header(USER_AGENT, "polis");
    for (name, value) in &ask.headers {
        request = request.header(*name, value);
    }
    let request = request.body(Empty::<Bytes>::new())?;
    let body_max = ask.body_max;
    let asked = async move {
        let (parts, body) = sender.send_request(request).await?.into_parts();
        if parts.status != StatusCode::OK {
            return Ok((parts.status, Bytes::new()));
        }
        if body.size_hint().lower() > body_max as u64 {
            return Err(Error::TooLarge);
        }
        match Limited::new(body, body_max).collect().await {
            Ok(body) => Ok((parts.status, body.to_bytes())),
            Err(error) if error.is::<LengthLimitError>() => Err(Error::TooLarge),
            Err(error) => Err(Error::Body(error)),
        }
    };
    // The connection ends with its only sender; its errors are those of the request.
    let (_ended, answer) = tokio::join!(connection, asked);
    answer
}
