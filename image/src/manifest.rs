//! The manifest of a build, for the programs that boot, measure or test the image.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    atomic, boot_files, disk,
    error::{At as _, Error, Result},
    esp,
    guard::{self, Guard},
    layout,
    moved::Moved,
    program,
    signing::ImageSigner,
    step::Observer,
    verity::Verity,
};

/// Name of the file in the output folder.
pub(crate) const FILE: &str = "manifest.json";

/// The text of `os-release` before the word of a variant; the base variant has no such line.
pub(crate) const VARIANT: &str = "POLIS_VARIANT=";

/// The text of `os-release` before the version of Kubernetes; the base variant has no such line.
pub(crate) const KUBERNETES: &str = "POLIS_KUBERNETES=";

/// Default size of an image: the system, and some gigabytes for data.
pub const SIZE_DEFAULT: u64 = 4 << 30;

/// The purpose of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// For machines that work: what `cargo xtask image` makes.
    Product,
    /// For tests and trials: quick to build, with faults to inject.
    Development,
    /// For measurements: the product, with workloads to measure.
    Measurement,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Product, Self::Development, Self::Measurement];

    /// The word in `os-release`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Product => "product",
            Self::Development => "development",
            Self::Measurement => "measurement",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// Which programs an image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// The packages that every node needs, without workloads: quick to build.
    Base,
    /// The same, with containerd and Kubernetes.
    Full,
}

impl Variant {
    pub(crate) const ALL: [Self; 2] = [Self::Base, Self::Full];

    /// The word in the manifest and in `os-release`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// The parts of an image. Paths are names in the folder that holds the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The folder; not stored, so that it may be moved.
    #[serde(skip)]
    pub folder: PathBuf,
    /// The purpose of the image.
    pub kind: Kind,
    /// Which programs it has.
    pub variant: Variant,
    /// The packages that differ from the lock.
    pub moved: Vec<Moved>,
    /// Version of Polis.
    pub version: String,
    /// First 16 digits of the hash of the content.
    pub image_version: String,
    /// Release of the kernel.
    pub kernel_release: String,
    /// The kernel's command line, as it is in the unified kernel image.
    pub cmdline: String,
    /// How the system is opened.
    pub verity: Verity,
    /// The kernel, for direct boot.
    pub kernel: PathBuf,
    /// The initramfs, for direct boot.
    pub initramfs: PathBuf,
    /// The archive of microcode that is before the initramfs in the unified kernel image; a
    /// development image has none.
    pub microcode: Option<PathBuf>,
    /// The unified kernel image, unsigned.
    pub uki: PathBuf,
    /// systemd-boot, unsigned: the loader of a signed image.
    pub loader: PathBuf,
    /// The content of the system partition.
    pub system: PathBuf,
    /// Folder with firmware for virtual machines.
    pub firmware: PathBuf,
    /// The disk image.
    pub image: PathBuf,
    /// SHA-256 of the disk image.
    pub sha256: String,
    /// Bytes by part.
    pub sizes: Sizes,
}

/// Bytes by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// The kernel.
    pub kernel: u64,
    /// The initramfs.
    pub initramfs: u64,
    /// The microcode; 0 where there is none.
    pub microcode: u64,
    /// The unified kernel image, which holds all three.
    pub uki: u64,
    /// The system's file system.
    pub erofs: u64,
    /// The hash tree behind it.
    pub verity: u64,
    /// The ESP's partition.
    pub esp_partition: u64,
    /// The system's partition.
    pub system_partition: u64,
}

/// How an image is put on disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of a parameters file for the ESP.
    pub parameters: Option<Vec<u8>>,
    /// The signer of what the machine starts; an image without keys is unsigned.
    pub signer: Option<Arc<ImageSigner>>,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Where to write it.
    pub out: PathBuf,
    /// How to write it.
    pub format: Format,
}

impl Options {
    /// A raw image of the usual size without parameters.
    #[must_use]
    pub fn new(out: impl Into<PathBuf>) -> Self {
        Self {
            parameters: None,
            signer: None,
            size: SIZE_DEFAULT,
            out: out.into(),
            format: Format::Raw,
        }
    }
}

