//! `cargo xtask bench build`: how long a person waits after one line has changed.
//!
//! For each place in the sources: one line changes, cargo builds the program that has it, as
//! `run` and the stories build it, and then the quick tests of the package run. Cargo and
//! the compiler do what they do in daily work, with everything else built before.
//!
//! The line is a value that the program keeps, since a comment would leave it as it was.
//! The file is restored afterwards, also after a failure or a signal.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use polis_image::Kind;

use super::stop::Stop;
use super::{Row, Table};
use crate::image::{self, workspace};

/// Where a line changes.
struct Place {
    name: &'static str,
    file: &'static str,
    package: &'static str,
    program: &'static str,
    /// The most seconds until the program is built.
    goal: f64,
}

/// The goals are shares of the time from before the sources were divided into crates, on two
/// busy processors: 0.15 of 296 s for `polisctl` and of 360 s for `node` with `init`, and 0.4
/// of the latter for a service.
const PLACES: [Place; 4] = [
    Place {
        name: "a command of polisctl",
        file: "src/polisctl/src/units.rs",
        package: "polisctl",
        program: "polisctl",
        goal: 44.0,
    },
    Place {
        name: "init",
        file: "src/init/src/shutdown.rs",
        package: "polis-init",
        program: "init",
        goal: 54.0,
    },
    Place {
        name: "a service of the node",
        file: "src/machine/src/network/service/mod.rs",
        package: "polis-machine",
        program: "node",
        goal: 144.0,
    },
    Place {
        name: "a page of the console",
        file: "tui/src/header.rs",
        package: "polis-tui",
        program: "node",
        goal: 54.0,
    },
];

pub(super) fn measure(runs: u32, stop: &Stop) -> Result<Table> {
    let mut table = Table::new("build", runs)?;
    let _held = stop.hold();
    for place in &PLACES {
        let mut built = Row::new(format!("{}: {} is built", place.name, place.program), "s");
        built.goal = Some(place.goal);
        let tests = format!("{}: and the quick tests of {} have run", place.name, place.package);
        let mut tested = Row::new(tests, "s");
        place.build()?;
        place.test()?;
        for run in 0..runs {
            stop.check()?;
            let _changed = Changed::new(place.file, run)?;
            let start = Instant::now();
            place.build()?;
            built.values.push(start.elapsed().as_secs_f64());
            place.test()?;
            tested.values.push(start.elapsed().as_secs_f64());
        }
        table.rows.extend([built, tested]);
    }
    Ok(table)
}

impl Place {
    fn build(&self) -> Result<()> {
        image::build_programs(Kind::Development, &[self.program]).map(drop)
    }

    fn test(&self) -> Result<()> {
        let mut command: Command = image::cargo(&workspace());
        let command = command.args(["test", "--quiet", "--lib", "--package", self.package]);
        let status = command.stdout(Stdio::null()).status().context("cannot start cargo")?;
        ensure!(status.success(), "the quick tests of {} ended with {status}", self.package);
        Ok(())
    }
}

/// A source file with one more line, until this value is dropped.
pub(super) struct Changed {
    path: PathBuf,
    text: String,
}

impl Changed {
    /// Adds a line, another one in each `run`.
    pub(super) fn new(file: &str, run: u32) -> Result<Self> {
        let path = workspace().join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {file}"))?;
        let changed = Self { path, text };
        // `#[used]` keeps it in the program, which a comment would not change.
        let line = format!("\n#[used]\nstatic MEASURED: u32 = {run};\n");
        fs::write(&changed.path, format!("{}{line}", changed.text))
            .with_context(|| format!("cannot change {file}"))?;
        Ok(changed)
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, &self.text) {
            eprintln!("bench: cannot restore {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_a_file_of_its_package() {
        for place in &PLACES {
            let file = workspace().join(place.file);
            assert!(file.is_file(), "{}", place.file);
            let folder = file.ancestors().find(|folder| folder.join("Cargo.toml").is_file());
            let manifest = fs::read_to_string(folder.unwrap().join("Cargo.toml")).unwrap();
            assert!(manifest.contains(&format!("name = \"{}\"", place.package)), "{}", place.name);
        }
    }

    #[test]
    fn a_changed_file_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.rs");
        fs::write(&path, "fn x() {}\n").unwrap();
        let changed = Changed::new(&path.display().to_string(), 3).unwrap();
        assert!(fs::read_to_string(&path).unwrap().contains("MEASURED: u32 = 3;"));
        drop(changed);
        assert_eq!(fs::read_to_string(&path).unwrap(), "fn x() {}\n");
    }
}
