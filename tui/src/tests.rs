//! Draws every page in every state.

use std::sync::Arc;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};

use crate::guru::{self, Countdown, Guru};
use crate::snapshot::{LogEntry, Severity};
use crate::{Command, Key, Page, Snapshot, View, render, samples};

#[path = "cursor_tests.rs"]
mod cursor;
#[path = "glance_tests.rs"]
mod glance;
#[path = "header_tests.rs"]
mod header;
#[path = "guru_tests.rs"]
mod meditation;
#[path = "proptests.rs"]
mod proptests;
#[path = "quorum_tests.rs"]
mod quorum;
#[path = "workloads_tests.rs"]
mod workloads;

fn draw(columns: u16, rows: u16, draw: impl FnOnce(&mut Buffer)) -> TestBackend {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|frame| draw(frame.buffer_mut())).unwrap();
    terminal.backend().clone()
}

fn screen(snapshot: &Snapshot, view: &View, columns: u16, rows: u16) -> String {
    draw(columns, rows, |buffer| render(snapshot, view, buffer)).to_string()
}

fn guru_screen(guru: &Guru, view: &guru::View, columns: u16, rows: u16) -> String {
    draw(columns, rows, |buffer| guru::render(guru, view, true, buffer)).to_string()
}

fn view(page: Page, columns: u16, rows: u16) -> View {
    let mut view = View::new(columns, rows);
    view.key(page.key(), &Snapshot::default());
    view
}

/// One file a page, state and size.
#[track_caller]
fn check(name: &str, snapshot: &Snapshot) {
    for page in Page::ALL {
        for (columns, rows) in [(80, 24), (120, 40), (240, 67)] {
            let file = format!("{}-{name}-{columns}x{rows}", page.title().to_lowercase());
            let screen = screen(snapshot, &view(page, columns, rows), columns, rows);
            insta::assert_snapshot!(file, screen);
        }
    }
}

/// A phone, the terminals that people have, and the largest that is drawn on in whole.
const GURU_SIZES: [(u16, u16); 5] = [(40, 12), (80, 24), (120, 40), (132, 43), (240, 67)];

#[track_caller]
fn check_guru(name: &str, guru: &Guru, keys: &[Key]) {
    for (columns, rows) in GURU_SIZES {
        let mut view = guru::View::new(columns, rows);
        keys.iter().for_each(|key| assert_eq!(view.key(*key, guru), None));
        let file = format!("guru-{name}-{columns}x{rows}");
        insta::assert_snapshot!(file, guru_screen(guru, &view, columns, rows));
    }
}

#[test]
fn every_page_says_that_nothing_is_known_yet() {
    check("empty", &samples::empty());
}

#[test]
fn every_page_shows_an_ordinary_day() {
    check("ordinary", &samples::ordinary());
}

#[test]
fn every_page_shows_a_node_that_only_works() {
    check("worker", &samples::worker());
}

#[test]
fn every_page_shows_a_boot_that_waits() {
    check("booting", &samples::booting());
}

#[test]
fn every_page_shows_a_machine_that_waits_to_be_let_in() {
    check("registering", &samples::registering());
}

#[test]
fn every_page_shows_that_much_happens() {
    check("busy", &samples::busy());
}

#[test]
fn every_page_shows_the_beginning_of_a_crowd() {
    check("crowd", &samples::crowd());
}

#[test]
fn every_page_shows_what_fails() {
    check("failing", &samples::failing());
}

#[test]
fn every_page_keeps_its_shape_with_overlong_texts() {
    check("overflowing", &samples::overflowing());
}

#[test]
fn a_node_without_a_part_in_consensus_says_who_has_one() {
    let mut snapshot = samples::ordinary();
    (snapshot.etcd, snapshot.pki) = (None, None);
    let nodes = snapshot.nodes.as_mut().unwrap();
    nodes.nodes[0].roles.clear();
    nodes.nodes.iter_mut().for_each(|node| node.etcd = None);
    let shown = |snapshot: &Snapshot, page| screen(snapshot, &view(page, 80, 24), 80, 24);
    let etcd = shown(&snapshot, Page::Etcd);
    assert!(etcd.contains("no etcd member: polis-0b7d3a99, polis-5c2e90b1"), "{etcd}");
    assert!(etcd.contains("polisctl node roles") && etcd.contains("--add"), "{etcd}");
    let pki = shown(&snapshot, Page::Pki);
    assert!(pki.contains("certificate is renewed automatically"), "{pki}");
    // It does not receive whether they vote.
    let cluster = shown(&snapshot, Page::Cluster);
    assert!(cluster.contains("member") && !cluster.contains("joining"), "{cluster}");
    // One that is to have a member waits for it.
    snapshot.nodes.as_mut().unwrap().nodes[0].roles = vec!["consensus member".to_owned()];
    let etcd = shown(&snapshot, Page::Etcd);
    assert!(etcd.contains("runs no etcd member yet"), "{etcd}");
}

