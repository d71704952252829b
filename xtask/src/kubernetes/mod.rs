//! `cargo xtask run --kubernetes`: gives the nodes of a run the roles of Kubernetes, deploys
//! the demo workload, and returns its answer.
//!
//! ```text
//! roles --> every node: `POLIS workload part=all state=ready` --> kubeconfig, kubectl
//!                                                                      |
//!              answer of a server, by the name of its Service <-- demo.yaml
//! ```
//!
//! All steps are those of an operator, by `polisctl` and `kubectl`. The first node becomes
//! the only controller: an API server needs a gigabyte and, under emulation, a processor.
//! Every node becomes a worker.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::{Event, Operator};

use crate::host::Late;
use crate::tail::Tail;
use crate::{image, operator};

/// Memory in MiB of the machine that is controller and worker.
pub(crate) const MEMORY_FIRST: u32 = 3072;
/// Memory in MiB of a machine that is a worker.
pub(crate) const MEMORY: u32 = 1536;
/// Bytes of the disk of a machine with workloads: the image as it is written to a larger disk.
/// On one of its own size, etcd's part leaves too little for containers.
pub(crate) const DISK: u64 = 10 << 30;
/// How long each wait may take. An API server that is translated needs minutes.
const PATIENCE: Duration = Duration::from_secs(30 * 60);
/// How long `polisctl` may look for a leader.
const ANSWER: &str = "5m";
/// The demo workload, and the Job that asks it.
const DEMO: &str = include_str!("demo.yaml");
/// Its namespace, as an option of `kubectl`.
const IN_DEMO: &str = "--namespace=demo";

/// The part of a node that a kubeconfig needs.
const API_SERVER: &str = "apiserver";

/// How `kubectl wait` reports that its time is up.
const TIMED_OUT: &str = "timed out waiting for the condition";

/// The last step.
pub(crate) const ASKED: &str = "a pod has asked it by its name";

/// The step of a part of a node, by its number in the run.
pub(crate) fn part_ready(part: &str, number: usize) -> String {
    format!("{part} of node {number} is ready")
}

/// The step of a node with all of its parts.
pub(crate) fn serves(number: usize) -> String {
    format!("node {number} serves all that its roles ask for")
}

/// A node of the run.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// Its ID.
    pub(crate) id: String,
    /// Its serial log.
    pub(crate) log: PathBuf,
}

/// A run whose cluster has an owner and whose nodes are ready.
#[derive(Debug)]
pub(crate) struct Deployment {
    /// The folder of the run.
    pub(crate) dir: PathBuf,
    /// `polisctl` of the owner.
    pub(crate) operator: Operator,
    /// The controller first.
    pub(crate) nodes: Vec<Node>,
    /// Calls this with each step that was done.
    pub(crate) report: fn(&str),
}

/// The steps that were done, each with the time since the deployment began.
#[derive(Debug, Default)]
pub(crate) struct Steps(pub(crate) Vec<(String, Duration)>);

impl Deployment {
    /// Gives the roles, waits, deploys. Returns the answer of the demo, and a table of the
    /// steps, as one text.
    ///
    /// # Errors
    ///
    /// The first step that failed, with the last words of what it waited for.
    pub(crate) fn run(&self) -> Result<String> {
        let (steps, answer) = self.steps()?;
        Ok(format!(
            "run: the demo answers at http://demo.demo.svc.cluster.local:\n\n{}\n{steps}\n\
             run: in another terminal: {} get pods --all-namespaces\n",
            answer.trim_end(),
            operator::typed(&script(&self.dir))
        ))
    }

    /// The same; returns the steps and the answer of the demo.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    pub(crate) fn steps(&self) -> Result<(Steps, String)> {
        let began = Instant::now();
        let mut steps = Steps::default();
        let mut done = |what: &str| {
            (self.report)(&format!("{:6.1} s  {what}", began.elapsed().as_secs_f64()));
            steps.0.push((what.to_owned(), began.elapsed()));
        };
        // The nodes of a kept run have their roles already, and may serve by now.
        let logs: Vec<_> = self.nodes.iter().map(|node| Tail::after_ready(&node.log)).collect();
        for (number, node) in self.nodes.iter().enumerate() {
            let roles: &[_] = match number {
                0 => &["--add", "kubernetes-controller", "--add", "kubernetes-worker"],
                _ => &["--add", "kubernetes-worker"],
            };
            // An election on a busy host takes longer than a person waits.
            let change = ["--timeout", ANSWER, "node", "roles", &node.id, "--yes"];
            self.operator.run(&[&change[..], roles].concat())?;
        }
        done("the nodes have their roles");
        let mut client = None;
        for (number, mut log) in logs.into_iter().enumerate() {
            let mut last = None;
            loop {
                let event = log
                    .next_event(PATIENCE, |event| event.word == "workload")
                    .with_context(|| waited(number + 1, last.as_ref()))?;
                match (event.get("part"), event.get("state")) {
                    (Some("all"), Some("ready")) => break,
                    (Some(part), Some("ready")) => {
                        done(&part_ready(part, number + 1));
                        // The rest of the node starts meanwhile.
                        if part == API_SERVER && client.is_none() {
                            client = Some(self.client()?);
                        }
                    }
                    _ => {}
                }
                last = Some(event);
            }
            done(&serves(number + 1));
        }
        // A node of a kept run may have been ready before this began.
        let client = client.map_or_else(|| self.client(), Ok)?;
        let answer = client.demo(&mut done)?;
        Ok((steps, answer))
    }

    /// Writes the kubeconfig of the owner; returns the client that uses it.
    fn client(&self) -> Result<Client> {
        let file = self.dir.join("kubeconfig");
        let path = file.display().to_string();
        self.operator.run(&["--timeout", ANSWER, "kubernetes", "kubeconfig", "-o", &path])?;
        Client::new(&self.dir, &file)
    }
}

