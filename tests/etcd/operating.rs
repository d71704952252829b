//! The operation of a running cluster, by the calls that operators make.

use std::time::Duration;

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use futures::StreamExt as _;
use polis_control::consensus::MemberStatus;
use polis_control::curator::state::Request as Change;
use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_tests::{Story, story};
use polis_wire::age;
use polis_wire::identity::NodeKey;
use polis_wire::node_roles::Role;
use polis_wire::pki::{Crl, Facts};
use polis_wire::rpc::client::{Channel, Client, Expect, Trust, dial};
use polis_wire::snapshot::Checksum;
use tonic::{Code, Status};

use crate::calls::{delete, invite, invite_with, reason, take_consensus, write};
use crate::curators::{BootstrapNode, Curator, address, credentials, self_signed};
use crate::harness::Machine;
use crate::voters::voter;

/// The key that its holder decrypts with.
pub(crate) fn identity(key: &NodeKey) -> age::Identity {
    let der = key.to_pkcs8_der().unwrap();
    age::Identity::of_key(&SigningKey::from_pkcs8_der(&der).unwrap())
}

/// The connection to the present leader.
async fn channel(client: &Client) -> Channel {
    client.leader().await.unwrap().connection.channel
}

/// The CRL of the cluster, by a stream of its own.
async fn revoked(client: &Client) -> Crl {
    let mut curator = CuratorClient::new(channel(client).await);
    let mut events = curator.watch(v1::WatchRequest::default()).await.unwrap().into_inner();
    loop {
        let event = events.message().await.unwrap().unwrap();
        if let Some(crl) = Crl::read(&event.crl) {
            return crl;
        }
    }
}

async fn nodes(client: &Client) -> Vec<v1::NodeInfo> {
    let mut management = ManagementClient::new(channel(client).await);
    let found = management.get_nodes(v1::GetNodesRequest::default()).await.unwrap().into_inner();
    found.map(Result::unwrap).collect().await
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads members_leave_one_by_one_and_never_one_too_many).takes(30),
    story!(threads an_operator_with_a_machine_of_its_own_reads_no_secret),
    story!(threads a_learner_that_never_started_is_taken_out_and_the_next_one_enters).takes(15),
    story!(threads a_departure_that_started_is_finished_by_any_leader).takes(15),
    story!(threads a_change_of_roles_that_a_record_refuses_is_not_begun_and_never_for_ever)
        .takes(10),
    story!(threads a_copied_disk_gets_no_key_while_its_node_runs).takes(15),
    story!(threads a_lone_curator_tells_all_there_is_to_know),
    story!(threads a_node_that_reports_without_end_is_refused_and_its_record_stays),
];

