//! The confirmation of a wipe: whether the cluster has removed the node that the node parameters
//! say to wipe.
//!
//! ```text
//! parameters name the node of this machine (`wipes`)
//!    '--> disk open: asked here -------------> not its node ------------> wiped
//!    '--> disk locked: asked for its key ---'                (`disown`: mark, give up, reboot)
//!                                           '-> a member, or no answer --> as without them
//! ```
//!
//! The node asks before it starts etcd, so it wipes a member of etcd that is damaged, too.
//! It shows its certificate first: a leader that accepts it has the node as a member. If no leader
//! accepts it, the node proves a key of its own instead: TLS rejects a certificate that has ended,
//! as that of a node that was off for long, before a curator can answer.
//!
//! | disk | proves | asks by |
//! |---|---|---|
//! | encrypted | the join key | `JoinNode`, as for the key of the disk, which names the node |
//! | insecure | the node key | `CommitNode`, repeating its entry |
//!
//! Invariants:
//! - Nothing is wiped unless the parameters have the full ID of this node, and a curator with a
//!   certificate of the CA that this node trusts has answered that it does not have the node. To
//!   have it with another join key, which a recovery of the disk makes, is to have it.
//! - An outage delays a member by [`PATIENCE`] at most.
//! - A power cut before the mark on the ESP (`disown`) changes nothing: the next boot asks again.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::time::timeout;
use tracing::{info, warn};

use super::credentials;
use super::error::Refused;
use super::remote::{Remote, Untrusted};
use super::remote_unlock::{join_key_of, join_question};
use super::sealed::{Sealed, kind_message};
use super::service::Consensus;
use super::state::Event;
use super::{Error, Service};
use polis_base::stage::{Stage, State};
use polis_base::{boot, cause};
use polis_machine::storage::Kind;
use polis_runtime::event::until;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{NodeId, NodeKey};
use polis_wire::rpc::client::{Candidate, Channel, Client, Timeouts};

/// How long a boot waits for a curator. A lease of an address, and an election, take less.
pub(super) const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 8 } else { 60 });

/// The text of the wait.
const ASKED: &str = "a curator of the cluster, which says whether it has removed this node: the \
                     node parameters say to wipe it; the boot goes on after a minute";

impl<C: Consensus> Service<C> {
    /// Whether the parameters name the node in `sealed`, which has this key, and its cluster
    /// confirms that it does not have the node.
    pub(super) async fn is_to_be_wiped(
        &mut self,
        ctx: &Context,
        sealed: &Sealed,
        key: &NodeKey,
    ) -> Result<bool, Error> {
        until(&mut self.parameters, "the parameters", |known| known.as_ref().map(drop)).await?;
        let node = key.id();
        if self.named() != Some(node) {
            return Ok(false);
        }
        info!(%node, "the node parameters say to wipe this node: asking its cluster");
        ctx.stage(Stage::Cluster, State::Waiting(ASKED.to_owned()));
        let asked = timeout(PATIENCE, Box::pin(self.ask_standing(ctx, sealed, key))).await;
        ctx.stage(Stage::Cluster, State::Started);
        let why = match asked {
            Ok(Err(Error::Curator(refused))) if refused.is_removal() => {
                self.confirmed(ctx, node, &refused);
                return Ok(true);
            }
            Ok(Ok(())) => "the node is a member".to_owned(),
            Ok(Err(error)) => cause::line(&error),
            Err(_elapsed) => "no curator answered".to_owned(),
        };
        warn!(
            why,
            "nothing is wiped: the node parameters name this node, but its cluster has not \
             confirmed that it removed the node; delete it first (`polisctl node delete {node} \
             --force`), then reboot"
        );
        Ok(false)
    }

