//! The pages of the console: each answers one question of a person, with the answer on top.

pub(crate) mod boot;
pub(crate) mod cluster;
pub(crate) mod etcd;
pub(crate) mod filter;
mod load;
pub(crate) mod logs;
mod naming;
pub(crate) mod network;
pub(crate) mod pki;
mod reach;
pub(crate) mod services;
pub(crate) mod workloads;

use std::ops::Range;

pub(crate) use self::cluster::has_no_part;

use ratatui::text::Line;

use crate::Snapshot;
use crate::page::Page;
use crate::theme::Mark;

/// From so many columns on, blocks stand beside each other.
pub(crate) const WIDE: usize = 110;

/// A page as lines: the head stays, the body scrolls.
#[derive(Debug, Default)]
pub(crate) struct Content {
    pub(crate) head: Vec<Line<'static>>,
    pub(crate) body: Vec<Line<'static>>,
    /// Lines before the body that will not be shown soon, about.
    pub(crate) above: usize,
    /// The head of the lines from one of the body on: the last line of the head.
    pub(crate) days: Vec<(usize, Line<'static>)>,
    /// Lines of the body that must be on the screen: where the cursor is.
    pub(crate) focus: Option<Range<usize>>,
}

impl Content {
    /// Rows for the head out of `height`: never more than half, so that every
    /// line of the body can be reached.
    pub(crate) fn head_rows(&self, height: u16) -> u16 {
        u16::try_from(self.head.len()).unwrap_or(u16::MAX).min(height / 2)
    }
}

impl Page {
    /// The first line of the page, and its mark; the logs do not have one.
    pub(crate) fn answer(self, snapshot: &Snapshot) -> Option<(Mark, String)> {
        Some(match self {
            Self::Boot => boot::answer(snapshot),
            Self::Cluster => cluster::answer(snapshot),
            Self::Etcd => etcd::answer(snapshot),
            Self::Pki => pki::answer(snapshot),
            Self::Services => services::answer(snapshot),
            Self::Network => network::answer(snapshot),
            Self::Workloads => workloads::answer(snapshot),
            Self::Logs => return None,
        })
    }

    /// The mark of a page that has news for a person on another page.
    pub(crate) fn remark(self, snapshot: &Snapshot) -> Option<Mark> {
        let (mark, _) = self.answer(snapshot)?;
        (mark >= Mark::Attention).then_some(mark)
    }

    /// Whether the page's answer may have changed, with the same header: comparing is
    /// cheaper than answering, where no more is compared than an answer reads. An age,
    /// or etcd's index, changes each second.
    pub(crate) fn may_answer_anew(self, old: &Snapshot, new: &Snapshot) -> bool {
        let nodes = || old.nodes != new.nodes;
        match self {
            Self::Boot => boot::may_answer_anew(old, new),
            Self::Cluster => nodes() || cluster::reaches_anew(old, new),
            Self::Etcd => etcd::may_answer_anew(old, new) || nodes(),
            Self::Pki => pki::may_answer_anew(old, new) || new.pki.is_none() && nodes(),
            Self::Services => services::may_answer_anew(old, new),
            Self::Network => old.network != new.network,
            Self::Workloads => workloads::may_answer_anew(old, new),
            Self::Logs => false,
        }
    }

    /// Whether a mark has changed on any page, for a person on another page.
    pub(crate) fn any_remarks_anew(old: &Snapshot, new: &Snapshot) -> bool {
        Self::ALL
            .into_iter()
            .any(|page| page.may_answer_anew(old, new) && page.remark(old) != page.remark(new))
    }

    /// Whether an answer has changed on any page, word for word.
    fn any_answers_anew(old: &Snapshot, new: &Snapshot) -> bool {
        Self::ALL
            .into_iter()
            .any(|page| page.may_answer_anew(old, new) && page.answer(old) != page.answer(new))
    }

    /// Whether the page of `new` differs from that of `old`. Every field that its
    /// content reads is compared here.
    pub(crate) fn shows_change(self, old: &Snapshot, new: &Snapshot) -> bool {
        let page = match self {
            Self::Boot => {
                boot::may_answer_anew(old, new)
                    || old.metrics != new.metrics
                    || new.ready.is_some() && Self::any_answers_anew(old, new)
            }
            Self::Cluster => old.nodes != new.nodes || cluster::reaches_anew(old, new),
            // Without a part in it, they name the nodes with one.
            Self::Etcd => old.etcd != new.etcd || old.nodes != new.nodes,
            Self::Pki => old.pki != new.pki || new.pki.is_none() && old.nodes != new.nodes,
            Self::Services => old.services != new.services,
            Self::Logs => false,
            Self::Network => old.network != new.network,
            // Without a role, the nodes decide which command is shown.
            Self::Workloads => old.workloads != new.workloads || old.nodes != new.nodes,
        };
        page || old.logs != new.logs
    }
}
