//! Attestation of this boot: proves to the leader, by the TPM of this machine, what the machine
//! was started with.
//!
//! ```text
//! heartbeat: the record has no proof of this boot
//!   --> keys of the TPM --> question of the leader --> answer of the TPM --> the record has it
//!   --> the leader could not check it --> again, later
//!   --> the TPM fails [`ATTEMPTS`] times, or there is none --> the leader learns why
//! ```
//!
//! Invariants:
//! - The TPM delays nothing else: each use has [`TPM_MAX`], and a TPM that hangs holds one
//!   thread, however often it is asked (`management::Tpm`).
//! - A TPM that fails is left alone until the next boot.
//!
//! What this module does not do: decide when a proof is wanted (the leader does, with each
//! heartbeat), or judge it.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tracing::{info, warn};

use super::Service;
use crate::management::{Tpm, is_absent};
use polis_base::cause;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::attestation::Question;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::Repeat;

/// The time for one use of the TPM: some need half a minute for an RSA key.
const TPM_MAX: Duration = Duration::from_secs(60);

/// Uses of a TPM that fail before this boot is given up.
const ATTEMPTS: u32 = 3;

/// Answers in a row that the leader could not check before this boot is given up.
const UNDECIDED_MAX: u32 = 5;

/// The reason of a leader that could not check an answer: another exchange may end otherwise.
const UNDECIDED: &str = "tpm-undecided";

/// Between two exchanges with the leader: two heartbeats, so that the newest one says whether
/// another is wanted.
const PAUSE: Duration = Duration::from_secs(10);

/// The longest pause: all answers that a leader may fail to check are within the time that it gives
/// a member to prove its start.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The uses of a TPM in an exchange.
trait Prover: Sync {
    fn keys(&self) -> impl Future<Output = Result<v1::TpmKeys, Status>> + Send;

    /// The answer to a question, as that of the node `node`.
    fn answer(
        &self,
        node: &str,
        question: v1::TpmQuestion,
    ) -> impl Future<Output = Result<v1::TpmAnswer, Status>> + Send;
}

impl Prover for Tpm {
    async fn keys(&self) -> Result<v1::TpmKeys, Status> {
        Ok(Self::keys(self).await?.keys.unwrap_or_default())
    }

    async fn answer(&self, node: &str, question: v1::TpmQuestion) -> Result<v1::TpmAnswer, Status> {
        let question = Question::from_message(question);
        let question = question.map_err(|invalid| Status::internal(invalid.to_string()))?;
        Ok(self.attest(node, question).await?.answer.unwrap_or_default())
    }
}

/// Why an exchange did not end with a proof.
#[derive(Debug)]
enum Trouble {
    /// The machine has no TPM.
    Absent(Status),
    /// The TPM failed, or did not answer.
    Tpm(Status),
    /// The leader could not check the answer.
    Undecided(Status),
    /// The leader was not reached, or refused.
    Leader(Status),
}

impl Trouble {
    /// The failure of a call of the leader.
    fn of_leader(status: Status) -> Self {
        match status.metadata().get(REASON).is_some_and(|reason| reason == UNDECIDED) {
            true => Self::Undecided(status),
            false => Self::Leader(status),
        }
    }
}

/// Proves until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    ctx.healthy();
    let service = &service;
    let call = |request: v1::ProveTpmRequest| async move {
        let call = |channel| {
            let request = request.clone();
            async move { CuratorClient::new(channel).prove_tpm(request).await }
        };
        let response = service.client.call(Repeat::Allowed, call).await?;
        Ok(response.into_inner())
    };
    let named = || Named {
        node: service.own().map(|node| node.to_string()).unwrap_or_default(),
        boot_id: service.outputs.report.borrow().boot_id.clone(),
    };
    let work = work(&service.tpm, &service.outputs.prove_tpm, named, call);
    ctx.until_cancelled(Box::pin(work)).await.unwrap_or(Ok(()))
}

