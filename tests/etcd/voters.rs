//! Voters beside the first one, each with a curator.

use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::Client;

use crate::calls::admit;
use crate::curators::{BootstrapNode, Cluster, Curator};
use crate::harness::{Machine, Node};

/// Lets a machine in as a voter beside these, with a curator of its own.
pub(crate) async fn voter(
    cluster: &Cluster,
    of: &[&Curator],
    owner: &Client,
    machine: &Machine,
) -> (Node, Curator, Credentials) {
    let node = admit(cluster, of, owner, machine).await;
    node.voter_of(of.len() + 1).await;
    let own = cluster.credentials(machine).await;
    let curator = Curator::start(machine, &node, own.clone());
    (node, curator, own)
}

/// A cluster of three voters, each with a curator. The first machine founded it, and leads.
pub(crate) struct Voters {
    pub(crate) nodes: [Node; 3],
    pub(crate) cluster: Cluster,
    pub(crate) curators: [Curator; 3],
    /// The credentials of the nodes.
    pub(crate) own: [Credentials; 3],
    /// Knows all curators.
    pub(crate) owner: Client,
}

impl Voters {
    /// Switches the machines on for the first time, one after the other.
    pub(crate) async fn start([one, two, three]: &[Machine; 3]) -> Self {
        let BootstrapNode { node, cluster, curator, own, owner } = BootstrapNode::start(one).await;
        // Boxed: the future of a registration is large.
        let entered = Box::pin(voter(&cluster, &[&curator], &owner, two)).await;
        let (second, curator_two, own_two) = entered;
        let of = [&curator, &curator_two];
        let (third, curator_three, own_three) = Box::pin(voter(&cluster, &of, &owner, three)).await;
        let curators = [curator, curator_two, curator_three];
        let owner = cluster.owner(&curators.each_ref()).await;
        let (nodes, own) = ([node, second, third], [own, own_two, own_three]);
        Self { nodes, cluster, curators, own, owner }
    }
}
