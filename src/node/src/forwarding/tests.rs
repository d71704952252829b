//! Delivery to stand-ins of collectors, over TLS, that die and come back, and from a ring that
//! goes through boots.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use polis_base::files::File;
use polis_base::serial::Severity;
use polis_proto::otlp::any_value::Value;
use polis_proto::otlp::{
    ExportLogsPartialSuccess, ExportLogsServiceRequest, ExportLogsServiceResponse,
};
use polis_runtime::event::until;
use polis_runtime::logtree::{Body, Levelled, Origin, ring};
use polis_runtime::supervisor::{Context, Handles};
use prost::Message as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::cursors::Cursors;
use super::deliver::Delivery;
use super::line::Subject;
use super::*;

const SOON: Duration = Duration::from_secs(60);

/// A boot of a node that keeps its log in a folder.
struct Boot {
    ctx: Context,
    handles: Handles,
    status: watch::Receiver<ring::Status>,
    run: JoinHandle<Result<(), ring::RunError>>,
}

#[expect(clippy::disallowed_methods, reason = "a test has no supervisor")]
fn boot(dir: &Path, name: &str) -> Boot {
    let (ctx, handles) = Context::for_test();
    let config = ring::Config {
        dir: dir.to_owned(),
        bytes_max: 8 * ring::SEGMENT_MAX,
        boot_id: name.to_owned(),
        started: 1_800_000_000,
        image: "image".to_owned(),
    };
    let (sender, status) = watch::channel(ring::Status::default());
    let run = tokio::spawn(ring::Service { status: sender }.run(config, ctx.clone()));
    Boot { ctx, handles, status, run }
}

impl Boot {
    fn log(&self, message: &str) {
        let body = Body::Levelled(Levelled::new(Severity::Info, message));
        self.ctx.logs().append("root.test", Origin::Service, body);
    }

    async fn stop(self) {
        self.handles.cancel().await;
        self.run.await.unwrap().unwrap();
    }
}

/// The lines of a node as they arrive: boot, number, text.
type Received = Arc<Mutex<Vec<(String, u64, String)>>>;

/// A stand-in of a collector, which may die and come back on its port.
struct Collector {
    address: SocketAddr,
    ca: String,
    acceptor: TlsAcceptor,
    received: Received,
    task: Option<JoinHandle<()>>,
}

impl Collector {
    async fn new() -> Self {
        let issuer_key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca = params.self_signed(&issuer_key).unwrap().pem();
        let issuer = rcgen::Issuer::new(params, issuer_key);
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let own = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let own = own.signed_by(&key, &issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = rustls::ServerConfig::builder_with_provider(polis_wire::rpc::provider())
            // The oldest version that targets may speak.
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![CertificateDer::from(own.der().to_vec())], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        Self { address, ca, acceptor, received: Received::default(), task: None }
    }

    /// Starts it; `serve` has one connection.
    #[expect(clippy::disallowed_methods, reason = "a test has no supervisor")]
    async fn start<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        serve: impl Fn(TlsStream<TcpStream>, Received) -> F + Send + 'static,
    ) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        let (acceptor, received) = (self.acceptor.clone(), Arc::clone(&self.received));
        self.task = Some(tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((tcp, _from)) = listener.accept().await {
                if let Ok(tls) = acceptor.accept(tcp).await {
                    connections.spawn(serve(tls, Arc::clone(&received)));
                }
            }
        }));
    }

    /// Ends it, with all its connections.
    async fn stop(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }

    fn target(&self, scheme: &str) -> LogTarget {
        let url = format!("{scheme}://{}", self.address);
        let target = v1::LogTarget { url, ca: self.ca.clone() };
        let message = v1::LogConfiguration { targets: vec![target], ..Default::default() };
        Order::read(message).unwrap().targets.remove(0)
    }

    fn texts(&self) -> BTreeSet<String> {
        self.received.lock().unwrap().iter().map(|(_, _, text)| text.clone()).collect()
    }

    async fn has(&self, text: &str) {
        let wait = async {
            while !self.texts().contains(text) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(SOON, wait).await.unwrap_or_else(|_| panic!("no {text:?}: {:?}", self.texts()));
    }
}

