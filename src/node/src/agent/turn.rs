//! This node's part of an update of the cluster: when the leader gives it its turn, it fetches
//! the bundle, installs it, moves its pods away and restarts.
//!
//! ```text
//! answer to a heartbeat --turn--> what is on the disk?
//!    the new version runs --------> nothing: its reports say so, and name the image
//!    it was tried in this turn, or the loader left it aside ---> [failed]
//!    it waits for its try --------> [drain] -> [ready]
//!    anything else ---------------> [fetch] -> [install] -> [drain] -> [ready]
//!                                      answer to a heartbeat --leave--> [restart]
//! ```
//!
//! Nothing of a turn is written down here: after a restart the turn comes again, and the disk
//! says what was done. The number of the boot in which the turn began distinguishes a try of
//! this turn from one before it, and that of the boot in which the node had its leave shows a
//! loader that does not start the new system: the node would restart for ever.
//!
//! Invariants:
//! - A node restarts for an update only in its turn, once the new system was read back, and with
//!   the leave of the leader, which sees whether the others can do without it.
//! - A turn that the leader takes back ends what is being done, but for a system that is on the
//!   disk already.
//! - The content that the holder sends is checked as if an owner had sent it.
//!
//! What this module does not do: give the turn, or decide what a failure means for the others
//! (`curator::update`).

use std::convert::Infallible;
use std::io::{self, BufReader, Read};
use std::sync::{Arc, Weak};
use std::time::Duration;

use polis_bundle::EtcdTarget;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_proto::v1::update_report::Phase;
use semver::Version;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Status, Streaming};
use tracing::{debug, info, warn};

use super::Service;
use polis_base::cause;
use polis_base::hex;
use polis_base::sys::reboot::Reason;
use polis_machine::update::{
    self, Door, Error, Installed, Other, PIECES, Pieces, Progress, Purpose, Standing, Store,
    Unfinished,
};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;
use polis_wire::rpc::client::{Expect, Trust, dial};
use polis_wire::rpc::resumes_at;
use polis_workload::Part;
use polis_workload::drain::{Drains, State};

/// Between two attempts at the node that has the bundle.
const RETRY: Duration = Duration::from_secs(5);
/// Longest that attempts at it may go on: the owner is to see that it is away for good.
const ATTEMPTS: Duration = Duration::from_secs(30 * 60);
/// Longest that it may send nothing.
const STALL: Duration = Duration::from_secs(60);
/// Longest that pods may take to go.
const DRAIN: Duration = Duration::from_secs(15 * 60);
/// Longest that a heartbeat waits for the disk with the bundles.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// How a turn goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taking {
    /// The number of the turn; zero: none.
    turn: i64,
    phase: Phase,
    cause: String,
}

/// The parts of the machine that an update needs.
#[derive(Clone, Debug)]
pub struct Tools {
    /// Where another system is taken.
    pub door: Door,
    /// Where a bundle is kept for others.
    pub bundles: Store,
    /// Where this node is drained.
    pub drains: Drains,
    /// Held while a heartbeat uses the disk with the bundles.
    pub looks: Arc<Mutex<()>>,
}

/// Uses the disk with the bundles for a heartbeat, unless an earlier use has not ended: heartbeats
/// go on beside a disk that hangs, and each would take one of the few threads that save files.
/// `None` then, and where the disk does not answer in time.
async fn look<T: Send + 'static>(
    looks: &Arc<Mutex<()>>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let turn = Arc::clone(looks).try_lock_owned().ok()?;
    let work = blocking(move || {
        let done = work();
        drop(turn);
        done
    });
    timeout(LOOK_MAX, work).await.ok()
}

