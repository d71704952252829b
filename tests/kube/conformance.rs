//! The conformance tests of Kubernetes, by `cargo xtask conformance`.
//!
//! That command calls a story for what the tests need beside it, and the story calls the
//! command for the tests: a control plane for the tests that need no pod, and a registry
//! with the images of those that do. A run of the level `kube` does the first as well, where
//! the suite was built.
//!
//! A few of the tests without pods want a node that is ready, and no pod on it. So the
//! cluster has a node object with room for no pod, whose lease the story renews as a
//! kubelet does.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use polis_tests::{Story, skip, story};
use polis_workload::Answer;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};

use crate::registry::{self, Server};
use crate::world::{self, Controller, SOON, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads tests_that_need_no_pod_pass).takes(240),
    story!(threads tests_with_pods_pass_on_a_cluster),
];

/// The arguments of the command but for the kubeconfig, as a list in JSON.
const COMMAND: &str = "POLIS_CONFORMANCE";
/// The layout with the images of the tests with pods.
const IMAGES: &str = "POLIS_CONFORMANCE_IMAGES";
/// The folder of the cluster of `cargo xtask run --kubernetes` for them.
const CLUSTER: &str = "POLIS_CONFORMANCE_CLUSTER";

/// The loopback interface of this host, for a machine of such a cluster.
const HOST: &str = "10.0.2.2";
/// The registry in the names of the images.
const REGISTRY: &str = "registry.k8s.io";

/// The node.
const NODE: &str = "no-room";

/// Between two renewals of its lease, a kubelet's default: the controller manager takes a
/// node for lost after 40 seconds.
const RENEWAL: Duration = Duration::from_secs(10);

async fn tests_that_need_no_pod_pass() -> Result<()> {
    let Ok(list) = std::env::var(COMMAND) else {
        return skip("`cargo xtask conformance` builds target/go/bin/e2e, and runs it");
    };
    let controller = Controller::ready().await;
    let folder = tempfile::tempdir()?;
    let kubeconfig = kubeconfig(&controller, folder.path())?;
    let mut command = command(&list, &kubeconfig)?;
    add_node(&controller).await;
    let mut tests = tokio::task::spawn_blocking(move || command.status());
    let mut renewal = tokio::time::interval(RENEWAL);
    let status = loop {
        tokio::select! {
            // Cancel-safe: a task, which goes on.
            ended = &mut tests => break ended??,
            // Cancel-safe: a tick is lost at most.
            _tick = renewal.tick() => {
                let answer = renew(&controller).await;
                if let Some(refused) = answer.filter(|answer| answer.status >= 300) {
                    println!("the lease: {}", String::from_utf8_lossy(&refused.body));
                }
            }
        }
    };
    controller.stop().await;
    ensure!(status.success(), "the conformance tests ended with {status}");
    Ok(())
}

async fn tests_with_pods_pass_on_a_cluster() -> Result<()> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(images), Some(cluster)) = (set(IMAGES), set(CLUSTER)) else {
        return skip("`cargo xtask conformance --stage pods` runs it");
    };
    let list = std::env::var(COMMAND).context(COMMAND)?;
    let server = Server::start(HOST, None, registry::layout(&images)?).await?;
    let mirror = format!("{HOST}:{}", server.address.port());
    let folder = tempfile::tempdir()?;
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, &server.authority)?;
    let ca = ca.display().to_string();
    let registry = |args: &[&str]| operate(&cluster, &[&["cluster", "registry"], args].concat());
    let kubeconfig = by_name(&cluster, folder.path()).await?;
    registry(&["set", &mirror, "--ca", &ca])?;
    registry(&["set", REGISTRY, "--mirror", &mirror])?;
    let mut command = command(&list, &kubeconfig)?;
    let status = tokio::task::spawn_blocking(move || command.status()).await?;
    for entry in [REGISTRY, &mirror] {
        registry(&["delete", entry, "--yes"])?;
    }
    ensure!(status?.success(), "conformance tests with pods failed");
    Ok(())
}

