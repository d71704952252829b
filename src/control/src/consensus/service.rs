//! The service of the member: prepares the disk, starts etcd, and starts it again at another
//! pace, with other authorities, or with the state that a new member has received.
//!
//! ```text
//! orders -> (bootstrap, or write an invitation) -> start -> serve
//!   ^                                                ^         |
//!   |                               Grow, Rotate, Announce ----+
//!   +---------------- orders taken back: etcd ends, no member --+
//! ```
//!
//! Invariants:
//! - While the file `alone` is on the disk, this member is the only one. The file is
//!   written when the list of members shows one member (`serve`), and removed, with etcd
//!   restarted at the pace of many, before any member is added. Both happen in this one
//!   task, so neither overtakes the other. Without the file the pace is that of many: a
//!   lost file causes a slower start at worst.
//!
//! What this module does not do: watch the member (`serve`), change the
//! membership (`members`), or care for certificates (`watchers`).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::announcement::Announcement;
use super::args::{Pace, Purpose};
use super::credentials::{self, Credentials, Found};
use super::members::Members;
use super::serve::{After, Channels, Serving, report};
use super::{
    Config, Error, MemberStatus, Orders, Start, Status, bootstrap, defragmentation, maintenance,
    process, snapshots, wal, watchers,
};
use polis_base::files::{self, Etcd};
use polis_base::stage::{Stage, State};
use polis_base::sys;
use polis_base::trapdoor::{Report, code};
use polis_runtime::event::until;
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_wire::pki::Overview;

/// How often in a row etcd may end with an error about its own files: memory errs, too, and
/// a later read may find the data.
const BLAMED_MAX: u32 = 3;

/// An etcd that ran for so long found its files sound.
const SOUND: Duration = Duration::from_secs(600);

/// The text of the wait of a member that the others have removed.
const REMOVED: &str = "a leader of the cluster that decides whether this node has an etcd \
                       member: the other members removed the one that it had; check that this \
                       node reaches the other control-plane nodes on port 7835";

/// The delay before an etcd that reported its removal is started again: it would report the
/// same, unless it was wrong.
const OUT_MAX: Duration = Duration::from_secs(60);

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    config: Config,
    orders: watch::Receiver<Option<Orders>>,
    channels: Channels,
    overview: watch::Sender<Overview>,
    /// How often in a row etcd has ended with an error about its files: the one value that
    /// outlives a run.
    blamed: Arc<AtomicU32>,
}

/// Starts etcd again, if it trusts other authorities than the files of its member name.
#[derive(Clone, Debug)]
pub struct Restarts(Arc<Notify>);

impl Restarts {
    /// Asks for it. A second question before the first is read counts once.
    pub fn ask(&self) {
        self.0.notify_one();
    }
}

impl Service {
    /// A service that waits for orders.
    #[must_use]
    pub fn new(config: Config, orders: watch::Receiver<Option<Orders>>) -> Self {
        Self {
            config,
            orders,
            channels: Channels::default(),
            overview: watch::Sender::default(),
            blamed: Arc::default(),
        }
    }

