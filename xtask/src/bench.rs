//! `cargo xtask bench`.

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("`cargo xtask bench` is not part of this build")
}
