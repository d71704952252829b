//! A curator for the tests of the cluster manager: it leads, and rejects the calls of nodes.

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use polis_proto::v1;
use polis_proto::v1::curator_local_server::{CuratorLocal, CuratorLocalServer};
use prost::Message as _;
use tonic::body::Body;
use tonic::codegen::{Body as _, http};
use tonic::metadata::MetadataValue;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::Machine;
use crate::curator::Store;
use polis_base::sys::clock;
use polis_machine::parameters::{Cluster, DirectoryNode, Register};
use polis_wire::identity::{NodeId, NodeKey};
use polis_wire::pki::memory::Memory;
use polis_wire::rpc::testing::Running;
use polis_wire::rpc::{App, Credentials, Limits, Peer, REASON};

/// A curator on loopback, which serves until it is dropped with its test.
pub(super) struct Curator {
    id: NodeId,
    ca: Vec<u8>,
    running: Running,
}

impl Curator {
    /// A curator of the cluster in `etcd`, which rejects each call with the next of `reasons`,
    /// and those after them with the last.
    pub(super) async fn start(etcd: &Memory, reasons: &[&'static str]) -> Self {
        let reasons = Arc::new(Mutex::new(reasons.iter().copied().collect()));
        Self::rejecting(etcd, Rejects::Always(reasons)).await
    }

    /// A curator of the cluster in `etcd`, which rejects `JoinNode` as its records say.
    pub(super) async fn with_records(etcd: &Memory) -> Self {
        Self::rejecting(etcd, Rejects::ByRecords(Store::new(etcd.clone()))).await
    }

    async fn rejecting(etcd: &Memory, rejects: Rejects) -> Self {
        let (store, now) = (Store::new(etcd.clone()), clock::now());
        let key = NodeKey::generate().unwrap();
        let ca = store.ensure_authority(now).await.unwrap().der;
        let issued = store.curator_certificate(key.identity(), now).await.unwrap();
        let credentials = Credentials {
            certificate: issued.der,
            key: Arc::new(key.to_pkcs8_der().unwrap()),
            authorities: Some(store.authorities().await.unwrap().into()),
        };
        let routes = Routes::new(CuratorLocalServer::new(Leads(key.id())));
        let app = App::Grpc(routes.add_service(rejects));
        let bound = Arc::new(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let running = Running::start_at(bound, credentials, app, Limits::default()).await;
        let curator = Self { id: key.id(), ca, running };
        curator.accepts([].into());
        curator
    }

    /// Sets the nodes whose certificates it accepts: the members.
    pub(super) fn accepts(&self, nodes: BTreeSet<NodeId>) {
        self.running.access_list.send_modify(|list| Arc::make_mut(list).nodes = Some(nodes));
    }

    /// Lets a member find it, as the last list of a leader does.
    pub(super) fn is_known_to(&self, machine: &Machine) {
        let address = self.running.address.to_string();
        let node =
            v1::cluster_directory::Node { id: self.id.to_string(), addresses: vec![address] };
        let directory = v1::ClusterDirectory { nodes: vec![node] };
        let file = machine.root().esp.cluster_directory;
        file.write(&directory.encode_to_vec()).unwrap();
    }

    /// The parameters with which a machine registers with it.
    pub(super) fn register(&self) -> Option<Cluster> {
        let addresses = vec![self.running.address.to_string()];
        Some(Cluster::Register(Register {
            directory: vec![DirectoryNode { id: self.id, addresses }],
            ca_certificate: self.ca.clone(),
            ..crate::cluster::tests::register()
        }))
    }
}

/// Says that this node leads.
#[derive(Clone, Debug)]
struct Leads(NodeId);

#[tonic::async_trait]
impl CuratorLocal for Leads {
    type GetCurrentLeaderStream = BoxStream<'static, Result<v1::GetCurrentLeaderResponse, Status>>;

    async fn get_current_leader(
        &self,
        _request: Request<v1::GetCurrentLeaderRequest>,
    ) -> Result<Response<Self::GetCurrentLeaderStream>, Status> {
        let id = self.0.to_string();
        let leads = v1::GetCurrentLeaderResponse {
            leader_id: id.clone(),
            this_id: id,
            ..Default::default()
        };
        Ok(Response::new(stream::iter([Ok(leads)]).chain(stream::pending()).boxed()))
    }

    async fn get_ca_certificate(
        &self,
        _request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        Err(Status::unimplemented("the nodes know it"))
    }
}

/// Rejects every call of the service `Curator`.
#[derive(Clone, Debug)]
enum Rejects {
    Always(Arc<Mutex<VecDeque<&'static str>>>),
    ByRecords(Store<Memory>),
}

impl Rejects {
    async fn status(self, request: http::Request<Body>) -> Status {
        let store = match self {
            Self::Always(reasons) => return rejection(&reasons),
            Self::ByRecords(store) => store,
        };
        let peer = request.extensions().get::<Peer>().cloned();
        let Some(Peer::Key(key)) = peer else { panic!("{peer:?} has no join key") };
        let v1::JoinNodeRequest { node_public_key, .. } = message(request.into_body()).await;
        let joined = store.join(&key, node_public_key.try_into().ok()).await;
        joined.expect_err("the join key is not in the records").into()
    }
}

/// The rejection with the next of `reasons`.
fn rejection(reasons: &Mutex<VecDeque<&'static str>>) -> Status {
    let mut reasons = reasons.lock().unwrap();
    let last = reasons.len() == 1;
    let reason = reasons.pop_front().unwrap();
    if last {
        reasons.push_back(reason);
    }
    let mut status = Status::failed_precondition("no");
    status.metadata_mut().insert(REASON, MetadataValue::from_static(reason));
    status
}

/// The message of a request, which follows the five bytes of its frame.
async fn message<M: prost::Message + Default>(mut body: Body) -> M {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        if let Ok(data) = frame.unwrap().into_data() {
            bytes.extend_from_slice(&data);
        }
    }
    M::decode(&bytes[5..]).unwrap()
}

impl tonic::server::NamedService for Rejects {
    const NAME: &'static str = "polis.v1.Curator";
}

impl tonic::codegen::Service<http::Request<Body>> for Rejects {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let rejects = self.clone();
        Box::pin(async move { Ok(rejects.status(request).await.into_http()) })
    }
}
