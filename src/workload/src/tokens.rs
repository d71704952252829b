//! Signs the tokens of service accounts for the API server of this node.
//!
//! ```text
//! API server --claims-----------> socket --> the key in etcd --> header and signature
//!            --which keys verify?-->     --> etcd            --> public keys
//! ```
//!
//! An API server reads key files at its start only; this way another key signs from one token to
//! the next, and the server itself never has it. Every call reads etcd, so all nodes change to
//! another key at the same moment.
//!
//! The protocol is Kubernetes' *External Service Account Token Signer* (KEP-740), version 1.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, UNIX_EPOCH};

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::parts::{Part, Parts};
use super::socket;
use polis_base::cause;
use polis_base::files::Sockets;
use polis_base::sys::clock;
use polis_control::consensus;
use polis_control::consensus::client::{Client, User};
use polis_proto::externaljwt::external_jwt_signer_server::{
    ExternalJwtSigner, ExternalJwtSignerServer,
};
use polis_proto::externaljwt::{
    FetchKeysRequest, FetchKeysResponse, Key, MetadataRequest, MetadataResponse, SignJwtRequest,
    SignJwtResponse, Timestamp,
};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::pki::{KeySet, ServiceAccounts};

/// The longest life that a caller may ask for. A rotation ends tokens before.
const LIFE_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Calls at once.
const CALLS_MAX: usize = 64;

/// The socket is for its group, which its directory gives it.
const MODE: u32 = 0o660;

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The socket cannot be listened on.
    #[error("cannot listen for the API server")]
    Listen(#[source] io::Error),
    /// The server ended.
    #[error("the signer of tokens ended")]
    Server(#[source] tonic::transport::Error),
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Configuration and inputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) sockets: Sockets,
    pub(super) consensus: watch::Receiver<consensus::Status>,
    pub(super) parts: Parts,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Error> {
        let voter = until(&mut self.consensus, "the etcd member", |status| {
            status.voter().map(|clients| clients.user(User::KubernetesPki))
        });
        let Some(client) = ctx.until_cancelled(voter).await.transpose()? else { return Ok(()) };
        // There are a key and the directory of the socket then.
        let ready = self.parts.ready(Part::Certificates);
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        let listener = blocking(move || listen(&self.sockets)).await?;
        ctx.healthy();
        Server::builder()
            .concurrency_limit_per_connection(CALLS_MAX)
            .add_service(ExternalJwtSignerServer::new(Signer(ServiceAccounts::new(client, ""))))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), ctx.cancelled())
            .await
            .map_err(Error::Server)
    }
}

/// The socket, which the API server alone reaches: its directory has that group. Blocks.
pub(super) fn listen(sockets: &Sockets) -> Result<UnixListener, Error> {
    let listener = socket::listen(sockets.client()).map_err(Error::Listen)?;
    let mode = std::fs::Permissions::from_mode(MODE);
    std::fs::set_permissions(sockets.client(), mode).map_err(Error::Listen)?;
    Ok(listener)
}

struct Signer(ServiceAccounts<Client>);

impl Signer {
    async fn keys(&self) -> Result<KeySet, Status> {
        match self.0.read().await {
            Ok(Some(keys)) => Ok(keys),
            Ok(None) => Err(Status::unavailable("the cluster has no key for tokens yet")),
            Err(error) => Err(Status::unavailable(cause::line(&error))),
        }
    }
}

#[tonic::async_trait]
impl ExternalJwtSigner for Signer {
    async fn sign(
        &self,
        request: Request<SignJwtRequest>,
    ) -> Result<Response<SignJwtResponse>, Status> {
        let SignJwtRequest { claims } = request.into_inner();
        let signed = self.keys().await?.sign(&claims);
        let signed = signed.map_err(|error| Status::unavailable(cause::line(&error)))?;
        let (header, signature) = (signed.header, signed.signature);
        Ok(Response::new(SignJwtResponse { header, signature }))
    }

    async fn fetch_keys(
        &self,
        _request: Request<FetchKeysRequest>,
    ) -> Result<Response<FetchKeysResponse>, Status> {
        let keys = self.keys().await?.verifying.into_iter();
        let keys = keys.map(|key| Key { key_id: key.id, key: key.der }).collect();
        let now = clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let read_at = Timestamp { seconds: now.as_secs().cast_signed(), nanos: 0 };
        Ok(Response::new(FetchKeysResponse {
            keys,
            data_timestamp: Some(read_at),
            refresh_hint_seconds: KeySet::REFRESH.as_secs().cast_signed(),
        }))
    }

    async fn metadata(
        &self,
        _request: Request<MetadataRequest>,
    ) -> Result<Response<MetadataResponse>, Status> {
        let max_token_expiration_seconds = LIFE_MAX.as_secs().cast_signed();
        Ok(Response::new(MetadataResponse { max_token_expiration_seconds }))
    }
}
