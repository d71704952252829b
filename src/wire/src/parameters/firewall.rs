//! The part of the nodes' firewall that the owner of a cluster configures: the addresses of
//! callers that are not nodes, and ports for pods in the network of their node.
//!
//! All other rules follow from the roles of a node and from the members of the cluster.
//!
//! Invariants:
//! - A printed port range parses to the same one, and has one spelling.
//! - No range has a port that a node itself uses: its callers follow from the rules.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use polis_proto::v1;

use super::cidr::Cidr;

/// Ports on which a node itself listens, on any of its addresses; `docs/network.md` lists them.
const OWN: [RangeInclusive<u16>; 5] =
    [123..=123, 6443..=6445, 7834..=7843, 10248..=10250, 10256..=10259];

/// The allowed callers of the nodes of a cluster. `Default` is a new cluster's: callers have any
/// address, and there are no more ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firewall {
    /// Networks of callers that are not nodes; empty: any address.
    pub sources: Vec<Cidr>,
    /// Ports that every node accepts from any address.
    pub ports: Vec<Ports>,
}

impl Firewall {
    /// The message, with one spelling for each value.
    #[must_use]
    pub fn to_message(&self) -> v1::FirewallConfiguration {
        v1::FirewallConfiguration {
            sources: self.sources.iter().map(ToString::to_string).collect(),
            ports: self.ports.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// A port, or several in a row. Not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ports {
    /// The protocol.
    pub protocol: Protocol,
    /// The first port.
    pub first: u16,
    /// The last one, which may be the first.
    pub last: u16,
}

impl Ports {
    /// One port of TCP.
    #[must_use]
    pub const fn tcp(port: u16) -> Self {
        Self { protocol: Protocol::Tcp, first: port, last: port }
    }

    /// One port of UDP.
    #[must_use]
    pub const fn udp(port: u16) -> Self {
        Self { protocol: Protocol::Udp, first: port, last: port }
    }

    /// The range without its protocol, as `nft` writes it: `443` or `5000-5100`.
    #[must_use]
    pub fn numbers(&self) -> String {
        match (self.first, self.last) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        }
    }

    /// Whether a port is in the range on which a node itself listens.
    #[must_use]
    pub fn is_of_node(&self) -> bool {
        OWN.iter().any(|own| self.first <= *own.end() && *own.start() <= self.last)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.protocol, self.numbers())
    }
}

/// The text is not a port range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a port as tcp/443, or ports as udp/5000-5100")]
pub struct Invalid;

impl FromStr for Ports {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (protocol, numbers) = text.split_once('/').ok_or(Invalid)?;
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return Err(Invalid),
        };
        // `u16::from_str` would take a sign and leading zeros.
        let port = |text: &str| {
            let plain = !text.starts_with(['0', '+']);
            text.parse::<u16>().ok().filter(|_| plain).ok_or(Invalid)
        };
        let ports = match numbers.split_once('-') {
            None => Self { protocol, first: port(numbers)?, last: port(numbers)? },
            Some((first, last)) => Self { protocol, first: port(first)?, last: port(last)? },
        };
        // `443-443` would be a second spelling of `443`.
        let single = ports.first == ports.last;
        let fits = ports.first <= ports.last && (!single || !numbers.contains('-'));
        fits.then_some(ports).ok_or(Invalid)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_port_has_one_spelling() {
        for good in ["tcp/443", "udp/1", "tcp/5000-5100", "udp/1-65535"] {
            assert_eq!(good.parse::<Ports>().unwrap().to_string(), good);
        }
        for bad in [
            "443",
            "tcp/",
            "tcp/0",
            "tcp/065",
            "tcp/+1",
            "tcp/65536",
            "tcp/5-4",
            "tcp/5-5",
            "tcp/5-",
            "tcp/-5",
            "sctp/5",
            "TCP/5",
            "tcp/5/6",
            " tcp/5",
        ] {
            assert!(bad.parse::<Ports>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_range_with_a_port_of_the_node_is_found() {
        for own in ["tcp/7839", "udp/123", "tcp/1-65535", "tcp/7000-7834", "tcp/10259-10300"] {
            assert!(own.parse::<Ports>().unwrap().is_of_node(), "{own}");
        }
        for free in ["tcp/443", "tcp/7844-10247", "udp/124"] {
            assert!(!free.parse::<Ports>().unwrap().is_of_node(), "{free}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(tcp|udp|)/?[0-9+-]{0,12}") {
            if let Ok(ports) = text.parse::<Ports>() {
                prop_assert_eq!(ports.to_string(), text);
            }
        }
    }
}