/// File formats of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte as on the disk.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl Manifest {
    /// Reads the manifest of an output folder.
    ///
    /// # Errors
    ///
    /// The manifest is missing, or of another version.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let bytes = fs::read(&path).at("read", &path)?;
        let mut manifest: Self =
            serde_json::from_slice(&bytes).map_err(std::io::Error::from).at("understand", &path)?;
        folder.clone_into(&mut manifest.folder);
        Ok(manifest)
    }

    /// Waits until no build works in an output folder, and reads its manifest. Until the guard is
    /// dropped, no later build replaces the parts.
    ///
    /// # Errors
    ///
    /// The folder cannot be locked, or the manifest is missing, or of another version.
    pub fn held(folder: &Path, observer: &dyn Observer) -> Result<(Self, Guard)> {
        let guard = guard::hold(folder, observer)?;
        Ok((Self::load(folder)?, guard))
    }

    /// Writes it to its folder. Another process reads either the former one or this one, each
    /// whole: a build without work writes it, too.
    pub(crate) fn save(&self) -> Result<()> {
        let path = self.folder.join(FILE);
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        let text = text.at("describe", &path)?;
        atomic::replace(&path, |draft| fs::write(draft, text).at("write", &path))
    }

    /// The full path of one of the parts.
    #[must_use]
    pub fn path(&self, part: &Path) -> PathBuf {
        self.folder.join(part)
    }
}

/// Puts the parts together on a disk, with other parameters or another size than the
/// built image. Builds nothing, so it takes as long as copying. A caller that holds the [`Guard`]
/// of the folder reads the parts of one build.
///
/// # Errors
///
/// The size is too small, a part is missing, or the file cannot be written.
pub fn assemble(manifest: &Manifest, options: &Options) -> Result<()> {
    let layout = layout::plan(
        &manifest.verity.root_hash,
        manifest.sizes.erofs + manifest.sizes.verity,
        options.size,
    )?;
    let read = |part: &Path| {
        let path = manifest.path(part);
        fs::read(&path).at("read", &path)
    };
    let uki = read(&manifest.uki)?;
    let mut files = match &options.signer {
        None => boot_files::unsigned(uki),
        Some(signer) => {
            boot_files::signed(&uki, &read(&manifest.loader)?, &manifest.version, signer)?
        }
    };
    if let Some(parameters) = &options.parameters {
        files.push((esp::PARAMETERS.to_owned(), parameters.clone()));
    }
    let esp = esp::build(&manifest.verity.root_hash, layout::SECTOR, &files)?;
    let system = manifest.path(&manifest.system);
    let mut system = fs::File::open(&system).at("open", &system)?;
    match options.format {
        Format::Raw => disk::write(&options.out, &layout, &mut [&mut &*esp, &mut system]),
        Format::Qcow2 => atomic::replace(&options.out, |whole| {
            let raw = atomic::name(whole);
            disk::write(&raw, &layout, &mut [&mut &*esp, &mut system])?;
            let converted = convert(&raw, whole, "qcow2");
            fs::remove_file(&raw).at("remove", &raw)?;
            converted
        }),
    }
}

/// Converts an image with QEMU's own tool.
pub(crate) fn convert(from: &Path, to: &Path, format: &str) -> Result<()> {
    let mut command = program::host("qemu-img");
    program::run(command.args(["convert", "-O", format]).arg(from).arg(to)).map(drop).map_err(
        |error| match error {
            Error::Start { source, .. } => {
                Error::Start { program: "qemu-img (package qemu-utils)".to_owned(), source }
            }
            other => other,
        },
    )
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::inspect::tests::parts;

    #[test]
    fn a_process_that_reads_a_manifest_has_the_former_one_whole_while_another_is_saved() {
        let folder = tempfile::tempdir().unwrap();
        let former = parts(folder.path());
        former.save().unwrap();
        let mut reader = fs::File::open(folder.path().join(FILE)).unwrap();
        Manifest { version: "1".to_owned(), ..former.clone() }.save().unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, serde_json::to_string_pretty(&former).unwrap());
        assert_eq!(Manifest::load(folder.path()).unwrap().version, "1");
        let draft = atomic::name(&folder.path().join(FILE));
        assert!(!draft.exists(), "nothing unfinished is left");
    }
}
