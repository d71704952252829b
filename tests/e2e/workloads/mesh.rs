//! A cluster of three machines with workloads: one controller, two workers.
//!
//! The machines are raised once, since that takes longer than anything that happens to them
//! afterwards. The chapters, each a function:
//!
//! - pods reach each other across the machines by address, by name and by NodePort, and
//!   nothing of it is on the wire in clear;
//! - a NetworkPolicy decides about a client on another machine;
//! - with `--all`: the authorities of the cluster and of Kubernetes are rotated under all of it;
//! - a user is revoked, and the open requests of the user end;
//! - etcd loses its quorum, pods go on, a worker that starts meanwhile has the mesh of its last
//!   boot, and all is whole again by itself;
//! - a worker is decommissioned, and its pod moves to the other.
//!
//! The first machine is the only member of etcd until the chapter that needs two: on a host
//! with few processors, an API server that starts under emulation takes the time of three
//! members' heartbeats.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::args::Devices;
use polis_qemu::capture::Captured;
use polis_qemu::fleet::Part;
use polis_qemu::host::free_port;
use polis_qemu::{Config, Event, Fleet, Operator, Port};
use polis_tests::{Story, draws_all, polisctl, story};
use serde_json::Value;

use super::kubectl::Kubectl;
use super::policy::{self, Outcome};
use super::{GONE, KUBECTL, PART};
use crate::fleet::{ask_until, catch_up, joined_by, run};
use crate::world::{SOON, World, chapters};

/// The workloads.
const WORKLOADS: &str = include_str!("mesh.yaml");
/// In the answer of the server: what must not be on the wire between two machines.
const MARKER: &str = "marker-in-the-answer-of-the-demo";
/// The server by the name of its Service.
const WEB: &str = "web.default.svc.cluster.local:80";

/// A client on the machine that does not have the server.
const CLIENT: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  automountServiceAccountToken: false
  nodeSelector: {polis.internal/name: node-3}
  containers:
    - {name: demo, image: 'polis.internal/demo:1', imagePullPolicy: IfNotPresent}
";

/// Lets friends in to the server, and no other pod.
const ONLY_FRIENDS: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: only-friends}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchLabels: {role: friend}}}]
      ports: [{port: 8080, protocol: TCP}]
";

/// The port of the server on every worker.
const NODE_PORT: u16 = 30080;
/// What a worker says that no leader answers.
const MESH_OF_LAST_BOOT: &str = "the nodes of the mesh are those of the last boot";
/// The port of the mesh, and the type of a message of WireGuard that carries a packet.
const MESH: u16 = 7838;
const CARRIES_A_PACKET: u8 = 4;

/// The machines, by their parts.
const CONTROLLER: usize = 0;
const WORKERS: [usize; 2] = [1, 2];
/// The worker that `web` prefers, and the other.
const HOME: usize = WORKERS[0];
const OTHER: usize = WORKERS[1];

/// Memory in MiB of a controller, and of a worker.
const MEMORY: [u32; 2] = [2560, 1536];
const DISK: u64 = 8 << 30;

/// Longest that what a revoked user has open may go on.
const CUT_MAX: Duration = Duration::from_secs(2);

/// Longest that the host waits for one answer of a pod.
const ANSWER: Duration = Duration::from_secs(10);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(three_machines_carry_pods_through_what_befalls_them)
    .cluster()
    .takes(900)
    .at_most(Duration::from_secs(40 * 60))];

fn three_machines_carry_pods_through_what_befalls_them() -> Result<()> {
    let world = World::of_full("mesh")?;
    let chapter = chapters();

    let mut mesh = Mesh::raised(&world, &chapter)?;
    mesh.reaches_across_machines()?;
    chapter("pods reached each other across the machines");
    mesh.policy_holds_across_machines()?;
    chapter("a policy decided about a client of another machine");
    if draws_all() {
        mesh.authorities_are_rotated()?;
        chapter("the authorities were rotated");
    }
    mesh.revoked_user_is_cut(&world)?;
    chapter("a user was revoked, and what it had open ended");
    mesh.quorum_is_lost_and_found()?;
    chapter("etcd lost its quorum, and found it again");
    mesh.worker_leaves()?;
    chapter("a worker was decommissioned, and its pod moved");
    Ok(())
}