/// Reads syslog messages, by their octet counts.
async fn syslog(mut tls: TlsStream<TcpStream>, received: Received) {
    loop {
        let mut length = 0;
        loop {
            match tls.read_u8().await {
                Ok(b' ') => break,
                Ok(digit @ b'0'..=b'9') => length = length * 10 + usize::from(digit - b'0'),
                _ => return,
            }
        }
        let mut message = vec![0; length];
        if tls.read_exact(&mut message).await.is_err() {
            return;
        }
        let message = String::from_utf8(message).unwrap();
        let (head, text) = message.split_once("] ").unwrap();
        let value = |name: &str| {
            let (_, rest) = head.split_once(&format!(" {name}=\""))?;
            Some(rest.split('"').next().unwrap().to_owned())
        };
        // A line that says what is missing has no number.
        if let Some(number) = value("seq") {
            let line = (value("boot").unwrap(), number.parse().unwrap(), text.to_owned());
            received.lock().unwrap().push(line);
        }
    }
}

/// Answers requests of OTLP: first that it is busy, then that it cannot read a batch with
/// *poison* in it, and that it rejects one record of a batch with *partly*. It asks for a pause at
/// the first batch with *pause*.
async fn otlp(mut tls: TlsStream<TcpStream>, received: Received) {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = tls.read_u8().await else { return };
            head.push(byte);
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        assert!(head.starts_with("post /v1/logs http/1.1"), "{head}");
        let (_, length) = head.split_once("content-length: ").unwrap();
        let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
        tls.read_exact(&mut body).await.unwrap();
        let request = ExportLogsServiceRequest::decode(body.as_slice()).unwrap();
        let (lines, boot) = lines(&request);
        let has = |text: &str| lines.iter().any(|(_, line)| line == text);
        let (status, answer) = if received.lock().unwrap().is_empty() && has("busy") {
            received.lock().unwrap().push(("busy".to_owned(), 0, "busy once".to_owned()));
            ("503 Busy", Vec::new())
        } else if has("pause") && received.lock().unwrap().iter().all(|it| it.0 != "pause") {
            received.lock().unwrap().push(("pause".to_owned(), 0, "a pause, please".to_owned()));
            ("503 Busy\r\nRetry-After: 2", Vec::new())
        } else if has("poison") {
            ("400 Bad", Vec::new())
        } else {
            let lines = lines.iter().map(|(number, text)| (boot.clone(), *number, text.clone()));
            received.lock().unwrap().extend(lines);
            let rejected_log_records = i64::from(has("partly"));
            let error_message = String::new();
            let partial = ExportLogsPartialSuccess { rejected_log_records, error_message };
            let response = ExportLogsServiceResponse { partial_success: Some(partial) };
            ("200 OK", response.encode_to_vec())
        };
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", answer.len());
        tls.write_all(&[head.as_bytes(), &answer].concat()).await.unwrap();
    }
}

/// The numbers and texts of a request, and the boot that they are of.
fn lines(request: &ExportLogsServiceRequest) -> (Vec<(u64, String)>, String) {
    let resource = &request.resource_logs[0];
    let attributes = &resource.resource.as_ref().unwrap().attributes;
    let text = |value: &Option<polis_proto::otlp::AnyValue>| match value.clone().unwrap().value {
        Some(Value::StringValue(text)) => text,
        other => panic!("{other:?}"),
    };
    let attribute =
        |key: &str| text(&attributes.iter().find(|attribute| attribute.key == key).unwrap().value);
    assert_eq!((attribute("host.id"), attribute("polis.cluster")), ("id".into(), "domain".into()));
    let records = resource.scope_logs[0].log_records.iter().map(|record| {
        let number = record.attributes.iter().find(|it| it.key == "polis.sequence").unwrap();
        let Some(Value::IntValue(number)) = number.value.clone().unwrap().value else { panic!() };
        (u64::try_from(number).unwrap(), text(&record.body))
    });
    (records.collect(), attribute("polis.boot.id"))
}

/// A delivery that runs.
struct Running {
    task: JoinHandle<()>,
    cursors: Arc<Mutex<Cursors>>,
    status: watch::Sender<Status>,
    url: String,
    /// The delivery ends with it.
    _proxy: watch::Sender<Option<parameters::Proxy>>,
}

