//! The session: a user of a context, connected to a cluster.
//!
//! ```text
//! context --> key, certificate, CA --> Session --call--> the leader, whoever that is
//!                                         \------node--> one node, at its own port
//! ```
//!
//! Invariants:
//! - No request is sent to a cluster whose CA is not in the context.
//! - No request is sent to a node whose certificate does not match the given ID or prefix.
//! - A certificate past two thirds of its lifetime is renewed first; if that fails, the old
//!   one is used until it ends.
//!
//! What this module does not do: find the leader (`rpc::client`), or implement a command.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ed25519_dalek::SigningKey;
use polis_proto::v1;
use polis_proto::v1::aaa_client::AaaClient;
use polis_proto::v1::management_client::ManagementClient;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tonic::{Code, Response, Status};

use super::contexts::{Context, Contexts};
use super::error::{Error, Exit, Explain as _};
use super::output::Out;
use super::{Global, context, key};
use polis_base::cause;
use polis_base::sys::clock;
use polis_wire::endpoint::{Endpoint, KUBERNETES_PORT, MANAGEMENT_PORT};
use polis_wire::identity::{Fingerprint, NodeId, NodeName, Spoken};
use polis_wire::pki::Facts;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::https::{self, Answer};
use polis_wire::rpc::client::{
    Candidate, Channel, Client, Connection, DialError, Expect, Patience, Repeat, Trust, dial,
};

/// Longest that a command waits for the cluster: an election takes ten seconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// Longest that a command looks for a leader where it has an answer without one.
const LEADER: Duration = Duration::from_secs(5);
/// Longest that one attempt at a call may take.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Between two attempts at a node that is waited for.
const RETRY: Duration = Duration::from_millis(500);

/// A user of a cluster, with a client for its leader.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) context: Context,
    credentials: Credentials,
    client: Client,
    /// The value of `--timeout`.
    limit: Option<Limit>,
    contexts: Contexts,
    out: Out,
}

/// The deadline of a command, for all of its calls together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    total: Duration,
    end: Instant,
}

impl Limit {
    /// Starts now.
    pub(super) fn new(total: Duration) -> Self {
        Self { total, end: Instant::now() + total }
    }

    /// Ends `work` at the deadline. Cancel-safe if `work` is.
    pub(super) async fn within<T>(
        self,
        what: &str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        timeout_at(self.end, work).await.unwrap_or_else(|_elapsed| Err(self.over(what)))
    }

    fn over(self, what: &str) -> Error {
        Error::timed_out(format!("timed out after {}", super::units::span(self.total)))
            .context(format!("cannot {what}"))
            .or_help("allow more time: --timeout")
    }
}

/// Credentials of a key, with a certificate of any kind for it.
pub(super) fn credentials(
    key: &SigningKey,
    certificate: Vec<u8>,
    authority: Option<Vec<u8>>,
) -> Credentials {
    let key = Arc::new(polis_wire::pki::key_der(key));
    Credentials { certificate, key, authority }
}

/// How long a command looks for a leader that it does not need.
fn leader_time(timeout: Option<Duration>) -> Duration {
    timeout.map_or(LEADER, |total| LEADER.min(total / 2))
}

/// How long the calls of a command may take.
pub(super) fn patience(global: &Global, default: Duration) -> Patience {
    let total = global.timeout.unwrap_or(default);
    Patience { attempt: ATTEMPT.min(total), total }
}

/// The candidates for curators.
pub(super) fn candidates(global: &Global, context: &Context) -> Result<Vec<Candidate>, Error> {
    let named = |endpoint: &Endpoint| Candidate {
        node: None,
        host: endpoint.host.clone(),
        port: endpoint.port,
    };
    if !global.endpoints.is_empty() {
        return Ok(global.endpoints.iter().map(named).collect());
    }
    let mut candidates = Vec::new();
    for text in &context.settings.endpoints {
        let endpoint: Endpoint =
            text.parse().doing(|| format!("context {} has no good endpoint", context.name))?;
        candidates.push(named(&endpoint));
    }
    // Endpoints of the command line are used unchanged.
    let anew = |one: &Candidate| {
        !candidates.iter().any(|named| (&named.host, named.port) == (&one.host, one.port))
    };
    let learnt: Vec<_> = learnt(context)?.into_iter().filter(anew).collect();
    candidates.extend(learnt);
    if candidates.is_empty() {
        return Err(Error::new(format!("context {} has no endpoint", context.name))
            .or_help("name the address of a curator: --endpoint HOST[:PORT]"));
    }
    Ok(candidates)
}

