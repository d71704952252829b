//! The room of this node for new volumes, as the scheduler reads it: one `CSIStorageCapacity` for
//! each class of the driver.
//!
//! ```text
//! classes --watched---> NODE.CLASS in kube-system, owned by the Node
//! disk ----every 5 s--> differs from what is shown? --> these objects
//! ```
//!
//! The scheduler selects no node for a claim that asks for more than the node shows for the class,
//! nor one that shows nothing for it. The watch begins anew every five minutes, and with it the
//! objects are read again: one that was deleted, or shows another capacity, is corrected then.
//!
//! Invariants:
//! - While the API server answers, the room that is shown is not more than there was [`LOOK`] ago:
//!   a claim that this node has refused soon goes elsewhere.
//! - Growth of less than two [`STEP`]s makes no request.
//!
//! What this module does not do: compute the room (`host::quota`), or delete the objects. They
//! go with their Node, by the garbage collector; nothing reads that of a class that is gone.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, warn};

use super::claims::{self, Class};
use super::cluster::{CLASSES, Cluster, Server};
use super::provisioner::pause;
use super::reconcile::Error;
use super::store::Store;
use crate::api::Api;
use crate::parts::API_STARTS;
use crate::watch::{Event, Watch};
use polis_base::cause;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;

/// Between two looks at the disk; a new class is served at once.
const LOOK: Duration = Duration::from_secs(5);

/// The room is shown in whole steps: where images and containers fill the disk, it changes with
/// each file that is written.
const STEP: u64 = 64 << 20;

/// Shows the room of one node. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Publisher {
    /// The API server, asked as this driver on this node.
    pub api: Api,
    /// This node.
    pub node: NodeId,
    /// Its volumes.
    pub store: Store,
}

impl Publisher {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// None: a failed step is tried again.
    pub async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let (begun, mut refused) = (Instant::now(), cause::Last::default());
        ctx.healthy();
        loop {
            let started = Instant::now();
            let round = Box::pin(self.round());
            let Some(ended) = ctx.until_cancelled(round).await else { return Ok(()) };
            match &ended {
                Ok(()) => refused.clear(),
                Err(error) => failed(error, begun, &mut refused),
            }
            let pause = pause(&ended, started.elapsed());
            if ctx.until_cancelled(sleep(pause)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// One watch of the classes, from its start to its end.
    async fn round(&self) -> Result<(), Error> {
        let mut room = Room::new(Cluster(self.api.clone()), self.node, self.store.clone());
        let mut classes = Watch::open(&self.api, CLASSES).await?;
        let mut look = Instant::now() + LOOK;
        loop {
            tokio::select! {
                // Cancel-safe, both.
                event = classes.next() => {
                    let Some(event) = event? else { return Ok(()) };
                    if room.event(&event) {
                        // The pods of a new class wait for it.
                        look = Instant::now();
                    }
                }
                () = sleep_until(look) => {
                    room.look().await?;
                    look = Instant::now() + LOOK;
                }
            }
        }
    }
}

/// Logs a failure that stays. The provisioner shows an API server that does not answer, and the
/// rights of a new worker come some seconds after it.
fn failed(error: &Error, begun: Instant, refused: &mut cause::Last) {
    let stays = error.stays() && begun.elapsed() >= API_STARTS;
    let new = stays && refused.is_new(&cause::line(error));
    let error = error as &dyn std::error::Error;
    if new {
        warn!(error, "cannot show the scheduler the room for volumes");
    } else {
        debug!(error, "cannot show the scheduler the room for volumes yet");
    }
}

/// The objects of this node, and what they show.
#[derive(Debug)]
struct Room<S> {
    cluster: Cluster<S>,
    node: NodeId,
    store: Store,
    /// By class; `None` for an object that is missing, or was not read yet.
    shown: BTreeMap<String, Option<u64>>,
}

impl<S: Server> Room<S> {
    fn new(cluster: Cluster<S>, node: NodeId, store: Store) -> Self {
        Self { cluster, node, store, shown: BTreeMap::new() }
    }

    /// Takes an event of a class; returns whether it is a new one of this driver.
    fn event(&mut self, event: &Event) -> bool {
        let (Event::Is(object) | Event::Gone(object)) = event;
        let Some(class) = object["metadata"]["name"].as_str() else { return false };
        if matches!(event, Event::Gone(_)) {
            self.shown.remove(class);
            return false;
        }
        // The name of a class may be too long for one that begins with that of the node.
        let own = Class::read(object).is_some()
            && claims::is_name(&claims::capacity_name(self.node, class));
        let new = own && !self.shown.contains_key(class);
        if new {
            self.shown.insert(class.to_owned(), None);
        }
        new
    }

    /// Looks at the disk, and changes each object that differs.
    async fn look(&mut self) -> Result<(), Error> {
        let store = self.store.clone();
        let room = blocking(move || store.room()).await?;
        for (class, shown) in &mut self.shown {
            if shown.is_none() {
                *shown = self.cluster.room(self.node, class).await?;
            }
            let Some(bytes) = differs(*shown, room) else { continue };
            let present = match shown {
                Some(_) => self.cluster.show_room(self.node, class, bytes).await?,
                None => self.cluster.create_room(self.node, class, bytes).await?,
            };
            // The next look reads and makes one that is missing.
            *shown = present.then_some(bytes);
        }
        Ok(())
    }
}

/// The room to show, where it differs too much from what is shown.
fn differs(shown: Option<u64>, room: u64) -> Option<u64> {
    let stays = shown.is_some_and(|shown| shown <= room && room - shown < 2 * STEP);
    (!stays).then_some(room - room % STEP)
}

#[cfg(test)]
#[path = "capacity_tests.rs"]
mod tests;
