//! What the programs reach, in a child with the rights of each.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use polis_base::files::{KubernetesRun, Root};
use polis_runtime::sys::acts;
use polis_wire::pki::WorkerPurpose;
use rustix::process::geteuid;

use super::super::credentials::Purpose;
use super::super::worker;
use super::*;

const CHILD: &str = "confinement::tests::act_of_a_confined_child";

/// Not a test: what the children of the others do.
#[test]
fn act_of_a_confined_child() {
    acts::child();
}

/// Each program, by the name that the snapshots have.
fn programs(site: &Site) -> [(&'static str, Confinement); 6] {
    [
        ("API server", api_server(site)),
        ("controller manager", controller_manager(site)),
        ("scheduler", scheduler(site)),
        ("kube-proxy", kube_proxy(site)),
        ("CoreDNS", dns(site)),
        ("policy", policy(site)),
    ]
}

/// A tree that every user passes into, as into `/`.
fn tree() -> (tempfile::TempDir, Root) {
    let base = tempfile::tempdir().unwrap();
    fs::set_permissions(base.path(), Permissions::from_mode(0o755)).unwrap();
    let root = Root::at(base.path());
    root.create().unwrap();
    (base, root)
}

/// Whether this process can start programs as other users; says so if not.
fn is_root() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        println!("not tested: needs root");
    }
    is_root
}

/// Writes every file of the programs, and some of others, as the node does.
fn fill(root: &Root, site: &Site) {
    site.data.create().unwrap();
    site.run.create().unwrap();
    let KubernetesRun {
        dir: _,
        flexvolume: _,
        ca,
        worker_ca,
        front_proxy_ca,
        tokens: _,
        service_account_key,
        authentication,
        admission,
        encryption,
        audit_policy,
        controller_manager,
        scheduler,
        kubelet_config,
        kubelet,
        kube_proxy_config,
        kube_proxy,
        corefile,
        dns,
        policy,
    } = &site.run;
    let own = [
        ca,
        worker_ca,
        front_proxy_ca,
        service_account_key,
        authentication,
        admission,
        encryption,
        audit_policy,
        controller_manager,
        scheduler,
        kubelet_config,
        kubelet,
        kube_proxy_config,
        kube_proxy,
        corefile,
        dns,
        policy,
    ];
    let other = [
        &root.data.node.credentials.key,
        &root.data.node.users,
        &root.data.etcd.peer_pki.key,
        &root.data.etcd.peer_crl,
        &root.esp.sealed_configuration,
    ];
    for file in own.into_iter().chain(other) {
        file.write(b"content").unwrap();
    }
    for directory in [&root.data.kubelet, &root.data.mesh, &root.data.volumes] {
        directory.create().unwrap();
        fs::write(directory.path().join("file"), "content").unwrap();
    }
    root.data.mesh_key.write(b"content").unwrap();
    fs::write(root.data.etcd.data.path().join("db"), "content").unwrap();
    root.data.etcd.admit().unwrap();
    let controller = Purpose::ALL.map(|purpose| purpose.pair(&site.data));
    let worker = WorkerPurpose::ALL.map(|purpose| worker::pair(&site.data, purpose));
    for pair in controller.iter().chain(&worker) {
        pair.key.write(b"content").unwrap();
        pair.certificate.write(b"content").unwrap();
    }
    fs::write(site.data.audit_log(), "content").unwrap();
    site.data.admit_audit().unwrap();
}

/// Every file below `path`.
fn files(path: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            files(&entry.path(), found);
        } else {
            found.push(entry.path());
        }
    }
}

#[tokio::test]
async fn no_program_reaches_the_kernel_s_interface_or_the_node_s_key() {
    let (_base, root) = tree();
    for (_name, confinement) in programs(&Site::live(&root)) {
        acts::keeps_from_all(CHILD, &confinement, &[], &root).await;
    }
}

#[tokio::test]
async fn each_program_opens_its_own_files_and_no_others() {
    if !is_root() {
        return;
    }
    let (base, root) = tree();
    let site = Site::live(&root);
    fill(&root, &site);
    // As an earlier system left them, for root alone.
    for purpose in Purpose::ALL {
        let pair = purpose.pair(&site.data);
        for file in [&pair.key, &pair.certificate] {
            chown(file.path(), Some(0), Some(0)).unwrap();
            fs::set_permissions(file.path(), Permissions::from_mode(0o600)).unwrap();
        }
        pair.settle().unwrap();
    }
    for directory in [&site.data.dir, &site.data.pki] {
        chown(directory.path(), Some(0), Some(0)).unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
    }
    site.data.create().unwrap();

    let mut all = Vec::new();
    files(base.path(), &mut all);
    all.sort();
    let mut shown = String::new();
    for (name, confinement) in programs(&site) {
        writeln!(shown, "{name}").unwrap();
        for file in acts::readable(CHILD, &confinement, &all).await {
            let file = file.strip_prefix(base.path()).unwrap();
            writeln!(shown, "  {}", file.display()).unwrap();
        }
    }
    insta::assert_snapshot!(shown);
}

#[tokio::test]
async fn the_api_server_alone_reaches_etcd_and_the_signer_and_writes_the_audit_log() {
    if !is_root() {
        return;
    }
    let (_base, root) = tree();
    let site = Site::live(&root);
    fill(&root, &site);
    let sockets = &root.ephemeral.consensus;
    sockets.dir.give(users::ETCD).unwrap();
    let _listener = UnixListener::bind(sockets.client()).unwrap();
    // What etcd's umask leaves; its group is that of the directory.
    fs::set_permissions(sockets.client(), Permissions::from_mode(0o770)).unwrap();
    chown(sockets.client(), Some(users::ETCD.id), None).unwrap();
    let signer = &site.run.tokens;
    let _signer = crate::tokens::listen(signer).unwrap();
    for (name, confinement) in programs(&site) {
        let expected = if name == "API server" { "done" } else { "EACCES" };
        let attempt = async |act, place: &Path| {
            acts::attempt(CHILD, act, place, Some(confinement.clone())).await
        };
        assert_eq!(attempt("connect", sockets.client()).await, expected, "{name}");
        assert_eq!(attempt("connect", signer.client()).await, expected, "{name}");
        assert_eq!(attempt("write", site.data.audit.path()).await, expected, "{name}");
        for directory in [&site.data.pki, &site.run.dir, &sockets.dir, &root.data.etcd.data] {
            assert_eq!(attempt("write", directory.path()).await, "EACCES", "{name}");
        }
    }
}
