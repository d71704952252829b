//! Errors of child processes: a program did not start, or failed.

use std::io;
use std::path::PathBuf;

use super::exit::Exit;
use crate::logtree::Body;
use crate::sys::confine;

/// How many of the last lines of its output a message quotes.
const QUOTED_MAX: usize = 3;
/// Characters of each quoted line: an error message stays short.
const QUOTE_MAX: usize = 300;

/// Why a program did not run, or did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be started.
    #[error("cannot start {}", program.display())]
    Start {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its control group does not exist.
    #[error("cannot start {} in the control group {}", program.display(), cgroup.display())]
    Cgroup {
        /// Which one.
        program: PathBuf,
        /// The directory of the group.
        cgroup: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be confined.
    #[error("cannot confine {}", program.display())]
    Confine {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: Box<confine::Error>,
    },
    /// It runs, and the kernel does not report how it ended.
    #[error("cannot wait for {}", program.display())]
    Wait {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It did not read its input.
    #[error("cannot write to {}", program.display())]
    Write {
        /// Which one.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{} {exit}{}", program.display(), output(tail))]
    Failed {
        /// Which one.
        program: PathBuf,
        /// How it ended.
        exit: Exit,
        /// The last lines of its output.
        tail: Vec<Body>,
    },
}

fn output(tail: &[Body]) -> String {
    let last = &tail[tail.len().saturating_sub(QUOTED_MAX)..];
    let quoted: Vec<String> =
        last.iter().map(|body| body.to_string().chars().take(QUOTE_MAX).collect()).collect();
    match &quoted[..] {
        [] => ", without output".to_owned(),
        lines => format!(": {}", lines.join(" / ")),
    }
}
