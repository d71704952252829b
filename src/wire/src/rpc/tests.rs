//! The server layer on loopback, with real certificates: which callers are accepted,
//! and what happens to those that lose their access.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use polis_proto::v1::curator_local_server::{CuratorLocal, CuratorLocalServer};
use polis_proto::v1::management_client::ManagementClient;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::WatchStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use tracing_subscriber::layer::SubscriberExt as _;

use super::client::{Candidate, Client, Expect, Patience, Repeat, Trust, dial};
use super::testing::{Authority, Running, SOON, key, node_id, self_signed};
use super::*;
use crate::pki::{Authorities, Facts, Template};
use polis_base::cause;
use polis_base::sys::clock;
use polis_runtime::logtree::layer::ToTree;
use polis_runtime::logtree::{Query, Tree};

/// Answers with the leader, and with the caller's name.
#[derive(Clone)]
struct Local {
    this: u8,
    /// Seed and address of the leader.
    leader: Arc<watch::Sender<Option<(u8, std::net::SocketAddr)>>>,
    asked: Arc<AtomicUsize>,
    /// Callers that searched for the leader here.
    searched: Arc<AtomicUsize>,
    /// Waits so long before it answers.
    slow: Duration,
}

type Told = Pin<Box<dyn Stream<Item = Result<v1::GetCurrentLeaderResponse, Status>> + Send>>;

#[tonic::async_trait]
impl CuratorLocal for Local {
    type GetCurrentLeaderStream = Told;

    async fn get_current_leader(
        &self,
        _request: Request<v1::GetCurrentLeaderRequest>,
    ) -> Result<Response<Told>, Status> {
        self.searched.fetch_add(1, Ordering::Relaxed);
        let this_id = node_id(self.this).to_string();
        let reported = WatchStream::new(self.leader.subscribe()).map(move |leader| {
            let this_id = this_id.clone();
            Ok(match leader {
                Some((seed, address)) => v1::GetCurrentLeaderResponse {
                    leader_id: node_id(seed).to_string(),
                    leader_address: address.ip().to_string(),
                    leader_port: address.port().into(),
                    this_id,
                    ..Default::default()
                },
                None => v1::GetCurrentLeaderResponse { this_id, ..Default::default() },
            })
        });
        Ok(Response::new(Box::pin(reported)))
    }

    async fn get_ca_certificate(
        &self,
        request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        sleep(self.slow).await;
        let ca_certificate = Peer::of(&request).to_string().into_bytes();
        Ok(Response::new(v1::GetCaCertificateResponse { ca_certificate }))
    }
}

fn local(this: u8) -> Local {
    let (leader, asked, searched) = Default::default();
    Local { this, leader, asked, searched, slow: Duration::ZERO }
}

fn app(local: &Local) -> App {
    App::Grpc(Routes::new(CuratorLocalServer::new(local.clone())))
}

async fn server(authority: &Authority) -> Running {
    Running::start(authority, authority.curator(1).await, app(&local(1)), Limits::default()).await
}

/// The caller as the server identifies it.
async fn who(
    running: &Running,
    authority: &Authority,
    credentials: Option<&Credentials>,
) -> Result<String, Status> {
    let connection = running.dial(authority, credentials).await;
    let connection = connection.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut client = CuratorLocalClient::new(connection.channel);
    let asked = client.get_ca_certificate(v1::GetCaCertificateRequest {}).await?;
    Ok(String::from_utf8(asked.into_inner().ca_certificate).unwrap())
}

#[tokio::test]
async fn each_caller_is_taken_for_who_its_certificate_says() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let none = who(&running, &authority, None).await;
    assert_eq!(none.unwrap(), "a caller without a certificate");
    let key_holder = self_signed(9, None);
    let key_holder = who(&running, &authority, Some(&key_holder)).await;
    assert_eq!(key_holder.unwrap(), format!("the key of {}", node_id(9)));
    let node = authority.node(2).await;
    let node = who(&running, &authority, Some(&node)).await;
    assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
    let user = authority.user("ann", Role::Operator, 3).await;
    let user = who(&running, &authority, Some(&user)).await;
    assert_eq!(user.unwrap(), "operator ann");
    running.stop().await;
}

