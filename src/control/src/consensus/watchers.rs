//! The watchers of certificates: keep the files that etcd reads in step with the
//! certificates kept in etcd.
//!
//! Three services below `consensus`, each waiting until this member is a voter: a learner
//! can read nothing. etcd reads certificate, key and CRL again at every handshake, so it is
//! enough to replace a file.
//!
//! What this module does not do: revoke (`members`).

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use super::client::{Client, Kv, Mirror, User};
use super::credentials::{authority, chain_pem, peer_certificate, trusted_pem};
use super::{Error, Peer, Status};
use polis_base::files::Etcd;
use polis_base::sys::clock;
use polis_runtime::event::until;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{Identity, NodeId};
use polis_wire::pki::{Authorities, Crl, Namespace, Overview, Renewal};

/// The time between two checks of the certificate's age, which is counted in days.
const POLL_INTERVAL: Duration = Duration::from_secs(60 * 60);

/// The delay after a renewal that did not work: another member may have been faster.
const RETRY: Duration = Duration::from_secs(5);

/// The place of the cluster's certificates: namespace and folder.
const SHOWN: [(User, &str); 2] = [(User::EtcdPki, ""), (User::Curator, "pki/")];

/// The parts that the three services share.
#[derive(Clone, Debug)]
pub(super) struct Watchers {
    pub(super) tree: Etcd,
    pub(super) identity: Identity,
    pub(super) peer: Peer,
    pub(super) status: watch::Receiver<Status>,
    /// Receives which authorities the files name.
    pub(super) written: watch::Sender<Status>,
    pub(super) overview: watch::Sender<Overview>,
}

impl Watchers {
    /// Waits until this member is a voter. `None` once the run must end.
    async fn client(&mut self, ctx: &Context, user: User) -> Result<Option<Client>, Error> {
        let voter = until(&mut self.status, "the etcd member", |status| {
            status.voter().map(|clients| clients.user(user))
        });
        let client = ctx.until_cancelled(voter).await.transpose()?;
        if client.is_some() {
            ctx.healthy();
        }
        Ok(client)
    }

