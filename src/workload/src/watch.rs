//! A watch of one kind of objects: everything that exists, then every change.
//!
//! The API server answers a watch without a resource version with an event for each object
//! that exists, and goes on with changes. So a reader needs no list: it starts a watch, and
//! another one when that ends, and has seen everything each time. An object is one line, and
//! only one line at a time is held.
//!
//! Invariants:
//! - A line of more than [`LINE_MAX`] bytes is left out, and the watch goes on.
//! - No depth of the `managedFields` of an object ends the watch.
//! - [`Watch::next`] is cancel-safe.

use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use http::Method;
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Bytes, Incoming};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::warn;

use super::api::{Api, Error, Pipe, parse};

/// How long a watch goes on before it begins anew, and sees again what it missed, or what
/// failed.
const LIFE: Duration = Duration::from_secs(300);

/// The server ends a watch itself; one that has not by then hangs. One that has lost its power is
/// noticed sooner, by its connection ([`Api::connect`]).
const LIFE_MAX: Duration = Duration::from_secs(330);

/// The server begins to answer within this.
const OPEN_MAX: Duration = Duration::from_secs(20);

/// The longest line: etcd holds objects of 1.5 MiB at most, and JSON is somewhat longer.
const LINE_MAX: usize = 4 << 20;

/// Bytes of an answer other than a watch.
const ANSWER_MAX: usize = 64 << 10;

/// The change of an object.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    /// It exists, as it is now.
    Is(Value),
    /// It is gone; this was its last state.
    Gone(Value),
}

/// A watch that goes on.
pub(super) struct Watch {
    /// Moves the bytes; `None` once it has ended.
    pipe: Option<Pin<Box<Pipe>>>,
    body: Incoming,
    lines: Lines,
    deadline: Instant,
    address: SocketAddr,
}

impl Watch {
    /// Starts a watch of the objects at `path`, which has no query.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(super) async fn open(api: &Api, path: &str) -> Result<Self, Error> {
        let silent = |_elapsed| Error::Silent { address: api.address };
        timeout(OPEN_MAX, Box::pin(Self::ask(api, path))).await.map_err(silent)?
    }

    async fn ask(api: &Api, path: &str) -> Result<Self, Error> {
        let address = api.address;
        let http = |source: anyhow::Error| Error::Http { address, source };
        let (mut sender, pipe) = api.dial().await?;
        let mut pipe = Box::pin(pipe);
        let path = format!("{path}?watch=true&timeoutSeconds={}", LIFE.as_secs());
        let answer = sender.send_request(api.prepared(Method::GET, &path, &[], Vec::new())?);
        let answer = tokio::select! {
            // Cancel-safe, both: the request is given up with the connection.
            answer = answer => answer.map_err(|error| http(error.into()))?,
            ended = pipe.as_mut() => {
                let closed = anyhow::anyhow!("the connection was closed");
                return Err(http(ended.err().map_or(closed, Into::into)));
            }
        };
        let (parts, body) = answer.into_parts();
        if parts.status.is_success() {
            let deadline = Instant::now() + LIFE_MAX;
            return Ok(Self { pipe: Some(pipe), body, lines: Lines::default(), deadline, address });
        }
        let said = Limited::new(body, ANSWER_MAX).collect();
        let (_ended, said) = tokio::join!(pipe, said);
        let said = said.map_err(|error| http(anyhow::anyhow!(error)))?.to_bytes();
        Err(Error::refused(address, parts.status.as_u16(), &said))
    }

    /// The next event; `None` at the end of the watch. Cancel-safe: received bytes stay.
    ///
    /// # Errors
    ///
    /// [`Error::Http`], and [`Error::Refused`] for an error of the server within the watch.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, Error> {
        let address = self.address;
        let http = |source: anyhow::Error| Error::Http { address, source };
        loop {
            while let Some(line) = self.lines.next() {
                let mut line = parse(&line).map_err(|error| http(error.into()))?;
                let object = line["object"].take();
                match line["type"].as_str().unwrap_or_default() {
                    "ADDED" | "MODIFIED" => return Ok(Some(Event::Is(object))),
                    "DELETED" => return Ok(Some(Event::Gone(object))),
                    "ERROR" => {
                        let status = object["code"].as_u64().and_then(|code| code.try_into().ok());
                        let said = object.to_string();
                        return Err(Error::refused(
                            address,
                            status.unwrap_or_default(),
                            said.as_bytes(),
                        ));
                    }
                    _ => {}
                }
            }
            let Ok(frame) = timeout_at(self.deadline, self.frame()).await else { return Ok(None) };
            let Some(frame) = frame else { return Ok(None) };
            let frame = frame.map_err(|error| http(error.into()))?;
            if let Ok(data) = frame.into_data() {
                self.lines.push(&data);
            }
        }
    }

    /// The next part of the body. Cancel-safe.
    async fn frame(&mut self) -> Option<Result<hyper::body::Frame<Bytes>, hyper::Error>> {
        loop {
            let Some(pipe) = self.pipe.as_mut() else { return self.body.frame().await };
            tokio::select! {
                // Cancel-safe, both: they hold nothing that the next call does not find.
                frame = self.body.frame() => return frame,
                _ended = pipe.as_mut() => self.pipe = None,
            }
        }
    }
}