async fn members_leave_one_by_one_and_never_one_too_many() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let [one, two, three] = &machines;
    let BootstrapNode { node: first, cluster, curator: curator_one, own, owner } =
        BootstrapNode::start(one).await;
    let last = take_consensus(&owner, &one.name()).await.unwrap_err();
    assert_eq!((last.code(), reason(&last)), (Code::FailedPrecondition, "quorum"));

    let (second, curator_two, _) = voter(&cluster, &[&curator_one], &owner, two).await;
    let of = [&curator_one, &curator_two];
    let (third, curator_three, _) = voter(&cluster, &of, &owner, three).await;
    let of = [&curator_one, &curator_two, &curator_three];
    let owner = cluster.owner(&of).await;
    // A watcher of all nodes receives every later event.
    let viewer = cluster.owner(&of).await;
    let mut watch = CuratorClient::new(channel(&viewer).await);
    let mut watch = watch.watch(v1::WatchRequest::default()).await.unwrap().into_inner();
    let known = watch.message().await.unwrap().unwrap();
    assert_eq!((known.nodes.len(), known.current), (3, true));

    // With the third dead, no living voter may go.
    third.stop().await;
    curator_three.supervisor.stop().await;
    let refused = loop {
        match take_consensus(&owner, &two.name()).await {
            Err(refused) if refused.code() == Code::FailedPrecondition => break refused,
            // The connection to the third is not closed yet.
            other => assert!(other.is_err(), "the second was let go"),
        }
    };
    assert_eq!(reason(&refused), "quorum");
    assert!(
        refused.message().contains("2 of 2 voters must answer, of which 1 can be reached"),
        "{refused}"
    );
    let alive = delete(&owner, &three.name(), false).await.unwrap_err();
    assert_eq!(reason(&alive), "still-up");
    // The dead one itself may: it is forgotten, and its credentials are revoked.
    delete(&owner, &three.name(), true).await.unwrap();
    let gone = delete(&owner, &three.name(), true).await.unwrap_err();
    assert_eq!((gone.code(), reason(&gone)), (Code::NotFound, "unknown"));
    first.voter_of(2).await;
    assert_eq!(nodes(&owner).await.len(), 2, "the next answer shows it");
    loop {
        let event = watch.message().await.unwrap().unwrap();
        if event.gone == [three.name()] {
            break;
        }
    }

    let trust = Trust::in_one(cluster.authority.clone());
    let proof = async |at: &Curator| {
        let (host, expect) = (at.address.ip().to_string(), Expect::Curator(Some(at.id)));
        let shown = dial(&host, at.address.port(), expect, &trust, None).await.unwrap();
        Facts::read(&shown.certificate).unwrap().serial
    };
    let proofs = [proof(&curator_one).await, proof(&curator_two).await];

    // The leader is to go itself: another one leads, and does it.
    let begun = std::time::Instant::now();
    let info = take_consensus(&owner, &one.name()).await.unwrap();
    println!("the leader's own member was removed in {:?}", begun.elapsed());
    assert_eq!(info.roles, None);
    assert!(curator_two.term().is_some());
    let ended = loop {
        match watch.message().await {
            // That it is on its way out.
            Ok(Some(_event)) => {}
            ended => break ended,
        }
    };
    assert!(ended.is_err(), "a watch ends with the term: {ended:?}");
    second.voter_of(1).await;
    first.waits("to be out", |status| status.standing != MemberStatus::Voter).await;

    // It is a node as before, without the proof of a curator.
    let (serial, crl) = (Facts::read(&own.certificate).unwrap().serial, revoked(&owner).await);
    let are = [&proofs[0], &proofs[1], &serial].map(|serial| crl.revokes(serial));
    assert_eq!(are, [true, false, false]);
    // Once it is decommissioned, all of it is void.
    let [host, port] =
        [curator_two.address.ip().to_string(), curator_two.address.port().to_string()];
    let beat = async || {
        let port = port.parse().unwrap();
        let way = dial(&host, port, Expect::AnyNode, &trust, Some(&own)).await.ok()?;
        CuratorClient::new(way.channel).heartbeat(v1::HeartbeatRequest::default()).await.ok()
    };
    assert_eq!(beat().await.unwrap().into_inner().interval_ms, 5000);
    let request = v1::DecommissionNodeRequest { node_id: one.name() };
    let mut management = ManagementClient::new(channel(&owner).await);
    let gone = management.decommission_node(request).await.unwrap().into_inner();
    assert_eq!(gone.node.unwrap().state(), v1::NodeState::Decommissioned);
    // The message is on its way for some milliseconds.
    while beat().await.is_some() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut watcher = CuratorClient::new(channel(&owner).await);
    let mut record = watcher.watch(v1::WatchRequest::default()).await.unwrap().into_inner();
    let mut crl = Vec::new();
    // Its certificate is on the list.
    while !Crl::read(&crl).is_some_and(|crl| crl.revokes(&serial)) {
        crl = record.message().await.unwrap().unwrap().crl;
    }
    delete(&owner, &one.name(), false).await.unwrap();
    write(&owner, &two.name(), 1).await.unwrap();

    for curator in [curator_one, curator_two] {
        curator.supervisor.stop().await;
    }
    for node in [first, second] {
        node.stop().await;
    }
}

