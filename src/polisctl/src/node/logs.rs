//! `polisctl node logs`: the log tree of a node.

use polis_proto::v1;
use polis_proto::v1::logs_response::Entry;
use polis_proto::v1::node_management_client::NodeManagementClient;
use polis_wire::rpc::client::Channel;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tonic::Status;

use super::At;
use crate::error::Error;
use crate::output::{Document, Format};
use crate::session::{PATIENCE, Session, Target, refused};
use crate::text::{clean, is_near, word};
use crate::{Global, units};

/// Arguments of `node logs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node; several are merged, by their wall clocks.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<String>,
    /// Only the lines of this service and those below it, such as root.consensus; `root.`
    /// may be left out.
    #[arg(long, default_value = "", value_name = "NAME")]
    name: String,
    /// Leave out the services below.
    #[arg(long)]
    alone: bool,
    /// Leave out lines below this severity.
    #[arg(long, value_enum, default_value_t = Severity::Info)]
    severity: Severity,
    /// Whether to print lines of programs that have no severity.
    #[arg(long, value_enum, default_value_t = Raw::Both)]
    raw: Raw,
    /// Only the newest N of the lines that are there.
    #[arg(short = 'n', long, value_name = "N")]
    tail: Option<u32>,
    /// Only lines of this time until now, such as 10m; of this boot.
    #[arg(long, value_name = "DURATION", value_parser = units::duration, conflicts_with = "boot")]
    since: Option<Duration>,
    /// Follow new lines, also after the node has rebooted.
    #[arg(short, long, conflicts_with = "boot")]
    follow: bool,
    /// Print times of the wall clock, in UTC, in place of seconds since the kernel started.
    #[arg(short = 't', long)]
    wall_clock: bool,
    /// 0 is this boot, -1 the one before.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = boot)]
    boot: i32,
    #[command(flatten)]
    at: At,
}

/// Reads the number of a boot.
fn boot(text: &str) -> Result<i32, String> {
    let boot = text.parse().ok().filter(|boot: &i32| *boot <= 0);
    boot.ok_or_else(|| "allowed are 0, this boot, and -1, -2 and so on, those before".to_owned())
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Severity {
    /// Everything.
    Debug,
    /// Information and worse.
    Info,
    /// Warnings and worse.
    Warning,
    /// Errors and worse.
    Error,
    /// Failures that ended their writer.
    Fatal,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Raw {
    /// With the others.
    Both,
    /// Alone.
    Only,
    /// Not at all.
    None,
}

impl From<Severity> for v1::Severity {
    fn from(severity: Severity) -> Self {
        match severity {
            Severity::Debug => Self::Debug,
            Severity::Info => Self::Info,
            Severity::Warning => Self::Warning,
            Severity::Error => Self::Error,
            Severity::Fatal => Self::Fatal,
        }
    }
}

/// An entry, as programs read it.
#[derive(Debug, Serialize)]
struct View<'a> {
    node: &'a str,
    name: &'a str,
    severity: String,
    uptime_seconds: f64,
    /// RFC 3339; `null`: the node had no clock yet.
    time: Option<units::Time>,
    time_unix_nanos: i64,
    source: &'a str,
    message: &'a str,
    fields: &'a BTreeMap<String, String>,
    raw: bool,
}

/// How the lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// With the time of the wall clock.
    wall_clock: bool,
    /// With the node that logged it.
    node: bool,
}

const READ: &str = "read the log";

/// Between two attempts to reach a node that is followed.
const RETRY: Duration = Duration::from_secs(2);

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let several = arguments.nodes.len() > 1;
    let form = Form { wall_clock: arguments.wall_clock || several, node: several };
    if several && arguments.at.at.is_some() {
        return Err(Error::usage("--at is the address of one node, and several are named")
            .or_help("name one node, or leave --at out: the cluster knows the addresses"));
    }
    let mut session = Session::prepare(global, PATIENCE)?;
    let mut logs = Vec::new();
    for node in &arguments.nodes {
        logs.push(Box::pin(Log::open(&session, node, &arguments)).await?);
    }
    if arguments.follow {
        // A person ends it.
        session.go_on();
        let session = &session;
        let show = |log: &str, entry: &Entry| global.out.stream(&document(entry, log, form)?);
        let remark = |text: &str| global.out.remark(text);
        let followed = logs.into_iter().map(|log| log.follow(session, show, remark));
        return futures::future::try_join_all(followed).await.map(drop);
    }
    // A document for programs is printed whole.
    if let ([log], Format::Table) = (&mut *logs, global.out.format) {
        let show = |log: &str, entry: &Entry| global.out.stream(&document(entry, log, form)?);
        let remark = |text: &str| global.out.remark(text);
        return session.in_time(READ, log.read(&show, &remark)).await;
    }
    let entries = std::cell::RefCell::new(Vec::new());
    for log in &mut logs {
        let keep = |log: &str, entry: &Entry| {
            entries.borrow_mut().push((entry.time_unix_nanos, log.to_owned(), entry.clone()));
            Ok(())
        };
        let remark = |text: &str| global.out.remark(text);
        session.in_time(READ, log.read(&keep, &remark)).await?;
    }
    let mut entries = entries.into_inner();
    if several {
        // Stable: lines of one node stay in its own order where their times are the same.
        entries.sort_by_key(|(nanos, _, _)| *nanos);
    }
    let documents = entries.iter().map(|(_, log, entry)| document(entry, log, form));
    global.out.entries(documents.collect::<Result<_, _>>()?)
}

