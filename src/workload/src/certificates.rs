//! The certificates, keys and configuration files of this controller: made if they are
//! missing, written, and renewed.
//!
//! A controller is a voter of etcd, so it reads and writes etcd directly.
//!
//! ```text
//! etcd: authorities, service-account key, encryption key --> /ephemeral/kubernetes
//! own keys on /data/kubernetes/pki -- signed in etcd ------> beside them
//!      ^                                                          |
//!      +-- every hour, and when an owner rotates the authorities -+
//! ```
//!
//! A certificate is renewed after two thirds of its life, when another authority signs, and when
//! the cluster's configuration has other names for the API: at once, since the node watches that
//! record. The node revokes and replaces a certificate with a former name. Every
//! program reads its files again when they change, but for the controller manager: it starts again
//! when another key signs tokens, and once a former authority, which it gives to pods, is not
//! trusted any more.
//! The bridges of a rotation follow each certificate, for a program that still holds a former
//! authority.
//!
//! Invariants:
//! - Of several controllers at once, one makes a shared key, and the others read it.
//! - A file is replaced whole, and only by other content.
//! - The certificate of the API server has the names of the configuration, and no former ones.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64ct::{Base64, Encoding as _};
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use futures::future::try_join_all;
use rand::TryRng as _;
use rand::rngs::SysRng;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::component;
use super::configuration;
use super::credentials::{Purpose, authority, front_proxy_authority};
use super::names;
use super::parts::{Part, PartState, Parts};
use super::site::Site;
use polis_base::cause;
use polis_base::files::{self, File, Pair};
use polis_base::sys::clock;
use polis_control::consensus;
use polis_control::consensus::client::{Client, User};
use polis_control::curator;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::pki::{
    self, Authorities, Certificate, Guard, Host, Issued, Namespace, Reason, ServiceAccounts, Store,
    Write,
};
use polis_wire::rpc::Credentials;

/// The delay after an attempt that failed: another controller may have been faster.
const RETRY: Duration = Duration::from_secs(2);

/// Between two looks while a former authority is trusted, so that its end is known in time.
const ROTATES: Duration = Duration::from_secs(30);

/// Where the key lies that encrypts Secrets.
const ENCRYPTION_KEY: &str = "encryption/secrets";
const ENCRYPTION_KEY_LENGTH: usize = 32;

