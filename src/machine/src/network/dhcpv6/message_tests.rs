//! Messages that `dhcproto`, another implementation, wrote and read, and a fuzz target.

use polis_fuzz::{Accepted, Target};
use proptest::prelude::*;

use super::super::{classified, times};
use super::*;

const CLIENT: Client = Client { mac: Mac([0x52, 0x54, 0, 0x70, 0x6f, 1]), association: 0 };
const TRANSACTION: [u8; 3] = [1, 2, 3];

/// An address for 1000 seconds with preference 7 and a name server, as `dhcproto` 0.15 writes it.
const LEASE: &str = "070102030001000a00030001525400706f010002000a0003000152550a0002020003002800\
                     0000000000012c000001e00005001820010db8000000000000000000000007000002580000\
                     03e800070001070017001020010db8000000000000000000000053";
/// No address, with the status inside of the association.
const NONE: &str = "020102030001000a00030001525400706f010002000a0003000152550a0002020003001b0000\
                    00000000012c000001e0000d000b00026e6f6e65206c656674";
/// Two name servers for 1800 seconds.
const SERVERS_ALONE: &str = "070102030001000a00030001525400706f010002000a0003000152550a00020200170\
                             02020010db800000000000000000000005320010db8000000000000000000000054002\
                             0000400000708";

fn bytes(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

fn read(text: &str, kind: u8) -> Result<Answer, Unusable> {
    Answer::read(&bytes(text), kind, CLIENT, TRANSACTION)
}

#[test]
fn answers_of_another_implementation_are_read() {
    let lease = read(LEASE, REPLY).unwrap();
    let given = Given {
        address: "2001:db8::7".parse().unwrap(),
        preferred: 600,
        valid: 1000,
        renew: 300,
        rebind: 480,
    };
    assert_eq!(lease.association, Association::Given(given));
    assert_eq!(lease.server, bytes("0003000152550a000202"));
    assert_eq!(lease.preference, 7);
    assert_eq!(lease.nameservers, ["2001:db8::53".parse::<Ipv6Addr>().unwrap()]);
    let none = read(NONE, ADVERTISE).unwrap();
    assert_eq!(none.association, Association::Refused(Status::NoAddresses));
    let servers = read(SERVERS_ALONE, REPLY).unwrap();
    assert_eq!(servers.association, Association::Absent);
    assert_eq!((servers.nameservers.len(), servers.refresh), (2, Some(1800)));
}

#[test]
fn an_answer_to_someone_else_is_none() {
    let with = |client, transaction| Answer::read(&bytes(LEASE), REPLY, client, transaction);
    assert_eq!(with(CLIENT, [1, 2, 4]), Err(Unusable::Transaction));
    let other = Client { mac: Mac([0x52, 0x54, 0, 0x70, 0x6f, 2]), ..CLIENT };
    assert_eq!(with(other, TRANSACTION), Err(Unusable::Client));
    assert_eq!(read(LEASE, ADVERTISE), Err(Unusable::Kind));
    // The address of another link of this client.
    let vlan = with(Client { association: 7, ..CLIENT }, TRANSACTION).unwrap();
    assert_eq!(vlan.association, Association::Absent);
}

#[test]
fn an_answer_without_a_server_or_with_too_much_is_not_taken() {
    let whole = bytes(LEASE);
    for length in 0..whole.len() {
        let part = Answer::read(&whole[..length], REPLY, CLIENT, TRANSACTION);
        // At the end of an option, the rest may be missing.
        let complete = part.is_ok_and(|answer| answer.server.len() == 10);
        assert_eq!(complete, [32, 76, 81].contains(&length), "{length} bytes");
    }
    let mut many = whole.clone();
    many.extend([0, 99, 0, 0].repeat(OPTIONS_MAX));
    assert_eq!(Answer::read(&many, REPLY, CLIENT, TRANSACTION), Err(Unusable::Options));
    let mut long = whole[..18].to_vec();
    put(&mut long, SERVER_ID, &[7; ID_MAX + 1]);
    assert_eq!(Answer::read(&long, REPLY, CLIENT, TRANSACTION), Err(Unusable::Server));
}

#[test]
fn servers_are_bounded_and_ones_that_no_host_is_left_out() {
    let mut message = bytes(LEASE);
    let list = |addresses: &[&str]| -> Vec<u8> {
        addresses.iter().flat_map(|it| it.parse::<Ipv6Addr>().unwrap().octets()).collect()
    };
    put(&mut message, NAME_SERVERS, &list(&["::", "fe80::1", "ff02::1", "::1", "::ffff:1.2.3.4"]));
    put(&mut message, NAME_SERVERS, &list(&["64:ff9b::1", "2001:db8::53", "fd00::1", "fd00::2"]));
    let mut ntp = Vec::new();
    put(&mut ntp, NTP_ADDRESS, &list(&["2001:db8::123"]));
    // By name: left out.
    put(&mut ntp, 3, b"\x04time\x07example\x00");
    put(&mut message, NTP_SERVERS, &ntp);
    let answer = Answer::read(&message, REPLY, CLIENT, TRANSACTION).unwrap();
    let shown: Vec<String> = answer.nameservers.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["2001:db8::53", "64:ff9b::1", "fd00::1"]);
    assert_eq!(answer.ntp_servers, ["2001:db8::123".parse::<Ipv6Addr>().unwrap()]);
}

