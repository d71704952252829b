//! Clocks of a network without a server outside: chronyd of the image, with the configuration
//! that nodes give it, in simulated time. An hour takes a second.
//!
//! ```text
//! oscillator, fast or slow --> clock of the kernel <-- adjtimex -- chronyd <-- NTP --> the others
//! `------------ drift.c, preloaded into each chronyd ------------'
//! ```
//!
//! Each process tells the simulation until when it waits. Time stands still until all wait and no
//! packet is on its way; then it jumps to the first deadline. So the load of this host changes
//! nothing, and what is measured is the true difference of the clocks, not what chronyd takes for
//! it. Packets are real ones, on the loopback device; each takes 0.1 to 0.6 ms.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use polis_base::sys::clock;
use polis_machine::network::names::Peers;
use polis_machine::parameters::NtpServer;
use polis_machine::time::{Asked, Known, PORT, Plan};
use polis_proto::v1;
use polis_tests::{Story, skip, story};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};
use polis_wire::rpc::testing::node_id;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(clocks_of_a_closed_network_agree_within_ten_milliseconds_over_an_hour)];

/// The nodes, by how much faster their oscillators are than true time, in millionths. The last
/// one does not vote. The voters with the smallest address, the fastest clock, leads.
const FASTER: [i64; 4] = [50, -50, 0, -50];
const VOTERS: usize = 3;

/// Until the clocks are near each other.
const SETTLED: Duration = Duration::from_secs(300);
const HOUR: Duration = Duration::from_secs(3600);
/// How far clocks may be apart, in seconds.
const APART_MAX: f64 = 0.010;
/// The longest step of the simulation. Between two, no clock changes how fast it runs.
const STEP: Duration = Duration::from_secs(10);

/// A port that needs no root.
const FREE: u16 = 11123;
/// A port at which nothing listens.
const SILENT: u16 = FREE + 1;
/// How long a process may compute: far longer than it ever does.
const PATIENCE: Duration = Duration::from_secs(60);

/// The sources of time beside the voters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    /// The voters do not answer: each clock runs by itself.
    Apart,
    /// There are none.
    Closed,
    /// There is a server with Network Time Security, which does not answer.
    ClosedWithNts,
}

fn clocks_of_a_closed_network_agree_within_ten_milliseconds_over_an_hour() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let preloaded = dir.path().join("drift.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("etcd/drift.c");
    #[expect(clippy::disallowed_methods, reason = "a story on the host may start a compiler")]
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-fno-stack-protector", "-o"]);
    match compiler.arg(&preloaded).arg(source).status() {
        Ok(status) => ensure!(status.success(), "drift.c does not compile: {status}"),
        Err(error) => return skip(&format!("no C compiler here: {error}")),
    }
    // The simulation can fail: an hour without any source is seen.
    let mut apart = Simulation::begin(dir.path(), &preloaded, Network::Apart)?;
    let drifted = apart.until(HOUR)?;
    ensure!((0.35..0.37).contains(&drifted), "{drifted} s apart after an hour of 100 ppm");
    for network in [Network::Closed, Network::ClosedWithNts] {
        let mut simulation = Simulation::begin(dir.path(), &preloaded, network)?;
        let first = 1e3 * simulation.until(SETTLED)?;
        let worst = simulation.until(SETTLED + HOUR)?;
        println!("{network:?}: {first:.3} ms apart at first, {:.3} ms in the hour", 1e3 * worst);
        ensure!(worst < APART_MAX, "{network:?}: clocks were {worst} s apart");
        let rates = simulation.processes.iter().map(|process| process.waiting.rate);
        let (low, high) = span(rates);
        ensure!(high - low < 5e-6, "{network:?}: clocks do not run alike: {low} {high}");
    }
    Ok(())
}

/// The message of a process that waits: `struct waiting` of `drift.c`.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Nanoseconds since the beginning: until when it waits, and its time now.
    deadline: u64,
    now: u64,
    /// Whether it did something since it was told the time.
    ran: bool,
    /// Seconds that its clock is ahead of true time, and by which that grows in a second.
    error: f64,
    rate: f64,
}

impl Waiting {
    /// The bytes of the message.
    const LENGTH: usize = 40;

    fn read(bytes: [u8; Self::LENGTH]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..8 * at + 8]);
            u64::from_ne_bytes(word)
        };
        let real = |at| f64::from_bits(word(at));
        Self { deadline: word(0), now: word(1), ran: word(2) != 0, error: real(3), rate: real(4) }
    }

    /// Seconds that its clock is ahead of true time at `at`.
    fn ahead(&self, at: u64) -> f64 {
        let since = Duration::from_nanos(at.saturating_sub(self.now));
        self.error + since.as_secs_f64() * self.rate
    }
}

/// A chronyd, which waits.
struct Process {
    child: Child,
    line: UnixStream,
    waiting: Waiting,
}

impl Process {
    /// Tells it the time, and waits until it waits again.
    fn tell(&mut self, now: u64) -> Result<()> {
        self.line.write_all(&now.to_ne_bytes())?;
        self.hear()
    }

    fn hear(&mut self) -> Result<()> {
        let mut bytes = [0; Waiting::LENGTH];
        self.line.read_exact(&mut bytes).context("a chronyd has ended, or computes for ever")?;
        self.waiting = Waiting::read(bytes);
        Ok(())
    }
}

impl Drop for Process {
    /// It ends where it cannot tell that it waits.
    fn drop(&mut self) {
        let _gone = self.line.shutdown(Shutdown::Both);
        let _ended = self.child.wait();
    }
}

/// Some chronyd, in one time.
struct Simulation {
    processes: Vec<Process>,
    now: u64,
}

