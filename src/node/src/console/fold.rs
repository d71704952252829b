//! The fold of event values into the snapshot that the console shows.
//!
//! The console folds when a value has changed, and lets `age` add the time that has
//! passed since; all terminals, and consoles elsewhere, draw the one snapshot.
//!
//! Invariants:
//! - Pure: time comes in as a value, and every age comes out computed. The code that
//!   draws has no clock.
//! - An unknown value is empty, and not zero: a page shows that it waits for it.
//!
//! What this module does not do: read anything of the machine (`load`, `watched`), or
//! decide how something looks (`polis_tui`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_tui::snapshot::{
    Address, Authority, Bucket, Certificate, Change, Cluster, Crl, Etcd, Header, Interface, Logs,
    Member, MemberStatus, Network, Nodes, Pki, Service, ServiceState, Snapshot, Snapshots, Stage,
    StageState, Taken, Warning,
};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::ClusterNodes;
use super::fingerprint_words::FingerprintWords;
use super::watched::Values;
use super::workloads;
use crate::shipping;
use polis_base::hex;
use polis_base::stage::{self, Stages};
use polis_control::{cluster, consensus};
use polis_machine::parameters::Cidr;
use polis_machine::time::State as ClockState;
use polis_machine::{mirror, network, storage, volumes};
use polis_proto::v1::NetworkState;
use polis_runtime::supervisor::{self, Tree};
use polis_wire::identity::Fingerprint;
use polis_wire::pki::{AuthorityView, CertificateView, Overview, Renewal};
use polis_workload as workload;
use polis_workload::drain::State;

/// The only kind of wall clock shown: machines of one cluster stand anywhere.
pub(super) const CLOCK: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day] [hour]:[minute]:[second] UTC");
pub(super) const DAY: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");

const INSECURE: &str = "The data partition is not encrypted: a person who has the disk can read \
                        it.";
const SHARE_ON_DISK: &str =
    "A person who takes the disk can read it: a share of its key is stored on it.";
const SHARE_ON_DISK_HELP: &str =
    "use a TPM; or an owner: polisctl cluster configure --cold-start attended";
const RECOVERY_KEY: &str = "The recovery key of this machine's disk is stored only in the \
                            cluster. An owner saves it:";

const LEAVING_HELP: &str = "a machine that was asked to end goes off within a minute, and at once \
                            if it is asked again";

const UNOWNED: &str =
    "This cluster has no owner yet. The holder of its owner's key takes ownership:";

/// The authority that people compare with their own eyes.
const CLUSTER_CA: &str = "cluster CA";

const SECONDS_A_DAY: i64 = 86_400;

/// The snapshot of the console at `uptime`, when the wall clock reads `now`.
pub(super) fn fold(
    values: &Values,
    logs: &Arc<Logs>,
    uptime: Duration,
    now: SystemTime,
) -> Snapshot {
    Snapshot {
        header: header(values, uptime, now),
        ready: ready(values),
        previous_failure: values.environment.previous_guru.clone(),
        warnings: warnings(values),
        stages: stages(&values.stages, uptime),
        network: network(values, uptime),
        nodes: nodes(&values.cluster_nodes, uptime),
        etcd: etcd(values, now),
        pki: pki(&values.pki, &values.words, now),
        services: services(&values.services, uptime),
        workloads: workloads::workloads(values, uptime, now),
        metrics: values.load.as_ref().map(|load| load.metrics.clone()),
        logs: Arc::clone(logs),
    }
}

/// When the node was ready, in time since the kernel started.
pub(super) fn ready(values: &Values) -> Option<Duration> {
    let roles = values.stages.get(&stage::Stage::Roles);
    roles.filter(|entry| entry.state == stage::State::Done).map(|entry| entry.changed)
}

fn header(values: &Values, uptime: Duration, now: SystemTime) -> Header {
    Header {
        node: values.cluster.node.map(|id| id.to_string()),
        words: values.cluster.fingerprint.and_then(|own| values.words.get(&own).cloned()),
        version: values.environment.version.clone(),
        slot: values.environment.slot.clone(),
        cluster: match values.cluster.state {
            cluster::State::Unknown => Cluster::Unknown,
            cluster::State::Foreign => Cluster::Foreign,
            cluster::State::Trusted => Cluster::Trusted,
            cluster::State::Home => Cluster::Home,
            cluster::State::Disowning => Cluster::Disowning,
            cluster::State::Split => Cluster::Split,
        },
        address: values.network.primary.map(|address| address.to_string()),
        uptime,
        clock: printed(now, CLOCK),
        clock_unset: match values.time.state {
            ClockState::Unset | ClockState::Floor => true,
            ClockState::Cluster | ClockState::Synced | ClockState::Lost => false,
        },
    }
}

