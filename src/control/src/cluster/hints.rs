//! Where this machine's cluster is, by the parameters of this machine.

use polis_proto::v1;
use tokio::sync::watch;

use polis_machine::parameters;

/// The sources of addresses of this machine's cluster.
#[derive(Clone, Debug)]
pub(super) struct Hints {
    pub(super) parameters: watch::Receiver<parameters::Known>,
    /// DER of the CAs of its cluster that it knows.
    pub(super) cas: Vec<Vec<u8>>,
}

impl Hints {
    /// Where its cluster is reached.
    pub(super) fn directory(&self) -> v1::ClusterDirectory {
        let known = self.parameters.borrow();
        known
            .as_ref()
            .and_then(|known| known.directory(|ca| self.cas.iter().any(|known| known == ca)))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn only_parameters_with_the_own_ca_say_where_the_cluster_is() {
        let register = crate::cluster::tests::register();
        let (cas, wanted) = (vec![register.ca_certificate.clone()], register.directory());
        let hints = watch::Sender::new(None);
        let own = Hints { parameters: hints.subscribe(), cas };
        assert!(own.directory().nodes.is_empty(), "nothing was read yet");
        let cluster = parameters::Cluster::Register(register);
        let parameters = parameters::Parameters {
            cluster,
            network: parameters::Network::default(),
            console_tui: Vec::new(),
            wipes: None,
            install: None,
            volumes: Vec::new(),
            mirror: None,
        };
        let found = Some((parameters, parameters::Source::Esp));
        let loaded = parameters::Loaded { found, warning: None, tried: Vec::new() };
        hints.send_replace(Some(Arc::new(loaded)));
        assert_eq!(own.directory(), wanted);
        let untrusted = Hints { cas: vec![b"another".to_vec()], ..own };
        assert!(untrusted.directory().nodes.is_empty(), "another cluster's parameters");
    }
}
