//! A look at the cluster: the records of the leader, and what each node shows on its console.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use polis_base::sys::clock;
use polis_proto::v1;
use tokio::time::timeout;

use super::board::Board;
use super::card::Card;
use crate::console::glance;
use crate::error::Error;
use crate::session::{self, Session, at_most};
use crate::units;

/// How long one node may take; it answers at once.
const NODE: Duration = Duration::from_secs(3);
/// How long the leader may take to list the nodes, before the screen says that it does not.
const LEADER: Duration = Duration::from_secs(4);
/// Nodes that are asked at the same time. Each of them costs this machine a connection with a
/// handshake; so many that do not answer delay the others by [`NODE`].
const AT_ONCE: usize = 64;

/// Asks the leader for the nodes, and each of them for the rest. Without an answer of the
/// leader the nodes are those of `last`, if it has any.
pub(super) async fn poll(session: &Session, last: &Board) -> Result<Board, Error> {
    let list = Box::pin(session.nodes(&[]));
    let listed = match last.nodes.is_empty() {
        // The first list may take as long as in any command.
        true => list.await,
        false => timeout(LEADER, list).await.unwrap_or_else(|_elapsed| {
            Err(Error::new(format!("no leader answers within {}", units::span(LEADER))))
        }),
    };
    let (nodes, at, trouble) = match listed {
        Ok(nodes) => (nodes, units::date(clock::now()), None),
        Err(error) if last.nodes.is_empty() => return Err(error),
        Err(error) => (last.nodes.clone(), last.at.clone(), Some(error.summary())),
    };
    let cards = in_turn(nodes.iter().map(|node| card(session, node))).await;
    let cluster = session.context.name.clone();
    Ok(Board { cluster, nodes, cards, at, trouble, notice: None })
}

async fn card(session: &Session, node: &v1::NodeInfo) -> Card {
    let target = session::target(node).ok();
    let answer = match (&target, node.state()) {
        (Some(target), v1::NodeState::Up) => {
            let answer = at_most(NODE, glance(session, target)).await;
            Some(answer.map_err(|error| error.summary()))
        }
        (_, _) => None,
    };
    let card = Card::of(node, target, answer);
    let notes = card.notes.iter().map(|note| session.for_reader(note)).collect();
    Card { notes, ..card }
}

/// The answers in the order of the questions, of which [`AT_ONCE`] wait at the same time.
async fn in_turn<F: Future>(questions: impl Iterator<Item = F>) -> Vec<F::Output> {
    stream::iter(questions).buffered(AT_ONCE).collect().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use polis_wire::rpc::Role;
    use tokio::time::Instant;

    use super::*;
    use crate::dashboard::card::Mark;
    use crate::loopback::{Cluster, NAME};
    use crate::session::PATIENCE;

    #[tokio::test]
    async fn a_fixed_number_of_nodes_is_asked_at_once_and_all_are_in_their_order() {
        let (now, most) = (Cell::new(0_usize), Cell::new(0_usize));
        let (now, most) = (&now, &most);
        let questions = (0..500).map(|number| async move {
            now.set(now.get() + 1);
            most.set(most.get().max(now.get()));
            tokio::task::yield_now().await;
            now.set(now.get() - 1);
            number
        });
        assert_eq!(in_turn(questions).await, (0..500).collect::<Vec<_>>());
        assert_eq!(most.get(), AT_ONCE);
    }

    #[test]
    fn without_a_leader_the_dashboard_says_so_and_still_asks_each_node() {
        let world = crate::testing::World::new();
        let cluster = Cluster::new(&world);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let session = Session::prepare(&world.global(), PATIENCE).unwrap();
            let first = poll(&session, &Board::default()).await.unwrap();
            assert_eq!(first.headline(), (Mark::Good, "1 node, all healthy".to_owned()));
            cluster.lose_the_leader();
            cluster.asked();
            let begun = Instant::now();
            let then = poll(&session, &first).await.unwrap();
            // The bound of the leader and that of a node, and what a busy host adds.
            assert!(begun.elapsed() < Duration::from_secs(12), "{:?}", begun.elapsed());
            let (mark, text) = then.headline();
            assert_eq!(mark, Mark::Bad);
            assert!(
                text.starts_with(&format!("No newer list of nodes since {}", first.at)),
                "{text}"
            );
            assert_eq!(then.cards[0].called, NAME);
            assert_eq!(cluster.asked(), ["Console"], "the node was asked");
        });
    }

    #[test]
    fn a_note_names_the_role_for_a_command_that_its_reader_may_not_type() {
        let world = crate::testing::World::new();
        let cluster = Cluster::new(&world);
        let (_bound, closed) = crate::testing::closed_port();
        cluster.has_a_crowd(&world, &closed);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for (role, is_marked) in
            [(Role::Viewer, true), (Role::Operator, false), (Role::Owner, false)]
        {
            cluster.lets_in_as(&world, role);
            let looked = runtime.block_on(async {
                let session = Session::prepare(&world.global(), PATIENCE).unwrap();
                poll(&session, &Board::default()).await.unwrap()
            });
            let notes: Vec<_> = looked.cards.iter().flat_map(|card| card.notes.clone()).collect();
            let suggested: Vec<_> =
                notes.iter().filter(|note| note.contains("`polisctl node")).collect();
            assert!(suggested.len() > 2, "{notes:?}");
            let mark = " (only an operator or an owner may)";
            assert!(
                suggested.iter().all(|note| note.contains(mark) == is_marked),
                "{role}: {suggested:?}"
            );
        }
    }
}
