//! Acts that a confined program must not do, for tests of each confinement in the crate that
//! makes it: a child tries them, which is the test's own program, started again with the name of
//! an act in its environment.
//!
//! Every act is shown to pass where the confinement is not there.
#![expect(clippy::unwrap_used, reason = "a helper of tests panics as a test does")]
#![expect(clippy::print_stdout, reason = "a test says what this host keeps it from")]

use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use polis_base::files::Root;
use rustix::net::{AddressFamily, SocketType, ipproto};

use super::confine::{Confinement, has_landlock};
use super::process::Command;

/// Names the act for the child.
const ACT: &str = "POLIS_CONFINED_ACT";
/// The file or directory that the act is about; files for `readable`, with colons between them.
const PLACE: &str = "POLIS_CONFINED_PLACE";
/// The acts that no program of the node needs; chronyd alone sets the clock.
pub const ACTS: [&str; 9] =
    ["mount", "ptrace", "kexec", "unshare", "module", "keyring", "clock", "raw", "packet"];
/// Flags that no kernel knows.
const WRONG_FLAGS: libc::c_long = 0x7ff0;
/// Stands before the result in the child's output.
const DONE: &str = "act:";

/// Does the act that the environment names, if it names one, as the child of a test. Each binary
/// with such tests has a test that calls it.
pub fn child() {
    let Ok(act) = std::env::var(ACT) else { return };
    let place = std::env::var(PLACE).unwrap_or_default();
    let ended = match act.as_str() {
        "mount" => mount(),
        // Of a process that does not exist: the end of a traced child wakes no pidfd, and the
        // test would wait for it without end.
        "ptrace" => call(libc::SYS_ptrace, [libc::c_long::from(libc::PTRACE_DETACH), 0, 0]),
        // Flags that no kernel knows: it refuses them after it has checked the right.
        "kexec" => call(libc::SYS_kexec_load, [0, 0, 0]),
        "unshare" => call(libc::SYS_unshare, [libc::c_long::from(libc::CLONE_NEWUTS), 0, 0]),
        "module" => call(libc::SYS_delete_module, [0, 0, 0]),
        "keyring" => call(libc::SYS_keyctl, [0, 0, 0]),
        "clock" => call(libc::SYS_clock_settime, [-1, 0, 0]),
        "raw" => socket(AddressFamily::INET, SocketType::RAW),
        "packet" => socket(AddressFamily::PACKET, SocketType::DGRAM),
        "stream" => socket(AddressFamily::INET, SocketType::STREAM),
        "open" => done(fs::read(&place).map(drop)),
        "readable" => {
            let readable = place.split(':').filter(|path| fs::File::open(path).is_ok());
            readable.collect::<Vec<_>>().join(":")
        }
        "connect" => done(UnixStream::connect(&place).map(drop)),
        "write" => done(fs::write(format!("{place}/new"), "new")),
        unknown => format!("no act is called {unknown}"),
    };
    std::io::stdout().write_all(format!("\n{DONE}{ended}\n").as_bytes()).unwrap();
}

fn done(ended: std::io::Result<()>) -> String {
    match ended {
        Ok(()) => "done".to_owned(),
        Err(error) => match error.raw_os_error() {
            Some(libc::EPERM) => "EPERM".to_owned(),
            Some(libc::EACCES) => "EACCES".to_owned(),
            _ => error.to_string(),
        },
    }
}

fn mount() -> String {
    let flags = rustix::mount::MountFlags::empty();
    done(rustix::mount::mount("none", "/no/such/place", "tmpfs", flags, None).map_err(Into::into))
}

fn socket(family: AddressFamily, kind: SocketType) -> String {
    let protocol = (kind == SocketType::RAW).then_some(ipproto::ICMP);
    done(rustix::net::socket(family, kind, protocol).map(drop).map_err(Into::into))
}

#[expect(unsafe_code, reason = "no crate has these calls, since no program should need them")]
fn call(number: libc::c_long, arguments: [libc::c_long; 3]) -> String {
    let [one, two, three] = arguments;
    // SAFETY: every call here is one that the kernel refuses before it reads memory, or that
    // takes numbers only; a null pointer is refused with EFAULT.
    let ended = unsafe { libc::syscall(number, one, two, three, WRONG_FLAGS) };
    done(if ended == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) })
}

/// The result of an act of a child: `done`, the name of the error, or its text. `test` is the
/// whole name of the test that calls [`child`].
pub async fn attempt(
    test: &str,
    act: &str,
    place: &Path,
    confinement: Option<Confinement>,
) -> String {
    // By this name, a user can run it who may not pass through the directories before it.
    let mut command = Command::new("/proc/self/exe")
        .args(["--exact", test, "--nocapture"])
        .args(["--test-threads", "1"])
        .env(ACT, act)
        .env(PLACE, place);
    if let Some(confinement) = confinement {
        command = command.confined(confinement);
    }
    let output = String::from_utf8(command.run().await.unwrap()).unwrap();
    let (_, ended) = output.split_once(DONE).unwrap_or_else(|| panic!("{output}"));
    ended.lines().next().unwrap().to_owned()
}

/// Those of the files that a program with this confinement can open for reading.
pub async fn readable(test: &str, confinement: &Confinement, files: &[PathBuf]) -> Vec<PathBuf> {
    let place = std::env::join_paths(files).unwrap();
    let found = attempt(test, "readable", place.as_ref(), Some(confinement.clone())).await;
    found.split(':').filter(|path| !path.is_empty()).map(PathBuf::from).collect()
}

/// Checks that a program with this confinement can do none of the [`ACTS`] but those that it
/// `may`, and cannot read the key of the node below `root`, where one is made for the test.
///
/// # Panics
///
/// When it can.
pub async fn keeps_from_all(test: &str, confinement: &Confinement, may: &[&str], root: &Root) {
    root.create().unwrap();
    let key = &root.data.node.credentials.key;
    key.write(b"key").unwrap();
    let key = key.path();
    let confined = |act, place| attempt(test, act, place, Some(confinement.clone()));
    for act in ACTS {
        let free = attempt(test, act, Path::new(""), None).await;
        let ended = confined(act, Path::new("")).await;
        if may.contains(&act) {
            assert_eq!(ended, free, "{act}, which it may do");
        } else {
            assert_eq!(ended, "EPERM", "{act}, which ends with {free} without the confinement");
            if free == "EPERM" {
                println!("shows nothing: this host keeps every program from {act}");
            }
        }
    }
    assert_eq!(attempt(test, "open", key, None).await, "done");
    if has_landlock() {
        assert_eq!(confined("open", key).await, "EACCES", "the node's key");
    } else {
        println!("not tested: this kernel has no Landlock, which keeps root from the node's key");
    }
}