#[tokio::test]
async fn a_certificate_that_is_no_caller_s_ends_the_handshake() {
    let authority = Authority::new().await;
    let foreign = Authority::new().await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let ago = clock::now() - Duration::from_secs(100 * 24 * 60 * 60);
    let revoked = authority.user("eve", Role::Viewer, 4).await;
    let serial = Facts::read(&revoked.certificate).unwrap().serial;
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(access_list).serials = Arc::new(BTreeSet::from([serial]));
    });
    // A node under the name of another, a user with an unknown role.
    let pretender = authority.sign(&node_id(5).to_string(), Template::Node, 6, clock::now()).await;
    let nobody = authority.sign("x", Template::User { role: "king" }, 7, clock::now()).await;
    let peer = Template::EtcdPeer { host: crate::pki::Host::Name("a".to_owned()) };
    for (bad, reason) in [
        (foreign.node(2).await, "UnknownCA"),
        (
            authority.sign("old", Template::User { role: "owner" }, 8, ago).await,
            "CertificateExpired",
        ),
        (revoked, "CertificateRevoked"),
        (pretender, "CertificateUnknown"),
        (nobody, "CertificateUnknown"),
        (authority.sign("peer", peer, 9, clock::now()).await, "CertificateUnknown"),
    ] {
        let refused = who(&running, &authority, Some(&bad)).await.unwrap_err();
        let causes = cause::line(&refused);
        // The client's error depends on whether it had sent its first call by then.
        let reported = [reason, "BrokenPipe", "reset", "closed", "broken pipe", "unavailable"];
        assert!(reported.iter().any(|reported| causes.contains(reported)), "{reason}: {causes}");
    }
    assert_eq!(running.metrics.handshakes_failed.get(), 6);
    assert!(running.metrics.calls().next().is_none());
    running.stop().await;
}

#[tokio::test]
async fn a_certificate_by_a_clock_that_was_ahead_is_accepted_on_both_sides_and_an_ended_one_not() {
    let authority = Authority::new().await;
    let days = |days: u64| Duration::from_secs(days * 24 * 60 * 60);
    let node = |seed, at| {
        let authority = authority.clone();
        async move { authority.sign(&node_id(seed).to_string(), Template::Node, seed, at).await }
    };
    let early = node(2, clock::now() + days(400)).await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let caller = who(&running, &authority, Some(&early)).await;
    assert_eq!(caller.unwrap(), format!("node {}", node_id(2)));
    running.credentials.send_replace(Some(early));
    assert!(who(&running, &authority, None).await.is_ok());
    let ended = node(3, clock::now() - days(91)).await;
    running.credentials.send_replace(Some(ended));
    let refused = running.dial(&authority, None).await.unwrap_err();
    assert!(refused.help().contains("compare the clock"), "{refused:?}");
    running.stop().await;
}

#[tokio::test]
async fn a_node_that_is_not_up_is_refused_at_each_call() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let node = authority.node(2).await;
    let unknown = who(&running, &authority, Some(&node)).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unavailable);
    running.up(&[1]);
    let down = who(&running, &authority, Some(&node)).await.unwrap_err();
    assert_eq!(down.code(), Code::PermissionDenied);
    assert_eq!(down.message(), format!("node {} is not in state UP", node_id(2)));
    running.stop().await;
}

#[tokio::test]
async fn a_revoked_node_gets_the_reason_at_every_call() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    running.up(&[1, 2]);
    let node = authority.node(2).await;
    let serial = Facts::read(&node.certificate).unwrap().serial;
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(access_list).serials = Arc::new(BTreeSet::from([serial]));
    });
    for _ in 0..20 {
        let refused = who(&running, &authority, Some(&node)).await.unwrap_err();
        assert!(is_removal(&refused), "{refused:?}");
    }
    running.stop().await;
}

#[tokio::test]
async fn only_a_revoked_caller_loses_its_open_streams_at_once() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let open = async |credentials: &Credentials| {
        let connection = running.dial(&authority, Some(credentials)).await.unwrap();
        let mut client = CuratorLocalClient::new(connection.channel);
        let request = v1::GetCurrentLeaderRequest {};
        let mut stream = client.get_current_leader(request).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        stream
    };
    let [ann, bob] =
        [("ann", 3), ("bob", 4)].map(|(name, seed)| authority.user(name, Role::Viewer, seed));
    let (ann, bob) = (ann.await, bob.await);
    let (mut anns, mut bobs) = (open(&ann).await, open(&bob).await);
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(access_list).users.as_mut().unwrap().remove("ann");
    });
    let cut = timeout(SOON, anns.message()).await.unwrap().unwrap_err();
    assert_eq!(cut.code(), Code::Unauthenticated);
    assert!(cut.message().starts_with("the certificate of viewer ann is not "), "{cut}");
    assert_eq!(running.metrics.cut.get(), 1);
    assert!(timeout(Duration::from_millis(200), bobs.message()).await.is_err());
    assert!(who(&running, &authority, Some(&ann)).await.is_err());
    running.stop().await;
}

