//! Tests of the marks by which a page points at the others.

use super::*;
use crate::snapshot::{
    Health, PartState, PodState, ServiceState, StageState, Update, UpdateState, Workloads,
};

/// The row of keys.
fn keys(snapshot: &Snapshot, page: Page) -> String {
    let screen = screen(snapshot, &view(page, 80, 24), 80, 24);
    screen.lines().last().unwrap().trim_matches('"').to_owned()
}

fn broken() -> Snapshot {
    let mut snapshot = samples::ordinary();
    snapshot.nodes.as_mut().unwrap().nodes[2].health = Health::Late;
    snapshot.etcd.as_mut().unwrap().alarms = vec!["NOSPACE".to_owned()];
    snapshot.services[5].state = ServiceState::Dead;
    snapshot.pki.as_mut().unwrap().certificates[3].renews = None;
    snapshot
}

#[test]
fn the_row_of_keys_says_which_pages_have_something_to_say() {
    let plain = " 1 Boot [2 Cluster] 3 etcd  4 PKI  5 Services  6 Logs  7 Network  8 Workloads  ?";
    assert_eq!(keys(&samples::ordinary(), Page::Cluster), plain);
    let expected =
        "[1 Boot] 2 Cluster! 3 etcd! 4 PKI▲ 5 Services! 6 Logs  7 Network  8 Workloads  ?";
    assert_eq!(keys(&broken(), Page::Boot), expected);
    let open = keys(&broken(), Page::Etcd);
    assert!(open.contains("2 Cluster![3 etcd] 4 PKI▲"), "{open}");
}

#[test]
fn a_node_that_runs_with_errors_is_not_shown_as_healthy() {
    let boot = screen(&broken(), &view(Page::Boot, 80, 24), 80, 24);
    assert!(boot.contains("! Running, "), "{boot}");
    for expected in
        ["Cluster F2   1 of 3 nodes with an", "Alarm NOSPACE", "down: consensus.maintenance"]
    {
        assert!(boot.contains(expected), "{expected:?} is not on\n{boot}");
    }
    let mut waits = samples::ordinary();
    waits.nodes.as_mut().unwrap().nodes[2].state = crate::snapshot::NodeState::New;
    let boot = screen(&waits, &view(Page::Boot, 80, 24), 80, 24);
    assert!(boot.contains("▲ Running, 1 warning."), "{boot}");
}

/// Three nodes without a heartbeat at the new leader yet.
fn after_a_change_of_leader() -> Snapshot {
    let mut snapshot = samples::ordinary();
    for node in &mut snapshot.nodes.as_mut().unwrap().nodes {
        (node.health, node.heartbeat) = (Health::Unknown, None);
    }
    snapshot
}

#[test]
fn what_a_new_leader_does_not_know_yet_is_not_said_to_be_well() {
    let snapshot = after_a_change_of_leader();
    let (mark, said) = Page::Cluster.answer(&snapshot).unwrap();
    assert_eq!(mark, crate::theme::Mark::Attention, "{said}");
    assert!(said.starts_with("2 of 3 nodes without a heartbeat yet: "), "{said}");
    let page = screen(&snapshot, &view(Page::Cluster, 80, 24), 80, 24);
    assert!(page.contains("not known") && !page.contains("all healthy"), "{page}");
    // The same without a leader, whatever was known before.
    let mut snapshot = samples::ordinary();
    snapshot.nodes.as_mut().unwrap().leader = None;
    let (mark, said) = Page::Cluster.answer(&snapshot).unwrap();
    assert_eq!(mark, crate::theme::Mark::Attention, "{said}");
    assert!(said.contains("health is unknown") && !said.contains("healthy"), "{said}");
}

#[test]
fn while_etcd_does_not_know_whether_a_voter_answers_nothing_is_said_to_be_well() {
    let mut snapshot = samples::ordinary();
    let members = &mut snapshot.etcd.as_mut().unwrap().members;
    members.iter_mut().find(|member| !member.own).unwrap().answers = None;
    let (mark, said) = Page::Cluster.answer(&snapshot).unwrap();
    assert_eq!(mark, crate::theme::Mark::Attention, "{said}");
    assert_eq!(said, "3 nodes; the connections to the other voters are not known yet.");
    // The page itself says what the others say of it.
    let page = screen(&snapshot, &view(Page::Cluster, 80, 24), 80, 24);
    assert!(page.contains(&format!("▲ {said}")) && !page.contains("healthy"), "{page}");
}

