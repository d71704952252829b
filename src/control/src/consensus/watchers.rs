//! The watchers of certificates: keep the files that etcd reads in step with the
//! certificates kept in etcd.
//!
//! Three services below `consensus`, each waiting until this member is a voter: a learner
//! can read nothing. etcd reads certificate, key and CRL again at every handshake, so it is
//! enough to replace a file.
//!
//! What this module does not do: revoke (`members`).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::client::{Change, Client, Kv, User};
use super::credentials::{authority, peer_certificate, trusted_pem};
use super::{Error, Peer, Status};
use polis_base::cause;
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

/// Between two overviews, at least. Making one reads every certificate.
const OVERVIEW_PACE: Duration = Duration::from_secs(1);

/// How many times longer than making an overview the wait for the next one is: the nodes of
/// a large cluster that all renew their certificates take a twentieth of a processor at most.
const OVERVIEW_SHARE: u32 = 20;

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
        let mut failed = cause::Last::default();
        let maintain = async {
            loop {
                news.mark_unchanged();
                // Boxed: a certificate in the making is large, and rare.
                let wait = match Box::pin(self.renew(&namespace)).await {
                    Ok(()) => {
                        failed.clear();
                        POLL_INTERVAL
                    }
                    Err(Error::Pki(error)) if error.retriable() => {
                        let error = cause::line(&error);
                        if failed.is_new(&error) {
                            warn!(error, "cannot maintain the member's certificate, retrying");
                        }
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
        replace(&self.tree.peer_pki.cert, authorities.chain_pem(&issued.der)).await?;
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
        let copies = Mutex::new(Copies::default());
        let changed = Notify::new();
        let update = |which: usize, folder: &str, changes: &[Change]| {
            locked(&copies).update(which, folder, changes);
            changed.notify_one();
        };
        let namespaces = [one.namespace().to_owned(), two.namespace().to_owned()];
        tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Ok(()),
            // Cancel-safe: follows again from a listing.
            never = one.follow(first.1, |_, changes| update(0, first.1, changes)) => match never {},
            // Cancel-safe: follows again from a listing.
            never = two.follow(second.1, |_, changes| update(1, second.1, changes)) => match never {},
            // Cancel-safe: the next run makes the overview anew.
            never = self.publish(&copies, &changed, &namespaces) => match never {},
        }
    }

    /// Makes an overview after each change, at a bounded pace.
    async fn publish(
        &self,
        copies: &Mutex<Copies>,
        changed: &Notify,
        namespaces: &[String; SHOWN.len()],
    ) -> Infallible {
        loop {
            changed.notified().await;
            let (copies, namespaces) = (locked(copies).clone(), namespaces.clone());
            let begun = Instant::now();
            let overview = blocking(move || copies.overview(&namespaces)).await;
            self.overview.send_if_modified(|shown| {
                let differs = *shown != overview;
                *shown = overview;
                differs
            });
            tokio::time::sleep(OVERVIEW_PACE.max(begun.elapsed() * OVERVIEW_SHARE)).await;
        }
    }
}

/// The contents of the namespaces that are shown. A change costs the same with ten
/// certificates and with ten thousand.
#[derive(Clone, Default)]
struct Copies([Arc<BTreeMap<String, Vec<u8>>>; SHOWN.len()]);

impl Copies {
    fn update(&mut self, which: usize, folder: &str, changes: &[Change]) {
        // Copies the map only while an overview is made of it.
        let copy = Arc::make_mut(&mut self.0[which]);
        let inside = |key: &str| key.strip_prefix(folder).map(str::to_owned);
        for change in changes {
            match change {
                Change::Put(kv) => copy.extend(inside(&kv.key).map(|key| (key, kv.value.clone()))),
                Change::Gone(key) => drop(inside(key).and_then(|key| copy.remove(&key))),
            }
        }
    }

    fn overview(&self, namespaces: &[String; SHOWN.len()]) -> Overview {
        let [peers, cluster] = &self.0;
        let mut overview = Overview::default();
        // Each member renews its own certificate, see `certificate`.
        overview.add(&namespaces[0], peers, |_| Renewal::ByUser);
        // Nodes and their curators renew their own; for other certificates a person sees to
        // the renewal.
        overview.add(&namespaces[1], cluster, |name| {
            let node = name.split_once('.').map_or(name, |(node, _curator)| node);
            match node.parse::<NodeId>() {
                Ok(_node) => Renewal::ByUser,
                Err(_person) => Renewal::WhenUsed,
            }
        });
        overview
    }
}

fn locked(copies: &Mutex<Copies>) -> MutexGuard<'_, Copies> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str) -> Change {
        let kv = Kv { key: key.to_owned(), value: vec![1], created: 1, modified: 1, lease: 0 };
        Change::Put(kv)
    }

    #[test]
    fn an_overview_in_the_making_keeps_its_contents_and_no_other_change_copies_them() {
        let mut copies = Copies::default();
        copies.update(1, "pki/", &[put("pki/a"), put("nodes/a")]);
        let at = Arc::as_ptr(&copies.0[1]);
        copies.update(1, "pki/", &[put("pki/b")]);
        assert_eq!(Arc::as_ptr(&copies.0[1]), at);
        let shown = copies.clone();
        copies.update(1, "pki/", &[Change::Gone("pki/a".to_owned()), put("pki/c")]);
        let keys = |copies: &Copies| copies.0[1].keys().cloned().collect::<Vec<_>>();
        assert_eq!(
            (keys(&shown), keys(&copies)),
            (vec!["a".into(), "b".into()], vec!["b".into(), "c".into()])
        );
    }
}