/// A kubeconfig of the cluster whose server is named as its certificate says. The suite takes
/// the server of a kubeconfig, and forgets under which name its certificate is to be checked; a
/// proxy on this host leads that name to the forwarded port.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
async fn by_name(cluster: &Path, folder: &Path) -> Result<PathBuf> {
    let file = folder.join("kubeconfig");
    std::fs::copy(cluster.join("kubeconfig"), &file)?;
    let config = |args: &[&str]| {
        let mut command = Command::new(cluster.join("kubectl"));
        said(command.arg("config").args(args).arg("--kubeconfig").arg(&file))
    };
    let cluster = config(&["view", "--minify", "--output", "jsonpath={.clusters[0].name}"])?;
    let fact = |name: &str| {
        config(&[
            "view",
            "--minify",
            "--output",
            &format!("jsonpath={{.clusters[0].cluster.{name}}}"),
        ])
    };
    let (server, name) = (fact("server")?, fact("tls-server-name")?);
    let address = server.strip_prefix("https://").context("the server has no address")?.to_owned();
    let port = address.rsplit_once(':').map_or("443", |(_, port)| port).to_owned();
    let proxy = tunnel(address).await?;
    config(&["set", &format!("clusters.{cluster}.server"), &format!("https://{name}:{port}")])?;
    config(&["set", &format!("clusters.{cluster}.proxy-url"), &format!("http://{proxy}")])?;
    config(&["unset", &format!("clusters.{cluster}.tls-server-name")])?;
    Ok(file)
}

/// Starts a proxy (RFC 9110, CONNECT) whose every connection leads to `target`.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
async fn tunnel(target: String) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let target = target.clone();
            tokio::spawn(async move {
                if registry::head(&mut client).await.is_err() {
                    return;
                }
                let Ok(mut server) = TcpStream::connect(target).await else { return };
                let open = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                if open.is_ok() {
                    let _gone = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
    });
    Ok(address)
}

/// Runs `polisctl` for the cluster in this folder.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
fn operate(cluster: &Path, args: &[&str]) -> Result<()> {
    said(Command::new(cluster.join("polisctl")).args(args)).map(drop)
}

/// The output of a command.
fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, said.trim());
    Ok(String::from_utf8(output.stdout)?)
}

/// The command that runs the tests against the cluster of this kubeconfig.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
fn command(list: &str, kubeconfig: &Path) -> Result<Command> {
    let list: Vec<String> = serde_json::from_str(list).context(COMMAND)?;
    let [program, name, rest @ ..] = &list[..] else {
        anyhow::bail!("{COMMAND} names no command: {list:?}");
    };
    let mut command = Command::new(program);
    // Before the rest, which may end with a filter.
    command.arg(name).arg("--kubeconfig").arg(kubeconfig).args(rest);
    Ok(command)
}

/// A kubeconfig of a caller who may do everything.
fn kubeconfig(controller: &Controller, folder: &Path) -> Result<PathBuf> {
    let api = controller.master();
    let client = api.client.context("a client of the API server has a certificate")?;
    let cluster = json!({
        "server": format!("https://{}", api.address),
        "certificate-authority": api.ca.path(),
    });
    let user = json!({
        "client-certificate": client.certificate.path(),
        "client-key": client.key.path(),
    });
    let path = folder.join("kubeconfig");
    std::fs::write(&path, world::kubeconfig(&cluster, &user))?;
    Ok(path)
}

/// Makes the node, and waits until the controller manager has taken it for ready.
async fn add_node(controller: &Controller) {
    let room = json!({"cpu": "1", "memory": "1Gi", "pods": "0"});
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "status": {
            "capacity": room, "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": "192.0.2.2"}],
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Story",
                "message": "a node object with room for no pod",
            }],
        },
    });
    let made = controller.create("/api/v1/nodes", &node).await;
    assert_eq!(made.status, 201, "{}", String::from_utf8_lossy(&made.body));
    // A new node has a taint, until the controller manager has seen it.
    let path = format!("/api/v1/nodes/{NODE}");
    let is_free = async || {
        let answer = renew(controller).await;
        assert!(answer.is_none_or(|answer| answer.status < 300), "the lease was refused");
        let answer = controller.master().get(&path).await.unwrap();
        let node: Value = serde_json::from_slice(&answer.body).unwrap();
        node["metadata"]["name"] == NODE && node["spec"]["taints"].is_null()
    };
    wait_until(SOON, "the node has no taint", is_free).await;
}

/// Renews the lease of the node; nothing comes of it while the API server does not answer.
async fn renew(controller: &Controller) -> Option<Answer> {
    let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap().format(&Rfc3339).unwrap();
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NODE},
        "spec": {
            "holderIdentity": NODE,
            "leaseDurationSeconds": 40,
            // Kubernetes wants microseconds.
            "renewTime": now.replace('Z', ".000000Z"),
        },
    });
    let path = format!(
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}\
         ?fieldManager=story&force=true"
    );
    let kind = [("content-type", "application/apply-patch+yaml")];
    let body = lease.to_string().into_bytes();
    controller.master().request(Method::PATCH, &path, &kind, body).await.ok()
}
