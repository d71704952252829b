//! A tunnel through an HTTP proxy: asks the proxy for a connection to a server (CONNECT, RFC 9110).
//!
//! ```text
//! TCP to the proxy --CONNECT HOST:PORT--> 200 --> the same TCP, now to the server
//! ```
//!
//! Invariants:
//! - The proxy receives the server's host and port, and no other data of the caller in the clear.
//! - The head of an answer is read up to [`HEAD_MAX`] within [`ANSWER_MAX`], and no body.
//! - Nothing that the proxy itself sends is taken for a byte of the server: TLS begins with the
//!   client.
//!
//! What this module does not do: find or reach the proxy, or speak TLS (`outside`).

use std::pin::pin;
use std::time::Duration;

use futures::FutureExt as _;
use http::header::{HOST, USER_AGENT};
use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1::Builder;
use hyper::upgrade::{self, Parts};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::endpoint::Endpoint;

/// A proxy connects to the server within this time.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Bytes of the head of an answer.
const HEAD_MAX: usize = 16 << 10;
/// Lines in the head of an answer. Real ones have five.
const HEADERS_MAX: usize = 64;

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request cannot be written.
    #[error("the request cannot be made")]
    Request(#[source] http::Error),
    /// Not HTTP, too long, or the connection was lost.
    #[error("its answer cannot be read as HTTP")]
    Http(#[source] hyper::Error),
    /// It answers 407.
    #[error("it requires authentication, which is not supported")]
    User,
    /// It refuses, or does not reach the server.
    #[error("it answers {status}")]
    Refused {
        /// Its answer.
        status: StatusCode,
    },
    /// It sends bytes of its own behind the answer.
    #[error("it sends data before the server is asked")]
    Early,
    /// It closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// It took too long.
    #[error("it does not answer within {} seconds", ANSWER_MAX.as_secs())]
    Silent,
}

/// Asks the proxy at the other end of `tcp` for a tunnel; the returned connection ends at the
/// server.
///
/// # Errors
///
/// [`Error`].
pub async fn open(tcp: TcpStream, server: &Endpoint) -> Result<TcpStream, Error> {
    timeout(ANSWER_MAX, ask(tcp, server)).await.map_err(|_elapsed| Error::Silent)?
}

async fn ask(tcp: TcpStream, server: &Endpoint) -> Result<TcpStream, Error> {
    let mut builder = Builder::new();
    builder.max_buf_size(HEAD_MAX).max_headers(HEADERS_MAX);
    let connected = builder.handshake(TokioIo::new(tcp)).await;
    let (mut sender, connection) = connected.map_err(Error::Http)?;
    let place = server.to_string();
    let request = Request::connect(place.as_str())
        .header(HOST, place.as_str())
        .header(USER_AGENT, "polis")
        .body(Empty::<Bytes>::new())
        .map_err(Error::Request)?;
    let asked = async {
        let response = sender.send_request(request).await.map_err(Error::Http)?;
        match response.status() {
            StatusCode::OK => upgrade::on(response).await.map_err(Error::Http),
            StatusCode::PROXY_AUTHENTICATION_REQUIRED => Err(Error::User),
            status => Err(Error::Refused { status }),
        }
    };
    let (mut asked, mut connection) = (pin!(asked), pin!(connection.with_upgrades()));
    let upgraded = tokio::select! {
        biased;
        // Cancel-safe, both: nothing of an attempt is kept.
        answer = &mut asked => answer?,
        // The proxy has answered, or closed the connection.
        ended = &mut connection => match asked.now_or_never() {
            Some(answer) => answer?,
            None => return Err(ended.err().map_or(Error::Closed, Error::Http)),
        },
    };
    let parts = upgraded.downcast::<TokioIo<TcpStream>>().map_err(|_other| Error::Closed)?;
    let Parts { io, read_buf, .. } = parts;
    if read_buf.is_empty() { Ok(io.into_inner()) } else { Err(Error::Early) }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// The other end of a connection at the proxy, with the request that it received.
    struct Asked {
        tcp: TcpStream,
        request: String,
    }

    async fn accepted(listener: &TcpListener) -> Asked {
        let (mut tcp, _from) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            assert!(tcp.read_buf(&mut request).await.unwrap() > 0, "the request is whole");
        }
        Asked { tcp, request: String::from_utf8(request).unwrap() }
    }

    fn server() -> Endpoint {
        Endpoint { host: "logs.example".to_owned(), port: 4318 }
    }

    /// The result of a request to a proxy that answers so, and its end of the connection.
    async fn answered(answer: &[u8]) -> (Result<TcpStream, Error>, Asked) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = async { open(TcpStream::connect(address).await.unwrap(), &server()).await };
        let proxy = async {
            let mut asked = accepted(&listener).await;
            // A client may be gone before the end of a long answer.
            let _gone = asked.tcp.write_all(answer).await;
            let _gone = asked.tcp.shutdown().await;
            asked
        };
        tokio::join!(client, proxy)
    }

    #[tokio::test]
    async fn a_proxy_learns_host_and_port_and_carries_the_rest() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = async {
            let tcp = TcpStream::connect(address).await.unwrap();
            let mut tunnel = open(tcp, &server()).await.unwrap();
            tunnel.write_all(b"hello").await.unwrap();
            let mut answer = [0; 5];
            tunnel.read_exact(&mut answer).await.unwrap();
            answer
        };
        let proxy = async {
            let Asked { mut tcp, request } = accepted(&listener).await;
            // Word for word, and in pieces.
            for piece in [&b"HTTP/1.1 200 Conn"[..], b"ection established\r\nVia: a\r\n\r", b"\n"] {
                tcp.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            let mut hello = [0; 5];
            tcp.read_exact(&mut hello).await.unwrap();
            tcp.write_all(&hello).await.unwrap();
            request
        };
        let (answer, request) = tokio::join!(client, proxy);
        assert_eq!(&answer, b"hello");
        let request = request.to_ascii_lowercase();
        let mut lines: Vec<_> = request.trim_end().split("\r\n").collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            ["connect logs.example:4318 http/1.1", "host: logs.example:4318", "user-agent: polis"]
        );
    }

    #[tokio::test]
    async fn a_proxy_that_refuses_says_why() {
        let (refused, _asked) = answered(b"HTTP/1.1 403 Forbidden\r\n\r\n").await;
        let refused = refused.unwrap_err();
        assert!(refused.to_string().contains("403 Forbidden"), "{refused}");
        let answer = b"HTTP/1.1 407 Proxy Authentication Required\r\n\
                       Proxy-Authenticate: Basic realm=\"a\"\r\nContent-Length: 9\r\n\r\nforbidden";
        let (refused, _asked) = answered(answer).await;
        assert!(matches!(refused, Err(Error::User)), "{refused:?}");
        // Only this one is a tunnel.
        for status in ["101 Switching Protocols", "204 No Content", "302 Found"] {
            let answer = format!("HTTP/1.1 {status}\r\nLocation: http://a/\r\n\r\n");
            let (refused, _asked) = answered(answer.as_bytes()).await;
            assert!(refused.is_err(), "{status}");
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_not_one_makes_no_tunnel() {
        let long = format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "a".repeat(2 * HEAD_MAX));
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "A: a\r\n".repeat(2 * HEADERS_MAX));
        let garbage = [0x16, 3, 1, 0, 0xff, b'\r', b'\n', b'\r', b'\n'];
        for answer in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n",
            b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
            &garbage,
            long.as_bytes(),
            many.as_bytes(),
        ] {
            let (refused, _asked) = answered(answer).await;
            let shown = String::from_utf8_lossy(&answer[..answer.len().min(40)]).into_owned();
            assert!(matches!(refused, Err(Error::Http(_) | Error::Closed)), "{shown}: {refused:?}");
        }
    }

    #[tokio::test]
    async fn bytes_of_the_proxy_are_not_taken_for_those_of_the_server() {
        let (refused, _asked) = answered(b"HTTP/1.1 200 OK\r\n\r\n\x15\x03\x03").await;
        assert!(matches!(refused, Err(Error::Early)), "{refused:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_proxy_that_does_not_answer_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (_silent, _from) = listener.accept().await.unwrap();
        let refused = open(tcp, &server()).await;
        assert!(matches!(refused, Err(Error::Silent)), "{refused:?}");
    }
}