/// The cluster, and the ways into it.
struct Mesh {
    cluster: Fleet,
    kubectl: Kubectl,
    /// The port of the host that leads to the NodePort of each worker.
    ways: [u16; 2],
}

impl Mesh {
    /// Three machines that serve all that their roles ask for.
    fn raised(world: &World, chapter: &dyn Fn(&str)) -> Result<Self> {
        let small = world.bootstrap_config("")?;
        let disk = Some(world.disk_of_size(DISK, None)?);
        let first = Config { disk, memory: MEMORY[0], cpus: 2, ..small };
        let mut cluster = joined_by(world, first, 1 + WORKERS.len(), "")?;
        for number in WORKERS {
            let config = &mut cluster.nodes[number].config;
            // The memory of a saved machine is fixed.
            config.devices = Devices::FromStart;
            config.memory = MEMORY[1];
        }
        cluster.found()?;
        cluster.admit(&WORKERS.map(|number| (number, Part::Worker)))?;
        chapter("three machines are one cluster");
        for number in 0..cluster.nodes.len() {
            let role = if number == CONTROLLER { "controller" } else { "worker" };
            let id = cluster.nodes[number].id.clone();
            let role = format!("kubernetes-{role}");
            run(&cluster, &["node", "roles", &id, "--add", &role])?;
        }
        let mut ways = [0; 2];
        for (way, number) in ways.iter_mut().zip(WORKERS) {
            *way = free_port()?;
            cluster.segment.forward(*way, cluster.nodes[number].address, NODE_PORT)?;
        }
        let kubeconfig = world.path("kubeconfig");
        let kubectl = Kubectl::new(kubeconfig.clone());
        let mut mesh = Self { cluster, kubectl, ways };
        for number in [CONTROLLER, HOME, OTHER] {
            mesh.serves(number)?;
            chapter(&format!("machine {} serves all that its role asks for", number + 1));
        }
        let out = kubeconfig.display().to_string();
        run(&mesh.cluster, &["kubernetes", "kubeconfig", "-o", &out])?;
        mesh.kubectl.apply(WORKLOADS)?;
        mesh.kubectl.run(&["wait", "--for=condition=Available", "deployment/web", KUBECTL], "")?;
        mesh.kubectl.ready(&["pod/idle"])?;
        chapter("the workloads run");
        Ok(mesh)
    }

    /// Waits until everything that the roles of a machine ask for serves.
    fn serves(&mut self, number: usize) -> Result<()> {
        self.says(number, "all", |event| event.is("state", "ready"))
    }

    /// Waits until a part of a machine reports this.
    fn says(&mut self, number: usize, part: &str, what: fn(&Event) -> bool) -> Result<()> {
        let machine = self.cluster.machine(number)?;
        let said =
            machine.wait_for("workload", PART, |event| event.is("part", part) && what(event));
        said.with_context(|| format!("machine {}, part {part}", number + 1)).map(drop)
    }

    fn id(&self, number: usize) -> &str {
        &self.cluster.nodes[number].id
    }

    /// A document of the API.
    fn get(&self, what: &[&str]) -> Result<Value> {
        let text = self.kubectl.run(&[&["get", "--output", "json"], what].concat(), "")?;
        serde_json::from_str(&text).with_context(|| format!("no document: {text}"))
    }

    /// Asks `web` from outside, by the NodePort of a worker, until it answers.
    fn answers_outside(&self, worker: usize) -> Result<String> {
        let way = self.ways[worker - HOME];
        let what = format!("an answer at the NodePort of machine {}", worker + 1);
        ask_until(&what, || Ok(ask(way).ok().filter(|answer| answer.contains(MARKER))))
    }

