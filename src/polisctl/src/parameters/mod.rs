//! `polisctl parameters`: writes, prints and checks node parameters.
//!
//! Parameters are checked before they are written: the message is encoded and then parsed
//! by the node's parser.

mod format;
mod image;
pub(super) mod network;
pub(super) mod show;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use polis_proto::v1;
use polis_proto::v1::cluster_configuration as configuration;
use polis_proto::v1::node_parameters::Cluster;
use prost::Message as _;

use self::format::{Decoded, Format};
pub(super) use self::show::labels;
use super::cluster::ticket::Admission;
use super::error::{Error, Explain as _};
use super::output::{self, Document};
use super::{Global, contexts, key};
use polis_base::hex;
use polis_wire::identity::{NodeId, NodeName};
use polis_wire::node_labels;
use polis_wire::parameters;

/// Commands about node parameters.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Write parameters that bootstrap a new cluster.
    Bootstrap(Box<Bootstrap>),
    /// Write parameters that register with a running cluster.
    Register(Box<Register>),
    /// Print a parameters file: a message, its text, or a disk image with FAT.
    Show {
        /// The file; `-` is standard input.
        file: PathBuf,
    },
    /// Check a parameters file as a machine does, in each format.
    Check {
        /// The file; `-` is standard input.
        file: PathBuf,
    },
}

/// The parameters of a new cluster.
#[derive(Debug, clap::Args)]
pub(super) struct Bootstrap {
    /// The owner's key: public or private, in PEM, or 64 hexadecimal digits.
    #[arg(long, value_name = "FILE")]
    owner_key: Option<PathBuf>,
    /// Name of the cluster [default: cluster.internal].
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    /// The IPv4 network of all pods, a /24 a node; cannot change later [default: 10.192.0.0/11].
    #[arg(long, value_name = "CIDR")]
    pod_network: Option<String>,
    /// The IPv4 network of Services; cannot change later [default: 10.224.0.0/16].
    #[arg(long, value_name = "CIDR")]
    service_network: Option<String>,
    #[command(flatten)]
    rules: Rules,
    #[command(flatten)]
    machine: Machine,
}

/// The configuration of all nodes of a cluster.
#[derive(Debug, clap::Args)]
pub(super) struct Rules {
    /// Whether nodes use their TPM; best-effort in a new cluster.
    #[arg(long, value_enum)]
    tpm: Option<Tpm>,
    /// The protection that a data partition must provide; authenticated in a new cluster.
    #[arg(long, value_enum)]
    storage: Option<Storage>,
    /// How a node joins that cannot reach the cluster; automatic in a new cluster.
    #[arg(long, value_enum)]
    cold_start: Option<ColdStart>,
    /// A time server of all nodes; `,nts` behind it asks for Network Time Security. Repeatable:
    /// the servers replace those that there were; none in a new cluster.
    #[arg(long = "time-server", value_name = "HOST[,nts]")]
    time_servers: Vec<String>,
    /// Take the cluster's time servers away.
    #[arg(long, conflicts_with = "time_servers")]
    no_time_servers: bool,
}

impl Rules {
    /// Whether no field is set.
    pub(super) fn is_empty(&self) -> bool {
        self.tpm.is_none()
            && self.storage.is_none()
            && self.cold_start.is_none()
            && self.time_servers.is_empty()
            && !self.no_time_servers
    }

    /// The given options.
    pub(super) fn options(&self) -> String {
        use clap::ValueEnum as _;
        let word = |name: &str, value: Option<clap::builder::PossibleValue>| {
            value.map(|value| format!("--{name} {}", value.get_name()))
        };
        let options = [
            word("tpm", self.tpm.and_then(|tpm| tpm.to_possible_value())),
            word("storage", self.storage.and_then(|storage| storage.to_possible_value())),
            word("cold-start", self.cold_start.and_then(|start| start.to_possible_value())),
        ];
        let servers = self.time_servers.iter().map(|server| format!("--time-server {server}"));
        let none = self.no_time_servers.then(|| "--no-time-servers".to_owned());
        options.into_iter().flatten().chain(servers).chain(none).collect::<Vec<_>>().join(" ")
    }

