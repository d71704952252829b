//! The errors of building an image, with the next step for the operator.

use std::{io, path::PathBuf};

use crate::{esp, layout, moved::Moved, signing};

/// The result of every function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The command that renews the lock file; named in every error that it resolves.
const UPDATE: &str = "cargo xtask image --update-payload";

/// The format of [`Error::Malformed`] for which there is a next step.
pub(crate) const MICROCODE: &str = "file of microcode";

/// Why an image could not be built or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be used.
    #[error("cannot {what} {path}", path = path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// Its object.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program ended with a failure.
    #[error("{program} ended with {status}: {output}")]
    Program {
        /// The program.
        program: String,
        /// Its exit status, in words.
        status: String,
        /// The end of its output.
        output: String,
    },
    /// The host's apt knows no Debian mirror.
    #[error("the host's apt is set up with no Debian mirror")]
    NoMirror,
    /// The lock file is missing.
    #[error("the lock file {path} does not exist", path = path.display())]
    NoLock {
        /// Where it was expected.
        path: PathBuf,
    },
    /// A line of the lock file is malformed.
    #[error("line {line} of the lock file is wrong: {reason}")]
    Lock {
        /// Counted from 1.
        line: usize,
        /// The fault.
        reason: String,
    },
    /// The lock file and the builder's list name different packages.
    #[error("the lock file and the package list differ: {difference}")]
    Stale {
        /// The packages on one side only.
        difference: String,
    },
    /// The payload has no public authorities.
    #[error("{folder} has no certificates", folder = folder.display())]
    NoAuthorities {
        /// Where they are expected.
        folder: PathBuf,
    },
    /// The archive does not offer the package.
    #[error("the archive has no package {package}")]
    NoPackage {
        /// Its name.
        package: String,
    },
    /// The archive does not offer a package with the firmware of devices. An archive may lack the
    /// component that has them.
    #[error("the mirror {mirror} has no package {package} in its component {component}")]
    NoComponent {
        /// The URL of the archive.
        mirror: String,
        /// The name of the package.
        package: String,
        /// The component.
        component: &'static str,
    },
    /// The mirror no longer has a locked version, and other versions are not allowed.
    #[error("the mirror no longer has these packages of the lock:{}", lines(moved))]
    NotLocked {
        /// The packages, with what the archive has today.
        moved: Vec<Moved>,
    },
    /// The indices of the archive could not be fetched, or no key of Debian has signed them.
    #[error("cannot fetch the indices of the archive: {output}")]
    Indices {
        /// The end of the output of apt.
        output: String,
    },
    /// The mirror does not have a file that its own index names.
    #[error("the mirror's index names {package} {version}, and the mirror does not have it")]
    Vanished {
        /// Its name.
        package: String,
        /// The version that the index names.
        version: String,
    },
    /// A locked package could not be fetched.
    #[error("cannot fetch {package} {version}: {output}")]
    Fetch {
        /// Its name.
        package: String,
        /// The version in the lock file.
        version: String,
        /// The message of apt.
        output: String,
    },
    /// No Go module of the repository has this name.
    #[error("the repository has no Go module {name}; it has {known}")]
    NoModule {
        /// The name that was asked for.
        name: String,
        /// The names of all modules.
        known: String,
    },
    /// The modules of a Go program could not be fetched.
    #[error("cannot fetch the Go modules of {program}: {output}")]
    Modules {
        /// The program.
        program: String,
        /// The message of `go`.
        output: String,
    },
    /// A Go module has no licence terms, so an image must not contain it.
    #[error("the Go module {module} has no licence terms")]
    NoTerms {
        /// Its path and version.
        module: String,
    },
    /// A program that was just built does not report what it should.
    #[error("{program} does not report {expected}, but: {output}")]
    Unexpected {
        /// The program.
        program: String,
        /// The missing word.
        expected: String,
        /// Its report.
        output: String,
    },
    /// A program of the payload needs a library that the payload lacks.
    #[error("{file} needs {library}, which is in no package of the payload")]
    Library {
        /// The program or library that needs it.
        file: String,
        /// The name it asks for.
        library: String,
    },
    /// Modules of the image name firmware files that the payload lacks.
    #[error("no package of the payload has the firmware {files}")]
    NoFirmware {
        /// The files, each with its module.
        files: String,
    },
    /// A required file is missing in the payload.
    #[error("the payload has no {path}")]
    Absent {
        /// Path inside the payload.
        path: String,
    },
    /// A binary file has the wrong format.
    #[error("{path} is not a valid {expected}: {reason}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected format.
        expected: &'static str,
        /// The reason.
        reason: String,
    },
    /// The stub has no room for our sections, or an unexpected layout.
    #[error("cannot build a unified kernel image: {reason}")]
    Uki {
        /// The reason.
        reason: String,
    },
    /// The disk cannot be laid out.
    #[error(transparent)]
    Layout(#[from] layout::Error),
    /// The image could not be signed.
    #[error(transparent)]
    Signing(#[from] signing::Error),
    /// The kernel image of a build was replaced by that of another build.
    #[error("{path} starts the system of another build in the same folder", path = path.display())]
    OtherBuild {
        /// The kernel image.
        path: PathBuf,
    },
    /// The parts do not make a bundle.
    #[error("cannot make an update bundle")]
    Bundle(#[source] polis_bundle::Refusal),
    /// The partition table could not be written or read.
    #[error("cannot write or read the partition table of {path}", path = path.display())]
    Gpt {
        /// The image.
        path: PathBuf,
        /// The error of the table's library.
        source: gpt::GptError,
    },
    /// The ESP could not be written or read.
    #[error(transparent)]
    Esp(#[from] esp::Error),
    /// A file does not hold an image of Polis.
    #[error("{path} holds no image of Polis: {reason}", path = path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The missing or invalid part.
        reason: String,
    },
    /// Two builds of the same inputs gave different bytes.
    #[error("two builds of the same inputs differ in {0}")]
    NotReproducible(String),
}

/// What programs print where a disk is full; the words of Go have no capitals.
const FULL: &str = "no space left on device";

/// What `go` prints when it cannot reach the module proxy.
const UNREACHABLE: [&str; 6] = [
    "dial tcp",
    "no such host",
    "i/o timeout",
    "connection refused",
    "network is unreachable",
    "TLS handshake timeout",
];

impl Error {
    /// Whether modules are missing because the host has no way to the proxy, and not because
    /// one of them differs from `go.sum`.
    #[must_use]
    pub fn no_way_to_modules(&self) -> bool {
        let Self::Modules { output, .. } = self else { return false };
        UNREACHABLE.iter().any(|words| output.contains(words))
            && !output.contains("SECURITY ERROR")
            && !output.contains("checksum mismatch")
    }

    /// Whether a program ended because a disk is full.
    fn is_of_full_disk(&self) -> bool {
        let (Self::Program { output, .. }
        | Self::Indices { output }
        | Self::Fetch { output, .. }
        | Self::Modules { output, .. }) = self
        else {
            return false;
        };
        output.to_ascii_lowercase().contains(FULL)
    }

    /// The next step for the operator.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        Some(match self {
            Self::File { what: "read", source, .. }
                if source.kind() == io::ErrorKind::UnexpectedEof =>
            {
                "copy or build the file again".to_owned()
            }
            Self::Foreign { .. } => {
                "name a whole disk image, raw or qcow2; `polisctl update inspect` shows an update \
                 bundle"
                    .to_owned()
            }
            full if full.is_of_full_disk() => {
                "make room on the disk, for example by `cargo clean`".to_owned()
            }
            Self::NoMirror => {
                "name one: cargo xtask image --mirror URL (a URL that ends in /debian)".to_owned()
            }
            Self::NoLock { .. } | Self::Stale { .. } | Self::Lock { .. } => {
                format!("renew the lock file: {UPDATE}")
            }
            Self::NotLocked { .. } => format!(
                "name an archive that has old versions (--snapshot URL), renew the lock file \
                 ({UPDATE}), or build without --locked: the image is then marked as not of the lock"
            ),
            Self::Vanished { .. } => {
                "the mirror is being updated: try again later, or name another: --mirror URL"
                    .to_owned()
            }
            Self::Fetch { .. } | Self::Indices { .. } => {
                "check the network, or name another mirror: --mirror URL".to_owned()
            }
            Self::Modules { .. } => {
                "make a way to the module proxy for Go (variable GOPROXY), or build an image \
                 without workloads, which needs none: --variant base"
                    .to_owned()
            }
            Self::NoPackage { .. } => {
                "correct the package list in image/src/packages.rs, or name an archive that has \
                 the locked version: --snapshot URL"
                    .to_owned()
            }
            Self::NoComponent { component, .. } => format!(
                "name a mirror of Debian that has the component {component}: --mirror URL; if only \
                 this package is missing, correct the package list in image/src/packages.rs"
            ),
            Self::Library { .. } => "correct the package list in image/src/packages.rs".to_owned(),
            Self::NoFirmware { .. } => {
                "add the package that has it to image/src/packages.rs, or leave the file out in \
                 image/src/firmware.rs"
                    .to_owned()
            }
            Self::Malformed { expected, .. } if *expected == MICROCODE => {
                "name an archive that has the locked version of the package (--snapshot URL), or \
                 correct image/src/microcode.rs"
                    .to_owned()
            }
            Self::Layout(layout::Error::TooSmall { needed, .. }) => {
                format!("use a larger size: --size {}", roomy(*needed))
            }
            Self::Layout(layout::Error::SystemTooLarge { .. }) => {
                "build a system with less in it: --variant base has no workloads".to_owned()
            }
            Self::OtherBuild { .. } => "repeat the command, which builds again".to_owned(),
            Self::Signing(error) => return error.help(),
            Self::Layout(layout::Error::Ragged { size }) => {
                let whole = size.checked_next_multiple_of(layout::ALIGNMENT);
                match whole.map(|size| (size, layout::plan("", 0, size))) {
                    None => "use a smaller size".to_owned(),
                    Some((_, Err(layout::Error::TooSmall { needed, .. }))) => {
                        format!("use a larger size: --size {}", roomy(needed))
                    }
                    Some((size, _)) => format!("use --size {size}"),
                }
            }
            _ => return None,
        })
    }
}

