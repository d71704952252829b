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
//!   else the oldest one goes. A member asks for room before it is asked: if all members start at
//!   once, they take turns, and each question that was asked can be answered.
//!
//! What this module does not do: decide which machine enters (an operator does, with the
//! outcome), or whether a member fits (`attested`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_proto::v1;
use tokio::time::Instant;

use polis_wire::attestation::{Answer, Challenge, Error, Keys, REGISTERS, Registers, to_messages};
use polis_wire::identity::NodeId;

/// A machine answers within seconds, and an operator lets in few at a time.
const QUESTIONS_MAX: usize = 256;

/// How long a question of a member keeps its place: longer than a node gives its TPM.
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// Bytes of the longest certificate that a record keeps: several times what makers issue.
const CERTIFICATE_MAX: usize = 4096;

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
    /// Whether one more node may be asked without loss of another question. Questions that
    /// were not answered in time are forgotten.
    pub(super) fn has_room(&self, id: NodeId) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, asked| asked.at.elapsed() < ANSWER_MAX);
        waiting.len() < QUESTIONS_MAX || waiting.contains_key(&id)
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

    /// What an answer proves of the boot `boot_id`, at `at` in seconds since 1970; `None` if this
    /// leader has not asked.
    pub(super) fn judge(
        &self,
        id: NodeId,
        boot_id: &str,
        answer: v1::TpmAnswer,
        at: i64,
    ) -> Option<v1::TpmAttestation> {
        let asked = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)?;
        Some(match proved(id, &asked.challenge, answer) {
            Ok(registers) => v1::TpmAttestation {
                at,
                keys: Some(asked.keys),
                registers: to_messages(registers),
                fault: String::new(),
                boot_id: boot_id.to_owned(),
            },
            Err(error) => failed(boot_id, error.to_string(), at),
        })
    }
}

/// The entry in a record for a boot of which the TPM proves nothing, for this reason.
pub(super) fn failed(boot_id: &str, fault: String, at: i64) -> v1::TpmAttestation {
    v1::TpmAttestation { at, fault, boot_id: boot_id.to_owned(), ..Default::default() }
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

    fn node(number: u8) -> NodeId {
        NodeId::from_public_key(&[number; 32])
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
        let told = answer(&tpm, node(1), question);
        let found = questions.judge(node(1), "boot", told.clone(), 7).unwrap();
        assert_eq!((found.at, &*found.fault, found.keys), (7, "", Some(keys())));
        assert_eq!(found.boot_id, "boot");
        assert_eq!(found.registers, to_messages(registers()));
        // Answered once; and this leader has asked no other machine.
        assert_eq!(questions.judge(node(1), "boot", told, 7), None);
        assert_eq!(questions.judge(node(2), "boot", v1::TpmAnswer::default(), 7), None);

        // The answer of another node, and none that holds.
        let question = questions.ask(node(1), keys()).unwrap();
        let fault = |told| questions.judge(node(1), "boot", told, 8).unwrap();
        let found = fault(answer(&tpm, node(2), question));
        assert_eq!(found.boot_id, "boot");
        assert!(found.fault.contains("another question"), "{found:?}");
        assert!(found.keys.is_none() && found.registers.is_empty(), "{found:?}");
        questions.ask(node(1), keys()).unwrap();
        let found = fault(v1::TpmAnswer::default());
        assert!(found.fault.contains("not in the TPM"), "{found:?}");
        assert_eq!(questions.ask(node(1), v1::TpmKeys::default()), Err(Error::EndorsementKey));
    }

    #[test]
    fn questions_are_bounded_and_a_machine_has_one() {
        let (questions, tpm) = (Questions::default(), Software::default());
        let last = u16::try_from(QUESTIONS_MAX).unwrap() + 3;
        for number in 0..last {
            let mut key = [0; 32];
            key[..2].copy_from_slice(&number.to_le_bytes());
            let id = NodeId::from_public_key(&key);
            for _time in 0..2 {
                questions.ask(id, tpm.keys().into_message()).unwrap();
            }
            assert!(questions.0.lock().unwrap().contains_key(&id), "{number}");
        }
        assert_eq!(questions.0.lock().unwrap().len(), QUESTIONS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn members_that_start_at_once_take_turns_and_none_loses_its_question() {
        let (questions, tpm) = (Questions::default(), Software::default());
        let id = |number: u16| {
            let mut key = [0; 32];
            key[..2].copy_from_slice(&number.to_le_bytes());
            NodeId::from_public_key(&key)
        };
        let all = 0..u16::try_from(QUESTIONS_MAX).unwrap();
        let mut first = None;
        for number in all {
            assert!(questions.has_room(id(number)));
            let question = questions.ask(id(number), tpm.keys().into_message()).unwrap();
            first.get_or_insert(question);
        }
        // It may be asked anew, and another one waits.
        assert!(questions.has_room(id(0)) && !questions.has_room(id(1000)));
        let told = answer(&tpm, id(0), first.unwrap());
        assert_eq!(questions.judge(id(0), "boot", told, 7).unwrap().fault, "");
        assert!(questions.has_room(id(1000)));
        questions.ask(id(1000), tpm.keys().into_message()).unwrap();
        assert!(!questions.has_room(id(1001)));
        // A member that does not answer keeps no place.
        tokio::time::advance(ANSWER_MAX).await;
        assert!(questions.has_room(id(1001)));
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
