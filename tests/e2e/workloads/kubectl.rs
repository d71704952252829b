//! `kubectl`, as a person uses it beside a machine of a story.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use polis_tests::workspace;

/// `kubectl` with the access that a kubeconfig gives.
pub(super) struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// The program that was built beside the image.
    pub(super) fn new(kubeconfig: PathBuf) -> Self {
        Self { program: workspace().join("target/go/bin/kubectl"), kubeconfig }
    }

    /// Runs it with `input`; returns its output.
    #[expect(
        clippy::disallowed_methods,
        reason = "the rule is for the node; this runs on the host"
    )]
    pub(super) fn run(&self, args: &[&str], input: &str) -> Result<String> {
        let mut child = Command::new(&self.program)
            .arg("--kubeconfig")
            .arg(AsRef::<Path>::as_ref(&self.kubeconfig))
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        let mut stdin = child.stdin.take().context("kubectl has no input")?;
        stdin.write_all(input.as_bytes()).context("kubectl does not read its input")?;
        drop(stdin);
        let output = child.wait_with_output().context("cannot wait for kubectl")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {args:?} ended with {}: {said}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