#[test]
fn a_node_that_etcd_has_not_taken_in_is_joining() {
    let mut snapshot = samples::ordinary();
    snapshot.nodes.as_mut().unwrap().nodes[2].etcd = None;
    let cluster = screen(&snapshot, &view(Page::Cluster, 120, 40), 120, 40);
    assert_eq!(cluster.matches("joining").count(), 1, "{cluster}");
}

#[test]
fn a_guru_fills_the_screen() {
    check_guru("ordinary", &samples::guru(), &[]);
    check_guru("held", &Guru { countdown: Countdown::Held, ..samples::guru() }, &[]);
    check_guru("empty", &Guru::default(), &[]);
    check_guru("locked", &samples::guru_locked(), &[]);
    check_guru("wide", &samples::guru_wide(), &[]);
    check_guru("maintenance", &samples::guru_in_maintenance(), &[]);
}

#[test]
fn a_guru_shows_its_logs() {
    check_guru("logs", &samples::guru_overflowing(), &[Key::Char('l')]);
}

#[test]
fn an_overlong_guru_keeps_what_matters_on_a_small_screen() {
    let guru = samples::guru_overflowing();
    check_guru("overflowing", &guru, &[]);
    let screen = guru_screen(&guru, &guru::View::new(80, 24), 80, 24);
    for needed in
        ["#0601.0000", "reboot. `", "write them", "R reboot", "P power off", "Holding after 4"]
    {
        assert!(screen.contains(needed), "{needed:?} is not on\n{screen}");
    }
}

#[test]
fn a_recovery_key_is_typed_with_every_letter_in_it() {
    let guru = samples::guru_locked();
    let mut view = guru::View::new(80, 24);
    assert_eq!(view.key(Key::Char('u'), &guru), Some(Command::Hold), "the countdown stops");
    for c in "RPHLU-rphlu 27".chars() {
        assert_eq!(view.key(Key::Char(c), &guru), None, "{c:?} is a letter of the key");
    }
    view.key(Key::Char('x'), &guru);
    view.key(Key::Char('é'), &guru);
    view.key(Key::Backspace, &guru);
    for (columns, rows) in [(80, 24), (120, 40)] {
        view.resize(columns, rows);
        let file = format!("guru-prompt-{columns}x{rows}");
        insta::assert_snapshot!(file, guru_screen(&guru, &view, columns, rows));
    }
    assert!(!format!("{view:?}").contains("RPHLU"), "nothing prints a key");
    assert_eq!(view.key(Key::Enter, &guru), Some(Command::Unlock));
    assert_eq!(view.take_typed().unwrap().as_str(), "RPHLU-rphlu 27");
    assert_eq!(view.key(Key::Char('r'), &guru), Some(Command::Reboot));
}

#[test]
fn tab_walks_through_all_pages_and_back() {
    let snapshot = samples::ordinary();
    let mut view = View::new(80, 24);
    let forth = Page::ALL.map(|_| {
        view.key(Key::Tab, &snapshot);
        view.page()
    });
    let mut all = Page::ALL;
    all.rotate_left(1);
    assert_eq!(forth, all);
    view.key(Key::BackTab, &snapshot);
    assert_eq!(view.page(), Page::Workloads);
}

#[test]
fn help_lists_the_keys_and_any_key_closes_it() {
    let snapshot = samples::ordinary();
    let mut view = View::new(80, 24);
    view.key(Key::Char('?'), &snapshot);
    insta::assert_snapshot!("help-80x24", screen(&snapshot, &view, 80, 24));
    for page in [Page::Services, Page::Logs] {
        let mut view = self::view(page, 80, 24).that_can_be_left();
        view.key(Key::Char('?'), &snapshot);
        let screen = screen(&snapshot, &view, 80, 24);
        let all = ["On this page", "On every page", "any key closes it", "leave this console"];
        assert!(all.iter().chain(&["Ctrl-]"]).all(|it| screen.contains(it)), "{screen}");
    }
    view.key(Key::F(5), &snapshot);
    assert_eq!(view.page(), Page::Boot, "the key that closes the help does nothing else");
    assert!(!screen(&snapshot, &view, 80, 24).contains("Keys"));
}

