//! The network of the node: gives it an address, and publishes that address.
//!
//! [`Service`] owns every Ethernet interface and the loopback interface of the machine; no other
//! service sets links, addresses or routes. `console`, `consensus` and the cluster manager read
//! its [`Status`]; [`names`] makes the node's own name resolve to the address.
//!
//! ```text
//! kernel --links, addresses, routes--> Observed --+
//! parameters ------------------------> Network ---+--> plan --> Wanted --> actions --> apply
//! DHCP ------------------------------> leases ----+      +----> Status (event value), resolv.conf
//! routers --addresses of the kernel--> advertised +
//! ```
//!
//! Invariants:
//! - Every wake reads all, plans all and applies the difference, so a lost
//!   message, a pulled cable and a late interface are all the same case.
//! - `Status::primary` is an address that the kernel has on an interface.
//! - An answer of a DHCP server is bounded and checked before it is believed.
//!
//! What this module does not do: filter packets, ask DHCPv6, or make addresses of IPv6 beyond
//! those of the parameters: the kernel accepts router advertisements by itself.

mod advertised;
mod apply;
mod dhcp;
mod holding;
mod lease;
pub mod names;
mod observe;
mod plan;
mod primary;
mod service;
#[cfg(test)]
mod service_tests;

use std::net::IpAddr;
use std::time::Duration;

use crate::parameters::{Cidr, Mac};

pub use self::observe::Interfaces;
pub use self::service::{Config, Error, Service};

/// The published status of the network; an event value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The address of the node; `None` while it has no address.
    pub primary: Option<IpAddr>,
    /// The way out.
    pub gateway: Option<IpAddr>,
    /// DNS servers, best first.
    pub nameservers: Vec<IpAddr>,
    /// Time servers, by name or address.
    pub ntp_servers: Vec<String>,
    /// Every Ethernet interface, in the kernel's order.
    pub interfaces: Vec<Interface>,
    /// The reason why an address waits, and the next step.
    pub waiting: Option<String>,
}

impl Status {
    /// All addresses of the node, the primary first.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let all = self.interfaces.iter().flat_map(|interface| &interface.addresses);
        let others = all.map(Cidr::address).filter(|address| Some(*address) != self.primary);
        self.primary.into_iter().chain(others).collect()
    }
}

/// One Ethernet interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its number in the kernel.
    pub index: u32,
    /// Its name in the kernel.
    pub name: String,
    /// Its hardware address.
    pub mac: Mac,
    /// Whether a cable is plugged in and the other end is there.
    pub carrier: bool,
    /// The kernel's driver, if it has one.
    pub driver: Option<String>,
    /// Its addresses, IPv6 link-local ones left out.
    pub addresses: Vec<Cidr>,
    /// Whether a DHCP server is asked for an address.
    pub asking: bool,
    /// The lease from a DHCP server.
    pub leased: Option<Leased>,
}

/// An address that a DHCP server gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    /// The address.
    pub address: Cidr,
    /// When it must be given back, in time since the kernel started; `None`: never.
    pub ends: Option<Duration>,
}
