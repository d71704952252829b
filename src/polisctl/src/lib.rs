//! The operator's command line: `polisctl`.
//!
//! One file a group of commands; each has a `Command` that clap fills and a
//! `run` that does the work and prints one document. This file picks the
//! command and ends the program.
//!
//! ```text
//! arguments --clap--> Command --run--> Document --> standard output: table, JSON or YAML
//!                                  \-> Error -----> standard error: error, causes, help
//! ```
//!
//! Exit status: 0 done; 1 refused or failed; 2 wrong usage; 3 timed out waiting.
//!
//! Invariants:
//! - No cluster is trusted because it answered: its CA is compared with what a
//!   person read from the machine's screen, or with a file.
//! - Standard output carries the document and nothing else.
//!
//! What this module does not do: decide what a user may do (the servers do), or
//! keep anything but contexts.

mod arguments;
mod ask;
mod audit;
mod bucket;
mod cluster;
mod completion;
mod console;
mod context;
mod contexts;
mod dashboard;
mod error;
mod etcd;
mod events;
mod kernel;
mod key;
mod kubernetes;
mod leaderless;
#[cfg(test)]
mod loopback;
mod maintenance;
#[cfg(test)]
mod mentions_tests;
mod node;
mod output;
mod owner;
mod ownership;
mod parameters;
#[cfg(test)]
mod prometheus_tests;
mod rights;
mod screen;
mod session;
mod snapshot;
#[cfg(test)]
mod suggestions_tests;
mod support;
mod table;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod testing;
mod text;
mod top;
mod unfinished;
mod units;
mod update;
mod upload;
mod user;
mod watch;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use self::arguments::{command, read};
use self::contexts::Contexts;
use self::error::{Error, Exit, Explain as _};
use self::key::Passphrase;
use self::output::{Document, Format, Out, Streams};
use polis_base::canvas::Colours;
use polis_wire::endpoint::Endpoint;

/// Operates Polis clusters.
#[derive(Debug, Parser)]
#[command(name = "polisctl", version, arg_required_else_help = true)]
#[command(after_help = "Exit status: 0 done; 1 refused or failed; 2 wrong usage; 3 timed out.")]
struct Cli {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Command,
}

/// The options of every command.
#[derive(Debug, clap::Args)]
struct Options {
    /// The cluster and user to act as [default: the one that is in use].
    #[arg(long, global = true, value_name = "NAME", value_parser = contexts::name)]
    context: Option<String>,
    /// Where a curator is; repeatable [default: those of the context].
    #[arg(long = "endpoint", global = true, value_name = "HOST[:PORT]")]
    endpoints: Vec<Endpoint>,
    /// How to print what was found; `-o` means a file where a command writes one.
    #[arg(short, long, global = true, value_enum, default_value_t)]
    output: Format,
    /// How long to wait for the cluster, such as 30s or 5m [default: 15s a call].
    #[arg(long, global = true, value_name = "DURATION", value_parser = units::duration)]
    timeout: Option<Duration>,
    /// A file whose first line is the passphrase of the key.
    #[arg(long, global = true, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
    /// The folder of contexts [default: polis in the XDG configuration folder].
    #[arg(long, global = true, value_name = "FOLDER")]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write, print and check node parameters.
    #[command(subcommand)]
    Parameters(parameters::Command),
    /// Make the key of an owner, or of another user.
    #[command(subcommand, visible_alias = "key")]
    Owner(owner::Command),
    /// List, make and select contexts.
    #[command(subcommand)]
    Context(context::Command),
    /// Take ownership of a cluster, configure it and show its state.
    #[command(subcommand)]
    Cluster(cluster::Command),
    /// Approve, operate and remove nodes.
    #[command(subcommand)]
    Node(node::Command),
    /// List the nodes, as `node list` does.
    #[command(subcommand)]
    Get(Get),
    /// Reach a machine that shows a guru meditation: its logs, its node parameters.
    #[command(subcommand)]
    Maintenance(maintenance::Command),
    /// Manage the users of the cluster.
    #[command(subcommand)]
    User(user::Command),
    /// Show the state of etcd, and save a snapshot.
    #[command(subcommand)]
    Etcd(etcd::Command),
    /// List and fetch the snapshots that a cluster has sent to a bucket.
    #[command(subcommand)]
    Snapshot(snapshot::Command),
    /// Give kubectl access, and show the state of Kubernetes.
    #[command(subcommand)]
    Kubernetes(kubernetes::Command),
    /// Check update bundles.
    #[command(subcommand)]
    Update(update::Command),
    /// List what has happened: who joined, left, led, failed, with times.
    Events(events::Arguments),
    /// List who did what to what, and check that this log is whole.
    Audit(audit::Arguments),
    /// Print the load of the nodes: processor, memory, disk, network.
    Top(top::Arguments),
    /// Show the whole cluster in this terminal; Enter opens a node's screen, q leaves.
    Dashboard,
    /// Show a node's screen in this terminal; q leaves it.
    Console(console::Arguments),
    /// Write an archive for a bug report: state, versions and logs of all nodes, no keys.
    Support(support::Arguments),
    /// Print a completion script for a shell, which completes node IDs, too.
    Completion {
        /// The shell; `nodes` prints the IDs that the scripts complete.
        #[arg(value_parser = completion::target())]
        shell: completion::Target,
    },
    /// Print the version of this program.
    Version,
}