    /// Pod to pod, Service, name and NodePort, and the wire meanwhile.
    fn reaches_across_machines(&mut self) -> Result<()> {
        let pods = self.get(&["pods", "--selector", "app=web"])?;
        let pod = &pods["items"][0];
        ensure!(pod["spec"]["nodeName"] == self.id(HOME), "not on the second machine: {pod}");
        let address = pod["status"]["podIP"].as_str().context("no address")?.to_owned();
        let service = self.get(&["service", "web"])?;
        let service = service["spec"]["clusterIP"].as_str().context("no address")?.to_owned();

        self.cluster.segment.links().capture();
        let asked = [
            ("by-address", format!("{address}:8080")),
            ("by-service", format!("{service}:80")),
            ("by-name", WEB.to_owned()),
        ];
        self.kubectl.apply(&visitor(&asked))?;
        let done = "--for=jsonpath={.status.phase}=Succeeded";
        self.kubectl.run(&["wait", done, "pod/visitor", KUBECTL], "")?;
        for (how, _) in &asked {
            let answer = self.kubectl.run(&["logs", "visitor", "--container", how], "")?;
            ensure!(answer.contains(MARKER) && answer.contains(self.id(HOME)), "{how}: {answer}");
        }
        // The API server's machine has no pods, and reaches those of others.
        let path = "/api/v1/namespaces/default/services/web:80/proxy/";
        let answer = self.kubectl.raw(path)?;
        ensure!(answer.contains(MARKER), "through the API server: {answer}");
        for worker in WORKERS {
            let answer = self.answers_outside(worker)?;
            ensure!(answer.contains(self.id(HOME)), "another pod answered: {answer}");
        }
        let captured = self.cluster.segment.links().captured();
        let captured = captured.map_err(|missed| anyhow::anyhow!("{missed} frames are missing"))?;
        wire(&captured)
    }

    /// A policy decides about a client on another machine: it is refused, answered once it has
    /// the label that the policy names, and answered without the policy.
    fn policy_holds_across_machines(&self) -> Result<()> {
        self.kubectl.apply(CLIENT)?;
        self.kubectl.ready(&["pod/client"])?;
        self.client_is(Outcome::Answered)?;
        self.kubectl.apply(ONLY_FRIENDS)?;
        self.client_is(Outcome::Refused)?;
        self.kubectl.run(&["label", "pod", "client", "role=friend"], "")?;
        self.client_is(Outcome::Answered)?;
        self.kubectl.run(&["label", "pod", "client", "role-"], "")?;
        self.client_is(Outcome::Refused)?;
        self.kubectl.run(&["delete", "networkpolicy", "only-friends"], "")?;
        self.client_is(Outcome::Answered)?;
        self.kubectl.delete(&["pod/client"], GONE)
    }

    fn client_is(&self, outcome: Outcome) -> Result<()> {
        let took = policy::becomes(&self.kubectl, "client", WEB, outcome)?;
        eprintln!("          the client of the other machine: {outcome:?} after {took:.1?}");
        Ok(())
    }

    /// Other authorities sign for everything, and the pods and their callers do not notice.
    fn authorities_are_rotated(&self) -> Result<()> {
        self.kubectl.apply(HOLDER)?;
        self.kubectl.ready(&["pod/holder"])?;
        let key = || self.kubectl.run(&["exec", "holder", "--", "/demo", "token"], "");
        let (before, former) = (self.lives()?, key()?);
        self.cluster.operator.run(&["--timeout", "20m", "cluster", "rotate-ca", "--yes"])?;
        self.kubectl.serves()?;
        for worker in WORKERS {
            self.answers_outside(worker)?;
        }
        // The API server asks the kubelet of another machine.
        self.kubectl.run(&["logs", "visitor", "--container", "by-name"], "")?;
        let after = self.lives()?;
        ensure!(before == after, "pods did not go on: {before:?}, then {after:?}");
        let next = key()?;
        ensure!(former != next, "the pod still has a token of the former key: {next}");
        self.kubectl.delete(&["pod/holder"], GONE)?;
        Ok(())
    }

