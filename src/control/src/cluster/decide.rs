//! The decision of what this machine does, taken once a boot. Pure.
//!
//! ```text
//! sealed configuration  data partition  journal   -> decision
//! -----------------------------------------------------------------------
//! there                 there           any          join
//! there                 none            any          refuse: data lost
//! damaged or none       there           whole        continue what it began: a
//!                                                    bootstrap, or a registration
//! damaged               any             else         refuse: damaged
//! none                  there           damaged      refuse: journal damaged
//! none                  there           none         refuse: configuration lost
//! none                  none            registration continue it, unless the parameters
//!                                                    name another cluster
//! none                  none            else         follow the parameters
//! ```
//!
//! Parameters for the same cluster renew the ticket and the addresses of a registration.
//!
//! The journal is removed once the sealed configuration is safely on the disk. So while the
//! journal exists, a damaged sealed configuration is one whose first write was cut off.
//!
//! Invariants:
//! - A data partition that this machine did not just begin to make never becomes the start
//!   of a new cluster.
//! - A record that cannot be understood is refused by its own name.
//! - The data of a node ends only after its cluster has removed it, and where the parameters
//!   have its full ID or an owner has asked the node itself ([`wipe`]).

use super::error::Refusal;
use super::journal::{Journal, Registering};
use super::record::Record;
use super::sealed::{Begun, Sealed};
use polis_machine::parameters::{Bootstrap, Cluster, Install, Parameters, Register};
use polis_wire::identity::{Identity, NodeId};

/// Whether the disk has a data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Without one.
    Absent,
    /// It has one.
    Present,
}

/// The decision for this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The machine is a member, and joins again.
    StartAgain(Box<Sealed>),
    /// The machine creates a cluster.
    Bootstrap(Bootstrap),
    /// The machine continues to create a cluster, which an earlier boot began.
    GoOn(Box<Begun>),
    /// The machine registers with a cluster.
    Register(Register),
    /// The machine continues a registration or a commit that an earlier boot began.
    GoOnRegistering(Box<Registering>),
    /// The machine becomes no node: it installs its system to another disk.
    Install(Box<Install>),
}

/// The end of what a removed node left on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// Its data partition is to be given up.
    GiveUp,
    /// Its data partition is gone: its records on the ESP are to go, too.
    Forget,
}

/// Decides. `configured` is the cluster of the parameters, if the machine has any.
///
/// # Errors
///
/// [`Refusal`].
pub fn decide(
    sealed: &Record<Sealed>,
    journal: &Record<Journal>,
    data: Data,
    configured: Option<&Cluster>,
) -> Result<Decision, Refusal> {
    match (sealed, data, journal) {
        (Record::Whole(sealed), Data::Present, _) => {
            Ok(Decision::StartAgain(Box::new(sealed.clone())))
        }
        (Record::Whole(_), Data::Absent, _) => Err(Refusal::DataLost),
        (Record::Absent | Record::Damaged(_), Data::Present, Record::Whole(journal)) => {
            Ok(match journal.clone() {
                Journal::Bootstrap(begun) => Decision::GoOn(Box::new(begun)),
                Journal::Register(begun) => {
                    let begun = renewed(&begun, configured).unwrap_or(begun);
                    Decision::GoOnRegistering(Box::new(begun))
                }
            })
        }
        (Record::Damaged(damage), Data::Absent | Data::Present, _) => {
            Err(Refusal::SealedDamaged(damage.clone()))
        }
        (Record::Absent, Data::Present, Record::Damaged(damage)) => {
            Err(Refusal::JournalDamaged(damage.clone()))
        }
        (Record::Absent, Data::Present, Record::Absent) => Err(Refusal::SealedLost),
        (Record::Absent, Data::Absent, journal) => fresh(journal, configured),
    }
}

/// The installation that this machine does instead of becoming a node: its parameters ask for
/// one, and the disk that it was started from has never been a node's.
#[must_use]
pub fn installs<'a>(
    sealed: &Record<Sealed>,
    journal: &Record<Journal>,
    data: Data,
    configured: Option<&'a Parameters>,
) -> Option<&'a Install> {
    let unused = *sealed == Record::Absent && *journal == Record::Absent && data == Data::Absent;
    configured.filter(|_parameters| unused)?.install.as_ref()
}

