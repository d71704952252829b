//! Logs and snapshots that leave the machine: stand-ins of a syslog receiver, of an OTLP collector
//! and of an S3 store on the host, which the machine reaches through QEMU's network.
//!
//! Every record on a disk has a number, so a collector sees by itself whether one is missing.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context as _, Result, ensure};
use polis_proto::otlp::ExportLogsServiceRequest;
use polis_proto::otlp::any_value::Value as Attribute;
use polis_qemu::Config;
use polis_tests::{Story, story};
use polis_wire::s3::testing::{KEY, REGION, SECRET, Store};
use prost::Message as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::Value;

use crate::fleet::ask_until;
use crate::owner::{Owner, private};
use crate::world::{SOON, World, home};

/// The host, as a machine behind QEMU's NAT reaches it.
const HOST: &str = "10.0.2.2";

/// Between two looks of a stand-in whether it was cut.
const LOOK: Duration = Duration::from_millis(100);

/// Lines of a first boot; there are more.
const LINES_MIN: u64 = 300;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(every_line_of_a_log_reaches_its_targets_across_a_cut_and_a_reboot).takes(150)];

fn every_line_of_a_log_reaches_its_targets_across_a_cut_and_a_reboot() -> Result<()> {
    let world = World::new("forwarding")?;
    let owner = Owner::new(&world.path("owner"))?;
    let config = Config { forwards: owner.forwards.clone(), ..world.bootstrap_config("")? };
    let authority = Authority::new(&world.path("ca.pem"))?;
    let syslog = Collector::start(&authority, syslog)?;
    let otlp = Collector::start(&authority, otlp)?;
    let (mut machine, founded) = world.at_home(&config)?;
    owner.take(&founded.ca)?;
    let node = founded.node.as_str();

    let ca = authority.file.display();
    let targets = [
        format!("syslog+tls://{HOST}:{},ca={ca}", syslog.port),
        format!("otlp+https://{HOST}:{},ca={ca}", otlp.port),
    ];
    owner.run(&[
        "cluster",
        "configure",
        "--log-target",
        &targets[0],
        "--log-target",
        &targets[1],
    ])?;
    delivered(&owner, node)?;
    for collector in [&syslog, &otlp] {
        let lines = collector.whole()?;
        ensure!(lines.values().sum::<u64>() > LINES_MIN, "few lines: {lines:?}");
    }
    shipped(&world, &owner)?;

    // The receiver is away for the end of this boot and the start of the next one.
    syslog.cut(true);
    for number in 0..5 {
        owner.run(&["node", "label", node, &format!("round={number}")])?;
    }
    ask_until("a target that fails", || {
        let failing = deliveries(&owner, node)?.iter().any(|it| it["failure"] != "");
        Ok(failing.then_some(()))
    })?;
    let status = owner.run(&["cluster", "status"])?;
    ensure!(status.contains("fails since"), "the status does not name the target: {status}");
    let health = owner.run(&["cluster", "health"])?;
    ensure!(health.contains("healthy"), "a collector that is away ails the cluster: {health}");
    owner.run(&["node", "reboot", node, "--yes"])?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after a reboot: {back:?}, before: {founded:?}");
    syslog.cut(false);
    delivered(&owner, node)?;

    let (first, second) = (syslog.whole()?, otlp.whole()?);
    ensure!(first.len() == 2 && second.len() == 2, "two boots: {first:?}, {second:?}");
    println!("lines of each boot at the receiver: {first:?}, at the collector: {second:?}");
    let last = deliveries(&owner, node)?;
    let complete = |it: &Value| it["missing"] == 0 && it["rejected"] == 0;
    ensure!(last.len() == 2 && last.iter().all(complete), "{last:?}");
    Ok(())
}

