//! Hostile callers, each beside a well-behaved one.
//!
//! Each story asserts that the server stays up, that its memory and connections are
//! bounded, and that a well-behaved caller is served during the attack.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use futures::stream::{FuturesUnordered, iter, pending};
use futures::{Stream, StreamExt as _};
use hyper_util::rt::TokioIo;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_proto::v1::node_management_server::{NodeManagement, NodeManagementServer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tonic::service::Routes;
use tonic::transport::{self, Endpoint};
use tonic::{Code, Request, Response, Status, Streaming};
use tracing_subscriber::layer::SubscriberExt as _;

use super::client::Channel;
use super::limits::{ANSWERS_MAX, STREAMS_MAX};
use super::testing::{Authority, Running, SOON, node_id, self_signed};
use super::*;
use polis_runtime::logtree::layer::ToTree;
use polis_runtime::logtree::{Query, Tree};

/// Answers at once, and streams as much as anybody takes.
struct Busy {
    /// The messages of streams that it has made.
    made: Arc<AtomicUsize>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl NodeManagement for Busy {
    type LogsStream = Answers<v1::LogsResponse>;
    type ConsoleStream = Answers<v1::ConsoleFrame>;
    type DrainStream = Answers<v1::DrainProgress>;
    type UpdateStream = Answers<v1::UpdateProgress>;
    type StoreBundleStream = Answers<v1::UpdateProgress>;
    type FetchBundleStream = Answers<v1::UpdateRequest>;

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        Ok(Response::new(v1::GetStatusResponse::default()))
    }

    async fn logs(
        &self,
        _request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn get_firewall(
        &self,
        _request: Request<v1::GetFirewallRequest>,
    ) -> Result<Response<v1::GetFirewallResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn services(
        &self,
        _request: Request<v1::ServicesRequest>,
    ) -> Result<Response<v1::ServicesResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn drain(
        &self,
        _request: Request<v1::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("not here"))
    }

    /// Counts the bytes of all pieces.
    async fn update(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::UpdateStream>, Status> {
        let mut incoming = request.into_inner();
        let mut bytes = 0;
        while let Some(piece) = incoming.message().await? {
            bytes += piece.data.len() as u64;
        }
        let told = v1::UpdateProgress { bytes, ..Default::default() };
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(told)]))))
    }

    async fn store_bundle(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::StoreBundleStream>, Status> {
        self.update(request).await
    }

    async fn fetch_bundle(
        &self,
        _request: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        Err(Status::not_found("no bundle is kept here"))
    }

    async fn reboot(
        &self,
        _request: Request<v1::RebootRequest>,
    ) -> Result<Response<v1::RebootResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn console(
        &self,
        _request: Request<v1::ConsoleRequest>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let frame = v1::ConsoleFrame { snapshot: vec![7; 64 << 10] };
        let made = Arc::clone(&self.made);
        Ok(Response::new(Box::pin(futures::stream::repeat_with(move || {
            made.fetch_add(1, Ordering::Relaxed);
            Ok(frame.clone())
        }))))
    }

    async fn get_attestation_keys(
        &self,
        _request: Request<v1::GetAttestationKeysRequest>,
    ) -> Result<Response<v1::GetAttestationKeysResponse>, Status> {
        Ok(Response::new(v1::GetAttestationKeysResponse::default()))
    }

    async fn attest(
        &self,
        _request: Request<v1::AttestRequest>,
    ) -> Result<Response<v1::AttestResponse>, Status> {
        Ok(Response::new(v1::AttestResponse::default()))
    }

    async fn announce_firmware_update(
        &self,
        _request: Request<v1::AnnounceFirmwareUpdateRequest>,
    ) -> Result<Response<v1::AnnounceFirmwareUpdateResponse>, Status> {
        Ok(Response::new(v1::AnnounceFirmwareUpdateResponse::default()))
    }

    async fn reset(
        &self,
        _request: Request<v1::ResetRequest>,
    ) -> Result<Response<v1::ResetResponse>, Status> {
        Ok(Response::new(v1::ResetResponse {}))
    }

    async fn unlock(
        &self,
        _request: Request<v1::UnlockRequest>,
    ) -> Result<Response<v1::UnlockResponse>, Status> {
        Ok(Response::new(v1::UnlockResponse {}))
    }
}

