//! The gVisor runtime of a worker: its configuration, and what the machine lacks for it.
//!
//! A container of gVisor talks to a kernel in a process, `runsc`, and that process talks to
//! the kernel of the machine. Its platform is systrap: a filter of the kernel sends each
//! system call of the container to a handler, so it needs nothing of the processor.
//!
//! [`configuration`] is pure. [`lacking`] looks at the machine before containerd starts: a
//! worker that lacks something runs every other pod, and its containerd does not know the
//! handler, so a pod that asks for it fails with containerd's own words.

use std::fs;
use std::path::Path;

/// The handler of containerd, and the name that the runtime class refers to.
pub const HANDLER: &str = "runsc";
/// The label of a Node whose machine runs pods of the runtime class, and its value. The class
/// selects by it.
pub const LABEL: &str = "polis.internal/gvisor";
/// See [`LABEL`].
pub const HERE: &str = "true";
/// The configuration of the shim. containerd names it with each container; whether a
/// container shares the shim of its pod is decided before that, and the shim then looks
/// here.
pub const CONFIGURATION: &str = "/run/containerd/runsc/config.toml";
/// The programs.
const RUNTIME: &str = "runsc";
const SHIM: &str = "containerd-shim-runsc-v1";

/// A filter with this action is what systrap is named after (seccomp(2), `SECCOMP_RET_TRAP`).
const ACTIONS: &str = "sys/kernel/seccomp/actions_avail";
const TRAP: &str = "trap";

/// The kernel in a process, and the process that opens files for it, have a user namespace
/// each; `runsc` refuses to start below two (user_namespaces(7)).
const NAMESPACES: &str = "sys/user/max_user_namespaces";
const NAMESPACES_MIN: u64 = 2;

/// Systrap starts its processes with `ptrace(2)`, which 3 forbids to everyone. A kernel
/// without Yama has no such file.
const PTRACE: &str = "sys/kernel/yama/ptrace_scope";
const PTRACE_NEVER: u64 = 3;

/// The configuration file of the shim; it passes the flags of the second part to `runsc`.
///
/// One shim serves all containers of a pod (`grouping`). The network is gVisor's own, on the
/// interface that the pod has. The programs that newer releases have beside `runsc` are not
/// in the image: `runsc` has their code, and a program of its own would only start sooner.
#[must_use]
pub fn configuration() -> &'static str {
    r#"grouping = true

[runsc_config]
platform = "systrap"
network = "sandbox"
sidecar-usage-policy = "LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK"
"#
}

/// The parts that the machine lacks for gVisor, in words; `proc` is `/proc`, and
/// `programs` has those of the image. Blocks.
#[must_use]
pub fn lacking(proc: &Path, programs: &Path) -> Vec<String> {
    let mut lacking: Vec<_> = [RUNTIME, SHIM]
        .iter()
        .filter(|name| !programs.join(name).exists())
        .map(|name| format!("the image has no program {name}"))
        .collect();
    let actions = fs::read_to_string(proc.join(ACTIONS)).unwrap_or_default();
    if !actions.split_whitespace().any(|action| action == TRAP) {
        lacking.push(format!("the kernel has no seccomp filters that trap ({ACTIONS})"));
    }
    match number(&proc.join(NAMESPACES)) {
        None => lacking.push(format!("the kernel has no user namespaces ({NAMESPACES})")),
        Some(max) if max < NAMESPACES_MIN => lacking.push(format!(
            "the kernel allows {max} user namespaces and gVisor needs {NAMESPACES_MIN} \
             ({NAMESPACES})"
        )),
        Some(_) => {}
    }
    if number(&proc.join(PTRACE)).is_some_and(|scope| scope >= PTRACE_NEVER) {
        lacking.push(format!("the kernel forbids ptrace to every process ({PTRACE})"));
    }
    lacking
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with everything.
    fn machine() -> tempfile::TempDir {
        let machine = tempfile::tempdir().unwrap();
        write(&machine, ACTIONS, "kill_process trap errno\n");
        write(&machine, NAMESPACES, "94217\n");
        for name in [RUNTIME, SHIM] {
            write(&machine, name, "");
        }
        machine
    }

    fn write(machine: &tempfile::TempDir, name: &str, text: &str) {
        let path = machine.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn said(machine: &tempfile::TempDir) -> String {
        lacking(machine.path(), machine.path()).join("; ")
    }

    #[test]
    fn a_machine_with_everything_lacks_nothing() {
        let machine = machine();
        assert_eq!(said(&machine), "");
        write(&machine, PTRACE, "2\n");
        assert_eq!(said(&machine), "");
    }

    #[test]
    fn each_feature_that_is_missing_is_named_with_its_place() {
        let machine = machine();
        write(&machine, ACTIONS, "kill_process errno\n");
        assert_eq!(
            said(&machine),
            "the kernel has no seccomp filters that trap (sys/kernel/seccomp/actions_avail)"
        );
        write(&machine, ACTIONS, "trap");
        write(&machine, NAMESPACES, "1\n");
        assert_eq!(
            said(&machine),
            "the kernel allows 1 user namespaces and gVisor needs 2 \
             (sys/user/max_user_namespaces)"
        );
        write(&machine, NAMESPACES, "2\n");
        write(&machine, PTRACE, "3\n");
        assert_eq!(
            said(&machine),
            "the kernel forbids ptrace to every process (sys/kernel/yama/ptrace_scope)"
        );
        fs::remove_file(machine.path().join(SHIM)).unwrap();
        assert!(said(&machine).starts_with("the image has no program containerd-shim-runsc-v1;"));
    }

    #[test]
    fn a_kernel_that_says_nothing_lacks_all_but_yama() {
        let nothing = tempfile::tempdir().unwrap();
        assert_eq!(lacking(nothing.path(), nothing.path()).len(), 4);
    }
}
