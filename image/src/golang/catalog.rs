//! The programs that are built from Go modules: where each comes from, and how it is
//! built.
//!
//! Pure: [`super`] carries it out. Every version is in `image/go/<module>/go.mod` and
//! nowhere else.
//!
//! Invariants:
//! - Flags and settings follow from this table and from `go.mod`, and from nothing on the
//!   host.

use std::path::Path;

use crate::error::{Error, Result};

/// A folder below `image/go`: a Go module whose programs are built together.
#[derive(Debug)]
pub(crate) struct Module {
    /// Name of the folder, and of the build step.
    pub(crate) name: &'static str,
    /// The required module whose version is that of the programs.
    pub(crate) origin: &'static str,
    /// How the programs learn their version.
    pub(crate) stamp: Stamp,
    /// The programs.
    pub(crate) programs: &'static [Program],
}

/// One program.
#[derive(Debug)]
pub(crate) struct Program {
    /// Name of the file.
    pub(crate) name: &'static str,
    /// The package with its `main`, as `go build` takes it.
    pub(crate) package: &'static str,
    /// Build tags.
    pub(crate) tags: &'static str,
    /// The language of its sources.
    pub(crate) code: Code,
    /// Arguments with which it prints its version, and words that it must print then.
    pub(crate) check: (&'static [&'static str], &'static [&'static str]),
    /// Its folder in the image; a program without one is a tool of the host.
    pub(crate) folder: Option<&'static str>,
    /// Further names in that folder.
    pub(crate) links: &'static [&'static str],
}

/// The language of a program's sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// Go alone: one static file.
    Go,
    /// Go and C: linked against the payload's libraries.
    GoAndC,
}

/// The variables that hold a program's version. Those of a module's own build would name
/// a commit; a module has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stamp {
    /// The sources hold it.
    None,
    /// The program does not report it.
    Absent,
    /// These variables, wherever a program has them.
    Variables(&'static [&'static str]),
    /// Those of Kubernetes: clients and servers compare them with each other's.
    Kubernetes,
}

/// The build tags of programs without C code. Name resolution and users are then Go's own
/// in any case; the third leaves the pages of a debugging server out of gRPC.
const PLAIN: &str = "netgo,osusergo,grpcnotrace";

/// Those of a shim, which make it small: every pod has one in memory.
const SHIM: &str = "no_grpc,no_tracing,urfave_cli_no_docs,netgo,osusergo,static_build";

/// Every module, in the order in which they are built: the longest last, so that a
/// mistake in another one is seen early; and the suite last of all, since it finds most of
/// its packages in the cache when Kubernetes is built.
pub(crate) const MODULES: &[Module] =
    &[RUNC, CNI, COREDNS, POLICY, GVISOR, CONTAINERD, CTR, KUBECTL, KUBE, AGNHOST, E2E];

/// The program that starts a container. It enters namespaces before Go's runtime starts, in C.
const RUNC: Module = Module {
    name: "runc",
    origin: "github.com/opencontainers/runc",
    stamp: Stamp::None,
    programs: &[Program {
        tags: "seccomp,runc_nocriu,urfave_cli_no_docs,netgo,osusergo",
        code: Code::GoAndC,
        // Without seccomp, a pod that asks for a filter would not start.
        check: (&["--version"], &["runc version", "libseccomp"]),
        ..Program::of("runc", "github.com/opencontainers/runc", "usr/bin")
    }],
};

/// The plugins that give a pod its network: containerd runs them.
const CNI: Module = Module {
    name: "cni",
    origin: "github.com/containernetworking/plugins",
    stamp: Stamp::Variables(&[
        "github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion",
    ]),
    programs: &[
        plugin("host-local", "github.com/containernetworking/plugins/plugins/ipam/host-local"),
        plugin("portmap", "github.com/containernetworking/plugins/plugins/meta/portmap"),
        plugin("ptp", "github.com/containernetworking/plugins/plugins/main/ptp"),
    ],
};

const fn plugin(name: &'static str, package: &'static str) -> Program {
    // Without a command, a plugin says what it is.
    Program { check: (&[], &["CNI", "plugin"]), ..Program::of(name, package, "usr/lib/cni") }
}

/// The name server of pods.
const COREDNS: Module = Module {
    name: "coredns",
    origin: "github.com/coredns/coredns",
    stamp: Stamp::None,
    programs: &[Program {
        check: (&["-version"], &["CoreDNS"]),
        ..Program::of("coredns", ".", "usr/bin")
    }],
};

/// The program that enforces NetworkPolicies on a node.
const POLICY: Module = Module {
    name: "policy",
    origin: "sigs.k8s.io/kube-network-policies",
    stamp: Stamp::Variables(&["main.version"]),
    programs: &[Program {
        check: (&["-version"], &["kube-network-policies"]),
        ..Program::of("policy", ".", "usr/bin")
    }],
};

