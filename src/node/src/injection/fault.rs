//! Fault injection: the node breaks itself, for the stories that show what follows.
//!
//! `polis.fault=NAME` on the kernel command line selects the fault, and each use is logged
//! as an error. The command line selects the whole system, so the word gives its author no
//! new right.
//!
//! It strikes once the node is ready; `kernel-panic` strikes at once, and `kill-by-pods` at
//! each order of the story.
//!
//! | name | what happens |
//! |---|---|
//! | `service-panic` | a service panics once |
//! | `service-flaps` | a service panics more often than it may |
//! | `main-panic` | the main task panics |
//! | `kill-etcd` | etcd gets SIGKILL |
//! | `flapping-etcd` | etcd gets SIGKILL whenever it runs |
//! | `no-containerd` | containerd gets SIGKILL whenever it runs |
//! | `damage-etcd` | etcd gets SIGKILL, and its database is overwritten |
//! | `lose-etcd` | everything of the member of etcd is removed, and it gets SIGKILL; what is written of it later is removed, too |
//! | `kill-node` | the node gets SIGKILL |
//! | `kill-by-pods` | once a pod with the name `kill-PROGRAM` runs here, that program gets SIGKILL |
//! | `node-hangs` | every worker of the runtime is blocked forever |
//! | `kernel-panic` | the kernel panics |
//! | `no-firewall` | every port is reached from everywhere, for stories about what is behind one |
//! | `locked` | the trapdoor opens as for a locked disk, unless a recovery key was given |

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open};
use tokio::io::Interest;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::error;

use polis_base::files;
use polis_base::recovery;
use polis_base::sys::command_line;
use polis_base::trapdoor::{Report, code};
use polis_control::consensus;
use polis_runtime::event::{self, Closed};
use polis_runtime::supervisor::{Context, Policy};
use polis_runtime::sys::{process, readiness};
use polis_workload::runtime::{self, pods};

/// The faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A service panics once.
    ServicePanic,
    /// A service panics more often than it may.
    ServiceFlaps,
    /// The main task panics.
    MainPanic,
    /// etcd is killed.
    KillEtcd,
    /// etcd is killed again and again.
    FlappingEtcd,
    /// containerd is killed again and again.
    NoContainerd,
    /// etcd is killed, and its database overwritten.
    DamageEtcd,
    /// Everything of the member of etcd is removed, now and later, and it is killed.
    LoseEtcd,
    /// This process is killed.
    KillNode,
    /// The programs that pods name are killed.
    KillByPods,
    /// Every worker of the runtime is blocked.
    NodeHangs,
    /// The kernel panics, as early as it takes an order to.
    KernelPanic,
    /// The firewall accepts everything.
    NoFirewall,
    /// The trapdoor opens as for a locked disk, unless a recovery key was given.
    Locked,
}

impl Fault {
    const ALL: [(&'static str, Self); 14] = [
        ("service-panic", Self::ServicePanic),
        ("service-flaps", Self::ServiceFlaps),
        ("main-panic", Self::MainPanic),
        ("kill-etcd", Self::KillEtcd),
        ("flapping-etcd", Self::FlappingEtcd),
        ("no-containerd", Self::NoContainerd),
        ("damage-etcd", Self::DamageEtcd),
        ("lose-etcd", Self::LoseEtcd),
        ("kill-node", Self::KillNode),
        ("kill-by-pods", Self::KillByPods),
        ("node-hangs", Self::NodeHangs),
        ("kernel-panic", Self::KernelPanic),
        ("no-firewall", Self::NoFirewall),
        ("locked", Self::Locked),
    ];

    /// The fault that the command line of this boot asks for, if any.
    #[must_use]
    pub fn of_this_boot() -> Option<Self> {
        let line = command_line::read().unwrap_or_default();
        let name = command_line::value(&line, "polis.fault")?;
        let fault = Self::from_name(name);
        match fault {
            Some(_) => error!("polis.fault={name}: fault injection is on"),
            None => error!("polis.fault={name} is not a known fault: ignored"),
        }
        fault
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, fault)| *fault)
    }

    /// How often its service may die.
    #[must_use]
    pub fn policy(self) -> Policy {
        Policy::at_most(2, Duration::from_secs(60))
    }
}

