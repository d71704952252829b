//! `polisctl node taint`: the taints in the record of a node, written as `kubectl taint` has them.

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;

use super::{called, described};
use crate::Global;
use crate::ask::{DryRun, Go};
use crate::error::Error;
use crate::session::Session;
use polis_wire::parameters;
use polis_wire::rpc::client::Repeat;

/// The form of an argument.
const FORM: &str = "KEY[=VALUE]:EFFECT, or KEY[:EFFECT]- to remove; EFFECT is NoSchedule, \
                    PreferNoSchedule or NoExecute";

/// Arguments of `node taint`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// `KEY=VALUE:EFFECT` sets a taint, and replaces the value of one with this key and effect;
    /// `KEY:EFFECT-` removes it, and `KEY-` each of the key. An effect is NoSchedule,
    /// PreferNoSchedule or NoExecute.
    #[arg(required = true, value_name = "KEY[=VALUE]:EFFECT|KEY-")]
    taints: Vec<String>,
    #[command(flatten)]
    dry_run: DryRun,
}

/// A change of the taints of a node.
#[derive(Debug, Default, PartialEq)]
struct Change {
    set: Vec<v1::NodeTaint>,
    remove: Vec<v1::NodeTaint>,
}

/// Sets and removes taints.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { node, taints, dry_run } = arguments;
    let Change { set, remove } = change(&taints)?;
    let session = Session::open(global).await?;
    let found = session.find(&node).await?;
    let (name, node_id) = (called(&found), found.id);
    let effect = format!("{name} gets its taints changed: {}.", taints.join(" "));
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let request = v1::UpdateNodeTaintsRequest { node_id, set, remove };
    let node = session.call("change the taints", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).update_node_taints(request).await }
    });
    described(&node.await?, global)
}

/// Reads the arguments, and checks them as the leader does.
fn change(texts: &[String]) -> Result<Change, Error> {
    let mut change = Change::default();
    for text in texts {
        // No part of a taint ends with a dash.
        let removed = text.strip_suffix('-');
        let taint = taint(text, removed.unwrap_or(text))?;
        let is_whole = taint.effect() != v1::node_taint::Effect::Unspecified;
        match removed {
            // A value may be written, as for kubectl: key and effect name the taint.
            Some(_) if is_whole || taint.value.is_empty() => {
                change.remove.push(v1::NodeTaint { value: String::new(), ..taint });
            }
            None if is_whole => change.set.push(taint),
            Some(_) | None => {
                let help = match removed {
                    Some(name) => format!("add an effect, such as {name}:NoSchedule-"),
                    None => format!("add an effect, such as {text}:NoSchedule"),
                };
                return Err(Error::usage(format!("{text:?} is not {FORM}")).or_help(help));
            }
        }
    }
    parameters::node_taints(&change.set, "set", 2)
        .and_then(|()| parameters::removed_taints(&change.remove, &change.set, "remove", 3))
        .map_err(|error| {
            Error::usage(error.to_string()).or_help("docs/worker.md lists who sets which taints")
        })?;
    Ok(change)
}

/// Reads `KEY[=VALUE][:EFFECT]` in the argument `whole`.
fn taint(whole: &str, text: &str) -> Result<v1::NodeTaint, Error> {
    let (name, effect) = text.split_once(':').unwrap_or((text, ""));
    let (key, value) = name.split_once('=').unwrap_or((name, ""));
    let known = match effect {
        "" if !text.contains(':') => Some(v1::node_taint::Effect::Unspecified),
        effect => parameters::taint_effect(effect),
    };
    let effect = known.ok_or_else(|| {
        Error::usage(format!("{whole:?} has the effect {effect:?}; allowed is {FORM}"))
    })?;
    Ok(v1::NodeTaint { key: key.to_owned(), value: value.to_owned(), effect: effect.into() })
}

#[cfg(test)]
mod tests {
    use polis_wire::parameters::taint_text;
    use polis_wire::rpc::testing::node_id;

    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;

    fn read(texts: &[&str]) -> Result<[Vec<String>; 2], Error> {
        let texts: Vec<_> = texts.iter().map(|text| (*text).to_owned()).collect();
        let Change { set, remove } = change(&texts)?;
        Ok([set, remove].map(|taints| taints.iter().map(taint_text).collect()))
    }

    #[test]
    fn taints_are_read_as_kubectl_reads_them() {
        let [set, remove] = read(&[
            "gpu=a100:NoSchedule",
            "example.com/db:NoExecute",
            "old-",
            "other:PreferNoSchedule-",
            "gpu=h100:NoExecute-",
        ])
        .unwrap();
        assert_eq!(set, ["gpu=a100:NoSchedule", "example.com/db:NoExecute"]);
        assert_eq!(remove, ["old", "other:PreferNoSchedule", "gpu:NoExecute"]);
        // One effect of a key is set while another one is removed.
        read(&["gpu:NoSchedule", "gpu:NoExecute-"]).unwrap();
    }

    #[test]
    fn a_wrong_taint_is_refused_with_what_is_allowed() {
        let cases: [(&[&str], &str); 11] = [
            (&["gpu"], "\"gpu\" is not KEY[=VALUE]:EFFECT"),
            (&["gpu=a100"], "\"gpu=a100\" is not KEY[=VALUE]:EFFECT"),
            (&["gpu=a100-"], "\"gpu=a100-\" is not KEY[=VALUE]:EFFECT"),
            (&["gpu:noschedule"], "has the effect \"noschedule\"; allowed is"),
            (&["gpu:"], "has the effect \"\"; allowed is"),
            (&["gpu:NoSchedule:NoExecute"], "has the effect \"NoSchedule:NoExecute\""),
            (&["gpu=a b:NoSchedule"], "set[0].value is \"a b\""),
            (&["a:NoSchedule", "a=b:NoSchedule"], "each pair of key and effect once"),
            (&["a:NoSchedule", "a-"], "a taint that is not set as well"),
            (&["node.kubernetes.io/x:NoExecute"], "a key outside of node.kubernetes.io"),
            (&["-"], "remove[0].key is \"\""),
        ];
        for (texts, said) in cases {
            let refused = read(texts).unwrap_err().summary();
            assert!(refused.contains(said), "{texts:?}: {refused}");
        }
        // The next step of a person who removes a taint does not set it.
        for (text, next) in [("gpu=a", "gpu=a:NoSchedule\n"), ("gpu=a-", "gpu=a:NoSchedule-\n")] {
            let refused = read(&[text]).unwrap_err().render();
            assert!(refused.ends_with(next), "{refused}");
        }
    }

    #[test]
    fn a_node_gets_taints_and_shows_them() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let said = world.runs(&["node", "taint", &id, "gpu=a100:NoSchedule", "old-"]);
        assert!(said.contains("taints        gpu=a100:NoSchedule\n"), "{said}");
        assert_eq!(cluster.asked(), ["UpdateNodeTaints [\"gpu=a100:NoSchedule\"] [\"old\"]"]);
        let json = world.runs(&["node", "taint", &id, "gpu:NoExecute", "-o", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let taint = serde_json::json!({"key": "gpu", "value": "", "effect": "NoExecute"});
        assert_eq!(value["taints"], serde_json::json!([taint]));
        assert_eq!(cluster.asked(), ["UpdateNodeTaints [\"gpu:NoExecute\"] []"]);
        let said = world.runs(&["node", "taint", &id, "old-", "--dry-run"]);
        assert!(said.contains("gets its taints changed: old-."), "{said}");
        assert_eq!(cluster.asked(), [""; 0]);
    }
}
