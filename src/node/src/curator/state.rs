//! The life of a node's record: which requests may change it, and how. Pure.
//!
//! | request \ state | (absent)  | NEW            | STANDBY        | UP, never home | UP, joined | DECOMMISSIONED |
//! |-----------------|-----------|----------------|----------------|----------------|------------|----------------|
//! | register        | NEW       | same, refreshed| same, join key | same, join key | same¹      | refused        |
//! | approve         | not found | STANDBY        | same           | same           | same       | refused        |
//! | commit          | not found | refused        | UP             | same, new keys | refused    | refused        |
//! | join            | not found | refused        | refused        | joined         | same       | refused        |
//! | status          | not found | refused        | refused        | joined         | same       | refused        |
//! | roles, labels   | not found | yes            | yes            | yes            | yes        | refused²       |
//! | name            | not found | yes            | yes            | yes            | yes        | refused²       |
//! | leave⁴          | not found | yes            | yes            | yes            | yes        | yes            |
//! | decommission    | not found | refused        | refused        | DECOMM.        | DECOMM.    | same           |
//! | delete          | not found | gone           | gone           | refused³       | refused³   | gone           |
//!
//! ¹ with the join key that it has; with another one it is refused: another machine
//!   would open the disk of a member.
//! ² roles and a name cannot be given; to take away a missing role changes nothing, and a
//!   name that is taken away is free for another node.
//! ³ unless forced.
//! ⁴ meanwhile the role consensus member cannot be given; taking it ends the departure.
//!
//! No request leaves a node with the role Kubernetes controller and without the role consensus
//! member: its API server reads and writes the etcd beside it.
//!
//! Invariants:
//! - No request moves a record back to an earlier state of a node's life, except after the
//!   record was deleted.
//! - A decommissioned node has no roles and no keys.
//! - Once a node was home, its join key and the keys of its disk stay.
//!
//! What this module does not do: check tickets, fingerprints or policies, ask
//! whether etcd can do without the node (`nodes`, `membership`), or give places in the
//! network of pods (`pod_network`).

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;

use polis_proto::v1::{self, NodeState};

use polis_wire::identity::{Identity, NodeName};
use polis_wire::pod_network::Prefix;

/// Labels of one node; as many as the parameters may give.
const LABELS_MAX: usize = 64;

/// A request to change a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// A machine registers.
    Register(Registration),
    /// An operator approves it.
    Approve,
    /// The machine commits.
    Commit(Commitment),
    /// The node was home, and joins again.
    Join,
    /// The node sends its status.
    Status(v1::NodeStatus),
    /// An operator gives and takes roles.
    Roles {
        /// The roles to give.
        add: v1::NodeRoles,
        /// The roles to take.
        remove: v1::NodeRoles,
    },
    /// An operator sets and removes labels.
    Labels {
        /// New values.
        set: BTreeMap<String, String>,
        /// Keys to remove.
        remove: Vec<String>,
    },
    /// An operator gives it a name, or takes it away where that is empty. That no other
    /// node has it is checked beside the record (`names`).
    Name(String),
    /// The owner has saved the recovery key.
    ForgetRecoveryKey,
    /// It begins to leave etcd, and `leaving` names the next step.
    Leave(v1::Departure),
    /// It ends the departure from etcd: it is out, or must stay.
    Stay,
    /// An operator decommissions it for good.
    Decommission,
    /// An operator deletes it.
    Delete {
        /// Although it is a member: it is dead.
        force: bool,
    },
}

/// The fields of a registration.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// The key that its certificate proved.
    pub identity: Identity,
    /// The public half of the key that it will join with.
    pub join_key: [u8; 32],
    /// Whether it has a TPM and uses it.
    pub tpm: bool,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its address.
    pub address: String,
    /// The name that its parameters give it.
    pub name: Option<NodeName>,
    /// Seconds since 1970.
    pub now: i64,
}

