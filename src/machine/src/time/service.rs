//! The service: keeps a chronyd that fits the plan, and reports what it says.
//!
//! ```text
//! [idle] --a plan--> [running] --another plan, settled and due--> [running]
//!    ^                  | a second without sources --> [idle]
//!    |                  | chronyd ends, or is silent --> the run ends, and the next begins
//! ```
//!
//! chronyd starts as root, binds its port, and then is the user `_chrony` with the right to set
//! the clock and no other, behind a filter of system calls of its own. It is confined from its
//! start on, so as root, too, it has no more rights than that takes, and no other files.
//!
//! The addresses of other nodes are in the plan, so a node that changes its own again and again
//! changes the plans of all others.
//!
//! Invariants:
//! - Other plans end at most [`ENDS_MAX`] chronyds in a row, and then one each [`PACE`].
//! - The last plan is the one that stays, whenever it came.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info, warn};

use super::kept::{self, Keeper};
use super::plan::{Asked, Known, Plan};
use super::tracking::{Asker, Silence};
use super::{Ahead, State, Status};
use crate::network::{self, names::Peers};
use crate::parameters::NtpServer;
use crate::storage;
use polis_base::files::{self, Dir, File};
use polis_base::sys::clock;
use polis_base::users;
use polis_runtime::event::{Closed, until};
use polis_runtime::logtree::Parser;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::confine::{CapabilitySet, Confinement};
use polis_runtime::sys::process::{self, Child, Command};
use polis_wire::identity::Identity;
use polis_wire::node_roles::Nodes;

/// The filter of system calls that kills chronyd at the first one that is not in it.
const FILTER: &str = "1";

/// Between two questions to chronyd: short beside the intervals at which it measures.
const ASK: Duration = Duration::from_secs(5);
/// Answers that may fail in a row: chronyd waits for a resolver at most.
const SILENCE_MAX: u32 = 6;
/// How long a new plan must stand: at a boot, one input after the other arrives.
const SETTLE: Duration = Duration::from_secs(2);
/// Ends of chronyd for other plans in a row: more than the nodes of a new cluster cause while they
/// enter one after the other.
const ENDS_MAX: u32 = 8;
/// Between two of them afterwards: long enough for a chronyd to ask its sources for [`FIRST`].
const PACE: Duration = Duration::from_secs(60);
/// How long sources are asked after a start before their silence counts: a burst of four
/// questions takes eight seconds.
const FIRST: Duration = Duration::from_secs(30);
/// chronyd ends at once when it is asked to.
const GRACE: Duration = Duration::from_secs(2);

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// chronyd.
    pub binary: PathBuf,
    /// Its configuration.
    pub configuration: File,
    /// The directory of its socket.
    pub sockets: Dir,
    /// The clock stood before the date of the image when the node started.
    pub stood: bool,
}

impl Config {
    /// The clock of a running node.
    #[must_use]
    pub fn live(tree: &files::Root, raised: &Status) -> Self {
        Self {
            stood: raised.state == State::Floor,
            binary: PathBuf::from("/usr/sbin/chronyd"),
            configuration: tree.ephemeral.chrony.clone(),
            sockets: tree.ephemeral.time.clone(),
        }
    }

    fn socket(&self) -> PathBuf {
        self.sockets.path().join("chronyd.sock")
    }

    /// The rights of chronyd: it may change its user, serve the port of NTP, set the clock.
    fn confinement(&self) -> Confinement {
        Confinement::new()
            .keeps(CapabilitySet::SETUID | CapabilitySet::SETGID)
            .keeps(CapabilitySet::NET_BIND_SERVICE | CapabilitySet::SYS_TIME)
            .sets_clock()
            .reads(self.configuration.path())
            .writes(self.sockets.path())
    }
}

/// The values that it reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The identity of this node.
    pub identity: watch::Receiver<Option<Identity>>,
    /// The servers of parameters and DHCP.
    pub network: watch::Receiver<network::Status>,
    /// The roles that the cluster gives to this node.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The members and their addresses.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// The nodes of the last boot, and those that were found on the segment.
    pub peers: watch::Receiver<Peers>,
    /// The servers in the cluster's configuration.
    pub servers: watch::Receiver<Vec<NtpServer>>,
    /// The data partition, which has the last known time.
    pub storage: watch::Receiver<storage::Status>,
}

impl Inputs {
    fn plan(&self, asked: Asked) -> Plan {
        let nodes = self.nodes.borrow().clone();
        Plan::new(&Known {
            own: self.identity.borrow().as_ref().map(|own| own.id),
            roles: self.roles.borrow().as_ref(),
            nodes: nodes.as_deref(),
            peers: &self.peers.borrow(),
            cluster: &self.servers.borrow(),
            network: &self.network.borrow().ntp_servers,
            asked,
        })
    }

