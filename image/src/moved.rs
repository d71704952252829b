//! A package in which a payload differs from the lock file (`difference` finds them).

use std::fmt;

use serde::{Deserialize, Serialize};

/// A package that differs from the lock file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Its name today.
    pub package: String,
    /// The version in the lock file; absent when a dependency brought the package.
    pub locked: Option<String>,
    /// The version in the image; absent when the archive no longer has the package.
    pub used: Option<String>,
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { package, locked, used } = self;
        let locked = locked.as_deref().unwrap_or("(not in the lock)");
        let used = used.as_deref().unwrap_or("(none)");
        write!(f, "{package} {locked} -> {used}")
    }
}
