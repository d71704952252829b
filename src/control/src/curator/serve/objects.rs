//! The object of a call in its entry in the audit log, from the request: the node, the user, the
//! labels or taints, and so on.
//!
//! Invariant: an object has no secret of its request.
//!
//! What this module does not do: cut long texts (`audit`).

use polis_proto::v1;
use prost::Message;

use crate::curator::audit::TEXT_MAX;
use polis_wire::node_roles::Role;
use polis_wire::parameters::taint_text;
use polis_wire::rpc;

/// The object of a call: never a secret of its request.
pub(super) fn what(path: &str, message: &[u8]) -> String {
    fn read<M: Message + Default>(message: &[u8], text: impl Fn(M) -> String) -> String {
        M::decode(message).map(text).unwrap_or_default()
    }
    match path.rsplit('/').next().unwrap_or(path) {
        "ApproveNode" => read(message, |call: v1::ApproveNodeRequest| call.node_id),
        "ConfirmRecoveryKey" => read(message, |call: v1::ConfirmRecoveryKeyRequest| call.node_id),
        "ControlUpdate" => read(message, |call: v1::ControlUpdateRequest| {
            call.control().as_str_name().trim_start_matches("CONTROL_").to_ascii_lowercase()
        }),
        "BeginUpdate" => read(message, |call: v1::BeginUpdateRequest| {
            let version = call.bundle.unwrap_or_default().version;
            if call.dry_run { format!("{version}, only planned") } else { version }
        }),
        "ConfirmFirewall" => read(message, |call: v1::ConfirmFirewallRequest| {
            let v1::FirewallConfiguration { sources, ports } =
                call.configuration.unwrap_or_default();
            format!("from {}; ports {}", sources.join(" "), ports.join(" "))
        }),
        "ConfigureNodeNetwork" => {
            read(message, |call: v1::ConfigureNodeNetworkRequest| call.node_id)
        }
        "CreateUser" => read(message, |call: v1::CreateUserRequest| {
            let role = rpc::Role::try_from(call.role()).map(|role| format!("{role} "));
            format!("{}{}", role.unwrap_or_default(), call.name)
        }),
        "DecommissionNode" => read(message, |call: v1::DecommissionNodeRequest| call.node_id),
        "DeleteNode" => read(message, |call: v1::DeleteNodeRequest| call.node_id),
        "DeleteRegistry" => read(message, |call: v1::DeleteRegistryRequest| call.host),
        "GetRecoveryKey" => read(message, |call: v1::GetRecoveryKeyRequest| call.node_id),
        "GetRegisterTicket" => read(message, |call: v1::GetRegisterTicketRequest| {
            if call.rotate { "a new ticket" } else { "the ticket" }.to_owned()
        }),
        "NameNode" => read(message, |call: v1::NameNodeRequest| {
            format!("{} {}", call.node_id, call.name).trim_end().to_owned()
        }),
        "RevokeUser" => read(message, |call: v1::RevokeUserRequest| call.name),
        "SetRegistry" => read(message, |call: v1::SetRegistryRequest| {
            call.registry.map(|registry| registry.host).unwrap_or_default()
        }),
        "UpdateNodeLabels" => read(message, |call: v1::UpdateNodeLabelsRequest| {
            let set = call.set.iter().map(|(key, value)| format!("+{key}={value}"));
            let removed = call.remove.iter().map(|key| format!("-{key}"));
            listed(call.node_id, set.chain(removed))
        }),
        "UpdateNodeRoles" => read(message, |call: v1::UpdateNodeRolesRequest| {
            let mut text = call.node_id;
            for (sign, roles) in [('+', call.add), ('-', call.remove)] {
                for role in Role::given(&roles.unwrap_or_default()) {
                    text.push(' ');
                    text.push(sign);
                    text.push_str(role.slug());
                }
            }
            text
        }),
        "UpdateNodeTaints" => read(message, |call: v1::UpdateNodeTaintsRequest| {
            let set = call.set.iter().map(|taint| format!("+{}", taint_text(taint)));
            let removed = call.remove.iter().map(|taint| format!("-{}", taint_text(taint)));
            listed(call.node_id, set.chain(removed))
        }),
        _ => String::new(),
    }
}

