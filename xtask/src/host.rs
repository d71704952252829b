//! Host requirements: checks for the programs that a command needs, and installs missing
//! ones.
//!
//! A fresh machine has Rust, apt and little more. Each command names its needs as
//! [`Need`]s; as root, missing packages are installed by apt, with a message; else the
//! command fails and prints the line to run.
//!
//! Invariants:
//! - A package is installed only when the program that it provides is missing: a host may
//!   have the program from another suite, which apt would refuse to mix.
//!
//! What this module does not do: install Rust, or anything for the image
//! (`polis_image` unpacks that in a folder of its own).

use std::{
    env,
    ffi::OsStr,
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

/// The help of an error. Attach it with `.context(Help(..))`.
#[derive(Debug)]
pub(crate) struct Help(pub(crate) String);

impl fmt::Display for Help {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Wrong usage that clap cannot detect: the command exits with status 2.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// A wait that ran out of time: the command exits with status 3.
#[derive(Debug)]
pub(crate) struct Late(pub(crate) String);

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Late {}

/// A requirement of the host, and the package that provides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// A program looked for on `PATH` (and where administrators' programs
    /// are), or an absolute path of a file.
    pub(crate) what: &'static str,
    /// The Debian package that provides it.
    pub(crate) package: &'static str,
}

/// Requirements of a build: a protocol buffer compiler and the well-known types, which are
/// a separate package.
pub(crate) const BUILD: &[Need] = &[
    Need { what: "cc", package: "gcc" },
    Need { what: "strip", package: "binutils" },
    Need { what: "/usr/lib/x86_64-linux-gnu/libc.a", package: "libc6-dev" },
    Need { what: "protoc", package: "protobuf-compiler" },
    Need { what: "/usr/include/google/protobuf/descriptor.proto", package: "libprotobuf-dev" },
];

/// Requirements of fetching, verifying and unpacking the payload.
pub(crate) const PAYLOAD: &[Need] = &[
    Need { what: "apt-get", package: "apt" },
    Need { what: "dpkg-deb", package: "dpkg" },
    Need {
        what: "/usr/share/keyrings/debian-archive-keyring.gpg",
        package: "debian-archive-keyring",
    },
];

/// Requirements of writing or converting qcow2 files.
pub(crate) const QEMU_IMG: &[Need] = &[Need { what: "qemu-img", package: "qemu-utils" }];

/// Requirements of an emulated TPM.
pub(crate) const TPM: &[Need] = &[Need { what: polis_qemu::tpm::SWTPM, package: "swtpm" }];

/// Requirements of a config drive, which is an ISO 9660 image.
pub(crate) const ISO: &[Need] = &[Need { what: "xorriso", package: "xorriso" }];

/// Checks that the memory of the machines, in MiB, fits into this host: otherwise the kernel kills
/// one of them during its boot without an explanation.
///
/// # Errors
///
/// They do not fit.
pub(crate) fn require_memory(machines: &[u32]) -> Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    fits(&text, machines)
}

fn fits(meminfo: &str, machines: &[u32]) -> Result<()> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    // Without a figure from the host, the run continues.
    let Some(free) = free.map(|kibibytes| kibibytes / 1024) else { return Ok(()) };
    let wanted: u64 = machines.iter().copied().map(u64::from).sum();
    if wanted <= free {
        return Ok(());
    }
    let shares: Vec<_> = machines.iter().map(u32::to_string).collect();
    let nodes = if machines.len() == 1 { "node needs" } else { "nodes need" };
    Err(anyhow::anyhow!(
        "{} {nodes} {} MiB of memory, and this host has {free} MiB left",
        machines.len(),
        shares.join(" + "),
    ))
    .context(Help("reduce --memory, stop other programs, or run fewer nodes".to_owned()))
}

/// Checks that the file system of `folder` has `wanted` bytes left for `what`, without which
/// no result of it would mean anything.
///
/// # Errors
///
/// It has less.
pub(crate) fn require_space(folder: &Path, wanted: u64, what: &str) -> Result<()> {
    // Without a figure from the host, the run continues.
    let Some(free) = free_space(folder).filter(|free| *free < wanted) else { return Ok(()) };
    Err(anyhow::anyhow!(
        "{what} needs {} MiB, and {} has {} MiB left",
        wanted >> 20,
        folder.display(),
        free >> 20
    ))
    .context(Help("make room there, for example by `cargo clean`".to_owned()))
}

