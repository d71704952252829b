//! The part of a run about DHCP for IPv4: starts and ends clients, and holds what they get.
//!
//! What this module does not do: decide which links ask (`plan`), or which lease gives the node its
//! address (`primary`).

use std::pin::Pin;

use futures::stream::Stream;
use tokio::time::Instant;
use tokio_stream::StreamMap;
use tracing::{info, warn};

use super::super::dhcp::{self, Event};
use super::super::plan::{Observed, Wanted};
use super::super::view::name;
use super::Run;

/// The clients, by link.
pub(super) type Clients = StreamMap<u32, Pin<Box<dyn Stream<Item = Event> + Send>>>;

impl Run {
    /// Starts and ends DHCP clients.
    pub(super) fn ask(&mut self, observed: &Observed, wanted: &Wanted) {
        let asking: Vec<u32> = self.clients.keys().copied().collect();
        for link in asking.iter().filter(|link| !wanted.dhcp.contains(link)) {
            self.clients.remove(link);
        }
        for index in wanted.dhcp.iter().filter(|link| !asking.contains(link)) {
            if let Some(link) = observed.links.get(index) {
                let client = dhcp::ask(*index, link.name.clone(), link.mac);
                self.clients.insert(*index, Box::pin(client));
            }
        }
        self.v6.ask(observed, &wanted.dhcpv6);
    }

    pub(super) fn answered(&mut self, observed: &Observed, link: u32, event: Event) {
        let name = name(observed, link);
        match event {
            Event::Leased(lease) => {
                let (address, server) = (lease.address, lease.server);
                let seconds = lease.lifetime.as_secs();
                info!("DHCP server {server} leases {address} to {name} for {seconds} s");
                self.leases.answered(link, lease, Instant::now());
                self.renewed.insert((link, address));
            }
            Event::Refused(refused) => {
                warn!("a DHCP server's answer on {name} cannot be used: {refused}");
            }
            Event::Ended => {
                if let Some(lease) = self.leases.ended(link) {
                    warn!("the lease of {} on {name} ended", lease.address);
                }
            }
            Event::Failed(error) => warn!("cannot ask DHCP on {name}: {error}"),
        }
    }
}
