//! The access list: publishes the users and nodes with access, by the records, to the
//! servers of this node.
//!
//! Where a curator runs, access is decided by the content of etcd, milliseconds after it
//! was written; nodes without one receive it from a curator.

use std::sync::Arc;

use polis_proto::v1::NodeState;
use tokio::sync::watch;
use tracing::error;

use super::directory::Directory;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::pki::Crl;
use polis_wire::rpc::{self, AccessList, Serials};

/// Publishes the access list. A service of every curator.
#[derive(Clone, Debug)]
pub struct Service {
    /// The copy of the records.
    pub directory: watch::Receiver<Directory>,
    /// The access list.
    pub access_list: watch::Sender<Arc<AccessList>>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the directory ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut read = Revoked::default();
        loop {
            let access_list = {
                let directory = self.directory.borrow_and_update();
                // Until the first listing the access list is unknown, and every caller is
                // rejected.
                (directory.revision() > 0).then(|| of(&directory, &mut read))
            };
            if let Some(access_list) = access_list {
                self.access_list.send_if_modified(|known| {
                    let changed = **known != access_list;
                    if changed {
                        *known = Arc::new(access_list);
                    }
                    changed
                });
            }
            match ctx.until_cancelled(self.directory.changed()).await {
                Some(changed) => changed.map_err(|_closed| Closed("the directory"))?,
                None => return Ok(()),
            }
        }
    }
}

/// The CRL that was read last, and its content.
#[derive(Default)]
pub(super) struct Revoked {
    der: Arc<Vec<u8>>,
    serials: Serials,
}

pub(super) fn of(directory: &Directory, read: &mut Revoked) -> AccessList {
    let der = directory.crl();
    if read.der != der {
        match Crl::read(&der) {
            Some(crl) => read.serials = Arc::new(crl.serials()),
            // The names in the last CRL stay rejected.
            None => error!("the CRL of the cluster cannot be read and is not used"),
        }
        read.der = der;
    }
    let in_state = |state| {
        let nodes = directory.nodes().filter(move |(_, known)| known.node.state() == state);
        nodes.map(|(id, _)| id).collect()
    };
    AccessList {
        nodes: Some(in_state(NodeState::Up)),
        removed: in_state(NodeState::Decommissioned),
        serials: Arc::clone(&read.serials),
        users: Some(rpc::users(directory.users())),
    }
}