/// The room for the number of labels or taints that an entry does not name.
const MORE_MAX: usize = " and 128 more".len();

/// The text with as many of `words` behind it as fit into an entry, the first in any case, and the
/// number of the others: a node may have more labels or taints than fit.
fn listed(mut text: String, words: impl Iterator<Item = String>) -> String {
    let mut others = 0;
    for (at, word) in words.enumerate() {
        let fits = text.len() + 1 + word.len() + MORE_MAX <= TEXT_MAX;
        if others == 0 && (fits || at == 0) {
            text.push(' ');
            text.push_str(&word);
        } else {
            others += 1;
        }
    }
    if others == 0 { text } else { format!("{text} and {others} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_names_what_the_call_is_about_and_no_secret() {
        let registry = v1::Registry {
            host: "a.example".to_owned(),
            password: "hunter2".to_owned(),
            ..Default::default()
        };
        let set = v1::SetRegistryRequest { registry: Some(registry) }.encode_to_vec();
        assert_eq!(what("/polis.v1.Management/SetRegistry", &set), "a.example");
        let roles = v1::UpdateNodeRolesRequest {
            node_id: "polis-1".to_owned(),
            add: Some(Role::record(&[Role::KubernetesWorker])),
            remove: None,
        };
        let text = what("/polis.v1.Management/UpdateNodeRoles", &roles.encode_to_vec());
        assert_eq!(text, "polis-1 +kubernetes-worker");
        let owned = |text: &&str| (*text).to_owned();
        let labels = |set: &[(&str, &str)], remove: &[&str]| {
            let labels = v1::UpdateNodeLabelsRequest {
                node_id: "polis-1".to_owned(),
                set: set.iter().map(|(key, value)| (owned(key), owned(value))).collect(),
                remove: remove.iter().map(owned).collect(),
            };
            what("/polis.v1.Management/UpdateNodeLabels", &labels.encode_to_vec())
        };
        let text = labels(&[("rack", "r1"), ("zone", "")], &["old"]);
        assert_eq!(text, "polis-1 +rack=r1 +zone= -old");
        let (key, value) = ("k".repeat(63), "v".repeat(63));
        let text = labels(&[(key.as_str(), value.as_str()), ("zone", "a")], &[value.as_str()]);
        assert_eq!(text, format!("polis-1 +{key}={value} +zone=a and 1 more"));
        assert!(text.len() <= TEXT_MAX, "{text}");
        let taint = |value: &str, effect: v1::node_taint::Effect| v1::NodeTaint {
            key: "gpu".to_owned(),
            value: value.to_owned(),
            effect: effect.into(),
        };
        use v1::node_taint::Effect::{NoExecute, NoSchedule, Unspecified};
        let taints = v1::UpdateNodeTaintsRequest {
            node_id: "polis-1".to_owned(),
            set: vec![taint("a100", NoSchedule)],
            remove: vec![taint("", NoExecute), taint("", Unspecified)],
        };
        let text = what("/polis.v1.Management/UpdateNodeTaints", &taints.encode_to_vec());
        assert_eq!(text, "polis-1 +gpu=a100:NoSchedule -gpu:NoExecute -gpu");
        let user = v1::CreateUserRequest {
            name: "ann".to_owned(),
            role: v1::UserRole::Operator.into(),
            public_key: vec![1; 32],
        };
        assert_eq!(what("/polis.v1.Aaa/CreateUser", &user.encode_to_vec()), "operator ann");
        assert_eq!(what("/polis.v1.Aaa/CreateUser", &[0xff]), "", "damaged");
    }
}
