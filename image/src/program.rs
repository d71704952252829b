//! The start of programs: the host's, and those of the payload with the payload's own
//! loader and libraries, so that a build does not depend on the host's.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::error::{Error, Result};

/// Where Debian keeps the libraries of this architecture.
pub(crate) const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The loader, which is itself one of them.
pub(crate) const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";

/// How much of a failed program's output goes into the error.
const OUTPUT_MAX: usize = 2000;

/// A program of the host.
pub(crate) fn host(program: &str) -> Command {
    #[expect(
        clippy::disallowed_methods,
        reason = "the builder runs on a host, where a parent waits for its own children"
    )]
    let mut command = Command::new(program);
    // Messages are matched and shown: in one language, independent of the caller's.
    command.env("LC_ALL", "C.UTF-8");
    command
}

/// A program of the unpacked payload, run with the payload's loader.
#[must_use]
pub fn payload(root: &Path, program: &str) -> Command {
    let name = program.rsplit('/').next().unwrap_or(program);
    let mut command = host(&root.join(LOADER).to_string_lossy());
    command
        .args(["--argv0", name, "--library-path"])
        .arg(root.join(LIBRARIES))
        .arg(root.join(program));
    command
}

/// Runs a command to its end and returns its output.
///
/// # Errors
///
/// It cannot be started, or it fails: the error has the end of its output.
pub fn run(command: &mut Command) -> Result<Vec<u8>> {
    let program = name(command);
    let output =
        command.output().map_err(|source| Error::Start { program: program.clone(), source })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(OUTPUT_MAX)..])
        .trim()
        .replace('\n', "; ");
    Err(Error::Program { program, status: output.status.to_string(), output: text })
}

/// The same, with everything that the program has said, as text.
pub(crate) fn run_both(command: &mut Command) -> Result<String> {
    let program = name(command);
    let output =
        command.output().map_err(|source| Error::Start { program: program.clone(), source })?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    match output.status.success() {
        true => Ok(text),
        false => Err(Error::Program { program, status: output.status.to_string(), output: text }),
    }
}

/// The program that a command runs: behind the loader, the loaded one; behind `setpriv`, the one
/// that it starts.
fn name(command: &Command) -> String {
    let mut arguments = command.get_args();
    let program = match arguments.find(|argument| *argument == "--argv0" || *argument == "--") {
        Some(_) => arguments.next(),
        None => None,
    };
    PathBuf::from(program.unwrap_or(command.get_program())).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_carries_the_status_and_the_output() {
        let error = run(host("sh").args(["-c", "echo seen; exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "sh ended with exit status: 3: seen");
    }

    #[test]
    fn a_program_of_the_payload_goes_by_its_own_name() {
        assert_eq!(name(&payload(Path::new("/x"), "usr/sbin/depmod")), "depmod");
    }

    #[test]
    fn a_program_behind_setpriv_goes_by_its_own_name() {
        let mut go = host("setpriv");
        go.args(["--pdeathsig", "KILL", "--", "/x/bin/go", "build"]);
        assert_eq!(name(&go), "/x/bin/go");
    }
}