#[test]
fn etcd_s_own_view_of_a_dead_member_counts_at_once() {
    for mut snapshot in [after_a_change_of_leader(), samples::ordinary()] {
        let etcd = snapshot.etcd.as_mut().unwrap();
        let dead = etcd.members.iter_mut().find(|member| !member.own).unwrap();
        dead.answers = Some(false);
        let dead = dead.name.clone();
        let (mark, said) = Page::Cluster.answer(&snapshot).unwrap();
        assert_eq!(mark, crate::theme::Mark::Bad, "{said}");
        assert!(said.starts_with("1 of 3 nodes does not answer: "), "{said}");
        for page in [Page::Cluster, Page::Etcd] {
            let page = screen(&snapshot, &view(page, 80, 24), 80, 24);
            assert!(page.contains(&format!("polisctl node delete {dead} --force")), "{page}");
        }
    }
}

#[test]
fn a_node_that_is_cut_off_before_it_is_ready_is_not_shown_as_running() {
    let mut snapshot = samples::failing();
    let expected = |snapshot: &Snapshot| Page::Boot.answer(snapshot).unwrap().1;
    assert!(snapshot.ready.is_none());
    assert!(expected(&snapshot).starts_with("Starting, and cut off from the cluster"));
    snapshot.ready = Some(Duration::from_secs(5));
    assert!(expected(&snapshot).starts_with("Running, but cut off from the cluster"));
}

#[test]
fn a_node_that_is_cut_off_names_the_page_that_says_more() {
    let mut snapshot = samples::failing();
    let said = |snapshot: &Snapshot| Page::Boot.answer(snapshot).unwrap().1;
    assert!(said(&snapshot).contains("too few of its members answer"));
    // A worker has no member of etcd, and its etcd page names no silent one.
    let worker = Snapshot { etcd: None, ..snapshot.clone() };
    // The member is well, and no curator answers.
    snapshot.etcd = samples::ordinary().etcd;
    for snapshot in [&worker, &snapshot] {
        let said = said(snapshot);
        assert!(said.contains("no curator answers") && said.contains("(F2)"), "{said}");
        assert!(!said.contains("etcd page"), "{said}");
    }
    assert!(Page::Boot.may_answer_anew(&samples::failing(), &snapshot));
}

#[test]
fn a_machine_on_its_own_is_not_yellow_for_ever() {
    let mut snapshot = samples::ordinary();
    let etcd = snapshot.etcd.as_mut().unwrap();
    etcd.members.truncate(1);
    etcd.survives = Some(0);
    assert!(keys(&snapshot, Page::Boot).contains(" 3 etcd▲"), "two others could vote");
    snapshot.nodes.as_mut().unwrap().nodes.truncate(1);
    assert!(keys(&snapshot, Page::Boot).contains(" 3 etcd "), "the cluster has no other node");
    let etcd = screen(&snapshot, &view(Page::Etcd, 80, 24), 80, 24);
    assert!(etcd.contains("· Losing this node stops the cluster"), "{etcd}");
}

#[test]
fn every_stage_is_a_key_away_however_small_the_screen() {
    let snapshot = samples::ordinary();
    let mut view = view(Page::Boot, 80, 24);
    assert!(!screen(&snapshot, &view, 80, 24).contains("initramfs   done"));
    view.key(Key::Enter, &snapshot);
    assert!(screen(&snapshot, &view, 80, 24).contains("initramfs   done"));
    view.key(Key::Enter, &snapshot);
    assert!(!screen(&snapshot, &view, 80, 24).contains("initramfs   done"));
}

#[test]
fn a_stage_that_waits_is_never_folded_and_its_reason_is_on_a_small_screen() {
    let snapshot = samples::failing();
    let boot = screen(&snapshot, &view(Page::Boot, 80, 24), 80, 24);
    assert!(boot.contains("7 stages    done") && boot.contains("connects them"), "{boot}");
    for stage in snapshot.stages.iter().filter(|stage| stage.state != StageState::Done) {
        assert!(boot.contains(&format!(" {} ", stage.name)), "{} is not on\n{boot}", stage.name);
    }
}

#[test]
fn what_is_another_number_each_second_is_seen_by_the_page_that_shows_it_and_by_no_other() {
    let one = samples::ordinary();
    let mut new = one.clone();
    new.services.iter_mut().for_each(|service| service.since += Duration::from_secs(1));
    let authorities = &mut new.pki.as_mut().unwrap().authorities;
    authorities
        .iter_mut()
        .flat_map(|it| &mut it.crl)
        .for_each(|it| it.age += Duration::from_secs(60));
    let etcd = new.etcd.as_mut().unwrap();
    (etcd.index, etcd.applied) = (etcd.index + 9, etcd.applied + 9);
    etcd.members[1].round_trip = Some(77_000);
    for page in Page::ALL {
        let shows = matches!(page, Page::Etcd | Page::Pki | Page::Services);
        assert_eq!(view(page, 80, 24).sees_change(&one, &new), shows, "{page:?}");
        let answers = page != Page::Boot && page.may_answer_anew(&one, &new);
        assert!(!answers, "{page:?} is recomputed without need");
    }
}

