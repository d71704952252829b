//! The writer of this machine's status: the one way in which the status changes.
//!
//! Four services contribute to the status: the cluster manager reports each step on the way
//! home, `agent` whether the node is in contact with its cluster and what the cluster says
//! of the recovery key, and `roles` whether the member of etcd votes. These services do not
//! have the sender: each change is a method here.
//!
//! Invariants:
//! - The state changes only as [`State::after`] allows, except for a run that starts over.
//! - A change is one step and touches only the fields that its caller owns, so no change
//!   overwrites another service's.
//! - Readers see a new state only after the serial line and the log have it.

use tokio::sync::watch;

use super::state::Event;
use super::{State, Status};
use polis_base::serial::EventLine;
use polis_runtime::lines::Lines;
use polis_wire::identity::{Fingerprint, NodeId};
use polis_wire::node_roles::Role;

/// Writes [`Status`]. Cheap to clone: all clones write the same one.
#[derive(Clone, Debug, Default)]
pub struct Writer(watch::Sender<Status>);

impl Writer {
    /// Makes a machine with the status `status`.
    #[must_use]
    pub fn new(status: Status) -> Self {
        Self(watch::Sender::new(status))
    }

    /// Receives every change from now on.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Status> {
        self.0.subscribe()
    }

    /// The current status. No change happens while the returned value is held.
    #[must_use]
    pub fn borrow(&self) -> watch::Ref<'_, Status> {
        self.0.borrow()
    }

    /// Names the fingerprint that an operator compares before approving this node.
    pub(super) fn shows(&self, fingerprint: Fingerprint) {
        self.0.send_if_modified(|status| {
            let before = status.fingerprint.replace(fingerprint);
            before != status.fingerprint
        });
    }

    /// Changes the state, if `event` leads to another; `say` logs it before any reader can
    /// act on it. Returns whether it did.
    pub fn happened(&self, event: Event, lines: &Lines, say: impl FnOnce(State)) -> bool {
        self.0.send_if_modified(|status| {
            let Some(state) = status.state.after(event).filter(|state| *state != status.state)
            else {
                return false;
            };
            status.state = state;
            print(lines, status);
            say(state);
            true
        })
    }

    /// Sets whether the machine serves `role` from now on.
    pub fn serves(&self, role: Role, serves: bool) {
        self.0.send_if_modified(|status| {
            let changed = status.roles.contains(&role) != serves;
            if changed && serves {
                status.roles.push(role);
            } else if changed {
                status.roles.retain(|other| *other != role);
            }
            changed
        });
    }

    /// Sets whether the owner still has to save the recovery key of the disk.
    pub fn recovery_key_unsaved(&self, unsaved: bool) {
        self.0.send_if_modified(|status| match &mut status.keys {
            Some(keys) if keys.recovery_key_unsaved != unsaved => {
                keys.recovery_key_unsaved = unsaved;
                true
            }
            _ => false,
        });
    }

    /// Sets whether a firmware update is announced.
    pub(super) fn firmware_update_announced(&self, announced: bool) {
        self.0.send_if_modified(|status| match &mut status.keys {
            Some(keys) if keys.firmware_update_announced != announced => {
                keys.firmware_update_announced = announced;
                true
            }
            _ => false,
        });
    }

    /// Starts over, for a run of the cluster manager: nothing is known.
    pub(super) fn begin(&self, lines: &Lines) {
        let status = Status::default();
        print(lines, &status);
        self.0.send_replace(status);
    }

    /// The machine has its name.
    pub(super) fn named(&self, node: NodeId) {
        self.0.send_modify(|status| status.node = Some(node));
    }

    /// Sets whether the machine waits for the key of its disk.
    pub(super) fn waits_for_key(&self, waits: bool) {
        self.0.send_modify(|status| status.waits_for_key = waits);
    }

    /// The machine is a member, with the facts in `home`; the state follows from events.
    pub(super) fn entered(&self, home: Status, lines: &Lines) {
        self.0.send_modify(|status| {
            let state = status.state.after(Event::Entered).unwrap_or_default();
            *status = Status { state, ..home };
            print(lines, status);
        });
    }
}

/// The line first: other services print lines of their own as soon as they see the change.
fn print(lines: &Lines, status: &Status) {
    let line = EventLine::new("cluster").field("state", status.state);
    lines.event(match status.node {
        Some(node) => line.field("node", node),
        None => line,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::KeyStatus;

    #[test]
    fn only_a_change_of_the_state_is_published() {
        let writer = Writer::default();
        let watcher = writer.subscribe();
        let (lines, _written) = Lines::channel();
        let never = |state| panic!("{state} is published");
        assert!(!writer.happened(Event::CutOff, &lines, never), "it is not a member");
        assert!(!watcher.has_changed().unwrap());
        let mut published = None;
        assert!(writer.happened(Event::Entered, &lines, |state| published = Some(state)));
        assert_eq!(published, Some(State::Home));
        assert!(!writer.happened(Event::Reconnected, &lines, never), "it is home already");
        assert!(writer.happened(Event::Removed, &lines, |_state| {}));
        assert!(!writer.happened(Event::Entered, &lines, never));
        assert_eq!(writer.borrow().state, State::Disowning);
    }

    #[test]
    fn each_change_keeps_what_others_have_said() {
        let (lines, _written) = Lines::channel();
        let writer = Writer::default();
        let keys = KeyStatus {
            sealed: true,
            keeper: None,
            recovery_key_unsaved: true,
            firmware_update_announced: false,
        };
        writer.named(NodeId::from_public_key(&[1; 32]));
        writer.waits_for_key(true);
        let home = Status { node: writer.borrow().node, keys: Some(keys), ..Status::default() };
        writer.entered(home, &lines);
        writer.serves(Role::ConsensusMember, true);
        writer.serves(Role::ConsensusMember, true);
        assert!(writer.happened(Event::CutOff, &lines, |_state| {}));
        writer.recovery_key_unsaved(false);
        let status = writer.borrow().clone();
        assert_eq!((status.state, status.waits_for_key), (State::Split, false));
        assert_eq!(status.roles, [Role::ConsensusMember]);
        assert!(status.node.is_some() && !status.keys.unwrap().recovery_key_unsaved);
        writer.serves(Role::ConsensusMember, false);
        assert!(writer.borrow().roles.is_empty());
    }
}
