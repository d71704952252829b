//! Confirmation by the operator: questions that only a person may answer.

use super::Global;
use super::error::{Error, Explain as _};
use super::output::Document;
use super::text::clean_lines;

/// Option of every command that changes something in the cluster.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct DryRun {
    /// Print what the command would do, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Whether a command does what it said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Go {
    /// It does.
    On,
    /// The person only wanted to know, and knows by now.
    NoFurther,
}

impl DryRun {
    /// Whether the person only wants to know the effect.
    pub(super) fn is_on(self) -> bool {
        self.dry_run
    }

    /// The document of a dry run.
    pub(super) fn document(effect: &str) -> Result<Document, Error> {
        Self::shown(&serde_json::json!({ "dry_run": true, "effect": effect }), effect)
    }

    /// The same about one of several nodes, with its ID.
    pub(super) fn document_of(node: &str, effect: &str) -> Result<Document, Error> {
        let value = serde_json::json!({ "node": node, "dry_run": true, "effect": effect });
        Self::shown(&value, effect)
    }

    fn shown(value: &serde_json::Value, effect: &str) -> Result<Document, Error> {
        Document::new(value, format!("{effect} Nothing was changed: this was a dry run."))
    }

    /// Prints `effect` and ends the command, if that is all that is wanted.
    pub(super) fn of(self, global: &Global, effect: &str) -> Result<Go, Error> {
        if !self.is_on() {
            return Ok(Go::On);
        }
        global.out.print(&Self::document(effect)?)?;
        Ok(Go::NoFurther)
    }
}

/// Options of every command that disturbs a node, a user or the cluster.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Sure {
    /// Do not ask.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    dry_run: DryRun,
}

impl Sure {
    /// Fails without a terminal and without `--yes`, before anything else is done, so that
    /// a script fails at once.
    pub(super) fn can_be(self, global: &Global) -> Result<(), Error> {
        if self.yes || self.is_dry_run() || global.out.streams.has_person() {
            return Ok(());
        }
        Err(Error::new("the command asks for confirmation, and this is not a terminal")
            .or_help("confirm with --yes, or see the effect with --dry-run"))
    }

    /// Whether the person only wants to know the effect.
    pub(super) fn is_dry_run(self) -> bool {
        self.dry_run.is_on()
    }

    /// Prints the effect of the command and its object, and asks for confirmation.
    pub(super) fn of(self, global: &Global, effect: &str) -> Result<Go, Error> {
        let go = self.only_shown(global, effect)?;
        if go == Go::On && !self.yes {
            self.can_be(global)?;
            confirm(global, &format!("{effect} Go on?"), "confirm with --yes")?;
        }
        Ok(go)
    }

    /// The same without a question, for a use of the command that does not disturb.
    pub(super) fn only_shown(self, global: &Global, effect: &str) -> Result<Go, Error> {
        self.dry_run.of(global, effect)
    }
}

/// Asks a yes-or-no question on the terminal. Without a terminal it returns an error with
/// `instead` as its help.
pub(super) fn confirm(global: &Global, question: &str, instead: &str) -> Result<(), Error> {
    let answer = answer(global, &format!("{question} [yes/no]"), instead)?;
    if is_yes(&answer) {
        return Ok(());
    }
    Err(Error::new("not confirmed: nothing was changed").or_help("answer `yes` to go on"))
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].iter().any(|yes| answer.trim().eq_ignore_ascii_case(yes))
}

/// The error of a question without a terminal, with `instead` as its help.
pub(super) fn no_person(instead: &str) -> Error {
    Error::new("the command asks a question, and this is not a terminal").or_help(instead)
}

/// Reads one line from the terminal. Without a terminal it returns an error with `instead`
/// as its help.
pub(super) fn answer(global: &Global, question: &str, instead: &str) -> Result<String, Error> {
    let streams = &global.out.streams;
    if !streams.has_person() {
        return Err(no_person(instead));
    }
    streams.stderr(&format!("{} ", clean_lines(question)));
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
