//! The loader of kernel modules and their dependencies.
//!
//! Reads the files that `depmod` makes: `modules.dep`, `modules.alias`,
//! `modules.softdep`, `modules.builtin`. The same code serves the initramfs
//! (`/modules`, a dozen of them), the running system and `modprobe`.
//!
//! Invariants:
//! - A module is handed to the kernel after everything that it needs.
//! - A module that the kernel has already is not read again.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use polis_base::sys::module;

use super::alias;

/// Chains of dependencies are short; a longer one is a circle in a broken file.
const DEPTH_MAX: usize = 32;

/// Old framebuffer drivers claim screens that the firmware or a newer driver
/// serves better, and leave them dark.
const UNWANTED: &str = "/drivers/video/fbdev/";

/// The modules of one kernel.
#[derive(Debug)]
pub struct Modules {
    directory: PathBuf,
    dependencies: Dependencies,
    softdeps: String,
    loaded: BTreeSet<String>,
}

/// Why a module was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The module does not exist.
    #[error("there is no module {name}")]
    Absent {
        /// The name.
        name: String,
    },
    /// It is of a kind that is never loaded.
    #[error("module {name} is never loaded")]
    Unwanted {
        /// The name.
        name: String,
    },
    /// The dependencies make a circle.
    #[error("the dependencies of module {name} form a cycle")]
    Circle {
        /// The name.
        name: String,
    },
    /// The kernel refused it.
    #[error("cannot load module {name}")]
    Refused {
        /// The name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Error {
    /// Whether it only means that the hardware is missing.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        match self {
            Self::Refused { source, .. } => {
                source.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
            }
            Self::Unwanted { .. } => true,
            Self::Absent { .. } | Self::Circle { .. } => false,
        }
    }
}

/// The text of `modules.dep`, sorted for search without a copy of its parts.
#[derive(Debug)]
struct Dependencies {
    text: String,
    /// Start and end of each line, in the order of their modules' names.
    lines: Vec<(u32, u32)>,
}

impl Dependencies {
    fn new(text: String) -> Self {
        let mut lines = Vec::new();
        let mut start = 0;
        for line in text.split_inclusive('\n') {
            let end = start + line.len();
            // Polis never makes a file of 4 GiB.
            if let (Ok(start), Ok(end)) = (u32::try_from(start), u32::try_from(end)) {
                lines.push((start, end));
            }
            start = end;
        }
        let mut sorted = Self { text, lines: Vec::new() };
        // Each name is cut out once, and compared a dozen times.
        lines.sort_by_cached_key(|line| name_bytes(sorted.line(*line)).collect::<Vec<u8>>());
        sorted.lines = lines;
        sorted
    }

    fn line(&self, (start, end): (u32, u32)) -> &str {
        let range = usize::try_from(start).unwrap_or(0)..usize::try_from(end).unwrap_or(0);
        self.text.get(range).unwrap_or("").trim_end()
    }

    /// The path of a module, and of those that it needs, nearest first.
    fn find(&self, name: &str) -> Option<(&str, Vec<&str>)> {
        let found = self
            .lines
            .binary_search_by(|line| name_bytes(self.line(*line)).cmp(name.bytes().map(plain)))
            .ok()?;
        let (path, needed) = self.line(self.lines[found]).split_once(':')?;
        Some((path, needed.split_whitespace().collect()))
    }
}

/// A hyphen and an underscore are the same in names of modules.
fn plain(byte: u8) -> u8 {
    if byte == b'-' { b'_' } else { byte }
}

/// The name of a module as the kernel writes it.
fn own_name(name: &str) -> String {
    name.replace('-', "_")
}

/// The name in a path such as `kernel/fs/xfs/xfs.ko.xz` or a line that starts with one.
fn name(path: &str) -> &str {
    let path = path.split(':').next().unwrap_or(path);
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file)
}

fn name_bytes(path: &str) -> impl Iterator<Item = u8> {
    name(path).bytes().map(plain)
}

