//! A cluster's certificates, and servers on loopback, for tests of this crate and of others.
#![expect(clippy::unwrap_used, reason = "a helper of tests panics as a test does")]

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::EncodePrivateKey as _;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use zeroize::Zeroizing;

use super::access_list::{Listed, Users};
use super::client::{Connection, DialError, Expect, Trust, dial};
use super::server::BACKLOG;
use super::{
    AccessList, App, Config, Credentials, Error, Limits, Listen, Metrics, Role, Server, Table,
};
use crate::identity::NodeId;
use crate::pki::memory::Memory;
use crate::pki::{Authorities, Certificate, Issuer, Mode, Namespace, Pin, Reason, Template};
use polis_base::sys::clock;
use polis_runtime::supervisor::{Context, Handles};

/// Longest wait for anything on loopback.
pub const SOON: Duration = Duration::from_secs(20);

/// Where a server gets its users from.
type List = watch::Sender<Arc<AccessList>>;

/// The CA of a cluster that consists only of certificates.
#[derive(Clone, Debug)]
pub struct Authority {
    namespace: Namespace<Memory>,
    certificate: Arc<Certificate>,
    /// The users that it has signed for, and the servers that receive them.
    admitted: Arc<Mutex<(Users, Vec<List>)>>,
    /// The certificate of its first CA.
    pub der: Vec<u8>,
}

/// The key that grows from `seed`.
#[must_use]
pub fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// The ID of the node with that key.
#[must_use]
pub fn node_id(seed: u8) -> NodeId {
    NodeId::from_public_key(&key(seed).verifying_key().to_bytes())
}

fn pkcs8(key: &SigningKey) -> Arc<Zeroizing<Vec<u8>>> {
    Arc::new(Zeroizing::new(key.to_pkcs8_der().unwrap().as_bytes().to_vec()))
}

impl Authority {
    /// A new CA.
    pub async fn new() -> Self {
        let namespace = Namespace::new(Memory::default(), "");
        let certificate = Arc::new(Certificate {
            issuer: Issuer::Itself,
            name: "cluster".to_owned(),
            template: Template::ClusterAuthority,
            mode: Mode::Managed,
        });
        let der = namespace.ensure(&certificate, clock::now()).await.unwrap().der;
        Self { namespace, certificate, admitted: Arc::default(), der }
    }

    /// The authorities that its nodes know.
    pub async fn authorities(&self) -> Arc<Authorities> {
        self.namespace.authorities(&self.certificate).await.unwrap().unwrap().into()
    }

    /// Begins the rotation of this number.
    pub async fn rotate(&self, rotation: u64) {
        assert!(self.namespace.rotate(&self.certificate, rotation, clock::now()).await.unwrap());
    }

    /// Ends the rotation.
    pub async fn conclude(&self) {
        assert!(self.namespace.conclude(&self.certificate, Pin::None).await.unwrap());
    }

    /// Signs any template.
    pub async fn sign(
        &self,
        name: &str,
        template: Template,
        seed: u8,
        now: SystemTime,
    ) -> Credentials {
        let key = key(seed);
        let desired = Certificate {
            issuer: Issuer::Authority(Arc::clone(&self.certificate)),
            name: name.to_owned(),
            template,
            mode: Mode::External(key.verifying_key().to_bytes()),
        };
        let issued = self.namespace.ensure(&desired, now).await.unwrap();
        let authorities = Some(self.authorities().await);
        Credentials { certificate: issued.der, key: pkcs8(&key), authorities }
    }

    /// Credentials of a node.
    pub async fn node(&self, seed: u8) -> Credentials {
        self.sign(&node_id(seed).to_string(), Template::Node, seed, clock::now()).await
    }

    /// The CRL, once it names every certificate of a node as a curator.
    pub async fn revoked_curator(&self, seed: u8) -> Vec<u8> {
        let name = format!("{}.curator", node_id(seed));
        let revoke =
            self.namespace.revoke(&self.certificate, &name, Reason::KeyCompromise, clock::now());
        assert_ne!(revoke.await.unwrap(), 0);
        self.namespace.crl(&self.certificate).await.unwrap().unwrap().der
    }

    /// Credentials of a node as a curator.
    pub async fn curator(&self, seed: u8) -> Credentials {
        let node = node_id(seed).to_string();
        let name = format!("{node}.curator");
        self.sign(&name, Template::Curator { node }, seed, clock::now()).await
    }

