//! The deadlines of storage: every step has one, and reports what it waits for.
//!
//! `storage::service` wraps the machine in [`Patient`]. A disk that hangs must not
//! hang the boot in silence.
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
const SOON: Duration = Duration::from_secs(10);

/// For a few blocks.
const SMALL: Duration = Duration::from_secs(60);
/// For a file system's first blocks, and its first seconds.
const LARGE: Duration = Duration::from_secs(300);
/// For what grows with the disk: a journal that is replayed, free space that is written.
const LARGEST: Duration = Duration::from_secs(1800);

/// A machine whose steps have deadlines.
#[derive(Clone, Copy, Debug)]
pub struct Patient<'a, M> {
    /// The machine that takes the steps.
    pub machine: &'a M,
    /// The status in which it reports what it waits for.
    pub ctx: &'a Context,
}

impl<M: Machine + Sync> Patient<'_, M> {
    async fn step<T>(
        &self,
        what: &'static str,
        limit: Duration,
        work: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        within(self.ctx, what, limit, work).await
    }
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
            Self::Disk => format!("{what}; the disk is slow, and the boot stops after {seconds} s"),
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

impl<M: Machine + Sync> Machine for Patient<'_, M> {
    async fn write_table(&self, table: &Table) -> Result<(), Error> {
        self.step("writing the partition table", SMALL, self.machine.write_table(table)).await
    }

    async fn register(&self, partition: &Partition) -> Result<(), Error> {
        self.step("announcing a partition to the kernel", SMALL, self.machine.register(partition))
            .await
    }

    async fn protect(&self, partition: &Partition) -> Result<(), Error> {
        self.step("encrypting the data partition", LARGE, self.machine.protect(partition)).await
    }

    async fn format(&self, partition: &Partition) -> Result<(), Error> {
        self.step("making a file system", LARGE, self.machine.format(partition)).await
    }

    async fn mount(&self, partition: &Partition) -> Result<(), Error> {
        self.step("mounting the data partition", LARGEST, self.machine.mount(partition)).await
    }

    async fn settle(&self, partition: &Partition) -> Result<(), Error> {
        let what = "writing the initial free space of the data partition";
        self.step(what, LARGEST, self.machine.settle(partition)).await
    }

    async fn clear(&self, partition: &Partition) -> Result<(), Error> {
        self.step("wiping the data partition", SMALL, self.machine.clear(partition)).await
    }

    async fn grow(&self, partition: &Partition) -> Result<(), Error> {
        self.step("growing the data partition", LARGE, self.machine.grow(partition)).await
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
        assert_eq!(disk, "a step; the disk is slow, and the boot stops after 300 s");
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
