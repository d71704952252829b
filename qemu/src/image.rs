//! A built image: the output of `cargo xtask image`, and the firmware of a machine for it.
//!
//! The folder holds `manifest.json`, which names the rest: the raw disk image,
//! kernel and initramfs on their own (for direct boots), and a folder with the
//! payload's UEFI firmware.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::args::{Accelerator, Firmware, with};
use crate::cache::{self, Cache, Key, Wanted};
use crate::kernel;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image is not built, or is in another folder.
    #[error("cannot read {path}; build an image with `cargo xtask image`")]
    Read {
        /// The file.
        path: String,
        /// The system's complaint.
        source: io::Error,
    },
    /// The manifest is of another version.
    #[error("{path} has no `{key}`; build the image again with `cargo xtask image`")]
    Manifest {
        /// The manifest.
        path: String,
        /// The missing key.
        key: &'static str,
    },
    /// The unpacked kernel could not be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: String,
        /// The system's complaint.
        source: io::Error,
    },
    /// The variables of the firmware could not be copied.
    #[error("cannot copy the firmware's variables to {path}")]
    Variables {
        /// The copy.
        path: String,
        /// The system's complaint.
        source: io::Error,
    },
    /// The kernel has another format than Debian's.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The unpacked kernel cannot be kept.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// Words of the kernel command line that make a translated machine cheaper. QEMU's translated
/// processor has Meltdown by its model, so each system call would flush the TLB twice; that is a
/// tenth of a boot. A timer of high resolution is set anew for each short sleep, and the write to
/// the local APIC that sets it was a tenth of what a voter at work costs.
pub const CHEAP: &str = "mitigations=off highres=off";

/// [`CHEAP`] for a machine that is translated, and nothing for another.
#[must_use]
pub fn cheap(accelerator: Accelerator) -> &'static str {
    match accelerator {
        Accelerator::Kvm => "",
        Accelerator::Tcg | Accelerator::TcgSingle => CHEAP,
    }
}

/// Name of the unpacked kernel in its entry.
const UNPACKED: &str = "vmlinux";

/// A built image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The raw disk image: copied for each machine, never started itself.
    pub disk: PathBuf,
    /// The kernel on its own.
    pub kernel: PathBuf,
    /// The initramfs on its own.
    pub initramfs: PathBuf,
    /// The folder with UEFI firmware.
    pub firmware: PathBuf,
    /// The kernel command line that is built into the unified kernel image.
    pub cmdline: String,
    /// The value that a node prints as `image=`.
    pub version: String,
}

/// Which firmware starts the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flash {
    /// Plain UEFI.
    Plain,
    /// A Secure Boot build. Its variables begin without keys (setup mode), so it enforces
    /// nothing until what it starts enrols some.
    Secure,
}

impl Image {
    /// Reads the manifest in `dir`.
    ///
    /// # Errors
    /// When it cannot be read, or lacks a key.
    pub fn load(dir: &Path) -> Result<Self, Error> {
        let file = dir.join("manifest.json");
        let path = file.display().to_string();
        let read = |source| Error::Read { path: path.clone(), source };
        let text = fs::read_to_string(&file).map_err(read)?;
        let manifest: Value = serde_json::from_str(&text)
            .map_err(|source| Error::Read { path: path.clone(), source: source.into() })?;
        let get = |key| match manifest[key].as_str() {
            Some(value) => Ok(value.to_owned()),
            None => Err(Error::Manifest { path: path.clone(), key }),
        };
        let folder = std::path::absolute(dir).map_err(read)?;
        Ok(Self {
            disk: folder.join(get("image")?),
            kernel: folder.join(get("kernel")?),
            initramfs: folder.join(get("initramfs")?),
            firmware: folder.join(get("firmware")?),
            cmdline: get("cmdline")?,
            version: get("image_version")?,
        })
    }

    /// A direct boot of the image's own kernel, with `append` behind its command line.
    #[must_use]
    pub fn direct(&self, append: &str) -> Firmware {
        Firmware::Direct {
            kernel: self.kernel.clone(),
            initramfs: self.initramfs.clone(),
            cmdline: with(&self.cmdline, append),
        }
    }

