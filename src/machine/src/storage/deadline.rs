//! The deadlines of the steps on a disk: every step has one, and reports what it waits for.
//!
//! [`Bounded`] wraps a machine: it names each step and its limit, and a [`Watch`] does what is due
//! when a step takes long. That of `storage::service` is the [`Context`] of the service: a disk
//! that hangs must not hang the boot in silence. That of a volume is in `steps`.
//!
//! ```text
//! step --SOON--> stage `waiting`, with a name --deadline--> error
//!   +--ends--> stage `started` again
//! ```
//!
//! A step also waits while the kernel has no random numbers for its keys, which is not the
//! disk's fault: [`Cause`] distinguishes the two.
//!
//! What this module does not do: end a system call that hangs. Its thread remains,
//! and the machine reboots from the guru meditation.

use std::time::Duration;

use tokio::time::timeout;

use super::apply::{Error, Machine};
use super::table::{Partition, Table};
use polis_base::stage::{Stage, State};
use polis_base::sys::random;
use polis_runtime::supervisor::Context;

/// A step that takes longer is worth a word.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// For a few blocks.
pub(crate) const SMALL: Duration = Duration::from_secs(60);
/// For a file system's first blocks, and its first seconds; for a key that is tried.
pub(crate) const LARGE: Duration = Duration::from_secs(300);
/// For what grows with the disk: a journal that is replayed, free space that is written, systems
/// that are copied.
pub(crate) const LARGEST: Duration = Duration::from_secs(1800);

/// The names of the steps that say what is made or opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    pub(crate) protect: &'static str,
    pub(crate) mount: &'static str,
    pub(crate) settle: &'static str,
    pub(crate) clear: &'static str,
    pub(crate) grow: &'static str,
}

/// Those of the data partition.
pub(crate) const DATA: Words = Words {
    protect: "encrypting the data partition",
    mount: "mounting the data partition",
    settle: "writing the initial free space of the data partition",
    clear: "wiping the data partition",
    grow: "growing the data partition",
};

/// What is done when a step takes long.
pub(crate) trait Watch {
    /// Waits for `work`, the step `what`, which should end within `limit`.
    fn step(
        &self,
        what: &'static str,
        limit: Duration,
        work: impl Future<Output = Result<(), Error>> + Send,
    ) -> impl Future<Output = Result<(), Error>> + Send;
}

impl Watch for Context {
    async fn step(
        &self,
        what: &'static str,
        limit: Duration,
        work: impl Future<Output = Result<(), Error>> + Send,
    ) -> Result<(), Error> {
        within(self, what, limit, work).await
    }
}

/// A machine whose steps have names and limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounded<'a, M, W> {
    /// The machine that takes the steps.
    pub(crate) machine: &'a M,
    /// What is done when one takes long.
    pub(crate) watch: &'a W,
    pub(crate) words: Words,
}

/// Why a step takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The disk is slow, or does not answer.
    Disk,
    /// The kernel has no random numbers yet.
    Random,
}

impl Cause {
    fn now() -> Self {
        if random::is_ready() { Self::Disk } else { Self::Random }
    }

    /// The wait of the boot, in words.
    fn wait(self, what: &str, seconds: u64) -> String {
        match self {
            Self::Disk => format!(
                "{what}; the disk is slow, or does not answer: check it and its cable; the boot \
                 stops after {seconds} s"
            ),
            Self::Random => format!(
                "random numbers, which {what} needs; the kernel has too few until a processor \
                 with RDRAND or a virtio-rng device supplies them; the boot stops after {seconds} s"
            ),
        }
    }

    /// Why the boot stops.
    fn error(self, what: &'static str, seconds: u64) -> Error {
        match self {
            Self::Disk => Error::Late { what, seconds },
            Self::Random => Error::Random { what, seconds },
        }
    }
}

