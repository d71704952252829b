//! Text as it is shown: what other machines say cannot control the terminal, and lines fit
//! into it.

use std::time::{Duration, SystemTime};

use polis_base::serial::is_control;
use polis_tui::ratatui::text::Span;

use super::units;

/// Removes control sequences, and marks that disguise a text.
pub(super) fn clean(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\r' | '\t' => ' ',
            c if is_control(c) => '?',
            c => c,
        })
        .collect()
}

/// The names in TLS of the refusals of the other end, and their meaning. rustls prints the names.
const ALERTS: [(&str, &str); 7] = [
    (
        "HandshakeFailure",
        "the other end ended the handshake: it is starting, or its certificate is changing",
    ),
    ("InternalError", "the other end ended the handshake: it is starting, or has a fault"),
    ("AccessDenied", "the other end has no certificate yet: it is starting"),
    ("UnknownCA", "the other end does not accept this certificate: it belongs to another cluster"),
    ("CertificateUnknown", "the other end does not accept this certificate"),
    ("CertificateRevoked", "the other end rejects this certificate: it was revoked"),
    ("CertificateExpired", "the other end rejects this certificate: it has ended, by its clock"),
];

/// The words before the name of an alert.
const ALERT: &str = "received fatal alert: ";

/// How rustls prints that `polis_wire` rejects the certificate of a node: before its ID, and behind
/// it; and the words between the two.
const REJECTED: [(&str, &str); 2] = [
    (
        "invalid peer certificate: Other(OtherError(NoCurator { found: \"",
        "is not a curator: it has no certificate of one",
    ),
    (
        "invalid peer certificate: Other(OtherError(Revoked { found: \"",
        "has a certificate that was revoked",
    ),
];
const REJECTED_END: &str = "\" }))";

/// How rustls prints that the certificate of the other end has ended: before the time of the check,
/// between that and the end of the certificate, in seconds since 1970, and behind both.
const ENDED: (&str, &str, &str) = (
    "invalid peer certificate: certificate expired: verification time ",
    " (UNIX), but certificate is not valid after ",
    " seconds ago)",
);

/// A text with the meaning of an alert of TLS in place of its name.
pub(super) fn spelled(text: &str) -> String {
    let mut spelled = text.to_owned();
    while let Some((before, rest)) = spelled.split_once(ENDED.0) {
        let Some((times, after)) = rest.split_once(ENDED.2) else { break };
        let end = times.split_once(ENDED.1).and_then(|(_check, end)| end.split(' ').next());
        let end =
            end.and_then(|end| end.parse::<u32>().ok()).map(|end| Duration::from_secs(end.into()));
        let Some(end) = end.and_then(|end| SystemTime::UNIX_EPOCH.checked_add(end)) else { break };
        let date = units::date(end);
        spelled = format!(
            "{before}the certificate of the other end ended on {date}: compare its clock with this \
             machine's{after}"
        );
    }
    for (raw, meaning) in REJECTED {
        while let Some((before, rest)) = spelled.split_once(raw) {
            let Some((node, after)) = rest.split_once(REJECTED_END) else { break };
            spelled = format!("{before}{node} {meaning}{after}");
        }
    }
    for (name, meaning) in ALERTS {
        spelled = spelled.replace(&format!("{ALERT}{name}"), meaning);
    }
    spelled
}

/// The same for a text of several lines, which stay.
pub(super) fn clean_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

/// The words of an enum of the API: `TPM_MODE_BEST_EFFORT` is `best_effort`.
pub(super) fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase()
}

/// `text` in a terminal with so many columns. A longer line is broken at spaces, and goes on
/// below its value, if it is a name and a value. A word and a command in back quotes stay
/// whole: one that is wider than the terminal has a line of its own, which the terminal breaks
/// without a space, so that it can be copied.
pub(super) fn fit(text: &str, columns: usize) -> String {
    text.split('\n').map(|line| fit_line(line, columns)).collect::<Vec<_>>().join("\n")
}

