//! The server layer on loopback, with real certificates: which callers are accepted,
//! and what happens to those that lose their access.

mod callers;
mod leader;
mod serving;
mod trust;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use polis_proto::v1::curator_local_server::{CuratorLocal, CuratorLocalServer};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::WatchStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::testing::{Authority, Running, node_id};
use super::{App, Credentials, Limits, Peer};

/// Answers with the leader, and with the caller's name.
#[derive(Clone)]
struct Local {
    this: u8,
    /// Seed and address of the leader.
    leader: Arc<watch::Sender<Option<(u8, std::net::SocketAddr)>>>,
    asked: Arc<AtomicUsize>,
    /// Callers that searched for the leader here.
    searched: Arc<AtomicUsize>,
    /// Waits so long before it answers.
    slow: Duration,
}

type Leaders = Pin<Box<dyn Stream<Item = Result<v1::GetCurrentLeaderResponse, Status>> + Send>>;

#[tonic::async_trait]
impl CuratorLocal for Local {
    type GetCurrentLeaderStream = Leaders;

    async fn get_current_leader(
        &self,
        _request: Request<v1::GetCurrentLeaderRequest>,
    ) -> Result<Response<Leaders>, Status> {
        self.searched.fetch_add(1, Ordering::Relaxed);
        let this_id = node_id(self.this).to_string();
        let reported = WatchStream::new(self.leader.subscribe()).map(move |leader| {
            let this_id = this_id.clone();
            Ok(match leader {
                Some((seed, address)) => v1::GetCurrentLeaderResponse {
                    leader_id: node_id(seed).to_string(),
                    leader_address: address.ip().to_string(),
                    leader_port: address.port().into(),
                    this_id,
                    ..Default::default()
                },
                None => v1::GetCurrentLeaderResponse { this_id, ..Default::default() },
            })
        });
        Ok(Response::new(Box::pin(reported)))
    }

    async fn get_ca_certificate(
        &self,
        request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        sleep(self.slow).await;
        let ca_certificate = Peer::of(&request).to_string().into_bytes();
        Ok(Response::new(v1::GetCaCertificateResponse { ca_certificate }))
    }
}

fn local(this: u8) -> Local {
    let (leader, asked, searched) = Default::default();
    Local { this, leader, asked, searched, slow: Duration::ZERO }
}

fn app(local: &Local) -> App {
    App::Grpc(Routes::new(CuratorLocalServer::new(local.clone())))
}

async fn server(authority: &Authority) -> Running {
    Running::start(authority, authority.curator(1).await, app(&local(1)), Limits::default()).await
}

/// The caller as the server identifies it.
async fn who(
    running: &Running,
    authority: &Authority,
    credentials: Option<&Credentials>,
) -> Result<String, Status> {
    let connection = running.dial(authority, credentials).await;
    let connection = connection.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut client = CuratorLocalClient::new(connection.channel);
    let asked = client.get_ca_certificate(v1::GetCaCertificateRequest {}).await?;
    Ok(String::from_utf8(asked.into_inner().ca_certificate).unwrap())
}
