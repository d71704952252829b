//! What the kernel has found so far: whether a disk may yet come is read from it.
//!
//! A module is `coming` while its first function runs, in which most drivers look for their
//! devices; those of SATA and SCSI go on in the background. Each device that is found makes `init`
//! load the next driver: a drive is there three modules after its controller. On a slow machine
//! each step takes seconds, and no count of seconds fits them all.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What the kernel says of a module whose first function runs.
const COMING: &str = "coming";

/// The block devices, and each module with its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrivals {
    disks: Vec<String>,
    modules: BTreeMap<String, String>,
}

impl Arrivals {
    /// What sysfs, mounted at `sys`, shows now.
    pub(super) fn of(sys: &Path) -> Self {
        let mut disks = names(&sys.join("class/block"));
        disks.sort();
        let modules = sys.join("module");
        let state = |name: String| {
            // What is part of the kernel itself has none.
            let state = fs::read_to_string(modules.join(&name).join("initstate")).ok()?;
            Some((name, state.trim_end().to_owned()))
        };
        let modules = names(&modules).into_iter().filter_map(state).collect();
        Self { disks, modules }
    }

    /// Whether the first function of a driver still runs.
    pub(super) fn is_loading(&self) -> bool {
        self.modules.values().any(|state| state == COMING)
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_loads_and_a_disk_that_comes_are_seen() {
        let sys = tempfile::tempdir().unwrap();
        let sys = sys.path();
        let nothing = Arrivals::of(sys);
        assert!(!nothing.is_loading());

        fs::create_dir_all(sys.join("module/kernel")).unwrap();
        assert_eq!(Arrivals::of(sys), nothing, "a part of the kernel is no driver that came");
        fs::create_dir_all(sys.join("module/sr_mod")).unwrap();
        fs::write(sys.join("module/sr_mod/initstate"), "coming\n").unwrap();
        let loading = Arrivals::of(sys);
        assert!(loading.is_loading());
        fs::write(sys.join("module/sr_mod/initstate"), "live\n").unwrap();
        let loaded = Arrivals::of(sys);
        assert!(!loaded.is_loading());
        assert_ne!(loaded, loading);
        fs::create_dir_all(sys.join("class/block/sr0")).unwrap();
        assert_ne!(Arrivals::of(sys), loaded);
    }
}
