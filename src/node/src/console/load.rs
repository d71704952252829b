//! The load of the machine, in samples: processors, memory, disks, network.
//!
//! ```text
//! /proc: counters --PACE, or at rest--> differences --> series (event value) --> fold
//! ```
//!
//! Invariants:
//! - A column of a chart is [`PACE`] long, whether it was sampled or is a part of a
//!   longer time that was.
//! - A disk that does not answer stops the charts, and no other service of the node.
//!
//! What this module does not do: keep more than a screen shows. The metrics have the
//! history of a node.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polis_tui::snapshot::Metrics;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::attention::Attention;
use super::counters::{Counters, Space, space};
use polis_base::files;
use polis_base::sys::quota::Usage;
use polis_runtime::supervisor::{Context, blocking};
use polis_workload::host;

/// Between two samples: what a column of a chart stands for.
const PACE: Duration = Duration::from_secs(2);
/// The same at rest, without changes or keys: one sample gives the mean of several
/// columns.
const PACE_AT_REST: Duration = Duration::from_secs(30);
/// Columns that are kept: four minutes, and a chart on a wide screen.
const SAMPLES: usize = 120;

/// The recent load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// Of the whole machine.
    pub(super) metrics: Metrics,
    /// Of each network interface, by name.
    pub(super) interfaces: BTreeMap<String, Traffic>,
    /// The space of workloads on the data partition; `None` where they have no limit.
    pub(super) quota: Option<Usage>,
}

/// Bytes a second through one interface, the newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) received: Vec<u64>,
    pub(super) sent: Vec<u64>,
}

/// Samples for as long as it runs.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// Where /proc and /sys are.
    pub(super) proc: PathBuf,
    pub(super) sys: PathBuf,
    /// The data partition.
    pub(super) data: Arc<files::Data>,
    pub(super) load: watch::Sender<Option<Load>>,
    /// Whether something happens.
    pub(super) attention: Attention,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(self, ctx: Context) -> Result<(), Infallible> {
        let read = || (Instant::now(), Counters::read(&self.proc, &self.sys));
        let mut series = Series::default();
        let (mut then, mut before) = read();
        ctx.healthy();
        while ctx.until_cancelled(self.due(then)).await.is_some() {
            let (at, now) = read();
            series.add(&before, &now, at - then);
            (then, before) = (at, now);
            let Some((space, quota)) = ctx.until_cancelled(self.disk()).await else { break };
            self.load.send_replace(Some(Load { quota, ..series.load(&before, space) }));
        }
        Ok(())
    }

    /// The space on the data partition, and that of workloads where they have a limit.
    async fn disk(&self) -> (Option<Space>, Option<Usage>) {
        let data = Arc::clone(&self.data);
        blocking(move || {
            let quota = host::quota::usage(&data).ok().filter(|usage| usage.limits.bytes > 0);
            (space(data.mount.path(), data.unwritten.path()), quota)
        })
        .await
    }

    /// Waits until a sample is due after the one at `last`. Cancel-safe.
    async fn due(&self, last: Instant) {
        loop {
            let mut calls = self.attention.calls();
            let pace = if self.attention.is_at_rest() { PACE_AT_REST } else { PACE };
            tokio::select! {
                // Cancel-safe: only waits.
                () = sleep_until(last + pace) => return,
                // Cancel-safe: waits for an event value, whose sender is here.
                _open = calls.changed() => {}
            }
        }
    }
}

/// The rates between the readings of the counters.
#[derive(Debug, Default)]
struct Series {
    cpu: VecDeque<u64>,
    memory: VecDeque<u64>,
    disk_read: VecDeque<u64>,
    disk_written: VecDeque<u64>,
    received: VecDeque<u64>,
    sent: VecDeque<u64>,
    interfaces: BTreeMap<String, (VecDeque<u64>, VecDeque<u64>)>,
    /// Time that has passed and is in no column yet.
    owed: Duration,
}