pub(super) fn printed(time: SystemTime, format: &[BorrowedFormatItem<'_>]) -> String {
    // Fails only for years that no clock of a machine can hold.
    OffsetDateTime::from(time).format(format).unwrap_or_default()
}

fn warnings(values: &Values) -> Vec<Warning> {
    let plain = |text: &str| Warning { text: text.to_owned(), help: None };
    let unowned = unowned(values);
    let mut warnings: Vec<_> = unowned.iter().cloned().collect();
    warnings.extend(values.health.warnings().iter().map(|text| plain(text)));
    warnings.extend(mirror::warnings(&values.mirror).iter().map(|text| plain(text)));
    warnings.extend(volumes::warnings(&values.volumes).iter().map(|text| plain(text)));
    let ready = values.storage.ready();
    if ready.is_some_and(|ready| ready.kind == storage::Kind::Insecure) {
        warnings.push(plain(INSECURE));
    }
    if let Some(keys) = &values.cluster.keys {
        if keys.keeper == Some(cluster::Keeper::Disk) {
            warnings.push(Warning {
                text: SHARE_ON_DISK.to_owned(),
                help: Some(SHARE_ON_DISK_HELP.to_owned()),
            });
        }
        // Only an owner can read it.
        if keys.recovery_key_unsaved && unowned.is_none() {
            let node = values.cluster.node.map(|id| id.to_string()).unwrap_or_default();
            warnings.push(Warning {
                text: RECOVERY_KEY.to_owned(),
                help: Some(format!("polisctl node recovery-key {node}")),
            });
        }
    }
    warnings.extend(values.workload.unfit.as_deref().map(plain));
    warnings.extend(drain(&values.workload));
    let reported = values.known.as_ref().and_then(|known| known.warning.clone());
    warnings.extend(reported.as_deref().map(plain));
    warnings
}

/// A drain, which also comes before an end that somebody at the machine asked for.
fn drain(workload: &workload::Status) -> Option<Warning> {
    let waits = match workload.drain_cause.as_str() {
        "" => String::new(),
        cause => format!(", and it waits for {cause}"),
    };
    (workload.drain == State::Draining).then(|| Warning {
        text: format!("Pods leave this node{waits}."),
        help: Some(LEAVING_HELP.to_owned()),
    })
}

/// The first step of an operator with a new cluster, which cannot be operated before it.
fn unowned(values: &Values) -> Option<Warning> {
    let person = |it: &CertificateView| it.renewal == Renewal::WhenUsed;
    let is_cluster = |it: &&AuthorityView| authority_name(&it.namespace, &it.name) == CLUSTER_CA;
    let ca = values.pki.authorities.iter().find(is_cluster)?;
    if values.pki.certificates.iter().any(person) || ready(values).is_none() {
        return None;
    }
    let at = values.network.primary.map_or("HOST".to_owned(), |address| address.to_string());
    let words = values.words.get(&fingerprint(ca)).map_or("WORDS", String::as_str);
    Some(Warning {
        text: UNOWNED.to_owned(),
        help: Some(format!(
            "polisctl --endpoint {at} cluster take-ownership --fingerprint {words}"
        )),
    })
}

fn stages(stages: &Stages, uptime: Duration) -> Vec<Stage> {
    let shown = |stage: stage::Stage| {
        let Some(entry) = stages.get(&stage) else {
            return Stage {
                name: stage.name().to_owned(),
                state: StageState::Pending,
                started: Duration::ZERO,
                elapsed: Duration::ZERO,
            };
        };
        let (state, end) = match &entry.state {
            stage::State::Started => (StageState::Started, uptime),
            stage::State::Waiting(what) => {
                let since = uptime.saturating_sub(entry.changed);
                (StageState::Waiting { what: what.clone(), since }, uptime)
            }
            stage::State::Done => (StageState::Done, entry.changed),
            stage::State::Failed => (StageState::Failed, entry.changed),
        };
        Stage {
            name: stage.name().to_owned(),
            state,
            started: entry.started,
            elapsed: end.saturating_sub(entry.started),
        }
    };
    stage::Stage::ALL.map(shown).into()
}

fn network(values: &Values, uptime: Duration) -> Network {
    let status = &values.network;
    let shown = |address: &IpAddr| address.to_string();
    Network {
        interfaces: status.interfaces.iter().map(|it| interface(it, values, uptime)).collect(),
        gateway: status.gateway.as_ref().map(shown),
        nameservers: status.nameservers.iter().map(shown).collect(),
        time_servers: status.ntp_servers.clone(),
        waiting: status.waiting.clone(),
        faults: status.faults.clone(),
        change: Change {
            state: match status.change.state {
                NetworkState::Unspecified => String::new(),
                _ => status.change.word().to_owned(),
            },
            cause: status.change.cause.clone(),
        },
    }
}

fn interface(interface: &network::Interface, values: &Values, uptime: Duration) -> Interface {
    let traffic = values.load.as_ref().and_then(|load| load.interfaces.get(&interface.name));
    let traffic = traffic.cloned().unwrap_or_default();
    let address = |cidr: &Cidr| {
        let mut leased = [interface.leased, interface.leased_v6].into_iter().flatten();
        let leased = leased.find(|leased| leased.address == *cidr);
        Address {
            cidr: cidr.to_string(),
            source: interface.origin(cidr).to_owned(),
            primary: Some(cidr.address()) == values.network.primary,
            lease: leased.and_then(|it| it.ends).map(|ends| ends.saturating_sub(uptime)),
        }
    };
    Interface {
        name: interface.name.clone(),
        mac: interface.mac.to_string(),
        driver: interface.driver.clone(),
        carrier: interface.carrier,
        asking: interface.asking,
        addresses: interface.addresses.iter().map(address).collect(),
        received: traffic.received,
        sent: traffic.sent,
        kind: kind(&interface.kind, interface.carrier),
        bond: match &interface.kind {
            network::Kind::Card(Some(member)) => Some(member.bond.clone()),
            network::Kind::Card(None) | network::Kind::Bond(_) | network::Kind::Vlan { .. } => None,
        },
        mtu: interface.mtu,
        planned: interface.planned.as_ref().map(ToString::to_string),
        silent: match (&interface.kind, &interface.planned) {
            (network::Kind::Card(Some(_)), _) => true,
            (_, Some(planned)) => {
                !planned.dhcp && planned.addresses.is_empty() && !interface.asking
            }
            (_, None) => false,
        },
    }
}

/// The kind of a link; empty for a card that is in no bond.
fn kind(kind: &network::Kind, carrier: bool) -> String {
    match kind {
        network::Kind::Card(None) => String::new(),
        network::Kind::Card(Some(member)) => {
            let part = match (carrier, member.active) {
                (false, _) => "no carrier",
                (true, true) => "active",
                (true, false) => "waits",
            };
            format!("member of {}, {part}", member.bond)
        }
        network::Kind::Bond(Some(mode)) => format!("bond, {mode}"),
        network::Kind::Bond(None) => "bond".to_owned(),
        network::Kind::Vlan { on, id } => format!("VLAN {id} on {on}"),
    }
}

fn nodes(known: &ClusterNodes, uptime: Duration) -> Option<Nodes> {
    let passed = uptime.saturating_sub(known.at);
    let older = |age: Duration| age.saturating_add(passed);
    let mut nodes = known.nodes.clone()?;
    nodes.stale = nodes.stale.map(older);
    for node in &mut nodes.nodes {
        node.heartbeat = node.heartbeat.map(older);
    }
    Some(nodes)
}

fn etcd(values: &Values, now: SystemTime) -> Option<Etcd> {
    let Values { consensus: status, members: learned, past, .. } = values;
    let never_started = status.member.is_none() && status.standing == Default::default();
    if never_started && status.peer_url.is_empty() {
        return None;
    }
    let serves = status.clients.is_some();
    let members = status.members.iter().map(|member| {
        let own = Some(member.id) == status.member;
        let learned = learned.get(&member.id);
        let reported = learned.and_then(|learned| learned.reported.as_ref());
        Member {
            name: member.name.clone(),
            id: member.id.0,
            url: member.peer_url.clone(),
            standing: match member.learner {
                true => MemberStatus::Learner {
                    caught_up: learner(status, own).or(reported.map(|reported| reported.share)),
                },
                false => MemberStatus::Voter,
            },
            leader: Some(member.id) == status.leader,
            own,
            answers: match own {
                true => Some(serves),
                false => learned.and_then(|learned| learned.connected),
            },
            lag: match own {
                true => serves.then(|| status.index.saturating_sub(status.applied)),
                false => reported.map(|reported| reported.behind),
            },
            round_trip: reported
                .map(|reported| u64::try_from(reported.took.as_micros()).unwrap_or(u64::MAX)),
            db_size: match own {
                true => Some(status.db_size),
                false => reported.map(|reported| reported.db_size),
            },
            reaches: reported.and_then(|reported| reported.reaches.clone()),
        }
    });
    let mut members: Vec<_> = members.collect();
    let reached = reached(&members);
    for own in members.iter_mut().filter(|member| member.own) {
        own.reaches.clone_from(&reached);
    }
    Some(Etcd {
        state: status.standing.name().to_owned(),
        version: status.version.clone(),
        quorum: status.leader.is_some(),
        survives: status.leader.and_then(|_leader| survives(&members)),
        members,
        term: status.term,
        index: status.index,
        applied: status.applied,
        db_size: status.db_size,
        db_used: status.db_used,
        db_quota: status.db_quota,
        alarms: status.alarms.iter().map(ToString::to_string).collect(),
        past: past.clone(),
        snapshots: status.snapshots.as_ref().map(|local| Snapshots {
            kept: u64::try_from(local.kept).unwrap_or(u64::MAX),
            newest: local.newest.map(|newest| Taken {
                age: since(newest.at, now),
                bytes: newest.bytes,
                revision: newest.revision,
            }),
            problem: local.problem(),
        }),
        bucket: values.shipping.delivery.as_ref().map(|delivery| bucket(delivery, now)),
    })
}

/// The place outside of the cluster where snapshots go.
fn bucket(delivery: &shipping::Delivery, now: SystemTime) -> Bucket {
    let failure = delivery.failure.as_ref();
    Bucket {
        url: delivery.target.clone(),
        newest: delivery.newest.map(|newest| Taken {
            age: since(newest.at, now),
            bytes: newest.bytes,
            revision: newest.revision,
        }),
        waits_for: delivery.waits_for.clone(),
        problem: failure.map(|failure| match &failure.help {
            Some(help) => format!("{}; {help}", failure.cause),
            None => failure.cause.clone(),
        }),
        failing: failure.and_then(|failure| failing(failure, now)),
    }
}

/// For how long nothing could be sent; not known where the wall clock was set back since.
pub(super) fn failing(failure: &shipping::Failure, now: SystemTime) -> Option<Duration> {
    now.duration_since(failure.since).ok()
}

/// The age of what happened at a moment of the wall clock, which may have been set since.
pub(super) fn since(at: SystemTime, now: SystemTime) -> Duration {
    now.duration_since(at).unwrap_or_default()
}

/// The other members that this node's own reaches, once it is known of each.
fn reached(members: &[Member]) -> Option<Vec<u64>> {
    let others = members.iter().filter(|member| !member.own);
    let answers = others.map(|member| Some((member.id, member.answers?)));
    let answers = answers.collect::<Option<Vec<_>>>()?;
    Some(answers.into_iter().filter(|(_, answers)| *answers).map(|(id, _)| id).collect())
}

/// The number of answering voters that may fail before too few are left, once it is
/// known of each of them whether it answers.
fn survives(members: &[Member]) -> Option<u32> {
    let voters = members.iter().filter(|member| member.standing == MemberStatus::Voter);
    let answers: Vec<bool> = voters.map(|voter| voter.answers).collect::<Option<_>>()?;
    let answer = answers.iter().filter(|answers| **answers).count();
    let needed = answers.len() / 2 + 1;
    Some(u32::try_from(answer.saturating_sub(needed)).unwrap_or(u32::MAX))
}

/// How far this node's learner is, in percent.
fn learner(status: &consensus::Status, own: bool) -> Option<u8> {
    match status.standing {
        consensus::MemberStatus::Learner { behind } if own && status.index > 0 => {
            let has = status.index.saturating_sub(behind);
            u8::try_from(has.saturating_mul(100) / status.index).ok()
        }
        _ => None,
    }
}

fn pki(overview: &Overview, words: &FingerprintWords, now: SystemTime) -> Option<Pki> {
    if overview.authorities.is_empty() {
        return None;
    }
    Some(Pki {
        authorities: overview.authorities.iter().map(|view| authority(view, words, now)).collect(),
        certificates: overview.certificates.iter().map(|view| certificate(view, now)).collect(),
    })
}

fn authority(view: &AuthorityView, words: &FingerprintWords, now: SystemTime) -> Authority {
    let fingerprint = fingerprint(view);
    Authority {
        name: authority_name(&view.namespace, &view.name),
        words: words.get(&fingerprint).cloned(),
        fingerprint: bytes(&view.fingerprint),
        ends: printed(view.not_after, DAY),
        days_left: days(now, view.not_after),
        used: used(view.not_before, now, view.not_after),
        issued: view.issued as u64,
        crl: view.crl_issued.map(|issued| Crl {
            number: view.crl_number,
            entries: view.revoked.len() as u64,
            age: now.duration_since(issued).unwrap_or_default(),
        }),
    }
}

/// The common name of an authority.
fn authority_name(namespace: &str, name: &str) -> String {
    match (namespace, name) {
        ("polis:curator", "cluster") => CLUSTER_CA.to_owned(),
        ("polis:etcd-pki", "etcd-peers") => "etcd CA".to_owned(),
        _ => format!("{namespace} {name}"),
    }
}

/// The fingerprint of an authority's certificate.
pub(super) fn fingerprint(view: &AuthorityView) -> Fingerprint {
    Fingerprint::from_bytes(bytes(&view.fingerprint))
}

fn certificate(view: &CertificateView, now: SystemTime) -> Certificate {
    Certificate {
        name: view.name.clone(),
        issuer: authority_name(&view.namespace, &view.issuer),
        ends: printed(view.not_after, DAY),
        days_left: days(now, view.not_after),
        renews: Some(printed(view.renew_at, DAY)),
        when_used: view.renewal == Renewal::WhenUsed,
        renew_at: used(view.not_before, view.renew_at, view.not_after),
        used: used(view.not_before, now, view.not_after),
        revoked: view.revoked,
    }
}

/// The share of a life that is over at `time`, in percent.
pub(super) fn used(from: SystemTime, time: SystemTime, to: SystemTime) -> u8 {
    let share = span(from, time).saturating_mul(100) / span(from, to).max(1);
    u8::try_from(share.clamp(0, 100)).unwrap_or(100)
}

/// Full days from `from` to `to`; negative where that is past.
pub(super) fn days(from: SystemTime, to: SystemTime) -> i64 {
    span(from, to).div_euclid(SECONDS_A_DAY)
}

/// Seconds from `from` to `to`.
fn span(from: SystemTime, to: SystemTime) -> i64 {
    (OffsetDateTime::from(to) - OffsetDateTime::from(from)).whole_seconds()
}

/// The 32 bytes of a fingerprint; any other text shows as zeros.
fn bytes(digits: &str) -> [u8; 32] {
    hex::decode_name(digits).unwrap_or_default()
}

fn services(tree: &Tree, uptime: Duration) -> Vec<Service> {
    // By parts, so that a name that only begins like its neighbour's does not
    // come between the neighbour and its children.
    let by_parts: BTreeMap<Vec<&str>, &supervisor::Entry> =
        tree.iter().map(|(name, entry)| (parts(name), entry)).collect();
    by_parts
        .into_iter()
        .map(|(parts, entry)| Service {
            depth: u16::try_from(parts.len() - 1).unwrap_or(u16::MAX),
            name: parts.last().copied().unwrap_or_default().to_owned(),
            state: match entry.state {
                supervisor::State::Starting => ServiceState::Starting,
                supervisor::State::Healthy => ServiceState::Healthy,
                supervisor::State::Done | supervisor::State::Stopped => ServiceState::Done,
                supervisor::State::Dead => ServiceState::Restarting,
                supervisor::State::Failed => ServiceState::Dead,
            },
            restarts: u64::from(entry.restarts),
            cause: entry.cause.clone(),
            since: uptime.saturating_sub(entry.since),
        })
        .collect()
}

fn parts(name: &Arc<str>) -> Vec<&str> {
    name.split('.').collect()
}

#[cfg(test)]
#[path = "fold_tests.rs"]
mod tests;
