//! Finds what `cargo xtask image` built, and makes a machine's firmware of it.
//!
//! The folder holds the raw disk image, kernel and initramfs on their own (for
//! direct boots), the UEFI firmware of the payload, and `manifest.json`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::args::Firmware;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing was built, or not there.
    #[error("cannot read {path}; build an image with `cargo xtask image`")]
    Read {
        /// The file.
        path: String,
        /// The system's complaint.
        source: io::Error,
    },
    /// The manifest is of another time.
    #[error("{path} has no `{key}`; build the image again with `cargo xtask image`")]
    Manifest {
        /// The manifest.
        path: String,
        /// What it lacks.
        key: &'static str,
    },
    /// The variables of the firmware could not be copied.
    #[error("cannot copy the firmware's variables to {path}")]
    Variables {
        /// The copy.
        path: String,
        /// The system's complaint.
        source: io::Error,
    },
}

/// A built image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    dir: PathBuf,
    /// The kernel command line that is built into the unified kernel image.
    pub cmdline: String,
    /// What a node prints as `image=`.
    pub version: String,
}

/// Which firmware starts the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flash {
    /// Plain UEFI.
    Plain,
    /// A Secure Boot build. No keys are enrolled (setup mode), so it enforces
    /// nothing: the image is not signed.
    Secure,
}

impl Image {
    /// Reads the manifest in `dir`.
    ///
    /// # Errors
    /// When there is none, or it lacks something.
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
        let (cmdline, version) = (get("cmdline")?, get("image_version")?);
        let dir = std::path::absolute(dir).map_err(read)?;
        Ok(Self { dir, cmdline, version })
    }

    /// The raw disk image: never to be started, only to be copied.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.dir.join("polis.img")
    }

    /// The kernel on its own.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// The initramfs on its own.
    #[must_use]
    pub fn initramfs(&self) -> PathBuf {
        self.dir.join("initramfs.cpio")
    }

    /// A direct boot of the image's own kernel, with `append` behind its command line.
    #[must_use]
    pub fn direct(&self, append: &str) -> Firmware {
        Firmware::Direct {
            kernel: self.kernel(),
            initramfs: self.initramfs(),
            cmdline: format!("{} {append}", self.cmdline).trim_end().to_owned(),
        }
    }

    /// A UEFI boot. The variables live in `dir` and stay if they are there already.
    ///
    /// # Errors
    /// When the firmware is not in the image's folder, or cannot be copied.
    pub fn uefi(&self, flash: Flash, dir: &Path, append: &str) -> Result<Firmware, Error> {
        let firmware = self.dir.join("firmware");
        let (code, secure) = match flash {
            Flash::Plain => ("OVMF_CODE_4M.fd", false),
            Flash::Secure => ("OVMF_CODE_4M.secboot.fd", true),
        };
        let vars = dir.join("vars.fd");
        if !vars.exists() {
            let copied = fs::create_dir_all(dir)
                .and_then(|()| fs::copy(firmware.join("OVMF_VARS_4M.fd"), &vars));
            copied
                .map_err(|source| Error::Variables { path: vars.display().to_string(), source })?;
        }
        Ok(Firmware::Uefi { code: firmware.join(code), vars, secure, append: append.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_without_a_command_line_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("manifest.json"), r#"{"image_version": "1"}"#).unwrap();
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
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("firmware")).unwrap();
        fs::write(dir.path().join("firmware/OVMF_VARS_4M.fd"), "fresh").unwrap();
        let manifest = r#"{"cmdline": "quiet", "image_version": "1"}"#;
        fs::write(dir.path().join("manifest.json"), manifest).unwrap();
        let image = Image::load(dir.path()).unwrap();
        let machine = dir.path().join("machine");
        image.uefi(Flash::Plain, &machine, "").unwrap();
        fs::write(machine.join("vars.fd"), "written by the guest").unwrap();
        image.uefi(Flash::Plain, &machine, "").unwrap();
        assert_eq!(fs::read_to_string(machine.join("vars.fd")).unwrap(), "written by the guest");
    }

    #[test]
    fn a_direct_boot_adds_to_the_built_in_command_line() {
        let image =
            Image { dir: "/i".into(), cmdline: "quiet".to_owned(), version: "1".to_owned() };
        let Firmware::Direct { cmdline, .. } = image.direct("polis.x=1") else {
            panic!("a direct boot")
        };
        assert_eq!(cmdline, "quiet polis.x=1");
    }
}
