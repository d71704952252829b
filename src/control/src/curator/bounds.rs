//! The bounds of what nodes report of themselves. A status beyond them is rejected: it is kept in
//! etcd, and an honest node keeps to them. A heartbeat is cut to them.
//!
//! Invariants:
//! - Every field of a report has a bound. The fields of a status are all named here, so that the
//!   compiler asks for the bound of a new one.
//! - A rejection names the field.
//! - A heartbeat takes no more memory than its fields need.

use polis_base::serial::is_control;
use polis_proto::v1;
use prost::Message as _;

use super::convert::{address, unicast};
use super::error::Error;

/// The longest version, image or boot ID.
const WORD_MAX: usize = 64;
/// Addresses of a node beside the one in its record.
const ADDRESSES_MAX: usize = 16;
/// Targets of logs that a node reports on: more than there are.
const LOG_TARGETS_MAX: usize = 8;
/// Links of a node that it reports, and bytes of a word about one.
const LINKS_MAX: usize = 64;
const LINK_WORD_MAX: usize = 256;
/// Faults of its network that a node reports; it leaves out those beyond.
const FAULTS_MAX: usize = 16;
/// Further disks that a node reports; it leaves out those beyond.
const VOLUMES_MAX: usize = 16;
/// Bytes of the longest text about workloads.
const TEXT_MAX: usize = 1024;
/// Bytes of a whole status: with all the links and addresses that a node reports it has some
/// 100 KB. The record of a node has little else that grows, so it stays far below the 1.5 MiB that
/// etcd takes in one request, also after a step that adds a few bytes.
const STATUS_MAX: usize = 128 << 10;
/// Bytes of a SHA-256.
const DIGEST: usize = 32;

/// The report of a node about itself.
pub(super) fn status(status: Option<v1::NodeStatus>) -> Result<v1::NodeStatus, Error> {
    let status = status.ok_or_else(|| Error::Field("status is missing".to_owned()))?;
    check_status(&status)?;
    let bytes = status.encoded_len();
    if bytes > STATUS_MAX {
        let allowed = format!("allowed are at most {STATUS_MAX} together");
        return Err(Error::Field(format!("status: it has {bytes} bytes; {allowed}")));
    }
    Ok(status)
}

/// Checks each field of a report.
fn check_status(status: &v1::NodeStatus) -> Result<(), Error> {
    let v1::NodeStatus {
        external_address,
        version,
        image,
        boot_id,
        storage_kind: _,
        key_keeper: _,
        curator_port,
        reported_at: _,
        workload_fault,
        workload,
        drain,
        workload_crash_loop,
        firewall_fault,
        firmware_update_announced: _,
        other_addresses,
        slot,
        trial: _,
        other_system,
        memory_bytes: _,
        data_bytes: _,
        network: links,
        mirror,
        volumes: disks,
    } = status;
    addresses(external_address, other_addresses)?;
    check_word(version, "status.version")?;
    check_word(image, "status.image")?;
    check_word(boot_id, "status.boot_id")?;
    check_word(slot, "status.slot")?;
    check_word(drain, "status.drain")?;
    check_text(workload_fault, "status.workload_fault")?;
    check_text(workload, "status.workload")?;
    check_text(workload_crash_loop, "status.workload_crash_loop")?;
    check_text(firewall_fault, "status.firewall_fault")?;
    check_text(other_system, "status.other_system")?;
    check_text(mirror, "status.mirror")?;
    if let Some(report) = links {
        network(report)?;
    }
    volumes(disks)?;
    if *curator_port > u32::from(u16::MAX) {
        return Err(Error::Field("status.curator_port: allowed are 0 to 65535".to_owned()));
    }
    Ok(())
}

