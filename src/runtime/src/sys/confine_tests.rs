//! Each layer of the confinement by itself, in a child that tries what a program must not.
//!
//! Every act is shown to pass the layer when the layer is not there.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use polis_base::users::{ETCD, POLICY};

use super::super::acts::{self, ACTS};
use super::super::process::Command;
use super::*;

/// Not a test: what the children of the tests do.
#[test]
fn act_of_a_confined_child() {
    acts::child();
}

/// The layers of a test: root with every capability, and with every file.
fn unconfined() -> Confinement {
    Confinement::new().keeps(CapabilitySet::all()).any_files()
}

/// `None`, and a line, where this process is not root: then the kernel refuses most by itself.
fn is_root() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        println!("not tested: needs root");
    }
    is_root
}

/// The result of an act.
async fn attempt(act: &str, place: &Path, confinement: Option<Confinement>) -> String {
    acts::attempt("sys::confine::tests::act_of_a_confined_child", act, place, confinement).await
}

async fn status(confinement: Option<Confinement>) -> String {
    let mut command = Command::new("/bin/cat").arg("/proc/self/status");
    if let Some(confinement) = confinement {
        command = command.confined(confinement);
    }
    let output = command.run().await.unwrap();
    String::from_utf8(output).unwrap().replace('\t', " ")
}

#[tokio::test]
async fn the_filter_alone_keeps_root_from_the_kernel_s_interface_to_itself() {
    if !is_root() {
        return;
    }
    for act in ACTS {
        let free = attempt(act, Path::new(""), None).await;
        if free == "EPERM" {
            println!("not tested: this host refuses {act} to root, too");
            continue;
        }
        let confined = attempt(act, Path::new(""), Some(unconfined())).await;
        assert_eq!(confined, "EPERM", "{act}, which ends with {free} without the filter");
    }
    assert_eq!(attempt("stream", Path::new(""), Some(unconfined())).await, "done");
    let clock = unconfined().sets_clock();
    assert_ne!(attempt("clock", Path::new(""), Some(clock)).await, "EPERM");
}

