//! Repeated lines of one program: written once, then counted.
//!
//! A program that waits may write the same line ten times a second: the kubelet does until
//! an API server answers. Kept whole, that drives everything else out of the log, and a slow
//! serial port has nothing else to do.
//!
//! Invariants:
//! - A line that was not seen for [`WINDOW`] is written at once.
//! - A line that is left out is counted, and the count is written: with the next one of the
//!   same text, or when the program writes anything else after the window, or at its end.
//!
//! Lines are the same if severity, message and all fields are; the time that the writer gave
//! does not count.

use std::collections::VecDeque;
use std::time::Duration;

use super::Body;
use polis_base::serial::Severity;

/// For how long a line stands for its repetitions.
const WINDOW: Duration = Duration::from_secs(30);

/// How many different lines are remembered; the oldest makes room.
const LINES_MAX: usize = 32;

/// The recent lines of a program, oldest first.
#[derive(Debug, Default)]
pub(super) struct Repeats(VecDeque<Line>);

#[derive(Debug)]
struct Line {
    severity: Severity,
    text: String,
    written: Duration,
    left_out: u64,
}

impl Line {
    /// The line with the number of those that were left out; `None` if all were written.
    fn counted(self) -> Option<Body> {
        (self.left_out > 0).then(|| {
            let mut body = super::Levelled::new(self.severity, self.text);
            body.fields.push(repeated(self.left_out));
            Body::Levelled(body)
        })
    }
}

fn repeated(times: u64) -> (String, String) {
    ("repeated".to_owned(), times.to_string())
}

impl Repeats {
    /// The lines to write for one that comes at `now`, oldest first.
    pub(super) fn filter(&mut self, now: Duration, mut body: Body) -> Vec<Body> {
        let (severity, text) = (body.severity(), body.to_string());
        let is_over = |line: &Line| now.saturating_sub(line.written) >= WINDOW;
        let same = |line: &Line| line.severity == severity && line.text == text;
        if let Some(line) = self.0.iter_mut().find(|line| same(line) && !is_over(line)) {
            line.left_out += 1;
            return Vec::new();
        }
        let (over, mut kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.0).into_iter().partition(|line| is_over(line));
        let room = kept.len().saturating_sub(LINES_MAX - 1);
        let (own, over): (Vec<_>, Vec<_>) =
            over.into_iter().chain(kept.drain(..room)).partition(|line| same(line));
        let mut written: Vec<_> = over.into_iter().filter_map(Line::counted).collect();
        if let Some(left_out) = own.first().map(|line| line.left_out).filter(|count| *count > 0) {
            match &mut body {
                Body::Levelled(levelled) => levelled.fields.push(repeated(left_out)),
                Body::Raw(text) => text.push_str(&format!(" repeated={left_out}")),
            }
        }
        written.push(body);
        kept.push_back(Line { severity, text, written: now, left_out: 0 });
        self.0 = kept;
        written
    }

    /// The lines to write when no further line comes.
    pub(super) fn rest(&mut self) -> Vec<Body> {
        self.0.drain(..).filter_map(Line::counted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logtree::Levelled;

    fn body(text: &str) -> Body {
        Body::Levelled(Levelled::new(Severity::Error, text))
    }

    /// The lines that are written for lines that come at these seconds.
    fn written(repeats: &mut Repeats, lines: &[(u64, &str)]) -> Vec<String> {
        let write = |(at, text): &(u64, &str)| repeats.filter(Duration::from_secs(*at), body(text));
        lines.iter().flat_map(write).map(|body| body.to_string()).collect()
    }

    #[test]
    fn a_repeated_line_is_written_once_in_a_window_with_the_number_of_the_others() {
        let mut repeats = Repeats::default();
        let lines =
            [(0, "wait"), (1, "wait"), (2, "other"), (3, "wait"), (30, "wait"), (31, "wait")];
        assert_eq!(written(&mut repeats, &lines), ["wait", "other", "wait repeated=2"]);
        assert_eq!(repeats.rest(), {
            let mut last = Levelled::new(Severity::Error, "wait");
            last.fields.push(("repeated".to_owned(), "1".to_owned()));
            vec![Body::Levelled(last)]
        });
        assert_eq!(repeats.rest(), []);
    }

    #[test]
    fn any_line_after_the_window_brings_the_count() {
        let mut repeats = Repeats::default();
        let lines = [(0, "wait"), (1, "wait"), (40, "ready")];
        assert_eq!(written(&mut repeats, &lines), ["wait", "wait repeated=1", "ready"]);
    }

    #[test]
    fn lines_that_differ_in_a_field_or_in_severity_are_all_written() {
        let mut repeats = Repeats::default();
        let mut took = Levelled::new(Severity::Info, "applied");
        took.fields.push(("took".to_owned(), "1 ms".to_owned()));
        let all = [
            Body::Levelled(Levelled::new(Severity::Info, "applied")),
            Body::Levelled(Levelled::new(Severity::Error, "applied")),
            Body::Levelled(took),
        ];
        for body in all {
            assert_eq!(repeats.filter(Duration::ZERO, body.clone()), [body]);
        }
    }

    #[test]
    fn many_different_lines_are_all_written_and_no_count_is_lost() {
        let mut repeats = Repeats::default();
        let mut count = 0;
        for round in 0..3 * LINES_MAX {
            let text = format!("line {round}");
            for _ in 0..2 {
                count += repeats.filter(Duration::from_secs(1), body(&text)).len();
            }
            assert!(repeats.0.len() <= LINES_MAX);
        }
        assert_eq!(count + repeats.rest().len(), 2 * 3 * LINES_MAX);
    }
}
