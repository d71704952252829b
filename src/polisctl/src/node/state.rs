//! `polisctl node status` and `polisctl node services`: the state that a node reports.
//!
//! Both query the node instead of the leader, so they work without a leader and for a node
//! that the cluster cannot reach.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde::Serialize;

use super::At;
use crate::error::Error;
use crate::output::{Document, fields, or_dash};
use crate::session::{PATIENCE, Session, refused};
use crate::table::table;
use crate::text::word;
use crate::watch::Watch;
use crate::{Global, units};
use polis_wire::rpc::client::Channel;

/// The node to query.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    pub(super) watch: Watch,
}

impl Arguments {
    /// The session of all answers: the passphrase of the key is asked for once.
    pub(super) fn session(&self, global: &Global) -> Result<Session, Error> {
        let mut session = Session::prepare(global, PATIENCE)?;
        if self.watch.is_on() {
            session.go_on();
        }
        Ok(session)
    }

    /// Dialled again for each answer of a watch: a reboot ends the connection.
    pub(super) async fn dial(
        &self,
        session: &Session,
    ) -> Result<NodeManagementClient<Channel>, Error> {
        let target = session.target(Some(&self.node), self.at.at.as_ref()).await?;
        Ok(NodeManagementClient::new(session.node(&target).await?))
    }
}

/// The state of a node, as programs read it.
#[derive(Debug, Serialize)]
struct Status {
    id: String,
    cluster_state: String,
    ready: bool,
    uptime_seconds: f64,
    address: String,
    version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    slot: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    trial: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    other_system: String,
    image: String,
    boot_id: String,
    storage: String,
    key_keeper: String,
    /// Whether its next start opens the disk whatever the firmware measures.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    firmware_update_announced: bool,
    /// `null`: it does not run a curator.
    curator_port: Option<u32>,
    /// The part of it that waits, and for what.
    #[serde(skip_serializing_if = "String::is_empty")]
    waits_for: String,
    /// The state of its parts of Kubernetes, and of its drain.
    #[serde(skip_serializing_if = "Option::is_none")]
    kubernetes: Option<String>,
}

/// Prints the state of a node.
pub(super) async fn status(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let session = arguments.session(global)?;
    let read = async || {
        let mut client = Box::pin(arguments.dial(&session)).await?;
        let answer = client.get_status(v1::GetStatusRequest {});
        let answer = session.within("read the state of the node", answer).await?;
        Status::of(answer.into_inner()).document()
    };
    arguments.watch.run(global, read).await
}

impl Status {
    fn of(answer: v1::GetStatusResponse) -> Self {
        let status = answer.status.unwrap_or_default();
        Self {
            id: answer.node_id,
            cluster_state: answer.cluster_state,
            ready: answer.ready,
            waits_for: answer.waits_for,
            uptime_seconds: answer.uptime_seconds,
            storage: word(status.storage_kind().as_str_name(), "STORAGE_KIND_"),
            key_keeper: word(status.key_keeper().as_str_name(), "KEY_KEEPER_"),
            firmware_update_announced: status.firmware_update_announced,
            kubernetes: super::view::kubernetes(&status.workload, &status.drain),
            curator_port: (status.curator_port != 0).then_some(status.curator_port),
            address: status.external_address,
            version: status.version,
            slot: status.slot,
            trial: status.trial,
            other_system: status.other_system,
            image: status.image,
            boot_id: status.boot_id,
        }
    }

    fn document(&self) -> Result<Document, Error> {
        let up = Duration::try_from_secs_f64(self.uptime_seconds).unwrap_or_default();
        let curator = self.curator_port.map(|port| format!("on port {port}"));
        let mut lines = vec![
            ("node", or_dash(&self.id)),
            ("cluster", self.cluster_state.clone()),
            ("ready", if self.ready { "yes" } else { "no" }.to_owned()),
            ("up for", units::span(up)),
            ("address", or_dash(&self.address)),
            ("version", super::view::version(&self.version, &self.slot, self.trial)),
            ("image", or_dash(&self.image)),
            ("boot", or_dash(&self.boot_id)),
            ("storage", self.storage.clone()),
            ("disk key in", self.key_keeper.clone()),
            ("curator", or_dash(&curator.unwrap_or_default())),
        ];
        if !self.waits_for.is_empty() {
            lines.insert(3, ("waits", self.waits_for.clone()));
        }
        lines.extend(super::view::firmware(self.firmware_update_announced));
        lines.extend(self.kubernetes.clone().map(|state| ("Kubernetes", state)));
        lines.extend(super::view::other(&self.other_system));
        Document::new(self, fields(&lines))
    }
}

/// A service, as programs read it.
#[derive(Debug, Serialize)]
struct Service {
    name: String,
    state: String,
    restarts: u32,
    cause: String,
    since_uptime_seconds: f64,
}

/// Prints the services of a node.
pub(super) async fn services(arguments: &Arguments, global: &Global) -> Result<(), Error> {
    let session = arguments.session(global)?;
    let read = async || {
        let mut client = Box::pin(arguments.dial(&session)).await?;
        let answer = client.services(v1::ServicesRequest {});
        let answer = session.within("list the services", answer).await?;
        tree(answer.into_inner().services)
    };
    arguments.watch.run(global, read).await
}

