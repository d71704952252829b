//! The taints of a node, which its Node object in Kubernetes has: their validation, and their text
//! as `kubectl taint` has it.
//!
//! | domain of a key | who sets taints in it |
//! |---|---|
//! | `node.kubernetes.io` | the controllers of Kubernetes, by the conditions of the Node |
//! | `node.cloudprovider.kubernetes.io` | the controller of a cloud |
//! | `node-role.kubernetes.io` | tools that create clusters |
//! | none, or any other | operators |
//!
//! Invariants:
//! - The API server accepts each taint that passes: if it refused one, the Node would get none of
//!   the others.

use polis_proto::v1::NodeTaint;
use polis_proto::v1::node_taint::Effect;

use super::error::Error;
use super::text::{self, At as _, Refusal};

/// Taints of one node; as many as it may have labels.
pub const TAINTS_MAX: usize = 64;

/// The domains whose taints others set and remove by their own rules.
const RESERVED: [&str; 3] =
    ["node.kubernetes.io", "node-role.kubernetes.io", "node.cloudprovider.kubernetes.io"];

const EFFECTS: [(Effect, &str); 3] = [
    (Effect::NoSchedule, "NoSchedule"),
    (Effect::PreferNoSchedule, "PreferNoSchedule"),
    (Effect::NoExecute, "NoExecute"),
];

/// The name of an effect in Kubernetes; empty if it is unspecified.
#[must_use]
pub fn taint_effect_name(effect: Effect) -> &'static str {
    EFFECTS.iter().find(|(known, _)| *known == effect).map_or("", |(_, name)| *name)
}

/// The effect with this name in Kubernetes.
#[must_use]
pub fn taint_effect(name: &str) -> Option<Effect> {
    EFFECTS.iter().find(|(_, known)| *known == name).map(|(effect, _)| *effect)
}

/// `KEY[=VALUE][:EFFECT]`, without the parts that are empty.
#[must_use]
pub fn taint_text(taint: &NodeTaint) -> String {
    let mut text = taint.key.clone();
    let effect = taint_effect_name(taint.effect());
    for (mark, part) in [('=', taint.value.as_str()), (':', effect)] {
        if !part.is_empty() {
            text.push(mark);
            text.push_str(part);
        }
    }
    text
}

/// Checks taints that are set; `path` is their position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn node_taints(taints: &[NodeTaint], path: &str, number: u16) -> Result<(), Error> {
    text::at_most(taints.len(), TAINTS_MAX, "taints").at(path, number)?;
    for (i, taint) in taints.iter().enumerate() {
        let at = |field: &str| format!("{path}[{i}].{field}");
        key(&taint.key).at(at("key"), 1)?;
        text::label_value(&taint.value).at(at("value"), 2)?;
        known_effect(taint).at(at("effect"), 3)?;
        let same = |other: &NodeTaint| other.key == taint.key && other.effect == taint.effect;
        if taints.iter().take(i).any(same) {
            let twice = Refusal::of(&taint_text(taint), "each pair of key and effect once");
            return Err(twice).at(format!("{path}[{i}]"), number);
        }
    }
    Ok(())
}

/// Checks taints that are removed, while these are `set` at the same time; `path` is their
/// position as errors report it.
///
/// # Errors
///
/// [`Error::Field`].
pub fn removed_taints(
    taints: &[NodeTaint],
    set: &[NodeTaint],
    path: &str,
    number: u16,
) -> Result<(), Error> {
    text::at_most(taints.len(), TAINTS_MAX, "taints").at(path, number)?;
    for (i, taint) in taints.iter().enumerate() {
        let at = |field: &str| format!("{path}[{i}].{field}");
        text::label_key(&taint.key).at(at("key"), 1)?;
        if !taint.value.is_empty() {
            let refusal = Refusal::of(&taint.value, "nothing: key and effect name a taint");
            return Err(refusal).at(at("value"), 2);
        }
        if taint.effect != i32::from(Effect::Unspecified) {
            known_effect(taint).at(at("effect"), 3)?;
        }
        if set.iter().any(|set| is_removed(set, taint)) {
            let refusal = Refusal::of(&taint_text(taint), "a taint that is not set as well");
            return Err(refusal).at(format!("{path}[{i}]"), number);
        }
    }
    Ok(())
}

/// Whether a taint is among those that `removed` names.
fn is_removed(taint: &NodeTaint, removed: &NodeTaint) -> bool {
    let effects = [i32::from(Effect::Unspecified), taint.effect];
    removed.key == taint.key && effects.contains(&removed.effect)
}

fn key(text: &str) -> Result<(), Refusal> {
    text::label_key(text)?;
    let domain = text.split_once('/').map(|(domain, _name)| domain);
    if domain.is_some_and(|domain| RESERVED.contains(&domain)) {
        let allowed = format!(
            "a key outside of {}, whose taints Kubernetes sets and removes itself",
            RESERVED.join(", ")
        );
        return Err(Refusal::of(text, allowed));
    }
    Ok(())
}

