//! `cargo xtask test`.

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("`cargo xtask test` is not part of this build")
}
