//! The programs under a pod are killed, one by one: the pod goes on, and each comes back.
//!
//! The fault `kill-by-pods` kills what a pod names (`docs/testing.md`). The death of `node` is
//! another matter: it opens the trapdoor, so the machine reboots, and the pods begin anew.
//!
//! At the end the machine is off for so long that every certificate of Kubernetes has ended.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_base::sys::clock;
use polis_qemu::{Config, Event, Machine};
use polis_tests::{Story, story};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::kubectl::Kubectl;
use super::{ACCESS, GONE, KUBECTL, PART, boot_despite_races, large, serves, takes_both_roles};
use crate::fleet::{ask_until, catch_up};
use crate::owner::Owner;
use crate::world::{SOON, World, home};

/// The programs, as their processes are called; the part of the workload stack that says what
/// was lost, or the service of the node.
const PROGRAMS: [(&str, Says); 4] = [
    ("containerd", Says::Part("containerd")),
    ("kubelet", Says::Part("kubelet")),
    ("kube-apiserver", Says::Part("apiserver")),
    ("etcd", Says::Service("root.consensus")),
];

/// The reporter of a death on the serial line.
#[derive(Clone, Copy)]
enum Says {
    Part(&'static str),
    Service(&'static str),
}

/// The pod that is to go on. The API server reaches it, so it answers a person.
const WITNESS: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: witness}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
";

/// How long the machine is off at the end: a day longer than a certificate of Kubernetes is
/// valid. That of the owner is valid for a month.
const OFF: Duration = Duration::from_secs(4 * 24 * 60 * 60);

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_pod_goes_on_while_what_runs_it_is_killed).cluster().takes(600)];

fn a_pod_goes_on_while_what_runs_it_is_killed() -> Result<()> {
    let world = World::of_full("killed")?;
    let owner = Owner::with_ports(&world.path("owner"), &[ACCESS])?;
    let small = world.bootstrap_config("polis.fault=kill-by-pods polis.guru-countdown=1")?;
    let config = large(&world, &owner, small)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    takes_both_roles(&owner, &mut machine, &founded.node)?;
    let kubectl = Kubectl::of(&world, &owner)?;
    kubectl.apply(WITNESS)?;
    kubectl.ready(&["pod/witness"])?;
    let before = life(&kubectl)?;
    agent(&kubectl, "write", "/box/kept, 1Mi")?;

    for (program, says) in PROGRAMS {
        catch_up(&mut machine);
        kubectl.apply(&order(program))?;
        let killed = format!("{program} is not killed");
        machine.wait_for_text("killing it, requested by polis.fault", PART).context(killed)?;
        let began = Instant::now();
        let said = death(&mut machine, says).with_context(|| format!("the end of {program}"))?;
        back(&mut machine, says)?;
        whole(&kubectl)?;
        eprintln!("          {program}: whole after {:.1?}; {said}", began.elapsed());
        let after = life(&kubectl)?;
        ensure!(before == after, "{program}: the pod was {before:?}, and is {after:?}");
        kubectl.delete(&[&format!("pod/kill-{program}")], GONE)?;
    }

    // The program that runs everything else: the machine says so, and begins anew.
    kubectl.apply(&order("node"))?;
    let guru = machine.wait_for("guru", PART, |_| true)?;
    ensure!(guru.text("cause").contains("signal"), "another cause: {guru}");
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    home(&mut machine)?;
    serves(&mut machine)?;
    whole(&kubectl)?;
    kubectl.ready(&["pod/witness"])?;
    let after = life(&kubectl)?;
    ensure!(after.restarts == before.restarts + 1, "after a reboot: {after:?}");

    machine.kill();
    let config = Config { clock: Some(clock::now() + OFF), ..config };
    let _machine = boot_despite_races(|| {
        let mut machine = world.boot(&config)?;
        let back = home(&mut machine)?;
        ensure!(back == founded, "after four days: {back:?}, before: {founded:?}");
        serves(&mut machine)?;
        Ok(machine)
    })?;
    whole(&kubectl)?;
    kubectl.ready(&["pod/witness"])?;
    let last = life(&kubectl)?;
    ensure!(last.restarts == after.restarts + 1, "after four days: {last:?}");
    let begun = OffsetDateTime::from(clock::now() + OFF / 2).format(&Rfc3339)?;
    ensure!(last.since > begun, "its clock is that of the host: {last:?}, not after {begun}");
    eprintln!("          whole after all certificates of Kubernetes had ended: {last:?}");
    // Over a reboot and a power cut.
    agent(&kubectl, "read", "/box/kept")
}