fn fit_line(line: &str, columns: usize) -> String {
    if width(line) <= columns {
        return line.to_owned();
    }
    let (head, rest) = line.split_at(value(line));
    let hang = width(head);
    let (mut text, mut at, mut gap) = (head.to_owned(), hang, 0);
    for piece in pieces(rest) {
        let wide = width(piece);
        if at + gap + wide > columns {
            // A text that is too wide for its column begins further left.
            let indent = hang.min(columns.saturating_sub(wide));
            text.truncate(text.trim_end_matches(' ').len());
            text.push_str(if text.is_empty() { "" } else { "\n" });
            text.push_str(&" ".repeat(indent));
            (at, gap) = (indent, 0);
        }
        text.push_str(&" ".repeat(gap));
        text.push_str(piece);
        (at, gap) = (at + gap + wide, 1);
    }
    text
}

/// Widest name of a value: text further to the right belongs to a sentence.
const NAME_MAX: usize = 24;

/// Where the value of a line begins: behind a name and two spaces, or behind the indentation.
fn value(line: &str) -> usize {
    let text = line.len() - line.trim_start_matches(' ').len();
    let Some(gap) = line[text..].find("  ").map(|at| text + at) else { return text };
    let value = line.len() - line[gap..].trim_start_matches(' ').len();
    if value <= NAME_MAX { value } else { text }
}

/// The words of a line; a command in back quotes is one of them.
fn pieces(line: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let (mut begun, mut is_quoted) = (0, false);
    for (at, c) in line.char_indices() {
        match c {
            '`' if is_quoted => is_quoted = false,
            '`' => is_quoted = line[at + 1..].contains('`'),
            ' ' if !is_quoted => {
                pieces.push(&line[begun..at]);
                begun = at + 1;
            }
            _ => {}
        }
    }
    pieces.push(&line[begun..]);
    pieces
}

/// The columns that a text takes: two for a wide character, none for one that combines.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// A text as a column of a table, with spaces behind it.
pub(super) fn pad(text: &str, columns: usize) -> String {
    let missing = columns.saturating_sub(width(text));
    format!("{text}{:missing$}", "")
}

/// The first `columns` of a text; two dots say that there was more.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let dots = columns.min(2);
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    let kept = ends.take_while(|end| width(&text[..*end]) <= columns - dots).last();
    format!("{}{}", &text[..kept.unwrap_or_default()], &".."[..dots])
}

/// The most edits between a mistyped word and the one that was meant.
const SLIPS_MAX: usize = 2;

/// Whether a word is nearly the one that was typed.
pub(super) fn is_near(word: &str, typed: &str) -> bool {
    slips(word, typed) <= SLIPS_MAX
}

