//! The requests to a bucket.
//!
//! Each has a connection of its own: there are three in an hour, and none begins in the middle
//! of another.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use base64ct::{Base64, Encoding as _};
use futures::FutureExt as _;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::body::Outgoing;
use super::xml::{self, Page, Refusal};
use super::{Bucket, Credentials, Error, sign};
use crate::outside;
use polis_base::hex;

/// A store answers a request without content within this time, and takes or sends some of a
/// content.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Bytes a second of the slowest line that is waited for.
const PACE_MIN: u64 = 64 << 10;
/// Bytes of a listing: a thousand keys of the longest kind.
const LISTING_MAX: u64 = 4 << 20;
/// Bytes of a refusal that are read.
const REFUSAL_MAX: usize = 64 << 10;
/// Objects on one page of a listing, as every store gives them.
const PAGE: &str = "1000";
/// Objects of a listing: eleven years of them, one an hour.
const OBJECTS_MAX: usize = 100_000;
/// The header with the checksum of an object.
const CHECKSUM: &str = "x-amz-checksum-sha256";
const NO_TEXT: &str = "it is not text";

/// An object of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its key behind the prefix of the bucket.
    pub key: String,
    /// Its bytes.
    pub size: u64,
}

/// The way to a bucket.
#[derive(Clone, Debug)]
pub struct Client {
    /// The bucket.
    pub bucket: Bucket,
    /// The credentials that sign.
    pub credentials: Credentials,
    /// The file of the public authorities, in PEM.
    pub bundle: PathBuf,
    /// The clock of the signatures.
    pub clock: fn() -> SystemTime,
}

/// One request.
struct Call<'a> {
    method: Method,
    path: String,
    query: &'a [(&'a str, &'a str)],
    /// SHA-256 of the content, in hexadecimal digits.
    content: String,
    /// The same in Base64, for the store to keep beside the object.
    checksum: Option<String>,
    body: Outgoing,
    /// Counts the bytes of content in either direction.
    moved: Arc<AtomicU64>,
    limit: Duration,
    /// Bytes of the answer.
    size_max: u64,
}

/// Takes the bytes of an answer.
type Sink<'a> = &'a mut (dyn FnMut(&[u8]) -> io::Result<()> + Send);