    /// The same from the words of a file, whose fields have the names in `cluster info`. An empty
    /// list of time servers takes those of the cluster away.
    pub(super) fn of_words(
        tpm: Option<&str>,
        storage: Option<&str>,
        cold_start: Option<&str>,
        time_servers: Option<&[String]>,
    ) -> Result<Self, Error> {
        Ok(Self {
            tpm: word("tpm_mode", tpm)?,
            storage: word("storage_security_policy", storage)?,
            cold_start: word("cold_start", cold_start)?,
            time_servers: time_servers.unwrap_or_default().to_vec(),
            no_time_servers: time_servers.is_some_and(<[String]>::is_empty),
        })
    }

    /// Only the fields that are set.
    pub(super) fn named(&self) -> v1::ClusterConfiguration {
        let mut named = v1::ClusterConfiguration::default();
        self.apply(&mut named);
        named
    }

    /// Changes only the fields that are set.
    pub(super) fn apply(&self, configuration: &mut v1::ClusterConfiguration) {
        use configuration::{ColdStart as Start, StorageSecurityPolicy as Policy, TpmMode};
        if let Some(tpm) = self.tpm {
            configuration.set_tpm_mode(match tpm {
                Tpm::Required => TpmMode::Required,
                Tpm::BestEffort => TpmMode::BestEffort,
                Tpm::Disabled => TpmMode::Disabled,
            });
        }
        if let Some(storage) = self.storage {
            configuration.set_storage_security_policy(match storage {
                Storage::Authenticated => Policy::NeedsEncryptionAndAuthentication,
                Storage::Encrypted => Policy::NeedsEncryption,
                Storage::Permissive => Policy::Permissive,
                Storage::Insecure => Policy::NeedsInsecure,
            });
        }
        if let Some(cold_start) = self.cold_start {
            configuration.set_cold_start(match cold_start {
                ColdStart::Automatic => Start::Automatic,
                ColdStart::Attended => Start::Attended,
            });
        }
        if self.no_time_servers || !self.time_servers.is_empty() {
            let servers = self.time_servers.iter().map(|text| time_server(text)).collect();
            configuration.time = Some(v1::TimeConfiguration { servers });
        }
    }
}

/// Reads a word that an option takes, from the field of a file.
fn word<T: clap::ValueEnum>(field: &str, text: Option<&str>) -> Result<Option<T>, Error> {
    let Some(text) = text else { return Ok(None) };
    let read = T::from_str(text, false).map_err(|_unknown| {
        let words = T::value_variants().iter().filter_map(T::to_possible_value);
        let words: Vec<_> = words.map(|word| word.get_name().to_owned()).collect();
        Error::new(format!("{field} is {text:?}; allowed is one of {}", words.join(", ")))
    });
    read.map(Some)
}

/// A server of `--time-server`; the node's own check of the host follows.
fn time_server(text: &str) -> v1::NtpServer {
    let (host, nts) = text.strip_suffix(",nts").map_or((text, false), |host| (host, true));
    v1::NtpServer { host: host.to_owned(), nts }
}

/// The parameters of a registration.
#[derive(Debug, clap::Args)]
pub(super) struct Register {
    /// The register ticket, in hexadecimal, or `@FILE` [default: asked of the cluster].
    #[arg(long, value_name = "TICKET")]
    ticket: Option<String>,
    /// The cluster's CA, in PEM or DER [default: that of the context].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A node of the cluster and its addresses; repeatable [default: asked of the cluster].
    #[arg(long = "node", value_name = "ID=ADDRESS[,ADDRESS]")]
    nodes: Vec<String>,
    #[command(flatten)]
    machine: Machine,
}