fn free_space(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// A warning where the file system of `folder` has less free space than `wanted` bytes, which
/// `what` may take.
pub(crate) fn short_of_space(folder: &Path, wanted: u64, what: &str) -> Option<String> {
    let free = free_space(folder)?;
    (free < wanted).then(|| {
        format!(
            "{what} takes up to {} GiB, and {} has {} GiB left: make room, or it may end with \
             \"No space left on device\"",
            wanted >> 30,
            folder.display(),
            free >> 30
        )
    })
}

/// Folders of programs that are not on every user's `PATH`.
const ADMIN_PATHS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// Checks that every need of `groups` is met, and installs what is missing.
///
/// # Errors
///
/// A package is missing and may not be, or could not be, installed.
pub(crate) fn require(groups: &[&[Need]]) -> Result<()> {
    let packages = missing(groups, |need| find(need.what).is_some());
    if packages.is_empty() {
        return Ok(());
    }
    let line = format!("apt-get install --yes --no-install-recommends {}", packages.join(" "));
    if !rustix::process::geteuid().is_root() || find("apt-get").is_none() {
        return Err(anyhow::anyhow!("this host lacks {}", packages.join(", ")))
            .context(Help(as_another_user(&line)));
    }
    eprintln!("host: installing {} ({line})", packages.join(" "));
    // Absent or old package lists make the first attempt fail; a second attempt with fresh
    // lists is cheaper than refreshing them each time.
    if apt(&install(&packages)).is_err() {
        apt(&["update".to_owned()]).and_then(|()| apt(&install(&packages))).context(Help(
            format!("apt could not install the missing packages; see its output, then run: {line}"),
        ))?;
    }
    let left = missing(groups, |need| find(need.what).is_some());
    anyhow::ensure!(left.is_empty(), "apt installed {}, but it is still missing", left.join(" "));
    Ok(())
}

/// The one line that a user pastes who may not install packages. It renews the package lists: a
/// fresh machine has none.
fn as_another_user(line: &str) -> String {
    format!("run: sudo apt-get update && sudo {line}")
}

/// The missing packages, each once, in the order of the needs.
fn missing(groups: &[&[Need]], met: impl Fn(&Need) -> bool) -> Vec<&'static str> {
    let mut packages: Vec<&'static str> = Vec::new();
    for need in groups.iter().copied().flatten() {
        if !met(need) && !packages.contains(&need.package) {
            packages.push(need.package);
        }
    }
    packages
}

/// Finds a program, or the file when `what` is an absolute path.
pub(crate) fn find(what: &str) -> Option<PathBuf> {
    if what.starts_with('/') {
        return Path::new(what).exists().then(|| PathBuf::from(what));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(ADMIN_PATHS.iter().map(PathBuf::from))
        .map(|directory| directory.join(what))
        .find(|candidate| candidate.is_file())
}

fn install(packages: &[&str]) -> Vec<String> {
    ["install", "--yes", "--no-install-recommends"]
        .iter()
        .chain(packages)
        .map(|argument| (*argument).to_owned())
        .collect()
}

fn apt(arguments: &[impl AsRef<OsStr>]) -> Result<()> {
    let status = Command::new("apt-get")
        .arg("--quiet=2")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .context("cannot start apt-get")?;
    anyhow::ensure!(status.success(), "apt-get ended with {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_names_a_disk_that_is_short_of_space() {
        let folder = std::env::temp_dir();
        assert_eq!(short_of_space(&folder, 0, "nothing"), None);
        require_space(&folder, 0, "nothing").unwrap();
        let error = require_space(&folder, u64::MAX, "level e2e").unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains("level e2e needs ") && said.contains(" MiB left"), "{said}");
        let warning = short_of_space(&folder, u64::MAX, "everything").unwrap();
        assert!(warning.starts_with("everything takes up to 17179869183 GiB, and /"), "{warning}");
        assert_eq!(short_of_space(Path::new("/no/such/folder"), 1, "it"), None);
    }

    #[test]
    fn machines_that_do_not_fit_into_the_host_are_refused_with_the_sums() {
        let meminfo = "MemTotal: 9999999 kB\nMemAvailable:    2097152 kB\n";
        assert!(fits(meminfo, &[512; 4]).is_ok());
        let error = format!("{:#}", fits(meminfo, &[1024, 512, 1024]).unwrap_err());
        assert!(error.contains("3 nodes need 1024 + 512 + 1024 MiB of memory"), "{error}");
        assert!(error.contains("2048 MiB left"), "{error}");
        assert!(fits("", &[99_999; 99]).is_ok());
    }

    const NEEDS: &[Need] = &[
        Need { what: "one", package: "first" },
        Need { what: "two", package: "second" },
        Need { what: "three", package: "first" },
    ];

    #[test]
    fn a_package_is_asked_for_only_when_something_of_it_is_missing() {
        assert_eq!(missing(&[NEEDS], |need| need.what != "three"), ["first"]);
        assert!(missing(&[NEEDS], |_| true).is_empty());
    }

    #[test]
    fn the_line_to_paste_works_on_a_host_without_package_lists() {
        let line = as_another_user("apt-get install --yes swtpm");
        assert_eq!(line, "run: sudo apt-get update && sudo apt-get install --yes swtpm");
    }

    #[test]
    fn a_package_is_named_once_however_many_needs_it_meets() {
        assert_eq!(missing(&[NEEDS, NEEDS], |_| false), ["first", "second"]);
    }

    #[test]
    fn an_absolute_need_is_a_file_and_no_program() {
        assert!(find("/proc/self/exe").is_some());
        assert!(find("/no/such/file").is_none());
    }
}
