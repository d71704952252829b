//! OTLP over HTTP: log records as protocol buffers, a request for each batch.
//!
//! An answer with a status of 200 to 299 is the acknowledgement. Messages are a part of the
//! public schema, compiled like the project's own (`proto/opentelemetry`): the crates of
//! OpenTelemetry bring a second way of logging with them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::header::{CONNECTION, CONTENT_TYPE, HOST, RETRY_AFTER};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use polis_base::serial::{Severity, is_control};
use polis_proto::otlp::any_value::Value;
use polis_proto::otlp::{
    AnyValue, ExportLogsServiceRequest, ExportLogsServiceResponse, InstrumentationScope, KeyValue,
    LogRecord, Resource, ResourceLogs, ScopeLogs, SeverityNumber, Status,
};
use polis_runtime::logtree::ring::Recorder;
use polis_runtime::logtree::{Body, Origin};
use polis_wire::outside::{self, Server};
use polis_wire::parameters::LogTarget;
use prost::Message as _;
use tokio::time::timeout;

use super::line::{Batch, Line, Subject};

/// A collector answers within this time.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Bytes of an answer that are read.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Characters of an answer that an error quotes.
const QUOTE_MAX: usize = 200;
/// The type of requests, and of answers.
const PROTOBUF: &str = "application/x-protobuf";
/// The longest wait that a collector may ask for.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Why a batch was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Connect(#[from] outside::Error),
    #[error("the exchange with {url} failed")]
    Http { url: String, source: anyhow::Error },
    #[error("{url} does not answer within {} seconds", ANSWER_MAX.as_secs())]
    Silent { url: String },
    #[error("{url} answers {status}{said}")]
    Refused { url: String, status: StatusCode, said: String, wait: Option<Duration> },
}

/// A collector, and the connection to it while one is open.
pub(super) struct Connection {
    target: LogTarget,
    server: Server,
    bundle: PathBuf,
    open: Option<Open>,
}

struct Open {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes; ends with the connection.
    driver: BoxFuture<'static, Result<(), hyper::Error>>,
}

/// The answer of a collector to a request.
enum Answer {
    /// It has them, but for so many.
    Taken(u64),
    /// It cannot read them, or they are too many at once.
    Unreadable,
}

impl Connection {
    /// Connects to a target at this server.
    pub(super) async fn open(
        target: &LogTarget,
        server: Server,
        bundle: &Path,
    ) -> Result<Self, Error> {
        let (target, bundle) = (target.clone(), bundle.to_owned());
        let open = Some(open(&target, &server, &bundle).await?);
        Ok(Self { target, server, bundle, open })
    }

    /// Sends lines; returns how many of them the collector rejected. Lines that it cannot read
    /// are sent in halves, down to the one that it rejects.
    pub(super) async fn send(&mut self, subject: &Subject, batch: &Batch) -> Result<u64, Error> {
        let mut rejected = 0;
        let mut parts = vec![batch.lines.as_slice()];
        while let Some(part) = parts.pop() {
            let request = request(subject, &batch.recorder, part).encode_to_vec();
            match self.post(request).await? {
                Answer::Taken(but) => rejected += but.min(part.len() as u64),
                Answer::Unreadable if part.len() < 2 => rejected += part.len() as u64,
                Answer::Unreadable => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                }
            }
        }
        Ok(rejected)
    }

    async fn post(&mut self, body: Vec<u8>) -> Result<Answer, Error> {
        let url = self.target.url();
        // Taken out: an exchange that is dropped leaves no connection in the middle of it.
        let mut open = match self.open.take() {
            Some(open) => open,
            None => open(&self.target, &self.server, &self.bundle).await?,
        };
        let exchange = exchange(&mut open, &self.target, body);
        let silent = |_elapsed| Error::Silent { url: url.clone() };
        let http = |source| Error::Http { url: url.clone(), source };
        let answered = timeout(ANSWER_MAX, exchange).await.map_err(silent)?;
        let (status, headers, body) = answered.map_err(http)?;
        if status.is_success() {
            let closes = headers.get(CONNECTION).is_some_and(|it| it == "close");
            self.open = (!closes).then_some(open);
            return Ok(Answer::Taken(rejected(&body)));
        }
        if matches!(status.as_u16(), 400 | 413 | 422) {
            return Ok(Answer::Unreadable);
        }
        let wait = headers.get(RETRY_AFTER).and_then(|it| it.to_str().ok()?.parse().ok());
        let wait = wait.map(|seconds| Duration::from_secs(seconds).min(WAIT_MAX));
        let binary = headers.get(CONTENT_TYPE).is_some_and(|it| it == PROTOBUF);
        Err(Error::Refused { url, status, said: said(&body, binary), wait })
    }
}

async fn open(target: &LogTarget, server: &Server, bundle: &Path) -> Result<Open, Error> {
    let tls = outside::connect(server, bundle, &[b"http/1.1"]).await?;
    let http = |error: hyper::Error| Error::Http { url: target.url(), source: error.into() };
    let (sender, connection) = handshake(TokioIo::new(tls)).await.map_err(http)?;
    Ok(Open { sender, driver: connection.boxed() })
}

