//! A directory for the sockets of one server.

use std::path::{Path, PathBuf};

use super::file::Dir;
use super::owner::Group;

/// A directory that makes a socket accessible to root only, unless its place says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sockets {
    /// The directory itself.
    pub dir: Dir,
    client: PathBuf,
}

impl Sockets {
    pub(super) fn at(base: PathBuf, name: &str) -> Self {
        Self { client: base.join(name), dir: Dir::private(base) }
    }

    /// The same sockets, which this group may reach, too, if their owner makes them with a
    /// mode that lets it.
    pub(super) fn reached_by(self, group: Group) -> Self {
        Self { dir: self.dir.for_sockets_of(group), ..self }
    }

    /// Where clients connect.
    #[must_use]
    pub fn client(&self) -> &Path {
        &self.client
    }

    /// The socket for plain HTTP, if the server keeps the two apart.
    #[must_use]
    pub fn http(&self) -> PathBuf {
        self.dir.path().join("http.sock")
    }
}
