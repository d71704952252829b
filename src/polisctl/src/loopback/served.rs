//! What the services of the cluster share: the state behind their answers, and the record of the
//! calls.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::{Stream, StreamExt as _, stream};
use polis_proto::v1;
use tonic::{Response, Status};

use super::Shown;
use super::kubernetes::Kubernetes;
use super::tpm::Tpm;
use polis_wire::rpc::testing::Authority;

/// How the leader takes a change of the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Takes {
    /// It stores each field.
    All,
    /// It is of a version that does not know the proxy.
    AllButTheProxy,
    /// It refuses the change, for a reason without a word of its own.
    Nothing,
}

/// The settings of the cluster.
pub(super) struct Settings {
    pub(super) takes: Takes,
    pub(super) configuration: v1::ClusterConfiguration,
    pub(super) registries: Vec<v1::Registry>,
}

impl Default for Settings {
    /// Those of a cluster with one registry, which has a user.
    fn default() -> Self {
        let host = "registry.example:5000".to_owned();
        let registry = v1::Registry { host, username: "ann".to_owned(), ..Default::default() };
        Self {
            takes: Takes::All,
            configuration: v1::ClusterConfiguration::default(),
            registries: vec![registry],
        }
    }
}

impl Settings {
    /// Changes the fields that are set; the firewall only once it is confirmed.
    pub(super) fn configure(&mut self, wished: v1::ClusterConfiguration) -> Result<(), Status> {
        let wished = match self.takes {
            Takes::All => wished,
            Takes::AllButTheProxy => v1::ClusterConfiguration { proxy: None, ..wished },
            Takes::Nothing => return Err(Status::invalid_argument("this proxy is not allowed")),
        };
        let known = std::mem::take(&mut self.configuration);
        let either = |wished: i32, known: i32| if wished == 0 { known } else { wished };
        self.configuration = v1::ClusterConfiguration {
            tpm_mode: either(wished.tpm_mode, known.tpm_mode),
            storage_security_policy: either(
                wished.storage_security_policy,
                known.storage_security_policy,
            ),
            cold_start: either(wished.cold_start, known.cold_start),
            time: wished.time.or(known.time),
            log: wished.log.or(known.log),
            snapshots: wished.snapshots.or(known.snapshots),
            attestation: wished.attestation.or(known.attestation),
            kubernetes: wished.kubernetes.or(known.kubernetes),
            proxy: wished.proxy.or(known.proxy),
            ..known
        };
        Ok(())
    }
}

/// Answers every call of a node.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) ca: Vec<u8>,
    pub(super) crl: Arc<Mutex<Vec<u8>>>,
    pub(super) authority: Authority,
    pub(super) asked: Arc<Mutex<Vec<String>>>,
    pub(super) leads: Arc<AtomicBool>,
    /// Whether the member of etcd answers.
    pub(super) answers: Arc<AtomicBool>,
    pub(super) kubernetes: Kubernetes,
    pub(super) etcd_read: Arc<tokio::sync::Notify>,
    pub(super) says: Arc<Mutex<String>>,
    pub(super) crowd: Arc<AtomicBool>,
    /// The audit log.
    pub(super) audit: Arc<Mutex<(v1::AuditHead, Vec<v1::AuditEntry>)>>,
    /// The update of the cluster.
    pub(super) update: Arc<Mutex<Option<v1::ClusterUpdate>>>,
    /// What the next looks at it find, one after the other.
    pub(super) update_looks: Arc<Mutex<VecDeque<v1::ClusterUpdate>>>,
    /// How often the rotation of its CA was read.
    pub(super) rotation: Arc<AtomicUsize>,
    /// What its owner has set.
    pub(super) settings: Arc<Mutex<Settings>>,
    /// The firewall that was set last.
    pub(super) firewall: Arc<Mutex<v1::FirewallConfiguration>>,
    /// The network that was ordered last for the node.
    pub(super) network: Arc<Mutex<Option<v1::NetworkOrder>>>,
    /// The certificates that its servers show.
    pub(super) shown: Arc<Mutex<Vec<Shown>>>,
    pub(super) tpm: Arc<Mutex<Tpm>>,
    /// What the node has of a bundle whose transfer broke.
    pub(super) part: Arc<Mutex<Vec<u8>>>,
    pub(super) etcd_cluster: Arc<Mutex<String>>,
}

impl Served {
    pub(super) fn note(&self, call: &str) {
        self.asked.lock().unwrap().push(call.to_owned());
    }

    /// The records of the crowd, if it is there.
    pub(super) fn crowd<T>(&self, records: impl FnOnce() -> Vec<T>) -> Vec<T> {
        if self.crowd.load(Ordering::Relaxed) { records() } else { Vec::new() }
    }
}

pub(super) fn not_served<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no test needs it"))
}

pub(super) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(super) fn answers<T: Send + 'static>(all: Vec<T>) -> Response<Answers<T>> {
    Response::new(stream::iter(all.into_iter().map(Ok)).boxed())
}
