//! The Go toolchain of the payload: how `go` is started, and what is seen of its work.
//!
//! Invariants:
//! - Except for the download of modules, `go` reads no setting of the host and reaches no
//!   network.
//! - No other toolchain is ever downloaded or used.

use std::{
    env, fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::catalog::Code;
use crate::{
    error::{At as _, Error, Result},
    lock::Lock,
    packages::{GO, GO_SOURCES},
    payload::Payload,
    program::{self, LIBRARIES},
};

/// Where the toolchain is in the payload.
const GOROOT: &str = "usr/lib/go-1.26";
/// The packages with C headers and libraries.
const C: &[&str] = &["libc6-dev", "libseccomp-dev", "libseccomp2", "libc6", "linux-libc-dev"];
/// The C compiler, the host's: our Rust programs need it as well.
const CC: &str = "gcc";
/// Variables of the host that would select another C compiler, or other headers and libraries for
/// it.
const CC_SETTINGS: [&str; 10] = [
    "CC",
    "CFLAGS",
    "LDFLAGS",
    "PKG_CONFIG_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "LD_RUN_PATH",
];
/// How many lines of a failed build go into the error.
const LINES_MAX: usize = 20;

/// Whether `go` may use the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    /// Through the module proxy that the host's Go is set up with.
    Proxy,
    /// Not at all.
    Off,
}

/// The unpacked toolchain, and the folder of its caches.
#[derive(Debug)]
pub(super) struct Toolchain {
    payload: PathBuf,
    lock: Lock,
    cache: PathBuf,
}

impl Toolchain {
    pub(super) fn new(payload: &Payload, cache: PathBuf) -> Result<Self> {
        for folder in ["mod", "build", "path"] {
            let folder = cache.join(folder);
            fs::create_dir_all(&folder).at("make", &folder)?;
        }
        // Both are passed to programs that run elsewhere.
        let absolute = |path: &Path| std::path::absolute(path).at("find", path);
        Ok(Self {
            payload: absolute(&payload.root)?,
            lock: payload.lock.clone(),
            cache: absolute(&cache)?,
        })
    }

    /// The folder with downloaded modules.
    pub(super) fn modules(&self) -> PathBuf {
        self.cache.join("mod")
    }

    /// The payload's root folder.
    pub(super) fn payload(&self) -> &Path {
        &self.payload
    }

    /// The version of the toolchain's package.
    pub(super) fn version(&self) -> &str {
        let package = self.lock.packages.iter().find(|package| package.name == GO);
        package.map_or("", |package| &package.version)
    }

    /// A text that changes with every tool that decides the bytes of a program.
    pub(super) fn identity(&self, code: Code) -> Result<String> {
        let (names, compiler) = match code {
            Code::Go => (&[][..], Vec::new()),
            Code::GoAndC => (C, program::run(program::host(CC).arg("-dumpfullversion"))?),
        };
        let packages = self
            .lock
            .packages
            .iter()
            .filter(|package| {
                [GO, GO_SOURCES].iter().chain(names).any(|name| *name == package.name)
            })
            .map(|package| format!("{} {} {}\n", package.name, package.version, package.sha256));
        Ok(packages.collect::<String>() + &String::from_utf8_lossy(&compiler))
    }

    /// `go`, in a folder of ours. It ends with the thread that starts it: a build behind other
    /// work must not outlive the command.
    pub(super) fn go(&self, folder: &Path, code: Code, network: Network) -> Command {
        // A static program, as all of the toolchain is: it needs no loader.
        let mut go = program::host("setpriv");
        go.args(["--pdeathsig", "KILL", "--"]).arg(self.payload.join(GOROOT).join("bin/go"));
        go.current_dir(folder);
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if (name.starts_with("GO") || name.starts_with("CGO_"))
                && !(network == Network::Proxy && of_the_proxy(&name))
            {
                go.env_remove(&*name);
            }
        }
        for name in CC_SETTINGS {
            go.env_remove(name);
        }
        go.env("GOROOT", self.payload.join(GOROOT))
            .env("GOPATH", self.cache.join("path"))
            .env("GOMODCACHE", self.modules())
            .env("GOCACHE", self.cache.join("build"))
            .env("GOTOOLCHAIN", "local")
            .env("GOWORK", "off")
            .env("GOTELEMETRY", "off")
            // Otherwise only root could remove the cache again without a change of modes.
            .env("GOFLAGS", "-modcacherw")
            // Of the compiler: it collects garbage less often than by default (100), which is a
            // fifth of the processor time of a build of Kubernetes, and takes more memory.
            .env("GOGC", "400")
            .envs([("GOOS", "linux"), ("GOARCH", "amd64"), ("GOAMD64", "v1")]);
        if network == Network::Off {
            go.envs([("GOENV", "off"), ("GOPROXY", "off"), ("GOSUMDB", "off")]);
        }
        match code {
            Code::Go => go.env("CGO_ENABLED", "0"),
            Code::GoAndC => self.with_c(&mut go),
        };
        go
    }

    /// Lets the C compiler see the payload's headers and libraries, and not the host's.
    fn with_c<'a>(&self, go: &'a mut Command) -> &'a mut Command {
        let sysroot = quoted(format!("--sysroot={}", self.payload.display()));
        // The compiler knows the host's libraries by a path that no sysroot changes;
        // these come before them.
        let libraries = quoted(format!("-B{}/", self.payload.join(LIBRARIES).display()));
        go.env("CGO_ENABLED", "1")
            .env("CC", CC)
            .env("CGO_CFLAGS", format!("{sysroot} -O2"))
            .env("CGO_LDFLAGS", format!("{sysroot} {libraries} -lseccomp"))
            // Its answer would be about the host's libraries; the flags above are complete.
            .env("PKG_CONFIG", "true")
    }
}

