//! The access table as a way to secrets: everything that a caller can reach by calls that it
//! may make, in any order and with machines of its own.
//!
//! Each RPC is a step: whom it serves is in the table, what it asks for beyond that and what it
//! hands out is here. No call takes away what a caller has, so the steps that are taken until
//! none adds anything are those of every order.

use std::collections::BTreeSet;

use super::access::METRICS;
use super::testing::node_id;
use super::*;

/// The keys and secrets that a caller can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    /// The ticket, from a call or from the parameters of a machine.
    Ticket,
    /// A machine of the caller's own that waits for approval.
    Registered,
    /// The same, approved.
    Approved,
    /// The same as a node, with its certificate.
    Node,
    /// The same with roles, among them these two.
    Voter,
    Worker,
    /// Everything in etcd: the keys of the authorities, of disks, of Kubernetes.
    Store,
    /// The keys that open disks alone.
    RecoveryKeys,
    /// The passwords of registries.
    Passwords,
    /// The certificate of an owner.
    Owner,
}

use Thing::{
    Approved, Node, Owner, Passwords, RecoveryKeys, Registered, Store, Ticket, Voter, Worker,
};

/// Things that only an owner may have. The key of the CA is in etcd, and makes an owner.
const SECRETS: [Thing; 6] = [Store, RecoveryKeys, Passwords, Owner, Voter, Worker];