/// Names a bucket, and waits until the first hourly snapshot is in it; an owner decrypts it.
fn shipped(world: &World, owner: &Owner) -> Result<()> {
    let store = Store::start(HOST);
    let (ca, key) = (world.path("bucket.pem"), world.path("bucket.key"));
    fs::write(&ca, &store.ca)?;
    private(&key, &format!("{KEY}\n{SECRET}\n"))?;
    let url = store.url(store.address.port(), "polis");
    let target = format!("{url},region={REGION},ca={}", ca.display());
    let key = key.display().to_string();
    let options = ["--snapshot-target", &target, "--snapshot-credentials", &key];
    let printed = owner.run(&[&["cluster", "configure"][..], &options].concat())?;
    ensure!(!printed.contains(SECRET), "the secret is printed: {printed}");
    let (name, content) = ask_until("a snapshot in the store", || {
        Ok(store
            .with(|state| state.objects.iter().next().map(|(key, it)| (key.clone(), it.clone()))))
    })?;
    let digest = ring::digest::digest(&ring::digest::SHA256, &content);
    let digest = polis_base::hex::encode(digest.as_ref());
    ensure!(name.contains(&digest), "{name} is not named by its SHA-256, {digest}");
    println!("{name}: {} bytes", content.len());
    ask_until("a status that names it", || {
        let status = owner.run(&["cluster", "status"])?;
        Ok(status.contains("has the one of").then_some(()))
    })?;
    let [file, plain] = ["etcd.age", "etcd.db"].map(|name| world.path(name));
    fs::write(&file, content)?;
    let [file, plain] = [file, plain].map(|path| path.display().to_string());
    owner.run(&["etcd", "decrypt", &file, "--out", &plain])?;
    owner.run(&["cluster", "configure", "--no-snapshot-target"])?;
    Ok(())
}

/// The deliveries of a node by the cluster's report.
fn deliveries(owner: &Owner, node: &str) -> Result<Vec<Value>> {
    let described = owner.document(&["node", "describe", node])?;
    Ok(described["logs"].as_array().cloned().unwrap_or_default())
}

/// Waits until both targets have nearly all lines: there is always a new one.
fn delivered(owner: &Owner, node: &str) -> Result<()> {
    ask_until("two targets with all lines", || {
        let known = deliveries(owner, node)?;
        let has = |it: &&Value| {
            it["failure"] == "" && it["until"].is_string() && it["behind"].as_u64() < Some(20)
        };
        Ok((known.iter().filter(has).count() == 2).then_some(()))
    })
}

/// An authority, and the file of its certificate.
struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    file: PathBuf,
}

impl Authority {
    fn new(file: &Path) -> Result<Self> {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
        let mut params = rcgen::CertificateParams::new(Vec::new())?;
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        fs::write(file, params.self_signed(&key)?.pem())?;
        Ok(Self { issuer: rcgen::Issuer::new(params, key), file: file.to_owned() })
    }

    /// A server that this authority certifies for the host.
    fn server(&self) -> Result<Arc<ServerConfig>> {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
        let params = rcgen::CertificateParams::new(vec![HOST.to_owned()])?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let chain = vec![CertificateDer::from(certificate.der().to_vec())];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(Arc::new(config))
    }
}

/// The boot and the number of each record that arrived.
type Received = Arc<Mutex<BTreeMap<u64, String>>>;

type Serve = fn(&mut dyn Line, &Received) -> io::Result<()>;

/// Both directions of a connection.
trait Line: Read + Write {}

impl<T: Read + Write> Line for T {}

/// A stand-in of a collector.
struct Collector {
    port: u16,
    received: Received,
    cut: Arc<AtomicBool>,
}

