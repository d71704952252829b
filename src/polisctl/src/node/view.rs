//! The view of a node's record.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1;
use serde::Serialize;

use super::proof::Recorded;
use super::reports::{Delivery, Shipped, Volume};
use super::returning::{Returning, fingerprint};
use crate::output::{fields, or_dash};
use crate::table::{Table, table};
use crate::text::{clean, word};
use crate::{parameters, units};
use polis_wire::node_roles::Role;
use polis_wire::parameters::{taint_effect_name, taint_text};

/// The length of an ID in a command that has no room for all of it: `polis-` and eight
/// digits, which a command completes, or refuses if two nodes begin with them.
const SHORT: usize = 14;

/// A taint, as programs read it: with the names of Kubernetes.
#[derive(Debug, Serialize)]
struct Taint {
    key: String,
    value: String,
    effect: &'static str,
    /// `KEY[=VALUE]:EFFECT`.
    #[serde(skip)]
    text: String,
}

impl Taint {
    fn of(taint: &v1::NodeTaint) -> Self {
        Self {
            key: clean(&taint.key),
            value: clean(&taint.value),
            effect: taint_effect_name(taint.effect()),
            text: clean(&taint_text(taint)),
        }
    }
}

/// A node, as programs read it.
#[derive(Debug, Serialize)]
pub(crate) struct View {
    id: String,
    /// A person's name for it; `null`: none.
    name: Option<String>,
    state: String,
    health: String,
    roles: Vec<&'static str>,
    address: String,
    version: String,
    /// The system partition that it runs from.
    #[serde(skip_serializing_if = "String::is_empty")]
    slot: String,
    /// Whether its system was not ready yet since the update.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    trial: bool,
    /// The system in the other partition, and its standing.
    #[serde(skip_serializing_if = "String::is_empty")]
    other_system: String,
    image: String,
    boot_id: String,
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    taints: Vec<Taint>,
    /// `null`: no heartbeat yet.
    heartbeat_age_ms: Option<u64>,
    /// How its clock stands.
    #[serde(skip_serializing_if = "String::is_empty")]
    clock: String,
    /// Microseconds that it is ahead of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    clock_offset_us: Option<i64>,
    /// How far its log has reached each target.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logs: Vec<Delivery>,
    /// Which snapshot of etcd its target has, if the node sends them.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshots: Option<Shipped>,
    storage: String,
    /// The mirror of its disk.
    #[serde(skip_serializing_if = "String::is_empty")]
    mirror: String,
    /// Its further disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    volumes: Vec<Volume>,
    key_keeper: String,
    tpm: bool,
    /// What its TPM proved to the leader last.
    #[serde(skip_serializing_if = "Option::is_none")]
    attestation: Option<Recorded>,
    /// Why it does not fit the attestation policy of the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    attestation_fault: String,
    recovery_key_unsaved: bool,
    /// Whether its next start opens the disk whatever the firmware measures.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    firmware_update_announced: bool,
    /// Whether it voted in the former cluster, from whose snapshot this one was founded
    /// again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    former_voter: bool,
    /// Why it cannot carry a Kubernetes role that it has.
    #[serde(skip_serializing_if = "String::is_empty")]
    workload_fault: String,
    /// Why its firewall is not in force.
    #[serde(skip_serializing_if = "String::is_empty")]
    firewall_fault: String,
    /// How it stands with the network that was ordered for it, and why it gave that up.
    #[serde(skip_serializing_if = "String::is_empty")]
    ordered_network: String,
    /// Parts of its network without a link, and addresses that another machine has, too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    network_faults: Vec<String>,
    /// The state of its parts of Kubernetes, and the cause where they do not work.
    #[serde(skip_serializing_if = "String::is_empty")]
    workload: String,
    /// The state of its drain, while it is drained.
    #[serde(skip_serializing_if = "String::is_empty")]
    drain: String,
    /// The hardware of the machine; absent where it has not reported it.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_bytes: Option<u64>,
    /// The part of Kubernetes that ends again and again, with its last words.
    #[serde(skip_serializing_if = "String::is_empty")]
    workload_crash_loop: String,
    registered_at: Option<units::Time>,
    /// Its request for a new certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    returning: Option<Returning>,
    fingerprint: String,
    /// Slow to compute: only where one node is described.
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<String>,
}

