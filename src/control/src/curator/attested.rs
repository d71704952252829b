//! The members that do not fit the attestation policy: finds them, and reports them.
//!
//! A member proves after each start what it was started with. Nothing keeps it out: an update
//! gives members systems that the policy does not name yet, and a cluster must not lose its nodes
//! to a policy. So a difference is a problem of the cluster, and a line in the log of the leader.
//!
//! ```text
//! policy, record of a member (directory) --> fits? (pure) --> fault in the directory, log
//! ```
//!
//! Invariants:
//! - The directory is locked while its records are looked at, and not while they are compared: with
//!   many members and makers that takes as long as a thousand checks of signatures.
//! - Without a policy, and without a TPM in its record, a member has no fault.
//! - A member that has started again has [`PROOF_MAX`] to prove that: a restart alone is no fault.
//!
//! What this module does not do: ask (`serve`), check a proof (`attesting`), or keep a node out
//! (`nodes`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::attestation_policy::{self, Misfit};
use super::directory::{Directory, Known};
use super::leader::Leadership;
use super::state::has_tpm;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;

/// The time between two looks at the members.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The time that a member has after its start to prove it: longer than a node tries, which
/// then reports why its TPM fails, and longer than a thousand members take together.
const PROOF_MAX: Duration = Duration::from_secs(300);

/// The next step of an owner after an update.
const NAME_IT: &str = "if this is the cluster's update, name its image: `polisctl cluster \
                       configure --attestation-image FILE`, with each image and each maker that \
                       is to be in the policy";

/// A member that reported neither a proof nor a fault of its TPM.
const NOTHING: &str = "its TPM has proved nothing in this boot: see the log of the node, and \
                       update a node of an earlier version";

/// Whether the leader has no proof of this boot of a member.
pub(super) fn awaits(node: &v1::Node, boot_id: &str) -> bool {
    let proved = node.attestation.as_ref().is_some_and(|proof| proof.boot_id == boot_id);
    !boot_id.is_empty() && !proved
}

/// The boot that a member reported last.
fn boot_id(node: &v1::Node) -> &str {
    node.status.as_ref().map(|status| status.boot_id.as_str()).unwrap_or_default()
}

/// Why a member does not fit the policy, with what to do; empty: it does. `late`: it had
/// [`PROOF_MAX`] to prove its boot.
fn fault(policy: Option<&v1::AttestationPolicy>, node: &v1::Node, late: bool) -> String {
    let policy = policy.filter(|policy| !(policy.systems.is_empty() && policy.makers.is_empty()));
    if policy.is_none() || !has_tpm(node) || node.state() != v1::NodeState::Up {
        return String::new();
    }
    let unproved = awaits(node, boot_id(node));
    match attestation_policy::misfit(policy, node.attestation.as_ref()) {
        Err(error) => format!("not compared with the attestation policy: {error}"),
        // It fitted before this boot.
        Ok(_) if unproved && late => NOTHING.to_owned(),
        Ok(Some(Misfit::Unproved(_))) if node.attestation.is_none() => String::new(),
        Ok(None) => String::new(),
        Ok(Some(misfit @ Misfit::Unproved(_))) => misfit.to_string(),
        Ok(Some(misfit @ Misfit::Differs { .. })) => {
            let is_image = matches!(misfit, Misfit::Differs { image: Some(_), .. });
            let advice = if is_image { format!("; {NAME_IT}") } else { String::new() };
            format!("started with another system: {misfit}{advice}")
        }
    }
}

/// A member, as it was compared last.
#[derive(Debug)]
struct Compared {
    node: Arc<v1::Node>,
    /// Since when it has this boot and this proof, as far as this leader knows.
    since: Instant,
    late: bool,
    fault: String,
}

impl Compared {
    fn new(node: &Arc<v1::Node>) -> Self {
        let node = Arc::clone(node);
        Self { node, since: Instant::now(), late: false, fault: String::new() }
    }

    /// Whether this record has the same facts as the one that was compared.
    fn is_of(&self, node: &Arc<v1::Node>) -> bool {
        let is_same = |known: &v1::Node| {
            (known.state, known.tpm, boot_id(known)) == (node.state, node.tpm, boot_id(node))
                && known.attestation == node.attestation
        };
        Arc::ptr_eq(&self.node, node) || is_same(&self.node)
    }
}