/// A server under attack, and an owner who goes on working.
struct Siege {
    running: Running,
    authority: Authority,
    owner: Credentials,
    made: Arc<AtomicUsize>,
}

impl Siege {
    async fn begin(limits: Limits) -> Self {
        let authority = Authority::new().await;
        let made = Arc::new(AtomicUsize::new(0));
        let busy = Busy { made: Arc::clone(&made) };
        let app = App::Grpc(Routes::new(NodeManagementServer::new(busy)));
        let running = Running::start(&authority, authority.node(1).await, app, limits).await;
        let owner = authority.user("ann", Role::Owner, 3).await;
        Self { running, authority, owner, made }
    }

    fn address(&self) -> SocketAddr {
        self.running.address
    }

    async fn client(&self) -> NodeManagementClient<Channel> {
        let connection = self.running.dial(&self.authority, Some(&self.owner)).await;
        NodeManagementClient::new(connection.unwrap().channel)
    }

    /// The owner, with room for one byte of each stream.
    async fn narrow(&self) -> NodeManagementClient<transport::Channel> {
        let roots = tls::roots(std::iter::once(self.authority.der.as_slice())).unwrap();
        let mut config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(self.owner.chain(), self.owner.private_key())
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let tcp = TcpStream::connect(self.address()).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from(node_id(1).to_string()).unwrap();
        let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        let mut io = Some(TokioIo::new(tls));
        let connector = tower::service_fn(move |_uri: http::Uri| {
            let again = || std::io::Error::other("the connection was closed");
            std::future::ready(io.take().ok_or_else(again))
        });
        let endpoint = Endpoint::from_static("http://node").initial_stream_window_size(1_u32);
        NodeManagementClient::new(endpoint.connect_with_connector(connector).await.unwrap())
    }

    /// The owner connects again and is served.
    async fn serves(&self) {
        timeout(SOON, self.is_served()).await.unwrap().unwrap();
    }

    async fn is_served(&self) -> Result<(), Status> {
        let dialled = self.running.dial(&self.authority, Some(&self.owner)).await;
        let connection = dialled.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut client = NodeManagementClient::new(connection.channel);
        client.get_status(v1::GetStatusRequest {}).await.map(drop)
    }

    /// Waits until the server has closed all connections but `left`.
    async fn lets_go(&self, left: u64) {
        let end = Instant::now() + SOON;
        while self.running.metrics.open.get() > left {
            assert!(Instant::now() < end, "{} are open", self.running.metrics.open.get());
            sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn garbage_ends_its_own_connection_and_nothing_else() {
    let siege = Siege::begin(Limits::default()).await;
    let kinds: [Vec<u8>; 5] = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        vec![0; 5000],
        // A record of TLS that claims the greatest possible length.
        [&[0x16, 3, 1, 0xff, 0xff][..], &[1; 100]].concat(),
        (0..10_000_u32).flat_map(u32::to_le_bytes).collect(),
    ];
    let attacks = kinds.iter().cycle().take(50).map(|garbage| async {
        let mut tcp = TcpStream::connect(siege.address()).await.unwrap();
        // The server may hang up before all of it is written.
        let _written = tcp.write_all(garbage).await;
        let _shut = tcp.shutdown().await;
        let mut answer = Vec::new();
        let _read = timeout(SOON, tcp.read_to_end(&mut answer)).await.unwrap();
    });
    tokio::join!(join_all(attacks), siege.serves());
    siege.serves().await;
    siege.lets_go(2).await;
    assert_eq!(siege.running.metrics.handshakes_failed.get(), 50);
    siege.running.stop().await;
}

#[tokio::test]
async fn stalled_handshakes_block_no_other_caller() {
    let limits = Limits { handshake: Duration::from_millis(500), ..Limits::default() };
    let siege = Siege::begin(limits.clone()).await;
    let mut half_open = Vec::new();
    for n in 0..200 {
        let mut tcp = TcpStream::connect(siege.address()).await.unwrap();
        if n % 2 == 0 {
            // The beginning of a hello, and then nothing.
            tcp.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1]).await.unwrap();
        }
        half_open.push(tcp);
    }
    siege.serves().await;
    let open = siege.running.metrics.open.get();
    assert!(open <= 2 + u64::try_from(limits.handshakes_per_address).unwrap(), "{open}");
    siege.lets_go(1).await;
    siege.serves().await;
    drop(half_open);
    siege.running.stop().await;
}

