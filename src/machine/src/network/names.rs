//! The names of the node: its host name, its machine-id, and an address for its name.
//!
//! etcd dials the peers by name, and one of them is this node; programs ask for
//! the host name and the machine-id at the strangest moments. All of it lies in
//! memory, behind links from `/etc`, and follows from the node's key.
//!
//! ```text
//! identity unknown:                   hosts: localhost
//! identity known:                     host name, machine-id
//! identity and primary address known: hosts: the node's ID has that address
//! peers known:                        hosts: theirs, too
//! ```
//!
//! Invariants:
//! - Once both are known, the node's ID resolves to the primary address, and it
//!   follows the address when that changes.
//! - The files exist from the first moment on, so the links never dangle.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use tokio::sync::watch;
use tracing::{info, warn};

use super::Status as Network;
use polis_base::files::{self, File};
use polis_runtime::event::Closed;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::Context;
use polis_wire::identity::{Identity, NodeId};

/// The host name of a machine that does not know its identity yet.
const NAMELESS: &str = "polis";

/// The other nodes, and where they are.
pub type Peers = BTreeMap<NodeId, IpAddr>;

/// Where the names go.
#[derive(Clone, Debug)]
pub struct Config {
    /// `/etc/hosts`.
    pub hosts: File,
    /// `/etc/hostname`.
    pub hostname: File,
    /// `/etc/machine-id`.
    pub machine_id: File,
    /// Whether the service sets the host name in the kernel, and asks the resolver for
    /// it.
    pub kernel: Kernel,
}

/// Whether the names are those of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// They are: this is a node.
    Set,
    /// They lie elsewhere: this is a test.
    Leave,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where the names go.
    pub config: Config,
    /// The identity of this node, once it is known.
    pub identity: watch::Receiver<Option<Identity>>,
    /// The address.
    pub network: watch::Receiver<Network>,
    /// The other nodes.
    pub peers: watch::Receiver<Peers>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] files::Error),
    /// The kernel does not take the host name.
    #[error("cannot set the host name")]
    HostName(#[source] rustix::io::Errno),
    /// The owner of an input ended.
    #[error(transparent)]
    Lost(#[from] Closed),
}

impl Service {
    /// Keeps the names in step until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`]; a restart writes everything again.
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        let mut written: Option<(Option<Identity>, Option<IpAddr>, Peers)> = None;
        loop {
            let identity = *self.identity.borrow_and_update();
            let address = self.network.borrow_and_update().primary;
            let peers = self.peers.borrow_and_update().clone();
            let now = (identity, address, peers);
            if written.as_ref() != Some(&now) {
                let former = written.as_ref();
                let same = former.is_some_and(|(node, at, _)| (*node, *at) == (identity, address));
                if former.is_none_or(|(former, ..)| *former != identity) {
                    self.name(identity.as_ref()).await?;
                }
                let hosts = hosts(identity.as_ref(), address, &now.2);
                self.config.hosts.save(hosts.into_bytes()).await?;
                written = Some(now);
                let resolves = identity.map(|identity| identity.id).zip(address);
                if let Some((id, address)) = resolves.filter(|_| !same) {
                    info!("{id} is {address}");
                    if self.config.kernel == Kernel::Set {
                        ctx.until_cancelled(check(id, address)).await;
                    }
                }
            }
            ctx.healthy();
            tokio::select! {
                // Cancel-safe: only waits.
                () = ctx.cancelled() => return Ok(()),
                // Cancel-safe per the docs of `changed`.
                changed = self.identity.changed() => changed.map_err(|_closed| Closed("identity"))?,
                // Cancel-safe per the docs of `changed`.
                changed = self.network.changed() => changed.map_err(|_closed| Closed("network"))?,
                // Cancel-safe per the docs of `changed`.
                changed = self.peers.changed() => changed.map_err(|_closed| Closed("peers"))?,
            }
        }
    }

    /// Writes host name and machine-id.
    async fn name(&self, identity: Option<&Identity>) -> Result<(), Error> {
        let name = identity.map_or_else(|| NAMELESS.to_owned(), |known| known.id.to_string());
        if self.config.kernel == Kernel::Set {
            rustix::system::sethostname(name.as_bytes()).map_err(Error::HostName)?;
        }
        self.config.hostname.save(format!("{name}\n").into_bytes()).await?;
        // systemd's word for "not known yet"; an empty file means "make one up".
        let machine_id = identity.map_or_else(|| "uninitialized".to_owned(), Identity::machine_id);
        self.config.machine_id.save(format!("{machine_id}\n").into_bytes()).await?;
        Ok(())
    }
}

