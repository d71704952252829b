//! Writing another system to the disk, while this one runs.
//!
//! ```text
//! manifest checked --> other kernel images removed --> kernel: polis.new, system: the other slot
//!   --> flushed --> read back from the disk --> BootNext --> polis-V+1.efi --> flushed
//! ```
//!
//! Invariants:
//! - The manifest is checked, signature and all, before anything is changed.
//! - A run that ends anywhere leaves the running system as the only one that the loader
//!   lists, or both whole. The next run begins anew, or goes on where the transfer of the same
//!   bundle broke (`receive`).

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use polis_bundle::{
    Bundle, EtcdTarget, KubernetesProgram, KubernetesTarget, Manifest, Part, SECURITY_LEVEL, Target,
};
use semver::Version;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tracing::{info, warn};

use super::entry::{self, Entry, Standing, UNFINISHED};
use super::receive::{self, Unfinished};
use super::{Config, Error, Other, Phase, Progress, Status, Step, Turn, workload};
use crate::storage::fat;
use crate::storage::slot::Slot;
use polis_base::hex;
use polis_base::sys::efivar;
use polis_base::sys::files::forget;

/// How much is read back at a time.
const CHUNK: usize = 1 << 20;

/// A system that is on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Its version.
    pub version: Version,
    /// Its slot.
    pub slot: &'static str,
}

impl Turn {
    /// Reads a bundle and puts its system on the disk; the next start of the machine tries it.
    /// Blocks for as long as the disk and the sender take.
    ///
    /// `bundle` begins at the byte `at` of the bundle: zero, or where the unfinished one of this
    /// purpose ends. `etcd` is that of the cluster, as far as this node knows it.
    ///
    /// # Errors
    ///
    /// [`Error`]: the running system is as it was.
    pub fn install(
        mut self,
        bundle: impl Read,
        at: u64,
        etcd: EtcdTarget,
        progress: &watch::Sender<Progress>,
    ) -> Result<Installed, Error> {
        let config = &*self.door.config;
        let running = entry::running(&config.efivars, &config.kernels)?;
        if running.standing != Standing::Good {
            return Err(Error::OnTrial);
        }
        Slot::check(&config.disk, &config.kernels)?;
        let place = Place {
            slot: Slot::beside(&config.slot, &config.disk)?,
            kernels: &config.kernels,
            running: &running.file,
        };
        let unfinished = self.left.system.as_ref();
        let (bundle, mut written) = receive::open(unfinished, at, bundle, &self.key)?;
        let (head, manifest) = (bundle.head().to_vec(), bundle.manifest().clone());
        manifest.suits(&place.target(config, etcd, self.api_server())?)?;
        self.left.system = None;
        let version = &manifest.version;
        let event = |step: Step, result: &str| step.line(version, place.slot.name, result);
        let (image, slot) = (&manifest.image, place.slot.name);
        info!(%version, image, slot, there = written, "an update is written");
        self.lines.event(event(Step::Write, "started"));
        let failed = |step, error: &Error| {
            let cause = polis_base::cause::line(error);
            warn!(%version, cause, "the update was not installed");
            self.lines.event(event(step, "failed").field("cause", cause));
        };
        let received = place.clear(written > 0).and_then(|()| {
            self.changed(None);
            place.write(bundle, &mut written, progress)
        });
        if let Err(error) = received {
            failed(Step::Write, &error);
            self.left.system = Unfinished::after(&error, &head, image, written);
            if self.left.system.is_none() {
                place.clear_unfinished();
            }
            return Err(error);
        }
        self.lines.event(event(Step::Write, "done"));
        self.lines.event(event(Step::Verify, "started"));
        let verified = place.verify(&manifest, progress).and_then(|()| {
            // Before the name, both: without a new kernel image, they change nothing.
            self.note_workload(version);
            prepare_a_second_attempt(&config.efivars);
            place.name(version)
        });
        verified.inspect_err(|error| {
            failed(Step::Verify, error);
            place.clear_unfinished();
        })?;
        self.lines.event(event(Step::Verify, "done"));
        info!(%version, "the update is on the disk; the next start tries it");
        self.changed(Some(Other {
            version: version.clone(),
            image: Some(image.clone()),
            slot: place.slot.name,
            standing: Standing::Untried,
            cause: None,
        }));
        Ok(Installed { version: manifest.version, slot: place.slot.name })
    }

    /// The API server that the roles of this node ask for. Other programs of Kubernetes depend on
    /// those of other nodes, which the leader knows.
    fn api_server(&self) -> Option<KubernetesTarget> {
        let runs = self.door.config.kubernetes.clone()?;
        let program = KubernetesProgram::ApiServer;
        self.door.workload.borrow().api_server.then_some(KubernetesTarget { runs, program })
    }

    /// Notes which workloads the trial of `version` must find ready.
    fn note_workload(&self, version: &Version) {
        let workload = self.door.workload.borrow().clone();
        if let Err(error) = workload::note(&self.door.config.before, version, &workload) {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot note which workloads are ready: the trial does not judge them");
        }
    }

    fn changed(&self, other: Option<Other>) {
        self.door.status.send_modify(|Status { other: known, .. }| *known = other);
    }
}

/// Where another system goes.
struct Place<'a> {
    slot: Slot,
    /// The folder of the kernel images.
    kernels: &'a Path,
    /// The one that runs.
    running: &'a str,
}