/// The addresses of a node.
fn addresses(own: &str, others: &[String]) -> Result<(), Error> {
    address(own, "status.external_address")?;
    let field = "status.other_addresses";
    if others.len() > ADDRESSES_MAX {
        return Err(Error::Field(format!("{field}: allowed are at most {ADDRESSES_MAX}")));
    }
    for text in others {
        let other = text.parse().map_err(|_parse| {
            Error::Field(format!("{field} has {text:?}; allowed are IP addresses"))
        })?;
        unicast(other, field)?;
    }
    Ok(())
}

/// The links of a node, their faults, and how it stands with an order.
fn network(report: &v1::NetworkReport) -> Result<(), Error> {
    let field = |what: &str, allowed: String| {
        Err(Error::Field(format!("status.network.{what}: allowed are at most {allowed}")))
    };
    let v1::NetworkReport { number: _, state: _, cause, links, faults } = report;
    check_text(cause, "status.network.cause")?;
    if faults.len() > FAULTS_MAX {
        return field("faults", FAULTS_MAX.to_string());
    }
    for fault in faults {
        check_text(fault, "status.network.faults")?;
    }
    if links.len() > LINKS_MAX {
        return field("links", LINKS_MAX.to_string());
    }
    for link in links {
        let v1::NetworkLink {
            name,
            kind,
            mac,
            carrier: _,
            driver,
            path,
            mtu: _,
            addresses,
            on,
            vlan: _,
            origins,
        } = link;
        if addresses.len().max(origins.len()) > ADDRESSES_MAX {
            return field("links.addresses", ADDRESSES_MAX.to_string());
        }
        let words = [name, kind, mac, driver, path, on].into_iter();
        let mut words = words.chain(addresses).chain(origins);
        if words.any(|word| word.len() > LINK_WORD_MAX || word.contains(is_control)) {
            return field("links", format!("{LINK_WORD_MAX} printed characters for each text"));
        }
    }
    Ok(())
}

/// The further disks of a node.
fn volumes(reports: &[v1::VolumeReport]) -> Result<(), Error> {
    if reports.len() > VOLUMES_MAX {
        return Err(Error::Field(format!("status.volumes: allowed are at most {VOLUMES_MAX}")));
    }
    for v1::VolumeReport { name, state, cause } in reports {
        check_word(name, "status.volumes.name")?;
        check_word(state, "status.volumes.state")?;
        check_text(cause, "status.volumes.cause")?;
    }
    Ok(())
}

/// A heartbeat as the leader keeps it in memory: each field within bounds.
pub(super) fn heartbeat(heartbeat: v1::HeartbeatRequest) -> v1::HeartbeatRequest {
    let v1::HeartbeatRequest {
        consensus,
        clock,
        update,
        authorities,
        log_deliveries: logs,
        snapshot_delivery: snapshots,
    } = heartbeat;
    v1::HeartbeatRequest {
        consensus: consensus.map(figures),
        clock,
        update: update.map(update_report),
        authorities: digest(authorities),
        log_deliveries: log_deliveries(logs),
        snapshot_delivery: snapshots.map(snapshot_delivery),
    }
}

/// The figures of a member, within bounds; a longer text is cut off.
fn figures(figures: v1::ConsensusFigures) -> v1::ConsensusFigures {
    let v1::ConsensusFigures {
        leader,
        index,
        applied_index,
        db_bytes,
        db_used_bytes,
        authorities,
        authorities_at_start,
        mut snapshots,
    } = figures;
    if let Some(snapshots) = &mut snapshots {
        cut(&mut snapshots.problem, TEXT_MAX);
    }
    v1::ConsensusFigures {
        leader,
        index,
        applied_index,
        db_bytes,
        db_used_bytes,
        authorities: digest(authorities),
        authorities_at_start: digest(authorities_at_start),
        snapshots,
    }
}

/// A SHA-256; anything else says nothing, as an empty field does.
fn digest(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() != DIGEST {
        return Vec::new();
    }
    // A field that was sent twice may have had room for a longer value.
    bytes.shrink_to_fit();
    bytes
}

