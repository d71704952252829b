//! Text for the screen: cleans it, wraps or cuts it, and formats numbers for people.
//!
//! The font of the Linux console has 256 glyphs, and much of the text was written
//! outside of this machine. So every text passes [`clean`] on its way.
//!
//! Invariants:
//! - A cleaned character takes exactly one cell, on every terminal; widths are
//!   numbers of characters from there on.
//! - Nothing that a terminal could take for a command is ever drawn.

use std::borrow::Cow;
use std::time::Duration;

/// Replaces characters that the console cannot draw. Most texts need no change, and are
/// cleaned more than once on their way: that costs no copy.
pub fn clean(text: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~');
    if text.bytes().all(is_plain) || text.chars().all(|c| clean_char(c) == c) {
        return Cow::Borrowed(text);
    }
    // A text that others have cut shows that as one of [`cut`] does.
    Cow::Owned(text.replace('…', "..").chars().map(clean_char).collect())
}

/// Whether this crate draws `c`, beyond Latin letters. All of it is in code page 437,
/// the content of the kernel's fonts.
fn is_glyph(c: char) -> bool {
    matches!(c, '─' | '│' | '┌' | '┐' | '└' | '┘' | '├' | '┤' | '┬' | '┴' | '┼')
        || matches!(c, '░' | '▒' | '▓' | '█' | '▄' | '▌' | '▐' | '▀')
        || matches!(c, '■' | '►' | '◄' | '▲' | '▼' | '•')
}

fn clean_char(c: char) -> char {
    match c {
        ' '..='~' => c,
        '\u{a0}' => ' ',
        '\u{ad}' | '\u{2010}'..='\u{2015}' | '\u{2212}' => '-',
        '\u{a1}'..='\u{ff}' => c,
        '\u{2018}'..='\u{201b}' => '\'',
        '\u{201c}'..='\u{201f}' => '"',
        c if c.is_control() || c.is_whitespace() => ' ',
        c if is_glyph(c) => c,
        _ => '?',
    }
}

/// Number of cells that a cleaned text takes.
pub(crate) fn width(text: &str) -> usize {
    text.chars().count()
}

/// The first `width` cells of `text`; two dots say that there was more.
pub(crate) fn cut(text: &str, max: usize) -> String {
    if width(text) <= max {
        return text.to_owned();
    }
    let kept: String = text.chars().take(max.saturating_sub(2)).collect();
    let dots = max.min(2);
    format!("{kept}{}", &".."[..dots])
}

/// The last `max` cells of `text`; two dots say that there was more before them.
pub(crate) fn end(text: &str, max: usize) -> String {
    let cells = width(text);
    if cells <= max {
        return text.to_owned();
    }
    let dots = max.min(2);
    let kept: String = text.chars().skip(cells - (max - dots)).collect();
    format!("{}{kept}", &".."[..dots])
}

/// `text` as a column of `max` cells, of which the last is always free.
pub(crate) fn pad(text: &str, max: usize) -> String {
    let text = cut(text, max.saturating_sub(1));
    format!("{text:max$}")
}

/// Longest name inside a sentence.
const NAME_MAX: usize = 32;

/// A name as a part of a sentence, which stays a sentence however long the name is.
pub(crate) fn name(text: &str) -> String {
    cut(&clean(text), NAME_MAX)
}

/// Breaks `text` into lines of at most `max` cells, at spaces where it can.
/// There is always at least one line, and a width of zero counts as one.
pub(crate) fn wrap(text: &str, max: usize) -> Vec<String> {
    let max = max.max(1);
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut used = 0;
    // Between two spaces is an empty word: columns of spaces stay as they are.
    for word in text.split(' ') {
        let mut word = word;
        let mut long = width(word);
        if used > 0 && used + 1 + long <= max {
            line.push(' ');
            used += 1;
        } else if used > 0 {
            lines.push(std::mem::take(&mut line));
            used = 0;
        }
        while long > max {
            let end = word.char_indices().nth(max).map_or(word.len(), |(at, _)| at);
            lines.push(word[..end].to_owned());
            word = &word[end..];
            long -= max;
        }
        line.push_str(word);
        used += long;
    }
    if !line.is_empty() || lines.is_empty() {
        lines.push(line);
    }
    lines
}

/// The same in at most `rows`, of which the last one is cut where there is more.
pub(crate) fn wrap_within(text: &str, max: usize, rows: usize) -> Vec<String> {
    let mut lines = wrap(text, max);
    if lines.len() > rows {
        let rest = lines.split_off(rows.saturating_sub(1)).join(" ");
        lines.push(cut(&rest, max));
    }
    lines
}

/// How long ago something was by the wall clock. Where that was set back meanwhile, the age is
/// not known, and zero here: shown as a time, it would look fresh.
pub(crate) fn ago(age: Duration) -> String {
    match age {
        Duration::ZERO => "later than this clock".to_owned(),
        age => format!("{} ago", duration(age)),
    }
}

/// A length of time in at most two units: `40 ms`, `9.4 s`, `3 min 12 s`, `2 d 4 h`.
pub fn duration(length: Duration) -> String {
    let (millis, seconds) = (length.as_millis(), length.as_secs());
    match seconds {
        // A value that rounds up to 60.0 is shown in minutes.
        _ if millis < 1000 => format!("{millis} ms"),
        _ if millis < 59_950 => format!("{:.1} s", length.as_secs_f64()),
        0..3600 => match (millis + 500) / 1000 {
            rounded @ 0..3600 => two_units(rounded, 60, "min", "s"),
            _ => "1 h".to_owned(),
        },
        3600..86_400 => two_units(u128::from(seconds / 60), 60, "h", "min"),
        _ => two_units(u128::from(seconds / 3600), 24, "d", "h"),
    }
}

