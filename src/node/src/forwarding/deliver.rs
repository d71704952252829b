//! The delivery to one target: reads the ring from its cursor on, sends, and moves the cursor.
//!
//! ```text
//! [waiting: no new line] --line--> [connecting] --> [sending] --taken, settled--> cursor
//!          ^                            ^               |  ^----------- next line ----+
//!          |                            |               | lost, refused
//!          +----- cancelled ------------+-- backoff ----+
//! ```
//!
//! An answer of HTTP settles a batch at once. A line that a syslog receiver's kernel took
//! settles when the connection is still open [`SETTLE`] later: until then the receiver may die
//! with it unread, and it is sent again.
//!
//! A change of the proxy restarts the delivery only if it changes the server to connect to.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_base::cause;
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::logtree::ring::{self, Place, Ring, Stretch};
use polis_runtime::supervisor::Policy;
use polis_runtime::supervisor::restart::{History, Verdict};
use polis_wire::outside::Server;
use polis_wire::parameters::{LogProtocol, LogTarget, Proxy};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use super::cursors::Cursors;
use super::line::{Batch, Subject};
use super::{Failure, Status, Target, otlp, syslog};

/// How long a connection to a syslog receiver must live on after its kernel took a batch.
const SETTLE: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 10_000 });

/// Why nothing is sent at the moment.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error(transparent)]
    Ring(#[from] ring::Error),
    #[error(transparent)]
    Syslog(#[from] syslog::Error),
    #[error(transparent)]
    Otlp(#[from] otlp::Error),
}

/// A target, and what its delivery shares with the others.
pub(super) struct Delivery {
    pub(super) target: LogTarget,
    /// The proxy of the cluster.
    pub(super) proxy: watch::Receiver<Option<Proxy>>,
    /// The file of the public authorities.
    pub(super) bundle: PathBuf,
    pub(super) subject: watch::Receiver<Subject>,
    pub(super) ring: watch::Receiver<ring::Status>,
    pub(super) cursors: Arc<Mutex<Cursors>>,
    pub(super) status: watch::Sender<Status>,
}

/// The way to a target.
enum Connection {
    Syslog(syslog::Connection),
    Otlp(Box<otlp::Connection>),
}

impl Connection {
    /// Sends lines; returns how many were rejected.
    async fn send(&mut self, subject: &Subject, batch: &Batch) -> Result<u64, Error> {
        match self {
            Self::Syslog(connection) => Ok(connection.send(subject, batch).await.map(|()| 0)?),
            Self::Otlp(connection) => Ok(connection.send(subject, batch).await?),
        }
    }

    /// Waits until it is lost. Cancel-safe.
    async fn lost(&mut self) -> Error {
        match self {
            Self::Syslog(connection) => connection.lost().await.into(),
            // The next request finds out.
            Self::Otlp(_) => std::future::pending().await,
        }
    }

    fn settles_after(&self) -> Duration {
        match self {
            Self::Syslog(_) => SETTLE,
            Self::Otlp(_) => Duration::ZERO,
        }
    }
}

/// A batch that was taken, and is not settled.
struct Taken {
    settles: Instant,
    place: Option<Place>,
    missing: u64,
    rejected: u64,
}

impl Delivery {
    /// Delivers until it is dropped.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the owner of the ring, of the subject or of the proxy ended.
    pub(super) async fn run(mut self) -> Result<Infallible, Closed> {
        let (target, mut proxy) = (self.target.clone(), self.proxy.clone());
        loop {
            let server = target.server(proxy.borrow_and_update().as_ref());
            tokio::select! {
                // Cancel-safe: lines that have not settled are sent again.
                ended = self.deliver(&server) => return ended,
                // Cancel-safe: it waits for an event value.
                changed = another_way(&target, &mut proxy, &server) => changed?,
            }
        }
    }

    /// Delivers by `server`: the target itself, or the proxy to it.
    async fn deliver(&mut self, server: &Server) -> Result<Infallible, Closed> {
        let mut backoff = History::default();
        loop {
            let mut session = Session { taken: VecDeque::new(), settled: false };
            let Err(error) = Box::pin(self.session(server, &mut session)).await;
            if let Error::Closed(closed) = error {
                return Err(closed);
            }
            let pause = match &error {
                Error::Otlp(otlp::Error::Refused { wait, .. }) => wait.unwrap_or_default(),
                Error::Closed(_) | Error::Ring(_) | Error::Syslog(_) | Error::Otlp(_) => {
                    Duration::ZERO
                }
            };
            if session.settled {
                // A connection that worked is replaced at once, unless the target asks for a pause,
                // and only another failure counts.
                backoff = History::default();
                sleep(pause).await;
                continue;
            }
            self.failed(&cause::line(&error));
            let random = f64::from(rand::random::<u16>()) / f64::from(u16::MAX);
            let verdict = backoff.died(Policy::forever(), clock::uptime(), None, random);
            let delay = match verdict {
                Verdict::Restart(delay) => delay,
                Verdict::GiveUp(_) => Duration::from_secs(60),
            };
            sleep(delay.max(pause)).await;
        }
    }

    /// Sends over one connection until it fails.
    async fn session(
        &mut self,
        server: &Server,
        session: &mut Session,
    ) -> Result<Infallible, Error> {
        let mut place = self.cursor();
        let mut stretch = self.next(place).await?;
        let (target, bundle) = (&self.target, &self.bundle);
        let mut connection = match target.protocol {
            LogProtocol::Syslog => {
                Connection::Syslog(syslog::Connection::open(target, server, bundle).await?)
            }
            LogProtocol::Otlp => {
                let connection = otlp::Connection::open(target, server.clone(), bundle).await?;
                Connection::Otlp(Box::new(connection))
            }
        };
        loop {
            let began = Instant::now();
            let subject = self.subject.borrow().clone();
            let batch = Batch::of(&stretch);
            let rejected = connection.send(&subject, &batch).await?;
            place = stretch.next;
            self.took(place, &batch);
            let settles = Instant::now() + connection.settles_after();
            let missing = stretch.missing;
            session.taken.push_back(Taken { settles, place, missing, rejected });
            // A target that is far behind leaves half of the time to the rest of the node.
            let rest = Instant::now() + began.elapsed();
            let next = async {
                sleep_until(rest).await;
                self.next(place).await
            };
            let mut next = std::pin::pin!(next);
            stretch = loop {
                self.settle(session);
                let due = session.taken.front().map(|taken| taken.settles);
                tokio::select! {
                    // Cancel-safe: polled on in the next round.
                    read = &mut next => break read?,
                    // Cancel-safe: nothing of it is kept.
                    lost = connection.lost() => return Err(lost),
                    // Cancel-safe: only waits.
                    () = sleep_until(due.unwrap_or(rest)), if due.is_some() => {}
                }
            };
        }
    }

    /// The place of the cursor.
    fn cursor(&self) -> Option<Place> {
        let cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
        cursors.targets.get(&self.target.url()).and_then(|cursor| cursor.place)
    }

    /// The next lines behind a place, once there are any.
    async fn next(&self, place: Option<Place>) -> Result<Stretch, Error> {
        let mut status = self.ring.clone();
        loop {
            let ring: Ring = until(&mut status, "the log", |status| status.ring.clone()).await?;
            let stretch = ring.after(place).await?;
            self.behind(place, status.borrow().records);
            if !stretch.is_empty() {
                return Ok(stretch);
            }
            status.changed().await.map_err(|_closed| Closed("the log"))?;
        }
    }

    /// Moves the cursor behind the batches that have settled.
    fn settle(&self, session: &mut Session) {
        let now = Instant::now();
        while session.taken.front().is_some_and(|taken| taken.settles <= now)
            && let Some(taken) = session.taken.pop_front()
        {
            let Taken { place, missing, rejected, .. } = taken;
            session.settled = true;
            self.reached();
            let url = self.target.url();
            let (all_missing, all_rejected) = {
                let mut cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
                let cursor = cursors.targets.entry(url.clone()).or_default();
                cursor.place = place;
                cursor.missing = cursor.missing.saturating_add(missing);
                cursor.rejected = cursor.rejected.saturating_add(rejected);
                (cursor.missing, cursor.rejected)
            };
            if missing > 0 {
                warn!(target = url, lines = missing, "lines of the log were gone before delivery");
            }
            if rejected > 0 {
                warn!(target = url, lines = rejected, "a target rejected lines of the log");
            }
            self.change(|target| (target.missing, target.rejected) = (all_missing, all_rejected));
        }
    }

    /// The target has these lines.
    fn took(&self, place: Option<Place>, batch: &Batch) {
        let until = batch.lines.last().and_then(|line| line.time);
        let records = self.ring.borrow().records;
        self.change(|target| {
            target.sent = target.sent.saturating_add(batch.lines.len() as u64);
            target.until = until.or(target.until);
            target.behind = behind(place, records);
        });
    }

    /// The target keeps what it takes: a batch has settled.
    fn reached(&self) {
        let mut ended = None;
        self.change(|target| ended = target.failure.take());
        if let Some(Failure { since, .. }) = ended {
            let seconds = clock::now().duration_since(since).unwrap_or_default().as_secs();
            info!(target = self.target.url(), seconds, "the log reaches its target again");
        }
    }

    fn behind(&self, place: Option<Place>, records: u64) {
        self.change(|target| target.behind = behind(place, records));
    }

    /// An attempt failed. Each cause is logged once, until the target is reached again.
    fn failed(&self, cause: &str) {
        let mut is_new = false;
        let records = self.ring.borrow().records;
        self.change(|target| {
            target.behind = behind(self.cursor(), records);
            let known = target.failure.as_ref();
            is_new = known.is_none_or(|known| known.cause != cause);
            let since = known.map_or_else(clock::now, |known: &Failure| known.since);
            target.failure = Some(Failure { cause: cause.to_owned(), since });
        });
        if is_new {
            warn!(target = self.target.url(), cause, "the log does not reach its target");
        }
    }

    /// Changes the status of this target.
    fn change(&self, change: impl FnOnce(&mut Target)) {
        let url = self.target.url();
        self.status.send_if_modified(|status| {
            let target = status.targets.entry(url).or_default();
            let before = target.clone();
            change(target);
            before != *target
        });
    }
}

/// The result of one connection.
struct Session {
    taken: VecDeque<Taken>,
    /// Whether a batch has settled.
    settled: bool,
}

/// Waits until the delivery has to connect to another server than `server`. Cancel-safe.
async fn another_way(
    target: &LogTarget,
    proxy: &mut watch::Receiver<Option<Proxy>>,
    server: &Server,
) -> Result<(), Closed> {
    loop {
        proxy.changed().await.map_err(|_closed| Closed("the proxy"))?;
        let now = target.server(proxy.borrow_and_update().as_ref());
        if now != *server {
            return Ok(());
        }
    }
}

/// Records of the disk that are not before a place.
fn behind(place: Option<Place>, records: u64) -> u64 {
    records.saturating_sub(place.map_or(0, |place| place.number))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use polis_proto::v1;
    use polis_wire::parameters;

    use super::super::Order;
    use super::*;

    fn target(url: &str) -> LogTarget {
        let target = v1::LogTarget { url: url.to_owned(), ca: String::new() };
        let order = v1::LogConfiguration { targets: vec![target], ..Default::default() };
        Order::read(order).unwrap().targets.remove(0)
    }

    #[tokio::test]
    async fn only_a_proxy_that_a_delivery_uses_restarts_it() {
        let read = |url: &str, direct: &[&str]| {
            let direct = direct.iter().map(|host| (*host).to_owned()).collect();
            let message =
                v1::ProxyConfiguration { url: url.to_owned(), direct, ..Default::default() };
            parameters::proxy(&message, "proxy").unwrap()
        };
        let (first, second) = ("http://a.example:3128", "http://b.example:3128");
        let (syslog, otlp) = ("syslog+tls://logs.example", "otlp+https://logs.example");
        for (url, before, after, begins_anew) in [
            (syslog, None, read(first, &[]), false),
            (syslog, read(first, &[]), read(second, &[]), false),
            (otlp, None, read(first, &["logs.example"]), false),
            (otlp, read(first, &[]), read(first, &["web.example"]), false),
            (otlp, None, read(first, &[]), true),
            (otlp, read(first, &[]), read(second, &[]), true),
            (otlp, read(first, &[]), None, true),
        ] {
            let target = target(url);
            let known = watch::Sender::new(before);
            let mut proxy = known.subscribe();
            let server = target.server(proxy.borrow_and_update().as_ref());
            let text = format!("{url}: {after:?}");
            known.send_replace(after);
            let waited = another_way(&target, &mut proxy, &server).now_or_never();
            assert_eq!(waited, begins_anew.then_some(Ok(())), "{text}");
        }
    }

    #[tokio::test]
    async fn a_target_fails_until_it_has_kept_a_batch() {
        let target = target("syslog+tls://192.0.2.1");
        let (url, status) = (target.url(), watch::Sender::<Status>::default());
        let delivery = Delivery {
            target,
            proxy: watch::Sender::new(None).subscribe(),
            bundle: PathBuf::from("/nonexistent"),
            subject: watch::Sender::new(Subject::default()).subscribe(),
            ring: watch::Sender::new(ring::Status::default()).subscribe(),
            cursors: Arc::default(),
            status: status.clone(),
        };
        let failing = || status.borrow().targets[&url].failure.is_some();
        delivery.failed("refused");
        delivery.took(None, &Batch::of(&Stretch::default()));
        assert!(failing(), "it may close before it has read them");
        let taken = Taken { settles: Instant::now(), place: None, missing: 0, rejected: 0 };
        let mut session = Session { taken: VecDeque::from([taken]), settled: false };
        delivery.settle(&mut session);
        assert!(session.settled && !failing());
    }
}