    /// Asks until a curator answers; an answer without an error means a member.
    async fn ask_standing(
        &mut self,
        ctx: &Context,
        sealed: &Sealed,
        key: &NodeKey,
    ) -> Result<(), Error> {
        let others = self.addresses(sealed).await?;
        if others.is_empty() {
            return Err(Error::Unreachable("the address of no other node is known".to_owned()));
        }
        self.address(ctx).await?;
        let files = self.config.root.data.node.credentials.clone();
        let certified = match blocking(move || credentials::read(&files)).await {
            Ok(own) => Some(Client::fixed(others.clone(), own, Timeouts::default())),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "no certificate to ask with: asking by a key of this node alone");
                None
            }
        };
        if is_accepted(certified.as_ref()).await {
            return Ok(());
        }
        let answered = self.ask_by_key(ctx, sealed, key, others).await;
        // A leader of an earlier version does not find the node by the join key of a recovery.
        if answered.is_err() && is_accepted(certified.as_ref()).await {
            return Ok(());
        }
        answered
    }

    async fn ask_by_key(
        &self,
        ctx: &Context,
        sealed: &Sealed,
        key: &NodeKey,
        others: Vec<Candidate>,
    ) -> Result<(), Error> {
        let words = |why: &str| format!("{ASKED} ({why})");
        match &sealed.secrets {
            Some(secrets) => {
                let sealer = self.config.unlocker(self.disk()).sealer;
                let join_key = join_key_of(&sealer, secrets).await?;
                let curators = Remote::new(&join_key, sealed.trusted(), others)?;
                let question = join_question(sealed);
                let call = |mut curator: CuratorClient<Channel>| {
                    let question = question.clone();
                    async move { curator.join_node(question).await }
                };
                curators.retry_for(ctx, Untrusted::Wait, words, call).await?;
            }
            None => {
                let curators = Remote::new(key, sealed.trusted(), others)?;
                let call = |mut curator: CuratorClient<Channel>| async move {
                    let request = v1::CommitNodeRequest {
                        storage_kind: kind_message(Kind::Insecure).into(),
                        boot_id: boot::id(),
                        ..Default::default()
                    };
                    curator.commit_node(request).await
                };
                curators.retry_for(ctx, Untrusted::Wait, words, call).await?;
            }
        }
        Ok(())
    }

    /// The end of a run whose cluster does not have `node`: a wipe, if the parameters say so.
    /// `unsealed` is the mark of a node that has no sealed configuration yet.
    pub(super) async fn turned_away(
        &mut self,
        ctx: &Context,
        node: NodeId,
        refused: Refused,
        unsealed: Option<Sealed>,
    ) -> Error {
        let known = until(&mut self.parameters, "the parameters", |known| known.as_ref().map(drop));
        if let Err(closed) = known.await {
            return closed.into();
        }
        let named = self.named();
        if named != Some(node) {
            return Error::TurnedAway { node, named, refused };
        }
        self.confirmed(ctx, node, &refused);
        let file = self.config.root.esp.sealed_configuration.clone();
        if let Some(mark) = unsealed
            && let Err(error) = file.save(mark.to_record()).await
        {
            return error.into();
        }
        self.wipe_disk().await
    }

    /// The node that the parameters say to wipe, as far as they are known.
    pub(super) fn named(&self) -> Option<NodeId> {
        self.parameters.borrow().as_ref().and_then(|known| known.parameters()?.wipes)
    }

    /// Publishes and logs the removal, once the parameters have the ID of the node and the cluster
    /// has answered.
    fn confirmed(&self, ctx: &Context, node: NodeId, refused: &Refused) {
        self.status.happened(Event::Removed, ctx.lines(), |_disowning| {});
        warn!(
            %node,
            reason = refused.reason,
            "the cluster does not have this node: its disk is wiped, as the node parameters say"
        );
    }
}

/// Whether a leader accepts the certificate of this node, which only a member's is.
async fn is_accepted(certified: Option<&Client>) -> bool {
    match certified {
        Some(client) => client.leader().await.is_ok(),
        None => false,
    }
}
