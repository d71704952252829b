//! What the bar at the top keeps, and what can be read aloud below it.

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
    snapshot.previous_failure = Some("#0802.0009 etcd ended by signal 9".to_owned());
    let boot = screen(&snapshot, &View::new(80, 24), 80, 24);
    assert!(!boot.contains("1 warning") && boot.contains("#0802.0009"), "{boot}");
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