#[tokio::test]
async fn idle_untrusted_connections_are_replaced() {
    let limits = Limits { untrusted_per_address: 4, ..Limits::default() };
    let siege = Siege::begin(limits).await;
    let mut held = Vec::new();
    for seed in 0..20 {
        let untrusted = self_signed(seed, None);
        held.push(siege.running.dial(&siege.authority, Some(&untrusted)).await.unwrap());
    }
    siege.lets_go(5).await;
    siege.serves().await;
    siege.running.stop().await;
}

#[tokio::test]
async fn an_idle_untrusted_caller_is_disconnected() {
    let limits = Limits { untrusted_idle: Duration::from_millis(100), ..Limits::default() };
    let siege = Siege::begin(limits).await;
    let _idle = siege.running.dial(&siege.authority, None).await.unwrap();
    siege.lets_go(0).await;
    siege.running.stop().await;
}

#[tokio::test]
async fn a_user_that_connects_without_end_leaves_a_bounded_number_of_lines() {
    let tree = Tree::new(None);
    let subscriber = tracing_subscriber::registry().with(ToTree(tree.clone()));
    let _default = tracing::subscriber::set_default(subscriber);
    let siege = Siege::begin(Limits { known_per_name: 1, ..Limits::default() }).await;
    let begun = Instant::now();
    let mut owner = siege.client().await;
    owner.get_status(v1::GetStatusRequest {}).await.unwrap();
    let closed = &siege.running.metrics.crowded_out;
    for connection in 1..=40 {
        // The server may hang up before the client has a channel.
        let _channel = siege.running.dial(&siege.authority, Some(&siege.owner)).await;
        while closed.get() < connection {
            assert!(begun.elapsed() < 4 * SOON, "{} were closed", closed.get());
            sleep(Duration::from_millis(1)).await;
        }
    }
    owner.get_status(v1::GetStatusRequest {}).await.unwrap();
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
    siege.running.stop().await;
    let lines = tree.backlog(&Query::all());
    let lines = lines.iter().map(|entry| entry.body.to_string());
    let lines = lines.filter(|line| line.contains("its peer has as many")).count();
    // Ten at once, and one a second.
    assert!((10..=11 + seconds).contains(&lines), "{lines} lines in {seconds} s");
}

#[tokio::test]
async fn ten_thousand_connections_leave_room_for_the_owner() {
    let siege = Siege::begin(Limits::default()).await;
    let address = siege.address();
    let most = std::sync::atomic::AtomicU64::new(0);
    let flood = async {
        for _ in 0..100 {
            let wave = (0..100).map(|_| TcpStream::connect(address));
            let wave = join_all(wave).await;
            let open = siege.running.metrics.open.get();
            most.fetch_max(open, Ordering::Relaxed);
            drop(wave);
        }
    };
    let work = async {
        // A handshake may have to make way where thousands come from its own address; a
        // retry gets through.
        for _ in 0..10 {
            let end = Instant::now() + SOON;
            while siege.is_served().await.is_err() {
                assert!(Instant::now() < end);
            }
        }
    };
    tokio::join!(flood, work);
    // Connections that have already ended may still wait in the socket.
    siege.lets_go(10).await;
    let most = most.into_inner();
    let bound = u64::try_from(Limits::default().handshakes_per_address).unwrap() + 20;
    assert!(most <= bound, "{most} connections were held at once");
    assert!(siege.running.metrics.accepted.get() > 1000);
    siege.serves().await;
    siege.running.stop().await;
}