#[tokio::test]
async fn a_certificate_without_a_record_admits_no_user() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let ann = authority.user("ann", Role::Viewer, 3).await;
    // As the holder of a stolen key of the CA makes it.
    let forged = authority.forged("eve", Role::Owner, 4).await;
    let refused = who(&running, &authority, Some(&forged)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(!is_removal(&refused));
    who(&running, &authority, Some(&ann)).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn no_user_is_served_while_the_users_are_unknown() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let ann = authority.user("ann", Role::Owner, 3).await;
    let known = running.access_list.borrow().users.clone();
    running.access_list.send_modify(|list| Arc::make_mut(list).users = None);
    let refused = who(&running, &authority, Some(&ann)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("which users there are"), "{refused}");
    // The list is late by less than the call waits.
    running.access_list.send_modify(|list| Arc::make_mut(list).users = Some(Default::default()));
    let listed = async {
        sleep(Duration::from_millis(100)).await;
        running.access_list.send_modify(|list| Arc::make_mut(list).users = known);
    };
    let (served, ()) = tokio::join!(who(&running, &authority, Some(&ann)), listed);
    served.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_revoked_caller_learns_the_reason_even_if_the_handshake_fails() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let node = authority.node(5).await;
    let serial = Facts::read(&node.certificate).unwrap().serial;
    running.up(&[5]);
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let patience = Patience { attempt: Duration::from_secs(2), total: SOON };
    let client = Client::fixed(vec![Candidate { node: None, host, port }], node, patience);
    let call = || {
        client.call(Repeat::Allowed, |channel| async {
            let mut local = CuratorLocalClient::new(channel);
            local.get_ca_certificate(v1::GetCaCertificateRequest {}).await.map(drop)
        })
    };
    running.access_list.send_modify(|access_list| {
        Arc::make_mut(&mut Arc::make_mut(access_list).serials).insert(serial);
    });
    let refused = call().await.unwrap_err();
    assert!(is_removal(&refused), "{refused:?}");
    running.stop().await;
}

#[tokio::test]
async fn new_credentials_hold_for_the_next_connection_and_old_ones_go_on() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let first = running.dial(&authority, None).await.unwrap();
    assert_eq!(first.node, node_id(1));
    running.credentials.send_replace(Some(authority.node(2).await));
    let end = Instant::now() + SOON;
    while running.dial(&authority, None).await.unwrap().node != node_id(2) {
        assert!(Instant::now() < end);
        tokio::task::yield_now().await;
    }
    let mut client = CuratorLocalClient::new(first.channel);
    client.get_ca_certificate(v1::GetCaCertificateRequest {}).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_client_takes_no_other_cluster_s_node_and_no_other_node() {
    let authority = Authority::new().await;
    let foreign = Authority::new().await;
    let running = server(&authority).await;
    let error = running.dial(&foreign, None).await.unwrap_err();
    assert!(matches!(error, client::DialError::Handshake { .. }), "{error:?}");
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let trust = Trust::in_one(authority.der.clone());
    let other = dial(&host, port, Expect::Node(node_id(2)), &trust, None).await.unwrap_err();
    let source = std::error::Error::source(&other).unwrap().to_string();
    assert!(source.contains(&node_id(1).to_string()), "{source}");
    // Unchecked, it receives the certificate that it should compare.
    let shown = dial(&host, port, Expect::AnyNode, &Trust::Unchecked, None).await.unwrap();
    let facts = Facts::read(&shown.certificate).unwrap();
    assert_eq!(facts.public_key, key(1).verifying_key().to_bytes());
    running.stop().await;
}

