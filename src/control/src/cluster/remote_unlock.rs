//! Remote unlock: opens the disk of a member with the cluster's half of its key from a
//! curator, or with the recovery key from a person.
//!
//! ```text
//! no keeper of this machine has the cluster's half
//!    |-- directory names others --> JoinNode, by the join key --> half --> slot 0
//!    |                                  |--> refused: this node was removed, and is wiped if
//!    |                                  |    the parameters say so (`confirm`)
//!    +-- unlock request: a recovery key ------------------------------> slot 1
//! ```
//!
//! Both ways are open at once, and the first to succeed ends the wait.
//!
//! The question names the node: the cluster may have it with another join key, since a recovery
//! of the disk makes a new one, and answers then that it has the node.
//!
//! Invariants:
//! - This machine stores the half that a curator gives only if the cluster wants shares stored.

use std::net::IpAddr;
use std::sync::Arc;

use polis_proto::v1;
use prost::Message as _;
use tracing::{info, warn};
use uuid::Uuid;

use super::remote::{Remote, Untrusted, join_key};
use super::sealed::Sealed;
use super::service::Consensus;
use super::unlock::keeper::Slot;
use super::unlock::keys::{Half, Secrets};
use super::unlock::request;
use super::unlock::sealer::{Guarded, Sealer};
use super::unlock::{Keys, Unlocker};
use super::{Error, Service};
use polis_base::files;
use polis_base::stage::{self, Stage};
use polis_base::sys::clock;
use polis_machine::parameters::ColdStart;
use polis_machine::storage::key::RecoveryKey;
use polis_runtime::event::until;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{Fingerprint, Identity, NodeKey};
use polis_wire::pki::Authorities;
use polis_wire::rpc::client::{Candidate, Channel, candidates};
use polis_wire::{pki, rpc};

impl<C: Consensus> Service<C> {
    /// The curators of other nodes, which this node asks as the holder of its join key; `None`
    /// if it was alone or has no such key.
    pub(super) async fn others(
        &self,
        unlocker: &Unlocker,
        sealed: &Sealed,
    ) -> Result<Option<Remote>, Error> {
        let Some(secrets) = &sealed.secrets else { return Ok(None) };
        let key = join_key_of(&unlocker.sealer, secrets).await?;
        let others = self.addresses(sealed).await?;
        if others.is_empty() {
            return Ok(None);
        }
        Remote::new(&key, sealed.trusted(), others).map(Some)
    }

    /// Where the curators of other nodes are, by the directory of the last boot and by the
    /// parameters of this machine.
    pub(super) async fn addresses(&self, sealed: &Sealed) -> Result<Vec<Candidate>, Error> {
        let file = self.config.root.esp.cluster_directory.clone();
        let own = Identity::new(sealed.node_public_key).id;
        let known = blocking(move || -> Result<_, Error> {
            let directory = match file.read() {
                Err(error @ files::Error::Damaged { .. }) => {
                    warn!(error = &error as &dyn std::error::Error, "the cluster's directory");
                    None
                }
                directory => directory?,
            };
            let directory = directory.unwrap_or_default();
            let directory = v1::ClusterDirectory::decode(directory.as_slice());
            Ok(directory.unwrap_or_else(|error| {
                warn!(%error, "the cluster's directory on the ESP is damaged");
                v1::ClusterDirectory::default()
            }))
        })
        .await?;
        let configured = self.configured(sealed);
        let known = candidates(&known).into_iter().chain(candidates(&configured));
        Ok(known.filter(|one| one.node != Some(own)).collect())
    }

