//! Why an answer is missing, or is not the wanted one.

use std::io;
use std::net::SocketAddr;

use serde_json::Value;

use super::REQUEST_MAX;

/// Characters of an answer that an error quotes.
const QUOTE_MAX: usize = 300;

/// Why the answer is missing, or is not the wanted one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The own credentials are not there, or unreadable.
    #[error("cannot use {what}")]
    Credentials {
        /// The file, or what was made of it.
        what: String,
        /// Why.
        source: anyhow::Error,
    },
    /// The server does not listen, or closes the connection.
    #[error("cannot connect to {address}")]
    Connect {
        /// The server.
        address: SocketAddr,
        /// The error of the kernel, or of the other end.
        source: io::Error,
    },
    /// It does not speak HTTP.
    #[error("no answer from {address}")]
    Http {
        /// The server.
        address: SocketAddr,
        /// The error of the library.
        source: anyhow::Error,
    },
    /// The request timed out.
    #[error("{address} does not answer within {} seconds", REQUEST_MAX.as_secs())]
    Silent {
        /// The server.
        address: SocketAddr,
    },
    /// It answers with more than is read.
    #[error("the answer of {address} with status {status} is too long")]
    Long {
        /// The server.
        address: SocketAddr,
        /// The status code of HTTP.
        status: u16,
    },
    /// It answers with an error.
    #[error("{address} answers {status}: {said}")]
    Refused {
        /// The server.
        address: SocketAddr,
        /// The status code of HTTP.
        status: u16,
        /// The beginning of its message.
        said: String,
    },
}

impl Error {
    /// The error for an answer with this content.
    pub(crate) fn refused(address: SocketAddr, status: u16, body: &[u8]) -> Self {
        Self::Refused { address, status, said: said(body) }
    }
}

/// The message in an answer: that of a Kubernetes `Status`, or the beginning of the text.
fn said(body: &[u8]) -> String {
    let status: Option<Value> = serde_json::from_slice(body).ok();
    let message = status.as_ref().and_then(|status| status["message"].as_str().map(str::to_owned));
    let text = message.unwrap_or_else(|| failed_checks(&String::from_utf8_lossy(body)));
    text.chars().take(QUOTE_MAX).collect()
}

/// The checks that failed, where the answer lists checks (`[-]etcd failed: ...`).
fn failed_checks(text: &str) -> String {
    let failed: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("[-]")).collect();
    if failed.is_empty() { text.trim().to_owned() } else { failed.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_quotes_the_message_of_the_server() {
        let status =
            br#"{"kind":"Status","status":"Failure","message":"forbidden: no","code":403}"#;
        assert_eq!(said(status), "forbidden: no");
        assert_eq!(
            said(b"[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed\n"),
            "etcd failed: reason withheld"
        );
        assert_eq!(said(b"404 page not found\n"), "404 page not found");
        assert_eq!(said(&[0xff; 1000]).chars().count(), QUOTE_MAX);
    }
}