#[tokio::test]
async fn a_server_that_stops_ends_its_streams_with_a_reason_and_at_once() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let connection = running.dial(&authority, Some(&self_signed(9, None))).await.unwrap();
    let mut client = CuratorLocalClient::new(connection.channel);
    let stream = client.get_current_leader(v1::GetCurrentLeaderRequest {}).await.unwrap();
    let mut stream = stream.into_inner();
    stream.message().await.unwrap().unwrap();
    let began = Instant::now();
    let (ended, ()) = tokio::join!(stream.message(), running.stop());
    assert_eq!(ended.unwrap_err().code(), Code::Unavailable);
    assert!(began.elapsed() < Limits::default().stop, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_call_ends_at_its_deadline_and_is_counted() {
    let authority = Authority::new().await;
    let mut local = local(1);
    local.slow = Duration::from_secs(600);
    let limits = Limits { deadline: Duration::from_millis(50), ..Limits::default() };
    let running = Running::start(&authority, authority.curator(1).await, app(&local), limits).await;
    let late = who(&running, &authority, None).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    let (path, calls) = running.metrics.calls().next().unwrap();
    assert_eq!(path, "/polis.v1.CuratorLocal/GetCaCertificate");
    assert_eq!(calls.codes().collect::<Vec<_>>(), [(Code::DeadlineExceeded, 1)]);
    running.stop().await;
}

#[tokio::test]
async fn a_call_that_changes_something_is_in_the_log_with_its_user() {
    let tree = Tree::new(None);
    let subscriber = tracing_subscriber::registry().with(ToTree(tree.clone()));
    let _default = tracing::subscriber::set_default(subscriber);
    let authority = Authority::new().await;
    let running = server(&authority).await;
    for (name, role) in [("ann", Role::Operator), ("bob", Role::Viewer)] {
        let user = authority.user(name, role, 3).await;
        let connection = running.dial(&authority, Some(&user)).await.unwrap();
        let mut client = ManagementClient::new(connection.channel);
        let read = client.get_cluster_info(v1::GetClusterInfoRequest::default()).await.unwrap_err();
        assert_eq!(read.code(), Code::Unimplemented, "this server has no such service");
        let changed = client.approve_node(v1::ApproveNodeRequest::default()).await.unwrap_err();
        let refused = Code::PermissionDenied;
        assert_eq!(changed.code() == refused, role == Role::Viewer, "{changed}");
    }
    running.stop().await;
    let lines = tree.backlog(&Query::all());
    let lines = lines.iter().map(|entry| entry.body.to_string());
    let calls: Vec<_> = lines.filter(|line| line.contains("calls")).collect();
    assert_eq!(calls, ["a user calls ApproveNode by=\"operator ann\" from=127.0.0.1"]);
}

/// Two curators, whose leader the test sets.
struct Pair {
    running: [Running; 2],
    locals: [Local; 2],
    client: Client,
}

impl Pair {
    async fn start(authority: &Authority) -> Self {
        let (one, two) = (local(1), local(2));
        let limits = Limits::default;
        let running = [
            Running::start(authority, authority.curator(1).await, app(&one), limits()).await,
            Running::start(authority, authority.curator(2).await, app(&two), limits()).await,
        ];
        let user = authority.user("ann", Role::Viewer, 3).await;
        let client = client(&running, user);
        Self { running, locals: [one, two], client }
    }

    /// A client of both with other credentials.
    fn of(&self, credentials: Credentials) -> Client {
        client(&self.running, credentials)
    }

    fn leads(&self, which: usize) {
        let leader = (u8::try_from(which).unwrap() + 1, self.running[which].address);
        for local in &self.locals {
            local.leader.send_replace(Some(leader));
        }
    }

    async fn call(&self) -> Result<(), Status> {
        let call = |channel| async {
            let mut client = CuratorLocalClient::new(channel);
            client.get_ca_certificate(v1::GetCaCertificateRequest {}).await.map(drop)
        };
        self.client.call(Repeat::Allowed, call).await
    }

    fn asked(&self) -> [usize; 2] {
        self.locals.each_ref().map(|local| local.asked.load(Ordering::Relaxed))
    }

    fn searched(&self) -> [usize; 2] {
        self.locals.each_ref().map(|local| local.searched.load(Ordering::Relaxed))
    }
}

fn client<R: std::borrow::Borrow<Running>>(servers: &[R], credentials: Credentials) -> Client {
    let candidate = |running: &R| Candidate {
        node: None,
        host: running.borrow().address.ip().to_string(),
        port: running.borrow().address.port(),
    };
    let patience = Patience { attempt: Duration::from_secs(2), total: SOON };
    Client::fixed(servers.iter().map(candidate).collect(), credentials, patience)
}

#[tokio::test]
async fn a_client_asks_the_leader_wherever_it_began() {
    let pair = Pair::start(&Authority::new().await).await;
    pair.leads(1);
    pair.call().await.unwrap();
    pair.call().await.unwrap();
    assert_eq!(pair.asked(), [0, 2]);
    assert_eq!(*pair.client.leader_id().borrow(), Some(node_id(2)));
}

#[tokio::test]
async fn a_call_that_may_be_repeated_survives_the_end_of_the_leader() {
    let pair = Pair::start(&Authority::new().await).await;
    pair.leads(0);
    pair.call().await.unwrap();
    let Pair { running: [first, second], locals, client } = pair;
    let address = second.address;
    let lead = async {
        first.stop().await;
        for local in &locals {
            local.leader.send_replace(Some((2, address)));
        }
    };
    let call = |channel| async {
        let mut client = CuratorLocalClient::new(channel);
        client.get_ca_certificate(v1::GetCaCertificateRequest {}).await.map(drop)
    };
    // Made while the first stops, and still after it.
    let calls = async {
        let end = Instant::now() + SOON;
        while locals[1].asked.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < end);
            client.call(Repeat::Allowed, call).await.unwrap();
        }
    };
    tokio::join!(lead, calls);
    second.stop().await;
}