impl Modules {
    /// The modules in `directory`.
    ///
    /// # Errors
    ///
    /// When the directory has no `modules.dep`.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let dependencies = fs::read_to_string(directory.join("modules.dep"))?;
        // A kernel without soft dependencies does not need the file.
        let softdeps = fs::read_to_string(directory.join("modules.softdep")).unwrap_or_default();
        let dependencies = Dependencies::new(dependencies);
        let directory = directory.to_owned();
        Ok(Self { directory, dependencies, softdeps, loaded: BTreeSet::new() })
    }

    /// The modules of the running kernel.
    ///
    /// # Errors
    ///
    /// When the system has no modules for it.
    pub fn of_running_kernel() -> io::Result<Self> {
        let uname = rustix::system::uname();
        let release = uname.release().to_string_lossy();
        Self::open(&Path::new("/usr/lib/modules").join(release.as_ref()))
    }

    /// Which modules serve each of these modaliases.
    ///
    /// # Errors
    ///
    /// When `modules.alias` can't be read.
    pub fn find<'a>(
        &self,
        aliases: &BTreeSet<&'a str>,
    ) -> io::Result<BTreeMap<&'a str, Vec<String>>> {
        let file = fs::read_to_string(self.directory.join("modules.alias"))?;
        Ok(alias::find(&file, aliases))
    }

    /// Whether `name` is a module here, or part of the kernel.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.dependencies.find(name).is_some() || self.is_builtin(name)
    }

    fn is_builtin(&self, wanted: &str) -> bool {
        let file = fs::read_to_string(self.directory.join("modules.builtin")).unwrap_or_default();
        file.lines().any(|line| name_bytes(line).eq(wanted.bytes().map(plain)))
    }

    /// Loads a module and what it needs. One that is loaded already, or part of
    /// the kernel, is a success.
    ///
    /// # Errors
    ///
    /// The first module of the chain that can't be loaded.
    pub fn load(&mut self, name: &str) -> Result<(), Error> {
        self.load_with(name, c"")
    }

    /// The same, with parameters for the module itself; one that is loaded already keeps its own.
    ///
    /// # Errors
    ///
    /// The first module of the chain that can't be loaded.
    pub fn load_with(&mut self, name: &str, parameters: &CStr) -> Result<(), Error> {
        self.load_within(name, parameters, DEPTH_MAX)
    }

    fn load_within(&mut self, wanted: &str, parameters: &CStr, depth: usize) -> Result<(), Error> {
        let own = own_name(wanted);
        if self.loaded.contains(&own) || is_live(&own) {
            return Ok(());
        }
        let Some(depth) = depth.checked_sub(1) else { return Err(Error::Circle { name: own }) };
        let Some((path, needed)) = self.dependencies.find(&own) else {
            let built_in = self.is_builtin(&own) || Path::new("/sys/module").join(&own).exists();
            return if built_in { Ok(()) } else { Err(Error::Absent { name: own }) };
        };
        if format!("/{path}").contains(UNWANTED) {
            return Err(Error::Unwanted { name: own });
        }
        let path = self.directory.join(path);
        let needed: Vec<String> = needed.iter().map(|path| name(path).to_owned()).collect();
        let (before, after) = softdeps(&self.softdeps, &own);
        for soft in before {
            self.load_softly(&soft, depth);
        }
        for needed in needed.iter().rev() {
            self.load_within(needed, c"", depth)?;
        }
        module::load(&path, parameters)
            .map_err(|source| Error::Refused { name: own.clone(), source })?;
        self.loaded.insert(own);
        for soft in after {
            self.load_softly(&soft, depth);
        }
        Ok(())
    }

    /// Loads what a module would like to have: a module, or one that serves an
    /// alias. `depmod` lists the ones made for a processor first, and those refuse
    /// to run on another. It may work without: that is what makes the dependency soft.
    fn load_softly(&mut self, wanted: &str, depth: usize) {
        if !matches!(self.load_within(wanted, c"", depth), Err(Error::Absent { .. })) {
            return;
        }
        let found = self.find(&BTreeSet::from([wanted])).unwrap_or_default();
        let load = |name: String| self.load_within(&name, c"", depth).is_ok();
        let _one = found.into_values().flatten().any(load);
    }
}

/// Whether the kernel has loaded it. A module that is still loading does not count,
/// even if parts of it are visible: the kernel makes a second loader wait for the
/// first.
fn is_live(name: &str) -> bool {
    state(name).is_some_and(|state| state == "live")
}

/// Whether the kernel is loading it: a driver does so while it looks for its devices.
#[must_use]
pub fn is_loading(name: &str) -> bool {
    state(name).is_some_and(|state| state == "coming")
}

