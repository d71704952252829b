//! `polisctl node firewall`: the rules of a node's firewall, with the callers and the purpose of
//! each.
//!
//! The node itself answers, so the command works without a leader.

use polis_proto::v1;
use polis_proto::v1::get_firewall_response::Rule;
use serde::Serialize;

use super::state::Arguments;
use crate::Global;
use crate::error::Error;
use crate::output::{Document, Text};
use crate::table::table;

/// The firewall of a node, as programs read it.
#[derive(Debug, Serialize)]
pub(crate) struct View {
    in_force: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    fault: String,
    rules: Vec<RuleView>,
    members: Vec<String>,
    sources: Vec<String>,
    ports: Vec<String>,
    /// `null`: the configuration was confirmed.
    tried_for_seconds: Option<u32>,
    dropped: Option<u64>,
}

#[derive(Debug, Serialize)]
struct RuleView {
    name: String,
    ports: String,
    callers: String,
    pods: bool,
    purpose: String,
    accepted: Option<u64>,
}

/// Prints the firewall of a node.
pub(super) async fn run(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let session = arguments.session(global)?;
    let read = async || {
        let mut client = Box::pin(arguments.dial(&session)).await?;
        let answer = client.get_firewall(v1::GetFirewallRequest {});
        let answer = session.within("read the firewall of the node", answer).await?;
        View::of(answer.into_inner()).document()
    };
    arguments.watch.run(global, read).await
}

impl View {
    fn of(answer: v1::GetFirewallResponse) -> Self {
        let v1::FirewallConfiguration { sources, ports } = answer.configuration.unwrap_or_default();
        let rule = |rule: Rule| RuleView {
            name: rule.name,
            ports: rule.ports,
            callers: rule.callers,
            pods: rule.pods,
            purpose: rule.purpose,
            accepted: rule.accepted,
        };
        Self {
            in_force: answer.in_force,
            fault: answer.fault,
            rules: answer.rules.into_iter().map(rule).collect(),
            members: answer.members,
            sources,
            ports,
            tried_for_seconds: answer.tried_for_ms.map(|ms| ms / 1000),
            dropped: answer.dropped,
        }
    }

    fn document(&self) -> Result<Document, Error> {
        let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |it| it.to_string());
        let row = |rule: &RuleView| {
            let pods = if rule.pods { ", and pods" } else { "" };
            let callers = match rule.callers.as_str() {
                "any" => "any address".to_owned(),
                _ => format!("members and sources{pods}"),
            };
            vec![rule.ports.clone(), callers, rule.purpose.clone(), count(rule.accepted)]
        };
        let rows: Vec<_> = self.rules.iter().map(row).collect();
        let mut text = Text::default();
        if !self.in_force {
            text = text.and(format!("These rules are not in force: {}.\n\n", self.fault));
        } else if !self.fault.is_empty() {
            text = text.and(format!("The connections cannot be counted: {}.\n\n", self.fault));
        }
        if let Some(seconds) = self.tried_for_seconds {
            text = text.and(format!(
                "These rules are tried: without a confirmation the former ones return in \
                 {seconds} s.\n\n"
            ));
        }
        text = text.then(table(&["PORT", "CALLERS", "FOR", "ACCEPTED"], &rows));
        let members = match &self.members[..] {
            [] => "no other node".to_owned(),
            members => members.join(", "),
        };
        let sources = match &self.sources[..] {
            [] => {
                "any address; `polisctl cluster configure --firewall-source` names them".to_owned()
            }
            sources => sources.join(", "),
        };
        text = text.and(format!("\nMembers: {members}.\nSources: {sources}.\n"));
        if let Some(dropped) = self.dropped {
            text = text.and(format!(
                "Everything else is dropped: {dropped} packets since these rules were set.\n"
            ));
        }
        Document::new(self, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> v1::GetFirewallResponse {
        let rule = |ports: &str, callers: &str, pods, purpose: &str| Rule {
            name: "name".to_owned(),
            ports: ports.to_owned(),
            callers: callers.to_owned(),
            pods,
            purpose: purpose.to_owned(),
            accepted: Some(7),
        };
        v1::GetFirewallResponse {
            rules: vec![
                rule("tcp/7834", "known", false, "the members of etcd"),
                rule("tcp/7840", "known", true, "collectors of metrics"),
                rule("tcp/443", "any", true, "a port in the configuration of the cluster"),
            ],
            members: vec!["10.0.2.16".to_owned()],
            configuration: Some(v1::FirewallConfiguration {
                sources: vec!["192.0.2.0/24".to_owned()],
                ports: vec!["tcp/443".to_owned()],
            }),
            tried_for_ms: None,
            in_force: true,
            fault: String::new(),
            dropped: Some(3),
        }
    }

    fn text(answer: v1::GetFirewallResponse) -> String {
        format!("{:?}", View::of(answer).document().unwrap())
    }

    #[test]
    fn each_rule_says_who_may_call_and_what_for() {
        let shown = text(answer());
        for words in [
            "members and sources, and pods",
            "any address",
            "the members of etcd",
            "Members: 10.0.2.16.",
            "Sources: 192.0.2.0/24.",
            "dropped: 3 packets",
        ] {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        assert!(!shown.contains("not in force") && !shown.contains("are tried"), "{shown}");
    }

    #[test]
    fn a_firewall_that_fails_or_is_tried_says_so_first() {
        let failed = v1::GetFirewallResponse {
            in_force: false,
            fault: "cannot start nft".to_owned(),
            ..answer()
        };
        assert!(text(failed).contains("not in force: cannot start nft."));
        let tried = v1::GetFirewallResponse { tried_for_ms: Some(9_900), ..answer() };
        assert!(text(tried).contains("the former ones return in 9 s"));
    }
}
