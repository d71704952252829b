//! The programs of an image that are built from Go modules.
//!
//! ```text
//! image/go/<module>/{go.mod,go.sum,main.go}
//!    |  module proxy, once: go mod download
//!    v
//! <cache>/go/mod -- go build, without a network --> <out>/bin/<program>
//!                                              \--> <out>/terms/<module>.json
//! ```
//!
//! `build` calls this for an image with workloads, and [`programs`] for a person who
//! wants some programs alone. The toolchain is of the payload ([`toolchain`]); which
//! programs there are, and how each is built, is a table ([`catalog`]).
//!
//! Invariants:
//! - A downloaded module is used only with the hash in `go.sum`; Go itself checks it.
//! - A build reads the sources, the modules and the payload, and nothing else: two hosts
//!   have the same bytes (for programs with C code, with the same C compiler).
//! - A module is built again only if its sources, its flags or a tool has changed; its
//!   record is beside the programs, so all images share one build.
//! - Every program has reported the version that `go.mod` names.
//!
//! What this module does not do: choose versions. `go get` and `go mod tidy` in a folder
//! of `image/go` do that, and a commit records it.

pub(crate) mod catalog;
mod download;
mod terms;
mod toolchain;

use std::{fs, path::PathBuf};

use self::{
    catalog::{Code, KUBE, MODULES, Module, Program, Stamp},
    terms::Terms,
    toolchain::{Network, Toolchain},
};
use crate::{
    error::{At as _, Error, Result},
    guard::{self, Guard},
    payload::{Payload, Source},
    program,
    provide::provide,
    step::{Inputs, Observer, Steps, Unit},
};

/// Where the sources of the programs are, and where the programs go.
#[derive(Clone, Debug)]
pub struct Folders {
    /// The folder with a folder for each Go module.
    pub modules: PathBuf,
    /// The folder for programs, their terms, and the records of their builds.
    pub out: PathBuf,
}

impl Folders {
    fn program(&self, program: &Program) -> PathBuf {
        self.out.join("bin").join(program.name)
    }

    fn module(&self, module: &Module) -> PathBuf {
        self.modules.join(module.name)
    }

    fn version(&self, module: &Module) -> Result<String> {
        let path = self.module(module).join("go.mod");
        module.version(&fs::read_to_string(&path).at("read", &path)?, &path)
    }

    fn terms(&self, module: &Module) -> PathBuf {
        self.out.join("terms").join(format!("{}.json", module.name))
    }
}

/// Builds the programs of these modules, or of all that an image has, where they are not
/// up to date. Returns their paths.
///
/// # Errors
///
/// No module has such a name; the payload or a module cannot be fetched; or a build
/// fails.
pub fn programs(
    source: &Source,
    folders: &Folders,
    names: &[String],
    observer: &dyn Observer,
) -> Result<Vec<PathBuf>> {
    let modules = select(names)?;
    let payload = provide(source, observer)?;
    Builder::new(source, folders, &payload, observer)?.build(&modules)?;
    let programs = modules.iter().flat_map(|module| module.programs);
    Ok(programs.map(|program| folders.program(program)).collect())
}

/// Fetches the payload and what the modules of an image need, where they are not there.
/// [`crate::build()`] does that as well; a caller with other work before it learns here
/// of a host without a way to the module proxy.
///
/// # Errors
///
/// The payload or a module cannot be fetched.
pub fn fetch(source: &Source, folders: &Folders, observer: &dyn Observer) -> Result<()> {
    let payload = provide(source, observer)?;
    Builder::new(source, folders, &payload, observer)?.fetch()
}

/// The modules with these names; without names, those of an image.
fn select(names: &[String]) -> Result<Vec<&'static Module>> {
    if names.is_empty() {
        return Ok(MODULES.iter().filter(|module| module.in_image()).collect());
    }
    let find = |name: &String| {
        let found = MODULES.iter().find(|module| module.name == name);
        found.ok_or_else(|| Error::NoModule {
            name: name.clone(),
            known: MODULES.iter().map(|module| module.name).collect::<Vec<_>>().join(", "),
        })
    };
    names.iter().map(find).collect()
}

