//! The members that a member without a leader waits for.
//!
//! Only a leader publishes who the members are. Before the first contact with one, the
//! newest source is the directory on the ESP: it lists the curators, one beside each member
//! of etcd.

use std::time::Duration;

use polis_proto::v1;
use prost::Message as _;
use tracing::warn;

use super::Member;
use polis_base::files::File;
use polis_runtime::logtree::Levelled;

/// Longer than the members of a cluster that is switched on need to find each other.
const DOUBT: Duration = Duration::from_secs(60);

/// The members in the last list of a leader, from any boot. Blocks. An unreadable list
/// counts as empty: the member waits all the same.
pub(super) fn named_last(directory: &File) -> v1::ClusterDirectory {
    let read = match directory.read() {
        Ok(read) => read.unwrap_or_default(),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot read the list of the other members");
            Vec::new()
        }
    };
    v1::ClusterDirectory::decode(read.as_slice()).unwrap_or_default()
}

/// Whether the node `own` is the only voter, so that no other can be missing.
pub(super) fn is_only_voter(
    own: &str,
    known: &[Member],
    last: &v1::ClusterDirectory,
    alone: bool,
) -> bool {
    let voters = known.iter().filter(|member| !member.learner);
    match known.is_empty() {
        false => voters.map(Member::called).all(|name| name == own),
        true => alone || !last.nodes.is_empty() && last.nodes.iter().all(|node| node.id == own),
    }
}

/// The wait, in words, of a node whose own etcd has not answered since this time of this boot.
pub(super) fn slow(since: Duration) -> String {
    format!(
        "the etcd of this node, which does not answer since second {} of this boot: its disk or \
         its processors are too slow for it now; `polisctl node logs NODE --name consensus.etcd` \
         says what it is doing",
        since.as_secs()
    )
}

/// The same for a node whose disk took so long for a write that no leader can be elected:
/// a member votes only after its vote is on the disk.
pub(super) fn slow_disk(what: &str, took: Duration) -> String {
    format!(
        "its disk: a write of etcd took {:.1} s, longer than the election timeout, 1 s; check the \
         disk, or the load of its host; and for {what}",
        took.as_secs_f64()
    )
}

/// The time that a write took, of a line that etcd logs when one takes a second or more.
pub(super) fn slow_write(line: &Levelled) -> Option<Duration> {
    if line.message != SLOW_WRITE {
        return None;
    }
    let (_, took) = line.fields.iter().find(|(key, _)| key == "took")?;
    go_duration(took)
}

/// The message of etcd about a slow write of its log.
const SLOW_WRITE: &str = "slow fdatasync";

/// A time as Go writes one that is not below a second: `1.5s`, `2m3s`, `1h0m0s`.
fn go_duration(text: &str) -> Option<Duration> {
    let (mut seconds, mut digits) = (0.0, String::new());
    for c in text.chars() {
        let unit = match c {
            'h' => 3600.0,
            'm' => 60.0,
            's' => 1.0,
            c => {
                digits.push(c);
                continue;
            }
        };
        seconds += std::mem::take(&mut digits).parse::<f64>().ok()? * unit;
    }
    digits.is_empty().then(|| Duration::try_from_secs_f64(seconds).ok()).flatten()
}

/// The reason why the member of the node `own` waits, since this time of this boot and for
/// this long. `known` are the members, if its etcd had a leader since it was started; else
/// those of `last` count.
pub(super) fn leader(
    own: &str,
    known: &[Member],
    last: &v1::ClusterDirectory,
    since: Duration,
    silent: Duration,
) -> String {
    let place = |name: &str| {
        let known = last.nodes.iter().find(|node| node.id == name);
        known.and_then(|node| node.addresses.first())
    };
    let mut voters: Vec<&str> =
        known.iter().filter(|member| !member.learner).map(Member::called).collect();
    if known.is_empty() {
        voters = last.nodes.iter().map(|node| node.id.as_str()).collect();
    }
    let others: Vec<&str> = voters.iter().filter(|name| **name != own).copied().collect();
    let since = since.as_secs();
    let mut what = if others.is_empty() {
        format!(
            "a leader of etcd, since second {since} of this boot; more than half of the voters \
             must be on, and reachable on port 7834 at their last known addresses"
        )
    } else {
        // This node votes, or is about to.
        let count = others.len() + 1;
        let quorum = count / 2 + 1;
        let named: Vec<_> = others
            .iter()
            .map(|name| match place(name) {
                Some(address) => format!("{name} (last address {address})"),
                None => (*name).to_owned(),
            })
            .collect();
        let needed = match (quorum - 1, others.len()) {
            (1, 1) => String::new(),
            (needed, all) if needed == all => "all of ".to_owned(),
            (needed, _) => format!("{needed} of "),
        };
        format!(
            "a quorum of etcd, since second {since} of this boot: {quorum} of {count} voters \
             must be on and reach each other on port 7834; this one is on, and needs {needed}{}; \
             switch on the machines that are off, or repair the network between them",
            named.join(", ")
        )
    };
    if silent >= DOUBT {
        what.push_str(
            "; or this member was removed: `polisctl etcd members` lists the members, and the \
             node asks a curator if it can reach one",
        );
    }
    what
}

#[cfg(test)]
mod tests {
    use super::super::MemberId;
    use super::*;

