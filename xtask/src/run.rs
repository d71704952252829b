//! `cargo xtask run`.

/// Arguments of `cargo xtask run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("`cargo xtask run` is not part of this build")
}