async fn exchange(
    open: &mut Open,
    target: &LogTarget,
    body: Vec<u8>,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    let request = Request::post(target.path.as_str())
        .header(HOST, target.endpoint.to_string())
        .header(CONTENT_TYPE, PROTOBUF)
        .body(Full::new(Bytes::from(body)))?;
    let Open { sender, driver } = open;
    let asked = async {
        sender.ready().await?;
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        anyhow::Ok((parts.status, parts.headers, body))
    };
    let mut asked = std::pin::pin!(asked);
    tokio::select! {
        biased;
        answer = &mut asked => answer,
        // The connection has ended; an answer that came before it is whole.
        ended = driver => {
            let answer = asked.now_or_never();
            answer.unwrap_or_else(|| match ended {
                Err(error) => Err(error.into()),
                Ok(()) => Err(anyhow::anyhow!("the collector closed the connection")),
            })
        }
    }
}

/// How many records of a request a collector rejected, by its answer.
fn rejected(body: &[u8]) -> u64 {
    let read = ExportLogsServiceResponse::decode(body).unwrap_or_default();
    let partial = read.partial_success.unwrap_or_default();
    u64::try_from(partial.rejected_log_records).unwrap_or(0)
}

/// The text of a refusal, as the end of a sentence.
fn said(body: &[u8], binary: bool) -> String {
    let text = match Status::decode(body) {
        Ok(status) if binary => status.message,
        _ => String::from_utf8_lossy(body).into_owned(),
    };
    let plain = |c: char| if is_control(c) { ' ' } else { c };
    let text: String = text.trim().chars().take(QUOTE_MAX).map(plain).collect();
    if text.is_empty() { text } else { format!(": {text}") }
}

/// The request for lines of one process.
fn request(subject: &Subject, recorder: &Recorder, lines: &[Line]) -> ExportLogsServiceRequest {
    let Subject { id, name: _, cluster, version } = subject;
    let known = [
        ("service.name", "polis"),
        ("service.version", version),
        ("service.instance.id", id),
        ("host.id", id),
        ("host.name", subject.host()),
        ("host.image.id", &recorder.image),
        ("polis.cluster", cluster),
        ("polis.boot.id", &recorder.boot_id),
    ];
    let known = known.into_iter().filter(|(_, value)| !value.is_empty());
    let mut attributes: Vec<_> = known.map(|(key, value)| text(key, value)).collect();
    attributes.push(number("process.pid", recorder.process.into()));
    let scope = InstrumentationScope { name: "polis".to_owned(), version: version.clone() };
    let scope_logs =
        ScopeLogs { scope: Some(scope), log_records: lines.iter().map(record).collect() };
    let resource = Some(Resource { attributes });
    let resource_logs = vec![ResourceLogs { resource, scope_logs: vec![scope_logs] }];
    ExportLogsServiceRequest { resource_logs }
}

fn record(line: &Line) -> LogRecord {
    let entry = &line.entry;
    let severity = match entry.body.severity() {
        Severity::Debug => SeverityNumber::Debug,
        Severity::Info => SeverityNumber::Info,
        Severity::Warning => SeverityNumber::Warn,
        Severity::Error => SeverityNumber::Error,
        Severity::Fatal => SeverityNumber::Fatal,
    };
    let origin = match entry.origin {
        Origin::Service => "service",
        Origin::Program => "program",
        Origin::Kernel => "kernel",
    };
    let mut attributes = vec![text("polis.name", &entry.name), text("polis.origin", origin)];
    attributes.extend(
        line.number.and_then(|it| i64::try_from(it).ok()).map(|it| number("polis.sequence", it)),
    );
    let message = match &entry.body {
        Body::Raw(text) => text,
        Body::Levelled(it) => {
            if !it.source.is_empty() {
                attributes.push(text("code.namespace", &it.source));
            }
            // A key may be there once: a field of a program with one of the names above is left
            // out.
            let mut keys = BTreeSet::new();
            for (key, value) in &it.fields {
                let taken = key.starts_with("polis.") || key == "code.namespace";
                if !taken && !key.is_empty() && keys.insert(key) {
                    attributes.push(text(key, value));
                }
            }
            &it.message
        }
    };
    let since = line.time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let nanos = since.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0);
    LogRecord {
        time_unix_nano: nanos,
        observed_time_unix_nano: nanos,
        severity_number: severity.into(),
        severity_text: entry.body.severity().letter().to_string(),
        body: Some(AnyValue { value: Some(Value::StringValue(message.clone())) }),
        attributes,
    }
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value) }
}

fn number(key: &str, value: i64) -> KeyValue {
    let value = AnyValue { value: Some(Value::IntValue(value)) };
    KeyValue { key: key.to_owned(), value: Some(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_collector_answers_cannot_control_a_terminal() {
        let body = "no\u{1b}[2J\u{202e}quota\u{2028}left\n";
        assert_eq!(said(body.as_bytes(), false), ": no [2J quota left");
        assert_eq!(said(b" \n", false), "");
    }
}
