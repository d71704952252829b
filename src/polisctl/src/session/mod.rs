//! The session: a user of a context, connected to a cluster.
//!
//! ```text
//! context --> key, certificate, CA --> Session --call--> the leader of the moment
//!                                         \------node--> one node, at its own port
//! ```
//!
//! Invariants:
//! - No request is sent to a cluster whose CA is neither in the context nor follows the one there.
//! - No request is sent to a node whose certificate does not match the given ID or prefix.
//! - No node whose certificate is on the CRL is asked, as far as the context has the CRL: the
//!   first call of a command reads a new one.
//! - A certificate past two thirds of its lifetime is renewed first; if that fails, the old
//!   one is used until it ends. One of a former CA is renewed after the first call.
//!
//! What this module does not do: find the leader (`rpc::client`), or implement a command.

mod candidates;
mod deadline;
mod node;
mod refusal;
mod target;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use ed25519_dalek::SigningKey;
use polis_proto::v1;
use polis_proto::v1::aaa_client::AaaClient;
use polis_proto::v1::management_client::ManagementClient;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Response, Status};

pub(super) use self::candidates::{ENDPOINT, candidates};
pub(super) use self::deadline::{Limit, PATIENCE, at_most, within};
pub(super) use self::node::dialled;
pub(super) use self::refusal::refused;
pub(super) use self::target::{Target, target};

use self::deadline::{ATTEMPT, LEADER, leader_time, timeouts};
use super::contexts::{self, Context, Contexts};
use super::error::Error;
use super::output::Out;
use super::{Global, key, units};
use polis_base::sys::clock;
use polis_wire::age::Identity;
use polis_wire::identity::Fingerprint;
use polis_wire::pki::{Authorities, Crl, Facts};
use polis_wire::rpc::client::{Channel, Client, Repeat, Timeouts};
use polis_wire::rpc::{AccessList, Credentials, Role};

/// A user of a cluster, with a client for its leader.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) context: Context,
    credentials: Credentials,
    /// Reads what the cluster encrypted to this user.
    identity: Identity,
    client: Client,
    /// Has the certificates that the cluster has revoked.
    access_list: watch::Sender<Arc<AccessList>>,
    /// The value of `--timeout`.
    limit: Option<Limit>,
    contexts: Contexts,
    out: Out,
    /// Whether the CA and the CRL of the leader were compared with those in the context.
    kept_up: AtomicBool,
}

/// The CA of now, if the one that is known leads to it.
pub(super) fn successor(known: &[u8], answer: &v1::EscrowResponse) -> Result<Vec<u8>, Error> {
    let read = answer.authorities.clone().and_then(Authorities::from_message);
    let read = read.filter(|read| read.succeed(known) && read.signed(&answer.certificate));
    let wrong = || {
        Error::new("the leader names a CA to which the known one does not lead").or_help(
            "compare the CA with a machine's screen (F4): `polisctl cluster take-ownership`",
        )
    };
    read.map(|read| read.signing).ok_or_else(wrong)
}

/// Credentials of a key, with a certificate of any kind for it.
pub(super) fn credentials(
    key: &SigningKey,
    certificate: Vec<u8>,
    authority: Option<Vec<u8>>,
) -> Credentials {
    let key = Arc::new(polis_wire::pki::key_der(key));
    let authorities = authority.map(|der| Authorities::sole(der).into());
    Credentials { certificate, key, authorities }
}

/// How a user of this role gets another certificate in place of one that has ended.
fn another(context: &Context, role: Option<Role>) -> String {
    let Context { name, settings, .. } = context;
    match role {
        Some(Role::Owner) => {
            format!("prove the key again: `polisctl --context {name} cluster take-ownership`")
        }
        Some(Role::Viewer | Role::Operator) | None => format!(
            "ask for another one by `polisctl user create`, and import its file: `polisctl \
             --context {name} context import FILE --key {}`",
            settings.key.display()
        ),
    }
}

impl Session {
    /// Opens the current context, and renews its certificate when due.
    pub(super) async fn open(global: &Global) -> Result<Self, Error> {
        let mut session = Self::prepare(global, PATIENCE)?;
        let progress = global.out.progress();
        progress.says("looking for the leader of the cluster");
        session.renew(global).await;
        Ok(session)
    }