/// `kubectl` for one cluster, as a script that a person can use, too.
#[derive(Debug)]
pub(crate) struct Client {
    script: PathBuf,
}

impl Client {
    /// Writes the script of `dir`, which uses this kubeconfig.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub(crate) fn new(dir: &Path, kubeconfig: &Path) -> Result<Self> {
        let lines = format!(
            "#!/bin/sh\n# kubectl for the cluster of this folder.\nexec {} --kubeconfig {} \"$@\"\n",
            operator::quoted(&program()),
            operator::quoted(kubeconfig)
        );
        let script = script(dir);
        fs::write(&script, lines)
            .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", script.display()))?;
        Ok(Self { script })
    }

    /// Deploys the demo, and waits until a pod has asked it by the name of its Service. Calls
    /// `done` after each step; returns the answer.
    ///
    /// # Errors
    ///
    /// The first step that failed.
    pub(crate) fn demo(&self, mut done: impl FnMut(&str)) -> Result<String> {
        self.run(&["apply", "--filename", "-"], Some(DEMO))?;
        done("the demo is deployed");
        self.wait("condition=Available", &["deployment/demo", IN_DEMO])?;
        done("the demo is available");
        self.wait("condition=Complete", &["job/visitor", IN_DEMO])?;
        done(ASKED);
        let answer = self.run(&["logs", "job/visitor", IN_DEMO], None)?;
        ensure!(answer.contains("kernel"), "the demo answered {answer:?}");
        Ok(answer)
    }

    /// Waits until an object is as `state` says, in the words of `kubectl wait`; the object may
    /// have options behind it.
    ///
    /// # Errors
    ///
    /// It is not in time.
    pub(crate) fn wait(&self, state: &str, object: &[&str]) -> Result<()> {
        let until = format!("--timeout={}s", PATIENCE.as_secs());
        let state = format!("--for={state}");
        self.run(&[&["wait", &state, &until], object].concat(), None).map(drop)
    }

    /// Runs `kubectl`; returns its standard output.
    fn run(&self, args: &[&str], input: Option<&str>) -> Result<String> {
        use std::io::Write as _;
        let mut child = Command::new(&self.script)
            .args(args)
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        if let (Some(mut pipe), Some(input)) = (child.stdin.take(), input) {
            pipe.write_all(input.as_bytes()).context("kubectl does not read its input")?;
        }
        let output = child.wait_with_output().context("cannot wait for kubectl")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let (args, status) = (args.join(" "), output.status);
            let text = format!("kubectl {args} ended with {status}: {}", said.trim());
            if said.contains(TIMED_OUT) {
                return Err(Late(text).into());
            }
            bail!(text);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The operator's program of Kubernetes.
fn program() -> PathBuf {
    image::workspace().join(image::KUBECTL)
}

/// `kubectl` with the kubeconfig of the run in `dir`.
pub(crate) fn script(dir: &Path) -> PathBuf {
    dir.join("kubectl")
}

fn waited(number: usize, last: Option<&Event>) -> String {
    let last = last.map_or_else(|| "nothing so far".to_owned(), ToString::to_string);
    format!("the workload stack of node {number} is not ready; its last report: {last}")
}

impl std::fmt::Display for Steps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = self.0.iter().map(|(what, _)| what.chars().count()).max().unwrap_or(4);
        writeln!(f, "  {:<width$}  {:>8}  {:>8}", "what", "at", "took")?;
        let mut before = Duration::ZERO;
        for (what, at) in &self.0 {
            let [at_s, took] = [*at, at.saturating_sub(before)].map(|time| time.as_secs_f64());
            writeln!(f, "  {what:<width$}  {at_s:>8.1}  {took:>8.1}")?;
            before = *at;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_how_long_each_step_took() {
        let step = |what: &str, at| (what.to_owned(), Duration::from_secs(at));
        let steps = Steps(vec![step("roles", 2), step("apiserver of node 1 is ready", 90)]);
        insta::assert_snapshot!(steps.to_string(), @r"
          what                                at      took
          roles                              2.0       2.0
          apiserver of node 1 is ready      90.0      88.0
        ");
    }

    #[test]
    fn the_demo_has_images_of_the_system_only() {
        let images: Vec<_> = DEMO.lines().filter(|line| line.contains("image:")).collect();
        assert_eq!(images.len(), 2);
        assert!(images.iter().all(|line| line.ends_with("polis.internal/demo:1")));
    }
}
