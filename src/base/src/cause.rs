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

#[cfg(test)]
mod tests {
    use super::*;

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
