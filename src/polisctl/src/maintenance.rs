//! `polisctl maintenance`: a machine that shows a guru meditation, over the network.
//!
//! ```text
//! --code, from the screen ----> keys of both ends ------------------------------+--> call
//! owner's key, certificate; fingerprint of the screen --> key of the machine ---+
//! ```
//!
//! A machine without an owner shows a code, from which both ends derive their keys. One whose node
//! parameters name an owner shows the fingerprint of its key, and wants the owner's key or a
//! certificate of its cluster.
//!
//! Invariants:
//! - Nothing is asked of a machine whose key is neither that of the code nor of the fingerprint.
//! - The owner's certificate is shown only to a machine that refused the owner's key.

use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::maintenance_client::MaintenanceClient;
use polis_proto::v1::read_log_request::Log as LogKind;
use polis_tui::bytes;
use serde::Serialize;
use tokio::time::sleep;
use tonic::{Code as StatusCode, Status};

use super::ask::{Go, Sure};
use super::error::{Error, Explain as _};
use super::output::{Document, Format, fields, or_dash};
use super::session::{Limit, credentials, refused, unreached};
use super::text::clean;
use super::{Global, ask, key, ownership, parameters};
use polis_wire::endpoint::{Endpoint, MANAGEMENT_PORT};
use polis_wire::identity::{Fingerprint, NodeId, Spoken};
use polis_wire::maintenance::Code;
use polis_wire::parameters::Cluster;
use polis_wire::pki::Facts;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Channel, Connection, DialError, Expect, Trust, dial};

/// Between two attempts at a machine that is waited for.
const RETRY: Duration = Duration::from_millis(500);

/// Commands for machines in maintenance.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Print the failure, the disks, the addresses and the node parameters of a machine.
    Describe {
        #[command(flatten)]
        machine: Machine,
    },
    /// Print a log of a machine.
    Logs {
        #[command(flatten)]
        machine: Machine,
        /// The log.
        #[arg(long, value_enum, default_value_t)]
        log: Log,
    },
    /// Give a machine node parameters, and reboot it.
    Parameters {
        #[command(flatten)]
        machine: Machine,
        /// The file: a message, its text, or a disk image; `-` is standard input.
        file: PathBuf,
        /// Replace other node parameters that the machine has.
        #[arg(long)]
        replace: bool,
        /// Do not reboot the machine: it reads them at its next start.
        #[arg(long)]
        no_reboot: bool,
        #[command(flatten)]
        sure: Sure,
    },
    /// Reboot a machine.
    Reboot(End),
    /// Power a machine off.
    Poweroff(End),
}

/// A machine to reboot or power off.
#[derive(Debug, clap::Args)]
pub(super) struct End {
    #[command(flatten)]
    machine: Machine,
    #[command(flatten)]
    sure: Sure,
}

/// Which machine, and what its screen shows.
#[derive(Debug, clap::Args)]
pub(super) struct Machine {
    /// The address on the machine's screen.
    #[arg(value_name = "HOST[:PORT]", value_parser = endpoint)]
    host: Endpoint,
    /// The one-time code on the machine's screen [default: asked for].
    #[arg(long, value_name = "CODE", conflicts_with_all = ["fingerprint", "owner_key"])]
    code: Option<Code>,
    /// The fingerprint on the machine's screen, in words or digits [default: asked for].
    #[arg(long, value_name = "WORDS")]
    fingerprint: Option<Spoken>,
    /// The owner's private key [default: that of the context, or of `owner create`].
    #[arg(long, value_name = "FILE")]
    owner_key: Option<PathBuf>,
}

/// A log of a machine.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(super) enum Log {
    /// The lines before the failure.
    #[default]
    Failure,
    /// The kernel's log.
    Kernel,
    /// The reports of the last failures, kept on the ESP.
    Reports,
}

impl From<Log> for LogKind {
    fn from(log: Log) -> Self {
        match log {
            Log::Failure => Self::Unspecified,
            Log::Kernel => Self::Kernel,
            Log::Reports => Self::Reports,
        }
    }
}

fn endpoint(text: &str) -> Result<Endpoint, polis_wire::endpoint::Invalid> {
    Endpoint::parse(text, MANAGEMENT_PORT)
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::Describe { machine } => {
            let reached = Reached::new(&machine, global).await?;
            global.out.print(&described(reached.described)?)
        }
        Command::Logs { machine, log } => {
            Reached::new(&machine, global).await?.log(log, global).await
        }
        Command::Parameters { machine, file, replace, no_reboot, sure } => {
            give(&machine, &file, Given { replace, no_reboot }, sure, global).await
        }
        Command::Reboot(End { machine, sure }) => end(&machine, false, sure, global).await,
        Command::Poweroff(End { machine, sure }) => end(&machine, true, sure, global).await,
    }
}