    /// The same, for a command that has an answer without a leader, too: it looks for one
    /// for half of the time that a person gives, and for a few seconds at most.
    pub(super) async fn brief(global: &Global) -> Result<Self, Error> {
        let mut session = Self::prepare(global, LEADER)?;
        session.limit_calls(leader_time(global.timeout));
        session.renew(global).await;
        Ok(session)
    }

    /// The part that needs no connection.
    pub(super) fn prepare(global: &Global, wait: Duration) -> Result<Self, Error> {
        let named = global.contexts.context(global.context.as_deref())?;
        let context = named.ok_or_else(contexts::no_context)?;
        let name = &context.name;
        let takes = || {
            format!(
                "`polisctl --context {name} cluster take-ownership` gets one once the cluster is \
                 healthy; `cargo xtask run` does that by itself"
            )
        };
        let ca = context.ca.clone().ok_or_else(|| {
            Error::new(format!("context {name} does not know the CA of its cluster"))
                .or_help(takes())
        })?;
        let certificate = context.certificate.clone().ok_or_else(|| {
            Error::new(format!("context {name} has no certificate")).or_help(takes())
        })?;
        let facts = Facts::read(&certificate).ok_or_else(|| {
            Error::new(format!("the certificate of context {name} is damaged")).or_help(takes())
        })?;
        let role = facts.unit.as_deref().and_then(|unit| unit.parse().ok());
        if let Some(role) = role {
            global.out.streams.read_by(role);
        }
        if clock::now() >= facts.not_after {
            let date = units::date(facts.not_after);
            let text = format!("the certificate of context {name} ended on {date}");
            return Err(Error::new(text).or_help(another(&context, role)));
        }
        let key = key::read(&context.settings.key, &global.passphrase)?;
        if key.verifying_key().to_bytes() != facts.public_key {
            return Err(Error::new(format!(
                "{} is not the key of the certificate of context {name}",
                context.settings.key.display()
            ))
            .or_help(format!("name the right one: `polisctl context set {name} --key FILE`")));
        }
        let credentials = credentials(&key, certificate, Some(ca));
        let identity = Identity::of_key(&key);
        let candidates = candidates(global, &context)?;
        let client = Client::fixed(candidates, credentials.clone(), timeouts(global, wait));
        let access_list = watch::Sender::new(access_list(context.crl.clone()));
        let client = client.wary(access_list.subscribe());
        let contexts = global.contexts.clone();
        let limit = global.timeout.map(Limit::new);
        let out = global.out.clone();
        Ok(Self {
            context,
            credentials,
            identity,
            client,
            access_list,
            limit,
            contexts,
            out,
            kept_up: AtomicBool::new(false),
        })
    }

    /// Forgets its connections: the next call opens another one, and a network or a firewall that
    /// lets one go on need not let another begin.
    pub(super) fn reconnect(&mut self, global: &Global) -> Result<(), Error> {
        let candidates = candidates(global, &self.context)?;
        let client = Client::fixed(candidates, self.credentials.clone(), self.client.timeouts());
        self.client = client.wary(self.access_list.subscribe());
        Ok(())
    }

    /// Renews the certificate when due.
    async fn renew(&mut self, global: &Global) {
        let facts = Facts::read(&self.credentials.certificate);
        if !facts.is_some_and(|facts| facts.renewal_due(clock::now())) {
            return;
        }
        match self.renewed().await {
            // Used by the next command: this one is already connected.
            Ok(context) => {
                self.credentials.certificate = context.certificate.clone().unwrap_or_default();
                self.context = context;
            }
            Err(error) => global.out.remark(error.render().trim_end()),
        }
    }

    /// Gets a certificate of the CA that signs now, and keeps both for the next command.
    async fn renewed(&self) -> Result<Context, Error> {
        let client = self.client();
        let renewed = client.call(Repeat::Allowed, |channel| async move {
            Ok(AaaClient::new(channel).renew(v1::RenewRequest {}).await?.into_inner())
        });
        let answer = self.within("renew the certificate", Box::pin(renewed)).await?;
        let mut context = self.contexts.load(&self.context.name)?;
        let ca = successor(context.ca.as_deref().unwrap_or_default(), &answer)?;
        (context.ca, context.certificate) = (Some(ca), Some(answer.certificate));
        self.contexts.save(&context)?;
        Ok(context)
    }

