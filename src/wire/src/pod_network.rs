//! The network of pods: the ranges of all pods, of Services, and of the pods of one node.
//!
//! The leader gives out the prefixes of nodes, and the nodes build the mesh of them. The
//! configuration of the cluster has [`Networks`], which are fixed when it is founded;
//! `parameters` checks them.
//!
//! `ipnet` keeps the bits behind the fixed ones, which a record here must not have: a type
//! that refuses them would wrap it, and be as long as this one.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use polis_proto::v1;

/// A network and the number of its fixed bits. Its other bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefix {
    network: Ipv4Addr,
    length: u8,
}

/// The networks of a cluster. Fixed: they are in the rules and routes of every node, and in
/// certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Networks {
    /// The addresses of all pods.
    pub pods: Prefix,
    /// The addresses of Services.
    pub services: Prefix,
}

impl Default for Networks {
    fn default() -> Self {
        Self {
            pods: Prefix { network: Ipv4Addr::new(10, 192, 0, 0), length: 11 },
            services: Prefix { network: Ipv4Addr::new(10, 224, 0, 0), length: 16 },
        }
    }
}

/// Fixed bits of the prefix of a node: room for more pods than kubelet runs.
pub const NODE_LENGTH: u8 = 24;

impl Networks {
    /// The prefixes for nodes in the network of pods, in order; 8192 of them in the default one.
    pub fn node_prefixes(self) -> impl Iterator<Item = Prefix> {
        let count = 1_u32 << NODE_LENGTH.saturating_sub(self.pods.length).min(31);
        (0..count).map(move |index| {
            let network = self.pods.network.to_bits() | (index << (32 - NODE_LENGTH));
            Prefix { network: Ipv4Addr::from_bits(network), length: NODE_LENGTH }
        })
    }

    /// The address of the Service `kubernetes`, under which pods reach the API servers: the first
    /// that a Service can have.
    #[must_use]
    pub fn first_service(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.services.network.to_bits() | 1)
    }

    /// The one of the two networks that has `address`.
    #[must_use]
    pub fn with(self, address: Ipv4Addr) -> Option<Prefix> {
        [self.pods, self.services].into_iter().find(|network| network.has(address))
    }

    /// The message, with both.
    #[must_use]
    pub fn to_message(self) -> v1::ClusterNetworks {
        v1::ClusterNetworks {
            pod_network: self.pods.to_string(),
            service_network: self.services.to_string(),
        }
    }
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
    fn the_default_networks_are_well_formed_and_apart() {
        let networks = Networks::default();
        let Networks { pods, services } = networks;
        for network in [pods, services] {
            assert_eq!(Prefix::new(network.network, network.length), Ok(network));
        }
        assert!(!pods.overlaps(services));
        assert_eq!(networks.with(Ipv4Addr::new(10, 223, 255, 255)), Some(pods));
        assert_eq!(networks.with(Ipv4Addr::new(10, 224, 0, 0)), Some(services));
        assert_eq!(networks.with(Ipv4Addr::new(10, 225, 0, 0)), None);
        assert_eq!(networks.first_service(), Ipv4Addr::new(10, 224, 0, 1));
    }

    #[test]
    fn the_prefixes_of_nodes_fill_the_network_of_pods() {
        for (pods, count, last) in [
            ("10.192.0.0/11", 8192, "10.223.255.0/24"),
            ("172.16.0.0/12", 4096, "172.31.255.0/24"),
            ("192.168.6.0/23", 2, "192.168.7.0/24"),
        ] {
            let networks = Networks { pods: prefix(pods), ..Networks::default() };
            let all: Vec<_> = networks.node_prefixes().collect();
            assert_eq!(all.len(), count, "{pods}");
            assert_eq!((all[0].network(), all[0].length()), (networks.pods.network(), 24));
            assert_eq!(all[count - 1], prefix(last));
            assert!(all.iter().all(|one| networks.pods.contains(*one)));
            assert!(all.windows(2).all(|pair| pair[0] < pair[1] && !pair[0].overlaps(pair[1])));
        }
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