    /// Waits for a curator or a person to open the disk.
    pub(super) async fn helped(
        &mut self,
        ctx: &Context,
        mut unlocker: Unlocker,
        sealed: Option<&Sealed>,
        curators: Option<Remote>,
        partition: Uuid,
    ) -> Result<Option<Keys>, Error> {
        let credentials = meanwhile(&unlocker.sealer, sealed).await;
        let words = match &credentials {
            Some((_, words)) => format!(" --fingerprint {words}"),
            None => String::new(),
        };
        let by_hand = format!("an owner runs `polisctl node unlock NODE --at ADDRESS{words}`");
        let what = match &curators {
            Some(_) => format!(
                "the key of this node's disk, which no key store of this machine has: from a \
                 curator of the cluster, or {by_hand}"
            ),
            None => format!(
                "the key of this node's disk, which is not stored (cold_start is ATTENDED); \
                 {by_hand}"
            ),
        };
        ctx.stage(Stage::Cluster, stage::State::Waiting(what));
        let mut network = self.network.clone();
        let address = until(&mut network, "the network", |status| status.primary);
        let secrets = sealed.and_then(|sealed| sealed.secrets.as_ref());
        let question = sealed.map(join_question).unwrap_or_default();
        let asked = async {
            match &curators {
                Some(curators) => ask(ctx, curators, address, &by_hand, question).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(asked);
        let credentials = credentials.map(|(credentials, _)| credentials);
        let mut waiting = request::wait(&self.unlock_requests, credentials);
        self.status.waits_for_key(true);
        let opened = loop {
            let request = tokio::select! {
                // Cancel-safe: it waits for a request and takes it in one step.
                request = waiting.next() => request,
                half = &mut asked => {
                    break match (half, secrets) {
                        (Ok(half), Some(secrets)) => {
                            unlocker.with_half(secrets, half, partition).await.map(Some)
                        }
                        (Ok(_), None) => Err(Error::NoShare),
                        (Err(error), _) => Err(error),
                    };
                }
            };
            if let Some(opened) = answer(&mut unlocker, sealed, partition, request).await {
                break opened;
            }
        };
        self.status.waits_for_key(false);
        ctx.stage(Stage::Cluster, stage::State::Started);
        opened
    }
}

/// The question for the cluster's half of the key.
pub(super) fn join_question(sealed: &Sealed) -> v1::JoinNodeRequest {
    v1::JoinNodeRequest {
        tpm: sealed.secrets.as_ref().is_some_and(Guarded::is_sealed),
        node_public_key: sealed.node_public_key.to_vec(),
    }
}

/// The key by which this node asks for its half.
pub(super) async fn join_key_of(
    sealer: &Sealer,
    secrets: &Guarded<Secrets>,
) -> Result<NodeKey, Error> {
    let (sealer, secrets) = (sealer.clone(), secrets.clone());
    blocking(move || Ok(join_key(&sealer.open(&secrets)?))).await
}

/// Tries the recovery key of one request; returns nothing if it belongs to another disk.
async fn answer(
    unlocker: &mut Unlocker,
    sealed: Option<&Sealed>,
    partition: Uuid,
    request: request::Request,
) -> Option<Result<Option<Keys>, Error>> {
    let request::Request { key, answer } = request;
    let key: RecoveryKey = key;
    match unlocker.recover(key, sealed, partition).await {
        Err(Error::RecoveryKeyWrong { reason }) => {
            warn!(reason, "the given recovery key does not open the disk");
            // The caller may have gone.
            let _gone = answer.send(Err(request::Refused::Wrong(reason)));
            None
        }
        opened => {
            let configured = opened.as_ref().map(drop);
            let configured = configured.map_err(|error| request::Refused::Wrong(error.to_string()));
            let _gone = answer.send(configured);
            Some(opened)
        }
    }
}

/// Asks for the cluster's half until a curator decides.
async fn ask(
    ctx: &Context,
    curators: &Remote,
    address: impl Future<Output = Result<IpAddr, polis_runtime::event::Closed>>,
    by_hand: &str,
    question: v1::JoinNodeRequest,
) -> Result<Half, Error> {
    address.await?;
    info!("asking the cluster for its half of the disk's key");
    let words = |why: &str| {
        format!("the key of this node's disk: from a curator of the cluster ({why}), or {by_hand}")
    };
    let call = |mut curator: v1::curator_client::CuratorClient<Channel>| {
        let question = question.clone();
        async move { curator.join_node(question).await }
    };
    let given = curators.retry_for(ctx, Untrusted::Wait, words, call).await?;
    Half::new(&given.cluster_unlock_key).ok_or(Error::NoShare)
}

/// Stores the half that a curator gave, if the cluster wants that.
pub(super) async fn keep(unlocker: &Unlocker, sealed: &Sealed, keys: Keys) -> Result<Keys, Error> {
    if keys.keeper.is_some() || sealed.keeping.cold_start == ColdStart::Attended {
        return Ok(keys);
    }
    let shares = unlocker.shares.clone();
    blocking(move || {
        let keeper = shares.keep(Slot::Current, &keys.secrets, &keys.cluster)?;
        Ok(Keys { keeper: Some(keeper), ..keys })
    })
    .await
}

/// The certificate that this machine serves with while its disk is locked, and the
/// fingerprint words of its key; nothing if the key is missing.
async fn meanwhile(sealer: &Sealer, sealed: Option<&Sealed>) -> Option<(rpc::Credentials, String)> {
    let sealed = sealed?.clone();
    let sealer = sealer.clone();
    let made = blocking(move || {
        let Some(secrets) = &sealed.secrets else { return Ok(None) };
        let join = sealer.open(secrets)?.join_key();
        let name = Identity::new(sealed.node_public_key).id.to_string();
        let certificate = pki::self_signed(&name, &join, clock::now());
        let certificate = certificate.map_err(|error| Error::Store(error.into()))?;
        let words = Fingerprint::of_key(join.verifying_key().as_bytes()).words();
        let key = Arc::new(pki::key_der(&join));
        let authorities = Some(Authorities::sole(sealed.trusted().to_vec()).into());
        Ok(Some((rpc::Credentials { certificate, key, authorities }, words)))
    });
    made.await.unwrap_or_else(|error: Error| {
        let error: &dyn std::error::Error = &error;
        warn!(error, "a recovery key can be typed at the console only");
        None
    })
}
