//! A fleet: a cluster of several machines on one segment.
//!
//! ```text
//!             boot        ready, ownership       parameters     approve, roles
//! machine 0 ------> founds ---------------+------------------------------------> voter
//! machine 1                               +--> boot --> asks to be let in -----> voter
//! machine 2                               +--> boot --> asks to be let in -----> voter
//!                                              (side by side)
//! ```
//!
//! Nodes count from 0; their folders, and all names that people see, count from 1.
//!
//! Invariants:
//! - Each step waits for a line on the node's own serial port, never for a length of
//!   time.
//! - A node is approved only with the fingerprint that its own machine showed.
//!
//! What this module does not do: make disks, or configure machines. It plugs each in,
//! and gives parameters to those that register.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::args::{Config, FwCfg, Link};
use crate::deadline::Deadline;
use crate::host::free_port;
use crate::line::Event;
use crate::machine::{Error, Machine};
use crate::operator::{CURATOR, Operator, PortForward};
use crate::plug::Port;
use crate::segment::Segment;
use crate::template;

/// The ports of a node that the host reaches: curator, management, metrics, and the
/// Kubernetes API for people.
const PORTS: [u16; 4] = [CURATOR, 7839, 7840, 6444];

/// The item of fw_cfg in which a node looks for its parameters.
pub const PARAMETERS: &str = "opt/polis/parameters.pb";

/// Between two questions for a leader.
const LOOK: Duration = Duration::from_millis(300);

/// The text before the fingerprint in the waiting message of a registering node.
const SHOWN: &str = "fingerprint is ";

/// An event of a node, with its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Milestone {
    /// Which node, from 0.
    pub node: usize,
    /// The name of the event.
    pub what: &'static str,
    /// Since the fleet began.
    pub at: Duration,
}

/// The part that a node plays in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A member that votes in etcd.
    Voter,
    /// A member without a part in consensus.
    Worker,
}

/// One machine of the cluster.
#[derive(Debug)]
pub struct Node {
    /// The machine's configuration.
    pub config: Config,
    /// Its address, at every boot until [`Fleet::renumber`].
    pub address: IpAddr,
    /// Its ID, once it has reported it.
    pub id: String,
    /// Off, or on.
    pub machine: Option<Machine>,
    /// The ports through which the host reaches it.
    pub forwards: Vec<PortForward>,
    dir: PathBuf,
}

/// The machines, their segment, and their operator.
#[derive(Debug)]
pub struct Fleet {
    /// Each is at the port of its number.
    pub nodes: Vec<Node>,
    /// The segment that joins them.
    pub segment: Segment,
    /// The owner of the cluster.
    pub operator: Operator,
    /// Longest that any single step may take.
    pub patience: Duration,
    key: PathBuf,
    diary: Diary,
    hand: Hand,
}

/// Puts the parameters in this file where the machine, which is off, looks for them.
pub type Hand = fn(&mut Config, &Path) -> std::io::Result<()>;

/// Parameters as an item of fw_cfg.
fn by_fw_cfg(config: &mut Config, file: &Path) -> std::io::Result<()> {
    config.fw_cfg.retain(|item| item.name != PARAMETERS);
    config.fw_cfg.push(FwCfg { name: PARAMETERS.to_owned(), file: file.to_owned() });
    Ok(())
}

/// The events so far, with their times.
#[derive(Debug)]
struct Diary {
    began: Instant,
    milestones: Mutex<Vec<Milestone>>,
    report: fn(&Milestone),
}

impl Diary {
    fn reached(&self, node: usize, what: &'static str) {
        let milestone = Milestone { node, what, at: self.began.elapsed() };
        (self.report)(&milestone);
        if let Ok(mut all) = self.milestones.lock() {
            all.push(milestone);
        }
    }
}

impl Fleet {
    /// Plugs in a machine for each of `configs`; all are off. Their logs go to
    /// the folders `1`, `2`, ... of `dir`. `key` is the owner's.
    ///
    /// # Errors
    /// When the segment cannot be made, or a port cannot be forwarded.
    pub fn new(
        dir: &Path,
        configs: Vec<Config>,
        operator: Operator,
        key: &Path,
    ) -> Result<Self, Error> {
        Self::on(dir, configs, operator, key, |_segment| ())
    }

    /// The same on a segment with IPv6 only.
    ///
    /// # Errors
    /// As [`Fleet::new`].
    pub fn with_ipv6_only(
        dir: &Path,
        configs: Vec<Config>,
        operator: Operator,
        key: &Path,
    ) -> Result<Self, Error> {
        Self::on(dir, configs, operator, key, Segment::only_ipv6)
    }

