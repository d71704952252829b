//! Fuzz target of the answers of a metadata service: the whole bytes of a connection.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use polis_fuzz::{Accepted, Target};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::*;

/// A connection to a server that answers with these bytes once it was asked.
struct Canned<'a> {
    answer: &'a [u8],
    asked: bool,
    waiting: Option<Waker>,
}

impl AsyncRead for Canned<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.asked {
            self.waiting = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let (next, rest) = self.answer.split_at(self.answer.len().min(buffer.remaining()));
        buffer.put_slice(next);
        self.answer = rest;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Canned<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.asked = true;
        self.waiting.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[test]
fn answers_of_metadata_services() {
    let samples = [
        "HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\npolis-parameters-v1:YWJj",
        "HTTP/1.1 200 OK\r\nServer: EC2ws\r\nTransfer-Encoding: chunked\r\n\r\n\
         4\r\nYWJj\r\n0\r\n\r\n",
        "HTTP/1.0 404 Not Found\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nnone",
        "HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (ask, _encoding) = question(Platform::Azure, None);
    let ask = Ask { body_max: 64, ..ask };
    Target::new("machine.metadata").samples(samples.map(|text| text.as_bytes().to_vec())).run(
        |input| {
            let stream = Canned { answer: input, asked: false, waiting: None };
            let answer = runtime.block_on(exchange::exchange(stream, "169.254.169.254", &ask));
            let Ok((_status, body)) = answer else { return Accepted::No };
            assert!(body.len() <= ask.body_max && body.len() <= input.len());
            for encoding in [Encoding::Plain, Encoding::Base64] {
                if let Ok(Some(bytes)) = content(&body, encoding) {
                    assert!(!bytes.is_empty() && bytes.len() <= body.len());
                }
            }
            let _token = token_of(&body);
            Accepted::Yes
        },
    );
}
