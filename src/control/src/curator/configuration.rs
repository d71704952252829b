//! The cluster's configuration: changes the settings that hold for the whole cluster.

use polis_proto::v1;
use tracing::info;

use super::error::Error;
use super::store::{CONFIGURATION, Outcome, Store};
use polis_machine::parameters;
use polis_wire::pki;

impl<S: pki::Store + Clone> Store<S> {
    /// Changes the fields that `wish` names; fields that are unset there stay as they are,
    /// so that two operators who change different fields at once do not undo each other.
    /// The settings that a running cluster is built on stay.
    ///
    /// # Errors
    ///
    /// [`Error::Field`], [`Error::Fixed`].
    pub async fn configure(
        &self,
        desired: v1::ClusterConfiguration,
    ) -> Result<v1::ClusterConfiguration, Error> {
        let checked = parameters::configuration(desired.clone(), "configuration");
        let checked = checked.map_err(|error| Error::Field(error.to_string()))?;
        let written = self.update(CONFIGURATION, |old: Option<v1::ClusterConfiguration>| {
            let old = old.unwrap_or_default();
            let domain = if old.cluster_domain.is_empty() {
                parameters::ClusterConfiguration::default().domain
            } else {
                old.cluster_domain.clone()
            };
            // The value is in names that workload was given, and in certificates.
            if !desired.cluster_domain.is_empty() && checked.domain != domain {
                return Err(Error::Fixed { field: "cluster_domain", value: domain });
            }
            let either = |desired: i32, old: i32| if desired == 0 { old } else { desired };
            let new = v1::ClusterConfiguration {
                cluster_domain: domain,
                tpm_mode: either(desired.tpm_mode, old.tpm_mode),
                storage_security_policy: either(
                    desired.storage_security_policy,
                    old.storage_security_policy,
                ),
                cold_start: either(desired.cold_start, old.cold_start),
                time: desired.time.clone().or_else(|| old.time.clone()),
            };
            if new == old {
                return Ok(Outcome::Keep(old));
            }
            info!("the cluster's configuration was changed");
            Ok(Outcome::Put(new, Vec::new(), Vec::new()))
        });
        written.await
    }
}
