//! The words of fingerprints, computed away from the waiting code.
//!
//! Words cost tens of milliseconds of a processor, on purpose
//! ([`Fingerprint::words`]); the console draws ten times a second. So a
//! service computes each of them once, where it may block.
//!
//! Invariants:
//! - The words of a fingerprint are not computed twice while they are requested.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;

use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::Fingerprint;

/// Fingerprints requested at once, at most: a screen shows a few.
const REQUESTS_MAX: usize = 64;

/// The words of the requested fingerprints.
pub(super) type FingerprintWords = BTreeMap<Fingerprint, String>;

/// Computes words. Holds no progress but in `words`.
#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) requested: watch::Receiver<BTreeSet<Fingerprint>>,
    pub(super) words: watch::Sender<FingerprintWords>,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        loop {
            let requested = self.requested.borrow_and_update().clone();
            self.words.send_if_modified(|words| {
                let before = words.len();
                words.retain(|known, _| requested.contains(known));
                words.len() != before
            });
            let known = self.words.borrow().clone();
            for fingerprint in
                requested.into_iter().filter(|it| !known.contains_key(it)).take(REQUESTS_MAX)
            {
                let computed = tokio::task::spawn_blocking(move || fingerprint.words());
                match ctx.until_cancelled(computed).await {
                    None => return Ok(()),
                    // Not to be had: the digits are there too.
                    Some(Err(_panicked)) => {}
                    Some(Ok(words)) => {
                        self.words.send_modify(|all| drop(all.insert(fingerprint, words)));
                    }
                }
            }
            match ctx.until_cancelled(self.requested.changed()).await {
                Some(changed) => changed.map_err(|_closed| Closed("what is asked for"))?,
                None => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_runtime::supervisor::Policy;

    #[tokio::test]
    async fn requested_words_are_published_and_the_rest_dropped() {
        let (one, other) = (Fingerprint::of_key(&[1; 32]), Fingerprint::of_key(&[2; 32]));
        let requested = watch::Sender::new(BTreeSet::from([one]));
        let service = Service { requested: requested.subscribe(), words: watch::Sender::default() };
        let mut words = service.words.subscribe();
        let (ctx, handles) = Context::for_test();
        ctx.spawn("words", Policy::forever(), move |ctx| service.clone().run(ctx));
        words.wait_for(|words| words.contains_key(&one)).await.unwrap();
        requested.send_replace(BTreeSet::from([other]));
        let now = words.wait_for(|words| words.contains_key(&other)).await.unwrap().clone();
        assert_eq!(now, BTreeMap::from([(other, other.words())]));
        handles.cancel().await;
    }
}
