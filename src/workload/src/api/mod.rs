//! The HTTPS client for the parts of Kubernetes on this machine: health checks, and changes
//! of the cluster's own objects.
//!
//! By HTTP/1.1 over TLS 1.3: [`Api`] asks over one connection for each request, and [`Session`]
//! over one for requests that follow each other. Credentials are read from their files for each
//! connection, so a renewed certificate is used at once. The few kinds of requests that the node
//! makes need no client library of Kubernetes.
//!
//! Invariants:
//! - A request ends within [`REQUEST_MAX`], and an answer is at most [`ANSWER_MAX`] long, or one
//!   object of a list at most [`session::OBJECT_MAX`].
//! - However long the objects of a list are, and however deeply their `managedFields` are nested,
//!   it is read: people with few rights make such objects.
//! - A connection ends within half a minute after its server has lost its power
//!   ([`set_options`]), also where it only waits for what the server sends next.

mod connection;
mod error;
mod parsing;
mod session;

use std::net::SocketAddr;
use std::time::Duration;

use http::header::HOST;
use http::{Method, Request};
use http_body_util::Full;
use hyper::body::Bytes;

use polis_base::files::{File, Pair};

#[cfg(test)]
pub(super) use connection::timeouts;
pub(super) use connection::{Pipe, open, set_options};
pub use error::Error;
pub(super) use parsing::parse;
#[cfg(test)]
pub(super) use parsing::tests::record;
pub(super) use session::Session;

/// A local server answers in milliseconds; one that waits for etcd needs up to ten seconds.
const REQUEST_MAX: Duration = Duration::from_secs(20);

/// Bytes of an answer that are read.
const ANSWER_MAX: usize = 4 << 20;

/// The type of a JSON document.
pub(super) const JSON: &str = "application/json";

/// The same of a list of objects of which the server sends the metadata alone.
pub(super) const METADATA: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// The type of a change of some fields of an object.
pub(super) const MERGE_PATCH: &str = "application/merge-patch+json";

/// The way to one server on this machine.
#[derive(Clone, Debug)]
pub struct Api {
    /// Where it listens.
    pub address: SocketAddr,
    /// The authority that signed its certificate.
    pub ca: File,
    /// The certificate of the caller; `None` for an anonymous one.
    pub client: Option<Pair>,
}

/// An answer.
#[derive(Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code of HTTP.
    pub status: u16,
    /// The content.
    pub body: Vec<u8>,
}

/// Bodies may hold Secrets: only their length is shown.
impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({}, {} bytes)", self.status, self.body.len())
    }
}

/// Each request here is the only one of its session.
impl Api {
    /// Reads `path`.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub async fn get(&self, path: &str) -> Result<Answer, Error> {
        self.request(Method::GET, path, &[], Vec::new()).await
    }

    /// Fails unless the server answers `path` with success.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn check(&self, path: &str) -> Result<(), Error> {
        Session::new(self).check(path).await
    }

    /// Makes one request.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<Answer, Error> {
        Session::new(self).request(method, path, headers, body, ANSWER_MAX).await
    }

    /// Fails unless an answer is a success.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`].
    pub(super) fn succeeded(&self, answer: &Answer) -> Result<(), Error> {
        match (200..300).contains(&answer.status) {
            true => Ok(()),
            false => Err(Error::refused(self.address, answer.status, &answer.body)),
        }
    }

    /// A request with these headers and this content.
    ///
    /// # Errors
    ///
    /// [`Error::Http`], for a path or a header that is not one.
    pub(super) fn prepared(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, Error> {
        let mut request = Request::builder().method(method).uri(path);
        request = request.header(HOST, self.address.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Full::new(Bytes::from(body))).map_err(|error| self.http(error))
    }

    /// The error for one of the library.
    fn http(&self, source: impl Into<anyhow::Error>) -> Error {
        Error::Http { address: self.address, source: source.into() }
    }
}

#[cfg(test)]
pub(super) mod tests;