impl Series {
    /// Adds as many columns as fit into the time that has `passed`.
    fn add(&mut self, before: &Counters, now: &Counters, passed: Duration) {
        self.owed = self.owed.saturating_add(passed);
        for _column in 0..SAMPLES {
            let Some(left) = self.owed.checked_sub(PACE) else { return };
            self.owed = left;
            self.column(before, now, passed);
        }
        // Longer than a chart.
        self.owed = Duration::ZERO;
    }

    fn column(&mut self, before: &Counters, now: &Counters, passed: Duration) {
        // A counter that went back was reset: a device was added again.
        let rate = |before: u64, now: u64| {
            let millis = passed.as_millis().max(1);
            let rate = u128::from(now.saturating_sub(before)) * 1000 / millis;
            u64::try_from(rate).unwrap_or(u64::MAX)
        };
        let time = now.time.saturating_sub(before.time);
        push(&mut self.cpu, percent(now.busy.saturating_sub(before.busy), time));
        let used = now.memory_total.saturating_sub(now.memory_free);
        push(&mut self.memory, percent(used, now.memory_total));
        push(&mut self.disk_read, rate(before.disk_read, now.disk_read));
        push(&mut self.disk_written, rate(before.disk_written, now.disk_written));
        self.interfaces.retain(|name, _| now.interfaces.contains_key(name));
        let (mut all_received, mut all_sent) = (0_u64, 0_u64);
        for (name, (received, sent)) in &now.interfaces {
            let (first, second) =
                before.interfaces.get(name).copied().unwrap_or((*received, *sent));
            let (in_rate, out_rate) = (rate(first, *received), rate(second, *sent));
            let (received, sent) = self.interfaces.entry(name.clone()).or_default();
            push(received, in_rate);
            push(sent, out_rate);
            all_received = all_received.saturating_add(in_rate);
            all_sent = all_sent.saturating_add(out_rate);
        }
        push(&mut self.received, all_received);
        push(&mut self.sent, all_sent);
    }

    fn load(&self, now: &Counters, space: Option<Space>) -> Load {
        let list = |series: &VecDeque<u64>| series.iter().copied().collect::<Vec<_>>();
        let percents = |series: &VecDeque<u64>| {
            series.iter().map(|it| u8::try_from(*it).unwrap_or(100)).collect::<Vec<_>>()
        };
        let space = space.unwrap_or_default();
        let traffic = |(received, sent): &(VecDeque<u64>, VecDeque<u64>)| Traffic {
            received: list(received),
            sent: list(sent),
        };
        Load {
            metrics: Metrics {
                pace: PACE,
                processors: now.processors,
                cpu: percents(&self.cpu),
                memory: percents(&self.memory),
                memory_total: now.memory_total,
                memory_used: now.memory_total.saturating_sub(now.memory_free),
                disk_read: list(&self.disk_read),
                disk_written: list(&self.disk_written),
                received: list(&self.received),
                sent: list(&self.sent),
                data_total: space.total,
                data_used: space.used,
                data_unwritten: space.unwritten,
            },
            interfaces: self.interfaces.iter().map(|(k, v)| (k.clone(), traffic(v))).collect(),
            quota: None,
        }
    }
}

fn push(series: &mut VecDeque<u64>, value: u64) {
    if series.len() == SAMPLES {
        series.pop_front();
    }
    series.push_back(value);
}

