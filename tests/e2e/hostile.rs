//! Callers that mean harm, on every port that a machine has, beside one that does not.
//!
//! All of them come from one address, that of QEMU's NAT, so the one in earnest
//! shares its room with the others, and may have to try again.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::join_all;
use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_qemu::Config;
use polis_qemu::deadline::Deadline;
use polis_tests::{Story, patiently, story};
use polis_wire::rpc::client::{Channel, Expect, Trust, dial};
use polis_wire::rpc::{Credentials, provider};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::{Code, Status};

use crate::owner::Owner;
use crate::world::{SOON, World};

const PEERS: u16 = 7834;
const CURATOR: u16 = 7835;
const MANAGEMENT: u16 = 7839;
const METRICS: u16 = 7840;

/// Callers of the port of etcd's peers are members only; the services behind the firewall have
/// to hold without it.
const OPEN: &str = "polis.fault=no-firewall";

/// Every port that a node opens.
const PORTS: [u16; 4] = [PEERS, CURATOR, MANAGEMENT, METRICS];

/// Bytes by which `node` may grow: three servers have room for 256 handshakes each from
/// one address, of 64 KiB at worst, and the rest is for the served calls.
const GROWTH_MAX: u64 = 96 << 20;

/// Longest that one attack waits for its victim.
const ACT: Duration = Duration::from_secs(10);

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(hostile_callers_on_every_port_block_no_other_caller).takes(110)];

