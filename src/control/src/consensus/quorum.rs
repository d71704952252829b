//! The quorum rule: decides whether a cluster survives the loss of a member.
//!
//! Pure. Every removal of a voter asks here first; etcd's own check of the same rule
//! returns no reasons.

use std::collections::BTreeSet;

use super::{Member, MemberId};

/// The reason why a member must stay.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A cluster has at least one voter.
    #[error("{name} is the last voter")]
    Last {
        /// The member that was to leave.
        name: String,
    },
    /// Too few of the others answer to decide anything without it.
    #[error(
        "without {name}, {needed} of {voters} voters must answer, of which {answering} can be reached; \
         missing: {}", missing.join(", ")
    )]
    Quorum {
        /// The member that was to leave.
        name: String,
        /// Voters that would be left.
        voters: usize,
        /// How many of them make a majority.
        needed: usize,
        /// How many of them answer.
        answering: usize,
        /// The members that do not answer.
        missing: Vec<String>,
    },
}

/// Whether `leaving`, one of `members`, may leave: the voters that answer without it
/// keep a majority. A learner may always leave.
pub(super) fn may_leave(
    leaving: &Member,
    members: &[Member],
    answering: &BTreeSet<MemberId>,
) -> Result<(), Refusal> {
    if leaving.learner {
        return Ok(());
    }
    let name = || leaving.called().to_owned();
    let left: Vec<_> =
        members.iter().filter(|member| !member.learner && member.id != leaving.id).collect();
    if left.is_empty() {
        return Err(Refusal::Last { name: name() });
    }
    let needed = left.len() / 2 + 1;
    let (answer, silent): (Vec<&Member>, Vec<&Member>) =
        left.iter().copied().partition(|member| answering.contains(&member.id));
    if answer.len() >= needed {
        return Ok(());
    }
    Err(Refusal::Quorum {
        name: name(),
        voters: left.len(),
        needed,
        answering: answer.len(),
        missing: silent.iter().map(|member| member.called().to_owned()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cluster(voters: u64) -> Vec<Member> {
        (1..=voters)
            .map(|id| Member {
                id: MemberId(id),
                name: format!("n{id}"),
                peer_url: String::new(),
                learner: false,
            })
            .collect()
    }

    fn answering(ids: &[u64]) -> BTreeSet<MemberId> {
        ids.iter().copied().map(MemberId).collect()
    }

    #[test]
    fn of_three_a_dead_one_may_leave_and_a_live_one_may_not() {
        let members = cluster(3);
        assert_eq!(may_leave(&members[2], &members, &answering(&[1, 2])), Ok(()));
        let refused = may_leave(&members[1], &members, &answering(&[1, 2])).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "without n2, 2 of 2 voters must answer, of which 1 can be reached; missing: n3"
        );
    }

    #[test]
    fn the_last_voter_stays_and_a_learner_may_always_leave() {
        let mut members = cluster(2);
        members[1].learner = true;
        let last = may_leave(&members[0], &members, &answering(&[1, 2]));
        assert_eq!(last, Err(Refusal::Last { name: "n1".to_owned() }));
        assert_eq!(may_leave(&members[1], &members, &answering(&[1])), Ok(()));
    }

    proptest! {
        #[test]
        fn a_member_may_leave_only_if_a_majority_still_answers(
            voters in 1..8_u64, leaving: prop::sample::Index, up in prop::collection::btree_set(1..8_u64, 0..8)
        ) {
            let members = cluster(voters);
            let up: BTreeSet<_> = up.into_iter().map(MemberId).collect();
            let gone = leaving.get(&members);
            if may_leave(gone, &members, &up).is_ok() {
                let left: Vec<_> = members.iter().filter(|member| member.id != gone.id).collect();
                let answer = left.iter().filter(|member| up.contains(&member.id)).count();
                prop_assert!(2 * answer > left.len());
            }
        }
    }
}
