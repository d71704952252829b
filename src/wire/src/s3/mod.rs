//! A bucket of an S3-compatible store: lists the names of its objects, puts objects into it and
//! gets them from it.
//!
//! The leader of a cluster sends snapshots of etcd through it, and `polisctl` fetches them.
//!
//! ```text
//! Client --sign: AWS Signature Version 4--> HTTP/1.1 over TLS, one connection a request --> store
//!    ^                                                                                       |
//!    +------ xml: names and sizes, or the code of a refusal <------ bounded answer ----------+
//! ```
//!
//! The protocol is four headers and a chain of HMACs above the TLS and HTTP that the node has
//! already. The crates for it bring more than they save: `object_store` 61 further crates and a
//! second provider of cryptography, `rust-s3` 57, `aws-sdk-s3` 60, `aws-sigv4` 17 with a runtime
//! of their own, and `rusty-s3` 31, without the hash of the content in the signature, by which
//! the store checks what it received.
//!
//! Invariants:
//! - The secret key leaves this process only as a key of HMAC.
//! - An answer is read up to a bound, a redirect is never followed, and no request goes out
//!   without TLS.
//! - An object that is put is whole: the store compares the SHA-256 of all of it with the signed
//!   one before it keeps any of it.
//!
//! What this module does not do: delete or replace objects (a key without that right is enough),
//! try again (its caller does), or put an object in parts (a store takes 5 GB in one request,
//! twice the largest database of etcd).

mod body;
mod client;
mod credentials;
mod error;
mod sign;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod xml;

#[cfg(test)]
mod tests;

pub use self::client::{Client, Object};
pub use self::credentials::{Credentials, Invalid};
pub use self::error::Error;
pub use self::xml::Refusal;
use crate::endpoint::Endpoint;
use crate::outside::Server;

/// The port of HTTPS, which a request does not name.
pub const HTTPS: u16 = 443;
/// The region that stores of one region sign for.
pub const REGION: &str = "us-east-1";

/// A bucket, and the part of it that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The store.
    pub server: Server,
    /// Its name.
    pub name: String,
    /// The beginning of every key; empty, or ends with a slash.
    pub prefix: String,
    /// The region that requests are signed for.
    pub region: String,
}

impl Bucket {
    /// Its name: `s3+https://HOST:PORT/BUCKET[/PREFIX]`.
    #[must_use]
    pub fn url(&self) -> String {
        let Self { server: Server { endpoint, .. }, name, prefix, .. } = self;
        let url = format!("s3+https://{endpoint}/{name}/{prefix}");
        url.trim_end_matches('/').to_owned()
    }

    /// Whether the key for `other` is also for this bucket: both are the same at the same store.
    #[must_use]
    pub fn has_the_key_of(&self, other: &Self) -> bool {
        (&self.server.endpoint, &self.name) == (&other.server.endpoint, &other.name)
    }

    /// The store as a request names it.
    fn host(&self) -> String {
        let Endpoint { host, port } = &self.server.endpoint;
        match (*port, host.contains(':')) {
            (HTTPS, true) => format!("[{host}]"),
            (HTTPS, false) => host.clone(),
            _ => self.server.endpoint.to_string(),
        }
    }
}