impl Simulation {
    fn begin(dir: &Path, preloaded: &Path, network: Network) -> Result<Self> {
        let dir = dir.join(format!("{network:?}"));
        // chronyd refuses a directory that others may enter.
        fs::DirBuilder::new().mode(0o700).create(&dir)?;
        let socket = dir.join("simulation.sock");
        let listener = UnixListener::bind(&socket)?;
        let base = clock::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let mut processes = Vec::new();
        for (number, faster) in FASTER.into_iter().enumerate() {
            let file = dir.join(format!("{number}.conf"));
            fs::write(&file, configuration(number, network, &dir))?;
            let mut command = chronyd(preloaded)?;
            command.arg(&file).env_clear().stdin(Stdio::null());
            command.env("POLIS_SIM_SOCKET", &socket).env("POLIS_SIM_NUMBER", number.to_string());
            command.env("POLIS_SIM_BASE", base.to_string());
            // In billionths, and never negative.
            command.env("POLIS_SIM_PPB", (1_000_000 + 1000 * faster).to_string());
            // Its words are those of the story.
            let child = command.spawn().context("chronyd does not start")?;
            let (line, _from) = listener.accept()?;
            line.set_read_timeout(Some(PATIENCE))?;
            let waiting = Waiting::read([0; Waiting::LENGTH]);
            let mut process = Process { child, line, waiting };
            process.hear()?;
            processes.push(process);
        }
        Ok(Self { processes, now: 0 })
    }

    /// Lets time pass until `end`; returns how far clocks were apart at most, in seconds.
    fn until(&mut self, end: Duration) -> Result<f64> {
        let (end, step) = (nanos(end), nanos(STEP));
        let mut worst: f64 = 0.0;
        while self.now < end {
            self.run()?;
            let ahead = self.processes.iter().map(|process| process.waiting.ahead(self.now));
            let (low, high) = span(ahead);
            worst = worst.max(high - low);
            let deadlines = self.processes.iter().map(|process| process.waiting.deadline);
            let first = deadlines.min().unwrap_or(end).min(self.now + step);
            self.now = self.now.max(first);
        }
        Ok(worst)
    }

    /// Lets each process do what there is to do, until none has anything left.
    fn run(&mut self) -> Result<()> {
        loop {
            let mut ran = false;
            for process in &mut self.processes {
                process.tell(self.now)?;
                ran |= process.waiting.ran;
                // A packet that it sent arrives later.
                self.now = self.now.max(process.waiting.now);
            }
            if !ran {
                return Ok(());
            }
        }
    }
}

/// chronyd of the image, with the C library of the image.
fn chronyd(preloaded: &Path) -> Result<Command> {
    let etcd = crate::harness::etcd();
    let root = etcd.ancestors().nth(3).context("etcd is not in a system")?;
    #[expect(clippy::disallowed_methods, reason = "a story on the host may start a program")]
    let mut command = Command::new(root.join("lib64/ld-linux-x86-64.so.2"));
    let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
    let libraries = libraries.map(|dir| root.join(dir).display().to_string()).join(":");
    command.args(["--library-path", &libraries]).arg("--preload").arg(preloaded);
    command.arg(root.join("usr/sbin/chronyd"));
    // It serves a port that needs no root, and keeps the user.
    command.args(["-d", "-U", "-u", "root", "-f"]);
    Ok(command)
}

/// The configuration that a node writes, with addresses and ports of this host.
fn configuration(number: usize, network: Network, dir: &Path) -> String {
    let own = id(number);
    let nodes = nodes();
    let nts = [NtpServer { host: address(FASTER.len()).to_string(), nts: true }];
    let peers = Peers::new();
    let plan = Plan::new(&Known {
        own: Some(own),
        roles: nodes.get(&own).and_then(|node| node.roles.as_ref()),
        nodes: Some(&nodes),
        peers: &peers,
        cluster: if network == Network::ClosedWithNts { &nts } else { &[] },
        network: &[],
        asked: Asked::Yes,
    });
    let address = address(number);
    let mut text = format!("bindaddress {address}\nbindacqaddress {address}\n");
    for line in plan.configuration(&dir.join(format!("{number}.sock"))).lines() {
        let voter = line.starts_with("server ") && !line.contains(" nts");
        let port = match voter {
            true if network == Network::Apart => format!(" port {SILENT}"),
            true => format!(" port {FREE}"),
            false => String::new(),
        };
        text += &line.replace(&format!("port {PORT}"), &format!("port {FREE}"));
        text += &format!("{port}\n");
    }
    text
}

fn nodes() -> Nodes {
    let node = |number: usize| {
        let roles: &[Role] = if number < VOTERS { &[Role::ConsensusMember] } else { &[] };
        let status = v1::NodeStatus {
            external_address: address(number).to_string(),
            ..v1::NodeStatus::default()
        };
        v1::NodeInfo {
            state: v1::NodeState::Up.into(),
            roles: Some(Role::record(roles)),
            status: Some(status),
            ..v1::NodeInfo::default()
        }
    };
    (0..FASTER.len()).map(|number| (id(number), node(number))).collect()
}

fn id(number: usize) -> NodeId {
    node_id(u8::try_from(number).unwrap())
}

/// A loopback address that no other story uses, as those of the harness.
fn address(number: usize) -> Ipv4Addr {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high, low, u8::try_from(number).unwrap() + 1)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap()
}

/// The smallest and the largest.
fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let ends = (f64::INFINITY, f64::NEG_INFINITY);
    values.fold(ends, |(low, high), value| (low.min(value), high.max(value)))
}
