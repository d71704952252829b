//! Fuzz target of the discovery messages of a segment.

use polis_fuzz::{Accepted, Target};

use super::tests::{HERE, HERE_6, NONCE, SIGNED, key, message, message_at, received};
use super::{Discovery, Kind, MAGIC_4};

#[test]
fn discovery_messages() {
    let both = [Kind::Asks, Kind::Answers];
    let sent = both.map(|kind| [HERE, HERE_6].map(|at| message_at(at, kind, &key(1), NONCE)));
    let genuine = sent.concat();
    Target::new("control.discovery").samples(&genuine).length_max(200).run(|input| {
        let from = Discovery::read(input).map_or(HERE, |discovery| discovery.address);
        let accepted = received(input, from).is_some();
        assert_eq!(accepted, genuine.iter().any(|known| known == input), "a forged message");
        accepted.into()
    });
}

#[test]
fn discovery_messages_of_a_member() {
    // The kinds of messages that a member may sign, with its address and its number.
    let sample = [&[1, 10, 0, 2, 17][..], &NONCE].concat();
    Target::new("control.discovery_content").samples([sample]).length_max(64).run(|input| {
        let mut bytes = message(Kind::Asks, &key(1), NONCE);
        let signed = SIGNED;
        bytes.truncate(MAGIC_4.len());
        bytes.extend(input.iter().take(1));
        bytes.extend(key(1).public_key());
        bytes.extend(input.iter().skip(1));
        let fits = bytes.len() == signed;
        bytes.extend(key(1).sign(&bytes));
        let Some(discovery) = Discovery::read(&bytes) else { return Accepted::No };
        assert!(fits, "a message has one length");
        let accepted = received(&bytes, discovery.address);
        assert!(accepted.is_none_or(|accepted| accepted == discovery));
        accepted.is_some().into()
    });
}
