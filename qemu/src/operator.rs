//! Operates a cluster as a person does: by calling `polisctl`.
//!
//! What is run is the very program that people run, so whatever a story does to
//! its cluster, they can do.

use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::machine::Error;

/// A port of a node, and the port of this host that leads to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The node's address on its segment.
    pub address: Ipv4Addr,
    /// The port there.
    pub port: u16,
    /// The port of the host's loopback interface.
    pub host: u16,
}

/// The port at which a node's curator listens.
pub const CURATOR: u16 = 7835;

/// `polisctl` with one context.
#[derive(Clone, Debug)]
pub struct Operator {
    program: PathBuf,
    config: PathBuf,
    context: String,
}

impl Operator {
    /// The program, its folder of contexts, and the name of the context.
    #[must_use]
    pub fn new(program: &Path, config: &Path, context: &str) -> Self {
        Self { program: program.into(), config: config.into(), context: context.to_owned() }
    }

    /// Makes or renews the context: the owner's key, and the ways to the nodes.
    ///
    /// # Errors
    /// When `polisctl` refuses.
    pub fn equip(&self, key: &Path, ways: &[Way]) -> Result<(), Error> {
        let mut args = vec!["context".to_owned(), "set".to_owned(), self.context.clone()];
        args.extend(["--key".to_owned(), key.display().to_string()]);
        for Way { address, port, host } in ways {
            if *port == CURATOR {
                args.extend(["--endpoint".to_owned(), format!("127.0.0.1:{host}")]);
            }
            args.extend(["--via".to_owned(), format!("{address}:{port}=127.0.0.1:{host}")]);
        }
        self.run(&args).map(drop)
    }

    /// Runs `polisctl`; what it printed.
    ///
    /// # Errors
    /// [`Error::Operator`] with what it said where its status is not 0.
    #[expect(
        clippy::disallowed_methods,
        reason = "the rule is for the node; this runs on the host"
    )]
    pub fn run(&self, args: &[impl AsRef<OsStr>]) -> Result<String, Error> {
        let output = Command::new(&self.program)
            .arg("--config")
            .arg(&self.config)
            // A time that is given comes later, and counts.
            .args(["--context", &self.context])
            .args(args)
            .output()
            .map_err(|source| Error::Host { doing: "start polisctl".to_owned(), source })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        let words = args.iter().map(|arg| arg.as_ref().to_string_lossy());
        Err(Error::Operator {
            command: words.collect::<Vec<_>>().join(" "),
            status: output.status.to_string(),
            said: text(&output.stderr),
        })
    }

    /// The same, with the document that it prints for programs.
    ///
    /// # Errors
    /// As [`Operator::run`], or when that is no JSON.
    pub fn document(&self, args: &[&str]) -> Result<Value, Error> {
        let said = self.run(&[args, &["--output", "json"]].concat())?;
        serde_json::from_str(&said).map_err(|error| Error::Operator {
            command: args.join(" "),
            status: format!("no document ({error})"),
            said,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_was_asked_and_what_was_said() {
        let operator = Operator::new(Path::new("ls"), Path::new("/nonexistent"), "x");
        let error = operator.run(&["node", "list"]).unwrap_err().to_string();
        assert!(error.contains("polisctl node list"), "{error}");
        assert!(error.contains("--config"), "{error}");
    }
}
