//! The confinement of a child process: its user, its capabilities, its system calls and its
//! files. A service describes it with [`Confinement`] and hands it to
//! [`Command::confined`](super::process::Command::confined).
//!
//! ```text
//! capabilities   all but the kept ones leave the bounding set, for good
//! user           groups, group and user change; from then on it has the kept ones and no others,
//!                and so have the programs that it starts
//! no new rights  no program that it starts has more than it has
//! files          Landlock: the system to read and to run, and what the service names
//! system calls   seccomp: what no program of the node needs fails with EPERM
//! ```
//!
//! [`Confinement::open`] runs in the node and does everything that allocates;
//! [`Opened::apply`] runs in the child between fork and exec, in the order of the picture.
//!
//! Invariants:
//! - Each layer that is there holds without the others: root with every capability cannot
//!   mount behind the filter, nor read a file that is not named behind Landlock.
//! - A child of a node that is not root keeps its user: that is a test.
//! - A kernel without Landlock is named once in the log; the other layers are mandatory.
//!
//! What this module does not do: give files to a user (`polis_base::files`), or confine
//! programs that make file systems, open disks or run pods, which need most of what it takes.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Once;

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, Ruleset, RulesetAttr as _, RulesetCreated,
    RulesetCreatedAttr as _, RulesetError, path_beneath_rules,
};
use polis_base::files::Root;
use polis_base::users::User;
use rustix::process::{Gid, Uid, geteuid};
pub use rustix::thread::CapabilitySet;
use rustix::thread::{
    CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};

/// The newest version of Landlock whose rights are used; on an older kernel, those that it
/// knows.
const LANDLOCK: ABI = ABI::V5;

/// The directories of the system: to read, and to run programs from.
const SYSTEM: [&str; 6] = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc"];
/// The state of the kernel and of the process itself: to read. The user decides what is shown
/// of other processes.
const KERNEL: [&str; 5] = ["/proc", "/sys", "/dev/urandom", "/dev/random", "/dev/zero"];
/// To write to without an effect.
const NULL: &str = "/dev/null";

/// Further groups of a user.
const GROUPS_MAX: usize = 4;

/// Capability numbers that a kernel may know.
const CAPABILITIES_MAX: u32 = 64;

/// Why a confinement cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter of system calls does not compile.
    #[error("cannot make the filter of system calls")]
    Filter(#[from] seccompiler::BackendError),
    /// The kernel rejects the rules about files.
    #[error("cannot make the rules about files")]
    Files(#[from] RulesetError),
}

/// The right to set the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    Kept,
    Set,
}

/// The rights of a program.
#[derive(Clone, Debug)]
#[must_use = "a confinement has no effect until a command has it"]
pub struct Confinement {
    user: Option<User>,
    kept: CapabilitySet,
    clock: Clock,
    files: Option<Files>,
}

/// The files of a program beside those of the system.
#[derive(Clone, Debug, Default)]
struct Files {
    read: Vec<PathBuf>,
    written: Vec<PathBuf>,
}

impl Default for Confinement {
    fn default() -> Self {
        Self::new()
    }
}

impl Confinement {
    /// No capability, no system call that changes the machine, and no file beside those of the
    /// system. The user is the node's.
    pub fn new() -> Self {
        Self {
            user: None,
            kept: CapabilitySet::empty(),
            clock: Clock::Kept,
            files: Some(Files::default()),
        }
    }

    /// It runs as this user if the node is root.
    pub fn user(mut self, user: User) -> Self {
        self.user = Some(user);
        self
    }

    /// It may have these capabilities: one with a user of its own has them from its start, and so
    /// have the programs that it starts. A program that changes its user itself needs them.
    pub fn keeps(mut self, capabilities: CapabilitySet) -> Self {
        self.kept |= capabilities;
        self
    }

    /// The filter of system calls lets it set the clock; it needs the capability too.
    pub fn sets_clock(mut self) -> Self {
        self.clock = Clock::Set;
        self
    }

    /// It may read this file, or what is below this directory. A file must exist when the
    /// program is started, and its successor of the same name is another file.
    pub fn reads(mut self, path: impl Into<PathBuf>) -> Self {
        self.files.get_or_insert_default().read.push(path.into());
        self
    }

    /// It may read, change, make and remove what is below this directory, but not run it.
    pub fn writes(mut self, path: impl Into<PathBuf>) -> Self {
        self.files.get_or_insert_default().written.push(path.into());
        self
    }

