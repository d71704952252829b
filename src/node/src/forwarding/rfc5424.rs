//! The format of syslog messages (RFC 5424), and their frames on a stream (RFC 6587, octet
//! counting, as RFC 5425 asks for).
//!
//! ```text
//! 171 <30>1 2026-11-26T08:15:52.000120Z node-1 root.storage 412 - [polis@32473 node="polis-…"
//!     boot="5f3a…" seq="1017"] the data partition is open took="1 s"
//! ```
//!
//! Invariants:
//! - A message has no character that [`is_control`] and at most [`MESSAGE_MAX`] bytes, whatever
//!   the line has: each byte of such a character becomes `#` and three octal digits, and a long
//!   text is cut.
//! - Each field of the header has only characters that the RFC allows.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use polis_base::serial::{Severity, is_control};
use polis_runtime::logtree::ring::Recorder;
use polis_runtime::logtree::{Body, Origin};
use time::format_description::StaticFormatDescription;
use time::macros::format_description;
use time::{OffsetDateTime, UtcOffset};

use super::line::{Line, Subject};

/// Bytes of a message: what receivers take without a setting of their own.
pub(super) const MESSAGE_MAX: usize = 8192;
/// The lengths that the RFC allows.
const HOST_MAX: usize = 255;
const APP_MAX: usize = 48;
const ID_MAX: usize = 32;
/// Bytes of a value in the structured data.
const VALUE_MAX: usize = 512;
/// The name of the structured data. Its number is the one that RFC 5612 keeps for examples: the
/// project has no number of its own.
const DATA: &str = "polis@32473";
/// Marks UTF-8 behind it.
const BOM: &str = "\u{feff}";
const CUT: &str = "…";

const TIME: StaticFormatDescription =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

/// Adds the frame of a message to `frames`.
pub(super) fn put(frames: &mut Vec<u8>, subject: &Subject, recorder: &Recorder, line: &Line) {
    let message = message(subject, recorder, line);
    frames.extend_from_slice(format!("{} ", message.len()).as_bytes());
    frames.extend_from_slice(message.as_bytes());
}

fn message(subject: &Subject, recorder: &Recorder, line: &Line) -> String {
    let entry = &line.entry;
    let facility = match entry.origin {
        Origin::Kernel => 0,
        // A system daemon.
        Origin::Service | Origin::Program => 3,
    };
    let severity = match entry.body.severity() {
        Severity::Debug => 7,
        Severity::Info => 6,
        Severity::Warning => 4,
        Severity::Error => 3,
        Severity::Fatal => 2,
    };
    let event = match &entry.body {
        Body::Levelled(it) => it.fields.iter().find(|(key, _)| key == "event"),
        Body::Raw(_) => None,
    };
    let mut text = format!(
        "<{}>1 {} {} {} {} {} [{DATA} node=\"{}\" boot=\"{}\"",
        facility * 8 + severity,
        time(line.time),
        word(subject.host(), HOST_MAX),
        word(&entry.name, APP_MAX),
        word(&recorder.process.to_string(), ID_MAX),
        word(event.map(|(_, event)| event.as_str()).unwrap_or_default(), ID_MAX),
        value(&subject.id),
        value(&recorder.boot_id),
    );
    // Writing into a string cannot fail.
    let _infallible = match line.number {
        Some(number) => write!(text, " seq=\"{number}\""),
        None => Ok(()),
    };
    if entry.name.len() > APP_MAX {
        let _infallible = write!(text, " name=\"{}\"", value(&entry.name));
    }
    text.push_str("] ");
    let body = entry.body.to_string();
    if !body.is_ascii() {
        text.push_str(BOM);
    }
    let max = MESSAGE_MAX.saturating_sub(text.len());
    text.push_str(&printable(&body, max));
    text
}

/// The time as the RFC has it; `-` for one that it cannot say.
fn time(time: Option<SystemTime>) -> String {
    let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let nanos = since.and_then(|since| i128::try_from(since.as_nanos()).ok());
    let read = nanos.and_then(|nanos| OffsetDateTime::from_unix_timestamp_nanos(nanos).ok());
    let text = read.and_then(|read| read.to_offset(UtcOffset::UTC).format(TIME).ok());
    text.unwrap_or_else(|| "-".to_owned())
}

/// A field of the header: printed ASCII without spaces; `-` where nothing is left.
fn word(text: &str, max: usize) -> String {
    let plain = |c: char| if c.is_ascii_graphic() { c } else { '_' };
    let word: String = text.chars().map(plain).take(max).collect();
    if word.is_empty() { "-".to_owned() } else { word }
}

/// A value in the structured data, without its quotes.
fn value(text: &str) -> String {
    let mut value = String::new();
    for c in printable(text, VALUE_MAX).chars() {
        if ['"', '\\', ']'].contains(&c) {
            value.push('\\');
        }
        value.push(c);
    }
    value
}

/// The text without what [`is_control`], in at most `max` bytes.
fn printable(text: &str, max: usize) -> String {
    let mut printable = String::with_capacity(text.len().min(max));
    // The last place at which the mark still fits.
    let mut end = 0;
    for c in text.chars() {
        if is_control(c) {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing into a string cannot fail.
                let _infallible = write!(printable, "#{byte:03o}");
            }
        } else {
            printable.push(c);
        }
        if printable.len() > max {
            printable.truncate(end);
            printable.push_str(CUT);
            return printable;
        }
        if printable.len() + CUT.len() <= max {
            end = printable.len();
        }
    }
    printable
}

#[cfg(test)]
#[path = "rfc5424_tests.rs"]
mod tests;