fn percent(part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(part) * 100 / u128::from(whole.max(1))).unwrap_or(100).min(100)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use tokio::time::timeout;

    use super::*;

    fn counters() -> Counters {
        Counters {
            processors: 2,
            time: 1000,
            busy: 150,
            memory_total: 1_024_000,
            memory_free: 768_000,
            disk_read: 200 * 512,
            disk_written: 300 * 512,
            interfaces: BTreeMap::from([("eth0".to_owned(), (1000, 500))]),
        }
    }

    fn service(root: &Path) -> Service {
        Service {
            proc: root.to_owned(),
            sys: root.to_owned(),
            data: Arc::new(files::Root::at(root).data),
            load: watch::Sender::default(),
            attention: Attention::default(),
        }
    }

    #[test]
    fn a_sample_is_what_happened_since_the_one_before() {
        let (before, mut now) = (counters(), counters());
        now.time += 400;
        now.busy += 100;
        now.disk_read += 4096;
        now.interfaces.insert("eth0".to_owned(), (3000, 400));
        now.interfaces.insert("eth1".to_owned(), (9, 9));
        let mut series = Series::default();
        series.add(&before, &now, Duration::from_secs(2));
        let load = series.load(&now, Some(Space { total: 10, used: 4, unwritten: 3 }));
        let metrics = &load.metrics;
        assert_eq!((metrics.cpu[0], metrics.memory[0]), (25, 25));
        assert_eq!((metrics.disk_read[0], metrics.disk_written[0]), (2048, 0));
        assert_eq!((metrics.received[0], metrics.sent[0]), (1000, 0));
        let data = (metrics.data_total, metrics.data_used, metrics.data_unwritten);
        assert_eq!(data, (10, 4, 3));
        assert_eq!(load.interfaces["eth1"].received, [0]);
    }

    #[test]
    fn a_sample_of_a_longer_time_is_as_many_columns_of_its_mean() {
        let (before, mut now) = (counters(), counters());
        now.disk_read += 6000;
        let mut series = Series::default();
        series.add(&before, &now, PACE_AT_REST);
        assert_eq!(series.disk_read, [200; 15]);
        // The remainder is kept.
        series.add(&now, &now, PACE * 3 / 2);
        assert_eq!(series.disk_read.len(), 16);
        series.add(&now, &now, PACE * 3 / 2);
        assert_eq!(series.disk_read.len(), 18);
    }

    #[tokio::test(start_paused = true)]
    async fn samples_are_rare_at_rest_and_frequent_once_something_happens() {
        let service = service("/nowhere".as_ref());
        let attention = service.attention.clone();
        let began = Instant::now();
        service.due(began).await;
        assert_eq!(began.elapsed(), PACE);
        tokio::time::advance(Duration::from_secs(60)).await;
        let last = Instant::now();
        service.due(last).await;
        assert_eq!(last.elapsed(), PACE_AT_REST);
        let last = Instant::now();
        let called = async {
            tokio::time::sleep(PACE * 5 / 4).await;
            attention.call();
        };
        tokio::join!(service.due(last), called);
        assert_eq!(last.elapsed(), PACE * 5 / 4, "it is due at once");
    }

    #[tokio::test]
    async fn a_disk_that_hangs_keeps_no_thread_of_the_other_services() {
        let root = tempfile::tempdir().unwrap();
        let service = service(root.path());
        let mount = service.data.mount.path();
        std::fs::create_dir_all(mount.parent().unwrap()).unwrap();
        // Opening it for reading waits for a writer.
        mknodat(CWD, mount, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let mut disk = std::pin::pin!(service.disk());
        let early = timeout(Duration::from_millis(50), &mut disk).await;
        assert!(early.is_err(), "{early:?}");
        let _writer = File::options().write(true).open(mount).unwrap();
        let (_space, quota) = disk.await;
        assert_eq!(quota, None);
    }

    #[test]
    fn a_series_has_an_end() {
        let (mut series, counters) = (Series::default(), counters());
        for _ in 0..SAMPLES + 7 {
            series.add(&counters, &counters, PACE);
        }
        let load = series.load(&counters, None);
        assert_eq!(
            (load.metrics.cpu.len(), load.interfaces["eth0"].sent.len()),
            (SAMPLES, SAMPLES)
        );
    }

    #[test]
    fn no_counters_are_no_reason_to_panic() {
        let most = Counters {
            processors: u32::MAX,
            time: u64::MAX,
            busy: u64::MAX,
            memory_total: u64::MAX,
            memory_free: u64::MAX,
            disk_read: u64::MAX,
            disk_written: u64::MAX,
            interfaces: BTreeMap::from([("eth0".to_owned(), (u64::MAX, u64::MAX))]),
        };
        for (before, now) in [(Counters::default(), most.clone()), (most, Counters::default())] {
            let mut series = Series::default();
            series.add(&before, &now, PACE);
            series.add(&now, &before, Duration::MAX);
            let space = Space { total: 1, used: 2, unwritten: 3 };
            assert_eq!(series.load(&now, Some(space)).metrics.cpu.len(), SAMPLES);
        }
    }
}
