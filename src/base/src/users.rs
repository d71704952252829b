//! The users of the system besides root, each for one program, and the files in `/etc` that
//! name them.
//!
//! The image writes its `/etc/passwd` and `/etc/group` from this list, and the services that
//! start the programs take the numbers from here.

/// A user of the system, and the group of the same name and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// Its name.
    pub name: &'static str,
    /// Its number, and that of its group. It stands on disks, so it never changes.
    pub id: u32,
}

/// The user of chronyd.
pub const CHRONY: User = User { name: "_chrony", id: 123 };

/// The user of etcd. A number that images of containers do not use, since a container's
/// process shares the kernel's table of users with etcd.
pub const ETCD: User = User { name: "_etcd", id: 2379 };

const ALL: [User; 2] = [CHRONY, ETCD];

/// The content of `/etc/passwd`. No user can log in.
#[must_use]
pub fn passwd() -> String {
    let system = ALL.map(|User { name, id }| format!("{name}:x:{id}:{id}::/:/bin/false\n"));
    format!(
        "root:x:0:0:root:/:/bin/false\n{}nobody:x:65534:65534:nobody:/:/bin/false\n",
        system.concat()
    )
}

/// The content of `/etc/group`.
#[must_use]
pub fn group() -> String {
    let system = ALL.map(|User { name, id }| format!("{name}:x:{id}:\n"));
    format!("root:x:0:\n{}nogroup:x:65534:\n", system.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_user_has_a_line_and_a_group() {
        assert_eq!(
            passwd(),
            "root:x:0:0:root:/:/bin/false\n_chrony:x:123:123::/:/bin/false\n\
             _etcd:x:2379:2379::/:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n"
        );
        assert_eq!(group(), "root:x:0:\n_chrony:x:123:\n_etcd:x:2379:\nnogroup:x:65534:\n");
    }
}
