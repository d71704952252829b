//! Members prove what they were started with, after each start, and one that does not fit the
//! attestation policy is reported and stays in.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use polis_tests::{Story, patiently, story};
use polis_wire::attestation::software::Software;
use polis_wire::attestation::{Question, REGISTERS, Registers, qualifier};
use polis_wire::rpc::client::{Client, Repeat};
use tonic::{Code, Streaming};

use crate::calls::{heartbeat, reason};
use crate::curators::{BootstrapNode, Cluster};
use crate::harness::Machine;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads a_member_proves_each_start_and_one_that_does_not_fit_is_reported).takes(10)];

const SOON: Duration = Duration::from_secs(20);

/// Between two heartbeats of a node here.
const BEAT: Duration = Duration::from_millis(50);

/// The register 11 of the image of the policy.
const IMAGE: [u8; 32] = [7; 32];

/// A node as far as its proofs go, with a TPM in software.
struct Pretended {
    client: Client,
    tpm: Software,
    boot_id: String,
}

impl Pretended {
    /// Whether the leader wants a proof of the boot.
    async fn is_asked(&self) -> bool {
        let update = v1::UpdateReport { boot_id: self.boot_id.clone(), ..Default::default() };
        let request = v1::HeartbeatRequest { update: Some(update), ..Default::default() };
        heartbeat(&self.client, request).await.prove_tpm
    }

    /// Beats until the leader wants a proof, or does not any more.
    async fn is_asked_soon(&self, expected: bool) {
        let asked = async {
            while self.is_asked().await != expected {
                tokio::time::sleep(BEAT).await;
            }
        };
        let what = format!("proofs of {} are wanted: {expected}", self.boot_id);
        patiently(SOON, asked).await.expect(&what);
    }

    /// Starts again.
    async fn starts(&mut self, boot_id: &str) {
        self.boot_id = boot_id.to_owned();
        let status = v1::NodeStatus { boot_id: boot_id.to_owned(), ..Default::default() };
        let request = v1::UpdateNodeStatusRequest { status: Some(status), ..Default::default() };
        let reported = self.client.call(Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { CuratorClient::new(channel).update_node_status(request).await.map(drop) }
        });
        reported.await.unwrap();
    }

    async fn call(
        &self,
        request: v1::ProveTpmRequest,
    ) -> Result<Option<v1::TpmQuestion>, tonic::Status> {
        let request = v1::ProveTpmRequest { boot_id: self.boot_id.clone(), ..request };
        let called = self.client.call(Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { Ok(CuratorClient::new(channel).prove_tpm(request).await?.into_inner()) }
        });
        Ok(called.await?.question)
    }

    /// Asks for a question.
    async fn asks(&self) -> Option<v1::TpmQuestion> {
        let keys = Some(self.tpm.keys().into_message());
        self.call(v1::ProveTpmRequest { keys, ..Default::default() }).await.unwrap()
    }

    /// The answer to a question as that of the node with this ID.
    fn answer(
        &self,
        name: &str,
        question: v1::TpmQuestion,
        registers: Registers,
    ) -> v1::ProveTpmRequest {
        let question = Question::from_message(question).unwrap();
        let qualifier = qualifier(&question.nonce, name);
        let answer = self.tpm.prove(&question.credential, &qualifier, registers).unwrap();
        v1::ProveTpmRequest { answer: Some(answer.into_message()), ..Default::default() }
    }

    /// Answers a question.
    async fn answers(&self, name: &str, question: v1::TpmQuestion, registers: Registers) {
        let answer = self.answer(name, question, registers);
        assert_eq!(self.call(answer).await.unwrap(), None);
    }
}

/// The registers after a start of [`IMAGE`] with this addition.
fn started(added: u8) -> Registers {
    let registers = REGISTERS.into_iter().map(|number| (number, [3; 32]));
    registers.chain([(11, IMAGE), (12, [added; 32]), (13, [0; 32])]).collect()
}

/// Waits until the leader says this of the node.
async fn shows(
    watch: &mut Streaming<v1::WatchEvent>,
    what: &str,
    expected: impl Fn(&v1::NodeInfo) -> bool,
) -> v1::NodeInfo {
    let shown = async {
        loop {
            let event = watch.message().await.unwrap().expect("the leader stays");
            if let Some(node) = event.nodes.into_iter().find(|node| expected(node)) {
                return node;
            }
        }
    };
    patiently(SOON, shown).await.expect(what)
}

async fn set_policy(cluster: &Cluster, policy: v1::AttestationPolicy) {
    let configuration = cluster.store.configuration().await.unwrap();
    let configuration = v1::ClusterConfiguration { attestation: Some(policy), ..configuration };
    let now = polis_base::sys::clock::now();
    cluster.store.configure(configuration, None, now).await.unwrap();
}

