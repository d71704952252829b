//! Kubernetes on the node: its controller, its worker, and the proxy that lets users in.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use polis_proto::v1;
use tonic::Status;
use tonic::body::Body;

use polis_wire::rpc::{Caller, Exchange, Gateway};

/// A Kubernetes with one controller, and fixed nodes and pods.
#[derive(Clone, Debug, Default)]
pub(super) struct Kubernetes {
    /// Whether the node has the role.
    pub(super) there: Arc<AtomicBool>,
    /// Whether its API server is not ready yet.
    pub(super) starts: Arc<AtomicBool>,
    /// Whether the node has the role of a worker.
    pub(super) works: Arc<AtomicBool>,
    /// The messages of a drain of the worker.
    pub(super) drain: Arc<Mutex<Vec<Result<v1::DrainProgress, Status>>>>,
    /// Whether the node is a worker too, and its kubelet in a crash loop.
    pub(super) loops: Arc<AtomicBool>,
}

impl Kubernetes {
    pub(super) fn roles(&self) -> Option<v1::NodeRoles> {
        let has = |role: &AtomicBool| role.load(Ordering::Relaxed);
        let roles = v1::NodeRoles {
            kubernetes_controller: has(&self.there)
                .then_some(v1::node_roles::KubernetesController {}),
            kubernetes_worker: (has(&self.works) || has(&self.loops))
                .then_some(v1::node_roles::KubernetesWorker {}),
            ..Default::default()
        };
        (roles != v1::NodeRoles::default()).then_some(roles)
    }

    pub(super) fn services(&self) -> Vec<v1::services_response::Service> {
        let starts = self.starts.load(Ordering::Relaxed);
        let service = |(part, state, cause): (&str, &str, &str)| v1::services_response::Service {
            name: format!("root.{part}"),
            state: state.to_owned(),
            cause: cause.to_owned(),
            restarts: if state == "dead" { 7 } else { 0 },
            ..Default::default()
        };
        let api_server = match starts {
            true => ("workload.controller.apiserver", "starting", "no quorum"),
            false => ("workload.controller.apiserver", "healthy", ""),
        };
        let controller = [
            ("workload.controller.access", "healthy", ""),
            api_server,
            ("workload.controller.certificates", "healthy", ""),
        ];
        let worker = [
            ("runtime.containerd", "healthy", ""),
            ("workload.worker.kubelet", "dead", "kubelet ended with status 1: no swap"),
        ];
        let there = self.there.load(Ordering::Relaxed);
        let loops = self.loops.load(Ordering::Relaxed);
        let controller = controller.into_iter().filter(|_| there);
        controller.chain(worker.into_iter().filter(|_| loops)).map(service).collect()
    }
}

impl Gateway for Kubernetes {
    fn open(&self, _caller: &Caller) -> Arc<dyn Exchange> {
        Arc::new(self.clone())
    }

    fn refusal(&self, status: &Status) -> http::Response<Body> {
        let answer = http::Response::builder().status(403);
        answer.body(Body::new(status.message().to_owned())).unwrap()
    }
}

#[tonic::async_trait]
impl Exchange for Kubernetes {
    async fn call(&self, request: http::Request<hyper::body::Incoming>) -> http::Response<Body> {
        let (code, text) = match request.uri().path() {
            "/readyz" if self.starts.load(Ordering::Relaxed) => (500, "[-]etcd failed: x\n"),
            "/readyz" => (200, "ok"),
            "/api/v1/nodes" => (200, NODES),
            "/api/v1/namespaces/kube-system/configmaps/kube-root-ca.crt" => (200, AUTHORITIES),
            "/api/v1/pods" if request.uri().query() == Some("limit=250") => (200, PODS),
            "/api/v1/pods" => (200, MORE_PODS),
            _ => (404, "404 page not found"),
        };
        let answer = http::Response::builder().status(code);
        answer.body(Body::new(text.to_owned())).unwrap()
    }
}

/// The authority of the API servers, in PEM.
pub(super) const AUTHORITY: &str = "-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n";

const AUTHORITIES: &str = r#"{"kind": "ConfigMap", "data": {"ca.crt":
    "-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n"}}"#;

const NODES: &str = r#"{"items": [{"metadata": {"name": "polis-1"}, "status": {
    "nodeInfo": {"kubeletVersion": "v1.37.2"},
    "conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady",
        "message": "no network"}]}}]}"#;

/// The first of two answers.
const PODS: &str = r#"{"metadata": {"continue": "a=b"}, "items": [
    {"metadata": {"namespace": "default", "name": "web"}, "spec": {"nodeName": "polis-1"},
     "status": {"phase": "Running", "containerStatuses": [{"name": "web", "ready": true}]}},
    {"metadata": {"namespace": "default", "name": "job"}, "status": {"phase": "Succeeded"}}]}"#;

const MORE_PODS: &str = r#"{"items": [
    {"metadata": {"namespace": "shop", "name": "cart"}, "spec": {"nodeName": "polis-1"},
     "status": {"phase": "Running", "containerStatuses": [{"name": "main", "ready": false,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}}]}"#;
