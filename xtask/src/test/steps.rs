//! Runs a command of a part, shows its output, and reads its results.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result};

use super::RESULTS;
use crate::image;

/// Tests that ran. A build error counts as zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    pub(super) failed: usize,
}

/// The path of the report of a binary with stories.
pub(super) fn report_of(part: &str) -> PathBuf {
    image::workspace().join(RESULTS).join(format!("{part}.json"))
}

/// The command line, for a person who wants to run it again.
pub(super) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().display();
    let mut line = program.to_string();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.display().to_string());
    }
    line
}

/// Runs `command` with its output passed on, and adds up its summaries.
pub(super) fn counted(command: &mut Command) -> Result<(Option<String>, Counts)> {
    passed_on(command, std::io::stdout(), std::io::stderr())
}

/// The same, with the output passed on to these.
fn passed_on(
    command: &mut Command,
    out: impl Write,
    err: impl Write + Send + 'static,
) -> Result<(Option<String>, Counts)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot be started")?;
    let stdout = child.stdout.take().context("has no output")?;
    let stderr = child.stderr.take().context("has no error output")?;
    let errors = thread::spawn(move || tee(stderr, err));
    let mut counts = tee(stdout, out);
    let status = child.wait().context("cannot be waited for")?;
    let more = errors.join().unwrap_or_default();
    counts.passed += more.passed;
    counts.failed += more.failed;
    let failure = match (status.success(), counts.failed) {
        (true, _) => None,
        (false, 0) => Some(status.to_string()),
        (false, failed) => Some(format!("{failed} of {} tests", failed + counts.passed)),
    };
    Ok((failure, counts))
}

fn tee(from: impl Read, mut to: impl Write) -> Counts {
    let mut counts = Counts::default();
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        // A closed output must not end the tests.
        let _shown = to.write_all(&line).and_then(|()| to.write_all(b"\n"));
        let summary = summary(&String::from_utf8_lossy(&line));
        counts.passed += summary.passed;
        counts.failed += summary.failed;
    }
    counts
}

/// Reads a summary of cargo's runner (`test result: ok. 2 passed; 1 failed; ...`). Any
/// other line counts nothing.
fn summary(line: &str) -> Counts {
    let line = polis_qemu::line::clean(line.as_bytes());
    if !line.starts_with("test result:") {
        return Counts::default();
    }
    let words: Vec<&str> = line.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    let before = |what: &str| -> usize {
        let numbers = words.windows(2).filter(|pair| pair[1] == what);
        numbers.filter_map(|pair| pair[0].parse::<usize>().ok()).sum()
    };
    Counts { passed: before("passed"), failed: before("failed") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_counted_in_colour_too() {
        let plain =
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(summary(plain), Counts { passed: 3, failed: 1 });
        let coloured = "test result: \u{1b}[32mok\u{1b}[0m. 2 passed; 0 failed; 0 ignored";
        assert_eq!(summary(coloured), Counts { passed: 2, failed: 0 });
    }

    #[test]
    fn what_a_test_prints_is_no_summary() {
        assert_eq!(summary("7 passed, 9 failed"), Counts::default());
        let shown = "    test result: FAILED. 0 passed; 1 failed; 0 ignored";
        assert_eq!(summary(shown), Counts::default());
    }

    #[test]
    fn a_failing_command_is_reported_with_its_count() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'test result: FAILED. 1 passed; 2 failed;'; exit 101"]);
        // On the terminal, it would be counted as a summary of this run.
        let (failure, counts) = passed_on(&mut command, std::io::sink(), std::io::sink()).unwrap();
        assert_eq!(counts, Counts { passed: 1, failed: 2 });
        assert_eq!(failure.as_deref(), Some("2 of 3 tests"));
    }
}