fn hostile_callers_on_every_port_block_no_other_caller() -> Result<()> {
    let world = World::new("hostile")?;
    let owner = Owner::with_ports(&world.path("owner"), &[PEERS, METRICS])?;
    let config = Config { forwards: owner.forwards.clone(), ..world.bootstrap_config(OPEN)? };
    let (machine, founded) = world.at_home(&config)?;
    owner.take(&founded.ca)?;
    let victim = Victim {
        node: founded.node.clone(),
        credentials: owner.credentials()?,
        at: PORTS
            .map(|port| owner.at(port).map(|at| (port, at)))
            .into_iter()
            .collect::<Result<_>>()?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(victim.besieged())?;
    runtime.shutdown_timeout(Duration::from_secs(1));

    owner.run(&["cluster", "wait"])?;
    // Of a node that was at rest, before all this.
    let memory = machine.seen(|event| event.word == "memory");
    println!("{}", memory.last().context("home without a line about memory")?);
    let again = machine.seen(|event| event.word == "boot" || event.word == "ready");
    ensure!(again.len() == 2, "it was not ready all the time: {again:?}");
    // The listeners have not died of it once.
    let listens = |name: &str| name.starts_with("root.management") || name == "root.curator.server";
    let died = machine.seen(|event| {
        event.word == "service" && event.is("state", "dead") && listens(event.text("name"))
    });
    ensure!(died.is_empty(), "services died: {died:?}");
    Ok(())
}

/// A machine, and the credentials of its owner.
struct Victim {
    node: String,
    credentials: Credentials,
    at: Vec<(u16, String)>,
}

impl Victim {
    /// All attacks at once; meanwhile the victim's owner works, and the victim's memory is
    /// watched.
    async fn besieged(&self) -> Result<()> {
        let before = self.patiently(|| self.memory()).await?;
        let over = AtomicBool::new(false);
        let rounds = AtomicU32::new(0);
        let harm = async {
            let on_all = |port| async move {
                tokio::join!(self.garbage(port), self.half_open(port), self.crowd(port));
            };
            let (_, refused, ()) =
                tokio::join!(join_all(PORTS.map(on_all)), self.huge(), self.slow());
            over.store(true, Ordering::Relaxed);
            refused
        };
        let work = async {
            let mut most = before;
            // At least once while it lasts, and once behind it.
            let mut last = false;
            while !last {
                last = over.load(Ordering::Relaxed);
                self.patiently(|| self.nodes()).await.context("the curator")?;
                self.patiently(|| self.status()).await.context("management")?;
                most = most.max(self.patiently(|| self.memory()).await.context("metrics")?);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(most)
        };
        let (refused, most) = tokio::join!(harm, work);
        let most = most?;
        refused?;
        let rounds = rounds.into_inner();
        ensure!(rounds >= 2, "its owner was served {rounds} times");
        let mib = |bytes: u64| bytes >> 20;
        println!("{rounds} rounds were served; node: {} MiB, {} MiB", mib(before), mib(most));
        let growth = most.saturating_sub(before);
        ensure!(growth <= GROWTH_MAX, "node has grown by {} MiB", mib(growth));
        self.let_go().await
    }

    /// Does it again until it succeeds: a newcomer may have to make way.
    async fn patiently<T, F: Future<Output = Result<T>>>(&self, work: impl Fn() -> F) -> Result<T> {
        let mut end = Deadline::within(SOON);
        loop {
            match patiently(SOON, Box::pin(work())).await? {
                Ok(done) => return Ok(done),
                Err(error) if end.is_over() => return Err(error),
                Err(_crowded) => sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn address(&self, port: u16) -> &str {
        self.at.iter().find(|(guest, _)| *guest == port).map_or("", |(_, at)| at)
    }

    async fn tcp(&self, port: u16) -> Result<TcpStream> {
        Ok(timeout(ACT, TcpStream::connect(self.address(port))).await??)
    }

    /// A connection on which only the identities of both sides were exchanged.
    async fn tls(&self, port: u16) -> Result<TlsStream<TcpStream>> {
        let mut roots = rustls::RootCertStore::empty();
        let known = self.credentials.authorities.as_ref().context("no CA")?;
        roots.add(known.signing.clone().into())?;
        let key = PrivateKeyDer::Pkcs8(self.credentials.key.to_vec().into());
        let mut config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![self.credentials.certificate.clone().into()], key)?;
        let protocol: &[u8] = if port == METRICS { b"http/1.1" } else { b"h2" };
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = ServerName::try_from(self.node.clone())?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, self.tcp(port).await?);
        Ok(timeout(ACT, connecting).await??)
    }

    async fn channel(&self, port: u16) -> Result<Channel> {
        let (host, port) = self.address(port).split_once(':').context("no port")?;
        let trust = Trust::cluster(self.credentials.authorities.clone().context("no CA")?);
        let own = Some(&self.credentials);
        Ok(dial(host, port.parse()?, Expect::AnyNode, &trust, own).await?.channel)
    }

    async fn nodes(&self) -> Result<()> {
        let mut client = ManagementClient::new(self.channel(CURATOR).await?);
        let info =
            client.get_cluster_info(v1::GetClusterInfoRequest::default()).await?.into_inner();
        ensure!(info.leader == self.node, "another leads: {}", info.leader);
        Ok(())
    }

    async fn status(&self) -> Result<()> {
        let mut client = NodeManagementClient::new(self.channel(MANAGEMENT).await?);
        let status = client.get_status(v1::GetStatusRequest {}).await?.into_inner();
        ensure!(status.ready, "it is not ready any more");
        Ok(())
    }

    async fn page(&self) -> Result<String> {
        let mut stream = self.tls(METRICS).await?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await?;
        let mut page = Vec::new();
        // A peer that closes without a farewell may still have sent everything.
        let _end = timeout(ACT, stream.read_to_end(&mut page)).await?;
        Ok(String::from_utf8(page)?)
    }

    /// The resident bytes of `node`, as it reports them.
    async fn memory(&self) -> Result<u64> {
        let page = self.page().await?;
        ensure!(page.lines().any(|line| line == "polis_ready 1"), "it is not ready: {page}");
        number(&page, "process_resident_memory_bytes ")
    }

    /// Waits until what only held a place is gone.
    async fn let_go(&self) -> Result<()> {
        let mut end = Deadline::within(SOON);
        loop {
            let page = self.patiently(|| self.page()).await?;
            let open = page.lines().filter_map(|line| line.strip_prefix("polis_rpc_connections{"));
            let open = open.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u32>().ok()).sum();
            match open {
                0..=16 => return Ok(()),
                open if end.is_over() => bail!("{open} connections are still held"),
                _ => sleep(Duration::from_millis(500)).await,
            }
        }
    }

    /// Bytes that mean nothing, or something in another protocol.
    async fn garbage(&self, port: u16) {
        let kinds: [Vec<u8>; 5] = [
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            vec![0; 5000],
            // A record of TLS with the greatest possible length in its header.
            [&[0x16, 3, 1, 0xff, 0xff][..], &[1; 100]].concat(),
            (0..10_000_u32).flat_map(u32::to_le_bytes).collect(),
        ];
        let acts = kinds.iter().cycle().take(25).map(|bytes| async move {
            let mut stream = self.tcp(port).await?;
            stream.write_all(bytes).await?;
            stream.shutdown().await?;
            let mut answer = Vec::new();
            timeout(ACT, stream.read_to_end(&mut answer)).await??;
            anyhow::Ok(())
        });
        // The victim may cut it off early.
        let _ended = join_all(acts).await;
        // The same behind a good handshake.
        if let (true, Ok(mut stream)) = (port != PEERS, self.tls(port).await) {
            let _heard = stream.write_all(&kinds[4]).await;
        }
    }

    /// Handshakes that do not go on.
    async fn half_open(&self, port: u16) {
        let acts = (0..100).map(|n| async move {
            let mut stream = self.tcp(port).await?;
            if n % 2 == 0 {
                stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1]).await?;
            }
            sleep(ACT).await;
            anyhow::Ok(())
        });
        let _ended = join_all(acts).await;
    }

    /// Connections that come and go.
    async fn crowd(&self, port: u16) {
        for _wave in 0..10 {
            let _gone = join_all((0..50).map(|_| self.tcp(port))).await;
        }
    }

    /// Messages and headers of many megabytes.
    async fn huge(&self) -> Result<()> {
        let long = "x".repeat(64 << 20);
        let unlock = async {
            let client = NodeManagementClient::new(self.patient_channel(MANAGEMENT).await?);
            let request = v1::UnlockRequest { recovery_key: long.clone() };
            let mut client = client.max_encoding_message_size(usize::MAX);
            anyhow::Ok(is_heard(timeout(ACT, client.unlock(request)).await))
        };
        let approve = async {
            let client = ManagementClient::new(self.patient_channel(CURATOR).await?);
            let (node_id, fingerprint) = (self.node.clone(), long.clone());
            let request = v1::ApproveNodeRequest { node_id, fingerprint, ..Default::default() };
            let mut client = client.max_encoding_message_size(usize::MAX);
            anyhow::Ok(is_heard(timeout(ACT, client.approve_node(request)).await))
        };
        let header = async {
            let mut stream = self.patiently(|| self.tls(METRICS)).await?;
            let head = [&b"GET /metrics HTTP/1.1\r\nHost: "[..], long.as_bytes()].concat();
            anyhow::Ok(timeout(ACT, stream.write_all(&head)).await.is_ok_and(|sent| sent.is_ok()))
        };
        let heard = tokio::try_join!(unlock, approve, header)?;
        ensure!(heard == (false, false, false), "messages of 64 MiB were read: {heard:?}");
        Ok(())
    }

    /// A channel that was made in spite of all others.
    async fn patient_channel(&self, port: u16) -> Result<Channel> {
        self.patiently(|| self.channel(port)).await
    }

    /// Readers that never read the answers to their requests.
    async fn slow(&self) {
        let logs = async {
            let mut client = NodeManagementClient::new(self.channel(MANAGEMENT).await?);
            let mut held = Vec::new();
            for _ in 0..20 {
                let all = v1::LogsRequest {
                    children: true,
                    backlog: -1,
                    follow: true,
                    ..Default::default()
                };
                held.push(timeout(ACT, client.logs(all)).await??);
            }
            sleep(ACT).await;
            anyhow::Ok(())
        };
        let watches = async {
            let mut client = CuratorClient::new(self.channel(CURATOR).await?);
            let mut held = Vec::new();
            for _ in 0..20 {
                held.push(timeout(ACT, client.watch(v1::WatchRequest::default())).await??);
            }
            sleep(ACT).await;
            anyhow::Ok(())
        };
        let pages = async {
            let mut stream = self.tls(METRICS).await?;
            let asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(1000);
            timeout(ACT, stream.write_all(&asked)).await??;
            sleep(ACT).await;
            anyhow::Ok(())
        };
        let _ended = tokio::join!(logs, watches, pages);
    }
}

/// Whether a handler has read a request and judged it: what is too long for the server does not
/// get so far.
fn is_heard<T>(answer: Result<Result<T, Status>, Elapsed>) -> bool {
    let Ok(answer) = answer else { return false };
    answer.map_or_else(
        |refused| matches!(refused.code(), Code::InvalidArgument | Code::FailedPrecondition),
        |_done| true,
    )
}

/// The value behind `name` on a page of metrics.
fn number(page: &str, name: &str) -> Result<u64> {
    let value = page.lines().find_map(|line| line.strip_prefix(name));
    let value = value.with_context(|| format!("no {name}on the page:\n{page}"))?;
    value.trim().parse().with_context(|| format!("{name}is {value}"))
}
