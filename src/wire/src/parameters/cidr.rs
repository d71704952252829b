//! Addresses as parameters and DHCP write them: networks in CIDR, and MACs.
//!
//! Each has one spelling, so that two texts differ where the addresses do. `ipnet` would
//! replace a dozen lines of arithmetic, and the strict parser would stay.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An address and the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// The text is not an address of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a {0}")]
pub struct Invalid(&'static str);

impl Cidr {
    /// `None` if the prefix is longer than the address.
    #[must_use]
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= bits).then_some(Self { address, prefix })
    }

    /// The address, with its host bits.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The number of leading bits that name the network.
    #[must_use]
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// The network, without host bits.
    #[must_use]
    pub fn network(&self) -> Self {
        let address = match self.address {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
        };
        Self { address, ..*self }
    }

    /// Whether `address` is in the network.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        Self::new(address, self.prefix).is_some_and(|other| {
            other.address.is_ipv4() == self.address.is_ipv4() && other.network() == self.network()
        })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        const INVALID: Invalid = Invalid("network in CIDR");
        let (address, prefix) = text.split_once('/').ok_or(INVALID)?;
        // `u8::from_str` would take a sign and leading zeros.
        let plain = prefix == "0" || !prefix.starts_with(['0', '+']);
        let prefix = prefix.parse().ok().filter(|_| plain).ok_or(INVALID)?;
        let address = address.parse().ok().ok_or(INVALID)?;
        Self::new(address, prefix).ok_or(INVALID)
    }
}

/// The hardware address of an Ethernet interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Mac {
    type Err = Invalid;

    /// Lower case and colons only, so that one address has one spelling.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        const INVALID: Invalid = Invalid("MAC address");
        let mut mac = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut mac {
            let part = parts.next().ok_or(INVALID)?;
            let lower = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
            if part.len() != 2 || !part.chars().all(lower) {
                return Err(INVALID);
            }
            *byte = u8::from_str_radix(part, 16).ok().ok_or(INVALID)?;
        }
        parts.next().is_none().then_some(Self(mac)).ok_or(INVALID)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_network_loses_its_host_bits() {
        for (text, network) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3/32", "10.1.2.3/32"),
            ("10.1.2.3/0", "0.0.0.0/0"),
            ("fd00:1::2/64", "fd00:1::/64"),
            ("fd00::1/0", "::/0"),
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().network().to_string(), network);
        }
    }

    #[test]
    fn a_network_contains_its_own_family_only() {
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("192.0.2.1".parse().unwrap()));
        assert!(!all.contains("::1".parse().unwrap()));
    }

    #[test]
    fn odd_spellings_are_refused() {
        for bad in ["10.0.0.1", "10.0.0.1/33", "10.0.0.1/+8", "10.0.0.1/08", "::/129", "/8", "a/8"]
        {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
        for bad in ["", "52:54:00:00:00", "52:54:00:00:00:0A", "52:54:00:00:00:01:02", "5:+4::::"] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(bits in any::<u128>(), v4 in any::<bool>(), prefix in 0u8..=128, mac in any::<[u8; 6]>()) {
            let address = if v4 {
                IpAddr::V4(Ipv4Addr::from_bits((bits & 0xffff_ffff) as u32))
            } else {
                IpAddr::V6(Ipv6Addr::from_bits(bits))
            };
            if let Some(cidr) = Cidr::new(address, prefix) {
                prop_assert_eq!(cidr.to_string().parse(), Ok(cidr));
                prop_assert!(cidr.contains(address));
            }
            prop_assert_eq!(Mac(mac).to_string().parse(), Ok(Mac(mac)));
        }

        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>()) {
            let _parsed = text.parse::<Cidr>();
            let _parsed = text.parse::<Mac>();
        }
    }
}
