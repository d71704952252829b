//! Requests that follow each other, over one connection where that lives.

use std::pin::{Pin, pin};
use std::sync::{Mutex, PoisonError};

use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{ANSWER_MAX, Answer, Api, Error, JSON, MERGE_PATCH, Pipe, REQUEST_MAX, parse};
use crate::objects::{FIELD_MANAGER, Object};

/// Bytes of an answer with one object: etcd holds 1.5 MiB of it at most, and its text may be
/// several times as long.
pub(super) const OBJECT_MAX: usize = 16 << 20;

/// The answer to a certificate that is not valid any more.
const UNAUTHORIZED: u16 = 401;

/// A connection, and the way to send requests over it.
type Open = (SendRequest<Full<Bytes>>, Pin<Box<Pipe>>);

/// Requests that follow each other, each over the connection of the one before: a TLS handshake is
/// more work than most answers, and half of it is that of the server. Two requests at once have a
/// connection each.
pub(crate) struct Session {
    api: Api,
    /// The connection, between two requests.
    open: Mutex<Option<Open>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({:?})", self.api)
    }
}

/// The same server, and no connection to it yet.
impl Clone for Session {
    fn clone(&self) -> Self {
        Self::new(&self.api)
    }
}

impl Session {
    pub(crate) fn new(api: &Api) -> Self {
        Self { api: api.clone(), open: Mutex::default() }
    }

    /// Closes the connection: no request follows for a while, and the next one reads the
    /// credentials anew.
    pub(crate) fn close(&self) {
        drop(self.take());
    }