/// The report of a node on its systems, within bounds; a longer text is cut off.
pub(super) fn update_report(mut report: v1::UpdateReport) -> v1::UpdateReport {
    let v1::UpdateReport {
        boot_id,
        version,
        image,
        variant,
        release_key,
        keeps,
        kubernetes,
        cause,
        ..
    } = &mut report;
    for (text, max) in [boot_id, version, image, variant, release_key, keeps, kubernetes]
        .into_iter()
        .map(|word| (word, WORD_MAX))
        .chain([(cause, TEXT_MAX)])
    {
        cut(text, max);
    }
    report
}

/// The deliveries of a node's log by its own report, within bounds.
fn log_deliveries(mut all: Vec<v1::LogDelivery>) -> Vec<v1::LogDelivery> {
    all.truncate(LOG_TARGETS_MAX);
    all.shrink_to_fit();
    for delivery in &mut all {
        cut(&mut delivery.target, TEXT_MAX);
        cut(&mut delivery.failure, TEXT_MAX);
    }
    all
}

/// The snapshots that a node sends by its own report, within bounds.
fn snapshot_delivery(mut delivery: v1::SnapshotDelivery) -> v1::SnapshotDelivery {
    let v1::SnapshotDelivery { target, failure, help, waits_for, .. } = &mut delivery;
    for text in [target, failure, help, waits_for] {
        cut(text, TEXT_MAX);
    }
    delivery
}

/// Why the TPM of a node proves nothing, as the node says, within bounds.
pub(super) fn tpm_fault(mut fault: String) -> String {
    cut(&mut fault, TEXT_MAX);
    fault
}

/// The name of a boot, or nothing if the field is empty.
pub(super) fn boot_id(text: String, field: &str) -> Result<String, Error> {
    check_word(&text, field)?;
    Ok(text)
}

/// Checks a word that a node says of itself.
fn check_word(word: &str, field: &str) -> Result<(), Error> {
    if word.len() > WORD_MAX || !word.chars().all(|c| c.is_ascii_graphic()) {
        return Err(Error::Field(format!(
            "{field}: allowed are at most {WORD_MAX} printed characters without spaces"
        )));
    }
    Ok(())
}

/// Checks a text for people.
fn check_text(text: &str, field: &str) -> Result<(), Error> {
    if text.len() > TEXT_MAX {
        return Err(Error::Field(format!("{field}: allowed are at most {TEXT_MAX} bytes")));
    }
    Ok(())
}