#[test]
fn the_screens_in_the_documentation_are_drawn_by_this_code() {
    let boot = screen(&samples::booting(), &View::new(80, 24), 80, 24);
    let guru = guru_screen(&samples::guru(), &guru::View::new(80, 24), 80, 24);
    let page = include_str!("../../docs/console.md");
    for screen in [boot, guru] {
        let rows = screen.lines().map(|row| row.trim_matches('"').trim_end());
        let screen = rows.collect::<Vec<_>>().join("\n");
        assert!(page.contains(&screen), "docs/console.md does not show\n{screen}");
    }
}

/// A snapshot with `number` log lines, which say their number.
fn chatter(number: u64) -> Snapshot {
    let mut snapshot = samples::ordinary();
    // The log tree keeps the newest hundred.
    let logs = Arc::make_mut(&mut snapshot.logs);
    logs.entries = (number.saturating_sub(100)..number)
        .map(|number| LogEntry {
            number,
            time: Duration::from_secs(number),
            severity: if number % 10 == 0 { Severity::Error } else { Severity::Info },
            name: "root".to_owned(),
            text: format!("line <{number}>"),
            ..LogEntry::default()
        })
        .map(Arc::new)
        .collect();
    logs.total = number;
    snapshot
}

#[test]
fn logs_follow_until_someone_reads() {
    let mut view = view(Page::Logs, 80, 24);
    assert!(screen(&chatter(150), &view, 80, 24).contains("<149>"));
    view.key(Key::PageUp, &chatter(150));
    view.key(Key::Up, &chatter(150));
    let before = screen(&chatter(150), &view, 80, 24);
    let after = screen(&chatter(900), &view, 80, 24);
    assert!(!before.contains("<149>") && before.contains("<120>"), "{before}");
    assert!(after.contains("<120>") && after.contains("750 newer"), "{after}");
    view.key(Key::End, &chatter(900));
    assert!(screen(&chatter(901), &view, 80, 24).contains("<900>"));
}

#[test]
fn a_search_shows_what_holds_it_and_escape_shows_all_again() {
    let mut view = view(Page::Logs, 80, 24);
    for key in "/<14".chars().map(Key::Char) {
        view.key(key, &chatter(150));
    }
    let typing = screen(&chatter(150), &view, 80, 24);
    assert!(typing.contains("<140>") && !typing.contains("<139>"), "{typing}");
    view.key(Key::Char('7'), &chatter(150));
    view.key(Key::Backspace, &chatter(150));
    view.key(Key::Enter, &chatter(150));
    let kept = screen(&chatter(150), &view, 80, 24);
    assert!(kept.contains("<149>") && kept.contains("with \"<14\""), "{kept}");
    view.key(Key::Esc, &chatter(150));
    assert!(screen(&chatter(150), &view, 80, 24).contains("<139>"));
}

#[test]
fn a_search_that_is_dropped_leaves_the_lines_as_they_were() {
    let mut view = view(Page::Logs, 80, 24);
    let before = screen(&chatter(150), &view, 80, 24);
    for key in "/zzz".chars().map(Key::Char).chain([Key::Esc]) {
        view.key(key, &chatter(150));
    }
    assert_eq!(screen(&chatter(150), &view, 80, 24), before);
}

#[test]
fn the_logs_of_a_service_are_one_key_away() {
    let snapshot = samples::failing();
    let mut view = view(Page::Services, 80, 24);
    // The cursor begins at the root: its second service is `consensus`.
    for key in [Key::Down, Key::Down, Key::Down, Key::Char('L')] {
        view.key(key, &snapshot);
    }
    assert_eq!(view.page(), Page::Logs);
    let screen = screen(&snapshot, &view, 80, 24);
    assert!(screen.contains("of root.consensus.") && !screen.contains("root.names"), "{screen}");
}