/// The edit distance of two words.
fn slips(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (place, known) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *known);
            diagonal = row[place + 1];
            row[place + 1] = changed.min(diagonal + 1).min(row[place] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_disguises_a_text_is_seen() {
        assert_eq!(clean("a\tb\u{1b}c"), "a b?c");
        assert_eq!(clean("d\u{202e}e\u{61c}f\u{2028}g"), "d?e?f?g");
        assert_eq!(clean("é … \u{1f600}"), "é … \u{1f600}");
    }

    #[test]
    fn a_wide_character_takes_two_columns_and_a_combined_one_none() {
        let wide = "\u{6f22}\u{5b57}-\u{1f4a5}";
        assert_eq!([width(wide), width("e\u{301}"), width("node-1")], [7, 1, 6]);
        assert_eq!(pad(wide, 9), format!("{wide}  "));
        assert_eq!(pad(wide, 3), wide);
        assert_eq!(cut(wide, 7), wide);
        // Half of a character is not shown.
        assert_eq!(
            [6, 5, 3].map(|columns| cut(wide, columns)),
            ["\u{6f22}\u{5b57}..", "\u{6f22}..", ".."]
        );
        assert_eq!(cut("e\u{301}e\u{301}e\u{301}e", 3), "e\u{301}..");
        assert_eq!(fit("\u{6f22}\u{5b57} \u{6f22}", 5), "\u{6f22}\u{5b57}\n\u{6f22}");
    }

    #[test]
    fn a_line_goes_on_below_its_value_and_a_command_stays_whole() {
        let text = "waiting  a machine that wants in: `polisctl node approve ID`, which asks\nok";
        insta::assert_snapshot!(fit(text, 40), @r"
        waiting  a machine that wants in:
                 `polisctl node approve ID`,
                 which asks
        ok
        ");
        let error = "help: take ownership of it: `polisctl --endpoint HOST cluster take-ownership`";
        insta::assert_snapshot!(fit(error, 50), @r"
        help: take ownership of it:
        `polisctl --endpoint HOST cluster take-ownership`
        ");
        let wide = "help: `polisctl node delete polis-0 --force` ends it";
        assert_eq!(fit(wide, 20), "help:\n`polisctl node delete polis-0 --force`\nends it");
        assert_eq!(fit("name  a\n      0123456789", 12), "name  a\n  0123456789");
        assert_eq!(fit("name  0123456789", 12), "name\n  0123456789");
    }

    #[test]
    fn a_word_is_near_another_one_by_two_slips_at_most() {
        assert_eq!([slips("", "abc"), slips("abc", "abc"), slips("kitten", "sitting")], [3, 0, 3]);
        assert!(is_near("curator", "cruator") && !is_near("curator", "weather"));
    }

    #[test]
    fn an_alert_of_tls_is_in_words() {
        let raw = "transport error: received fatal alert: HandshakeFailure";
        let text = spelled(raw);
        assert!(text.starts_with("transport error: the other end ended the handshake"), "{text}");
        assert!(!ALERTS.iter().any(|(name, _)| text.contains(name)), "{text}");
        assert_eq!(
            spelled("received fatal alert: DecodeError"),
            "received fatal alert: DecodeError"
        );
    }

    #[test]
    fn a_certificate_that_has_ended_has_its_date_and_names_the_clock() {
        let raw = "no secure connection to 127.0.0.1:7835: invalid peer certificate: certificate \
                   expired: verification time 1795767031 (UNIX), but certificate is not valid \
                   after 1790000000 (5767031 seconds ago); 127.0.0.1:7836: no answer";
        let text = spelled(raw);
        assert_eq!(
            text,
            format!(
                "no secure connection to 127.0.0.1:7835: the certificate of the other end ended \
                 on {}: compare its clock with this machine's; 127.0.0.1:7836: no answer",
                units::date(SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000))
            )
        );
        // A text that only begins like one stays.
        let other = raw.replace("1790000000", "x");
        assert_eq!(spelled(&other), other);
    }

    #[test]
    fn a_node_whose_certificate_is_rejected_is_named_in_words() {
        let raw = "127.0.0.1:7835: no secure connection to 127.0.0.1:7835: invalid peer \
                   certificate: Other(OtherError(NoCurator { found: \"polis-1\" })); more";
        let text = "127.0.0.1:7835: no secure connection to 127.0.0.1:7835: polis-1 is not a \
                    curator: it has no certificate of one; more";
        assert_eq!(spelled(raw), text);
        let cut = &raw[..raw.len() - 10];
        assert_eq!(spelled(cut), cut);
        let revoked = spelled(&raw.replace("NoCurator", "Revoked"));
        assert!(revoked.ends_with("polis-1 has a certificate that was revoked; more"), "{revoked}");
    }

    proptest! {
        #[test]
        fn a_fitted_text_has_the_words_of_the_text_and_no_wider_line(
            text in "([a-z`]{1,12}[ \n]{1,3}){0,40}", columns in 30_usize..130
        ) {
            let fitted = fit(&text, columns);
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            prop_assert_eq!(words(&fitted), words(&text));
            for line in fitted.lines() {
                let is_whole = pieces(line.trim_start_matches(' ')).len() == 1;
                prop_assert!(width(line) <= columns || is_whole, "{}", line);
            }
        }
    }
}
