//! Calls to one node, at its own port or at its port for Kubernetes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::Session;
use super::candidates::detour;
use super::deadline::{Limit, within};
use super::refusal::unreached;
use super::target::Target;
use crate::error::{Error, Explain as _};
use polis_wire::endpoint::{Endpoint, KUBERNETES_PORT};
use polis_wire::identity::{Fingerprint, Spoken};
use polis_wire::pki::{Authorities, Facts};
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::https::{self, Answer};
use polis_wire::rpc::client::{Channel, Connection, Expect, Trust, dial};

/// Between two attempts at a node that is waited for.
const RETRY: Duration = Duration::from_millis(500);

impl Session {
    /// Connects; with `--timeout` it retries until then, for a node that is starting.
    async fn reach(&self, at: &Endpoint, trust: &Trust) -> Result<Connection, Error> {
        let own = Some(&self.credentials);
        let reached = dialled(at, Expect::AnyNode, trust, own, self.limit);
        self.out.waiting(&format!("connecting to {at}"), Box::pin(reached)).await
    }

    /// Which certificates of nodes are good.
    fn trust(&self) -> Trust {
        let known = self.credentials.authorities.clone();
        let authorities = known.unwrap_or_else(|| Authorities::sole(Vec::new()).into());
        let revoked = Arc::clone(&self.access_list.borrow().serials);
        Trust::Cluster { authorities, revoked }
    }

    /// Connects to one node's own port.
    pub(crate) async fn node(&self, node: &Target) -> Result<Channel, Error> {
        Ok(self.connect(node).await?.channel)
    }

    /// The same; also returns the node at the other end.
    pub(crate) async fn connect(&self, node: &Target) -> Result<Connection, Error> {
        let address = detour(&self.context, &node.address)?;
        let trust = self.trust();
        let reached = self.reach(&address, &trust).await;
        let connection = reached.doing(|| format!("cannot reach {}", node.meant))?;
        node.meant.check(connection.node, &address)?;
        Ok(connection)
    }

    /// Reads a path of Kubernetes through one of its controllers.
    pub(crate) async fn kubernetes(&self, node: &Target, path: &str) -> Result<Answer, Error> {
        let Endpoint { host, port } = self.kubernetes_at(node)?;
        let trust = self.trust();
        let expect = node.meant.id().map_or(Expect::AnyNode, Expect::Node);
        let answer = https::get(&host, port, expect, &trust, &self.credentials, path);
        let answer = async {
            answer.await.map_err(|error| match error {
                https::Error::Dial(dial) => unreached(dial),
                late @ https::Error::Silent { .. } => Error::late(late.into()).or_help(
                    "the API server is overloaded, or its etcd is slow: see `polisctl etcd status`",
                ),
                error => error.into(),
            })
        };
        let limited = within(self.limit, "ask Kubernetes", answer);
        self.out.waiting(&format!("asking Kubernetes at {host}"), limited).await
    }

    /// Where a controller lets users into Kubernetes.
    pub(crate) fn kubernetes_at(&self, node: &Target) -> Result<Endpoint, Error> {
        detour(&self.context, &node.address.at_port(KUBERNETES_PORT))
    }

    /// The certificate and the key of the user.
    pub(crate) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Connects to a node that waits for the key of its disk. Its certificate is
    /// self-signed, so its fingerprint is compared before anything is sent.
    pub(crate) async fn waiting_node(
        &self,
        node: &Target,
        spoken: &Spoken,
    ) -> Result<Channel, Error> {
        let address = detour(&self.context, &node.address)?;
        let connection = self.reach(&address, &Trust::Unchecked).await?;
        let facts = Facts::read(&connection.certificate);
        let key = facts.ok_or_else(|| {
            Error::new("the node shows no certificate".to_owned())
                .or_help("check the address: another program may listen there")
        })?;
        let shown = Fingerprint::of_key(&key.public_key);
        if shown.is(spoken) {
            return Ok(connection.channel);
        }
        Err(Error::new(format!(
            "the machine at {address} has another key: {}, {shown}",
            shown.words()
        ))
        .or_help(
            "read the fingerprint again from the machine's own screen, page Boot; if they still \
             differ, the connection is intercepted",
        ))
    }
}

/// Connects to a machine; with a deadline it retries until then, for one that is starting.
pub(crate) async fn dialled(
    at: &Endpoint,
    expect: Expect,
    trust: &Trust,
    own: Option<&Credentials>,
    limit: Option<Limit>,
) -> Result<Connection, Error> {
    let dialled = || dial(&at.host, at.port, expect, trust, own);
    let Some(limit) = limit else { return Box::pin(dialled()).await.map_err(unreached) };
    let mut last = None;
    loop {
        match timeout_at(limit.end, Box::pin(dialled())).await {
            Ok(Err(error)) if error.is_absence() => last = Some(error),
            Ok(dialled) => return dialled.map_err(unreached),
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