/// A machine that has answered, and the way to it.
struct Reached {
    host: Endpoint,
    credentials: Credentials,
    node: NodeId,
    limit: Option<Limit>,
    described: v1::DescribeResponse,
}

impl Reached {
    /// Reaches a machine, proves the caller and reads what it says of itself.
    async fn new(machine: &Machine, global: &Global) -> Result<Self, Error> {
        let limit = global.timeout.map(Limit::new);
        let asked = match (&machine.code, &machine.fingerprint) {
            (None, None) => asked(global)?,
            (code, _) => code.clone(),
        };
        let progress = global.out.progress();
        progress.says(&format!("connecting to {}", machine.host));
        let reached = match asked {
            Some(code) => Box::pin(Self::by_code(&machine.host, &code, limit)).await,
            None => Box::pin(Self::by_owner(machine, global, limit)).await,
        };
        drop(progress);
        reached.doing(|| format!("cannot reach the machine at {}", machine.host))
    }

    async fn by_code(host: &Endpoint, code: &Code, limit: Option<Limit>) -> Result<Self, Error> {
        let keys = code.keys();
        let failed = || "cannot use the keys of this code".to_owned();
        let credentials = Credentials {
            certificate: keys.caller.proof().doing(failed)?,
            key: keys.caller.to_pkcs8_der().doing(failed)?.into(),
            authorities: None,
        };
        let node = keys.machine.id();
        let connection = reach(host, Expect::Node(node), &credentials, limit).await;
        let connection = connection.map_err(|error| match error {
            Unreached::Dial(DialError::Handshake { .. }) => Error::new(
                "the machine does not have this code, or another one has its address",
            )
            .or_help("read the code on its screen again: each start of the machine makes another"),
            error => error.explained(),
        })?;
        let described = describe(connection.channel).await;
        let described = described.map_err(|status| refused("describe the machine", &status))?;
        Ok(Self { host: host.clone(), credentials, node, limit, described })
    }

    async fn by_owner(
        machine: &Machine,
        global: &Global,
        limit: Option<Limit>,
    ) -> Result<Self, Error> {
        let host = machine.host.clone();
        let context = global.contexts.context(global.context.as_deref())?;
        let file = match (&machine.owner_key, &context) {
            (Some(file), _) => file.clone(),
            (None, Some(context)) if !context.settings.key.as_os_str().is_empty() => {
                context.settings.key.clone()
            }
            (None, _) => global.contexts.owner_key(),
        };
        let key = key::read(&file, &global.passphrase)
            .help(|| "name the owner's key with --owner-key".to_owned())?;
        let own = credentials(&key, ownership::self_signed(&key)?, None);
        let connection = reach(&host, Expect::AnyNode, &own, limit).await;
        let connection = connection.map_err(Unreached::explained)?;
        compare(global, machine, &connection)?;
        let node = connection.node;
        let status = match describe(connection.channel).await {
            Ok(described) => return Ok(Self { host, credentials: own, node, limit, described }),
            Err(status) => status,
        };
        // A machine that registers knows no key of an owner, but the CA of its cluster.
        let certificate = context.and_then(|context| context.certificate);
        let of_key = |der: &Vec<u8>| {
            Facts::read(der).is_some_and(|it| it.public_key == key.verifying_key().to_bytes())
        };
        let certificate = certificate.filter(of_key);
        let (StatusCode::Unauthenticated, Some(certificate)) = (status.code(), certificate) else {
            return Err(refused("describe the machine", &status));
        };
        let own = credentials(&key, certificate, None);
        let connection = reach(&host, Expect::Node(node), &own, limit).await;
        let connection = connection.map_err(Unreached::explained)?;
        let described = describe(connection.channel).await;
        let described = described.map_err(|status| refused("describe the machine", &status))?;
        Ok(Self { host, credentials: own, node, limit, described })
    }

    /// A connection for the next call: a person may have thought longer than one stays open.
    async fn client(&self) -> Result<MaintenanceClient<Channel>, Error> {
        let expect = Expect::Node(self.node);
        let connection = reach(&self.host, expect, &self.credentials, self.limit).await;
        Ok(MaintenanceClient::new(connection.map_err(Unreached::explained)?.channel))
    }

