//! The metadata services of clouds: asks for the user data of this machine.
//!
//! ```text
//! platform --> request --HTTP--> 200: user data, decoded
//!                            +-> 404, or an empty body: none
//!                            +-> anything else: trouble, and the caller asks again
//! ```
//!
//! | cloud | request to `169.254.169.254`, port 80 | encoding |
//! |---|---|---|
//! | Amazon EC2 | `PUT /latest/api/token`, then `GET /latest/user-data` with the token (IMDSv2) | none |
//! | Google Compute Engine | `GET /computeMetadata/v1/instance/attributes/user-data`, `Metadata-Flavor: Google` | none |
//! | Microsoft Azure | `GET /metadata/instance/compute/userData`, `Metadata: true` | base64 |
//! | Oracle Cloud | `GET /opc/v2/instance/metadata/user_data`, `Authorization: Bearer Oracle` | base64 |
//! | Hetzner Cloud | `GET /hetzner/v1/userdata` | none |
//! | `DigitalOcean` | `GET /metadata/v1/user-data` | none |
//! | Vultr | `GET /latest/user-data` | none |
//! | `OpenStack` | `GET /openstack/latest/user_data` | none |
//!
//! EC2, Google Compute Engine and Oracle Cloud answer at an address of IPv6, too, for machines
//! without IPv4.
//!
//! Invariants:
//! - One question takes [`ASK_MAX`] at most, and reads a bounded number of bytes.
//! - Nothing is decided by an answer of another status than 200 and 404.
//!
//! What this module does not do: choose the platform (`dmi`), ask again (`service`), or understand
//! the user data (`polis_wire::parameters`).

mod exchange;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use base64ct::{Base64, Encoding as _};
use http::{HeaderValue, Method, StatusCode};
use hyper::body::Bytes;
use polis_wire::parameters::{BYTES_MAX, Platform};
use tokio::net::TcpStream;
use tokio::time::timeout;

use self::exchange::Ask;

/// Where every one of these services answers. The address is valid on one segment only, and no
/// router passes it on.
pub const ADDRESS: SocketAddr =
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(169, 254, 169, 254), 80));

/// Where the service of this platform answers by IPv6, if it does.
#[must_use]
pub fn address_v6(platform: Platform) -> Option<SocketAddr> {
    let address = match platform {
        Platform::Ec2 => Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
        Platform::Gce => Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
        Platform::Oracle => Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
        Platform::Azure
        | Platform::Hetzner
        | Platform::DigitalOcean
        | Platform::Vultr
        | Platform::OpenStack => return None,
    };
    Some(SocketAddr::new(address.into(), 80))
}

/// How long a connection may take. The service is one hop away.
const CONNECT_MAX: Duration = Duration::from_secs(4);

/// How long a question may take, with all of its requests.
const ASK_MAX: Duration = Duration::from_secs(10);

/// Bytes of a session token of EC2; real ones have 56.
const TOKEN_MAX: usize = 1024;

/// The bound of user data that is not encoded.
const PLAIN_MAX: usize = 64 << 10;
const _: () = assert!(PLAIN_MAX as u64 == BYTES_MAX);

/// The bound of user data in base64, with room for line feeds.
const BASE64_MAX: usize = 2 * PLAIN_MAX;

/// How a service encodes the user data that it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Plain,
    Base64,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    /// The kernel has no way there yet.
    #[error("no route leads to it; an address by DHCP gives one")]
    NoRoute,
    /// Nothing answers there, or it refuses.
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// The time is over.
    #[error("it does not answer within {} seconds", ASK_MAX.as_secs())]
    Silent,
    /// No whole answer.
    #[error(transparent)]
    Http(#[from] exchange::Error),
    /// Another status than 200 and 404.
    #[error("it answers {status} to {path}")]
    Status {
        /// The status.
        status: StatusCode,
        /// The request.
        path: &'static str,
    },
    /// The session token of EC2 cannot be sent back.
    #[error("its session token is not text")]
    Token,
    /// User data that the cloud should have encoded.
    #[error("its user data is not base64")]
    NotBase64,
}

impl Trouble {
    /// Whether there is user data with more bytes than node parameters may have: asking again
    /// gives the same.
    pub(super) fn is_too_large(&self) -> bool {
        matches!(self, Self::Http(exchange::Error::TooLarge))
    }
}

/// Asks the metadata service of `platform` at `address` for user data; `None`: it has none.
pub(super) async fn ask(
    platform: Platform,
    address: SocketAddr,
) -> Result<Option<Vec<u8>>, Trouble> {
    timeout(ASK_MAX, user_data(platform, address)).await.map_err(|_elapsed| Trouble::Silent)?
}

