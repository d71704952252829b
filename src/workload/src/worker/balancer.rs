//! The way of this node's clients to the API servers: a TCP balancer on loopback.
//!
//! kubelet, kube-proxy and the name server know one address. Each connection goes to the
//! first controller that accepts it: to the one on this node while it is ready, else in turn.
//! TLS is between the client and the API server; the balancer carries bytes.
//!
//! ```text
//! nodes of the cluster, of the last boot before there are any --> targets
//! connection --> first target that accepts within CONNECT_MAX --> bytes both ways
//!
//! API server of this node   its place among the targets
//! ready                     first
//! starting                  none
//! any other state           last: without etcd it takes no change
//! ```
//!
//! Invariants:
//! - At most [`CONNECTIONS_MAX`] connections are carried; further ones wait in the kernel.
//! - An API server of this node gets no connection while it starts. It accepts long before it is
//!   ready, and on a slow machine its clients, each with a TLS handshake at every try, keep it
//!   from its own work: it was ready after 250 s instead of 62.
//! - While the API server of this node is not ready and another one accepts connections, its own
//!   are closed: a client that keeps one would never reach the other, and kubelet could not renew
//!   its lease. While no other accepts, they stay: their clients would only come back.
//! - The kernel holds back nothing that either end has sent ([`api::set_options`]).
//! - The other end of a connection that vanishes frees its place within half a minute.
//! - A connection without a target ends in order, not by a reset, if the client ends its side
//!   within [`DRAIN_MAX`]: it tries again, as for an API server that starts, and its messages
//!   have the same cause each time.
//!
//! What this module does not do: check whether an API server of another node works beyond that it
//! accepts. A client that finds one hanging drops its connection, and comes back to the next one.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, trace};

use crate::api;
use crate::parts::{Part, PartState, Parts};
use polis_base::cause;
use polis_proto::v1;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;

/// Each client of the node has a few.
const CONNECTIONS_MAX: usize = 256;

/// How long a controller may take to accept. Another one is asked then.
const CONNECT_MAX: Duration = Duration::from_secs(3);

/// How long a client that is refused may take to end its side.
const DRAIN_MAX: Duration = Duration::from_secs(3);

/// Between two looks at whether clients should leave the API server of this node: its checks are
/// ten seconds apart.
const LOOK: Duration = Duration::from_secs(1);

/// After an error of `accept`: no descriptor is free, for example.
const PAUSE: Duration = Duration::from_millis(100);