impl Collector {
    fn start(authority: &Authority, serve: Serve) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let (config, received) = (authority.server()?, Received::default());
        let cut = Arc::<AtomicBool>::default();
        let (shared, off) = (Arc::clone(&received), Arc::clone(&cut));
        thread::spawn(move || {
            for tcp in listener.incoming().flatten() {
                // A connection that is dropped at once looks like a host that is off.
                if off.load(Ordering::Relaxed) {
                    continue;
                }
                let (config, received, cut) =
                    (Arc::clone(&config), Arc::clone(&shared), Arc::clone(&off));
                thread::spawn(move || {
                    // It ends with the machine, or with the cut.
                    let _ended = connection(tcp, config, cut, serve, &received);
                });
            }
        });
        Ok(Self { port, received, cut })
    }

    fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }

    /// How many records of each boot arrived; an error where a number is missing.
    fn whole(&self) -> Result<BTreeMap<String, u64>> {
        let received = self.received.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut boots = BTreeMap::new();
        for (expected, (number, boot)) in (0..).zip(received.iter()) {
            ensure!(expected == *number, "record {expected} is missing before {number}");
            *boots.entry(boot.clone()).or_default() += 1;
        }
        Ok(boots)
    }
}

fn connection(
    tcp: TcpStream,
    config: Arc<ServerConfig>,
    cut: Arc<AtomicBool>,
    serve: Serve,
    received: &Received,
) -> Result<()> {
    tcp.set_read_timeout(Some(LOOK))?;
    let mut line = Cuttable { tls: StreamOwned::new(ServerConnection::new(config)?, tcp), cut };
    loop {
        serve(&mut line, received).context("the connection ended")?;
    }
}

/// A connection that ends when its collector is cut.
struct Cuttable {
    tls: StreamOwned<ServerConnection, TcpStream>,
    cut: Arc<AtomicBool>,
}

impl Read for Cuttable {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.cut.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            match self.tls.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => return read,
            }
        }
    }
}

impl Write for Cuttable {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tls.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tls.flush()
    }
}

fn byte(line: &mut dyn Line) -> io::Result<u8> {
    let mut byte = [0];
    line.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn noise() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Reads one syslog message, by its octet count.
fn syslog(line: &mut dyn Line, received: &Received) -> io::Result<()> {
    let mut length = 0;
    loop {
        match byte(line)? {
            b' ' => break,
            digit if digit.is_ascii_digit() => length = length * 10 + usize::from(digit - b'0'),
            _ => return Err(noise()),
        }
    }
    let mut message = vec![0; length];
    line.read_exact(&mut message)?;
    let message = String::from_utf8(message).map_err(|_not| noise())?;
    let value = |name: &str| message.split_once(&format!(" {name}=\""))?.1.split('"').next();
    let (Some(boot), Some(number)) = (value("boot"), value("seq")) else { return Err(noise()) };
    let number = number.parse().map_err(|_not| noise())?;
    note(received, number, boot);
    Ok(())
}

/// Answers one request of OTLP.
fn otlp(line: &mut dyn Line, received: &Received) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(byte(line)?);
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    let length = head.split_once("content-length: ").and_then(|(_, rest)| rest.lines().next());
    let length = length.and_then(|length| length.parse().ok()).ok_or_else(noise)?;
    let mut body = vec![0; length];
    line.read_exact(&mut body)?;
    let request = ExportLogsServiceRequest::decode(body.as_slice()).map_err(|_not| noise())?;
    for logs in &request.resource_logs {
        let resource = logs.resource.as_ref().map(|resource| resource.attributes.as_slice());
        let boot = resource.unwrap_or_default().iter().find(|it| it.key == "polis.boot.id");
        let boot = boot.and_then(|it| it.value.clone()?.value);
        let Some(Attribute::StringValue(boot)) = boot else { return Err(noise()) };
        for record in logs.scope_logs.iter().flat_map(|scope| &scope.log_records) {
            let number = record.attributes.iter().find(|it| it.key == "polis.sequence");
            let number = number.and_then(|it| it.value.clone()?.value);
            let Some(Attribute::IntValue(number)) = number else { return Err(noise()) };
            note(received, u64::try_from(number).map_err(|_not| noise())?, &boot);
        }
    }
    line.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
    line.flush()
}

fn note(received: &Received, number: u64, boot: &str) {
    let mut received = received.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    received.insert(number, boot.to_owned());
}
