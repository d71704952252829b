//! One Ethernet segment for several machines: a learning switch, and a gateway that
//! answers DHCP and forwards the host's ports. Needs no rights on the host.
//!
//! ```text
//!  machine 0 --+                          each port: a unix socket on which the
//!  machine 1 --+-- switch -- gateway      switch listens; a frame is its length
//!  machine 2 --+   (here)    (a QEMU      in four bytes, big-endian, and itself
//!                             without a guest)
//! ```
//!
//! The gateway is QEMU's own NAT. It treats every IP packet that it sees as its own and
//! resets unknown connections, even between other machines; so the switch never floods
//! a unicast frame to it.
//!
//! A segment can have IPv6 only: then the switch has a router, and the gateway stays for the
//! host's ports alone (`ipv6`).
//!
//! A port can be a trunk, as one to a machine with VLANs: its frames have the tag of one VLAN, and
//! the switch takes it off and puts it on; what has no tag or another one is lost.
//!
//! Links are cut, slowed and healed here, pair by pair, while the machines keep their
//! carrier: like a broken switch between two racks. A pulled cable is `set_link` of the
//! machine's own protocol. The frames that the switch delivers can be captured here, too.
//!
//! Invariants:
//! - A port that does not drain loses frames, as on a real switch, and does not slow
//!   other ports.
//! - A machine that comes back to its port takes it over; the old line is closed.

mod links;
mod switch;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::switch::Switch;
use crate::gateway::Gateway;
use crate::ipv6;
use crate::lease;
use crate::machine::Error;
use crate::plug::{Plug, Port};

pub use self::links::Links;

/// A running segment. Ends when dropped.
#[derive(Debug)]
pub struct Segment {
    switch: Switch,
    gateway: Gateway,
    dir: PathBuf,
    /// The address that the gateway gives to each machine.
    addresses: Vec<Ipv4Addr>,
}

impl Segment {
    /// Starts a segment for `machines` machines. The gateway's log goes to `dir`.
    ///
    /// # Errors
    /// When QEMU is missing, or a socket cannot be made.
    pub fn start(machines: u8, dir: &Path) -> Result<Self, Error> {
        let switch = Switch::start(machines).map_err(|source| Error::Host {
            doing: "make the sockets of a network".to_owned(),
            source,
        })?;
        let gateway = Gateway::start(&switch.socket(Port::Gateway), dir)?;
        let mut segment = Self { switch, gateway, dir: dir.to_owned(), addresses: Vec::new() };
        for machine in 0..machines {
            let mac = segment.plug(machine).hardware_address();
            let offered = segment.offered(machine, mac)?;
            segment.addresses.push(offered);
        }
        Ok(segment)
    }

    fn offered(&self, machine: u8, mac: [u8; 6]) -> Result<Ipv4Addr, Error> {
        lease::offered(&self.plug(machine).socket, mac).map_err(|source| Error::Host {
            doing: format!("get an address for machine {machine}"),
            source,
        })
    }

    /// Gives each machine another address than at the start, as a DHCP server that
    /// has lost its leases may. The machines are off; no port is forwarded
    /// afterwards.
    ///
    /// # Errors
    /// When QEMU is missing, or the gateway has too few addresses for so many machines.
    pub fn renumber(&mut self) -> Result<(), Error> {
        self.gateway = Gateway::start(&self.switch.socket(Port::Gateway), &self.dir)?;
        let machines = (0_u8..).zip(0..self.addresses.len());
        // It gives its addresses in order, so dummy machines take those of the start.
        for (machine, _) in machines.clone() {
            let untrusted = [0x52, 0x54, 0, 0x70, 0, machine];
            self.offered(machine, untrusted)?;
        }
        for (machine, place) in machines {
            self.addresses[place] = self.offered(machine, self.plug(machine).hardware_address())?;
        }
        Ok(())
    }

    /// Takes IPv4 and DHCP away from the machines, for good, and gives them a router of IPv6. They
    /// make their addresses of its prefix.
    pub fn only_ipv6(&self) {
        self.route(ipv6::Addresses::Prefix);
    }

    /// The same, with addresses by DHCPv6.
    pub fn only_dhcpv6(&self) {
        self.route(ipv6::Addresses::Dhcpv6);
    }

    fn route(&self, addresses: ipv6::Addresses) {
        let machines = (0_u8..).zip(&self.addresses).map(|(machine, four)| ipv6::Machine {
            four: *four,
            hardware: self.plug(machine).hardware_address(),
        });
        let router = ipv6::Router { machines: machines.collect(), addresses };
        self.switch.lock().router = Some(router);
    }

    /// Carries VLAN `id` alone on these ports, tagged. The others are in it without a tag.
    pub fn trunk(&self, ports: &[Port], id: u16) {
        self.switch.lock().trunks.extend(ports.iter().map(|port| (*port, id)));
    }

    /// The address that a machine gets by DHCP, or from the router, at every boot until
    /// [`Segment::renumber`].
    ///
    /// # Panics
    /// When the number is not that of a machine of the segment.
    #[must_use]
    pub fn address(&self, machine: u8) -> IpAddr {
        let machine = usize::from(machine);
        match &self.switch.lock().router {
            Some(router) => router.machines[machine].ipv6(router.addresses).into(),
            None => self.addresses[machine].into(),
        }
    }

    /// Where machine number `machine` is plugged in.
    #[must_use]
    pub fn plug(&self, machine: u8) -> Plug {
        Plug { socket: self.switch.socket(Port::Machine(machine)), machine }
    }

    /// A port of the segment without a machine.
    #[must_use]
    pub fn spare(&self) -> Plug {
        self.plug(u8::try_from(self.addresses.len()).unwrap_or(u8::MAX))
    }

    /// Forwards the host's loopback port `host` to `port` of the machine with
    /// `address`.
    ///
    /// # Errors
    /// When no machine has the address, the port is taken, or the gateway is gone.
    pub fn forward(&mut self, host: u16, address: IpAddr, port: u16) -> Result<(), Error> {
        let four = match address {
            IpAddr::V4(four) => Some(four),
            IpAddr::V6(six) => {
                let switch = self.switch.lock();
                switch.router.as_ref().and_then(|router| {
                    let mut machines = router.machines.iter();
                    let machine = machines.find(|machine| machine.ipv6(router.addresses) == six);
                    machine.map(|machine| machine.four)
                })
            }
        };
        let four = four.ok_or_else(|| Error::Host {
            doing: format!("forward a port to {address}"),
            source: io::ErrorKind::AddrNotAvailable.into(),
        })?;
        self.gateway.forward(host, four, port)
    }

    /// The means to cut, slow and heal its links, and to see what is on them.
    #[must_use]
    pub fn links(&self) -> Links {
        Links { state: Arc::clone(&self.switch.state) }
    }
}