fn known_effect(taint: &NodeTaint) -> Result<(), Refusal> {
    if taint_effect_name(taint.effect()).is_empty() {
        let names = EFFECTS.map(|(_, name)| name).join(", ");
        return Err(Refusal::described(taint.effect, format!("one of {names}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taint(key: &str, value: &str, effect: Effect) -> NodeTaint {
        NodeTaint { key: key.to_owned(), value: value.to_owned(), effect: effect.into() }
    }

    /// Position, number, value and allowed values of a refusal.
    fn refused(result: Result<(), Error>) -> (String, u16, String, String) {
        let Err(Error::Field(error)) = result else { panic!("{result:?}") };
        (error.path, error.number, error.value, error.allowed)
    }

    #[test]
    fn taints_are_written_as_kubectl_writes_them() {
        for (text, taint) in [
            ("gpu=a100:NoSchedule", taint("gpu", "a100", Effect::NoSchedule)),
            ("example.com/x:NoExecute", taint("example.com/x", "", Effect::NoExecute)),
            ("gpu", taint("gpu", "", Effect::Unspecified)),
        ] {
            assert_eq!(taint_text(&taint), text);
        }
        for (of, name) in EFFECTS {
            assert_eq!((taint_effect_name(of), taint_effect(name)), (name, Some(of)));
        }
        assert_eq!((taint_effect_name(Effect::Unspecified), taint_effect("")), ("", None));
        assert_eq!(taint_effect("noschedule"), None);
    }

    #[test]
    fn taints_of_operators_pass() {
        let keys = [
            "gpu",
            "nvidia.com/gpu",
            "node-restriction.kubernetes.io/x",
            "node.kubernetes.io",
            "mynode.kubernetes.io/x",
        ];
        let mut taints: Vec<_> =
            keys.iter().map(|key| taint(key, "", Effect::PreferNoSchedule)).collect();
        taints.push(taint("gpu", "", Effect::NoExecute));
        node_taints(&taints, "set", 2).unwrap();
    }

    #[test]
    fn each_refusal_says_what_where_and_what_is_allowed() {
        let good = taint("gpu", "a", Effect::NoSchedule);
        let unknown = NodeTaint { effect: 9, ..good.clone() };
        let same = taint("gpu", "b", Effect::NoSchedule);
        for (bad, at, number, shown, allowed) in [
            (taint("a b", "", Effect::NoExecute), "set[1].key", 1, "\"a b\"", "1 to 63 letters"),
            (taint("a", "b c", Effect::NoExecute), "set[1].value", 2, "\"b c\"", "up to 63"),
            (taint("a", "", Effect::Unspecified), "set[1].effect", 3, "0", "one of NoSchedule"),
            (unknown, "set[1].effect", 3, "9", "PreferNoSchedule, NoExecute"),
            (same, "set[1]", 2, "\"gpu=b:NoSchedule\"", "each pair of key and effect once"),
        ] {
            let (path, field, value, allows) = refused(node_taints(&[good.clone(), bad], "set", 2));
            assert_eq!((&*path, field, &*value), (at, number, shown));
            assert!(allows.contains(allowed), "{allows}");
        }
        for domain in RESERVED {
            let reserved = taint(&format!("{domain}/x"), "", Effect::NoSchedule);
            let (path, _, value, allowed) = refused(node_taints(&[reserved], "set", 2));
            assert_eq!((&*path, value), ("set[0].key", format!("\"{domain}/x\"")));
            assert!(allowed.contains("Kubernetes sets and removes itself"), "{allowed}");
        }
        let many: Vec<_> = (0..=TAINTS_MAX)
            .map(|number| taint(&format!("a{number}"), "", Effect::NoExecute))
            .collect();
        node_taints(&many[..TAINTS_MAX], "set", 2).unwrap();
        let (path, _, value, allowed) = refused(node_taints(&many, "set", 2));
        assert_eq!((&*path, &*value, &*allowed), ("set", "65 taints", "at most 64"));
    }

    #[test]
    fn a_taint_is_removed_by_its_key_and_not_while_it_is_set() {
        let set = [taint("gpu", "a", Effect::NoSchedule)];
        // A reserved one may be in a record of another version.
        for gone in [
            taint("gpu", "", Effect::NoExecute),
            taint("other", "", Effect::Unspecified),
            taint("node.kubernetes.io/x", "", Effect::Unspecified),
        ] {
            removed_taints(&[gone], &set, "remove", 3).unwrap();
        }
        for (gone, at, shown) in [
            (taint("gpu", "", Effect::NoSchedule), "remove[0]", "\"gpu:NoSchedule\""),
            (taint("gpu", "", Effect::Unspecified), "remove[0]", "\"gpu\""),
            (taint("-", "", Effect::NoExecute), "remove[0].key", "\"-\""),
            (taint("b", "x", Effect::NoExecute), "remove[0].value", "\"x\""),
            (NodeTaint { effect: 9, ..taint("b", "", Effect::NoExecute) }, "remove[0].effect", "9"),
        ] {
            let (path, _, value, _) = refused(removed_taints(&[gone], &set, "remove", 3));
            assert_eq!((&*path, &*value), (at, shown));
        }
        let many = vec![taint("b", "", Effect::NoExecute); TAINTS_MAX + 1];
        let (path, ..) = refused(removed_taints(&many, &[], "remove", 3));
        assert_eq!(path, "remove");
    }

    proptest! {
        #[test]
        fn arbitrary_taints_pass_or_are_refused_by_their_place(
            parts in prop::collection::vec((".{0,80}", ".{0,80}", -1..5_i32), 0..80),
        ) {
            let taint = |(key, value, effect)| NodeTaint { key, value, effect };
            let taints: Vec<_> = parts.into_iter().map(taint).collect();
            for checked in [
                node_taints(&taints, "field_x", 2),
                removed_taints(&taints, &[], "field_x", 3),
            ] {
                if let Err(error) = checked {
                    prop_assert!(error.to_string().starts_with("field_x"), "{}", error);
                }
            }
        }
    }
}
