//! `polisctl cluster rotate-ca`: another CA for the cluster, and other authorities for the members
//! of etcd and for Kubernetes.
//!
//! ```text
//! the leader begins --> nodes, members of etcd --> this command waits --> its own context
//! ```

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::get_rotation_response::Step;
use polis_proto::v1::management_client::ManagementClient;
use serde::Serialize;
use tokio::time::sleep;

use crate::ask::{Go, Sure};
use crate::error::Error;
use crate::node::called;
use crate::output::{Document, fields};
use crate::session::Session;
use crate::watch::Watch;
use crate::{Global, units};
use polis_wire::identity::Fingerprint;
use polis_wire::rpc::client::Repeat;

/// Between two questions how far it is.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 1000 });

/// The effect of a rotation.
const ROTATION: &str = "The cluster gets another CA, etcd another authority of its members, and \
                        Kubernetes other authorities and another key for tokens. Every node and \
                        user gets another certificate for the same key. The members of etcd start \
                        again one by one, the kubelets at once: pods go on, `kubectl exec` and \
                        `logs -f` end. Nothing that was signed with the former keys alone is \
                        believed any more, nor is a token of Kubernetes that a person made.";

/// Arguments of `cluster rotate-ca`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    part: Option<Part>,
    /// Return once it has begun: the cluster goes on by itself.
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    sure: Sure,
}

#[derive(Debug, clap::Subcommand)]
enum Part {
    /// Show how far the rotation is, or when the last one ended.
    Status(Watch),
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let Arguments { part, no_wait, sure } = arguments;
    if let Some(Part::Status(watch)) = part {
        let session = Session::brief(global).await?;
        return watch.run(global, async || View::read(&session).await?.document()).await;
    }
    if sure.of(global, ROTATION)? == Go::NoFurther {
        return Ok(());
    }
    let mut session = Session::open(global).await?;
    session
        .call("rotate the CA", Repeat::Allowed, |channel| async move {
            let request = v1::RotateAuthoritiesRequest {};
            ManagementClient::new(channel).rotate_authorities(request).await
        })
        .await?;
    let mut view = View::read(&session).await?;
    if !no_wait {
        session.limit_all(global);
        let progress = global.out.progress();
        while view.ended.is_none() {
            progress.says(&view.waits());
            sleep(LOOK).await;
            view = View::read(&session).await.map_err(|error| {
                error
                    .context("the rotation goes on without this command")
                    .or_help("see how far it is: `polisctl cluster rotate-ca status`")
            })?;
        }
    }
    session.follow_ca().await;
    global.out.print(&view.document()?)
}

/// A rotation, as programs read it.
#[derive(Clone, Debug, Serialize)]
struct View {
    number: u64,
    began: Option<units::Time>,
    ended: Option<units::Time>,
    /// `kubernetes`, `certificates`, `peers`, `restarts`, `none`.
    step: &'static str,
    waits_for: Vec<String>,
    /// Nodes that do not answer and are not waited for.
    away: Vec<String>,
    /// Members of etcd start again only after it.
    waits_for_update: bool,
    /// Nodes whose members are away: none starts again before they are back.
    missed: Vec<Missed>,
    ca_fingerprint: String,
    ca_words: String,
    #[serde(skip)]
    called: Vec<(String, String)>,
}

/// A node that etcd misses while its members are to start again.
#[derive(Clone, Debug, Serialize)]
struct Missed {
    id: String,
    heartbeat_age_ms: u64,
}

impl Missed {
    fn of(read: &v1::get_rotation_response::Missed) -> Self {
        Self { id: read.node_id.clone(), heartbeat_age_ms: read.silent_ms }
    }
}

impl View {
    async fn read(session: &Session) -> Result<Self, Error> {
        let read = session
            .call("read the rotation", Repeat::Allowed, |channel| async move {
                ManagementClient::new(channel).get_rotation(v1::GetRotationRequest {}).await
            })
            .await?;
        // Names make it readable, and it is true without them.
        let nodes = session.nodes(&[]).await.unwrap_or_default();
        Ok(Self::of(&read, &nodes))
    }

    fn of(read: &v1::GetRotationResponse, nodes: &[v1::NodeInfo]) -> Self {
        let rotation = read.rotation.unwrap_or_default();
        let ca = Fingerprint::of_certificate(&read.ca_certificate);
        let time = |seconds| units::since_1970(seconds).map(units::Time);
        Self {
            number: rotation.number,
            began: time(rotation.began_at),
            ended: time(rotation.ended_at),
            step: match read.step() {
                Step::Unspecified => "none",
                Step::Certificates => "certificates",
                Step::Peers => "peers",
                Step::Restarts => "restarts",
                Step::Kubernetes => "kubernetes",
            },
            waits_for: read.waits_for.clone(),
            away: read.away.clone(),
            waits_for_update: read.waits_for_update,
            missed: read.missed.iter().map(Missed::of).collect(),
            ca_fingerprint: ca.to_string(),
            ca_words: ca.words(),
            called: nodes.iter().map(|node| (node.id.clone(), called(node))).collect(),
        }
    }

    fn names(&self, ids: &[String]) -> String {
        let name = |id: &String| {
            let known = self.called.iter().find(|(known, _)| known == id);
            known.map_or_else(|| id.clone(), |(_, called)| called.clone())
        };
        ids.iter().map(name).collect::<Vec<_>>().join(", ")
    }

