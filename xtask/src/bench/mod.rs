//! `cargo xtask bench`: the measurements of the documentation.
//!
//! Each measurement is a [`Table`] of rows with all their values; their median and range
//! are printed, and `target/bench/<name>.json` contains all. `docs/benchmarks.md` records
//! the results with place and date.

mod boot;
mod build;
mod cluster;
mod console;
mod count;
mod curator;
mod floor;
mod image;
mod kubernetes;
mod stop;
mod storage;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use polis_qemu::Image;
use serde::Serialize;

use self::stop::Stop;
use crate::lock::Lock;
use crate::{host, run};

/// Processors of each machine, unless `--cpus` says otherwise.
const CPUS: u32 = 2;

/// Nodes of the curator, unless `--nodes` says otherwise.
const NODES: u32 = 1000;

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The measurements [default: all].
    #[arg(value_enum)]
    name: Option<Name>,
    /// How often each row is measured.
    #[arg(long, default_value_t = 5, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Processors of each machine that is booted; those of `cluster` have one [default: 2].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: Option<u32>,
    /// Only boot without firmware, in half the time (`boot` alone).
    #[arg(long)]
    direct: bool,
    /// Folder of another image, an earlier one for example, that boots beside this one
    /// (`boot` alone).
    #[arg(long, value_name = "FOLDER")]
    beside: Option<PathBuf>,
    /// Count instructions and translated blocks instead of seconds (`boot` alone): what else the
    /// host does changes them less.
    #[arg(long)]
    count: bool,
    /// Build the full image once without any earlier output, too (`image` alone): its programs
    /// take half an hour.
    #[arg(long)]
    cold: bool,
    /// Nodes of the curator that is measured (`curator` alone) [default: 1000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(200..=10_000))]
    nodes: Option<u32>,
}

impl Args {
    fn cpus(&self) -> u32 {
        self.cpus.unwrap_or(CPUS)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    /// From a changed line to the program and to its quick tests, in four places.
    Build,
    /// Building the image: nothing changed, one line changed, cold. Its size by part.
    Image,
    /// From the start of QEMU to a node that is ready, beside the floor; memory at rest.
    Boot,
    /// A flush on each kind of data partition, and a first boot with it.
    Storage,
    /// The cost of the console: memory, processor at rest and under a flood of log lines.
    Console,
    /// A curator with many nodes (`--nodes`) and 200 watchers: delays, processor, memory.
    Curator,
    /// Three nodes from nothing, by part; all from cold; the death of a leader.
    Cluster,
    /// One machine with both roles of Kubernetes, and one where a script starts the same
    /// programs: to each part and to a pod that answers; memory of each part at rest. Under
    /// emulation ten to twenty minutes a run.
    Kubernetes,
}

impl Name {
    /// The requirements of the host.
    fn needs(self) -> &'static [&'static [host::Need]] {
        match self {
            Self::Build => &[host::BUILD],
            Self::Image | Self::Curator => &[host::PAYLOAD, host::BUILD],
            Self::Boot | Self::Storage | Self::Console | Self::Cluster => {
                &[run::QEMU, host::PAYLOAD, host::BUILD]
            }
            Self::Kubernetes => &[run::QEMU, host::PAYLOAD, host::BUILD, kubernetes::NEEDS],
        }
    }
}

/// Rejects an option that the named measurement would ignore.
///
/// # Errors
///
/// There is one.
fn reject_ignored(args: &Args) -> Result<(), host::Usage> {
    let Some(name) = args.name else { return Ok(()) };
    let machines = [Name::Boot, Name::Storage, Name::Console, Name::Kubernetes];
    let options: [(bool, &str, &[Name]); 6] = [
        (args.beside.is_some(), "--beside", &[Name::Boot]),
        (args.count, "--count", &[Name::Boot]),
        (args.direct, "--direct", &[Name::Boot]),
        (args.cold, "--cold", &[Name::Image]),
        (args.nodes.is_some(), "--nodes", &[Name::Curator]),
        (args.cpus.is_some(), "--cpus", &machines),
    ];
    for (given, option, of) in options {
        if given && !of.contains(&name) {
            let value = |name: &Name| Some(name.to_possible_value()?.get_name().to_owned());
            let of: Vec<_> = of.iter().filter_map(value).collect();
            return Err(host::Usage(format!("{option} is an option of {} alone", of.join(", "))));
        }
    }
    Ok(())
}

