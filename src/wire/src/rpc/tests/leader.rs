//! How a client finds the leader among the curators, and follows it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::{Local, app, local};
use crate::pki::Facts;
use crate::rpc::client::{Candidate, Client, Repeat, Timeouts};
use crate::rpc::testing::{Authority, Running, SOON, node_id};
use crate::rpc::{AccessList, Credentials, Limits, Role, is_removal};

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
    let timeouts = Timeouts { attempt: Duration::from_secs(2), total: SOON };
    Client::fixed(servers.iter().map(candidate).collect(), credentials, timeouts)
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
    let timeouts = Timeouts { attempt, total: SOON };
    let candidates = vec![Candidate { node: None, host, port }];
    let client = Client::fixed(candidates, authority.node(5).await, timeouts);
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
    let silent = (2..12).map(|last| at(format!("127.0.0.{last}"), leader));
    let candidates = [at(here(), stale)].into_iter().chain(silent).chain([at(here(), leader)]);
    let timeouts = Timeouts { attempt: SOON, total: SOON };
    let client = Client::fixed(candidates.collect(), authority.node(5).await, timeouts);
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
async fn an_alert_of_an_unverified_peer_is_not_a_removal() {
    let authority = Authority::new().await;
    let untrusted = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = untrusted.local_addr().unwrap().port();
    let candidates = vec![Candidate { node: None, host: "127.0.0.1".to_owned(), port }];
    let timeouts = Timeouts { attempt: Duration::from_secs(2), total: SOON };
    let client = Client::fixed(candidates, authority.node(5).await, timeouts);
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
