//! The tree of control groups: which get the processors first, and which keep their memory.
//!
//! The kernel divides processors by weight when there are too few. An API server that
//! starts takes all of them for a minute, and kubelet's pods for as long as they like: in
//! that time `node` still sends its sign of life, which `init` waits for, and etcd still
//! answers heartbeats, which its peers wait for.
//!
//! [`plan`] is pure; [`apply`] writes it; [`sort`] moves the processes that were started
//! before the groups existed.
//!
//! The groups exist only with a role of Kubernetes. Without one, `node` and etcd share the
//! machine with no other program, so weights would change nothing, while the memory controller
//! costs every page fault of a boot a little, and each of the writes here waits for a grace
//! period of the kernel.
//!
//! What this module does not do: make `kubepods`. Kubelet makes it with the kernel's
//! weight, 100.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use polis_runtime::sys::cgroup::Group;

/// The controllers that the tree uses, and that kubelet asks for.
const CONTROLLERS: [&str; 6] = ["cpuset", "cpu", "io", "memory", "pids", "hugetlb"];

/// A share of this is 1/100 of the kernel's own weight.
const WEIGHT_SYSTEM: u32 = 1000;
const WEIGHT_KUBERNETES: u32 = 200;

const MIB: u64 = 1 << 20;
/// Resident memory of `init` and `node` at work, with room for a burst.
const MEMORY_POLIS: u64 = 64 * MIB;
/// etcd with the objects of a small cluster.
const MEMORY_ETCD: u64 = 128 * MIB;
/// containerd, kubelet and a few shims; the kernel passes it on to the children.
const MEMORY_POD_RUNTIME: u64 = 192 * MIB;
/// Of the machine's memory, at most one part in this many is protected: the kernel kills
/// where it finds nothing that it may reclaim.
const PROTECTED_PART: u64 = 3;

/// Below that of every pod, and above the processes that the kernel must never kill.
const SCORE: &str = "-999";

/// One group as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which one.
    pub group: Group,
    /// Its share of the processors where they are short; `None` is the kernel's, 100.
    pub weight: Option<u32>,
    /// Bytes that the kernel does not reclaim from it.
    pub memory_min: u64,
    /// Whether it has groups of its own, which then use the controllers, too.
    pub divided: bool,
}

/// Why the tree cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}", path.display())]
pub struct Error {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// The groups for a machine with `memory` bytes, each after its parent.
#[must_use]
pub fn plan(memory: u64) -> Vec<Wanted> {
    let all = MEMORY_POLIS + MEMORY_ETCD + MEMORY_POD_RUNTIME;
    let protected = all.min(memory / PROTECTED_PART);
    // On a small machine, each gets less in the same proportion. The sums are far below
    // the range of 64 bits: a machine's memory is at most 2^57 bytes.
    let share = |wanted: u64| wanted * (protected / MIB) / (all / MIB);
    let wanted = |group, weight, memory, divided| Wanted {
        group,
        weight,
        memory_min: share(memory),
        divided,
    };
    Group::ALL
        .into_iter()
        .map(|group| match group {
            Group::Polis => wanted(group, Some(WEIGHT_SYSTEM), MEMORY_POLIS, false),
            Group::Etcd => wanted(group, Some(WEIGHT_SYSTEM), MEMORY_ETCD, false),
            Group::Kube => wanted(group, Some(WEIGHT_KUBERNETES), 0, false),
            Group::PodRuntime => wanted(group, Some(WEIGHT_KUBERNETES), MEMORY_POD_RUNTIME, true),
            Group::Containerd | Group::Kubelet | Group::Shim => wanted(group, None, 0, false),
        })
        .collect()
}

/// Makes the groups below `root`, and returns the controllers that the kernel lacks.
/// Blocks.
///
/// # Errors
///
/// The first write that the kernel refuses.
pub fn apply(root: &Path, groups: &[Wanted]) -> Result<Vec<&'static str>, Error> {
    let available = read(&root.join("cgroup.controllers"))?;
    let (present, lacking): (Vec<_>, Vec<_>) = CONTROLLERS
        .into_iter()
        .partition(|controller| available.split_whitespace().any(|word| word == *controller));
    let enabled: Vec<_> = present.iter().map(|controller| format!("+{controller}")).collect();
    let enabled = enabled.join(" ");
    write(&root.join("cgroup.subtree_control"), &enabled)?;
    for Wanted { group, weight, memory_min, divided } in groups {
        let directory = root.join(group.name());
        fs::create_dir_all(&directory).map_err(failed("make", &directory))?;
        if *divided {
            write(&directory.join("cgroup.subtree_control"), &enabled)?;
        }
        if let Some(weight) = weight.filter(|_| present.contains(&"cpu")) {
            write(&directory.join("cpu.weight"), &weight.to_string())?;
        }
        if *memory_min > 0 && present.contains(&"memory") {
            write(&directory.join("memory.min"), &memory_min.to_string())?;
        }
    }
    Ok(lacking)
}

/// Moves every process that is still in the root of the hierarchy into its group, with all
/// its threads, and asks the OOM killer to take it last; returns the number of processes
/// that it moved. The kernel leaves the memory of a process with the group in which it was
/// taken, so the protection covers what the process takes from now on. Blocks.
///
/// # Errors
///
/// When the root cannot be read, or a process that still runs does not move.
pub fn sort(root: &Path, proc: &Path) -> Result<usize, Error> {
    let members = read(&root.join("cgroup.procs"))?;
    let mut moved = 0;
    for process in members.lines() {
        let Some(group) = group_of(proc, process) else { continue };
        let place = root.join(group.name()).join("cgroup.procs");
        match append(&place, process) {
            Ok(()) => moved += 1,
            // It has ended since the list was read.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
            Err(source) => return Err(Error { operation: "write to", path: place, source }),
        }
        // A process that has just ended needs no score.
        let _ended = write(&proc.join(process).join("oom_score_adj"), SCORE);
    }
    Ok(moved)
}

