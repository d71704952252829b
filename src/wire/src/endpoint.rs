//! The address where a service of the cluster listens: a host and a port.
//!
//! Parameters, directories and operator input all use this one parser, so that an
//! address that works in one place works in all. A stricter reader, such as
//! `parameters`, checks the host name afterwards.
//!
//! Invariants:
//! - Parsing a printed endpoint gives the same endpoint.
//! - An IPv6 address without brackets has no port: its last group is never read as one.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Where curators listen.
pub const CURATOR_PORT: u16 = 7835;
/// Where every node listens to its operators.
pub const MANAGEMENT_PORT: u16 = 7839;
/// Where a Kubernetes controller lets users of Polis in.
pub const KUBERNETES_PORT: u16 = 6444;
/// Where every node shows its numbers.
pub const METRICS_PORT: u16 = 7840;

/// A host name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// A DNS name or an IP address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// The text has no host, or a port outside the allowed range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("allowed is HOST or HOST:PORT, with an IPv6 address and a port as [ADDRESS]:PORT")]
pub struct Invalid;

impl Endpoint {
    /// The same host at another port.
    #[must_use]
    pub fn at_port(&self, port: u16) -> Self {
        Self { host: self.host.clone(), port }
    }

    /// Reads `host`, `host:port`, `ip`, `ip:port`, `[ip]` or `[ip]:port`.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn parse(text: &str, port_default: u16) -> Result<Self, Invalid> {
        let bare_address = text.parse::<IpAddr>().is_ok();
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or(Invalid)?;
                host.parse::<std::net::Ipv6Addr>().map_err(|_not| Invalid)?;
                (
                    host,
                    if after.is_empty() {
                        None
                    } else {
                        Some(after.strip_prefix(':').ok_or(Invalid)?)
                    },
                )
            }
            None if bare_address => (text, None),
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let known = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
        if host.is_empty() || host.len() > 253 || !host.chars().all(known) {
            return Err(Invalid);
        }
        let port = match port {
            None => port_default,
            Some(digits) if digits.bytes().all(|c| c.is_ascii_digit()) => {
                digits.parse().map_err(|_not| Invalid)?
            }
            Some(_) => return Err(Invalid),
        };
        if port == 0 {
            return Err(Invalid);
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

/// A host, with or without brackets, and a port as [`Endpoint`] prints them.
#[must_use]
pub fn at(host: &str, port: u16) -> String {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    Endpoint { host, port }.to_string()
}

impl FromStr for Endpoint {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::parse(text, CURATOR_PORT)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_port_may_be_left_out() {
        for (text, read) in [
            ("node", "node:7835"),
            ("node:1", "node:1"),
            ("192.0.2.1", "192.0.2.1:7835"),
            ("192.0.2.1:17835", "192.0.2.1:17835"),
            ("fd00::1", "[fd00::1]:7835"),
            ("[fd00::1]", "[fd00::1]:7835"),
            ("[fd00::1]:2", "[fd00::1]:2"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), read);
        }
    }

    #[test]
    fn a_host_and_a_port_are_printed_as_they_are_read() {
        assert_eq!(at("node", 1), "node:1");
        assert_eq!([at("fd00::1", 2), at("[fd00::1]", 2)], ["[fd00::1]:2", "[fd00::1]:2"]);
    }

    #[test]
    fn what_is_no_host_and_port_is_refused() {
        for text in [
            "",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a:1:2",
            "[a]:1",
            "[10.0.0.1]:1",
            "[fd00::1",
            "[fd00::1]:",
            "[fd00::1]1",
            "a b",
            "https://a",
        ] {
            assert_eq!(text.parse::<Endpoint>(), Err(Invalid), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_host_reads_with_a_port_and_without(
            name in "[a-z][a-z0-9-]{0,8}(\\.[a-z0-9]{1,5}){0,2}",
            four in any::<std::net::Ipv4Addr>(),
            six in any::<std::net::Ipv6Addr>(),
            port in 1_u16..,
        ) {
            for host in [name, four.to_string(), six.to_string()] {
                let endpoint = Endpoint { host: host.clone(), port };
                prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
                let usual = Endpoint { host: host.clone(), port: CURATOR_PORT };
                prop_assert_eq!(host.parse(), Ok(usual.clone()));
                if host.contains(':') {
                    prop_assert_eq!(format!("[{host}]").parse(), Ok(usual));
                }
            }
        }

        #[test]
        fn what_is_read_reads_back(text in "[a-z0-9.:\\[\\]]{0,20}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
            }
        }
    }
}

#[cfg(test)]
#[path = "endpoint_fuzz_tests.rs"]
mod fuzz_tests;
