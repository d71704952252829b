//! The gateway: requests of users over HTTP/1.1 that a service forwards to another server,
//! with endless answers and upgrades.
//!
//! ```text
//! caller --request--> admission --> Exchange::call --> the other server
//!        <--answer, cut when the caller loses its access--
//!
//! 101 with a Tunnel in it: from then on bytes in both directions, cut in the same way
//! ```
//!
//! Invariants:
//! - A [`Gateway`] receives requests of users alone ([`Table::users`]).
//! - Everything that a connection has opened at the other server ends with it.
//!
//! What this module does not do: connect to the other server (the [`Gateway`] does).
//!
//! [`Table::users`]: super::Table::users

use std::fmt;
use std::sync::Arc;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tonic::Status;
use tonic::body::Body;
use tracing::trace;

use super::body::{End, Open};
use super::peer::Caller;

/// Bytes of a tunnel on their way, in each direction.
const TUNNEL_BUFFER: usize = 32 << 10;

/// Forwards the requests of users to another server.
pub trait Gateway: fmt::Debug + Send + Sync {
    /// The exchange of a new connection of this caller, a user.
    fn open(&self, caller: &Caller) -> Arc<dyn Exchange>;

    /// The answer to a request that the server layer rejects.
    fn refusal(&self, status: &Status) -> Response<Body>;
}

/// The requests of one connection, which come one after the other. The connections that it
/// opens have to end when it is dropped.
#[tonic::async_trait]
pub trait Exchange: fmt::Debug + Send + Sync {
    /// Answers one request. An answer 101 has a [`Tunnel`] in its extensions.
    async fn call(&self, request: Request<Incoming>) -> Response<Body>;
}

/// Both ends of an upgraded connection.
#[derive(Clone, Debug)]
pub struct Tunnel {
    /// The caller.
    pub caller: OnUpgrade,
    /// The other server.
    pub server: OnUpgrade,
}

/// A tunnel that is about to be open, counted as a call under way.
#[derive(Debug)]
pub(super) struct Upgraded {
    pub(super) tunnel: Tunnel,
    pub(super) open: Open,
}

impl Upgraded {
    /// Passes bytes on until one end closes, or the caller loses its access.
    pub(super) async fn run(self, end: &End) -> Result<(), hyper::Error> {
        let Self { tunnel, open } = self;
        let passed = async {
            let (caller, server) = tokio::try_join!(tunnel.caller, tunnel.server)?;
            let (mut caller, mut server) = (TokioIo::new(caller), TokioIo::new(server));
            let copied = copy_bidirectional_with_sizes(
                &mut caller,
                &mut server,
                TUNNEL_BUFFER,
                TUNNEL_BUFFER,
            );
            match copied.await {
                Ok((sent, received)) => trace!(sent, received, "a tunnel has ended"),
                Err(error) => trace!("a tunnel broke: {error}"),
            }
            Ok(())
        };
        let ended = tokio::select! {
            // Cancel-safe, both: the connections end with the tunnel.
            ended = passed => ended,
            () = end.cancelled() => Ok(()),
        };
        drop(open);
        ended
    }
}