/// The version of Kubernetes in an image with workloads, such as `1.37.2`.
pub(crate) fn kubernetes(folders: &Folders) -> Result<String> {
    let version = folders.version(&KUBE)?;
    Ok(version.trim_start_matches('v').to_owned())
}

/// The programs of an image, as its root has them.
#[derive(Debug, Default)]
pub(crate) struct Built {
    /// Path in the root, and the file.
    pub(crate) programs: Vec<(String, PathBuf)>,
    /// Path in the root, and the target of the link.
    pub(crate) links: Vec<(String, String)>,
    /// Those with C code, which need libraries.
    pub(crate) linked: Vec<PathBuf>,
    /// Terms by path in the root.
    pub(crate) terms: Terms,
}

/// Builds with one toolchain into one folder.
pub(crate) struct Builder<'a> {
    folders: &'a Folders,
    toolchain: Toolchain,
    steps: Steps<'a>,
    /// The terms of Go itself, which every program contains.
    own_terms: PathBuf,
    _guard: Guard,
}

impl<'a> Builder<'a> {
    /// Waits until no other build works in these folders.
    pub(crate) fn new(
        source: &Source,
        folders: &'a Folders,
        payload: &Payload,
        observer: &'a dyn Observer,
    ) -> Result<Self> {
        for folder in ["bin", "terms"].map(|name| folders.out.join(name)) {
            fs::create_dir_all(&folder).at("make", &folder)?;
        }
        let guard = guard::hold(&folders.out, observer)?;
        let package = crate::packages::GO;
        Ok(Self {
            folders,
            toolchain: Toolchain::new(payload, source.cache.join("go"))?,
            steps: Steps::open(folders.out.join("steps"), observer)?,
            own_terms: payload.root.join(format!("usr/share/doc/{package}/copyright")),
            _guard: guard,
        })
    }

    /// Downloads what the modules of an image need, where one of them is to be built.
    fn fetch(&self) -> Result<()> {
        for module in select(&[])? {
            let outputs = self.outputs(module);
            if !self.steps.fresh(module.name, &self.inputs(module)?, &outputs) {
                let folder = self.folders.module(module);
                download::modules(&self.toolchain, &folder, self.steps.observer)?;
            }
        }
        self.steps.digests.save()
    }

    /// Builds the programs of an image.
    pub(crate) fn image(&self) -> Result<Built> {
        let modules = select(&[])?;
        self.build(&modules)?;
        let mut built = Built::default();
        let go = format!("std@{}/copyright", self.toolchain.version());
        let text = fs::read(&self.own_terms).at("read", &self.own_terms)?;
        let mut terms = Terms::from([(go, String::from_utf8_lossy(&text).into_owned())]);
        for module in modules {
            for program in module.programs {
                let Some(folder) = program.folder else { continue };
                let file = self.folders.program(program);
                if program.code == Code::GoAndC {
                    built.linked.push(file.clone());
                }
                built.programs.push((format!("{folder}/{}", program.name), file));
                let link = |name: &&str| (format!("{folder}/{name}"), program.name.to_owned());
                built.links.extend(program.links.iter().map(link));
            }
            let path = self.folders.terms(module);
            let text = fs::read(&path).at("read", &path)?;
            let more: Terms = serde_json::from_slice(&text)
                .map_err(std::io::Error::from)
                .at("understand", &path)?;
            terms.extend(more);
        }
        let place = |(path, text)| (format!("usr/share/doc/go/{path}"), text);
        built.terms = terms.into_iter().map(place).collect();
        Ok(built)
    }

    fn build(&self, modules: &[&Module]) -> Result<()> {
        for module in modules {
            let outputs = self.outputs(module);
            self.steps.run(module.name, self.inputs(module)?, &outputs, || self.make(module))?;
        }
        self.steps.digests.save()
    }

    fn outputs(&self, module: &Module) -> Vec<PathBuf> {
        let programs = module.programs.iter().map(|program| self.folders.program(program));
        programs.chain([self.folders.terms(module)]).collect()
    }

