//! The name server of this node's pods: CoreDNS, on an address that every node has on its
//! loopback interface.
//!
//! It answers for Services from what it watches at the API server, and forwards everything
//! else to the node's own name servers. It reads its file again when those change.

use std::io;
use std::net::IpAddr;

use tokio::sync::watch;
use tracing::warn;

use super::{args, configuration};
use crate::network;
use crate::workload::certificates::{chain, replace};
use crate::workload::component::{self, Check, Component, Process};
use crate::workload::parts::{Part, Parts};
use crate::workload::site::Site;
use polis_base::files;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};

/// The checks of CoreDNS: ready when it has read all Services, and alive while it answers.
const READY: &str = "/ready";
const LIVE: &str = "/health";

/// The loopback interface is the first one of every network namespace.
const LOOPBACK: u32 = 1;

/// Why a run of the name server ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// No connection to the kernel.
    #[error("cannot use the network of the kernel")]
    Netlink(#[source] io::Error),
    /// The kernel refuses the address.
    #[error("cannot give {} to the loopback interface", configuration::DNS_ADDRESS)]
    Address(#[source] rtnetlink::Error),
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
    /// The name servers of the node.
    pub(super) network: watch::Receiver<network::Status>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Error> {
        let certificates = self.parts.ready(Part::WorkerCertificates);
        let Some(ready) = ctx.until_cancelled(certificates).await else { return Ok(()) };
        ready?;
        if let Err(error) = self.prepare().await {
            self.parts.fail(Part::Dns, chain(&error));
            return Err(error);
        }
        let port = |port| self.site.loopback_port(port);
        let component = Component {
            part: Part::Dns,
            program: self.site.programs.join("coredns"),
            args: args::dns(&self.site),
            process: Process::PLAIN,
            ready: Check::plain(port(configuration::DNS_READY), READY),
            live: Check::plain(port(configuration::DNS_HEALTH), LIVE),
            parts: self.parts.clone(),
        };
        Ok(component.run(&ctx, self.follow()).await?)
    }

    /// What the program needs: the address, and its file.
    async fn prepare(&mut self) -> Result<(), Error> {
        give_address(configuration::DNS_ADDRESS.into()).await?;
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

/// Gives the loopback interface an address; one that it has stays.
async fn give_address(address: IpAddr) -> Result<(), Error> {
    let (connection, handle, _messages) = rtnetlink::new_connection().map_err(Error::Netlink)?;
    let request = handle.address().add(LOOPBACK, address, 32).replace();
    tokio::select! {
        // Cancel-safe: the kernel does it or not, and a later run does it again.
        done = request.execute() => done.map_err(Error::Address),
        // Cancel-safe: the connection ends only when the kernel closes it.
        () = connection => Err(Error::Netlink(io::ErrorKind::BrokenPipe.into())),
    }
}
