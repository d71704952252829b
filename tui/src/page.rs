//! The pages: their names, their keys and their order. `pages` has what they show.

use crate::Key;

/// A page of the console.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Is it up? What is it waiting for?
    #[default]
    Boot,
    /// Which other nodes are there, and is each one well?
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

    /// The page `steps` further on, past the last one to the first.
    pub(crate) fn step(self, steps: usize) -> Self {
        Self::ALL[(self as usize + steps) % Self::ALL.len()]
    }
}
