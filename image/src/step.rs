//! The steps of a build, each run only when one of its inputs has changed.
//!
//! A step names its inputs (content hashes under readable labels), its outputs, and the
//! work. After the work a record is written; the next time, an equal record means that
//! the step is up to date.
//!
//! ```text
//! record absent ------------------\
//! an input differs ----------------> work --> outputs --> record --> [built, why]
//! an output is gone or touched ---/
//! otherwise -------------------------------------------------------> [cached]
//! ```
//!
//! Invariants:
//! - The record is removed before the work and written after it, so interrupted work is
//!   done again.
//! - The source text of a step is one of its inputs: a changed recipe runs.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    digest::{Digests, Stamp, hash},
    error::{At as _, Result},
    moved::Moved,
};

/// The report of a step, for observers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The step.
    pub name: &'static str,
    /// How long it took.
    pub time: Duration,
    /// Why it ran; `None` when its outputs were up to date.
    pub why: Option<String>,
}

/// Watches a build. Called from several threads.
pub trait Observer: Sync {
    /// Another process works in this folder, and the build waits for its end.
    fn waits(&self, folder: &Path);
    /// A step has work to do, and begins with it.
    fn begin(&self, name: &'static str);
    /// A step has ended.
    fn step(&self, report: &Report);
    /// A package differs from the lock.
    fn moved(&self, moved: &Moved);
    /// Long work has got so far. Ends with `done == total`.
    fn progress(&self, what: &str, done: u64, total: u64, unit: Unit);
}

/// The unit of the progress of long work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Go modules.
    Modules,
    /// Packages of a Go program.
    Packages,
}