/// The node and the boot that a proof is of.
struct Named {
    node: String,
    boot_id: String,
}

/// Proves each time that `asked` says so; `call` reaches the leader.
async fn work<P: Prover, F>(
    tpm: &P,
    asked: &watch::Sender<bool>,
    named: impl Fn() -> Named,
    call: impl Fn(v1::ProveTpmRequest) -> F,
) -> Result<(), Closed>
where
    F: Future<Output = Result<v1::ProveTpmResponse, Status>>,
{
    let mut wanted = asked.subscribe();
    let (mut failures, mut undecided, mut failed) = (0, 0, cause::Last::default());
    let fault = loop {
        until(&mut wanted, "the heartbeat", |wanted| wanted.then_some(())).await?;
        match prove(tpm, &named(), &call).await {
            Ok(()) => {
                info!("the leader has what the TPM proves of this boot");
                failed.clear();
                undecided = 0;
                // The next heartbeat sets it again where that is not enough.
                asked.send_replace(false);
            }
            Err(Trouble::Absent(status)) => break status.message().to_owned(),
            Err(Trouble::Tpm(status)) => {
                failures += 1;
                warn!(%status, failures, "the TPM does not prove what this node was started with");
                if failures == ATTEMPTS {
                    break status.message().to_owned();
                }
            }
            Err(Trouble::Undecided(status)) => {
                undecided += 1;
                warn!(%status, undecided, "the leader could not check what the TPM proves");
                if undecided == UNDECIDED_MAX {
                    break status.message().to_owned();
                }
            }
            Err(Trouble::Leader(status)) => {
                if failed.is_new(&status.to_string()) {
                    warn!(%status, "cannot prove to the leader what this node was started with");
                }
            }
        }
        sleep(pause(undecided)).await;
    };
    // The leader learns why nothing is proved in this boot, and the TPM is left alone.
    let request = v1::ProveTpmRequest { boot_id: named().boot_id, fault, ..Default::default() };
    while call(request.clone()).await.is_err() {
        sleep(PAUSE).await;
    }
    std::future::pending().await
}

/// The pause before the next exchange, after so many answers in a row that were not checked.
fn pause(undecided: u32) -> Duration {
    let factor = 2_u32.saturating_pow(undecided.saturating_sub(1));
    PAUSE.saturating_mul(factor).min(PAUSE_MAX)
}

/// One exchange with the leader.
async fn prove<P: Prover, F>(
    tpm: &P,
    named: &Named,
    call: impl Fn(v1::ProveTpmRequest) -> F,
) -> Result<(), Trouble>
where
    F: Future<Output = Result<v1::ProveTpmResponse, Status>>,
{
    let boot_id = named.boot_id.clone();
    let keys = Some(in_time(tpm.keys()).await?);
    let request = v1::ProveTpmRequest { boot_id, keys, ..Default::default() };
    let response = call(request.clone()).await.map_err(Trouble::of_leader)?;
    // The record has a proof of this boot.
    let Some(question) = response.question else { return Ok(()) };
    let answer = Some(in_time(tpm.answer(&named.node, question)).await?);
    let request = v1::ProveTpmRequest { keys: None, answer, ..request };
    call(request).await.map(drop).map_err(Trouble::of_leader)
}