#[tokio::test]
async fn an_upload_is_as_long_as_it_is_and_each_piece_of_it_is_bounded() {
    let limits = Limits { message: 64 << 10, ..Limits::default() };
    let siege = Siege::begin(limits).await;
    let upload = async |size: usize, count: usize| {
        let piece = v1::UpdateRequest { data: vec![7; size], ..Default::default() };
        let pieces = futures::stream::iter(std::iter::repeat_n(piece, count));
        let answer = siege.client().await.update(pieces).await?;
        let mut told = answer.into_inner();
        Ok::<_, Status>(told.message().await?.unwrap().bytes)
    };
    // In all, many times the longest message.
    assert_eq!(upload(32 << 10, 64).await.unwrap(), 2 << 20);
    // tonic's own bound of a message.
    let status = upload(5 << 20, 1).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    siege.serves().await;
    siege.running.stop().await;
}

#[tokio::test]
async fn a_message_of_a_hundred_megabytes_is_refused_before_it_is_read() {
    let siege = Siege::begin(Limits::default()).await;
    let mut client = siege.client().await.max_encoding_message_size(usize::MAX);
    let huge = v1::UnlockRequest { recovery_key: "x".repeat(100 << 20) };
    let refused = timeout(SOON, client.unlock(huge)).await.unwrap().unwrap_err();
    assert_ne!(refused.code(), Code::Ok);
    siege.serves().await;

    // An untrusted connection is rejected at once, and the one that it may make is
    // short.
    let untrusted = siege.running.dial(&siege.authority, None).await.unwrap();
    let mut untrusted = NodeManagementClient::new(untrusted.channel);
    let long = v1::UnlockRequest { recovery_key: "x".repeat(1 << 20) };
    let refused = timeout(SOON, untrusted.unlock(long)).await.unwrap().unwrap_err();
    assert_ne!(refused.code(), Code::Ok);
    siege.serves().await;
    siege.running.stop().await;
}