/// Changes of the workloads, one thing at a time.
fn workloads_that_differ() -> [fn(&mut Workloads); 9] {
    [
        |_| {},
        |it| it.unfit = Some("the image".to_owned()),
        |it| it.parts[0].state = PartState::Failed,
        |it| it.parts.iter_mut().for_each(|part| part.state = PartState::Ready),
        |it| it.waits.push("an etcd that votes".to_owned()),
        |it| it.quotas[0].used = it.quotas[0].limit,
        |it| it.pods = None,
        |it| it.pods.as_mut().unwrap().pods[0].state = PodState::CrashLoop,
        |it| it.pods.as_mut().unwrap().total = 7,
    ]
}

#[test]
fn whatever_an_answer_reads_is_looked_at() {
    let samples = samples::all().map(|(_, snapshot)| snapshot);
    let mut others = samples.to_vec();
    // One thing at a time.
    let mut but = |change: &dyn Fn(&mut Snapshot)| {
        let mut other = samples::ordinary();
        change(&mut other);
        others.push(other);
    };
    but(&|it| it.services[3].restarts += 1);
    but(&|it| it.services[3].state = ServiceState::Starting);
    but(&|it| it.services.truncate(3));
    but(&|it| it.etcd.as_mut().unwrap().alarms.push("NOSPACE".to_owned()));
    but(&|it| it.etcd.as_mut().unwrap().quorum = false);
    but(&|it| it.etcd.as_mut().unwrap().db_size = 1_900 << 20);
    but(&|it| it.etcd.as_mut().unwrap().survives = Some(0));
    but(&|it| it.etcd.as_mut().unwrap().state = "stopped".to_owned());
    but(&|it| it.etcd.as_mut().unwrap().members[1].answers = Some(false));
    but(&|it| it.etcd.as_mut().unwrap().members.truncate(1));
    but(&|it| it.pki.as_mut().unwrap().authorities[0].days_left = 3);
    but(&|it| it.pki.as_mut().unwrap().certificates[0].revoked = true);
    but(&|it| it.pki.as_mut().unwrap().certificates[0].used = 99);
    but(&|it| it.pki = None);
    for change in workloads_that_differ() {
        but(&|it| {
            it.workloads = samples::busy().workloads;
            change(it.workloads.as_mut().unwrap());
        });
    }
    for round_trip in [None, Some(900)] {
        but(&|it| {
            let etcd = it.etcd.as_mut().unwrap();
            etcd.survives = None;
            (etcd.members[1].answers, etcd.members[1].round_trip) = (None, round_trip);
        });
    }
    for (one, other) in others.iter().flat_map(|one| others.iter().map(move |it| (one, it))) {
        for field in 6..11 {
            let new = mixed(one, other, field);
            let pages = [Page::Cluster, Page::Etcd, Page::Pki, Page::Services, Page::Workloads];
            for page in pages {
                let same = page.answer(one) == page.answer(&new);
                assert!(same || page.may_answer_anew(one, &new), "{page:?}, field {field}");
            }
        }
    }
}

#[test]
fn a_command_is_on_one_line_with_any_node_id() {
    let snapshot = samples::worker();
    let etcd = screen(&snapshot, &view(Page::Etcd, 80, 24), 80, 24);
    let whole = |line: &str| line.contains("polisctl node roles") && line.contains("-member");
    assert!(etcd.lines().any(whole), "{etcd}");
}

#[test]
fn a_mark_that_changes_is_seen_from_every_page() {
    let (one, new) = (samples::ordinary(), broken());
    for field in [6, 7, 8, 9] {
        let new = mixed(&one, &new, field);
        for page in Page::ALL {
            assert!(view(page, 80, 24).sees_change(&one, &new), "field {field} from {page:?}");
        }
    }
}

