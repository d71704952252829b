//! The credentials of this node: publishes the certificate and the key that it serves and
//! calls with.
//!
//! ```text
//! [none] --home--> read from the disk --> [credentials] --home again--> read again
//! ```
//!
//! Invariants:
//! - Credentials are published only while this machine is a member, and they are its own.

use tokio::sync::watch;
use tracing::error;
use zeroize::Zeroizing;

use super::{State, Status};
use polis_base::files::{self, File};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::pki::{Authorities, Facts};
use polis_wire::rpc;

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where the files are.
    pub files: files::Credentials,
    /// Whether this machine is a member.
    pub cluster: watch::Receiver<Status>,
    /// The certificate and key that every server and client of this node uses.
    pub credentials: watch::Sender<Option<rpc::Credentials>>,
}

/// Why the credentials are missing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// A file cannot be read.
    #[error("cannot read the credentials of this node")]
    Read(#[from] polis_base::files::Error),
    /// A file is missing or has unexpected content.
    #[error("the credentials of this node are damaged: {0}")]
    Damaged(&'static str),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        loop {
            let home = until(&mut self.cluster, "the cluster", |status| {
                (status.state == State::Home).then_some(())
            });
            let Some(home) = ctx.until_cancelled(home).await else { return Ok(()) };
            home?;
            let files = self.files.clone();
            let read = blocking(move || read(&files)).await?;
            self.credentials.send_replace(Some(read));
            ctx.healthy();
            let away = until(&mut self.cluster, "the cluster", |status| {
                matches!(status.state, State::Unknown | State::Disowning).then_some(())
            });
            let Some(away) = ctx.until_cancelled(away).await else { return Ok(()) };
            away?;
            self.credentials.send_replace(None);
        }
    }
}

pub(super) fn read(files: &files::Credentials) -> Result<rpc::Credentials, Error> {
    let key = files.key.read()?.ok_or(Error::Damaged("the key is missing"))?;
    let certificate = pem(&files.certificate, "the certificate is missing")?;
    let authorities = files.authorities.read()?.ok_or(Error::Damaged("the CA is missing"))?;
    let authorities = Authorities::from_record(&authorities);
    let authorities = authorities.ok_or(Error::Damaged("the CA cannot be read"))?;
    if Facts::read(&certificate).is_none() {
        error!("the certificate of this node cannot be read");
        return Err(Error::Damaged("the certificate cannot be read"));
    }
    let key = Zeroizing::new(key).into();
    Ok(rpc::Credentials { certificate, key, authorities: Some(authorities.into()) })
}

fn pem(file: &File, missing: &'static str) -> Result<Vec<u8>, Error> {
    let text = file.read()?.ok_or(Error::Damaged(missing))?;
    let (_, pem) = x509_parser::pem::parse_x509_pem(&text)
        .map_err(|_parse| Error::Damaged("a certificate is not in PEM"))?;
    Ok(pem.contents)
}

#[cfg(test)]
mod tests {
    use polis_runtime::save::Save as _;

    use super::*;
    use polis_base::files::Root;

    #[tokio::test]
    async fn only_a_member_has_credentials() {
        let disk = tempfile::tempdir().unwrap();
        let root = Root::at(disk.path());
        root.create().unwrap();
        let files = root.data.node.credentials;
        let key = polis_wire::identity::NodeKey::generate().unwrap();
        let store = crate::curator::Store::new(polis_wire::pki::memory::Memory::default());
        let now = polis_base::sys::clock::now();
        let issued = store.ensure_node_certificate(key.identity(), now).await.unwrap();
        files.key.save(key.to_pkcs8_der().unwrap().to_vec()).await.unwrap();
        let text = |der: &[u8]| polis_wire::pki::certificate_pem(der).into_bytes();
        files.certificate.save(text(&issued.der)).await.unwrap();

        let (home, cluster) = watch::channel(Status::default());
        let credentials = watch::Sender::new(None);
        let mut published = credentials.subscribe();
        let service = Service { files: files.clone(), cluster, credentials };
        let (ctx, handles) = Context::for_test();
        home.send_modify(|status| status.state = State::Home);
        let refused = service.clone().run(ctx.clone()).await;
        assert!(matches!(refused, Err(Error::Damaged(_))), "the CA is missing");
        let known = Authorities::sole(issued.issuer_der.clone());
        files.authorities.save(known.to_record()).await.unwrap();
        let look = async {
            let found = until(&mut published, "test", Clone::clone).await.unwrap();
            assert_eq!(found.certificate, issued.der);
            assert_eq!(found.authorities.as_deref(), Some(&known));
            home.send_modify(|status| status.state = State::Disowning);
            until(&mut published, "test", |now| now.is_none().then_some(())).await.unwrap();
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(service.run(ctx), look);
        ended.unwrap();
    }
}
