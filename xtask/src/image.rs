//! `cargo xtask image`: builds the disk image, or looks into one.

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    crate::host::require(&[crate::host::PAYLOAD, crate::host::BUILD, crate::host::QEMU_IMG])?;
    println!("nothing to do");
    Ok(())
}