    /// The same with addresses by DHCPv6.
    ///
    /// # Errors
    /// As [`Fleet::new`].
    pub fn with_dhcpv6(
        dir: &Path,
        configs: Vec<Config>,
        operator: Operator,
        key: &Path,
    ) -> Result<Self, Error> {
        Self::on(dir, configs, operator, key, Segment::only_dhcpv6)
    }

    fn on(
        dir: &Path,
        configs: Vec<Config>,
        operator: Operator,
        key: &Path,
        prepare: fn(&Segment),
    ) -> Result<Self, Error> {
        let host = |doing: &str| {
            let doing = doing.to_owned();
            move |source| Error::Host { doing, source }
        };
        let machines = u8::try_from(configs.len())
            .map_err(|_many| std::io::ErrorKind::InvalidInput.into())
            .map_err(host("join so many machines"))?;
        let mut segment = Segment::start(machines, &dir.join("network"))?;
        prepare(&segment);
        let mut nodes = Vec::new();
        for (number, config) in (0..machines).zip(configs) {
            let address = segment.address(number);
            let mut forwards = Vec::new();
            for port in PORTS {
                let host = free_port().map_err(host("find a free port"))?;
                segment.forward(host, address, port)?;
                forwards.push(PortForward { address, port, host });
            }
            nodes.push(Node {
                config: Config { link: Link::Segment(segment.plug(number)), ..config },
                address,
                id: String::new(),
                machine: None,
                forwards,
                dir: dir.join((number + 1).to_string()),
            });
        }
        let forwards: Vec<PortForward> =
            nodes.iter().flat_map(|node| node.forwards.clone()).collect();
        operator.equip(key, &forwards)?;
        Ok(Self {
            nodes,
            segment,
            operator,
            patience: Duration::from_secs(300),
            key: key.to_owned(),
            diary: Diary {
                began: Instant::now(),
                milestones: Mutex::default(),
                report: |_milestone| (),
            },
            hand: by_fw_cfg,
        })
    }

    /// Gives machines their parameters in another way than by fw_cfg: one that was saved in
    /// stage 1 does not look there.
    #[must_use]
    pub fn handing(mut self, hand: Hand) -> Self {
        self.hand = hand;
        self
    }

    /// Reports each milestone when it is reached.
    #[must_use]
    pub fn reporting(mut self, report: fn(&Milestone)) -> Self {
        self.diary.report = report;
        self
    }

    /// The events so far, in order.
    #[must_use]
    pub fn milestones(&self) -> Vec<Milestone> {
        let mut all = self.diary.milestones.lock().map(|all| all.clone()).unwrap_or_default();
        all.sort_by_key(|milestone| milestone.at);
        all
    }

    /// Waits until node 0, which is on and has founded the cluster in an earlier run,
    /// is ready; takes ownership if that run did not get so far.
    ///
    /// # Errors
    /// When the node does not become ready.
    pub fn own_again(&mut self) -> Result<Event, Error> {
        self.owned("became ready")
    }

    /// Boots node 0, whose parameters found a cluster, and takes ownership of it.
    ///
    /// # Errors
    /// When the node does not become ready.
    pub fn found(&mut self) -> Result<Event, Error> {
        self.boot(0)?;
        self.own()
    }

    /// The second half of [`Fleet::found`], for a machine that is on.
    ///
    /// # Errors
    /// When the node does not become ready.
    pub fn own(&mut self) -> Result<Event, Error> {
        self.owned("founded the cluster")
    }

    fn owned(&mut self, how: &'static str) -> Result<Event, Error> {
        let patience = self.patience;
        let ready = self.machine(0)?.wait_for("ready", patience, |_| true)?;
        ready.text("node").clone_into(&mut self.nodes[0].id);
        self.diary.reached(0, how);
        self.operator.run(&[
            "--timeout",
            "2m",
            "cluster",
            "take-ownership",
            "--fingerprint",
            ready.text("ca"),
        ])?;
        self.diary.reached(0, "has an owner");
        Ok(ready)
    }

    /// Boots these nodes with a ticket, side by side, approves them, and gives each its
    /// part.
    ///
    /// # Errors
    /// Those of the first node that fails.
    pub fn admit(&mut self, parts: &[(usize, Part)]) -> Result<(), Error> {
        for &(number, _) in parts {
            self.give_ticket(number)?;
            self.boot(number)?;
        }
        self.let_in(parts)
    }

    /// Writes parameters for a node that will ask for admission.
    ///
    /// # Errors
    /// When the cluster does not issue a ticket.
    pub fn give_ticket(&mut self, number: usize) -> Result<(), Error> {
        self.give_ticket_with(number, &[])
    }