impl Client {
    /// The objects whose keys begin so and are behind `after`, in the order of their keys. Keys
    /// are those behind the prefix of the bucket.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn list(&self, begin: &str, after: &str) -> Result<Vec<Object>, Error> {
        let own = &self.bucket.prefix;
        let begin = format!("{own}{begin}");
        let mut after = format!("{own}{after}");
        let mut objects = Vec::new();
        loop {
            let page = self.page(&begin, &after).await?;
            for listed in page.objects {
                // An honest store gives them in this order, and so the listing ends.
                if listed.key <= after || !listed.key.starts_with(&begin) {
                    return Err(self.unusable("its keys are not those that were asked for"));
                }
                let key = listed.key[own.len()..].to_owned();
                objects.push(Object { key, size: listed.size });
                after = listed.key;
            }
            if objects.len() > OBJECTS_MAX {
                return Err(self.unusable("more than 100,000 objects have this prefix"));
            }
            if !page.more {
                return Ok(objects);
            }
        }
    }

    async fn page(&self, begin: &str, after: &str) -> Result<Page, Error> {
        let mut query = vec![("list-type", "2"), ("max-keys", PAGE), ("prefix", begin)];
        if !after.is_empty() {
            query.push(("start-after", after));
        }
        let call = Call {
            method: Method::GET,
            path: format!("/{}", self.bucket.name),
            query: &query,
            content: sign::NOTHING.to_owned(),
            checksum: None,
            body: Outgoing::Empty,
            moved: Arc::default(),
            limit: ANSWER_MAX,
            size_max: LISTING_MAX,
        };
        let mut text = Vec::new();
        let mut sink = |bytes: &[u8]| {
            text.extend_from_slice(bytes);
            Ok(())
        };
        self.ask(call, &mut sink).await?;
        let text = String::from_utf8(text).map_err(|_not_text| self.unusable(NO_TEXT))?;
        let page = xml::page(&text).map_err(|why| self.unusable(&why))?;
        if page.more && page.objects.is_empty() {
            return Err(self.unusable("an empty page is not the last one"));
        }
        Ok(page)
    }

    /// Puts an object, which consists of these pieces: `size` bytes with this SHA-256. The store
    /// keeps it only if it is whole.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn put(
        &self,
        key: &str,
        size: u64,
        sha256: [u8; 32],
        pieces: mpsc::Receiver<Vec<u8>>,
    ) -> Result<(), Error> {
        let moved = Arc::<AtomicU64>::default();
        let call = Call {
            method: Method::PUT,
            path: self.path(key),
            query: &[],
            content: hex::encode(&sha256),
            // A bucket with an object lock demands one in a header of its own.
            checksum: Some(Base64::encode_string(&sha256)),
            body: Outgoing::Pieces { pieces, left: size, moved: Arc::clone(&moved) },
            moved,
            limit: ANSWER_MAX + Duration::from_secs(size / PACE_MIN),
            size_max: REFUSAL_MAX as u64,
        };
        self.ask(call, &mut |_said| Ok(())).await
    }

    /// Gets an object of so many bytes; `sink` takes them. It is whole only without an error.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn get(&self, key: &str, size: u64, sink: Sink<'_>) -> Result<(), Error> {
        let moved = Arc::<AtomicU64>::default();
        let call = Call {
            method: Method::GET,
            path: self.path(key),
            query: &[],
            content: sign::NOTHING.to_owned(),
            checksum: None,
            body: Outgoing::Empty,
            moved: Arc::clone(&moved),
            limit: ANSWER_MAX + Duration::from_secs(size / PACE_MIN),
            size_max: size,
        };
        let mut counted = |bytes: &[u8]| {
            moved.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            sink(bytes)
        };
        self.ask(call, &mut counted).await?;
        let received = moved.load(Ordering::Relaxed);
        if received < size {
            return Err(self.unusable(&format!("it has {received} of {size} bytes")));
        }
        Ok(())
    }

    fn path(&self, key: &str) -> String {
        format!("/{}/{}{key}", self.bucket.name, self.bucket.prefix)
    }

    async fn ask(&self, call: Call<'_>, sink: Sink<'_>) -> Result<(), Error> {
        let (limit, stands_still) = (call.limit, stands_still(Arc::clone(&call.moved)));
        let silent =
            |limit: Duration| Error::Silent { url: self.bucket.url(), seconds: limit.as_secs() };
        // Boxed: the state of a handshake is large.
        let asked = timeout(limit, Box::pin(self.exchange(call, sink)));
        tokio::select! {
            // Cancel-safe: nothing of an exchange is kept.
            answered = asked => answered.map_err(|_elapsed| silent(limit))?,
            // Cancel-safe: it only waits.
            () = stands_still => Err(silent(ANSWER_MAX)),
        }
    }

    async fn exchange(&self, call: Call<'_>, sink: Sink<'_>) -> Result<(), Error> {
        let size_max = call.size_max;
        let request = self.signed(call)?;
        let tls = outside::connect(&self.bucket.server, &self.bundle, &[b"http/1.1"]).await?;
        let opened = handshake(TokioIo::new(tls)).await;
        let (mut sender, connection) = opened.map_err(|error| self.lost(error))?;
        let asked = async {
            let response = sender.send_request(request).await.map_err(|error| self.lost(error))?;
            self.answer(response, size_max, sink).await
        };
        let (mut asked, mut connection) = (std::pin::pin!(asked), std::pin::pin!(connection));
        tokio::select! {
            biased;
            answer = &mut asked => answer,
            // The connection has ended; an answer that came before it is whole.
            ended = &mut connection => {
                let closed = || Err(self.lost(anyhow::anyhow!("the store closed the connection")));
                asked.now_or_never().unwrap_or_else(|| match ended {
                    Err(error) => Err(self.lost(error)),
                    Ok(()) => closed(),
                })
            }
        }
    }

    fn signed(&self, call: Call<'_>) -> Result<Request<Outgoing>, Error> {
        let host = self.bucket.host();
        let mut headers = vec![(HOST.as_str(), host.as_str())];
        headers.extend(call.checksum.iter().map(|checksum| (CHECKSUM, checksum.as_str())));
        let unsigned = sign::Request {
            method: call.method.as_str(),
            path: &call.path,
            query: call.query,
            headers: &headers,
            content: &call.content,
        };
        let (region, now) = (&self.bucket.region, (self.clock)());
        let signed = sign::sign(&unsigned, &self.credentials, region, now);
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(&signed.target)
            .header("x-amz-date", &signed.time)
            .header("x-amz-content-sha256", &call.content)
            .header(AUTHORIZATION, &signed.authorization);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if call.method == Method::PUT {
            request = request.header(CONTENT_TYPE, "application/octet-stream");
        }
        request.body(call.body).map_err(|error| self.lost(error))
    }

    /// Reads an answer, up to a bound.
    async fn answer(
        &self,
        response: http::Response<Incoming>,
        size_max: u64,
        sink: Sink<'_>,
    ) -> Result<(), Error> {
        let (parts, mut body) = response.into_parts();
        if parts.status != StatusCode::OK {
            return Err(self.refused(parts.status, &parts.headers, body).await);
        }
        let mut size = 0;
        while let Some(bytes) = self.next(&mut body).await? {
            size += bytes.len() as u64;
            if size > size_max {
                return Err(self.unusable(&format!("it has more than {size_max} bytes")));
            }
            sink(&bytes).map_err(|source| Error::Keep { url: self.bucket.url(), source })?;
        }
        Ok(())
    }

    async fn refused(
        &self,
        status: StatusCode,
        headers: &http::HeaderMap,
        mut body: Incoming,
    ) -> Error {
        let mut text = Vec::new();
        // The status is an answer even where the rest is lost.
        while let Ok(Some(bytes)) = self.next(&mut body).await {
            let room = REFUSAL_MAX - text.len();
            text.extend_from_slice(&bytes[..bytes.len().min(room)]);
            if text.len() == REFUSAL_MAX {
                break;
            }
        }
        let mut refusal = xml::refusal(&String::from_utf8_lossy(&text));
        if refusal.region.is_empty() {
            let header = headers.get("x-amz-bucket-region").and_then(|it| it.to_str().ok());
            refusal.region = header.map(xml::quoted).unwrap_or_default();
        }
        let Refusal { code, .. } = &refusal;
        let url = self.bucket.url();
        match status.is_redirection() || code == "PermanentRedirect" {
            true => Error::Elsewhere { url, status, refusal },
            false => Error::Refused { url, status, refusal },
        }
    }

    /// The next bytes of an answer.
    async fn next(&self, body: &mut Incoming) -> Result<Option<Bytes>, Error> {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| self.lost(error))?;
            // Trailers say nothing.
            if let Ok(bytes) = frame.into_data() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    fn lost(&self, source: impl Into<anyhow::Error>) -> Error {
        Error::Http { url: self.bucket.url(), source: source.into() }
    }

    fn unusable(&self, why: &str) -> Error {
        Error::Answer { url: self.bucket.url(), why: why.to_owned() }
    }
}

/// Waits until no byte of a content has moved for too long.
pub(super) async fn stands_still(moved: Arc<AtomicU64>) {
    let mut known = None;
    loop {
        let now = moved.load(Ordering::Relaxed);
        if known.replace(now) == Some(now) {
            return;
        }
        sleep(ANSWER_MAX).await;
    }
}
