//! The name server of this node's pods: CoreDNS, on an address that every node has on its
//! loopback interface.
//!
//! It answers for Services from what it watches at the API server, and forwards everything
//! else to the node's own name servers. It reads its file again when those change.
//!
//! ```text
//! certificates --> an API server answers, or kubelet runs --> address on `lo` --> CoreDNS
//! ```

use std::io;
use std::net::Ipv4Addr;

use netlink_packet_route::address::AddressScope;
use rtnetlink::AddressMessageBuilder;
use rustix::io::Errno;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::warn;

use super::node_object::readable;
use super::{SERVICES, args, configuration};
use crate::api::Api;
use crate::certificates::{Trusted, replace, until_an_authority_ends};
use crate::component::{self, Check, Component, Process};
use crate::confinement;
use crate::mesh::kernel::ignore;
use crate::parts::{API_STARTS, Part, PartState, Parts};
use crate::site::Site;
use polis_base::cause;
use polis_base::files;
use polis_machine::network;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};

/// The checks of CoreDNS: ready when it has read all Services, and alive while it answers.
const READY: &str = "/ready";
const LIVE: &str = "/health";

/// The loopback interface is the first one of every network namespace.
const LOOPBACK: u32 = 1;
/// Fixed bits of a single address.
const HOST: u8 = 32;

/// Why a run of the name server ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// No connection to the kernel.
    #[error("cannot use the network of the kernel")]
    Netlink(#[source] io::Error),
    /// The kernel refuses the address, or its end.
    #[error("cannot {what} the address {} on the loopback interface", configuration::DNS_ADDRESS)]
    Address {
        /// The change.
        what: &'static str,
        /// Why.
        source: rtnetlink::Error,
    },
    /// Its file cannot be written.
    #[error(transparent)]
    Files(#[from] files::Error),
    /// The program.
    #[error(transparent)]
    Component(#[from] component::Error),
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) site: Site,
    /// The API server, asked as the program does.
    pub(super) api: Api,
    /// The name servers of the node.
    pub(super) network: watch::Receiver<network::Status>,
    /// The authorities of Kubernetes that its program read at its start.
    pub(super) trusted: watch::Receiver<Trusted>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Error> {
        self.parts.set(Part::Dns, PartState::Starting);
        let Some(wanted) = ctx.until_cancelled(self.wanted()).await else {
            // A run before this one may have given it.
            return loopback(Change::Remove, configuration::DNS_ADDRESS).await;
        };
        wanted?;
        if let Err(error) = self.prepare().await {
            self.parts.fail(Part::Dns, cause::line(&error));
            return Err(error);
        }
        let port = |port| self.site.loopback_port(port);
        let component = Component {
            part: Part::Dns,
            program: self.site.programs.join("coredns"),
            args: args::dns(&self.site),
            process: Process::PLAIN,
            confinement: Some(confinement::dns(&self.site)),
            ready: Check::plain(port(configuration::DNS_READY), READY),
            first: None,
            live: Check::plain(port(configuration::DNS_HEALTH), LIVE),
            parts: self.parts.clone(),
        };
        let outdated = until_an_authority_ends(Part::Dns, self.trusted.clone());
        let either = async {
            tokio::select! {
                // Both wait for values.
                ended = self.follow() => ended,
                ended = outdated => ended,
            }
        };
        Box::pin(component.run(&ctx, either)).await?;
        // The role is taken away: the machine is as it was before.
        loopback(Change::Remove, configuration::DNS_ADDRESS).await
    }

    /// Waits for the certificates, and until an API server answers: the program's own tries are
    /// up to half a minute apart once some have failed. Without an API server it still answers
    /// for names outside of the cluster, so it starts without one where kubelet runs, and with it
    /// pods, and after [`API_STARTS`] anyway.
    async fn wanted(&self) -> Result<(), Closed> {
        self.parts.ready(Part::WorkerCertificates).await?;
        tokio::select! {
            // Cancel-safe, all: they read, and wait.
            () = readable(&self.api, SERVICES, &self.parts, |_why| ()) => Ok(()),
            running = self.parts.ready(Part::Kubelet) => running,
            () = sleep(API_STARTS) => Ok(()),
        }
    }

    /// The inputs of the program: the address, and its file.
    async fn prepare(&mut self) -> Result<(), Error> {
        loopback(Change::Give, configuration::DNS_ADDRESS).await?;
        self.write().await
    }

    /// Writes the file again for other name servers. Ends when that fails.
    async fn follow(mut self) -> component::Error {
        loop {
            if self.network.changed().await.is_err() {
                return Closed("the network").into();
            }
            if let Err(error) = self.write().await {
                warn!(error = &error as &dyn std::error::Error, "other name servers");
                let what = "its configuration cannot be written";
                return component::Error::Outdated { part: Part::Dns, what };
            }
        }
    }

    async fn write(&mut self) -> Result<(), Error> {
        let servers = self.network.borrow_and_update().nameservers.clone();
        let file = self.site.run.corefile.clone();
        let text = configuration::corefile(&self.site, &servers);
        Ok(blocking(move || replace(&file, text.as_bytes()).map(drop)).await?)
    }
}

/// The fate of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Give,
    Remove,
}

