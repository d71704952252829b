//! The questions of this leader to TPMs: of machines that register, and, apart from those, of
//! members after their starts.
//!
//! ```text
//! keys of a machine whose ticket holds, or of a member --> question, kept here
//! answer --> registers and keys, proved; or why they are not --> the node's record
//! ```
//!
//! The questions live in the memory of the curator that leads: another leader asks anew.
//!
//! Invariants:
//! - A question is answered once.
//! - At most [`QUESTIONS_MAX`] questions wait. A machine that is asked anew loses its own first,
//!   else the oldest one goes. Each machine that may wait for approval has a place, so that other
//!   holders of the ticket cannot keep it from its proof.
//! - At most [`MEMBERS_MAX`] questions to members wait. A member asks for room before it is asked:
//!   if all members start at once, they take turns, and each question that was asked can be
//!   answered.
//! - A member begins at most [`PROOFS_MAX`] proofs in a row, and then one each [`PROOFS_PACE`]:
//!   each is an operation with a key of its TPM, a check of a signature and a write.
//!
//! What this module does not do: decide which machine enters (an operator does, with the
//! outcome), or whether a member fits (`attested`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_proto::v1;
use tokio::time::Instant;

use super::budgets::Budgets;
use polis_wire::attestation::{Answer, Challenge, Error, Keys, REGISTERS, Registers, to_messages};
use polis_wire::identity::NodeId;

/// As many as machines may wait for approval. Each takes 6 KiB at most, most of it the certificate
/// of the TPM.
pub(super) const QUESTIONS_MAX: usize = 1024;

/// The questions to members that may wait: a member answers within seconds, and asks again soon
/// where there is no room.
const MEMBERS_MAX: usize = 256;

/// The time for which a question of a member keeps its place: longer than a node gives its TPM.
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// The proofs that a member may begin in a row: twice as many as a node tries in a boot.
pub(super) const PROOFS_MAX: u32 = 12;

/// The time after which a member may begin one more: the pause of a node between two.
pub(super) const PROOFS_PACE: Duration = Duration::from_secs(10);

/// Bytes of the longest certificate that a record keeps: several times what makers issue.
const CERTIFICATE_MAX: usize = 4096;

/// The number of proofs that members may begin.
pub(super) fn budgets() -> Budgets {
    Budgets::new(PROOFS_MAX, PROOFS_PACE)
}

/// The questions that wait for an answer. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Questions(Arc<Mutex<BTreeMap<NodeId, Asked>>>);

#[derive(Debug)]
struct Asked {
    challenge: Challenge,
    /// As a record would keep them.
    keys: v1::TpmKeys,
    /// Later questions have greater numbers.
    number: u64,
    at: Instant,
}

impl Questions {
    /// Whether one more member may be asked. Questions that were not answered in time are
    /// forgotten.
    pub(super) fn has_room(&self, id: NodeId) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, asked| asked.at.elapsed() < ANSWER_MAX);
        waiting.len() < MEMBERS_MAX || waiting.contains_key(&id)
    }

    /// Asks the TPM that has these keys.
    ///
    /// # Errors
    ///
    /// [`Error`] for keys that are none of a TPM.
    pub(super) fn ask(&self, id: NodeId, keys: v1::TpmKeys) -> Result<v1::TpmQuestion, Error> {
        let keys = Keys::from_message(keys);
        let challenge = Challenge::new(&keys)?;
        let question = challenge.question(&REGISTERS);
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = waiting.values().map(|asked| asked.number + 1).max().unwrap_or(0);
        if waiting.remove(&id).is_none() && waiting.len() >= QUESTIONS_MAX {
            let oldest = waiting.iter().min_by_key(|(_, asked)| asked.number);
            let oldest = oldest.map(|(id, _)| *id);
            oldest.and_then(|oldest| waiting.remove(&oldest));
        }
        waiting.insert(id, Asked { challenge, keys: kept(keys), number, at: Instant::now() });
        Ok(question)
    }

    /// The proof in an answer of the boot `boot_id`, at `at` in seconds since 1970; `None` if this
    /// leader has not asked.
    pub(super) fn judge(
        &self,
        id: NodeId,
        boot_id: &str,
        answer: v1::TpmAnswer,
        at: i64,
    ) -> Option<Result<v1::TpmAttestation, Error>> {
        let asked = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)?;
        let proved = proved(id, &asked.challenge, answer);
        Some(proved.map(|registers| v1::TpmAttestation {
            at,
            keys: Some(asked.keys),
            registers: to_messages(registers),
            fault: String::new(),
            boot_id: boot_id.to_owned(),
        }))
    }
}