    /// Prints a log.
    async fn log(&self, log: Log, global: &Global) -> Result<(), Error> {
        let request = v1::ReadLogRequest { log: LogKind::from(log).into() };
        let failed = |status: Status| refused("read the log", &status);
        let mut client = self.client().await?;
        let mut pieces = client.read_log(request).await.map_err(failed)?.into_inner();
        // A person sees each line at once; a document for programs is printed whole.
        let is_whole = global.out.format != Format::Table;
        let mut documents = Vec::new();
        while let Some(v1::ReadLogResponse { text }) = pieces.message().await.map_err(failed)? {
            for line in text.lines() {
                let line = clean(line);
                let value = serde_json::json!({ "line": line });
                let document = Document::new(&value, line)?;
                match is_whole {
                    true => documents.push(document),
                    false => global.out.print(&document)?,
                }
            }
        }
        if is_whole { global.out.entries(documents) } else { Ok(()) }
    }

    async fn end(&self, power_off: bool) -> Result<(), Error> {
        let ended = self.client().await?.end(v1::EndRequest { power_off }).await;
        ended.map(drop).map_err(|status| refused("end the machine", &status))
    }
}

async fn describe(channel: Channel) -> Result<v1::DescribeResponse, Status> {
    let mut client = MaintenanceClient::new(channel);
    Ok(client.describe(v1::DescribeRequest {}).await?.into_inner())
}

/// Asks the person for a code; `None`: the machine shows a fingerprint.
fn asked(global: &Global) -> Result<Option<Code>, Error> {
    let typed = ask::answer(
        global,
        "Type the code on the machine's screen; only Enter if it shows a fingerprint:",
        "name what the machine's screen shows: --code CODE, or --fingerprint WORDS",
    )?;
    match typed.trim() {
        "" => Ok(None),
        typed => typed.parse().map(Some).help(|| "read the machine's screen again".to_owned()),
    }
}

/// Compares the key of a machine with its screen, by an option or by a person.
fn compare(global: &Global, machine: &Machine, connection: &Connection) -> Result<(), Error> {
    let facts = Facts::read(&connection.certificate).ok_or_else(|| {
        Error::new("the machine shows no certificate")
            .or_help("check the address: another program may listen there")
    })?;
    let shown = Fingerprint::of_key(&facts.public_key);
    let Some(spoken) = &machine.fingerprint else {
        let question = format!(
            "The machine at {} has this key:\n\n    {}\n\nDoes its own screen show the same \
             fingerprint?",
            machine.host,
            shown.words()
        );
        let instead = "name the fingerprint on the machine's screen: --fingerprint WORDS";
        return ask::confirm(global, &question, instead);
    };
    if shown.is(spoken) {
        return Ok(());
    }
    Err(Error::new(format!("the machine has another key: {}, {shown}", shown.words())).or_help(
        "read the fingerprint on its screen again: each start makes another key; if they still \
         differ, the connection is intercepted",
    ))
}

/// Why a machine was not reached.
enum Unreached {
    Dial(DialError),
    Late(Error),
}

impl Unreached {
    fn explained(self) -> Error {
        match self {
            Self::Dial(error) => unreached(error),
            Self::Late(error) => error,
        }
    }
}

/// Connects; with `--timeout` it retries until then, for a machine that is starting. The key of
/// the machine is in what is expected, or is compared by the caller.
async fn reach(
    host: &Endpoint,
    expect: Expect,
    own: &Credentials,
    limit: Option<Limit>,
) -> Result<Connection, Unreached> {
    let dialled = || dial(&host.host, host.port, expect, &Trust::Unchecked, Some(own));
    let Some(limit) = limit else { return Box::pin(dialled()).await.map_err(Unreached::Dial) };
    let attempts = async {
        loop {
            match Box::pin(dialled()).await {
                Err(error) if error.is_absence() => sleep(RETRY).await,
                dialled => return Ok(dialled.map_err(Unreached::Dial)),
            }
        }
    };
    let reached = limit.within(&format!("connect to {host}"), attempts).await;
    reached.unwrap_or_else(|late| Err(Unreached::Late(late)))
}

