//! The conformance tests of Kubernetes that need no pod, by `cargo xtask conformance`.
//!
//! That command calls the story for a control plane, and the story calls the command for the
//! tests. A run of the level `kube` does the same, where the suite was built.
//!
//! A few of the tests without pods want a node that is ready, and no pod on it. So the
//! cluster has a node object with room for no pod, whose lease the story renews as a
//! kubelet does.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use polis_tests::{Story, skip, story};
use polis_workload::Answer;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::suite;
use crate::world::{self, Controller, SOON, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(threads tests_that_need_no_pod_pass).takes(240)];

/// The node.
const NODE: &str = "no-room";

/// Between two renewals of its lease, a kubelet's default: the controller manager takes a
/// node for lost after 40 seconds.
const RENEWAL: Duration = Duration::from_secs(10);

async fn tests_that_need_no_pod_pass() -> Result<()> {
    let Ok(list) = std::env::var(suite::COMMAND) else {
        return skip("`cargo xtask conformance` builds target/go/bin/e2e, and runs it");
    };
    let controller = Controller::ready().await;
    let folder = tempfile::tempdir()?;
    let kubeconfig = kubeconfig(&controller, folder.path())?;
    let mut command = suite::command(&list, &kubeconfig)?;
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
