//! The loader of stage 1's drivers: threads that hand modules to the kernel, one after another.
//!
//! The kernel returns from a driver's loading when the driver has looked for its devices. A
//! storage adapter with full shelves takes minutes for that, and one that is broken never
//! returns. Stage 1 goes on meanwhile: it knows which driver it waits for, and takes a disk
//! from another driver.
//!
//! ```text
//! stage 1 --names--> [queue] --> [thread] --> kernel
//!    ^                  |            |
//!    |                  | no thread has finished a module for STUCK
//!    |                  +-------> [another thread] --> kernel
//!    +------------- loaded modules, and a wake -----+
//! ```
//!
//! Invariants:
//! - Modules are handed over one at a time, in the order of their names here, unless one is
//!   stuck.
//! - No call waits for the kernel.
//!
//! What this module does not do: choose drivers (`drivers`), or find modules (`modules`).

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use super::modules::Error;

/// A driver that takes longer does not hold up the next one.
pub const STUCK: Duration = Duration::from_secs(2);

/// Threads at most: a machine has no more kinds of adapters that hang.
const THREADS_MAX: usize = 8;

/// Hands one module to the kernel; `Modules::load` on a machine.
pub type Load = Arc<dyn Fn(&str) -> Result<(), Error> + Send + Sync>;

/// The kernel's answer about one module.
#[derive(Debug)]
pub struct Done {
    /// The module.
    pub name: String,
    /// Whether it is loaded.
    pub result: Result<(), Error>,
    thread: usize,
}

#[derive(Debug)]
struct Thread {
    orders: Sender<String>,
    /// The module that it loads, and since when.
    busy: Option<(String, Duration)>,
}

/// The threads and what waits for them.
pub struct Loader {
    load: Load,
    queue: VecDeque<String>,
    known: BTreeSet<String>,
    threads: Vec<Thread>,
    report: Sender<Done>,
    reported: Receiver<Done>,
    wake: PipeWriter,
    woken: PipeReader,
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, threads, .. } = self;
        f.debug_struct("Loader")
            .field("queue", queue)
            .field("threads", threads)
            .finish_non_exhaustive()
    }
}

impl Loader {
    /// A loader without threads; the first module starts one.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    pub fn new(load: Load) -> io::Result<Self> {
        let (woken, wake) = io::pipe()?;
        rustix::io::ioctl_fionbio(&woken, true)?;
        let (report, reported) = mpsc::channel();
        Ok(Self {
            load,
            queue: VecDeque::new(),
            known: BTreeSet::new(),
            threads: Vec::new(),
            report,
            reported,
            wake,
            woken,
        })
    }

    /// Loads a module once, after all earlier ones.
    pub fn load(&mut self, name: &str, now: Duration) {
        if self.known.insert(name.to_owned()) {
            self.queue.push_back(name.to_owned());
            self.assign(now);
        }
    }

    /// The loads that ended since the last call. Starts the next ones.
    pub fn take(&mut self, now: Duration) -> Vec<Done> {
        // The pipe only wakes; the reports are in the channel.
        while self.woken.read(&mut [0; 64]).is_ok_and(|length| length > 0) {}
        let done: Vec<Done> = self.reported.try_iter().collect();
        for done in &done {
            if let Some(thread) = self.threads.get_mut(done.thread) {
                thread.busy = None;
            }
        }
        self.assign(now);
        done
    }

    /// The modules that the kernel has not returned from, and since when it has them.
    pub fn busy(&self) -> impl Iterator<Item = (&str, Duration)> {
        self.threads.iter().filter_map(|thread| thread.busy.as_ref()).map(|(n, at)| (&**n, *at))
    }

    /// Whether everything is loaded.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.busy().next().is_none()
    }

    /// Whether another module would be handed over at once: nothing waits, and the module that
    /// is loading is stuck.
    #[must_use]
    pub fn has_room(&self, now: Duration) -> bool {
        self.queue.is_empty() && self.busy().all(|(_name, since)| is_stuck(since, now))
    }

    /// When a module that is loading will be stuck. `None` where nothing would follow it.
    #[must_use]
    pub fn deadline(&self, now: Duration) -> Option<Duration> {
        self.busy().map(|(_name, since)| since + STUCK).filter(|at| *at > now).max()
    }

    /// The descriptor that can be read when something was loaded.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.woken.as_fd()
    }

    fn assign(&mut self, now: Duration) {
        while !self.queue.is_empty()
            && self.busy().all(|(_name, since)| is_stuck(since, now))
            && let Some(index) = self.free_thread()
            && let Some(name) = self.queue.pop_front()
        {
            let thread = &mut self.threads[index];
            // A thread ends only by a panic in its module's loading, with the module named as
            // busy for ever.
            thread.orders.send(name.clone()).ok();
            thread.busy = Some((name, now));
        }
    }

    /// A thread without work, an additional one where there is none.
    fn free_thread(&mut self) -> Option<usize> {
        let free = self.threads.iter().position(|thread| thread.busy.is_none());
        if free.is_some() || self.threads.len() >= THREADS_MAX {
            return free;
        }
        let number = self.threads.len();
        let (orders, ordered) = mpsc::channel::<String>();
        let (load, report) = (Arc::clone(&self.load), self.report.clone());
        let mut wake = self.wake.try_clone().ok()?;
        let work = move || {
            while let Ok(name) = ordered.recv() {
                let result = load(&name);
                // Stage 1 has its disk and went on.
                if report.send(Done { name, result, thread: number }).is_err() {
                    return;
                }
                wake.write_all(b".").ok();
            }
        };
        thread::Builder::new().name(format!("drivers-{number}")).spawn(work).ok()?;
        self.threads.push(Thread { orders, busy: None });
        Some(number)
    }
}