/// The service that breaks, or breaks something.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fault to cause.
    pub fault: Fault,
    /// The recovery key, if somebody gave one.
    pub recovery: recovery::Given,
    /// Whether the node is ready.
    pub ready: watch::Receiver<bool>,
    /// The pods on the node.
    pub pods: watch::Receiver<Option<runtime::Pods>>,
    /// Whether it broke already, in an earlier run.
    pub struck: Arc<AtomicBool>,
}

impl Service {
    /// Breaks, or runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of the value is gone.
    #[expect(clippy::panic, reason = "that is what it is for")]
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        if self.fault != Fault::KernelPanic {
            let ready = event::until(&mut self.ready, "ready", |ready| ready.then_some(()));
            let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
            ready?;
        }
        // Earlier events are logged first: an observer from outside could not make sense of
        // the rest.
        while !ctx.lines().is_drained() {
            sleep(Duration::from_millis(5)).await;
        }
        let first = !self.struck.swap(true, Ordering::Relaxed);
        match self.fault {
            Fault::ServicePanic if first => panic!("requested by polis.fault"),
            Fault::ServiceFlaps => panic!("requested by polis.fault"),
            Fault::KillEtcd if first => process::find("etcd").into_iter().for_each(kill),
            Fault::DamageEtcd if first => {
                for victim in process::find("etcd") {
                    kill_and_see(victim).await;
                }
                damage();
            }
            Fault::LoseEtcd if first => {
                error!("removing the member of etcd, requested by polis.fault");
                // The next one must not start while half of it is there.
                lose();
                for victim in process::find("etcd") {
                    kill_and_see(victim).await;
                }
                ctx.healthy();
                ctx.until_cancelled(lose_ever_again()).await;
                return Ok(());
            }
            Fault::KillNode => kill(getpid()),
            Fault::FlappingEtcd | Fault::NoContainerd => {
                ctx.healthy();
                let etcd = self.fault == Fault::FlappingEtcd;
                let program = if etcd { "etcd" } else { "containerd" };
                ctx.until_cancelled(kill_ever_again(program)).await;
                return Ok(());
            }
            Fault::KillByPods => {
                ctx.healthy();
                let Some(ended) = ctx.until_cancelled(kill_by_pods(self.pods)).await else {
                    return Ok(());
                };
                return Err(ended);
            }
            Fault::NodeHangs => hang(&ctx),
            Fault::KernelPanic => {
                if let Err(error) = std::fs::write("/proc/sysrq-trigger", "c") {
                    error!(error = &error as &dyn std::error::Error, "the kernel goes on");
                }
            }
            Fault::Locked => match self.recovery.text() {
                Ok(None) => match ctx.trapdoor(locked()).await {},
                Ok(Some((text, source))) => {
                    // Only the length: it shows a story that all of it arrived, and reveals
                    // nothing else.
                    let characters = text.expose().len();
                    error!(characters, "{source} opens what polis.fault locked");
                }
                Err(error) => error!(error = &error as &dyn std::error::Error, "no recovery key"),
            },
            // The main task and the firewall look for themselves.
            Fault::MainPanic
            | Fault::NoFirewall
            | Fault::ServicePanic
            | Fault::KillEtcd
            | Fault::DamageEtcd
            | Fault::LoseEtcd => {}
        }
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }
}

/// Kills a program whenever it runs, without end.
async fn kill_ever_again(program: &str) {
    loop {
        process::find(program).into_iter().for_each(kill);
        sleep(Duration::from_secs(1)).await;
    }
}

