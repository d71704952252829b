//! A config drive, as OpenStack makes it: an ISO 9660 image labelled `config-2`.
//!
//! `xorriso` writes it, with the options that OpenStack gives to `genisoimage`. A writer of the
//! stories' own would only show that the node reads what the same people wrote.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The options of nova, `nova/virt/configdrive.py`: short names with the long ones of Joliet and
/// Rock Ridge beside them.
const OPTIONS: [&str; 11] = [
    "-as",
    "mkisofs",
    "-ldots",
    "-allow-lowercase",
    "-allow-multidot",
    "-l",
    "-quiet",
    "-J",
    "-r",
    "-V",
    "config-2",
];

/// Writes the image of a config drive with this user data.
#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
pub(crate) fn write(image: &Path, user_data: &[u8]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let latest = folder.path().join("openstack/latest");
    fs::create_dir_all(&latest)?;
    fs::write(latest.join("user_data"), user_data)?;
    fs::write(latest.join("meta_data.json"), r#"{"uuid": "story"}"#)?;
    let mut xorriso = Command::new("xorriso");
    xorriso.args(OPTIONS).arg("-o").arg(image).arg(folder.path());
    let made = xorriso.output().context("cannot start xorriso")?;
    ensure!(made.status.success(), "xorriso: {}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}
