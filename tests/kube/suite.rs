//! The command of the stories that run conformance tests: `cargo xtask conformance`, which
//! names itself in their environment, with its arguments.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// The command and its arguments but for the kubeconfig, as a list in JSON.
pub(crate) const COMMAND: &str = "POLIS_CONFORMANCE";

/// The command that runs the tests against the cluster of this kubeconfig; `list` is the value
/// of [`COMMAND`].
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
pub(crate) fn command(list: &str, kubeconfig: &Path) -> Result<Command> {
    let list: Vec<String> = serde_json::from_str(list).context(COMMAND)?;
    let [program, name, rest @ ..] = &list[..] else {
        bail!("{COMMAND} names no command: {list:?}");
    };
    let mut command = Command::new(program);
    // Before the rest, which may end with a filter.
    command.arg(name).arg("--kubeconfig").arg(kubeconfig).args(rest);
    Ok(command)
}
