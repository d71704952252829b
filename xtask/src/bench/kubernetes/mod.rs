//! `cargo xtask bench kubernetes`: one machine with both roles of Kubernetes, from the roles
//! to a pod that answers, and the memory of each part at rest.
//!
//! ```text
//! boot --> `memory` without roles --> roles --> each part ready --> demo, its answer
//!                                                    \--> `memory` with roles
//! ```
//!
//! The steps are those of `cargo xtask run --kubernetes`; they count from the request for
//! the roles, by the host's clock. Memory is that of the node's own event line, ten seconds
//! after everything that its roles ask for was ready: the demo starts beside it.
//!
//! After it, each round starts the same programs by a script, on the same kernel in the same
//! machine ([`script`]); its steps count from an etcd that answers, which a node has before it
//! gets the roles.

mod script;

use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_image::{Kind, Manifest, Variant};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::fleet::PARAMETERS;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::cheap;
use polis_qemu::{Bus, Config, Event, Image, Machine};

pub(super) use self::script::NEEDS;
use super::{Args, Row, Table};
use crate::kubernetes::{self, DISK, Deployment, MEMORY_FIRST, Steps};
use crate::operator::Operator;
use crate::{host, image, parameters, run};

/// A plain disk: `bench storage` measures encryption.
const POLICY: StorageSecurityPolicy = StorageSecurityPolicy::NeedsInsecure;

/// The additional memory of `node` itself with the roles, in KiB.
const NODE_GOAL: f64 = 8192.0;

/// The time of a node, in times of the script's.
const TIME_GOAL: f64 = 1.15;

/// Upper bound of a wait; an API server that is translated needs minutes.
const LONG: Duration = Duration::from_secs(1800);

/// The processes of the event line, as far as a node has them.
const PROCESSES: [&str; 10] = [
    "init",
    "node",
    "etcd",
    "apiserver",
    "controller-manager",
    "scheduler",
    "containerd",
    "kubelet",
    "kube-proxy",
    "dns",
];

pub(super) fn measure(args: &Args) -> Result<Table> {
    host::require_memory(&[MEMORY_FIRST])?;
    let packages = image::Packages::default();
    let image = run::image_from(Kind::Product, Variant::Full, &packages)?;
    let folder = image.disk.parent().context("an image without a folder")?;
    let manifest = Manifest::load(folder)?;
    image::kubectl(&packages)?;
    image::go_programs(&["ctr"])?;
    let folder = image::workspace().join("target/bench/kubernetes");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("cannot empty target/bench/kubernetes")?;
    }
    let mut table = Table::new("kubernetes", args.runs)?;
    for round in 1..=args.runs {
        let folder = folder.join(round.to_string());
        let what = || format!("round {round}");
        let (steps, memory) =
            once(&image, &folder.join("polis"), args.cpus()).with_context(what)?;
        let script = script::once(&manifest, &folder.join("script"), args.cpus())
            .with_context(|| format!("{}, of the script", what()))?;
        let mut values = rows("from the roles", &steps);
        values.extend(rows("script, from etcd", &script));
        values.extend(over(&steps, &script)?);
        values.extend(memory);
        gather(&mut table.rows, values);
    }
    Ok(table)
}

/// The times of steps, as rows.
fn rows(of: &str, steps: &Steps) -> Vec<Value> {
    let row = |(what, at): &(String, Duration)| {
        (Row::new(format!("{of}: {what}"), "s"), at.as_secs_f64())
    };
    steps.0.iter().map(row).collect()
}

/// How much longer Polis takes than the script until an API server answers, until all serve,
/// and until a pod has its answer.
fn over(polis: &Steps, script: &Steps) -> Result<Vec<Value>> {
    let ratio = |what: &str| -> Result<Value> {
        let at = |steps: &Steps| {
            let step = steps.0.iter().find(|(step, _)| step == what);
            step.map(|(_, at)| at.as_secs_f64()).with_context(|| format!("no step \"{what}\""))
        };
        let row = Row::new(format!("over the script: {what}"), "times").goal(TIME_GOAL);
        Ok((row, at(polis)? / at(script)?))
    };
    let steps = [kubernetes::part_ready("apiserver", 1), kubernetes::serves(1)];
    steps.iter().map(String::as_str).chain([kubernetes::ASKED]).map(ratio).collect()
}

/// A row without values yet, and its value in one round.
type Value = (Row, f64);

/// Adds the values of one round to the rows of the same names.
fn gather(rows: &mut Vec<Row>, values: Vec<Value>) {
    for (row, value) in values {
        match rows.iter_mut().find(|known| known.name == row.name) {
            Some(known) => known.values.push(value),
            None => rows.push(Row { values: vec![value], ..row }),
        }
    }
}