/// The lines of a stream.
#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
    /// Where the search for the end of a line goes on.
    seen: usize,
    /// The line is too long, and its rest is left out.
    skipping: bool,
}

impl Lines {
    fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    /// The next whole line that is not too long.
    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let end = self.bytes[self.seen..].iter().position(|byte| *byte == b'\n');
            let Some(end) = end.map(|end| end + self.seen) else {
                self.seen = self.bytes.len();
                if self.skipping || self.bytes.len() > LINE_MAX {
                    if !self.skipping {
                        warn!(bytes = self.bytes.len(), "an object is too long, and is left out");
                    }
                    self.skipping = true;
                    self.bytes = Vec::new();
                    self.seen = 0;
                }
                return None;
            };
            let line: Vec<_> = self.bytes.drain(..=end).collect();
            self.seen = 0;
            if !std::mem::take(&mut self.skipping) && line.len() <= LINE_MAX {
                return Some(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::record;
    use crate::api::tests::asked;

    #[tokio::test]
    async fn an_object_that_is_nested_deeply_ends_no_watch() {
        let line = |name: &str, depth: usize| {
            let metadata = format!(r#"{{"managedFields":{},"name":"{name}"}}"#, record(depth));
            format!(r#"{{"type":"ADDED","object":{{"metadata":{metadata}}}}}"#) + "\n"
        };
        let body = line("deep", 200) + &line("other", 1);
        let names = asked(
            |_path| body.clone(),
            async |api| {
                let mut watch = Watch::open(api, "/claims").await.unwrap();
                let mut names = Vec::new();
                while let Some(event) = watch.next().await.unwrap() {
                    let Event::Is(object) = event else { panic!("{event:?}") };
                    names.push(object["metadata"]["name"].clone());
                }
                names
            },
        );
        assert_eq!(names.await, ["deep", "other"]);
    }

    fn all(lines: &mut Lines) -> Vec<String> {
        std::iter::from_fn(|| lines.next()).map(|one| String::from_utf8(one).unwrap()).collect()
    }

    #[test]
    fn lines_are_whole_whatever_the_pieces_are() {
        let mut lines = Lines::default();
        lines.push(b"a");
        assert_eq!(all(&mut lines), [""; 0]);
        lines.push(b"b\ncd\ne");
        assert_eq!(all(&mut lines), ["ab\n", "cd\n"]);
        lines.push(b"\n");
        assert_eq!(all(&mut lines), ["e\n"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_left_out_and_no_other() {
        let mut lines = Lines::default();
        lines.push(b"a\n");
        for _piece in 0..3 {
            lines.push(&vec![b'x'; LINE_MAX]);
            let _read = lines.next();
            assert!(lines.bytes.len() <= LINE_MAX, "it is not held");
        }
        lines.push(b"x\nb\n");
        assert_eq!(all(&mut lines), ["b\n"]);
        // In one piece, with its end.
        let mut long = vec![b'x'; LINE_MAX + 1];
        long.extend_from_slice(b"\nc\n");
        lines.push(&long);
        assert_eq!(all(&mut lines), ["c\n"]);
    }
}