/// Without a partition, nothing was made yet. A bootstrap commits to nothing at that point;
/// a registration is already known to the curator, so the machine continues as the same
/// node.
fn fresh(journal: &Record<Journal>, configured: Option<&Cluster>) -> Result<Decision, Refusal> {
    let begun = match journal {
        Record::Whole(Journal::Register(begun)) => Some(begun),
        Record::Whole(Journal::Bootstrap(_)) | Record::Absent | Record::Damaged(_) => None,
    };
    match (configured, begun) {
        (Some(Cluster::Bootstrap(bootstrap)), _) => Ok(Decision::Bootstrap(bootstrap.clone())),
        (Some(Cluster::Register(register)), begun) => {
            Ok(match begun.and_then(|begun| renewed(begun, configured)) {
                Some(begun) => Decision::GoOnRegistering(Box::new(begun)),
                None => Decision::Register(register.clone()),
            })
        }
        (None, Some(begun)) => Ok(Decision::GoOnRegistering(Box::new(begun.clone()))),
        (None, None) => Err(Refusal::NothingToDo),
    }
}

/// A registration with the ticket and the addresses of the parameters, if these are for the
/// same cluster.
fn renewed(begun: &Registering, configured: Option<&Cluster>) -> Option<Registering> {
    let Some(Cluster::Register(register)) = configured else { return None };
    (begun.register.ca_certificate == register.ca_certificate)
        .then(|| Registering { register: register.clone(), ..begun.clone() })
}

/// Decides whether what a node left on this machine is to be wiped before anything else:
/// because the parameters name it (`named`), or because a wipe has begun. A machine without a
/// whole sealed configuration does not know whose data it has, and wipes nothing.
///
/// # Errors
///
/// [`Refusal::WipesOther`] on the disk of a removed node that is not the named one. A node that
/// does not know that its cluster has removed it ignores the parameters here: it may be the node
/// that registered with them after the wipe. If they have its own ID, it asks once its disk is open
/// (`confirm`).
pub fn wipe(
    sealed: &Record<Sealed>,
    data: Data,
    named: Option<NodeId>,
) -> Result<Option<Wipe>, Refusal> {
    let Record::Whole(sealed) = sealed else { return Ok(None) };
    let found = Identity::new(sealed.node_public_key).id;
    match named {
        _ if sealed.wiped => {}
        Some(named) if sealed.disowned && named == found => {}
        Some(named) if sealed.disowned => return Err(Refusal::WipesOther { named, found }),
        Some(_) | None => return Ok(None),
    }
    Ok(Some(match data {
        Data::Present => Wipe::GiveUp,
        Data::Absent => Wipe::Forget,
    }))
}