    /// The same, with more options of `polisctl parameters register`.
    ///
    /// # Errors
    /// As [`Fleet::give_ticket`], and when an option is not accepted.
    pub fn give_ticket_with(&mut self, number: usize, options: &[&str]) -> Result<(), Error> {
        let host = |doing: String| move |source| Error::Host { doing, source };
        let node = &mut self.nodes[number];
        std::fs::create_dir_all(&node.dir).map_err(host(format!("make {}", node.dir.display())))?;
        let file = node.dir.join("parameters.pb");
        let out = file.display().to_string();
        // As their folders are called. A name that a former node has is left to that.
        let name = format!("node-{}", number + 1);
        let line = ["--timeout", "2m", "parameters", "register", "--name", &name, "--out", &out];
        self.operator.run(&[&line[..], options].concat())?;
        (self.hand)(&mut node.config, &file)
            .map_err(host(format!("give {} to the machine", file.display())))
    }

    /// Approves those of these nodes, all of them on, that ask; waits until each has
    /// its part.
    ///
    /// # Errors
    /// Those of the first node that fails.
    pub fn let_in(&mut self, parts: &[(usize, Part)]) -> Result<(), Error> {
        let mut nodes = std::mem::take(&mut self.nodes);
        let (operator, diary, patience) = (&self.operator, &self.diary, self.patience);
        let outcomes: Vec<Result<(), Error>> = thread::scope(|scope| {
            let nodes = nodes.iter_mut().enumerate().filter_map(|(number, node)| {
                let part = parts.iter().find(|(wanted, _)| *wanted == number)?.1;
                Some((number, part, node))
            });
            let threads: Vec<_> = nodes
                .map(|(number, part, node)| {
                    let reached = move |what| diary.reached(number, what);
                    scope.spawn(move || node.enter(operator, part, patience, &reached))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or(Err(Error::Panicked)))
                .collect()
        });
        self.nodes = nodes;
        outcomes.into_iter().collect()
    }

    /// Switches a machine on. Its log is appended to.
    ///
    /// # Errors
    /// When QEMU does not start.
    pub fn boot(&mut self, number: usize) -> Result<(), Error> {
        let node = &mut self.nodes[number];
        // Before the new one opens the same disk.
        node.machine = None;
        node.machine = Some(template::start(&node.config, &node.dir)?);
        Ok(())
    }

    /// Switches a machine on that is a member already, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn boot_again(&mut self, number: usize) -> Result<Event, Error> {
        self.boot(number)?;
        let patience = self.patience;
        self.machine(number)?.wait_for("ready", patience, |_| true)
    }

    /// Cuts a machine's power.
    pub fn cut_power(&mut self, number: usize) {
        if let Some(machine) = self.nodes[number].machine.take() {
            machine.kill();
        }
    }

    /// Gives every node another address, while all machines are off.
    ///
    /// # Errors
    /// As [`Segment::renumber`], or when a port cannot be forwarded.
    pub fn renumber(&mut self) -> Result<(), Error> {
        self.segment.renumber()?;
        for (number, node) in (0..).zip(&mut self.nodes) {
            node.address = self.segment.address(number);
            for forward in &mut node.forwards {
                forward.address = node.address;
                self.segment.forward(forward.host, forward.address, forward.port)?;
            }
        }
        let forwards = self.nodes.iter().flat_map(|node| node.forwards.clone());
        self.operator.equip(&self.key, &forwards.collect::<Vec<PortForward>>())
    }

    /// The machine of a node that is on.
    ///
    /// # Errors
    /// When it is off.
    pub fn machine(&mut self, number: usize) -> Result<&mut Machine, Error> {
        self.nodes[number].machine.as_mut().ok_or(Error::IsOff { number: number + 1 })
    }

    /// Where a node is plugged in.
    #[must_use]
    pub fn port(number: usize) -> Port {
        Port::Machine(u8::try_from(number).unwrap_or(u8::MAX))
    }