    /// Waits for a change of any of them. Cancel-safe: waits for event values.
    async fn changed(&mut self) -> Result<(), Closed> {
        let (changed, name) = tokio::select! {
            changed = self.identity.changed() => (changed, "the identity"),
            changed = self.network.changed() => (changed, "the network"),
            changed = self.roles.changed() => (changed, "the roles"),
            changed = self.nodes.changed() => (changed, "the nodes"),
            changed = self.peers.changed() => (changed, "the addresses of nodes"),
            changed = self.servers.changed() => (changed, "the cluster's time servers"),
            changed = self.storage.changed() => (changed, "storage"),
        };
        changed.map_err(|_closed| Closed(name))
    }
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be written.
    #[error(transparent)]
    Files(#[from] files::Error),
    /// chronyd does not run.
    #[error(transparent)]
    Process(#[from] process::Error),
    /// It runs and does not answer.
    #[error("chronyd has not answered {SILENCE_MAX} times in a row")]
    Silent(#[source] Silence),
    /// The owner of an input ended.
    #[error(transparent)]
    Lost(#[from] Closed),
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The values that it reads.
    pub inputs: Inputs,
    /// The published status, which [`super::raise`] has begun.
    pub status: watch::Sender<Status>,
    /// The lead of this clock over each source that answers.
    pub ahead: watch::Sender<Ahead>,
}

/// Why one chronyd gives way to the next.
enum Next {
    /// The node ends.
    Stop,
    /// The inputs make another plan, or have the last known time for this clock.
    Plan,
    /// The other voters have been asked.
    Asked,
}

impl Service {
    /// Keeps the clock until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`]; a restart begins with what is known then.
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        ctx.lines().event(self.status.borrow().line());
        ctx.healthy();
        let (mut asked, mut keeper) = (Asked::Not, Keeper::default());
        let mut ends = Ends::new();
        let mut read = !self.config.stood;
        loop {
            // No chronyd runs here, which would take it for an error of the clock.
            if !read && let Some(file) = kept::wanted(&self.status, &self.inputs.storage) {
                read = true;
                if let Some(raised) = kept::raise(file, clock::set).await {
                    self.publish(&ctx, |_before| raised);
                }
            }
            let plan = self.inputs.plan(asked);
            if plan.lends() {
                // Another voter that comes is the one that asks.
                asked = Asked::Yes;
            }
            let next = if plan.is_empty() {
                self.publish(&ctx, Status::without_source);
                match ctx.until_cancelled(self.inputs.changed()).await {
                    None => Next::Stop,
                    Some(changed) => changed.map(|()| Next::Plan)?,
                }
            } else {
                Box::pin(self.serve(&ctx, &plan, (asked, read), &mut keeper, &mut ends)).await?
            };
            match next {
                Next::Stop => return Ok(()),
                Next::Plan => {}
                Next::Asked => asked = Asked::Yes,
            }
        }
    }

    /// Runs a chronyd for this plan, until another one is needed.
    /// `read`: the last known time was read.
    async fn serve(
        &mut self,
        ctx: &Context,
        plan: &Plan,
        (asked, read): (Asked, bool),
        keeper: &mut Keeper,
        ends: &mut Ends,
    ) -> Result<Next, Error> {
        let text = plan.configuration(&self.config.socket());
        self.config.configuration.save(text.into_bytes()).await?;
        let sockets = self.config.sockets.clone();
        // It refuses a directory of another user.
        blocking(move || sockets.create().and_then(|()| sockets.give(users::CHRONY))).await?;
        let mut child = Command::new(&self.config.binary)
            .confined(self.config.confinement())
            .args(["-d", "-F", FILTER, "-u", users::CHRONY.name, "-f"])
            .arg(self.config.configuration.path())
            .log(ctx.sink("chronyd", Parser::Raw))
            .spawn()
            .await?;
        debug!(?plan, "chronyd has new sources of time");
        let mut inputs = self.inputs.clone();
        let next = tokio::select! {
            // Cancel-safe, all of them: the work that they leave is ended below.
            () = ctx.cancelled() => Ok(Next::Stop),
            exit = child.wait() => Err(child.failed(exit?).into()),
            next = self.watch(ctx, plan, read, keeper) => next,
            other = another(&mut inputs, plan, asked, ends) => Ok(other.map(|()| Next::Plan)?),
            opened = self.opened(), if !read => Ok(opened.map(|()| Next::Plan)?),
        };
        if matches!(next, Ok(Next::Stop)) {
            keeper.keep(&self.inputs.storage).await;
        }
        end(&mut child).await?;
        // The measurements end with chronyd.
        self.ahead.send_replace(Ahead::default());
        next
    }

    /// Waits until the last known time can be read, where the clock wants it.
    async fn opened(&self) -> Result<(), Closed> {
        let mut storage = self.inputs.storage.clone();
        until(&mut storage, "storage", |storage| storage.ready().map(|_ready| ())).await?;
        if kept::wanted(&self.status, &self.inputs.storage).is_none() {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    /// Asks chronyd again and again. Ends with an error, or once the other voters have been
    /// asked.
    async fn watch(
        &self,
        ctx: &Context,
        plan: &Plan,
        read: bool,
        keeper: &mut Keeper,
    ) -> Result<Next, Error> {
        let mut began = Instant::now();
        let (mut asker, mut silent) = (None, 0);
        loop {
            sleep(ASK).await;
            match self.ask(&mut asker).await {
                Ok(state) => {
                    silent = 0;
                    let follows = matches!(state.state, State::Cluster | State::Synced);
                    // Until its first measurements, a fresh chronyd follows nothing. It has none
                    // without an address, and none of voters that only the next one asks.
                    let has_others =
                        plan.is_asking() && !plan.has_voters_of(&self.inputs.plan(Asked::Not));
                    if has_others || self.inputs.network.borrow().primary.is_none() {
                        began = Instant::now();
                    }
                    if follows || began.elapsed() >= FIRST {
                        self.publish(ctx, |_before| state);
                        let confirmed = kept::is_confirmed(&state, &self.ahead.borrow().clone());
                        // What the voters agree on must not replace a later time unread.
                        if read || state.state == State::Synced {
                            keeper.note(&self.inputs.storage, confirmed).await;
                        }
                        if plan.is_asking() {
                            return Ok(Next::Asked);
                        }
                    }
                }
                Err(silence) => {
                    asker = None;
                    silent += 1;
                    if silent == SILENCE_MAX {
                        return Err(Error::Silent(silence));
                    }
                }
            }
        }
    }

    async fn ask(&self, asker: &mut Option<Asker>) -> Result<Status, Silence> {
        let asker = match asker {
            Some(asker) => asker,
            None => {
                let own = self.config.sockets.path().join("node.sock");
                asker.insert(Asker::connect(&self.config.socket(), own)?)
            }
        };
        let tracking = asker.tracking().await?;
        let ahead = asker.sources().await?;
        self.ahead.send_if_modified(|known| {
            let changed = *known != ahead;
            *known = ahead;
            changed
        });
        Ok(tracking.status(*self.status.borrow(), clock::now()))
    }

    /// Publishes what `change` makes of the status, and says what is new.
    fn publish(&self, ctx: &Context, change: impl FnOnce(Status) -> Status) {
        let before = *self.status.borrow();
        let after = change(before);
        self.status.send_if_modified(|status| {
            let changed = *status != after;
            *status = after;
            changed
        });
        if !after.is_news(&before) {
            return;
        }
        ctx.lines().event(after.line());
        let source = after.source;
        match after.state {
            State::Unset | State::Floor => {}
            State::Cluster => info!(%source, "the clock follows the voters of the cluster"),
            State::Synced => info!(%source, "the clock follows a server"),
            State::Lost => warn!("no source of time answers any more; the clock runs by itself"),
        }
    }
}

/// The ends of chronyd for other plans: [`ENDS_MAX`] in a row, and then one each [`PACE`].
struct Ends {
    /// When that many may follow each other again.
    whole: Instant,
}

impl Ends {
    fn new() -> Self {
        Self { whole: Instant::now() }
    }

    /// When the next one may be.
    fn due(&self) -> Instant {
        let now = Instant::now();
        let owed = self.whole.saturating_duration_since(now);
        now + owed.saturating_sub(PACE * (ENDS_MAX - 1))
    }

    fn count(&mut self) {
        self.whole = self.whole.max(Instant::now()) + PACE;
    }
}

/// Waits until another plan stands, and chronyd may end for it.
async fn another(
    inputs: &mut Inputs,
    plan: &Plan,
    asked: Asked,
    ends: &mut Ends,
) -> Result<(), Closed> {
    loop {
        inputs.changed().await?;
        if inputs.plan(asked) != *plan {
            sleep_until(ends.due().max(Instant::now() + SETTLE)).await;
            // What changed meanwhile is in the plan, too.
            if inputs.plan(asked) != *plan {
                ends.count();
                return Ok(());
            }
        }
    }
}

async fn end(child: &mut Child) -> Result<(), Error> {
    child.terminate(GRACE).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use polis_runtime::sys::acts;

    use super::*;

    /// Not a test: what the children of the next one do.
    #[test]
    fn act_of_a_confined_child() {
        acts::child();
    }

    #[tokio::test]
    async fn chronyd_reaches_the_clock_and_neither_the_kernel_s_interface_nor_the_node_s_key() {
        let base = tempfile::tempdir().unwrap();
        let root = files::Root::at(base.path());
        let confinement = Config::live(&root, &Status::default()).confinement();
        let test = "time::service::tests::act_of_a_confined_child";
        acts::keeps_from_all(test, &confinement, &["clock"], &root).await;
    }

    /// The owners of the inputs.
    struct Owners {
        servers: watch::Sender<Vec<NtpServer>>,
        network: watch::Sender<network::Status>,
        identity: watch::Sender<Option<Identity>>,
        roles: watch::Sender<Option<v1::NodeRoles>>,
        nodes: watch::Sender<Option<Arc<Nodes>>>,
        peers: watch::Sender<Peers>,
        storage: watch::Sender<storage::Status>,
    }

    fn inputs() -> (Owners, Inputs) {
        let owners = Owners {
            servers: watch::Sender::default(),
            network: watch::Sender::default(),
            identity: watch::Sender::default(),
            roles: watch::Sender::default(),
            nodes: watch::Sender::default(),
            peers: watch::Sender::default(),
            storage: watch::Sender::new(storage::Status::Starting),
        };
        let inputs = Inputs {
            identity: owners.identity.subscribe(),
            network: owners.network.subscribe(),
            roles: owners.roles.subscribe(),
            nodes: owners.nodes.subscribe(),
            peers: owners.peers.subscribe(),
            servers: owners.servers.subscribe(),
            storage: owners.storage.subscribe(),
        };
        (owners, inputs)
    }

    fn server(host: &str) -> Vec<NtpServer> {
        vec![NtpServer { host: host.to_owned(), nts: false }]
    }

    #[tokio::test(start_paused = true)]
    async fn another_chronyd_starts_only_for_another_plan_that_stands() {
        let (owners, mut inputs) = inputs();
        owners.servers.send_replace(server("192.0.2.1"));
        let plan = inputs.plan(Asked::Not);
        assert!(!plan.is_empty());
        let began = Instant::now();
        let change = async {
            sleep(Duration::from_secs(10)).await;
            // What the plan does not depend on.
            owners.network.send_modify(|status| status.waiting = None);
            sleep(Duration::from_secs(10)).await;
            // One that is taken back at once.
            owners.servers.send_replace(server("192.0.2.2"));
            sleep(SETTLE / 2).await;
            owners.servers.send_replace(server("192.0.2.1"));
            sleep(Duration::from_secs(10)).await;
            owners.servers.send_replace(server("192.0.2.3"));
        };
        let mut ends = Ends::new();
        let another = another(&mut inputs, &plan, Asked::Not, &mut ends);
        let (another, ()) = tokio::join!(another, change);
        assert_eq!(another, Ok(()));
        assert_eq!(began.elapsed(), Duration::from_secs(30) + SETTLE / 2 + SETTLE);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_every_few_seconds_end_chronyd_once_a_minute_and_the_last_one_stays() {
        let (owners, mut inputs) = inputs();
        let nth = |number: u8| server(&format!("192.0.2.{number}"));
        owners.servers.send_replace(nth(99));
        let last = inputs.plan(Asked::Not);
        owners.servers.send_replace(nth(100));
        let (mut plan, mut ends) = (inputs.plan(Asked::Not), Ends::new());
        let began = Instant::now();
        let changes = async {
            for number in 0..=99 {
                owners.servers.send_replace(nth(number));
                sleep(Duration::from_secs(3)).await;
            }
        };
        let follow = async {
            let mut at = Vec::new();
            while plan != last {
                another(&mut inputs, &plan, Asked::Not, &mut ends).await.unwrap();
                plan = inputs.plan(Asked::Not);
                at.push(began.elapsed().as_secs());
            }
            at
        };
        let (at, ()) = tokio::join!(follow, changes);
        // The first ones at once, as while a cluster is set up.
        assert_eq!(at, [2, 5, 8, 11, 14, 17, 20, 23, 62, 122, 182, 242, 302]);
        // After a quiet while, as many may follow each other as in the beginning.
        sleep(PACE * ENDS_MAX).await;
        assert!(ends.whole <= Instant::now());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_owner_is_an_error() {
        let (owners, mut inputs) = inputs();
        let plan = inputs.plan(Asked::Not);
        drop(owners);
        assert!(another(&mut inputs, &plan, Asked::Not, &mut Ends::new()).await.is_err());
    }
}
