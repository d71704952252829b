//! A target: its samples, its bounds, and the loop that feeds it.
//!
//! ```text
//! ordinary run:                 batches of the seed, until CASES inputs or a second
//! POLIS_FUZZ_SECONDS=600:       batches of the seed, until the time is over
//! ```
//!
//! Batch `n` is drawn from the seed plus `n`, and a failure prints that sum: the next run
//! with it begins at the batch that failed.

use std::env;
use std::fmt::Write as _;
use std::io::Write as _;
use std::str::FromStr;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use rustix::time::{ClockId, clock_gettime};

use crate::{damage, heap};

/// The variable with the seconds of a long run.
const SECONDS: &str = "POLIS_FUZZ_SECONDS";
/// The variable with the seed, as for all tests.
const SEED: &str = "POLIS_SEED";

/// Inputs of a batch: as many runs follow from one seed.
const BATCH: u32 = 64;
/// Inputs of an ordinary run.
const CASES: u64 = 2048;
/// The end of an ordinary run on a busy host.
const ORDINARY: Duration = Duration::from_secs(1);
/// How long the search for the shortest input that fails may take, in milliseconds.
const SHRINK_MS_MAX: u32 = 30_000;
/// Bytes of an input, unless the target says otherwise.
const LENGTH_MAX: usize = 4096;
/// Bytes that a parser may have at a time for each byte of its input, and without one.
const MEMORY_PER_BYTE: usize = 64;
const MEMORY: usize = 256 << 10;
/// Processor time of one input: a thousand times what they take.
const TIME_MAX: Duration = Duration::from_millis(500);

/// Whether the parser took an input for valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// It returned a value, which the target compared with what it encodes to.
    Yes,
    /// It returned an error, or nothing.
    No,
}

impl From<bool> for Accepted {
    fn from(yes: bool) -> Self {
        if yes { Self::Yes } else { Self::No }
    }
}

/// A fuzz target.
#[derive(Debug)]
#[must_use = "a target does nothing until it runs"]
pub struct Target {
    name: &'static str,
    samples: Vec<Vec<u8>>,
    length_max: usize,
    memory: usize,
}

/// The figures of a run.
#[derive(Default)]
struct Figures {
    inputs: u64,
    accepted: u64,
    time_max: Duration,
    memory_max: usize,
}

impl Target {
    /// A target without samples: for a parser that takes every input.
    pub fn new(name: &'static str) -> Self {
        Self { name, samples: Vec::new(), length_max: LENGTH_MAX, memory: MEMORY }
    }

    /// Adds valid inputs.
    pub fn samples<S: AsRef<[u8]>>(mut self, samples: impl IntoIterator<Item = S>) -> Self {
        self.samples.extend(samples.into_iter().map(|sample| sample.as_ref().to_vec()));
        self
    }

    /// Bytes of an input at most; at least those of the longest sample.
    pub fn length_max(mut self, bytes: usize) -> Self {
        self.length_max = bytes;
        self
    }

    /// Bytes that the parser may have at a time beside 64 for each byte of the input.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Feeds `read`, which panics where something does not hold.
    ///
    /// # Panics
    ///
    /// A sample is not accepted, or an input makes `read` panic, take too long, or take too
    /// much memory. The message has the shortest such input, and the seed.
    pub fn run(self, read: impl Fn(&[u8]) -> Accepted) {
        let samples = self.samples.iter().map(Vec::len).max().unwrap_or_default();
        let length_max = self.length_max.max(samples);
        let figures = std::cell::RefCell::new(Figures::default());
        let check = |input: &[u8]| self.check(&read, input, &mut figures.borrow_mut());
        for (number, sample) in self.samples.iter().enumerate() {
            let accepted = check(sample).unwrap_or_else(|why| panic!("sample {number}: {why}"));
            assert_eq!(accepted, Accepted::Yes, "sample {number} is valid and was not accepted");
        }
        let inputs = damage::inputs(&self.samples, length_max);
        let (seconds, seed) = (number(SECONDS), number(SEED).unwrap_or(0));
        let (began, limit) = (Instant::now(), seconds.map_or(ORDINARY, Duration::from_secs));
        let mut batch: u64 = seed;
        loop {
            let result = runner(self.name, batch).run(&inputs, |input| match check(&input) {
                Ok(_accepted) => Ok(()),
                Err(why) => Err(TestCaseError::fail(why)),
            });
            if let Err(error) = result {
                panic!("{}", self.failure(batch, &error));
            }
            batch = batch.wrapping_add(1);
            let all = seconds.is_none() && figures.borrow().inputs >= CASES;
            if all || began.elapsed() >= limit {
                break;
            }
        }
        if seconds.is_some() {
            self.print(&figures.borrow(), began.elapsed());
        }
    }

