//! The users of the cluster, and their certificates.

use polis_proto::v1;
use polis_proto::v1::aaa_server::Aaa;
use tonic::{Request, Response, Status};

use super::served::Served;
use super::{PERSON, crowd};
use polis_wire::rpc::Role;
use polis_wire::rpc::testing::key;

#[tonic::async_trait]
impl Aaa for Served {
    async fn escrow(
        &self,
        _request: Request<v1::EscrowRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        self.note("Escrow");
        let owner = self.authority.user("owner", Role::Owner, PERSON).await;
        Ok(Response::new(v1::EscrowResponse {
            certificate: owner.certificate,
            ca_certificate: self.ca.clone(),
            authorities: Some(self.authority.authorities().await.to_message()),
        }))
    }

    async fn renew(
        &self,
        _request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let owner = self.authority.user("owner", Role::Owner, PERSON).await;
        let authorities = self.authority.authorities().await;
        Ok(Response::new(v1::EscrowResponse {
            certificate: owner.certificate,
            ca_certificate: authorities.signing.clone(),
            authorities: Some(authorities.to_message()),
        }))
    }

    async fn create_user(
        &self,
        request: Request<v1::CreateUserRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let v1::CreateUserRequest { name, public_key, .. } = request.into_inner();
        self.note(&format!("CreateUser {name}"));
        assert_eq!(public_key, key(PERSON).verifying_key().to_bytes(), "tests invite this key");
        let user = self.authority.user(&name, Role::Viewer, PERSON).await;
        Ok(Response::new(v1::EscrowResponse {
            certificate: user.certificate,
            ca_certificate: self.ca.clone(),
            authorities: Some(self.authority.authorities().await.to_message()),
        }))
    }

    async fn revoke_user(
        &self,
        request: Request<v1::RevokeUserRequest>,
    ) -> Result<Response<v1::RevokeUserResponse>, Status> {
        self.note(&format!("RevokeUser {}", request.into_inner().name));
        Ok(Response::new(v1::RevokeUserResponse {}))
    }

    async fn list_users(
        &self,
        _request: Request<v1::ListUsersRequest>,
    ) -> Result<Response<v1::ListUsersResponse>, Status> {
        let public_key = key(PERSON).verifying_key().to_bytes().to_vec();
        let role = v1::UserRole::Owner.into();
        let user = v1::User { name: "owner".to_owned(), role, public_key, revoked: false };
        let users = [vec![user], self.crowd(crowd::users)].concat();
        let certificate_ends = [("owner".to_owned(), 1_700_000_000)].into();
        Ok(Response::new(v1::ListUsersResponse { users, certificate_ends }))
    }
}