/// The systems of this node, for a heartbeat.
pub(super) async fn report(service: &Service) -> v1::UpdateReport {
    let bundles = service.tools.bundles.clone();
    let kept = look(&service.tools.looks, move || bundles.kept()).await;
    let keeps = kept.flatten().unwrap_or_default();
    let config = service.tools.door.config();
    let Taking { turn, phase, cause } = service.outputs.taking.borrow().clone();
    v1::UpdateReport {
        boot_id: service.outputs.report.borrow().boot_id.clone(),
        version: config.version.clone(),
        image: service.inputs.environment.image.clone(),
        trial: on_trial(&service.inputs.update.borrow()),
        ready: *service.inputs.ready.borrow(),
        variant: config.variant.clone(),
        kubernetes: config.kubernetes.as_ref().map(ToString::to_string).unwrap_or_default(),
        release_key: config.release_key.map(|key| hex::encode(key.as_bytes())).unwrap_or_default(),
        keeps,
        turn,
        phase: phase.into(),
        cause,
    }
}

/// Whether the next start may begin another system than this one: true until the names on the
/// ESP were read.
fn on_trial(status: &update::Status) -> bool {
    !status.known || status.trial
}

/// Takes what the leader has this node do; nothing changes where it did not say.
pub(super) async fn ordered(service: &Service, orders: Option<v1::UpdateOrders>) {
    let Some(v1::UpdateOrders { turn, keep, restart }) = orders else { return };
    service
        .outputs
        .leave
        .send_replace(restart.then_some(turn.as_ref()).flatten().map(|turn| turn.began));
    // A leave changes nothing of what is being done.
    let work = |turn: &Option<v1::UpdateTurn>| {
        turn.clone().map(|turn| v1::UpdateTurn { left: String::new(), ..turn })
    };
    service.outputs.turn.send_if_modified(|known| {
        let changed = work(known) != work(&turn);
        *known = turn;
        changed
    });
    let (door, bundles) = (service.tools.door.clone(), service.tools.bundles.clone());
    // It goes on behind the next heartbeat, which a slow disk must not delay.
    let _removed = look(&service.tools.looks, move || door.keep_only(&bundles, &keep)).await;
}

/// Carries out turns until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut turns = service.outputs.turn.subscribe();
    ctx.healthy();
    loop {
        let turn = turns.borrow_and_update().clone();
        let work = async {
            let Some(turn) = turn else {
                service.outputs.taking.send_replace(Taking::default());
                return std::future::pending::<Infallible>().await;
            };
            let note = |phase, cause: String| {
                let taking = Taking { turn: turn.began, phase, cause };
                service.outputs.taking.send_if_modified(|known| {
                    let changed = *known != taking;
                    known.clone_from(&taking);
                    changed
                });
            };
            if let Err(cause) = take(&service, &ctx, &turn, &note).await {
                warn!(cause, "this node does not take the new version");
                note(Phase::Failed, cause);
            }
            std::future::pending::<Infallible>().await
        };
        let next = async {
            tokio::select! {
                // Cancel-safe: a turn that is taken back ends here, and the disk says how far it
                // came.
                never = Box::pin(work) => match never {},
                // Cancel-safe: waits for an event value.
                changed = turns.changed() => changed.map_err(|_closed| Closed("the turn")),
            }
        };
        match ctx.until_cancelled(next).await {
            Some(changed) => changed?,
            None => return Ok(()),
        }
    }
}

/// The next step of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Do {
    /// The new version runs.
    Nothing,
    /// The system has to come to the disk.
    Install,
    /// It is there.
    Restart,
    /// It was tried in this turn and did not stay, or another system of its version runs.
    Failed(String),
}

/// The system that runs.
#[derive(Clone, Copy, Debug)]
struct Running<'a> {
    version: &'a str,
    variant: &'a str,
    image: &'a str,
}

