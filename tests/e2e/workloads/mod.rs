//! A machine with the roles of Kubernetes: a demo answers, policies hold, volumes hold their
//! size and survive power cuts, pods that take all they can get hurt nothing, the roles go, the
//! machine ends.

pub(crate) mod killed;
mod kubectl;
mod limits;
pub(crate) mod mesh;
mod policy;
mod trial;
mod volumes;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use polis_qemu::{Config, Machine};
use polis_tests::{Story, skip, story};

use self::kubectl::Kubectl;
use self::trial::Calm;
use crate::owner::Owner;
use crate::restart::orderly_end;
use crate::world::{FULL, POWER_BUTTON, SOON, World, home};

/// Longest that a part of the workload stack may take: an API server that is translated
/// needs minutes.
const PART: Duration = Duration::from_secs(12 * 60);
/// The same for `kubectl`.
const KUBECTL: &str = "--timeout=720s";
/// How long the machine is observed at rest, before it has anything of Kubernetes.
const REST: Duration = Duration::from_secs(30);
/// The port of a node at which people reach the API.
const ACCESS: u16 = 6444;
/// As `cargo xtask run --kubernetes` deploys it.
const DEMO: &str = include_str!("../../../xtask/src/kubernetes/demo.yaml");

/// A pod with a volume of its own, and one with a kernel of its own.
const MORE: &str = "\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: box}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: keeper}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      volumeMounts: [{name: box, mountPath: /box}]
  volumes: [{name: box, persistentVolumeClaim: {claimName: box}}]
---
apiVersion: v1
kind: Pod
metadata: {name: sandboxed}
spec:
  runtimeClassName: gvisor
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
";

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_demo_answers_by_its_name_and_its_pods_end_with_the_machine)
        .cluster()
        .takes(1000)
        .at_most(Duration::from_secs(40 * 60))];

fn a_demo_answers_by_its_name_and_its_pods_end_with_the_machine() -> Result<()> {
    if std::env::var_os(FULL).is_none() {
        return skip("no image with Kubernetes was built: see docs/testing.md");
    }
    let world = World::of_full("workloads")?;
    let owner = Owner::with_ports(&world.path("owner"), &[ACCESS])?;
    // It writes to etcd all the time, so that a wait of etcd is seen.
    let small = world.bootstrap_config("polis.exercise=append")?;
    let config = Config {
        // In place of the small disk, which has too little room for workloads.
        disk: Some(world.disk_of_size(10 << 30, None)?),
        forwards: owner.forwards.clone(),
        memory: 3072,
        cpus: 2,
        ..small
    };
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    let calm = Calm::begins(&owner, &machine)?;
    let begun = Instant::now();
    while let Some(left) = REST.checked_sub(begun.elapsed()) {
        machine.next_line(left);
    }
    calm.held(&owner, &machine, "a machine at rest")?;
    let calm = Calm::begins(&owner, &machine)?;
    let roles = ["--add", "kubernetes-controller", "--add", "kubernetes-worker", "--yes"];
    owner.run(&[&["node", "roles", &founded.node][..], &roles[..]].concat())?;
    serves(&mut machine)?;
    calm.held(&owner, &machine, "an API server and the rest of Kubernetes that start")?;

    let kubeconfig = world.path("kubeconfig");
    owner.run(&["kubernetes", "kubeconfig", "-o", &kubeconfig.display().to_string()])?;
    let kubectl = Kubectl::new(kubeconfig);
    kubectl.run(&["apply", "--filename", "-"], DEMO)?;
    kubectl.run(&["wait", "--for=condition=Complete", "job/visitor", KUBECTL], "")?;
    let answer = kubectl.run(&["logs", "job/visitor"], "")?;
    ensure!(answer.contains(&founded.node), "the demo did not say its node: {answer}");

    kubectl.run(&["apply", "--filename", "-"], policy::CLIENTS)?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/friend", "pod/stranger", KUBECTL], "")?;
    policy::decide(&kubectl)?;
    policy::spare_the_node(&kubectl, "stranger")?;
    kubectl.run(&["delete", "pod", "friend", "stranger", "--timeout=120s"], "")?;

    kubectl.run(&["apply", "--filename", "-"], MORE)?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/keeper", "pod/sandboxed", KUBECTL], "")?;
    let at = |pod| format!("/api/v1/namespaces/default/pods/{pod}:8080/proxy/");
    let sandboxed = kubectl.run(&["get", "--raw", &at("sandboxed")], "")?;
    ensure!(sandboxed.contains("gvisor"), "the kernel of a gVisor pod: {sandboxed}");
    let keeper = kubectl.run(&["get", "--raw", &at("keeper")], "")?;
    ensure!(!keeper.contains("gvisor"), "the kernel of another pod: {keeper}");
    kubectl.run(&["delete", "pod", "sandboxed", "--timeout=60s"], "")?;

    volumes::hold_their_size(&kubectl, &owner, &machine)?;
    limits::memory_and_processes(&kubectl, &owner, &machine)?;
    limits::the_disk(&kubectl, &owner, &machine, "keeper")?;

    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.qmp.power_button()?;
    orderly_end(&mut machine, "poweroff")?;
    let open = "the partition stays open";
    let open: Vec<_> =
        machine.lines().into_iter().filter(|line| line.text.contains(open)).collect();
    ensure!(open.is_empty(), "the data partition was still in use at the end: {open:?}");
    machine.wait_end(SOON)?;

    // The pods are there again without a person.
    let mut machine = world.boot(&config)?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after a power-off: {back:?}, before: {founded:?}");
    serves(&mut machine)?;
    kubectl.run(&["wait", "--for=condition=Available", "deployment/demo", KUBECTL], "")?;
    let mut machine = volumes::survive_power_cuts(&kubectl, machine, || {
        let mut machine = world.boot(&config)?;
        home(&mut machine)?;
        serves(&mut machine)?;
        Ok(machine)
    })?;
    kubectl.run(&["delete", "pod", "keeper", "--timeout=120s"], "")?;
    kubectl.run(&["delete", "pvc", "box", "--timeout=120s"], "")?;
    volumes::leave_nothing(&kubectl, &mut machine)?;
    owner.run(&["node", "roles", &founded.node, "--remove", "kubernetes-worker", "--yes"])?;
    let stopped = |part: &'static str, state: &'static str| {
        move |event: &polis_qemu::Event| event.is("part", part) && event.is("state", state)
    };
    machine.wait_for("workload", PART, stopped("drain", "drained"))?;
    machine.wait_for("workload", PART, stopped("containerd", "stopped"))?;
    machine.wait_for("workload", PART, stopped("drain", "none"))?;
    Ok(())
}

/// Waits until everything that the roles ask for serves.
fn serves(machine: &mut Machine) -> Result<()> {
    let ready = |event: &polis_qemu::Event| event.is("part", "all") && event.is("state", "ready");
    machine.wait_for("workload", PART, ready).map(drop)?;
    Ok(())
}