/// Asks the resolver, and logs it if the answer differs. That would be a fault of the
/// image, not of this boot: the node could not mend it.
async fn check(id: NodeId, address: IpAddr) {
    match tokio::net::lookup_host((id.to_string(), 0)).await {
        Ok(found) => {
            let found: Vec<IpAddr> = found.map(|socket| socket.ip()).collect();
            if !found.contains(&address) {
                warn!("{id} resolves to {found:?}, and this node is at {address}");
            }
        }
        Err(error) => warn!("{id} does not resolve: {error}"),
    }
}

fn hosts(identity: Option<&Identity>, address: Option<IpAddr>, peers: &Peers) -> String {
    let mut hosts = String::from("127.0.0.1 localhost\n::1 localhost\n");
    if let Some((identity, address)) = identity.zip(address) {
        // Writing to a string cannot fail.
        let _written = writeln!(hosts, "{address} {}", identity.id);
    }
    for (id, address) in peers.iter().filter(|(id, _)| identity.is_none_or(|own| own.id != **id)) {
        let _written = writeln!(hosts, "{address} {id}");
    }
    hosts
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::files::Root;

    #[tokio::test]
    async fn the_files_follow_the_identity_and_the_address() {
        let base = tempfile::tempdir().unwrap();
        let files = Root::at(base.path()).ephemeral;
        files.create().unwrap();
        let (identity, known) = watch::channel(None);
        let (network, addressed) = watch::channel(Network::default());
        let (_others, peers) = watch::channel(Peers::default());
        let config = Config {
            hosts: files.hosts.clone(),
            hostname: files.hostname.clone(),
            machine_id: files.machine_id.clone(),
            kernel: Kernel::Leave,
        };
        let service = Service { config, identity: known, network: addressed, peers };
        let read = |file: &File| String::from_utf8(file.read().unwrap().unwrap()).unwrap();
        let story = async {
            let id = Identity::new([0xab; 32]);
            identity.send_replace(Some(id));
            for address in [[10, 0, 2, 15], [10, 0, 2, 16]].map(IpAddr::from) {
                network.send_modify(|status| status.primary = Some(address));
                let line = format!("\n{address} {}\n", id.id);
                while !files.hosts.read().unwrap().is_some_and(|it| it.ends_with(line.as_bytes())) {
                    tokio::task::yield_now().await;
                }
            }
            assert_eq!(read(&files.hostname), format!("{}\n", id.id));
            assert_eq!(read(&files.machine_id), format!("{}\n", id.machine_id()));
        };
        let (ctx, _handles) = Context::for_test();
        tokio::select! {
            ended = service.run(ctx) => panic!("{ended:?}"),
            () = story => {}
        }
    }

    #[test]
    fn the_node_s_name_has_its_address_once_both_are_known() {
        let identity = Identity::new([0xab; 32]);
        let address = Some(IpAddr::from([10, 0, 2, 15]));
        assert!(
            hosts(Some(&identity), address, &Peers::new())
                .ends_with("\n10.0.2.15 polis-abababababababababababababababab\n")
        );
        let nobody = Peers::new();
        assert_eq!(hosts(Some(&identity), None, &nobody), hosts(None, address, &nobody));
    }

    #[test]
    fn others_have_their_names_and_never_this_node_s() {
        let own = Identity::new([0xab; 32]);
        let other = Identity::new([0xcd; 32]).id;
        let address = IpAddr::from([10, 0, 2, 15]);
        let peers = [(own.id, [10, 0, 2, 99].into()), (other, [10, 0, 2, 16].into())].into();
        let hosts = hosts(Some(&own), Some(address), &peers);
        assert!(
            hosts.ends_with(&format!("\n10.0.2.15 {}\n10.0.2.16 {other}\n", own.id)),
            "{hosts}"
        );
    }
}