#[tokio::test]
async fn a_call_that_may_not_be_repeated_is_waited_for_as_long_as_there_is_time() {
    let authority = Authority::new().await;
    let attempt = Duration::from_millis(200);
    let local = Local { slow: 3 * attempt, ..local(1) };
    let running =
        Running::start(&authority, authority.curator(1).await, app(&local), Limits::default())
            .await;
    running.up(&[1, 5]);
    local.leader.send_replace(Some((1, running.address)));
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let patience = Patience { attempt, total: SOON };
    let candidates = vec![Candidate { node: None, host, port }];
    let client = Client::fixed(candidates, authority.node(5).await, patience);
    let call = |channel| async {
        let mut client = CuratorLocalClient::new(channel);
        client.get_ca_certificate(v1::GetCaCertificateRequest {}).await.map(drop)
    };
    client.call(Repeat::Never, call).await.unwrap();
    assert_eq!(local.asked.load(Ordering::Relaxed), 1);
    running.stop().await;
}

#[tokio::test]
async fn a_follower_learns_of_a_new_leader_before_a_call_fails() {
    let pair = Pair::start(&Authority::new().await).await;
    pair.leads(0);
    pair.call().await.unwrap();
    let mut leader = pair.client.leader_id();
    let follow = pair.client.follow();
    let change = async {
        pair.leads(1);
        leader.wait_for(|leader| *leader == Some(node_id(2))).await.unwrap();
    };
    tokio::select! {
        never = follow => match never {},
        changed = timeout(SOON, change) => changed.unwrap(),
    }
    pair.call().await.unwrap();
    assert_eq!(pair.asked(), [1, 1]);
}

#[tokio::test]
async fn without_a_leader_the_client_lists_the_queried_candidates() {
    let pair = Pair::start(&Authority::new().await).await;
    let error = pair.client.leader().await.unwrap_err().to_string();
    assert!(error.contains("it knows no leader"), "{error}");
    assert!(pair.running.iter().all(|one| error.contains(&one.address.to_string())), "{error}");
}

#[tokio::test]
async fn an_election_costs_each_curator_one_connection_of_a_caller() {
    let pair = Pair::start(&Authority::new().await).await;
    let _no_leader = pair.client.leader().await.unwrap_err();
    assert_eq!(pair.searched(), [1, 1]);
    // The next search goes on with both, and one of them announces that it leads.
    let call = pair.call();
    let elected = async {
        sleep(Duration::from_millis(100)).await;
        pair.leads(1);
    };
    let (called, ()) = tokio::join!(call, elected);
    called.unwrap();
    assert_eq!((pair.searched(), pair.asked()), ([1, 1], [0, 1]));
}

#[tokio::test]
async fn a_curator_that_stops_in_an_election_is_asked_again() {
    let authority = Authority::new().await;
    let Pair { running: [first, second], locals, client } = Pair::start(&authority).await;
    let _no_leader = client.leader().await.unwrap_err();
    let gone = first.address;
    first.stop().await;
    let error = client.leader().await.unwrap_err().to_string();
    assert!(error.contains(&format!("{gone}: ")), "{error}");
    assert!(error.contains(&format!("{}: it knows no leader", second.address)), "{error}");
    locals[1].leader.send_replace(Some((2, second.address)));
    let found = timeout(SOON, client.leader()).await.unwrap().unwrap();
    assert_eq!(found.connection.node, node_id(2));
    second.stop().await;
}