/// The address to dial: a detour of the context, or the address itself.
fn detour(context: &Context, address: &Endpoint) -> Result<Endpoint, Error> {
    match context.settings.via.get(&address.to_string()) {
        Some(other) => other.parse().doing(|| format!("the detour {other:?} has no address")),
        None => Ok(address.clone()),
    }
}

/// Curators of the cluster's directory.
fn learnt(context: &Context) -> Result<Vec<Candidate>, Error> {
    let mut candidates = Vec::new();
    for (id, addresses) in &context.settings.nodes {
        let Ok(node) = id.parse() else { continue };
        for address in addresses {
            let Ok(endpoint) = address.parse::<Endpoint>() else { continue };
            let Endpoint { host, port } = detour(context, &endpoint)?;
            candidates.push(Candidate { node: Some(node), host, port });
        }
    }
    Ok(candidates)
}

impl Session {
    /// Opens the current context, and renews its certificate when due.
    pub(super) async fn open(global: &Global) -> Result<Self, Error> {
        Self::patient(global, PATIENCE).await
    }

    /// The same, for a command with its own wait.
    pub(super) async fn patient(global: &Global, wait: Duration) -> Result<Self, Error> {
        let mut session = Self::prepare(global, wait)?;
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
        let context = named.ok_or_else(context::no_context)?;
        let name = &context.name;
        let takes = || format!("`polisctl --context {name} cluster take-ownership` gets one");
        let ca = context.ca.clone().ok_or_else(|| {
            Error::new(format!("context {name} does not know the CA of its cluster"))
                .or_help(takes())
        })?;
        let certificate = context.certificate.clone().ok_or_else(|| {
            Error::new(format!("context {name} has no certificate")).or_help(takes())
        })?;
        let facts = Facts::read(&certificate)
            .ok_or_else(|| Error::new(format!("the certificate of context {name} is damaged")))?;
        if clock::now() >= facts.not_after {
            return Err(Error::new(format!(
                "the certificate of context {name} ended on {}",
                super::units::date(facts.not_after)
            ))
            .or_help(format!(
                "the owner takes ownership again: {}; others ask the owner for a new one",
                takes()
            )));
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
        let candidates = candidates(global, &context)?;
        let client = Client::fixed(candidates, credentials.clone(), patience(global, wait));
        let contexts = global.contexts.clone();
        let limit = global.timeout.map(Limit::new);
        let out = global.out.clone();
        Ok(Self { context, credentials, client, limit, contexts, out })
    }

    /// Renews the certificate when due.
    async fn renew(&mut self, global: &Global) {
        let facts = Facts::read(&self.credentials.certificate);
        if !facts.is_some_and(|facts| facts.renewal_due(clock::now())) {
            return;
        }
        let renewed = self
            .call("renew the certificate", Repeat::Allowed, |channel| async move {
                AaaClient::new(channel).renew(v1::RenewRequest {}).await
            })
            .await
            .and_then(|answer| {
                self.context.certificate = Some(answer.certificate.clone());
                global.contexts.save(&self.context)?;
                Ok(answer.certificate)
            });
        match renewed {
            // Used by the next command: this one is already connected.
            Ok(certificate) => self.credentials.certificate = certificate,
            Err(error) => global.out.remark(error.render().trim_end()),
        }
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
        self.within(what, Box::pin(made)).await
    }

    /// The client for the next call, with the time that is left.
    pub(super) fn client(&self) -> Client {
        match self.limit {
            None => self.client.clone(),
            Some(limit) => {
                let total = limit.end.saturating_duration_since(Instant::now());
                self.client.clone().patient(Patience { attempt: ATTEMPT.min(total), total })
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
        let limited = async {
            match self.limit {
                None => answer.await,
                Some(limit) => limit.within(what, answer).await,
            }
        };
        self.out.waiting(&format!("waiting: {what}"), limited).await
    }

    /// Restarts the deadline: the time that a person takes to answer a question does not
    /// count.
    pub(super) fn begin_anew(&mut self) {
        self.limit = self.limit.map(|limit| Limit::new(limit.total));
    }

    /// Removes the deadline, for a command that runs until the operator ends it.
    pub(super) fn go_on(&mut self) {
        self.limit = None;
    }

    /// The nodes with these IDs; all nodes, if the list is empty.
    pub(super) async fn nodes(&self, ids: &[String]) -> Result<Vec<v1::NodeInfo>, Error> {
        let client = self.client();
        let nodes = client.call(Repeat::Allowed, |channel| {
            let request = v1::GetNodesRequest { ids: ids.to_vec(), ..Default::default() };
            async move {
                let mut stream =
                    ManagementClient::new(channel).get_nodes(request).await?.into_inner();
                let mut nodes = Vec::new();
                while let Some(node) = stream.message().await? {
                    nodes.push(node);
                }
                Ok(nodes)
            }
        });
        let mut nodes = self.within("list the nodes", Box::pin(nodes)).await?;
        nodes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(nodes)
    }

    /// Limits each call from now on, regardless of `--timeout`.
    pub(super) fn limit_calls(&mut self, total: Duration) {
        self.limit = None;
        let patience = Patience { attempt: ATTEMPT.min(total), total };
        self.client = self.client.clone().patient(patience);
    }

    /// The node of an ID, a prefix of one, or a name.
    pub(super) async fn find(&self, wanted: &str) -> Result<v1::NodeInfo, Error> {
        let nodes = self.nodes(&[]).await;
        let nodes = match wanted.parse::<NodeName>() {
            Ok(name) => nodes.map_err(|error| {
                error.help_if_late(format!(
                    "only a leader knows which node is {name}; use the ID of the node, or check \
                     the endpoints and wait for a leader with `polisctl cluster wait`"
                ))
            }),
            Err(_invalid) => nodes,
        };
        pick(nodes?, wanted)
    }

    /// Stores the addresses of the curators for the time when the endpoints do not answer:
    /// ownership is taken through one node only.
    pub(super) fn learn(&self, directory: Option<&v1::ClusterDirectory>) {
        let Some(directory) = directory.filter(|directory| !directory.nodes.is_empty()) else {
            return;
        };
        let nodes: BTreeMap<_, _> =
            directory.nodes.iter().map(|node| (node.id.clone(), node.addresses.clone())).collect();
        // Read again, since another command may have changed it. If the folder cannot be
        // written, this command still succeeds.
        let _forgotten = self.contexts.load(&self.context.name).and_then(|mut context| {
            if context.settings.nodes == nodes {
                return Ok(());
            }
            context.settings.nodes = nodes;
            self.contexts.save(&context)
        });
    }

    /// Connects; with `--timeout` it retries until then, for a node that is starting.
    async fn reach(&self, at: &Endpoint, trust: &Trust) -> Result<Connection, Error> {
        let reached = Box::pin(self.dialled(at, trust));
        self.out.waiting(&format!("connecting to {at}"), reached).await
    }

    async fn dialled(&self, at: &Endpoint, trust: &Trust) -> Result<Connection, Error> {
        let dialled = || dial(&at.host, at.port, Expect::AnyNode, trust, Some(&self.credentials));
        let explained = |error: DialError| {
            let help = error.help();
            Error::from(error).or_help(help)
        };
        let Some(limit) = self.limit else { return Box::pin(dialled()).await.map_err(explained) };
        let mut last = None;
        loop {
            match timeout_at(limit.end, Box::pin(dialled())).await {
                Ok(Err(error)) if error.is_absence() => last = Some(error),
                Ok(dialled) => return dialled.map_err(explained),
                Err(_elapsed) => {
                    let Some(error) = last else {
                        return Err(limit.over(&format!("connect to {at}")));
                    };
                    let help = error.help();
                    return Err(Error::late(error.into()).or_help(help));
                }
            }
            sleep_until(limit.end.min(Instant::now() + RETRY)).await;
        }
    }

    /// Connects to one node's own port.
    pub(super) async fn node(&self, node: &Target) -> Result<Channel, Error> {
        Ok(self.connect(node).await?.channel)
    }

    /// The same; also returns the node at the other end.
    pub(super) async fn connect(&self, node: &Target) -> Result<Connection, Error> {
        let address = detour(&self.context, &node.address)?;
        let trust = Trust::Authority(self.credentials.authority.clone().unwrap_or_default());
        let reached = self.reach(&address, &trust).await;
        let connection = reached.doing(|| format!("cannot reach {}", node.meant))?;
        node.meant.check(connection.node, &address)?;
        Ok(connection)
    }

    /// Reads a path of Kubernetes through one of its controllers.
    pub(super) async fn kubernetes(&self, node: &Target, path: &str) -> Result<Answer, Error> {
        let Endpoint { host, port } = self.kubernetes_at(node)?;
        let trust = Trust::Authority(self.credentials.authority.clone().unwrap_or_default());
        let expect = node.meant.id().map_or(Expect::AnyNode, Expect::Node);
        let answer = https::get(&host, port, expect, &trust, &self.credentials, path);
        let answer = async {
            answer.await.map_err(|error| match &error {
                https::Error::Dial(dial) => {
                    let help = dial.help();
                    Error::from(error).or_help(help)
                }
                _ => error.into(),
            })
        };
        let limited = async {
            match self.limit {
                None => answer.await,
                Some(limit) => limit.within("ask Kubernetes", answer).await,
            }
        };
        self.out.waiting(&format!("asking Kubernetes at {host}"), limited).await
    }

    /// Where a controller lets users into Kubernetes.
    pub(super) fn kubernetes_at(&self, node: &Target) -> Result<Endpoint, Error> {
        detour(&self.context, &node.address.at_port(KUBERNETES_PORT))
    }

    /// The certificate and the key of the user.
    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Connects to a node that waits for the key of its disk. Its certificate is
    /// self-signed, so its fingerprint is compared before anything is sent.
    pub(super) async fn waiting_node(
        &self,
        node: &Target,
        spoken: &Spoken,
    ) -> Result<Channel, Error> {
        let address = detour(&self.context, &node.address)?;
        let Endpoint { host, port } = &address;
        let connection = self.reach(&address, &Trust::Unchecked).await?;
        let facts = Facts::read(&connection.certificate);
        let key = facts.ok_or_else(|| Error::new("the node shows no certificate".to_owned()))?;
        let shown = Fingerprint::of_key(&key.public_key);
        if shown.is(spoken) {
            return Ok(connection.channel);
        }
        Err(Error::new(format!(
            "the machine at {host}:{port} has another key: {}, {shown}",
            shown.words()
        ))
        .or_help(
            "read the fingerprint again from the machine's own screen, page Boot; if they still \
             differ, the connection is intercepted",
        ))
    }

    /// The management address of a node: `at`, or the one that the cluster has.
    pub(super) async fn target(
        &self,
        wanted: Option<&str>,
        at: Option<&Endpoint>,
    ) -> Result<Target, Error> {
        if let Some(at) = at {
            let meant = match wanted {
                None => Meant::Any,
                // No certificate has a name: the leader says whose ID to compare.
                Some(wanted) if wanted.parse::<NodeName>().is_ok() => {
                    let node = self.find(wanted).await?;
                    Meant::parse(&node.id)?
                }
                Some(wanted) => Meant::parse(wanted)?,
            };
            return Ok(Target { meant, address: at.clone() });
        }
        let node = match wanted {
            Some(wanted) => match self.known(wanted) {
                None => self.find(wanted).await?,
                Some(known) => {
                    let time = leader_time(self.limit.map(|limit| limit.total));
                    match timeout(time, Box::pin(self.find(wanted))).await {
                        Ok(Err(error)) if error.exit() != Exit::TimedOut => return Err(error),
                        Ok(Ok(node)) => node,
                        Ok(Err(_)) | Err(_) => {
                            self.out.remark(&format!(
                                "no leader was found; asking the node at its last known address, {}",
                                known.address.host
                            ));
                            return Ok(known);
                        }
                    }
                }
            },
            None => {
                let leader = async { self.client.leader().await.map_err(Status::from) };
                let leader = self.within("find the leader", leader).await?;
                self.find(&leader.connection.node.to_string()).await?
            }
        };
        match target(&node) {
            Ok(target) => Ok(target),
            // A node without a status may still be in the directory.
            Err(error) => self.in_directory(&node).await.ok_or(error),
        }
    }

    /// The nodes that the context knows, each at its own port. A context that has not
    /// learnt any knows its endpoints.
    pub(super) fn known_nodes(&self) -> Vec<Target> {
        let managed = |meant, address: &str| {
            let address = Endpoint::parse(address, MANAGEMENT_PORT).ok()?;
            Some(Target { meant, address: address.at_port(MANAGEMENT_PORT) })
        };
        let settings = &self.context.settings;
        let learnt = settings.nodes.iter().filter_map(|(id, addresses)| {
            managed(Meant::Node(id.parse().ok()?), addresses.first()?)
        });
        let learnt: Vec<_> = learnt.collect();
        if !learnt.is_empty() {
            return learnt;
        }
        settings.endpoints.iter().filter_map(|at| managed(Meant::Any, at)).collect()
    }

    /// The node that `wanted` names, if the context has learnt of one such node.
    fn known(&self, wanted: &str) -> Option<Target> {
        let meant = Meant::parse(wanted).ok()?;
        let fits = |target: &Target| match (&meant, &target.meant) {
            (Meant::Node(meant), Meant::Node(known)) => meant == known,
            (Meant::Digits(digits), Meant::Node(known)) => {
                known.to_string()[PREFIX.len()..].starts_with(digits)
            }
            (_, _) => false,
        };
        let mut found = self.known_nodes().into_iter().filter(fits);
        found.next().filter(|_| found.next().is_none())
    }

    async fn in_directory(&self, node: &v1::NodeInfo) -> Option<Target> {
        let info = super::cluster::info(self).await.ok()?;
        let nodes = info.cluster_directory?.nodes;
        let entry = nodes.into_iter().find(|entry| entry.id == node.id)?;
        let address = Endpoint::parse(entry.addresses.first()?, MANAGEMENT_PORT).ok()?;
        let address = address.at_port(MANAGEMENT_PORT);
        Some(Target { meant: Meant::Node(node.id.parse().ok()?), address })
    }
}

/// A node's own port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// The expected node.
    pub(super) meant: Meant,
    /// The address.
    pub(super) address: Endpoint,
}

/// The node that is expected at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// Any node of the cluster.
    Any,
    /// The node with this ID.
    Node(NodeId),
    /// The node whose ID has this prefix.
    Digits(String),
}

impl Meant {
    /// The ID in full, where that is known.
    pub(super) fn id(&self) -> Option<NodeId> {
        match self {
            Self::Node(id) => Some(*id),
            Self::Any | Self::Digits(_) => None,
        }
    }