#[test]
fn no_answer_has_the_client_wait_for_more_than_an_hour() {
    for (says, kept) in [(59, None), (60, Some(60)), (3_600, Some(3_600)), (86_400, Some(3_600))] {
        let mut message = bytes(NONE);
        put(&mut message, SOLICIT_WAIT_MAX, &u32::to_be_bytes(says));
        let answer = Answer::read(&message, ADVERTISE, CLIENT, TRANSACTION).unwrap();
        assert_eq!(answer.wait_max, kept.map(Duration::from_secs), "{says} s");
    }
}

#[test]
fn questions_are_as_another_implementation_reads_them() {
    let with =
        Binding { server: bytes("0003000152550a000202"), address: "2001:db8::7".parse().unwrap() };
    let hex = |question: Question<'_>| {
        let message = question.message(CLIENT, TRANSACTION, Duration::from_millis(1500));
        message.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let client = "0001000a00030001525400706f01";
    let (server, elapsed) = ("0002000a0003000152550a000202", "000800020096");
    let address = "00030028000000000000000000000000\
                   0005001820010db80000000000000000000000070000000000000000";
    let wants = "0006000800170038001f0052";
    for (question, expected) in [
        (
            Question::Solicit,
            format!("01010203{client}{elapsed}{wants}0003000c000000000000000000000000"),
        ),
        (Question::Request(&with), format!("03010203{client}{server}{elapsed}{wants}{address}")),
        (Question::Renew(&with), format!("05010203{client}{server}{elapsed}{wants}{address}")),
        (Question::Rebind(&with), format!("06010203{client}{elapsed}{wants}{address}")),
        (Question::Decline(&with), format!("09010203{client}{server}{elapsed}{address}")),
        (Question::Information, format!("0b010203{client}{elapsed}0006000a00170038001f00200053")),
    ] {
        assert_eq!(hex(question), expected, "{question:?}");
    }
}

proptest! {
    #[test]
    fn whatever_times_a_server_says_no_lease_is_renewed_without_pause_or_after_its_end(
        preferred in any::<u32>(), valid in 30_u32.., renew in any::<u32>(), rebind in any::<u32>(),
    ) {
        let address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7);
        let (t1, t2) = times(Given { address, preferred, valid, renew, rebind });
        prop_assert!(Duration::from_secs(5) <= t1 && t1 <= t2);
        prop_assert!(t2 <= Duration::from_secs(valid.into()));
    }
}

#[test]
fn dhcpv6_answers() {
    let samples = [LEASE, NONE, SERVERS_ALONE].map(bytes);
    Target::new("machine.dhcpv6").samples(samples).run(|input| {
        let kind = input.first().copied().unwrap_or_default();
        let Ok(answer) = Answer::read(input, kind, CLIENT, TRANSACTION) else {
            return Accepted::No;
        };
        assert!((1..=ID_MAX).contains(&answer.server.len()));
        for servers in [&answer.nameservers, &answer.ntp_servers] {
            assert!(servers.len() <= SERVERS_MAX && servers.iter().all(|it| is_host_v6(*it)));
        }
        assert!(answer.wait_max.is_none_or(|wait| wait <= Duration::from_secs(3_600)));
        let from = std::net::IpAddr::from(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2));
        let heard = classified(answer, from, tokio::time::Instant::now());
        if let Some(super::super::Heard::Lease(leased)) = heard {
            let (lease, bound) = *leased;
            assert!(lease.lifetime >= Duration::from_secs(30) && lease.routes.is_empty());
            assert!(bound.renew <= bound.rebind && bound.rebind <= bound.ends);
            assert!(lease.address.prefix() == 128 && lease.address.address().is_ipv6());
        }
        Accepted::Yes
    });
}

#[test]
fn a_former_address_without_time_does_not_hide_the_new_one() {
    let part = |last: u8, valid: u32| {
        let mut part = vec![0, 5, 0, 24];
        part.extend(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).octets());
        part.extend([0; 4]);
        part.extend(valid.to_be_bytes());
        part
    };
    let read = |parts: &[Vec<u8>]| association(&[vec![0; 12], parts.concat()].concat(), 0).unwrap();
    for parts in [[part(1, 0), part(2, 3600)], [part(2, 3600), part(1, 0)]] {
        let Some(Association::Given(given)) = read(&parts) else { panic!("no address") };
        assert_eq!((given.address.octets()[15], given.valid), (2, 3600));
    }
    let Some(Association::Given(given)) = read(&[part(1, 0)]) else { panic!("no address") };
    assert_eq!(given.valid, 0);
}