/// Whether [`wipe`] or [`decide`] would read the parameters; if not, the caller does not
/// wait for them.
#[must_use]
pub fn needs_parameters(sealed: &Record<Sealed>, data: Data) -> bool {
    match (sealed, data) {
        (Record::Whole(sealed), Data::Present) => sealed.disowned && !sealed.wiped,
        (Record::Whole(sealed), Data::Absent) => sealed.disowned,
        (Record::Absent, _) | (Record::Damaged(_), Data::Present) => true,
        (Record::Damaged(_), Data::Absent) => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::record::Damage;
    use crate::cluster::sealed::Keeping;
    use crate::cluster::tests::{begun, bootstrap, half, register};
    use crate::cluster::unlock::keys::Secrets;
    use crate::cluster::unlock::sealer::Guarded;
    use polis_machine::storage::Kind;

    fn sealed() -> Sealed {
        Sealed {
            node_public_key: [7; 32],
            cluster_ca: Vec::new(),
            rotated_ca: None,
            storage: Kind::Insecure,
            secrets: None,
            keeping: Keeping::default(),
            disowned: false,
            wiped: false,
        }
    }

    fn founding() -> Record<Journal> {
        Record::Whole(Journal::Bootstrap(begun()))
    }

    fn registering() -> Registering {
        let secrets = Secrets { node: half(1), join: half(2), key: Some(half(3)) };
        let secrets = Guarded::Plain(secrets);
        Registering { register: register(), node: [5; 32], secrets, disk: None }
    }

    #[test]
    fn an_interrupted_registration_continues_as_the_same_node() {
        let journal = Record::Whole(Journal::Register(registering()));
        let go_on = |begun: Registering| Ok(Decision::GoOnRegistering(Box::new(begun)));
        for data in [Data::Absent, Data::Present] {
            let decided = decide(&Record::Absent, &journal, data, None);
            assert_eq!(decided, go_on(registering()), "{data:?}");
        }
        // A rotated ticket is replaced, and the node stays the same.
        let ticket = polis_machine::parameters::Ticket(b"another".to_vec().into());
        let newer = Register { ticket, ..register() };
        let configured = Cluster::Register(newer.clone());
        let decided = decide(&Record::Absent, &journal, Data::Absent, Some(&configured));
        assert_eq!(decided, go_on(Registering { register: newer.clone(), ..registering() }));
        // Once its disk is made, too: a node that was deleted or decommissioned needs it.
        for sealed in [Record::Absent, Record::Damaged(Damage::Checksum)] {
            assert!(needs_parameters(&sealed, Data::Present));
            let decided = decide(&sealed, &journal, Data::Present, Some(&configured));
            assert_eq!(decided, go_on(Registering { register: newer.clone(), ..registering() }));
        }
        // Another cluster starts a new registration, unless a disk is made.
        let other = Register { ca_certificate: b"other".to_vec(), ..register() };
        let configured = Cluster::Register(other.clone());
        let decided = decide(&Record::Absent, &journal, Data::Absent, Some(&configured));
        assert_eq!(decided, Ok(Decision::Register(other)));
        let decided = decide(&Record::Absent, &journal, Data::Present, Some(&configured));
        assert_eq!(decided, go_on(registering()));
    }

    #[test]
    fn a_fresh_machine_does_what_the_parameters_say() {
        let configured = Cluster::Bootstrap(bootstrap());
        let decided = decide(&Record::Absent, &Record::Absent, Data::Absent, Some(&configured));
        assert_eq!(decided, Ok(Decision::Bootstrap(bootstrap())));
        let decided = decide(&Record::Absent, &Record::Absent, Data::Absent, None);
        assert_eq!(decided, Err(Refusal::NothingToDo));
    }

    #[test]
    fn a_begun_bootstrap_goes_on_as_it_was_begun_whatever_the_parameters_say_now() {
        let journal = founding();
        let decided = decide(&Record::Absent, &journal, Data::Present, None);
        assert_eq!(decided, Ok(Decision::GoOn(Box::new(begun()))));
        let other = Bootstrap { owner_public_key: [9; 32], ..bootstrap() };
        let configured = Cluster::Bootstrap(other.clone());
        let decided = decide(&Record::Absent, &journal, Data::Present, Some(&configured));
        assert_eq!(decided, Ok(Decision::GoOn(Box::new(begun()))));
        // Before anything was made, the newest parameters are used.
        let decided = decide(&Record::Absent, &journal, Data::Absent, Some(&configured));
        assert_eq!(decided, Ok(Decision::Bootstrap(other)));
    }

    #[test]
    fn a_member_starts_again_whatever_else_there_is() {
        let configured = Cluster::Bootstrap(bootstrap());
        for journal in [Record::Absent, founding(), Record::Damaged(Damage::Magic)] {
            let decided =
                decide(&Record::Whole(sealed()), &journal, Data::Present, Some(&configured));
            assert_eq!(decided, Ok(Decision::StartAgain(Box::new(sealed()))));
        }
    }

    #[test]
    fn a_configuration_that_was_being_written_is_written_again() {
        let damaged = Record::Damaged(Damage::Magic);
        let decided = decide(&damaged, &founding(), Data::Present, None);
        assert_eq!(decided, Ok(Decision::GoOn(Box::new(begun()))));
    }

    #[test]
    fn only_the_named_node_or_one_whose_wipe_has_begun_is_wiped() {
        let own = Identity::new(sealed().node_public_key).id;
        let other = Identity::new([8; 32]).id;
        let member = Record::Whole(sealed());
        let removed = Record::Whole(Sealed { disowned: true, ..sealed() });
        let begun = Record::Whole(Sealed { disowned: true, wiped: true, ..sealed() });
        for (data, end) in [(Data::Present, Wipe::GiveUp), (Data::Absent, Wipe::Forget)] {
            assert_eq!(wipe(&removed, data, Some(own)), Ok(Some(end)));
            assert_eq!(wipe(&member, data, Some(own)), Ok(None), "it was not removed");
            for sealed in [&member, &removed] {
                assert_eq!(wipe(sealed, data, None), Ok(None));
            }
            // A registration in progress continues, even if the parameters have changed.
            for named in [None, Some(own), Some(other)] {
                assert_eq!(wipe(&begun, data, named), Ok(Some(end)), "{named:?}");
            }
            // The node that registered after the wipe still has these parameters.
            assert_eq!(wipe(&member, data, Some(other)), Ok(None));
            let refusal = Refusal::WipesOther { named: other, found: own };
            assert_eq!(wipe(&removed, data, Some(other)), Err(refusal));
            for unknown in [Record::Absent, Record::Damaged(Damage::Checksum)] {
                assert_eq!(wipe(&unknown, data, Some(own)), Ok(None), "whose data is it?");
            }
        }
    }

    #[test]
    fn only_a_machine_whose_disk_was_never_a_node_s_installs() {
        let install = crate::cluster::tests::install();
        let parameters = Parameters {
            cluster: Cluster::Bootstrap(bootstrap()),
            network: polis_machine::parameters::Network::default(),
            console_tui: Vec::new(),
            wipes: None,
            install: Some(install.clone()),
            volumes: Vec::new(),
            mirror: None,
        };
        let asks = Some(&parameters);
        let (unused, no_journal) = (Record::Absent, Record::Absent);
        assert_eq!(installs(&unused, &no_journal, Data::Absent, asks), Some(&install));
        let plain = Parameters { install: None, ..parameters.clone() };
        assert_eq!(installs(&unused, &no_journal, Data::Absent, Some(&plain)), None);
        assert_eq!(installs(&unused, &no_journal, Data::Present, asks), None);
        assert_eq!(installs(&unused, &founding(), Data::Absent, asks), None);
        assert_eq!(installs(&Record::Whole(sealed()), &no_journal, Data::Absent, asks), None);
        let damaged = Record::Damaged(Damage::Magic);
        assert_eq!(installs(&damaged, &no_journal, Data::Absent, asks), None);
    }

    #[test]
    fn a_lost_configuration_beside_a_data_partition_is_no_fresh_start() {
        let configured = Cluster::Bootstrap(bootstrap());
        let decided = decide(&Record::Absent, &Record::Absent, Data::Present, Some(&configured));
        assert_eq!(decided, Err(Refusal::SealedLost));
        let damaged = Record::Damaged(Damage::Checksum);
        let decided = decide(&Record::Absent, &damaged, Data::Present, Some(&configured));
        assert_eq!(decided, Err(Refusal::JournalDamaged(Damage::Checksum)));
        let damaged = Record::Damaged(Damage::Checksum);
        let decided = decide(&damaged, &Record::Absent, Data::Present, Some(&configured));
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
            journal in record(Journal::Bootstrap(begun())),
            present in any::<bool>(),
        ) {
            let data = if present { Data::Present } else { Data::Absent };
            let configured = Cluster::Bootstrap(bootstrap());
            let decided = decide(&sealed, &journal, data, Some(&configured));
            if present || sealed != Record::Absent {
                prop_assert!(!matches!(decided, Ok(Decision::Bootstrap(_))));
            }
            if !needs_parameters(&sealed, data) {
                prop_assert_eq!(decided, decide(&sealed, &journal, data, None));
            }
        }
    }
}
