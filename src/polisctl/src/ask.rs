//! Asks a person a question that only a person may answer.

use super::Global;
use super::error::{Error, Explain as _};

/// Asks a question of yes or no, where a person sits in front of a terminal.
/// Without one the answer is an error, whose help is `instead`.
pub(super) fn confirm(global: &Global, question: &str, instead: &str) -> Result<(), Error> {
    let answer = answer(global, &format!("{question} [yes/no]"), instead)?;
    if is_yes(&answer) { Ok(()) } else { Err(Error::new("not confirmed: nothing was done")) }
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].iter().any(|yes| answer.trim().eq_ignore_ascii_case(yes))
}

/// Reads one line from the person in front of the terminal.
/// Without a terminal the answer is an error, whose help is `instead`.
pub(super) fn answer(global: &Global, question: &str, instead: &str) -> Result<String, Error> {
    let streams = &global.out.streams;
    if !streams.has_person() {
        return Err(Error::new("not a terminal").or_help(instead));
    }
    streams.stderr(&format!("{question} "));
    streams.line().doing(|| "cannot read the answer".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn y_and_yes_count_and_nothing_else_does() {
        for answer in ["y", "Y", "yes", "YES\n", " yes \r\n"] {
            assert!(is_yes(answer), "{answer:?}");
        }
        for answer in ["", "\n", "n", "no", "ye", "yess", "y y"] {
            assert!(!is_yes(answer), "{answer:?}");
        }
    }
}
