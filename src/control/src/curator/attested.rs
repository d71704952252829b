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
use super::directory::Directory;
use super::leader::Leadership;
use super::state::has_tpm;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;

/// The time between two looks at the members.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long a member that has started may be without a proof: longer than a node tries, which
/// then reports why its TPM fails, and longer than a thousand members take together.
const PROOF_MAX: Duration = Duration::from_secs(300);

/// What an owner does after an update.
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
        let facts = |node: &v1::Node| (node.state, node.tpm, boot_id(node).to_owned());
        Arc::ptr_eq(&self.node, node)
            || (facts(&self.node) == facts(node) && self.node.attestation == node.attestation)
    }
}

/// The members, as this leader compared them last.
#[derive(Debug, Default)]
struct Members {
    policy: Option<v1::AttestationPolicy>,
    compared: BTreeMap<NodeId, Compared>,
}

impl Members {
    /// Compares what has changed; returns the members whose fault in the directory is not the
    /// present one.
    fn look(&mut self, directory: &Directory) -> Vec<(NodeId, String)> {
        let policy = directory.configuration().attestation.as_ref();
        let same_policy = self.policy.as_ref() == policy;
        if !same_policy {
            self.policy = policy.cloned();
        }
        self.compared.retain(|id, _| directory.node(*id).is_some());
        let mut changed = Vec::new();
        for (id, known) in directory.nodes() {
            let mut is_new = !same_policy;
            let compared = self.compared.entry(id).or_insert_with(|| {
                is_new = true;
                Compared::new(&known.node)
            });
            if compared.is_of(&known.node) {
                compared.node = Arc::clone(&known.node);
            } else {
                is_new = true;
                *compared = Compared::new(&known.node);
            }
            let late = compared.since.elapsed() >= PROOF_MAX;
            if is_new || compared.late != late {
                compared.late = late;
                compared.fault = fault(policy, &known.node, late);
            }
            if compared.fault != known.attestation_fault {
                changed.push((id, compared.fault.clone()));
            }
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
                let changed = members.look(&self.directory.borrow());
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
        let mut look = |node: &v1::Node, policy: Option<u8>| {
            let attestation = policy.map(self::policy);
            let configuration = v1::ClusterConfiguration { attestation, ..Default::default() };
            let records = [
                (CONFIGURATION.to_owned(), configuration.encode_to_vec()),
                (node_key(id), node.encode_to_vec()),
            ];
            let changes = records.map(|(key, value)| {
                Change::Put(Kv { key, value, created: 1, modified: 1, lease: 0 })
            });
            directory.apply(&Mirror::default(), &changes);
            let changed = members.look(&directory);
            for (id, fault) in &changed {
                assert!(directory.set_attestation_fault(*id, fault));
            }
            changed.into_iter().map(|(_, fault)| fault).collect::<Vec<_>>()
        };
        let right = member("a", Some(proof("a", 7, 0)));
        assert!(look(&right, Some(7)).is_empty());
        let again = v1::Node { tpm: true, ..member("b", right.attestation.clone()) };
        assert!(look(&again, Some(7)).is_empty());
        tokio::time::advance(PROOF_MAX).await;
        let [nothing] = &look(&again, Some(7))[..] else { panic!("one") };
        assert!(nothing.contains("nothing in this boot"), "{nothing}");
        assert!(look(&again, Some(7)).is_empty());
        let proved = member("b", Some(proof("b", 8, 0)));
        let [other] = &look(&proved, Some(7))[..] else { panic!("one") };
        assert!(other.contains("register 11"), "{other}");
        // Another report of its status is nothing new.
        let report = v1::NodeStatus { version: "2".to_owned(), ..proved.status.clone().unwrap() };
        let reported = v1::Node { status: Some(report), ..proved };
        assert!(look(&reported, Some(7)).is_empty());
        assert_eq!(look(&reported, Some(8)), [""]);
        let [other] = &look(&reported, Some(7))[..] else { panic!("one") };
        assert!(other.contains("register 11"), "{other}");
        assert_eq!(look(&reported, None), [""]);
    }
}
