//! The workload stack in a trial: which of its parts were ready before the update, and which of
//! those the new system has lost.
//!
//! ```text
//! the system before: the parts that are ready --install--> /data/node/trial.json
//!                                                               |
//! the new system:    the parts that the roles ask for ----------+--> a part that is lost
//! ```
//!
//! Invariants:
//! - A part counts only if it was ready when this version was installed: the update may be what
//!   mends the others. Without a record of this version, no part counts.
//! - A part that the roles of the node no longer ask for does not count.
//!
//! What this module does not do: know what a part needs to be ready (`polis-workload`).

use polis_base::files::{Error, File};
use semver::Version;
use serde::{Deserialize, Serialize};
use tracing::warn;

/// A part that the roles of this node ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// What is wrong with it; `None` while it is ready.
    pub fault: Option<String>,
}

/// The parts of the workload stack of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// Those that its roles ask for, in the order of their start; `None` before the roles are
    /// known.
    pub parts: Option<Vec<Part>>,
    /// Whether one of them is an API server.
    pub api_server: bool,
}

impl Workload {
    /// The first part of `before` that is not ready: the later ones may wait for it.
    pub(super) fn lost(&self, before: &[String]) -> Option<String> {
        let Some(parts) = &self.parts else {
            return Some("the roles of the node are not known yet".to_owned());
        };
        let mut counted = parts.iter().filter(|part| before.iter().any(|name| name == part.name));
        counted.find_map(|Part { name, fault }| {
            let fault = fault.as_ref()?;
            Some(format!("{name} was ready before the update and is not: {fault}"))
        })
    }

    fn ready(&self) -> Vec<String> {
        let parts = self.parts.iter().flatten().filter(|part| part.fault.is_none());
        parts.map(|part| part.name.to_owned()).collect()
    }
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// The version that was installed.
    version: String,
    /// The parts that were ready then.
    ready: Vec<String>,
}

/// Notes which parts are ready while `version` is installed. Blocks.
pub(super) fn note(file: &File, version: &Version, workload: &Workload) -> Result<(), Error> {
    let record = Record { version: version.to_string(), ready: workload.ready() };
    // Texts alone: nothing can fail.
    file.write(&serde_json::to_vec(&record).unwrap_or_default())
}

/// The parts that were ready when `version` was installed. Blocks.
pub(super) fn before(file: &File, version: &Version) -> Vec<String> {
    let bytes = match file.read() {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Vec::new(),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot read which workloads were ready before the update");
            return Vec::new();
        }
    };
    match serde_json::from_slice::<Record>(&bytes) {
        Ok(record) if record.version == version.to_string() => record.ready,
        Ok(_of_another) => Vec::new(),
        Err(error) => {
            warn!(%error, "the record of the workloads before the update is damaged");
            Vec::new()
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use polis_base::files::Root;

    use super::*;

    /// These parts, each with what is wrong with it; empty: it is ready.
    pub(crate) fn with(parts: &[(&'static str, &str)]) -> Workload {
        let part = |(name, fault): &(&'static str, &str)| Part {
            name,
            fault: (!fault.is_empty()).then(|| (*fault).to_owned()),
        };
        Workload { parts: Some(parts.iter().map(part).collect()), api_server: false }
    }

    #[test]
    fn a_part_that_was_ready_before_the_update_is_missed_while_the_roles_ask_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Root::at(folder.path()).data.node;
        let (new, other) = (Version::new(1, 1, 0), Version::new(1, 2, 0));
        assert_eq!(before(&tree.trial, &new), Vec::<String>::new(), "there is no record");
        std::fs::create_dir_all(tree.dir.path()).unwrap();
        let old = with(&[("containerd", ""), ("kubelet", ""), ("dns", "no port")]);
        note(&tree.trial, &new, &old).unwrap();
        assert_eq!(before(&tree.trial, &other), Vec::<String>::new(), "it is of another version");
        let before = before(&tree.trial, &new);
        assert_eq!(before, ["containerd", "kubelet"]);
        let lost = |parts: &[_]| with(parts).lost(&before);
        assert_eq!(lost(&[("containerd", ""), ("kubelet", ""), ("dns", "no port")]), None);
        let first = lost(&[("containerd", "no root"), ("kubelet", "it is starting")]).unwrap();
        assert_eq!(first, "containerd was ready before the update and is not: no root");
        assert!(lost(&[("containerd", ""), ("kubelet", "exited")]).unwrap().starts_with("kubelet"));
        assert_eq!(lost(&[]), None, "the role was removed");
        let unknown = Workload::default().lost(&before).unwrap();
        assert_eq!(unknown, "the roles of the node are not known yet");
    }

    #[test]
    fn a_damaged_record_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Root::at(folder.path()).data.node;
        std::fs::create_dir_all(tree.dir.path()).unwrap();
        for content in ["", "{", "[]", r#"{"version":"1.1.0"}"#] {
            tree.trial.write(content.as_bytes()).unwrap();
            assert_eq!(before(&tree.trial, &Version::new(1, 1, 0)), Vec::<String>::new());
        }
    }
}