/// The container runtime, and the program that it leaves with each pod. Left out are the
/// snapshotters that need file systems or devices that no node has.
const CONTAINERD: Module = Module {
    name: "containerd",
    origin: "github.com/containerd/containerd/v2",
    stamp: Stamp::Variables(&["github.com/containerd/containerd/v2/version.Version"]),
    programs: &[
        Program {
            tags: "no_btrfs,no_devmapper,no_zfs,no_rdt,no_tracing,urfave_cli_no_docs,\
                   netgo,osusergo,static_build,grpcnotrace",
            check: (&["--version"], &["containerd"]),
            ..Program::of(
                "containerd",
                "github.com/containerd/containerd/v2/cmd/containerd",
                "usr/bin",
            )
        },
        Program {
            tags: SHIM,
            check: (&["-v"], &["Version"]),
            ..Program::of(
                "containerd-shim-runc-v2",
                "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
                "usr/bin",
            )
        },
    ],
};

/// containerd's client, for a machine of `cargo xtask bench kubernetes` that a script starts.
const CTR: Module = Module {
    name: "ctr",
    origin: "github.com/containerd/containerd/v2",
    stamp: Stamp::Variables(&["github.com/containerd/containerd/v2/version.Version"]),
    programs: &[Program {
        check: (&["--version"], &["ctr"]),
        folder: None,
        ..Program::of("ctr", "github.com/containerd/containerd/v2/cmd/ctr", "")
    }],
};

/// The runtime of pods that get a kernel of their own, as a process, and its shim. `runsc`
/// is a main package of ours with fewer commands. The shim is containerd's library, which
/// reports a version as containerd does: here it is that of gVisor.
///
/// The module is the branch `go` of gVisor, which has the sources that another build system
/// has generated, and these compiled files: the handler of trapped system calls, the vDSO,
/// and two programs for the kernel's XDP, which the configuration does not use.
const GVISOR: Module = Module {
    name: "gvisor",
    origin: "gvisor.dev/gvisor",
    stamp: Stamp::Variables(&[
        "github.com/containerd/containerd/v2/version.Version",
        "gvisor.dev/gvisor/runsc/version.version",
    ]),
    programs: &[
        Program {
            check: (&["--version"], &["runsc version"]),
            ..Program::of("runsc", ".", "usr/bin")
        },
        Program {
            tags: SHIM,
            check: (&["-v"], &["Version"]),
            ..Program::of("containerd-shim-runsc-v1", "gvisor.dev/gvisor/shim", "usr/bin")
        },
    ],
};

/// Kubernetes' client, for people and tests on the host.
const KUBECTL: Module = Module {
    name: "kubectl",
    origin: "k8s.io/kubectl",
    stamp: Stamp::Kubernetes,
    programs: &[Program {
        check: (&["version", "--client"], &["Client Version"]),
        folder: None,
        ..Program::of("kubectl", ".", "")
    }],
};

/// Every program of Kubernetes that a node has.
pub(crate) const KUBE: Module = Module {
    name: "kube",
    origin: "k8s.io/kubernetes",
    stamp: Stamp::Kubernetes,
    programs: &[Program {
        check: (&["kube-apiserver", "--version"], &["Kubernetes"]),
        links: &[
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubelet",
        ],
        ..Program::of("kube", ".", "usr/bin")
    }],
};

/// Kubernetes' end-to-end suite, for `cargo xtask conformance`.
const E2E: Module = Module {
    name: "e2e",
    origin: "k8s.io/kubernetes",
    stamp: Stamp::Kubernetes,
    programs: &[Program {
        check: (&["--version"], &[]),
        folder: None,
        ..Program::of("e2e", ".", "")
    }],
};

/// The program of most pods of that suite. It reports no version of Kubernetes.
const AGNHOST: Module = Module {
    name: "agnhost",
    origin: "k8s.io/kubernetes",
    stamp: Stamp::Absent,
    programs: &[Program {
        check: (&["help"], &["netexec"]),
        folder: None,
        ..Program::of("agnhost", "k8s.io/kubernetes/test/images/agnhost", "")
    }],
};

impl Module {
    /// Whether an image has a program of this module.
    pub(crate) fn in_image(&self) -> bool {
        self.programs.iter().any(|program| program.folder.is_some())
    }

    /// Whether a program of this module has C code.
    pub(crate) fn has_c(&self) -> bool {
        self.programs.iter().any(|program| program.code == Code::GoAndC)
    }

    /// The version of the programs, from the text of `go.mod`.
    pub(crate) fn version(&self, go_mod: &str, path: &Path) -> Result<String> {
        let required = go_mod.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip_while(|word| *word == "require");
            (words.next() == Some(self.origin)).then(|| words.next()).flatten()
        });
        let wrong = |reason| Error::Malformed {
            path: path.to_owned(),
            expected: "go.mod of this program",
            reason,
        };
        let required =
            required.ok_or_else(|| wrong(format!("it does not require {}", self.origin)))?;
        if self.stamp != Stamp::Kubernetes {
            return Ok(required.to_owned());
        }
        // The libraries of version 1.N.P of Kubernetes are released as 0.N.P.
        required
            .strip_prefix("v0.")
            .or_else(|| required.strip_prefix("v1."))
            .map(|rest| format!("v1.{rest}"))
            .ok_or_else(|| wrong(format!("{required} is not a version of Kubernetes")))
    }
}