    /// A watch, an `exec` and a forwarded port of a user who is revoked.
    fn revoked_user_is_cut(&mut self, world: &World) -> Result<()> {
        let path = |name: &str| world.path(name).display().to_string();
        let user = Operator::new(&polisctl()?, &world.path("ann"), "ann");
        user.run(&["owner", "create", "-o", &path("ann.key")])?;
        let [public, invitation] = ["ann.pub", "ann.json"].map(path);
        let role = ["user", "create", "ann", "--role", "operator"];
        let role = [&role[..], &["--key", &public, "-o", &invitation]].concat();
        run(&self.cluster, &role)?;
        user.run(&["context", "import", &invitation, "--key", &path("ann.key")])?;
        let kubeconfig = path("ann-kubeconfig");
        user.run(&["--timeout", "2m", "kubernetes", "kubeconfig", "-o", &kubeconfig])?;
        let kubectl = Kubectl::new(kubeconfig.into());

        let watch = kubectl.start(&["get", "pods", "--watch"])?;
        watch.says("idle", SOON)?;
        let forward = kubectl.start(&["port-forward", "deployment/web", ":8080"])?;
        forward.says("Forwarding from", SOON)?;
        let exec = kubectl.start(&["exec", "idle", "--", "/pause"])?;
        ask_until("a running exec", || Ok((self.execs()? == 1).then_some(())))?;

        run(&self.cluster, &["user", "revoke", "ann", "--yes"])?;
        let revoked = Instant::now();
        for (what, running) in [("watch", &watch), ("port-forward", &forward), ("exec", &exec)] {
            running.ends(CUT_MAX)?;
            eprintln!("          {what} ended {:?} after the revocation", revoked.elapsed());
        }
        ensure!(kubectl.run(&["get", "pods"], "").is_err(), "a revoked user lists pods");
        // On the machine, too: the API server has no such stream any more.
        ask_until("the end of the exec", || Ok((self.execs()? == 0).then_some(())))
    }

    /// The streams of `exec` that the API server has.
    fn execs(&self) -> Result<u64> {
        let metrics = self.kubectl.raw("/metrics")?;
        let exec = |line: &&str| {
            line.starts_with("apiserver_longrunning_requests{")
                && line.contains("subresource=\"exec\"")
        };
        let count = |line: &str| line.rsplit(' ').next()?.parse::<u64>().ok();
        Ok(metrics.lines().filter(exec).filter_map(count).sum())
    }

    /// Two members of etcd lose each other: the pods of both sides go on, the API says so,
    /// and everything comes back.
    fn quorum_is_lost_and_found(&mut self) -> Result<()> {
        let id = self.id(HOME).to_owned();
        run(&self.cluster, &["node", "roles", &id, "--add", "consensus-member"])?;
        let machine = self.cluster.machine(HOME)?;
        machine.wait_for("etcd", SOON, |etcd| etcd.is("state", "voter"))?;
        self.kubectl.serves()?;
        let before = self.lives()?;

        catch_up(self.cluster.machine(CONTROLLER)?);
        let links = self.cluster.segment.links();
        links.cut(Fleet::port(CONTROLLER), Fleet::port(HOME));
        self.says(CONTROLLER, "apiserver", |event| event.is("state", "failed"))?;
        // Its own check of etcd waits for ten seconds, and a busy machine's for more.
        ask_until("an API server that names etcd", || {
            let ready = self.kubectl.raw("/readyz");
            Ok(ready.err().filter(|said| format!("{said:#}").contains("etcd failed")).map(drop))
        })?;
        let status =
            self.cluster.operator.document(&["--timeout", "1m", "kubernetes", "status"])?;
        let controller = &status["controllers"][0];
        ensure!(controller["ready"] == false, "ready without a quorum: {status}");
        let cause = controller["cause"].as_str().unwrap_or_default();
        ensure!(cause.contains("etcd"), "etcd is not named: {status}");
        // One by the pod's own machine, which has lost the API, and one across the mesh.
        for worker in WORKERS {
            self.answers_outside(worker)?;
        }
        self.worker_starts_without_a_leader()?;

        links.heal();
        self.serves(OTHER)?;
        self.answers_outside(OTHER)?;
        self.kubectl.serves()?;
        let after = self.lives()?;
        ensure!(before == after, "pods did not go on: {before:?}, then {after:?}");
        Ok(())
    }

    /// A cluster without a quorum has no leader, so the worker takes its certificates and the nodes
    /// of the mesh from its own disk. The API server reads nothing for its kubelet meanwhile.
    fn worker_starts_without_a_leader(&mut self) -> Result<()> {
        self.cluster.cut_power(OTHER);
        self.cluster.boot(OTHER)?;
        self.says(OTHER, "worker-certificates", |event| event.is("state", "ready"))?;
        self.cluster.machine(OTHER)?.wait_for_text(MESH_OF_LAST_BOOT, SOON)?;
        self.says(OTHER, "mesh", |event| event.is("state", "ready"))
    }

