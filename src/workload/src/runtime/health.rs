//! The health of containerd: whether it answers, and what it says of itself.

use std::time::Duration;

use polis_proto::cri::runtime_service_client::RuntimeServiceClient;
use polis_proto::cri::{RuntimeCondition, StatusRequest};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

/// A containerd that starts containers on a busy machine answers late.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// One condition of the container runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Whether it holds.
    pub holds: bool,
    /// Why not, in its own words; empty where it holds.
    pub reason: String,
}

/// The state of containerd by its own report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Whether it can run containers.
    pub runtime: Condition,
    /// Whether pods get a network: not before the node has its prefix.
    pub network: Condition,
}

/// Asks containerd.
///
/// # Errors
///
/// The error of containerd; [`tonic::Code::DeadlineExceeded`] if it does not answer.
pub async fn ask(channel: &Channel) -> Result<Health, Status> {
    let mut client = RuntimeServiceClient::new(channel.clone());
    let asked = timeout(ANSWER_MAX, client.status(StatusRequest::default())).await;
    let silent = |_elapsed| Status::deadline_exceeded("no answer");
    let answer = asked.map_err(silent)??.into_inner();
    Ok(health(&answer.status.unwrap_or_default().conditions))
}

fn health(conditions: &[RuntimeCondition]) -> Health {
    let condition = |name: &str| {
        let Some(found) = conditions.iter().find(|condition| condition.r#type == name) else {
            return Condition {
                holds: false,
                reason: format!("containerd says nothing of {name}"),
            };
        };
        let reason = if found.message.is_empty() { &found.reason } else { &found.message };
        let reason = if found.status { String::new() } else { reason.clone() };
        Condition { holds: found.status, reason }
    };
    Health { runtime: condition("RuntimeReady"), network: condition("NetworkReady") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_that_does_not_hold_has_a_reason() {
        let condition = |name: &str, status, message: &str| RuntimeCondition {
            r#type: name.to_owned(),
            status,
            reason: "Word".to_owned(),
            message: message.to_owned(),
        };
        let waits = "no network config found";
        let said = [condition("RuntimeReady", true, ""), condition("NetworkReady", false, waits)];
        let expected = Health {
            runtime: Condition { holds: true, reason: String::new() },
            network: Condition { holds: false, reason: waits.to_owned() },
        };
        assert_eq!(health(&said), expected);
        assert_eq!(health(&[condition("NetworkReady", false, "")]).network.reason, "Word");
        let silent = health(&[]).runtime;
        assert!(!silent.holds && silent.reason == "containerd says nothing of RuntimeReady");
    }
}
