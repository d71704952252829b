//! The health of the data partition: notices in the kernel's log that it fails or is full.
//!
//! The service runs [`watch`] while the partition is mounted. The console shows [`Health`]; the
//! log and the serial line report each change of it.
//!
//! ```text
//! kernel's messages --> ours? --does not read--------> failing (reported, forgotten
//!                         |                            when nothing follows)
//!                         +--does not write, or the
//!                            file system shut down---> end: only a mount mends that
//! free space --------------------< 32 MiB-----------> full, until there is more
//! requests or a flush without
//!                  an answer-----15 s---------------> stalled, until it answers
//!                                600 s--------------> end: nothing is written any more
//! ```
//!
//! A failed write ends it, although programs get an error for it, too: once the kernel has
//! reported the error, it takes its copy in memory for written. A program that reads then sees
//! data that is not on the disk, continues, and loses its later writes with the next power cut.
//! A boot reads what is on the disk.
//!
//! What this module does not do: react. A program whose read or write fails gets an error from
//! the kernel, and dies of it if it must; the supervisor starts it again.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use tokio::io::Interest;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::stall;
use polis_base::serial::EventLine;
use polis_base::sys::clock;
use polis_base::sys::kmsg::{From, Reader, Record};
use polis_runtime::supervisor::Context;
use polis_runtime::sys::readiness;

/// With less free space than this, the next write of a service may fail.
const FULL: u64 = 32 << 20;
/// With more than this there is room again: the gap keeps one write from changing
/// it to and fro.
const ROOM: u64 = 48 << 20;

/// How often the free space and the requests are looked at.
const PACE: Duration = Duration::from_secs(1);

/// Where the kernel shows disks, and where their devices are.
const SYS: &str = "/sys";
const DEV: &str = "/dev";

/// Levels of the kernel's messages; a lower one is more severe.
const ERROR: u8 = 3;
const WARNING: u8 = 4;

/// An error of the disk is dropped when no other follows for so long.
const MEMORY: Duration = Duration::from_secs(60);

/// How the data partition does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The free space, when there is too little.
    pub full: Option<u64>,
    /// The newest error of the disk, when there was one lately.
    pub fault: Option<Fault>,
    /// When the disk has not answered for too long.
    pub stalled: Option<Stalled>,
}

/// A disk that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stalled {
    /// Since when, by the uptime.
    pub since: Duration,
    /// After how long the node stops.
    pub deadline: Duration,
}

impl Health {
    /// The warnings of the console.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let full = self.full.map(|free| {
            format!("the data partition is full: {} MiB are left; delete something", free >> 20)
        });
        let stalled = self.stalled.map(|Stalled { deadline, .. }| {
            format!(
                "the disk does not answer: check it and its cable; the node stops after {} s",
                deadline.as_secs()
            )
        });
        full.into_iter()
            .chain(self.fault.as_ref().map(ToString::to_string))
            .chain(stalled)
            .collect()
    }
}

/// A message of the kernel about a device of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Its kind.
    pub what: What,
    /// The partition, or the device as the kernel calls it.
    pub device: String,
    /// Where, in units of 512 bytes.
    pub sector: Option<u64>,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Somebody or something changed the written data.
    Changed,
    /// The disk does not read.
    Read,
    /// The disk does not write: a write that was acknowledged may be missing.
    Write,
    /// XFS found something that it never wrote.
    Corrupt,
    /// XFS has given up.
    ShutDown,
    /// The disk has requests, and ends none.
    Hung,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.what {
            What::Changed => "written data was changed",
            What::Read => "the disk fails reads",
            What::Write => "the disk fails writes",
            What::Corrupt => "the file system is damaged",
            What::ShutDown => "the file system was shut down",
            What::Hung => "the disk does not answer",
        };
        write!(f, "{what}: device {}", self.device)?;
        match self.sector {
            Some(sector) => write!(f, ", sector {sector}"),
            None => Ok(()),
        }
    }
}

/// The devices whose messages count.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The disk whose errors count, as the kernel calls it: `vda`.
    pub disk: String,
    /// The device whose requests are counted: the disk, or that of a mirror.
    pub counted: String,
    /// The data partition: `/dev/vda4`.
    pub partition: String,
    /// The mounted devices, by their names in the kernel: `vda4`, `dm-2`.
    pub mounted: String,
    /// The integrity device below the mounted one, for the kind that has it: `dm-1`.
    pub integrity: String,
}

