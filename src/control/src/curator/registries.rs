//! The registries of images: one record with all of them, so that a limit on their number
//! holds however many owners change them at once.

use std::time::SystemTime;

use polis_proto::v1;
use tracing::info;

use super::error::Error;
use super::store::{Outcome, REGISTRIES, Store};
use polis_wire::pki;
use polis_wire::registry::{REGISTRIES_MAX, Registry};

impl<S: pki::Store + Clone> Store<S> {
    /// Sets how workers reach a registry, instead of what was there.
    ///
    /// # Errors
    ///
    /// [`Error::Field`].
    pub async fn set_registry(
        &self,
        desired: &v1::Registry,
        now: SystemTime,
    ) -> Result<v1::Registry, Error> {
        let desired = Registry::read_at(desired, now);
        let desired = desired.map_err(|invalid| Error::Field(invalid.to_string()))?.to_message();
        let written = self.update(REGISTRIES, |old: Option<v1::Registries>| {
            let old = old.unwrap_or_default();
            let mut new = old.clone();
            match new.registries.binary_search_by(|one| one.host.cmp(&desired.host)) {
                Ok(at) if new.registries[at] == desired => return Ok(Outcome::Keep(old)),
                Ok(at) => new.registries[at] = desired.clone(),
                Err(_) if new.registries.len() >= REGISTRIES_MAX => {
                    let text = format!(
                        "registry: the cluster has {REGISTRIES_MAX} registries, and allowed are \
                         no more; delete one first"
                    );
                    return Err(Error::Field(text));
                }
                Err(at) => new.registries.insert(at, desired.clone()),
            }
            info!(host = desired.host, "the way to a registry of images was set");
            Ok(Outcome::Put(new, Vec::new(), Vec::new()))
        });
        written.await?;
        Ok(desired)
    }

    /// Forgets a registry.
    ///
    /// # Errors
    ///
    /// [`Error::RegistryUnknown`].
    pub async fn delete_registry(&self, host: &str) -> Result<(), Error> {
        let written = self.update(REGISTRIES, |old: Option<v1::Registries>| {
            let mut new = old.unwrap_or_default();
            let Some(at) = new.registries.iter().position(|one| one.host == host) else {
                let host = host.chars().take(64).collect();
                return Err(Error::RegistryUnknown { host });
            };
            new.registries.remove(at);
            info!(host, "the way to a registry of images was deleted");
            Ok(Outcome::Put(new, Vec::new(), Vec::new()))
        });
        written.await.map(drop)
    }
}
