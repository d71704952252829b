//! The counters of the rules, from the output of `nft --json list table`. Pure.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::text::DROPPED;

/// The packets of each rule, and those that no rule accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// By the name of the rule.
    pub accepted: BTreeMap<String, u64>,
    /// Of all others. Broadcasts are not counted.
    pub dropped: u64,
}

/// The output of `nft` is not what its manual says (libnftables-json).
#[derive(Debug, thiserror::Error)]
#[error("the output of nft cannot be read")]
pub(super) struct Unread(#[from] serde_json::Error);

#[derive(Deserialize)]
struct Output {
    nftables: Vec<Item>,
}

/// A rule; the other items of the list are not needed.
#[derive(Deserialize)]
struct Item {
    rule: Option<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    comment: Option<String>,
    #[serde(default)]
    expr: Vec<Statement>,
}

/// The statements of a rule have one key each, which is their kind.
#[derive(Deserialize)]
struct Statement {
    counter: Option<Counter>,
}

#[derive(Deserialize)]
struct Counter {
    packets: u64,
}

/// Reads the output of `nft`.
///
/// # Errors
///
/// [`Unread`].
pub(super) fn read(output: &[u8]) -> Result<Counted, Unread> {
    let output: Output = serde_json::from_slice(output)?;
    let mut counted = Counted::default();
    for Rule { comment, expr } in output.nftables.into_iter().filter_map(|item| item.rule) {
        let Some(name) = comment else { continue };
        let packets = expr.iter().filter_map(|it| it.counter.as_ref()).map(|it| it.packets);
        let packets = packets.fold(0, u64::saturating_add);
        if name == DROPPED {
            counted.dropped = counted.dropped.saturating_add(packets);
        } else {
            let sum = counted.accepted.entry(name).or_default();
            *sum = sum.saturating_add(packets);
        }
    }
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_rules_of_one_name_are_added_up() {
        let output = br#"{"nftables": [
            {"metainfo": {"version": "1.1.3", "json_schema_version": 1}},
            {"table": {"family": "inet", "name": "polis-firewall", "handle": 2}},
            {"chain": {"family": "inet", "name": "input", "policy": "drop"}},
            {"rule": {"chain": "input", "expr": [{"match": {"op": "=="}}, {"accept": null}]}},
            {"rule": {"comment": "etcd", "expr": [
                {"match": {"op": "==", "right": "@members4"}},
                {"counter": {"packets": 3, "bytes": 180}}, {"accept": null}]}},
            {"rule": {"comment": "etcd", "expr": [{"counter": {"packets": 4, "bytes": 0}}]}},
            {"rule": {"comment": "dropped", "expr": [{"counter": {"packets": 9, "bytes": 0}}]}}
        ]}"#;
        let counted = read(output).unwrap();
        assert_eq!(counted.accepted, BTreeMap::from([("etcd".to_owned(), 7)]));
        assert_eq!(counted.dropped, 9);
        assert!(read(b"{}").is_err() && read(b"").is_err());
    }

    proptest! {
        #[test]
        fn any_output_is_read_or_refused(output in prop::collection::vec(any::<u8>(), 0..200)) {
            let _read = read(&output);
        }
    }
}