fn cut(text: &mut String, max: usize) {
    let end = (0..=text.len().min(max)).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or_default());
    text.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_arbitrary_status_is_refused_or_within_bounds(text in ".{0,100}", port: u32) {
            let reported = v1::NodeStatus {
                version: text.clone(),
                boot_id: text,
                curator_port: port,
                workload_crash_loop: "x".repeat(port as usize % (2 * TEXT_MAX)),
                ..Default::default()
            };
            if let Ok(status) = status(Some(reported)) {
                prop_assert!(status.workload_crash_loop.len() <= TEXT_MAX);
                prop_assert!(status.version.len() <= WORD_MAX && status.curator_port <= 65535);
                prop_assert!(status.version.chars().all(|c| c.is_ascii_graphic()));
            }
        }
    }

    #[test]
    fn the_text_about_the_snapshots_of_a_member_is_bounded() {
        let problem = "ü".repeat(TEXT_MAX);
        let snapshots = Some(v1::LocalSnapshots { problem, kept: 7, ..Default::default() });
        let shown = figures(v1::ConsensusFigures { snapshots, ..Default::default() });
        let shown = shown.snapshots.unwrap();
        assert_eq!((shown.problem.len(), shown.kept), (TEXT_MAX, 7));
    }

    #[test]
    fn every_text_of_a_status_is_bounded() {
        let (text, word) = ("x".repeat(TEXT_MAX), "x".repeat(WORD_MAX));
        let full = v1::NodeStatus {
            version: word.clone(),
            image: word.clone(),
            boot_id: word.clone(),
            slot: word.clone(),
            drain: word.clone(),
            workload_fault: text.clone(),
            workload: text.clone(),
            workload_crash_loop: text.clone(),
            firewall_fault: text.clone(),
            other_system: text.clone(),
            mirror: text.clone(),
            ..Default::default()
        };
        status(Some(full)).unwrap();
        let (text, word) = (format!("{text}x"), format!("{word}x"));
        let other = v1::NodeStatus::default;
        let long = [
            ("version", v1::NodeStatus { version: word.clone(), ..other() }),
            ("image", v1::NodeStatus { image: word.clone(), ..other() }),
            ("boot_id", v1::NodeStatus { boot_id: word.clone(), ..other() }),
            ("slot", v1::NodeStatus { slot: word.clone(), ..other() }),
            ("drain", v1::NodeStatus { drain: word, ..other() }),
            ("workload_fault", v1::NodeStatus { workload_fault: text.clone(), ..other() }),
            ("workload", v1::NodeStatus { workload: text.clone(), ..other() }),
            (
                "workload_crash_loop",
                v1::NodeStatus { workload_crash_loop: text.clone(), ..other() },
            ),
            ("firewall_fault", v1::NodeStatus { firewall_fault: text.clone(), ..other() }),
            ("other_system", v1::NodeStatus { other_system: text.clone(), ..other() }),
            ("mirror", v1::NodeStatus { mirror: text, ..other() }),
        ];
        for (field, reported) in long {
            let error = status(Some(reported)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("status.{field}: allowed")), "{error}");
        }
    }

    #[test]
    fn the_status_of_a_node_leaves_room_in_its_record() {
        // With texts of this length at most.
        let reported = |length: usize| {
            let text = |max: usize| "x".repeat(length.min(max));
            let link = v1::NetworkLink {
                name: text(15),
                path: text(LINK_WORD_MAX),
                addresses: vec![text(LINK_WORD_MAX); ADDRESSES_MAX],
                origins: vec![text(LINK_WORD_MAX); ADDRESSES_MAX],
                ..Default::default()
            };
            let network = v1::NetworkReport {
                links: vec![link; LINKS_MAX],
                faults: vec!["x".repeat(TEXT_MAX); FAULTS_MAX],
                ..Default::default()
            };
            let (name, state, cause) = (text(WORD_MAX), text(WORD_MAX), text(TEXT_MAX));
            let volumes = vec![v1::VolumeReport { name, state, cause }; VOLUMES_MAX];
            status(Some(v1::NodeStatus { network: Some(network), volumes, ..Default::default() }))
        };
        // The longest address of IPv6 with its prefix has 43 bytes.
        assert!(reported(43).is_ok());
        let error = reported(TEXT_MAX).unwrap_err().to_string();
        assert!(error.starts_with("status: it has ") && error.ends_with(" together"), "{error}");
        const { assert!(8 * STATUS_MAX < 3 << 19, "etcd takes 1.5 MiB in one request") };
    }

    #[test]
    fn only_whole_digests_of_a_heartbeat_are_kept() {
        let kept = |length: usize| {
            let sent = || vec![9; length];
            let consensus = v1::ConsensusFigures {
                authorities: sent(),
                authorities_at_start: sent(),
                index: 7,
                ..Default::default()
            };
            let kept = heartbeat(v1::HeartbeatRequest {
                consensus: Some(consensus),
                authorities: sent(),
                ..Default::default()
            });
            let figures = kept.consensus.unwrap();
            assert_eq!(figures.index, 7);
            let digests = [kept.authorities, figures.authorities, figures.authorities_at_start];
            digests.map(|digest| digest.len())
        };
        assert_eq!([kept(0), kept(32)], [[0; 3], [32; 3]]);
        for length in [1, 31, 33, 4 << 20] {
            assert_eq!(kept(length), [0; 3], "{length} bytes");
        }
    }

    #[test]
    fn a_heartbeat_keeps_no_room_that_it_does_not_use() {
        let mut authorities = Vec::with_capacity(1 << 20);
        authorities.extend_from_slice(&[9; DIGEST]);
        let log_deliveries = vec![v1::LogDelivery::default(); 1 << 16];
        let sent = v1::HeartbeatRequest { authorities, log_deliveries, ..Default::default() };
        let kept = heartbeat(sent);
        assert!(kept.authorities.len() == DIGEST && kept.authorities.capacity() < 1 << 10);
        assert_eq!(kept.log_deliveries.len(), LOG_TARGETS_MAX);
        assert!(kept.log_deliveries.capacity() < 1 << 10);
    }

    #[test]
    fn what_a_node_says_of_its_further_disks_is_bounded() {
        let reported = |count: usize, name: &str, cause: usize| {
            let (name, state, cause) = (name.to_owned(), "failed".to_owned(), "x".repeat(cause));
            let volumes = vec![v1::VolumeReport { name, state, cause }; count];
            status(Some(v1::NodeStatus { volumes, ..Default::default() }))
        };
        assert!(reported(VOLUMES_MAX, "db", TEXT_MAX).is_ok());
        for refused in [
            reported(VOLUMES_MAX + 1, "db", 1),
            reported(1, "d\nb", 1),
            reported(1, "db", TEXT_MAX + 1),
        ] {
            assert!(refused.unwrap_err().to_string().contains("status.volumes"));
        }
    }

    #[test]
    fn what_a_node_says_of_its_links_is_bounded() {
        let reported = |links: usize, name: &str, addresses: usize| {
            let link = v1::NetworkLink {
                name: name.to_owned(),
                addresses: vec!["192.0.2.7/24".to_owned(); addresses],
                origins: vec!["DHCP".to_owned(); addresses],
                ..Default::default()
            };
            let network = v1::NetworkReport { links: vec![link; links], ..Default::default() };
            status(Some(v1::NodeStatus { network: Some(network), ..Default::default() }))
        };
        assert!(reported(LINKS_MAX, "eth0", ADDRESSES_MAX).is_ok());
        for refused in [
            reported(LINKS_MAX + 1, "eth0", 1),
            reported(1, "eth0", ADDRESSES_MAX + 1),
            reported(1, "eth\n0", 1),
            reported(1, "eth\u{202e}0", 1),
            reported(1, &"e".repeat(LINK_WORD_MAX + 1), 1),
        ] {
            assert!(refused.unwrap_err().to_string().contains("status.network.links"));
        }
    }

    #[test]
    fn the_faults_of_a_network_are_bounded() {
        let reported = |count: usize, length: usize| {
            let faults = vec!["x".repeat(length); count];
            let network = v1::NetworkReport { faults, ..Default::default() };
            status(Some(v1::NodeStatus { network: Some(network), ..Default::default() }))
        };
        assert!(reported(FAULTS_MAX, TEXT_MAX).is_ok());
        for refused in [reported(FAULTS_MAX + 1, 1), reported(1, TEXT_MAX + 1)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.starts_with("status.network.faults: allowed"), "{error}");
        }
    }

    #[test]
    fn what_a_node_says_of_its_systems_is_bounded() {
        let said = v1::UpdateReport {
            version: "é".repeat(99),
            cause: "x".repeat(TEXT_MAX + 1),
            variant: "base".to_owned(),
            kubernetes: "9".repeat(WORD_MAX + 1),
            image: "a".repeat(WORD_MAX + 1),
            turn: 7,
            ..Default::default()
        };
        let kept = update_report(said);
        assert_eq!((kept.version.len(), kept.cause.len()), (WORD_MAX, TEXT_MAX));
        assert_eq!((kept.variant.as_str(), kept.turn), ("base", 7));
        assert_eq!((kept.kubernetes.len(), kept.image.len()), (WORD_MAX, WORD_MAX));
    }
}