    /// Reads an ID, or the first digits of one.
    fn parse(text: &str) -> Result<Self, Error> {
        if let Ok(id) = text.parse() {
            return Ok(Self::Node(id));
        }
        let digits = text.strip_prefix(PREFIX).unwrap_or(text);
        let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        if (DIGITS_MIN..=DIGITS_MAX).contains(&digits.len()) && digits.chars().all(is_digit) {
            return Ok(Self::Digits(digits.to_owned()));
        }
        Err(Error::usage(format!("{text:?} is not a node ID, a prefix of one, or a name"))
            .or_help("use the ID, at least its first four digits, or the node's name"))
    }

    /// Compares with the node of the certificate at `address`, before any request is sent.
    fn check(&self, found: NodeId, address: &Endpoint) -> Result<(), Error> {
        let fits = match self {
            Self::Any => true,
            Self::Node(meant) => *meant == found,
            Self::Digits(digits) => found.to_string()[PREFIX.len()..].starts_with(digits),
        };
        if fits {
            return Ok(());
        }
        Err(Error::new(format!("the node at {address} is {found}, not {self}")).or_help(
            "nothing was sent to it; check the address: `polisctl node list` shows where each \
             node is",
        ))
    }
}

impl fmt::Display for Meant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("the node"),
            Self::Node(id) => id.fmt(f),
            Self::Digits(digits) => write!(f, "{PREFIX}{digits}…"),
        }
    }
}

