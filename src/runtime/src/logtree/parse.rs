//! Parsers of the log formats of the programs in the image.
//!
//! Parsing never fails: a line that does not match its program's format (a panic, a
//! warning of a library) is kept as raw text.

use serde_json::Value;

use super::{Body, Levelled};
use polis_base::serial::Severity;

/// How a program writes its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parser {
    /// Lines of text.
    Raw,
    /// Lines of a tool such as `cryptsetup`, which has no levels: its own words tell an
    /// error from a remark.
    Tool,
    /// One JSON object a line: etcd, by the library zap, and containerd, by logrus.
    Json,
    /// A letter, month and day, time, process, file: Kubernetes components.
    Klog,
}

impl Parser {
    /// Reads one line.
    #[must_use]
    pub fn parse(self, line: &str) -> Body {
        let levelled = match self {
            Self::Raw => None,
            Self::Tool => tool(line),
            Self::Json => json(line),
            Self::Klog => klog(line),
        };
        levelled.map_or_else(|| Body::Raw(line.to_owned()), Body::Levelled)
    }
}

/// How the tools of the disk begin an error, or what they have in it.
const TOOL_ERRORS: [&str; 6] = ["cannot ", "failed", "error", "unable to", "invalid", "not found"];
/// The same for errors that do not stop them: a key that opens no slot is an answer.
const TOOL_WARNINGS: [&str; 2] = ["warning", "no key available"];

/// `Cannot wipe header on device /dev/sda2.`
fn tool(line: &str) -> Option<Levelled> {
    let lower = line.to_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    let severity = match () {
        () if has(&TOOL_WARNINGS) => Severity::Warning,
        () if has(&TOOL_ERRORS) => Severity::Error,
        () => return None,
    };
    Some(Levelled::new(severity, line))
}

/// `{"level":"warn","ts":"..","caller":"auth/store.go:12","msg":"..","other":1}`, or
/// `{"level":"warning","msg":"..","other":1,"time":".."}`.
fn json(line: &str) -> Option<Levelled> {
    let Value::Object(object) = serde_json::from_str(line).ok()? else { return None };
    let severity = match object.get("level")?.as_str()? {
        "debug" | "trace" => Severity::Debug,
        "info" => Severity::Info,
        "warn" | "warning" => Severity::Warning,
        "error" => Severity::Error,
        "dpanic" | "panic" | "fatal" => Severity::Fatal,
        _ => return None,
    };
    let mut levelled = Levelled::new(severity, object.get("msg")?.as_str()?);
    for (key, value) in object {
        match key.as_str() {
            "level" | "msg" => {}
            "ts" | "time" => levelled.stamp = Some(text(value)),
            "caller" => levelled.source = text(value),
            _ => levelled.fields.push((key, text(value))),
        }
    }
    Some(levelled)
}

/// A JSON value as a person would write it: strings without quotes.
fn text(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// `W0103 15:04:05.000001    1234 reflector.go:561] message`
fn klog(line: &str) -> Option<Levelled> {
    let severity = match line.as_bytes().first()? {
        b'I' => Severity::Info,
        b'W' => Severity::Warning,
        b'E' => Severity::Error,
        b'F' => Severity::Fatal,
        _ => return None,
    };
    let (head, message) = line.get(1..)?.split_once("] ")?;
    let mut words = head.split_ascii_whitespace();
    let (date, time) = (words.next()?, words.next()?);
    let (_process, source) = (words.next()?, words.next()?);
    let is_date = date.len() == 4 && date.bytes().all(|b| b.is_ascii_digit());
    let is_time = time.bytes().all(|b| b.is_ascii_digit() || matches!(b, b':' | b'.'));
    if !is_date || !is_time || words.next().is_some() {
        return None;
    }
    let mut levelled = Levelled::new(severity, message);
    levelled.stamp = Some(format!("{date} {time}"));
    source.clone_into(&mut levelled.source);
    Some(levelled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_of_etcd_keeps_its_time_source_and_fields() {
        let line = r#"{"level":"warn","ts":"2026-11-20T23:12:40.301139Z","caller":"auth/store.go:1241","msg":"simple token","took":"1 ms","n":3}"#;
        let Body::Levelled(it) = Parser::Json.parse(line) else { panic!("not understood") };
        assert_eq!(it.severity, Severity::Warning);
        assert_eq!(it.source, "auth/store.go:1241");
        assert_eq!(it.stamp.as_deref(), Some("2026-11-20T23:12:40.301139Z"));
        assert_eq!(Body::Levelled(it).to_string(), "simple token n=3 took=\"1 ms\"");
    }

    #[test]
    fn a_line_of_containerd_keeps_its_severity_time_and_fields() {
        let line = r#"{"error":"no such file","level":"warning","msg":"cleanup failed","time":"2026-11-26T04:00:00.1Z"}"#;
        let Body::Levelled(it) = Parser::Json.parse(line) else { panic!("not understood") };
        assert_eq!(it.severity, Severity::Warning);
        assert_eq!(it.stamp.as_deref(), Some("2026-11-26T04:00:00.1Z"));
        assert_eq!(Body::Levelled(it).to_string(), "cleanup failed error=\"no such file\"");
        // Other text of a shim or a library beside it stays as it is.
        assert_eq!(Parser::Json.parse("panic: nil"), Body::Raw("panic: nil".to_owned()));
    }

    #[test]
    fn an_error_of_a_cipher_s_tool_is_an_error() {
        let severity = |line: &str| match Parser::Tool.parse(line) {
            Body::Levelled(it) => Some(it.severity),
            Body::Raw(_) => None,
        };
        for line in [
            "Cannot use xts-aes-plain64 cipher with integrity hmac-sha256.",
            "device-mapper: reload ioctl on crypt failed: No such file or directory",
            "Error allocating crypto tfm",
        ] {
            assert_eq!(severity(line), Some(Severity::Error), "{line}");
        }
        let refused = "No key available with this passphrase.";
        assert_eq!(severity(refused), Some(Severity::Warning));
        assert_eq!(severity("meta-data=/dev/sda3 isize=512"), None);
    }

    #[test]
    fn a_go_panic_on_the_same_pipe_stays_a_raw_line() {
        let line = "panic: runtime error: index out of range";
        assert_eq!(Parser::Json.parse(line), Body::Raw(line.to_owned()));
    }

    #[test]
    fn a_klog_line_is_taken_apart() {
        let line = "E0103 15:04:05.000001    1234 reflector.go:561] cannot list: refused";
        let Body::Levelled(it) = Parser::Klog.parse(line) else { panic!("not understood") };
        assert_eq!(it.severity, Severity::Error);
        assert_eq!(it.source, "reflector.go:561");
        assert_eq!(it.message, "cannot list: refused");
    }

    #[test]
    fn text_that_only_begins_like_klog_stays_raw() {
        for line in ["Error: no such file", "I am] here", "W0103", "Éa] b"] {
            assert_eq!(Parser::Klog.parse(line), Body::Raw(line.to_owned()));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_lines_are_kept_or_parsed_but_never_lost(
            line in prop_oneof![any::<String>(), r#"[IWEF]\d{4} [\d:.]{1,9} \d \w{1,5}\] .*"#, r#"\{"level":"[a-z]*","msg":".*"\}"#]
        ) {
            for parser in [Parser::Raw, Parser::Json, Parser::Klog] {
                if let Body::Raw(text) = parser.parse(&line) {
                    prop_assert_eq!(text, &*line);
                }
            }
        }
    }
}
