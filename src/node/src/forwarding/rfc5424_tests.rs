//! The format of syslog messages, at the edges of RFC 5424.

use std::sync::Arc;
use std::time::Duration;

use polis_runtime::logtree::{Entry, Levelled};
use proptest::prelude::*;

use super::*;

fn subject() -> Subject {
    Subject {
        id: "polis-0123456789abcdef0123456789abcdef".to_owned(),
        name: "node-1".to_owned(),
        ..Subject::default()
    }
}

fn recorder() -> Recorder {
    Recorder { boot_id: "5f3a".to_owned(), process: 412, ..Recorder::default() }
}

fn line(name: &str, origin: Origin, body: Body) -> Line {
    let entry = Entry { number: 3, at: Duration::from_secs(1), name: name.into(), origin, body };
    let time = UNIX_EPOCH + Duration::from_micros(1_800_000_000_000_120);
    Line { number: Some(17), time: Some(time), entry: Arc::new(entry) }
}

fn levelled(severity: Severity, message: &str, fields: &[(&str, &str)]) -> Body {
    let fields = fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Body::Levelled(Levelled { fields: fields.collect(), ..Levelled::new(severity, message) })
}

fn said(line: &Line) -> String {
    message(&subject(), &recorder(), line)
}

#[test]
fn a_message_has_the_node_the_service_and_the_number_of_its_record() {
    let body = levelled(Severity::Warning, "it is slow", &[("took", "1 s")]);
    insta::assert_snapshot!(said(&line("root.storage", Origin::Service, body)), @r#"<28>1 2027-01-15T08:00:00.000120Z node-1 root.storage 412 - [polis@32473 node="polis-0123456789abcdef0123456789abcdef" boot="5f3a" seq="17"] it is slow took="1 s""#);
    let body = levelled(Severity::Info, "leads", &[("event", "leads")]);
    insta::assert_snapshot!(said(&line("root.curator", Origin::Service, body)), @r#"<30>1 2027-01-15T08:00:00.000120Z node-1 root.curator 412 leads [polis@32473 node="polis-0123456789abcdef0123456789abcdef" boot="5f3a" seq="17"] leads event=leads"#);
    let kernel = said(&line("root.kernel", Origin::Kernel, Body::Raw("tainted".to_owned())));
    assert!(kernel.starts_with("<6>1 "), "{kernel}");
    let fatal = said(&line("root", Origin::Program, levelled(Severity::Fatal, "x", &[])));
    assert!(fatal.starts_with("<26>1 "), "{fatal}");
}

#[test]
fn a_time_that_no_clock_had_is_left_out() {
    let mut line = line("root", Origin::Service, Body::Raw("x".to_owned()));
    for time in [None, UNIX_EPOCH.checked_sub(Duration::from_secs(1)), far()] {
        line.time = time;
        assert!(said(&line).starts_with("<30>1 - node-1 "), "{}", said(&line));
    }
}

/// In the year 30,000.
fn far() -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_secs(28_000 * 365 * 24 * 3600))
}

#[test]
fn a_line_cannot_begin_another_message() {
    let text = "one\n<0>1 - - - - - - two\u{7}\u{85}\r\u{202e}";
    let printed = said(&line("root\n<0>", Origin::Service, Body::Raw(text.to_owned())));
    assert!(printed.contains(" root_<0> "), "{printed}");
    assert!(
        printed.ends_with("one#012<0>1 - - - - - - two#007#302#205#015#342#200#256"),
        "{printed}"
    );
    let mut odd = subject();
    odd.id = "a\"b\\c]d\n".to_owned();
    let message = message(&odd, &recorder(), &line("root", Origin::Service, Body::Raw("x".into())));
    assert!(message.contains(r#"node="a\"b\\c\]d#012""#), "{message}");
}

#[test]
fn other_text_than_ascii_is_marked_as_utf_8() {
    let plain = said(&line("root", Origin::Service, Body::Raw("grun".to_owned())));
    assert!(!plain.contains(BOM));
    let marked = said(&line("root", Origin::Service, Body::Raw("grün".to_owned())));
    assert!(marked.ends_with("] \u{feff}grün"), "{marked}");
}

#[test]
fn a_name_that_is_too_long_is_whole_in_the_structured_data() {
    let name = format!("root.{}", "workload.".repeat(8));
    let printed = said(&line(&name, Origin::Service, Body::Raw("x".to_owned())));
    let app = printed.split(' ').nth(3).unwrap();
    assert_eq!(app.len(), APP_MAX);
    assert!(printed.contains(&format!("name=\"{name}\"")), "{printed}");
}

#[test]
fn a_frame_says_how_many_bytes_follow() {
    let mut frames = Vec::new();
    for text in ["one", "zwölf"] {
        let line = line("root", Origin::Service, Body::Raw(text.to_owned()));
        put(&mut frames, &subject(), &recorder(), &line);
    }
    let mut rest = frames.as_slice();
    let mut ends = Vec::new();
    while let Some(space) = rest.iter().position(|byte| *byte == b' ') {
        let length: usize = std::str::from_utf8(&rest[..space]).unwrap().parse().unwrap();
        let (message, behind) = rest[space + 1..].split_at(length);
        ends.push(std::str::from_utf8(message).unwrap().rsplit(' ').next().unwrap().to_owned());
        rest = behind;
    }
    assert_eq!((ends, rest), (vec!["one".to_owned(), "\u{feff}zwölf".to_owned()], &[][..]));
}

proptest! {
    #[test]
    fn any_line_is_a_message_of_bounded_length(
        name in ".{0,80}", host in ".{0,300}", boot in ".{0,80}",
        text in prop_oneof![".{0,200}", "[\u{0}-\u{20}é]{3000,9000}"],
        event in ".{0,50}", value in ".{0,300}", seconds: u64, number: Option<u64>,
    ) {
        let body = levelled(Severity::Info, &text, &[("event", &event), ("value", &value)]);
        let mut line = line(&name, Origin::Service, body);
        line.number = number;
        line.time = UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        let subject = Subject { id: value.clone(), name: host, ..subject() };
        let message = message(&subject, &Recorder { boot_id: boot, ..recorder() }, &line);
        prop_assert!(message.len() <= MESSAGE_MAX, "{} bytes", message.len());
        // The mark of UTF-8 before the text, and no other.
        prop_assert!(!message.replacen(BOM, "", 1).contains(is_control));
        let header: Vec<_> = message.split(' ').take(6).collect();
        prop_assert_eq!(header.len(), 6);
        for (field, max) in header[2..].iter().zip([HOST_MAX, APP_MAX, ID_MAX, ID_MAX]) {
            prop_assert!((1..=max).contains(&field.len()), "{:?}", header);
            prop_assert!(field.chars().all(|c| c.is_ascii_graphic()), "{:?}", header);
        }
        let head = message.splitn(7, ' ').nth(6).unwrap();
        prop_assert!(head.starts_with("[polis@32473 node=\""), "{}", head);
    }
}