/// Ignores all reports.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Observer for Silent {
    fn waits(&self, _: &Path) {}
    fn begin(&self, _: &'static str) {}
    fn step(&self, _: &Report) {}
    fn moved(&self, _: &Moved) {}
    fn progress(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

/// Inputs of a step: hashes by label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inputs(BTreeMap<String, String>);

impl Inputs {
    /// Starts from the source texts that hold the step's rules.
    pub(crate) fn recipe(sources: &[&str]) -> Self {
        Self::default().text("its recipe", &sources.concat())
    }

    pub(crate) fn text(mut self, label: &str, text: &str) -> Self {
        self.0.insert(label.to_owned(), hash(text.as_bytes()));
        self
    }

    pub(crate) fn file(mut self, label: &str, path: &Path, digests: &Digests) -> Result<Self> {
        self.0.insert(label.to_owned(), digests.of(path)?);
        Ok(self)
    }

    /// One hash for all of them.
    pub(crate) fn digest(&self) -> String {
        hash(format!("{:?}", self.0).as_bytes())
    }

    /// Which labels differ from `before`, in words.
    fn changed(&self, before: &Self) -> Option<String> {
        let mut labels: Vec<&str> = self
            .0
            .iter()
            .filter(|(label, digest)| before.0.get(*label) != Some(*digest))
            .map(|(label, _)| label.as_str())
            .collect();
        labels.extend(
            before.0.keys().filter(|label| !self.0.contains_key(*label)).map(String::as_str),
        );
        (!labels.is_empty()).then(|| format!("{} changed", labels.join(", ")))
    }
}

/// The record of a step that has run.
#[derive(Debug, Serialize, Deserialize)]
struct Record<T> {
    inputs: Inputs,
    outputs: Vec<(PathBuf, Stamp)>,
    value: T,
}

/// Runs steps for one output folder.
pub(crate) struct Steps<'a> {
    folder: PathBuf,
    pub(crate) digests: Digests,
    pub(crate) observer: &'a dyn Observer,
}

impl<'a> Steps<'a> {
    /// Keeps records in `folder`.
    pub(crate) fn open(folder: PathBuf, observer: &'a dyn Observer) -> Result<Self> {
        fs::create_dir_all(&folder).at("make", &folder)?;
        let digests = Digests::open(folder.join("digests.json"));
        Ok(Self { folder, digests, observer })
    }

    /// Whether [`Self::run`] would find the outputs of a step up to date.
    pub(crate) fn fresh(&self, name: &str, inputs: &Inputs, outputs: &[PathBuf]) -> bool {
        let record = read::<serde_json::Value>(&self.folder.join(format!("{name}.json")));
        record.is_some_and(|record| {
            inputs.changed(&record.inputs).or_else(|| touched(&record, outputs)).is_none()
        })
    }

    /// Runs `work` unless its outputs are up to date.
    pub(crate) fn run<T: Serialize + DeserializeOwned>(
        &self,
        name: &'static str,
        inputs: Inputs,
        outputs: &[PathBuf],
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let path = self.folder.join(format!("{name}.json"));
        let why = match read::<T>(&path) {
            None => "first build".to_owned(),
            Some(record) => {
                match inputs.changed(&record.inputs).or_else(|| touched(&record, outputs)) {
                    None => {
                        self.observer.step(&Report { name, time: start.elapsed(), why: None });
                        return Ok(record.value);
                    }
                    Some(why) => {
                        fs::remove_file(&path).at("remove", &path)?;
                        why
                    }
                }
            }
        };
        self.observer.begin(name);
        let value = work()?;
        let outputs = outputs
            .iter()
            .map(|output| Ok((output.clone(), Stamp::of(output)?)))
            .collect::<Result<_>>()?;
        let record = Record { inputs, outputs, value };
        let bytes = serde_json::to_vec(&record).map_err(std::io::Error::from);
        fs::write(&path, bytes.at("describe", &path)?).at("write", &path)?;
        self.observer.step(&Report { name, time: start.elapsed(), why: Some(why) });
        Ok(record.value)
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<Record<T>> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Returns the output that has changed since the step, if any.
fn touched<T>(record: &Record<T>, outputs: &[PathBuf]) -> Option<String> {
    outputs.iter().find_map(|output| {
        let name = output.file_name().unwrap_or(output.as_os_str()).display();
        let Some((_, before)) = record.outputs.iter().find(|(path, _)| path == output) else {
            return Some(format!("{name} is a new output"));
        };
        match Stamp::of(output) {
            Ok(now) if now == *before => None,
            Ok(_) => Some(format!("{name} was changed")),
            Err(_) => Some(format!("{name} is missing")),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Seen(Mutex<Vec<Option<String>>>);

    impl Observer for Seen {
        fn step(&self, report: &Report) {
            self.0.lock().unwrap().push(report.why.clone());
        }
        fn waits(&self, _: &Path) {}
        fn begin(&self, _: &'static str) {}
        fn moved(&self, _: &Moved) {}
        fn progress(&self, _: &str, _: u64, _: u64, _: Unit) {}
    }

    #[test]
    fn a_step_runs_when_an_input_or_an_output_changed_and_says_which() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out");
        let seen = Seen::default();
        let steps = Steps::open(folder.path().join("steps"), &seen).unwrap();
        let run = |text: &str| {
            let work = || fs::write(&output, text).at("write", &output);
            steps
                .run("s", Inputs::default().text("node", text), std::slice::from_ref(&output), work)
                .unwrap();
        };
        let fresh = |text: &str| {
            let inputs = Inputs::default().text("node", text);
            steps.fresh("s", &inputs, std::slice::from_ref(&output))
        };
        assert!(!fresh("a"));
        run("a");
        assert!(fresh("a") && !fresh("b"));
        run("a");
        run("b");
        fs::remove_file(&output).unwrap();
        run("b");
        fs::write(&output, "other").unwrap();
        run("b");
        run("b");
        let whys = seen.0.lock().unwrap().clone();
        let whys: Vec<_> = whys.iter().map(Option::as_deref).collect();
        assert_eq!(
            whys,
            [
                Some("first build"),
                None,
                Some("node changed"),
                Some("out is missing"),
                Some("out was changed"),
                None
            ]
        );
    }

    #[test]
    fn work_that_failed_is_done_again() {
        let folder = tempfile::tempdir().unwrap();
        let steps = Steps::open(folder.path().join("steps"), &Silent).unwrap();
        let inputs = || Inputs::default().text("x", "1");
        steps.run("s", inputs(), &[], || Ok(1)).unwrap();
        let other = Inputs::default().text("x", "2");
        let error = crate::Error::NoMirror;
        assert!(steps.run::<u8>("s", other, &[], || Err(error)).is_err());
        assert_eq!(steps.run("s", inputs(), &[], || Ok(2)).unwrap(), 2);
    }
}
