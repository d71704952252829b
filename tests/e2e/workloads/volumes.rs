//! Volumes on a machine: full at their size, larger while they are used, and with what was
//! written to them after power cuts between any two steps of others.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Machine;
use polis_tests::{cuts, seed, share};

use super::kubectl::Kubectl;
use super::trial::{Calm, Trial, demo, demo_again};
use super::{KUBECTL, PART};
use crate::fleet::ask_until;
use crate::owner::Owner;

const MIB: u64 = 1 << 20;
/// The part of a volume's quota that the file system itself takes.
const OWN: u64 = 4 * MIB;

/// Cuts in an ordinary run, and in a run of everything.
const CUTS: (u32, u32) = (1, 10);
/// Of each cut, the time in which a claim becomes a pod with a volume, and another one goes:
/// on a translated machine.
const CHANGE: Duration = Duration::from_secs(40);

/// The line of the driver when the last directory is gone.
const SWEPT: &str = "removed all that was left of volumes volumes=0 ";

/// A claim of 64 MiB, and a pod that has it.
fn pod_with_volume(name: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}, labels: {{volumes: ours}}}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 64Mi}}}}
---
{}",
        pod(name)
    )
}

/// A pod that has the claim of its name at `/box`.
pub(super) fn pod(name: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{volumes: ours}}}}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
      volumeMounts: [{{name: box, mountPath: /box}}]
  volumes: [{{name: box, persistentVolumeClaim: {{claimName: {name}}}}}]
"
    )
}

/// The pods `full` and `beside` with a volume each, of which one is filled and then grows.
pub(super) fn hold_their_size(kubectl: &Kubectl, owner: &Owner, machine: &Machine) -> Result<()> {
    let both = format!("{}---\n{}", pod_with_volume("full"), pod_with_volume("beside"));
    kubectl.apply(&both)?;
    kubectl.ready(&["pod/full", "pod/beside"])?;
    let calm = Calm::begins(owner, machine)?;

    let kept = Trial::run(kubectl, "full", &["write", "/box/kept", "16Mi"])?;
    kept.is_whole()?;
    let rest = Trial::run(kubectl, "full", &["write", "/box/rest", "1Gi"])?;
    rest.is_full()?;
    let all = kept.done + rest.done;
    ensure!((64 * MIB - OWN..=64 * MIB).contains(&all), "64 MiB hold {all} bytes");

    // It stays full meanwhile.
    Trial::run(kubectl, "beside", &["write", "/box/kept", "32Mi"])?.is_whole()?;
    kubectl.run(&["create", "configmap", "written", "--from-literal=while=full"], "")?;
    let files = Trial::run(kubectl, "beside", &["files", "/box/many", "1000000"])?;
    files.is_full()?;
    // One for each 16 KiB.
    ensure!((4000..=4096).contains(&files.done), "64 MiB hold {} files", files.done);
    calm.held(owner, machine, "a full volume")?;

    let more = r#"{"spec": {"resources": {"requests": {"storage": "128Mi"}}}}"#;
    kubectl.run(&["patch", "pvc", "full", "--patch", more], "")?;
    let larger = "--for=jsonpath={.status.capacity.storage}=128Mi";
    kubectl.run(&["wait", larger, "pvc/full", KUBECTL], "")?;
    let after = Trial::run(kubectl, "full", &["write", "/box/after", "1Gi"])?;
    after.is_full()?;
    let all = all + after.done;
    ensure!((128 * MIB - OWN..=128 * MIB).contains(&all), "128 MiB hold {all} bytes");
    is_whole(&demo(kubectl, "full", &["read", "/box/kept"])?)
}

/// Cuts the power while a claim gets its volume and another one gives it back; `boot` starts
/// the machine again, until everything serves. Each claim has its own data afterwards, or is
/// gone.
pub(super) fn survive_power_cuts(
    kubectl: &Kubectl,
    mut machine: Machine,
    boot: impl Fn() -> Result<Machine>,
) -> Result<Machine> {
    let (seed, cuts) = (seed()?, cuts(CUTS.0, CUTS.1)?);
    println!("POLIS_SEED={seed} POLIS_CUTS={cuts}");
    let mut ending = "beside".to_owned();
    for number in 1..=cuts {
        let name = format!("cut-{number}");
        let share = share(seed, number, cuts);
        let begun = Instant::now();
        for kind in ["pod", "pvc"] {
            kubectl.run(&["delete", kind, &ending, "--wait=false"], "")?;
        }
        kubectl.apply(&pod_with_volume(&name))?;
        let moment = CHANGE.mul_f64(share);
        while let Some(left) = moment.checked_sub(begun.elapsed()) {
            machine.next_line(left);
        }
        println!("cut {number}: {moment:.1?} after {ending} was to go and {name} to come");
        machine.kill();
        machine = boot()?;
        let ready = format!("pod/{name}");
        kubectl.ready(&["pod/full", &ready])?;
        let kept = demo_again(&mut machine, kubectl, "full", &["read", "/box/kept"])?;
        is_whole(&kept)?;
        for kind in ["pod", "pvc"] {
            let object = format!("{kind}/{ending}");
            kubectl.run(&["wait", "--for=delete", &object, KUBECTL], "")?;
        }
        // It is new: nothing of another claim is in it.
        let first = ["write", "/box/first", "4Mi"];
        Trial::read(&demo_again(&mut machine, kubectl, &name, &first)?)?.is_whole()?;
        let made = Trial::run(kubectl, &name, &["files", "/box/many", "1000000"])?;
        made.is_full()?;
        ensure!((4000..=4096).contains(&made.done), "a new volume holds {} files", made.done);
        ending = name;
    }
    Ok(machine)
}

/// Deletes every claim of these tests, and waits until the node has no directory of a volume.
pub(super) fn leave_nothing(kubectl: &Kubectl, machine: &mut Machine) -> Result<()> {
    let all = ["--selector=volumes=ours", KUBECTL];
    for kind in ["pod", "pvc"] {
        kubectl.run(&[&["delete", kind][..], &all[..]].concat(), "")?;
    }
    machine.wait_for_text(SWEPT, PART).context("directories of volumes stay")?;
    // The object of the last one goes at the same time.
    ask_until("the end of every volume", || {
        let left = kubectl.run(&["get", "pv", "--output=name"], "")?;
        Ok(left.trim().is_empty().then_some(()))
    })
}

/// Fails unless what was written first is there.
fn is_whole(read: &str) -> Result<()> {
    ensure!(read.contains("as they were written"), "{read}");
    println!("{}", read.trim());
    Ok(())
}
