//! The unlock of an encrypted partition: the order of its steps.
//!
//! `storage::machine` takes the steps, with `cryptsetup`; in the tests, a step fails that
//! they choose.
//!
//! ```text
//! size -> open -> size --as before-----------------------> new passphrase
//!                   \--another--> close --> open again ----^
//!                                     \--in use-----------^
//! ```
//!
//! Invariants:
//! - An unlock that succeeds has set the new passphrase: its caller relies on that. A
//!   partition that did not take its new size takes it at the next boot.

use std::io;

use tracing::warn;

use super::luks::OpenError;

/// The steps.
pub(super) trait Steps {
    /// Opens the partition.
    fn open(&self) -> impl Future<Output = Result<(), OpenError>> + Send;

    /// The room of the integrity device, which the kernel writes when it starts it; `None`
    /// for a kind without one.
    fn integrity_size(&self) -> impl Future<Output = Option<u64>> + Send;

    /// Closes the partition.
    fn close(&self) -> impl Future<Output = io::Result<()>> + Send;

    /// Gives the partition its new passphrase, if there is one.
    fn rekey(&self) -> impl Future<Output = Result<(), OpenError>> + Send;
}

/// Opens the partition at the size that it has now, and gives it its new passphrase.
///
/// # Errors
///
/// [`OpenError::Unfit`] when the key is wrong.
pub(super) async fn unlock(steps: &impl Steps) -> Result<(), OpenError> {
    let before = steps.integrity_size().await;
    steps.open().await?;
    if steps.integrity_size().await != before {
        // The partition has grown: the integrity device has just learnt that, and
        // the layers above it have not.
        let closed = steps.close().await;
        if let Err(error) = closed {
            warn!(error = &error as &dyn std::error::Error, "cannot open it at its new size yet");
        } else {
            steps.open().await?;
        }
    }
    steps.rekey().await
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A partition that has grown.
    struct Grown {
        closes: bool,
        taken: Mutex<Vec<&'static str>>,
    }

    impl Grown {
        fn take(&self, step: &'static str) {
            self.taken.lock().unwrap().push(step);
        }
    }

    impl Steps for Grown {
        async fn open(&self) -> Result<(), OpenError> {
            self.take("open");
            Ok(())
        }

        async fn integrity_size(&self) -> Option<u64> {
            Some(if self.taken.lock().unwrap().is_empty() { 1 } else { 2 })
        }

        async fn close(&self) -> io::Result<()> {
            self.take("close");
            if self.closes { Ok(()) } else { Err(io::ErrorKind::ResourceBusy.into()) }
        }

        async fn rekey(&self) -> Result<(), OpenError> {
            self.take("rekey");
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_partition_gets_its_new_passphrase_also_where_it_does_not_close() {
        let all = ["open", "close", "open", "rekey"];
        let fewer = ["open", "close", "rekey"];
        for (closes, steps) in [(true, &all[..]), (false, &fewer[..])] {
            let grown = Grown { closes, taken: Mutex::default() };
            unlock(&grown).await.unwrap();
            assert_eq!(*grown.taken.lock().unwrap(), steps);
        }
    }
}
