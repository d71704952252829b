//! The node of a machine in maintenance: answers calls of the owner, or of the reader of the
//! screen, while `init` shows a guru meditation.
//!
//! `init` starts `node` again after a failure, with the report of it. This tree is all of that
//! `node`: it has the network, the firewall and one server, and no disk, no cluster, no key.
//!
//! ```text
//! report, log --init--> [survey of the parameters] --> Gate --> server, port 7839
//!                              |                                   |
//!                              +--> network --address--> [notice] <+ calls
//!                                                           +--> init: screen, countdown
//! ```
//!
//! Invariants:
//! - A machine whose parameters name an owner shows no code: only a key opens it.
//! - Nothing here opens the trapdoor: parameters that cannot be used are those of no owner.
//! - The code is in no log of this process; `init` shows it.
//!
//! What this module does not do: count down or end the machine (`init`), check what the
//! parameters mean for the machine (`cluster`), or open its disk.

mod gate;
mod machine;
mod notice;
mod serve;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rand::rngs::SysError;
use tokio::sync::watch;

use crate::firewall;
use polis_base::environment::Environment;
use polis_base::files;
use polis_base::sys::reboot::Reason;
use polis_base::trapdoor::Report;
use polis_control::{cluster, consensus};
use polis_machine::network;
use polis_machine::parameters::{self, METADATA_ADDRESS, Surveyor, metadata_v6};
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_wire::endpoint::MANAGEMENT_PORT;
use polis_wire::identity;
use polis_wire::rpc::{self, AccessList, App, Limits, Listen, Metrics, Table};

use self::gate::Gate;

/// Bytes of a request: the largest parameters, and what is around them.
const MESSAGE_MAX: usize = (64 << 10) + 1024;

/// What `init` shows, and whether a call was admitted; an event value.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Shown {
    /// The command that reaches this machine, and the code or the fingerprint; empty until there
    /// is an address.
    pub text: String,
    /// How many calls were admitted.
    pub calls: u64,
    /// The last of their callers.
    pub caller: String,
}

