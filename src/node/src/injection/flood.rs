//! The `flood` exercise: measures this process at rest, then while something writes more
//! log lines than anybody reads. The cost of the console in that case is a promise.
//!
//! A part of `generator`. Two lines report the measurements:
//!
//! ```text
//! POLIS exercise name=flood phase=rest cpu=0.42 node=21500
//! POLIS exercise name=flood phase=flood cpu=31.07 node=23044 lines=200000 seconds=20.01
//! ```
//!
//! `cpu` is in percent of one processor, `node` in KiB.

use std::fs;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tracing::info;

use polis_base::serial::EventLine;
use polis_runtime::supervisor::Context;
use polis_runtime::sys::process;

/// By then, the work that follows a start is done.
const SETTLED: Duration = Duration::from_secs(20);
/// How long each phase is measured.
const PHASE: Duration = Duration::from_secs(20);
/// Ten thousand lines a second, in parts.
const TICK: Duration = Duration::from_millis(10);
const LINES: u64 = 100;
/// Ticks of a processor's time in a second, at any pace of the kernel.
const HERTZ: f64 = 100.0;

/// Measures both phases. Cancel-safe in that nothing is kept.
pub(super) async fn run(ctx: &Context, line: impl Fn() -> EventLine) {
    sleep(SETTLED).await;
    let (rest, ()) = measured(sleep(PHASE)).await;
    ctx.lines().event(with_cost(line().field("phase", "rest"), &rest));
    let (flood, lines) = measured(write()).await;
    // The serial port leaves out lines that it cannot take in time.
    sleep(SETTLED).await;
    let line = with_cost(line().field("phase", "flood"), &flood);
    let seconds = format!("{:.2}", flood.seconds);
    ctx.lines().event(line.field("lines", lines).field("seconds", seconds));
}

/// Writes lines until the phase is over; returns how many.
async fn write() -> u64 {
    let end = Instant::now() + PHASE;
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut lines = 0;
    while Instant::now() < end {
        tick.tick().await;
        for _ in 0..LINES {
            lines += 1;
            info!(line = lines, "one of many lines, as requested");
        }
    }
    lines
}

/// The cost of a phase.
struct Cost {
    seconds: f64,
    /// Percent of one processor.
    cpu: f64,
    /// Resident KiB at its end.
    node: u64,
}

async fn measured<T>(work: impl Future<Output = T>) -> (Cost, T) {
    let (begun, before) = (Instant::now(), ticks().unwrap_or_default());
    let done = work.await;
    let ticks = ticks().unwrap_or_default() - before;
    let seconds = begun.elapsed().as_secs_f64();
    let cpu = ticks / HERTZ / seconds * 100.0;
    (Cost { seconds, cpu, node: process::resident("self").unwrap_or_default() }, done)
}

fn with_cost(line: EventLine, cost: &Cost) -> EventLine {
    line.field("cpu", format!("{:.2}", cost.cpu)).field("node", cost.node)
}

/// Processor time of this process, in ticks.
fn ticks() -> Option<f64> {
    parse(&fs::read_to_string("/proc/self/stat").ok()?)
}

/// The 14th and the 15th field; the second is in brackets and may hold anything.
fn parse(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let (user, system): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_past_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 0 0 20 0 1 0 9";
        assert_eq!(parse(stat), Some(300.0));
        assert_eq!(parse("7 (a"), None);
        assert!(ticks().is_some());
    }
}