/// Runs a pod that has directories of the machine below `/var/lib`, as agents have them, until
/// it has done its one act. At first there are no such directories: kubelet makes one of them,
/// and containerd the other.
fn agent(kubectl: &Kubectl, act: &str, on: &str) -> Result<()> {
    kubectl.apply(&format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: agent-{act}, namespace: kube-system}}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      args: [{act}, {on}]
      securityContext: {{runAsUser: 0}}
      volumeMounts: [{{name: box, mountPath: /box}}, {{name: other, mountPath: /other}}]
  volumes:
    - {{name: box, hostPath: {{path: /var/lib/example, type: DirectoryOrCreate}}}}
    - {{name: other, hostPath: {{path: /var/lib/other/below}}}}
"
    ))?;
    let pod = format!("pod/agent-{act}");
    let done = "--for=jsonpath={.status.phase}=Succeeded";
    kubectl.run(&["wait", done, &pod, "--namespace=kube-system", KUBECTL], "").map(drop)
}

/// A pod that has the node kill a program, and does nothing else.
fn order(program: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: kill-{program}}}\nspec:\n  restartPolicy: \
         Never\n  automountServiceAccountToken: false\n  containers:\n    - name: pause\n      \
         image: polis.internal/pause:1\n      imagePullPolicy: IfNotPresent\n"
    )
}

/// Waits until the end of a program is reported, with its signal; returns the line.
fn death(machine: &mut Machine, says: Says) -> Result<Event> {
    let by_signal = |event: &Event| event.text("cause").contains("signal 9");
    Ok(match says {
        Says::Part(part) => machine.wait_for("workload", SOON, |event| {
            event.is("part", part) && event.is("state", "failed") && by_signal(event)
        })?,
        Says::Service(name) => {
            machine.wait_for("service", SOON, |event| event.is("name", name) && by_signal(event))?
        }
    })
}

/// Waits until it is reported as working again.
fn back(machine: &mut Machine, says: Says) -> Result<()> {
    let event = match says {
        Says::Part(part) => machine.wait_for("workload", PART, |event| {
            event.is("part", part) && event.is("state", "ready")
        })?,
        Says::Service(name) => machine.wait_for("service", PART, |event| {
            event.is("name", name) && event.is("state", "healthy")
        })?,
    };
    drop(event);
    Ok(())
}

/// Waits until the API answers, its node is Ready, and the pod answers a person.
fn whole(kubectl: &Kubectl) -> Result<()> {
    kubectl.serves()?;
    let path = "/api/v1/namespaces/default/pods/witness:8080/proxy/";
    ask_until("an answer of the pod", || Ok(kubectl.raw(path).ok()))?;
    Ok(())
}

/// Since when the container of the pod runs, and how often it was started again.
#[derive(Debug, PartialEq, Eq)]
struct Life {
    since: String,
    restarts: u64,
}

fn life(kubectl: &Kubectl) -> Result<Life> {
    let text = kubectl.run(&["get", "--output", "json", "pod/witness"], "")?;
    let pod: Value = serde_json::from_str(&text)?;
    let status = &pod["status"]["containerStatuses"][0];
    let since = status["state"]["running"]["startedAt"].as_str();
    Ok(Life {
        since: since.with_context(|| format!("it does not run: {status}"))?.to_owned(),
        restarts: status["restartCount"].as_u64().context("no number of restarts")?,
    })
}
