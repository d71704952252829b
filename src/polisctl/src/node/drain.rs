//! The drain of a worker before its machine ends or its role goes.
//!
//! The node drains itself and stays drained for as long as this command holds the stream:
//! a command that ends before its change leaves a node that takes pods again.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::drain_progress::State;
use polis_proto::v1::node_management_client::NodeManagementClient;
use tokio::time::timeout;
use tonic::{Code, Streaming};

use super::called;
use crate::error::Error;
use crate::session::{self, Session, refused};
use crate::{Global, units};
use polis_wire::rpc::client::Channel;

/// How long a node that is to lose its role may take to accept a connection.
const REACH: Duration = Duration::from_secs(10);

/// How much later than its own deadline a node may answer.
const SLACK: Duration = Duration::from_secs(60);

/// How pods are moved away.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Drain {
    /// How long pods of a worker may take to move to other nodes first; 0s: they are not
    /// moved.
    #[arg(long, value_name = "DURATION", value_parser = deadline, default_value = "5m")]
    drain_timeout: Duration,
    /// Evict also pods that no controller replaces, and go on after that time whatever is
    /// left.
    #[arg(long)]
    force: bool,
}

fn deadline(text: &str) -> Result<Duration, String> {
    let day = Duration::from_secs(24 * 60 * 60);
    let given = units::duration_up_to(day, text)?;
    match given {
        Duration::ZERO => Ok(given),
        _ if given < Duration::from_secs(1) => Err("allowed are 0s, and 1s to 1d".to_owned()),
        _ => Ok(given),
    }
}

/// A node that stays as it is for as long as this value is there.
#[derive(Debug)]
#[must_use]
pub(super) struct Held {
    _stream: Option<Streaming<v1::DrainProgress>>,
}

impl Held {
    const NOTHING: Self = Self { _stream: None };
}

impl Drain {
    /// Drains a node that is to lose its role, if it is a worker. A node that is dead has
    /// nothing to move; one that lives and cannot be reached is an error.
    pub(super) async fn before(
        self,
        session: &Session,
        node: &v1::NodeInfo,
        global: &Global,
    ) -> Result<Held, Error> {
        let worker = node.roles.is_some_and(|roles| roles.kubernetes_worker.is_some());
        if !worker || node.state() != v1::NodeState::Up || self.drain_timeout.is_zero() {
            return Ok(Held::NOTHING);
        }
        let target = session::target(node)?;
        let reached = timeout(REACH, Box::pin(session.connect(&target))).await;
        let reached = reached.unwrap_or_else(|_elapsed| {
            let seconds = REACH.as_secs();
            Err(Error::timed_out(format!("no answer from {} in {seconds} s", target.address))
                .or_help("see that it is on and reachable; --force goes on without a drain"))
        });
        match reached {
            Ok(connection) => self.hold(connection.channel, &called(node), global).await,
            Err(error) if node.health() != v1::NodeHealth::Healthy || self.force => {
                global.out.remark(&format!(
                    "{} is not drained: {}; Kubernetes makes its pods anew elsewhere",
                    called(node),
                    error.summary()
                ));
                Ok(Held::NOTHING)
            }
            Err(error) => Err(error.context(format!("cannot drain {}", called(node))).or_help(
                "it is healthy, so its pods should move first; go on without: --drain-timeout 0s",
            )),
        }
    }

    /// Drains the node at the other end of `channel`, if it is a worker.
    pub(super) async fn hold(
        self,
        channel: Channel,
        name: &str,
        global: &Global,
    ) -> Result<Held, Error> {
        if self.drain_timeout.is_zero() {
            return Ok(Held::NOTHING);
        }
        let drained = Box::pin(self.drained(channel, name, global));
        timeout(self.drain_timeout + SLACK, drained).await.unwrap_or_else(|_elapsed| {
            Err(Error::timed_out("it does not say how far it is")
                .context(format!("cannot drain {name}"))
                .or_help("go on without: --drain-timeout 0s"))
        })
    }

    async fn drained(self, channel: Channel, name: &str, global: &Global) -> Result<Held, Error> {
        const WHAT: &str = "drain the node";
        let timeout_seconds = u32::try_from(self.drain_timeout.as_secs()).unwrap_or(u32::MAX);
        let request = v1::DrainRequest { timeout_seconds, force: self.force };
        let progress = global.out.progress();
        progress.says(&format!("waiting: {WHAT}"));
        let asked = NodeManagementClient::new(channel).drain(request).await;
        let mut stream = match asked {
            Ok(answer) => answer.into_inner(),
            Err(status) if status.code() == Code::Unimplemented => {
                drop(progress);
                global.out.remark(&format!("{name} is not drained: its version cannot"));
                return Ok(Held::NOTHING);
            }
            Err(status) => return Err(refused(WHAT, &status)),
        };
        loop {
            let report = stream.message().await.map_err(|status| refused(WHAT, &status))?;
            let report = report.ok_or_else(|| {
                Error::new("the node has ended the drain")
                    .or_help("run the command again: a drain goes on where it was")
            })?;
            match report.state() {
                State::NoWorker | State::Drained => break,
                State::GivenUp => {
                    let left = left(report.pods);
                    drop(progress);
                    global.out.remark(&format!("{name} is not drained: {}{left}", report.cause));
                    break;
                }
                State::Draining | State::Unspecified => progress.says(&line(name, self, &report)),
            }
        }
        Ok(Held { _stream: Some(stream) })
    }
}

