//! The CNI file: gives containerd the network of this node's pods, once the node has a
//! prefix.
//!
//! containerd watches the directory. Without the file it reports no network, kubelet the
//! node as not ready, and no pod starts: pods without addresses would be worse.

use tokio::sync::watch;
use tracing::info;

use super::configuration;
use crate::certificates::replace;
use crate::mesh::Prefix;
use crate::parts::{Part, PartState, Parts};
use polis_base::cause;
use polis_base::files;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) tree: files::Root,
    pub(super) prefix: watch::Receiver<Option<Prefix>>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        loop {
            let prefix = *self.prefix.borrow_and_update();
            let tree = self.tree.clone();
            let part = Part::PodNetwork;
            match (blocking(move || write(&tree, prefix)).await, prefix) {
                (Ok(()), Some(prefix)) => {
                    info!(%prefix, "pods have their network");
                    self.parts.set(part, PartState::Ready);
                }
                (Ok(()), None) => self.parts.set(part, PartState::Starting),
                (Err(error), _) => self.parts.fail(part, cause::line(&error)),
            }
            ctx.healthy();
            match ctx.until_cancelled(self.prefix.changed()).await {
                Some(changed) => changed.map_err(|_closed| Closed("the prefix of pods"))?,
                None => {
                    // The prefix may belong to another node when the role returns.
                    let tree = self.tree.clone();
                    if let Err(error) = blocking(move || write(&tree, None)).await {
                        self.parts.fail(part, cause::line(&error));
                    }
                    return Ok(());
                }
            }
        }
    }
}

/// Makes the file what it should be. Blocks.
fn write(tree: &files::Root, prefix: Option<Prefix>) -> Result<(), files::Error> {
    let file = &tree.ephemeral.pod_network_file;
    let Some(prefix) = prefix else { return file.remove() };
    tree.ephemeral.pod_network.create()?;
    let state = tree.ephemeral.pod_addresses.path();
    replace(file, &configuration::pod_network(prefix, state)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_comes_and_goes_with_the_prefix() {
        let base = tempfile::tempdir().unwrap();
        let tree = files::Root::at(base.path());
        std::fs::create_dir_all(tree.ephemeral.mount.path()).unwrap();
        let file = tree.ephemeral.pod_network_file.clone();
        write(&tree, None).unwrap();
        write(&tree, Some("10.192.3.0/24".parse().unwrap())).unwrap();
        let text = String::from_utf8(file.read().unwrap().unwrap()).unwrap();
        assert!(text.contains("10.192.3.2"), "{text}");
        write(&tree, None).unwrap();
        assert_eq!(file.read().unwrap(), None);
    }
}