/// Rejects what would end a measurement only after its builds: an option that it would ignore, and
/// an image of `--beside` that is not there.
fn check(args: &Args) -> Result<()> {
    reject_ignored(args)?;
    args.beside.as_deref().map(Image::load).transpose()?;
    Ok(())
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    check(&args)?;
    // A second process would empty the folders that the first one measures in.
    let _lock = Lock::of_measurements(&crate::image::workspace().join("target"))?;
    let all = Name::value_variants();
    let names = args.name.as_ref().map_or(all, std::slice::from_ref);
    // Before the first measurement, which may take an hour.
    let needs: Vec<_> = names.iter().flat_map(|name| name.needs()).copied().collect();
    host::require(&needs)?;
    let stop = Stop::new()?;
    for name in names {
        // One that came at the end of the measurement before, which has restored everything.
        stop.check()?;
        let table = match *name {
            Name::Boot => boot::measure(&args)?,
            Name::Storage => storage::measure(&args)?,
            Name::Console => console::measure(&args)?,
            Name::Build => build::measure(args.runs, &stop)?,
            Name::Image => image::measure(&args, &stop)?,
            Name::Curator => curator::measure(args.runs, args.nodes.unwrap_or(NODES) as usize)?,
            Name::Cluster => cluster::measure(args.runs)?,
            Name::Kubernetes => kubernetes::measure(&args)?,
        };
        table.publish()?;
    }
    Ok(())
}

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Table {
    name: &'static str,
    command: String,
    date: String,
    machine: String,
    rows: Vec<Row>,
}

/// One quantity and its values.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    unit: &'static str,
    values: Vec<f64>,
    /// The goal of the median.
    goal: Option<f64>,
}

impl Row {
    fn new(name: impl Into<String>, unit: &'static str) -> Self {
        Self { name: name.into(), unit, values: Vec::new(), goal: None }
    }

    fn goal(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }

    /// The middle value, or the mean of the two in the middle.
    fn median(&self) -> f64 {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.get(middle) {
            None => f64::NAN,
            Some(upper) if sorted.len() % 2 == 1 => *upper,
            Some(upper) => f64::midpoint(sorted[middle - 1], *upper),
        }
    }

    fn cells(&self) -> [String; 5] {
        let digits = if self.unit == "bytes" || self.unit == "KiB" { 0 } else { 2 };
        let show = |value: f64| format!("{value:.digits$}");
        let least = self.values.iter().copied().fold(f64::NAN, f64::min);
        let most = self.values.iter().copied().fold(f64::NAN, f64::max);
        let median = self.median();
        let goal = self.goal.map_or_else(String::new, |goal| {
            let verdict = if median <= goal { "met" } else { "missed" };
            format!("{} ({verdict})", show(goal))
        });
        let range = match self.values.len() {
            0 | 1 => String::new(),
            _ => format!("{} to {}", show(least), show(most)),
        };
        [self.name.clone(), self.unit.to_owned(), show(median), range, goal]
    }
}

impl Table {
    fn new(name: &'static str, runs: u32) -> Result<Self> {
        let command = format!("cargo xtask bench {name} --runs {runs}");
        Ok(Self { name, command, date: date()?, machine: machine(), rows: Vec::new() })
    }

    /// Prints the table as `docs/benchmarks.md` has it, and writes it for programs.
    fn publish(&self) -> Result<()> {
        println!("\n{}; `{}`; {}\n", self.date, self.command, self.machine);
        print!("{}", self.markdown());
        let folder = crate::image::workspace().join("target/bench");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let file = folder.join(format!("{}.json", self.name));
        let text = serde_json::to_string_pretty(self).context("cannot encode the table")?;
        fs::write(&file, text + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
        println!("\nall values: {}", file.display());
        Ok(())
    }

    fn markdown(&self) -> String {
        let heads = ["what", "unit", "median", "range", "goal"].map(str::to_owned);
        let rows: Vec<[String; 5]> =
            std::iter::once(heads).chain(self.rows.iter().map(Row::cells)).collect();
        let widths: [usize; 5] = std::array::from_fn(|column| {
            rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
        });
        let mut text = String::new();
        for (index, row) in rows.iter().enumerate() {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!(" {cell:<width$} |"));
            text.extend(std::iter::once("|".to_owned()).chain(cells));
            text.push('\n');
            if index == 0 {
                text.push('|');
                text.extend(widths.map(|width| format!("{}|", "-".repeat(width + 2))));
                text.push('\n');
            }
        }
        text
    }
}

