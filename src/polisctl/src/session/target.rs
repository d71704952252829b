//! Which node a command is about, and where it is: by an ID, a prefix of one, a name, or an
//! address.

use std::fmt;

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use tokio::time::timeout;
use tonic::Status;

use super::Session;
use super::deadline::leader_time;
use crate::error::{Error, Exit, Explain as _};
use crate::text::is_near;
use polis_wire::endpoint::{Endpoint, MANAGEMENT_PORT};
use polis_wire::identity::{NodeId, NodeName};
use polis_wire::rpc::client::Repeat;

impl Session {
    /// The nodes with these IDs; all nodes, if the list is empty.
    pub(crate) async fn nodes(&self, ids: &[String]) -> Result<Vec<v1::NodeInfo>, Error> {
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
        self.keep_up().await;
        nodes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(nodes)
    }

    /// The node of an ID, a prefix of one, or a name.
    pub(crate) async fn find(&self, wanted: &str) -> Result<v1::NodeInfo, Error> {
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

    /// The management address of a node: `at`, or the one that the cluster has.
    pub(crate) async fn target(
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
    pub(crate) fn known_nodes(&self) -> Vec<Target> {
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
        let info = self.cluster_info().await.ok()?;
        let nodes = info.cluster_directory?.nodes;
        let entry = nodes.into_iter().find(|entry| entry.id == node.id)?;
        let address = Endpoint::parse(entry.addresses.first()?, MANAGEMENT_PORT).ok()?;
        let address = address.at_port(MANAGEMENT_PORT);
        Some(Target { meant: Meant::Node(node.id.parse().ok()?), address })
    }
}

/// A node's own port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The expected node.
    pub(crate) meant: Meant,
    /// The address.
    pub(crate) address: Endpoint,
}

/// The node that is expected at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meant {
    /// Any node of the cluster.
    Any,
    /// The node with this ID.
    Node(NodeId),
    /// The node whose ID has this prefix.
    Digits(String),
}

impl Meant {
    /// The ID in full, where that is known.
    pub(crate) fn id(&self) -> Option<NodeId> {
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
    pub(super) fn check(&self, found: NodeId, address: &Endpoint) -> Result<(), Error> {
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
pub(crate) fn target(node: &v1::NodeInfo) -> Result<Target, Error> {
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

/// The digits of an ID with which a mistyped one is recognised.
const NEAR_DIGITS: usize = 8;
/// The most nodes that an error suggests.
const NEAR_MAX: usize = 4;

/// The node of an ID, of a prefix of its digits, or of a name.
fn pick(nodes: Vec<v1::NodeInfo>, wanted: &str) -> Result<v1::NodeInfo, Error> {
    let digits = wanted.strip_prefix("polis-").unwrap_or(wanted);
    let fits = |node: &v1::NodeInfo| {
        let own = node.id.strip_prefix("polis-").unwrap_or(&node.id);
        own == digits
            || (!node.name.is_empty() && node.name == wanted)
            || (digits.len() >= DIGITS_MIN && own.starts_with(digits))
    };
    let (mut found, others): (Vec<v1::NodeInfo>, Vec<_>) = nodes.into_iter().partition(fits);
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => {
            let near = match near(&others, wanted) {
                near if near.is_empty() => String::new(),
                near => format!("near: {}; ", near.join(", ")),
            };
            Err(Error::new(format!("there is no node {wanted:?}")).or_help(format!(
                "{near}`polisctl node list` shows them; name one by its name, or by four digits \
                 of its ID"
            )))
        }
        _ => {
            let ids: Vec<String> = found.into_iter().map(|node| node.id).collect();
            Err(Error::new(format!("{wanted:?} is a prefix of several nodes"))
                .or_help(format!("give more digits: {}", ids.join(", "))))
        }
    }
}

/// The nodes whose name, or the first digits of whose ID, are nearly what was typed. A word of a
/// few letters is near to most names.
fn near(nodes: &[v1::NodeInfo], wanted: &str) -> Vec<String> {
    let typed = wanted.strip_prefix(PREFIX).unwrap_or(wanted);
    let letters = typed.chars().count();
    let alike = |node: &&v1::NodeInfo| {
        let digits = node.id.strip_prefix(PREFIX).unwrap_or(&node.id);
        let begins: String = digits.chars().take(letters).collect();
        letters >= DIGITS_MIN && !node.name.is_empty() && is_near(&node.name, typed)
            || letters >= NEAR_DIGITS && is_near(&begins, typed)
    };
    let called = |node: &v1::NodeInfo| match &*node.name {
        "" => node.id.clone(),
        name => name.to_owned(),
    };
    nodes.iter().filter(alike).take(NEAR_MAX).map(called).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: &str) -> v1::NodeInfo {
        v1::NodeInfo { id: format!("polis-{id}"), ..Default::default() }
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
    fn a_mistyped_node_is_suggested() {
        let mail = v1::NodeInfo { name: "mail-1".to_owned(), ..node("abcd1234ffff") };
        let nodes = || vec![mail.clone(), node("beef5678ffff")];
        let help = |wanted: &str| pick(nodes(), wanted).unwrap_err().render();
        for typed in ["mial-1", "mail1", "abcd1243", "polis-abdc1234f"] {
            assert!(help(typed).contains("help: near: mail-1; `polisctl"), "{}", help(typed));
        }
        assert!(help("beef5687").contains("help: near: polis-beef5678ffff; "));
        for typed in ["", "ma", "abce", "weather"] {
            assert!(help(typed).contains("help: `polisctl node list`"), "{}", help(typed));
        }
    }
}