    /// The member as an event value.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.channels.status.subscribe()
    }

    /// The certificates of the cluster as an event value.
    #[must_use]
    pub fn overview(&self) -> watch::Receiver<Overview> {
        self.overview.subscribe()
    }

    /// The way to start etcd again.
    #[must_use]
    pub fn restarts(&self) -> Restarts {
        Restarts(Arc::clone(&self.channels.restart))
    }

    /// The way to add and remove members.
    #[must_use]
    pub fn members(&self) -> Members {
        let Channels { growth, wake, .. } = self.channels.clone();
        Members::new(self.status(), growth, wake, self.config.sockets.clone())
    }

    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// Whenever etcd is not running any more, or could not be started.
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        readahead(&self.config.binary);
        if self.orders.borrow().is_none() {
            // The status of a member that left is cleared.
            self.channels.status.send_if_modified(|status| {
                let left = !status.is_absent();
                *status = Status::default();
                left
            });
        }
        let waiting = until(&mut self.orders, "the orders", Clone::clone);
        let Some(orders) = ctx.until_cancelled(waiting).await else { return Ok(()) };
        let (orders, mut given) = (orders?, self.orders.clone());
        if self.channels.status.borrow().removed {
            ctx.stage(Stage::Consensus, State::Waiting(REMOVED.to_owned()));
            let withdrawn = tokio::time::timeout(OUT_MAX, given.wait_for(Option::is_none));
            let withdrawn = async { withdrawn.await.is_ok() };
            match ctx.until_cancelled(withdrawn).await {
                None => return Ok(()),
                Some(true) => {
                    ctx.stage(Stage::Consensus, State::Done);
                    return Err(Error::Left);
                }
                Some(false) => {}
            }
        }
        let begun = Instant::now();
        let ended = tokio::select! {
            // In the other branch etcd ends as a killed process, and orders that are taken back
            // mean that its data is not wanted any more.
            ended = self.member(&ctx, &orders) => ended,
            Ok(_withdrawn) = given.wait_for(Option::is_none) => Err(Error::Left),
        };
        self.channels.status.send_modify(|status| {
            status.standing = MemberStatus::Stopped;
            status.leader = None;
            status.clients = None;
            status.ready_to_grow = false;
            status.removed |= matches!(ended, Err(Error::Removed));
        });
        report(&self.channels.status, &ctx, None);
        if matches!(ended, Err(Error::Left)) {
            // The caller does not wait for it any more.
            ctx.stage(Stage::Consensus, State::Done);
        }
        let blamed = self.blamed(&ended, begun.elapsed());
        if let Err(
            error @ (Error::NoMember
            | Error::Damaged { .. }
            | Error::Corrupt { .. }
            | Error::Snapshot(_)
            | Error::EmptySnapshot
            | Error::EncryptedSnapshot),
        ) = &ended
            && (blamed >= BLAMED_MAX || !matches!(error, Error::Corrupt { .. }))
        {
            // A restart does not bring lost files back.
            match ctx.until_cancelled(ctx.trapdoor(hopeless(error))).await {
                Some(never) => match never {},
                None => return Ok(()),
            }
        }
        ended
    }

    /// How often in a row etcd has ended with an error about its files by now.
    fn blamed(&self, ended: &Result<(), Error>, ran: Duration) -> u32 {
        if ran >= SOUND {
            self.blamed.store(0, Ordering::Relaxed);
        }
        if matches!(ended, Err(Error::Corrupt { .. })) {
            self.blamed.fetch_add(1, Ordering::Relaxed);
        }
        self.blamed.load(Ordering::Relaxed)
    }

    async fn member(&self, ctx: &Context, orders: &Orders) -> Result<(), Error> {
        ctx.stage(Stage::Consensus, State::Started);
        let peer_url = orders.peer.url();
        self.channels.status.send_modify(|status| {
            // A new membership has nothing to do with the old one.
            let removed = status.removed && !orders.start.joins();
            *status =
                Status { peer_url, db_quota: self.config.quota, removed, ..Status::default() };
        });
        report(&self.channels.status, ctx, None);

        self.config.sockets.dir.create()?;
        let Some(prepared) = ctx.until_cancelled(self.prepare(ctx, orders)).await else {
            return Ok(());
        };
        prepared?;
        self.start_watchers(ctx, orders);

        let mut purpose = match &orders.start {
            Start::Join(invitation) => Purpose::Join(&invitation.members),
            Start::Bootstrap | Start::Restart => Purpose::Serve,
        };
        loop {
            let alone = self.config.tree.alone.clone();
            let alone = blocking(move || alone.read()).await?.is_some();
            let pace = if alone { Pace::Alone } else { Pace::Lan };
            let trusted = self.config.tree.peer_pki.ca.clone();
            let trusted = blocking(move || trusted.read()).await?;
            self.channels.status.send_modify(|status| {
                status.authorities_at_start = trusted.map(|pem| Sha256::digest(pem).into());
            });
            let announcement = match purpose {
                Purpose::Join(members) => {
                    let name = format!("{}.{}", ctx.name(), process::ETCD);
                    Announcement::expected(ctx.logs(), name, members)
                }
                Purpose::Found | Purpose::Serve => None,
            };
            let started = process::spawn(&self.config, ctx, orders, pace, purpose).await?;
            let (config, channels) = (&self.config, &self.channels);
            let serving =
                Serving::new(config, channels, ctx, started, pace, orders.key.id()).await?;
            match serving.announced(announcement).run().await? {
                After::Cancelled => return Ok(()),
                After::Grow => {
                    info!("adding a second member");
                    let alone = self.config.tree.alone.clone();
                    blocking(move || alone.remove()).await?;
                }
                After::Rotate => info!("starting etcd again, which trusts a former authority"),
                After::Announce => info!("starting etcd again, for it to announce itself at once"),
            }
            purpose = Purpose::Serve;
        }
    }

    /// Makes the disk such that etcd can be started for good.
    async fn prepare(&self, ctx: &Context, orders: &Orders) -> Result<(), Error> {
        let tree = self.config.tree.clone();
        let found = blocking(move || credentials::look(&tree)).await?;
        match (&orders.start, found) {
            (Start::Bootstrap, Found::Nothing | Found::Unfinished) => {
                // Its future is large, and needed once in a lifetime.
                Box::pin(bootstrap::bootstrap(&self.config, ctx, orders)).await
            }
            (Start::Bootstrap | Start::Restart, Found::Complete) => {
                let log = self.config.tree.log.clone();
                // Files that etcd has reported as damaged stay as they are: a person may need them.
                if self.blamed.load(Ordering::Relaxed) == 0
                    && let Err(error) = blocking(move || wal::remove_copies(&log)).await
                {
                    let error: &dyn std::error::Error = &error;
                    warn!(error, "cannot remove the copies of torn files of the log of etcd");
                }
                Ok(())
            }
            (Start::Bootstrap | Start::Restart, Found::Damaged { missing }) => {
                Err(Error::Damaged { missing })
            }
            (Start::Restart, Found::Nothing | Found::Unfinished) => Err(Error::NoMember),
            (Start::Join(invitation), found) => {
                let tree = self.config.tree.clone();
                blocking(move || {
                    if found == Found::Unfinished || !wal::holds_entries(&tree.log)? {
                        tree.data.clear()?;
                        tree.bootstrapping.remove()?;
                    }
                    tree.alone.remove()?;
                    tree.data.create()
                })
                .await?;
                let credentials = Credentials {
                    authorities: invitation.authorities.clone(),
                    certificate: invitation.certificate.clone(),
                    crl: invitation.crl.clone(),
                };
                credentials::write(&self.config.tree, &credentials, &orders.key).await
            }
        }
    }

    fn start_watchers(&self, ctx: &Context, orders: &Orders) {
        let watchers = watchers::Watchers {
            tree: self.config.tree.clone(),
            identity: orders.key.identity(),
            peer: orders.peer.clone(),
            status: self.channels.status.subscribe(),
            written: self.channels.status.clone(),
            overview: self.overview.clone(),
        };
        let crl = watchers.clone();
        ctx.spawn("crl", Policy::forever(), move |ctx| crl.clone().crl(ctx));
        let certificate = watchers.clone();
        ctx.spawn("certificate", Policy::forever(), move |ctx| {
            certificate.clone().certificate(ctx)
        });
        ctx.spawn("overview", Policy::forever(), move |ctx| watchers.clone().overview(ctx));
        let promoter = self.members();
        ctx.spawn("promoter", Policy::forever(), move |ctx| promoter.clone().promote(ctx));
        let maintenance = maintenance::Maintenance {
            status: self.channels.status.subscribe(),
            members: self.members(),
        };
        ctx.spawn("maintenance", Policy::forever(), move |ctx| maintenance.clone().run(ctx));
        let defragmentation = defragmentation::Service {
            status: self.channels.status.subscribe(),
            members: self.members(),
            data: self.config.tree.data.clone(),
        };
        ctx.spawn("defragmentation", Policy::forever(), move |ctx| {
            defragmentation.clone().run(ctx)
        });
        let snapshots = snapshots::Service {
            dir: self.config.tree.snapshots.clone(),
            tool: self.config.restorer.clone(),
            pace: self.config.snapshot_pace,
            status: self.channels.status.subscribe(),
            published: self.channels.status.clone(),
        };
        ctx.spawn("snapshots", Policy::forever(), move |ctx| snapshots.clone().run(ctx));
    }
}