/// Whether the check decided nothing, so that another question may have a proof as its answer:
/// a register changed between its reading and the signature, the answer is to an earlier question
/// of a curator that leads again, or this machine has no random numbers.
pub(super) fn is_undecided(error: &Error) -> bool {
    matches!(error, Error::Registers | Error::Activation | Error::Random)
}

/// The entry in a record for a boot of which the TPM proves nothing, for this reason.
pub(super) fn failed(boot_id: &str, fault: String, at: i64) -> v1::TpmAttestation {
    v1::TpmAttestation { at, fault, boot_id: boot_id.to_owned(), ..Default::default() }
}

/// The proof in the record of an approved machine, from the recorded proof and a newer one. The
/// operator may have looked at the recorded one, so a newer one counts only from the same TPM.
pub(super) fn after_approval(
    known: Option<v1::TpmAttestation>,
    new: Option<v1::TpmAttestation>,
) -> Option<v1::TpmAttestation> {
    match known {
        Some(known) if known.fault.is_empty() => {
            Some(new.filter(|new| same_tpm(new, &known)).unwrap_or(known))
        }
        other => new.or(other),
    }
}

/// Whether both proofs are of the TPM with one endorsement key.
fn same_tpm(new: &v1::TpmAttestation, known: &v1::TpmAttestation) -> bool {
    let key = |proof: &v1::TpmAttestation| proof.keys.clone().map(|keys| keys.endorsement_key);
    key(new).is_some() && key(new) == key(known)
}

fn proved(id: NodeId, challenge: &Challenge, answer: v1::TpmAnswer) -> Result<Registers, Error> {
    let answer = Answer::from_message(answer)?;
    challenge.check(&id.to_string(), &REGISTERS, &answer)?;
    Ok(answer.registers)
}

