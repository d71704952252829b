//! The pages: their names, their keys, and the parts of a snapshot that each of them
//! shows.

use crate::pages::{boot, cluster, etcd, network, pki, services, workloads};
use crate::theme::Mark;
use crate::{Key, Snapshot};

/// A page of the console.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Is it up? What is it waiting for?
    #[default]
    Boot,
    /// Who else is there, and is everyone well?
    Cluster,
    /// Would the cluster survive the loss of a member?
    Etcd,
    /// What ends soon?
    Pki,
    /// What died, why, how often?
    Services,
    /// What was logged?
    Logs,
    /// Can others reach this machine?
    Network,
    /// Does Kubernetes serve here, and which pods are not well?
    Workloads,
}

impl Page {
    /// All pages, in the order of their function keys.
    pub const ALL: [Self; 8] = [
        Self::Boot,
        Self::Cluster,
        Self::Etcd,
        Self::Pki,
        Self::Services,
        Self::Logs,
        Self::Network,
        Self::Workloads,
    ];

    /// The name of the page.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Boot => "Boot",
            Self::Cluster => "Cluster",
            Self::Etcd => "etcd",
            Self::Pki => "PKI",
            Self::Services => "Services",
            Self::Logs => "Logs",
            Self::Network => "Network",
            Self::Workloads => "Workloads",
        }
    }

    /// The key that opens it.
    #[must_use]
    pub fn key(self) -> Key {
        Key::F(self as u8 + 1)
    }

    /// The page of function key `number`, from 1.
    pub(crate) fn of_key(number: usize) -> Option<Self> {
        Self::ALL.get(number.checked_sub(1)?).copied()
    }

    /// Those whose log lines belong on the page, and what these lines are called.
    pub(crate) fn writers(self) -> Option<(&'static str, &'static [&'static str])> {
        match self {
            Self::Cluster => Some((
                "Log of the cluster",
                &["root.cluster", "root.curator", "root.agent", "root.roles"],
            )),
            Self::Etcd => Some(("Log of etcd", &["root.consensus"])),
            Self::Pki => Some((
                "Log of the certificates",
                &[
                    "root.credentials",
                    "root.agent.renewal",
                    "root.consensus.certificate",
                    "root.consensus.crl",
                ],
            )),
            Self::Network => Some(("Log of the network", &["root.network", "root.names"])),
            Self::Workloads => Some(("Log of the workloads", &["root.workload", "root.runtime"])),
            Self::Boot | Self::Services | Self::Logs => None,
        }
    }

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
            Self::Boot => (old.ready, &old.stages) != (new.ready, &new.stages),
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
                (old.ready, &old.stages, &old.metrics) != (new.ready, &new.stages, &new.metrics)
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

    /// The page `steps` further on, past the last one to the first.
    pub(crate) fn step(self, steps: usize) -> Self {
        Self::ALL[(self as usize + steps) % Self::ALL.len()]
    }
}