/// The directory at one moment, as far as members are compared.
#[derive(Debug)]
struct Seen {
    /// The policy, if it is another one than that of the last comparison.
    policy: Option<Option<v1::AttestationPolicy>>,
    /// Each member, and its fault in the directory.
    members: Vec<(NodeId, Arc<v1::Node>, String)>,
}

/// The members, as this leader compared them last.
#[derive(Debug, Default)]
struct Members {
    policy: Option<v1::AttestationPolicy>,
    compared: BTreeMap<NodeId, Compared>,
}

impl Members {
    /// Copies what a comparison needs. Does no work beside that: the directory is locked.
    fn see(&self, directory: &Directory) -> Seen {
        let policy = &directory.configuration().attestation;
        let member = |(id, known): (NodeId, &Known)| {
            (id, Arc::clone(&known.node), known.attestation_fault.clone())
        };
        Seen {
            policy: (self.policy != *policy).then(|| policy.clone()),
            members: directory.nodes().map(member).collect(),
        }
    }

    /// Compares the members that have changed, and all of them with a new policy; returns the
    /// members whose fault in the directory is not the present one. Gives way to other work after
    /// each comparison.
    async fn compare(&mut self, seen: Seen) -> Vec<(NodeId, String)> {
        let is_new_policy = seen.policy.is_some();
        if let Some(policy) = seen.policy {
            self.policy = policy;
        }
        let mut before = std::mem::take(&mut self.compared);
        let mut changed = Vec::new();
        for (id, node, known_fault) in seen.members {
            let known = before.remove(&id).filter(|compared| compared.is_of(&node));
            let is_new = is_new_policy || known.is_none();
            let mut compared = match known {
                Some(compared) => Compared { node, ..compared },
                None => Compared::new(&node),
            };
            let late = compared.since.elapsed() >= PROOF_MAX;
            if is_new || compared.late != late {
                compared.late = late;
                compared.fault = fault(self.policy.as_ref(), &compared.node, late);
                tokio::task::yield_now().await;
            }
            if compared.fault != known_fault {
                changed.push((id, compared.fault.clone()));
            }
            self.compared.insert(id, compared);
        }
        changed
    }
}

/// Finds the members that do not fit, while this curator leads. A service.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// Whether it leads.
    pub(super) leadership: watch::Receiver<Leadership>,
    /// The directory that has the records, and that it writes faults to.
    pub(super) directory: watch::Sender<Directory>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        ctx.until_cancelled(self.work()).await.unwrap_or(Ok(()))
    }

    async fn work(&mut self) -> Result<(), Closed> {
        loop {
            let leads = |leadership: &Leadership| leadership.term.clone();
            let term = until(&mut self.leadership, "the election", leads).await?;
            let mut members = Members::default();
            while self.leadership.borrow().term.as_ref() == Some(&term) {
                let seen = members.see(&self.directory.borrow());
                let changed = members.compare(seen).await;
                self.report(&changed);
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            // The next leader compares them; this one does not any more.
            let compared = std::mem::take(&mut members.compared);
            self.write(compared.into_keys().map(|id| (id, String::new())));
        }
    }

    fn report(&self, changed: &[(NodeId, String)]) {
        for (node, fault) in changed {
            match fault.as_str() {
                "" => info!(event = "attested", %node, "a member fits the attestation policy"),
                fault => warn!(
                    event = "unattested", %node, fault,
                    "a member does not fit the attestation policy"
                ),
            }
        }
        self.write(changed.iter().cloned());
    }

    fn write(&self, faults: impl Iterator<Item = (NodeId, String)>) {
        self.directory.send_if_modified(|directory| {
            let set = |any, (id, fault): (NodeId, String)| {
                directory.set_attestation_fault(id, &fault) || any
            };
            faults.fold(false, set)
        });
    }
}

#[cfg(test)]
mod tests {
    use polis_wire::attestation::software::Software;
    use prost::Message as _;

    use super::*;
    use crate::consensus::client::{Change, Kv, Mirror};
    use crate::curator::store::{CONFIGURATION, node_key};