    /// The same image for direct boots that cost two thirds on one translated
    /// processor: with its kernel unpacked, once, into `cache`, and without
    /// mitigations. These are the only differences from the product; boots by UEFI are
    /// the same.
    ///
    /// # Errors
    /// When the kernel cannot be read, unpacked or kept.
    pub fn quick(&self, cache: &Cache) -> Result<Self, Error> {
        let path = self.kernel.display().to_string();
        let packed = fs::read(&self.kernel).map_err(|source| Error::Read { path, source })?;
        let key = Key::default().part(&packed).digits();
        let wanted = Wanted { kind: "kernel", key, age_max: None };
        let entry = cache.entry(&wanted, |dir| {
            let file = dir.join(UNPACKED);
            let kernel = kernel::unpack(&packed)?;
            let path = file.display().to_string();
            fs::write(&file, kernel).map_err(|source| Error::Write { path, source })
        })?;
        let cmdline = with(&self.cmdline, CHEAP);
        Ok(Self { kernel: entry.dir.join(UNPACKED), cmdline, ..self.clone() })
    }

    /// A UEFI boot. The variables are kept in `dir`; existing ones stay.
    ///
    /// # Errors
    /// When the firmware is not in the image's folder, or cannot be copied.
    pub fn uefi(&self, flash: Flash, dir: &Path, append: &str) -> Result<Firmware, Error> {
        let (code, secure) = match flash {
            Flash::Plain => ("OVMF_CODE_4M.fd", false),
            Flash::Secure => ("OVMF_CODE_4M.secboot.fd", true),
        };
        let vars = dir.join("vars.fd");
        if !vars.exists() {
            let copied = fs::create_dir_all(dir)
                .and_then(|()| fs::copy(self.firmware.join("OVMF_VARS_4M.fd"), &vars));
            copied
                .map_err(|source| Error::Variables { path: vars.display().to_string(), source })?;
        }
        let code = self.firmware.join(code);
        Ok(Firmware::Uefi { code, vars, secure, append: append.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = r#"{"image": "polis.img", "kernel": "vmlinuz", "firmware": "firmware",
        "initramfs": "initramfs.cpio", "cmdline": "quiet", "image_version": "1"}"#;

    fn built() -> (tempfile::TempDir, Image) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("firmware")).unwrap();
        fs::write(dir.path().join("firmware/OVMF_VARS_4M.fd"), "fresh").unwrap();
        fs::write(dir.path().join("manifest.json"), MANIFEST).unwrap();
        let image = Image::load(dir.path()).unwrap();
        (dir, image)
    }

    #[test]
    fn a_manifest_without_a_command_line_is_refused_by_name() {
        let (dir, _image) = built();
        let without = MANIFEST.replace("cmdline", "other");
        fs::write(dir.path().join("manifest.json"), without).unwrap();
        let error = Image::load(dir.path()).unwrap_err();
        assert!(error.to_string().contains("no `cmdline`"), "{error}");
    }

    #[test]
    fn what_is_not_built_names_the_command_that_builds_it() {
        let error = Image::load(Path::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().contains("cargo xtask image"), "{error}");
    }

    #[test]
    fn variables_are_copied_once_and_then_kept() {
        let (dir, image) = built();
        let machine = dir.path().join("machine");
        image.uefi(Flash::Plain, &machine, "").unwrap();
        fs::write(machine.join("vars.fd"), "written by the guest").unwrap();
        image.uefi(Flash::Plain, &machine, "").unwrap();
        assert_eq!(fs::read_to_string(machine.join("vars.fd")).unwrap(), "written by the guest");
    }

    #[test]
    fn a_direct_boot_adds_to_the_built_in_command_line() {
        let (dir, image) = built();
        let Firmware::Direct { kernel, cmdline, .. } = image.direct("polis.x=1") else {
            panic!("a direct boot")
        };
        assert_eq!(cmdline, "quiet polis.x=1");
        assert_eq!(kernel, dir.path().join("vmlinuz"));
    }

    #[test]
    fn a_kernel_that_cannot_be_unpacked_is_named_and_not_kept() {
        let (dir, image) = built();
        fs::write(dir.path().join("vmlinuz"), "no kernel").unwrap();
        let cache = Cache::new(&dir.path().join("cache"));
        for _again in 0..2 {
            assert!(matches!(image.quick(&cache), Err(Error::Kernel(_))));
        }
    }
}
