//! Decides what this machine is to do, once a boot. Pure.
//!
//! ```text
//! sealed configuration  data partition  journal   -> decision
//! -----------------------------------------------------------------------
//! there                 there           any          start again
//! there                 none            any          refuse: data lost
//! damaged or none       there           under way    go on with the bootstrap
//! damaged               any             else         refuse: damaged
//! none                  there           damaged      refuse: journal damaged
//! none                  there           none         refuse: configuration lost
//! none                  none            any          what the parameters say
//! ```
//!
//! The journal goes once the sealed configuration is on the disk for good, so
//! while it is there, a damaged sealed configuration is one that was being written.
//!
//! Invariants:
//! - A data partition that this machine did not just begin to make is never the
//!   start of a new cluster.
//! - What cannot be understood is refused by its own name.

use super::record::Damage;
use super::sealed::{Begun, Sealed};
use crate::parameters::{Bootstrap, Cluster};

/// A record on the ESP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record<T> {
    /// There is none.
    Absent,
    /// There is something, and it is not whole.
    Damaged(Damage),
    /// Whole.
    Whole(T),
}

/// Whether the disk has a data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// It has none.
    Absent,
    /// It has one.
    Present,
}

/// What this machine does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is a member, and comes back.
    StartAgain(Box<Sealed>),
    /// It founds a cluster.
    Bootstrap(Bootstrap),
    /// It goes on founding a cluster; an earlier boot began.
    GoOn(Begun),
}

/// Why this machine does nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The machine is a member, and does not know of what.
    #[error("the sealed configuration is damaged: {0}")]
    SealedDamaged(Damage),
    /// The machine is a member, and its data has gone.
    #[error("this machine is a member of a cluster, and its data partition has gone")]
    DataLost,
    /// The data of a member is there, and nothing that says whose.
    #[error("there is a data partition, and the sealed configuration that belongs to it has gone")]
    SealedLost,
    /// A bootstrap was under way, and nobody knows which.
    #[error("a bootstrap was under way, and its journal is damaged: {0}")]
    JournalDamaged(Damage),
    /// Nobody told this machine what to become.
    #[error("this machine has no cluster and no node parameters")]
    NothingToDo,
    /// It is told to register.
    #[error("this version can only found a cluster, not register into one")]
    CannotRegister,
}

/// Decides. `told` is what the parameters say, if there are any.
///
/// # Errors
///
/// [`Refusal`].
pub fn decide(
    sealed: &Record<Sealed>,
    journal: &Record<Begun>,
    data: Data,
    told: Option<&Cluster>,
) -> Result<Decision, Refusal> {
    match (sealed, data, journal) {
        (Record::Whole(sealed), Data::Present, _) => {
            Ok(Decision::StartAgain(Box::new(sealed.clone())))
        }
        (Record::Whole(_), Data::Absent, _) => Err(Refusal::DataLost),
        (Record::Absent | Record::Damaged(_), Data::Present, Record::Whole(begun)) => {
            Ok(Decision::GoOn(begun.clone()))
        }
        (Record::Damaged(damage), Data::Absent | Data::Present, _) => {
            Err(Refusal::SealedDamaged(damage.clone()))
        }
        (Record::Absent, Data::Present, Record::Damaged(damage)) => {
            Err(Refusal::JournalDamaged(damage.clone()))
        }
        (Record::Absent, Data::Present, Record::Absent) => Err(Refusal::SealedLost),
        // A journal without a partition: nothing was made yet, so nothing binds.
        (Record::Absent, Data::Absent, _) => match told {
            Some(Cluster::Bootstrap(bootstrap)) => Ok(Decision::Bootstrap(bootstrap.clone())),
            Some(Cluster::Register(_)) => Err(Refusal::CannotRegister),
            None => Err(Refusal::NothingToDo),
        },
    }
}

