//! The kernel's side of the mesh: reads the device, and carries out actions.
//!
//! [`connected`] opens the sockets for one pass over the device and closes them after it, so
//! a pass depends on nothing that an earlier one has left.
//!
//! ```text
//! link       the interface, its addresses and routes    rtnetlink
//! wireguard  the key, the port and the peers            generic netlink
//! ```
//!
//! What this module does not do: decide anything (`actions`).

mod link;
mod wireguard;

pub(crate) use self::link::ignore;

use std::io;

use netlink_packet_route::link::InfoKind;
use netlink_proto::sys::protocols::NETLINK_GENERIC;

use self::wireguard::Generic;
use super::DEVICE;
use super::actions::{Action, Observed};
use super::key::PrivateKey;

/// Why the kernel does not have the mesh.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No socket to the kernel.
    #[error("cannot open the kernel's network socket")]
    Connect(#[source] io::Error),
    /// The socket to the kernel closed.
    #[error("the kernel closed the network socket")]
    Closed,
    /// The kernel does not say what there is.
    #[error("cannot read the interface {DEVICE}")]
    Observe(#[source] rtnetlink::Error),
    /// The kernel has no WireGuard.
    #[error("the kernel cannot make a WireGuard device")]
    Unsupported(#[source] rtnetlink::Error),
    /// The kernel refuses a change of the interface.
    #[error("cannot {what}")]
    Link {
        /// The change.
        what: &'static str,
        /// Why.
        source: rtnetlink::Error,
    },
    /// The kernel refuses to read or change keys and peers.
    #[error("cannot {what}")]
    WireGuard {
        /// The request.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// An answer of the kernel that does not fit the request.
    #[error("the kernel gave no number for {0}")]
    Answer(&'static str),
}

/// The way to the kernel for one pass.
#[derive(Debug)]
pub struct Kernel {
    links: rtnetlink::Handle,
    generic: Generic,
}

/// Opens the sockets and does `work` with them.
///
/// # Errors
///
/// [`Error::Connect`], [`Error::Closed`], and those of `work`.
pub async fn connected<T, E: From<Error>>(
    work: impl AsyncFnOnce(&Kernel) -> Result<T, E>,
) -> Result<T, E> {
    // Each message without a receiver would be a line in the log.
    let (links, handle, _unasked) = rtnetlink::new_connection().map_err(Error::Connect)?;
    let (families, family, _unasked) =
        netlink_proto::new_connection(NETLINK_GENERIC).map_err(Error::Connect)?;
    let (devices, device, _unasked) =
        netlink_proto::new_connection(NETLINK_GENERIC).map_err(Error::Connect)?;
    let kernel = Kernel { links: handle, generic: Generic::new(family, device) };
    tokio::select! {
        // Each ends only with its socket; a list that is cut off is read again in the next pass.
        () = links => Err(Error::Closed.into()),
        () = families => Err(Error::Closed.into()),
        () = devices => Err(Error::Closed.into()),
        done = work(&kernel) => done,
    }
}

impl Kernel {
    /// Reads the device.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn observe(&self) -> Result<Observed, Error> {
        let observed =
            link::observe(&self.links, InfoKind::Wireguard).await.map_err(Error::Observe)?;
        let Observed::Device(mut device) = observed else { return Ok(observed) };
        self.generic.observe(&mut device).await?;
        Ok(Observed::Device(device))
    }

    /// Carries out one action. `key` is the own key, for [`Action::Configure`].
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn apply(&self, action: &Action, key: &PrivateKey) -> Result<(), Error> {
        match action {
            Action::Configure => self.generic.configure(key).await,
            Action::Peer(change) => self.generic.change(change).await,
            link => link::apply(&self.links, link).await,
        }
    }

    /// Removes the interface with this number.
    ///
    /// # Errors
    ///
    /// [`Error::Link`].
    pub async fn delete(&self, index: u32) -> Result<(), Error> {
        link::apply(&self.links, &Action::Delete(index)).await
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
