//! Tests of the bar at the top, and of the words below it that can be read aloud.

use super::*;

const LONG: &str = "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff";

#[test]
fn the_clock_stays_whatever_the_address_is() {
    let mut snapshot = samples::ordinary();
    snapshot.header.address = Some(LONG.to_owned());
    let small = screen(&snapshot, &View::new(80, 24), 80, 24);
    let place = small.lines().nth(1).unwrap();
    assert!(place.contains(LONG) && place.contains("14:03:22 UTC"), "{place}");
    assert!(place.contains("slot A") && !place.contains("up 14 d"), "{place}");
    let large = screen(&snapshot, &View::new(120, 40), 120, 40);
    assert!(large.lines().nth(1).unwrap().contains("up 14 d"), "{large}");
}

#[test]
fn a_time_that_nothing_has_confirmed_has_a_mark_and_words() {
    let mut snapshot = samples::ordinary();
    let place = |snapshot: &Snapshot, columns| {
        let shown = screen(snapshot, &View::new(columns, 24), columns, 24);
        shown.lines().nth(1).unwrap().trim_matches('"').trim_end().to_owned()
    };
    assert!(!place(&snapshot, 80).contains('▲'), "{}", place(&snapshot, 80));
    snapshot.header.clock_unset = true;
    let shown = place(&snapshot, 80);
    assert!(shown.ends_with(" ▲ not set: 2026-02-17 14:03:22 UTC"), "{shown}");
    // The words go before the address, and the mark stays.
    snapshot.header.address = Some(LONG.to_owned());
    for (columns, lead) in [(80, " ▲ not set: "), (70, " ▲ ")] {
        let shown = place(&snapshot, columns);
        assert!(shown.contains(LONG), "{shown}");
        assert!(shown.ends_with(&format!("{lead}2026-02-17 14:03:22 UTC")), "{shown}");
    }
}

#[test]
fn an_address_can_be_read_whole_on_every_screen() {
    let mut snapshot = samples::ordinary();
    snapshot.nodes.as_mut().unwrap().nodes[1].address = Some(LONG.to_owned());
    for (columns, rows) in [(80, 24), (120, 40), (240, 67)] {
        let cluster = screen(&snapshot, &view(Page::Cluster, columns, rows), columns, rows);
        assert!(cluster.contains(LONG), "{cluster}");
    }
}

#[test]
fn the_failure_of_the_boot_before_is_no_warning_for_ever() {
    let mut snapshot = samples::ordinary();
    snapshot.previous_failure = Some("#0803.0000 etcd ended with status 2".to_owned());
    let boot = screen(&snapshot, &View::new(80, 24), 80, 24);
    assert!(!boot.contains("1 warning") && boot.contains("#0803.0000"), "{boot}");
    snapshot.header.uptime = Duration::from_secs(86_399);
    let boot = screen(&snapshot, &View::new(80, 24), 80, 24);
    assert!(boot.contains("1 warning"), "{boot}");
}

#[test]
fn a_command_is_on_one_line_and_the_words_are_there_once() {
    let snapshot = samples::registering();
    let node = snapshot.header.node.clone().unwrap();
    let command = format!("► polisctl node approve {node}");
    for page in [Page::Boot, Page::Cluster] {
        let screen = screen(&snapshot, &view(page, 80, 24), 80, 24);
        assert!(screen.contains(&command), "{screen}");
        let words = screen.matches("saddle-bright-canyon-oyster").count();
        assert_eq!(words, screen.matches("fingerprint=").count() + 1, "{screen}");
    }
    let busy = screen(&samples::busy(), &view(Page::Cluster, 80, 24), 80, 24);
    assert!(
        busy.contains("► polisctl node approve polis-e7723f0a94bb41c8a0d65b12e83f9c44"),
        "{busy}"
    );
}

#[test]
fn a_narrow_terminal_has_a_key_for_each_page_and_the_name_of_the_open_one() {
    let snapshot = samples::failing();
    for page in Page::ALL {
        let screen = screen(&snapshot, &view(page, 40, 12), 40, 12);
        let keys = screen.lines().last().unwrap();
        assert!(keys.contains(&format!(" {}]", page.title())) && keys.contains('?'), "{keys}");
        assert!((1..=8).all(|number| keys.contains(&number.to_string())), "{keys}");
        assert!(keys.contains("2!") || page == Page::Cluster, "{keys}");
    }
}

#[test]
fn a_narrow_page_keeps_what_its_rows_are_about() {
    let snapshot = samples::failing();
    let shown = |page| screen(&snapshot, &view(page, 44, 40), 44, 40);
    let services = shown(Page::Services);
    for row in ["├ names         dead                 11", "├ credentials   healthy"] {
        assert!(services.contains(row), "{row:?} is not on\n{services}");
    }
    let pki = shown(Page::Pki);
    let owner = pki.lines().find(|row| row.contains("├ owner")).unwrap();
    assert!(owner.contains("in 16 days") && !owner.contains('│'), "{pki}");
    let etcd = shown(Page::Etcd);
    for row in ["1 of 3 answers; 2 are", "            needed to write", "           9.8 MiB in use"]
    {
        assert!(etcd.contains(row), "{row:?} is not on\n{etcd}");
    }
    let cluster = shown(Page::Cluster);
    assert!(cluster.contains("! polis-0b7d3.. 10.0.2.16        late"), "{cluster}");
}

#[test]
fn a_table_shows_a_number_whole_or_not_at_all() {
    let cases = [
        (Page::Cluster, samples::failing(), "! polis-0b7d", ["voter", "2 min 14 s ago"]),
        (Page::Etcd, samples::ordinary(), "■ polis-0b7d", ["1.24 ms", "12.5 MiB"]),
        (Page::Workloads, samples::failing(), "! scheduler", ["failed", "11.0 s"]),
    ];
    for (page, snapshot, begin, cells) in &cases {
        let row = |columns| {
            let shown = screen(snapshot, &view(*page, columns, 40), columns, 40);
            shown.lines().find(|row| row.contains(begin)).unwrap().to_owned()
        };
        for (columns, cell) in (45..=80).flat_map(|at| cells.iter().map(move |cell| (at, cell))) {
            let row = row(columns);
            let is_begun = row.contains(&cell[..3]);
            assert_eq!(is_begun, row.contains(cell), "{cell} in {columns} columns: {row}");
        }
        assert!(cells.iter().all(|cell| row(80).contains(cell)), "{}", row(80));
    }
}

#[test]
fn what_time_takes_out_of_the_bar_is_no_matter_of_the_clock_alone() {
    let mut before = samples::ordinary();
    before.previous_failure = Some("#0803.0000 etcd ended with status 2".to_owned());
    before.header.uptime = Duration::from_secs(86_399);
    let mut after = before.clone();
    after.header.uptime += Duration::from_secs(1);
    assert!(View::new(80, 24).sees_change(&before, &after));
    before.header.uptime -= Duration::from_secs(1);
    after.header.uptime -= Duration::from_secs(1);
    assert!(!View::new(80, 24).sees_change(&before, &after));
}

#[test]
fn the_end_of_a_typed_text_is_on_a_narrow_screen_with_its_cursor() {
    let snapshot = samples::ordinary();
    let mut logs = view(Page::Logs, 30, 12);
    for c in "/connection to the other voters".chars() {
        logs.key(Key::Char(c), &snapshot);
    }
    let shown = screen(&snapshot, &logs, 30, 12);
    assert!(shown.lines().last().unwrap().contains(" Lines with ..he other voters "), "{shown}");
}
