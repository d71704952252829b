//! The curator on the node: who leads, and the CA of the cluster.

use std::sync::atomic::Ordering;

use futures::{StreamExt as _, stream};
use polis_proto::v1;
use polis_proto::v1::curator_local_server::CuratorLocal;
use tonic::{Request, Response, Status};

use super::NODE;
use super::served::{Answers, Served};
use polis_wire::pki::Crl;
use polis_wire::rpc::testing::node_id;

#[tonic::async_trait]
impl CuratorLocal for Served {
    type GetCurrentLeaderStream = Answers<v1::GetCurrentLeaderResponse>;

    async fn get_current_leader(
        &self,
        _request: Request<v1::GetCurrentLeaderRequest>,
    ) -> Result<Response<Self::GetCurrentLeaderStream>, Status> {
        let (now, served) = (self.leader(), self.clone());
        let before = now.leader_id.clone();
        let next = stream::once(async move {
            loop {
                let next = served.leader();
                if next.leader_id != before {
                    return Ok(next);
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        });
        let answers = stream::iter([Ok(now)]).chain(next).chain(stream::pending());
        Ok(Response::new(answers.boxed()))
    }

    async fn get_ca_certificate(
        &self,
        _request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        Ok(Response::new(v1::GetCaCertificateResponse { ca_certificate: self.ca.clone() }))
    }
}

impl Served {
    /// The leader of now: this node, or none.
    fn leader(&self) -> v1::GetCurrentLeaderResponse {
        let id = node_id(NODE).to_string();
        let leads = self.leads.load(Ordering::Relaxed);
        v1::GetCurrentLeaderResponse {
            leader_id: if leads { id.clone() } else { String::new() },
            this_id: id,
            crl_digest: Crl::read(&self.crl.lock().unwrap()).map_or(Vec::new(), |crl| crl.digest()),
            ..Default::default()
        }
    }
}