/// The fields of a commit, which the cluster keeps.
#[derive(Clone, PartialEq)]
pub struct Commitment {
    /// The cluster's half of its disk's key; empty without encryption.
    pub cluster_unlock_key: Vec<u8>,
    /// The protection of its disk.
    pub storage_kind: v1::StorageKind,
    /// The key that opens its disk alone; empty without encryption.
    pub recovery_key: Vec<u8>,
}

/// Hides the keys.
impl fmt::Debug for Commitment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Commitment({:?}, …)", self.storage_kind)
    }
}

/// The result for the record.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The record stays.
    Keep(Box<v1::Node>),
    /// The record is written.
    Put(Box<v1::Node>),
    /// The record is removed; this is its last content.
    Delete(Box<v1::Node>),
}

/// The reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The node does not exist.
    #[error("there is no such node")]
    Unknown,
    /// The node was decommissioned.
    #[error(
        "the node was decommissioned and cannot be a member again; delete it first, and give the \
         machine a new disk"
    )]
    Decommissioned,
    /// The node was not approved.
    #[error("the node was not approved yet")]
    NotApproved,
    /// The node has not committed.
    #[error("the node has not committed yet")]
    NotUp,
    /// The node is a member already.
    #[error("the node has committed already: its disk keys cannot be changed")]
    Joined,
    /// Another machine with its name.
    #[error("the node has committed already, with another join key")]
    Known,
    /// The node is a member.
    #[error("the node is a member: decommission it first, or use force if the machine is lost")]
    StillUp,
    /// The node is leaving etcd.
    #[error("the node is leaving etcd; retry once it has left")]
    Leaving,
    /// A controller without etcd.
    #[error(
        "a Kubernetes controller needs a member of etcd beside it, and the node does not have the \
             role consensus-member: give it that role as well"
    )]
    NoMember,
    /// The controller would lose its etcd.
    #[error(
        "the node is a Kubernetes controller, which needs its member of etcd: take the role \
             kubernetes-controller away first, or both at once"
    )]
    Controls,
    /// Too many labels.
    #[error("a node can have {LABELS_MAX} labels")]
    Labels,
    /// Every prefix of the network of pods belongs to a node.
    #[error(
        "the pod network {network} has no free prefix for one more node: take the roles of \
         Kubernetes from a node that does not need them, or delete nodes that are gone"
    )]
    PodNetworkFull {
        /// The network of all pods.
        network: Prefix,
    },
    /// The node is inside a network of Kubernetes.
    #[error(
        "the address {address} of the node is in {network}, which Kubernetes uses for pods and \
         Services: give the machine an address outside of it"
    )]
    InPodNetwork {
        /// The address that it reported.
        address: Ipv4Addr,
        /// The network of pods, or that of Services.
        network: Prefix,
    },
}

