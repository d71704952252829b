//! The rules of the log tree.

use proptest::prelude::*;

use super::*;

fn levelled(severity: Severity, text: &str) -> Body {
    Body::Levelled(Levelled::new(severity, text))
}

fn texts(entries: &[Arc<Entry>]) -> Vec<String> {
    entries.iter().map(|entry| entry.body.to_string()).collect()
}

#[test]
fn a_name_keeps_its_newest_entries_only() {
    let tree = Tree::new(None);
    for number in 0..=ENTRIES_MAX {
        tree.append("root.a", Origin::Service, Body::Raw(number.to_string()));
    }
    let kept = tree.backlog(&Query::all());
    assert_eq!(kept.len(), ENTRIES_MAX);
    assert_eq!(kept[0].number, 1);
}

#[test]
fn a_chatty_name_does_not_drive_out_a_quiet_one() {
    let tree = Tree::new(None);
    tree.append("root.quiet", Origin::Service, Body::Raw("still here".to_owned()));
    let long = "x".repeat(MESSAGE_MAX);
    for _ in 0..2 * BYTES_MAX / MESSAGE_MAX {
        tree.append("root.chatty", Origin::Program, Body::Raw(long.clone()));
    }
    assert!(tree.lock().bytes <= BYTES_MAX);
    let quiet = Query { name: "root.quiet".to_owned(), ..Query::all() };
    assert_eq!(texts(&tree.backlog(&quiet)), ["still here"]);
}

#[test]
fn entries_of_several_writers_have_their_times_in_the_order_of_the_tree() {
    let tree = Tree::new(None);
    std::thread::scope(|scope| {
        for name in ["root.a", "root.b", "root.c", "root.d"] {
            let tree = &tree;
            scope.spawn(move || {
                for _ in 0..ENTRIES_MAX {
                    tree.append(name, Origin::Service, Body::Raw(String::new()));
                }
            });
        }
    });
    let kept = tree.backlog(&Query::all());
    assert!(kept.len() > ENTRIES_MAX, "{}", kept.len());
    assert!(kept.is_sorted_by_key(|entry| entry.at));
}

#[test]
fn a_message_has_a_bound_and_stays_text() {
    let tree = Tree::new(None);
    tree.append("root", Origin::Program, Body::Raw("é".repeat(MESSAGE_MAX)));
    let kept = tree.backlog(&Query::all());
    let Body::Raw(text) = &kept[0].body else { panic!("raw went in") };
    assert!(text.len() <= MESSAGE_MAX + '…'.len_utf8());
    assert!(text.ends_with('…'));
}

#[test]
fn children_are_asked_for_by_name_and_not_by_prefix() {
    let tree = Tree::new(None);
    for name in ["root.a", "root.a.b", "root.ab"] {
        tree.append(name, Origin::Service, Body::Raw(name.to_owned()));
    }
    let mut query = Query { name: "root.a".to_owned(), ..Query::all() };
    assert_eq!(texts(&tree.backlog(&query)), ["root.a", "root.a.b"]);
    query.children = false;
    assert_eq!(texts(&tree.backlog(&query)), ["root.a"]);
}

#[tokio::test]
async fn filters_hold_for_backlog_and_stream() {
    let tree = Tree::new(None);
    let write = |turn: &str| {
        tree.append("root.a", Origin::Service, levelled(Severity::Info, "no"));
        tree.append("root.a", Origin::Service, levelled(Severity::Error, turn));
        tree.append("root.a", Origin::Service, Body::Raw("no".to_owned()));
    };
    write("before");
    let mut reader = tree.read(Query {
        severity_min: Severity::Warning,
        kinds: Kinds::Levelled,
        backlog: Backlog::Last(5),
        ..Query::all()
    });
    write("after");
    for expected in ["before", "after"] {
        let Some(Item::Entry(entry)) = reader.next().await else { panic!("no entry") };
        assert_eq!(entry.body.to_string(), expected);
    }
    assert_eq!(reader.try_next(), None);
}

#[test]
fn a_slow_reader_loses_entries_and_receives_their_number() {
    let tree = Tree::new(None);
    let mut reader = tree.read(Query { backlog: Backlog::None, ..Query::all() });
    for _ in 0..600 {
        tree.append("root", Origin::Service, Body::Raw("line".to_owned()));
    }
    let (mut got, mut lost) = (0, 0);
    while let Some(item) = reader.try_next() {
        match item {
            Item::Entry(_) => got += 1,
            Item::Lost(count) => lost += count,
        }
    }
    assert_eq!((got, lost), (512, 88));
}

#[test]
fn the_serial_line_gets_what_matters_and_no_more() {
    let (lines, mut written) = Lines::channel();
    let tree = Tree::new(Some(lines));
    let now = polis_base::sys::clock::uptime() + Duration::from_secs(1);
    for (origin, severity, at) in [
        (Origin::Service, Severity::Debug, now),
        (Origin::Service, Severity::Info, now),
        (Origin::Program, Severity::Info, now),
        (Origin::Program, Severity::Warning, now),
        (Origin::Kernel, Severity::Error, Duration::ZERO),
        (Origin::Kernel, Severity::Error, now),
    ] {
        tree.append_at(at, "root.a", origin, levelled(severity, &format!("{origin:?}")));
    }
    let mut seen = Vec::new();
    while let Ok(line) = written.try_recv() {
        seen.push(line.split_once("] ").unwrap().1.to_owned());
    }
    assert_eq!(seen, ["I root.a: Service", "W root.a: Program", "E root.a: Kernel"]);
}

proptest! {
    #[test]
    fn a_reader_sees_each_entry_once_and_in_order(
        before in 0_usize..40, last in 0_usize..60, after in 0_usize..40
    ) {
        let tree = Tree::new(None);
        let write = |count| for number in 0..count {
            tree.append(["root.a", "root.b"][number % 2], Origin::Service, Body::Raw(String::from("x")));
        };
        write(before);
        let mut reader = tree.read(Query { backlog: Backlog::Last(last), ..Query::all() });
        write(after);
        let mut numbers = Vec::new();
        while let Some(Item::Entry(entry)) = reader.try_next() {
            numbers.push(usize::try_from(entry.number).unwrap());
        }
        let expected: Vec<_> = (before.saturating_sub(last)..before + after).collect();
        prop_assert_eq!(numbers, expected);
    }
}