    /// Compares the CA and the CRL of the leader with those in the context, once.
    async fn keep_up(&self) {
        if self.kept_up.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(leader) = self.client.known_leader().await else { return };
        let shown = &leader.connection.certificate;
        ahead(shown, clock::now()).into_iter().for_each(|text| self.out.remark(&text));
        let known = self.credentials.authorities.as_ref();
        if known.is_some_and(|known| !known.signed(shown)) {
            self.follow_ca().await;
        }
        let known = [Vec::new(), self.context.crl_digest()];
        if !known.contains(&leader.crl_digest)
            && let Err(error) = self.read_crl().await
        {
            self.out.remark(error.render().trim_end());
        }
    }

    /// Reads the CRL, for this command and the next.
    async fn read_crl(&self) -> Result<(), Error> {
        let crl_digest = self.context.crl_digest();
        let client = self.client();
        let read = client.call(Repeat::Allowed, |channel| {
            let request = v1::GetClusterInfoRequest { crl_digest: crl_digest.clone() };
            async move {
                Ok(ManagementClient::new(channel).get_cluster_info(request).await?.into_inner())
            }
        });
        let info = self.within("read the list of revoked certificates", Box::pin(read)).await?;
        self.learn(&info);
        Ok(())
    }

    /// Gets a certificate of the next CA.
    pub(super) async fn follow_ca(&self) {
        match self.renewed().await {
            Ok(context) => {
                let ca = context.ca.as_deref().unwrap_or_default();
                let (name, words) = (&context.name, Fingerprint::of_certificate(ca).words());
                self.out.remark(&format!("the CA was rotated; context {name} trusts {words} now"));
            }
            Err(error) => self.out.remark(error.render().trim_end()),
        }
    }

    /// The identity of the user, for what the cluster encrypted to it.
    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Makes a call to the leader.
    pub(super) async fn call<T, F, R>(
        &self,
        what: &str,
        repeat: Repeat,
        mut call: F,
    ) -> Result<T, Error>
    where
        F: FnMut(Channel) -> R,
        R: Future<Output = Result<Response<T>, Status>>,
    {
        let client = self.client();
        let made = client.call(repeat, |channel| {
            let made = call(channel);
            async move { made.await.map(Response::into_inner) }
        });
        // On the heap: the futures of every command contain this one.
        let done = self.within(what, Box::pin(made)).await?;
        Box::pin(self.keep_up()).await;
        Ok(done)
    }

    /// The client for the next call: with the time that is left, and no more than a call may
    /// take.
    pub(super) fn client(&self) -> Client {
        match self.limit {
            None => self.client.clone(),
            Some(limit) => {
                let left = limit.end.saturating_duration_since(Instant::now());
                let total = left.min(self.client.timeouts().total);
                self.client.clone().with_timeouts(Timeouts { attempt: ATTEMPT.min(total), total })
            }
        }
    }