#[expect(clippy::disallowed_methods, reason = "a test has no supervisor")]
fn deliver(target: LogTarget, boot: &Boot, cursors: Cursors) -> Running {
    let subject =
        Subject { id: "id".to_owned(), cluster: "domain".to_owned(), ..Subject::default() };
    let (cursors, status) = (Arc::new(Mutex::new(cursors)), watch::Sender::default());
    let (url, proxy) = (target.url(), watch::Sender::default());
    let delivery = Delivery {
        target,
        proxy: proxy.subscribe(),
        bundle: PathBuf::from("/nonexistent"),
        subject: watch::Sender::new(subject).subscribe(),
        ring: boot.status.clone(),
        cursors: Arc::clone(&cursors),
        status: status.clone(),
    };
    let task = tokio::spawn(async move {
        // It ends with the ring.
        let _closed = delivery.run().await;
    });
    Running { task, cursors, status, url, _proxy: proxy }
}

impl Running {
    async fn target(&self, wanted: impl Fn(&Target) -> bool) -> Target {
        let found = async {
            let mut status = self.status.subscribe();
            let pick = |status: &Status| {
                status.targets.get(&self.url).filter(|target| wanted(target)).cloned()
            };
            until(&mut status, "the status", pick).await.unwrap()
        };
        let now = || self.status.borrow().clone();
        timeout(SOON, found).await.unwrap_or_else(|_| panic!("not the target: {:?}", now()))
    }

    /// Ends it as a loss of power would; what it had on the disk by then.
    async fn cut(self) -> Cursors {
        self.task.abort();
        let _cancelled = self.task.await;
        let kept = self.cursors.lock().unwrap().clone();
        let dir = tempfile::tempdir().unwrap();
        let file = File::private(dir.path().join("cursors.json"));
        kept.save(&file).await.unwrap();
        assert_eq!(Cursors::load(&file).await.unwrap(), kept);
        kept
    }
}

#[tokio::test]
async fn no_line_is_lost_when_the_receiver_dies_and_the_node_is_restarted() {
    let (dir, mut collector) = (tempfile::tempdir().unwrap(), Collector::new().await);
    let first = boot(dir.path(), "one");
    (0..500).for_each(|number| first.log(&format!("line {number}")));
    collector.start(syslog).await;
    let target = collector.target("syslog+tls");
    let running = deliver(target.clone(), &first, Cursors::default());
    collector.has("line 499").await;
    collector.stop().await;
    (500..600).for_each(|number| first.log(&format!("line {number}")));
    let refused = |it: &Failure| it.cause.contains("cannot connect");
    running.target(|target| target.failure.as_ref().is_some_and(refused)).await;
    collector.start(syslog).await;
    collector.has("line 599").await;
    running.target(|target| target.failure.is_none() && target.behind == 0).await;

    // The node loses its power with lines that were never sent.
    collector.stop().await;
    first.log("the last words of the first boot");
    let cursors = running.cut().await;
    first.stop().await;
    let second = boot(dir.path(), "two");
    second.log("the second boot");
    collector.start(syslog).await;
    let running = deliver(target, &second, cursors);
    collector.has("the second boot").await;
    running.target(|target| target.behind == 0).await;
    second.stop().await;

    let received = collector.received.lock().unwrap().clone();
    let numbers: BTreeSet<_> = received.iter().map(|(_, number, _)| *number).collect();
    assert_eq!(numbers, (0..602).collect(), "the numbers of all lines, without a gap");
    let boot = |text: &str| received.iter().find(|(_, _, it)| it == text).unwrap().0.clone();
    assert_eq!(boot("the last words of the first boot"), "one");
    assert_eq!(boot("the second boot"), "two");
}

#[tokio::test]
async fn a_line_that_settled_is_sent_once() {
    let (dir, mut collector) = (tempfile::tempdir().unwrap(), Collector::new().await);
    let node = boot(dir.path(), "one");
    node.log("once");
    collector.start(syslog).await;
    let target = collector.target("syslog+tls");
    let running = deliver(target.clone(), &node, Cursors::default());
    collector.has("once").await;
    let settled = async {
        while running.cursors.lock().unwrap().targets.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, settled).await.unwrap();
    let cursors = running.cut().await;
    node.log("twice");
    let running = deliver(target, &node, cursors);
    collector.has("twice").await;
    drop(running.cut().await);
    node.stop().await;
    let received = collector.received.lock().unwrap().clone();
    assert_eq!(received.iter().filter(|(_, _, text)| text == "once").count(), 1, "{received:?}");
}