/// Why the files of this node could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// etcd failed, or a value in it is damaged.
    #[error("cannot make the certificates of Kubernetes")]
    Pki(#[from] pki::Error),
    /// The key that encrypts Secrets.
    #[error("cannot read or make the key that encrypts Secrets")]
    Encryption(#[source] anyhow::Error),
    /// The names of the API in the cluster's configuration.
    #[error("cannot read the names of the API of Kubernetes")]
    Names(#[source] anyhow::Error),
    /// The key that encrypts Secrets has another length.
    #[error("the stored key that encrypts Secrets is damaged")]
    EncryptionDamaged,
    /// The kernel gave no random bytes.
    #[error("cannot make a key: no random bytes")]
    Random(#[source] rand::rngs::SysError),
    /// The disk.
    #[error("cannot keep the certificates of Kubernetes")]
    Files(#[from] files::Error),
}

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) site: Site,
    pub(super) node: NodeId,
    pub(super) consensus: watch::Receiver<consensus::Status>,
    /// Between two looks at the age of the certificates.
    pub(super) look: Duration,
    /// The node's own, which change when the authorities of the cluster do.
    pub(super) credentials: watch::Receiver<Option<Credentials>>,
    /// The authorities in the file that programs read.
    pub(super) trusted: watch::Sender<Trusted>,
    /// The name of the key in the file with which the controller manager signs.
    pub(super) signs: watch::Sender<Option<String>>,
    /// What the API server serves with.
    pub(super) serves: watch::Sender<Option<Credentials>>,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let voter = until(&mut self.consensus, "the etcd member", |status| {
            let users = [User::KubernetesPki, User::Curator];
            status.voter().map(|clients| users.map(|user| clients.user(user)))
        });
        let Some(clients) = ctx.until_cancelled(voter).await.transpose()? else { return Ok(()) };
        let [client, etcd] = clients;
        let records = curator::Store::new(etcd.clone());
        let mut known = Vec::new();
        let mut failed = cause::Last::default();
        loop {
            // Boxed: a certificate in the making is large, and made once an hour at most.
            let pass = Box::pin(self.pass(&client, &records, &mut known));
            let Some(done) = ctx.until_cancelled(pass).await else { return Ok(()) };
            let wait = match done {
                Ok(wait) => {
                    ctx.healthy();
                    failed.clear();
                    self.parts.set(Part::Certificates, PartState::Ready);
                    wait
                }
                Err(Error::Pki(pki::Error::Lost { .. })) => RETRY,
                Err(error) => {
                    let cause = cause::line(&error);
                    if failed.is_new(&cause) {
                        let error = &error as &dyn std::error::Error;
                        warn!(error, every = ?RETRY, "trying again until it succeeds");
                    }
                    self.parts.fail(Part::Certificates, cause);
                    RETRY
                }
            };
            let wait = async {
                tokio::select! {
                    // Cancel-safe, both: they change nothing.
                    () = until_another_look(wait, &mut self.credentials) => {}
                    () = names::until_other(&etcd, &known) => {}
                }
            };
            if ctx.until_cancelled(wait).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Makes and writes every key, certificate and file, with the names of the API of now in
    /// `known`; returns how long to wait before the next look.
    async fn pass(
        &self,
        client: &Client,
        records: &curator::Store<Client>,
        known: &mut Vec<Host>,
    ) -> Result<Duration, Error> {
        *known = names::read(records).await.map_err(Error::Names)?;
        let names = known.as_slice();
        let namespace = Namespace::new(client.clone(), "");
        let ca = authorities(&namespace, &authority()).await?;
        let front_proxy_ca = authorities(&namespace, &front_proxy_authority()).await?;
        let accounts = ServiceAccounts::new(client.clone(), "").ensure().await?;
        let encryption = encryption_key(client).await?;

        let signs = accounts.id().to_owned();
        let (data, run) = (self.site.data.clone(), self.site.run.clone());
        let (api, site) = (self.site.api(), self.site.clone());
        let (ca_pem, front_proxy_pem) = (ca.trusted_pem(), front_proxy_ca.trusted_pem());
        blocking(move || {
            data.create()?;
            run.create()?;
            replace(&run.ca, &ca_pem)?;
            replace(&run.front_proxy_ca, &front_proxy_pem)?;
            replace(&run.service_account_key, accounts.signing_pem().as_bytes())?;
            let key = Zeroizing::new(Base64::encode_string(&encryption));
            replace(&run.encryption, &configuration::encryption(&key))?;
            write_configuration(&site, api)
        })
        .await?;

        // At once: each waits for the disk several times, and the API server for all of them.
        let certificates = Purpose::ALL.into_iter().map(|purpose| {
            let proxy = purpose.authority().name == front_proxy_authority().name;
            let authorities = if proxy { &front_proxy_ca } else { &ca };
            self.certificate(&namespace, purpose, authorities, names)
        });
        try_join_all(certificates).await?;
        self.signs.send_if_modified(|known| known.replace(signs.clone()) != Some(signs));
        publish(&self.trusted, self.site.run.ca.clone()).await;
        let after = [authority(), front_proxy_authority()];
        for (authority, before) in after.iter().zip([&ca, &front_proxy_ca]) {
            // A rotation that began meanwhile: what was signed then has no bridges.
            if authorities(&namespace, authority).await? != *before {
                return Ok(RETRY);
            }
        }
        Ok(look([&ca, &front_proxy_ca], self.look))
    }

    /// Makes or renews one certificate, and writes it.
    async fn certificate(
        &self,
        namespace: &Namespace<Client>,
        purpose: Purpose,
        authorities: &Authorities,
        names: &[Host],
    ) -> Result<(), Error> {
        let pair = purpose.pair(&self.site.data);
        let key = blocking({
            let pair = pair.clone();
            move || own_key(&pair)
        })
        .await?;
        let wish = purpose.wish(&self.site, self.node, names, key.verifying_key().to_bytes());
        let issued = issued(namespace, &wish, purpose).await?;
        let chain = authorities.chain_pem(&issued.der);
        let new = blocking(move || replace(&pair.certificate, &chain)).await?;
        if new {
            info!(purpose = purpose.name(), "a new certificate");
        }
        if purpose == Purpose::ApiServer {
            let serves = Some(Credentials {
                certificate: issued.der,
                key: Arc::new(pki::key_der(&key)),
                authorities: Some(Arc::new(authorities.clone())),
            });
            self.serves.send_if_modified(|known| {
                let changed = *known != serves;
                *known = serves;
                changed
            });
        }
        Ok(())
    }
}

/// How long to wait before the next look; shorter while a former authority is trusted.
pub(super) fn look<'a>(
    known: impl IntoIterator<Item = &'a Authorities>,
    usual: Duration,
) -> Duration {
    let mut known = known.into_iter();
    if known.any(|known| known.leaving.is_some()) { usual.min(ROTATES) } else { usual }
}

/// The authorities in a file that programs read; `None` before it is there.
pub(super) type Trusted = Option<Vec<CertificateDer<'static>>>;

/// Publishes the authorities that are in the file.
pub(super) async fn publish(trusted: &watch::Sender<Trusted>, file: File) {
    let now = blocking(move || pki::certificates_der(&file.read().ok()??)).await;
    trusted.send_if_modified(|known| {
        let changed = *known != now;
        *known = now;
        changed
    });
}

/// Waits until an authority that was trusted when this part started is not trusted any more: the
/// part reads the file only at its start.
pub(super) async fn until_an_authority_ends(
    part: Part,
    mut trusted: watch::Receiver<Trusted>,
) -> component::Error {
    let begun = trusted.borrow_and_update().clone();
    let gone = until(&mut trusted, "the authorities of Kubernetes", |now| {
        let (begun, now) = (begun.as_ref()?, now.as_ref()?);
        begun.iter().any(|old| !now.contains(old)).then_some(())
    });
    let what = "an authority of Kubernetes is not trusted any more";
    match gone.await {
        Ok(()) => component::Error::Outdated { part, what },
        Err(closed) => closed.into(),
    }
}

/// Waits until another authority signs than when this part started.
pub(super) async fn until_another_authority_signs(
    part: Part,
    mut trusted: watch::Receiver<Trusted>,
) -> component::Error {
    // The one that signs comes first.
    let first = |known: &Trusted| known.as_ref()?.first().cloned();
    let begun = first(&trusted.borrow_and_update());
    let what = "another authority of Kubernetes signs";
    match until_other(&mut trusted, begun, first).await {
        Ok(()) => component::Error::Outdated { part, what },
        Err(closed) => closed.into(),
    }
}

/// Waits until another key signs tokens than when this part started, which reads it then only.
pub(super) async fn until_another_key_signs(
    part: Part,
    mut signs: watch::Receiver<Option<String>>,
) -> component::Error {
    let begun = signs.borrow_and_update().clone();
    let what = "another key signs the tokens of service accounts";
    match until_other(&mut signs, begun, Clone::clone).await {
        Ok(()) => component::Error::Outdated { part, what },
        Err(closed) => closed.into(),
    }
}

/// Waits until what `of` takes from a value is another than `begun`, where both are known.
async fn until_other<T, V: PartialEq>(
    value: &mut watch::Receiver<T>,
    begun: Option<V>,
    of: impl Fn(&T) -> Option<V>,
) -> Result<(), Closed> {
    until(value, "the keys of Kubernetes", |now| {
        let (begun, now) = (begun.as_ref()?, of(now)?);
        (*begun != now).then_some(())
    })
    .await
}

/// Waits for `wait`, or until the credentials of the node change.
pub(super) async fn until_another_look(
    wait: Duration,
    credentials: &mut watch::Receiver<Option<Credentials>>,
) {
    tokio::select! {
        () = sleep(wait) => {}
        Ok(()) = credentials.changed() => {}
    }
}

/// An authority and those before it; the authority is made if there is none.
async fn authorities(
    namespace: &Namespace<Client>,
    authority: &Certificate,
) -> Result<Authorities, Error> {
    namespace.ensure(authority, clock::now()).await?;
    let known = namespace.authorities(authority).await?;
    let name = || authority.name.clone();
    Ok(known.ok_or_else(|| pki::Error::Damaged { what: "certificate", name: name() })?)
}

/// The certificate in etcd, renewed if that is due; made if there is none for this key, or if it
/// has a host too many.
async fn issued(
    namespace: &Namespace<impl Store>,
    wish: &Certificate,
    purpose: Purpose,
) -> Result<Issued, Error> {
    let now = clock::now();
    // Before the renewal, which keeps the former certificate valid: one name may have replaced
    // another, or one have left while the node was off.
    match namespace.has_former_host(wish).await {
        Ok(false) => {
            return match namespace.renew(wish, now).await? {
                Some(renewed) => Ok(renewed),
                None => Ok(namespace.ensure(wish, now).await?),
            };
        }
        Ok(true) => {
            info!(purpose = purpose.name(), "a host was removed: the certificate is replaced");
        }
        Err(pki::Error::OtherKey { .. }) => {
            warn!(purpose = purpose.name(), "the key of this node was lost, and is replaced");
        }
        Err(error) => return Err(error.into()),
    }
    namespace.revoke_surely(&purpose.authority(), &wish.name, Reason::Unspecified, now).await?;
    Ok(namespace.ensure(wish, now).await?)
}

/// The files that follow from the site alone. Blocks.
fn write_configuration(site: &Site, api: SocketAddr) -> Result<(), Error> {
    let run = &site.run;
    replace(&run.authentication, &configuration::authentication())?;
    replace(&run.admission, &configuration::admission())?;
    replace(&run.audit_policy, &configuration::audit_policy())?;
    let ways = [
        (&run.controller_manager, Purpose::ControllerManager),
        (&run.scheduler, Purpose::Scheduler),
    ];
    for (file, purpose) in ways {
        let client = purpose.pair(&site.data);
        replace(file, &configuration::kubeconfig(api, &run.ca, &client))?;
    }
    Ok(())
}

/// The key of a pair, made if it is missing or damaged: another certificate replaces the one
/// of a lost key. The program of the pair may read both files afterwards, also those that an
/// earlier system wrote. Blocks.
pub(super) fn own_key(pair: &Pair) -> Result<SigningKey, Error> {
    pair.settle()?;
    let stored = pair.key.read()?.map(Zeroizing::new);
    let text = stored.as_ref().and_then(|bytes| std::str::from_utf8(bytes).ok());
    if let Some(key) = text.and_then(|text| SigningKey::from_pkcs8_pem(text).ok()) {
        return Ok(key);
    }
    let mut seed = Zeroizing::new([0; 32]);
    SysRng.try_fill_bytes(seed.as_mut()).map_err(Error::Random)?;
    let key = SigningKey::from_bytes(&seed);
    pair.key.write(pki::key_pem(&key).as_bytes())?;
    Ok(key)
}

/// The key that encrypts Secrets in etcd, the same for all controllers.
async fn encryption_key(store: &impl Store) -> Result<Zeroizing<Vec<u8>>, Error> {
    if let Some(found) = store.get(ENCRYPTION_KEY).await.map_err(Error::Encryption)? {
        let key = Zeroizing::new(found.value);
        return if key.len() == ENCRYPTION_KEY_LENGTH {
            Ok(key)
        } else {
            Err(Error::EncryptionDamaged)
        };
    }
    let mut key = Zeroizing::new(vec![0; ENCRYPTION_KEY_LENGTH]);
    SysRng.try_fill_bytes(&mut key).map_err(Error::Random)?;
    let guards = vec![Guard::Absent(ENCRYPTION_KEY.to_owned())];
    let writes = vec![Write::Put(ENCRYPTION_KEY.to_owned(), key.to_vec())];
    match store.commit(guards, writes).await.map_err(Error::Encryption)? {
        true => Ok(key),
        false => Err(pki::Error::Lost { name: ENCRYPTION_KEY.to_owned() }.into()),
    }
}

/// Writes a file unless it has that content already; returns whether it did. Blocks.
pub(super) fn replace(file: &File, content: &[u8]) -> Result<bool, files::Error> {
    let old = file.read()?.map(Zeroizing::new);
    let same = old.is_some_and(|old| old.as_slice() == content);
    if !same {
        file.write(content)?;
    }
    Ok(!same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::files::Group;
    use polis_wire::pki::memory::Memory;

    #[tokio::test]
    async fn a_name_is_in_the_certificate_from_its_addition_to_its_removal() {
        let namespace = Namespace::new(Memory::default(), "");
        let (site, node) = (crate::site::live(), NodeId::from_public_key(&[7; 32]));
        namespace.ensure(&authority(), clock::now()).await.unwrap();
        let name = Host::Name("api.example".to_owned());
        let shown = async |names: &[Host]| {
            let purpose = Purpose::ApiServer;
            let wish = purpose.wish(&site, node, names, [1; 32]);
            issued(&namespace, &wish, purpose).await.unwrap().der
        };
        let plain = shown(&[]).await;
        assert!(!pki::hosts(&plain).contains(&name));
        let named = shown(std::slice::from_ref(&name)).await;
        assert!(pki::hosts(&named).contains(&name));
        assert_eq!(shown(std::slice::from_ref(&name)).await, named, "nothing has changed");
        let other = Host::Name("other.example".to_owned());
        let replaced = shown(std::slice::from_ref(&other)).await;
        assert!(pki::hosts(&replaced).contains(&other) && !pki::hosts(&replaced).contains(&name));
        let removed = shown(&[]).await;
        assert_eq!(pki::hosts(&removed), pki::hosts(&plain));
        assert_eq!(shown(&[]).await, removed, "nothing has changed");
        let crl = namespace.crl(&authority()).await.unwrap().unwrap();
        let revoked = [&named, &replaced, &removed]
            .map(|der| crl.revokes(&pki::Facts::read(der).unwrap().serial));
        assert_eq!(revoked, [true, true, false]);
    }

    #[tokio::test]
    async fn the_key_of_secrets_is_made_once() {
        let memory = Memory::default();
        let key = encryption_key(&memory).await.unwrap();
        assert_eq!(key.len(), ENCRYPTION_KEY_LENGTH);
        assert_eq!(encryption_key(&memory).await.unwrap(), key);
        let short = vec![Write::Put(ENCRYPTION_KEY.to_owned(), vec![1])];
        assert!(memory.commit(Vec::new(), short).await.unwrap());
        assert!(matches!(encryption_key(&memory).await, Err(Error::EncryptionDamaged)));
    }

    #[test]
    fn a_key_is_made_once_and_a_damaged_one_is_replaced() {
        let base = tempfile::tempdir().unwrap();
        let kubernetes = files::Root::at(base.path()).data.kubernetes;
        kubernetes.create().unwrap();
        let pair = kubernetes.pair("test", Group::Root);
        let made = own_key(&pair).unwrap();
        assert_eq!(own_key(&pair).unwrap(), made);
        pair.key.write(b"noise").unwrap();
        let other = own_key(&pair).unwrap();
        assert_ne!(other, made);
        assert_eq!(own_key(&pair).unwrap(), other);
    }

    #[test]
    fn a_file_is_written_for_other_content_only() {
        let base = tempfile::tempdir().unwrap();
        let kubernetes = files::Root::at(base.path()).data.kubernetes;
        kubernetes.create().unwrap();
        let file = kubernetes.pair("test", Group::Root).certificate;
        let writes = ["one", "one", "two"].map(|text| replace(&file, text.as_bytes()).unwrap());
        assert_eq!(writes, [true, false, true]);
    }

    #[test]
    fn an_error_is_one_line_with_its_causes() {
        let error = Error::Encryption(anyhow::anyhow!("no leader").context("the store is closed"));
        let text = cause::line(&error);
        assert!(text.ends_with("encrypts Secrets: the store is closed: no leader"), "{text}");
    }
}