    /// Waits for an answer, until the deadline.
    pub(super) async fn within<T>(
        &self,
        what: &str,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Error> {
        // On the heap: the future of a call is large, and awaited in several layers.
        let answer = Box::pin(answer);
        let answer = async { answer.await.map_err(|status| refused(what, &status)) };
        self.out.waiting(&format!("waiting: {what}"), within(self.limit, what, answer)).await
    }

    /// Does `work` until the deadline, for a stream whose parts the command shows.
    pub(super) fn in_time<T>(
        &self,
        what: &str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> impl Future<Output = Result<T, Error>> {
        within(self.limit, what, Box::pin(work))
    }

    /// The deadline, if there is one.
    pub(super) fn end(&self) -> Option<Instant> {
        self.limit.map(|limit| limit.end)
    }

    /// A text with the role for each command that this user may not type.
    pub(super) fn for_reader(&self, text: &str) -> String {
        self.out.for_reader(text)
    }

    /// Restarts the deadline: the time that a person takes to answer a question does not
    /// count.
    pub(super) fn begin_anew(&mut self) {
        self.limit = self.limit.map(Limit::anew);
    }

    /// Removes the deadline, for a command that runs until the operator ends it.
    pub(super) fn go_on(&mut self) {
        self.limit = None;
    }

    /// Limits each call from now on, regardless of `--timeout`.
    pub(super) fn limit_calls(&mut self, total: Duration) {
        self.limit = None;
        let timeouts = Timeouts { attempt: ATTEMPT.min(total), total };
        self.client = self.client.clone().with_timeouts(timeouts);
    }

    /// Limits everything from now on, taken together, by `--timeout` if a person gave it.
    pub(super) fn limit_all(&mut self, global: &Global) {
        self.limit = global.timeout.map(Limit::new);
    }

    /// Reads the description of the cluster, and stores what a later command needs of it.
    pub(super) async fn cluster_info(&self) -> Result<v1::GetClusterInfoResponse, Error> {
        let crl_digest = self.context.crl_digest();
        let info = self
            .call("read the cluster's configuration", Repeat::Allowed, |channel| {
                let request = v1::GetClusterInfoRequest { crl_digest: crl_digest.clone() };
                async move { ManagementClient::new(channel).get_cluster_info(request).await }
            })
            .await?;
        self.learn(&info);
        Ok(info)
    }

    /// Stores the CRL, and the addresses of the curators for the time when the endpoints do not
    /// answer: ownership is taken through one node only.
    fn learn(&self, info: &v1::GetClusterInfoResponse) {
        let crl = Crl::read(&info.crl);
        if crl.is_some() {
            self.access_list.send_replace(access_list(crl.clone()));
        }
        let directory = info.cluster_directory.as_ref();
        let nodes = directory.into_iter().flat_map(|directory| &directory.nodes);
        let nodes: BTreeMap<_, _> =
            nodes.map(|node| (node.id.clone(), node.addresses.clone())).collect();
        // Read again, since another command may have changed it. If the folder cannot be
        // written, this command still succeeds.
        let _forgotten = self.contexts.load(&self.context.name).and_then(|mut context| {
            let before = context.clone();
            if !nodes.is_empty() {
                context.settings.nodes = nodes;
            }
            context.crl = crl.or(context.crl);
            if context == before { Ok(()) } else { self.contexts.save(&context) }
        });
    }
}

/// Rejects the certificates that the cluster has revoked.
pub(super) fn access_list(crl: Option<Crl>) -> Arc<AccessList> {
    let serials = crl.map(Crl::serials).unwrap_or_default();
    Arc::new(AccessList { serials: Arc::new(serials), ..AccessList::default() })
}

/// The remark for a person where the certificate of the leader begins later than `now`. The
/// certificate is accepted all the same, so that such a clock can be mended.
fn ahead(certificate: &[u8], now: SystemTime) -> Option<String> {
    let begins = Facts::read(certificate)?.not_before;
    (now < begins).then(|| {
        let date = units::date(begins);
        format!("the leader's certificate begins on {date}: compare its clock with this machine's")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::Cluster;
    use crate::testing::World;
    use polis_wire::pki::Template;
    use polis_wire::rpc::testing::Authority;

    #[test]
    fn a_curator_that_was_revoked_is_asked_once_and_never_again() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        world.runs(&["node", "list"]);
        cluster.revokes_its_curator();
        // It leads, as far as the context knows, and so this command learns of it.
        world.runs(&["node", "list"]);
        for command in [
            &["node", "list"][..],
            &["node", "logs", "polis-8a88", "--at", &cluster.address()],
            &["cluster", "take-ownership", "--owner-key", "@owner.key"],
        ] {
            let refused = world.run(command);
            assert_ne!(refused.status, 0, "{command:?}");
            assert!(refused.stderr.contains("was revoked"), "{command:?}: {}", refused.stderr);
        }
        std::fs::write(world.path("polis/contexts/home/crl.pem"), "noise").unwrap();
        let damaged = world.refuses(&["node", "list"]);
        assert!(damaged.contains("holds no CRL of a Polis cluster"), "{damaged}");
    }

    #[tokio::test]
    async fn a_leader_whose_clock_is_ahead_is_pointed_out() {
        let authority = Authority::new().await;
        let now = clock::now();
        let made = now + Duration::from_secs(90 * 24 * 60 * 60);
        let template = Template::Curator { node: "x".to_owned() };
        let shown = authority.sign("x.curator", template, 1, made).await.certificate;
        let text = ahead(&shown, now).unwrap();
        assert!(text.contains("compare its clock"), "{text}");
        assert_eq!(ahead(&shown, made), None);
        assert_eq!(ahead(b"noise", now), None);
    }
}
