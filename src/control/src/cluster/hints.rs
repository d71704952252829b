//! Where this machine's cluster is, by the parameters of this machine.

use polis_proto::v1;
use tokio::sync::watch;

use polis_machine::parameters;

/// The sources of addresses of this machine's cluster.
#[derive(Clone, Debug)]
pub(super) struct Hints {
    pub(super) parameters: watch::Receiver<parameters::Known>,
    /// SHA-256 of the CA of its cluster.
    pub(super) ca: [u8; 32],
}

impl Hints {
    /// Where its cluster is reached.
    pub(super) fn directory(&self) -> v1::ClusterDirectory {
        let known = self.parameters.borrow();
        known.as_ref().and_then(|known| known.directory(&self.ca)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sha2::{Digest as _, Sha256};

    use super::*;

    #[test]
    fn only_parameters_with_the_own_ca_say_where_the_cluster_is() {
        let register = crate::cluster::tests::register();
        let (ca, wanted) = (Sha256::digest(&register.ca_certificate).into(), register.directory());
        let hints = watch::Sender::new(None);
        let own = Hints { parameters: hints.subscribe(), ca };
        assert!(own.directory().nodes.is_empty(), "nothing was read yet");
        let cluster = parameters::Cluster::Register(register);
        let parameters = parameters::Parameters {
            cluster,
            network: parameters::Network::default(),
            console_tui: Vec::new(),
            wipes: None,
        };
        let found = Some((parameters, parameters::Source::Esp));
        let loaded = parameters::Loaded { found, warning: None, tried: Vec::new() };
        hints.send_replace(Some(Arc::new(loaded)));
        assert_eq!(own.directory(), wanted);
        let untrusted = Hints { ca: [0; 32], ..own };
        assert!(untrusted.directory().nodes.is_empty(), "another cluster's parameters");
    }
}