impl fmt::Debug for Shown {
    /// Without the text, which may have a code.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shown").field("calls", &self.calls).finish_non_exhaustive()
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The facts from `init`.
    pub environment: Environment,
    /// Why the machine is in maintenance.
    pub report: Report,
    /// The rules of the firewall.
    pub firewall: firewall::Config,
    /// The tree of files.
    pub tree: files::Root,
    /// Where the kernel shows things, and where the devices are.
    pub kernel: [PathBuf; 2],
    /// Where it listens.
    pub listen: Listen,
    /// The channel for requests to end the machine.
    pub end: watch::Sender<Option<Reason>>,
    /// What `init` shows.
    pub shown: watch::Sender<Shown>,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel gave no random bytes.
    #[error("cannot make a one-time code: no random bytes")]
    Random(#[source] SysError),
    /// A key does not sign its own certificate.
    #[error("cannot make the certificate of this machine")]
    Key(#[from] identity::Error),
    /// The descriptors of the API cannot be read: the build is broken.
    #[error("cannot read who may call")]
    Table(#[from] rpc::access::Unreadable),
}

impl Service {
    /// The service of a running machine.
    #[must_use]
    pub fn live(
        environment: &Environment,
        report: &Report,
        firewall: firewall::Config,
        end: watch::Sender<Option<Reason>>,
        shown: watch::Sender<Shown>,
    ) -> Self {
        Self {
            environment: environment.clone(),
            report: report.clone(),
            firewall,
            tree: files::Root::live(),
            kernel: ["/sys", "/dev"].map(PathBuf::from),
            listen: Listen::Everywhere(MANAGEMENT_PORT),
            end,
            shown,
        }
    }

    /// Where node parameters may be.
    fn places(&self) -> parameters::Config {
        let [sys, dev] = self.kernel.clone();
        let esp = &self.tree.esp;
        parameters::Config {
            sys,
            dev,
            esp: esp.parameters.clone(),
            given: esp.given_parameters.clone(),
            kept: esp.user_data.clone(),
            metadata: METADATA_ADDRESS,
            metadata_v6,
        }
    }

    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(self, ctx: Context) -> Result<(), Error> {
        let surveyor = Surveyor::new(self.places());
        let Some(survey) = ctx.until_cancelled(surveyor.survey()).await else {
            return Ok(());
        };
        let owner = Gate::owner(&survey.loaded);
        // The rounds of the code take a moment.
        let gate = blocking(move || Gate::new(owner)).await?;
        let known = watch::Sender::new(Some(Arc::new(survey.loaded)));
        let network = watch::Sender::new(network::Status::default());
        let listening = watch::Sender::new(None);
        self.face(&ctx, &known, &network);
        self.server(&ctx, &gate, surveyor, &network, &listening)?;
        let notice = notice::Service {
            gate: gate.notice(),
            network: network.subscribe(),
            listening: listening.subscribe(),
            shown: self.shown.clone(),
        };
        ctx.spawn("notice", Policy::forever(), move |ctx| notice.clone().run(ctx));
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    /// The network of the parameters, or that of a machine without any, and its firewall.
    fn face(
        &self,
        ctx: &Context,
        known: &watch::Sender<parameters::Known>,
        status: &watch::Sender<network::Status>,
    ) {
        let forever = Policy::forever();
        let asks = watch::Sender::new(false);
        let (ordered, proof) = (watch::Sender::default(), watch::Sender::default());
        let network = network::Service {
            config: network::Config {
                interfaces: network::Interfaces::Hardware,
                sys: self.kernel[0].clone(),
                resolv_conf: self.tree.ephemeral.resolv_conf.clone(),
                record: self.tree.esp.network.clone(),
            },
            known: known.subscribe(),
            order: ordered.subscribe(),
            proof: proof.subscribe(),
            asks: asks.subscribe(),
            status: status.clone(),
        };
        let apart = Apart::default();
        let firewall = firewall::Service {
            config: self.firewall.clone(),
            inputs: apart.inputs(&asks),
            network: status.subscribe(),
            status: watch::Sender::default(),
        };
        // The values of a cluster that is not there live as long as the services that read them.
        let held = (known.clone(), asks, ordered, proof, apart);
        ctx.spawn("network", forever, move |ctx| {
            let _held = &held;
            network.clone().run(ctx)
        });
        ctx.spawn("firewall", forever, move |ctx| firewall.clone().run(ctx));
    }

    fn server(
        &self,
        ctx: &Context,
        gate: &Gate,
        surveyor: Surveyor,
        network: &watch::Sender<network::Status>,
        listening: &watch::Sender<Option<SocketAddr>>,
    ) -> Result<(), Error> {
        let table = Arc::new(Table::polis()?);
        let handlers = serve::Handlers::new(self, gate, surveyor, network.subscribe());
        let credentials = watch::Sender::new(Some(gate.credentials()?));
        let lists = watch::Sender::new(Arc::<AccessList>::default());
        let server = rpc::Server {
            config: rpc::Config {
                name: "maintenance",
                listen: self.listen.clone(),
                limits: Limits { untrusted_message: MESSAGE_MAX, ..Limits::default() },
            },
            credentials: credentials.subscribe(),
            named: None,
            access_list: lists.subscribe(),
            metrics: Arc::new(Metrics::new(&table)),
            table,
            app: App::Grpc(handlers.routes()),
            refused: None,
            reached: None,
            listening: listening.clone(),
        };
        let held = (credentials, lists);
        ctx.spawn("grpc", Policy::forever(), move |ctx| {
            let _held = &held;
            server.clone().run(ctx)
        });
        Ok(())
    }
}

/// The values of a cluster, for a machine apart from any.
#[derive(Debug, Default)]
struct Apart {
    cluster: cluster::Writer,
    consensus: watch::Sender<consensus::Status>,
    roles: watch::Sender<Option<polis_proto::v1::NodeRoles>>,
    nodes: watch::Sender<Option<Arc<polis_wire::node_roles::Nodes>>>,
    peers: watch::Sender<network::names::Peers>,
    order: watch::Sender<Option<firewall::Order>>,
}

impl Apart {
    fn inputs(&self, asks: &watch::Sender<parameters::Asking>) -> firewall::Inputs {
        firewall::Inputs {
            cluster: self.cluster.subscribe(),
            consensus: self.consensus.subscribe(),
            roles: self.roles.subscribe(),
            nodes: self.nodes.subscribe(),
            peers: self.peers.subscribe(),
            order: self.order.subscribe(),
            asks: asks.subscribe(),
        }
    }
}