fn is_stuck(since: Duration, now: Duration) -> bool {
    now >= since + STUCK
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use polis_base::sys::poll::{self, Interest};

    use super::*;

    /// A kernel in which `stuck` returns only on request.
    fn loader() -> (Loader, Arc<Mutex<Vec<String>>>, Sender<()>) {
        let (go, gone) = mpsc::channel();
        let (gone, log) = (Mutex::new(gone), Arc::<Mutex<Vec<String>>>::default());
        let handed = Arc::clone(&log);
        let load: Load = Arc::new(move |name| {
            handed.lock().unwrap().push(name.to_owned());
            if name == "stuck" {
                gone.lock().unwrap().recv().ok();
            }
            match name {
                "absent" => Err(Error::Absent { name: name.to_owned() }),
                _ => Ok(()),
            }
        });
        (Loader::new(load).unwrap(), log, go)
    }

    /// Waits for the next reports.
    fn next(loader: &mut Loader, now: Duration) -> Vec<(String, bool)> {
        loop {
            let done = loader.take(now);
            if !done.is_empty() {
                return done.into_iter().map(|done| (done.name, done.result.is_ok())).collect();
            }
            let waited = [(loader.as_fd(), Interest::Read)];
            let ready = poll::wait(&waited, Some(Duration::from_secs(10))).unwrap();
            assert_eq!(ready, [true], "nothing was loaded");
        }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn modules_are_loaded_once_in_their_order_and_each_is_reported() {
        let (mut loader, log, _go) = loader();
        assert!(loader.is_idle() && loader.has_room(at(0)));
        for name in ["virtio_pci", "absent", "virtio_pci", "ahci"] {
            loader.load(name, at(0));
        }
        let mut done = Vec::new();
        while !loader.is_idle() {
            done.extend(next(&mut loader, at(0)));
        }
        let wanted = [("virtio_pci", true), ("absent", false), ("ahci", true)];
        assert_eq!(done, wanted.map(|(name, loaded)| (name.to_owned(), loaded)));
        assert_eq!(*log.lock().unwrap(), ["virtio_pci", "absent", "ahci"]);
        assert_eq!(loader.threads.len(), 1);
    }

    #[test]
    fn a_driver_that_does_not_return_holds_up_no_other_and_is_named() {
        let (mut loader, _log, go) = loader();
        loader.load("stuck", at(10));
        loader.load("ahci", at(10));
        assert!(loader.take(at(11)).is_empty());
        assert!(!loader.has_room(at(11)));
        assert_eq!(loader.deadline(at(11)), Some(at(12)));
        assert_eq!(loader.busy().collect::<Vec<_>>(), [("stuck", at(10))]);
        assert!(loader.take(at(12)).is_empty());
        assert_eq!(next(&mut loader, at(12)), [("ahci".to_owned(), true)]);
        assert_eq!(loader.busy().collect::<Vec<_>>(), [("stuck", at(10))]);
        assert!(loader.has_room(at(12)) && !loader.is_idle());
        assert_eq!(loader.deadline(at(12)), None);
        go.send(()).unwrap();
        assert_eq!(next(&mut loader, at(90)), [("stuck".to_owned(), true)]);
        assert!(loader.is_idle());
    }

    #[test]
    fn as_many_stuck_drivers_as_threads_are_all_that_is_tried() {
        let (go, gone) = mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let load: Load = Arc::new(move |_name| {
            gone.lock().unwrap().recv().ok();
            Ok(())
        });
        let mut loader = Loader::new(load).unwrap();
        (0..THREADS_MAX + 3).for_each(|number| loader.load(&number.to_string(), at(0)));
        (0..20).for_each(|round| drop(loader.take(at(round * 2))));
        assert_eq!(loader.busy().count(), THREADS_MAX);
        assert_eq!(loader.queue.len(), 3);
        drop(go);
        while !loader.is_idle() {
            next(&mut loader, at(60));
        }
    }
}