/// The result of `request` for the record.
///
/// # Errors
///
/// [`Refusal`].
pub fn step(node: Option<v1::Node>, request: Request) -> Result<Step, Refusal> {
    let Some(node) = node else {
        return match request {
            Request::Register(registration) => Ok(Step::Put(Box::new(register(registration)))),
            _ => Err(Refusal::Unknown),
        };
    };
    let state = node.state();
    let before = node.clone();
    let after = match request {
        Request::Register(registration) => register_again(node, state, registration)?,
        Request::Approve => match state {
            NodeState::New => with_state(node, NodeState::Standby),
            NodeState::Standby | NodeState::Up => node,
            NodeState::Unspecified | NodeState::Decommissioned => {
                return Err(Refusal::Decommissioned);
            }
        },
        Request::Commit(commitment) => commit(node, state, commitment)?,
        Request::Join => {
            member(state)?;
            v1::Node { joined: true, ..node }
        }
        Request::Status(status) => {
            member(state)?;
            v1::Node { joined: true, status: Some(status), ..node }
        }
        Request::Roles { add, remove } => {
            let (enters, leaves) =
                (add.consensus_member.is_some(), remove.consensus_member.is_some());
            if enters && !leaves && node.leaving.is_some() {
                return Err(Refusal::Leaving);
            }
            let leaving = node.leaving.filter(|_| !leaves);
            let had = node.roles.unwrap_or_default();
            let roles = change_roles(had, add, remove);
            let any = roles != v1::NodeRoles::default();
            if any && state == NodeState::Decommissioned {
                return Err(Refusal::Decommissioned);
            }
            if roles.kubernetes_controller.is_some() && roles.consensus_member.is_none() {
                let lost = had.kubernetes_controller.is_some() && had.consensus_member.is_some();
                return Err(if lost { Refusal::Controls } else { Refusal::NoMember });
            }
            v1::Node { roles: any.then_some(roles), leaving, ..node }
        }
        Request::Labels { set, remove } => {
            if state == NodeState::Decommissioned {
                return Err(Refusal::Decommissioned);
            }
            let mut labels = node.labels.clone();
            labels.retain(|key, _| !remove.contains(key));
            labels.extend(set);
            if labels.len() > LABELS_MAX {
                return Err(Refusal::Labels);
            }
            v1::Node { labels, ..node }
        }
        Request::Name(name) => {
            if state == NodeState::Decommissioned && !name.is_empty() {
                return Err(Refusal::Decommissioned);
            }
            v1::Node { name, ..node }
        }
        Request::ForgetRecoveryKey => v1::Node { recovery_key: Vec::new(), ..node },
        Request::Leave(departure) => v1::Node { leaving: Some(departure), ..node },
        Request::Stay => v1::Node { leaving: None, ..node },
        Request::Decommission => match state {
            NodeState::Up | NodeState::Decommissioned => v1::Node {
                roles: None,
                cluster_unlock_key: Vec::new(),
                recovery_key: Vec::new(),
                ..with_state(node, NodeState::Decommissioned)
            },
            NodeState::Unspecified | NodeState::New | NodeState::Standby => {
                return Err(Refusal::NotUp);
            }
        },
        Request::Delete { force } => {
            if state == NodeState::Up && !force {
                return Err(Refusal::StillUp);
            }
            return Ok(Step::Delete(Box::new(node)));
        }
    };
    let step = if after == before { Step::Keep } else { Step::Put };
    Ok(step(Box::new(after)))
}

fn with_state(node: v1::Node, state: NodeState) -> v1::Node {
    v1::Node { state: state.into(), ..node }
}

fn register(registration: Registration) -> v1::Node {
    // The name is taken beside the record: `nodes`.
    let Registration { identity, join_key, tpm, labels, address, now, name: _ } = registration;
    v1::Node {
        public_key: identity.public_key.to_vec(),
        state: NodeState::New.into(),
        labels: labels.into_iter().take(LABELS_MAX).collect(),
        join_key: join_key.to_vec(),
        status: Some(v1::NodeStatus { external_address: address, ..Default::default() }),
        tpm,
        registered_at: now,
        ..Default::default()
    }
}

fn register_again(
    node: v1::Node,
    state: NodeState,
    registration: Registration,
) -> Result<v1::Node, Refusal> {
    match state {
        // A machine registers again every few seconds until it is approved: its newest values
        // count, and the labels that an operator has set meanwhile stay.
        NodeState::New => {
            let v1::Node { join_key, status, tpm, .. } = register(registration);
            Ok(v1::Node { join_key, status, tpm, ..node })
        }
        NodeState::Standby | NodeState::Up if !node.joined => {
            Ok(v1::Node { join_key: registration.join_key.to_vec(), tpm: registration.tpm, ..node })
        }
        NodeState::Standby | NodeState::Up => {
            if node.join_key == registration.join_key {
                Ok(node)
            } else {
                Err(Refusal::Known)
            }
        }
        NodeState::Unspecified | NodeState::Decommissioned => Err(Refusal::Decommissioned),
    }
}