impl Program {
    /// A program in Go alone, in this folder of the image.
    const fn of(name: &'static str, package: &'static str, folder: &'static str) -> Self {
        Self {
            name,
            package,
            tags: PLAIN,
            code: Code::Go,
            check: (&[], &[]),
            folder: Some(folder),
            links: &[],
        }
    }

    /// The arguments of `go build` that decide the bytes of the program.
    pub(crate) fn flags(&self, stamp: Stamp, version: &str) -> Vec<String> {
        let linked = ["-s -w -buildid=".to_owned()].into_iter().chain(variables(stamp, version));
        let linked = linked.collect::<Vec<_>>().join(" ");
        let words = [
            // Otherwise the paths of this host would be in the program.
            "-trimpath",
            // The commit of this repository is not that of the program.
            "-buildvcs=false",
            "-mod=readonly",
            // The linker leaves debug information out, so it is not compiled: an eighth of a build.
            "-gcflags=all=-dwarf=false",
            "-tags",
            self.tags,
            "-ldflags",
            &linked,
        ];
        words.map(str::to_owned).to_vec()
    }
}

fn variables(stamp: Stamp, version: &str) -> Vec<String> {
    match stamp {
        Stamp::None | Stamp::Absent => Vec::new(),
        Stamp::Variables(names) => {
            names.iter().map(|name| format!("-X {name}={version}")).collect()
        }
        Stamp::Kubernetes => {
            let mut numbers = version.trim_start_matches('v').split('.');
            let (major, minor) = (numbers.next().unwrap_or(""), numbers.next().unwrap_or(""));
            let values = [
                ("gitVersion", version),
                ("gitMajor", major),
                ("gitMinor", minor),
                ("gitTreeState", "clean"),
                ("gitCommit", ""),
                ("buildDate", "1970-01-01T00:00:00Z"),
            ];
            ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"]
                .iter()
                .flat_map(|package| {
                    values.iter().map(move |(name, value)| format!("-X {package}.{name}={value}"))
                })
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_that_of_go_mod() {
        let path = Path::new("go.mod");
        let kube = KUBE;
        let text = "require (\n\tk8s.io/kubernetes v1.37.2\n)\n";
        assert_eq!(kube.version(text, path).unwrap(), "v1.37.2");
        assert_eq!(kube.version("require k8s.io/kubernetes v1.40.0\n", path).unwrap(), "v1.40.0");
        let kubectl = KUBECTL.version("\tk8s.io/kubectl v0.37.2\n", path);
        assert_eq!(kubectl.unwrap(), "v1.37.2");
        let error = kube.version("\tk8s.io/kubernetesque v1.0.0\n", path).unwrap_err();
        assert!(error.to_string().contains("does not require k8s.io/kubernetes"), "{error}");
    }

    #[test]
    fn kubernetes_learns_its_version_at_both_places_that_report_it() {
        let flags = KUBE.programs[0].flags(Stamp::Kubernetes, "v1.37.2").join(" ");
        for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
            assert!(flags.contains(&format!("-X {package}.gitVersion=v1.37.2 ")), "{flags}");
            assert!(flags.contains(&format!("-X {package}.gitMinor=37 ")), "{flags}");
        }
        assert!(flags.starts_with("-trimpath -buildvcs=false -mod=readonly"), "{flags}");
    }

    #[test]
    fn every_module_of_the_table_is_in_the_repository_with_its_checksums() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("go");
        for module in MODULES {
            let path = folder.join(module.name).join("go.mod");
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(module.version(&text, &path).unwrap().starts_with('v'));
            assert!(folder.join(module.name).join("go.sum").exists(), "{}", module.name);
        }
    }

    #[test]
    fn tools_of_the_host_are_of_the_version_of_what_they_ask() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("go");
        let version = |module: &Module| {
            let path = folder.join(module.name).join("go.mod");
            module.version(&std::fs::read_to_string(&path).unwrap(), &path).unwrap()
        };
        for same in [&[KUBE, KUBECTL, E2E][..], &[CONTAINERD, CTR]] {
            let versions: Vec<_> = same.iter().map(version).collect();
            assert!(versions.iter().all(|version| *version == versions[0]), "{versions:?}");
        }
    }

    #[test]
    fn no_two_programs_share_a_name() {
        let names: Vec<_> = MODULES
            .iter()
            .flat_map(|module| module.programs)
            .flat_map(|program| program.links.iter().chain([&program.name]))
            .collect();
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }
}