/// Why the balancer ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Another program has the port.
    #[error("cannot listen on {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// Where clients connect.
    pub(super) listen: SocketAddr,
    pub(super) node: NodeId,
    /// The API server on this node, if it is a controller.
    pub(super) local: SocketAddr,
    pub(super) nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// Those of the last boot, while no leader has answered in this one.
    pub(super) last: watch::Receiver<Option<Arc<Nodes>>>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(self, ctx: Context) -> Result<(), Error> {
        let address = self.listen;
        let listen = |source| Error::Listen { address, source };
        let listener = match TcpListener::bind(address).await.map_err(listen) {
            Ok(listener) => listener,
            Err(error) => {
                let cause = cause::line(&error);
                self.parts.fail(Part::ApiBalancer, cause);
                return Err(error);
            }
        };
        ctx.healthy();
        self.parts.set(Part::ApiBalancer, PartState::Ready);
        let left = watch::Sender::new(());
        tokio::select! {
            // Cancel-safe, both: every connection ends with the run.
            () = self.serve(&listener, &left, &ctx) => Ok(()),
            never = self.leave(&left) => match never {},
        }
    }

    /// Carries connections until cancelled.
    async fn serve(&self, listener: &TcpListener, left: &watch::Sender<()>, ctx: &Context) {
        // Its end ends every connection.
        let mut connections = JoinSet::new();
        let mut turn = 0;
        loop {
            let room = connections.len() < CONNECTIONS_MAX;
            let accepted = tokio::select! {
                // Cancel-safe, all of them: they wait for a connection, or for an end.
                () = ctx.cancelled() => return,
                Some(_ended) = connections.join_next() => continue,
                accepted = listener.accept(), if room => accepted,
            };
            match accepted {
                Ok((client, _from)) => {
                    turn += 1;
                    let targets = self.targets(turn);
                    connections.spawn(carry(client, targets, self.local, left.clone()));
                }
                Err(error) => {
                    debug!(error = &error as &dyn std::error::Error, "cannot accept");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Closes the connections to the API server of this node, which are the receivers of `left`,
    /// when that is not ready and another one accepts.
    async fn leave(&self, left: &watch::Sender<()>) -> Infallible {
        let ready = || self.parts.state(Part::ApiServer) == Some(PartState::Ready);
        loop {
            sleep(LOOK).await;
            if ready() || left.receiver_count() == 0 {
                continue;
            }
            // The own one may become ready meanwhile.
            if self.reaches_another().await && !ready() {
                left.send_replace(());
            }
        }
    }

    /// Whether an API server of another node accepts a connection. The records alone do not say:
    /// without a leader they are those of the past.
    async fn reaches_another(&self) -> bool {
        for target in self.targets(0) {
            let other = target != self.local;
            if other && matches!(timeout(CONNECT_MAX, TcpStream::connect(target)).await, Ok(Ok(_)))
            {
                return true;
            }
        }
        false
    }

    fn targets(&self, turn: usize) -> Vec<SocketAddr> {
        let nodes = self.nodes.borrow().clone();
        let nodes = nodes.or_else(|| self.last.borrow().clone());
        let Some(nodes) = nodes else { return Vec::new() };
        let state = self.parts.state(Part::ApiServer);
        targets(&nodes, self.node, self.local, state.as_ref(), turn)
    }
}

/// The API servers in the order in which this connection tries them; `state` is that of the one on
/// this node.
fn targets(
    nodes: &Nodes,
    own: NodeId,
    local: SocketAddr,
    state: Option<&PartState>,
    turn: usize,
) -> Vec<SocketAddr> {
    let controls = |info: &v1::NodeInfo| {
        info.state() == v1::NodeState::Up
            && info.roles.as_ref().is_some_and(|roles| roles.kubernetes_controller.is_some())
    };
    let mut others: Vec<_> = nodes
        .iter()
        .filter(|(id, info)| **id != own && controls(info))
        .filter_map(|(_, info)| info.status.as_ref()?.external_address.parse().ok())
        .map(|address| SocketAddr::new(address, local.port()))
        .collect();
    if !others.is_empty() {
        let first = turn % others.len();
        others.rotate_left(first);
    }
    if nodes.get(&own).is_some_and(controls) {
        match state {
            Some(PartState::Ready) => others.insert(0, local),
            Some(PartState::Starting) => {}
            Some(PartState::Failed { .. } | PartState::Stopped) | None => others.push(local),
        }
    }
    others
}

/// Carries one connection to its end. One to `local` is a receiver of `left`, and ends with its
/// next change, too.
async fn carry(
    mut client: TcpStream,
    targets: Vec<SocketAddr>,
    local: SocketAddr,
    left: watch::Sender<()>,
) {
    api::set_options(&client);
    for target in targets {
        let Ok(Ok(mut server)) = timeout(CONNECT_MAX, api::open(target)).await else {
            trace!(%target, "an API server does not accept");
            continue;
        };
        tokio::select! {
            // Cancel-safe, both: the connection ends with either. A reset by one side is the end
            // of a connection like any other.
            _carried = copy_bidirectional(&mut client, &mut server) => {}
            _changed = async { left.subscribe().changed().await }, if target == local => {
                trace!("the API server of this node is not ready: a connection is closed");
            }
        }
        return;
    }
    trace!("no API server accepts");
    // A client that goes on sending gets a reset.
    let _drained = timeout(DRAIN_MAX, refuse(client)).await;
}

/// Ends a connection without an answer. It reads what the client sends until its end: if bytes
/// are left, the kernel sends a reset, and the client reports another error.
async fn refuse(mut client: TcpStream) -> io::Result<()> {
    client.shutdown().await?;
    tokio::io::copy(&mut client, &mut tokio::io::sink()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use polis_wire::node_roles::Role;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    const LOCAL: &str = "127.0.0.1:6443";

    fn id(key: u8) -> NodeId {
        NodeId::from_public_key(&[key; 32])
    }

    fn node(address: &str, roles: &[Role]) -> v1::NodeInfo {
        v1::NodeInfo {
            state: v1::NodeState::Up.into(),
            roles: Some(Role::record(roles)),
            status: Some(v1::NodeStatus {
                external_address: address.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn a_controller_asks_itself_first_and_others_take_turns() {
        let controller = [Role::KubernetesController];
        let worker = [Role::KubernetesWorker];
        let mut leaving = node("192.0.2.9", &controller);
        leaving.set_state(v1::NodeState::Standby);
        let nodes = Nodes::from([
            (id(1), node("192.0.2.1", &controller)),
            (id(2), node("192.0.2.2", &controller)),
            (id(3), node("192.0.2.3", &worker)),
            (id(4), node("noise", &controller)),
            (id(5), leaving),
        ]);
        let local = LOCAL.parse().unwrap();
        let state = PartState::Ready;
        let ready = Some(&state);
        let said = |own, turn| {
            let targets = targets(&nodes, id(own), local, ready, turn);
            targets.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let mut firsts = vec![said(3, 0)[0].clone(), said(3, 1)[0].clone()];
        firsts.sort();
        assert_eq!(firsts, ["192.0.2.1:6443", "192.0.2.2:6443"]);
        assert_eq!(said(3, 2), said(3, 0));
        assert_eq!(said(1, 7), [LOCAL, "192.0.2.2:6443"]);
        assert!(targets(&Nodes::new(), id(1), local, ready, 0).is_empty());
    }

    #[test]
    fn the_nodes_of_the_last_boot_count_until_a_leader_reports_others() {
        let controller = |address: &str| {
            let node = node(address, &[Role::KubernetesController]);
            Some(Arc::new(Nodes::from([(id(1), node)])))
        };
        let (known, nodes) = watch::channel(None);
        let (_last, last) = watch::channel(controller("192.0.2.1"));
        let (ctx, _handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        let local = LOCAL.parse().unwrap();
        let balancer = Service { listen: local, node: id(9), local, nodes, last, parts };
        assert_eq!(balancer.targets(0), ["192.0.2.1:6443".parse().unwrap()]);
        known.send_replace(controller("192.0.2.2"));
        assert_eq!(balancer.targets(0), ["192.0.2.2:6443".parse().unwrap()]);
        known.send_replace(Some(Arc::default()));
        assert_eq!(balancer.targets(0), []);
    }

    #[test]
    fn an_api_server_of_this_node_is_left_alone_until_it_was_ready() {
        let controller = |address: &str| node(address, &[Role::KubernetesController]);
        let nodes =
            Nodes::from([(id(1), controller("192.0.2.1")), (id(2), controller("192.0.2.2"))]);
        let (_known, nodes) = watch::channel(Some(Arc::new(nodes)));
        let (ctx, _handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        let (local, last) = (LOCAL.parse().unwrap(), nodes.clone());
        let balancer =
            Service { listen: local, node: id(1), local, nodes, last, parts: parts.clone() };
        let other = "192.0.2.2:6443".parse().unwrap();
        parts.set(Part::ApiServer, PartState::Starting);
        assert_eq!(balancer.targets(0), [other]);
        parts.set(Part::ApiServer, PartState::Ready);
        assert_eq!(balancer.targets(0), [local, other]);
        // Without etcd it still answers from what it has read, and takes no change.
        parts.fail(Part::ApiServer, "no quorum");
        assert_eq!(balancer.targets(0), [other, local]);
        parts.set(Part::ApiServer, PartState::Stopped);
        assert_eq!(balancer.targets(0), [other, local]);
    }

    #[tokio::test]
    async fn clients_of_an_api_server_that_leaves_readiness_come_back_to_another() {
        let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local = own.local_addr().unwrap();
        let other = TcpListener::bind(("127.0.0.2", local.port())).await.unwrap();
        let listen = unused().await;
        let controller = |address: &str| node(address, &[Role::KubernetesController]);
        let alone = Nodes::from([(id(1), controller("192.0.2.1"))]);
        let mut both = alone.clone();
        both.insert(id(2), controller("127.0.0.2"));
        let (known, nodes) = watch::channel(Some(Arc::new(alone)));
        let (ctx, handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        parts.set(Part::ApiServer, PartState::Ready);
        let last = nodes.clone();
        let balancer = Service { listen, node: id(1), local, nodes, last, parts: parts.clone() };
        let story = async {
            parts.ready(Part::ApiBalancer).await.unwrap();
            let mut client = TcpStream::connect(listen).await.unwrap();
            let (_served, _from) = own.accept().await.unwrap();
            parts.fail(Part::ApiServer, "no quorum");
            let mut answer = [0; 1];
            let closed = timeout(LOOK + LOOK / 2, client.read(&mut answer)).await;
            assert!(closed.is_err(), "there is no other one: {closed:?}");
            known.send_replace(Some(Arc::new(both)));
            assert_eq!(client.read(&mut answer).await.unwrap(), 0);
            let mut again = TcpStream::connect(listen).await.unwrap();
            // The first one is the probe.
            let (_probe, _from) = other.accept().await.unwrap();
            let (_served, _from) = other.accept().await.unwrap();
            // Connections to others stay, whatever the one of this node does.
            parts.set(Part::ApiServer, PartState::Ready);
            sleep(LOOK + LOOK / 2).await;
            parts.fail(Part::ApiServer, "no quorum");
            let closed = timeout(LOOK + LOOK / 2, again.read(&mut answer)).await;
            assert!(closed.is_err(), "{closed:?}");
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(balancer.run(ctx), story);
        ended.unwrap();
    }

    /// An address that nothing listens on.
    async fn unused() -> SocketAddr {
        let free = TcpListener::bind("127.0.0.3:0").await.unwrap();
        free.local_addr().unwrap()
    }

    #[tokio::test]
    async fn clients_of_a_failed_api_server_stay_until_another_one_accepts() {
        let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local = own.local_addr().unwrap();
        let listen = unused().await;
        let controller = |address: &str| node(address, &[Role::KubernetesController]);
        // The records have another one, which does not accept.
        let nodes =
            Nodes::from([(id(1), controller("192.0.2.1")), (id(2), controller("127.0.0.2"))]);
        let (_known, nodes) = watch::channel(Some(Arc::new(nodes)));
        let (ctx, handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        parts.set(Part::ApiServer, PartState::Ready);
        let last = nodes.clone();
        let balancer = Service { listen, node: id(1), local, nodes, last, parts: parts.clone() };
        let story = async {
            parts.ready(Part::ApiBalancer).await.unwrap();
            let before = TcpStream::connect(listen).await.unwrap();
            let (_served, _from) = own.accept().await.unwrap();
            parts.fail(Part::ApiServer, "no quorum");
            let after = TcpStream::connect(listen).await.unwrap();
            let (_served_too, _from) = own.accept().await.unwrap();
            let mut clients = [before, after];
            let mut answer = [0; 1];
            for client in &mut clients {
                let closed = timeout(LOOK + LOOK / 2, client.read(&mut answer)).await;
                assert!(closed.is_err(), "no other one accepts: {closed:?}");
            }
            let _other = TcpListener::bind(("127.0.0.2", local.port())).await.unwrap();
            for client in &mut clients {
                assert_eq!(client.read(&mut answer).await.unwrap(), 0);
            }
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(balancer.run(ctx), story);
        ended.unwrap();
    }

    #[tokio::test]
    async fn a_connection_goes_to_the_first_target_that_accepts() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let targets = vec![closed.local_addr().unwrap(), server.local_addr().unwrap()];
        drop(closed);
        let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(front.local_addr().unwrap()).await.unwrap();
        let (accepted, _from) = front.accept().await.unwrap();
        let socket = accepted.as_fd().try_clone_to_owned().unwrap();
        let serve = async {
            let (mut stream, _from) = server.accept().await.unwrap();
            let mut word = [0; 4];
            stream.read_exact(&mut word).await.unwrap();
            stream.write_all(b"pong").await.unwrap();
            word
        };
        // The connection ends with both of its ends.
        let ask = async move {
            client.write_all(b"ping").await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let ((), word, answer) = tokio::join!(carried(accepted, targets), serve, ask);
        assert_eq!((&word, answer.as_str()), (b"ping", "pong"));
        // A client that vanishes frees its place.
        assert_eq!(api::timeouts(&socket).unwrap(), [Duration::from_secs(30); 2]);
        assert!(rustix::net::sockopt::tcp_nodelay(&socket).unwrap());
    }

    /// A connection that no other target is asked for.
    async fn carried(client: TcpStream, targets: Vec<SocketAddr>) {
        carry(client, targets, LOCAL.parse().unwrap(), watch::Sender::new(())).await;
    }

    #[tokio::test]
    async fn a_client_without_an_api_server_sees_an_end_whenever_it_speaks() {
        for early in [true, false] {
            let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = TcpStream::connect(front.local_addr().unwrap()).await.unwrap();
            if early {
                client.write_all(b"hello").await.unwrap();
            }
            let (accepted, _from) = front.accept().await.unwrap();
            let mut connections = JoinSet::new();
            connections.spawn(carried(accepted, Vec::new()));
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.unwrap();
            if !early {
                client.write_all(b"hello").await.unwrap();
            }
            drop(client);
            connections.join_all().await;
            assert!(answer.is_empty(), "{early} {answer:?}");
        }
    }
}