    /// The user and the modes of files alone decide what it may open.
    pub fn any_files(mut self) -> Self {
        self.files = None;
        self
    }

    /// Does what allocates, for a child that becomes `program`.
    pub(super) fn open(self, program: &Path) -> Result<Opened, Error> {
        let is_root = geteuid().is_root();
        Ok(Opened {
            user: self.user.filter(|_| is_root),
            // Only root may take capabilities out of the bounding set, and only it has any.
            kept: is_root.then_some(self.kept),
            files: self.files.map(|files| files.open(program)).transpose()?.flatten(),
            filters: [denied(self.clock)?, absent()?],
        })
    }
}

impl Files {
    /// The rules, unless the kernel has no Landlock. A path that does not exist has no rule.
    fn open(&self, program: &Path) -> Result<Option<OwnedFd>, RulesetError> {
        let run = AccessFs::from_read(LANDLOCK);
        let read = run & !AccessFs::Execute;
        let names = Root::live().ephemeral.etc;
        let rules = Ruleset::default()
            .handle_access(AccessFs::from_all(LANDLOCK))?
            .create()?
            .add_rules(path_beneath_rules(SYSTEM, run))?
            .add_rules(path_beneath_rules([program], run))?
            .add_rules(path_beneath_rules(KERNEL, read))?
            // The links in `/etc` lead there.
            .add_rules(path_beneath_rules([names.path()], read))?
            .add_rules(path_beneath_rules([NULL], read | AccessFs::WriteFile))?
            .add_rules(path_beneath_rules(&self.read, read))?
            .add_rules(path_beneath_rules(&self.written, written()))?;
        Ok(descriptor(rules))
    }
}

/// Whether this kernel has Landlock.
#[cfg(any(test, feature = "testing"))]
pub(super) fn has_landlock() -> bool {
    Files::default().open(Path::new("/bin/sh")).is_ok_and(|rules| rules.is_some())
}

/// Everything that files and directories of a program's own take; no devices, which only root
/// can make, and no links, by which root could be led elsewhere.
fn written() -> BitFlags<AccessFs> {
    AccessFs::from_all(LANDLOCK)
        & !(AccessFs::Execute
            | AccessFs::MakeChar
            | AccessFs::MakeBlock
            | AccessFs::MakeSym
            | AccessFs::IoctlDev)
}

fn descriptor(rules: RulesetCreated) -> Option<OwnedFd> {
    static ABSENT: Once = Once::new();
    let descriptor = Option::<OwnedFd>::from(rules);
    if descriptor.is_none() {
        ABSENT.call_once(|| {
            tracing::warn!(
                "this kernel has no Landlock: users and modes alone keep programs from files"
            );
        });
    }
    descriptor
}

/// The kernel's interface to itself, to other processes and to their secrets: no program of
/// the node needs it, and most of its errors were there.
const DENIED: [i64; 58] = [
    // File systems and roots.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_fanotify_init,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // Namespaces.
    libc::SYS_setns,
    libc::SYS_unshare,
    // The kernel: its code, its keys, its measurements.
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_lookup_dcookie,
    libc::SYS_nfsservctl,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    // System calls that this filter would not see.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // The machine.
    libc::SYS_reboot,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    libc::SYS_iopl,
    libc::SYS_ioperm,
];

/// Those that set the clock.
const CLOCK: [i64; 4] =
    [libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_adjtimex, libc::SYS_clock_adjtime];

/// Flags of `clone` that make a namespace.
const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// The kinds of sockets that programs of the node use. Others have had most of the kernel's
/// errors, and packets reach the network past its rules.
const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// The type by which an internet socket becomes one for packets (linux/net.h).
const SOCK_PACKET: i32 = 10;

