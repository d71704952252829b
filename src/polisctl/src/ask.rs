//! Asks a person a question that only a person may answer.

use super::Global;
use super::error::{Error, Explain as _};

/// Option of every command that disturbs a node, a user or the cluster.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Sure {
    /// Do not ask.
    #[arg(long)]
    yes: bool,
}

impl Sure {
    /// Refuses where the person can neither be asked nor has said yes. Before anything
    /// else is done: a script learns it at once.
    pub(super) fn can_be(self, global: &Global) -> Result<(), Error> {
        if self.yes || global.out.streams.has_person() {
            return Ok(());
        }
        Err(Error::new("not a terminal: use --yes"))
    }

    /// Says what the command does and to whom, and asks whether to go on.
    pub(super) fn of(self, global: &Global, effect: &str) -> Result<(), Error> {
        if self.yes {
            return Ok(());
        }
        self.can_be(global)?;
        confirm(global, &format!("{effect} Go on?"), "say --yes if you are sure")
    }
}

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