fn date() -> Result<String> {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d"]).output();
    let output = output.context("cannot start date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Processor, cores, memory and QEMU of this host, in one line.
fn machine() -> String {
    let field = |file: &str, key: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default().to_owned();
        line.split_once(':').map_or_else(String::new, |(_, value)| value.trim().to_owned())
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = field("/proc/meminfo", "MemTotal");
    let kibibytes: u64 =
        memory.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or_default();
    let qemu = polis_qemu::host::version()
        .map_or_else(|| "no QEMU".to_owned(), |(major, minor)| format!("QEMU {major}.{minor}"));
    let accelerator = polis_qemu::host::accelerator(polis_qemu::host::Preference::Auto, 1);
    format!(
        "{}, {cores} processors, {} GiB, {qemu} guests run {accelerator}",
        field("/proc/cpuinfo", "model name"),
        kibibytes / (1 << 20),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn an_option_of_another_measurement_is_wrong_usage() {
        let checked = |words: &str| {
            let words = std::iter::once("bench").chain(words.split_whitespace());
            reject_ignored(&<Line as clap::Parser>::parse_from(words).args)
        };
        for (words, of) in [
            ("storage --count", "boot"),
            ("image --beside x", "boot"),
            ("console --direct", "boot"),
            ("boot --cold", "image"),
            ("boot --nodes 500", "curator"),
            ("cluster --cpus 1", "boot, storage, console, kubernetes"),
        ] {
            let error = checked(words).unwrap_err().to_string();
            assert!(error.ends_with(&format!("is an option of {of} alone")), "{words}: {error}");
        }
        for words in [
            "boot --count --beside x --direct --cpus 1",
            "image --cold",
            "curator --nodes 500",
            "kubernetes --cpus 4",
            "--count --cold --cpus 1",
            "console",
        ] {
            checked(words).unwrap();
        }
    }

    #[test]
    fn an_image_beside_that_is_not_there_is_named_before_anything_is_built() {
        let words = ["bench", "boot", "--beside", "/nonexistent"];
        let error = check(&<Line as clap::Parser>::parse_from(words).args).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/manifest.json"), "{error:#}");
    }

    #[test]
    fn every_measurement_compiles_so_it_needs_what_a_build_needs() {
        for name in Name::value_variants() {
            assert!(name.needs().contains(&host::BUILD), "{name:?}");
        }
    }

    fn row(values: &[f64]) -> Row {
        Row { values: values.to_vec(), ..Row::new("x", "s") }
    }

    #[test]
    fn a_median_is_the_middle_or_between_the_two_in_the_middle() {
        assert!((row(&[9.0, 1.0, 2.0]).median() - 2.0).abs() < 1e-9);
        assert!((row(&[9.0, 1.0, 2.0, 4.0]).median() - 3.0).abs() < 1e-9);
        assert!(row(&[]).median().is_nan());
    }

    #[test]
    fn a_table_shows_median_range_and_whether_the_goal_is_met() {
        let table = Table {
            name: "boot",
            command: "c".to_owned(),
            date: "d".to_owned(),
            machine: "m".to_owned(),
            rows: vec![
                Row { name: "first boot".to_owned(), ..row(&[3.0, 1.0, 2.0]).goal(2.5) },
                Row { unit: "bytes", ..row(&[10.0]).goal(9.0) },
            ],
        };
        insta::assert_snapshot!(table.markdown(), @r"
        | what       | unit  | median | range        | goal       |
        |------------|-------|--------|--------------|------------|
        | first boot | s     | 2.00   | 1.00 to 3.00 | 2.50 (met) |
        | x          | bytes | 10     |              | 9 (missed) |
        ");
    }
}
