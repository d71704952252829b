//! The record of the orders on the ESP, written with a deadline: a disk that does not answer keeps
//! neither the leases nor the trial of an order waiting.
//!
//! ```text
//! [known] --another record--> [writing] --written, or an error--> [known], or not
//!                                |  ^
//!                     RECORD_MAX |  | each later look: has it ended?
//!                                v  |
//!                             [left behind]: goes on by itself
//! ```
//!
//! Invariants:
//! - One write at a time, so no older record takes the place of a newer one.
//! - Only the first call waits for a write that hangs.
//!
//! What this module does not do: know what a record says (`change`), or try again by itself.

use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::timeout;
use tracing::warn;

use polis_base::cause;
use polis_base::files::{Error, File};
use polis_runtime::save::Save as _;

/// How long a write may take: a disk that has to start its motor takes ten seconds.
const RECORD_MAX: Duration = Duration::from_secs(20);

type Write = BoxFuture<'static, Result<(), Error>>;

/// The record on the ESP.
pub(super) struct Kept {
    file: File,
    /// What is there, if that is known.
    stored: Option<Vec<u8>>,
    /// The write that has not ended, and what it writes.
    writing: Option<(Vec<u8>, Write)>,
    /// Each failure is logged once.
    failed: cause::Last,
}

impl Kept {
    /// The record in `file`, which has this content.
    pub(super) fn new(file: File, stored: Option<Vec<u8>>) -> Self {
        Self { file, stored, writing: None, failed: cause::Last::default() }
    }

    /// Makes `record` the content, unless it is. Safe to repeat.
    ///
    /// # Errors
    ///
    /// Why it is not known to be there, in words.
    pub(super) async fn keep(&mut self, record: Vec<u8>) -> Result<(), String> {
        let file = self.file.clone();
        let write = |content: Vec<u8>| -> Write { async move { file.save(content).await }.boxed() };
        let kept = self.keep_by(record, write).await;
        match &kept {
            Ok(()) => self.failed.clear(),
            Err(error) if self.failed.is_new(error) => {
                warn!(error, "cannot store the record of the network");
            }
            Err(_logged) => {}
        }
        kept
    }

    async fn keep_by(
        &mut self,
        record: Vec<u8>,
        write: impl FnOnce(Vec<u8>) -> Write,
    ) -> Result<(), String> {
        let late = || format!("its disk has not answered within {} s", RECORD_MAX.as_secs());
        if let Some((_, left)) = &mut self.writing {
            let ended = left.now_or_never().ok_or_else(late)?;
            self.ended(&ended);
        }
        if self.stored.as_ref() == Some(&record) {
            return Ok(());
        }
        let (_, write) = self.writing.insert((record.clone(), write(record)));
        let ended = timeout(RECORD_MAX, write).await.map_err(|_elapsed| late())?;
        self.ended(&ended);
        ended.map_err(|error| cause::line(&error))
    }

    /// The write has ended. After an error, either content may be there.
    fn ended(&mut self, ended: &Result<(), Error>) {
        let written = self.writing.take().map(|(content, _)| content);
        self.stored = written.filter(|_| ended.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::Instant;

    use super::*;

    fn kept(folder: &tempfile::TempDir) -> Kept {
        Kept::new(File::public(folder.path().join("network.pb")), None)
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_does_not_answer_costs_its_time_once_and_gets_the_newest_record() {
        let folder = tempfile::tempdir().unwrap();
        let mut kept = kept(&folder);
        let begun = Instant::now();
        let (answer, answered) = oneshot::channel::<()>();
        let hangs = move |_content: Vec<u8>| -> Write { answered.map(|_| Ok(())).boxed() };
        let error = kept.keep_by(b"one".to_vec(), hangs).await.unwrap_err();
        assert!(error.contains("not answered within 20 s"), "{error}");
        let waited = begun.elapsed();
        assert!((RECORD_MAX..RECORD_MAX * 2).contains(&waited), "{waited:?}");
        let never = |_content: Vec<u8>| -> Write { panic!("a write beside another") };
        assert_eq!(kept.keep_by(b"two".to_vec(), never).await, Err(error));
        assert_eq!(begun.elapsed(), waited, "it was waited for once more");

        answer.send(()).unwrap();
        let works = |content: Vec<u8>| -> Write {
            assert_eq!(content, b"two");
            async { Ok(()) }.boxed()
        };
        assert_eq!(kept.keep_by(b"two".to_vec(), works).await, Ok(()));
        assert_eq!(kept.keep_by(b"two".to_vec(), never).await, Ok(()), "it is there");
    }

    #[tokio::test]
    async fn a_record_that_was_refused_is_written_at_the_next_look() {
        let folder = tempfile::tempdir().unwrap();
        let mut kept = kept(&folder);
        std::fs::create_dir(kept.file.path()).unwrap();
        assert!(kept.keep(b"one".to_vec()).await.is_err());
        std::fs::remove_dir(kept.file.path()).unwrap();
        assert_eq!(kept.keep(b"one".to_vec()).await, Ok(()));
        assert_eq!(kept.file.read().unwrap().as_deref(), Some(&b"one"[..]));
    }
}
