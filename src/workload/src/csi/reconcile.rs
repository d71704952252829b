//! The reconciliation of volumes with their objects: makes volumes for claims, enlarges them, and
//! removes them.
//!
//! ```text
//! claim, this node selected  --> directory, project, size --> object --bound by Kubernetes-->
//!            does not fit    --> event --> no node selected
//! claim asks for more        --> size --> object --> status of the claim
//! object released, Delete    --> directory renamed --> object deleted --> content removed
//! ```
//!
//! An event is the whole state of one object: a state that fails is kept and tried again, until
//! a newer one takes its place.
//!
//! Invariants:
//! - A volume has its size and its limits before its object exists; its object is gone only
//!   after its directory has lost its name.
//! - Each pass over an object may be cut off after any step and be repeated.
//! - A volume whose object exists is removed only when that says so. A volume without an
//!   object and without a claim is removed only while it is empty.
//! - Attempts that fail for one cause make one event within [`REPORT_AGAIN`].
//!
//! What this module does not do: watch the objects (`provisioner`), or remove content (`trash`).

use std::collections::BTreeMap;
use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::time::Instant;
use tracing::{debug, info, trace, warn};

use super::claims::{self, Action, Claim, End, Refusal, Volume};
use super::cluster::{Cluster, Server};
use super::store::{self, Store};
use super::volume_id::VolumeId;
use crate::api;
use crate::watch::Event;
use polis_base::cause;
use polis_base::sys::clock;
use polis_runtime::supervisor::blocking;
use polis_wire::identity::NodeId;

/// How long the objects that wait are tried again before events have as much time: people with few
/// rights can have a thousand claims wait.
pub(super) const AGAIN_FOR: Duration = Duration::from_secs(1);

/// The same cause is reported again after this: events end after an hour.
const REPORT_AGAIN: Duration = Duration::from_secs(50 * 60);

/// Objects that wait for another attempt. More of them wait for the next watch.
const WAITING_MAX: usize = 1000;

/// Claims whose last event is remembered. The owners of more of them wait for theirs: an event
/// that is not remembered would be made again at each attempt.
const REPORTED_MAX: usize = 1000;

/// Why an attempt has failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The API server refuses, or does not answer.
    #[error(transparent)]
    Api(#[from] api::Error),
    /// The disk is not as it should be.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// Whether it stays until somebody changes something: the owner of a claim waits for that.
    /// A server that does not answer, is busy, or has a newer state is only tried again.
    pub(super) fn stays(&self) -> bool {
        match self {
            Self::Store(_) => true,
            Self::Api(api::Error::Refused { status, .. }) => {
                (400..500).contains(status) && ![408, 409, 429].contains(status)
            }
            Self::Api(
                api::Error::Credentials { .. }
                | api::Error::Connect { .. }
                | api::Error::Http { .. }
                | api::Error::Silent { .. }
                | api::Error::Long { .. },
            ) => false,
        }
    }
}

/// The kinds of objects that are watched.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Claim,
    Volume,
}

/// An object that concerns this node.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Claim(Claim),
    Volume(Volume),
}

impl Item {
    /// Objects of both kinds have the name of their volume.
    fn key(&self) -> (bool, VolumeId) {
        match self {
            Self::Claim(claim) => (true, claim.id.clone()),
            Self::Volume(volume) => (false, volume.id.clone()),
        }
    }
}

/// The work on objects, and what waits for another attempt.
#[derive(Debug)]
pub(super) struct Pass<S> {
    cluster: Cluster<S>,
    node: NodeId,
    store: Store,
    waiting: BTreeMap<(bool, VolumeId), Waiting>,
    /// The first of these that had no turn when the others were tried again.
    next: Option<(bool, VolumeId)>,
    /// Why the last look at empty volumes failed.
    pub(super) untidy: cause::Last,
    /// The cause of the last event for the owner of a claim, and its time.
    reported: BTreeMap<VolumeId, (String, Instant)>,
}

/// An object in its newest state, and why it waits.
#[derive(Debug)]
struct Waiting {
    item: Item,
    cause: cause::Last,
}

impl<S: Server> Pass<S> {
    pub(super) fn new(cluster: Cluster<S>, node: NodeId, store: Store) -> Self {
        let (waiting, reported) = (BTreeMap::new(), BTreeMap::new());
        let (next, untidy) = (None, cause::Last::default());
        Self { cluster, node, store, waiting, next, untidy, reported }
    }

    /// Takes an event of a watch.
    pub(super) async fn event(&mut self, kind: Kind, event: Event) {
        match event {
            Event::Is(object) => {
                if let Some(item) = self.read(kind, &object) {
                    self.item(item).await;
                }
            }
            Event::Gone(object) => self.forget(kind, &object),
        }
    }

    /// Reads an object that concerns this node.
    fn read(&self, kind: Kind, object: &serde_json::Value) -> Option<Item> {
        match kind {
            Kind::Claim => self.claim(object),
            Kind::Volume => self.volume(object),
        }
    }