/// Reads the disk: `running` runs in the boot `boot_id`, beside the system `other`. The version
/// alone decides where the image of one of the two is not known.
fn decide(turn: &v1::UpdateTurn, running: Running<'_>, boot_id: &str, other: Option<&Other>) -> Do {
    let bundle = turn.bundle.clone().unwrap_or_default();
    let wanted = Version::parse(&bundle.version).ok();
    let is_another = |image: &str| {
        let known = !image.is_empty() && !bundle.image.is_empty();
        known && image != bundle.image
    };
    if wanted.is_some() && Version::parse(running.version).ok() == wanted {
        // The leader counts an image of another variant as the same system, too.
        if running.variant == bundle.variant && is_another(running.image) {
            let Running { version, image, .. } = running;
            return Do::Failed(format!(
                "this node runs another system of version {version}: its image is {image}, and \
                 that of the bundle is {}; a node takes a newer version only, so build the bundle \
                 with one",
                bundle.image
            ));
        }
        return Do::Nothing;
    }
    // An owner may have sent another build of the version: it is replaced, not started.
    let is_wanted = |other: &&Other| {
        let is_another = other.image.as_deref().is_some_and(is_another);
        Some(&other.version) == wanted.as_ref() && !is_another
    };
    match other.filter(is_wanted) {
        Some(Other { standing: Standing::Untried, .. })
            if !turn.left.is_empty() && boot_id != turn.left =>
        {
            let cause = "the machine restarted, and its loader started the former system; the \
                         new one is on the disk and untried";
            Do::Failed(cause.to_owned())
        }
        Some(Other { standing: Standing::Untried, .. }) => Do::Restart,
        Some(other @ Other { standing: Standing::Tried, .. }) if boot_id != turn.boot_id => {
            let cause = other.cause.as_deref().unwrap_or(update::NO_REPORT);
            Do::Failed(format!("the new system did not stay: {cause}"))
        }
        Some(_) | None => Do::Install,
    }
}

/// Carries out a turn; an error is why the node gives up. Never ends once the machine does.
async fn take(
    service: &Service,
    ctx: &Context,
    turn: &v1::UpdateTurn,
    note: &impl Fn(Phase, String),
) -> Result<(), String> {
    let mut systems = service.inputs.update.clone();
    let known = systems.wait_for(|status: &update::Status| status.known).await;
    let known = known.map_err(|_closed| "the systems of this machine are not known")?.clone();
    let mut reports = service.outputs.report.subscribe();
    let report = reports.wait_for(|report| !report.boot_id.is_empty()).await;
    let boot_id = report.map_err(|_closed| "the number of this boot is not known")?.boot_id.clone();
    let config = service.tools.door.config();
    let (version, variant) = (config.version.as_str(), config.variant.as_str());
    let running = Running { version, variant, image: &service.inputs.environment.image };
    match decide(turn, running, &boot_id, known.other.as_ref()) {
        Do::Nothing => return Ok(()),
        Do::Failed(cause) => return Err(cause),
        Do::Restart => {}
        Do::Install => {
            info!("it is this node's turn in an update of the cluster");
            fetched(service, ctx, turn, note).await?;
        }
    }
    let held = drained(service, note).await?;
    note(Phase::Ready, String::new());
    let mut leaves = service.outputs.leave.subscribe();
    // Others may have failed while this node wrote to its disk.
    let leave = leaves.wait_for(|leave| *leave == Some(turn.began)).await;
    leave.map_err(|_closed| "the leader can give no leave to restart")?;
    note(Phase::Restart, String::new());
    warn!("this node restarts for an update of the cluster");
    service.outputs.end.send_replace(Some(Reason::Reboot));
    ctx.cancelled().await;
    drop(held);
    Ok(())
}