    /// A proof of a start of the system with this register 11, in this boot.
    fn proof(boot_id: &str, image: u8, added: u8) -> v1::TpmAttestation {
        let register =
            |(number, value): (u32, u8)| v1::TpmRegister { number, value: vec![value; 32] };
        v1::TpmAttestation {
            at: 1,
            keys: Some(Software::default().keys().into_message()),
            registers: [(11, image), (12, added), (13, 0)].map(register).to_vec(),
            boot_id: boot_id.to_owned(),
            ..Default::default()
        }
    }

    fn member(boot_id: &str, attestation: Option<v1::TpmAttestation>) -> v1::Node {
        let status = v1::NodeStatus { boot_id: boot_id.to_owned(), ..Default::default() };
        let state = v1::NodeState::Up.into();
        v1::Node { state, joined: true, status: Some(status), attestation, ..Default::default() }
    }

    fn policy(image: u8) -> v1::AttestationPolicy {
        let system = v1::attestation_policy::System {
            name: "1.0".to_owned(),
            kernel_image: vec![image; 32],
        };
        v1::AttestationPolicy { systems: vec![system], makers: Vec::new() }
    }

    #[test]
    fn a_member_with_another_start_has_a_fault_that_names_it_and_the_remedy() {
        let policy = policy(7);
        let fault = |node: &v1::Node| fault(Some(&policy), node, false);
        assert_eq!(fault(&member("a", Some(proof("a", 7, 0)))), "");
        let other = fault(&member("a", Some(proof("a", 8, 0))));
        let expected = "started with another system: register 11 (kernel image) is \
                        0808080808080808…, expected 0707070707070707… (1.0); if this is the \
                        cluster's update, name its image: `polisctl cluster configure \
                        --attestation-image FILE`";
        assert!(other.starts_with(expected), "{other}");
        let added = fault(&member("a", Some(proof("a", 7, 9))));
        assert!(added.starts_with("started with another system: register 12"), "{added}");
        assert!(!added.contains("update"), "{added}");
        let failed = super::super::attesting::failed("a", "the TPM is silent".to_owned(), 1);
        let failed = fault(&member("a", Some(failed)));
        assert_eq!(failed, "its TPM has proved nothing: the TPM is silent");
    }

    #[test]
    fn a_member_without_a_tpm_or_a_policy_or_that_is_not_in_has_no_fault() {
        let policy = policy(7);
        let other = member("a", Some(proof("a", 8, 0)));
        for none in [None, Some(v1::AttestationPolicy::default())] {
            assert_eq!(fault(none.as_ref(), &other, true), "");
            let again = member("b", other.attestation.clone());
            assert_eq!(fault(none.as_ref(), &again, true), "");
        }
        assert_eq!(fault(Some(&policy), &member("a", None), true), "");
        for state in [v1::NodeState::New, v1::NodeState::Standby, v1::NodeState::Decommissioned] {
            let node = v1::Node { state: state.into(), ..other.clone() };
            assert_eq!(fault(Some(&policy), &node, true), "", "{state:?}");
        }
    }