    /// Reads a claim that concerns this node.
    pub(super) fn claim(&self, object: &serde_json::Value) -> Option<Item> {
        let claim = Claim::read(object)?;
        // One that waits and is not of this node any more is forgotten.
        let waits = self.waiting.contains_key(&(true, claim.id.clone()));
        (waits || claim.action(self.node) != Action::Nothing).then_some(Item::Claim(claim))
    }

    /// Reads a volume of this node.
    pub(super) fn volume(&self, object: &serde_json::Value) -> Option<Item> {
        Volume::read(object, self.node).map(Item::Volume)
    }

    /// An object is gone, whatever its last state asked for: a deleted claim asks for nothing.
    fn forget(&mut self, kind: Kind, object: &serde_json::Value) {
        let metadata = &object["metadata"];
        let (claim, id) = match kind {
            Kind::Claim => (true, metadata["uid"].as_str().map(VolumeId::of_claim)),
            Kind::Volume => (false, metadata["name"].as_str().map(str::parse::<VolumeId>)),
        };
        let Some(Ok(id)) = id else { return };
        self.reported.remove(&id);
        self.waiting.remove(&(claim, id));
    }

    /// Forgets what waits for another attempt.
    pub(super) fn forget_waiting(&mut self) {
        self.waiting.clear();
        self.next = None;
    }

    /// Tries again what waits, from where the call before has stopped, for [`AGAIN_FOR`]; returns
    /// whether nothing is left to try.
    pub(super) async fn again(&mut self) -> bool {
        let begun = Instant::now();
        let next = self.next.take();
        let due = self.waiting.keys().filter(|key| next.as_ref().is_none_or(|next| *key >= next));
        for key in due.cloned().collect::<Vec<_>>() {
            if begun.elapsed() >= AGAIN_FOR {
                self.next = Some(key);
                return false;
            }
            let item = self.waiting.get(&key).map(|waiting| waiting.item.clone());
            if let Some(item) = item {
                self.item(item).await;
            }
        }
        true
    }