/// Brings the new system to the disk. Repeats what the way there can break, and nothing else,
/// for as long as attempts come further than those before.
async fn fetched(
    service: &Service,
    ctx: &Context,
    turn: &v1::UpdateTurn,
    note: &impl Fn(Phase, String),
) -> Result<(), String> {
    let (mut begun, mut furthest, mut anew) = (Instant::now(), 0, false);
    loop {
        let progress = watch::Sender::new(Progress::default());
        let fetched = fetch(service, ctx, turn, note, progress.clone(), &mut anew).await;
        let came = progress.borrow().bytes;
        if came > furthest {
            // The holder sends, and more than before: what broke is the way.
            (begun, furthest) = (Instant::now(), came);
        }
        match fetched {
            Ok(installed) => {
                let wanted = turn.bundle.as_ref().map(|bundle| bundle.version.as_str());
                if wanted == Some(installed.version.to_string().as_str()) {
                    return Ok(());
                }
                return Err(format!("the bundle has version {}", installed.version));
            }
            Err(Trouble::Retry(cause)) if begun.elapsed() >= ATTEMPTS => {
                return Err(format!("for {} minutes: {cause}", ATTEMPTS.as_secs() / 60));
            }
            Err(Trouble::Retry(cause)) => {
                debug!(cause, "cannot fetch the bundle");
                note(Phase::Fetch, cause);
                sleep(RETRY).await;
            }
            Err(Trouble::Bundle(cause)) => return Err(cause),
        }
    }
}

/// Why a bundle was not installed.
enum Trouble {
    /// It did not come whole; another attempt may do better.
    Retry(String),
    /// It breaks a rule, or this machine cannot take it.
    Bundle(String),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        let text = cause::line(&error);
        match error {
            Error::Busy | Error::OnTrial => Self::Retry(text),
            _ => Self::Bundle(text),
        }
    }
}

async fn fetch(
    service: &Service,
    ctx: &Context,
    turn: &v1::UpdateTurn,
    note: &impl Fn(Phase, String),
    progress: watch::Sender<Progress>,
    anew: &mut bool,
) -> Result<Installed, Trouble> {
    let entered = service.tools.door.enter(ctx.lines().clone())?;
    let retry = |text: String| Trouble::Retry(text);
    let image = turn.bundle.clone().unwrap_or_default().image;
    let holder: NodeId =
        turn.holder.parse().map_err(|_id| retry("no node has the bundle".into()))?;
    note(Phase::Fetch, String::new());
    let runs = service.inputs.consensus.borrow().cluster_version;
    let etcd = EtcdTarget { runs, one_way: turn.one_way };
    if service.own() == Some(holder) {
        let bundles = service.tools.bundles.clone();
        let own = image.clone();
        let file = blocking(move || bundles.open(&own)).await?;
        let file = file.ok_or_else(|| retry("this node no longer has the bundle".to_owned()))?;
        note(Phase::Install, String::new());
        // The thread reads on only while this waits for it.
        let lasts = Arc::new(());
        let own = Own { bundle: BufReader::new(file), turn: Arc::downgrade(&lasts) };
        let installed = blocking(move || entered.install(own, 0, etcd, &progress)).await?;
        drop(lasts);
        return Ok(installed);
    }
    let credentials = service.outputs.credentials.borrow().clone();
    let known = credentials.as_ref().and_then(|credentials| credentials.authorities.clone());
    let known = known.ok_or_else(|| retry("this node has no certificate".to_owned()))?;
    let (expect, trust) = (Expect::Node(holder), Trust::cluster(known));
    let port = service.config.management_port;
    let connection =
        Box::pin(dial(&turn.holder_address, port, expect, &trust, credentials.as_ref())).await;
    let connection = connection.map_err(|error| retry(cause::line(&error)))?;
    // Once: a transfer that begins now and breaks is continued again.
    let begins = std::mem::take(anew);
    let unfinished = entered.unfinished(Purpose::Install);
    let unfinished = unfinished.filter(|unfinished| !begins && unfinished.image() == image);
    let at = unfinished.map_or(0, Unfinished::at);
    let asked = NodeManagementClient::new(connection.channel)
        .fetch_bundle(v1::FetchBundleRequest { image, at })
        .await;
    let answer = asked.map_err(|status| retry(format!("{holder}: {}", status.message())))?;
    // A holder that does not know of `at` sends everything.
    let at = resumes_at(answer.metadata());
    note(Phase::Install, String::new());
    let (pieces, received) = mpsc::channel(PIECES);
    let receiving = passed_on(holder, answer.into_inner(), pieces);
    let installing = blocking(move || entered.install(Pieces::new(received), at, etcd, &progress));
    let (received, installed): (Result<(), Trouble>, _) = tokio::join!(receiving, installing);
    // A stream that broke off is why the bundle is too short.
    received?;
    installed.map_err(|error| match at {
        0 => error.into(),
        // The bytes of before may be of another build of the image, or the disk may have lost
        // them: the next attempt begins anew.
        _ => {
            *anew = true;
            retry(cause::line(&error))
        }
    })
}