    /// The reason to wait, in a sentence.
    fn waits(&self) -> String {
        if self.waits_for_update {
            return "waiting for the end of the update of the cluster".to_owned();
        }
        if !self.missed.is_empty() {
            let missed = self.missed.iter().map(|Missed { id, heartbeat_age_ms }| {
                let silent = units::span(Duration::from_millis(*heartbeat_age_ms));
                format!("{}, away for {silent}", self.names(std::slice::from_ref(id)))
            });
            return format!(
                "waiting, five minutes at most, for {}, before etcd starts again on {}",
                missed.collect::<Vec<_>>().join(", and for "),
                self.names(&self.waits_for)
            );
        }
        let what = match self.step {
            "kubernetes" => {
                "certificates of Kubernetes, which its programs read within six minutes, on"
            }
            "certificates" => "certificates of the next CA for",
            "peers" => "certificates of the members of etcd on",
            "restarts" => "another start of etcd on",
            _ => return "going on".to_owned(),
        };
        match self.names(&self.waits_for) {
            nodes if nodes.is_empty() => "going on".to_owned(),
            nodes => format!("waiting for {what} {nodes}"),
        }
    }

    fn document(&self) -> Result<Document, Error> {
        let state = match (&self.ended, &self.began) {
            (Some(ended), _) => format!("ended on {ended}"),
            (None, Some(began)) => format!("began on {began}; {}", self.waits()),
            (None, None) => self.waits(),
        };
        let mut lines = vec![
            ("rotation", format!("number {}, {state}", self.number)),
            ("CA", format!("{}\n{}", self.ca_words, self.ca_fingerprint)),
        ];
        if !self.away.is_empty() {
            let away = self.names(&self.away);
            lines.push(("away", format!("{away}: they learn of it when they are back")));
        }
        if self.ended.is_some() {
            let next = "take a new snapshot, and write new parameters for machines to come: \
                        earlier ones name the former CA";
            lines.push(("next", next.to_owned()));
        }
        Document::new(self, fields(&lines))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn a_rotation_is_begun_after_a_question_and_waited_for_and_the_context_follows() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let before = Cluster::ca(&world);
        let ended = world.asks(&["cluster", "rotate-ca"], "no\n");
        assert_eq!((ended.status, cluster.asked()), (1, Vec::<String>::new()));
        let json = world.runs(&["cluster", "rotate-ca", "--yes", "--output", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["number"], &value["step"]), (&1.into(), &"none".into()), "{json}");
        assert!(value["ended"].is_string(), "{json}");
        assert_eq!(cluster.asked(), ["RotateAuthorities"]);
        assert_ne!(Cluster::ca(&world), before);
        // The next command trusts the next CA alone.
        world.runs(&["cluster", "info"]);
        let text = world.runs(&["cluster", "rotate-ca", "status"]);
        assert!(text.contains("number 1, ended on 2023-11-14"), "{text}");
    }

    #[test]
    fn a_context_that_was_away_learns_of_a_rotation_by_any_command() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let before = Cluster::ca(&world);
        cluster.rotates();
        cluster.shows_the_next_ca();
        let ended = world.run(&["cluster", "info"]);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        assert!(
            ended.stderr.contains("the CA was rotated; context home trusts"),
            "{}",
            ended.stderr
        );
        assert_ne!(Cluster::ca(&world), before);
        let again = world.run(&["cluster", "info"]);
        assert_eq!((again.status, &*again.stderr), (0, ""), "told once");
    }

    #[test]
    fn a_rotation_says_what_it_waits_for_and_who_is_away() {
        let rotation = v1::Rotation { number: 2, began_at: 1_700_000_000, ..Default::default() };
        let read = v1::GetRotationResponse {
            rotation: Some(rotation),
            step: Step::Restarts.into(),
            waits_for: vec!["polis-a".to_owned()],
            away: vec!["polis-b".to_owned()],
            ca_certificate: b"ca".to_vec(),
            waits_for_update: false,
            missed: Vec::new(),
        };
        let named =
            v1::NodeInfo { id: "polis-a".to_owned(), name: "one".to_owned(), ..Default::default() };
        let named = [named];
        let view = View::of(&read, &named);
        assert!(view.ended.is_none());
        assert_eq!(view.waits(), "waiting for another start of etcd on one (polis-a)");
        let text = format!("{:?}", view.document().unwrap());
        assert!(text.contains("polis-b: they learn of it") && text.contains("number 2"), "{text}");
        // While a voter may be back soon, no other one starts again.
        let away =
            v1::get_rotation_response::Missed { node_id: "polis-b".to_owned(), silent_ms: 130_000 };
        let held = v1::GetRotationResponse { missed: vec![away], ..read.clone() };
        let held = View::of(&held, &named);
        let expected = "waiting, five minutes at most, for polis-b, away for 2 min 10 s, before \
                        etcd starts again on one (polis-a)";
        assert_eq!(held.waits(), expected);
        let json = serde_json::to_value(&held).unwrap();
        assert_eq!(json["missed"][0]["heartbeat_age_ms"], 130_000);
        let ended = v1::Rotation { ended_at: 1_700_000_100, ..read.rotation.unwrap() };
        let over = v1::GetRotationResponse {
            rotation: Some(ended),
            step: 0,
            waits_for: Vec::new(),
            ..read
        };
        let text = format!("{:?}", View::of(&over, &[]).document().unwrap());
        assert!(text.contains("ended on 2023-11-14"), "{text}");
    }
}