    /// Does what an object asks for. A failed step waits for another attempt.
    async fn item(&mut self, item: Item) {
        let key = item.key();
        let mut cause = self.waiting.remove(&key).map(|before| before.cause).unwrap_or_default();
        let done = match &item {
            Item::Claim(claim) => self.serve(claim).await,
            Item::Volume(volume) => self.keep(volume).await,
        };
        match done {
            Ok(Served::Done) => return,
            Ok(Served::Later) => cause.clear(),
            Err(error) => {
                if cause.is_new(&cause::line(&error)) {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        volume = %key.1,
                        "cannot do what an object asks for, and tries again"
                    );
                }
                if let Item::Claim(claim) = &item
                    && error.stays()
                {
                    self.confess(claim, &error).await;
                }
            }
        }
        if self.waiting.len() < WAITING_MAX {
            self.waiting.insert(key, Waiting { item, cause });
        }
    }

    /// Tells the owner of a claim that this node, or the API server, keeps it waiting.
    async fn confess(&mut self, claim: &Claim, error: &Error) {
        let cause = cause::line(error);
        let message = format!(
            "node {} cannot do this now, and tries again: {cause}; the log of the node has more \
             (`polisctl node logs`)",
            self.node,
        );
        let refusal = Refusal { reason: "ProvisioningFailed", message, cause };
        if let Err(error) = self.report(claim, refusal).await {
            // The reason is in the log already.
            debug!(error = &error as &dyn std::error::Error, "cannot inform the owner of a claim");
        }
    }

    /// Serves a claim.
    pub(super) async fn serve(&mut self, claim: &Claim) -> Result<Served, Error> {
        match claim.action(self.node) {
            Action::Nothing => Ok(Served::Done),
            Action::Make => self.make(claim).await,
            Action::Enlarge => self.enlarge(claim).await,
        }
    }

    async fn make(&mut self, claim: &Claim) -> Result<Served, Error> {
        let Some(class) = self.cluster.class(claim).await? else { return Ok(Served::Done) };
        let wanted = match claim.wanted(&class) {
            Ok(wanted) => wanted,
            Err(refusal) => {
                // The claim or the class has to change; a change of the claim is an event,
                // and the next watch looks at the class.
                self.report(claim, refusal).await?;
                return Ok(Served::Done);
            }
        };
        let (store, id, label) = (self.store.clone(), claim.id.clone(), claim.label());
        let made = blocking(move || store.make(&id, &label, wanted.bytes)).await;
        let bytes = match made {
            Ok(bytes) => bytes,
            Err(error) => {
                let next = "the scheduler selects a node again, and this one once it has room";
                self.failed(claim, error, wanted.bytes, next).await?;
                // It may fit on another node.
                self.cluster.release(claim).await?;
                return Ok(Served::Done);
            }
        };
        self.cluster.create(&claims::volume(claim, &class, self.node, bytes)).await?;
        self.reported.remove(&claim.id);
        Ok(Served::Done)
    }

    async fn enlarge(&mut self, claim: &Claim) -> Result<Served, Error> {
        let wanted = match claim.size() {
            Ok(bytes) => bytes,
            Err(refusal) => {
                self.report(claim, refusal).await?;
                return Ok(Served::Done);
            }
        };
        if !claim.shows_less_than(wanted) {
            return Ok(Served::Done);
        }
        let object = self.cluster.volume(&claim.id).await?;
        let volume = object.as_ref().and_then(|object| Volume::read(object, self.node));
        // Kubernetes has not bound it yet, or it is not a volume of this node.
        let Some(volume) = volume.filter(|volume| volume.claim.as_ref() == Some(&claim.id)) else {
            return Ok(Served::Done);
        };
        let (store, id) = (self.store.clone(), claim.id.clone());
        let bytes = match blocking(move || store.enlarge(&id, wanted)).await {
            Ok(bytes) => bytes,
            Err(error) => {
                let next = "the volume grows as soon as there is room";
                return self.failed(claim, error, wanted, next).await.map(|()| Served::Later);
            }
        };
        if volume.bytes() < bytes {
            self.cluster.resize(&volume, bytes).await?;
        }
        self.cluster.show_size(claim, bytes).await?;
        self.reported.remove(&claim.id);
        Ok(Served::Done)
    }

    /// Tells the owner of a claim why it has no room, and what is next; other errors are the
    /// node's.
    async fn failed(
        &mut self,
        claim: &Claim,
        error: store::Error,
        wanted: u64,
        next: &str,
    ) -> Result<(), Error> {
        if !error.is_full() {
            return Err(error.into());
        }
        let size = claims::size(wanted);
        let message = format!(
            "{size} does not fit on node {}: {}; {next}: remove volumes or images from that node, \
             or ask for less",
            self.node,
            cause::line(&error),
        );
        // The room that is left changes with each file that is written.
        let cause = format!("no room for {size}");
        self.report(claim, Refusal { reason: "NoRoom", message, cause }).await
    }

    /// Tells it once, and again when the event has ended.
    async fn report(&mut self, claim: &Claim, refusal: Refusal) -> Result<(), Error> {
        let now = Instant::now();
        let lasts = |at: &Instant| now.duration_since(*at) < REPORT_AGAIN;
        let last = self.reported.get(&claim.id);
        if last.is_some_and(|(cause, at)| *cause == refusal.cause && lasts(at)) {
            return Ok(());
        }
        if last.is_none() && self.reported.len() >= REPORTED_MAX {
            self.reported.retain(|_, (_, at)| lasts(at));
            if self.reported.len() >= REPORTED_MAX {
                trace!(claim = claim.label(), why = refusal.message, "too many owners to inform");
                return Ok(());
            }
        }
        let at = OffsetDateTime::from(clock::now()).replace_nanosecond(0);
        let at = at.ok().and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_default();
        let event = claims::event(claim, &refusal, self.node, &at);
        self.cluster.report(claim, &refusal, event).await?;
        self.reported.insert(claim.id.clone(), (refusal.cause, now));
        Ok(())
    }

    /// Keeps a volume as its object says.
    pub(super) async fn keep(&mut self, volume: &Volume) -> Result<Served, Error> {
        let (store, id) = (self.store.clone(), volume.id.clone());
        match volume.end() {
            Some(End::Remove) => {
                // It is for good: what an event said may have changed since.
                let now = self.cluster.volume(&id).await?;
                let now = now.as_ref().and_then(|object| Volume::read(object, self.node));
                let Some(volume) = now.filter(|now| now.uid == volume.uid) else {
                    return Ok(Served::Done);
                };
                if volume.end() != Some(End::Remove) {
                    return Ok(Served::Done);
                }
                blocking(move || store.trash(&id)).await?;
                self.cluster.delete(&volume).await?;
            }
            Some(End::Forget) => {
                info!(volume = %id, "keeps the content of a volume without an object");
                self.cluster.forget(volume).await?;
            }
            None => {
                let bytes = volume.bytes();
                let kept = blocking(move || match store.usage(&id)? {
                    Some(usage) if usage.limits.bytes >= bytes => Ok(()),
                    // A power cut has taken the new size back.
                    Some(_) => store.enlarge(&id, bytes).map(drop),
                    None => Err(store::Error::Missing { id }),
                })
                .await;
                match kept {
                    Err(error @ store::Error::Missing { .. }) => {
                        warn!(error = &error as &dyn std::error::Error, "its object remains");
                    }
                    kept => kept?,
                }
            }
        }
        Ok(Served::Done)
    }

    /// Removes the empty volumes whose object was never made and whose claim is gone.
    pub(super) async fn tidy(&mut self) -> Result<(), Error> {
        let store = self.store.clone();
        for (id, claim) in blocking(move || store.empty()).await? {
            if self.cluster.volume(&id).await?.is_some() {
                continue;
            }
            if self.cluster.claim_uid(&claim).await?.as_deref() == Some(id.claim()) {
                continue;
            }
            let store = self.store.clone();
            if blocking(move || store.abandon(&id)).await? {
                info!(claim, "removed an empty volume that nothing asks for any more");
            }
        }
        Ok(())
    }
}

/// The state of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// Nothing is left to do until it changes.
    Done,
    /// It is tried again.
    Later,
}

#[cfg(test)]
#[path = "reconcile_tests.rs"]
mod tests;