/// The log of a node, of which some lines may have been read.
struct Log {
    /// As the node is called in the lines.
    node: String,
    target: Target,
    request: v1::LogsRequest,
    lines: tonic::Streaming<v1::LogsResponse>,
    /// Lines up to this many seconds after the kernel's start count as read.
    from: f64,
    /// The same of the newest line.
    last: f64,
}

impl Log {
    async fn open(session: &Session, node: &str, arguments: &Arguments) -> Result<Self, Error> {
        let target = session.target(Some(node), arguments.at.at.as_ref()).await?;
        let mut client = NodeManagementClient::new(session.node(&target).await?);
        let name = known(session, &mut client, node, arguments).await?;
        let earliest = earliest(session, &mut client, arguments.since).await?;
        let raw = match arguments.raw {
            Raw::Both => v1::logs_request::Raw::Unspecified,
            Raw::Only => v1::logs_request::Raw::Only,
            Raw::None => v1::logs_request::Raw::None,
        };
        let request = v1::LogsRequest {
            name,
            children: !arguments.alone,
            minimum: v1::Severity::from(arguments.severity).into(),
            raw: raw.into(),
            backlog: arguments.tail.map_or(-1, i64::from),
            follow: arguments.follow,
            boot: arguments.boot,
        };
        let lines = client.logs(request.clone());
        let lines = session.within(READ, lines).await?.into_inner();
        let from = earliest.next_down();
        Ok(Self { node: node.to_owned(), target, request, lines, from, last: from })
    }

    /// Reads to the end of the stream.
    async fn read(
        &mut self,
        show: &impl Fn(&str, &Entry) -> Result<(), Error>,
        remark: &impl Fn(&str),
    ) -> Result<(), Error> {
        let failed = |status: Status| refused("continue the log", &status);
        while let Some(answer) = self.lines.message().await.map_err(failed)? {
            let from = self.from;
            for entry in answer.entries.iter().filter(|entry| entry.uptime_seconds > from) {
                show(&self.node, entry)?;
                self.last = self.last.max(entry.uptime_seconds);
            }
            if answer.lost > 0 {
                remark(&lost(answer.lost));
            }
        }
        Ok(())
    }

    /// Reads without an end: a node that reboots, or cannot be reached for a while, goes on
    /// with the lines that were not read.
    async fn follow(
        mut self,
        session: &Session,
        show: impl Fn(&str, &Entry) -> Result<(), Error>,
        remark: impl Fn(&str),
    ) -> Result<(), Error> {
        loop {
            match self.read(&show, &remark).await {
                Err(error) if error.is_of_output() => return Err(error),
                Err(error) => remark(&format!("{}: {}", self.node, error.summary())),
                Ok(()) => remark(&format!("{}: the node ended the log", self.node)),
            }
            loop {
                tokio::time::sleep(RETRY).await;
                if let Ok(restarted) = Box::pin(self.again(session)).await {
                    let how = if restarted { "has rebooted" } else { "answers again" };
                    remark(&format!("{} {how}", self.node));
                    break;
                }
            }
        }
    }

    /// Connects again; returns whether this is another boot.
    async fn again(&mut self, session: &Session) -> Result<bool, Error> {
        let mut client = NodeManagementClient::new(session.node(&self.target).await?);
        let failed = |status: Status| refused("continue the log", &status);
        let status = client.get_status(v1::GetStatusRequest {}).await.map_err(failed)?.into_inner();
        let restarted = status.uptime_seconds < self.last;
        self.from = if restarted { f64::NEG_INFINITY } else { self.last };
        self.last = self.from;
        // The asked part of the first log was read; now every line counts.
        let request = v1::LogsRequest { backlog: -1, ..self.request.clone() };
        self.lines = client.logs(request).await.map_err(failed)?.into_inner();
        Ok(restarted)
    }
}