    #[test]
    fn a_slow_disk_is_named_before_the_members_that_are_missing() {
        use polis_base::serial::Severity;
        let line = |message: &str, took: &str| {
            let mut line = Levelled::new(Severity::Warning, message);
            line.fields = vec![("took".into(), took.into())];
            line
        };
        let took = |text: &str| slow_write(&line("slow fdatasync", text));
        assert_eq!(took("1.5s"), Some(Duration::from_millis(1500)));
        assert_eq!(took("1m2s"), Some(Duration::from_secs(62)));
        assert_eq!(took("1h0m0.5s"), Some(Duration::from_millis(3_600_500)));
        for wrong in ["", "s", "3", "-2s", "NaNs", "120ms"] {
            assert_eq!(took(wrong).filter(|took| !took.is_zero()), None, "{wrong}");
        }
        assert_eq!(slow_write(&line("another message", "3s")), None);
        let text = slow_disk("a quorum of etcd", Duration::from_millis(3200));
        assert!(text.starts_with("its disk: a write of etcd took"), "{text}");
        assert!(text.contains("took 3.2 s") && text.ends_with("for a quorum of etcd"), "{text}");
    }

    fn directory(nodes: &[(&str, &[&str])]) -> v1::ClusterDirectory {
        let node = |&(id, addresses): &(&str, &[&str])| v1::cluster_directory::Node {
            id: id.to_owned(),
            addresses: addresses.iter().map(|&address| address.to_owned()).collect(),
        };
        v1::ClusterDirectory { nodes: nodes.iter().map(node).collect() }
    }

    fn member(id: u64, learner: bool) -> Member {
        Member { id: MemberId(id), name: format!("n{id}"), peer_url: String::new(), learner }
    }

    const SINCE: Duration = Duration::from_secs(9);
    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn a_boot_without_a_quorum_names_the_last_known_voters_and_addresses() {
        let last = directory(&[("n1", &["10.0.0.1"]), ("n2", &["10.0.0.2"]), ("n3", &[])]);
        let text = leader("n1", &[], &last, SINCE, SOON);
        let whom = "2 of 3 voters must be on and reach each other on port 7834; this one is on, \
                    and needs 1 of n2 (last address 10.0.0.2), n3; switch on";
        assert!(text.contains(whom) && text.contains("since second 9 of this boot"), "{text}");
        assert!(!text.contains("was removed"), "{text}");

        let two = directory(&[("n1", &["10.0.0.1"]), ("n2", &["10.0.0.2"])]);
        let text = leader("n1", &[], &two, SINCE, SOON);
        assert!(text.contains("2 of 2 voters") && text.contains("needs n2 (last"), "{text}");

        let five = directory(&[("n1", &[]), ("n2", &[]), ("n3", &[]), ("n4", &[]), ("n5", &[])]);
        let text = leader("n5", &[], &five, SINCE, SOON);
        assert!(text.contains("3 of 5 voters") && text.contains("needs 2 of n1, n2"), "{text}");
    }

    #[test]
    fn a_member_that_had_a_leader_names_its_voters_and_no_learner() {
        let last = directory(&[("n2", &["10.0.0.2"]), ("n9", &["10.0.0.9"])]);
        let known = [member(1, false), member(2, false), member(3, true)];
        let text = leader("n1", &known, &last, SINCE, SOON);
        assert!(text.contains("2 of 2 voters") && text.contains("n2 (last address"), "{text}");
        assert!(!text.contains("n3") && !text.contains("n9"), "{text}");
    }

    #[test]
    fn a_member_that_knows_no_other_reports_that_and_later_other_causes() {
        let nobody = v1::ClusterDirectory::default();
        let text = leader("n1", &[], &nobody, SINCE, DOUBT);
        assert!(text.contains("more than half of the voters"), "{text}");
        assert!(text.contains("polisctl etcd members"), "{text}");
        let alone = directory(&[("n1", &["10.0.0.1"])]);
        assert!(leader("n1", &[], &alone, SINCE, SOON).contains("a leader of etcd"));
    }

    #[test]
    fn an_only_voter_misses_no_other_and_its_own_etcd_is_slow() {
        let none = v1::ClusterDirectory::default();
        let alone = directory(&[("n1", &["10.0.0.1"])]);
        let two = directory(&[("n1", &["10.0.0.1"]), ("n2", &["10.0.0.2"])]);
        assert!(is_only_voter("n1", &[member(1, false)], &two, false), "the newest list counts");
        assert!(is_only_voter("n1", &[member(1, false), member(2, true)], &two, false));
        assert!(is_only_voter("n1", &[], &alone, false));
        assert!(is_only_voter("n1", &[], &none, true), "the first boot of a cluster");
        assert!(!is_only_voter("n1", &[member(1, false), member(2, false)], &alone, true));
        assert!(!is_only_voter("n1", &[], &two, false));
        assert!(!is_only_voter("n1", &[], &none, false), "nothing is known");
        let said = slow(SINCE);
        assert!(said.contains("too slow") && !said.contains("voters"), "{said}");
    }

    #[test]
    fn an_unreadable_directory_names_no_member() {
        let disk = tempfile::tempdir().unwrap();
        let root = polis_base::files::Root::at(disk.path());
        root.create().unwrap();
        let file = root.esp.cluster_directory;
        assert_eq!(named_last(&file), v1::ClusterDirectory::default());
        file.write(b"no directory").unwrap();
        assert_eq!(named_last(&file), v1::ClusterDirectory::default());
        let whole = directory(&[("n1", &["10.0.0.1"])]);
        file.write(&whole.encode_to_vec()).unwrap();
        assert_eq!(named_last(&file), whole);
    }
}

#[cfg(test)]
#[path = "awaited_fuzz_tests.rs"]
mod fuzz_tests;