impl View {
    pub(crate) fn of(node: &v1::NodeInfo) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let registered = units::since_1970(node.registered_at);
        Self {
            id: node.id.clone(),
            name: Some(node.name.clone()).filter(|name| !name.is_empty()),
            state: word(node.state().as_str_name(), "NODE_STATE_"),
            health: word(node.health().as_str_name(), "NODE_HEALTH_"),
            roles: roles(node.roles.as_ref()),
            storage: word(status.storage_kind().as_str_name(), "STORAGE_KIND_"),
            key_keeper: word(status.key_keeper().as_str_name(), "KEY_KEEPER_"),
            address: status.external_address,
            version: status.version,
            slot: status.slot,
            trial: status.trial,
            firmware_update_announced: status.firmware_update_announced,
            other_system: status.other_system,
            mirror: clean(&status.mirror),
            volumes: status.volumes.iter().map(Volume::of).collect(),
            image: status.image,
            workload_fault: status.workload_fault,
            firewall_fault: status.firewall_fault,
            ordered_network: ordered(status.network.as_ref()),
            network_faults: network_faults(status.network.as_ref()),
            workload: status.workload,
            drain: status.drain,
            memory_bytes: Some(status.memory_bytes).filter(|bytes| *bytes > 0),
            data_bytes: Some(status.data_bytes).filter(|bytes| *bytes > 0),
            workload_crash_loop: status.workload_crash_loop,
            boot_id: status.boot_id,
            labels: node.labels.clone(),
            taints: node.taints.iter().map(Taint::of).collect(),
            heartbeat_age_ms: u64::try_from(node.heartbeat_age_ms).ok(),
            clock: node.clock.map(clock).unwrap_or_default(),
            clock_offset_us: node.clock.and_then(|clock| clock.offset_us),
            logs: node.log_deliveries.iter().map(Delivery::of).collect(),
            snapshots: node.snapshot_delivery.as_ref().map(Shipped::of),
            tpm: node.tpm,
            attestation: Recorded::of(node),
            attestation_fault: clean(&node.attestation_fault),
            recovery_key_unsaved: node.recovery_key_unsaved,
            former_voter: node.former_voter,
            registered_at: registered.map(units::Time),
            returning: node.returning.as_ref().map(Returning::of),
            fingerprint: fingerprint(node).map(|f| f.to_string()).unwrap_or_default(),
            words: None,
        }
    }

    /// The same with the words of its fingerprint.
    pub(super) fn with_words(node: &v1::NodeInfo) -> Self {
        Self { words: fingerprint(node).map(|f| f.words()), ..Self::of(node) }
    }

    /// State and health, in words.
    pub(crate) fn standing(&self) -> String {
        match (&*self.state, &*self.health) {
            ("up", health) => format!("up, {}", health.replace('_', " ")),
            (state, _) => state.to_owned(),
        }
    }

    /// How a sentence calls it: by its name, where it has one, and its ID.
    pub(crate) fn called(&self) -> String {
        match &self.name {
            None => self.id.clone(),
            Some(name) => format!("{name} ({})", self.id),
        }
    }

    /// Its roles, in words.
    pub(crate) fn roles_text(&self) -> String {
        or_dash(&self.roles.join(", "))
    }

    /// How it comes back, if it voted in the former cluster, whose snapshot was restored.
    pub(crate) fn return_of_former_voter(&self) -> Option<String> {
        let Self { id, .. } = self;
        // With all of the ID, the command would be wider than a terminal.
        let short: String = id.chars().take(SHORT).collect();
        // A controller needs the role of a member.
        let controls = self.roles.contains(&Role::KubernetesController.slug());
        let more = if controls { " (with `--remove kubernetes-controller`)" } else { "" };
        self.former_voter.then(|| {
            format!(
                "disk lost: `polisctl node delete {id} --force`; disk whole: boot it with parameters \
                 of `polisctl parameters register`, then `polisctl node roles {short} --remove \
                 consensus-member`{more} gives up its etcd data, which may be newer than the \
                 snapshot, and lets it in"
            )
        })
    }

    /// Whether its heartbeat is overdue.
    pub(crate) fn is_late(&self) -> bool {
        self.is_up() && self.health == "late"
    }

    /// Whether it waits for approval, to enter or to come back.
    pub(crate) fn waits_for_approval(&self) -> bool {
        self.state == "new" || self.asks_to_return()
    }

    /// Whether it asks for a new certificate, and no operator has approved it.
    pub(crate) fn asks_to_return(&self) -> bool {
        self.returning.as_ref().is_some_and(Returning::waits)
    }

    pub(crate) fn is_up(&self) -> bool {
        self.state == "up"
    }

    /// The time since the last heartbeat, as a cell of a table.
    fn heartbeat(&self) -> String {
        match self.heartbeat_age_ms {
            None => "no heartbeat yet".to_owned(),
            Some(age) => format!("{} ago", units::span(Duration::from_millis(age))),
        }
    }

    /// The same as a sentence.
    fn last_heartbeat(&self) -> String {
        match self.heartbeat_age_ms {
            None => self.heartbeat(),
            Some(_age) => format!("last heartbeat {}", self.heartbeat()),
        }
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.id.clone(),
            self.state.clone(),
            self.health.clone(),
            or_dash(&self.roles.join(",")),
            or_dash(&self.address),
            or_dash(&self.version),
            self.heartbeat(),
        ]
    }

    /// The name in a cell of its own, behind the ID.
    fn named_row(&self) -> Vec<String> {
        let mut row = self.row();
        row.insert(1, or_dash(self.name.as_deref().unwrap_or_default()));
        row
    }

    /// The reason why it cannot serve its roles, or does not, with the remedy or the last words
    /// of a part; `None` without one.
    fn fault(&self) -> Option<&str> {
        let faults = [&self.firewall_fault, &self.workload_fault, &self.workload_crash_loop];
        faults.map(String::as_str).into_iter().find(|fault| !fault.is_empty())
    }

    /// The state of its parts of Kubernetes; `None` without any.
    pub(crate) fn kubernetes(&self) -> Option<String> {
        kubernetes(&self.workload, &self.drain)
    }

    /// How its clock stands, with its offset; `None` where it has not reported it.
    fn clock_text(&self) -> Option<String> {
        let state = Some(self.clock.as_str()).filter(|state| !state.is_empty())?;
        let Some(offset) = self.clock_offset_us else { return Some(state.to_owned()) };
        let side = if offset < 0 { "behind" } else { "ahead" };
        let (seconds, micros) =
            (offset.unsigned_abs() / 1_000_000, offset.unsigned_abs() % 1_000_000);
        Some(format!("{state}, {seconds}.{micros:06} s {side}"))
    }

    /// The targets that its log does not reach, each with the cause.
    pub(crate) fn undelivered(&self) -> impl Iterator<Item = String> {
        let failing = self.logs.iter().filter(|delivery| delivery.fails());
        failing.map(|it| format!("{}: {}", self.called(), it.text()))
    }

    /// The faults of its mirror and its further disks.
    pub(crate) fn disk_faults(&self) -> impl Iterator<Item = String> {
        // A mirror that is whole and says more has a fault, too.
        let is_whole = self.mirror.starts_with("whole on ") && !self.mirror.contains("; ");
        let mirror = (!self.mirror.is_empty() && !is_whole).then_some(&self.mirror);
        let mirror = mirror.map(|text| format!("{}: mirror {text}", self.called()));
        let volumes = self.volumes.iter().filter(|volume| volume.has_failed());
        mirror
            .into_iter()
            .chain(volumes.map(|it| format!("{}: volume {}", self.called(), it.text())))
    }

    /// Which snapshot of etcd its target has, if it sends them.
    pub(crate) fn shipped(&self) -> Option<String> {
        self.snapshots.as_ref().map(Shipped::text)
    }

    /// Its ID.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Whether only the cluster has its recovery key.
    pub(crate) fn is_recovery_key_unsaved(&self) -> bool {
        self.recovery_key_unsaved
    }

    fn storage_text(&self) -> String {
        match self.data_bytes {
            Some(size) => format!("{}, {}", self.storage, polis_tui::bytes(size)),
            None => self.storage.clone(),
        }
    }

    /// A line for each field.
    pub(crate) fn fields(&self) -> String {
        let recovery = if self.recovery_key_unsaved {
            format!("unsaved: `polisctl node recovery-key show {}`", self.id)
        } else {
            "-".to_owned()
        };
        let words = self.words.as_deref().unwrap_or_default();
        let roles = match self.fault() {
            Some(fault) => format!("{}\n{fault}", self.roles.join(", ")),
            None => or_dash(&self.roles.join(", ")),
        };
        let mut lines = vec![
            ("node", self.id.clone()),
            ("name", or_dash(self.name.as_deref().unwrap_or_default())),
            ("state", self.state.clone()),
            ("health", format!("{}; {}", self.health, self.last_heartbeat())),
            ("roles", roles),
        ];
        lines.extend(self.return_of_former_voter().map(|advice| ("former voter", advice)));
        lines.extend(self.kubernetes().map(|state| ("Kubernetes", state)));
        lines.extend([
            ("address", or_dash(&self.address)),
            ("version", version(&self.version, &self.slot, self.trial)),
        ]);
        let order = Some(&self.ordered_network).filter(|order| !order.is_empty());
        let network: Vec<_> = order.into_iter().chain(&self.network_faults).cloned().collect();
        lines.extend((!network.is_empty()).then(|| ("network", network.join("\n"))));
        lines.extend(other(&self.other_system));
        lines.extend(self.clock_text().map(|text| ("clock", text)));
        let logs: Vec<_> = self.logs.iter().map(Delivery::text).collect();
        lines.extend((!logs.is_empty()).then(|| ("logs", logs.join("\n"))));
        lines.extend(self.memory_bytes.map(|memory| ("memory", polis_tui::bytes(memory))));
        lines.extend(self.shipped().map(|text| ("snapshots", text)));
        lines.extend([
            ("image", or_dash(&self.image)),
            ("boot", or_dash(&self.boot_id)),
            ("storage", self.storage_text()),
        ]);
        let mirror = Some(self.mirror.clone()).filter(|mirror| !mirror.is_empty());
        lines.extend(mirror.map(|mirror| ("mirror", mirror)));
        let volumes: Vec<_> = self.volumes.iter().map(Volume::text).collect();
        lines.extend((!volumes.is_empty()).then(|| ("further disks", volumes.join("\n"))));
        lines.extend([
            ("disk key in", self.key_keeper.clone()),
            ("TPM", if self.tpm { "yes" } else { "no" }.to_owned()),
        ]);
        lines.extend(firmware(self.firmware_update_announced));
        lines.extend(self.attestation.as_ref().map(|proof| ("TPM proved", proof.text())));
        let misfit = Some(self.attestation_fault.clone()).filter(|fault| !fault.is_empty());
        lines.extend(misfit.map(|fault| ("attestation", fault)));
        lines.extend(self.returning.as_ref().map(|it| ("returns", it.text(&self.id))));
        lines.extend([("recovery key", recovery), ("labels", parameters::labels(&self.labels))]);
        let taints: Vec<_> = self.taints.iter().map(|taint| taint.text.as_str()).collect();
        lines.extend((!taints.is_empty()).then(|| ("taints", taints.join("\n"))));
        lines.extend([
            ("registered", or_dash(&units::text(self.registered_at))),
            ("fingerprint", format!("{words}\n{}", self.fingerprint).trim().to_owned()),
        ]);
        fields(&lines)
    }
}