/// The bundle that this node keeps itself, for as long as its turn lasts: a turn that is taken back
/// ends it for the thread that writes it, as it ends a transfer.
struct Own<R> {
    bundle: R,
    turn: Weak<()>,
}

impl<R: Read> Read for Own<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.turn.strong_count() {
            0 => Ok(0),
            _ => self.bundle.read(buffer),
        }
    }
}

/// Passes the pieces that the holder sends on to the thread that writes them.
async fn passed_on(
    holder: NodeId,
    mut stream: Streaming<v1::UpdateRequest>,
    pieces: mpsc::Sender<Vec<u8>>,
) -> Result<(), Trouble> {
    let silent =
        |_elapsed| Trouble::Retry(format!("{holder} has sent nothing for {} s", STALL.as_secs()));
    let refused = |status: Status| Trouble::Retry(format!("{holder}: {}", status.message()));
    loop {
        let piece = timeout(STALL, stream.message()).await.map_err(silent)?.map_err(refused)?;
        let Some(piece) = piece else { return Ok(()) };
        // The thread wants no more: it has an outcome.
        if pieces.send(piece.data).await.is_err() {
            return Ok(());
        }
    }
}

/// Moves the pods away, where there are any. The node takes pods again once the returned value
/// is dropped.
async fn drained(
    service: &Service,
    note: &impl Fn(Phase, String),
) -> Result<Option<polis_workload::drain::Held>, String> {
    let worker = service.workload_parts().contains(&Part::Kubelet);
    if !worker {
        return Ok(None);
    }
    let held = service.tools.drains.begin(DRAIN, false);
    let mut seen = None;
    loop {
        let progress = held.next(seen.as_ref()).await.map_err(|taken| taken.to_string())?;
        match progress.state {
            State::Drained | State::GivenUp => return Ok(Some(held)),
            State::Failed(_) => return Err(format!("its pods stay: {}", progress.cause)),
            State::None | State::Draining => note(Phase::Drain, progress.cause.clone()),
        }
        seen = Some(progress);
    }
}

impl Service {
    /// The parts of Kubernetes that this node runs.
    fn workload_parts(&self) -> Vec<Part> {
        self.inputs.workload.borrow().parts.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn() -> v1::UpdateTurn {
        let bundle = v1::UpdateBundle {
            version: "1.1.0".to_owned(),
            variant: "full".to_owned(),
            image: "00".to_owned(),
            ..Default::default()
        };
        v1::UpdateTurn { bundle: Some(bundle), boot_id: "first".to_owned(), ..Default::default() }
    }

    fn other(version: &str, standing: Standing) -> Other {
        let version = version.parse().unwrap();
        Other { version, image: None, slot: "B", standing, cause: None }
    }

    fn running(version: &str) -> Running<'_> {
        Running { version, variant: "full", image: "" }
    }