    /// Reads one input within the bounds.
    fn check(
        &self,
        read: &impl Fn(&[u8]) -> Accepted,
        input: &[u8],
        figures: &mut Figures,
    ) -> Result<Accepted, String> {
        let began = thread_time();
        let (result, memory) = heap::measured(|| {
            // A parser that panics is not used again.
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(input)))
        });
        let time = thread_time().saturating_sub(began);
        let accepted = result.map_err(|panic| format!("it panicked: {}", text(&*panic)))?;
        let allowed = self.memory + MEMORY_PER_BYTE * input.len();
        if memory > allowed {
            return Err(format!(
                "it had {memory} bytes of memory at a time for {} bytes of input; allowed are \
                 {allowed}",
                input.len()
            ));
        }
        if time > TIME_MAX {
            return Err(format!("it took {time:?} of a processor; allowed are {TIME_MAX:?}"));
        }
        figures.inputs += 1;
        figures.accepted += u64::from(accepted == Accepted::Yes);
        figures.time_max = figures.time_max.max(time);
        figures.memory_max = figures.memory_max.max(memory);
        Ok(accepted)
    }

    fn failure(&self, seed: u64, error: &TestError<Vec<u8>>) -> String {
        let mut message = format!("{}, with {SEED}={seed}: ", self.name);
        // Writing into a string cannot fail.
        let _infallible = match error {
            TestError::Abort(why) => write!(message, "{why}"),
            TestError::Fail(why, input) => {
                write!(message, "{why}\ninput: b\"{}\"", input.escape_ascii())
            }
        };
        message
    }

    /// Says what a long run used, past the capture of the tests' output.
    fn print(&self, figures: &Figures, took: Duration) {
        let Figures { inputs, accepted, time_max, memory_max } = figures;
        let (name, seconds) = (self.name, took.as_secs());
        // The figures are for a person who may have left.
        let _unread = writeln!(
            std::io::stderr(),
            "fuzz {name}: {inputs} inputs in {seconds} s, {accepted} accepted; at most \
             {time_max:?} and {} KiB for one",
            memory_max / 1024
        );
    }
}

/// Draws the inputs of a batch. The name is a part of the seed, so that targets with the
/// same samples differ.
fn runner(name: &str, batch: u64) -> TestRunner {
    let config = Config {
        cases: BATCH,
        failure_persistence: None,
        max_shrink_time: SHRINK_MS_MAX,
        max_shrink_iters: u32::MAX,
        ..Config::default()
    };
    // FNV-1a: `std`'s may differ from one release of Rust to the next.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&batch.to_le_bytes());
    seed[8..16].copy_from_slice(&hash.to_le_bytes());
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed))
}

/// The processor time of this thread: a busy host does not slow it.
fn thread_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// The number in a variable, if it is set.
fn number<T: FromStr>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_parse| panic!("{name} is to be a number, and is {text:?}")))
}

/// The words of a panic.
fn text(panic: &(dyn std::any::Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without words")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message with which a target fails.
    fn failure(target: Target, read: impl Fn(&[u8]) -> Accepted) -> String {
        let run = std::panic::AssertUnwindSafe(|| target.run(read));
        text(&*std::panic::catch_unwind(run).unwrap_err()).to_owned()
    }

    #[test]
    fn a_panic_is_found_and_shortened() {
        let message = failure(Target::new("panics").samples([b"length 3 abc"]), |input| {
            assert!(!input.contains(&0xff), "a byte of ones");
            Accepted::Yes
        });
        assert!(message.contains("POLIS_SEED="), "{message}");
        assert!(message.contains("a byte of ones"), "{message}");
        assert!(message.contains("\\xff"), "{message}");
    }

    #[test]
    fn memory_without_bound_is_found() {
        let message = failure(Target::new("allocates").samples([[0; 4]]), |input| {
            let claimed = input.first().copied().unwrap_or_default();
            drop(Vec::<u8>::with_capacity(usize::from(claimed) << 20));
            Accepted::Yes
        });
        assert!(message.contains("bytes of memory"), "{message}");
    }

    #[test]
    fn a_sample_that_is_not_accepted_is_a_failure() {
        let message = failure(Target::new("stale").samples([b"old"]), |_| Accepted::No);
        assert!(message.contains("was not accepted"), "{message}");
    }

    #[test]
    fn a_seed_repeats_its_inputs() {
        let drawn = |seed| {
            let seen = std::cell::RefCell::new(Vec::new());
            let inputs = damage::inputs(&[vec![7; 20]], 64);
            let keep = |input| {
                seen.borrow_mut().push(input);
                Ok(())
            };
            runner("repeats", seed).run(&inputs, keep).unwrap();
            seen.into_inner()
        };
        assert_eq!(drawn(3), drawn(3));
        assert_ne!(drawn(3), drawn(4));
    }
}
