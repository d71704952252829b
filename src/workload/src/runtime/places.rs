//! Where the container runtime has its programs, its files and its images.

use std::path::PathBuf;

use super::gvisor;
use crate::host;
use polis_base::files;

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program.
    pub binary: PathBuf,
    /// The directory with the programs that containerd starts.
    pub programs: PathBuf,
    /// The configuration of gVisor, at the one path where its shim looks before it has that
    /// of the handler.
    pub gvisor: files::File,
    /// The OCI layout with the images of the system.
    pub images: PathBuf,
    /// The tree of the node.
    pub tree: files::Root,
    /// The interfaces of the machine.
    pub host: host::Config,
}

impl Config {
    /// The places of a running node.
    #[must_use]
    pub fn live(tree: &files::Root) -> Self {
        Self {
            binary: "/usr/bin/containerd".into(),
            programs: "/usr/bin".into(),
            gvisor: files::File::public(gvisor::CONFIGURATION.into()),
            images: "/usr/share/polis/images".into(),
            tree: tree.clone(),
            host: host::Config::live(tree),
        }
    }

    /// Whether containerd was prepared since the boot, by this process or by one before it:
    /// its configuration lies in memory until everything has ended.
    pub(super) fn has_run(&self) -> bool {
        self.tree.ephemeral.containerd_config.path().exists()
    }
}
