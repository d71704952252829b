//! Health checks over plain HTTP, of the parts that answer so on loopback: kubelet,
//! kube-proxy and CoreDNS.

use std::net::SocketAddr;
use std::time::Duration;

use http::Request;
use http::header::HOST;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::api::Error;

/// A check of a program on this machine takes milliseconds.
const REQUEST_MAX: Duration = Duration::from_secs(10);

/// Bytes of an answer that are read.
const ANSWER_MAX: usize = 64 << 10;

/// Characters of an answer that an error quotes.
const QUOTE_MAX: usize = 300;

/// Fails unless the server answers `path` with success.
///
/// # Errors
///
/// [`Error`].
pub(super) async fn check(address: SocketAddr, path: &str) -> Result<(), Error> {
    let silent = |_elapsed| Error::Silent { address };
    timeout(REQUEST_MAX, exchange(address, path)).await.map_err(silent)?
}

async fn exchange(address: SocketAddr, path: &str) -> Result<(), Error> {
    let connect = |source| Error::Connect { address, source };
    let http = |source: anyhow::Error| Error::Http { address, source };
    let tcp = TcpStream::connect(address).await.map_err(connect)?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(tcp)).await;
    let (mut sender, connection) = handshake.map_err(|error| http(error.into()))?;
    let request = Request::get(path).header(HOST, address.to_string());
    let request = request.body(Empty::<Bytes>::new()).map_err(|error| http(error.into()))?;
    let asked = async move {
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, ANSWER_MAX).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        Ok((parts.status, body))
    };
    // The connection ends with its only sender; its errors are those of the request.
    let (_ended, answer) = tokio::join!(connection, asked);
    let (status, body) = answer.map_err(http)?;
    if status.is_success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&body).trim().chars().take(QUOTE_MAX).collect();
    Err(Error::Refused { address, status: status.as_u16(), said })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    async fn answered(answer: &'static str) -> Result<(), Error> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async {
            let (mut stream, _from) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).await.unwrap();
            assert!(request[..length].starts_with(b"GET /healthz HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).await.unwrap();
        };
        tokio::join!(check(address, "/healthz"), serve).0
    }

    #[tokio::test]
    async fn a_check_succeeds_with_the_answer_and_quotes_a_failure() {
        answered("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
        let failed = "HTTP/1.1 503 No\r\nContent-Length: 9\r\n\r\nno sync\r\n";
        let error = answered(failed).await.unwrap_err().to_string();
        assert!(error.ends_with("answers 503: no sync"), "{error}");
        assert!(matches!(answered("noise\r\n\r\n").await, Err(Error::Http { .. })));
    }
}
