//! The kernel's log as evidence: why a process died.
//!
//! What this module does not do: read the log (`sys::kmsg`).

use rustix::process::Pid;

use polis_base::sys::kmsg::Record;

/// Something in the kernel's log that explains a death.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelEvent {
    /// A block of a verified device does not match its hash.
    Corrupt {
        /// The device below, as `major:minor`.
        device: String,
        /// `data` or `metadata`.
        kind: String,
        /// Blocks of 4096 bytes from the start of the device.
        block: u64,
    },
    /// The kernel was out of memory and killed this process.
    OutOfMemory {
        /// Its number.
        process: i32,
        /// Its name, at most 15 letters.
        name: String,
    },
}

impl KernelEvent {
    /// Checks one record.
    #[must_use]
    pub fn find(record: &Record) -> Option<Self> {
        // Only the kernel's own records count: a process may write to its log, too.
        if record.facility != 0 {
            return None;
        }
        corrupt(&record.text).or_else(|| out_of_memory(&record.text))
    }

    /// Whether it explains the death of `process`.
    #[must_use]
    pub fn killed(&self, process: Pid) -> bool {
        matches!(self, Self::OutOfMemory { process: killed, .. }
            if *killed == process.as_raw_nonzero().get())
    }
}

/// `device-mapper: verity: 254:2: data block 1234 is corrupted`
fn corrupt(text: &str) -> Option<KernelEvent> {
    let rest = text.strip_prefix("device-mapper: verity: ")?;
    let rest = rest.strip_suffix(" is corrupted")?;
    let (device, what) = rest.split_once(": ")?;
    let (kind, block) = what.split_once(" block ")?;
    let (major, minor) = device.split_once(':')?;
    let numbers = [major, minor].iter().all(|number| number.parse::<u32>().is_ok());
    if !numbers || !["data", "metadata"].contains(&kind) {
        return None;
    }
    let block = block.parse().ok()?;
    Some(KernelEvent::Corrupt { device: device.to_owned(), kind: kind.to_owned(), block })
}

/// `Out of memory: Killed process 123 (node) total-vm:...`, or the same of a
/// control group: `Memory cgroup out of memory: Killed process ...`
fn out_of_memory(text: &str) -> Option<KernelEvent> {
    let (before, rest) = text.split_once("Killed process ")?;
    if !before.to_ascii_lowercase().contains("out of memory") {
        return None;
    }
    let (process, rest) = rest.split_once(" (")?;
    let (name, _rest) = rest.split_once(')')?;
    Some(KernelEvent::OutOfMemory { process: process.parse().ok()?, name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn record(text: &str) -> Record {
        let time = Duration::from_secs(1);
        Record { level: 3, facility: 0, sequence: 1, time, text: text.to_owned() }
    }

    #[test]
    fn a_corrupt_block_is_read_from_the_kernel_s_words() {
        let found = |text| KernelEvent::find(&record(text));
        assert_eq!(
            found("device-mapper: verity: 254:2: data block 1234 is corrupted"),
            Some(KernelEvent::Corrupt { device: "254:2".into(), kind: "data".into(), block: 1234 })
        );
        assert_eq!(
            found("device-mapper: verity: 8:2: metadata block 26001 is corrupted"),
            Some(KernelEvent::Corrupt {
                device: "8:2".into(),
                kind: "metadata".into(),
                block: 26001
            })
        );
        assert_eq!(found("device-mapper: verity: sha256 using implementation x"), None);
    }

    #[test]
    fn a_process_killed_for_memory_is_found_by_its_number() {
        let text = "Out of memory: Killed process 123 (node) total-vm:512kB, anon-rss:1kB";
        let kernel_log = KernelEvent::find(&record(text)).unwrap();
        assert!(kernel_log.killed(Pid::from_raw(123).unwrap()));
        assert!(!kernel_log.killed(Pid::from_raw(124).unwrap()));
    }

    #[test]
    fn lines_of_processes_in_the_kernel_log_are_ignored() {
        let text = "device-mapper: verity: 254:2: data block 1 is corrupted";
        assert_eq!(KernelEvent::find(&Record { facility: 1, ..record(text) }), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>()) {
            let _evidence = KernelEvent::find(&record(&text));
            let _evidence = KernelEvent::find(&record(&format!("device-mapper: verity: {text}")));
            let _evidence = KernelEvent::find(&record(&format!("Out of memory: Killed process {text}")));
        }
    }
}
