//! One request by HTTP/1.1 to a node: the same certificates and checks as for gRPC.
//!
//! `polisctl` calls the gateway of a Kubernetes controller with it.
//!
//! Invariants:
//! - A request ends within [`REQUEST_MAX`], and an answer is at most [`ANSWER_MAX`] long.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use http::header::HOST;
use http::{Method, Request};
use hyper::body::{Body as _, Incoming};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tonic::body::Body;

use super::dial::{self, Expect, Secure, Trust};
use crate::endpoint::at;
use crate::identity::NodeId;
use crate::rpc::tls::Credentials;

/// Longest that a request may take, the connection included.
const REQUEST_MAX: Duration = Duration::from_secs(20);

/// Bytes of an answer that are read.
const ANSWER_MAX: usize = 16 << 20;

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The node that gave it.
    pub node: NodeId,
    /// The status code of HTTP.
    pub status: u16,
    /// The content.
    pub body: Vec<u8>,
}

/// The reason why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed.
    #[error(transparent)]
    Dial(#[from] dial::Error),
    /// The other end does not speak HTTP, or stopped in the middle.
    #[error("no answer from {}", at(host, *port))]
    Http {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The library's error.
        source: hyper::Error,
    },
    /// The path is invalid.
    #[error("{path:?} is not a valid path")]
    Path {
        /// The path.
        path: String,
        /// The library's error.
        source: http::Error,
    },
    /// The deadline has passed.
    #[error("{} does not answer within {} seconds", at(host, *port), REQUEST_MAX.as_secs())]
    Silent {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// The answer is too long.
    #[error("{} answers with more than {ANSWER_MAX} bytes", at(host, *port))]
    TooLong {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Reads `path` from the node at `host`, a name or an address.
///
/// # Errors
///
/// [`Error`]; an answer with an error is an answer.
pub async fn get(
    host: &str,
    port: u16,
    expect: Expect,
    trust: &Trust,
    credentials: &Credentials,
    path: &str,
) -> Result<Answer, Error> {
    let silent = |_elapsed| Error::Silent { host: host.to_owned(), port };
    // On the heap: a handshake is large.
    let exchange = Box::pin(exchange(host, port, expect, trust, credentials, path));
    timeout(REQUEST_MAX, exchange).await.map_err(silent)?
}

async fn exchange(
    host: &str,
    port: u16,
    expect: Expect,
    trust: &Trust,
    credentials: &Credentials,
    path: &str,
) -> Result<Answer, Error> {
    let request = Request::builder()
        .method(Method::GET)
        .uri(path)
        .header(HOST, at(host, port))
        .body(Body::empty())
        .map_err(|source| Error::Path { path: path.to_owned(), source })?;
    let secured = dial::secured(host, port, expect, trust, Some(credentials), b"http/1.1");
    let Secure { tls, node, .. } = secured.await?;
    let http = |source| Error::Http { host: host.to_owned(), port, source };
    let io = TokioIo::new(tls);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.map_err(http)?;
    let asked = async move {
        let (parts, body) = sender.send_request(request).await.map_err(http)?.into_parts();
        let body = whole(body).await.map_err(http)?;
        let body = body.ok_or_else(|| Error::TooLong { host: host.to_owned(), port })?;
        Ok(Answer { node, status: parts.status.as_u16(), body })
    };
    // The connection ends with its only sender; its errors are those of the request.
    let (_ended, answer) = tokio::join!(connection, asked);
    answer
}

/// A whole body; `None` if it is too long.
async fn whole(mut body: Incoming) -> Result<Option<Vec<u8>>, hyper::Error> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let Ok(data) = frame?.into_data() else { continue };
        if bytes.len() + data.len() > ANSWER_MAX {
            return Ok(None);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Some(bytes))
}
