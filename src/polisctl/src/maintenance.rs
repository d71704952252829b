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

use ed25519_dalek::SigningKey;
use polis_proto::v1;
use polis_proto::v1::maintenance_client::MaintenanceClient;
use polis_proto::v1::read_log_request::Log as LogKind;
use polis_tui::bytes;
use serde::Serialize;
use tonic::{Code as StatusCode, Response, Status};

use super::ask::{Go, Sure};
use super::error::{Error, Exit, Explain as _};
use super::output::{Document, Format, Progress, fields, or_dash};
use super::session::{Limit, credentials, dialled, refused, within};
use super::text::clean;
use super::{Global, ask, key, ownership, parameters};
use polis_wire::endpoint::{Endpoint, MANAGEMENT_PORT};
use polis_wire::identity::{Fingerprint, NodeId, Spoken};
use polis_wire::maintenance::Code;
use polis_wire::parameters::Cluster;
use polis_wire::pki::Facts;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Channel, Connection, Expect, Trust};

const DESCRIBE: &str = "describe the machine";
const GIVE: &str = "give the machine node parameters";
const READ: &str = "read the log";

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

/// The key of an owner, and its certificate.
struct Owner {
    key: SigningKey,
    /// The certificate of the context, if it is for this key.
    certificate: Option<Vec<u8>>,
}

impl Owner {
    /// Reads the named key, else that of the context, else that of `owner create`.
    fn find(machine: &Machine, global: &Global) -> Result<Self, Error> {
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
        let of_key = |der: &Vec<u8>| {
            Facts::read(der).is_some_and(|it| it.public_key == key.verifying_key().to_bytes())
        };
        let certificate = context.and_then(|context| context.certificate).filter(of_key);
        Ok(Self { key, certificate })
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
        let asked = match (&machine.code, &machine.fingerprint) {
            (None, None) => asked(global)?,
            (code, _) => code.clone(),
        };
        let reached = match asked {
            Some(code) => Box::pin(Self::by_code(&machine.host, &code, global)).await,
            None => {
                let owner = Owner::find(machine, global)?;
                Box::pin(Self::by_owner(machine, owner, global)).await
            }
        };
        reached.doing(|| format!("cannot reach the machine at {}", machine.host))
    }

    async fn by_code(host: &Endpoint, code: &Code, global: &Global) -> Result<Self, Error> {
        let limit = global.timeout.map(Limit::new);
        let _progress = connecting(host, global);
        let keys = code.keys();
        let failed = || "cannot use the keys of this code".to_owned();
        let credentials = Credentials {
            certificate: keys.caller.proof().doing(failed)?,
            key: keys.caller.to_pkcs8_der().doing(failed)?.into(),
            authorities: None,
        };
        let node = keys.machine.id();
        let connection = reach(host, Expect::Node(node), &credentials, limit).await;
        let connection = connection.map_err(|error| {
            match error.is_handshake() && error.exit() == Exit::Failed {
                true => Error::new(
                    "the machine does not have this code, or another one has its address",
                )
                .or_help(
                    "read the code on its screen again: each start of the machine makes another",
                ),
                false => error,
            }
        })?;
        let described = describe(connection.channel, limit).await?;
        let described = described.map_err(|status| refused(DESCRIBE, &status))?;
        Ok(Self { host: host.clone(), credentials, node, limit, described })
    }

    async fn by_owner(machine: &Machine, owner: Owner, global: &Global) -> Result<Self, Error> {
        let host = machine.host.clone();
        let Owner { key, certificate } = owner;
        let own = credentials(&key, ownership::self_signed(&key)?, None);
        let limit = global.timeout.map(Limit::new);
        let progress = connecting(&host, global);
        let connection = reach(&host, Expect::AnyNode, &own, limit).await?;
        // It would be drawn over the question.
        drop(progress);
        compare(global, machine, &connection)?;
        let limit = match machine.fingerprint {
            Some(_) => limit,
            None => limit.map(Limit::anew),
        };
        let node = connection.node;
        let status = match describe(connection.channel, limit).await? {
            Ok(described) => return Ok(Self { host, credentials: own, node, limit, described }),
            Err(status) => status,
        };
        // A machine that registers knows no key of an owner, but the CA of its cluster.
        let (StatusCode::Unauthenticated, Some(certificate)) = (status.code(), certificate) else {
            return Err(refused(DESCRIBE, &status));
        };
        let own = credentials(&key, certificate, None);
        let connection = reach(&host, Expect::Node(node), &own, limit).await?;
        let described = describe(connection.channel, limit).await?;
        let described = described.map_err(|status| refused(DESCRIBE, &status))?;
        Ok(Self { host, credentials: own, node, limit, described })
    }