/// `total` small units as large and small ones; a zero of the small ones is left out.
fn two_units(total: u128, factor: u128, large: &str, small: &str) -> String {
    match (total / factor, total % factor) {
        (whole, 0) => format!("{} {large}", count(u64::try_from(whole).unwrap_or(u64::MAX))),
        (whole, rest) => {
            format!("{} {large} {rest} {small}", count(u64::try_from(whole).unwrap_or(u64::MAX)))
        }
    }
}

/// A size with one decimal, as every screen and `polisctl` show it: `20.0 MiB`.
#[must_use]
pub fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if size < 1024 {
        return format!("{size} B");
    }
    // Tenths of the unit, so that no float is needed; the last unit may run over 1024.
    let mut tenths = u128::from(size) * 10 / 1024;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if tenths < 10_240 {
            break;
        }
        tenths /= 1024;
        unit = next;
    }
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

/// A short length of time in microseconds: `420 µs`, `1.24 ms`, `340 ms`.
pub(crate) fn micros(micros: u64) -> String {
    match micros {
        0..1000 => format!("{micros} µs"),
        1000..10_000 => format!("{}.{:02} ms", micros / 1000, micros % 1000 / 10),
        10_000..100_000 => format!("{}.{} ms", micros / 1000, micros % 1000 / 100),
        _ => duration(Duration::from_micros(micros)),
    }
}

/// A number with its thousands apart: `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things: `1 day`, `2 days`.
pub(crate) fn plural(number: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(number), if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_the_font_lacks_is_replaced() {
        assert_eq!(clean("as it is"), Cow::Borrowed("as it is"));
        assert_eq!(clean("é\u{2014}“x”\u{2713}\u{1b}[2J\t漢"), "é-\"x\"? [2J ?");
    }

    #[test]
    fn a_cut_text_says_so() {
        assert_eq!(cut("consensus", 9), "consensus");
        assert_eq!(cut("consensus", 6), "cons..");
        assert_eq!(cut("consensus", 1), ".");
        assert_eq!(cut("consensus", 0), "");
        assert_eq!([9, 6, 1, 0].map(|max| end("consensus", max)), ["consensus", "..nsus", ".", ""]);
        assert_eq!(clean("a line of kilo…"), "a line of kilo..");
    }

    #[test]
    fn lines_break_at_spaces_and_long_words_anywhere() {
        assert_eq!(wrap("a quick brown fox", 8), ["a quick", "brown", "fox"]);
        assert_eq!(wrap("to abcdefghij k", 4), ["to", "abcd", "efgh", "ij k"]);
        assert_eq!(wrap("", 8), [""]);
    }

    #[test]
    fn a_text_of_too_many_lines_is_cut_and_says_so() {
        let fox = "a quick brown fox jumps";
        assert_eq!(wrap_within(fox, 8, 4), ["a quick", "brown", "fox", "jumps"]);
        assert_eq!(wrap_within(fox, 8, 2), ["a quick", "brown .."]);
        assert_eq!(wrap_within(fox, 30, 1), [fox]);
    }

    #[test]
    fn what_is_later_than_the_clock_is_not_fresh() {
        assert_eq!(ago(Duration::from_secs(120)), "2 min ago");
        assert_eq!(ago(Duration::ZERO), "later than this clock");
    }

    #[test]
    fn lengths_of_time_are_said_in_two_units() {
        let of = |millis| duration(Duration::from_millis(millis));
        assert_eq!(of(40), "40 ms");
        assert_eq!(of(9_412), "9.4 s");
        assert_eq!(of(59_949), "59.9 s");
        assert_eq!(of(59_960), "1 min");
        assert_eq!(of(192_000), "3 min 12 s");
        assert_eq!(of(3_599_900), "1 h");
        assert_eq!(of(7_500_000), "2 h 5 min");
        assert_eq!(of(187_200_000), "2 d 4 h");
    }

    #[test]
    fn round_trips_below_a_millisecond_are_shown() {
        assert_eq!([micros(7), micros(1_240), micros(12_549)], ["7 µs", "1.24 ms", "12.5 ms"]);
        assert_eq!([micros(340_000), micros(2_100_000)], ["340 ms", "2.1 s"]);
    }

    #[test]
    fn sizes_and_counts_are_short() {
        assert_eq!([0, 1023, 1536].map(bytes), ["0 B", "1023 B", "1.5 KiB"]);
        assert_eq!(bytes(20 << 20), "20.0 MiB");
        assert_eq!(bytes(2_300_000_000), "2.1 GiB");
        assert_eq!(bytes(u64::MAX), "16383.9 PiB");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(plural(1, "day"), "1 day");
        assert_eq!(plural(0, "day"), "0 days");
    }

    proptest! {
        #[test]
        fn wrapped_lines_fit_and_lose_no_word(text in ".{0,80}", max in 1usize..30) {
            let text = clean(&text);
            let lines = wrap(&text, max);
            prop_assert!(lines.iter().all(|line| width(line) <= max));
            let letters = |text: &str| text.replace(' ', "");
            prop_assert_eq!(letters(&lines.concat()), letters(&text));
        }

        #[test]
        fn nothing_cleaned_is_wide_or_a_command(text in any::<String>()) {
            let text = clean(&text);
            let cells = ratatui::text::Span::raw(&*text).width();
            prop_assert_eq!(cells, width(&text));
            prop_assert!(!text.contains(char::is_control));
        }

        #[test]
        fn any_length_of_time_can_be_said(seconds in any::<u64>()) {
            prop_assert!(width(&duration(Duration::from_secs(seconds))) < 32);
        }
    }
}
