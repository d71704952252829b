//! The capabilities of the host's QEMU.

use std::fs;
use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::args::Accelerator;

/// The program that every machine runs in.
pub const QEMU: &str = "qemu-system-x86_64";

/// The accelerator that a person asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// KVM where it works, else translation.
    Auto,
    /// KVM, or an error from QEMU.
    Kvm,
    /// Translation.
    Tcg,
}

/// Chooses the accelerator for a machine with `cpus` processors.
#[must_use]
pub fn accelerator(preference: Preference, cpus: u32) -> Accelerator {
    static KVM: OnceLock<bool> = OnceLock::new();
    let kvm = match preference {
        Preference::Kvm => true,
        Preference::Tcg => false,
        Preference::Auto => *KVM.get_or_init(kvm_works),
    };
    match (kvm, cpus) {
        (true, _) => Accelerator::Kvm,
        // Two threads rarely race: see `args`.
        (false, 3..) if version().is_none_or(|version| version < (8, 1)) => Accelerator::TcgSingle,
        (false, _) => Accelerator::Tcg,
    }
}

/// Whether KVM runs guests here. The device alone proves nothing: inside some
/// virtual machines it is there, makes machines, and their guests then hang. So
/// the processor must claim the extension, and QEMU must be able to start with it.
fn kvm_works() -> bool {
    let Ok(cpuinfo) = fs::read_to_string("/proc/cpuinfo") else { return false };
    claims_virtualisation(&cpuinfo) && starts_with_kvm().unwrap_or(false)
}

fn claims_virtualisation(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter_map(|line| line.strip_prefix("flags"));
    flags.any(|flags| flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm"))
}

/// Starts a QEMU without a machine and asks it to quit.
fn starts_with_kvm() -> io::Result<bool> {
    let mut child = command()
        .args(["-accel", "kvm", "-machine", "none", "-nodefaults", "-display", "none"])
        .args(["-qmp", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // Fails if QEMU has already ended; the status below covers that.
        let _sent = stdin.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"quit\"}\n");
    }
    Ok(child.wait()?.success())
}

/// A free port of the loopback interface.
///
/// # Errors
/// When all ports are in use.
pub fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Major and minor version of QEMU, or `None` if it cannot be asked.
#[must_use]
pub fn version() -> Option<(u32, u32)> {
    static VERSION: OnceLock<Option<(u32, u32)>> = OnceLock::new();
    *VERSION.get_or_init(|| parse_version(&output(&["--version"]).ok()?))
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let number = text.lines().next()?.split_once("version ")?.1.split_whitespace().next()?;
    let mut parts = number.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Whether this QEMU has the device `name`.
#[must_use]
pub fn has_device(name: &str) -> bool {
    static DEVICES: OnceLock<String> = OnceLock::new();
    let devices = DEVICES.get_or_init(|| output(&["-device", "help"]).unwrap_or_default());
    devices.contains(&format!("name \"{name}\""))
}

fn output(args: &[&str]) -> io::Result<String> {
    let output = command().args(args).stdin(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
fn command() -> Command {
    Command::new(QEMU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_distributions_are_read() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright";
        assert_eq!(parse_version(debian), Some((7, 2)));
        assert_eq!(parse_version("QEMU emulator version 10.0.13"), Some((10, 0)));
        assert_eq!(parse_version(""), None);
    }

    #[test]
    fn only_a_flag_of_its_own_claims_virtualisation() {
        assert!(claims_virtualisation("model name: x\nflags\t\t: fpu vmx sse\n"));
        assert!(claims_virtualisation("flags: svm\n"));
        assert!(!claims_virtualisation("flags: fpu vmx_thing\nbugs: svm\n"));
    }
}