async fn user_data(platform: Platform, address: SocketAddr) -> Result<Option<Vec<u8>>, Trouble> {
    let token = match platform {
        Platform::Ec2 => Some(token(address).await?),
        _ => None,
    };
    let (ask, encoding) = question(platform, token);
    let (status, body) = exchange(address, &ask).await?;
    match status {
        StatusCode::OK => content(&body, encoding),
        StatusCode::NOT_FOUND => Ok(None),
        status => Err(Trouble::Status { status, path: ask.path }),
    }
}

/// The request for user data, and how the answer is encoded.
fn question(platform: Platform, token: Option<HeaderValue>) -> (Ask, Encoding) {
    let word = HeaderValue::from_static;
    let (path, header, encoding) = match platform {
        Platform::Ec2 | Platform::Vultr => ("/latest/user-data", None, Encoding::Plain),
        Platform::Gce => (
            "/computeMetadata/v1/instance/attributes/user-data",
            Some(("metadata-flavor", word("Google"))),
            Encoding::Plain,
        ),
        Platform::Azure => (
            "/metadata/instance/compute/userData?api-version=2021-01-01&format=text",
            Some(("metadata", word("true"))),
            Encoding::Base64,
        ),
        Platform::Oracle => (
            "/opc/v2/instance/metadata/user_data",
            Some(("authorization", word("Bearer Oracle"))),
            Encoding::Base64,
        ),
        Platform::Hetzner => ("/hetzner/v1/userdata", None, Encoding::Plain),
        Platform::DigitalOcean => ("/metadata/v1/user-data", None, Encoding::Plain),
        Platform::OpenStack => ("/openstack/latest/user_data", None, Encoding::Plain),
    };
    let token = token.map(|token| ("x-aws-ec2-metadata-token", token));
    let body_max = match encoding {
        Encoding::Plain => PLAIN_MAX,
        Encoding::Base64 => BASE64_MAX,
    };
    let headers = header.into_iter().chain(token).collect();
    (Ask { method: Method::GET, path, headers, body_max }, encoding)
}

/// A session of EC2, without which it gives nothing (IMDSv2).
async fn token(address: SocketAddr) -> Result<HeaderValue, Trouble> {
    let ask = Ask {
        method: Method::PUT,
        path: "/latest/api/token",
        // A minute: it is used once.
        headers: vec![("x-aws-ec2-metadata-token-ttl-seconds", HeaderValue::from_static("60"))],
        body_max: TOKEN_MAX,
    };
    match exchange(address, &ask).await {
        Ok((StatusCode::OK, token)) => token_of(&token),
        Ok((status, _body)) => Err(Trouble::Status { status, path: ask.path }),
        // A token is not user data.
        Err(Trouble::Http(exchange::Error::TooLarge)) => Err(Trouble::Token),
        Err(trouble) => Err(trouble),
    }
}

fn token_of(body: &[u8]) -> Result<HeaderValue, Trouble> {
    let token = body.trim_ascii();
    let mut value = HeaderValue::from_bytes(token).map_err(|_invalid| Trouble::Token)?;
    if token.is_empty() {
        return Err(Trouble::Token);
    }
    value.set_sensitive(true);
    Ok(value)
}

/// The user data in a body; `None` for an empty one.
fn content(body: &[u8], encoding: Encoding) -> Result<Option<Vec<u8>>, Trouble> {
    let bytes = match encoding {
        Encoding::Plain => body.to_vec(),
        Encoding::Base64 => {
            let text: Vec<u8> =
                body.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
            let text = std::str::from_utf8(&text).map_err(|_invalid| Trouble::NotBase64)?;
            Base64::decode_vec(text).map_err(|_invalid| Trouble::NotBase64)?
        }
    };
    if bytes.len() > PLAIN_MAX {
        return Err(exchange::Error::TooLarge.into());
    }
    Ok((!bytes.is_empty()).then_some(bytes))
}

async fn exchange(address: SocketAddr, ask: &Ask) -> Result<(StatusCode, Bytes), Trouble> {
    let stream = match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if is_no_route(&error) => return Err(Trouble::NoRoute),
        Ok(Err(error)) => return Err(Trouble::Connect(error)),
        Err(_elapsed) => return Err(Trouble::Connect(io::ErrorKind::TimedOut.into())),
    };
    // Without the port, as it is the usual one: some services compare the name.
    let host = match address {
        SocketAddr::V4(four) => four.ip().to_string(),
        SocketAddr::V6(six) => format!("[{}]", six.ip()),
    };
    Ok(exchange::exchange(stream, &host, ask).await?)
}

/// Whether the kernel knows no way: no address yet, or none that leads there.
fn is_no_route(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, NetworkDown, NetworkUnreachable};
    matches!(error.kind(), NetworkUnreachable | NetworkDown | AddrNotAvailable)
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
pub(super) mod tests;
