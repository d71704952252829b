//! The workload generator: load for stories and measurements, mostly on the data partition.
//!
//! `polis.exercise=NAME` on the kernel command line selects it, as for `fault`. It reports the
//! events in lines `POLIS exercise name=NAME ...`. It begins once the node is ready.
//!
//! | name | what happens | keys of its lines |
//! |---|---|---|
//! | `count` | a number in etcd is read, then counted up until the end | `found`, then `acknowledged` |
//! | `append` | each node creates numbered keys of its own, ten a second | `writer`, with `holds`; `listed`; then `acknowledged`, `revision` |
//! | `trickle` | as `append`, two a second | the same, with the name `append` |
//! | `fill` | as `count`; meanwhile the data partition is filled, kept full, emptied | and `filled`, `emptied` |
//! | `wal` | records are written and flushed as etcd does it, and timed | `p50 p99 mean` in microseconds |
//! | `flood` | this process is measured at rest, then under 10,000 log lines a second | `phase cpu node`, see `flood` |
//!
//! The values that `count` writes carry [`PLAINTEXT`], for a search of the disk.

mod append;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{error, warn};

use super::flood;
use polis_base::files;
use polis_base::serial::EventLine;
use polis_base::sys::command_line;
use polis_control::consensus::{self, client};
use polis_runtime::event::{self, Closed};
use polis_runtime::supervisor::Context;

/// The start of the counted values.
pub const PLAINTEXT: &str = "polis-exercise-known-plaintext";

/// Between two numbers: the serial line has to carry each.
const PACE: Duration = Duration::from_millis(20);
/// After a number that was not acknowledged.
const RETRY: Duration = Duration::from_millis(250);

/// How long the data partition stays full: long enough to be noticed, and for etcd
/// to run into it.
const FULL: Duration = Duration::from_secs(8);

/// A record of etcd's log, and how many are timed.
const RECORD: usize = 2300;
const RECORDS: u64 = 400;
/// Those before them are not: the first flushes find everything cold.
const WARM: u64 = 50;

/// The exercises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generator {
    /// Count in etcd.
    Count,
    /// Write a history that can be checked, with this pause after each number.
    Append(Duration),
    /// Count while the disk is full.
    Fill,
    /// Time what etcd's log does.
    Wal,
    /// Write more log lines than anybody reads.
    Flood,
}

impl Generator {
    const ALL: [(&'static str, Self); 6] = [
        ("count", Self::Count),
        ("append", Self::Append(Duration::from_millis(100))),
        // At ten a second, each voter of three keeps a third of a translated processor busy.
        ("trickle", Self::Append(Duration::from_millis(500))),
        ("fill", Self::Fill),
        ("wal", Self::Wal),
        ("flood", Self::Flood),
    ];

    /// The exercise that the command line of this boot asks for, if any.
    #[must_use]
    pub fn of_this_boot() -> Option<Self> {
        let line = command_line::read().unwrap_or_default();
        let name = command_line::value(&line, "polis.exercise")?;
        let exercise = Self::from_name(name);
        match exercise {
            Some(_) => error!("polis.exercise={name}: the workload generator is on"),
            None => error!("polis.exercise={name} is not a known workload: ignored"),
        }
        exercise
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, exercise)| *exercise)
    }

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, known)| *known == self).map_or("", |(name, _)| name)
    }
}