fn commit(node: v1::Node, state: NodeState, commitment: Commitment) -> Result<v1::Node, Refusal> {
    match state {
        NodeState::New => Err(Refusal::NotApproved),
        NodeState::Standby | NodeState::Up if !node.joined => {
            let status = v1::NodeStatus {
                storage_kind: commitment.storage_kind.into(),
                ..node.status.clone().unwrap_or_default()
            };
            Ok(v1::Node {
                cluster_unlock_key: commitment.cluster_unlock_key,
                recovery_key: commitment.recovery_key,
                status: Some(status),
                ..with_state(node, NodeState::Up)
            })
        }
        NodeState::Standby | NodeState::Up => Err(Refusal::Joined),
        NodeState::Unspecified | NodeState::Decommissioned => Err(Refusal::Decommissioned),
    }
}

/// Fails unless the node is a member.
fn member(state: NodeState) -> Result<(), Refusal> {
    match state {
        NodeState::Up => Ok(()),
        NodeState::New | NodeState::Standby => Err(Refusal::NotUp),
        NodeState::Unspecified | NodeState::Decommissioned => Err(Refusal::Decommissioned),
    }
}

/// A role that is both given and taken is taken.
fn change_roles(roles: v1::NodeRoles, add: v1::NodeRoles, remove: v1::NodeRoles) -> v1::NodeRoles {
    fn one<T>(has: Option<T>, add: Option<T>, remove: Option<&T>) -> Option<T> {
        if remove.is_some() { None } else { has.or(add) }
    }
    v1::NodeRoles {
        consensus_member: one(
            roles.consensus_member,
            add.consensus_member,
            remove.consensus_member.as_ref(),
        ),
        kubernetes_controller: one(
            roles.kubernetes_controller,
            add.kubernetes_controller,
            remove.kubernetes_controller.as_ref(),
        ),
        kubernetes_worker: one(
            roles.kubernetes_worker,
            add.kubernetes_worker,
            remove.kubernetes_worker.as_ref(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn registration(join_key: u8) -> Registration {
        Registration {
            identity: Identity::new([7; 32]),
            join_key: [join_key; 32],
            tpm: true,
            labels: BTreeMap::new(),
            address: "192.0.2.1".to_owned(),
            name: None,
            now: 5,
        }
    }

    fn commitment(key: u8) -> Commitment {
        Commitment {
            cluster_unlock_key: vec![key; 32],
            storage_kind: v1::StorageKind::Authenticated,
            recovery_key: vec![key; 32],
        }
    }

    fn consensus() -> v1::NodeRoles {
        let consensus_member = Some(v1::node_roles::ConsensusMember {});
        v1::NodeRoles { consensus_member, ..Default::default() }
    }

    fn roles(add: v1::NodeRoles) -> Request {
        Request::Roles { add, remove: v1::NodeRoles::default() }
    }

    /// The record in each column of the table.
    fn columns() -> [(&'static str, Option<v1::Node>); 6] {
        let new = register(registration(1));
        let standby = with_state(new.clone(), NodeState::Standby);
        let up = commit(standby.clone(), NodeState::Standby, commitment(1)).unwrap();
        let up = v1::Node { roles: Some(consensus()), ..up };
        let joined = v1::Node { joined: true, ..up.clone() };
        let step = step(Some(joined.clone()), Request::Decommission).unwrap();
        let Step::Put(gone) = step else { panic!("it changes") };
        let columns = [Some(new), Some(standby), Some(up), Some(joined), Some(*gone)];
        let [new, standby, up, joined, gone] = columns;
        [
            ("absent", None),
            ("new", new),
            ("standby", standby),
            ("up", up),
            ("joined", joined),
            ("decommissioned", gone),
        ]
    }

    fn word(result: Result<Step, Refusal>) -> String {
        match result {
            Ok(Step::Keep(_)) => "same".to_owned(),
            Ok(Step::Put(node)) if node.joined => format!("{:?}, joined", node.state()),
            Ok(Step::Put(node)) => format!("{:?}", node.state()),
            Ok(Step::Delete(_)) => "gone".to_owned(),
            Err(refusal) => format!("!{refusal:?}"),
        }
    }

    #[test]
    fn every_request_in_every_state_is_as_the_table_says() {
        let status = v1::NodeStatus { version: "1".to_owned(), ..Default::default() };
        let set = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
        let rows = [
            ("register", Request::Register(registration(1))),
            ("register, other key", Request::Register(registration(2))),
            ("approve", Request::Approve),
            ("commit", Request::Commit(commitment(1))),
            ("commit, other keys", Request::Commit(commitment(2))),
            ("join", Request::Join),
            ("status", Request::Status(status)),
            (
                "roles",
                roles(v1::NodeRoles {
                    kubernetes_worker: Some(v1::node_roles::KubernetesWorker {}),
                    ..Default::default()
                }),
            ),
            ("no roles", roles(v1::NodeRoles::default())),
            ("labels", Request::Labels { set, remove: Vec::new() }),
            ("name", Request::Name("web".to_owned())),
            ("no name", Request::Name(String::new())),
            ("leave", Request::Leave(v1::Departure::default())),
            ("decommission", Request::Decommission),
            ("delete", Request::Delete { force: false }),
            ("delete, forced", Request::Delete { force: true }),
        ];
        let mut table = String::new();
        for (name, request) in rows {
            let cells = columns().map(|(_, node)| word(step(node, request.clone())));
            table += &format!("{name}: {}\n", cells.join(" | "));
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn a_decommissioned_node_keeps_no_secret() {
        let [.., (_, Some(gone))] = columns() else { panic!("the last column") };
        assert!(gone.cluster_unlock_key.is_empty() && gone.recovery_key.is_empty());
        assert_eq!(gone.roles, None);
    }

    #[test]
    fn a_leaving_node_cannot_enter_etcd_and_leaving_ends_with_the_role() {
        let [_, _, _, _, (_, joined), _] = columns();
        let departure = v1::Departure { remove: Some(consensus()), ..Default::default() };
        let Ok(Step::Put(leaving)) = step(joined, Request::Leave(departure)) else {
            panic!("it changes")
        };
        assert!(leaving.leaving.is_some());
        let enters = step(Some(*leaving.clone()), roles(consensus()));
        assert_eq!(enters, Err(Refusal::Leaving));
        let taken = Request::Roles { add: v1::NodeRoles::default(), remove: consensus() };
        let Ok(Step::Put(out)) = step(Some(*leaving), taken) else { panic!("it changes") };
        assert_eq!((out.leaving, out.roles), (None, None));
        let Ok(Step::Put(back)) = step(Some(*out), roles(consensus())) else {
            panic!("it changes")
        };
        assert_eq!(back.roles, Some(consensus()));
    }

    #[test]
    fn what_an_operator_gives_a_node_that_waits_is_there_when_it_asks_again() {
        let labels = |key: &str| BTreeMap::from([(key.to_owned(), "b".to_owned())]);
        let asks = Registration { labels: labels("own"), ..registration(1) };
        let again = Registration { address: "192.0.2.2".to_owned(), ..asks.clone() };
        let label = Request::Labels { set: labels("given"), remove: vec!["own".to_owned()] };
        let requests = [
            Request::Register(asks),
            roles(consensus()),
            label,
            Request::Leave(v1::Departure::default()),
            Request::Register(again),
        ];
        let mut node = None;
        for request in requests {
            let Ok(Step::Put(next)) = step(node, request) else { panic!("it changes") };
            node = Some(*next);
        }
        let node = node.unwrap();
        assert_eq!((node.roles, node.labels), (Some(consensus()), labels("given")));
        assert_eq!(node.leaving, Some(v1::Departure::default()));
        assert_eq!(node.status.unwrap().external_address, "192.0.2.2");
    }

    #[test]
    fn a_role_that_is_given_and_taken_is_taken() {
        let both = Request::Roles { add: consensus(), remove: consensus() };
        let [_, _, _, _, (_, joined), _] = columns();
        let Ok(Step::Put(node)) = step(joined, both) else { panic!("it changes") };
        assert_eq!(node.roles, None);
    }

    #[test]
    fn a_controller_has_a_member_of_etcd_from_first_to_last() {
        let controller = v1::NodeRoles {
            kubernetes_controller: Some(v1::node_roles::KubernetesController {}),
            ..Default::default()
        };
        let both = v1::NodeRoles { consensus_member: consensus().consensus_member, ..controller };
        let taken = |remove| Request::Roles { add: v1::NodeRoles::default(), remove };
        let [_, _, (_, standby), _, (_, joined), (_, gone)] = columns();
        // Both at once, one after the other, and back; never the controller alone.
        assert_eq!(step(standby.clone(), roles(controller)), Err(Refusal::NoMember));
        assert!(matches!(step(standby, roles(both)), Ok(Step::Put(_))));
        let Ok(Step::Put(node)) = step(joined, roles(controller)) else { panic!("it changes") };
        assert_eq!(step(Some(*node.clone()), taken(consensus())), Err(Refusal::Controls));
        let Ok(Step::Put(out)) = step(Some(*node.clone()), taken(both)) else {
            panic!("it changes")
        };
        assert_eq!(out.roles, None);
        let Ok(Step::Put(member)) = step(Some(*node), taken(controller)) else {
            panic!("it changes")
        };
        assert_eq!(member.roles, Some(consensus()));
        assert_eq!(step(gone, roles(controller)), Err(Refusal::Decommissioned));
    }

    fn any_request() -> impl Strategy<Value = Request> {
        prop_oneof![
            (0..3_u8).prop_map(|key| Request::Register(registration(key))),
            Just(Request::Approve),
            (0..3_u8).prop_map(|key| Request::Commit(commitment(key))),
            Just(Request::Join),
            Just(Request::Status(v1::NodeStatus::default())),
            Just(roles(consensus())),
            "[mn]?".prop_map(Request::Name),
            Just(Request::ForgetRecoveryKey),
            Just(Request::Leave(v1::Departure::default())),
            Just(Request::Stay),
            Just(Request::Decommission),
            any::<bool>().prop_map(|force| Request::Delete { force }),
        ]
    }

    proptest! {
        #[test]
        fn a_life_only_goes_forwards_and_keys_in_use_stay(
            requests in prop::collection::vec(any_request(), 0..40)
        ) {
            let mut node: Option<v1::Node> = None;
            for request in requests {
                let before = node.clone();
                let forgets = request == Request::ForgetRecoveryKey;
                match step(node.clone(), request) {
                    Ok(Step::Put(next)) => node = Some(*next),
                    Ok(Step::Delete(_)) => node = None,
                    Ok(Step::Keep(same)) => prop_assert_eq!(Some(&*same), node.as_ref()),
                    Err(_) => {}
                }
                let (Some(before), Some(after)) = (before, &node) else { continue };
                prop_assert!(before.state <= after.state);
                prop_assert!(!before.joined || after.joined);
                if before.joined && after.state() == NodeState::Up {
                    prop_assert_eq!(&before.cluster_unlock_key, &after.cluster_unlock_key);
                    prop_assert_eq!(&before.join_key, &after.join_key);
                    prop_assert!(forgets || before.recovery_key == after.recovery_key);
                }
                if after.state() == NodeState::Decommissioned {
                    prop_assert_eq!(&after.roles, &None);
                    prop_assert!(after.cluster_unlock_key.is_empty());
                }
            }
        }
    }
}