/// The update of its firmware that a node expects, if one is announced.
pub(super) fn firmware(announced: bool) -> Option<(&'static str, String)> {
    let text = "update announced: the next start opens the disk whatever it measures";
    announced.then(|| ("firmware", text.to_owned()))
}

/// The state of the network that was ordered for a node; empty: no order.
fn ordered(report: Option<&v1::NetworkReport>) -> String {
    let Some(report) = report else { return String::new() };
    match (report.state(), clean(&report.cause)) {
        (v1::NetworkState::Unspecified, _) => String::new(),
        (state, cause) => {
            let state = word(state.as_str_name(), "NETWORK_STATE_");
            if cause.is_empty() { state } else { format!("{state}: {cause}") }
        }
    }
}

/// The faults that a node reports of its network, a sentence for each.
pub(super) fn network_faults(report: Option<&v1::NetworkReport>) -> Vec<String> {
    let faults = report.into_iter().flat_map(|report| &report.faults);
    faults.map(|fault| clean(fault)).collect()
}

/// The word for how a clock stands; empty where that is unspecified.
fn clock(figures: v1::ClockFigures) -> String {
    match figures.state() {
        v1::ClockState::Unspecified => String::new(),
        state => word(state.as_str_name(), "CLOCK_STATE_"),
    }
}