/// A node of Polis, from a blank disk: its steps, and its memory.
fn once(image: &Image, folder: &Path, cpus: u32) -> Result<(Steps, Vec<Value>)> {
    run::make_folder(folder)?;
    let operator = Operator::prepare(folder, "bench", false)?;
    let config = Config { forwards: operator.forwards.clone(), ..config(image, folder, cpus)? };
    let log = folder.join("serial.log");
    let (taken, owner) = mpsc::channel();
    operator.follow(&log, move |node| drop(taken.send(node)));
    let mut machine = Machine::start(&config, folder)?;
    let ready = machine.wait_for("ready", LONG, |_| true)?;
    let node = owner.recv_timeout(LONG).context("no owner")??;
    // Before the roles: the line comes ten seconds after the node was ready.
    let before = machine.wait_for("memory", LONG, |_| true)?;
    let report = |step: &str| println!("kubernetes: {step}");
    let nodes = vec![kubernetes::Node { id: node, log }];
    let polisctl = operator.polisctl.clone();
    let deployment = Deployment { dir: folder.to_owned(), operator: polisctl, nodes, report };
    let (steps, _answer) = deployment.steps()?;
    let after = match machine.seen(|event| event.word == "memory" && has_roles(event)).pop() {
        Some(event) => event,
        None => machine.wait_for("memory", LONG, has_roles)?,
    };
    let mut values = vec![(Row::new("first boot, ready", "s"), ready.at.as_secs_f64())];
    values.extend(memory(&before, &after)?);
    drop(machine);
    let disk = folder.join("disk.img");
    fs::remove_file(&disk).with_context(|| format!("cannot remove {}", disk.display()))?;
    Ok((steps, values))
}

/// Whether a line of memory has the parts of Kubernetes.
fn has_roles(event: &Event) -> bool {
    event.get("kubelet").is_some()
}

fn config(image: &Image, folder: &Path, cpus: u32) -> Result<Config> {
    let disk = folder.join("disk.img");
    polis_qemu::disk::copy(&image.disk, &disk)
        .and_then(|()| polis_qemu::disk::resize(&disk, DISK))
        .context("cannot copy the image")?;
    let owner = parameters::owner_key(folder)?;
    let file = folder.join("parameters.pb");
    fs::write(&file, parameters::with_policy(&owner, None, POLICY))
        .with_context(|| format!("cannot write {}", file.display()))?;
    let accelerator = accelerator(Preference::Auto, cpus);
    Ok(Config {
        disk: Some(Disk { file: disk, bus: Bus::Virtio, cache: Cache::Unsafe }),
        memory: MEMORY_FIRST,
        cpus,
        fw_cfg: vec![FwCfg { name: PARAMETERS.to_owned(), file }],
        ..Config::new(image.direct(cheap(accelerator)), accelerator)
    })
}

/// The memory of each process with the roles, and what `node` takes more than without.
fn memory(before: &Event, after: &Event) -> Result<Vec<Value>> {
    let kibibytes = |event: &Event, name: &str| -> Result<f64> {
        event.text(name).parse().with_context(|| format!("bad {event}"))
    };
    let row = |name: &str| Row::new(format!("resident memory of {name}"), "KiB");
    let mut values = vec![(row("node, without roles"), kibibytes(before, "node")?)];
    for name in PROCESSES.into_iter().filter(|name| after.get(name).is_some()) {
        values.push((row(name), kibibytes(after, name)?));
    }
    let more = kibibytes(after, "node")? - kibibytes(before, "node")?;
    values.push((row("node, more with the roles").goal(NODE_GOAL), more));
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_compared_with_the_script_at_three_steps() {
        let steps = |seconds: [u64; 3]| {
            let names = [kubernetes::part_ready("apiserver", 1), kubernetes::serves(1)];
            let names = names.into_iter().chain([kubernetes::ASKED.to_owned()]);
            Steps(names.zip(seconds.map(Duration::from_secs)).collect())
        };
        let values = over(&steps([60, 90, 180]), &steps([30, 60, 120])).unwrap();
        let ratios: Vec<_> = values.iter().map(|(_, value)| *value).collect();
        assert_eq!(ratios, [2.0, 1.5, 1.5]);
        let error = over(&steps([1, 1, 1]), &Steps::default()).unwrap_err();
        assert!(error.to_string().contains("apiserver of node 1"), "{error}");
    }

    #[test]
    fn memory_is_read_with_and_without_the_roles() {
        let event = |text| Event::parse(text, Duration::ZERO).unwrap();
        let before = event("POLIS memory init=2140 node=15000 etcd=61000 t=31.002");
        let after = event("POLIS memory init=2140 node=18000 etcd=71000 kubelet=99000 t=131.002");
        assert!(!has_roles(&before) && has_roles(&after));
        let values = memory(&before, &after).unwrap();
        let names: Vec<_> =
            values.iter().map(|(row, value)| format!("{} {value}", row.name)).collect();
        let of = "resident memory of ";
        assert_eq!(names[0], format!("{of}node, without roles 15000"));
        assert!(names.contains(&format!("{of}kubelet 99000")), "{names:?}");
        assert_eq!(names.last().unwrap(), &format!("{of}node, more with the roles 3000"));
    }
}