#[tokio::test]
async fn a_leader_that_a_curator_names_and_that_is_gone_is_not_called_missing() {
    let pair = Pair::start(&Authority::new().await).await;
    pair.leads(0);
    let Pair { running: [first, second], client, .. } = pair;
    let (gone, follower) = (first.address, second.address);
    first.stop().await;
    let error = client.leader().await.unwrap_err().to_string();
    assert!(error.starts_with(&format!("the leader at {gone} cannot be asked: ")), "{error}");
    assert!(error.contains(&format!("{follower}: reports {gone} as the leader")), "{error}");
    second.stop().await;
}

#[tokio::test]
async fn one_curator_with_an_old_copy_does_not_hide_the_leader() {
    let authority = Authority::new().await;
    let pair = Pair::start(&authority).await;
    pair.leads(1);
    // The first has not learned yet that node 5 is a member.
    pair.running[0].up(&[1, 2]);
    pair.running[1].up(&[1, 2, 5]);
    let client = pair.of(authority.node(5).await);
    let leader = timeout(SOON, client.leader()).await.unwrap().unwrap();
    assert_eq!(leader.connection.node, node_id(2));
}

#[tokio::test]
async fn a_leader_at_the_end_of_a_long_list_is_found_although_the_first_refuses() {
    let authority = Authority::new().await;
    let pair = Pair::start(&authority).await;
    pair.leads(1);
    let [stale, leader] = &pair.running;
    // The first does not know the leader, either.
    pair.locals[0].leader.send_replace(None);
    stale.up(&[1, 2]);
    leader.up(&[1, 2, 5]);
    let at = |host: String, running: &Running| Candidate {
        node: None,
        host,
        port: running.address.port(),
    };
    let here = || "127.0.0.1".to_owned();
    let nobody = (2..12).map(|last| at(format!("127.0.0.{last}"), leader));
    let candidates = [at(here(), stale)].into_iter().chain(nobody).chain([at(here(), leader)]);
    let patience = Patience { attempt: SOON, total: SOON };
    let client = Client::fixed(candidates.collect(), authority.node(5).await, patience);
    let found = timeout(SOON, client.leader()).await.unwrap().unwrap();
    assert_eq!(found.connection.node, node_id(2));
}

#[tokio::test]
async fn a_refusal_counts_without_a_leader() {
    let authority = Authority::new().await;
    let pair = Pair::start(&authority).await;
    for running in &pair.running {
        running.up(&[1, 2]);
    }
    let removed = AccessList { removed: [node_id(5)].into(), ..AccessList::default() };
    pair.running[1].access_list.send_modify(|access_list| {
        let (nodes, users) = (access_list.nodes.clone(), access_list.users.clone());
        *access_list = Arc::new(AccessList { nodes, users, ..removed });
    });
    let client = pair.of(authority.node(5).await);
    let refusal = client.leader().await.unwrap_err();
    assert!(is_removal(&refusal.into()), "of two refusals, the permanent one");
}

#[tokio::test]
async fn a_removed_node_leads_no_client() {
    let authority = Authority::new().await;
    let pair = Pair::start(&authority).await;
    pair.leads(1);
    let shown = authority.curator(2).await.certificate;
    let serial = Facts::read(&shown).unwrap().serial;
    let revoked = AccessList { serials: Arc::new([serial].into()), ..AccessList::default() };
    let removed = AccessList { removed: [node_id(2)].into(), ..AccessList::default() };
    let fallen = [(revoked, "Revoked"), (removed, "it was removed from the cluster")];
    for (access_list, why) in fallen {
        let access_list = watch::Sender::new(Arc::new(access_list));
        let user = authority.user("ann", Role::Viewer, 3).await;
        let client = pair.of(user).wary(access_list.subscribe());
        let error = client.leader().await.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        access_list.send_replace(Arc::default());
        client.leader().await.unwrap();
    }
}

