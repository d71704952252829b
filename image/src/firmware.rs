//! The firmware files that drivers load into their devices: the ones that the modules of an
//! image name and that Debian has.
//!
//! ```text
//! kept modules --modinfo--> Named --> in UNUSED      --> left out
//!                                     in a package   --> root, or initramfs
//!                                     in UNAVAILABLE --> left out
//!                                     otherwise      --> error
//! ```
//!
//! A driver of a network card or a disk controller without its file leaves the machine
//! without network or disk, so the build checks each name that a module gives.
//!
//! Invariants:
//! - Each file that a kept module of the lock names is in the image, or a list has it.
//! - A file that no kept module names is not in the image.
//!
//! What this module does not do: find files that a driver loads without naming them. The
//! drivers in question (`bnxt_en`, `mlx5_core`, `lpfc` and others) load such a file only to
//! update a device that starts without it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{
    error::{Error, Result},
    modules::{self, Kept},
    payload::{Payload, parallel},
    program,
};

/// Where the packages have the files, and where the kernel looks for them in the root.
pub(crate) const FOLDER: &str = "usr/lib/firmware";

/// Files that a node does not use, by the start of their name.
const UNUSED: &[&str] = &[
    // Encrypted virtual machines (SEV), which a node does not host.
    "amd/amd_sev_",
    // Sound.
    "cs42l43.bin",
    // Sensors of laptops. The driver gives patterns instead of names.
    "intel/ish/",
];

/// Files that no package of Debian has where the driver looks, by the start of their name.
/// One that a package brings later is taken.
const UNAVAILABLE: &[&str] = &[
    // Old network cards: Alteon, Adaptec, SMC for PCMCIA, Sun.
    "acenic/",
    "adaptec/starfire_",
    "ositech/",
    "sun/cassini.bin",
    // Network cards of Netronome: two boards, and one mode of a third. Debian has these files
    // in folders that the driver does not read.
    "netronome/nic_AMDA0058-",
    "netronome/nic_AMDA0099-0001_1x10_1x25",
    // Old disk controllers: Adaptec (SAS), Western Digital (SCSI).
    "aic94xx-seq.fw",
    "wd719x-",
    // USB controllers of Renesas that have no memory of their own.
    "renesas_usb_fw.mem",
    // Serial ports.
    "c218tunx.cod",
    "c320tunx.cod",
    "cp204unx.cod",
    "edgeport/",
    "keyspan/",
    "mts_mt9234",
    "ti_3410.fw",
    "ti_5052.fw",
    "whiteheat",
    // Clocks.
    "idt82p33xxx.bin",
];

/// How many modules one `modinfo` reads: enough that starting it costs nothing, few enough
/// that all workers have some.
const MODULES_MAX: usize = 64;

/// The names of the firmware files that modules load, by the name of the module.
pub(crate) type Named = BTreeMap<String, BTreeSet<String>>;