#[test]
fn the_owner_s_certificate_is_yellow_only_when_somebody_has_to_use_it() {
    use crate::theme::Mark;
    let said = |days_left: i64, used: u8| {
        let mut snapshot = samples::ordinary();
        let pki = snapshot.pki.as_mut().unwrap();
        let owner = pki.certificates.iter_mut().find(|it| it.name == "owner").unwrap();
        assert!(owner.when_used);
        (owner.days_left, owner.used) = (days_left, used);
        Page::Pki.answer(&snapshot).unwrap()
    };
    // From the first owner on, and past the day from which it renews itself.
    for (days_left, used) in [(29, 3), (9, 70), (-1, 100)] {
        let (mark, text) = said(days_left, used);
        assert_eq!(mark, Mark::Good, "{days_left} days: {text}");
        assert!(!text.contains("not renewed automatically"), "{text}");
    }
    let (mark, text) = said(6, 80);
    assert_eq!(mark, Mark::Attention, "{text}");
    assert!(text.contains("unless its user runs polisctl"), "{text}");
    // A certificate that a machine should have renewed is one for a person.
    let mut late = samples::ordinary();
    let node = late.pki.as_mut().unwrap().certificates.iter_mut().find(|it| !it.when_used);
    node.unwrap().used = 90;
    assert_eq!(Page::Pki.answer(&late).unwrap().0, Mark::Attention);
}

#[test]
fn what_has_ended_names_the_next_step() {
    use crate::theme::Mark;
    let said = |node_days: i64, authority_days: i64| {
        let mut snapshot = samples::ordinary();
        let pki = snapshot.pki.as_mut().unwrap();
        pki.certificates.iter_mut().find(|it| !it.when_used).unwrap().days_left = node_days;
        pki.authorities[0].days_left = authority_days;
        Page::Pki.answer(&snapshot).unwrap()
    };
    let (mark, text) = said(-3, 3_000);
    assert_eq!(mark, Mark::Bad, "{text}");
    assert!(text.ends_with("Check the clock, then the logs (F6) of its node."), "{text}");
    for (days, mark) in [(-4, Mark::Bad), (100, Mark::Attention)] {
        let (shown, text) = said(60, days);
        assert_eq!(shown, mark, "{text}");
        assert!(text.ends_with(": `polisctl cluster rotate-ca`."), "{text}");
    }
}

#[test]
fn a_node_finds_itself_in_a_crowd_without_a_style() {
    let snapshot = samples::crowd();
    let own: String = snapshot.header.node.iter().flat_map(|id| id.chars()).take(14).collect();
    let shown = screen(&snapshot, &view(Page::Cluster, 80, 200), 80, 200);
    let rows: Vec<&str> = shown.lines().collect();
    let marked = |at: &usize| rows[*at].contains("this node ·");
    let found: Vec<usize> = (0..rows.len()).filter(marked).collect();
    assert!(matches!(found[..], [at] if rows[at - 1].contains(&own)), "{shown}");
}

#[test]
fn an_update_of_the_cluster_that_has_stopped_is_on_its_page_and_marks_it_on_the_others() {
    let mut snapshot = samples::ordinary();
    let node = snapshot.nodes.as_ref().unwrap().nodes[2].id.clone();
    let mut shows = |state, waits_for: &str| {
        snapshot.nodes.as_mut().unwrap().update = Some(Update {
            version: "0.2.0".to_owned(),
            state,
            done: 1,
            total: 3,
            node: Some(node.clone()),
            since: Some("2026-02-17 13:58 UTC".to_owned()),
            waits_for: waits_for.to_owned(),
        });
        let page = screen(&snapshot, &view(Page::Cluster, 120, 40), 120, 40);
        (page, Page::Cluster.answer(&snapshot).unwrap())
    };
    let (page, (mark, _)) = shows(UpdateState::Running, &format!("{node}: it restarts"));
    let line =
        "Update to 0.2.0: 1 of 3 nodes; polis-5c2e90b1 since 2026-02-17 13:58 UTC: it restarts.";
    assert!(page.contains(line), "{page}");
    assert_eq!(mark, crate::theme::Mark::Good);
    let (page, _) = shows(UpdateState::Paused, "");
    assert!(page.contains("Update to 0.2.0 paused: 1 of 3 nodes"), "{page}");
    for step in ["to continue, an owner runs:", "► polisctl cluster update resume"] {
        assert!(page.contains(step), "{page}");
    }
    let (page, (mark, said)) = shows(UpdateState::Failed, "guru 0310");
    assert!(page.contains("Update to 0.2.0 failed: 1 of 3 nodes"), "{page}");
    assert!(page.contains("guru 0310.") && page.contains("polisctl cluster update status"));
    assert_eq!(mark, crate::theme::Mark::Attention);
    assert!(said.starts_with("The update to 0.2.0 has stopped. 3 nodes"), "{said}");
}