async fn an_operator_with_a_machine_of_its_own_reads_no_secret() {
    let (machine, taken) = (Machine::new(), Machine::new());
    let BootstrapNode { node, cluster, curator, owner, .. } = BootstrapNode::start(&machine).await;
    let of = [&curator];
    let key = NodeKey::generate().unwrap();
    let now = polis_base::sys::clock::now();
    let (role, public) = (v1::UserRole::Operator, key.public_key());
    let made = cluster.store.create_user("otto", role, &public, now).await.unwrap().der;
    let operator = cluster.client(&of, credentials(&key, made, cluster.authority.clone()));
    let mut operates = ManagementClient::new(channel(&operator).await);
    let denied = |status: Status| assert_eq!(status.code(), Code::PermissionDenied, "{status}");

    let read = v1::GetRegisterTicketRequest::default();
    denied(operates.get_register_ticket(read).await.unwrap_err());
    let rotate = v1::GetRegisterTicketRequest { rotate: true, ..Default::default() };
    denied(operates.get_register_ticket(rotate).await.unwrap_err());
    // The owner hands out parameters, with the ticket, for new machines.
    let mut owns = ManagementClient::new(channel(&owner).await);
    let ticket = owns.get_register_ticket(read).await.unwrap().into_inner().ticket;
    let own = cluster.client(&of, self_signed(&taken.key));
    let mut registers = CuratorClient::new(channel(&own).await);
    let join_key = NodeKey::generate().unwrap().public_key().to_vec();
    let registration =
        v1::RegisterNodeRequest { register_ticket: ticket, join_key, ..Default::default() };
    registers.register_node(registration).await.unwrap();
    let node_id = taken.name();
    let approval = v1::ApproveNodeRequest { node_id: node_id.clone(), ..Default::default() };
    operates.approve_node(approval).await.unwrap();
    let storage_kind = v1::StorageKind::Insecure.into();
    let commitment = v1::CommitNodeRequest { storage_kind, ..Default::default() };
    let entered = registers.commit_node(commitment).await.unwrap().into_inner();

    // The machine is a node, and stays one without a role.
    for role in [Role::ConsensusMember, Role::KubernetesWorker] {
        let (node_id, add) = (node_id.clone(), Some(Role::record(&[role])));
        let request = v1::UpdateNodeRolesRequest { node_id, add, remove: None };
        denied(operates.update_node_roles(request).await.unwrap_err());
    }
    let own = credentials(&taken.key, entered.certificate, cluster.authority.clone());
    let own = cluster.client(&of, own);
    let mut reads = CuratorClient::new(channel(&own).await);
    let enter = v1::JoinConsensusRequest { address: address(&taken).to_string() };
    assert_eq!(reason(&reads.join_consensus(enter).await.unwrap_err()), "no-role");
    let registries = reads.watch_registries(v1::WatchRegistriesRequest {}).await;
    let refused = registries.unwrap().into_inner().message().await.unwrap_err();
    assert_eq!(reason(&refused), "no-worker");
    let recovery = operates.get_recovery_key(v1::GetRecoveryKeyRequest { node_id }).await;
    denied(recovery.unwrap_err());
    // An operator takes a snapshot, and cannot read it.
    let pieces = operates.snapshot_etcd(v1::SnapshotEtcdRequest {}).await.unwrap().into_inner();
    let pieces: Vec<_> = pieces.map(|piece| piece.unwrap().data).collect().await;
    let refused = age::decrypt(&identity(&key), &*pieces.concat(), &mut Vec::new()).unwrap_err();
    assert!(matches!(refused, age::Error::OtherRecipients { recipients: 1 }), "{refused}");
    curator.supervisor.stop().await;
    node.stop().await;
}

