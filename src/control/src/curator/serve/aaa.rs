//! The service `polis.v1.Aaa`: users and their certificates.

use polis_proto::v1;
use polis_proto::v1::aaa_server::Aaa;
use tonic::{Request, Response, Status};

use super::{Handlers, untrusted};
use crate::curator::convert;
use polis_base::sys::clock;
use polis_wire::pki::Issued;
use polis_wire::rpc::Peer;

fn answer(issued: Issued) -> Response<v1::EscrowResponse> {
    Response::new(v1::EscrowResponse { certificate: issued.der, ca_certificate: issued.issuer_der })
}

#[tonic::async_trait]
impl Aaa for Handlers {
    async fn escrow(
        &self,
        request: Request<v1::EscrowRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let Peer::Key(key) = Peer::of(&request) else { return Err(untrusted()) };
        let lead = self.lead()?;
        let issued = Box::pin(lead.store().escrow(&key, clock::now())).await;
        issued.map(answer).map_err(|error| lead.refuse(error))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let Peer::User { name, .. } = Peer::of(&request) else { return Err(untrusted()) };
        let lead = self.lead()?;
        let issued = Box::pin(lead.store().renew_user(&name, clock::now())).await;
        issued.map(answer).map_err(|error| lead.refuse(error))
    }

    async fn create_user(
        &self,
        request: Request<v1::CreateUserRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let request = request.into_inner();
        let lead = self.lead()?;
        let key = convert::key(&request.public_key, "public_key", 3)?;
        let made =
            Box::pin(lead.store().create_user(&request.name, request.role(), &key, clock::now()));
        made.await.map(answer).map_err(|error| lead.refuse(error))
    }

    async fn revoke_user(
        &self,
        request: Request<v1::RevokeUserRequest>,
    ) -> Result<Response<v1::RevokeUserResponse>, Status> {
        let lead = self.lead()?;
        let name = request.into_inner().name;
        let revoked = Box::pin(lead.store().revoke_user(&name, clock::now())).await;
        revoked.map_err(|error| lead.refuse(error))?;
        Ok(Response::new(v1::RevokeUserResponse {}))
    }

    async fn list_users(
        &self,
        _request: Request<v1::ListUsersRequest>,
    ) -> Result<Response<v1::ListUsersResponse>, Status> {
        let directory = self.lead()?.current().await?;
        let users = directory.borrow().users().cloned().collect();
        Ok(Response::new(v1::ListUsersResponse { users }))
    }
}
