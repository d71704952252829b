//! Pods that take all they can get: memory, processes, files, disk. Each is refused, killed or
//! evicted with a reason that a person sees, and the node goes on as if nothing were.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use polis_qemu::Machine;
use polis_qemu::deadline::Deadline;
use polis_tests::{draws_all, pick, seed};

use super::kubectl::Kubectl;
use super::trial::{Calm, Trial};
use super::{KUBECTL, PART};
use crate::console::Terminal;
use crate::owner::Owner;

/// Longest that the console may take for two pages while pods do their worst.
const PAGES: Duration = Duration::from_secs(30);
/// Between two such requests: a console that draws without a pause takes the processor from the
/// API server, which the pods wait for.
const LOOK: Duration = Duration::from_secs(5);

/// Processes that a pod may have (`docs/worker.md`).
const PROCESSES_MAX: u64 = 4096;

/// Pods that do one thing and end: `hungry` has no limit, so the node has to stop it.
const BRIEF: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: limited, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  restartPolicy: Never
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      args: [memory, 1Gi]
      resources: {limits: {memory: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: hungry, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  restartPolicy: Never
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      args: [memory, 64Gi]
---
apiVersion: v1
kind: Pod
metadata: {name: forking, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  restartPolicy: Never
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      args: [threads, '100000']
";

/// Pods that keep what they have taken: `bounded` has a limit of its own, `greedy` takes all
/// bytes, `swarming` all files. `ballast` has a volume, which takes its room from all others, so
/// the files are fewer.
const GREEDY: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: bounded, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes: [{name: scratch, emptyDir: {sizeLimit: 8Mi}}]
---
apiVersion: v1
kind: Pod
metadata: {name: greedy, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes: [{name: scratch, emptyDir: {}}]
---
apiVersion: v1
kind: Pod
metadata: {name: swarming, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes: [{name: scratch, emptyDir: {}}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: ballast, labels: {limits: ours}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 3840Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: ballast, labels: {limits: ours}}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      volumeMounts: [{name: box, mountPath: /box}]
  volumes: [{name: box, persistentVolumeClaim: {claimName: ballast}}]
";

/// Memory and processes.
pub(super) fn memory_and_processes(
    kubectl: &Kubectl,
    owner: &Owner,
    machine: &Machine,
    console: &mut Terminal,
) -> Result<()> {
    let calm = Calm::begins(owner, machine)?;
    kubectl.apply(BRIEF)?;
    waits(kubectl, console, "--for=jsonpath={.status.phase}=Succeeded", "forking")?;
    let forked = kubectl.run(&["logs", "forking"], "")?;
    println!("forking: {}", forked.trim());
    let forked = Trial::read(&forked)?;
    let again = forked.refused.as_deref().is_some_and(|why| why.contains("os error 11"));
    ensure!(again && forked.done < PROCESSES_MAX, "a pod has too many processes: {forked:?}");
    for (pod, allowed) in [("limited", &["OOMKilled"][..]), ("hungry", &["OOMKilled", "Evicted"])] {
        waits(kubectl, console, "--for=jsonpath={.status.phase}=Failed", pod)?;
        let reason = reason(kubectl, pod)?;
        println!("{pod}: {reason}");
        ensure!(allowed.iter().any(|one| reason.contains(one)), "{pod} ended by {reason}");
        is_shown(owner, pod, allowed)?;
    }
    calm.held(owner, machine, "pods that take all memory and all processes")
}

/// The disk, last: kubelet lets no pod on a node whose disk was full for five minutes.
/// `beside` is a pod with a volume of its own, which has room for 1 MiB. Of the two ways to fill
/// what pods may have, the seed draws one.
pub(super) fn the_disk(
    kubectl: &Kubectl,
    owner: &Owner,
    machine: &Machine,
    console: &mut Terminal,
    beside: &str,
) -> Result<()> {
    let calm = Calm::begins(owner, machine)?;
    kubectl.apply(GREEDY)?;
    let pods = ["bounded", "greedy", "swarming", "ballast"].map(|pod| format!("pod/{pod}"));
    let pods = pods.each_ref().map(String::as_str);
    kubectl.ready(&pods)?;
    // kubelet may evict it before its last byte, which ends the command.
    match Trial::run(kubectl, "bounded", &["write", "/scratch/file", "32Mi"]) {
        Ok(written) => written.is_whole()?,
        Err(error) => println!("bounded: {error:#}"),
    }
    is_evicted(kubectl, owner, console, "bounded", OF_THE_POD, "exceeds the limit")?;

    let ways = [full_of_bytes, full_of_files];
    let drawn = if draws_all() { vec![0, 1] } else { pick(seed()?, "full", ways.len(), 1) };
    for way in drawn {
        ways[way](kubectl, owner, console, beside)?;
    }
    let phase = "jsonpath={.status.phase}";
    let phase = kubectl.run(&["get", "pod", beside, "--output", phase], "")?;
    ensure!(phase == "Running", "{beside} is {phase}, and had nothing to do with it");
    calm.held(owner, machine, "pods that fill the disk")?;
    for kind in ["pod", "pvc"] {
        kubectl.run(&["delete", kind, "--selector=limits=ours", KUBECTL], "")?;
    }
    Ok(())
}

/// A pod takes all bytes that pods may have.
fn full_of_bytes(
    kubectl: &Kubectl,
    owner: &Owner,
    console: &mut Terminal,
    beside: &str,
) -> Result<()> {
    Trial::run(kubectl, "greedy", &["allocate", "/scratch/file", "1024Gi"])?.is_full()?;
    // The volumes of others, and etcd, have room of their own.
    Trial::run(kubectl, beside, &["write", "/box/while-full", "1Mi"])?.is_whole()?;
    kubectl.run(&["create", "configmap", "full", "--from-literal=disk=full"], "")?;
    let why = "low on resource: ephemeral-storage";
    is_evicted(kubectl, owner, console, "greedy", OF_THE_NODE, why)
}

/// A pod takes all files that pods may have.
fn full_of_files(
    kubectl: &Kubectl,
    owner: &Owner,
    console: &mut Terminal,
    _beside: &str,
) -> Result<()> {
    // It ends before its last file, or with an error: kubelet ends the pod.
    let files = ["exec", "swarming", "--", "/demo", "files", "/scratch/many", "1000000000"];
    let _files = kubectl.start(&files)?;
    is_evicted(kubectl, owner, console, "swarming", OF_THE_NODE, "low on resource: inodes")
}

/// Waits until a pod is so, and asks the console for its pages meanwhile.
fn waits(kubectl: &Kubectl, console: &mut Terminal, so: &str, pod: &str) -> Result<()> {
    let pod = format!("pod/{pod}");
    let wait = ["wait", so, pod.as_str(), KUBECTL];
    let waiting = kubectl.start(&wait)?;
    let (mut longest, mut late) = (Duration::ZERO, Deadline::within(PART));
    loop {
        longest = longest.max(console.answers()?);
        if waiting.is_over(LOOK) {
            break;
        }
        ensure!(!late.is_over(), "{pod}: not {so} within {PART:?}");
    }
    println!("{pod}: two pages of the console within {:.1} s", longest.as_secs_f64());
    ensure!(longest < PAGES, "{pod}: two pages of the console took {longest:?}");
    // With its status and its words, which are ready by now.
    kubectl.run(&wait, "").map(drop)
}

/// Where kubelet writes why it evicts a pod: what `kubectl wait` waits for, and the words.
type Written = (&'static str, &'static str);

/// For a limit of the pod's own.
const OF_THE_POD: Written =
    ("--for=jsonpath={.status.reason}=Evicted", "jsonpath={.status.message}");

/// For a node that is short of something. The reason of the pod itself may be that its container
/// ended in order.
const OF_THE_NODE: Written = (
    "--for=condition=DisruptionTarget",
    "jsonpath={.status.conditions[?(@.type=='DisruptionTarget')].message}",
);

fn is_evicted(
    kubectl: &Kubectl,
    owner: &Owner,
    console: &mut Terminal,
    pod: &str,
    (written, words): Written,
    why: &str,
) -> Result<()> {
    let begun = Instant::now();
    waits(kubectl, console, written, pod)?;
    let message = kubectl.run(&["get", "pod", pod, "--output", words], "")?;
    println!("{pod}: Evicted after {:.0} s: {message}", begun.elapsed().as_secs_f64());
    ensure!(message.contains(why), "{pod} was evicted: {message}");
    is_shown(owner, pod, &["Evicted"])
}

/// Why a pod ended: its own reason, and that of its container.
fn reason(kubectl: &Kubectl, pod: &str) -> Result<String> {
    let both = "jsonpath={.status.reason} {.status.containerStatuses[0].state.terminated.reason}";
    Ok(kubectl.run(&["get", "pod", pod, "--output", both], "")?.trim().to_owned())
}

/// Fails unless `polisctl` shows the pod with one of these reasons.
fn is_shown(owner: &Owner, pod: &str, reasons: &[&str]) -> Result<()> {
    let status = owner.document(&["kubernetes", "status"])?;
    let pods = status["pods"]["unwell"].as_array();
    let shown = pods.into_iter().flatten().find(|one| one["name"] == pod);
    let shown = shown.map(ToString::to_string).unwrap_or_default();
    ensure!(reasons.iter().any(|one| shown.contains(one)), "{pod} is shown as {shown:?}");
    Ok(())
}