/// The state and the services of a node, in this order.
pub(crate) async fn documents(
    client: &mut NodeManagementClient<Channel>,
) -> Result<[Document; 2], Error> {
    let status = client.get_status(v1::GetStatusRequest {}).await;
    let status = status.map_err(|status| refused("read the state of the node", &status))?;
    let services = client.services(v1::ServicesRequest {}).await;
    let services = services.map_err(|status| refused("list the services", &status))?;
    Ok([Status::of(status.into_inner()).document()?, tree(services.into_inner().services)?])
}

fn tree(services: Vec<v1::services_response::Service>) -> Result<Document, Error> {
    let view = |service: v1::services_response::Service| Service {
        name: service.name,
        state: service.state,
        restarts: service.restarts,
        cause: service.cause,
        since_uptime_seconds: service.since_uptime_seconds,
    };
    let services: Vec<_> = services.into_iter().map(view).collect();
    let row = |service: &Service| {
        vec![
            service.name.clone(),
            service.state.clone(),
            service.restarts.to_string(),
            format!("{:.3} s", service.since_uptime_seconds),
            or_dash(&service.cause),
        ]
    };
    let rows: Vec<_> = services.iter().map(row).collect();
    Document::new(&services, table(&["SERVICE", "STATE", "RESTARTS", "SINCE BOOT", "CAUSE"], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Format;

    #[test]
    fn a_node_says_how_it_is() {
        let answer = v1::GetStatusResponse {
            node_id: "polis-01".to_owned(),
            status: Some(v1::NodeStatus {
                external_address: "192.0.2.1".to_owned(),
                version: "0.1.0".to_owned(),
                storage_kind: v1::StorageKind::Encrypted.into(),
                key_keeper: v1::KeyKeeper::None.into(),
                curator_port: 7835,
                ..Default::default()
            }),
            cluster_state: "home".to_owned(),
            ready: true,
            uptime_seconds: 75.25,
            etcd: None,
            ..Default::default()
        };
        let document = Status::of(answer).document().unwrap();
        insta::assert_snapshot!(document.render(Format::Table).unwrap(), @r"
        node         polis-01
        cluster      home
        ready        yes
        up for       1 min 15 s
        address      192.0.2.1
        version      0.1.0
        image        -
        boot         -
        storage      encrypted
        disk key in  none
        curator      on port 7835
        ");
        let updated = v1::NodeStatus {
            version: "0.2.0".to_owned(),
            slot: "B".to_owned(),
            trial: true,
            other_system: "0.1.0 in slot A, good".to_owned(),
            ..Default::default()
        };
        let answer = v1::GetStatusResponse { status: Some(updated), ..Default::default() };
        let text = Status::of(answer).document().unwrap().render(Format::Table).unwrap();
        assert!(text.contains("version       0.2.0 in slot B, on trial\n"), "{text}");
        assert!(text.ends_with("other system  0.1.0 in slot A, good\n"), "{text}");
        let announced = v1::NodeStatus { firmware_update_announced: true, ..Default::default() };
        let answer = v1::GetStatusResponse { status: Some(announced), ..Default::default() };
        let text = Status::of(answer).document().unwrap().render(Format::Table).unwrap();
        assert!(text.contains("firmware     update announced: the next start"), "{text}");
        let drained = v1::NodeStatus {
            workload: "ready".to_owned(),
            drain: "draining".to_owned(),
            ..Default::default()
        };
        let answer = v1::GetStatusResponse { status: Some(drained), ..Default::default() };
        let text = Status::of(answer).document().unwrap().render(Format::Table).unwrap();
        assert!(text.ends_with("Kubernetes   ready; draining\n"), "{text}");
        let waits_for = "consensus waits for a disk that is fast enough".to_owned();
        let waiting = v1::GetStatusResponse { waits_for, ..Default::default() };
        let waiting = Status::of(waiting);
        assert_eq!(waiting.curator_port, None, "not running");
        let text = waiting.document().unwrap().render(Format::Table).unwrap();
        assert!(text.contains("waits        consensus waits for a disk"), "{text}");
    }

    #[test]
    fn services_are_listed_with_what_ended_them() {
        let service =
            |name: &str, state: &str, restarts, cause: &str| v1::services_response::Service {
                name: name.to_owned(),
                state: state.to_owned(),
                restarts,
                cause: cause.to_owned(),
                since_uptime_seconds: 1.5,
            };
        let document = tree(vec![
            service("root", "healthy", 0, ""),
            service("root.network", "dead", 3, "no lease\n\u{1b}[2J"),
        ]);
        insta::assert_snapshot!(document.unwrap().render(Format::Table).unwrap(), @r"
        SERVICE       STATE    RESTARTS  SINCE BOOT  CAUSE
        root          healthy  0         1.500 s     -
        root.network  dead     3         1.500 s     no lease ?[2J
        ");
    }
}
