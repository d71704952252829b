//! The check that the same inputs give the same bytes: it builds again, and compares.

use std::{fs, path::Path};

use crate::{
    build::{Config, build},
    digest::sha256,
    error::{At as _, Error, Result},
    guard,
    manifest::{self, Manifest, Options},
    step::Observer,
};

/// Size of the disks: little more than the partitions need, since hashing zeros adds nothing
/// to the check.
const SIZE: u64 = 2600 << 20;

/// The compared files, by name in the output folder.
const OUTPUTS: &[&str] = &["vmlinuz", "initramfs.cpio", "system.img", "polis.efi", "polis.img"];

/// Builds from the inputs of `built` again, in another folder below `folder` and with
/// no step cached, and returns the hash of each output.
///
/// The steps of `built` may have been cached. So this also compares the earlier inputs
/// of a step with its current ones. It holds the lock of the folder of `built`, since another
/// build there would replace what is compared.
///
/// # Errors
///
/// A build failed, or the two differ; the error names the first output that does.
pub fn verify_reproducible(
    built: &Manifest,
    config: &Config,
    folder: &Path,
    observer: &dyn Observer,
) -> Result<Vec<(&'static str, String)>> {
    let _guard = guard::hold(&built.folder, observer)?;
    if folder.exists() {
        fs::remove_dir_all(folder).at("clear", folder)?;
    }
    let again = folder.join("again");
    build(&Config { out: again.clone(), size: SIZE, ..config.clone() }, observer)?;
    let disk = folder.join("built.img");
    let (parameters, signer) = (config.parameters.clone(), config.signer.clone());
    let options = Options { size: SIZE, parameters, signer, ..Options::new(&disk) };
    manifest::assemble(built, &options)?;
    let compare = |name: &&'static str| {
        let first = if *name == "polis.img" { disk.clone() } else { built.folder.join(name) };
        let digest = sha256(&first)?;
        if sha256(&again.join(name))? != digest {
            return Err(Error::NotReproducible((*name).to_owned()));
        }
        Ok((*name, digest))
    };
    let digests = OUTPUTS.iter().map(compare).collect::<Result<_>>()?;
    fs::remove_dir_all(folder).at("clear", folder)?;
    Ok(digests)
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::mpsc, thread, time::Duration};

    use super::*;
    use crate::{
        golang,
        inspect::tests::parts,
        manifest::Kind,
        moved::Moved,
        payload::Source,
        step::{Report, Silent, Unit},
    };

    struct Waits(mpsc::Sender<PathBuf>);

    impl Observer for Waits {
        fn waits(&self, folder: &Path) {
            self.0.send(folder.to_owned()).unwrap();
        }
        fn begin(&self, _: &'static str) {}
        fn step(&self, _: &Report) {}
        fn moved(&self, _: &Moved) {}
        fn progress(&self, _: &str, _: u64, _: u64, _: Unit) {}
    }

    #[test]
    fn a_manifest_is_read_behind_the_build_at_work_and_its_parts_stay_while_it_is_held() {
        let folder = tempfile::tempdir().unwrap();
        let built = parts(folder.path());
        built.save().unwrap();
        let working = guard::hold(folder.path(), &Silent).unwrap();
        let (waits, waited) = mpsc::channel();
        let observer = Waits(waits);
        let waited = || waited.recv_timeout(Duration::from_secs(60));
        thread::scope(|scope| {
            let reader = scope.spawn(|| Manifest::held(folder.path(), &observer).unwrap());
            assert_eq!(waited().as_deref(), Ok(folder.path()));
            Manifest { version: "1".to_owned(), ..built }.save().unwrap();
            drop(working);
            let (manifest, held) = reader.join().unwrap();
            assert_eq!(manifest.version, "1");
            let later = scope.spawn(|| guard::hold(folder.path(), &observer).map(drop));
            assert_eq!(waited().as_deref(), Ok(folder.path()));
            drop(held);
            later.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_check_leaves_the_folder_to_the_process_that_works_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let built = parts(folder.path());
        let config = Config {
            kind: Kind::Development,
            source: Source::new(place("absent.lock"), place("cache")),
            go: golang::Folders { modules: place("modules"), out: place("go") },
            init: place("init"),
            node: place("node"),
            system_images: place("images"),
            version: "0".to_owned(),
            out: folder.path().to_owned(),
            parameters: None,
            signer: None,
            size: SIZE,
        };
        // Another check has left this folder.
        fs::create_dir_all(place("verify/again")).unwrap();
        let held = guard::hold(folder.path(), &Silent).unwrap();
        let (waits, waited) = mpsc::channel();
        let observer = Waits(waits);
        thread::scope(|scope| {
            let check =
                scope.spawn(|| verify_reproducible(&built, &config, &place("verify"), &observer));
            let told = waited.recv_timeout(Duration::from_secs(60));
            assert_eq!(told.as_deref(), Ok(folder.path()));
            assert!(place("verify/again").exists());
            drop(held);
            let outcome = check.join().unwrap();
            assert!(matches!(outcome, Err(Error::NoLock { .. })), "{outcome:?}");
        });
    }
}
