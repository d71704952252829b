//! The target of snapshots: where the leader sends them, and the key that it sends them with.
//!
//! ```text
//! cluster/configuration         the bucket: every reader of the cluster may read it
//! cluster/snapshot_credentials  the key: no call hands it out
//! ```
//!
//! Invariants:
//! - Both are written in one step, so there is a target exactly if there is a key for it.
//! - A key is never used at another bucket than the one that its owner gave it for.
//!
//! What this module does not do: send anything (`shipping` of the node).

use polis_proto::v1;
use prost::Message as _;

use super::error::Error;
use super::store::{self, CONFIGURATION, SNAPSHOT_CREDENTIALS, Store};
use polis_wire::age::Recipient;
use polis_wire::parameters::{self, snapshot_target};
use polis_wire::pki::{self, Write};
use polis_wire::s3::{Bucket, Credentials};

/// Everything that a snapshot is sent with.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it goes.
    pub bucket: Bucket,
    /// The credentials of the cluster at the store.
    pub credentials: Credentials,
    /// Those who can decrypt it.
    pub owners: Vec<Recipient>,
    /// The domain of the cluster.
    pub domain: String,
}

impl<S: pki::Store + Clone> Store<S> {
    /// Where snapshots go now; `None`: nowhere.
    ///
    /// # Errors
    ///
    /// [`store::Error`].
    pub async fn snapshot_target(&self) -> Result<Option<Target>, store::Error> {
        let configuration = self.configuration().await?;
        let damaged = |key: &str| store::Error::Damaged { key: key.to_owned() };
        let bucket = target(configuration.snapshots.as_ref());
        let Some(bucket) = bucket.map_err(|_invalid| damaged(CONFIGURATION))? else {
            return Ok(None);
        };
        let stored = self.read::<v1::SnapshotCredentials>(SNAPSHOT_CREDENTIALS).await?;
        let missing = || store::Error::Missing { key: SNAPSHOT_CREDENTIALS.to_owned() };
        let v1::SnapshotCredentials { access_key_id, secret_access_key } =
            stored.ok_or_else(missing)?;
        let secret = zeroize::Zeroizing::new(secret_access_key);
        let credentials = Credentials::new(&access_key_id, &secret)
            .map_err(|_invalid| damaged(SNAPSHOT_CREDENTIALS))?;
        let owners = self.owner_recipients().await?;
        let domain = match configuration.cluster_domain.as_str() {
            "" => parameters::ClusterConfiguration::default().domain,
            domain => domain.to_owned(),
        };
        Ok(Some(Target { bucket, credentials, owners, domain }))
    }

    /// The write that would leave the stored credentials as they are; `None` without any.
    pub(super) async fn stored_credentials(&self) -> Result<Option<Write>, store::Error> {
        let stored = self.kv.get(SNAPSHOT_CREDENTIALS).await.map_err(store::Error::Store)?;
        Ok(stored.map(|entry| Write::Put(SNAPSHOT_CREDENTIALS.to_owned(), entry.value)))
    }
}

/// The stored target and the writes beside it after a change; `credentials` are those of the
/// same change.
pub(super) fn change(
    old: Option<&v1::SnapshotConfiguration>,
    desired: Option<&v1::SnapshotConfiguration>,
    credentials: Option<&v1::SnapshotCredentials>,
) -> Result<(Option<v1::SnapshotConfiguration>, Vec<Write>), Error> {
    // The stored bytes were checked.
    let before = target(old).unwrap_or_default();
    let after = match desired {
        Some(_) => target(desired).map_err(|error| Error::Field(error.to_string()))?,
        None => before.clone(),
    };
    let key = SNAPSHOT_CREDENTIALS.to_owned();
    let writes = match (&after, credentials) {
        (Some(_), Some(new)) => vec![Write::Put(key, checked(new)?.encode_to_vec())],
        (None, Some(_)) => return Err(refused("there is no target of snapshots; name it, too")),
        (Some(after), None) if !before.as_ref().is_some_and(|it| it.has_the_key_of(after)) => {
            return Err(refused(
                "missing; a target in another bucket needs the key of that bucket",
            ));
        }
        (None, None) if before.is_some() => vec![Write::Delete(key)],
        (_, None) => Vec::new(),
    };
    let stored = match (desired, &after) {
        (Some(desired), Some(after)) => {
            Some(v1::SnapshotConfiguration { url: after.url(), ..desired.clone() })
        }
        (Some(_), None) => None,
        (None, _) => old.cloned(),
    };
    Ok((stored, writes))
}

fn target(
    message: Option<&v1::SnapshotConfiguration>,
) -> Result<Option<Bucket>, parameters::Error> {
    let read = message.map(|message| snapshot_target(message, "configuration.snapshots"));
    Ok(read.transpose()?.flatten())
}

fn checked(message: &v1::SnapshotCredentials) -> Result<v1::SnapshotCredentials, Error> {
    let v1::SnapshotCredentials { access_key_id, secret_access_key } = message;
    let read = Credentials::new(access_key_id, secret_access_key);
    read.map_err(|invalid| refused(&invalid.to_string()))?;
    Ok(message.clone())
}

fn refused(why: &str) -> Error {
    Error::Field(format!("snapshot_credentials: {why}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A change of the target: none, nowhere, or one of some buckets.
    fn desired(choice: usize) -> Option<v1::SnapshotConfiguration> {
        const URLS: [&str; 5] = [
            "",
            "s3+https://a.example/bucket",
            "s3+https://A.example:443/bucket/prefix/",
            "s3+https://a.example/other",
            "s3+http://a.example/bucket",
        ];
        let url = (*URLS.get(choice)?).to_owned();
        Some(v1::SnapshotConfiguration { url, ..Default::default() })
    }

    proptest! {
        #[test]
        fn there_is_a_key_exactly_if_there_is_a_target_and_it_was_given_for_that_bucket(
            changes in prop::collection::vec((0_usize..6, any::<bool>()), 0..30),
        ) {
            let (mut stored, mut given_for): (Option<v1::SnapshotConfiguration>, _) = (None, None);
            for (choice, with_key) in changes {
                let desired = desired(choice);
                let key = v1::SnapshotCredentials {
                    access_key_id: "id".to_owned(),
                    secret_access_key: "secret".to_owned(),
                };
                let key = with_key.then_some(key);
                let changed = change(stored.as_ref(), desired.as_ref(), key.as_ref());
                let Ok((new, writes)) = changed else { continue };
                stored = new;
                let bucket = target(stored.as_ref()).unwrap();
                for write in writes {
                    given_for = match write {
                        Write::Put(..) => bucket.clone(),
                        Write::Delete(_) => None,
                    };
                }
                prop_assert_eq!(bucket.is_some(), given_for.is_some());
                if let (Some(bucket), Some(given_for)) = (&bucket, &given_for) {
                    prop_assert!(bucket.has_the_key_of(given_for));
                }
            }
        }
    }
}
