//! Reads the kernel's messages into the log tree, under the name `kernel`.
//!
//! One `read` of `/dev/kmsg` is one record: `priority,sequence,microseconds,flags;text`,
//! then lines with details that begin with a space. A reader that was too slow
//! finds the error `EPIPE` once, and goes on with the oldest record there is.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use rustix::fs::OFlags;
use tokio::io::Interest;

use super::{Body, Levelled, Origin, Tree};
use crate::serial::Severity;
use crate::supervisor::Context;
use crate::sys::readiness;

/// Where the kernel's messages are.
const DEVICE: &str = "/dev/kmsg";
/// The dotted name of the kernel.
const NAME: &str = "kernel";
/// The kernel's own bound of one record.
const RECORD_MAX: usize = 8192;
/// Records between two looks at what else there is to do: a boot has some 600.
const BATCH: usize = 64;

/// Why the messages cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device cannot be opened.
    #[error("cannot open {DEVICE}")]
    Open(#[source] io::Error),
    /// The device was open and failed.
    #[error("cannot read {DEVICE}")]
    Read(#[source] io::Error),
}

/// Copies the kernel's messages into `tree`, beginning with the first of this boot.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where to.
    pub tree: Tree,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`] when the device cannot be read.
    pub async fn run(self, ctx: Context) -> Result<(), Error> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let device = OpenOptions::new().read(true).custom_flags(flags).open(DEVICE);
        let device = device.and_then(|device| readiness::watch_file(device, Interest::READABLE));
        let device = device.map_err(Error::Open)?;
        ctx.healthy();
        loop {
            let Some(ready) = ctx.until_cancelled(device.readable()).await else { return Ok(()) };
            let mut ready = ready.map_err(Error::Read)?;
            if !self.batch(device.get_ref()).map_err(Error::Read)? {
                ready.clear_ready();
            }
            // The first look finds the whole boot: let others run in between.
            tokio::task::yield_now().await;
        }
    }

    /// Copies some records. `false` when there is no more for now.
    fn batch(&self, mut device: &File) -> io::Result<bool> {
        let mut buffer = [0; RECORD_MAX];
        for _ in 0..BATCH {
            match device.read(&mut buffer) {
                Ok(length) => self.put(&String::from_utf8_lossy(&buffer[..length])),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(false),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::BrokenPipe => {
                        let text = "the kernel wrote faster than this node read: messages are lost";
                        let body = Body::Levelled(Levelled::new(Severity::Warning, text));
                        self.tree.append(NAME, Origin::Kernel, body);
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(true)
    }

    fn put(&self, record: &str) {
        match parse(record) {
            Some((at, levelled)) => {
                self.tree.append_at(at, NAME, Origin::Kernel, Body::Levelled(levelled));
            }
            None => self.tree.append(NAME, Origin::Kernel, Body::Raw(record.trim_end().to_owned())),
        }
    }
}

/// Reads one record; `None` if it is not one.
fn parse(record: &str) -> Option<(Duration, Levelled)> {
    let (head, text) = record.split_once(';')?;
    let mut head = head.split(',');
    let priority: u32 = head.next()?.parse().ok()?;
    let _sequence = head.next()?;
    let at = Duration::from_micros(head.next()?.parse().ok()?);
    // The lower three bits are the severity, the rest is the facility.
    let severity = match priority & 7 {
        0..=2 => Severity::Fatal,
        3 => Severity::Error,
        4 => Severity::Warning,
        5 | 6 => Severity::Info,
        _ => Severity::Debug,
    };
    let mut lines = text.lines();
    let mut levelled = Levelled::new(severity, lines.next().unwrap_or_default());
    for (key, value) in lines.filter_map(|line| line.strip_prefix(' ')?.split_once('=')) {
        levelled.fields.push((key.to_owned(), value.to_owned()));
    }
    Some((at, levelled))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_keeps_its_time_severity_and_details() {
        let record = "4,1234,9412000,-;virtio_net: link is down\n SUBSYSTEM=net\n DEVICE=n2\n";
        let (at, levelled) = parse(record).unwrap();
        assert_eq!(at, Duration::from_millis(9412));
        assert_eq!(levelled.severity, Severity::Warning);
        assert_eq!(levelled.message, "virtio_net: link is down");
        assert_eq!(levelled.fields[1], ("DEVICE".to_owned(), "n2".to_owned()));
    }

    #[test]
    fn the_facility_does_not_count_as_severity() {
        let (_, levelled) = parse("30,1,0,-;from user space").unwrap();
        assert_eq!(levelled.severity, Severity::Info);
    }

    proptest! {
        #[test]
        fn noise_never_panics(record in any::<String>()) {
            let _parsed = parse(&record);
            let _parsed = parse(&format!("6,1,2,-;{record}"));
        }
    }
}