    #[test]
    fn the_disk_says_what_there_is_to_do_in_a_turn() {
        let at = |version, boot, other: Option<Other>| {
            decide(&turn(), running(version), boot, other.as_ref())
        };
        assert_eq!(at("1.1.0", "second", Some(other("1.0.0", Standing::Good))), Do::Nothing);
        assert_eq!(at("1.0.0", "first", None), Do::Install);
        assert_eq!(at("1.0.0", "first", Some(other("0.9.0", Standing::Good))), Do::Install);
        // Power was lost before the restart.
        let untried = other("1.1.0", Standing::Untried);
        assert_eq!(at("1.0.0", "second", Some(untried.clone())), Do::Restart);
        // It had its leave: in the same boot it restarts, in another one the loader did not try.
        let left = v1::UpdateTurn { left: "first".to_owned(), ..turn() };
        let old = running("1.0.0");
        assert_eq!(decide(&left, old, "first", Some(&untried)), Do::Restart);
        assert!(matches!(decide(&left, old, "second", Some(&untried)), Do::Failed(_)));
        // It was left before this turn: this is another attempt.
        let tried = other("1.1.0", Standing::Tried);
        assert_eq!(at("1.0.0", "first", Some(tried.clone())), Do::Install);
        let failed =
            at("1.0.0", "second", Some(Other { cause: Some("guru 0310".into()), ..tried }));
        let text = "the new system did not stay: guru 0310".to_owned();
        assert_eq!(failed, Do::Failed(text));
        // Another bundle that was tried says nothing of this one.
        assert_eq!(at("1.0.0", "second", Some(other("1.2.0", Standing::Tried))), Do::Install);
    }

    #[test]
    fn another_build_of_the_version_is_not_the_system_of_the_bundle() {
        let runs = |image, variant| {
            let running = Running { version: "1.1.0", variant, image };
            decide(&turn(), running, "first", None)
        };
        let Do::Failed(cause) = runs("ff", "full") else { panic!() };
        assert!(cause.contains("its image is ff") && cause.contains("is 00"), "{cause}");
        // The same build, one that is not reported, and one of another variant.
        for (image, variant) in [("00", "full"), ("", "full"), ("ff", "base")] {
            assert_eq!(runs(image, variant), Do::Nothing, "{image} {variant}");
        }
        // On the disk, untried: what this boot wrote there is known.
        let beside = |image: Option<&str>| {
            let image = image.map(str::to_owned);
            let other = Other { image, ..other("1.1.0", Standing::Untried) };
            decide(&turn(), running("1.0.0"), "first", Some(&other))
        };
        assert_eq!(beside(Some("ff")), Do::Install);
        assert_eq!(beside(Some("00")), Do::Restart);
        assert_eq!(beside(None), Do::Restart);
    }

    #[test]
    fn the_bundle_of_this_node_ends_with_its_turn() {
        let lasts = Arc::new(());
        let mut own = Own { bundle: &b"bundle"[..], turn: Arc::downgrade(&lasts) };
        let mut piece = [0; 3];
        assert_eq!((own.read(&mut piece).unwrap(), &piece), (3, b"bun"));
        drop(lasts);
        assert_eq!(own.read(&mut piece).unwrap(), 0);
    }

    #[tokio::test]
    async fn a_disk_that_hangs_holds_one_thread_however_many_heartbeats_look() {
        let looks = Arc::default();
        let (answer, hangs) = std::sync::mpsc::channel();
        assert_eq!(look(&looks, move || hangs.recv()).await, None);
        for _heartbeat in 0..3 {
            assert!(looks.try_lock().is_err(), "the first one has not ended");
            assert_eq!(look(&looks, || 7).await, None);
        }
        answer.send(7).unwrap();
        // Its thread goes on.
        drop(looks.lock().await);
        // A busy host may give the next one no processor for a second.
        let next = async { while look(&looks, || 7).await != Some(7) {} };
        tokio::time::timeout(Duration::from_secs(60), next).await.unwrap();
    }

    #[test]
    fn only_what_the_way_can_break_is_tried_again() {
        for (error, again) in [
            (Error::Busy, true),
            (Error::OnTrial, true),
            (Error::NoKey, false),
            (polis_bundle::Refusal::Foreign.into(), false),
            (Error::Lost, false),
        ] {
            assert_eq!(matches!(Trouble::from(error), Trouble::Retry(_)), again);
        }
    }
}