/// Reads the names in these files of modules.
///
/// # Errors
///
/// `modinfo` cannot be run, or cannot read a file.
pub(crate) fn read(payload: &Path, files: &[PathBuf]) -> Result<Named> {
    let named = Mutex::new(Named::new());
    let groups: Vec<&[PathBuf]> = files.chunks(MODULES_MAX).collect();
    parallel(
        &groups,
        |group| {
            let mut modinfo = program::payload(payload, "usr/sbin/modinfo");
            let output = program::run(modinfo.arg("--null").args(group.iter()))?;
            named.lock().unwrap_or_else(PoisonError::into_inner).append(&mut parse(&output));
            Ok(())
        },
        || {},
    )?;
    Ok(named.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Reads the output of `modinfo --null`: for each file `filename:  PATH`, then its fields as
/// `name=value`, with a NUL behind each.
fn parse(output: &[u8]) -> Named {
    let mut named = Named::new();
    let mut module = String::new();
    for field in output.split(|byte| *byte == 0) {
        let field = String::from_utf8_lossy(field);
        if let Some(path) = field.strip_prefix("filename:") {
            module = modules::name(path);
        } else if let Some(file) = field.strip_prefix("firmware=") {
            named.entry(module.clone()).or_default().insert(file.to_owned());
        }
    }
    named
}

/// The files for these modules that go into the image, as paths below [`FOLDER`].
///
/// # Errors
///
/// A file is neither in the payload nor in one of the lists. A payload that differs from the
/// lock may have a newer driver with a file that the lists do not know: it goes without.
pub(crate) fn files(named: &Named, kept: &Kept, content: &Payload) -> Result<BTreeSet<String>> {
    let kept: BTreeSet<String> = kept.keys().map(|path| modules::name(path)).collect();
    let mut files = BTreeSet::new();
    let mut missing = Vec::new();
    for (module, wanted) in named {
        if !kept.contains(module) {
            continue;
        }
        for file in wanted {
            if listed(UNUSED, file) {
                continue;
            }
            if content.root.join(FOLDER).join(file).is_file() {
                files.insert(file.clone());
            } else if !listed(UNAVAILABLE, file) {
                missing.push(format!("{file} of {module}"));
            }
        }
    }
    if missing.is_empty() || !content.moved.is_empty() {
        return Ok(files);
    }
    Err(Error::NoFirmware { files: missing.join(", ") })
}

fn listed(list: &[&str], file: &str) -> bool {
    list.iter().any(|start| file.starts_with(start))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::{lock::Lock, modules::Form, moved::Moved};

    const OUTPUT: &[u8] = b"filename:       /x/kernel/net/card-a.ko.xz\0firmware=a/two.fw\0\
        description=a card\0firmware=a/one.fw\0\
        filename:       /x/kernel/net/plain.ko\0license=GPL\0\
        filename:       /x/kernel/usb/b.ko.xz\0firmware=whiteheat.fw\0";

    fn kept(paths: &[&str]) -> Kept {
        paths.iter().map(|path| ((*path).to_owned(), Form::Packed)).collect()
    }

    fn named(files: &[(&str, &str)]) -> Named {
        let mut named = Named::new();
        for (module, file) in files {
            named.entry((*module).to_owned()).or_default().insert((*file).to_owned());
        }
        named
    }

    /// A payload with these firmware files.
    fn payload(root: &Path, files: &[&str]) -> Payload {
        for file in files {
            let path = root.join(FOLDER).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, *file).unwrap();
        }
        let lock = Lock { packages: Vec::new() };
        Payload { root: root.to_owned(), lock, moved: Vec::new() }
    }

    #[test]
    fn each_module_has_the_names_behind_its_file() {
        let expected =
            named(&[("card_a", "a/one.fw"), ("card_a", "a/two.fw"), ("b", "whiteheat.fw")]);
        assert_eq!(parse(OUTPUT), expected);
    }

    #[test]
    fn the_image_has_the_files_of_its_own_modules_only() {
        let folder = tempfile::tempdir().unwrap();
        let content = payload(folder.path(), &["a/one.fw", "s.fw", "other.fw"]);
        symlink("one.fw", folder.path().join(FOLDER).join("a/two.fw")).unwrap();
        let named = named(&[("card_a", "a/one.fw"), ("card_a", "a/two.fw"), ("s", "s.fw")]);
        let files = files(&named, &kept(&["kernel/net/card-a.ko.xz"]), &content).unwrap();
        assert_eq!(files.into_iter().collect::<Vec<_>>(), ["a/one.fw", "a/two.fw"]);
    }

    #[test]
    fn a_file_that_no_package_and_no_list_has_is_an_error_with_its_driver() {
        let folder = tempfile::tempdir().unwrap();
        let mut content = payload(folder.path(), &["a/one.fw"]);
        // A link to a file that another package has.
        symlink("gone.fw", folder.path().join(FOLDER).join("a/two.fw")).unwrap();
        let named = named(&[("card_a", "a/one.fw"), ("card_a", "a/two.fw")]);
        let kept = kept(&["kernel/net/card-a.ko.xz"]);
        let error = files(&named, &kept, &content).unwrap_err();
        assert!(error.to_string().ends_with(" a/two.fw of card_a"), "{error}");
        assert!(error.help().unwrap().contains("image/src/firmware.rs"));
        content.moved.push(Moved {
            package: "linux-image-2".to_owned(),
            locked: Some("1".to_owned()),
            used: Some("2".to_owned()),
        });
        assert_eq!(files(&named, &kept, &content).unwrap().len(), 1);
    }

    #[test]
    fn a_file_in_a_list_may_be_missing_and_one_that_a_node_uses_is_taken_when_it_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let named = named(&[("b", "whiteheat.fw"), ("ccp", "amd/amd_sev_1.sbin")]);
        let kept = kept(&["kernel/usb/b.ko.xz", "kernel/crypto/ccp.ko.xz"]);
        let content = payload(folder.path(), &[]);
        assert_eq!(files(&named, &kept, &content).unwrap(), BTreeSet::new());
        let content = payload(folder.path(), &["whiteheat.fw", "amd/amd_sev_1.sbin"]);
        let files = files(&named, &kept, &content).unwrap();
        assert_eq!(files.into_iter().collect::<Vec<_>>(), ["whiteheat.fw"]);
    }

    #[test]
    fn the_documentation_has_each_file_that_is_left_out() {
        let page = include_str!("../../docs/images.md");
        for start in UNUSED.iter().chain(UNAVAILABLE) {
            assert!(page.contains(&format!("`{start}")), "docs/images.md does not name {start}");
        }
    }
}
