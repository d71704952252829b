//! The answer of `GetFirewall`.

use polis_proto::v1;
use polis_proto::v1::get_firewall_response::Rule;
use tokio::time::Instant;

use crate::firewall::{Callers, Counted, Status};

pub(super) use crate::firewall::{Config, State};

/// The rules with their counters, or with the cause why they cannot be counted.
pub(super) fn answer(status: &Status, counted: Result<Counted, String>) -> v1::GetFirewallResponse {
    let (counted, fault) = match counted {
        Ok(counted) => (Some(counted), String::new()),
        Err(fault) => (None, fault),
    };
    let rule = |rule: &crate::firewall::Rule| Rule {
        name: rule.name.clone(),
        ports: rule.ports.to_string(),
        callers: match rule.callers {
            Callers::Any => "any",
            Callers::Known => "known",
        }
        .to_owned(),
        pods: rule.pods,
        purpose: rule.purpose.to_owned(),
        accepted: counted.as_ref().map(|all| all.accepted.get(&rule.name).copied().unwrap_or(0)),
    };
    let left = status.until.map(|until| until.saturating_duration_since(Instant::now()));
    v1::GetFirewallResponse {
        rules: status.rules.rules.iter().map(rule).collect(),
        members: status.rules.members.iter().map(ToString::to_string).collect(),
        configuration: Some(status.firewall.to_message()),
        tried_for_ms: left.map(|left| u32::try_from(left.as_millis()).unwrap_or(u32::MAX)),
        in_force: status.state == State::InForce,
        fault,
        dropped: counted.map(|counted| counted.dropped),
    }
}