/// The remark about lines that a node could not send in time.
fn lost(lines: u64) -> String {
    let were = if lines == 1 { " was" } else { "s were" };
    format!("{lines} line{were} lost in transit")
}

/// Reads a log to its end, a line with its wall-clock time at a time.
pub(crate) async fn lines(
    client: &mut NodeManagementClient<Channel>,
    request: v1::LogsRequest,
    mut each: impl FnMut(&str),
) -> Result<(), Error> {
    let failed = |status: Status| refused(READ, &status);
    let mut stream = client.logs(request).await.map_err(failed)?.into_inner();
    while let Some(answer) = stream.message().await.map_err(failed)? {
        for entry in &answer.entries {
            let time = units::nanos_since_1970(entry.time_unix_nanos).map(units::rfc3339);
            each(&format!("{} {}", time.as_deref().unwrap_or("-"), line(entry)));
        }
        if answer.lost > 0 {
            each(&format!("- {}", lost(answer.lost)));
        }
    }
    Ok(())
}

/// The uptime at which the wanted lines begin, by the clock of the node's kernel: its wall
/// clock, and that of the operator, may be wrong.
async fn earliest(
    session: &Session,
    client: &mut NodeManagementClient<Channel>,
    since: Option<Duration>,
) -> Result<f64, Error> {
    let Some(since) = since else { return Ok(f64::NEG_INFINITY) };
    let status = client.get_status(v1::GetStatusRequest {});
    let status = session.within("ask the node for its uptime", status).await?.into_inner();
    Ok(status.uptime_seconds - since.as_secs_f64())
}

/// The most names that an error lists.
const NEAR_MAX: usize = 8;

/// The name of the kernel's messages in the log of a node.
const KERNEL: &str = "kernel";

/// The full name of a log.
///
/// The node lists the names of its services. Names that only the log has, such as those of
/// child processes, are read from the log itself, which takes longer and
/// happens only for names of other log writers.
async fn known(
    session: &Session,
    client: &mut NodeManagementClient<Channel>,
    node: &str,
    arguments: &Arguments,
) -> Result<String, Error> {
    let wanted = &*arguments.name;
    if wanted.is_empty() {
        return Ok(String::new());
    }
    let services = client.services(v1::ServicesRequest {});
    let services = session.within("list the services", services).await?.into_inner();
    let mut names: BTreeSet<String> =
        services.services.into_iter().map(|service| service.name).collect();
    // Beside it there is the service that copies its messages, `root.kernel`.
    names.insert(KERNEL.to_owned());
    if let Some(name) = complete(&names, wanted) {
        return Ok(name);
    }
    let request = v1::LogsRequest {
        children: true,
        minimum: v1::Severity::Debug.into(),
        backlog: -1,
        boot: arguments.boot,
        ..Default::default()
    };
    let read = async {
        let mut stream = client.logs(request).await?.into_inner();
        while let Some(answer) = stream.message().await? {
            names.extend(answer.entries.into_iter().map(|entry| entry.name));
        }
        Ok(())
    };
    session.within("read the names of the log", read).await?;
    complete(&names, wanted).ok_or_else(|| {
        let near = near(&names, wanted).join(", ");
        Error::new(format!("no log has the name {wanted:?}")).or_help(format!(
            "near names: {near}; `polisctl node services {node}` lists all services"
        ))
    })
}

/// As the console's filter takes a name: in full, or without `root.`.
fn complete(names: &BTreeSet<String>, wanted: &str) -> Option<String> {
    let wanted = wanted.trim_end_matches('.');
    [wanted.to_owned(), format!("root.{wanted}")].into_iter().find(|candidate| {
        let is_below =
            |name: &String| name.strip_prefix(candidate).is_some_and(|rest| rest.starts_with('.'));
        names.iter().any(|name| name == candidate || is_below(name))
    })
}

/// Suggestions: names that contain the text, names with a similar part, else the first
/// level of the tree.
fn near(names: &BTreeSet<String>, wanted: &str) -> Vec<String> {
    let last = wanted.rsplit('.').next().unwrap_or(wanted);
    let alike =
        |name: &&String| name.contains(wanted) || name.split('.').any(|word| is_near(word, last));
    let mut found: Vec<String> = names.iter().filter(alike).take(NEAR_MAX).cloned().collect();
    if found.is_empty() {
        let is_high = |name: &&String| name.matches('.').count() <= 1;
        found = names.iter().filter(is_high).take(NEAR_MAX).cloned().collect();
    }
    found
}