/// Waits for `work`, and reports it when it takes long.
///
/// # Errors
///
/// That of `work`, [`Error::Late`] or [`Error::Random`].
pub async fn within<T, E: From<Error>>(
    ctx: &Context,
    what: &'static str,
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = timeout(SOON, &mut work).await {
        return done;
    }
    let seconds = limit.as_secs();
    let text = Cause::now().wait(what, seconds);
    ctx.stage(Stage::Storage, State::Waiting(text));
    let done = timeout(limit.saturating_sub(SOON), work).await;
    ctx.stage(Stage::Storage, State::Started);
    done.unwrap_or_else(|_elapsed| Err(Cause::now().error(what, seconds).into()))
}

impl<M: Machine + Sync, W: Watch + Sync> Machine for Bounded<'_, M, W> {
    async fn write_table(&self, table: &Table) -> Result<(), Error> {
        let work = self.machine.write_table(table);
        self.watch.step("writing the partition table", SMALL, work).await
    }

    async fn register(&self, partition: &Partition) -> Result<(), Error> {
        let work = self.machine.register(partition);
        self.watch.step("announcing a partition to the kernel", SMALL, work).await
    }

    async fn protect(&self, partition: &Partition) -> Result<(), Error> {
        self.watch.step(self.words.protect, LARGE, self.machine.protect(partition)).await
    }

    async fn format(&self, partition: &Partition) -> Result<(), Error> {
        self.watch.step("making a file system", LARGE, self.machine.format(partition)).await
    }

    async fn mount(&self, partition: &Partition) -> Result<(), Error> {
        self.watch.step(self.words.mount, LARGEST, self.machine.mount(partition)).await
    }

    async fn settle(&self, partition: &Partition) -> Result<(), Error> {
        self.watch.step(self.words.settle, LARGEST, self.machine.settle(partition)).await
    }

    async fn clear(&self, partition: &Partition) -> Result<(), Error> {
        self.watch.step(self.words.clear, SMALL, self.machine.clear(partition)).await
    }

    async fn grow(&self, partition: &Partition) -> Result<(), Error> {
        self.watch.step(self.words.grow, LARGE, self.machine.grow(partition)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_step_that_hangs_is_named_and_given_up() {
        let (ctx, _handles) = Context::for_test();
        let stages = ctx.stages();
        let what = "a step";
        let hung = within(&ctx, what, SMALL, std::future::pending::<Result<(), Error>>());
        let reported = async {
            tokio::time::sleep(SOON + Duration::from_secs(1)).await;
            let entry = stages.borrow().get(&Stage::Storage).cloned();
            let State::Waiting(what) = entry.unwrap().state else { panic!("nothing is reported") };
            what
        };
        let (ended, reported) = tokio::join!(hung, reported);
        assert!(reported.starts_with("a step; "), "{reported}");
        assert!(matches!(ended, Err(Error::Late { what: "a step", seconds: 60 })), "{ended:?}");
    }

    #[test]
    fn a_machine_without_random_numbers_is_not_told_to_check_its_disk() {
        use crate::storage;
        use polis_base::trapdoor::code;
        let disk = Cause::Disk.wait("a step", 300);
        assert_eq!(
            disk,
            "a step; the disk is slow, or does not answer: check it and its cable; the boot stops \
             after 300 s"
        );
        let random = Cause::Random.wait("a step", 300);
        assert!(random.starts_with("random numbers, which a step needs; "), "{random}");
        assert!(!random.contains("disk"), "{random}");
        let report = |cause: Cause| storage::Error::Apply(cause.error("a step", 300)).report();
        assert_eq!(report(Cause::Disk).code, code::STORAGE_LATE);
        assert_eq!(report(Cause::Random).code, code::STORAGE_RANDOM);
    }

    #[tokio::test(start_paused = true)]
    async fn a_quick_step_is_not_logged() {
        let (ctx, _handles) = Context::for_test();
        let done = within(&ctx, "a step", SMALL, async { Ok::<_, Error>(7) }).await;
        assert_eq!(done.unwrap(), 7);
        assert!(ctx.stages().borrow().get(&Stage::Storage).is_none());
    }
}