#[tokio::test]
async fn a_collector_takes_what_it_can_read_and_the_rest_is_counted() {
    let (dir, mut collector) = (tempfile::tempdir().unwrap(), Collector::new().await);
    let node = boot(dir.path(), "one");
    collector.start(otlp).await;
    node.log("busy");
    let running = deliver(collector.target("otlp+https"), &node, Cursors::default());
    collector.has("busy").await;
    (0..20).for_each(|number| node.log(&format!("line {number}")));
    node.log("poison");
    (20..40).for_each(|number| node.log(&format!("line {number}")));
    collector.has("line 39").await;
    let target = running.target(|target| target.rejected == 1).await;
    assert_eq!((target.missing, target.failure), (0, None));
    node.log("partly");
    running.target(|target| target.rejected == 2 && target.behind == 0).await;
    drop(running.cut().await);
    node.stop().await;
    let texts = collector.texts();
    assert!((0..40).all(|number| texts.contains(&format!("line {number}"))), "{texts:?}");
    assert!(texts.contains("busy once") && !texts.contains("poison"), "{texts:?}");
}

#[tokio::test]
async fn a_collector_that_took_lines_and_asks_for_a_pause_gets_one() {
    let (dir, mut collector) = (tempfile::tempdir().unwrap(), Collector::new().await);
    let node = boot(dir.path(), "one");
    collector.start(otlp).await;
    node.log("first");
    let running = deliver(collector.target("otlp+https"), &node, Cursors::default());
    running.target(|target| target.sent > 0 && target.behind == 0).await;
    // Before it asks: a host that is late here must not shorten the measured pause.
    let began = Instant::now();
    node.log("pause");
    collector.has("a pause, please").await;
    collector.has("pause").await;
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    drop(running.cut().await);
    node.stop().await;
}

#[tokio::test]
async fn a_collector_of_another_authority_gets_nothing() {
    let (dir, mut collector) = (tempfile::tempdir().unwrap(), Collector::new().await);
    let node = boot(dir.path(), "one");
    node.log("secret");
    collector.start(syslog).await;
    let mut target = collector.target("syslog+tls");
    target.authorities = Collector::new().await.target("syslog+tls").authorities;
    let running = deliver(target, &node, Cursors::default());
    let failing = running.target(|target| target.failure.is_some()).await;
    let cause = failing.failure.unwrap().cause;
    assert!(cause.contains("no TLS with") && cause.contains("certificate"), "{cause}");
    assert_eq!((failing.sent, failing.behind), (0, 1));
    drop(running.cut().await);
    node.stop().await;
    assert!(collector.texts().is_empty());
}

#[tokio::test]
async fn lines_that_the_ring_overwrote_are_counted() {
    let (dir, mut collector) = (tempfile::tempdir().unwrap(), Collector::new().await);
    let first = boot(dir.path(), "one");
    first.log("early");
    collector.start(syslog).await;
    let target = collector.target("syslog+tls");
    let running = deliver(target.clone(), &first, Cursors::default());
    collector.has("early").await;
    let settled = async {
        while running.cursors.lock().unwrap().targets.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, settled).await.unwrap();
    let cursors = running.cut().await;
    (0..9).for_each(|number| first.log(&format!("gone {number}")));
    first.stop().await;
    // The ring makes room: here all of the first boot goes.
    let second = boot(dir.path(), "two");
    second.log("late");
    second.stop().await;
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("00000000-") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let third = boot(dir.path(), "three");
    let running = deliver(target, &third, cursors);
    running.target(|target| target.missing == 9).await;
    collector.has("late").await;
    drop(running.cut().await);
    third.stop().await;
}

#[tokio::test]
async fn damaged_cursors_begin_anew() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::private(dir.path().join("cursors.json"));
    for noise in ["", "{", r#"{"targets":{"a":{"place":7}}}"#, "[1]"] {
        file.write(noise.as_bytes()).unwrap();
        assert_eq!(Cursors::load(&file).await.unwrap(), Cursors::default(), "{noise}");
    }
}
