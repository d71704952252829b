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
use crate::output::Document;
use crate::session::{PATIENCE, Session, refused};
use crate::text::{clean, word};
use crate::{Global, units};

/// Arguments of `node logs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
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
    /// Only this number of existing lines.
    #[arg(short = 'n', long, value_name = "N")]
    tail: Option<u32>,
    /// Only lines of this time until now, such as 10m; of this boot.
    #[arg(long, value_name = "DURATION", value_parser = units::duration, conflicts_with = "boot")]
    since: Option<Duration>,
    /// Follow new lines.
    #[arg(short, long)]
    follow: bool,
    /// 0 is this boot, -1 the one before.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(..=0))]
    boot: i32,
    #[command(flatten)]
    at: At,
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

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let session = Session::prepare(global, PATIENCE)?;
    let target = session.target(Some(&arguments.node), arguments.at.at.as_ref()).await?;
    let mut client = NodeManagementClient::new(session.node(&target).await?);
    let name = known(&session, &mut client, &arguments).await?;
    let earliest = earliest(&session, &mut client, arguments.since).await?;
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
    let mut stream = session.within("read the log", client.logs(request)).await?.into_inner();
    while let Some(answer) =
        stream.message().await.map_err(|status| refused("continue the log", &status))?
    {
        for entry in answer.entries.iter().filter(|entry| entry.uptime_seconds >= earliest) {
            global.out.stream(&document(entry)?)?;
        }
        if answer.lost > 0 {
            global.out.remark(&format!("{} lines were lost in transit", answer.lost));
        }
    }
    Ok(())
}

/// Reads a log to its end, a line with its wall-clock time at a time.
pub(crate) async fn lines(
    client: &mut NodeManagementClient<Channel>,
    request: v1::LogsRequest,
    mut each: impl FnMut(&str),
) -> Result<(), Error> {
    let failed = |status: Status| refused("read the log", &status);
    let mut stream = client.logs(request).await.map_err(failed)?.into_inner();
    while let Some(answer) = stream.message().await.map_err(failed)? {
        for entry in &answer.entries {
            let time = units::nanos_since_1970(entry.time_unix_nanos).map(units::rfc3339);
            each(&format!("{} {}", time.as_deref().unwrap_or("-"), line(entry)));
        }
        if answer.lost > 0 {
            each(&format!("- {} lines were lost in transit", answer.lost));
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
/// The most edits between a mistyped name and a suggestion.
const SLIPS_MAX: usize = 2;

/// The full name of a log.
///
/// The node lists the names of its services. Names that only the log has, such as those of
/// the kernel and of child processes, are read from the log itself, which takes longer and
/// happens only for names of other log writers.
async fn known(
    session: &Session,
    client: &mut NodeManagementClient<Channel>,
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
            "near names: {near}; `polisctl node services {}` lists all services",
            arguments.node
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
    let alike = |name: &&String| {
        name.contains(wanted) || name.split('.').any(|word| slips(word, last) <= SLIPS_MAX)
    };
    let mut found: Vec<String> = names.iter().filter(alike).take(NEAR_MAX).cloned().collect();
    if found.is_empty() {
        let is_high = |name: &&String| name.matches('.').count() <= 1;
        found = names.iter().filter(is_high).take(NEAR_MAX).cloned().collect();
    }
    found
}

/// The edit distance of two words.
fn slips(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (place, known) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *known);
            diagonal = row[place + 1];
            row[place + 1] = changed.min(diagonal + 1).min(row[place] + 1);
        }
    }
    row[other.len()]
}

fn document(entry: &Entry) -> Result<Document, Error> {
    let view = View {
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
    Document::new(&view, line(entry))
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
        assert_eq!([slips("", "abc"), slips("abc", "abc"), slips("kitten", "sitting")], [3, 0, 3]);
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