/// What the kernel says of a module of its own: `coming`, `live` or `going`.
fn state(name: &str) -> Option<String> {
    let state = Path::new("/sys/module").join(own_name(name)).join("initstate");
    fs::read_to_string(state).ok().map(|state| state.trim_end().to_owned())
}

/// The modules to load before and after a module, from the text of `modules.softdep`.
fn softdeps(text: &str, wanted: &str) -> (Vec<String>, Vec<String>) {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("softdep")
            || !words.next().is_some_and(|module| name_bytes(module).eq(wanted.bytes().map(plain)))
        {
            continue;
        }
        let mut list = None;
        for word in words {
            match (word, &mut list) {
                ("pre:", _) => list = Some(&mut before),
                ("post:", _) => list = Some(&mut after),
                (_, Some(list)) => list.push(word.to_owned()),
                // Some modules list a dependency without `pre:` or `post:`.
                (_, None) => {}
            }
        }
    }
    (before, after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FILE: &str = "kernel/fs/xfs/xfs.ko.xz: kernel/lib/libcrc32c.ko.xz\n\
        kernel/lib/libcrc32c.ko.xz:\n\
        kernel/drivers/md/dm-verity.ko.xz: kernel/drivers/md/dm-bufio.ko.xz kernel/drivers/md/dm-mod.ko.xz\n\
        kernel/drivers/video/fbdev/vga16fb.ko.xz:\n";

    #[test]
    fn a_module_is_found_with_what_it_needs_however_its_name_is_written() {
        let dependencies = Dependencies::new(FILE.to_owned());
        let (path, needed) = dependencies.find("dm_verity").unwrap();
        assert_eq!(path, "kernel/drivers/md/dm-verity.ko.xz");
        let names: Vec<&str> = needed.iter().map(|path| name(path)).collect();
        assert_eq!(names, ["dm-bufio", "dm-mod"]);
        assert_eq!(dependencies.find("dm-verity").unwrap().0, path);
        assert!(dependencies.find("libcrc32c").unwrap().1.is_empty());
        assert!(dependencies.find("dm").is_none());
    }

    fn modules() -> (tempfile::TempDir, Modules) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("modules.dep"), FILE).unwrap();
        let builtin = "kernel/fs/ext4/ext4-polis.ko\n";
        fs::write(directory.path().join("modules.builtin"), builtin).unwrap();
        let modules = Modules::open(directory.path()).unwrap();
        (directory, modules)
    }

    #[test]
    fn what_is_part_of_the_kernel_needs_no_loading() {
        let (_directory, mut modules) = modules();
        assert!(modules.has("ext4_polis"));
        modules.load("ext4_polis").unwrap();
    }

    #[test]
    fn what_is_not_there_or_not_wanted_is_refused_by_name() {
        let (_directory, mut modules) = modules();
        let error = modules.load("none_such").unwrap_err();
        assert_eq!(error.to_string(), "there is no module none_such");
        assert!(matches!(modules.load("vga16fb"), Err(Error::Unwanted { .. })));
    }

    #[test]
    fn a_circle_of_dependencies_ends() {
        let directory = tempfile::tempdir().unwrap();
        let circle = "polis_a.ko: polis_b.ko\npolis_b.ko: polis_a.ko\n";
        fs::write(directory.path().join("modules.dep"), circle).unwrap();
        let mut modules = Modules::open(directory.path()).unwrap();
        assert!(matches!(modules.load("polis_a"), Err(Error::Circle { .. })));
    }

    #[test]
    fn soft_dependencies_are_split_into_before_and_after() {
        let text = "# comment\nsoftdep a-b pre: c d post: e\nsoftdep x gcm\n";
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(softdeps(text, "a_b"), (list(&["c", "d"]), list(&["e"])));
        assert_eq!(softdeps(text, "x"), (Vec::new(), Vec::new()));
    }

    proptest! {
        #[test]
        fn every_line_is_found_by_its_name(names in prop::collection::btree_set("[a-z_]{1,8}", 1..20)) {
            let text: String = names.iter().map(|name| format!("k/{name}.ko: k/z.ko\n")).collect();
            let dependencies = Dependencies::new(text);
            for name in &names {
                prop_assert!(dependencies.find(name).is_some());
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>(), name in any::<String>()) {
            let _found = Dependencies::new(text.clone()).find(&name);
            let _found = softdeps(&text, &name);
        }
    }
}
