//! Pods on a machine of the image with Kubernetes.
//!
//! That image takes half an hour to build the first time, so the suite does not build it: a
//! story is skipped where it is not there. Under emulation an API server takes minutes to
//! start, so one boot shows many promises.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::{Config, Machine};
use polis_tests::{Story, skip, story, workspace};

use crate::owner::Owner;
use crate::restart::{POWER_BUTTON, orderly_end};
use crate::world::{FULL, SOON, World, home};

/// Longest that the parts of a role may take to serve, or a pod to answer.
const PATIENCE: Duration = Duration::from_secs(14 * 60);
/// The same for a program that waits by itself.
const PATIENCE_ARG: &str = "--timeout=840s";
/// Memory of a controller that is a worker, in MiB.
const MEMORY: u32 = 3072;
/// A disk with room for the quota of workloads.
const DISK: u64 = 4 << 30;
/// The Kubernetes API for people.
const ACCESS: u16 = 6444;
/// Where the image builder puts the operator's program of Kubernetes.
const KUBECTL: &str = "target/go/bin/kubectl";
/// The demo of `cargo xtask run --kubernetes`.
const DEMO: &str = include_str!("../../xtask/src/kubernetes/demo.yaml");

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_pod_answers_by_the_name_of_its_service_and_outlives_its_keepers).takes(600)];

fn a_pod_answers_by_the_name_of_its_service_and_outlives_its_keepers() -> Result<()> {
    if std::env::var_os(FULL).is_none() {
        return skip("no image with Kubernetes was built: `cargo xtask run --kubernetes` does");
    }
    let world = World::of_full("workloads")?;
    let owner = Owner::with_ports(&world.path("owner"), &[ACCESS])?;
    let config = Config {
        disk: Some(world.disk_of_size(DISK, None)?),
        forwards: owner.forwards.clone(),
        memory: MEMORY,
        cpus: 2,
        ..world.bootstrap_config("")?
    };
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    let node = founded.node.as_str();

    let both = ["--add", "kubernetes-controller", "--add", "kubernetes-worker"];
    owner.run(&[&["node", "roles", node, "--yes"], &both[..]].concat())?;
    everything_serves(&mut machine)?;
    let kubectl = Kubectl::new(&world, &owner)?;

    // Row: a pod asks the demo by the name of its Service.
    kubectl.apply(DEMO)?;
    kubectl.run(&["wait", "--for=condition=Complete", "job/visitor", PATIENCE_ARG])?;
    let answer = kubectl.run(&["logs", "job/visitor"])?;
    ensure!(answer.contains(&format!("node   {node}")), "the demo answered {answer:?}");
    let before = kubectl.demo_pods()?;
    ensure!(before.len() == 2, "two servers, not {before:?}");

    // Row: the API server lost its elections of etcd to nobody.
    let elected = machine.seen(|event| event.word == "etcd");
    ensure!(
        elected.last().is_some_and(|last| last.is("term", elected[0].text("term")))
            || elected.len() <= 2,
        "etcd held an election while the API server started: {elected:?}"
    );

    // Row: taken away, the roles leave nothing behind that runs, and the machine ends in
    // good order.
    let both = ["--remove", "kubernetes-worker", "--remove", "kubernetes-controller"];
    owner.run(&[&["node", "roles", node, "--yes"], &both[..]].concat())?;
    machine.wait_for("workload", PATIENCE, |event| {
        event.is("part", "all") && event.is("state", "stopped")
    })?;
    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.qmp.power_button()?;
    orderly_end(&mut machine, "poweroff")
}

/// Waits until every part that the roles of the node ask for serves.
fn everything_serves(machine: &mut Machine) -> Result<()> {
    machine
        .wait_for("workload", PATIENCE, |event| {
            event.is("part", "all") && event.is("state", "ready")
        })
        .map(drop)
        .context("the parts of Kubernetes do not all serve")
}

/// `kubectl` with the kubeconfig of the owner.
struct Kubectl {
    config: PathBuf,
}

impl Kubectl {
    fn new(world: &World, owner: &Owner) -> Result<Self> {
        let config = world.path("kubeconfig");
        let file = config.display().to_string();
        owner.run(&["kubernetes", "kubeconfig", "-o", &file])?;
        Ok(Self { config })
    }

    fn apply(&self, manifest: &str) -> Result<()> {
        let file = self.config.with_extension("yaml");
        std::fs::write(&file, manifest)?;
        self.run(&["apply", "--filename", &file.display().to_string()]).map(drop)
    }

    /// The names of the servers that run, with their restarts.
    fn demo_pods(&self) -> Result<Vec<String>> {
        let columns = "custom-columns=N:.metadata.name,R:.status.containerStatuses[0].restartCount";
        let selected = ["get", "pods", "--selector", "app=demo", "--no-headers", "--output"];
        let printed = self.run(&[&selected[..], &[columns]].concat())?;
        Ok(printed.lines().map(str::to_owned).collect())
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the rule is for the node; this runs on the host"
    )]
    fn run(&self, args: &[&str]) -> Result<String> {
        let output = Command::new(workspace().join(KUBECTL))
            .arg("--kubeconfig")
            .arg(&self.config)
            .args(args)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {KUBECTL}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("kubectl {} ended with {}: {}", args.join(" "), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
