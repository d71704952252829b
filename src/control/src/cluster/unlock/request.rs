//! Unlock requests: takes the recovery key of the disk over the network, while the node
//! waits for it.
//!
//! ```text
//! Requests::unlock --Request--> the run that waits --Wanted::Open--> storage
//!      ^                            |
//!      +---------- answer ----------+
//! ```
//!
//! What this module does not do: check the caller's permission (`rpc`).

use std::fmt;

use tokio::sync::{mpsc, oneshot, watch};

use super::waiting;
use polis_base::recovery::form;
use polis_machine::storage::key::RecoveryKey;
use polis_wire::rpc::Credentials;

/// The reason why a recovery key did not open the disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The node waits for no key: it is home, or not that far, or has given up.
    #[error("this node does not wait for the key of its disk")]
    NotWaiting,
    /// It is mistyped.
    #[error(transparent)]
    Malformed(#[from] form::Error),
    /// It belongs to another disk, or the disk cannot be opened.
    #[error("the recovery key does not open the disk: {0}")]
    Wrong(String),
}

/// A key from a caller.
#[derive(Debug)]
pub struct Request {
    /// The key to try.
    pub key: RecoveryKey,
    /// Where to say whether it opens the disk.
    pub answer: oneshot::Sender<Result<(), Refused>>,
}

/// The state of a run that waits: a handle to it, and the credentials that it uses
/// meanwhile.
#[derive(Clone, Default)]
pub struct Open(Option<(mpsc::Sender<Request>, Option<Credentials>)>);

impl Open {
    /// The certificate that this machine serves with while it waits: its join key has
    /// signed it, because the cluster's own is on the disk.
    #[must_use]
    pub fn credentials(&self) -> Option<&Credentials> {
        self.0.as_ref().and_then(|(_, credentials)| credentials.as_ref())
    }
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Open(waiting)" } else { "Open(closed)" })
    }
}

/// Where a caller gives a recovery key.
#[derive(Clone, Debug)]
pub struct Requests(watch::Receiver<Open>);

impl Requests {
    /// Requests to the service that publishes on the other end of `open`.
    #[must_use]
    pub fn new(open: watch::Receiver<Open>) -> Self {
        Self(open)
    }

    /// Whether the node waits for a key. The cluster's status publishes changes of this.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.borrow().0.is_some()
    }

    /// How the run can be reached, as an event value.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Open> {
        self.0.clone()
    }

    /// Tries the recovery key in `text`. Not cancel-safe: the disk may open after
    /// the caller has gone.
    ///
    /// # Errors
    ///
    /// [`Refused`]; the disk is as it was.
    pub async fn unlock(&self, text: &str) -> Result<(), Refused> {
        let key = RecoveryKey::new(form::read(text)?);
        let (open, _) = self.0.borrow().0.clone().ok_or(Refused::NotWaiting)?;
        let (answer, answered) = oneshot::channel();
        open.send(Request { key, answer }).await.map_err(|_gone| Refused::NotWaiting)?;
        answered.await.unwrap_or(Err(Refused::NotWaiting))
    }
}

/// The run that waits for keys.
pub type Waiting<'a> = waiting::Waiting<'a, Open, Request>;

/// Publishes on `open` that keys are taken; the run has `credentials` meanwhile.
pub fn wait(open: &watch::Sender<Open>, credentials: Option<Credentials>) -> Waiting<'_> {
    Waiting::new(open, |requests| Open(Some((requests, credentials))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_is_taken_only_while_the_node_waits_for_one() {
        let open = watch::Sender::<Open>::default();
        let requests = Requests::new(open.subscribe());
        let text = form::write(&[7; form::SIZE]);
        assert_eq!(requests.unlock(&text).await, Err(Refused::NotWaiting));
        let mut waiting = wait(&open, None);
        assert!(requests.is_open());
        assert_eq!(requests.unlock("abc").await, Err(Refused::Malformed(form::Error::Length(3))));
        let (answered, ()) = tokio::join!(requests.unlock(&text), async {
            let request = waiting.next().await;
            assert_eq!(*request.key.bytes(), [7; form::SIZE]);
            request.answer.send(Ok(())).unwrap();
        });
        assert_eq!(answered, Ok(()));
        drop(waiting);
        assert!(!requests.is_open());
    }
}