/// Gives the loopback interface an address, or removes it. To do so twice is to do it once.
///
/// The address has the scope of a link: the kernel does not choose it as the source of a packet
/// that leaves the machine, and programs do not take it for one of the node's own.
async fn loopback(change: Change, address: Ipv4Addr) -> Result<(), Error> {
    let (connection, handle, _messages) = rtnetlink::new_connection().map_err(Error::Netlink)?;
    let work = async {
        match change {
            Change::Give => {
                let mut request = handle.address().add(LOOPBACK, address.into(), HOST).replace();
                request.message_mut().header.scope = AddressScope::Link;
                let what = "set";
                request.execute().await.map_err(|source| Error::Address { what, source })
            }
            Change::Remove => {
                let message = AddressMessageBuilder::<Ipv4Addr>::new().index(LOOPBACK);
                let message = message.address(address, HOST).build();
                let gone = handle.address().del(message).execute().await;
                let what = "remove";
                ignore(gone, Errno::ADDRNOTAVAIL).map_err(|source| Error::Address { what, source })
            }
        }
    };
    tokio::select! {
        // Cancel-safe: the kernel does it or not, and a later run does it again.
        done = work => done,
        // Cancel-safe: the connection ends only when the kernel closes it.
        () = connection => Err(Error::Netlink(io::ErrorKind::BrokenPipe.into())),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::TryStreamExt as _;
    use netlink_packet_route::address::{AddressAttribute, AddressMessage};
    use rustix::thread::UnshareFlags;

    use super::*;

    /// The IPv4 addresses of the loopback interface, as the kernel has them.
    async fn addresses() -> Vec<AddressMessage> {
        let (connection, handle, _messages) = rtnetlink::new_connection().unwrap();
        let request = handle.address().get().set_link_index_filter(LOOPBACK).execute();
        tokio::select! {
            all = request.try_collect::<Vec<_>>() => all.unwrap(),
            () = connection => panic!("the kernel closed the socket"),
        }
    }

    #[test]
    fn the_address_of_the_name_server_comes_and_goes_and_stays_on_its_link() {
        #[expect(deprecated, reason = "the other one is unsafe because of unused flags")]
        let entered = rustix::thread::unshare(UnshareFlags::NEWNET);
        if let Err(error) = entered {
            eprintln!("skipped: a network namespace needs root ({error})");
            return;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let before = addresses().await.len();
            for _twice in 0..2 {
                loopback(Change::Give, configuration::DNS_ADDRESS).await.unwrap();
            }
            let given = addresses().await;
            assert_eq!(given.len(), before + 1, "{given:?}");
            let one = given.iter().find(|it| it.header.scope == AddressScope::Link).unwrap();
            let address = AddressAttribute::Local(configuration::DNS_ADDRESS.into());
            assert!(one.attributes.contains(&address), "{one:?}");
            for _twice in 0..2 {
                loopback(Change::Remove, configuration::DNS_ADDRESS).await.unwrap();
            }
            assert_eq!(addresses().await.len(), before);
        });
    }

    #[tokio::test]
    async fn where_pods_run_a_name_server_needs_no_api_server() {
        let (ctx, _handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        let site = crate::site::live();
        // Nothing listens there.
        let address = (Ipv4Addr::LOCALHOST, 1).into();
        let api = Api { address, ca: site.run.worker_ca.clone(), client: None };
        let (_servers, network) = watch::channel(network::Status::default());
        let (_trusted, trusted) = watch::channel(None);
        let service = Service { site, api, network, trusted, parts: parts.clone() };
        parts.set(Part::WorkerCertificates, PartState::Ready);
        let wanted = tokio::time::timeout(Duration::from_millis(50), service.wanted());
        wanted.await.unwrap_err();
        parts.set(Part::Kubelet, PartState::Ready);
        service.wanted().await.unwrap();
    }
}
