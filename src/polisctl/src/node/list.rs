//! `polisctl node list`: the nodes of the cluster, and where each is.

use polis_proto::v1;

use super::view::{View, faults, nodes_table};
use crate::error::{Error, Exit};
use crate::output::{Document, Text};
use crate::session::{self, Session, Target};
use crate::watch::Watch;
use crate::{Global, parameters};

/// Which nodes to list.
#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Only with this label; repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Only in this state; repeatable.
    #[arg(long = "state", value_enum)]
    states: Vec<State>,
    #[command(flatten)]
    watch: Watch,
}

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum State {
    /// Waits for approval.
    New,
    /// Is approved and has not committed yet.
    Standby,
    /// A member.
    Up,
    /// Was removed.
    Decommissioned,
}

impl From<State> for v1::NodeState {
    fn from(state: State) -> Self {
        match state {
            State::New => Self::New,
            State::Standby => Self::Standby,
            State::Up => Self::Up,
            State::Decommissioned => Self::Decommissioned,
        }
    }
}

/// Prints the nodes.
pub(crate) async fn list(arguments: &List, global: &Global) -> Result<(), Error> {
    let List { labels, states, watch } = arguments;
    let labels = parameters::pairs("--label", labels)?;
    let mut session = Session::open(global).await?;
    if watch.is_on() {
        session.go_on();
    }
    let fits = |node: &v1::NodeInfo| {
        let state = node.state();
        (states.is_empty() || states.iter().any(|wanted| v1::NodeState::from(*wanted) == state))
            && labels.iter().all(|(key, value)| node.labels.get(key) == Some(value))
    };
    let listed = async || {
        let nodes = session.nodes(&[]).await?;
        let views: Vec<View> = nodes.iter().filter(|node| fits(node)).map(View::of).collect();
        Document::new(&views, Text::from(nodes_table(&views)).and(faults(&views)))
    };
    watch.run(global, listed).await
}

/// Every node with an address: those that the leader lists as members, else those that the
/// context knows.
pub(crate) async fn targets(session: &Session) -> Result<Vec<Target>, Error> {
    match session.nodes(&[]).await {
        Ok(nodes) => {
            let up = nodes.iter().filter(|node| node.state() == v1::NodeState::Up);
            Ok(up.filter_map(|node| session::target(node).ok()).collect())
        }
        Err(error) if error.exit() == Exit::TimedOut => match session.known_nodes() {
            known if known.is_empty() => Err(error),
            known => Ok(known),
        },
        Err(error) => Err(error),
    }
}
