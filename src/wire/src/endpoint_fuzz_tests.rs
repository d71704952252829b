//! Fuzz target of the short texts that people and records carry: hosts with ports, networks,
//! IDs, names and roles.

use std::fmt::Display;
use std::str::FromStr;

use polis_fuzz::{Accepted, Target};

use super::Endpoint;
use crate::identity::{NodeId, NodeName};
use crate::parameters::{Cidr, Mac};
use crate::pod_network::Prefix;

/// Whether the text is one of a `T`, which then is the same when it is read from its display.
fn reads<T: FromStr + Display + PartialEq>(text: &str) -> bool {
    let Ok(value) = text.parse::<T>() else { return false };
    assert!(value.to_string().parse::<T>().is_ok_and(|again| again == value), "{text:?}");
    true
}

#[test]
fn short_texts() {
    let id = format!("polis-{}", "0a".repeat(16));
    let samples = [
        "a.example:7835",
        "[fd00::1]:80",
        "fd00::1",
        "10.0.2.0/24",
        "fd00::/64",
        "10.128.0.0/24",
        "02:00:00:00:00:01",
        "node-1",
        &id,
    ];
    Target::new("wire.short_texts").samples(samples).length_max(300).run(|input| {
        let text = String::from_utf8_lossy(input);
        let known = [
            reads::<Endpoint>(&text),
            reads::<Cidr>(&text),
            reads::<Prefix>(&text),
            reads::<Mac>(&text),
            reads::<NodeId>(&text),
            reads::<NodeName>(&text),
        ];
        Accepted::from(known.contains(&true))
    });
}