    /// Keeps the CRL on the disk equal to the one in etcd.
    pub(super) async fn crl(mut self, ctx: Context) -> Result<(), Error> {
        let Some(client) = self.client(&ctx, User::EtcdPki).await? else { return Ok(()) };
        let key = Namespace::new(client.clone(), "").crl_key(&authority());
        let value = watch::Sender::new(None);
        let mut newest = value.subscribe();
        let write = async {
            loop {
                let stored = until(&mut newest, "the CRL", |value: &Option<Option<Kv>>| {
                    value.clone().flatten()
                })
                .await?;
                self.write_crl(&stored.value).await?;
                newest
                    .changed()
                    .await
                    .map_err(|_closed| polis_runtime::event::Closed("the CRL"))?;
            }
        };
        tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Ok(()),
            // Cancel-safe: follows again from a listing.
            never = client.follow_key(&key, &value) => match never {},
            // Cancel-safe: a write goes on by itself and is never torn.
            ended = write => ended,
        }
    }

    async fn write_crl(&self, der: &[u8]) -> Result<(), Error> {
        let Some(crl) = Crl::read(der) else {
            // The file on the disk is the last one that could be read.
            warn!("the CRL in etcd cannot be read and is not used");
            return Ok(());
        };
        if replace(&self.tree.peer_crl, crl.pem().into_bytes()).await? {
            info!(number = crl.number, revoked = crl.revoked.len(), "applied the CRL");
        }
        Ok(())
    }

    /// Renews this member's certificate, and keeps its files equal to what is in etcd: at once
    /// when the authority is rotated.
    pub(super) async fn certificate(mut self, ctx: Context) -> Result<(), Error> {
        let Some(client) = self.client(&ctx, User::EtcdPki).await? else { return Ok(()) };
        let namespace = Namespace::new(client.clone(), "");
        let key = namespace.rotated_key(&authority());
        let rotated = watch::Sender::new(None);
        let mut news = rotated.subscribe();
        let maintain = async {
            loop {
                news.mark_unchanged();
                // Boxed: a certificate in the making is large, and rare.
                let wait = match Box::pin(self.renew(&namespace)).await {
                    Ok(()) => POLL_INTERVAL,
                    Err(Error::Pki(error)) if error.retriable() => {
                        let error = &error as &dyn std::error::Error;
                        warn!(error, "cannot maintain the member's certificate, retrying");
                        RETRY
                    }
                    Err(error) => return Err(error),
                };
                // The sender outlives this.
                let _news = tokio::time::timeout(wait, news.changed()).await;
            }
        };
        tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Ok(()),
            // Cancel-safe: follows again from a listing.
            never = client.follow_key(&key, &rotated) => match never {},
            // Cancel-safe: a write goes on by itself and is never torn.
            ended = maintain => ended,
        }
    }

    async fn renew(&self, namespace: &Namespace<Client>) -> Result<(), Error> {
        let desired = peer_certificate(&self.identity, &self.peer);
        let issued = match namespace.renew(&desired, clock::now()).await? {
            Some(renewed) => {
                info!("renewed the member's certificate");
                renewed
            }
            None => namespace.ensure(&desired, clock::now()).await?,
        };
        let authorities = namespace.authorities(&authority()).await?;
        let authorities = authorities.unwrap_or_else(|| Authorities::sole(issued.issuer_der));
        if !authorities.signed(&issued.der) {
            // Rotated since: the next look is at once.
            return Ok(());
        }
        // The certificate first: peers that trust only the next authority accept it then.
        replace(&self.tree.peer_pki.cert, chain_pem(&issued.der, &authorities)).await?;
        if replace(&self.tree.peer_pki.ca, trusted_pem(&authorities)).await? {
            info!(rotations = authorities.rotations, "the authority of the peers was rotated");
        }
        let digest = Some(super::trusted_digest(&authorities));
        self.written.send_if_modified(|status| {
            std::mem::replace(&mut status.authorities, digest) != digest
        });
        Ok(())
    }

    /// Publishes which certificates exist.
    pub(super) async fn overview(mut self, ctx: Context) -> Result<(), Error> {
        let [first, second] = SHOWN;
        let Some(one) = self.client(&ctx, first.0).await? else { return Ok(()) };
        let Some(two) = self.client(&ctx, second.0).await? else { return Ok(()) };
        let folders = std::sync::Mutex::new([BTreeMap::new(), BTreeMap::new()]);
        let show = |which: usize, folder: &str, mirror: &Mirror| {
            let entries = mirror.entries.values();
            let entries = entries
                .filter_map(|kv| Some((kv.key.strip_prefix(folder)?.to_owned(), kv.value.clone())));
            let mut folders = folders.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            folders[which] = entries.collect();
            let mut overview = Overview::default();
            // Each member renews its own certificate, see `certificate`.
            overview.add(one.namespace(), &folders[0], |_| Renewal::ByUser);
            // Nodes and their curators renew their own; for other certificates a person sees to
            // the renewal.
            overview.add(two.namespace(), &folders[1], |name| {
                let node = name.split_once('.').map_or(name, |(node, _curator)| node);
                match node.parse::<NodeId>() {
                    Ok(_node) => Renewal::ByUser,
                    Err(_person) => Renewal::WhenUsed,
                }
            });
            self.overview
                .send_if_modified(|shown| std::mem::replace(shown, overview.clone()) != overview);
        };
        tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Ok(()),
            // Cancel-safe: follows again from a listing.
            never = one.follow(first.1, |mirror, _| show(0, first.1, mirror)) => match never {},
            // Cancel-safe: follows again from a listing.
            never = two.follow(second.1, |mirror, _| show(1, second.1, mirror)) => match never {},
        }
    }
}

/// Writes a file unless it has that content already.
async fn replace(file: &polis_base::files::File, content: Vec<u8>) -> Result<bool, Error> {
    let same = {
        let (file, content) = (file.clone(), content.clone());
        blocking(move || file.read().map(|old| old.as_ref() == Some(&content))).await?
    };
    if !same {
        file.save(content).await?;
    }
    Ok(!same)
}