fn document(entry: &Entry, node: &str, form: Form) -> Result<Document, Error> {
    let view = View {
        node,
        name: &entry.name,
        severity: word(entry.severity().as_str_name(), "SEVERITY_"),
        uptime_seconds: entry.uptime_seconds,
        time: units::nanos_since_1970(entry.time_unix_nanos).map(units::Time),
        time_unix_nanos: entry.time_unix_nanos,
        source: &entry.source,
        message: &entry.message,
        fields: &entry.fields,
        raw: entry.raw,
    };
    Document::new(&view, written(entry, node, form))
}

/// One line of a log, in the form that was asked for.
fn written(entry: &Entry, node: &str, form: Form) -> String {
    let mut text = line(entry);
    if form.wall_clock {
        let time = units::nanos_since_1970(entry.time_unix_nanos).map(units::rfc3339);
        // In place of the seconds in brackets.
        let rest = text.split_once("] ").map_or(&*text, |(_, rest)| rest);
        text = format!("{} {rest}", time.as_deref().unwrap_or("-"));
    }
    match form.node {
        true => clean(&format!("{node} {text}")),
        false => text,
    }
}

/// The form of the serial line.
fn line(entry: &Entry) -> String {
    let letter = match entry.severity() {
        _ if entry.raw => 'R',
        v1::Severity::Unspecified | v1::Severity::Debug => 'D',
        v1::Severity::Info => 'I',
        v1::Severity::Warning => 'W',
        v1::Severity::Error => 'E',
        v1::Severity::Fatal => 'F',
    };
    let mut line =
        format!("[{:>12.6}] {letter} {}: {}", entry.uptime_seconds, entry.name, entry.message);
    for (key, value) in &entry.fields {
        line.push_str(&format!(" {key}={value}"));
    }
    clean(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_in_full_or_without_the_root_and_a_slip_finds_what_was_meant() {
        let names = ["root", "root.consensus.etcd", "root.curator", "root.network.dhcp", "kernel"];
        let names = BTreeSet::from(names.map(str::to_owned));
        for (wanted, name) in [
            ("root.curator", "root.curator"),
            ("curator", "root.curator"),
            ("curator.", "root.curator"),
            ("network", "root.network"),
            ("network.dhcp", "root.network.dhcp"),
            ("consensus.etcd", "root.consensus.etcd"),
            ("kernel", "kernel"),
            ("root", "root"),
        ] {
            assert_eq!(complete(&names, wanted).as_deref(), Some(name), "{wanted}");
        }
        for wanted in ["cur", "root.net", "dhcp", "etcd", "root.curator.x", "ernel"] {
            assert_eq!(complete(&names, wanted), None, "{wanted}");
        }
        assert_eq!(near(&names, "cruator"), ["root.curator"]);
        assert_eq!(near(&names, "root.netwrok"), ["root.network.dhcp"]);
        assert_eq!(near(&names, "etcd"), ["root.consensus.etcd"]);
        assert_eq!(near(&names, "weather"), ["kernel", "root", "root.curator"]);
    }

    #[test]
    fn a_line_has_the_wall_clock_and_its_node_where_that_is_asked_for() {
        let entry = Entry {
            name: "root.network".to_owned(),
            severity: v1::Severity::Info.into(),
            uptime_seconds: 12.5,
            time_unix_nanos: 1_700_000_000_000_000_000,
            message: "a [bracket] follows".to_owned(),
            ..Entry::default()
        };
        let text = |wall_clock, node| written(&entry, "web-1", Form { wall_clock, node });
        assert_eq!(text(false, false), line(&entry));
        let plain = "2023-11-14T22:13:20Z I root.network: a [bracket] follows";
        assert_eq!(text(true, false), plain);
        assert_eq!(text(true, true), format!("web-1 {plain}"));
        let unset = Entry { time_unix_nanos: 0, ..entry.clone() };
        let form = Form { wall_clock: true, node: false };
        assert!(written(&unset, "", form).starts_with("- I root.network"), "no clock yet");
    }

    #[test]
    fn a_lost_line_is_one() {
        assert_eq!(lost(1), "1 line was lost in transit");
        assert_eq!(lost(2), "2 lines were lost in transit");
    }

    #[test]
    fn an_entry_is_one_line() {
        let entry = Entry {
            name: "root.network".to_owned(),
            severity: v1::Severity::Warning.into(),
            uptime_seconds: 12.5,
            message: "no carrier\n\u{1b}[2J".to_owned(),
            fields: BTreeMap::from([("interface".to_owned(), "eth0".to_owned())]),
            ..Entry::default()
        };
        assert_eq!(line(&entry), "[   12.500000] W root.network: no carrier ?[2J interface=eth0");
    }
}