    /// Each container: since when it runs, and how often it was started again.
    fn lives(&self) -> Result<Vec<(String, Value, Value)>> {
        let pods = self.get(&["pods"])?;
        let pods = pods["items"].as_array().context("no pods")?;
        let running = pods.iter().filter(|pod| pod["status"]["phase"] == "Running");
        let life = |pod: &Value| {
            let status = &pod["status"]["containerStatuses"][0];
            let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            (name, status["state"]["running"]["startedAt"].clone(), status["restartCount"].clone())
        };
        let lives: Vec<_> = running.map(life).collect();
        ensure!(!lives.is_empty(), "no pod runs: {pods:?}");
        Ok(lives)
    }

    /// The worker with the pods leaves: the one that a controller keeps moves to the other.
    fn worker_leaves(&mut self) -> Result<()> {
        let id = self.id(HOME).to_owned();
        let patient = ["--timeout", "8m"];
        // A pod that no controller would make anew keeps a worker from being drained.
        self.kubectl.delete(&["pod/idle"], GONE)?;
        let retire = ["node", "roles", &id, "--remove", "consensus-member", "--yes"];
        self.cluster.operator.run(&[&patient[..], &retire].concat())?;
        let decommission = ["node", "decommission", &id, "--yes"];
        self.cluster.operator.run(&[&patient[..], &decommission].concat())?;
        let machine = self.cluster.machine(HOME)?;
        machine.wait_for("drain", PART, |event| event.is("state", "drained"))?;

        self.kubectl.run(&["wait", "--for=condition=Available", "deployment/web", KUBECTL], "")?;
        let answer = self.answers_outside(OTHER)?;
        ensure!(answer.contains(self.id(OTHER)), "not on the other machine: {answer}");
        let gone = ["wait", "--for=delete", &format!("node/{id}"), KUBECTL];
        self.kubectl.run(&gone, "")?;
        Ok(())
    }
}

/// A pod with a token of its service account.
const HOLDER: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: holder}
spec:
  terminationGracePeriodSeconds: 5
  containers:
    - name: demo
      image: polis.internal/demo:1
      imagePullPolicy: IfNotPresent
";

/// A pod on the other worker that asks `web` in each of these ways.
fn visitor(asked: &[(&str, String)]) -> String {
    let mut text = "apiVersion: v1\nkind: Pod\nmetadata: {name: visitor}\nspec:\n  \
                    restartPolicy: OnFailure\n  automountServiceAccountToken: false\n  \
                    nodeSelector: {polis.internal/name: node-3}\n  containers:\n"
        .to_owned();
    for (name, server) in asked {
        text += &format!(
            "    - name: {name}\n      image: polis.internal/demo:1\n      \
             imagePullPolicy: IfNotPresent\n      args: [get, \"{server}\"]\n"
        );
    }
    text
}

/// Looks at what was on the wire: the marker in clear to and from the world outside, so a
/// search finds it where it is; between machines only in the mesh.
fn wire(captured: &[Captured]) -> Result<()> {
    let (inside, outside): (Vec<_>, Vec<_>) =
        captured.iter().partition(|one| one.is_between_machines());
    let clear =
        |frames: &[&Captured]| frames.iter().filter(|one| one.contains(MARKER.as_bytes())).count();
    let [home, other] = [HOME, OTHER].map(Fleet::port);
    let carries = |from: Port, to: Port| {
        let of_mesh = |one: &&&Captured| {
            let datagram = one.datagram();
            (one.from, one.to) == (from, to)
                && datagram.is_some_and(|datagram| {
                    datagram.destination.port() == MESH
                        && datagram.payload.first() == Some(&CARRIES_A_PACKET)
                })
        };
        inside.iter().filter(of_mesh).count()
    };
    let mesh = [carries(home, other), carries(other, home)];
    let clear = [clear(&outside), clear(&inside)];
    eprintln!(
        "          {} frames between machines, packets of the mesh between the workers: {mesh:?}; \
         the answer in clear: {} times to the world outside, {} times between machines",
        inside.len(),
        clear[0],
        clear[1]
    );
    ensure!(mesh.iter().all(|count| *count > 0), "no packet of the mesh: {mesh:?}");
    ensure!(clear[0] > 0, "the search does not find what is in clear");
    ensure!(clear[1] == 0, "traffic of pods is on the wire in clear");
    Ok(())
}

/// The answer of the demo at a port of this host.
fn ask(port: u16) -> Result<String> {
    let mut line = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    line.set_read_timeout(Some(ANSWER))?;
    line.write_all(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    line.read_to_string(&mut answer)?;
    Ok(answer)
}
