//! The end of all pods of this node, by their control group: asked first, then killed.
//!
//! kubelet makes the group `kubepods` with one group below it for each pod. It has ended
//! before, so nothing starts a pod meanwhile. While containerd runs, its shims clean up behind
//! each container; those that are left once it has ended are killed by [`end_shims`].
//!
//! What this module does not do: move pods to other nodes, which a drain does.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use polis_runtime::supervisor::blocking;
use polis_runtime::sys::cgroup::Group;

/// The parent of all groups of pods.
const PODS: &str = "kubepods";
/// Between two looks at whether a process is left.
const LOOK: Duration = Duration::from_millis(100);
/// A killed process ends within this, unless the kernel waits for a disk.
const KILLED: Duration = Duration::from_secs(1);

/// Ends every process of every pod: SIGTERM, and after `grace` the group is killed. `root` is
/// `/sys/fs/cgroup`. Without pods it returns at once.
pub async fn end(root: &Path, grace: Duration) {
    let group = root.join(PODS);
    if !is_populated(&group).await {
        debug!("no pods to end");
        return;
    }
    let asked = group.clone();
    let processes = blocking(move || ask(&asked)).await;
    if !is_empty_within(&group, grace).await {
        info!(grace_s = grace.as_secs(), "kills the pods that have not ended by themselves");
        if !kill(&group).await {
            warn!("a process of a pod does not end");
            return;
        }
    }
    info!(processes, "the pods of this node have ended");
}

/// Kills the shims that containerd has left: their pods have ended, and a containerd that was
/// down has not asked them to end.
pub async fn end_shims(root: &Path) {
    let group = root.join(Group::Shim.name());
    if is_populated(&group).await && !kill(&group).await {
        warn!("a shim of a container does not end");
    }
}

/// Kills every process of a group; returns whether all have ended.
async fn kill(group: &Path) -> bool {
    let file = group.join("cgroup.kill");
    if let Err(error) = blocking(move || fs::write(file, "1")).await {
        let error = &error as &dyn std::error::Error;
        warn!(error, group = %group.display(), "cannot kill a control group");
    }
    is_empty_within(group, KILLED).await
}

async fn is_empty_within(group: &Path, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while is_populated(group).await {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(LOOK).await;
    }
    true
}

/// Whether a process is in the group or below it. A group that does not exist has none.
async fn is_populated(group: &Path) -> bool {
    let events = group.join("cgroup.events");
    let text = blocking(move || fs::read_to_string(events)).await;
    text.is_ok_and(|text| text.lines().any(|line| line == "populated 1"))
}

/// Sends SIGTERM to every process of the group and of those below it; returns how many.
fn ask(group: &Path) -> usize {
    let mut asked = 0;
    for pid in processes(group) {
        // One that has ended meanwhile needs no signal.
        asked += usize::from(kill_process(pid, Signal::TERM).is_ok());
    }
    asked
}

/// The processes of a group and of all below it.
fn processes(group: &Path) -> Vec<Pid> {
    let mut found = Vec::new();
    let mut groups = vec![group.to_owned()];
    while let Some(group) = groups.pop() {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)));
        // A group that goes away meanwhile has no process left.
        groups.extend(children(&group).unwrap_or_default());
    }
    found
}

fn children(group: &Path) -> io::Result<Vec<PathBuf>> {
    let mut children = Vec::new();
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            children.push(entry.path());
        }
    }
    Ok(children)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(3);

    #[tokio::test]
    async fn a_node_without_pods_has_nothing_to_end() {
        let root = tempfile::tempdir().unwrap();
        end(root.path(), GRACE).await;
        let group = root.path().join(PODS);
        fs::create_dir(&group).unwrap();
        fs::write(group.join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
        end(root.path(), GRACE).await;
        assert!(!group.join("cgroup.kill").exists());
    }

    #[test]
    fn the_processes_of_all_pods_are_found() {
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join("burstable/pod1/container");
        fs::create_dir_all(&pod).unwrap();
        fs::write(root.path().join("cgroup.procs"), "").unwrap();
        fs::write(pod.join("cgroup.procs"), "17\n4\nx\n0\n").unwrap();
        let mut found: Vec<_> =
            processes(root.path()).iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        found.sort_unstable();
        assert_eq!(found, [4, 17]);
        assert!(processes(&root.path().join("gone")).is_empty());
    }

    /// As the kernel does on a machine where one process ignores SIGTERM: the group stays
    /// populated until it is killed.
    #[tokio::test(start_paused = true)]
    async fn pods_that_ignore_the_request_are_killed_after_their_grace() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join(PODS);
        fs::create_dir(&group).unwrap();
        fs::write(group.join("cgroup.events"), "populated 1\n").unwrap();
        let began = Instant::now();
        end(root.path(), GRACE).await;
        assert!(began.elapsed() >= GRACE + KILLED, "{:?}", began.elapsed());
        assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
    }
}