/// The service that does it.
#[derive(Clone, Debug)]
pub struct Service {
    /// The exercise to do.
    pub generator: Generator,
    /// Whether the node is ready.
    pub ready: watch::Receiver<bool>,
    /// etcd.
    pub consensus: watch::Receiver<consensus::Status>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of the node's state is gone.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let ready = event::until(&mut self.ready, "ready", |ready| ready.then_some(()));
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        ctx.healthy();
        let data = files::Root::live().data.mount.path().to_owned();
        let work = async {
            match self.generator {
                Generator::Count => self.count(&ctx).await,
                Generator::Append(pace) => append::run(self, &ctx, pace).await,
                Generator::Fill => {
                    let counted = self.clone();
                    let (counted, ()) = tokio::join!(counted.count(&ctx), self.fill(&ctx, &data));
                    counted
                }
                Generator::Wal => {
                    self.wal(&ctx, &data).await;
                    Ok(())
                }
                Generator::Flood => {
                    flood::run(&ctx, || self.line()).await;
                    Ok(())
                }
            }
        };
        match ctx.until_cancelled(Box::pin(work)).await {
            Some(done) => done?,
            None => return Ok(()),
        }
        ctx.cancelled().await;
        Ok(())
    }

    fn line(&self) -> EventLine {
        EventLine::new("exercise").field("name", self.generator.name())
    }

    async fn etcd(&mut self) -> Result<client::Client, Closed> {
        let found = event::until(&mut self.consensus, "etcd", |status| {
            status.voter().map(|clients| clients.user(client::User::Curator).sub("exercise"))
        });
        found.await
    }

    async fn count(mut self, ctx: &Context) -> Result<(), Closed> {
        let mut number = loop {
            match self.etcd().await?.get("count").await {
                Ok(found) => break found.and_then(|kv| number(&kv.value)).unwrap_or(0),
                Err(error) => {
                    warn!(error = &error as &dyn std::error::Error, "cannot read the number");
                    sleep(RETRY).await;
                }
            }
        };
        ctx.lines().event(self.line().field("found", number));
        loop {
            number += 1;
            let value = format!("{PLAINTEXT} {number}");
            match self.etcd().await?.put("count", value, None).await {
                Ok(_revision) => {
                    ctx.lines().event(self.line().field("acknowledged", number));
                    sleep(PACE).await;
                }
                Err(error) => {
                    warn!(number, error = &error as &dyn std::error::Error, "not acknowledged");
                    sleep(RETRY).await;
                }
            }
        }
    }

    async fn fill(&self, ctx: &Context, data: &Path) {
        let file = data.join(".exercise");
        let target = file.clone();
        let filled = tokio::task::spawn_blocking(move || fill(&target)).await;
        match filled {
            Ok(Ok(bytes)) => ctx.lines().event(self.line().field("filled", bytes)),
            Ok(Err(error)) => error!(error = &error as &dyn std::error::Error, "cannot fill it"),
            Err(_lost) => {}
        }
        // etcd writes into what it has preallocated; new allocations fail.
        sleep(FULL).await;
        if let Err(error) = tokio::fs::remove_file(&file).await {
            error!(error = &error as &dyn std::error::Error, "cannot empty it");
        }
        ctx.lines().event(self.line().field("emptied", true));
    }

    async fn wal(&self, ctx: &Context, data: &Path) {
        let file = data.join(".exercise");
        let timed = tokio::task::spawn_blocking(move || wal(&file)).await;
        match timed {
            Ok(Ok(mut times)) => {
                times.sort_unstable();
                let at = |share: usize| {
                    times.get((times.len() * share / 100).min(times.len() - 1)).copied()
                };
                let microseconds = |time: Option<Duration>| time.unwrap_or_default().as_micros();
                let mean = times.iter().sum::<Duration>() / u32::try_from(times.len()).unwrap_or(1);
                ctx.lines().event(
                    self.line()
                        .field("p50", microseconds(at(50)))
                        .field("p99", microseconds(at(99)))
                        .field("mean", mean.as_micros()),
                );
            }
            Ok(Err(error)) => error!(error = &error as &dyn std::error::Error, "cannot time it"),
            Err(_lost) => {}
        }
    }
}

/// The number behind the plaintext.
fn number(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.strip_prefix(PLAINTEXT)?.trim().parse().ok()
}

/// Takes all free space; returns how much that was. Blocks.
fn fill(path: &PathBuf) -> io::Result<u64> {
    let mut file = File::create(path)?;
    let block = vec![0x5a; 1 << 20];
    let mut bytes = 0;
    // The last bytes, too: space that a smaller write finds is taken as well.
    for size in [block.len(), 4096, 512] {
        loop {
            match file.write_all(&block[..size]).and_then(|()| file.sync_data()) {
                Ok(()) => bytes += size as u64,
                Err(error) if error.kind() == io::ErrorKind::StorageFull => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(bytes)
}

/// Times records in a preallocated file, each flushed. Blocks.
fn wal(path: &PathBuf) -> io::Result<Vec<Duration>> {
    let file = File::create(path)?;
    let whole = (WARM + RECORDS) * RECORD as u64;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, whole)?;
    file.sync_all()?;
    let record = vec![0x5a; RECORD];
    let mut times = Vec::new();
    for index in 0..WARM + RECORDS {
        let begun = Instant::now();
        file.write_all_at(&record, index * RECORD as u64)?;
        file.sync_data()?;
        if index >= WARM {
            times.push(begun.elapsed());
        }
    }
    std::fs::remove_file(path)?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_selects_its_workload() {
        for (name, exercise) in Generator::ALL {
            assert_eq!(Generator::from_name(name), Some(exercise));
            assert_eq!(exercise.name(), name);
        }
        assert_eq!(Generator::from_name("all"), None);
    }

    #[test]
    fn a_counted_value_tells_its_number() {
        assert_eq!(number(format!("{PLAINTEXT} 17").as_bytes()), Some(17));
        assert_eq!(number(b"something else 17"), None);
        assert_eq!(number(&[0xff]), None);
    }

    #[test]
    fn records_are_timed_and_leave_nothing() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = directory.path().join("exercise");
        assert_eq!(wal(&file).unwrap().len() as u64, RECORDS);
        assert!(!file.exists());
    }
}