/// The kinds that `get` lists.
#[derive(Debug, Subcommand)]
enum Get {
    /// List the nodes.
    #[command(visible_alias = "node")]
    Nodes(node::List),
}

/// The options of every command.
#[derive(Debug)]
struct Global {
    context: Option<String>,
    endpoints: Vec<Endpoint>,
    timeout: Option<Duration>,
    passphrase: Passphrase,
    contexts: Contexts,
    /// The file that kubectl reads, where the environment names one.
    kubeconfig: Option<PathBuf>,
    /// Whether screens have colours.
    colours: Colours,
    out: Out,
}

/// The width of help without a terminal, and the most in a wide one, where longer lines
/// would be hard to read.
const HELP_WIDTH: usize = 80;
const HELP_WIDTH_MAX: usize = 100;

/// Runs `polisctl`.
#[must_use]
pub fn main() -> ExitCode {
    let variable = |name: &str| std::env::var_os(name);
    ExitCode::from(run(std::env::args_os(), variable, &Streams::process()))
}

/// Runs one command line; returns the exit status.
fn run(
    arguments: impl IntoIterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<OsString>,
    streams: &Streams,
) -> u8 {
    let width = streams.columns().map_or(HELP_WIDTH, |columns| columns.min(HELP_WIDTH_MAX));
    let cli = match read(arguments, width) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            streams.stderr(&error::of_clap(&error.render().to_string()));
            return Exit::Usage as u8;
        }
        Err(answer) => {
            // Help and version. A reader that closed the output is not an error.
            let _lost = streams.stdout(answer.render().to_string().as_bytes());
            return 0;
        }
    };
    match start(cli, variable, streams) {
        Ok(()) => 0,
        Err(error) if error.is_output_closed() => 0,
        Err(error) => {
            let error = error.helpful();
            streams.stderr(&error.render());
            error.exit() as u8
        }
    }
}

