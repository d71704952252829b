//! The end of the machine, after a person has confirmed it twice.
//!
//! ```text
//! [closed] --F10, P--> [choose] --R--> [confirm reboot] ----Y--> Command::Reboot
//!     ^                  |   \---O--> [confirm power off] --Y--> Command::PowerOff
//!     +--any other key---+----------------------+
//! ```
//!
//! Invariants:
//! - No single key ends a machine, and a key that moves or scrolls is not one of the
//!   two.
//! - A confirmation that was typed before the question could be read does not count: a
//!   line that echoes, or a text that is pasted, ends no machine.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use crate::pages::has_no_part;
use crate::snapshot::{Cluster, MemberStatus, Snapshot};
use crate::text::{clean, wrap};
use crate::theme::{ATTENTION, BAD, BUSY, PLAIN, STRONG};
use crate::widgets::{Row, dialog};
use crate::{Command, Key};

/// Cells of the box, its border included.
const COLUMNS: u16 = 62;

/// Where a person is in the menu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Menu {
    /// Nothing was chosen yet.
    Choose,
    /// This was chosen.
    Confirm(End),
}

/// How the machine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Reboot,
    PowerOff,
}

impl Menu {
    /// The result of a key: the menu that is open then, and the command. A confirmation
    /// counts where the person has `seen` the question.
    pub(crate) fn key(self, key: Key, seen: bool) -> (Option<Self>, Option<Command>) {
        match (self, key) {
            (Self::Confirm(_), Key::Char('y' | 'Y')) if !seen => (Some(self), None),
            (Self::Choose, Key::Char('r' | 'R')) => (Some(Self::Confirm(End::Reboot)), None),
            (Self::Choose, Key::Char('o' | 'O')) => (Some(Self::Confirm(End::PowerOff)), None),
            (Self::Confirm(End::Reboot), Key::Char('y' | 'Y')) => (None, Some(Command::Reboot)),
            (Self::Confirm(End::PowerOff), Key::Char('y' | 'Y')) => (None, Some(Command::PowerOff)),
            _ => (None, None),
        }
    }

    pub(crate) fn draw(self, snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
        let key = |key: &str, what: &str| Row::indented(2).cell(5, BUSY, key).put(PLAIN, what);
        let mut rows = vec![Row::default()];
        let (title, style) = match self {
            Self::Choose => {
                rows.push(key("R", "reboot this machine"));
                rows.push(key("O", "power this machine off"));
                ("Power", BUSY)
            }
            Self::Confirm(end) => {
                let node = snapshot.header.node.as_deref().unwrap_or("this machine");
                rows.push(Row::indented(2).put(STRONG, &clean(node)));
                rows.push(Row::default());
                let inner = usize::from(area.width.min(COLUMNS)).saturating_sub(6);
                for line in wrap(&what_stops(snapshot, end), inner) {
                    rows.push(Row::indented(2).put(ATTENTION, &line));
                }
                rows.push(Row::default());
                match end {
                    End::Reboot => {
                        rows.push(key("Y", "yes, reboot it now"));
                        ("Reboot?", BAD)
                    }
                    End::PowerOff => {
                        rows.push(key("Y", "yes, power it off now"));
                        ("Power off?", BAD)
                    }
                }
            }
        };
        rows.push(key("Esc", "no, go back"));
        rows.push(Row::default());
        dialog::draw(title, style, rows, COLUMNS, area, buffer);
    }
}

/// The facts that a person should know before it is done.
fn what_stops(snapshot: &Snapshot, end: End) -> String {
    let away = match end {
        End::Reboot => "while it is away",
        End::PowerOff => "until it is back",
    };
    if snapshot.header.cluster != Cluster::Home {
        return format!("Its work stops {away}.");
    }
    let goes_on = format!("The cluster continues without it; its services stop {away}.");
    let unknown = |why: &str| {
        format!(
            "{why} this node cannot tell whether the cluster continues without it. Its services \
             stop {away}."
        )
    };
    let Some(etcd) = &snapshot.etcd else {
        return match has_no_part(snapshot) {
            true => goes_on,
            false => unknown("It runs no etcd member yet:"),
        };
    };
    let voters = etcd.members.iter().filter(|it| it.standing == MemberStatus::Voter).count();
    match (etcd.state.as_str(), etcd.survives) {
        ("voter" | "learner", _) if !etcd.quorum => {
            format!("The cluster has no quorum already. The services of this node stop {away}.")
        }
        ("learner", _) => goes_on,
        ("voter", Some(0)) if voters == 1 => {
            format!("It is the only voter of its cluster: the cluster stops {away}.")
        }
        ("voter", Some(0)) => format!(
            "The other voters have no majority without it: the cluster accepts no writes {away}."
        ),
        ("voter", Some(_)) => goes_on,
        ("voter", None) => format!(
            "The connections to the other voters are not known, so this node cannot tell whether \
             the cluster continues without it. Its services stop {away}."
        ),
        _ => unknown("Its etcd member does not serve:"),
    }
}
