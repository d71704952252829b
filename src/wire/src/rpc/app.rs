//! The services of a server, and the protocol that each kind speaks.

use std::fmt;
use std::sync::Arc;

use tonic::service::Routes;

use super::gateway::Gateway;

/// Makes a page of text.
pub type Page = Arc<dyn Fn() -> String + Send + Sync>;

/// The services of a server.
#[derive(Clone)]
pub enum App {
    /// gRPC, over HTTP/2.
    Grpc(Routes),
    /// One page of text, over HTTP/1.1: metrics.
    Page(Page),
    /// Every path, over HTTP/1.1 with upgrades: forwarded to another server.
    Gateway(Arc<dyn Gateway>),
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grpc(_) => "Grpc",
            Self::Page(_) => "Page",
            Self::Gateway(_) => "Gateway",
        })
    }
}

impl App {
    /// The protocol's name in a TLS handshake.
    pub(super) fn alpn(&self) -> &'static [u8] {
        match self {
            Self::Grpc(_) => b"h2",
            Self::Page(_) | Self::Gateway(_) => b"http/1.1",
        }
    }

    /// Whether a connection on which the handshake agreed on this protocol can be served.
    /// Clients of a gateway that upgrade may name none, which means HTTP/1.1.
    pub(super) fn speaks(&self, protocol: Option<&[u8]>) -> bool {
        match (self, protocol) {
            (Self::Gateway(_), None) => true,
            (_, protocol) => protocol == Some(self.alpn()),
        }
    }
}
