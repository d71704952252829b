use proptest::prelude::*;

use super::*;

fn network(server: u8) -> Network {
    Network { nameservers: vec![std::net::IpAddr::from([192, 0, 2, server])], ..Network::default() }
}

fn order(number: u64, server: u8) -> Order {
    Order { number, network: Some(network(server)) }
}

/// A machine whose parameters have the network 1.
fn started() -> Changes {
    let mut changes = Changes::default();
    assert_eq!(changes.known(network(1), true), None);
    changes
}

/// The machine after a power cut.
fn again(changes: &Changes) -> Changes {
    let mut again = Changes::read(&changes.record()).unwrap();
    again.known(network(1), true);
    again
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn an_order_is_confirmed_by_a_proof_that_began_after_it_was_in_force() {
    let (mut changes, now) = (started(), Instant::now());
    assert_eq!(changes.network(), Some(&network(1)));
    changes.take(&order(7, 2), None, now);
    assert_eq!(changes.network(), Some(&network(2)));
    assert_eq!(changes.change().state, State::Trying);
    changes.review(Some(now + seconds(1)), now + seconds(2));
    assert!(changes.is_trying(), "the kernel does not have all of it");
    changes.applied(None, now + seconds(3));
    changes.review(Some(now + seconds(2)), now + seconds(4));
    assert!(changes.is_trying(), "that call began over the former network");
    changes.review(Some(now + seconds(3)), now + seconds(5));
    assert_eq!((changes.change().state, changes.deadline()), (State::Confirmed, None));
    assert_eq!(again(&changes).network(), Some(&network(2)));
}

#[test]
fn a_trial_without_a_proof_is_over_at_its_end() {
    let (mut changes, now) = (started(), Instant::now());
    changes.take(&order(7, 2), None, now);
    changes.applied(None, now);
    assert_eq!(changes.deadline(), Some(now + TRIAL));
    changes.review(None, now + TRIAL - seconds(1));
    assert!(changes.is_trying());
    changes.review(None, now + TRIAL);
    let Change { number, state, cause } = changes.change();
    assert_eq!((number, state), (7, State::Reverted));
    assert!(cause.contains("no curator was reached over it within 45 s"), "{cause}");
    assert_eq!(changes.network(), Some(&network(1)));
    assert!(!changes.is_new(&order(7, 2)), "it is not tried again");

    let mut changes = started();
    changes.take(&order(8, 2), None, now);
    changes.applied(Some("an answer from a DHCP server".to_owned()), now);
    changes.review(Some(now + seconds(9)), now + TRIAL);
    assert!(changes.change().cause.contains("an answer from a DHCP server"));
}

#[test]
fn a_trial_ends_with_a_restart() {
    let (mut changes, now) = (started(), Instant::now());
    changes.take(&order(6, 2), None, now);
    changes.applied(None, now);
    changes.review(Some(now), now);
    changes.take(&order(7, 3), None, now);
    let again = again(&changes);
    assert_eq!(again.network(), Some(&network(2)), "the one that was confirmed");
    assert_eq!((again.change().number, again.change().state), (7, State::Reverted));
    assert!(!again.is_new(&order(7, 3)));
}

#[test]
fn what_the_machine_cannot_have_or_store_is_refused() {
    let (mut changes, now) = (started(), Instant::now());
    changes.take(&order(7, 2), Some("interface eth9 selects no card".to_owned()), now);
    assert_eq!(changes.change().state, State::Refused);
    assert!(changes.change().cause.contains("eth9"));
    assert_eq!(changes.network(), Some(&network(1)));
    changes.take(&order(8, 2), None, now);
    changes.unwritten("no space");
    assert_eq!((changes.change().state, changes.network()), (State::Refused, Some(&network(1))));
    changes.take(&order(9, 1), None, now);
    assert_eq!(changes.change().state, State::Confirmed, "it is in force already");
}

#[test]
fn other_parameters_count_instead_of_what_was_confirmed_over_the_former() {
    let (mut changes, now) = (started(), Instant::now());
    changes.take(&order(7, 2), None, now);
    changes.applied(None, now);
    changes.review(Some(now), now);
    let record = changes.record();
    // A machine whose parameters are gone, because only the first boot needed them.
    let mut without = Changes::read(&record).unwrap();
    assert_eq!(without.known(Network::default(), false), None);
    assert_eq!(without.network(), Some(&network(2)));
    let mut other = Changes::read(&record).unwrap();
    assert!(other.known(network(4), true).is_some());
    assert_eq!(other.network(), Some(&network(4)));
    assert_eq!(other.change().state, State::Reverted);
    // An order without a network means that of the parameters.
    changes.take(&Order { number: 8, network: None }, None, now);
    assert_eq!(changes.network(), Some(&network(1)));
}

#[derive(Clone, Debug)]
enum Event {
    Order(u64, u8),
    Applied(bool),
    Proof,
    Wait(u64),
    PowerCut,
    Unwritten,
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (1u64..5, 1u8..4).prop_map(|(number, server)| Event::Order(number, server)),
        any::<bool>().prop_map(Event::Applied),
        Just(Event::Proof),
        (1u64..60).prop_map(Event::Wait),
        Just(Event::PowerCut),
        Just(Event::Unwritten),
    ]
}

proptest! {
    /// At every moment, the network in force is one that was confirmed, or one that is tried for
    /// less than the time of a trial.
    #[test]
    fn only_confirmed_networks_last(events in prop::collection::vec(any_event(), 0..40)) {
        let (mut changes, mut now) = (started(), Instant::now());
        let mut good = network(1);
        let mut proof = None;
        let mut began = now;
        for event in events {
            match event {
                Event::Order(number, server) => {
                    let order = order(number, server);
                    if changes.is_new(&order) {
                        began = now;
                    }
                    changes.take(&order, None, now);
                }
                Event::Applied(all) => {
                    changes.applied((!all).then(|| "a carrier".to_owned()), now);
                }
                Event::Proof => proof = Some(now),
                Event::Wait(time) => now += seconds(time),
                Event::PowerCut => changes = again(&changes),
                Event::Unwritten => changes.unwritten("no space"),
            }
            changes.review(proof, now);
            let in_force = changes.network().unwrap().clone();
            if changes.is_trying() {
                prop_assert!(now < began + TRIAL);
            } else if changes.change().state == State::Confirmed {
                good = in_force.clone();
            }
            if !changes.is_trying() {
                prop_assert_eq!(&in_force, &good);
            }
            let again = again(&changes);
            prop_assert_eq!(again.network(), Some(&good));
        }
    }

    #[test]
    fn a_record_that_is_not_one_is_an_error_and_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(changes) = Changes::read(&bytes) {
            prop_assert!(!changes.is_trying());
        }
    }
}