#[tokio::test]
async fn without_capabilities_root_gets_no_raw_socket_and_no_other_s_file() {
    if !is_root() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    let file = base.path().join("file");
    fs::write(&file, "").unwrap();
    std::os::unix::fs::chown(&file, Some(ETCD.id), Some(ETCD.id)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let bare = || Confinement::new().any_files();
    assert_eq!(attempt("open", &file, Some(unconfined())).await, "done");
    assert_eq!(attempt("open", &file, Some(bare())).await, "EACCES");
    let kept = bare().keeps(CapabilitySet::DAC_OVERRIDE);
    assert_eq!(attempt("open", &file, Some(kept)).await, "done");
}

#[tokio::test]
async fn landlock_alone_keeps_root_from_the_node_s_key() {
    let base = tempfile::tempdir().unwrap();
    let root = Root::at(base.path());
    root.create().unwrap();
    let key = &root.data.node.credentials.key;
    key.write(b"key").unwrap();
    let only = |confinement: Confinement| Some(confinement.keeps(CapabilitySet::all()));
    if !has_landlock() {
        println!("not tested: this kernel has no Landlock");
        return;
    }
    assert_eq!(attempt("open", key.path(), Some(unconfined())).await, "done");
    assert_eq!(attempt("open", key.path(), only(Confinement::new())).await, "EACCES");
    let data = root.data.etcd.data.path();
    let grant = || Confinement::new().writes(data);
    assert_eq!(attempt("open", key.path(), only(grant())).await, "EACCES");
    assert_eq!(attempt("write", data, only(grant())).await, "done");
    assert_eq!(attempt("open", &data.join("new"), only(grant())).await, "done");
    assert_eq!(attempt("write", data, only(Confinement::new())).await, "EACCES");
    let reads = Confinement::new().reads(data);
    assert_eq!(attempt("write", data, only(reads.clone())).await, "EACCES");
    assert_eq!(attempt("open", &data.join("new"), only(reads)).await, "done");
}

#[tokio::test]
async fn a_user_of_its_own_has_no_way_to_the_node_s_key() {
    if !is_root() {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let root = Root::at(base.path());
    root.create().unwrap();
    let key = &root.data.node.credentials.key;
    key.write(b"key").unwrap();
    root.data.etcd.peer_pki.key.write(b"key").unwrap();
    root.data.etcd.admit().unwrap();
    let etcd = || Some(Confinement::new().any_files().user(ETCD));
    assert_eq!(attempt("open", key.path(), etcd()).await, "EACCES");
    assert_eq!(attempt("open", root.data.etcd.peer_pki.key.path(), etcd()).await, "done");
    assert_eq!(attempt("write", root.data.etcd.peer_pki.dir.path(), etcd()).await, "EACCES");
    assert_eq!(attempt("write", root.data.etcd.data.path(), etcd()).await, "done");
}

#[tokio::test]
async fn a_confined_child_is_shown_as_such_by_the_kernel() {
    let seen = status(Some(Confinement::new().user(ETCD))).await;
    let mut expected = vec!["NoNewPrivs: 1", "Seccomp: 2"];
    if geteuid().is_root() {
        expected.extend([
            "Uid: 2379 2379 2379 2379",
            "Gid: 2379 2379 2379 2379",
            "CapInh: 0000000000000000",
            "CapPrm: 0000000000000000",
            "CapBnd: 0000000000000000",
            "CapAmb: 0000000000000000",
        ]);
    }
    for line in expected {
        assert!(seen.lines().any(|it| it == line), "{line} in\n{seen}");
    }
    let free = status(None).await;
    assert!(free.contains("NoNewPrivs: 0\n") && free.contains("Seccomp: 0\n"), "{free}");
}

#[tokio::test]
async fn a_user_keeps_the_named_capability_and_the_groups_of_the_list_and_no_more() {
    if !is_root() {
        return;
    }
    let confinement = Confinement::new().user(POLICY).keeps(CapabilitySet::NET_ADMIN);
    // A program that it starts is shown: it has what it starts with, and passes on as much.
    let command = Command::new("/bin/sh").args(["-c", "cat /proc/self/status; true"]);
    let output = command.env("PATH", "/usr/bin:/bin").confined(confinement).run().await.unwrap();
    let seen = String::from_utf8(output).unwrap().replace('\t', " ");
    for line in [
        "Uid: 7843 7843 7843 7843",
        "Gid: 7843 7843 7843 7843",
        "Groups: 0 6440",
        "CapInh: 0000000000001000",
        "CapPrm: 0000000000001000",
        "CapEff: 0000000000001000",
        "CapBnd: 0000000000001000",
        "CapAmb: 0000000000001000",
    ] {
        assert!(seen.lines().any(|it| it.trim_end() == line), "{line} in\n{seen}");
    }
}

#[test]
fn no_user_has_more_groups_than_a_child_takes() {
    for user in polis_base::users::ALL {
        assert!(user.groups.len() <= GROUPS_MAX, "{user:?}");
    }
}

#[tokio::test]
async fn a_child_of_another_user_still_dies_with_the_node() {
    let setpriv = Path::new("/usr/bin/setpriv");
    if !setpriv.exists() {
        println!("not tested: needs {}", setpriv.display());
        return;
    }
    // The kernel forgets the signal when the user changes.
    let etcd = Confinement::new().user(ETCD);
    let output = Command::new(setpriv).arg("--dump").confined(etcd).run().await.unwrap();
    let output = String::from_utf8(output).unwrap().to_lowercase();
    let signal = output.lines().find(|line| line.starts_with("parent death signal:"));
    assert_eq!(signal, Some("parent death signal: kill"), "{output}");
}

#[test]
fn the_filters_compile_for_this_machine() {
    for clock in [Clock::Kept, Clock::Set] {
        assert!(!denied(clock).unwrap().is_empty());
    }
    assert!(!absent().unwrap().is_empty());
}