    /// Lists every user of this CA at a server, those of later, too.
    pub fn admits(&self, access_list: &watch::Sender<Arc<AccessList>>) {
        let (users, lists) = &mut *self.admitted.lock().unwrap();
        access_list.send_modify(|list| Arc::make_mut(list).users = Some(users.clone()));
        lists.push(access_list.clone());
    }

    /// Credentials of a user, who has a record from now on.
    pub async fn user(&self, name: &str, role: Role, seed: u8) -> Credentials {
        let listed = Listed { key: key(seed).verifying_key().to_bytes(), role };
        {
            let (users, lists) = &mut *self.admitted.lock().unwrap();
            users.insert(name.to_owned(), listed);
            for list in lists {
                list.send_modify(|list| {
                    let users = &mut Arc::make_mut(list).users;
                    users.get_or_insert_default().insert(name.to_owned(), listed);
                });
            }
        }
        self.forged(name, role, seed).await
    }

    /// Credentials of a user without a record.
    pub async fn forged(&self, name: &str, role: Role, seed: u8) -> Credentials {
        self.sign(name, Template::User { role: role.as_str() }, seed, clock::now()).await
    }
}

/// A certificate that proves a key, and nothing more.
#[must_use]
pub fn self_signed(seed: u8, authority: Option<Vec<u8>>) -> Credentials {
    let key = key(seed);
    let der = pkcs8(&key);
    let algorithm = &rcgen::PKCS_ED25519;
    let pair = rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&der.as_slice().into(), algorithm);
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, "self");
    let certificate = params.self_signed(&pair.unwrap()).unwrap().der().to_vec();
    let authorities = authority.map(|der| Authorities::sole(der).into());
    Credentials { certificate, key: der, authorities }
}

/// A server that runs until it is stopped.
#[derive(Debug)]
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    /// The credentials it serves with.
    pub credentials: watch::Sender<Option<Credentials>>,
    /// Its knowledge of nodes and users.
    pub access_list: watch::Sender<Arc<AccessList>>,
    /// Its counters.
    pub metrics: Arc<Metrics>,
    handles: Handles,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    /// Starts one on a free port, for the users of this CA.
    pub async fn start(
        authority: &Authority,
        credentials: Credentials,
        app: App,
        limits: Limits,
    ) -> Self {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        // As many as the real one: a story may overflow less.
        let bound = Arc::new(socket.listen(BACKLOG).unwrap().into_std().unwrap());
        let running = Self::start_at(bound, credentials, app, limits).await;
        authority.admits(&running.access_list);
        running
    }

    /// Starts one on a socket that is bound.
    pub async fn start_at(
        bound: Arc<TcpListener>,
        credentials: Credentials,
        app: App,
        limits: Limits,
    ) -> Self {
        let table = Arc::new(match app {
            App::Gateway(_) => Table::users(),
            App::Grpc(_) | App::Page(_) => Table::polis().unwrap(),
        });
        let metrics = Arc::new(Metrics::new(&table));
        let credentials = watch::Sender::new(Some(credentials));
        let access_list = watch::Sender::new(Arc::new(AccessList::default()));
        let (listening, mut listens) = watch::channel(None);
        let server = Server {
            config: Config { name: "test", listen: Listen::Bound(bound), limits },
            credentials: credentials.subscribe(),
            named: None,
            access_list: access_list.subscribe(),
            table,
            metrics: Arc::clone(&metrics),
            app,
            refused: None,
            reached: None,
            listening,
        };
        let (ctx, handles) = Context::for_test();
        #[expect(clippy::disallowed_methods, reason = "a test has no supervisor")]
        let task = tokio::spawn(server.run(ctx));
        let address = listens.wait_for(Option::is_some).await.unwrap().unwrap();
        Self { address, credentials, access_list, metrics, handles, task }
    }

    /// Sets which nodes are UP.
    pub fn up(&self, seeds: &[u8]) {
        let nodes = seeds.iter().map(|seed| node_id(*seed)).collect();
        self.access_list.send_modify(|access_list| Arc::make_mut(access_list).nodes = Some(nodes));
    }

    /// Connects as `credentials` say.
    ///
    /// # Errors
    ///
    /// As [`dial`].
    pub async fn dial(
        &self,
        authority: &Authority,
        credentials: Option<&Credentials>,
    ) -> Result<Connection, DialError> {
        let trust = Trust::in_one(authority.der.clone());
        let host = self.address.ip().to_string();
        dial(&host, self.address.port(), Expect::AnyNode, &trust, credentials).await
    }

    /// Stops it and waits for its end.
    pub async fn stop(self) {
        self.handles.cancel().await;
        tokio::time::timeout(SOON, self.task).await.unwrap().unwrap().unwrap();
    }
}
