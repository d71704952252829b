//! The service `polis.v1.CuratorLocal`: the answers of every curator, leader or not.

use polis_proto::v1;
use polis_proto::v1::curator_local_server::CuratorLocal;
use tokio::sync::watch;
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
        let directory = self.0.directory.subscribe();
        let say = move |leadership: &Leadership| {
            answer(leadership, &this_id, directory.borrow().crl_digest())
        };
        Ok(Response::new(announcements(self.0.leadership.clone(), say)))
    }

    async fn get_ca_certificate(
        &self,
        _request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        let ca_certificate = self.authority()?;
        Ok(Response::new(v1::GetCaCertificateResponse { ca_certificate }))
    }
}

/// What `say` answers at first, and whenever another leadership changes that. Each announcement is
/// made at its moment: by then, the CRL may be another one than at the announcement before.
fn announcements(
    leadership: watch::Receiver<Leadership>,
    say: impl Fn(&Leadership) -> v1::GetCurrentLeaderResponse + Send + 'static,
) -> Stream<v1::GetCurrentLeaderResponse> {
    let begun = (leadership, say, None);
    Box::pin(futures::stream::unfold(begun, |(mut leadership, say, sent)| async move {
        loop {
            let now = {
                let known = leadership.borrow_and_update().clone();
                say(&known)
            };
            if sent.as_ref() != Some(&now) {
                return Some((Ok(now.clone()), (leadership, say, Some(now))));
            }
            leadership.changed().await.ok()?;
        }
    }))
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

    use futures::{FutureExt as _, StreamExt as _};

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

    #[tokio::test]
    async fn an_announcement_has_the_crl_of_its_own_moment() {
        let leadership = watch::Sender::new(Leadership::default());
        let digest = watch::Sender::new(b"former".to_vec());
        let crl_digest = digest.subscribe();
        let say = move |known: &Leadership| v1::GetCurrentLeaderResponse {
            leader_id: known.leader.as_ref().map_or_else(String::new, |it| it.node.to_string()),
            crl_digest: crl_digest.borrow().clone(),
            ..Default::default()
        };
        let mut announced = announcements(leadership.subscribe(), say);
        let first = announced.next().await.unwrap().unwrap();
        assert_eq!((&*first.leader_id, &*first.crl_digest), ("", &b"former"[..]));
        assert!(announced.next().now_or_never().is_none(), "nothing has changed");
        digest.send_replace(b"newest".to_vec());
        let node = NodeId::from_public_key(&[1; 32]);
        let leader = Leader { node, address: None, port: 7835, since: SystemTime::UNIX_EPOCH };
        leadership.send_replace(Leadership { leader: Some(leader), term: None });
        let next = announced.next().await.unwrap().unwrap();
        assert_eq!((next.leader_id, &*next.crl_digest), (node.to_string(), &b"newest"[..]));
    }
}
