//! The settings of a child between fork and exec: its control group, its place in the order
//! of the OOM killer, the numbers of files and of processes that it may have, the modes of the
//! files that it makes, and its confinement.
//!
//! [`Limits::open`] runs in the node and does everything that allocates or may fail with a
//! path in its error; [`Opened::apply`] runs in the child and makes system calls only.
//!
//! What this module does not do: make control groups (`workload::host` of the node), or
//! decide what a confined program may do (`confine`).

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::confine::{self, Confinement};

/// The file of a control group that moves processes into it.
const MEMBERS: &str = "cgroup.procs";
/// In that file, the number of the process that writes.
const WRITER: &[u8] = b"0";

/// The limits of a command that is not started yet.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// The directory of the control group.
    pub(super) cgroup: Option<PathBuf>,
    /// From -1000 (never killed) to 1000 (killed first).
    pub(super) oom_score_adj: Option<i16>,
    /// The bound of open descriptors, soft and hard.
    pub(super) open_files: Option<u64>,
    /// The bound of processes and threads of its user, soft and hard.
    pub(super) processes: Option<u64>,
    /// The bits that no file of its making has.
    pub(super) umask: Option<Mode>,
    /// Its confinement. On the heap, since futures hold a command.
    pub(super) confinement: Option<Box<Confinement>>,
}

/// Why the limits cannot be set.
#[derive(Debug)]
pub(super) enum Refused {
    /// Its control group does not exist.
    NoGroup { cgroup: PathBuf, source: io::Error },
    /// Its confinement cannot be made.
    Confinement(Box<confine::Error>),
}

impl Limits {
    /// Opens what the child needs to become `program`.
    pub(super) fn open(self, program: &Path) -> Result<Opened, Refused> {
        let cgroup = self.cgroup.map(|cgroup| match open_members(&cgroup) {
            Ok(opened) => Ok(opened),
            Err(source) => Err(Refused::NoGroup { cgroup, source }),
        });
        Ok(Opened {
            cgroup: cgroup.transpose()?,
            oom_score_adj: self.oom_score_adj.map(|score| score.to_string().into_bytes()),
            open_files: self.open_files,
            processes: self.processes,
            umask: self.umask,
            confinement: self
                .confinement
                .map(|confinement| confinement.open(program).map(Box::new))
                .transpose()
                .map_err(|error| Refused::Confinement(Box::new(error)))?,
        })
    }
}

fn open_members(cgroup: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(cgroup.join(MEMBERS), flags, Mode::empty())?)
}

/// Limits that the child sets for itself.
#[derive(Debug)]
pub(super) struct Opened {
    cgroup: Option<OwnedFd>,
    oom_score_adj: Option<Vec<u8>>,
    open_files: Option<u64>,
    processes: Option<u64>,
    umask: Option<Mode>,
    confinement: Option<Box<confine::Opened>>,
}

impl Opened {
    /// Sets them for this process. Only makes system calls: neither allocates nor locks.
    pub(super) fn apply(&self) -> io::Result<()> {
        if let Some(members) = &self.cgroup {
            rustix::io::write(members, WRITER)?;
        }
        if let Some(score) = &self.oom_score_adj {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let file = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
            rustix::io::write(&file, score)?;
        }
        let bounds = [(Resource::Nofile, self.open_files), (Resource::Nproc, self.processes)];
        for (resource, count) in bounds {
            if count.is_some() {
                setrlimit(resource, Rlimit { current: count, maximum: count })?;
            }
        }
        if let Some(umask) = self.umask {
            rustix::process::umask(umask);
        }
        // Last: the others need the rights of the node.
        self.confinement.as_ref().map_or(Ok(()), |confinement| confinement.apply())
    }
}