async fn a_learner_that_never_started_is_taken_out_and_the_next_one_enters() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let [one, two, three] = &machines;
    let BootstrapNode { node: first, cluster, curator, owner, .. } =
        BootstrapNode::start(one).await;
    // The leader has sent its start orders, and it loses its power for good.
    invite(&cluster, &[&curator], &owner, two).await;
    first.waits("to have a learner", |status| status.members.len() == 2).await;
    let mut management = ManagementClient::new(channel(&owner).await);
    let reported =
        management.get_etcd_status(v1::GetEtcdStatusRequest {}).await.unwrap().into_inner();
    let learner = reported.members.iter().find(|member| member.learner).unwrap();
    assert!(learner.peer_urls[0].contains(&address(two).to_string()), "{learner:?}");
    // The newest write is its certificate, which is not a record.
    assert_eq!(nodes(&owner).await.len(), 2);

    take_consensus(&owner, &two.name()).await.unwrap();
    first.waits("to have no learner", |status| status.members.len() == 1).await;
    delete(&owner, &two.name(), true).await.unwrap();
    let (third, third_curator, _) = voter(&cluster, &[&curator], &owner, three).await;
    first.voter_of(2).await;

    for curator in [curator, third_curator] {
        curator.supervisor.stop().await;
    }
    for node in [first, third] {
        node.stop().await;
    }
}

