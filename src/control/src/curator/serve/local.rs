//! The service `polis.v1.CuratorLocal`: the answers of every curator, leader or not.

use polis_proto::v1;
use polis_proto::v1::curator_local_server::CuratorLocal;
use tonic::{Request, Response, Status};

use super::{Handlers, Stream};
use crate::curator::leader::Leadership;

#[tonic::async_trait]
impl CuratorLocal for Handlers {
    type GetCurrentLeaderStream = Stream<v1::GetCurrentLeaderResponse>;

    async fn get_current_leader(
        &self,
        _request: Request<v1::GetCurrentLeaderRequest>,
    ) -> Result<Response<Self::GetCurrentLeaderStream>, Status> {
        let this_id = self.0.node.to_string();
        let leadership = self.0.leadership.clone();
        let directory = self.0.directory.subscribe();
        let sent = None;
        let stream = futures::stream::unfold((leadership, sent), move |(mut leadership, sent)| {
            let this_id = this_id.clone();
            let crl_digest = directory.borrow().crl_digest().to_vec();
            async move {
                loop {
                    let now = answer(&leadership.borrow_and_update(), &this_id, &crl_digest);
                    if sent.as_ref() != Some(&now) {
                        return Some((Ok(now.clone()), (leadership, Some(now))));
                    }
                    leadership.changed().await.ok()?;
                }
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_ca_certificate(
        &self,
        _request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        let ca_certificate = self.authority()?;
        Ok(Response::new(v1::GetCaCertificateResponse { ca_certificate }))
    }
}

/// The leader. This curator names itself only while it would serve: a caller that received
/// its name from a curator that does not serve would ask no other.
fn answer(
    leadership: &Leadership,
    this_id: &str,
    crl_digest: &[u8],
) -> v1::GetCurrentLeaderResponse {
    let leader = leadership
        .leader
        .as_ref()
        .filter(|leader| leadership.term.is_some() || leader.node.to_string() != this_id);
    v1::GetCurrentLeaderResponse {
        leader_id: leader.map(|leader| leader.node.to_string()).unwrap_or_default(),
        leader_address: leader
            .and_then(|leader| leader.address)
            .map(|address| address.to_string())
            .unwrap_or_default(),
        leader_port: leader.map_or(0, |leader| leader.port.into()),
        this_id: this_id.to_owned(),
        crl_digest: leadership.term.as_ref().map(|_| crl_digest.to_vec()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::curator::directory::Leader;
    use polis_wire::identity::NodeId;

    #[test]
    fn a_curator_whose_lock_is_all_that_is_left_does_not_say_that_it_leads() {
        let node = NodeId::from_public_key(&[1; 32]);
        let since = SystemTime::UNIX_EPOCH;
        let leader = Some(Leader { node, address: None, port: 7835, since });
        let leadership = Leadership { leader, term: None };
        let own = answer(&leadership, &node.to_string(), b"digest");
        assert!(own.leader_id.is_empty() && own.crl_digest.is_empty());
        assert_eq!(answer(&leadership, "polis-other", b"digest").leader_id, node.to_string());
    }
}