/// The bits of a socket's type without its flags.
const KIND: u64 = 0xf;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The filter that denies with EPERM. Every call that it does not name is allowed: a
/// program's next version may use other calls, and must not fail years later on a path that
/// is rare.
fn denied(clock: Clock) -> Result<BpfProgram, Error> {
    let always = |call: &i64| (*call, Vec::new());
    let mut rules: Rules = DENIED.iter().map(always).collect();
    if clock == Clock::Kept {
        rules.extend(CLOCK.iter().map(always));
    }
    let namespaces = NAMESPACES.iter().map(|flag| {
        let bit = bits(*flag);
        SeccompRule::new(vec![argument(0, SeccompCmpOp::MaskedEq(bit), bit)?])
    });
    rules.insert(libc::SYS_clone, namespaces.collect::<Result<_, _>>()?);
    let foreign = FAMILIES.iter().map(|family| argument(0, SeccompCmpOp::Ne, bits(*family)));
    let mut sockets = vec![SeccompRule::new(foreign.collect::<Result<_, _>>()?)?];
    for family in [libc::AF_INET, libc::AF_INET6] {
        for kind in [libc::SOCK_RAW, SOCK_PACKET] {
            sockets.push(SeccompRule::new(vec![
                argument(0, SeccompCmpOp::Eq, bits(family))?,
                argument(1, SeccompCmpOp::MaskedEq(KIND), bits(kind))?,
            ])?);
        }
    }
    rules.insert(libc::SYS_socket, sockets);
    filter(rules, libc::EPERM)
}

/// The filter for calls whose flags lie in memory, where a filter cannot read them: they do
/// not exist, and a C library takes the older call instead.
fn absent() -> Result<BpfProgram, Error> {
    filter(Rules::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)
}

fn filter(rules: Rules, error: i32) -> Result<BpfProgram, Error> {
    let deny = SeccompAction::Errno(error.unsigned_abs());
    let arch = std::env::consts::ARCH.try_into()?;
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, deny, arch)?.try_into()?)
}

fn argument(
    index: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
}

/// A constant of the C library, which has no sign where it is a set of bits.
fn bits(constant: i32) -> u64 {
    u64::from(constant.cast_unsigned())
}

/// A confinement that the child puts itself into.
#[derive(Debug)]
pub(super) struct Opened {
    user: Option<User>,
    kept: Option<CapabilitySet>,
    files: Option<OwnedFd>,
    filters: [BpfProgram; 2],
}

impl Opened {
    /// Confines this process. Only makes system calls: neither allocates nor locks.
    pub(super) fn apply(&self) -> io::Result<()> {
        if let Some(kept) = self.kept {
            bound(kept)?;
        }
        if let Some(user) = self.user {
            become_user(user, self.kept.unwrap_or(CapabilitySet::empty()))?;
        }
        set_no_new_privs(true)?;
        if let Some(files) = &self.files {
            restrict(files)?;
        }
        for filter in &self.filters {
            // Its own error holds no more than the kernel's number.
            apply_filter(filter).map_err(|_refused| io::Error::last_os_error())?;
        }
        Ok(())
    }
}

/// Changes the user and its groups, with these capabilities and no others.
fn become_user(user: User, kept: CapabilitySet) -> io::Result<()> {
    let mut groups = [Gid::ROOT; GROUPS_MAX];
    let count = user.groups.len().min(GROUPS_MAX);
    for (place, group) in groups.iter_mut().zip(user.groups) {
        *place = Gid::from_raw(group.id);
    }
    set_thread_groups(&groups[..count])?;
    let (group, id) = (Gid::from_raw(user.id), Uid::from_raw(user.id));
    set_thread_res_gid(group, group, group)?;
    // Without this, the change of the user empties the permitted set.
    set_keep_capabilities(!kept.is_empty())?;
    set_thread_res_uid(id, id, id)?;
    if kept.is_empty() {
        return Ok(());
    }
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: kept };
    set_capabilities(None, sets)?;
    // What a program keeps that is not root's and has no capabilities of its file.
    for capability in kept.iter() {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Takes all but the kept capabilities from what this process and its programs can ever have.
fn bound(kept: CapabilitySet) -> io::Result<()> {
    clear_ambient_capability_set()?;
    let own = capabilities(None)?;
    set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..own })?;
    for number in 0..CAPABILITIES_MAX {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // The kernel's last capability is before this one.
            Err(rustix::io::Errno::INVAL) => break,
            removed => removed?,
        }
    }
    Ok(())
}

#[expect(unsafe_code, reason = "no crate calls this without allocating")]
fn restrict(rules: &OwnedFd) -> io::Result<()> {
    let flags: libc::c_ulong = 0;
    // SAFETY: the call takes a descriptor, which is open for the length of the borrow, and
    // flags; it reads and writes no memory of this process.
    let restricted =
        unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), flags) };
    if restricted == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[path = "confine_tests.rs"]
mod tests;
