//! The service `polis.v1.Aaa`: users and their certificates.

use polis_proto::v1;
use polis_proto::v1::aaa_server::Aaa;
use tonic::{Request, Response, Status};

use super::audit::answer;
use super::{Handlers, Lead, untrusted};
use crate::curator::convert;
use crate::curator::error::Error;
use polis_base::sys::clock;
use polis_wire::pki::Issued;
use polis_wire::rpc::Peer;

impl Lead {
    /// Rejects a key that no user has and that did not found the cluster. A caller without a
    /// certificate makes as many keys as it likes, and the leader lists all users for a known one
    /// only.
    async fn check_key(&self, key: &[u8; 32]) -> Result<(), Status> {
        let directory = self.current().await?;
        if directory.borrow().users().any(|user| user.public_key == key) {
            return Ok(());
        }
        match self.store().founded_with(key).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.refuse(Error::NotOwner)),
            Err(error) => Err(self.refuse(error)),
        }
    }

    /// The certificate, and the CAs that lead to the one that has signed it. Its callers box it:
    /// the making of a certificate is large, and rare.
    async fn certified(
        &self,
        issued: impl Future<Output = Result<Issued, Error>> + Send,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let issued = issued.await.map_err(|error| self.refuse(error))?;
        let authorities = self.store().authorities().await.map_err(|error| self.refuse(error))?;
        Ok(self.answer(v1::EscrowResponse {
            certificate: issued.der,
            ca_certificate: authorities.signing.clone(),
            authorities: Some(authorities.to_message()),
        }))
    }
}

#[tonic::async_trait]
impl Aaa for Handlers {
    async fn escrow(
        &self,
        request: Request<v1::EscrowRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let Peer::Key(key) = Peer::of(&request) else { return Err(untrusted()) };
        let lead = self.lead()?;
        lead.check_key(&key).await?;
        Box::pin(lead.certified(lead.store().escrow(&key, clock::now()))).await
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let Peer::User { name, .. } = Peer::of(&request) else { return Err(untrusted()) };
        let lead = self.lead()?;
        let renewed = Box::pin(lead.store().renew_user(&name, clock::now())).await;
        let (issued, is_new) = renewed.map_err(|error| lead.refuse(error))?;
        let certified = Box::pin(lead.certified(std::future::ready(Ok(issued)))).await?;
        Ok(answer(certified.into_inner(), is_new))
    }

    async fn create_user(
        &self,
        request: Request<v1::CreateUserRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let request = request.into_inner();
        let lead = self.lead()?;
        let key = convert::key(&request.public_key, "public_key", 3)?;
        let (store, role) = (lead.store(), request.role());
        Box::pin(lead.certified(store.create_user(&request.name, role, &key, clock::now()))).await
    }

    async fn revoke_user(
        &self,
        request: Request<v1::RevokeUserRequest>,
    ) -> Result<Response<v1::RevokeUserResponse>, Status> {
        let lead = self.lead()?;
        let name = request.into_inner().name;
        let revoked = Box::pin(lead.store().revoke_user(&name, clock::now())).await;
        revoked.map_err(|error| lead.refuse(error))?;
        Ok(lead.answer(v1::RevokeUserResponse {}))
    }

    async fn list_users(
        &self,
        _request: Request<v1::ListUsersRequest>,
    ) -> Result<Response<v1::ListUsersResponse>, Status> {
        let lead = self.lead()?;
        let directory = lead.current().await?;
        let users: Vec<_> = directory.borrow().users().cloned().collect();
        let ends = lead.store().certificate_ends(&users).await;
        let certificate_ends = ends.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::ListUsersResponse { users, certificate_ends }))
    }
}