    /// Everything that decides the bytes of a module's programs.
    fn inputs(&self, module: &Module) -> Result<Inputs> {
        let version = self.folders.version(module)?;
        let code = if module.has_c() { Code::GoAndC } else { Code::Go };
        let flags = module.programs.iter().fold(String::new(), |text, program| {
            let flags = program.flags(module.stamp, &version).join(" ");
            text + &format!("{} {} {:?} {flags}\n", program.name, program.package, program.code)
        });
        let mut inputs = Inputs::default()
            .text("the Go toolchain", &self.toolchain.identity(code)?)
            .text("its flags", &flags);
        let folder = self.folders.module(module);
        for entry in fs::read_dir(&folder).at("list", &folder)? {
            let path = entry.at("list", &folder)?.path();
            if path.is_file() {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                inputs = inputs.file(&name, &path, &self.steps.digests)?;
            }
        }
        Ok(inputs)
    }

    fn make(&self, module: &Module) -> Result<()> {
        download::modules(&self.toolchain, &self.folders.module(module), self.steps.observer)?;
        let version = self.folders.version(module)?;
        let mut terms = Terms::new();
        for program in module.programs {
            terms.extend(terms::collect(&self.list(module, program, terms::FORMAT)?)?);
            self.compile(module, program, &version)?;
            self.check(module, program, &version)?;
        }
        let path = self.folders.terms(module);
        let bytes = serde_json::to_vec(&terms).map_err(std::io::Error::from);
        fs::write(&path, bytes.at("describe", &path)?).at("write", &path)
    }

    /// The output of `go list` for every package of a program.
    fn list(&self, module: &Module, program: &Program, format: &str) -> Result<String> {
        let mut go = self.toolchain.go(&self.folders.module(module), program.code, Network::Off);
        go.args(["list", "-deps", "-mod=readonly", "-tags", program.tags, "-f", format]);
        let listed = program::run(go.arg(program.package))?;
        Ok(String::from_utf8_lossy(&listed).into_owned())
    }

    fn compile(&self, module: &Module, program: &Program, version: &str) -> Result<()> {
        let total = self.list(module, program, "{{.ImportPath}}")?.lines().count() as u64;
        let mut go = self.toolchain.go(&self.folders.module(module), program.code, Network::Off);
        go.args(["build", "-v"]).args(program.flags(module.stamp, version));
        let file = std::path::absolute(self.folders.program(program)).at("find", program.name)?;
        go.arg("-o").arg(file).arg(program.package);
        let mut done = 0;
        let built = toolchain::run_build(&mut go, |_package| {
            // A package of the cache is not reported, so this may end early; and never at
            // the end, since the linker's work is still to come.
            done = (done + 1).min(total.saturating_sub(1));
            self.steps.observer.progress(program.name, done, total, Unit::Packages);
        });
        self.steps.observer.progress(program.name, total, total, Unit::Packages);
        built
    }

    /// Whether a program runs, and reports its version where it knows one.
    fn check(&self, module: &Module, program: &Program, version: &str) -> Result<()> {
        let (arguments, words) = program.check;
        let file = self.folders.program(program);
        let file = std::path::absolute(&file).at("find", &file)?;
        let mut command = match program.code {
            Code::Go => program::host(&file.to_string_lossy()),
            Code::GoAndC => program::payload(self.toolchain.payload(), &file.to_string_lossy()),
        };
        let output = program::run_both(command.args(arguments))?;
        let version = match module.stamp {
            Stamp::None => version.trim_start_matches('v'),
            Stamp::Absent => "",
            // Without its stamp, a program reports a number as well, or something like it.
            Stamp::Variables(_) | Stamp::Kubernetes => version,
        };
        match words.iter().chain([&version]).find(|word| !output.contains(**word)) {
            None => Ok(()),
            Some(word) => Err(Error::Unexpected {
                program: program.name.to_owned(),
                expected: (*word).to_owned(),
                output,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_no_tool_of_the_host() {
        let names: Vec<_> = select(&[]).unwrap().iter().map(|module| module.name).collect();
        assert!(names.contains(&"kube") && !names.contains(&"kubectl") && !names.contains(&"e2e"));
        assert_eq!(select(&["kubectl".to_owned()]).unwrap()[0].name, "kubectl");
        let error = select(&["kuba".to_owned()]).unwrap_err();
        assert!(error.to_string().contains("kubectl"), "{error}");
    }
}
