//! Asks a person a question that only a person may answer.

use std::io::{self, BufRead as _, IsTerminal as _, Read as _};

use super::Global;
use super::error::{Error, Explain as _};

/// Far longer than any answer.
const ANSWER_MAX: u64 = 1024;

/// Asks a question of yes or no, where a person sits in front of a terminal.
/// Without one the answer is an error, whose help is `instead`.
pub(super) fn confirm(global: &Global, question: &str, instead: &str) -> Result<(), Error> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Error::new("nobody is there to be asked").or_help(instead));
    }
    global.out.streams.stderr(&format!("{question} [yes/no] "));
    let mut answer = String::new();
    io::stdin()
        .lock()
        .take(ANSWER_MAX)
        .read_line(&mut answer)
        .doing(|| "cannot read the answer".to_owned())?;
    if answer.trim().eq_ignore_ascii_case("yes") {
        return Ok(());
    }
    Err(Error::new("not confirmed: nothing was done"))
}
