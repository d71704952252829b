//! Finds a member of etcd whose peers were given another authority while it was off or cut off.
//!
//! Such a member cannot speak to its peers: they no longer trust what signed its certificate. Its
//! node speaks to a leader all the same, which gives it what a new member needs. The data on its
//! disk stays.

use std::net::IpAddr;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use sha2::{Digest as _, Sha256};

use crate::consensus::{self, Invitation};
use polis_base::files::File;
use polis_runtime::supervisor::blocking;
use polis_wire::identity::NodeId;
use polis_wire::rpc::client::{Client, Repeat};

/// What the member of this node needs to speak to its peers again, or `None` if its file
/// `trusted` names their authorities. Call it only for a node that is a member: the leader would
/// make another node one.
///
/// # Errors
///
/// Why no leader has answered.
pub async fn outdated(
    client: &Client,
    own: NodeId,
    address: IpAddr,
    trusted: File,
) -> Result<Option<Invitation>, String> {
    let request = v1::JoinConsensusRequest { address: address.to_string() };
    let call = |channel| {
        let request = request.clone();
        async move { Ok(CuratorClient::new(channel).join_consensus(request).await?.into_inner()) }
    };
    let answer = client.call(Repeat::Allowed, call).await;
    let answer = answer.map_err(|status: tonic::Status| status.to_string())?;
    let invitation = Invitation::read(answer, own).ok_or("the leader's answer is damaged")?;
    let known = blocking(move || trusted.read()).await.map_err(|error| error.to_string())?;
    let known = known.map(|pem| <[u8; 32]>::from(Sha256::digest(pem)));
    let current = known == Some(consensus::trusted_digest(&invitation.authorities));
    Ok((!current).then_some(invitation))
}