/// The address of a node in the cluster's records.
pub(super) fn target(node: &v1::NodeInfo) -> Result<Target, Error> {
    let address = node.status.as_ref().map(|status| status.external_address.as_str());
    let address = address.unwrap_or_default();
    let address = Endpoint::parse(address, MANAGEMENT_PORT).map_err(|_invalid| {
        Error::new(format!("the cluster has no address of {}", node.id))
            .or_help("name its address: --at HOST[:PORT]")
    })?;
    let id =
        node.id.parse().doing(|| format!("the cluster lists an invalid node ID {:?}", node.id))?;
    Ok(Target { meant: Meant::Node(id), address: address.at_port(MANAGEMENT_PORT) })
}

/// The prefix of every ID.
const PREFIX: &str = "polis-";
/// The shortest prefix of an ID, and the full length, in digits.
const DIGITS_MIN: usize = 4;
const DIGITS_MAX: usize = 32;

/// The node of an ID, of a prefix of its digits, or of a name.
fn pick(nodes: Vec<v1::NodeInfo>, wanted: &str) -> Result<v1::NodeInfo, Error> {
    let digits = wanted.strip_prefix("polis-").unwrap_or(wanted);
    let fits = |node: &v1::NodeInfo| {
        let own = node.id.strip_prefix("polis-").unwrap_or(&node.id);
        own == digits
            || (!node.name.is_empty() && node.name == wanted)
            || (digits.len() >= DIGITS_MIN && own.starts_with(digits))
    };
    let mut found: Vec<v1::NodeInfo> = nodes.into_iter().filter(fits).collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(Error::new(format!("there is no node {wanted:?}")).or_help(
            "`polisctl node list` shows them; name one by its name, or by four digits of its ID",
        )),
        _ => {
            let ids: Vec<String> = found.into_iter().map(|node| node.id).collect();
            Err(Error::new(format!("{wanted:?} is a prefix of several nodes"))
                .or_help(format!("give more digits: {}", ids.join(", "))))
        }
    }
}