    /// The node whose member of etcd leads, as the cluster reports now, or once it reports
    /// one: no member leads during an election, and on a busy host an election may come at
    /// any moment.
    ///
    /// # Errors
    /// When the cluster does not answer, or reports no leader that is a node of this fleet.
    #[expect(clippy::disallowed_methods, reason = "the rule is for the node; this is the host")]
    pub fn etcd_leader(&self) -> Result<usize, Error> {
        let mut deadline = Deadline::within(self.patience);
        loop {
            let members = self.operator.document(&["--timeout", "2m", "etcd", "members"])?;
            let leader = members
                .as_array()
                .and_then(|members| members.iter().find(|member| member["leader"] == true))
                .and_then(|member| member["node_id"].as_str());
            let number = self.nodes.iter().position(|node| Some(node.id.as_str()) == leader);
            if let Some(number) = number {
                return Ok(number);
            }
            if deadline.is_over() {
                return Err(Error::Operator {
                    command: "etcd members".to_owned(),
                    status: "no leader of this fleet".to_owned(),
                    output: members.to_string(),
                });
            }
            thread::sleep(LOOK);
        }
    }

    /// Waits until `nodes` nodes are up and healthy and every voter answers.
    ///
    /// # Errors
    /// When the deadline passes first.
    pub fn wait_whole(&self, nodes: usize) -> Result<(), Error> {
        let timeout = format!("{}s", self.patience.as_secs());
        let nodes = nodes.to_string();
        self.operator.run(&["--timeout", &timeout, "cluster", "wait", "--nodes", &nodes]).map(drop)
    }
}

impl Node {
    /// Follows a machine from its boot until it has its part.
    fn enter(
        &mut self,
        operator: &Operator,
        part: Part,
        patience: Duration,
        reached: &dyn Fn(&'static str),
    ) -> Result<(), Error> {
        let machine = self.machine.as_mut().ok_or(Error::IsOff { number: 0 })?;
        let what = "the fingerprint of a node that waits for approval, or `POLIS ready`";
        let is_ready = machine.seen(|event| event.word == "ready").pop().map(Asks::Ready);
        let asks = match is_ready {
            Some(ready) => ready,
            None => machine.wait(what, patience, |line| asks(&line.event()?))?,
        };
        let ready = match asks {
            Asks::Ready(ready) => ready,
            Asks::Approval(words) => {
                let foreign = machine.seen(|event| event.is("state", "foreign"));
                let id = foreign.last().map(|event| event.text("node").to_owned());
                let id = id.unwrap_or_default();
                reached("asked for approval");
                let approve = ["node", "approve", &id, "--fingerprint", &words];
                operator.run(&[&["--timeout", "2m"][..], &approve].concat())?;
                reached("was approved");
                machine.wait_for("ready", patience, |_| true)?
            }
        };
        ready.text("node").clone_into(&mut self.id);
        reached("is a member");
        let votes = |event: &Event| event.word == "etcd" && event.is("state", "voter");
        if part == Part::Worker || !machine.seen(votes).is_empty() {
            return Ok(());
        }
        let roles = ["node", "roles", &self.id, "--add", "consensus-member"];
        operator.run(&[&["--timeout", "2m"][..], &roles].concat())?;
        reached("has its role");
        // A node with little to learn may vote before it has reported that it learns.
        let member = |etcd: &Event| etcd.is("state", "learner") || etcd.is("state", "voter");
        let first = machine.wait_for("etcd", patience, member)?;
        if first.is("state", "learner") {
            reached("learns");
            machine.wait_for("etcd", patience, |etcd| etcd.is("state", "voter"))?;
        }
        reached("votes");
        Ok(())
    }
}

/// The action that a booting node requires from a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asks {
    /// Compare this fingerprint.
    Approval(String),
    /// Nothing: it is a member.
    Ready(Event),
}

/// The action that the node requires with this event, if any.
#[must_use]
pub fn asks(event: &Event) -> Option<Asks> {
    if event.word == "ready" {
        return Some(Asks::Ready(event.clone()));
    }
    let waits = event.word == "stage" && event.is("name", "cluster");
    let (_before, shown) = event.get("for").filter(|_| waits)?.split_once(SHOWN)?;
    let words = shown.split(';').next()?.trim();
    Some(Asks::Approval(words.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> Event {
        Event::parse(text, Duration::ZERO).unwrap()
    }

    #[test]
    fn the_fingerprint_is_read_from_what_the_node_waits_for() {
        let waits = event(
            r#"POLIS stage name=cluster state=waiting for="an operator who approves this node: its fingerprint is able acid aged also; compare it" t=9.0"#,
        );
        assert_eq!(asks(&waits), Some(Asks::Approval("able acid aged also".to_owned())));
        let other = event(r#"POLIS stage name=network state=waiting for="a carrier" t=1"#);
        assert_eq!(asks(&other), None);
    }

    #[test]
    fn a_member_asks_for_nothing() {
        let ready = event("POLIS ready node=polis-01 roles= address=10.0.2.16 t=9");
        assert_eq!(asks(&ready), Some(Asks::Ready(ready.clone())));
    }
}