async fn a_member_proves_each_start_and_one_that_does_not_fit_is_reported() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, own, owner } = BootstrapNode::start(&machine).await;
    let client = cluster.client(&[&curator], own);
    let name = machine.name();
    let mut member = Pretended { client, tpm: Software::default(), boot_id: String::new() };
    let proof = async || cluster.store.node(machine.key.id()).await.unwrap().attestation;

    // The first node of a cluster proves its start, once.
    member.starts("first").await;
    member.is_asked_soon(true).await;
    let question = member.asks().await.unwrap();
    assert_eq!(proof().await, None, "keys prove nothing");
    member.answers(&name, question, started(0)).await;
    let first = proof().await.unwrap();
    assert_eq!((&*first.fault, &*first.boot_id), ("", "first"));
    assert_eq!(first.registers.len(), REGISTERS.len());
    member.is_asked_soon(false).await;
    assert_eq!(member.asks().await, None);

    // With a policy that it fits, nothing is wrong. It starts again, with an addition.
    let mut watching = CuratorClient::new(owner.leader().await.unwrap().connection.channel);
    let only = v1::WatchRequest { node_id: name.clone() };
    let mut watch = watching.watch(only).await.unwrap().into_inner();
    let system =
        v1::attestation_policy::System { name: "1.0".to_owned(), kernel_image: IMAGE.to_vec() };
    let policy = v1::AttestationPolicy { systems: vec![system], makers: Vec::new() };
    set_policy(&cluster, policy).await;
    member.starts("second").await;
    let boot = |node: &v1::NodeInfo| node.status.as_ref().map(|status| status.boot_id.clone());
    let shown =
        shows(&mut watch, "the second boot", |node| boot(node).as_deref() == Some("second"));
    assert_eq!(shown.await.attestation_fault, "");
    member.is_asked_soon(true).await;
    let question = member.asks().await.unwrap();
    member.answers(&name, question, started(9)).await;
    let fault = shows(&mut watch, "the fault", |node| !node.attestation_fault.is_empty()).await;
    let fault = fault.attestation_fault;
    assert!(fault.starts_with("started with another system: register 12"), "{fault}");
    assert!(!fault.contains("register 11"), "{fault}");
    // It stays in.
    member.is_asked_soon(false).await;

    // An answer in the name of another node, one without a question, and a TPM that fails.
    member.starts("third").await;
    let question = member.asks().await.unwrap();
    member.answers("polis-of-another", question, started(0)).await;
    let forged = proof().await.unwrap();
    assert!(forged.fault.contains("another question") && forged.keys.is_none(), "{forged:?}");
    let answer = Some(v1::TpmAnswer::default());
    let unasked = v1::ProveTpmRequest { answer, ..Default::default() };
    assert_eq!(member.call(unasked).await.unwrap(), None);
    assert_eq!(proof().await.unwrap(), forged);
    member.starts("fourth").await;
    let silent = v1::ProveTpmRequest { fault: "it is silent".to_owned(), ..Default::default() };
    assert_eq!(member.call(silent).await.unwrap(), None);
    let expected = "its TPM has proved nothing: it is silent";
    shows(&mut watch, expected, |node| node.attestation_fault == expected).await;
    member.boot_id = "not a word".to_owned();
    let refused = member.call(v1::ProveTpmRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);

    // A register that changed after its reading: the leader has nothing to note, and asks again.
    member.starts("fifth").await;
    let before = proof().await;
    let question = member.asks().await.unwrap();
    let mut changed = member.answer(&name, question, started(0));
    changed.answer.as_mut().unwrap().registers[0].value = vec![9; 32];
    let refused = member.call(changed).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::Aborted, "tpm-undecided"));
    assert_eq!(proof().await, before);
    member.is_asked_soon(true).await;

    // The right system again; and without a policy nothing is compared.
    let question = member.asks().await.unwrap();
    member.answers(&name, question, started(0)).await;
    shows(&mut watch, "no fault", |node| node.attestation_fault.is_empty()).await;
    member.starts("sixth").await;
    let question = member.asks().await.unwrap();
    member.answers(&name, question, started(9)).await;
    shows(&mut watch, "the fault", |node| !node.attestation_fault.is_empty()).await;
    // An empty one ends it.
    set_policy(&cluster, v1::AttestationPolicy::default()).await;
    shows(&mut watch, "no fault", |node| node.attestation_fault.is_empty()).await;

    // A member that asks as fast as it can has few questions.
    member.starts("seventh").await;
    let mut asked = 0;
    let refused = loop {
        let keys = Some(member.tpm.keys().into_message());
        match member.call(v1::ProveTpmRequest { keys, ..Default::default() }).await {
            Ok(question) => assert!(question.is_some()),
            Err(status) => break status,
        }
        asked += 1;
        assert!(asked <= 12, "{asked} questions in a row");
    };
    assert_eq!((refused.code(), reason(&refused)), (Code::ResourceExhausted, "tpm-proofs"));
    curator.supervisor.stop().await;
    node.stop().await;
}
