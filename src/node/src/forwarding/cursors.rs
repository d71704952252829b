//! The cursors of all targets: how far each has the log, in one file on the data partition.
//!
//! The file is replaced whole. A target that is not in it begins with the oldest line of the
//! ring, and so does every target where the file is damaged: lines arrive twice then, and no
//! line is lost.

use std::collections::BTreeMap;

use polis_base::files::{Error, File};
use polis_runtime::logtree::ring::Place;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::blocking;
use serde::{Deserialize, Serialize};
use tracing::warn;

/// How far one target has the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cursor {
    /// Everything before it is delivered; `None`: nothing.
    pub(super) place: Option<Place>,
    /// Records that the ring overwrote before they were delivered.
    #[serde(default)]
    pub(super) missing: u64,
    /// Records that the target rejected.
    #[serde(default)]
    pub(super) rejected: u64,
}

/// The cursors by the URL of the target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cursors {
    pub(super) targets: BTreeMap<String, Cursor>,
}

impl Cursors {
    /// Those that the file has.
    pub(super) async fn load(file: &File) -> Result<Self, Error> {
        let file = file.clone();
        let Some(bytes) = blocking(move || file.read()).await? else { return Ok(Self::default()) };
        Ok(serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            warn!(%error, "the cursors of the log are damaged: every kept line is sent again");
            Self::default()
        }))
    }

    /// Writes the file.
    pub(super) async fn save(&self, file: &File) -> Result<(), Error> {
        // Keys of maps are texts here, and nothing else can fail.
        file.save(serde_json::to_vec(self).unwrap_or_default()).await
    }
}