#[test]
fn no_single_key_ends_the_machine() {
    let snapshot = samples::ordinary();
    let all = [Key::F(10), Key::Enter, Key::Esc, Key::Tab, Key::Up, Key::Ctrl('c')];
    for first in all.into_iter().chain((' '..='~').map(Key::Char)) {
        let mut view = View::new(80, 24);
        assert_eq!(view.key(first, &snapshot), None, "{first:?}");
    }
}

#[test]
fn the_machine_ends_after_a_choice_and_a_confirmation() {
    let snapshot = samples::ordinary();
    let press = |keys: &str| {
        let mut view = View::new(80, 24);
        let press = |key| {
            view.was_read();
            view.key(Key::Char(key), &snapshot)
        };
        keys.chars().map(press).collect::<Vec<_>>()
    };
    assert_eq!(press("PRY"), [None, None, Some(Command::Reboot)]);
    assert_eq!(press("Poy"), [None, None, Some(Command::PowerOff)]);
    assert_eq!(press("PRxY"), [None, None, None, None]);
    assert_eq!(press("PY"), [None, None]);
}

#[test]
fn a_text_that_is_echoed_or_pasted_ends_no_machine() {
    let snapshot = samples::ordinary();
    let mut view = View::new(80, 24);
    view.was_read();
    for key in "PRYyPOYy".chars() {
        assert_eq!(view.key(Key::Char(key), &snapshot), None, "{key:?}");
    }
    // A person who looks at the question, and then answers, means it.
    let mut view = View::new(80, 24);
    for key in "PRY".chars() {
        view.key(Key::Char(key), &snapshot);
    }
    assert!(screen(&snapshot, &view, 80, 24).contains("yes, reboot it now"));
    view.was_read();
    assert_eq!(view.key(Key::Char('Y'), &snapshot), Some(Command::Reboot));
}

#[test]
fn a_question_has_its_keys_on_a_screen_of_any_use() {
    let mut unknown = samples::ordinary();
    unknown.etcd.as_mut().unwrap().survives = None;
    for snapshot in [samples::empty(), samples::ordinary(), samples::failing(), unknown] {
        for (columns, rows) in [(40, 12), (40, 9), (80, 24)] {
            let mut view = View::new(columns, rows);
            for key in ['P', 'R'] {
                view.key(Key::Char(key), &snapshot);
            }
            let shown = screen(&snapshot, &view, columns, rows);
            for key in ["Y    yes, reboot it now", "Esc  no, go back"] {
                assert!(shown.contains(key), "{key:?} is not on {columns} x {rows}\n{shown}");
            }
        }
    }
    // What is left out of the question has a mark.
    let mut snapshot = samples::ordinary();
    snapshot.etcd.as_mut().unwrap().survives = None;
    let mut view = View::new(40, 12);
    for key in ['P', 'R'] {
        view.key(Key::Char(key), &snapshot);
    }
    let shown = screen(&snapshot, &view, 40, 12);
    assert!(shown.lines().any(|row| row.contains("│  ..  ")), "{shown}");
}

#[test]
fn ending_the_only_voter_warns_that_the_cluster_stops() {
    let mut snapshot = samples::ordinary();
    let etcd = snapshot.etcd.as_mut().unwrap();
    etcd.members.truncate(1);
    etcd.survives = Some(0);
    let mut view = View::new(80, 24);
    for key in ['P', 'R'] {
        view.key(Key::Char(key), &snapshot);
    }
    let screen = screen(&snapshot, &view, 80, 24);
    assert!(screen.contains("the only voter of its cluster"), "{screen}");
}

#[test]
fn only_a_console_that_can_be_left_is_left() {
    let snapshot = samples::empty();
    let mut view = View::new(80, 24).that_can_be_left();
    assert_eq!(view.key(Key::Char('q'), &snapshot), Some(Command::Leave));
    assert_eq!(View::new(80, 24).key(Key::Char('q'), &snapshot), None);
}

#[test]
fn logs_show_from_the_chosen_severity_on() {
    let mut view = view(Page::Logs, 80, 24);
    view.key(Key::Char('s'), &chatter(150));
    let screen = screen(&chatter(150), &view, 80, 24);
    assert!(screen.contains("<140>") && !screen.contains("<149>"), "{screen}");
}