async fn a_departure_that_started_is_finished_by_any_leader() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let [one, two, three] = &machines;
    let BootstrapNode { node: first, cluster, curator, owner, .. } =
        BootstrapNode::start(one).await;
    // A member that an earlier leader added, for a node without the role.
    first.members.add(&three.key.identity(), &three.peer, first.peers_pki().await).await.unwrap();
    let alone = |status: &polis_control::consensus::Status| status.members.len() == 1;
    first.waits("to have no unrequested learner", alone).await;

    let (second, second_curator, _) = voter(&cluster, &[&curator], &owner, two).await;
    first.voter_of(2).await;
    // It has no curator any more, so that the first leads to the end.
    second_curator.supervisor.stop().await;
    let (id, name) = (two.key.id(), two.name());
    let mut begun = false;
    while !begun {
        let leaves = async {
            while cluster.store.node(id).await.unwrap().leaving.is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        begun = tokio::select! {
            // The caller goes away in the middle.
            () = leaves => true,
            taken = take_consensus(&owner, &name) => {
                assert!(taken.is_err(), "it was done before it was seen to begin");
                false
            }
        };
    }
    first.voter_of(1).await;
    let out = async || {
        loop {
            let node = cluster.store.node(id).await.ok();
            if node.as_ref().is_none_or(|node| node.leaving.is_none()) {
                return node;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let record = polis_tests::patiently(Duration::from_secs(45), out()).await.unwrap().unwrap();
    assert_eq!(record.roles, None);
    second.stop().await;

    // A leader died before it had done anything of this.
    let then = v1::departure::Then::Delete.into();
    let departure = v1::Departure { then, ..Default::default() };
    cluster.store.change(id, Change::Leave(departure)).await.unwrap();
    let gone = polis_tests::patiently(Duration::from_secs(45), out()).await.unwrap();
    assert_eq!(gone, None);
    curator.supervisor.stop().await;
    first.stop().await;
}

async fn a_change_of_roles_that_a_record_refuses_is_not_begun_and_never_for_ever() {
    let machines = [Machine::new(), Machine::new()];
    let [one, two] = &machines;
    let BootstrapNode { node: first, cluster, curator, owner, .. } =
        BootstrapNode::start(one).await;
    invite(&cluster, &[&curator], &owner, two).await;
    let mut management = ManagementClient::new(channel(&owner).await);
    let (id, node_id) = (two.key.id(), two.name());
    let request = v1::DecommissionNodeRequest { node_id: node_id.clone() };
    management.decommission_node(request).await.unwrap();

    let add = Some(Role::record(&[Role::KubernetesWorker]));
    let remove = Some(Role::record(&[Role::ConsensusMember]));
    let before = cluster.store.node(id).await.unwrap();
    let request = v1::UpdateNodeRolesRequest { node_id, add, remove };
    let refused = management.update_node_roles(request).await.unwrap_err();
    assert_eq!(reason(&refused), "decommissioned");
    assert_eq!(cluster.store.node(id).await.unwrap(), before, "nothing has changed");

    // A departure that has begun ends where the record refuses the rest, and where this
    // version does not know the rest.
    let roles = v1::departure::Then::Roles.into();
    for departure in [
        v1::Departure { then: roles, add, remove },
        v1::Departure { then: 99, add: None, remove: None },
    ] {
        cluster.store.change(id, Change::Leave(departure)).await.unwrap();
        let ends = async {
            while cluster.store.node(id).await.unwrap().leaving.is_some() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        polis_tests::patiently(Duration::from_secs(45), ends).await.unwrap();
        assert_eq!(cluster.store.node(id).await.unwrap(), before);
    }
    curator.supervisor.stop().await;
    first.stop().await;
}

/// A copy of the ESP has the key with which its node asks for the other half of the disk's key.
async fn a_copied_disk_gets_no_key_while_its_node_runs() {
    let machines = [Machine::new(), Machine::new()];
    let [one, two] = &machines;
    let BootstrapNode { node: first, cluster, curator, owner, .. } =
        BootstrapNode::start(one).await;
    let join_key = NodeKey::generate().unwrap();
    invite_with(&cluster, &[&curator], &owner, two, &join_key).await;
    let copy = cluster.client(&[&curator], self_signed(&join_key));
    let mut copy = CuratorClient::new(channel(&copy).await);
    let ask = v1::JoinNodeRequest::default();
    let young = copy.join_node(ask.clone()).await.unwrap_err();
    assert_eq!(reason(&young), "running", "the leader cannot know yet");

    // A join key of no node, as after a recovery of the disk that the cluster does not know of.
    let other = cluster.client(&[&curator], self_signed(&NodeKey::generate().unwrap()));
    let mut other = CuratorClient::new(channel(&other).await);
    let stranger = NodeKey::generate().unwrap();
    let own = |key: &NodeKey| key.public_key().to_vec();
    for (node_public_key, expected) in
        [(Vec::new(), "unknown"), (own(&stranger), "unknown"), (own(&two.key), "other-join-key")]
    {
        let named = v1::JoinNodeRequest { node_public_key, ..ask.clone() };
        let refused = other.join_node(named).await.unwrap_err();
        assert_eq!(reason(&refused), expected);
    }

    let node = cluster.client(&[&curator], cluster.credentials(two).await);
    let mut node = CuratorClient::new(channel(&node).await);
    node.heartbeat(v1::HeartbeatRequest::default()).await.unwrap();
    let shown = async |health| {
        while !nodes(&owner).await.iter().any(|n| n.id == two.name() && n.health() == health) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let healthy = shown(v1::NodeHealth::Healthy);
    polis_tests::patiently(Duration::from_secs(10), healthy).await.unwrap();
    let refused = copy.join_node(ask.clone()).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::Unavailable, "running"));
    assert!(refused.message().contains("its disk was copied"), "{refused}");
    // The node was switched off.
    polis_tests::patiently(Duration::from_secs(40), shown(v1::NodeHealth::Late)).await.unwrap();
    copy.join_node(ask).await.unwrap();
    curator.supervisor.stop().await;
    first.stop().await;
}

async fn a_lone_curator_tells_all_there_is_to_know() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, own, owner } = BootstrapNode::start(&machine).await;
    let mut management = ManagementClient::new(channel(&owner).await);

    let info = management
        .get_cluster_info(v1::GetClusterInfoRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!((info.nodes_up, info.leader.as_str()), (1, machine.name().as_str()));
    assert_eq!(info.ca_certificate, cluster.authority);
    let directory = info.cluster_directory.unwrap();
    assert_eq!(directory.nodes[0].addresses, [curator.address.ip().to_string()]);

    // The node reports its state, and from then on owes heartbeats.
    let way = cluster.client(&[&curator], own);
    let mut node_calls = CuratorClient::new(channel(&way).await);
    let mut watch = CuratorClient::new(channel(&owner).await);
    let only = v1::WatchRequest { node_id: machine.name() };
    let mut watch = watch.watch(only).await.unwrap().into_inner();
    let mut first = watch.message().await.unwrap().unwrap();
    let networks = v1::ClusterNetworks {
        pod_network: "172.16.0.0/13".to_owned(),
        service_network: "172.24.0.0/16".to_owned(),
    };
    assert_eq!(first.networks, Some(networks), "those with which the cluster was founded");
    let before = first.nodes.remove(0);
    assert_eq!((before.health(), before.heartbeat_age_ms), (v1::NodeHealth::Absent, -1));
    node_calls.heartbeat(v1::HeartbeatRequest::default()).await.unwrap();
    let healthy = watch.message().await.unwrap().unwrap().nodes.remove(0);
    assert_eq!(healthy.health(), v1::NodeHealth::Healthy);
    assert!((0..5000).contains(&healthy.heartbeat_age_ms));
    let status = v1::NodeStatus { version: "1.2".to_owned(), ..Default::default() };
    let request = v1::UpdateNodeStatusRequest { status: Some(status), ..Default::default() };
    node_calls.update_node_status(request).await.unwrap();
    let reported = watch.message().await.unwrap().unwrap().nodes.remove(0);
    assert_eq!(reported.status.unwrap().version, "1.2");

    // A role of Kubernetes brings a place in the network of pods; the node adds its key.
    let role = v1::UpdateNodeRolesRequest {
        node_id: machine.name(),
        add: Some(Role::record(&[Role::KubernetesWorker])),
        remove: None,
    };
    let given = management.update_node_roles(role).await.unwrap().into_inner();
    let mut place =
        v1::ClusterNetwork { pod_prefix: "172.16.0.0/24".to_owned(), ..Default::default() };
    assert_eq!(given.cluster_network.as_ref(), Some(&place));
    let with_key = |key: &[u8]| v1::UpdateNodeStatusRequest {
        status: Some(v1::NodeStatus::default()),
        wireguard_public_key: key.to_vec(),
    };
    let short = node_calls.update_node_status(with_key(&[7; 31])).await.unwrap_err();
    assert_eq!((short.code(), reason(&short)), (Code::InvalidArgument, "field"));
    place.wireguard_public_key = vec![7; 32];
    node_calls.update_node_status(with_key(&place.wireguard_public_key)).await.unwrap();
    let told = async {
        loop {
            let nodes = watch.message().await.unwrap().unwrap().nodes;
            if nodes.iter().any(|node| node.cluster_network.as_ref() == Some(&place)) {
                return;
            }
        }
    };
    polis_tests::patiently(Duration::from_secs(10), told).await.unwrap();

    let etcd = management.get_etcd_status(v1::GetEtcdStatusRequest {}).await.unwrap().into_inner();
    let member = &etcd.members[0];
    assert!(member.answers && member.applied_index > 0 && member.db_bytes > 0, "{etcd:?}");
    assert_eq!((member.leader, member.told_age_ms), (member.id, 0), "{etcd:?}");
    assert_eq!((etcd.leader, member.node_id.as_str()), (member.id, machine.name().as_str()));

    // A snapshot is whole, and no secret is plain in it: a key of an authority, a ticket.
    let ticket = v1::GetRegisterTicketRequest { rotate: false, lifetime_seconds: 0 };
    let ticket = management.get_register_ticket(ticket).await.unwrap().into_inner().ticket;
    let pieces = management.snapshot_etcd(v1::SnapshotEtcdRequest {}).await.unwrap().into_inner();
    let pieces: Vec<_> = pieces.map(|piece| piece.unwrap().data).collect().await;
    let file = pieces.concat();
    let mut database = Vec::new();
    let identity = identity(&cluster.owner);
    age::decrypt(&identity, &*file, &mut database).unwrap();
    let mut checksum = Checksum::default();
    checksum.add(&database);
    assert!(checksum.is_whole());
    let has = |bytes: &[u8], secret: &[u8]| bytes.windows(secret.len()).any(|part| part == secret);
    for secret in [&*ticket, b"polis:curator/pki/authorities/cluster/key"] {
        assert!(has(&database, secret) && !has(&file, secret), "a plain secret in the snapshot");
    }

    let none = v1::GetRecoveryKeyRequest { node_id: machine.name() };
    let none = management.get_recovery_key(none).await.unwrap_err();
    assert_eq!((none.code(), reason(&none)), (Code::NotFound, "no-recovery-key"));
    for (field, request) in [
        ("node_id", v1::UpdateNodeLabelsRequest { node_id: "x".to_owned(), ..Default::default() }),
        (
            "set",
            v1::UpdateNodeLabelsRequest {
                node_id: machine.name(),
                set: [("a b".to_owned(), String::new())].into(),
                ..Default::default()
            },
        ),
        (
            "set names \"kubernetes.io/os\"",
            v1::UpdateNodeLabelsRequest {
                node_id: machine.name(),
                set: [("kubernetes.io/os".to_owned(), "linux".to_owned())].into(),
                ..Default::default()
            },
        ),
        (
            "remove names \"rack\"",
            v1::UpdateNodeLabelsRequest {
                node_id: machine.name(),
                set: [("rack".to_owned(), "7".to_owned())].into(),
                remove: vec!["rack".to_owned()],
            },
        ),
        (
            "remove",
            v1::UpdateNodeLabelsRequest {
                node_id: machine.name(),
                remove: vec!["-".to_owned()],
                ..Default::default()
            },
        ),
    ] {
        let refused = management.update_node_labels(request).await.unwrap_err();
        assert_eq!((refused.code(), reason(&refused)), (Code::InvalidArgument, "field"));
        assert!(refused.message().starts_with(field), "{refused}");
    }
    let taint = |key: &str| v1::NodeTaint {
        key: key.to_owned(),
        value: String::new(),
        effect: v1::node_taint::Effect::NoExecute.into(),
    };
    let mut taints = v1::UpdateNodeTaintsRequest {
        node_id: machine.name(),
        set: vec![taint("node.kubernetes.io/x")],
        remove: Vec::new(),
    };
    let refused = management.update_node_taints(taints.clone()).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::InvalidArgument, "field"));
    assert!(refused.message().starts_with("set[0].key is \"node.kubernetes.io/x\""), "{refused}");
    taints.set = vec![taint("gpu")];
    let tainted = management.update_node_taints(taints).await.unwrap().into_inner();
    assert_eq!(tainted.taints, [taint("gpu")]);

    // A network is ordered once, however often the call is made.
    let order = |server: &str| v1::ConfigureNodeNetworkRequest {
        node_id: machine.name(),
        configuration: Some(v1::NetworkConfiguration {
            nameservers: vec![server.to_owned()],
            ..Default::default()
        }),
    };
    let bad = management.configure_node_network(order("dns.example")).await.unwrap_err();
    assert_eq!((bad.code(), reason(&bad)), (Code::InvalidArgument, "field"));
    assert!(bad.message().starts_with("configuration.nameservers[0] is"), "{bad}");
    let mut orders = Vec::new();
    for server in ["192.0.2.53", "192.0.2.53", "192.0.2.54"] {
        let node = management.configure_node_network(order(server)).await.unwrap().into_inner();
        orders.push(node.network_order.unwrap());
    }
    assert_eq!(orders[0], orders[1]);
    assert_ne!(orders[1].number, orders[2].number);
    assert_eq!(orders[2].configuration, order("192.0.2.54").configuration);
    curator.supervisor.stop().await;
    node.stop().await;
}

async fn a_node_that_reports_without_end_is_refused_and_its_record_stays() {
    /// Statuses at once. On a slow host one comes back, each ten seconds, before all are sent.
    const AT_ONCE: std::ops::RangeInclusive<usize> = 120..=130;

    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, own, .. } = BootstrapNode::start(&machine).await;
    let own = cluster.client(&[&curator], own);
    let mut reports = CuratorClient::new(channel(&own).await);
    let report = |version: String| {
        let status = v1::NodeStatus { version, ..Default::default() };
        v1::UpdateNodeStatusRequest { status: Some(status), ..Default::default() }
    };
    let mut taken = 0_usize;
    let refused = loop {
        match reports.update_node_status(report(taken.to_string())).await {
            Ok(_taken) => taken += 1,
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("120 statuses at once, and one each 10 s"), "{refused}");
    assert!(AT_ONCE.contains(&taken), "{taken}");
    let record = cluster.store.node(machine.key.id()).await.unwrap();
    assert_eq!(record.status.unwrap().version, (taken - 1).to_string());
    // Its heartbeats are accepted all the same.
    reports.heartbeat(v1::HeartbeatRequest::default()).await.unwrap();
    curator.supervisor.stop().await;
    node.stop().await;
}