/// The beginning of the name of a pod that names a program.
const KILL: &str = "kill-";

/// Kills the program that each new pod names, until the owner of the pods is gone. A story
/// so kills programs one by one, while pods run, and sees each come back before the next.
async fn kill_by_pods(mut pods: watch::Receiver<Option<runtime::Pods>>) -> Closed {
    // A pod is there again, after containerd was: it is the same one.
    let mut done = BTreeSet::new();
    loop {
        let named = named(pods.borrow_and_update().as_ref());
        for program in named.difference(&done) {
            error!(program, "a pod asks for its end");
            match program.as_str() {
                "node" => kill(getpid()),
                program => process::find(program).into_iter().for_each(kill),
            }
        }
        done.extend(named);
        if pods.changed().await.is_err() {
            return Closed("the pods");
        }
    }
}

/// The programs that running pods name.
fn named(pods: Option<&runtime::Pods>) -> BTreeSet<String> {
    let running = |pod: &&pods::Pod| pod.state == pods::State::Running;
    let pods = pods.into_iter().flat_map(|pods| &pods.pods).filter(running);
    pods.filter_map(|pod| pod.name.strip_prefix(KILL)).map(str::to_owned).collect()
}

/// Blocks each worker of the runtime, with some to spare: which one takes which
/// task is the runtime's to choose.
fn hang(ctx: &Context) {
    error!("blocking every worker, requested by polis.fault");
    for number in 0..2 * tokio::runtime::Handle::current().metrics().num_workers() {
        let name = format!("hang-{number}");
        ctx.spawn(&name, Policy::forever(), |_ctx| async { block() });
    }
}

/// Blocks its thread without end.
fn block() -> Result<(), std::convert::Infallible> {
    loop {
        // It may be woken for no reason.
        std::thread::park();
    }
}

fn locked() -> Report {
    let error = std::io::Error::other("requested by polis.fault");
    Report::from_error(code::STORAGE_KEY_WRONG, &error)
}

/// Overwrites the start of etcd's database, where its header is.
fn damage() {
    let database = files::Root::live().data.etcd.data.path().join("member/snap/db");
    error!(database = %database.display(), "damaging it, requested by polis.fault");
    let written = std::fs::File::options()
        .write(true)
        .open(database)
        .and_then(|file| file.write_all_at(&[0x5a; 8192], 0).and_then(|()| file.sync_all()));
    if let Err(error) = written {
        error!(error = &error as &dyn std::error::Error, "cannot damage it");
    }
}

/// Removes the files of a member of etcd, and leaves the mark that there was one.
fn lose() {
    if let Err(error) = consensus::forget(&files::Root::live().data.etcd) {
        error!(error = &error as &dyn std::error::Error, "cannot remove it");
    }
}

/// Removes the files of a member whenever there are any, without end: the services that keep its
/// certificates may write these again until they have ended, too.
async fn lose_ever_again() {
    loop {
        lose();
        sleep(Duration::from_millis(50)).await;
    }
}

/// Kills a process, and waits for its end.
///
/// A running process would mend the damage: etcd writes the first pages of its database
/// with each commit.
async fn kill_and_see(victim: Pid) {
    let watched = pidfd_open(victim, PidfdFlags::NONBLOCK).map_err(std::io::Error::from);
    kill(victim);
    let gone = async { readiness::watch(watched?, Interest::READABLE)?.readable().await.map(drop) };
    if let Err(error) = gone.await {
        error!(error = &error as &dyn std::error::Error, "cannot observe its end");
    }
}

fn kill(victim: Pid) {
    error!(process = victim.as_raw_pid(), "killing it, requested by polis.fault");
    // It may have ended by itself.
    let _gone = rustix::process::kill_process(victim, Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_its_fault() {
        for (name, fault) in Fault::ALL {
            assert_eq!(Fault::from_name(name), Some(fault));
        }
        assert_eq!(Fault::from_name("all"), None);
    }
}
