//! The sentences about etcd, on its page and before a machine ends.

use super::*;
use crate::snapshot::{Etcd, Health, MemberStatus};
use crate::theme::Mark;

/// A cluster of three, of which this node's member is changed.
fn with(change: impl FnOnce(&mut Etcd)) -> Snapshot {
    let mut snapshot = samples::ordinary();
    change(snapshot.etcd.as_mut().unwrap());
    snapshot
}

/// The etcd page with all line breaks gone.
fn page(snapshot: &Snapshot) -> String {
    flat(&screen(snapshot, &view(Page::Etcd, 120, 40), 120, 40))
}

fn flat(screen: &str) -> String {
    let rows = screen.lines().map(|row| row.trim_matches('"'));
    let words: Vec<&str> = rows.flat_map(|row| row.split([' ', '│'])).collect();
    words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// The sentence before a reboot.
fn warning(snapshot: &Snapshot) -> String {
    let mut view = View::new(80, 24);
    for key in ['P', 'R'] {
        view.key(Key::Char(key), snapshot);
    }
    flat(&screen(snapshot, &view, 80, 24))
}

#[track_caller]
fn assert_says(screen: &str, wanted: &str) {
    assert!(screen.contains(wanted), "{wanted:?} is not on\n{screen}");
}

#[test]
fn a_worker_may_be_rebooted_and_its_cluster_goes_on() {
    let worker = samples::worker();
    assert_says(&warning(&worker), "The cluster continues without it");
    // A node that will have a member, and does not have it yet, knows nothing.
    let mut coming = worker;
    coming.nodes.as_mut().unwrap().nodes.iter_mut().filter(|node| node.own).for_each(|node| {
        node.roles = vec!["consensus member".to_owned()];
    });
    assert_says(&warning(&coming), "cannot tell");
}

#[test]
fn a_member_that_does_not_serve_shows_nothing_of_the_others() {
    for state in ["stopped", "starting"] {
        let snapshot = with(|etcd| {
            state.clone_into(&mut etcd.state);
            (etcd.quorum, etcd.survives) = (false, None);
            for member in &mut etcd.members {
                (member.leader, member.lag, member.round_trip) = (false, None, None);
                member.answers = member.own.then_some(false);
            }
        });
        let etcd = page(&snapshot);
        assert_says(&etcd, &format!("This node's member is {state}; the state of the others is"));
        assert_says(&etcd, "Database, at the last report");
        assert!(!etcd.contains("uorum") && !etcd.contains("needed to write"), "{etcd}");
        assert!(!etcd.contains("no answer"), "{etcd}");
        let warning = warning(&snapshot);
        assert_says(&warning, "Its etcd member does not serve: this node cannot");
        assert!(!warning.contains("quorum"), "{warning}");
    }
}

#[test]
fn without_a_quorum_there_is_none_to_lose() {
    let snapshot = with(|etcd| (etcd.quorum, etcd.survives) = (false, None));
    assert_says(&page(&snapshot), "! No quorum");
    assert_says(&warning(&snapshot), "The cluster has no quorum already");
}

#[test]
fn a_voter_that_is_silent_is_named_and_the_page_is_not_green() {
    let mut snapshot = with(|etcd| {
        let more = [etcd.members[1].clone(), etcd.members[2].clone()];
        etcd.members.extend(more.map(|it| crate::snapshot::Member { leader: false, ..it }));
        etcd.members[4].answers = Some(false);
        etcd.survives = Some(1);
    });
    let expected = "▲ polis-5c2e90b1 does not answer. The cluster survives the loss of 1 more.";
    assert_says(&page(&snapshot), expected);
    let etcd = snapshot.etcd.as_mut().unwrap();
    etcd.members[3].answers = Some(false);
    etcd.survives = Some(0);
    let expected =
        "! polis-0b7d3a99, polis-5c2e90b1 do not answer (2 voters): losing one more voter";
    assert_says(&page(&snapshot), expected);
}

#[test]
fn two_healthy_voters_get_no_advice_to_repair_one() {
    let snapshot = with(|etcd| {
        etcd.members.truncate(2);
        etcd.survives = Some(0);
    });
    let etcd = page(&snapshot);
    assert_says(&etcd, "▲ Losing one of the 2 voters stops the cluster.");
    assert!(!etcd.contains("more") && !etcd.contains("repair the network"), "{etcd}");
}

#[test]
fn voters_without_a_result_are_shown_as_unknown() {
    let snapshot = with(|etcd| {
        etcd.survives = None;
        (etcd.members[2].answers, etcd.members[2].round_trip) = (None, None);
    });
    let etcd = page(&snapshot);
    assert_says(&etcd, "► The connections to the other voters are not known yet.");
    assert_says(&etcd, "2 of 3 answer, 1 not known; 2 are needed");
    assert_says(&etcd, "voter, not known");
    assert_says(&warning(&snapshot), "The connections to the other voters are not known");
}

#[test]
fn members_that_have_just_answered_are_not_shown_as_queried() {
    let snapshot = with(|etcd| {
        etcd.survives = None;
        etcd.members[1..].iter_mut().for_each(|member| member.answers = None);
    });
    let etcd = page(&snapshot);
    assert_says(&etcd, "▲ The connections to the other voters are not known: their nodes answer");
    assert_says(&etcd, "1 of 3 answers, 2 not known; 2 are needed");
    assert!(!etcd.contains("asked"), "{etcd}");
    assert!(!warning(&snapshot).contains("asked"));
}

#[test]
fn only_a_learner_that_answers_has_a_bar() {
    let of = |answers, percent| {
        page(&with(|etcd| {
            etcd.members[2].standing = MemberStatus::Learner { caught_up: Some(percent) };
            etcd.members[2].answers = answers;
        }))
    };
    assert_says(&of(Some(true), 71), "71 %");
    assert_says(&of(Some(true), 255), "100 %");
    let silent = of(Some(false), 71);
    assert!(silent.contains("learner, no answer") && !silent.contains("71 %"), "{silent}");
}

#[test]
fn a_node_with_a_name_is_shown_by_it_and_by_the_beginning_of_its_id() {
    let mut snapshot = samples::ordinary();
    let nodes = snapshot.nodes.as_mut().unwrap();
    let leader = nodes.leader.clone();
    let node = nodes.nodes.iter_mut().find(|node| Some(&node.id) == leader.as_ref()).unwrap();
    (node.name, node.own) = (Some("web-1".to_owned()), false);
    let id = node.id.chars().take("polis-".len() + 8).collect::<String>();
    for (width, height) in [(80, 24), (120, 40), (240, 67)] {
        let shown = flat(&screen(&snapshot, &view(Page::Cluster, width, height), width, height));
        assert_says(&shown, "web-1 leads.");
        assert_says(&shown, &id);
    }
}

#[test]
fn a_member_is_called_as_its_node_is_on_the_cluster_page() {
    let mut snapshot = with(|etcd| {
        etcd.members[2].answers = Some(false);
        etcd.survives = Some(0);
    });
    let id = snapshot.nodes.as_ref().unwrap().nodes[2].id.clone();
    snapshot.nodes.as_mut().unwrap().nodes[2].name = Some("web-3".to_owned());
    let expected = "! web-3 does not answer: losing one more voter stops the cluster.";
    for (columns, rows) in [(80, 24), (120, 40), (240, 67)] {
        let view = view(Page::Etcd, columns, rows);
        let etcd = flat(&screen(&snapshot, &view, columns, rows));
        let other = ["web-3 does not answer: switch it on", "! web-3 voter, no answer"];
        for wanted in other.into_iter().chain([expected]) {
            assert_says(&etcd, wanted);
        }
        assert_says(&etcd, &format!("polisctl node delete {id} --force"));
    }
}

#[test]
fn a_database_that_is_nearly_full_is_said_in_words_before_it_accepts_no_writes() {
    let of = |percent: u64| {
        let snapshot = with(|etcd| etcd.db_size = etcd.db_quota / 100 * percent + 100);
        (Page::Etcd.answer(&snapshot).unwrap(), page(&snapshot))
    };
    let (answer, page) = of(79);
    assert_eq!(answer.0, Mark::Good);
    assert!(!page.contains("accepts no writes"), "{page}");
    let (answer, page) = of(91);
    assert_eq!(answer.0, Mark::Attention);
    let expected = "survives the loss of 1 of its 3 voters. The database is 91 % full: at 100 % \
                    etcd accepts no writes. Remove what the cluster does not need";
    assert_says(&page, expected);
    // What is worse is said in its place, and a member that does not serve knows no size.
    let full = |change: fn(&mut Etcd)| {
        let snapshot = with(|etcd| {
            etcd.db_size = etcd.db_quota;
            change(etcd);
        });
        Page::Etcd.answer(&snapshot).unwrap().1
    };
    let changes: [fn(&mut Etcd); 3] = [
        |etcd| etcd.alarms = vec!["NOSPACE".to_owned()],
        |etcd| (etcd.quorum, etcd.survives) = (false, None),
        |etcd| etcd.state = "stopped".to_owned(),
    ];
    for change in changes {
        let said = full(change);
        assert!(!said.contains("100 % full"), "{said}");
    }
}

/// The rows of a page, of the title's block.
fn block(snapshot: &Snapshot, page: Page, title: &str, width: u16) -> Vec<String> {
    let shown = screen(snapshot, &view(page, width, 40), width, 40);
    let rows = shown.lines().map(|row| row.trim_matches('"').trim().to_owned());
    rows.skip_while(|row| !row.starts_with(title)).take_while(|row| !row.is_empty()).collect()
}

#[test]
fn a_large_screen_has_the_past_hour_of_etcd_and_a_small_one_does_not() {
    let snapshot = samples::ordinary();
    let past = block(&snapshot, Page::Etcd, "History", 120);
    assert!(past[0].starts_with("History of the last 1 h, a column for 2 min"), "{past:?}");
    for wanted in ["Commit ", "Leader changes 0", "Database 12.5 MiB", "ms", "max "] {
        assert!(past[1].contains(wanted), "no {wanted}: {past:?}");
    }
    assert_eq!(past.len(), 4, "a head and a chart of two rows: {past:?}");
    assert!(block(&snapshot, Page::Etcd, "History", 80).is_empty());
    let none = with(|etcd| etcd.past = crate::snapshot::History::default());
    assert!(block(&none, Page::Etcd, "History", 120).is_empty(), "no sample yet");
}

#[test]
fn a_large_screen_says_who_reaches_whom() {
    // The link between the second and the third is cut; the third has not answered.
    let mut snapshot = with(|etcd| {
        let first = etcd.members[0].id;
        etcd.members[1].reaches = Some(vec![first]);
        etcd.members[2].reaches = None;
    });
    snapshot.nodes.as_mut().unwrap().nodes[2].name = Some("web-3".to_owned());
    for page in [Page::Cluster, Page::Etcd] {
        let rows = block(&snapshot, page, "Who reaches whom", 120);
        let words = |row: &str| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&rows[0])[3..6], ["polis-8e9e05c5", "polis-0b7d3a99", "web-3"]);
        assert_eq!(words(&rows[1]), ["polis-8e9e05c5", "■", "yes", "■", "yes"]);
        assert_eq!(words(&rows[2]), ["polis-0b7d3a99", "■", "yes", "!", "no"]);
        assert_eq!(words(&rows[3]), ["web-3", "·", "not", "known", "·", "not", "known"]);
        assert!(block(&snapshot, page, "Who reaches whom", 80).is_empty());
    }
    let mut changed = snapshot.clone();
    changed.etcd.as_mut().unwrap().members[2].reaches = Some(Vec::new());
    assert!(Page::Cluster.shows_change(&snapshot, &changed));
    let alone = with(|etcd| etcd.members.truncate(1));
    assert!(block(&alone, Page::Etcd, "Who reaches whom", 120).is_empty());
}

#[test]
fn a_voter_of_the_cluster_before_a_snapshot_is_shown_with_both_ways_on() {
    let mut snapshot = samples::ordinary();
    let former = &mut snapshot.nodes.as_mut().unwrap().nodes[2];
    (former.former_voter, former.etcd, former.health) = (true, None, Health::Late);
    let id = former.id.clone();
    let text = flat(&screen(&snapshot, &view(Page::Cluster, 120, 40), 120, 40));
    for wanted in [
        "former",
        "was a voter before the cluster was restored from a snapshot, and does not rejoin",
        "polisctl parameters register",
        &format!("polisctl node delete {id} --force"),
        &format!("polisctl node roles {id} --remove consensus-member"),
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(!text.contains("switch it on") && !text.contains("joining"), "{text}");
}