#[test]
fn one_key_up_from_the_end_moves_one_line() {
    let snapshot = samples::booting();
    let mut view = View::new(80, 12);
    view.key(Key::End, &snapshot);
    view.key(Key::Down, &snapshot);
    let body = |view: &View| -> Vec<String> {
        let rows = screen(&snapshot, view, 80, 12);
        rows.lines().skip(2).take(9).map(|row| row[..78].to_owned()).collect()
    };
    let end = body(&view);
    view.key(Key::Up, &snapshot);
    assert_eq!(body(&view)[1..], end[..8]);
}

/// `one`, but with the value at `field` from `other`.
fn mixed(one: &Snapshot, other: &Snapshot, field: usize) -> Snapshot {
    let (mut mixed, other) = (one.clone(), other.clone());
    match field {
        0 => mixed.header = other.header,
        1 => mixed.ready = other.ready,
        2 => mixed.previous_failure = other.previous_failure,
        3 => mixed.warnings = other.warnings,
        4 => mixed.stages = other.stages,
        5 => mixed.network = other.network,
        6 => mixed.nodes = other.nodes,
        7 => mixed.etcd = other.etcd,
        8 => mixed.pki = other.pki,
        9 => mixed.services = other.services,
        10 => mixed.workloads = other.workloads,
        11 => mixed.metrics = other.metrics,
        _ => mixed.logs = other.logs,
    }
    mixed
}

/// The picture of a snapshot in a view, without the row that has the time.
fn beside_clock(snapshot: &Snapshot, view: &View) -> Vec<Cell> {
    let backend = draw(160, 50, |buffer| render(snapshot, view, buffer));
    let clock = crate::clock_of(backend.buffer().area);
    let mut cells = backend.buffer().content().to_vec();
    cells.drain(usize::from(clock.y * clock.width)..usize::from(clock.bottom() * clock.width));
    cells
}

#[test]
fn whatever_a_view_shows_is_seen_to_change() {
    let samples = samples::all().map(|(_, snapshot)| snapshot);
    let mut power = view(Page::Logs, 160, 50);
    for key in [Key::F(10), Key::Char('r')] {
        power.key(key, &samples[0]);
    }
    let pages = Page::ALL.into_iter().map(|page| view(page, 160, 50));
    let views: Vec<View> = pages.chain([power]).collect();
    let others = |steps| samples.iter().zip(samples.iter().cycle().skip(steps));
    for (one, other) in [1, 3, 4].into_iter().flat_map(others) {
        for view in &views {
            let shown = std::cell::LazyCell::new(|| beside_clock(one, view));
            for field in 0..13 {
                let new = mixed(one, other, field);
                if !view.sees_change(one, &new) {
                    let same = *shown == beside_clock(&new, view);
                    assert!(same, "{:?} shows more than it looks at: field {field}", view.page());
                }
            }
        }
    }
}

#[test]
fn time_alone_is_drawn_by_the_row_of_the_clock() {
    let one = samples::ordinary();
    let mut new = one.clone();
    new.header.uptime += Duration::from_secs(1);
    new.header.clock = "2026-02-17 14:03:23 UTC".to_owned();
    for page in Page::ALL {
        assert!(!view(page, 80, 24).sees_change(&one, &new));
    }
    let whole = draw(80, 24, |buffer| render(&new, &View::new(80, 24), buffer));
    let area = crate::clock_of(whole.buffer().area);
    assert_eq!((area.y, area.height), (1, 1));
    let mut clock = Buffer::empty(area);
    crate::render_clock(&new, &mut clock);
    assert_eq!(clock.content(), &whole.buffer().content()[80..160]);
    // Where there is one row for the bar, no time is shown.
    assert!(crate::clock_of(ratatui::layout::Rect::new(0, 0, 80, 7)).is_empty());
    new.header.cluster = crate::snapshot::Cluster::Split;
    assert!(view(Page::Logs, 80, 24).sees_change(&one, &new));
}

#[test]
fn thousands_of_nodes_are_counted_as_their_sum_is() {
    let mut snapshot = samples::ordinary();
    let known = snapshot.nodes.as_mut().unwrap();
    let other = known.nodes.iter().find(|node| !node.own).unwrap();
    let late = crate::snapshot::Node { health: crate::snapshot::Health::Late, ..other.clone() };
    known.nodes.extend(vec![late; 1_200]);
    let (_, text) = Page::Cluster.answer(&snapshot).unwrap();
    assert!(text.starts_with("1,200 of 1,203 nodes with an overdue heartbeat: "), "{text}");
    assert!(text.contains(" and 1,198 more."), "{text}");
}
