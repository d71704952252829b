//! The network of this machine.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// The network of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// Every Ethernet interface, in the kernel's order.
    pub interfaces: Vec<Interface>,
    /// The way out.
    pub gateway: Option<String>,
    /// DNS servers, best first.
    pub nameservers: Vec<String>,
    /// Time servers, by name or address.
    pub time_servers: Vec<String>,
    /// The reason why an address waits, and the next step.
    pub waiting: Option<String>,
    /// Why a part of the configuration has no link, and which addresses another machine has, too:
    /// a sentence for each.
    pub faults: Vec<String>,
    /// How it stands with the network that the cluster ordered last.
    pub change: Change,
}

/// The state of an ordered network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// `trying`, `confirmed`, `reverted` or `refused`; empty: no order.
    pub state: String,
    /// Why it is reverted or refused.
    pub cause: String,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Its name, for example `eth0`.
    pub name: String,
    /// Its hardware address.
    pub mac: String,
    /// The kernel's driver, if it has one.
    pub driver: Option<String>,
    /// Whether a cable is plugged in and the other end is there.
    pub carrier: bool,
    /// Whether a DHCP server is asked for an address.
    pub asking: bool,
    /// Its addresses.
    pub addresses: Vec<Address>,
    /// Bytes that came in, a second, the newest last.
    pub received: Vec<u64>,
    /// Bytes that went out, a second, the newest last.
    pub sent: Vec<u64>,
    /// Its kind; empty for a card that is in no bond.
    pub kind: String,
    /// The name of the bond that it is a member of.
    pub bond: Option<String>,
    /// Bytes in a packet; zero: not known.
    pub mtu: u32,
    /// Its configuration, where it has one.
    pub planned: Option<String>,
    /// Whether it is to have no address.
    pub silent: bool,
}

/// An address of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Address {
    /// With the length of the network's prefix: `10.0.2.15/24`.
    pub cidr: String,
    /// Where it is from: `DHCP`, `configuration`, `router`; empty if that is not known.
    pub source: String,
    /// Whether others reach the node by it.
    pub primary: bool,
    /// The rest of its lease, if its lease ends.
    #[serde(with = "time::optional")]
    pub lease: Option<Duration>,
}