/// The parameters of the machine itself.
#[derive(Debug, clap::Args)]
struct Machine {
    /// A label of the node; repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// A name of the node beside its ID, if no other node has it.
    #[arg(long, value_name = "NAME")]
    name: Option<NodeName>,
    #[command(flatten)]
    links: network::Links,
    /// A terminal that carries the console besides tty1, such as hvc0; repeatable.
    #[arg(long = "console", value_name = "TERMINAL")]
    terminals: Vec<String>,
    /// Wipe the data partition first, if it is that of this removed node; the full ID.
    #[arg(long, value_name = "NODE_ID", value_parser = full_id)]
    wipes: Option<NodeId>,
    /// Install the system to this disk of the machine first, from a stick or another disk.
    ///
    /// `transport=nvme,min-size=100G`: exactly one disk must fit. Keys: transport (nvme, sata,
    /// scsi, usb, virtio, mmc), model, serial, wwid, path, min-size, max-size.
    #[arg(long, value_name = "KEY=VALUE[,...]", value_parser = parameters::Selector::message)]
    install_disk: Option<v1::DiskSelector>,
    /// The data that the installation may overwrite [default: none, the disk must be empty].
    #[arg(long, value_enum, requires = "install_disk")]
    install_wipe: Option<InstallWipe>,
    /// A further disk for a volume of workloads; repeatable.
    ///
    /// `db:serial=S4EW`: a name, and a disk as for `--install-disk`. Exactly one disk must fit,
    /// and it must be empty.
    #[arg(long = "volume", value_name = "NAME:KEY=VALUE[,...]",
          value_parser = parameters::DiskVolume::message)]
    volumes: Vec<v1::DiskVolume>,
    /// Mirror the disk that the machine runs from on this one, too.
    ///
    /// A disk as for `--install-disk`. Exactly one must fit, beside the one that the machine runs
    /// from, and it must be empty. It also selects a disk that replaces either.
    #[arg(long, value_name = "KEY=VALUE[,...]", value_parser = parameters::Selector::message)]
    mirror_disk: Option<v1::DiskSelector>,
    /// The format of the file: a machine reads each of them.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// The path of the parameters; `-` is standard output.
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

