//! A machine with the roles of Kubernetes: a demo answers, policies hold, a pod has a kernel of
//! its own, and the machine ends in order while pods run. A snapshot remains, in which the demo
//! lives on until the role goes.

pub(crate) mod conformance;
mod further;
pub(crate) mod greedy;
pub(crate) mod killed;
mod kubectl;
mod limits;
pub(crate) mod mesh;
mod policy;
mod restored;
mod trial;
pub(crate) mod updated;
mod volumes;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use polis_qemu::deadline::SLOWEST;
use polis_qemu::{Config, Error, Machine};
use polis_tests::{Story, story};

use self::kubectl::Kubectl;
use self::trial::Calm;
use crate::console::with_terminal;
use crate::owner::Owner;
use crate::restart::orderly_end;
use crate::world::{POWER_BUTTON, SOON, World, home};

/// Longest that a part of the workload stack may take: an API server that is translated
/// needs minutes.
const PART: Duration = Duration::from_secs(12 * 60);
/// The timeout of `kubectl` itself, in wall time: as much as the clock of deadlines can take for
/// a [`PART`]. By that clock, [`Kubectl::run`] ends it after a [`PART`].
const KUBECTL: &str = "--timeout=5760s";
const _: () = assert!(PART.saturating_mul(SLOWEST).as_secs() == 5760, "KUBECTL has another time");
/// Longest that the end of a pod or of a volume may take, in the time of the machine.
const GONE: Duration = Duration::from_secs(60);
/// How long the machine is observed at rest, before it has anything of Kubernetes.
const REST: Duration = Duration::from_secs(30);
/// Faults of the emulator, in a row, after which a machine is started again.
const RACES: u32 = 2;
/// The disk of a machine with workloads.
const DISK: u64 = 10 << 30;
/// The port of a node at which people reach the API.
const ACCESS: u16 = 6444;
/// As `cargo xtask run --kubernetes` deploys it.
const DEMO: &str = include_str!("../../../xtask/src/kubernetes/demo.yaml");
/// Its namespace, as an option of `kubectl`.
const IN_DEMO: &str = "--namespace=demo";

/// A pod with a volume of its own.
const KEEPER: &str = "\
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
";

/// A pod with a kernel of its own.
const SANDBOXED: &str = "\
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
        .takes(700)
        .at_most(Duration::from_secs(40 * 60))];

fn a_demo_answers_by_its_name_and_its_pods_end_with_the_machine() -> Result<()> {
    let (world, owner, config) = writing("workloads", |_world, config| Ok(config))?;
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
    takes_both_roles(&owner, &mut machine, &founded.node)?;
    calm.held(&owner, &machine, "an API server and the rest of Kubernetes that start")?;

    let kubectl = Kubectl::of(&world, &owner)?;
    visited(&kubectl, &founded.node)?;

    kubectl.apply(policy::CLIENTS)?;
    kubectl.ready(&["pod/friend", "pod/stranger"])?;
    policy::decide(&kubectl)?;
    policy::spare_the_probes(&kubectl)?;
    kubectl.delete(&["pod/friend", "pod/stranger"], GONE)?;

    kubectl.apply(&format!("{KEEPER}---\n{SANDBOXED}"))?;
    kubectl.ready(&["pod/keeper", "pod/sandboxed"])?;
    let at = |pod| format!("/api/v1/namespaces/default/pods/{pod}:8080/proxy/");
    let sandboxed = kubectl.raw(&at("sandboxed"))?;
    ensure!(sandboxed.contains("gvisor"), "the kernel of a gVisor pod: {sandboxed}");
    let keeper = kubectl.raw(&at("keeper"))?;
    ensure!(!keeper.contains("gvisor"), "the kernel of another pod: {keeper}");
    let begun = Instant::now();
    kubectl.delete(&["pod/sandboxed"], GONE)?;
    println!("the gVisor pod was deleted in {:.1} s", begun.elapsed().as_secs_f64());

    kubectl.delete(&["pod/keeper"], GONE)?;
    kubectl.delete(&["pvc/box"], GONE)?;
    let snapshot = restored::saved(&world, &owner)?;

    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.qmp.power_button()?;
    machine.wait_for("drain", SOON, |line| line.is("state", "draining"))?;
    // A person who presses it again does not wait for pods.
    machine.qmp.power_button()?;
    orderly_end(&mut machine, "poweroff")?;
    let open = "the partition stays open";
    let open: Vec<_> =
        machine.lines().into_iter().filter(|line| line.text.contains(open)).collect();
    ensure!(open.is_empty(), "the data partition was still in use at the end: {open:?}");
    machine.wait_end(SOON)?;

    let (mut machine, node) = restored::lives_on(&world, &owner, &snapshot, &founded.node)?;
    owner.run(&["node", "roles", &node, "--remove", "kubernetes-worker", "--yes"])?;
    machine.wait_for("drain", PART, |event| event.is("state", "drained"))?;
    machine.wait_for("workload", PART, |event| {
        event.is("part", "containerd") && event.is("state", "stopped")
    })?;
    machine.wait_for("drain", PART, |event| event.is("state", "none"))?;
    Ok(())
}

/// A machine that writes to etcd all the time, so that a wait of etcd is seen, with room for
/// workloads and with what `attach` adds to it.
fn writing(
    name: &str,
    attach: impl FnOnce(&World, Config) -> Result<Config>,
) -> Result<(World, Owner, Config)> {
    let world = World::of_full(name)?;
    let owner = Owner::with_ports(&world.path("owner"), &[ACCESS])?;
    let small = with_terminal(&world, "polis.exercise=append")?;
    let config = attach(&world, large(&world, &owner, small)?)?;
    Ok((world, owner, config))
}

/// `small` with room for workloads, and with the owner's ways to it.
fn large(world: &World, owner: &Owner, small: Config) -> Result<Config> {
    Ok(Config {
        disk: Some(world.disk_of_size(DISK, None)?),
        forwards: owner.forwards.clone(),
        memory: 3072,
        cpus: 2,
        ..small
    })
}

/// Boots until no fault of the emulator ends the machine: for its disk, each is a power cut more.
fn boot_despite_races(boot: impl Fn() -> Result<Machine>) -> Result<Machine> {
    for _ in 0..RACES {
        match boot() {
            Err(error) if error.downcast_ref::<Error>().is_some_and(Error::is_race) => {
                println!("{error:#}");
            }
            end => return end,
        }
    }
    boot()
}

/// Gives the machine both roles of Kubernetes, and waits until they serve.
fn takes_both_roles(owner: &Owner, machine: &mut Machine, node: &str) -> Result<()> {
    let roles = ["--add", "kubernetes-controller", "--add", "kubernetes-worker", "--yes"];
    owner.run(&[&["node", "roles", node][..], &roles[..]].concat())?;
    serves(machine)
}

/// Deploys the demo, and waits until a pod has asked it by its name; it must say this node.
fn visited(kubectl: &Kubectl, node: &str) -> Result<()> {
    kubectl.apply(DEMO)?;
    kubectl.run(&["wait", "--for=condition=Complete", "job/visitor", IN_DEMO, KUBECTL], "")?;
    let answer = kubectl.run(&["logs", "job/visitor", IN_DEMO], "")?;
    ensure!(answer.contains(node), "the demo did not say its node: {answer}");
    Ok(())
}

/// Waits until everything that the roles ask for serves.
fn serves(machine: &mut Machine) -> Result<()> {
    let ready = |event: &polis_qemu::Event| event.is("part", "all") && event.is("state", "ready");
    machine.wait_for("workload", PART, ready).map(drop)?;
    Ok(())
}