/// Reads one message of the kernel.
#[must_use]
pub fn read(message: &str, devices: &Devices) -> Option<Fault> {
    let sector = || {
        let after = &message[message.find("sector ")? + "sector ".len()..];
        after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let fault = |what, device: &str| Fault { what, device: device.to_owned(), sector: sector() };
    // The kernel names the device by its number only, that of either layer.
    if let Some((_, rest)) = message.split_once("device-mapper: crypt: ")
        && rest.contains("INTEGRITY AEAD ERROR")
    {
        let name = rest.split(':').next();
        let ours = [&devices.mounted, &devices.integrity].into_iter().any(|it| name == Some(it));
        return ours.then(|| fault(What::Changed, &devices.partition));
    }
    let mounted = format!("XFS ({})", devices.mounted);
    if message.starts_with(&mounted) {
        if message.contains("shut down") || message.contains("Shutting down") {
            return Some(fault(What::ShutDown, &devices.partition));
        }
        let corrupt = message.contains("orruption") || message.contains("Metadata CRC error");
        return corrupt.then(|| fault(What::Corrupt, &devices.partition));
    }
    let (status, rest) = message.split_once(" error, dev ")?;
    let (name, _place) = rest.split_once(", sector ")?;
    // Other messages have names that processes choose, before or after text of the kernel.
    let is_status = status.chars().all(|c| c.is_ascii_alphabetic() || matches!(c, ' ' | '/'));
    if !is_status || !is_of(name, &devices.disk) {
        return None;
    }
    failed(status, rest).map(|what| fault(what, name))
}

/// The meaning of a failed request. The kernel (`blk_print_req_error`) writes its status
/// before the device, and the operation behind it: `op 0x1:(WRITE)`.
fn failed(status: &str, rest: &str) -> Option<What> {
    let operation = rest.split_once(":(").and_then(|(_, rest)| rest.split(')').next());
    // A disk that lacks the command: the kernel writes zeros in its place.
    let lacks = ["critical target", "operation not supported"].contains(&status);
    match operation {
        Some("READ") => Some(What::Read),
        // Nothing was to be kept there.
        Some("DISCARD" | "SECURE_ERASE") => None,
        Some("WRITE_ZEROES") if lacks => None,
        // Every other operation changes something, one that is not known possibly.
        Some(_) | None => Some(What::Write),
    }
}

/// Whether `name` is `disk` or a partition of it, as the kernel calls them: `sda4` is of `sda`,
/// `nvme0n1p4` of `nvme0n1`, and neither `sdaa` nor `nvme0n10` is.
fn is_of(name: &str, disk: &str) -> bool {
    if led_to(name).as_deref() == Some(disk) {
        return true;
    }
    let Some(rest) = name.strip_prefix(disk) else { return false };
    // The number follows a `p` where the name of the disk ends with a digit itself.
    let ends_with_digit = disk.ends_with(|last: char| last.is_ascii_digit());
    let number = if ends_with_digit { rest.strip_prefix('p') } else { Some(rest) };
    rest.is_empty() || number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The disk that a path leads to. An NVMe disk that may have several paths has a hidden device for
/// each, and the kernel logs errors by its name: `nvme0c1n1` leads to `nvme0n1`.
fn led_to(path: &str) -> Option<String> {
    let (subsystem, rest) = path.strip_prefix("nvme")?.split_once('c')?;
    let (controller, namespace) = rest.split_once('n')?;
    let numbers = [subsystem, controller, namespace];
    let are_numbers = numbers.iter().all(|number| number.parse::<u32>().is_ok());
    are_numbers.then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Reads one record of the kernel's log; those that processes wrote do not count, nor do less
/// severe ones. A process can make the kernel log its name, and that of its program, as information
/// or as a warning: the text of an error in such a name must not end the node.
pub(crate) fn of(record: &Record, devices: &Devices) -> Option<Fault> {
    let fault = (record.facility == 0).then(|| read(&record.text, devices)).flatten()?;
    let least = match fault.what {
        // XFS logs some of it as a warning, and goes on.
        What::Corrupt => WARNING,
        What::Changed | What::Read | What::Write | What::ShutDown | What::Hung => ERROR,
    };
    (record.level <= least).then_some(fault)
}

/// The newest fault that the kernel has logged since it started, for the cause of a failure.
/// Blocks.
#[must_use]
pub fn newest(devices: &Devices) -> Option<Fault> {
    let mut log = Reader::open(From::Start).ok()?;
    let mut newest = None;
    while let Ok(Some(record)) = log.next_record() {
        newest = of(&record, devices).or(newest);
    }
    newest
}

/// Watches until the partition cannot be trusted with another write, and returns the reason. A
/// disk that answers nothing for `hung` cannot.
/// Cancel-safe.
///
/// # Errors
///
/// The kernel's log cannot be read.
pub async fn watch(
    ctx: &Context,
    health: &watch::Sender<Health>,
    devices: &Devices,
    mount: &Path,
    hung: Duration,
) -> std::io::Result<Fault> {
    let mut log = Reader::open(From::Now)?;
    let watched = readiness::watch(&log, Interest::READABLE)?;
    let mut tick = tokio::time::interval(PACE);
    let mut last: Option<(Instant, Fault)> = None;
    let device = Path::new(DEV).join(&devices.counted);
    let mut disk = stall::Watched::of(Path::new(SYS), &device);
    let mut free = None;
    loop {
        tokio::select! {
            // Cancel-safe: only waits.
            _now = tick.tick() => {}
            // Cancel-safe: only waits.
            ready = watched.readable() => {
                let mut ready = ready?;
                while let Some(record) = log.next_record()? {
                    let Some(fault) = of(&record, devices) else { continue };
                    match fault.what {
                        What::Write => return Ok(fault),
                        // The earlier fault says more than this end.
                        What::ShutDown => return Ok(last.map_or(fault, |(_, cause)| cause)),
                        What::Changed | What::Read | What::Corrupt | What::Hung => {
                            last = Some((Instant::now(), fault));
                        }
                    }
                }
                ready.clear_ready();
            }
        }
        last = last.filter(|(at, _)| at.elapsed() < MEMORY);
        let now = clock::uptime();
        let waits = disk.look(now).map(|since| (since, now.saturating_sub(since)));
        if waits.is_some_and(|(_, time)| time >= hung) {
            return Ok(Fault { what: What::Hung, device: devices.counted.clone(), sector: None });
        }
        let stalled = waits.filter(|(_, time)| *time >= stall::SLOW);
        let stalled = stalled.map(|(since, _)| Stalled { since, deadline: hung });
        // The file system may wait for the disk to answer this.
        if waits.is_none_or(|(_, time)| time < PACE) {
            let mount = mount.to_owned();
            let looked = tokio::task::spawn_blocking(move || {
                rustix::fs::statvfs(&mount).map(|stat| stat.f_bavail * stat.f_frsize)
            });
            if let Ok(looked) = tokio::time::timeout(PACE, looked).await {
                free = looked.ok().and_then(Result::ok);
            }
        }
        let was = health.borrow().clone();
        let limit = if was.full.is_some() { ROOM } else { FULL };
        let full = free.filter(|free| *free < limit);
        let fault = last.as_ref().map(|(_, fault)| fault.clone());
        let now = Health { full, fault, stalled };
        log_change(ctx, &was, &now);
        health.send_if_modified(|health| {
            let new = *health != now;
            health.clone_from(&now);
            new
        });
    }
}

fn log_change(ctx: &Context, was: &Health, now: &Health) {
    let line = |state: &str| EventLine::new("storage").field("state", state);
    match (was.full, now.full) {
        (None, Some(free)) => {
            let mib = free >> 20;
            error!(mib, "the data partition is full: writes fail until something is deleted");
            ctx.lines().event(line("full").field("free", free));
        }
        (Some(_), None) => {
            info!("the data partition has free space again");
            ctx.lines().event(line("room"));
        }
        (None, None) | (Some(_), Some(_)) => {}
    }
    match (was.stalled, now.stalled) {
        (None, Some(_)) => {
            let seconds = stall::SLOW.as_secs();
            error!(seconds, "the disk does not answer: no request and no flush of it has ended");
            ctx.lines().event(line("stalled").field("seconds", seconds));
        }
        (Some(Stalled { since, .. }), None) => {
            let seconds = clock::uptime().saturating_sub(since).as_secs();
            warn!(seconds, "the disk answers again");
            ctx.lines().event(line("answers").field("seconds", seconds));
        }
        (None, None) | (Some(_), Some(_)) => {}
    }
    match (&was.fault, &now.fault) {
        (was, Some(fault)) if was.as_ref() != Some(fault) => {
            error!("{fault}");
            let reported = line("failing").field("cause", fault).field("device", &fault.device);
            ctx.lines().event(match fault.sector {
                Some(sector) => reported.field("sector", sector),
                None => reported,
            });
        }
        (Some(_), None) => {
            warn!("no further error of the disk in a minute");
            ctx.lines().event(line("quiet"));
        }
        (_, Some(_)) | (None, None) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Devices {
        Devices {
            disk: "vda".to_owned(),
            counted: "vda".to_owned(),
            partition: "/dev/vda3".to_owned(),
            mounted: "dm-2".to_owned(),
            integrity: "dm-1".to_owned(),
        }
    }

    fn reported(message: &str) -> Option<String> {
        read(message, &devices()).map(|fault| fault.to_string())
    }

    #[test]
    fn a_tampered_block_is_named_by_device_and_sector() {
        assert_eq!(
            reported(
                "trusted_key: device-mapper: crypt: dm-1: INTEGRITY AEAD ERROR, sector 1024328"
            )
            .as_deref(),
            Some("written data was changed: device /dev/vda3, sector 1024328")
        );
    }

    #[test]
    fn an_error_of_our_disk_counts_and_one_of_another_does_not() {
        let message = |disk| {
            format!("I/O error, dev {disk}, sector 2048 op 0x1:(WRITE) flags 0x800 phys_seg 1")
        };
        assert_eq!(
            reported(&message("vda")).as_deref(),
            Some("the disk fails writes: device vda, sector 2048")
        );
        assert_eq!(reported(&message("sdb")), None);
        assert_eq!(
            reported("critical medium error, dev vda, sector 7 op 0x0:(READ)").as_deref(),
            Some("the disk fails reads: device vda, sector 7")
        );
    }

    #[test]
    fn a_disk_whose_name_begins_like_ours_is_another() {
        let of = |disk: &str, name| {
            let devices = Devices { disk: disk.to_owned(), ..devices() };
            let message = format!("I/O error, dev {name}, sector 8 op 0x1:(WRITE) flags 0x800");
            read(&message, &devices).map(|fault| fault.device)
        };
        for (disk, name) in [("sda", "sdaa"), ("sda", "sdb"), ("nvme0n1", "nvme0n10")] {
            assert_eq!(of(disk, name), None, "{name} is not {disk}");
        }
        let ours = [("sda", "sda"), ("sda", "sda4"), ("nvme0n1", "nvme0n1"), ("vda", "vda12")];
        for (disk, name) in ours.into_iter().chain([("nvme0n1", "nvme0n1p4")]) {
            assert_eq!(of(disk, name).as_deref(), Some(name), "{name} is of {disk}");
        }
    }

    #[test]
    fn an_error_of_a_path_to_our_disk_is_one_of_the_disk() {
        let devices = Devices { disk: "nvme0n1".to_owned(), ..devices() };
        let of = |name: &str| {
            let message = format!("I/O error, dev {name}, sector 8 op 0x1:(WRITE) flags 0x800");
            read(&message, &devices).map(|fault| fault.what)
        };
        for path in ["nvme0c0n1", "nvme0c12n1"] {
            assert_eq!(of(path), Some(What::Write), "{path}");
        }
        for other in ["nvme1c0n1", "nvme0c0n2", "nvme0c0n12", "nvme0cn1", "nvme0c0n", "nvmec0n1"] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn only_an_operation_that_loses_data_is_a_lost_write() {
        let what = |status, operation| {
            let message =
                format!("{status} error, dev vda, sector 8 op {operation} flags 0x800 phys_seg 1");
            read(&message, &devices()).map(|fault| fault.what)
        };
        for (status, operation) in [
            ("I/O", "0x3:(DISCARD)"),
            ("critical target", "0x3:(DISCARD)"),
            ("I/O", "0x5:(SECURE_ERASE)"),
            ("critical target", "0x9:(WRITE_ZEROES)"),
            ("operation not supported", "0x9:(WRITE_ZEROES)"),
        ] {
            assert_eq!(what(status, operation), None, "{status} {operation}");
        }
        for (status, operation) in [
            ("I/O", "0x1:(WRITE)"),
            ("critical target", "0x1:(WRITE)"),
            ("I/O", "0x2:(FLUSH)"),
            ("I/O", "0x9:(WRITE_ZEROES)"),
            ("timeout", "0x7:(ZONE_APPEND)"),
            ("I/O", "0x63:(UNKNOWN)"),
        ] {
            assert_eq!(what(status, operation), Some(What::Write), "{status} {operation}");
        }
        assert_eq!(what("critical medium", "0x0:(READ)"), Some(What::Read));
    }

    #[test]
    fn a_line_that_a_process_wrote_to_the_kernel_s_log_does_not_count() {
        let text = "I/O error, dev vda, sector 8 op 0x1:(WRITE) flags 0x800".to_owned();
        let kernel =
            Record { level: 3, facility: 0, sequence: 1, time: Duration::from_secs(1), text };
        assert_eq!(of(&kernel, &devices()).unwrap().what, What::Write);
        assert_eq!(of(&Record { facility: 1, ..kernel }, &devices()), None);
    }

    #[test]
    fn a_name_that_a_process_chose_ends_no_node() {
        let of = |level, text: &str| {
            let (facility, sequence, time) = (0, 1, Duration::from_secs(1));
            of(&Record { level, facility, sequence, time, text: text.to_owned() }, &devices())
        };
        // The kernel logs the name of a process, of 15 bytes, and of the file of its program.
        for (level, text) in [
            (6, "oom-kill:constraint=CONSTRAINT_MEMCG,task= error, dev vda,pid=7,uid=0"),
            (4, " error, dev vda invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
            (3, "CPU: 1 PID: 7 Comm:  error, dev vda Not tainted 6.12"),
            (4, "process '/I/O error, dev vda, sector 8 op 0x1:(WRITE)' started with"),
            (3, "process '/I/O error, dev vda, sector 8 op 0x1:(WRITE)' started with"),
            (6, "XFS (dm-2): a[7]: segfault at 0 ip 0 sp 0 error 4 in shut down[1000,1000]"),
            (6, "XFS (dm-2): a[7]: segfault at 0 ip 0 sp 0 error 4 in corruption[1000,1000]"),
        ] {
            assert_eq!(of(level, text), None, "{text}");
        }
        let what = |level, text: &str| of(level, text).map(|fault| fault.what);
        let shut_down = "XFS (dm-2): Log I/O Error (0x2) detected at xlog_ioend_work.  Shutting \
                         down filesystem.";
        assert_eq!(what(1, shut_down), Some(What::ShutDown));
        let warning = "XFS (dm-2): Corruption warning: Metadata has LSN (1:2) ahead of current LSN";
        assert_eq!(what(4, warning), Some(What::Corrupt));
    }

    #[test]
    fn a_shutdown_of_our_file_system_counts_and_of_another_does_not() {
        let message = |device| format!("XFS ({device}): Filesystem has been shut down due to log");
        assert_eq!(read(&message("dm-2"), &devices()).unwrap().what, What::ShutDown);
        assert_eq!(read(&message("vda9"), &devices()), None);
        let message = "XFS (dm-2): Metadata corruption detected at xfs_agf_verify";
        assert_eq!(read(message, &devices()).unwrap().what, What::Corrupt);
        assert_eq!(reported("XFS (dm-2): Ending clean mount"), None);
        assert_eq!(reported(""), None);
    }

    #[test]
    fn a_full_disk_a_fault_and_a_stall_are_three_warnings() {
        let fault = Fault { what: What::Read, device: "vda".to_owned(), sector: None };
        let [since, deadline] = [100, 600].map(Duration::from_secs);
        let stalled = Some(Stalled { since, deadline });
        let health = Health { full: Some(5 << 20), fault: Some(fault), stalled };
        assert_eq!(
            health.warnings(),
            [
                "the data partition is full: 5 MiB are left; delete something",
                "the disk fails reads: device vda",
                "the disk does not answer: check it and its cable; the node stops after 600 s",
            ]
        );
    }
}
