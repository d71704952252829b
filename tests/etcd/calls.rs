//! The calls of nodes and of people to the leader, as stories make them.

use polis_control::consensus::Start;
use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_wire::identity::NodeKey;
use polis_wire::node_roles::Role;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::{Client, Repeat};
use tonic::{Code, Status};

use crate::curators::{Cluster, Curator, address, credentials, invitation, self_signed};
use crate::harness::{Machine, Node};

/// Admits a machine, by the calls that it and an operator make.
pub(crate) async fn admit(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
) -> Node {
    machine.start(invite(cluster, of, owner, machine).await)
}

/// The same, up to the start orders of its member of etcd.
pub(crate) async fn invite(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
) -> Start {
    invite_with(cluster, of, owner, machine, &NodeKey::generate().unwrap()).await
}

/// The same, of a machine with this join key.
pub(crate) async fn invite_with(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
    join_key: &NodeKey,
) -> Start {
    let ticket = ticket(owner).await;
    let untrusted = cluster.client(of, self_signed(&machine.key));
    let register = |ticket: Vec<u8>| {
        let join_key = join_key.public_key().to_vec();
        let untrusted = &untrusted;
        async move {
            untrusted
                .call(Repeat::Allowed, |channel| {
                    let request = v1::RegisterNodeRequest {
                        register_ticket: ticket.clone(),
                        join_key: join_key.clone(),
                        ..Default::default()
                    };
                    async move {
                        Ok(CuratorClient::new(channel).register_node(request).await?.into_inner())
                    }
                })
                .await
        }
    };
    let refused = register(vec![1; 32]).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::PermissionDenied, "ticket-wrong"));
    let registered = register(ticket.clone()).await.unwrap();
    assert_eq!(registered.state(), v1::NodeState::New);

    let commit = || {
        let request = v1::CommitNodeRequest {
            storage_kind: v1::StorageKind::Insecure.into(),
            ..Default::default()
        };
        untrusted.call(Repeat::Allowed, move |channel| {
            let request = request.clone();
            async move { Ok(CuratorClient::new(channel).commit_node(request).await?.into_inner()) }
        })
    };
    let refused = commit().await.unwrap_err();
    assert_eq!(reason(&refused), "not-approved");
    let approved = approve(owner, &machine.name()).await;
    assert_eq!(approved.node.unwrap().state(), v1::NodeState::Standby);
    assert_eq!(register(ticket).await.unwrap().state(), v1::NodeState::Standby);
    let entered = commit().await.unwrap();
    assert_eq!(entered, commit().await.unwrap(), "the same certificate again");

    let own = credentials(&machine.key, entered.certificate, cluster.authority.clone());
    let node = cluster.client(of, own);
    let join = || {
        let address = address(machine).to_string();
        node.call(Repeat::Allowed, move |channel| {
            let request = v1::JoinConsensusRequest { address: address.clone() };
            async move { Ok(CuratorClient::new(channel).join_consensus(request).await?.into_inner()) }
        })
    };
    let refused = join().await.unwrap_err();
    assert_eq!(reason(&refused), "no-role");
    let refused = worker_certificate(&node, [9; 32]).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::FailedPrecondition, "no-worker"));
    let roles = Some(Role::record(&[Role::ConsensusMember]));
    let given = change_roles(owner, &machine.name(), roles, None).await.unwrap();
    assert_eq!(given.roles, roles);
    invitation(join().await.unwrap(), machine)
}

/// Asks for the certificate of kubelet for this key.
async fn worker_certificate(
    node: &Client,
    key: [u8; 32],
) -> Result<v1::IssueWorkerCertificateResponse, Status> {
    node.call(Repeat::Allowed, move |channel| async move {
        let request = v1::IssueWorkerCertificateRequest {
            purpose: v1::WorkerCertificate::Kubelet.into(),
            public_key: key.to_vec(),
        };
        Ok(CuratorClient::new(channel).issue_worker_certificate(request).await?.into_inner())
    })
    .await
}

/// Sends a heartbeat of a node.
pub(crate) async fn heartbeat(
    node: &Client,
    request: v1::HeartbeatRequest,
) -> v1::HeartbeatResponse {
    let answer = node.call(Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { Ok(CuratorClient::new(channel).heartbeat(request).await?.into_inner()) }
    });
    answer.await.unwrap()
}

/// The ticket with which machines register.
pub(crate) async fn ticket(owner: &Client) -> Vec<u8> {
    let answer = owner.call(Repeat::Allowed, |channel| async move {
        let request = v1::GetRegisterTicketRequest::default();
        Ok(ManagementClient::new(channel).get_register_ticket(request).await?.into_inner())
    });
    answer.await.unwrap().ticket
}

/// Approves a machine that has registered.
pub(crate) async fn approve(owner: &Client, node_id: &str) -> v1::ApproveNodeResponse {
    let answer = owner.call(Repeat::Allowed, |channel| {
        let node_id = node_id.to_owned();
        let request = v1::ApproveNodeRequest { node_id, ..Default::default() };
        async move { Ok(ManagementClient::new(channel).approve_node(request).await?.into_inner()) }
    });
    answer.await.unwrap()
}

/// Gives roles to a node, and takes others away; a refusal is handed on.
async fn change_roles(
    client: &Client,
    node_id: &str,
    add: Option<v1::NodeRoles>,
    remove: Option<v1::NodeRoles>,
) -> Result<v1::NodeInfo, Status> {
    client
        .call(Repeat::Allowed, |channel| {
            let request = v1::UpdateNodeRolesRequest { node_id: node_id.to_owned(), add, remove };
            async move {
                Ok(ManagementClient::new(channel).update_node_roles(request).await?.into_inner())
            }
        })
        .await
}

/// Takes the vote of a node away; a refusal is handed on.
pub(crate) async fn take_consensus(client: &Client, node_id: &str) -> Result<v1::NodeInfo, Status> {
    let remove = Some(Role::record(&[Role::ConsensusMember]));
    change_roles(client, node_id, None, remove).await
}

/// Deletes a node; a refusal is handed on.
pub(crate) async fn delete(client: &Client, node_id: &str, force: bool) -> Result<(), Status> {
    client
        .call(Repeat::Allowed, |channel| {
            let request = v1::DeleteNodeRequest { node_id: node_id.to_owned(), force };
            async move { ManagementClient::new(channel).delete_node(request).await.map(drop) }
        })
        .await
}

/// The reason of a refusal, in a word.
pub(crate) fn reason(status: &Status) -> &str {
    status.metadata().get(REASON).map_or("", |word| word.to_str().unwrap())
}

/// Writes a number into the record of a node, as an operator would.
pub(crate) async fn write(
    client: &Client,
    node_id: &str,
    number: u64,
) -> Result<v1::NodeInfo, Status> {
    client
        .call(Repeat::Allowed, |channel| {
            let request = v1::UpdateNodeLabelsRequest {
                node_id: node_id.to_owned(),
                set: [("number".to_owned(), number.to_string())].into(),
                remove: Vec::new(),
            };
            async move {
                Ok(ManagementClient::new(channel).update_node_labels(request).await?.into_inner())
            }
        })
        .await
}
