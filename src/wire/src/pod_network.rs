//! The network of pods: the ranges of all pods, of Services, and of the pods of one node.
//!
//! The leader gives out the prefixes of nodes, and the nodes build the mesh of them.
//!
//! `ipnet` keeps the bits behind the fixed ones, which a record here must not have: a type
//! that refuses them would wrap it, and be as long as this one.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// A network and the number of its fixed bits. Its other bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefix {
    network: Ipv4Addr,
    length: u8,
}

/// The addresses of all pods. Fixed: they are in the rules and routes of every node.
pub const PODS: Prefix = Prefix { network: Ipv4Addr::new(10, 192, 0, 0), length: 11 };

/// The addresses of Services.
pub const SERVICES: Prefix = Prefix { network: Ipv4Addr::new(10, 224, 0, 0), length: 16 };

/// Fixed bits of the prefix of a node: room for more pods than kubelet runs.
const NODE_LENGTH: u8 = 24;

/// The prefixes for nodes in [`PODS`], in order: 8192 of them.
pub fn node_prefixes() -> impl Iterator<Item = Prefix> {
    let count = 1_u32 << (NODE_LENGTH - PODS.length);
    (0..count).map(|index| {
        let network = PODS.network.to_bits() | (index << (32 - NODE_LENGTH));
        Prefix { network: Ipv4Addr::from_bits(network), length: NODE_LENGTH }
    })
}

/// Why a text is not a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not an address, a slash and a number.
    #[error("expected an IPv4 network such as 10.192.3.0/24")]
    Form,
    /// More than 32 bits.
    #[error("an IPv4 network has at most 32 fixed bits")]
    Length,
    /// An address in the network instead of the network.
    #[error("the address has bits behind the {0} fixed ones")]
    Host(u8),
}

impl Prefix {
    /// The network `network` with `length` fixed bits.
    ///
    /// # Errors
    ///
    /// [`Error::Length`], [`Error::Host`].
    pub fn new(network: Ipv4Addr, length: u8) -> Result<Self, Error> {
        if length > 32 {
            return Err(Error::Length);
        }
        let prefix = Self { network, length };
        if network.to_bits() & !prefix.mask() != 0 {
            return Err(Error::Host(length));
        }
        Ok(prefix)
    }

    /// Its first address.
    #[must_use]
    pub fn network(self) -> Ipv4Addr {
        self.network
    }

    /// How many of its bits are fixed.
    #[must_use]
    pub fn length(self) -> u8 {
        self.length
    }

    /// The address of the node itself in a network of pods: the one after the first.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network.to_bits() | 1)
    }

    /// Whether every address of `other` is in this one.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.length <= other.length
            && other.network.to_bits() & self.mask() == self.network.to_bits()
    }

    /// Whether `address` is in it.
    #[must_use]
    pub fn has(self, address: Ipv4Addr) -> bool {
        address.to_bits() & self.mask() == self.network.to_bits()
    }

    /// Whether the two have an address in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.length)).unwrap_or(0)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.length)
    }
}

impl FromStr for Prefix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (network, length) = text.split_once('/').ok_or(Error::Form)?;
        let form = |_| Error::Form;
        let digits = length.bytes().all(|byte| byte.is_ascii_digit());
        let length = length.parse().ok().filter(|_| digits).ok_or(Error::Form)?;
        Self::new(network.parse().map_err(form)?, length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prefix(text: &str) -> Prefix {
        text.parse().unwrap()
    }

    #[test]
    fn the_networks_are_well_formed_and_apart() {
        for network in [PODS, SERVICES] {
            assert_eq!(Prefix::new(network.network, network.length), Ok(network));
        }
        assert!(!PODS.overlaps(SERVICES));
        assert!(PODS.has(Ipv4Addr::new(10, 223, 255, 255)));
        assert!(!PODS.has(Ipv4Addr::new(10, 224, 0, 0)));
    }

    #[test]
    fn the_prefixes_of_nodes_fill_the_network_of_pods() {
        let all: Vec<_> = node_prefixes().collect();
        assert_eq!(all.len(), 8192);
        assert_eq!(all[0], prefix("10.192.0.0/24"));
        assert_eq!(all[8191], prefix("10.223.255.0/24"));
        assert!(all.iter().all(|one| PODS.contains(*one)));
        assert!(all.windows(2).all(|pair| pair[0] < pair[1] && !pair[0].overlaps(pair[1])));
    }

    #[test]
    fn a_network_holds_the_networks_of_its_nodes() {
        let (all, node) = (prefix("10.192.0.0/11"), prefix("10.223.255.0/24"));
        assert!(all.contains(node) && !node.contains(all) && node.overlaps(all));
        assert!(!all.overlaps(prefix("10.224.0.0/16")));
        assert!(prefix("0.0.0.0/0").contains(all));
        assert_eq!(node.gateway(), Ipv4Addr::new(10, 223, 255, 1));
    }

    #[test]
    fn a_text_that_is_no_network_is_rejected() {
        let table = [
            ("10.192.3.0", Error::Form),
            ("10.192.3.0/", Error::Form),
            ("10.192.3.0/+8", Error::Form),
            ("10.192.3/24", Error::Form),
            ("10.192.3.0/33", Error::Length),
            ("10.192.3.1/24", Error::Host(24)),
        ];
        for (text, error) in table {
            assert_eq!(text.parse::<Prefix>(), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_prefix_reads_back(bits in any::<u32>(), length in 0_u8..=32) {
            let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            let prefix = Prefix::new(Ipv4Addr::from_bits(bits & mask), length).unwrap();
            prop_assert_eq!(prefix.to_string().parse(), Ok(prefix));
            prop_assert!(prefix.contains(prefix));
        }
    }
}
