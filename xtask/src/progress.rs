//! The output of a build on a terminal: a line for each step, and the work under way.

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use polis_image::{Moved, Observer, Report, Unit};

/// How often the spinner of the terminal moves.
const TICK: Duration = Duration::from_millis(100);
/// The progress line of steps of unknown length, ...
const SPINNER: &str = "{spinner} {msg} {elapsed}";
/// ... of downloads, ...
const BAR: &str = "{spinner} {prefix} {wide_bar} {bytes}/{total_bytes} {eta}";
/// ... and of other work that is counted.
const BAR_COUNT: &str = "{spinner} {prefix} {wide_bar} {pos}/{len} {msg} {elapsed}";

/// Prints a line a step, and on a terminal shows the running steps.
#[derive(Debug)]
pub(crate) struct Terminal {
    bar: ProgressBar,
    running: Mutex<Vec<&'static str>>,
}

impl Default for Terminal {
    fn default() -> Self {
        // Draws on the standard error, and only if that is a terminal.
        Self { bar: ProgressBar::new_spinner(), running: Mutex::default() }
    }
}

impl Terminal {
    /// Shows the names of the running steps.
    fn show(&self, change: impl FnOnce(&mut Vec<&'static str>)) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut running);
        if running.is_empty() {
            self.bar.finish_and_clear();
            return;
        }
        if self.bar.is_finished() {
            self.bar.reset();
        }
        self.bar.set_message(running.join(", "));
        self.bar.enable_steady_tick(TICK);
    }

    fn style(&self, template: &str) {
        // The templates are constants; an invalid one falls back to a plain line.
        self.bar.set_style(
            ProgressStyle::with_template(template)
                .unwrap_or_else(|_wrong| ProgressStyle::default_bar()),
        );
    }
}

impl Observer for Terminal {
    fn waits(&self, folder: &Path) {
        // In a log the spinner is not seen, and the line of the step comes after the wait.
        let what = format!("for another process that works in {}", folder.display());
        self.bar.suspend(|| println!("{:<10} {what}", "waiting"));
    }

    fn begin(&self, name: &'static str) {
        self.show(|running| running.push(name));
    }

    fn step(&self, report: &Report) {
        let (state, why) = match &report.why {
            None => ("cached", String::new()),
            Some(why) => ("built", format!(" ({why})")),
        };
        let Report { name, time, .. } = report;
        self.bar.suspend(|| println!("{name:<10} {:>7.2} s  {state}{why}", time.as_secs_f64()));
        self.show(|running| running.retain(|other| other != name));
    }

    fn moved(&self, moved: &Moved) {
        self.bar.suspend(|| println!("{:<10} {moved}", "moved"));
    }

    fn progress(&self, what: &str, done: u64, total: u64, unit: Unit) {
        if done == total {
            self.style(SPINNER);
            return;
        }
        let (template, of) = match unit {
            Unit::Bytes => (BAR, ""),
            Unit::Modules => (BAR_COUNT, "modules"),
            Unit::Packages => (BAR_COUNT, "packages"),
        };
        self.style(template);
        self.bar.set_message(of);
        self.bar.set_prefix(what.to_owned());
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}