/// The group of a process that was started before there were groups; `None` for threads of
/// the kernel, which stay, and processes that have ended.
fn group_of(proc: &Path, process: &str) -> Option<Group> {
    let directory = proc.join(process);
    // A thread of the kernel has no program.
    fs::read_link(directory.join("exe")).ok()?;
    let name = fs::read_to_string(directory.join("comm")).ok()?;
    Some(if name.trim_end() == "etcd" { Group::Etcd } else { Group::Polis })
}

/// The machine's memory in bytes; 0 where the kernel does not report it.
#[must_use]
pub fn memory(proc: &Path) -> u64 {
    let text = fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = total.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kibibytes.unwrap_or_default().saturating_mul(1024)
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error { operation, path, source }
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(failed("read", path))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(failed("write to", path))
}

/// Writes without shortening the file, which the kernel would ignore and a test would see.
fn append(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::File::options().append(true).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;

    use super::*;

    /// A hierarchy as the kernel shows it, with what it makes by itself in each group.
    fn hierarchy(controllers: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
        fs::write(root.path().join("cgroup.procs"), "").unwrap();
        root
    }

    #[test]
    fn the_node_and_etcd_go_before_everything_else() {
        let text: Vec<_> = plan(4 << 30)
            .iter()
            .map(|wanted| {
                let weight = wanted.weight.unwrap_or(100);
                format!("{} {weight} {}", wanted.group.name(), wanted.memory_min / MIB)
            })
            .collect();
        insta::assert_snapshot!(text.join("\n"), @r"
        polis 1000 64
        etcd 1000 128
        kube 200 0
        podruntime 200 192
        podruntime/containerd 100 0
        podruntime/kubelet 100 0
        podruntime/shim 100 0
        ");
    }

    proptest! {
        #[test]
        fn a_third_of_the_memory_is_protected_at_most(memory in 0_u64..1 << 50) {
            let protected: u64 = plan(memory).iter().map(|wanted| wanted.memory_min).sum();
            prop_assert!(protected <= memory / PROTECTED_PART);
            prop_assert!(protected <= MEMORY_POLIS + MEMORY_ETCD + MEMORY_POD_RUNTIME);
        }
    }

    #[test]
    fn the_tree_is_made_and_made_again() {
        let root = hierarchy("cpuset cpu io memory pids rdma\n");
        let groups = plan(4 << 30);
        assert_eq!(apply(root.path(), &groups).unwrap(), ["hugetlb"]);
        assert_eq!(apply(root.path(), &groups).unwrap(), ["hugetlb"]);
        let text = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
        assert_eq!(text("cgroup.subtree_control"), "+cpuset +cpu +io +memory +pids");
        assert_eq!(text("podruntime/cgroup.subtree_control"), text("cgroup.subtree_control"));
        assert_eq!(text("etcd/cpu.weight"), "1000");
        assert_eq!(text("etcd/memory.min"), (128 * MIB).to_string());
        assert!(root.path().join("podruntime/shim").is_dir());
        assert!(!root.path().join("podruntime/shim/cpu.weight").exists());
        // A group with processes must not divide itself.
        assert!(!root.path().join("etcd/cgroup.subtree_control").exists());
    }

    #[test]
    fn a_kernel_without_a_controller_gets_no_write_for_it() {
        let root = hierarchy("pids\n");
        let lacking = apply(root.path(), &plan(4 << 30)).unwrap();
        assert_eq!(lacking, ["cpuset", "cpu", "io", "memory", "hugetlb"]);
        assert!(!root.path().join("polis/cpu.weight").exists());
        assert!(!root.path().join("polis/memory.min").exists());
    }

    #[test]
    fn a_missing_hierarchy_is_named() {
        let error = apply(Path::new("/nowhere"), &[]).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nowhere/cgroup.controllers");
    }

    #[test]
    fn processes_of_before_find_their_group_and_the_kernel_s_threads_stay() {
        let root = hierarchy("cpu memory");
        apply(root.path(), &plan(4 << 30)).unwrap();
        for group in ["polis", "etcd"] {
            fs::write(root.path().join(group).join("cgroup.procs"), "").unwrap();
        }
        fs::write(root.path().join("cgroup.procs"), "1\n2\n70\n80\n99\n").unwrap();
        let proc = tempfile::tempdir().unwrap();
        for (process, name) in [("1", "init"), ("2", "kthreadd"), ("70", "node"), ("80", "etcd")] {
            let directory = proc.path().join(process);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("comm"), format!("{name}\n")).unwrap();
            if name != "kthreadd" {
                symlink("/usr/bin/x", directory.join("exe")).unwrap();
            }
        }
        // 99 has ended.
        assert_eq!(sort(root.path(), proc.path()).unwrap(), 3);
        let members =
            |group: &str| fs::read_to_string(root.path().join(group).join("cgroup.procs")).unwrap();
        assert_eq!((members("polis").as_str(), members("etcd").as_str()), ("170", "80"));
        let score = fs::read_to_string(proc.path().join("80/oom_score_adj")).unwrap();
        assert_eq!(score, "-999");
    }

    #[test]
    fn the_memory_of_the_machine_is_read() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(memory(proc.path()), 0);
        fs::write(proc.path().join("meminfo"), "MemTotal:        2014 kB\nMemFree: 1 kB\n")
            .unwrap();
        assert_eq!(memory(proc.path()), 2014 * 1024);
    }
}