/// Whether [`decide`] would look at what the parameters say: if not, nobody has
/// to wait for them.
#[must_use]
pub fn needs_parameters<S>(sealed: &Record<S>, data: Data) -> bool {
    matches!((sealed, data), (Record::Absent, Data::Absent))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::sealed::Keeping;
    use crate::cluster::tests::bootstrap;
    use crate::storage::Kind;

    fn sealed() -> Sealed {
        Sealed {
            node_public_key: [7; 32],
            cluster_ca: Vec::new(),
            storage: Kind::Insecure,
            secrets: None,
            keeping: Keeping::default(),
        }
    }

    fn begun() -> Begun {
        Begun { bootstrap: bootstrap(), kind: Kind::Insecure, keys: None }
    }

    #[test]
    fn a_fresh_machine_does_what_the_parameters_say() {
        let told = Cluster::Bootstrap(bootstrap());
        let decided = decide(&Record::Absent, &Record::Absent, Data::Absent, Some(&told));
        assert_eq!(decided, Ok(Decision::Bootstrap(bootstrap())));
        let decided = decide(&Record::Absent, &Record::Absent, Data::Absent, None);
        assert_eq!(decided, Err(Refusal::NothingToDo));
    }

    #[test]
    fn a_begun_bootstrap_goes_on_as_it_was_begun_whatever_the_parameters_say_now() {
        let journal = Record::Whole(begun());
        let decided = decide(&Record::Absent, &journal, Data::Present, None);
        assert_eq!(decided, Ok(Decision::GoOn(begun())));
        let other = Bootstrap { owner_public_key: [9; 32], ..bootstrap() };
        let told = Cluster::Bootstrap(other.clone());
        let decided = decide(&Record::Absent, &journal, Data::Present, Some(&told));
        assert_eq!(decided, Ok(Decision::GoOn(begun())));
        // Before anything was made, the newest word counts.
        let decided = decide(&Record::Absent, &journal, Data::Absent, Some(&told));
        assert_eq!(decided, Ok(Decision::Bootstrap(other)));
    }

    #[test]
    fn a_member_starts_again_whatever_else_there_is() {
        let told = Cluster::Bootstrap(bootstrap());
        for journal in [Record::Absent, Record::Whole(begun()), Record::Damaged(Damage::Magic)] {
            let decided = decide(&Record::Whole(sealed()), &journal, Data::Present, Some(&told));
            assert_eq!(decided, Ok(Decision::StartAgain(Box::new(sealed()))));
        }
    }

    #[test]
    fn a_configuration_that_was_being_written_is_written_again() {
        let damaged = Record::Damaged(Damage::Magic);
        let decided = decide(&damaged, &Record::Whole(begun()), Data::Present, None);
        assert_eq!(decided, Ok(Decision::GoOn(begun())));
    }

    #[test]
    fn a_lost_configuration_beside_a_data_partition_is_no_fresh_start() {
        let told = Cluster::Bootstrap(bootstrap());
        let decided = decide(&Record::Absent, &Record::Absent, Data::Present, Some(&told));
        assert_eq!(decided, Err(Refusal::SealedLost));
        let damaged = Record::Damaged(Damage::Checksum);
        let decided = decide(&Record::Absent, &damaged, Data::Present, Some(&told));
        assert_eq!(decided, Err(Refusal::JournalDamaged(Damage::Checksum)));
        let damaged = Record::Damaged(Damage::Checksum);
        let decided = decide(&damaged, &Record::Absent, Data::Present, Some(&told));
        assert_eq!(decided, Err(Refusal::SealedDamaged(Damage::Checksum)));
    }

    fn record<T: Clone + std::fmt::Debug>(value: T) -> impl Strategy<Value = Record<T>> {
        let damages = prop::sample::select(vec![Damage::Magic, Damage::Checksum]);
        prop_oneof![
            Just(Record::Absent),
            damages.prop_map(Record::Damaged),
            Just(Record::Whole(value)),
        ]
    }

    proptest! {
        #[test]
        fn nothing_begins_on_a_data_partition_and_unneeded_parameters_change_nothing(
            sealed in record(sealed()),
            journal in record(begun()),
            present in any::<bool>(),
        ) {
            let data = if present { Data::Present } else { Data::Absent };
            let told = Cluster::Bootstrap(bootstrap());
            let decided = decide(&sealed, &journal, data, Some(&told));
            if present || sealed != Record::Absent {
                prop_assert!(!matches!(decided, Ok(Decision::Bootstrap(_))));
            }
            if !needs_parameters(&sealed, data) {
                prop_assert_eq!(decided, decide(&sealed, &journal, data, None));
            }
        }
    }
}