/// A flag as `go` reads it from a variable with several: blanks divide them, except between two
/// quotes of one kind around a whole flag. One with a blank and quotes of both kinds has no such
/// form: `go` names the variable then.
fn quoted(flag: String) -> String {
    if !flag.contains([' ', '\t', '\n', '\r']) {
        return flag;
    }
    let quote = if flag.contains('\'') { '"' } else { '\'' };
    format!("{quote}{flag}{quote}")
}

/// Whether a variable names the way to the module proxy, or the trust in it.
fn of_the_proxy(variable: &str) -> bool {
    ["GOPROXY", "GONOPROXY", "GOPRIVATE", "GOSUMDB", "GONOSUMDB", "GOINSECURE", "GOENV"]
        .contains(&variable)
}

/// Runs `go build -v` and calls `built` with the name of each package that it compiles.
pub(super) fn run_build(command: &mut Command, mut built: impl FnMut(&str)) -> Result<()> {
    let start = |source| Error::Start { program: "go".to_owned(), source };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(start)?;
    let mut said = Vec::new();
    for line in child.stderr.take().into_iter().flat_map(|pipe| BufReader::new(pipe).lines()) {
        let Ok(line) = line else { break };
        // A package has no blank in its name, unlike every message.
        if line.contains(char::is_whitespace) {
            said.push(line);
        } else {
            built(&line);
        }
    }
    let status = child.wait().map_err(start)?;
    if status.success() {
        return Ok(());
    }
    said.truncate(LINES_MAX);
    let output = said.iter().map(|line| line.trim()).collect::<Vec<_>>().join("; ");
    Err(Error::Program { program: "go build".to_owned(), status: status.to_string(), output })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_build_says_what_is_wrong_and_not_what_it_built() {
        let mut packages = Vec::new();
        let script = "echo a/b >&2; echo '# a/c' >&2; echo 'x.go:3:1: no such thing' >&2; exit 1";
        let error = run_build(program::host("sh").args(["-c", script]), |name| {
            packages.push(name.to_owned());
        });
        let expected = "go build ended with exit status: 1: # a/c; x.go:3:1: no such thing";
        assert_eq!(error.unwrap_err().to_string(), expected);
        assert_eq!(packages, ["a/b"]);
    }

    fn toolchain(cache: &Path) -> Toolchain {
        of_payload("/p", cache)
    }

    fn of_payload(root: &str, cache: &Path) -> Toolchain {
        let payload =
            Payload { root: root.into(), lock: Lock { packages: Vec::new() }, moved: Vec::new() };
        Toolchain::new(&payload, cache.to_owned()).unwrap()
    }

    #[test]
    fn a_payload_in_a_folder_with_a_blank_is_one_flag_of_the_c_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let flags = |root: &str, name: &str| {
            let toolchain = of_payload(root, folder.path());
            let go = toolchain.go(Path::new("/m"), Code::GoAndC, Network::Off);
            let found = go.get_envs().find(|(known, _)| *known == name);
            found.and_then(|(_, value)| value).map(|value| value.to_string_lossy().into_owned())
        };
        let compiles = |root: &str| flags(root, "CGO_CFLAGS").unwrap();
        assert_eq!(compiles("/p"), "--sysroot=/p -O2");
        assert_eq!(compiles("/a b"), "'--sysroot=/a b' -O2");
        assert_eq!(compiles("/ann's b"), "\"--sysroot=/ann's b\" -O2");
        let links = flags("/a b", "CGO_LDFLAGS").unwrap();
        let expected = format!("'--sysroot=/a b' '-B/a b/{LIBRARIES}/' -lseccomp");
        assert_eq!(links, expected);
    }

    #[test]
    fn the_host_s_folders_of_headers_and_libraries_do_not_reach_the_c_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let go = toolchain(folder.path()).go(Path::new("/m"), Code::GoAndC, Network::Off);
        for name in ["CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX"] {
            let is_removed = go.get_envs().any(|(known, value)| known == name && value.is_none());
            assert!(is_removed, "{name}");
        }
    }

    #[test]
    fn only_a_download_reaches_the_network() {
        let folder = tempfile::tempdir().unwrap();
        let toolchain = toolchain(folder.path());
        let value = |network, name: &str| {
            let go = toolchain.go(Path::new("/m"), Code::Go, network);
            let found = go.get_envs().find(|(known, _)| *known == name);
            found.and_then(|(_, value)| value).map(|value| value.to_string_lossy().into_owned())
        };
        assert_eq!(value(Network::Off, "GOPROXY").as_deref(), Some("off"));
        assert_ne!(value(Network::Proxy, "GOPROXY").as_deref(), Some("off"));
        for network in [Network::Off, Network::Proxy] {
            assert_eq!(value(network, "GOTOOLCHAIN").as_deref(), Some("local"));
            assert_eq!(value(network, "CGO_ENABLED").as_deref(), Some("0"));
        }
    }
}