/// What a machine says of itself, as programs read it.
#[derive(Debug, Serialize)]
struct View {
    code: String,
    stage: String,
    causes: Vec<String>,
    tried: Vec<String>,
    next: String,
    version: String,
    image: String,
    slot: String,
    addresses: Vec<String>,
    disks: Vec<Disk>,
    home: bool,
    parameters: Vec<String>,
    uptime_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Disk {
    name: String,
    bytes: u64,
    model: String,
    serial: String,
    system: bool,
}

fn described(answer: v1::DescribeResponse) -> Result<Document, Error> {
    let disks = answer.disks.into_iter().map(|disk| {
        let v1::MachineDisk { name, bytes, model, serial, system } = disk;
        Disk { name, bytes, model, serial, system }
    });
    let disks = disks.collect();
    let v1::DescribeResponse { code, stage, causes, tried, next, .. } = answer;
    let view = View {
        code,
        stage,
        causes,
        tried,
        next,
        version: answer.version,
        image: answer.image,
        slot: answer.slot,
        addresses: answer.addresses,
        disks,
        home: answer.home,
        parameters: answer.parameters,
        uptime_seconds: answer.uptime_seconds,
    };
    let text = text(&view);
    Document::new(&view, text)
}

fn text(view: &View) -> String {
    let lines = |texts: &[String]| or_dash(&texts.join("\n"));
    let disks: Vec<_> = view.disks.iter().map(Disk::line).collect();
    let image = format!("Polis {}, image {}, slot {}", view.version, view.image, view.slot);
    let home = if view.home { "yes: it is a member of a cluster, or was" } else { "no" };
    fields(&[
        ("failure", format!("{} in stage {}", view.code, view.stage)),
        ("cause", lines(&view.causes)),
        ("next", or_dash(&view.next)),
        ("system", image),
        ("addresses", lines(&view.addresses)),
        ("disks", lines(&disks)),
        ("home", home.to_owned()),
        ("parameters", lines(&view.parameters)),
    ])
}

impl Disk {
    fn line(&self) -> String {
        let Self { name, bytes: size, model, serial, system } = self;
        let model = if model.is_empty() { String::new() } else { format!(", {model}") };
        let serial = if serial.is_empty() { String::new() } else { format!(", serial {serial}") };
        let own = if *system { ", started from" } else { "" };
        format!("{name}, {}{model}{serial}{own}", bytes(*size))
    }
}

/// What is done beside the parameters.
#[derive(Clone, Copy, Debug)]
struct Given {
    replace: bool,
    no_reboot: bool,
}

async fn give(
    machine: &Machine,
    file: &Path,
    Given { replace, no_reboot }: Given,
    sure: Sure,
    global: &Global,
) -> Result<(), Error> {
    sure.can_be(global)?;
    let (message, parameters) = parameters::message_of(file)?;
    let reached = Reached::new(machine, global).await?;
    let request =
        |dry_run| v1::GiveParametersRequest { parameters: message.clone(), replace, dry_run };
    let failed = |status: Status| refused("give the machine node parameters", &status);
    // Before the person is asked: a machine may refuse them.
    let checked = reached.client().await?.give_parameters(request(true)).await.map_err(failed)?;
    let replaced = checked.into_inner().replaced;
    let effect = effect(&machine.host, &parameters.cluster, &replaced, no_reboot);
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    reached.client().await?.give_parameters(request(false)).await.map_err(failed)?;
    if !no_reboot {
        reached.end(false).await?;
    }
    let host = machine.host.to_string();
    let value = serde_json::json!({ "host": host, "replaced": replaced, "reboots": !no_reboot });
    let text = match no_reboot {
        true => format!("the machine at {host} uses the node parameters at its next start"),
        false => format!("the machine at {host} has the node parameters, and reboots"),
    };
    global.out.print(&Document::new(&value, text)?)
}

fn effect(host: &Endpoint, cluster: &Cluster, replaced: &[String], no_reboot: bool) -> String {
    let what = match cluster {
        Cluster::Bootstrap(_) => "found a new cluster",
        Cluster::Register(_) => "register with a running cluster",
    };
    let when = if no_reboot { "at its next start" } else { "after a reboot, which is now" };
    let instead = match replaced {
        [] => String::new(),
        places => format!(" They take precedence over those it has: {}.", places.join("; ")),
    };
    format!("The machine at {host} gets node parameters that {what}, {when}.{instead}")
}

async fn end(machine: &Machine, power_off: bool, sure: Sure, global: &Global) -> Result<(), Error> {
    sure.can_be(global)?;
    let reached = Reached::new(machine, global).await?;
    let verb = if power_off { "powers off" } else { "reboots" };
    let (host, code) = (&machine.host, clean(&reached.described.code));
    let effect = format!("The machine at {host}, which holds at {code}, {verb}.");
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    reached.end(power_off).await?;
    let value = serde_json::json!({ "host": host.to_string(), "power_off": power_off });
    global.out.print(&Document::new(&value, format!("the machine at {host} {verb}"))?)
}
