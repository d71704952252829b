//! The first process of the floor: the least that a boot to a working etcd can be.
//!
//! `cargo xtask bench boot` puts it into an initramfs with some modules, etcd and its C
//! library, boots it beside Polis with the same kernel and the same QEMU, and compares. It
//! loads the modules in the order of their names, mounts a disk that has a file system
//! already, starts etcd, polls it until it answers, reports that on the console, and ends
//! the machine in good order, so that the next boot finds a whole disk as Polis does.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use rustix::system::{RebootCommand, finit_module, reboot};

const DISK: &str = "/dev/vda";
const DATA: &str = "/data";
const SOCKET: &str = "/client.sock";

/// The pause between two checks of something that cannot be waited for.
const PAUSE: Duration = Duration::from_millis(5);

/// Every step takes less, on any host on which a measurement makes sense.
const WAIT_MAX: Duration = Duration::from_secs(120);

fn main() {
    let outcome = run();
    if let Err(error) = &outcome {
        say(&format!("POLIS floor-failed cause={:?} t={}", error.to_string(), uptime()));
    }
    rustix::fs::sync();
    // Returns only on failure, and the kernel then panics, which the measurement
    // detects.
    let _never = reboot(RebootCommand::PowerOff);
}

fn run() -> io::Result<()> {
    mount("devtmpfs", "/dev", "devtmpfs", MountFlags::empty(), None)?;
    mount("proc", "/proc", "proc", MountFlags::empty(), None)?;
    mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?;
    start_processors()?;
    let mut modules: Vec<_> =
        fs::read_dir("/modules")?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    modules.sort();
    for module in modules {
        finit_module(File::open(module)?, c"", 0)?;
    }
    until("the disk", || fs::metadata(DISK).is_ok())?;
    mount(DISK, DATA, "xfs", MountFlags::empty(), None)?;

    let mut etcd = start()?;
    until("etcd", || healthy().unwrap_or(false))?;
    say(&format!("POLIS floor t={}", uptime()));

    if let Some(pid) = i32::try_from(etcd.id()).ok().and_then(Pid::from_raw) {
        kill_process(pid, Signal::TERM)?;
    }
    etcd.wait()?;
    unmount(DATA, UnmountFlags::empty())?;
    Ok(())
}

/// The kernel boots on one processor (`polis_qemu::args`).
fn start_processors() -> io::Result<()> {
    for entry in fs::read_dir("/sys/devices/system/cpu")? {
        let online = entry?.path().join("online");
        if fs::read_to_string(&online).is_ok_and(|state| state.trim() == "0") {
            fs::write(online, "1")?;
        }
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this is a test program")]
fn start() -> io::Result<Child> {
    // The same pace as a node's etcd that founds a cluster: a single member is
    // up as soon as its own election timeout has passed.
    Command::new("/etcd")
        .args(["--name", "floor", "--data-dir", "/data/etcd", "--log-outputs", "/dev/null"])
        .args(["--listen-client-urls", &format!("unix://{SOCKET}")])
        .args(["--advertise-client-urls", "unix://floor:0"])
        .args(["--listen-peer-urls", "unix://nobody:0"])
        .args(["--initial-advertise-peer-urls", "https://floor.invalid:1"])
        .args(["--initial-cluster", "floor=https://floor.invalid:1"])
        .args(["--heartbeat-interval", "10", "--election-timeout", "50"])
        .env_clear()
        .env("GODEBUG", "netdns=go")
        .stdin(Stdio::null())
        .spawn()
}

/// Asks etcd over the port that also serves its clients.
fn healthy() -> io::Result<bool> {
    let mut etcd = UnixStream::connect(SOCKET)?;
    etcd.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    etcd.read_to_string(&mut answer)?;
    Ok(answer.contains(r#""health":"true""#))
}

#[expect(clippy::disallowed_methods, reason = "one thread, and nothing to wait on")]
fn until(what: &str, mut there: impl FnMut() -> bool) -> io::Result<()> {
    let start = Instant::now();
    while !there() {
        if start.elapsed() > WAIT_MAX {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("{what} is not there")));
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Seconds since the kernel started.
fn uptime() -> String {
    let text = fs::read_to_string("/proc/uptime").unwrap_or_default();
    text.split(' ').next().unwrap_or("0").to_owned()
}

fn say(line: &str) {
    // Without a console the line is lost.
    let _written = File::options()
        .write(true)
        .open("/dev/console")
        .and_then(|mut console| writeln!(console, "{line}"));
}