/// The keys as a record keeps them.
fn kept(mut keys: Keys) -> v1::TpmKeys {
    keys.certificate = keys.certificate.filter(|certificate| certificate.len() <= CERTIFICATE_MAX);
    keys.into_message()
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_wire::attestation::software::Software;
    use polis_wire::attestation::{Question, qualifier};

    fn node(number: u16) -> NodeId {
        let mut key = [0; 32];
        key[..2].copy_from_slice(&number.to_le_bytes());
        NodeId::from_public_key(&key)
    }

    fn registers() -> Registers {
        REGISTERS.into_iter().map(|number| (number, [3; 32])).collect()
    }

    /// The answer of a TPM, in the name of a node.
    fn answer(tpm: &Software, id: NodeId, question: v1::TpmQuestion) -> v1::TpmAnswer {
        let question = Question::from_message(question).unwrap();
        let qualifier = qualifier(&question.nonce, &id.to_string());
        tpm.prove(&question.credential, &qualifier, registers()).unwrap().into_message()
    }

    #[test]
    fn a_machine_that_waits_proves_its_tpm_once_and_in_its_own_name() {
        let (questions, tpm) = (Questions::default(), Software::default());
        let keys = || tpm.keys().into_message();
        let question = questions.ask(node(1), keys()).unwrap();
        let sent = answer(&tpm, node(1), question);
        let found = questions.judge(node(1), "boot", sent.clone(), 7).unwrap().unwrap();
        assert_eq!((found.at, &*found.fault, found.keys), (7, "", Some(keys())));
        assert_eq!(found.boot_id, "boot");
        assert_eq!(found.registers, to_messages(registers()));
        // Answered once; and this leader has asked no other machine.
        assert_eq!(questions.judge(node(1), "boot", sent, 7), None);
        assert_eq!(questions.judge(node(2), "boot", v1::TpmAnswer::default(), 7), None);

        // The answer of another node, and none that holds.
        let question = questions.ask(node(1), keys()).unwrap();
        let error = |sent| questions.judge(node(1), "boot", sent, 8).unwrap().unwrap_err();
        assert_eq!(error(answer(&tpm, node(2), question)), Error::Question);
        questions.ask(node(1), keys()).unwrap();
        assert_eq!(error(v1::TpmAnswer::default()), Error::Activation);
        assert_eq!(questions.ask(node(1), v1::TpmKeys::default()), Err(Error::EndorsementKey));
    }

    #[test]
    fn a_check_that_another_question_may_settle_is_told_from_one_that_failed() {
        let (questions, tpm) = (Questions::default(), Software::default());
        let ask = || questions.ask(node(1), tpm.keys().into_message()).unwrap();
        let judge = |sent| questions.judge(node(1), "boot", sent, 7).unwrap();
        // A register that changed after the TPM signed it.
        let mut changed = answer(&tpm, node(1), ask());
        changed.registers[0].value = vec![9; 32];
        assert!(is_undecided(&judge(changed).unwrap_err()));
        // The answer to the question before.
        let earlier = answer(&tpm, node(1), ask());
        ask();
        assert!(is_undecided(&judge(earlier).unwrap_err()));
        // An answer of another node, one without a signature, and keys that no TPM has.
        let other = answer(&tpm, node(2), ask());
        assert!(!is_undecided(&judge(other).unwrap_err()));
        let mut unsigned = answer(&tpm, node(1), ask());
        unsigned.signature = vec![0; 8];
        assert!(!is_undecided(&judge(unsigned).unwrap_err()));
        let keys = questions.ask(node(1), v1::TpmKeys::default());
        assert!(!is_undecided(&keys.unwrap_err()));
        // Right in the end.
        let right = answer(&tpm, node(1), ask());
        assert_eq!(judge(right).unwrap().fault, "");
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_begins_few_proofs_in_a_row_and_a_node_that_tries_has_always_one() {
        let budgets = budgets();
        let begun = (0..1000).filter(|_| budgets.take(node(1), 1)).count();
        assert_eq!(begun, 12);
        assert!(budgets.take(node(2), 1), "each member has its own");
        for _ in 0..100 {
            tokio::time::advance(PROOFS_PACE).await;
            assert!(budgets.take(node(1), 1) && !budgets.take(node(1), 1));
        }
    }

    #[test]
    fn machines_that_wait_displace_no_question_but_their_own_and_questions_are_bounded() {
        let (questions, tpm) = (Questions::default(), Software::default());
        let keys = tpm.keys().into_message();
        let ask = |number| questions.ask(node(number), keys.clone()).unwrap();
        let waits = |number| questions.0.lock().unwrap().contains_key(&node(number));
        let first = ask(0);
        // As many as may wait beside it, and some of them as often as they can.
        for number in (1..1024).chain(1..20) {
            ask(number);
        }
        let sent = answer(&tpm, node(0), first);
        assert_eq!(questions.judge(node(0), "boot", sent, 7).unwrap().unwrap().fault, "");
        // Beyond that the oldest one goes.
        ask(0);
        assert!(waits(20));
        ask(1024);
        assert!(!waits(20) && waits(21) && waits(1) && waits(0) && waits(1024));
        assert_eq!(questions.0.lock().unwrap().len(), QUESTIONS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn members_that_start_at_once_take_turns_and_none_loses_its_question() {
        let (questions, tpm) = (Questions::default(), Software::default());
        let all = 0..u16::try_from(MEMBERS_MAX).unwrap();
        let mut first = None;
        for number in all {
            assert!(questions.has_room(node(number)));
            let question = questions.ask(node(number), tpm.keys().into_message()).unwrap();
            first.get_or_insert(question);
        }
        // It may be asked anew, and another one waits.
        assert!(questions.has_room(node(0)) && !questions.has_room(node(1000)));
        let sent = answer(&tpm, node(0), first.unwrap());
        assert_eq!(questions.judge(node(0), "boot", sent, 7).unwrap().unwrap().fault, "");
        assert!(questions.has_room(node(1000)));
        questions.ask(node(1000), tpm.keys().into_message()).unwrap();
        assert!(!questions.has_room(node(1001)));
        // A member that does not answer keeps no place.
        tokio::time::advance(ANSWER_MAX).await;
        assert!(questions.has_room(node(1001)));
    }

    #[test]
    fn a_record_keeps_no_certificate_without_bounds() {
        let keys =
            Keys { certificate: Some(vec![1; CERTIFICATE_MAX + 1]), ..Software::default().keys() };
        assert!(kept(keys.clone()).endorsement_certificate.is_empty());
        let keys = Keys { certificate: Some(vec![1; CERTIFICATE_MAX]), ..keys };
        assert_eq!(kept(keys).endorsement_certificate.len(), CERTIFICATE_MAX);
    }
}
