//! How kubelet finds the driver: it calls this service at the driver's socket, which appears
//! in its directory of plugins, and says whether it takes the driver.

use polis_proto::plugin::registration_server::Registration as Service;
use polis_proto::plugin::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::names::DRIVER;

/// The kind of a volume driver in kubelet's words.
const KIND: &str = "CSIPlugin";

/// The versions of the interface that kubelet looks for.
const VERSIONS: [&str; 1] = ["1.0.0"];

/// The answer of kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Registered {
    /// Nothing yet.
    #[default]
    Unknown,
    /// It uses the driver.
    Yes,
    /// It does not.
    No {
        /// Its words.
        cause: String,
    },
}

/// The registration of the driver.
#[derive(Clone, Debug)]
pub(super) struct Registration {
    pub(super) registered: watch::Sender<Registered>,
}

#[tonic::async_trait]
impl Service for Registration {
    async fn get_info(
        &self,
        _request: Request<InfoRequest>,
    ) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: KIND.to_owned(),
            name: DRIVER.to_owned(),
            // The driver serves at the same socket.
            endpoint: String::new(),
            supported_versions: VERSIONS.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.registered.send_replace(match plugin_registered {
            true => Registered::Yes,
            false => Registered::No { cause: error },
        });
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
