use super::*;

fn given(preferred: u32, valid: u32, renew: u32, rebind: u32) -> Given {
    let address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7);
    Given { address, preferred, valid, renew, rebind }
}

#[test]
fn a_lease_is_renewed_when_the_server_says_or_at_half_of_its_time() {
    for (of, renew, rebind) in [
        (given(600, 1000, 100, 200), 100, 200),
        (given(600, 1000, 0, 0), 300, 480),
        (given(0, 1000, 0, 0), 500, 800),
        // Not more often than every five seconds, and not after the end.
        (given(600, 1000, 1, 1), 5, 5),
        (given(600, 1000, u32::MAX, u32::MAX), 1000, 1000),
        (given(u32::MAX, u32::MAX, 0, 0), 2_147_483_647, 3_435_973_836),
    ] {
        let (t1, t2) = times(of);
        assert_eq!((t1.as_secs(), t2.as_secs()), (renew, rebind), "{of:?}");
        assert!(RENEW_MIN <= t1 && t1 <= t2 && t2.as_secs() <= of.valid.into());
    }
}

#[test]
fn the_waits_double_up_to_their_most() {
    let (mut wait, mut expected) = (None, 1.0_f64);
    for _ in 0..12 {
        let next = SOLICIT.next(wait);
        let around = next.as_secs_f64() / expected;
        assert!((0.8..1.25).contains(&around), "{next:?}, expected about {expected} s");
        // Each wait is a tenth off the last one at most.
        expected = (next.as_secs_f64() * 2.0).min(120.0);
        wait = Some(next);
    }
    assert!(wait.is_some_and(|wait| wait <= Duration::from_secs(132)));
}

fn answer(association: Association) -> Answer {
    Answer {
        server: vec![0, 3, 0, 1, 2, 0, 0, 0, 0, 1],
        preference: 0,
        association,
        nameservers: vec![Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53)],
        ntp_servers: Vec::new(),
        refresh: None,
        wait_max: None,
    }
}

#[test]
fn every_reply_leads_somewhere() {
    let from = IpAddr::from(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2));
    let now = Instant::now();
    let classified = |association| classified(answer(association), from, now);
    let Some(Heard::Lease(leased)) = classified(Association::Given(given(600, 1000, 0, 0))) else {
        panic!("no lease")
    };
    let (lease, bound) = *leased;
    assert_eq!(lease.address.to_string(), "2001:db8::7/128");
    assert_eq!((lease.server, lease.nameservers.len()), (from, 1));
    assert_eq!(bound.ends, now + Duration::from_secs(1000));
    assert!(classified(Association::Absent).is_none());
    let withdrawn = classified(Association::Given(given(0, 0, 0, 0)));
    assert!(matches!(withdrawn, Some(Heard::Withdrawn)));
    let short = classified(Association::Given(given(10, 29, 0, 0)));
    assert!(matches!(short, Some(Heard::Refused(Refused::Lifetime(_)))));
    let own = Given { address: Ipv6Addr::LOCALHOST, ..given(600, 1000, 0, 0) };
    let own = classified(Association::Given(own));
    assert!(matches!(own, Some(Heard::Refused(Refused::Address(_)))));
    let unknown = classified(Association::Refused(Status::NoBinding));
    assert!(matches!(unknown, Some(Heard::Unknown)));
    let denied = classified(Association::Refused(Status::NoAddresses));
    assert!(matches!(denied, Some(Heard::Denied(Status::NoAddresses))));
}

/// The way of a server that always offers and never gives.
#[test]
fn no_answer_makes_the_client_ask_again_at_once() {
    let client = Client { mac: crate::parameters::Mac([2, 0, 0, 0, 0, 1]), association: 1 };
    let mut link = Link::new(2, "eth0".to_owned(), client, Want::Address);
    let refused = || Heard::Refused(Refused::Address(Ipv6Addr::LOCALHOST.into()));
    let answers =
        [|| Heard::Withdrawn, || Heard::Unknown, || Heard::Denied(Status::NoAddresses), refused];
    let mut last = REFUSED_WAIT / 2;
    for answer in answers.iter().cycle().take(12) {
        link.state = State::Soliciting;
        let _event = link.turn(answer());
        let State::Waiting(wait) = link.state else { panic!("it asks at once") };
        assert_eq!(wait, (last * 2).min(SOLICIT.max));
        last = wait;
    }
    let now = Instant::now();
    let from = IpAddr::from(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2));
    // A neighbour claims each address that the server gives.
    for seconds in [10, 20, 40, 80, 120, 120] {
        let lease = classified(answer(Association::Given(given(600, 1000, 0, 0))), from, now);
        assert!(matches!(link.turn(lease.unwrap()), Some(Event::Leased(_))));
        assert_eq!(link.refused_wait, REFUSED_WAIT);
        let State::Waiting(wait) = link.after_decline() else { panic!("it asks at once") };
        assert_eq!(wait.as_secs(), seconds);
    }
}
