//! The workloads: the parts of Kubernetes on this node, its quotas, and its pods.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// The workloads of this node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Workloads {
    /// The Kubernetes roles of this node, in words; empty for a node without one, which has
    /// nothing of the rest.
    pub roles: Vec<String>,
    /// Why the node cannot serve its roles, with the remedy.
    pub unfit: Option<String>,
    /// The parts that the roles need, in the order of their start.
    pub parts: Vec<Part>,
    /// The conditions outside of the parts that the parts wait for, in words.
    pub waits: Vec<String>,
    /// The limits of workloads on the data partition; empty while there are none.
    pub quotas: Vec<Quota>,
    /// The pods, if the container runtime answers.
    pub pods: Option<Pods>,
}

/// A part of the workload stack.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// Its word on the serial line.
    pub name: String,
    /// Its activity.
    pub state: PartState,
    /// Its last words, if it failed.
    pub cause: Option<String>,
    /// How often it was restarted.
    pub restarts: u64,
    /// How long its service has run, or not, if that is known.
    #[serde(with = "time::optional")]
    pub since: Option<Duration>,
}

/// The activity of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartState {
    /// Does not serve yet.
    Starting,
    /// Serves.
    Ready,
    /// Died, or its checks fail.
    Failed,
    /// Ended with the role.
    Stopped,
    /// Not known, or of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// A limit on the data partition, and its use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quota {
    /// Its object, in words.
    pub name: String,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that may be in use; zero without a limit.
    pub limit: u64,
    /// Files and directories.
    pub files: u64,
    /// Files and directories that there may be; zero without a limit.
    pub files_limit: u64,
}

/// The pods of this node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pods {
    /// Pods, those that are not well first. A node with very many leaves some out.
    pub pods: Vec<Pod>,
    /// How many there are.
    pub total: u64,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name in the namespace.
    pub name: String,
    /// Its activity.
    pub state: PodState,
    /// The container that the state is about, if it is about one.
    pub container: Option<String>,
    /// The reason of the state in one word, such as `OOMKilled`.
    pub reason: Option<String>,
    /// The exit status of the container, if it ended.
    pub exit_status: Option<i32>,
    /// More about the reason, in the words of the runtime.
    pub message: Option<String>,
    /// How often its containers were restarted.
    pub restarts: u64,
    /// The runtime class, such as `gvisor`; `None` for the ordinary one.
    pub runtime: Option<String>,
    /// Its age, if that is known.
    #[serde(with = "time::optional")]
    pub age: Option<Duration>,
}

/// The activity of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PodState {
    /// Its containers run.
    Running,
    /// No container runs yet.
    Starting,
    /// No container has started for too long.
    Waiting,
    /// Runs again since a short while ago, after a container had ended badly.
    Restarted,
    /// A container ended badly again, and is to be restarted.
    CrashLoop,
    /// A container ended badly.
    Failed,
    /// Ended well.
    Completed,
    /// Ends.
    Stopping,
    /// Not known, or of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}
