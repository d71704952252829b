//! Changes what holds for the whole cluster.

use polis_proto::v1;
use tracing::info;

use super::error::Error;
use super::store::{CONFIGURATION, Outcome, Store};
use crate::{parameters, pki};

impl<S: pki::Store + Clone> Store<S> {
    /// Replaces the configuration. What a running cluster is built on stays.
    ///
    /// # Errors
    ///
    /// [`Error::Field`], [`Error::Fixed`].
    pub async fn configure(
        &self,
        wish: v1::ClusterConfiguration,
    ) -> Result<v1::ClusterConfiguration, Error> {
        let checked = parameters::configuration(wish.clone(), "configuration");
        let checked = checked.map_err(|error| Error::Field(error.to_string()))?;
        let wish = v1::ClusterConfiguration { cluster_domain: checked.domain, ..wish };
        let written = self.update(CONFIGURATION, |old: Option<v1::ClusterConfiguration>| {
            let old = old.unwrap_or_default();
            let domain = if old.cluster_domain.is_empty() {
                parameters::ClusterConfiguration::default().domain
            } else {
                old.cluster_domain.clone()
            };
            // It is in names that workload was given, and in certificates.
            if wish.cluster_domain != domain {
                return Err(Error::Fixed { field: "cluster_domain", value: domain });
            }
            if wish == old {
                return Ok(Outcome::Keep(old));
            }
            info!("the cluster's configuration was changed");
            Ok(Outcome::Put(wish.clone(), Vec::new(), Vec::new()))
        });
        written.await
    }
}
