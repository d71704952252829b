//! The contents of the root file system and of the initramfs.
//!
//! Both are plans ([`Tree`]): nothing is written here.

use std::{
    fs,
    path::{Path, PathBuf},
};

use polis_base::users;

use crate::{
    authorities, elf,
    error::{At as _, Result},
    firmware::{self, Named},
    golang::Built,
    manifest::Variant,
    modules::{self, Form, Index, Kept},
    packages::POLIS,
    payload::Payload,
    program::{LIBRARIES, LOADER},
    tree::Tree,
};

/// Where the list of packages is in the root.
const PACKAGE_LIST: &str = "usr/share/polis/packages";
/// Folders that are mounted over.
const MOUNT_POINTS: &[&str] =
    &["data", "dev", "ephemeral", "esp", "mnt", "proc", "run", "sys", "tmp"];
/// Files that differ from node to node; the node writes them where it may.
const OF_THE_NODE: &[&str] = &["hostname", "hosts", "machine-id", "resolv.conf"];

/// The sources of both trees.
#[derive(Debug)]
pub(crate) struct Sources<'a> {
    payload: &'a Path,
    content: &'a Payload,
    variant: Variant,
    release: &'a str,
    index: Index,
}

impl<'a> Sources<'a> {
    /// Reads the output of `depmod` in the folder `index` about the payload's modules.
    pub(crate) fn open(
        content: &'a Payload,
        variant: Variant,
        release: &'a str,
        index: &Path,
    ) -> Result<Self> {
        let payload = &content.root;
        let read = |folder: &Path, name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).at("read", &path)
        };
        let index = Index::parse(
            &read(index, "modules.dep")?,
            &read(index, "modules.alias")?,
            &read(index, "modules.softdep")?,
            &read(&payload.join("usr/lib/modules").join(release), "modules.builtin")?,
        );
        Ok(Self { payload, content, variant, release, index })
    }

    fn modules(&self) -> PathBuf {
        self.payload.join("usr/lib/modules").join(self.release)
    }

    /// The root file system, except `etc/os-release`, which identifies all of it;
    /// `unpacked` holds plain modules as `<name>.ko`, `go` the programs of workloads; `named`
    /// are the firmware files of the modules.
    pub(crate) fn root(
        &self,
        init: &Path,
        node: &Path,
        unpacked: &Path,
        go: &Built,
        named: &Named,
    ) -> Result<Tree> {
        let mut tree = Tree::default();
        for name in ["bin", "lib", "lib64", "sbin"] {
            tree.folder(&format!("usr/{name}"), 0o755);
            tree.link(name, &format!("usr/{name}"));
        }
        for name in MOUNT_POINTS {
            tree.folder(name, 0o755);
        }
        tree.program("init", init);
        tree.program("usr/bin/node", node);
        // The kernel runs this to load modules; `init` recognises the request by the
        // name.
        tree.link("usr/sbin/modprobe", "/init");
        add_workloads(&mut tree, go);
        self.add_programs(&mut tree, go)?;
        self.add_modules(&mut tree, unpacked, named)?;
        self.add_settings(&mut tree);
        tree.text(authorities::BUNDLE, authorities::bundle(self.payload)?);
        self.add_copyrights(&mut tree)?;
        Ok(tree)
    }

    fn add_programs(&self, tree: &mut Tree, go: &Built) -> Result<()> {
        let programs = POLIS.programs(self.variant);
        for program in &programs {
            tree.program(program, self.payload.join(program));
        }
        let built = go.linked.iter().filter_map(|file| file.to_str());
        let linked: Vec<&str> = programs.iter().copied().chain(built).collect();
        for library in elf::closure(self.payload, &linked)? {
            // The payload has links from short names to long ones; the root needs the short ones.
            let path = format!("{LIBRARIES}/{library}");
            tree.file(&path, self.payload.join(&path));
        }
        tree.program(LOADER, self.payload.join(LOADER));
        tree.link("usr/lib64/ld-linux-x86-64.so.2", &format!("/{LOADER}"));
        Ok(())
    }

    fn add_modules(&self, tree: &mut Tree, unpacked: &Path, named: &Named) -> Result<()> {
        let kept = self.index.root()?;
        let folder = format!("usr/lib/modules/{}", self.release);
        self.add_files(tree, &kept, unpacked, |path, form| {
            format!("{folder}/{}", modules::in_form(path, form))
        });
        add_index(tree, &folder, &self.index, &kept, modules::in_form);
        tree.file(&format!("{folder}/modules.builtin"), self.modules().join("modules.builtin"));
        self.add_firmware(tree, &kept, named, firmware::FOLDER)
    }

    /// The firmware files that these modules load, below `folder`.
    fn add_firmware(
        &self,
        tree: &mut Tree,
        kept: &Kept,
        named: &Named,
        folder: &str,
    ) -> Result<()> {
        for file in firmware::files(named, kept, self.content)? {
            tree.file(&format!("{folder}/{file}"), self.payload.join(firmware::FOLDER).join(&file));
        }
        Ok(())
    }

    fn add_files(
        &self,
        tree: &mut Tree,
        kept: &Kept,
        unpacked: &Path,
        place: impl Fn(&str, Form) -> String,
    ) {
        for (path, form) in kept {
            let source = match form {
                Form::Plain => unpacked.join(flat(path, *form)),
                Form::Packed => self.modules().join(path),
            };
            tree.file(&place(path, *form), source);
        }
    }

    fn add_settings(&self, tree: &mut Tree) {
        for name in OF_THE_NODE {
            tree.link(&format!("etc/{name}"), &format!("/ephemeral/etc/{name}"));
        }
        tree.link("usr/lib/os-release", "/etc/os-release");
        tree.text("etc/passwd", users::passwd());
        tree.text("etc/group", users::group());
        tree.text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n");
        tree.link("etc/mtab", "/proc/self/mounts");
        tree.link("var/run", "/run");
        tree.text(PACKAGE_LIST, self.content.listing());
    }

    /// The image distributes these packages, so it includes their licence terms.
    fn add_copyrights(&self, tree: &mut Tree) -> Result<()> {
        for package in
            self.content.lock.packages.iter().filter(|package| package.category.in_image())
        {
            let path = format!("usr/share/doc/{}/copyright", package.name);
            let source = self.payload.join(&path);
            let text = fs::read(&source).at("read", &source)?;
            tree.text(&path, text);
        }
        Ok(())
    }

    /// The initramfs; `unpacked` holds plain modules as `<name>.ko`, and `named` are the
    /// firmware files of the modules.
    pub(crate) fn initramfs(&self, init: &Path, unpacked: &Path, named: &Named) -> Result<Tree> {
        let kept = self.index.initramfs()?;
        let mut tree = Tree::default();
        tree.program("init", init);
        // By this file `init` knows that it is in the initramfs.
        tree.text("stage1", "");
        tree.folder("dev", 0o755);
        // The kernel opens it for `init`'s first three descriptors, before anything is mounted.
        tree.device("dev/console", 5, 1);
        for name in ["proc", "sys", "run", "system"] {
            tree.folder(name, 0o755);
        }
        self.add_files(&mut tree, &kept, unpacked, |path, form| {
            format!("modules/{}", flat(path, form))
        });
        add_index(&mut tree, "modules", &self.index, &kept, flat);
        self.add_firmware(&mut tree, &kept, named, "lib/firmware")?;
        Ok(tree)
    }

    /// The files of all modules of the image, as Debian ships them.
    pub(crate) fn packed_modules(&self) -> Result<Vec<PathBuf>> {
        let both: Kept = self.index.root()?.into_iter().chain(self.index.initramfs()?).collect();
        Ok(both.keys().map(|path| self.modules().join(path)).collect())
    }

    /// The modules that must be unpacked: where each is, and its file's name unpacked.
    pub(crate) fn plain_modules(&self) -> Result<Vec<(PathBuf, String)>> {
        let both = self.index.root()?.into_iter().chain(self.index.initramfs()?);
        let plain: Kept = both.filter(|(_, form)| *form == Form::Plain).collect();
        Ok(plain
            .iter()
            .map(|(path, form)| (self.modules().join(path), flat(path, *form)))
            .collect())
    }
}

/// The programs that are built from Go modules, with the licence terms of what they are
/// linked from.
fn add_workloads(tree: &mut Tree, go: &Built) {
    for (path, file) in &go.programs {
        tree.program(path, file);
    }
    for (path, target) in &go.links {
        tree.link(path, target);
    }
    for (path, text) in &go.terms {
        tree.text(path, text.as_str());
    }
}

fn add_index(
    tree: &mut Tree,
    folder: &str,
    index: &Index,
    kept: &Kept,
    place: impl Fn(&str, Form) -> String,
) {
    tree.text(&format!("{folder}/modules.dep"), index.dep(kept, place));
    tree.text(&format!("{folder}/modules.alias"), index.alias(kept));
    tree.text(&format!("{folder}/modules.softdep"), index.softdep(kept));
}

/// The file name of a module in the initramfs, which has one folder for all.
fn flat(path: &str, form: Form) -> String {
    let file = format!("{}.ko", modules::name(path));
    match form {
        Form::Plain => file,
        Form::Packed => file + ".xz",
    }
}