/// The error of a refused call, with help for the operator.
pub(super) fn refused(what: &str, status: &Status) -> Error {
    let message = match status.message() {
        "" => status.code().description(),
        message => message,
    };
    let mut error = anyhow::Error::msg(message.to_owned());
    let source = std::error::Error::source(status);
    if let Some(source) = source {
        error = anyhow::Error::msg(cause::line(source)).context(message.to_owned());
    }
    let error = error.context(format!("cannot {what}"));
    let reason = status.metadata().get(REASON).and_then(|reason| reason.to_str().ok());
    let late = matches!(status.code(), Code::DeadlineExceeded | Code::Unavailable);
    let error = if late { Error::late(error) } else { Error::from(error) };
    // Which of the two it is, the leader says in words only.
    let reason = match reason.unwrap_or_default() {
        "quorum" if message.contains("can be reached") => "quorum-silent",
        reason => reason,
    };
    match help(status.code(), reason) {
        Some(help) => error.or_help(help),
        None => error,
    }
}

fn help(code: Code, reason: &str) -> Option<&'static str> {
    Some(match (reason, code) {
        ("quorum", _) => {
            "let another node vote first: `polisctl node roles NODE --add consensus-member`, then \
             `polisctl cluster wait`"
        }
        ("quorum-silent", _) => {
            "a dead voter keeps the others from leaving: delete it first, `polisctl node delete \
             NODE --force`; or switch it on"
        }
        ("unmanaged-pods", _) => {
            "nothing makes such a pod anew: delete it, or have it evicted all the same: --force"
        }
        ("drain", _) => {
            "the node takes pods again; end the pods or change their disruption budget, allow \
             more time: --drain-timeout, or go on with pods left: --force"
        }
        ("drain-taken", _) => "wait for the other command, and repeat this one",
        ("not-owner", _) => "name the owner's key with --owner-key",
        ("fingerprint", _) => {
            "compare with the machine's screen again; do not approve a fingerprint that differs"
        }
        ("still-up", _) => {
            "decommission it first: `polisctl node decommission NODE`; or, if the machine is \
             lost, add --force"
        }
        ("last-owner", _) => "make another owner first: `polisctl user create NAME --role owner`",
        ("name-taken", _) => {
            "choose another name, or take it away from that node: `polisctl node name NODE --remove`"
        }
        ("user-taken", _) => "pick another name, or revoke that user first",
        ("key-taken", _) => "make another key: `polisctl owner create -o FILE`",
        ("decommissioned", _) => {
            "a removed node cannot return: wipe its disk and register the machine again"
        }
        (_, Code::Unauthenticated) => {
            "get a certificate: owners by `polisctl cluster take-ownership`, others from the owner \
             by `polisctl user create`"
        }
        (_, Code::PermissionDenied) => "ask a user with that role: `polisctl user list`",
        (_, Code::Unavailable | Code::DeadlineExceeded) => {
            "check the endpoints, wait for a leader with `polisctl cluster wait`, or allow more \
             time: --timeout; a node answers without a leader: `polisctl node status NODE --at \
             HOST`"
        }
        (_, Code::ResourceExhausted) => "`polisctl etcd status` shows whether the store is full",
        (_, Code::Unimplemented) => "the cluster's version does not support this call",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: &str) -> v1::NodeInfo {
        v1::NodeInfo { id: format!("polis-{id}"), ..Default::default() }
    }

    #[test]
    fn a_curator_that_was_learnt_is_reached_through_its_forwarded_port() {
        let id = NodeId::from_public_key(&[1; 32]);
        let mut context = Context::new("home");
        context.settings.nodes =
            BTreeMap::from([(id.to_string(), vec!["10.0.2.16".into(), "10.0.2.17".into()])]);
        context.settings.via =
            BTreeMap::from([("10.0.2.16:7835".to_owned(), "127.0.0.1:17835".to_owned())]);
        let found = learnt(&context).unwrap();
        let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["127.0.0.1:17835", "10.0.2.17:7835"]);
        assert!(found.iter().all(|candidate| candidate.node == Some(id)));
    }

    #[test]
    fn a_node_is_named_by_the_beginning_of_its_digits() {
        let nodes = || vec![node("abcd1"), node("abcd2"), node("ffff0")];
        assert_eq!(pick(nodes(), "ffff").unwrap().id, "polis-ffff0");
        assert_eq!(pick(nodes(), "polis-abcd2").unwrap().id, "polis-abcd2");
        let both = pick(nodes(), "abcd").unwrap_err().render();
        assert!(both.contains("polis-abcd1, polis-abcd2"), "{both}");
        let short = pick(nodes(), "fff").unwrap_err().render();
        assert!(short.contains("there is no node"), "{short}");
    }

    #[test]
    fn a_node_is_named_by_its_name_alone() {
        let named = |id: &str, name: &str| v1::NodeInfo { name: name.to_owned(), ..node(id) };
        let nodes = || vec![named("abcd1", "web"), named("abcd2", "web-2"), node("ffff0")];
        assert_eq!(pick(nodes(), "web").unwrap().id, "polis-abcd1");
        assert_eq!(pick(nodes(), "web-2").unwrap().id, "polis-abcd2");
        for none in ["we", "", "WEB", "polis-web"] {
            assert!(pick(nodes(), none).is_err(), "{none:?}");
        }
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let status = Status::unauthenticated("this call needs a user");
        let error = refused("list the users", &status);
        insta::assert_snapshot!(error.render(), @r"
        error: cannot list the users
        cause: this call needs a user
        help: get a certificate: owners by `polisctl cluster take-ownership`, others from the owner by `polisctl user create`
        ");
        assert_eq!(error.exit(), crate::error::Exit::Failed);
        let error = refused("list the users", &Status::unavailable("no leader was found in time"));
        assert_eq!(error.exit(), crate::error::Exit::TimedOut);
    }

    #[test]
    fn the_word_of_a_refusal_picks_the_advice() {
        let mut status = Status::failed_precondition("two voters would be left");
        status.metadata_mut().insert(REASON, "quorum".parse().unwrap());
        let text = refused("take the roles away", &status).render();
        assert!(text.contains("help: let another node vote first"), "{text}");
        let text = "without n2, 2 of 2 voters must answer, of which 1 can be reached; missing: n3";
        let mut status = Status::failed_precondition(text);
        status.metadata_mut().insert(REASON, "quorum".parse().unwrap());
        let text = refused("decommission the node", &status).render();
        assert!(text.contains("`polisctl node delete NODE --force`"), "{text}");
        assert!(!text.contains("let another node vote first"), "{text}");
    }
}