/// A node that is wiped is never named by a part of its ID, or by a name that moves.
fn full_id(text: &str) -> Result<NodeId, String> {
    text.parse().map_err(|_invalid| {
        "the full ID of the node is needed: \"polis-\" and 32 lower-case hexadecimal digits, as its \
         screen and `polisctl node list` show it"
            .to_owned()
    })
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Tpm {
    /// A node without one is refused.
    Required,
    /// Used if there is one.
    BestEffort,
    /// Not used.
    Disabled,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Storage {
    /// Encrypted, and a changed block is an error.
    Authenticated,
    /// Encrypted.
    Encrypted,
    /// The strongest kind that the machine supports.
    Permissive,
    /// Neither of both.
    Insecure,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum InstallWipe {
    /// Data of any kind, but not the data of a node.
    AnyData,
    /// The data of a node.
    Member,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ColdStart {
    /// With a share of its disk's key that the machine stores.
    Automatic,
    /// Only with a curator or the recovery key.
    Attended,
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::Bootstrap(arguments) => {
            let owner = match &arguments.owner_key {
                Some(file) => key::read_public(file, &global.passphrase)?,
                None => owner_key(global)?,
            };
            let message = bootstrap(&arguments, &owner)?;
            written(&message, &arguments.machine, global)
        }
        Command::Register(arguments) => {
            let admission = admission(&arguments, global).await?;
            let message = register(&arguments, admission)?;
            written(&message, &arguments.machine, global)
        }
        Command::Show { file } => {
            let (decoded, parameters) = load(&file)?;
            global.out.print(&show::of_file(&parameters, &decoded)?)
        }
        Command::Check { file } => {
            let (decoded, parameters) = load(&file)?;
            let kind = match parameters.cluster {
                parameters::Cluster::Bootstrap(_) => "bootstrap a new cluster",
                parameters::Cluster::Register(_) => "register with a running cluster",
            };
            let first = parameters.install.as_ref().map_or_else(String::new, |install| {
                format!("install to the disk with {}, then ", install.disk)
            });
            let value = serde_json::json!({
                "file": file.to_string_lossy(), "format": decoded.format, "valid": true
            });
            let text = format!(
                "{}: valid parameters ({}), to {first}{kind}",
                file.display(),
                decoded.described()
            );
            global.out.print(&Document::new(&value, text)?)
        }
    }
}

/// The public half of the key that `owner create` made.
fn owner_key(global: &Global) -> Result<[u8; 32], Error> {
    let private = global.contexts.owner_key();
    let public = private.with_extension("pub");
    let file = if public.exists() { public } else { private };
    key::read_public(&file, &global.passphrase).help(|| {
        "name the owner's key with --owner-key, or make one: `polisctl owner create`".to_owned()
    })
}

fn bootstrap(arguments: &Bootstrap, owner: &[u8; 32]) -> Result<v1::NodeParameters, Error> {
    let mut configuration = v1::ClusterConfiguration {
        cluster_domain: arguments.domain.clone().unwrap_or_default(),
        pod_network: arguments.pod_network.clone().unwrap_or_default(),
        service_network: arguments.service_network.clone().unwrap_or_default(),
        ..Default::default()
    };
    arguments.rules.apply(&mut configuration);
    let cluster = v1::ClusterBootstrap {
        owner_public_key: owner.to_vec(),
        cluster_configuration: Some(configuration),
        labels: set_labels("--label", &arguments.machine.labels)?,
        name: name(&arguments.machine),
    };
    message(Cluster::ClusterBootstrap(cluster), &arguments.machine)
}

/// The values of the command line, and of the cluster for the rest.
async fn admission(arguments: &Register, global: &Global) -> Result<Admission, Error> {
    let ticket = arguments.ticket.as_deref().map(ticket).transpose()?;
    let mut ca = arguments.ca.as_deref().map(contexts::read_certificate).transpose()?;
    let nodes = nodes(&arguments.nodes)?;
    if ca.is_none() {
        let context = global.contexts.context(global.context.as_deref())?;
        ca = context.and_then(|context| context.ca);
    }
    if let (Some(ticket), Some(ca), false) = (&ticket, &ca, nodes.is_empty()) {
        return Ok(Admission { ticket: ticket.clone(), ca: ca.clone(), nodes });
    }
    if global.contexts.context(global.context.as_deref())?.is_none() {
        return Err(contexts::no_context().help_first("name --ticket, --ca and --node"));
    }
    let asked = super::cluster::ticket::admission(global, arguments.machine.wipes).await?;
    Ok(Admission {
        ticket: ticket.unwrap_or(asked.ticket),
        ca: ca.unwrap_or(asked.ca),
        nodes: if nodes.is_empty() { asked.nodes } else { nodes },
    })
}

fn nodes(texts: &[String]) -> Result<Vec<v1::cluster_directory::Node>, Error> {
    let read = |text: &String| {
        let (id, addresses) = text.split_once('=').ok_or_else(|| {
            Error::usage(format!("--node {text:?} is not ID=ADDRESS[,ADDRESS]"))
                .or_help("without --node, the cluster of the context is asked for its nodes")
        })?;
        let addresses = addresses.split(',').map(str::to_owned).collect();
        Ok(v1::cluster_directory::Node { id: id.to_owned(), addresses })
    };
    texts.iter().map(read).collect()
}

/// The largest file with a ticket.
const TICKET_FILE_MAX: u64 = 16 * 1024;

fn ticket(text: &str) -> Result<Vec<u8>, Error> {
    let text = match text.strip_prefix('@') {
        Some(file) => {
            let mut bytes = Vec::new();
            let read = File::open(file)
                .and_then(|file| file.take(TICKET_FILE_MAX).read_to_end(&mut bytes));
            read.doing(|| format!("cannot read the ticket from {file}"))?;
            String::from_utf8_lossy(&bytes).into_owned()
        }
        None => text.to_owned(),
    };
    hex::decode(text.trim()).ok_or_else(|| {
        Error::usage("the ticket is not hexadecimal, two digits a byte")
            .or_help("`polisctl cluster ticket` prints the ticket")
    })
}

fn register(arguments: &Register, admission: Admission) -> Result<v1::NodeParameters, Error> {
    let cluster = v1::ClusterRegister {
        cluster_directory: Some(v1::ClusterDirectory { nodes: admission.nodes }),
        register_ticket: admission.ticket,
        ca_certificate: admission.ca,
        labels: set_labels("--label", &arguments.machine.labels)?,
        name: name(&arguments.machine),
    };
    message(Cluster::ClusterRegister(cluster), &arguments.machine)
}

fn name(machine: &Machine) -> String {
    machine.name.as_ref().map(ToString::to_string).unwrap_or_default()
}

fn message(cluster: Cluster, machine: &Machine) -> Result<v1::NodeParameters, Error> {
    let Machine { links, terminals, wipes, .. } = machine;
    let install = machine.install_disk.clone().map(|disk| installation(disk, machine.install_wipe));
    let network = links.message()?;
    let console = v1::ConsoleConfiguration { tui: terminals.clone() };
    Ok(v1::NodeParameters {
        cluster: Some(cluster),
        network: (network != v1::NetworkConfiguration::default()).then_some(network),
        console: (!console.tui.is_empty()).then_some(console),
        wipes: wipes.map(|id| id.to_string()).unwrap_or_default(),
        install,
        volumes: machine.volumes.clone(),
        mirror: machine.mirror_disk.clone(),
    })
}

/// An installation of its own: it is done again on a disk that an earlier file has installed.
fn installation(disk: v1::DiskSelector, wipe: Option<InstallWipe>) -> v1::Installation {
    let wipe = match wipe {
        None => v1::installation::Wipe::Unspecified,
        Some(InstallWipe::AnyData) => v1::installation::Wipe::AnyData,
        Some(InstallWipe::Member) => v1::installation::Wipe::Member,
    };
    let id = rand::random::<[u8; parameters::ID_BYTES]>().to_vec();
    v1::Installation { disk: Some(disk), wipe: wipe.into(), id }
}

/// Reads `KEY=VALUE`, each key once.
pub(super) fn pairs(flag: &str, texts: &[String]) -> Result<BTreeMap<String, String>, Error> {
    let mut pairs = BTreeMap::new();
    for text in texts {
        let (key, value) = text.split_once('=').ok_or_else(|| {
            Error::usage(format!("{flag} {text:?} is not KEY=VALUE"))
                .or_help(format!("add a value: {text}=VALUE"))
        })?;
        if pairs.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(Error::usage(format!(
                "{flag} names {key:?} twice; allowed is each key once"
            ))
            .or_help("leave out the other values of this key"));
        }
    }
    Ok(pairs)
}

/// Reads labels to set, none of which Kubernetes or Polis sets itself. A machine accepts such a
/// label in its parameters, but its Node object never gets it.
pub(super) fn set_labels(flag: &str, texts: &[String]) -> Result<BTreeMap<String, String>, Error> {
    let labels = pairs(flag, texts)?;
    node_labels::check(labels.keys()).map_err(|reserved| {
        Error::usage(format!("{flag} names {reserved}"))
            .or_help("docs/worker.md lists who sets which labels of a Node object")
    })?;
    Ok(labels)
}

/// Checks a message as a machine does, then writes it.
fn written(message: &v1::NodeParameters, machine: &Machine, global: &Global) -> Result<(), Error> {
    let Machine { format, out, .. } = machine;
    let message = message.encode_to_vec();
    let parameters = checked(&message)?;
    let bytes = format.encode(&message)?;
    if output::is_stdout(out) {
        global.out.gives("the parameters")?;
        return global.out.raw(&bytes);
    }
    key::keep(out)?;
    // The ticket is a secret: others must not read it.
    contexts::write(out, &bytes)?;
    let description = show::document(&parameters)?;
    let file = out.to_string_lossy();
    let mut document = serde_json::json!({ "file": file, "format": format, "bytes": bytes.len() });
    document["parameters"] = description.value().clone();
    let mut text = format!("{} bytes in {} ({format})", bytes.len(), out.display());
    if let Some(warning) = format.warning(bytes.len()) {
        document["warning"] = warning.clone().into();
        text = format!("{text}\nwarning: {warning}");
    }
    global.out.print(&Document::new(&document, text)?)
}

fn checked(bytes: &[u8]) -> Result<parameters::Parameters, Error> {
    use parameters::Error::{Malformed, NothingChosen, Truncated};
    parameters::parse(bytes).map_err(|error| {
        let help = match &error {
            Malformed(_) | Truncated { .. } | NothingChosen => {
                "write the file again with `polisctl parameters bootstrap` or `polisctl parameters \
                 register`"
            }
            _ => "docs/parameters.md lists every field and its values",
        };
        Error::from(error).or_help(help)
    })
}

/// The message in a file of any format, and its content.
pub(super) fn message_of(file: &Path) -> Result<(Vec<u8>, parameters::Parameters), Error> {
    load(file).map(|(decoded, parameters)| (decoded.message, parameters))
}

/// Reads a file of any format, and checks its parameters as a machine does.
fn load(file: &Path) -> Result<(Decoded, parameters::Parameters), Error> {
    let read = if file == Path::new("-") {
        format::read(io::stdin().lock())
    } else {
        File::open(file).and_then(format::read)
    };
    let bytes = read.doing(|| format!("cannot read {}", file.display()))?;
    let decoded = format::decode(bytes).and_then(|decoded| {
        let parameters = match (checked(&decoded.message), decoded.file) {
            (checked, None) => checked,
            (checked, Some(file)) => checked.doing(|| format::cannot_use(file)),
        };
        Ok((decoded, parameters?))
    });
    decoded.doing(|| format!("{}: invalid parameters", file.display()))
}

#[cfg(test)]
mod tests;