#[tokio::test]
async fn requests_that_never_end_take_a_bounded_part_of_the_memory() {
    let limits = Limits { messages: 64 << 10, ..Limits::default() };
    let siege = Siege::begin(limits).await;
    let owner = siege.running.dial(&siege.authority, Some(&siege.owner)).await.unwrap();
    // Each sends its message, and never says that this was all.
    let begin = |_call| {
        let mut grpc = tonic::client::Grpc::new(owner.channel.clone());
        async move {
            let request = v1::UnlockRequest { recovery_key: "x".repeat(16 << 10) };
            let endless = iter([request]).chain(pending());
            let codec = tonic_prost::ProstCodec::<v1::UnlockRequest, v1::UnlockResponse>::default();
            let path = http::uri::PathAndQuery::from_static("/polis.v1.NodeManagement/Unlock");
            grpc.ready().await.unwrap();
            let refused = grpc.client_streaming(Request::new(endless), path, codec).await;
            refused.unwrap_err().code()
        }
    };
    let mut begun: FuturesUnordered<_> = (0..20).map(begin).collect();
    // Three of them fit.
    for _refused in 3..20 {
        let code = timeout(SOON, begun.next()).await.unwrap();
        assert_eq!(code, Some(Code::ResourceExhausted));
    }
    siege.serves().await;
    drop(begun);
    siege.running.stop().await;
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_cut_and_others_are_served() {
    let limits = Limits { stall: Duration::from_millis(200), ..Limits::default() };
    let siege = Siege::begin(limits).await;
    let mut slow = siege.client().await;
    // Never read: the windows fill, and then nothing moves.
    let stream = slow.console(v1::ConsoleRequest {}).await.unwrap().into_inner();
    let end = Instant::now() + SOON;
    while siege.running.metrics.stalled.get() == 0 {
        assert!(Instant::now() < end);
        siege.serves().await;
        sleep(Duration::from_millis(20)).await;
    }
    drop(stream);
    siege.serves().await;
    siege.running.stop().await;
}

#[tokio::test]
async fn streams_that_take_nothing_hold_a_bounded_number_of_messages() {
    let siege = Siege::begin(Limits::default()).await;
    // Both rounds have the places of one caller.
    let mut owner = siege.client().await;
    owner.get_status(v1::GetStatusRequest {}).await.unwrap();
    for _round in 0..2 {
        siege.lets_go(1).await;
        let before = siege.made.load(Ordering::Relaxed);
        let made = || siege.made.load(Ordering::Relaxed) - before;
        let narrow = siege.narrow().await;
        let calls = (0..100).map(|_| {
            let mut client = narrow.clone();
            async move { client.console(v1::ConsoleRequest {}).await }
        });
        let answers = timeout(SOON, join_all(calls)).await.unwrap();
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        let end = Instant::now() + SOON;
        while made() < ANSWERS_MAX {
            assert!(Instant::now() < end, "{} messages were made", made());
            sleep(Duration::from_millis(1)).await;
        }
        // Other answers to the same caller do not wait.
        owner.get_status(v1::GetStatusRequest {}).await.unwrap();
        siege.serves().await;
        assert_eq!(made(), ANSWERS_MAX);
    }
    siege.running.stop().await;
}

#[tokio::test]
async fn the_streams_of_a_caller_are_bounded_on_all_its_connections_together() {
    let siege = Siege::begin(Limits::default()).await;
    let (mut clients, mut held) = (Vec::new(), Vec::new());
    for _connection in 0..2 {
        let mut client = siege.client().await;
        for _stream in 0..STREAMS_MAX / 2 {
            held.push(client.console(v1::ConsoleRequest {}).await.unwrap());
        }
        clients.push(client);
    }
    let mut next = siege.client().await;
    let refused = next.console(v1::ConsoleRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().starts_with("owner ann has 128 streams open here"), "{refused}");
    // Its other calls are served, and so is another user's stream.
    next.get_status(v1::GetStatusRequest {}).await.unwrap();
    let bob = siege.authority.user("bob", Role::Viewer, 4).await;
    let bob = siege.running.dial(&siege.authority, Some(&bob)).await.unwrap();
    NodeManagementClient::new(bob.channel).console(v1::ConsoleRequest {}).await.unwrap();
    // A stream that ends makes room for another.
    drop(held.pop());
    let end = Instant::now() + SOON;
    while next.console(v1::ConsoleRequest {}).await.is_err() {
        assert!(Instant::now() < end, "the stream that ended still counts");
        sleep(Duration::from_millis(10)).await;
    }
    drop((held, clients));
    siege.running.stop().await;
}

#[tokio::test]
async fn an_untrusted_caller_is_rate_limited_and_the_owner_is_not() {
    let siege = Siege::begin(Limits::default()).await;
    let untrusted = siege.running.dial(&siege.authority, None).await.unwrap();
    let mut client = NodeManagementClient::new(untrusted.channel);
    let mut codes = std::collections::BTreeMap::new();
    for _ in 0..200 {
        let refused = client.get_status(v1::GetStatusRequest {}).await.unwrap_err();
        *codes.entry(format!("{:?}", refused.code())).or_insert(0) += 1;
    }
    let (rate, burst) = Limits::default().untrusted_rate;
    assert!(
        codes["ResourceExhausted"] > 200 - i32::try_from(burst + 20 * rate).unwrap(),
        "{codes:?}"
    );
    let mut owner = siege.client().await;
    for _ in 0..200 {
        owner.get_status(v1::GetStatusRequest {}).await.unwrap();
    }
    siege.running.stop().await;
}

#[tokio::test]
async fn streams_beyond_the_bound_wait_for_their_turn() {
    let limits = Limits { streams: 4, ..Limits::default() };
    let siege = Siege::begin(limits).await;
    let mut client = siege.client().await;
    // From the first answer on, a client knows the bound.
    client.get_status(v1::GetStatusRequest {}).await.unwrap();
    let calls = (0..100).map(|_| {
        let mut client = client.clone();
        async move { client.get_status(v1::GetStatusRequest {}).await }
    });
    let done = timeout(SOON, join_all(calls)).await.unwrap();
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    siege.running.stop().await;
}