#[tokio::test]
async fn a_node_without_the_certificate_of_a_curator_leads_no_client() {
    let authority = Authority::new().await;
    let pair = Pair::start(&authority).await;
    // A worker at an address of a curator, and one that a curator names.
    let worker = local(4);
    let taken =
        Running::start(&authority, authority.node(4).await, app(&worker), Limits::default()).await;
    let user = || authority.user("ann", Role::Viewer, 3);
    for (at, says) in [(&taken, (4, taken.address)), (&pair.running[0], (4, taken.address))] {
        worker.leader.send_replace(Some(says));
        pair.locals[0].leader.send_replace(Some(says));
        let client = client(&[at], user().await);
        let error = client.leader().await.unwrap_err().to_string();
        let named = error.contains(&node_id(4).to_string());
        assert!(error.contains("NoCurator") && named, "{error}");
    }
    assert_eq!(worker.asked.load(Ordering::Relaxed), 0);
    // As a node it is what it says.
    taken.dial(&authority, None).await.unwrap();
    taken.stop().await;
}

#[tokio::test]
async fn the_certificate_of_a_curator_makes_no_caller() {
    let authority = Authority::new().await;
    let running = server(&authority).await;
    let refused = who(&running, &authority, Some(&authority.curator(2).await)).await;
    assert!(refused.is_err(), "{refused:?}");
    running.stop().await;
}

#[tokio::test]
async fn an_alert_of_an_unverified_peer_is_not_a_removal() {
    let authority = Authority::new().await;
    let untrusted = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = untrusted.local_addr().unwrap().port();
    let candidates = vec![Candidate { node: None, host: "127.0.0.1".to_owned(), port }];
    let patience = Patience { attempt: Duration::from_secs(2), total: SOON };
    let client = Client::fixed(candidates, authority.node(5).await, patience);
    let forge = async {
        let (mut socket, _from) = untrusted.accept().await.unwrap();
        // Record of type alert, TLS 1.2 as always, two bytes: fatal, certificate_revoked.
        let alert = [21, 3, 3, 0, 2, 2, 44];
        tokio::io::AsyncWriteExt::write_all(&mut socket, &alert).await.unwrap();
        socket
    };
    let (leader, _socket) = tokio::join!(client.leader(), forge);
    let error = leader.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("CertificateRevoked"), "{text}");
    assert!(!is_removal(&error.into()), "{text}");
}

#[tokio::test]
async fn a_peer_that_trusts_only_a_former_ca_accepts_the_next_one() {
    let authority = Authority::new().await;
    let (away, stale_curator) = (authority.node(2).await, authority.curator(1).await);
    let ann = authority.user("ann", Role::Operator, 3).await;
    // As many as the bridges reach.
    for rotation in 1..=5 {
        authority.rotate(rotation).await;
        let running = server(&authority).await;
        running.up(&[1, 2]);
        // `who` trusts the first CA alone, and its callers show what that one has signed.
        let node = who(&running, &authority, Some(&away)).await;
        assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
        authority.conclude().await;
        running.credentials.send_replace(Some(authority.curator(1).await));
        let node = who(&running, &authority, Some(&away)).await;
        assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
        let user = who(&running, &authority, Some(&ann)).await;
        assert_eq!(user.unwrap(), "operator ann");
        // The other way round: a server that was away accepts a certificate of the next CA.
        running.credentials.send_replace(Some(stale_curator.clone()));
        let node = who(&running, &authority, Some(&authority.node(2).await)).await;
        assert_eq!(node.unwrap(), format!("node {}", node_id(2)));
        running.stop().await;
    }
}

#[tokio::test]
async fn a_former_ca_certifies_neither_servers_nor_unlisted_callers() {
    let authority = Authority::new().await;
    let stolen = authority.curator(1).await;
    let forged = authority.forged("eve", Role::Owner, 4).await;
    authority.rotate(1).await;
    let both = authority.authorities().await;
    authority.conclude().await;
    let after = authority.authorities().await;
    let running = server(&authority).await;
    running.up(&[1]);
    let eve = who(&running, &authority, Some(&forged)).await.unwrap_err();
    assert_eq!(eve.code(), Code::Unauthenticated, "{eve}");
    running.credentials.send_replace(Some(stolen));
    let (host, port) = (running.address.ip().to_string(), running.address.port());
    let by = |authorities: Arc<Authorities>| {
        let host = host.clone();
        async move { dial(&host, port, Expect::Curator(None), &Trust::cluster(authorities), None).await }
    };
    assert!(by(both).await.is_ok(), "trusted until the rotation is over");
    let refused = by(after).await.unwrap_err();
    assert!(matches!(refused, client::DialError::Handshake { .. }), "{refused:?}");
    running.stop().await;
}
