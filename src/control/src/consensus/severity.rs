//! The filter for etcd's lines: lowers warnings that report no problem, for the sink of its
//! lines.
//!
//! The general reader of the format knows no program; the meaning that a line has for etcd
//! alone is defined here, and in `damage` for lines about its files.

use polis_base::serial::Severity;
use polis_runtime::logtree::Levelled;

/// Classifies one line of etcd again: a connection without data is not a warning, and of
/// the two lines about one slow request the shorter is enough.
pub(super) fn lower(levelled: &mut Levelled) {
    // It follows `apply request took too long`, which names the request and its time.
    if is_silent_dial(levelled) || levelled.message == "request stats" {
        levelled.severity = Severity::Debug;
    }
}

/// Each member dials the others every few seconds to see whether they take a connection,
/// and etcd warns of each connection that sends no data; in a healthy cluster it warns of
/// nothing else.
fn is_silent_dial(levelled: &Levelled) -> bool {
    levelled.message == "rejected connection on peer endpoint"
        && levelled.fields.iter().any(|(key, value)| key == "error" && value == "EOF")
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_runtime::logtree::{Body, Parser, Tree};

    #[test]
    fn a_silent_dial_is_not_a_warning_and_a_bad_certificate_is() {
        let sink = Tree::new(None).sink("etcd", Parser::Json).ruled(lower);
        let severity = |error: &str| {
            let line = format!(
                r#"{{"level":"warn","msg":"rejected connection on peer endpoint","error":"{error}"}}"#
            );
            let Some(Body::Levelled(levelled)) = sink.line(line.as_bytes()) else {
                panic!("{line}")
            };
            levelled.severity
        };
        assert_eq!(severity("EOF"), Severity::Debug);
        assert_eq!(severity("remote error: tls: bad certificate"), Severity::Warning);
    }

    #[test]
    fn a_slow_request_is_warned_of_once() {
        let sink = Tree::new(None).sink("etcd", Parser::Json).ruled(lower);
        let severity = |message: &str| {
            let line = format!(r#"{{"level":"warn","msg":"{message}"}}"#);
            sink.line(line.as_bytes()).map(|body| body.severity())
        };
        assert_eq!(severity("apply request took too long"), Some(Severity::Warning));
        assert_eq!(severity("request stats"), Some(Severity::Debug));
    }
}
