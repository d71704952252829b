//! The users of the system besides root, each for one program, and the files in `/etc` that
//! name them.
//!
//! The image writes its `/etc/passwd` and `/etc/group` from this list, and the services that
//! start the programs take the numbers from here.

/// A group that several users share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name.
    pub name: &'static str,
    /// Its number. It stands on disks, so it never changes.
    pub id: u32,
}

/// A user of the system, and the group of the same name and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// Its name.
    pub name: &'static str,
    /// Its number, and that of its group. It stands on disks, so it never changes.
    pub id: u32,
    /// Its further groups.
    pub groups: &'static [Group],
}

/// The group of root, for which the kernel keeps the readers of a few files below `/proc/net`.
const ROOT: Group = Group { name: "root", id: 0 };

/// The group of the programs of Kubernetes: it passes through the directories of their files.
/// Each file has the group of the one program that reads it.
pub const KUBERNETES: Group = Group { name: "_kubernetes", id: 6440 };

/// The user of chronyd.
pub const CHRONY: User = User { name: "_chrony", id: 123, groups: &[] };

/// The user of etcd. A number that images of containers do not use, since a container's
/// process shares the kernel's table of users with etcd. This holds for each user below, too.
pub const ETCD: User = User { name: "_etcd", id: 2379, groups: &[] };

/// The user of the API server. The socket of etcd has its group.
pub const API_SERVER: User = kubernetes("_kube-apiserver", 6443);
/// The user of the controller manager.
pub const CONTROLLER_MANAGER: User = kubernetes("_kube-manager", 10257);
/// The user of the scheduler.
pub const SCHEDULER: User = kubernetes("_kube-scheduler", 10259);
/// The user of kube-proxy.
pub const KUBE_PROXY: User = kubernetes("_kube-proxy", 10256);
/// The user of CoreDNS.
pub const COREDNS: User = kubernetes("_coredns", 7841);
/// The user of the program that enforces NetworkPolicies. It reads the kernel's list of queues
/// of packets.
pub const POLICY: User = User { name: "_policy", id: 7843, groups: &[KUBERNETES, ROOT] };

const fn kubernetes(name: &'static str, id: u32) -> User {
    User { name, id, groups: &[KUBERNETES] }
}

/// All of them.
pub const ALL: [User; 8] =
    [CHRONY, ETCD, API_SERVER, CONTROLLER_MANAGER, SCHEDULER, KUBE_PROXY, COREDNS, POLICY];

/// The content of `/etc/passwd`. No user can log in.
#[must_use]
pub fn passwd() -> String {
    let system = ALL.map(|User { name, id, .. }| format!("{name}:x:{id}:{id}::/:/bin/false\n"));
    format!(
        "root:x:0:0:root:/:/bin/false\n{}nobody:x:65534:65534:nobody:/:/bin/false\n",
        system.concat()
    )
}

/// The content of `/etc/group`.
#[must_use]
pub fn group() -> String {
    let members = |group: Group| {
        let members = ALL.iter().filter(|user| user.groups.contains(&group));
        members.map(|user| user.name).collect::<Vec<_>>().join(",")
    };
    let shared = |Group { name, id }| format!("{name}:x:{id}:{}\n", members(Group { name, id }));
    let system = ALL.map(|User { name, id, .. }| format!("{name}:x:{id}:\n"));
    format!("{}{}{}nogroup:x:65534:\n", shared(ROOT), system.concat(), shared(KUBERNETES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_user_has_a_line_and_a_group() {
        assert_eq!(
            passwd(),
            "root:x:0:0:root:/:/bin/false\n\
             _chrony:x:123:123::/:/bin/false\n\
             _etcd:x:2379:2379::/:/bin/false\n\
             _kube-apiserver:x:6443:6443::/:/bin/false\n\
             _kube-manager:x:10257:10257::/:/bin/false\n\
             _kube-scheduler:x:10259:10259::/:/bin/false\n\
             _kube-proxy:x:10256:10256::/:/bin/false\n\
             _coredns:x:7841:7841::/:/bin/false\n\
             _policy:x:7843:7843::/:/bin/false\n\
             nobody:x:65534:65534:nobody:/:/bin/false\n"
        );
        assert_eq!(
            group(),
            "root:x:0:_policy\n_chrony:x:123:\n_etcd:x:2379:\n_kube-apiserver:x:6443:\n\
             _kube-manager:x:10257:\n_kube-scheduler:x:10259:\n_kube-proxy:x:10256:\n\
             _coredns:x:7841:\n_policy:x:7843:\n_kubernetes:x:6440:_kube-apiserver,\
             _kube-manager,_kube-scheduler,_kube-proxy,_coredns,_policy\nnogroup:x:65534:\n"
        );
    }

    #[test]
    fn no_two_users_or_groups_have_the_same_number() {
        let groups = [ROOT.id, KUBERNETES.id, 65534];
        let mut ids: Vec<_> = ALL.iter().map(|user| user.id).chain(groups).collect();
        ids.sort_unstable();
        let all = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), all);
    }
}