/// A call: what it asks for beside the caller that the table names, and what it hands out.
type Step = (&'static str, &'static [Thing], &'static [Thing]);

const STEPS: &[Step] = &[
    ("Aaa/CreateUser", &[], &[Owner]),
    // Only to the key that the cluster was founded with.
    ("Aaa/Escrow", &[Owner], &[Owner]),
    ("Aaa/ListUsers", &[], &[]),
    // For the same user and role.
    ("Aaa/Renew", &[], &[]),
    ("Aaa/RevokeUser", &[], &[]),
    ("Curator/CommitNode", &[Approved], &[Node]),
    ("Curator/GetConsensusStatus", &[], &[]),
    ("Curator/Heartbeat", &[], &[]),
    ("Curator/IssueCertificate", &[Node], &[Node]),
    ("Curator/IssueWorkerCertificate", &[Worker], &[]),
    ("Curator/JoinConsensus", &[Voter], &[Store, RecoveryKeys, Passwords, Owner]),
    // The half of the key of the machine's own disk.
    ("Curator/JoinNode", &[Node], &[]),
    ("Curator/ProveTpm", &[], &[]),
    ("Curator/RegisterNode", &[Ticket], &[Registered]),
    ("Curator/ReportCalls", &[], &[]),
    ("Curator/UpdateNodeStatus", &[], &[]),
    ("Curator/Watch", &[], &[]),
    ("Curator/WatchRegistries", &[Worker], &[Passwords]),
    ("CuratorLocal/GetCaCertificate", &[], &[]),
    ("CuratorLocal/GetCurrentLeader", &[], &[]),
    // For the holder of the code of that machine, or its owner: a machine's own parameters.
    ("Maintenance/Describe", &[], &[]),
    ("Maintenance/End", &[], &[]),
    ("Maintenance/GiveParameters", &[], &[]),
    ("Maintenance/ReadLog", &[], &[]),
    ("Management/ApproveNode", &[Registered], &[Approved]),
    ("Management/BeginUpdate", &[], &[]),
    ("Management/ConfigureCluster", &[], &[]),
    ("Management/ConfigureNodeNetwork", &[], &[]),
    ("Management/ConfirmFirewall", &[], &[]),
    ("Management/ConfirmRecoveryKey", &[], &[]),
    ("Management/ControlUpdate", &[], &[]),
    ("Management/DecommissionNode", &[], &[]),
    ("Management/DeleteNode", &[], &[]),
    ("Management/DeleteRegistry", &[], &[]),
    ("Management/GetAudit", &[], &[]),
    ("Management/GetClusterInfo", &[], &[]),
    ("Management/GetEtcdStatus", &[], &[]),
    ("Management/GetNodes", &[], &[]),
    // The same.
    ("Management/GetRecoveryKey", &[Owner], &[RecoveryKeys]),
    ("Management/GetRegisterTicket", &[], &[Ticket]),
    ("Management/GetRotation", &[], &[]),
    ("Management/GetUpdate", &[], &[]),
    // Without passwords.
    ("Management/ListRegistries", &[], &[]),
    ("Management/NameNode", &[], &[]),
    ("Management/RotateAuthorities", &[], &[]),
    ("Management/SetRegistry", &[], &[]),
    // Encrypted to the keys of the owners.
    ("Management/SnapshotEtcd", &[Owner], &[Store, RecoveryKeys, Passwords, Owner]),
    ("Management/UpdateNodeLabels", &[], &[]),
    ("Management/UpdateNodeRoles", &[Node], &[Voter, Worker]),
    ("Management/UpdateNodeTaints", &[], &[]),
    ("NodeManagement/AnnounceFirmwareUpdate", &[], &[]),
    // The endorsement key opens credentials of a caller's own making, and nothing that is sealed.
    ("NodeManagement/Attest", &[], &[]),
    ("NodeManagement/Console", &[], &[]),
    ("NodeManagement/Drain", &[], &[]),
    // The system of an update is not secret.
    ("NodeManagement/FetchBundle", &[], &[]),
    ("NodeManagement/GetAttestationKeys", &[], &[]),
    ("NodeManagement/GetFirewall", &[], &[]),
    ("NodeManagement/GetStatus", &[], &[]),
    ("NodeManagement/Logs", &[], &[]),
    ("NodeManagement/Reboot", &[], &[]),
    ("NodeManagement/Reset", &[], &[]),
    ("NodeManagement/Services", &[], &[]),
    ("NodeManagement/StoreBundle", &[], &[]),
    ("NodeManagement/Unlock", &[], &[]),
    ("NodeManagement/Update", &[], &[]),
];

/// The callers that somebody with this role and these things can be.
fn callers(role: Role, things: &BTreeSet<Thing>) -> Vec<Peer> {
    let user = |role| Peer::User { name: "otto".to_owned(), role };
    let mut callers = vec![Peer::None, Peer::Key([1; 32]), user(role)];
    callers.extend(things.contains(&Node).then(|| Peer::Node(node_id(1))));
    callers.extend(things.contains(&Owner).then(|| user(Role::Owner)));
    callers
}

/// Everything that is reached from `begun` on.
fn reached(role: Role, begun: &[Thing], serves: impl Fn(&str, &Peer) -> bool) -> BTreeSet<Thing> {
    let mut things: BTreeSet<_> = begun.iter().copied().collect();
    loop {
        let before = things.len();
        for (path, needs, yields) in STEPS {
            let callers = callers(role, &things);
            let has = needs.iter().all(|thing| things.contains(thing));
            if has && callers.iter().any(|caller| serves(path, caller)) {
                things.extend(*yields);
            }
        }
        if things.len() == before {
            return things;
        }
    }
}

fn secrets(things: &BTreeSet<Thing>) -> Vec<Thing> {
    SECRETS.into_iter().filter(|secret| things.contains(secret)).collect()
}

/// Whether the table serves this caller.
fn table() -> impl Fn(&str, &Peer) -> bool {
    let table = Table::polis().unwrap();
    move |path, caller| table.rule(&format!("/polis.v1.{path}")).unwrap().check(caller).is_ok()
}

#[test]
fn every_call_says_what_it_hands_out() {
    let table = Table::polis().unwrap();
    let known: BTreeSet<_> = STEPS.iter().map(|(path, ..)| format!("/polis.v1.{path}")).collect();
    assert_eq!(known.len(), STEPS.len(), "a call is there twice");
    let ours = |path: &&str| path.starts_with("/polis.") && *path != METRICS;
    let served: BTreeSet<_> =
        table.rules().map(|(path, _)| path).filter(ours).map(str::to_owned).collect();
    assert_eq!(known, served);
}

#[test]
fn no_call_of_an_operator_leads_to_a_secret_of_an_owner() {
    for role in [Role::Viewer, Role::Operator] {
        let things = reached(role, &[], table());
        assert!(!things.contains(&Ticket) && secrets(&things).is_empty(), "{role}: {things:?}");
        // An installer of machines has their parameters.
        let things = reached(role, &[Ticket], table());
        assert_eq!(secrets(&things), [], "{role}: {things:?}");
        assert_eq!(things.contains(&Node), role == Role::Operator, "{role}");
    }
}

#[test]
fn an_owner_reaches_every_secret() {
    assert_eq!(secrets(&reached(Role::Owner, &[], table())), SECRETS);
}

#[test]
fn an_operator_who_gives_roles_would_reach_every_secret() {
    let served = table();
    let serves = |path: &str, caller: &Peer| {
        let roles = path == "Management/UpdateNodeRoles";
        roles && matches!(caller, Peer::User { .. }) || served(path, caller)
    };
    let things = reached(Role::Operator, &[Ticket], serves);
    assert_eq!(secrets(&things), SECRETS);
}