    /// Fails unless the server answers `path` with success.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(crate) async fn check(&self, path: &str) -> Result<(), Error> {
        match self.get(path).await {
            // A success needs no content.
            Err(Error::Long { status: 200..=299, .. }) => Ok(()),
            answer => self.api.succeeded(&answer?),
        }
    }

    /// Reads an object; `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(crate) async fn read(&self, path: &str) -> Result<Option<Value>, Error> {
        let answer = self.get(path).await?;
        if answer.status == 404 {
            return Ok(None);
        }
        self.api.succeeded(&answer)?;
        parse(&answer.body).map(Some).map_err(|error| self.api.http(error))
    }

    async fn get(&self, path: &str) -> Result<Answer, Error> {
        self.request(Method::GET, path, &[], Vec::new(), ANSWER_MAX).await
    }

    /// Applies an object (server-side apply), and takes its fields over from other managers.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(crate) async fn apply(&self, object: &Object) -> Result<(), Error> {
        let path = format!("{}?fieldManager={FIELD_MANAGER}&force=true", object.path);
        let kind = "application/apply-patch+yaml";
        let answer = self.send(Method::PATCH, &path, kind, &object.content).await?;
        self.api.succeeded(&answer)
    }

    /// Reads the objects of a list in the form `accept`, `page` of them at a time or fewer where
    /// they are long, and keeps what `read` takes of each. `path` may have a query.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(crate) async fn list<T>(
        &self,
        path: &str,
        accept: &str,
        page: usize,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let and = if path.contains('?') { '&' } else { '?' };
        let (mut found, mut rest, mut page) = (Vec::new(), String::new(), page);
        loop {
            let asked = format!("{path}{and}limit={page}{rest}");
            let max = if page > 1 { ANSWER_MAX } else { OBJECT_MAX };
            let accept = [(ACCEPT.as_str(), accept)];
            let answer = match self.request(Method::GET, &asked, &accept, Vec::new(), max).await {
                Err(Error::Long { .. }) if page > 1 => {
                    page /= 2;
                    continue;
                }
                answer => answer?,
            };
            self.api.succeeded(&answer)?;
            let list = parse(&answer.body).map_err(|error| self.api.http(error))?;
            found.extend(list["items"].as_array().into_iter().flatten().filter_map(&read));
            match list["metadata"]["continue"].as_str() {
                Some(token) if !token.is_empty() => rest = format!("&continue={token}"),
                _ => return Ok(found),
            }
        }
    }

    /// Deletes an object, if it still has this UID and this version. Returns whether it was
    /// deleted: it may be gone already, or have changed.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(crate) async fn delete(&self, path: &str, uid: &str, version: &str) -> Result<bool, Error> {
        let options = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, "resourceVersion": version},
        });
        let answer = self.send(Method::DELETE, path, JSON, &options).await?;
        match answer.status {
            404 | 409 => Ok(false),
            _ => self.api.succeeded(&answer).map(|()| true),
        }
    }

    /// Changes the fields of an object that this merge patch has, if the object still has the UID
    /// and the version in it. Returns whether it was changed: it may be gone, or have changed
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(crate) async fn merge(&self, path: &str, patch: &Value) -> Result<bool, Error> {
        let answer = self.send(Method::PATCH, path, MERGE_PATCH, patch).await?;
        match answer.status {
            404 | 409 => Ok(false),
            _ => self.api.succeeded(&answer).map(|()| true),
        }
    }

    /// Sends a JSON document.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        content: &Value,
    ) -> Result<Answer, Error> {
        let kind = [(CONTENT_TYPE.as_str(), kind)];
        self.request(method, path, &kind, content.to_string().into_bytes(), ANSWER_MAX).await
    }

    /// Makes one request, whose answer is at most `max` bytes long.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
        max: usize,
    ) -> Result<Answer, Error> {
        let request = self.api.prepared(method, path, headers, body)?;
        let silent = |_elapsed| Error::Silent { address: self.api.address };
        timeout(REQUEST_MAX, Box::pin(self.ask(request, max))).await.map_err(silent)?
    }

    async fn ask(&self, request: Request<Full<Bytes>>, max: usize) -> Result<Answer, Error> {
        let open = match self.kept().await {
            Some(kept) => kept,
            None => {
                let (sender, pipe) = self.api.dial().await?;
                (sender, Box::pin(pipe))
            }
        };
        let (answer, open) = self.over_kept(open, request, max).await?;
        // A certificate that is refused now is refused for as long as the connection lives.
        let open = open.filter(|_open| answer.status != UNAUTHORIZED);
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = open;
        Ok(answer)
    }

    /// Sends a request, and reads its answer, which is at most `max` bytes long.
    async fn over(
        &self,
        sender: &mut SendRequest<Full<Bytes>>,
        request: Request<Full<Bytes>>,
        max: usize,
    ) -> Result<Answer, Error> {
        let answer = sender.send_request(request).await.map_err(|error| self.api.http(error))?;
        let (parts, body) = answer.into_parts();
        let status = parts.status.as_u16();
        match Limited::new(body, max).collect().await {
            Ok(body) => Ok(Answer { status, body: body.to_bytes().to_vec() }),
            Err(error) if error.is::<LengthLimitError>() => {
                Err(Error::Long { address: self.api.address, status })
            }
            Err(error) => Err(self.api.http(anyhow::anyhow!(error))),
        }
    }

    /// The same over a connection that later requests may use, too. Returns it with the answer,
    /// unless it has ended.
    async fn over_kept(
        &self,
        (mut sender, mut pipe): Open,
        request: Request<Full<Bytes>>,
        max: usize,
    ) -> Result<(Answer, Option<Open>), Error> {
        let (answer, pipe) = {
            let mut asked = pin!(self.over(&mut sender, request, max));
            tokio::select! {
                // Cancel-safe, both: a request that is cut off ends its connection.
                answer = asked.as_mut() => (answer?, Some(pipe)),
                _ended = pipe.as_mut() => {
                    // What has arrived is read all the same. A request that the connection had
                    // not taken when it ended fails with it: otherwise it would have no end.
                    drop(pipe);
                    (asked.await?, None)
                }
            }
        };
        Ok((answer, pipe.map(|pipe| (sender, pipe))))
    }

    /// The connection of the last request, unless the server has closed it.
    async fn kept(&self) -> Option<Open> {
        let (mut sender, mut pipe) = self.take()?;
        let lives = tokio::select! {
            biased;
            // Cancel-safe, both: the connection is given up.
            _ended = pipe.as_mut() => false,
            ready = sender.ready() => ready.is_ok(),
        };
        lives.then_some((sender, pipe))
    }

    fn take(&self) -> Option<Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