    #[test]
    fn a_member_that_proves_nothing_in_its_boot_has_a_fault_after_a_while() {
        let policy = policy(7);
        let said = |node: &v1::Node| [false, true].map(|late| fault(Some(&policy), node, late));
        let again = member("b", Some(proof("a", 7, 0)));
        assert!(awaits(&again, "b") && !awaits(&again, "a"));
        assert_eq!(said(&again), ["", NOTHING]);
        let tpm = v1::Node { tpm: true, ..member("b", None) };
        assert_eq!(said(&tpm), ["", NOTHING]);
        // Its newest proof counts, until there is another one.
        let [soon, late] = said(&member("b", Some(proof("a", 8, 0))));
        assert!(soon.contains("register 11"), "{soon}");
        assert_eq!(late, NOTHING);
        // A node that has not reported its boot.
        assert_eq!(said(&member("", Some(proof("a", 7, 0)))), ["", ""]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fault_is_reported_once_and_ends_with_a_proof_or_another_policy() {
        let id = NodeId::from_public_key(&[1; 32]);
        let mut members = Members::default();
        let mut directory = Directory::default();
        let mut look = async |node: &v1::Node, policy: Option<u8>| {
            put(&mut directory, [(id, node)], policy);
            let changed = members.compare(members.see(&directory)).await;
            for (id, fault) in &changed {
                assert!(directory.set_attestation_fault(*id, fault));
            }
            changed.into_iter().map(|(_, fault)| fault).collect::<Vec<_>>()
        };
        let right = member("a", Some(proof("a", 7, 0)));
        assert!(look(&right, Some(7)).await.is_empty());
        let again = v1::Node { tpm: true, ..member("b", right.attestation.clone()) };
        assert!(look(&again, Some(7)).await.is_empty());
        tokio::time::advance(PROOF_MAX).await;
        let [nothing] = &look(&again, Some(7)).await[..] else { panic!("one") };
        assert!(nothing.contains("nothing in this boot"), "{nothing}");
        assert!(look(&again, Some(7)).await.is_empty());
        let proved = member("b", Some(proof("b", 8, 0)));
        let [other] = &look(&proved, Some(7)).await[..] else { panic!("one") };
        assert!(other.contains("register 11"), "{other}");
        // Another report of its status is nothing new.
        let report = v1::NodeStatus { version: "2".to_owned(), ..proved.status.clone().unwrap() };
        let reported = v1::Node { status: Some(report), ..proved };
        assert!(look(&reported, Some(7)).await.is_empty());
        assert_eq!(look(&reported, Some(8)).await, [""]);
        let [other] = &look(&reported, Some(7)).await[..] else { panic!("one") };
        assert!(other.contains("register 11"), "{other}");
        assert_eq!(look(&reported, None).await, [""]);
    }

    /// Writes records of nodes and a policy into a directory, as a watch does.
    fn put<'a>(
        directory: &mut Directory,
        nodes: impl IntoIterator<Item = (NodeId, &'a v1::Node)>,
        policy: Option<u8>,
    ) {
        let attestation = policy.map(self::policy);
        let configuration = v1::ClusterConfiguration { attestation, ..Default::default() };
        let node = |(id, node): (NodeId, &v1::Node)| (node_key(id), node.encode_to_vec());
        let records = std::iter::once((CONFIGURATION.to_owned(), configuration.encode_to_vec()))
            .chain(nodes.into_iter().map(node));
        let put = |(key, value)| Change::Put(Kv { key, value, created: 1, modified: 1, lease: 0 });
        directory.apply(&Mirror::default(), &records.map(put).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_members_are_compared_while_others_write_to_the_directory() {
        let id = |number: u16| {
            let mut key = [0; 32];
            key[..2].copy_from_slice(&number.to_le_bytes());
            NodeId::from_public_key(&key)
        };
        let other = member("a", Some(proof("a", 8, 0)));
        let directory = watch::Sender::<Directory>::default();
        let nodes = (0..1000).map(|number| (id(number), &other));
        directory.send_modify(|directory| put(directory, nodes, Some(7)));
        let mut members = Members::default();
        let seen = members.see(&directory.borrow());
        assert_eq!(seen.members.len(), 1000);
        // One comparison after the other, with room for others in between.
        let mut compare = Box::pin(members.compare(seen));
        let mut turns = 0;
        let changed = loop {
            let turn = std::future::poll_fn(|context| {
                std::task::Poll::Ready(compare.as_mut().poll(context))
            });
            if let std::task::Poll::Ready(changed) = turn.await {
                break changed;
            }
            // A lock that the comparison held would end this test here.
            directory.send_modify(|directory| {
                directory.set_health(id(turns), v1::NodeHealth::Healthy);
            });
            turns += 1;
        };
        drop(compare);
        assert_eq!((turns, changed.len()), (1000, 1000));
        // The next look compares no member that is as it was.
        let seen = members.see(&directory.borrow());
        assert!(seen.policy.is_none());
        let mut compare = std::pin::pin!(members.compare(seen));
        let changed =
            std::future::poll_fn(|context| std::task::Poll::Ready(compare.as_mut().poll(context)));
        let std::task::Poll::Ready(changed) = changed.await else { panic!("it compares again") };
        assert_eq!(changed.len(), 1000, "their faults were not written");
    }
}
