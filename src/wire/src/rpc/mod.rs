//! The RPC layer: a server of gRPC, metrics and a gateway for authenticated peers, and a client
//! that finds the leader.
//!
//! The one server layer of the node: `curator` (7835), `management` (7839, 7840) and
//! `workload::access` (6444) hand it their services as [`App`]; no other part listens. The client
//! half ([`client`]) is what `polisctl` and the node itself call curators with.
//!
//! ```text
//! socket --> slot --> TLS 1.3 --> Caller --> HTTP/2 --> each call:
//!   |         |         |                                 path known?       access
//!   |         |         +-- verifier: cluster CA,         peer in access_list? access_list
//!   |         |             self-signed, none             rule lets it in?  access
//!   |         +-- limits: how many, from where            tokens, size, deadline
//!   +-- swapped at run time: certificate, roots           the service
//! ```
//!
//! Invariants:
//! - Only the server layer authorizes calls; a service finds the [`Peer`] in the
//!   extensions of each request.
//! - An RPC whose descriptor has no access option rejects every call.
//! - A peer that lost its access is rejected at its next call, and its open streams are
//!   cut at once.
//! - A caller without a certificate of the cluster can neither fill the memory nor take
//!   the connections of callers with one.
//!
//! What this module does not do: keep the records of members (`curator`), or issue
//! certificates (`pki`).

pub mod access;
pub mod access_list;
mod app;
mod body;
mod call;
pub mod client;
mod connection;
pub mod gateway;
pub mod limits;
pub mod metrics;
pub mod peer;
mod server;
mod shared;
mod tls;

#[cfg(test)]
mod access_tests;
#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod secrets_tests;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;

use tonic::metadata::{MetadataMap, MetadataValue};

use crate::identity::NodeId;

pub use self::access::Table;
pub use self::access_list::{AccessList, Listed, Serials, Users, is_removal, users};
pub use self::app::{App, Page};
pub use self::connection::KeepAlive;
pub use self::gateway::{Exchange, Gateway, Tunnel};
pub use self::limits::Limits;
pub use self::metrics::Metrics;
pub use self::peer::{Caller, Peer, Role};
pub use self::server::{Config, Error, Listen, Server};
pub use self::shared::Refused;
pub use self::tls::{Credentials, provider};

/// Metadata of a rejection: the keyword of its cause.
pub const REASON: &str = "polis-reason";

/// Metadata of a refusal by a curator that does not lead: such a call had no effect, so
/// the caller may repeat it on another curator.
const NOT_LEADER: &str = "polis-not-leader";

/// Metadata of the same refusal: the node that leads, if that is known.
pub const LEADER_ID: &str = "polis-leader-id";

/// Metadata of the same refusal: where it is, address and port.
pub const LEADER_ADDRESS: &str = "polis-leader-address";

/// Metadata of an answer to the transfer of a bundle: the byte of the bundle at which it
/// continues. Without it, the transfer begins anew.
const RESUME_AT: &str = "polis-resume-at";

/// Has an answer say that a transfer continues at a byte; zero says nothing.
pub fn resume_at<T>(mut answer: tonic::Response<T>, at: u64) -> tonic::Response<T> {
    if at > 0 {
        answer.metadata_mut().insert(RESUME_AT, MetadataValue::from(at));
    }
    answer
}

/// The byte at which a transfer continues, by the metadata of the answer; zero: it begins anew.
#[must_use]
pub fn resumes_at(answer: &MetadataMap) -> u64 {
    let value = answer.get(RESUME_AT).and_then(|value| value.to_str().ok());
    value.and_then(|value| value.parse().ok()).unwrap_or_default()
}

/// The refusal of a curator that does not lead; it names the leader if that is known.
#[must_use]
pub fn not_leader(leader: Option<(NodeId, Option<SocketAddr>)>) -> tonic::Status {
    let text = match leader {
        Some((id, _)) => format!("this curator does not lead; {id} does"),
        None => "this curator does not lead, and does not know the leader".to_owned(),
    };
    let mut status = tonic::Status::unavailable(text);
    let metadata = status.metadata_mut();
    metadata.insert(NOT_LEADER, MetadataValue::from_static("1"));
    let address = leader.and_then(|(_, address)| address).map(|address| address.to_string());
    let id = leader.map(|(id, _)| id.to_string());
    for (key, value) in [(LEADER_ID, id), (LEADER_ADDRESS, address)] {
        if let Some(value) = value.and_then(|value| value.parse().ok()) {
            metadata.insert(key, value);
        }
    }
    status
}

/// Whether a refusal is one of [`not_leader`].
#[must_use]
pub fn is_not_leader(status: &tonic::Status) -> bool {
    status.metadata().contains_key(NOT_LEADER)
}