/// The system that runs: its version, where it is, and whether it is on trial.
pub(super) fn version(version: &str, slot: &str, trial: bool) -> String {
    let place = if slot.is_empty() { String::new() } else { format!(" in slot {slot}") };
    let trial = if trial { ", on trial" } else { "" };
    format!("{}{place}{trial}", or_dash(version))
}

/// The line of the system in the other slot; `None` without one.
pub(super) fn other(system: &str) -> Option<(&'static str, String)> {
    (!system.is_empty()).then(|| ("other system", system.to_owned()))
}

/// The state of the parts of Kubernetes on a node, and that of its drain; `None` without
/// such parts.
pub(super) fn kubernetes(workload: &str, drain: &str) -> Option<String> {
    match (workload, drain) {
        ("", _) => None,
        (workload, "") => Some(workload.to_owned()),
        (workload, drain) => Some(format!("{workload}; {drain}")),
    }
}

/// How a sentence calls a node: by its name, where it has one, and its ID.
pub(crate) fn called(node: &v1::NodeInfo) -> String {
    match node.name.as_str() {
        "" => node.id.clone(),
        name => format!("{name} ({})", node.id),
    }
}

/// Nodes under headings, with a column for names where a node has one.
pub(crate) fn nodes_table(nodes: &[View]) -> Table {
    let mut heads =
        vec!["NODE", "STATE", "HEALTH", "ROLES", "ADDRESS", "VERSION", "LAST HEARTBEAT"];
    if nodes.iter().all(|node| node.name.is_none()) {
        let rows = nodes.iter().map(View::row).collect::<Vec<_>>();
        return table(&heads, &rows).sparing("VERSION");
    }
    heads.insert(1, "NAME");
    table(&heads, &nodes.iter().map(View::named_row).collect::<Vec<_>>()).sparing("VERSION")
}

/// A line for each node that cannot serve its roles.
pub(crate) fn faults(nodes: &[View]) -> String {
    let lines = |node: &View| {
        let misfit = Some(node.attestation_fault.as_str()).filter(|fault| !fault.is_empty());
        let faults = node.fault().into_iter().chain(misfit);
        let line = |fault| format!("{}: {}\n", clean(&node.called()), clean(fault));
        faults.map(line).collect::<String>()
    };
    nodes.iter().map(lines).collect()
}

fn roles(roles: Option<&v1::NodeRoles>) -> Vec<&'static str> {
    roles.into_iter().flat_map(Role::given).map(Role::slug).collect()
}