impl Place<'_> {
    /// The machine and system that a bundle has to suit.
    fn target(
        &self,
        config: &Config,
        etcd: EtcdTarget,
        kubernetes: Option<KubernetesTarget>,
    ) -> Result<Target, Error> {
        let version = Version::parse(&config.version)
            .map_err(|_not_a_version| Error::Version(config.version.clone()))?;
        Ok(Target {
            version,
            security_level: SECURITY_LEVEL,
            architecture: std::env::consts::ARCH.to_owned(),
            variant: config.variant.clone(),
            etcd,
            kubernetes,
            slot: self.slot.size,
            esp: self.room()?,
        })
    }

    /// Bytes that are free for a kernel image, once the others are gone.
    fn room(&self) -> Result<u64, Error> {
        let failed = || Error::io(format!("look at {}", self.kernels.display()));
        let space = rustix::fs::statvfs(self.kernels).map_err(io::Error::from).map_err(failed())?;
        let others = self.others()?.into_iter();
        let sizes = others.map(|file| Ok(fs::metadata(self.kernels.join(file))?.len()));
        let sizes: u64 = sizes.sum::<io::Result<u64>>().map_err(failed())?;
        Ok(space.f_bavail * space.f_frsize + sizes)
    }

    /// The kernel images that do not run, and what an earlier run has left.
    fn others(&self) -> Result<Vec<String>, Error> {
        let entries = entry::list(self.kernels)?.into_iter().map(|entry| entry.file);
        // FAT does not distinguish upper and lower case.
        let mut files: Vec<String> =
            entries.filter(|file| !file.eq_ignore_ascii_case(self.running)).collect();
        files.extend(self.kernels.join(UNFINISHED).exists().then(|| UNFINISHED.to_owned()));
        Ok(files)
    }

    /// Removes the other kernel images, for good. One that is unfinished stays if the transfer
    /// `resumes`.
    fn clear(&self, resumes: bool) -> Result<(), Error> {
        for file in self.others()?.iter().filter(|file| !resumes || *file != UNFINISHED) {
            let path = self.kernels.join(file);
            fs::remove_file(&path).map_err(Error::io(format!("remove {}", path.display())))?;
        }
        self.flush()
    }

    /// Writes both parts, but for the first `written` bytes, which are there. No name leads to the
    /// other slot by now.
    fn write<R: Read>(
        &self,
        bundle: Bundle<R>,
        written: &mut u64,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), Error> {
        let resumes = *written > 0;
        let path = self.kernels.join(UNFINISHED);
        let creating = || Error::io(format!("create {}", path.display()));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(!resumes);
        let kernel = options.open(&path).map_err(creating())?;
        let device = || self.slot.device.display();
        let opened = self.slot.open();
        let system = opened.map_err(Error::io(format!("open {}", device())))?;
        let places = [&kernel, &system].map(|file| receive::Place { file, at: 0 });
        let received = receive::parts(bundle, places, written, progress);
        // Also where the transfer broke: a file on the ESP is at risk until it is flushed.
        let flushed = kernel.sync_all().map_err(Error::io(format!("flush {}", path.display())));
        // A disk that fails leaves nothing to continue, also after a transfer that broke.
        flushed?;
        received?;
        system.sync_all().map_err(Error::io(format!("flush {}", device())))
    }

    /// Reads both parts back from the disk.
    fn verify(&self, manifest: &Manifest, progress: &watch::Sender<Progress>) -> Result<(), Error> {
        let total = receive::total(manifest);
        let mut bytes = 0;
        let mut more = |count| {
            bytes += count;
            progress.send_replace(Progress { phase: Phase::Verify, bytes, total });
        };
        let kernel = File::open(self.kernels.join(UNFINISHED));
        let system = self.slot.open();
        for ((name, part), file) in manifest.parts().into_iter().zip([kernel, system]) {
            let read = file.and_then(|file| {
                forget(&file)?;
                holds(file, part, &mut more)
            });
            if !read.map_err(Error::io(format!("read the {name} back")))? {
                return Err(Error::Differs(name));
            }
        }
        Ok(())
    }

    /// Gives the kernel image the name by which the loader tries it.
    fn name(&self, version: &Version) -> Result<(), Error> {
        let name = Entry::untried(version);
        let to = self.kernels.join(&name);
        let named = fat::rename(&self.kernels.join(UNFINISHED), &to);
        if named.is_err() {
            // It may have the name and not be flushed: the loader would try a failed installation.
            fs::remove_file(&to).unwrap_or_default();
        }
        named.map_err(Error::io(format!("make {name}")))
    }

    fn flush(&self) -> Result<(), Error> {
        fat::flush(self.kernels).map_err(Error::io(format!("flush {}", self.kernels.display())))
    }

    /// An unfinished file is useless, and the next run removes it, too.
    fn clear_unfinished(&self) {
        fs::remove_file(self.kernels.join(UNFINISHED)).unwrap_or_default();
    }
}

/// Has the firmware start the loader a second time if that returns at the next start, since the
/// firmware refused the new kernel image. Its try is taken then, so the second attempt starts the
/// system that runs now.
fn prepare_a_second_attempt(efivars: &Path) {
    let cause = match efivar::repeat_start(efivars) {
        Ok(true) => return,
        Ok(false) => "it does not say how it started this system".to_owned(),
        Err(error) => polis_base::cause::line(&error),
    };
    warn!(
        cause,
        "the firmware makes no second attempt at the next start: if it refuses the new kernel \
         image, the machine may wait for a person, and its next reset starts this system"
    );
}

/// Whether a file begins with a part.
fn holds(mut file: File, part: &Part, progress: &mut dyn FnMut(u64)) -> io::Result<bool> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    let mut left = part.size;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        let piece = &mut chunk[..piece];
        file.read_exact(piece)?;
        hash.update(&*piece);
        left -= piece.len() as u64;
        progress(piece.len() as u64);
    }
    Ok(hex::encode(&hash.finalize()) == part.sha256)
}

#[cfg(test)]
#[path = "install_tests.rs"]
pub(super) mod tests;