/// The result of a use of the TPM, which may hang.
async fn in_time<T>(used: impl Future<Output = Result<T, Status>>) -> Result<T, Trouble> {
    let silent = |_elapsed| {
        let seconds = TPM_MAX.as_secs();
        Status::deadline_exceeded(format!("the TPM did not answer within {seconds} s"))
    };
    let done = timeout(TPM_MAX, used).await.map_err(silent).flatten();
    done.map_err(|status| match is_absent(&status) {
        true => Trouble::Absent(status),
        false => Trouble::Tpm(status),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use polis_wire::attestation::software::Software;
    use polis_wire::attestation::{Challenge, Keys, REGISTERS, qualifier};
    use tokio::time::Instant;

    use super::*;

    const NODE: &str = "polis-1";

    fn named() -> Named {
        Named { node: NODE.to_owned(), boot_id: "boot".to_owned() }
    }

    /// A TPM in software, or one that hangs from its first or second use on.
    #[derive(Default)]
    struct Emulated {
        software: Software,
        hangs: Option<usize>,
        used: Mutex<usize>,
    }

    impl Emulated {
        async fn uses(&self) {
            let used = {
                let mut used = self.used.lock().unwrap();
                *used += 1;
                *used
            };
            if self.hangs.is_some_and(|first| used >= first) {
                std::future::pending::<()>().await;
            }
        }
    }

    impl Prover for Emulated {
        async fn keys(&self) -> Result<v1::TpmKeys, Status> {
            self.uses().await;
            Ok(self.software.keys().into_message())
        }

        async fn answer(
            &self,
            node: &str,
            asked: v1::TpmQuestion,
        ) -> Result<v1::TpmAnswer, Status> {
            self.uses().await;
            let asked = Question::from_message(asked).unwrap();
            let registers = REGISTERS.into_iter().map(|number| (number, [3; 32])).collect();
            let qualifier = qualifier(&asked.nonce, node);
            Ok(self
                .software
                .prove(&asked.credential, &qualifier, registers)
                .unwrap()
                .into_message())
        }
    }

    /// A leader that asks once, or has a proof already.
    #[derive(Default)]
    struct Leader {
        knows: bool,
        challenge: Mutex<Option<Challenge>>,
        proved: Mutex<Option<String>>,
        /// Answers that it cannot check, before the first that it can.
        unable: Mutex<u32>,
        /// The reported causes.
        faults: Mutex<Vec<String>>,
    }

    impl Leader {
        async fn prove_tpm(
            &self,
            request: v1::ProveTpmRequest,
        ) -> Result<v1::ProveTpmResponse, Status> {
            let v1::ProveTpmRequest { boot_id, keys, answer, fault } = request;
            if !fault.is_empty() {
                self.faults.lock().unwrap().push(fault);
                return Ok(v1::ProveTpmResponse::default());
            }
            let asked = self.challenge.lock().unwrap().take();
            let mut unable = self.unable.lock().unwrap();
            if answer.is_some() && *unable > 0 {
                *unable -= 1;
                let mut status = Status::aborted("the answer could not be checked");
                status.metadata_mut().insert(REASON, UNDECIDED.parse().unwrap());
                return Err(status);
            }
            if let (Some(answer), Some(asked)) = (answer, asked) {
                let answer = polis_wire::attestation::Answer::from_message(answer).unwrap();
                asked.check(NODE, &REGISTERS, &answer).unwrap();
                *self.proved.lock().unwrap() = Some(boot_id);
                return Ok(v1::ProveTpmResponse::default());
            }
            if self.knows {
                return Ok(v1::ProveTpmResponse::default());
            }
            let challenge = Challenge::new(&Keys::from_message(keys.unwrap())).unwrap();
            let question = Some(challenge.question(&REGISTERS));
            *self.challenge.lock().unwrap() = Some(challenge);
            Ok(v1::ProveTpmResponse { question })
        }
    }

    #[tokio::test]
    async fn a_boot_is_proved_once_to_a_leader_that_asks() {
        let (tpm, leader) = (Emulated::default(), Leader::default());
        prove(&tpm, &named(), |request| leader.prove_tpm(request)).await.unwrap();
        assert_eq!(leader.proved.lock().unwrap().as_deref(), Some("boot"));
        assert_eq!(*tpm.used.lock().unwrap(), 2);

        let (tpm, leader) = (Emulated::default(), Leader { knows: true, ..Default::default() });
        prove(&tpm, &named(), |request| leader.prove_tpm(request)).await.unwrap();
        assert_eq!(*leader.proved.lock().unwrap(), None);
        assert_eq!(*tpm.used.lock().unwrap(), 1, "it signs nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_tpm_that_hangs_is_given_up_after_its_time() {
        for hangs in [1, 2] {
            let tpm = Emulated { hangs: Some(hangs), ..Default::default() };
            let (leader, began) = (Leader::default(), Instant::now());
            let failed = prove(&tpm, &named(), |request| leader.prove_tpm(request)).await;
            let Err(Trouble::Tpm(status)) = failed else { panic!("{failed:?}") };
            assert_eq!(status.message(), "the TPM did not answer within 60 s");
            assert_eq!(began.elapsed(), TPM_MAX);
            assert_eq!(*leader.proved.lock().unwrap(), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_tpm_that_hangs_is_left_alone_after_some_attempts_and_the_leader_learns_why() {
        let tpm = Emulated { hangs: Some(1), ..Default::default() };
        let reported = Mutex::<Vec<(String, String)>>::default();
        let call = |request: v1::ProveTpmRequest| {
            let mut reported = reported.lock().unwrap();
            reported.push((request.boot_id, request.fault));
            // The first report is lost.
            std::future::ready(match reported.len() {
                1 => Err(Status::unavailable("no leader")),
                _ => Ok(v1::ProveTpmResponse::default()),
            })
        };
        let asked = watch::Sender::new(true);
        let hour = Duration::from_secs(3600);
        assert!(timeout(hour, work(&tpm, &asked, named, call)).await.is_err());
        let expected = ("boot".to_owned(), "the TPM did not answer within 60 s".to_owned());
        assert_eq!(*reported.lock().unwrap(), [expected.clone(), expected]);
        assert_eq!(*tpm.used.lock().unwrap(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_proof_is_made_again_only_if_a_heartbeat_asks_for_it() {
        let (tpm, leader) = (Emulated::default(), Leader::default());
        let asked = watch::Sender::new(true);
        let hour = Duration::from_secs(3600);
        let call = |request| leader.prove_tpm(request);
        for proofs in [1, 2] {
            assert!(timeout(hour, work(&tpm, &asked, named, call)).await.is_err());
            assert_eq!(*tpm.used.lock().unwrap(), 2 * proofs);
            assert!(!asked.send_replace(true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_the_leader_could_not_check_is_given_again_later() {
        let leader = Leader { unable: Mutex::new(UNDECIDED_MAX - 1), ..Default::default() };
        let (tpm, asked, began) = (Emulated::default(), watch::Sender::new(true), Instant::now());
        let call = |request| leader.prove_tpm(request);
        let mut until_proved = asked.subscribe();
        let proved = until_proved.wait_for(|wanted| !wanted);
        tokio::select! {
            ended = work(&tpm, &asked, named, call) => panic!("{ended:?}"),
            proved = proved => drop(proved.unwrap()),
        }
        assert_eq!(leader.proved.lock().unwrap().as_deref(), Some("boot"));
        assert_eq!(began.elapsed(), Duration::from_secs(10 + 20 + 40 + 60));
        assert!(leader.faults.lock().unwrap().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_can_never_check_learns_that_and_the_tpm_is_left_alone() {
        let leader = Leader { unable: Mutex::new(u32::MAX), ..Default::default() };
        let (tpm, asked) = (Emulated::default(), watch::Sender::new(true));
        let call = |request| leader.prove_tpm(request);
        let hour = Duration::from_secs(3600);
        assert!(timeout(hour, work(&tpm, &asked, named, call)).await.is_err());
        assert_eq!(*leader.faults.lock().unwrap(), ["the answer could not be checked"]);
        assert_eq!(*tpm.used.lock().unwrap(), 2 * UNDECIDED_MAX as usize);
    }

    #[tokio::test]
    async fn a_machine_without_a_tpm_asks_no_leader() {
        let dev = tempfile::tempdir().unwrap();
        let tpm = Tpm::new(dev.path().to_owned());
        let call = |_request| async { panic!("the leader is asked") };
        let failed = prove(&tpm, &named(), call).await;
        assert!(matches!(failed, Err(Trouble::Absent(_))), "{failed:?}");
    }
}