/// The line about a drain: for how long, and the reason to wait.
fn line(name: &str, drain: Drain, report: &v1::DrainProgress) -> String {
    let elapsed = Duration::try_from_secs_f64(report.elapsed_seconds).unwrap_or_default();
    format!(
        "draining {name}, {} of {}: waits for {}{}",
        units::span(elapsed),
        units::span(drain.drain_timeout),
        report.cause,
        left(report.pods)
    )
}

fn left(pods: u32) -> String {
    match pods {
        0 => String::new(),
        1 => "; 1 pod is left".to_owned(),
        pods => format!("; {pods} pods are left"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    fn report(state: State, pods: u32, cause: &str) -> v1::DrainProgress {
        let cause = cause.to_owned();
        v1::DrainProgress { state: state.into(), pods, cause, elapsed_seconds: 65.0 }
    }

    #[test]
    fn a_worker_is_drained_before_its_machine_ends_or_its_role_goes() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        cluster.has_worker();
        let id = node_id(NODE).to_string();
        cluster.drains(vec![
            Ok(report(State::Draining, 2, "the end of shop/web")),
            Ok(report(State::Drained, 0, "")),
        ]);
        let commands: [(&[&str], &str); 4] = [
            (&["node", "reboot", &id], "Reboot"),
            (&["node", "poweroff", &id], "PowerOff"),
            (&["node", "decommission", &id], "DecommissionNode"),
            (&["node", "roles", &id, "--remove", "kubernetes-worker"], "UpdateNodeRoles"),
        ];
        for (command, call) in commands {
            world.runs(&[command, &["--yes"]].concat());
            assert_eq!(cluster.asked(), ["Drain 300 false", call], "{command:?}");
            let options = ["--yes", "--drain-timeout", "90s", "--force"];
            world.runs(&[command, &options].concat());
            assert_eq!(cluster.asked(), ["Drain 90 true", call], "{command:?}");
            world.runs(&[command, &["--yes", "--drain-timeout", "0s"]].concat());
            assert_eq!(cluster.asked(), [call], "{command:?}");
        }
        // Roles that have no pods.
        world.runs(&["node", "roles", &id, "--remove", "consensus-member", "--yes"]);
        assert_eq!(cluster.asked(), ["UpdateNodeRoles"]);
        for (wrong, allowed) in [
            ("500ms", "allowed are 0s, and 1s to 1d"),
            ("2d", "at most 1d"),
            // Above the bound of every duration, too.
            ("40000d", "at most 1d"),
            ("5", "a number with the unit"),
        ] {
            let ended = world.run(&["node", "reboot", &id, "--drain-timeout", wrong]);
            assert_eq!(ended.status, 2, "{}", ended.stderr);
            assert!(ended.stderr.contains(allowed), "{}", ended.stderr);
        }
    }

    #[test]
    fn a_node_that_is_not_drained_stays_as_it_is() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        cluster.has_worker();
        let id = node_id(NODE).to_string();
        let mut status = tonic::Status::failed_precondition("no controller would replace a/b");
        let word = tonic::metadata::MetadataValue::from_static("unmanaged-pods");
        status.metadata_mut().insert(polis_wire::rpc::REASON, word);
        cluster.drains(vec![Err(status)]);
        for command in [&["node", "reboot", &*id][..], &["node", "decommission", &id]] {
            let said = world.refuses(&[command, &["--yes"]].concat());
            assert!(
                said.starts_with("error: cannot drain the node\ncause: no controller"),
                "{said}"
            );
            assert!(said.contains("help: ") && said.contains("--force"), "{said}");
            assert_eq!(cluster.asked(), ["Drain 300 false"], "{command:?}");
        }
    }

    #[test]
    fn a_drain_that_was_given_up_is_said_and_the_command_goes_on() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        cluster.has_worker();
        let id = node_id(NODE).to_string();
        cluster.drains(vec![Ok(report(
            State::GivenUp,
            3,
            "no answer for 30 s from an API server",
        ))]);
        let ended = world.run(&["node", "reboot", &id, "--yes"]);
        assert_eq!((ended.status, &*ended.stdout), (0, &*format!("{id} reboots\n")));
        let said = format!(
            "{id} is not drained: no answer for 30 s from an API server; 3 pods are left\n"
        );
        assert_eq!(ended.stderr, said);
        assert_eq!(cluster.asked(), ["Drain 300 false", "Reboot"]);
    }

    #[test]
    fn a_wait_names_its_cause_and_its_time() {
        let drain = Drain { drain_timeout: Duration::from_secs(300), force: false };
        let two = report(State::Draining, 2, "shop/web: the budget web");
        assert_eq!(
            line("web-1", drain, &two),
            "draining web-1, 1 min 5 s of 5 min 0 s: waits for shop/web: the budget web; 2 pods \
             are left"
        );
    }
}