/// A size for a disk that needs so many bytes, in whole gibibytes.
fn roomy(needed: u64) -> u64 {
    needed.next_multiple_of(1 << 30)
}

/// A line for each package.
fn lines(moved: &[Moved]) -> String {
    moved.iter().map(|moved| format!("\n  {moved}")).collect()
}

/// Names the operation and its object in an I/O error.
pub(crate) trait At<T> {
    fn at(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::File { what, path: path.into(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_not_a_fault_of_the_network() {
        let apt = "Error writing to file - write (28: No space left on device)".to_owned();
        let go = "write /x/go/mod/cache: no space left on device".to_owned();
        let [package, version, program, status] = ["a", "1", "kube", "2"].map(str::to_owned);
        let fetch = Error::Fetch { package, version, output: apt.clone() };
        let modules = Error::Modules { program: program.clone(), output: go };
        let dpkg = Error::Program { program, status, output: apt.clone() };
        for error in [fetch, modules, dpkg, Error::Indices { output: apt }] {
            let help = error.help().unwrap();
            assert!(help.starts_with("make room"), "{error}: {help}");
        }
        let away = Error::Indices { output: "Could not resolve 'mirror'".to_owned() };
        assert!(away.help().unwrap().contains("network"), "{away}");
    }

    #[test]
    fn the_size_in_the_next_step_is_one_that_is_taken() {
        let help = |size| Error::from(layout::plan("", 0, size).unwrap_err()).help().unwrap();
        let smallest = "use a larger size: --size 3221225472";
        assert_eq!([0, 1, 512, 1 << 30].map(help), [smallest; 4]);
        assert_eq!(help((4 << 30) - 1), "use --size 4294967296");
        assert!(layout::plan("", 0, 3_221_225_472).is_ok());
        // No multiple is behind it.
        assert_eq!(help(u64::MAX), "use a smaller size");
    }

    #[test]
    fn a_module_that_differs_is_no_missing_way_to_the_proxy() {
        let unreachable = |output: &str| {
            let (program, output) = ("kube".to_owned(), output.to_owned());
            Error::Modules { program, output }.no_way_to_modules()
        };
        assert!(unreachable("Get \"https://proxy\": dial tcp 192.0.2.1:443: i/o timeout"));
        assert!(unreachable("dial tcp: lookup proxy on 192.0.2.53:53: no such host"));
        for broken in [
            "verifying k8s.io/api@v0.37.2: checksum mismatch",
            "missing go.sum entry for module providing package k8s.io/api",
            "verifying module: SECURITY ERROR; then dial tcp: i/o timeout",
        ] {
            assert!(!unreachable(broken), "{broken}");
        }
        assert!(!Error::NoTerms { module: "dial tcp".to_owned() }.no_way_to_modules());
    }
}
