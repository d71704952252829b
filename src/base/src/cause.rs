//! The causes of an error as text: for log lines, reports and messages.

use std::error::Error;

/// The message of the error and those of its causes, the root cause last. A cause that
/// the message before it already contains is left out: some libraries repeat it.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if !texts.last().is_some_and(|last| last.contains(&text)) {
            texts.push(text);
        }
        next = error.source();
    }
    texts
}

/// The same in one line.
#[must_use]
pub fn line(error: &(dyn Error + 'static)) -> String {
    chain(error).join(": ")
}

/// The cause of the last failure: a cause is logged once, and not at each attempt.
#[derive(Clone, Debug, Default)]
pub struct Last(Option<String>);

impl Last {
    /// Whether this cause is another one than the last; it is the last one from now on.
    pub fn is_new(&mut self, cause: &str) -> bool {
        let new = self.0.as_deref() != Some(cause);
        if new {
            self.0 = Some(cause.to_owned());
        }
        new
    }

    /// An attempt succeeded: the next failure is new.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_new_once_until_it_changes_or_an_attempt_succeeds() {
        let mut last = Last::default();
        let mut news = |cause: &str| last.is_new(cause);
        assert!(news("no leader") && !news("no leader"));
        assert!(news("refused") && news("no leader") && !news("no leader"));
        last.clear();
        assert!(last.is_new("no leader"));
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Failure {
        text: &'static str,
        source: Option<Box<Self>>,
    }

    #[test]
    fn causes_follow_the_error_and_a_repeated_one_is_left_out() {
        let disk = Failure { text: "the disk is gone", source: None };
        let read = Failure { text: "read: the disk is gone", source: Some(Box::new(disk)) };
        let start = Failure { text: "cannot start", source: Some(Box::new(read)) };
        assert_eq!(chain(&start), ["cannot start", "read: the disk is gone"]);
        assert_eq!(line(&start), "cannot start: read: the disk is gone");
    }
}
