//! The snapshot of etcd on its way to a file: encrypted to the owners, piece by piece.
//!
//! Invariants:
//! - A stream that ends without an error is the whole of a whole snapshot.
//! - At most some hundred KiB are in memory at once.
//! - It ends in time: etcd keeps all that it deletes meanwhile.

use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use tokio::time::{Instant, timeout_at};

use crate::curator::error::Error;
use crate::curator::store;
use polis_wire::age::{Encryptor, Recipient};
use polis_wire::pki;
use polis_wire::snapshot::Checksum;

/// Enough for the largest database at 5 MB a second.
const TIME_MAX: Duration = Duration::from_secs(30 * 60);

/// Encrypts the pieces of a snapshot.
///
/// # Errors
///
/// When the kernel gives no random bytes. The stream ends with the error of `pieces`, or with
/// [`Error::CutSnapshot`] or [`Error::SlowSnapshot`].
pub(super) fn encrypted<P>(
    pieces: P,
    owners: &[Recipient],
) -> Result<impl Stream<Item = Result<Vec<u8>, Error>> + Send + use<P>, Error>
where
    P: Stream<Item = Result<Vec<u8>, Error>> + Send + 'static,
{
    let begun = Encryptor::begin(owners).map_err(|source| {
        let name = "the encryption of a snapshot".to_owned();
        Error::Store(store::Error::Pki(pki::Error::Random { name, source }))
    });
    let (encryptor, begun) = begun?;
    let end = Instant::now() + TIME_MAX;
    let state = Some((pieces.boxed(), encryptor, Checksum::default()));
    let rest = stream::try_unfold(state, move |state| async move {
        let Some((mut pieces, mut encryptor, mut checksum)) = state else { return Ok(None) };
        let slow = |_elapsed| Error::SlowSnapshot;
        while let Some(piece) = timeout_at(end, pieces.next()).await.map_err(slow)?.transpose()? {
            // Of a caller that reads slowly, the next piece is always there, and nothing is waited
            // for.
            if Instant::now() >= end {
                return Err(Error::SlowSnapshot);
            }
            checksum.add(&piece);
            let out = encryptor.push(&piece);
            if !out.is_empty() {
                return Ok(Some((out, Some((pieces, encryptor, checksum)))));
            }
        }
        match checksum.is_whole() {
            true => Ok(Some((encryptor.finish(), None))),
            false => Err(Error::CutSnapshot { size: checksum.size() }),
        }
    });
    Ok(stream::iter([Ok(begun)]).chain(rest))
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use futures::TryStreamExt as _;
    use sha2::{Digest as _, Sha256};

    use super::*;
    use polis_wire::age::{self, Identity};

    const SECRET: &[u8] = b"the private key of the authority";

    /// The content that a caller receives of a snapshot cut by `less` bytes at its end.
    async fn received(owner: &SigningKey, less: usize) -> Result<Vec<u8>, Error> {
        let content = SECRET.repeat(10_000);
        let mut whole = [&*content, &Sha256::digest(&content)].concat();
        whole.truncate(whole.len() - less);
        let pieces: Vec<_> = whole.chunks(32 * 1024).map(|piece| Ok(piece.to_vec())).collect();
        let owner = Recipient::of_key(owner.verifying_key().as_bytes()).unwrap();
        let chunks = encrypted(stream::iter(pieces), &[owner])?;
        Ok(chunks.try_collect::<Vec<_>>().await?.concat())
    }

    #[tokio::test]
    async fn a_snapshot_holds_nothing_that_is_plain_and_its_owner_reads_it() {
        let owner = SigningKey::from_bytes(&[1; 32]);
        let file = received(&owner, 0).await.unwrap();
        assert!(!file.windows(8).any(|bytes| bytes == &SECRET[..8]), "a plain secret");
        let mut plain = Vec::new();
        age::decrypt(&Identity::of_key(&owner), &*file, &mut plain).unwrap();
        let mut checksum = Checksum::default();
        checksum.add(&plain);
        assert!(checksum.is_whole() && plain.starts_with(SECRET));
        let operator = Identity::of_key(&SigningKey::from_bytes(&[2; 32]));
        assert!(age::decrypt(&operator, &*file, &mut Vec::new()).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_snapshot_that_takes_too_long_ends_with_an_error() {
        let owner = SigningKey::from_bytes(&[1; 32]);
        let owner = Recipient::of_key(owner.verifying_key().as_bytes()).unwrap();
        let chunks = encrypted(stream::pending::<Result<Vec<u8>, Error>>(), &[owner]).unwrap();
        let error = chunks.try_collect::<Vec<_>>().await.unwrap_err();
        assert!(matches!(error, Error::SlowSnapshot), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_snapshot_that_its_caller_reads_too_slowly_ends_with_an_error() {
        let owner = SigningKey::from_bytes(&[1; 32]);
        let owner = Recipient::of_key(owner.verifying_key().as_bytes()).unwrap();
        let pieces = stream::repeat_with(|| Ok(vec![7; 64 << 10]));
        let mut chunks = Box::pin(encrypted(pieces, &[owner]).unwrap());
        for _minute in 0..29 {
            chunks.try_next().await.unwrap().unwrap();
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        chunks.try_next().await.unwrap().unwrap();
        tokio::time::advance(Duration::from_secs(60)).await;
        let error = chunks.try_next().await.unwrap_err();
        assert!(matches!(error, Error::SlowSnapshot), "{error}");
        assert!(chunks.try_next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_snapshot_that_etcd_did_not_send_whole_ends_with_an_error() {
        let owner = SigningKey::from_bytes(&[1; 32]);
        for less in [1, 32, 40_000] {
            let error = received(&owner, less).await.unwrap_err();
            assert!(matches!(error, Error::CutSnapshot { .. }), "{error}");
        }
    }
}