    /// A connection for the next call: a person may have thought longer than one stays open.
    async fn client(&self) -> Result<MaintenanceClient<Channel>, Error> {
        let expect = Expect::Node(self.node);
        let connection = reach(&self.host, expect, &self.credentials, self.limit).await?;
        Ok(MaintenanceClient::new(connection.channel))
    }

    /// Restarts the deadline: the time that a person takes to answer a question does not count.
    fn begin_anew(&mut self) {
        self.limit = self.limit.map(Limit::anew);
    }

    /// Prints a log.
    async fn log(&self, log: Log, global: &Global) -> Result<(), Error> {
        let request = v1::ReadLogRequest { log: LogKind::from(log).into() };
        let failed = |status: Status| refused(READ, &status);
        let mut client = self.client().await?;
        let mut pieces = call(self.limit, READ, client.read_log(request)).await?;
        // A person sees each line at once; a document for programs is printed whole.
        let is_whole = global.out.format != Format::Table;
        let mut documents = Vec::new();
        let reading = async {
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
            Ok::<(), Error>(())
        };
        within(self.limit, READ, reading).await?;
        if is_whole { global.out.entries(documents) } else { Ok(()) }
    }

    async fn end(&self, power_off: bool) -> Result<(), Error> {
        let mut client = self.client().await?;
        let ended = client.end(v1::EndRequest { power_off });
        call(self.limit, "end the machine", ended).await.map(drop)
    }
}

async fn describe(
    channel: Channel,
    limit: Option<Limit>,
) -> Result<Result<v1::DescribeResponse, Status>, Error> {
    let mut client = MaintenanceClient::new(channel);
    tried(limit, DESCRIBE, client.describe(v1::DescribeRequest {})).await
}

/// Waits for an answer, until the deadline.
async fn call<T>(
    limit: Option<Limit>,
    what: &str,
    made: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Error> {
    tried(limit, what, made).await?.map_err(|status| refused(what, &status))
}

/// The same; a refusal is returned as it came.
async fn tried<T>(
    limit: Option<Limit>,
    what: &str,
    made: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<Result<T, Status>, Error> {
    let made = Box::pin(made);
    within(limit, what, async { Ok(made.await.map(Response::into_inner)) }).await
}

fn connecting(host: &Endpoint, global: &Global) -> Progress {
    let progress = global.out.progress();
    progress.says(&format!("connecting to {host}"));
    progress
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

/// Connects; with `--timeout` it retries until then, for a machine that is starting. The key of
/// the machine is in what is expected, or is compared by the caller.
async fn reach(
    host: &Endpoint,
    expect: Expect,
    own: &Credentials,
    limit: Option<Limit>,
) -> Result<Connection, Error> {
    dialled(host, expect, &Trust::Unchecked, Some(own), limit).await
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
    let mut reached = Reached::new(machine, global).await?;
    let request =
        |dry_run| v1::GiveParametersRequest { parameters: message.clone(), replace, dry_run };
    // Before the person is asked: a machine may refuse them.
    let mut client = reached.client().await?;
    let checked = call(reached.limit, GIVE, client.give_parameters(request(true))).await?;
    let replaced = checked.replaced;
    let effect = effect(&machine.host, &parameters.cluster, &replaced, no_reboot);
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    reached.begin_anew();
    let mut client = reached.client().await?;
    call(reached.limit, GIVE, client.give_parameters(request(false))).await?;
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
        Cluster::Bootstrap(_) => "bootstrap a new cluster",
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
    let mut reached = Reached::new(machine, global).await?;
    let verb = if power_off { "powers off" } else { "reboots" };
    let (host, code) = (&machine.host, clean(&reached.described.code));
    let effect = format!("The machine at {host}, which holds at {code}, {verb}.");
    if sure.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    reached.begin_anew();
    reached.end(power_off).await?;
    let value = serde_json::json!({ "host": host.to_string(), "power_off": power_off });
    global.out.print(&Document::new(&value, format!("the machine at {host} {verb}"))?)
}

#[cfg(test)]
mod tests {
    use crate::loopback::Cluster;
    use crate::testing::{World, closed_port};

    #[test]
    fn a_machine_that_is_waited_for_in_vain_is_a_timeout_with_its_last_cause() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let (_bound, closed) = closed_port();
        let how = ["--fingerprint", &*cluster.fingerprint(), "--timeout", "1s"];
        let ended = world.run(&[&["maintenance", "describe", &*closed][..], &how].concat());
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("cause: Connection refused"), "{}", ended.stderr);
    }
}