fn start(
    cli: Cli,
    variable: impl Fn(&str) -> Option<OsString>,
    streams: &Streams,
) -> Result<(), Error> {
    let Options { context, endpoints, output, timeout, passphrase_file, config } = cli.options;
    let out = Out { format: output, streams: streams.clone() };
    if let (Some(name), Format::Json | Format::Yaml) = (cli.command.draws(), output) {
        return Err(Error::usage(format!("`{name}` prints no document, so it takes no --output"))
            .or_help("leave --output out"));
    }
    match cli.command {
        Command::Completion { shell: completion::Target::Shell(shell) } => {
            return out.raw(&completion::script(shell));
        }
        Command::Version => {
            let version = env!("CARGO_PKG_VERSION");
            let value = serde_json::json!({ "polisctl": version });
            return out.print(&Document::new(&value, format!("polisctl {version}"))?);
        }
        _ => {}
    }
    let kubeconfig = kubernetes::usual_file(&variable);
    let colours = colours(&variable);
    let contexts = Contexts::find(config, variable)?;
    let passphrase = Passphrase { file: passphrase_file };
    let global =
        Global { context, endpoints, timeout, passphrase, contexts, kubeconfig, colours, out };
    // One thread: a command does one thing at a time.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .doing(|| "cannot start the runtime".to_owned())?;
    runtime.block_on(perform(cli.command, &global))
}

/// The wish of the environment: no colours where `NO_COLOR` is set and not empty
/// (<https://no-color.org>).
fn colours(variable: impl Fn(&str) -> Option<OsString>) -> Colours {
    match variable("NO_COLOR").is_some_and(|set| !set.is_empty()) {
        true => Colours::Off,
        false => Colours::On,
    }
}

impl Command {
    /// The name of a command that draws on a terminal, or prints for a shell.
    fn draws(&self) -> Option<&'static str> {
        match self {
            Self::Console(_) => Some("console"),
            Self::Dashboard => Some("dashboard"),
            Self::Completion { shell: completion::Target::Shell(_) } => Some("completion"),
            _ => None,
        }
    }
}