/// Removes every file of a member that has left. Blocks.
///
/// # Errors
///
/// The first part that cannot be removed; the call may be repeated.
pub fn forget(tree: &Etcd) -> Result<(), files::Error> {
    tree.data.clear()?;
    for file in [&tree.peer_pki.key, &tree.peer_pki.cert, &tree.peer_pki.ca] {
        file.erase()?;
    }
    for file in [&tree.peer_crl, &tree.alone, &tree.bootstrapping] {
        file.remove()?;
    }
    tree.snapshots.clear()
}

/// Asks the kernel to have the program in memory by the time it is started, from
/// within a runtime. Call it as early as you like; again costs little.
pub fn readahead(binary: &Path) {
    let binary = binary.to_owned();
    // Advice to the kernel: no code waits for it, and an error of the program appears when
    // it is started.
    let _unheeded = tokio::task::spawn_blocking(move || sys::files::readahead(&binary));
}

/// The report of a member that can never be started again.
fn hopeless(error: &Error) -> Report {
    let code = match error {
        Error::Snapshot(_) | Error::EmptySnapshot | Error::EncryptedSnapshot => {
            code::CONSENSUS_SNAPSHOT
        }
        Error::NoMember => code::CONSENSUS_MEMBER_ABSENT,
        Error::Corrupt { .. } => code::CONSENSUS_DATABASE_DAMAGED,
        _ => code::CONSENSUS_MEMBER_DAMAGED,
    };
    Report::from_error(code, error)
}