async fn perform(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::Parameters(command) => parameters::run(command, global).await,
        Command::Owner(command) => owner::run(command, global),
        Command::Update(command) => update::run(command, global),
        Command::Context(command) => context::run(command, global),
        Command::Cluster(command) => cluster::run(command, global).await,
        Command::Node(command) => node::run(command, global).await,
        Command::Get(Get::Nodes(arguments)) => node::list(&arguments, global).await,
        Command::Maintenance(command) => Box::pin(maintenance::run(command, global)).await,
        Command::User(command) => user::run(command, global).await,
        Command::Etcd(command) => etcd::run(command, global).await,
        Command::Snapshot(command) => Box::pin(snapshot::run(command, global)).await,
        Command::Kubernetes(command) => kubernetes::run(command, global).await,
        Command::Events(arguments) => Box::pin(events::run(&arguments, global)).await,
        Command::Audit(arguments) => Box::pin(audit::run(arguments, global)).await,
        Command::Top(arguments) => Box::pin(top::run(&arguments, global)).await,
        Command::Dashboard => Box::pin(dashboard::run(global)).await,
        Command::Console(arguments) => Box::pin(console::run(arguments, global)).await,
        Command::Support(arguments) => Box::pin(support::run(arguments, global)).await,
        Command::Completion { .. } => completion::nodes(global).await,
        Command::Version => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands that are part of the contract.
    const PROMISED: &str = "parameters bootstrap, parameters register, parameters show, \
        parameters check, owner create, cluster take-ownership, cluster info, cluster status, \
        cluster rotate-ca, cluster ticket, cluster ticket rotate, cluster update, cluster update status, \
        cluster update pause, cluster update resume, cluster update abort, cluster wait, node list, \
        node describe, node firewall, node network, node update, update inspect, \
        node approve, node roles, node label, node reboot, node poweroff, node decommission, \
        node delete, node logs, node attest, etcd members, etcd status, etcd snapshot, \
        snapshot list, snapshot fetch, maintenance describe, maintenance logs, \
        maintenance parameters, maintenance reboot, maintenance poweroff, console, kubernetes kubeconfig, kubernetes status, \
        audit, audit verify";

    fn paths(command: &clap::Command, path: &str) -> Vec<String> {
        let below = command.get_subcommands().flat_map(|sub| {
            let path = format!("{path} {}", sub.get_name());
            paths(sub, path.trim())
        });
        std::iter::once(path.to_owned()).chain(below).collect()
    }

    #[test]
    fn every_promised_command_is_there_and_the_manual_has_every_command() {
        let there = paths(&command(), "");
        for promised in PROMISED.split(", ") {
            assert!(there.iter().any(|path| path == promised), "{promised} is not there");
        }
        let manual = include_str!("../../../docs/polisctl.md");
        for path in there.iter().filter(|path| !path.is_empty()) {
            let last = path.rsplit(' ').next().unwrap();
            let written = [format!("`{path}"), format!("`{last}")];
            assert!(written.iter().any(|text| manual.contains(text)), "no {path} in the manual");
        }
    }

    #[test]
    fn wrong_usage_has_status_2_and_says_what_is_allowed() {
        let world = testing::World::new();
        let ended = world.run(&["parameters", "chekc", "x"]);
        assert_eq!(ended.status, 2);
        assert!(ended.stderr.contains("similar subcommand exists: 'check'"), "{}", ended.stderr);
        assert!(ended.stderr.contains("\n\nUsage: polisctl parameters "), "{}", ended.stderr);
        let last = ended.stderr.lines().last().unwrap();
        assert!(last.starts_with("help: `--help` after a command explains it"), "{last}");
        assert!(!ended.stderr.contains("For more information"), "{}", ended.stderr);
        // Without a command, the help says what there is.
        let ended = world.run(&["parameters"]);
        assert_eq!((ended.status, &*ended.stdout), (2, ""));
        assert!(!ended.stderr.contains("help: `--help`"), "{}", ended.stderr);
        let ended = world.run(&["context", "list", "--timeout", "1w"]);
        assert_eq!((ended.status, &*ended.stdout), (2, ""));
        assert!(ended.stderr.contains("number with the unit ms, s, m, h or d"), "{}", ended.stderr);
    }

    #[test]
    fn a_command_without_a_document_takes_no_format() {
        let world = testing::World::new();
        for command in [&["console"][..], &["dashboard"], &["completion", "bash"]] {
            let ended = world.run(&[command, &["--output", "json"]].concat());
            assert_eq!((ended.status, &*ended.stdout), (2, ""), "{command:?}");
            assert!(ended.stderr.contains("prints no document"), "{}", ended.stderr);
        }
        assert!(world.runs(&["completion", "bash"]).contains("polisctl"));
    }

    #[test]
    fn no_color_counts_where_it_is_not_empty() {
        let wish = |set: Option<&str>| {
            colours(|name| set.filter(|_| name == "NO_COLOR").map(OsString::from))
        };
        assert_eq!([wish(None), wish(Some(""))], [Colours::On; 2]);
        assert_eq!([wish(Some("1")), wish(Some("0"))], [Colours::Off; 2]);
    }

    #[test]
    fn help_is_an_answer() {
        let ended = testing::World::new().run(&["--help"]);
        assert_eq!((ended.status, &*ended.stderr), (0, ""));
        insta::assert_snapshot!("help", ended.stdout);
    }

    #[test]
    fn without_a_context_a_command_says_how_to_get_one() {
        let world = testing::World::new();
        for command in [&["cluster", "info"][..], &["node", "list"], &["etcd", "members"]] {
            insta::allow_duplicates! {
                insta::assert_snapshot!(world.refuses(command), @r"
                error: no context is in use
                help: take ownership of a cluster: `polisctl --endpoint HOST cluster take-ownership`; or pick a context: `polisctl context use NAME`
                ");
            }
        }
    }

    #[test]
    fn a_context_without_a_ca_is_not_talked_to() {
        let world = testing::World::new();
        world.runs(&["owner", "create", "-o", "@k"]);
        world.runs(&["context", "set", "home", "--endpoint", "192.0.2.1", "--key", "@k"]);
        insta::assert_snapshot!(world.runs(&["context", "list"]), @r"
           NAME  USER  ENDPOINTS       CERTIFICATE ENDS
        *  home  -     192.0.2.1:7835  -
        ");
        insta::assert_snapshot!(world.refuses(&["cluster", "info"]), @r"
        error: context home does not know the CA of its cluster
        help: `polisctl --context home cluster take-ownership` gets one once the cluster is healthy; `cargo xtask run` does that by itself
        ");
        insta::assert_snapshot!(world.refuses(&["context", "use", "hone"]), @r#"
        error: there is no context "hone"
        help: there are: home
        "#);
        world.runs(&["context", "remove", "home", "--yes"]);
    }

    #[test]
    fn an_endpoint_without_a_listener_is_named() {
        let world = testing::World::new();
        world.runs(&["owner", "create"]);
        let (_bound, address) = testing::closed_port();
        let printed = world.refuses(&["cluster", "take-ownership", "--endpoint", &address]);
        insta::assert_snapshot!(printed.replace(&address, "ADDRESS"), @r"
        error: cannot connect to ADDRESS
        cause: Connection refused (os error 111)
        help: check that the machine is on and ready, and that the port is open
        ");
    }

    #[test]
    fn a_file_whose_name_is_not_unicode_is_used_as_any_other() {
        use std::os::unix::ffi::OsStringExt as _;
        let world = testing::World::new();
        let odd = |name: &str| {
            let name = [&b"\xff"[..], name.as_bytes()].concat();
            world.path("").join(OsString::from_vec(name)).into_os_string()
        };
        let [key, parameters] = ["key", "parameters"].map(odd);
        let run = |words: &[&str], file: &OsString| {
            let words = words.iter().map(OsString::from).chain([file.clone()]);
            let line = std::iter::once(OsString::from("polisctl")).chain(words);
            let folder = odd("folder");
            let variable = |name: &str| (name == "XDG_CONFIG_HOME").then(|| folder.clone());
            super::run(line, variable, &Streams::new(std::io::sink(), std::io::sink()))
        };
        for format in ["json", "table"] {
            assert_eq!(run(&["--output", format, "owner", "show"], &key), 1);
        }
        assert_eq!(run(&["owner", "create", "-o"], &key), 0);
        assert_eq!(run(&["--output", "json", "owner", "show"], &key), 0);
        assert_eq!(run(&["owner", "create", "--output"], &OsString::from("yaml")), 0);
        assert!(PathBuf::from(odd("folder")).join("polis/owner.key").exists());
        assert_eq!(run(&["parameters", "bootstrap", "-o"], &parameters), 0);
        assert_eq!(run(&["parameters", "check"], &parameters), 0);
    }

    #[test]
    fn standard_output_is_no_file_for_a_command_that_has_a_document() {
        let world = testing::World::new();
        for line in [
            &["owner", "create"][..],
            &["etcd", "snapshot"],
            &["etcd", "decrypt", "@snapshot"],
            &["snapshot", "fetch", "--target", "x", "--credentials", "x"],
            &["support"],
            &["kubernetes", "kubeconfig"],
        ] {
            for out in ["-", "/dev/stdout"] {
                let ended = world.run(&[line, &["-o", out]].concat());
                assert_eq!((ended.status, &*ended.stdout), (2, ""), "{line:?}: {}", ended.stderr);
                assert!(ended.stderr.contains("allowed is a file"), "{line:?}: {}", ended.stderr);
            }
        }
        world.runs(&["owner", "create"]);
        let written = ["parameters", "bootstrap", "--format", "text", "-o", "/dev/stdout"];
        let text = world.runs(&written);
        assert!(text.starts_with("polis-parameters-v1:") && text.lines().count() == 1, "{text}");
        let ended = world.run(&[&written[..], &["--output", "json"]].concat());
        assert_eq!((ended.status, &*ended.stdout), (2, ""), "{}", ended.stderr);
    }

    #[test]
    fn the_version_is_a_command_too() {
        let world = testing::World::new();
        assert_eq!(world.runs(&["version"]), world.runs(&["--version"]));
        let value: serde_json::Value =
            serde_json::from_str(&world.runs(&["version", "-o", "json"])).unwrap();
        assert_eq!(value["polisctl"], env!("CARGO_PKG_VERSION"));
    }
}
