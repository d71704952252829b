//! `polisctl node logs`: the log tree of a node, from afar.

use polis_proto::v1;
use polis_proto::v1::logs_response::Entry;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde::Serialize;
use std::collections::BTreeMap;

use super::At;
use crate::Global;
use crate::cluster::word;
use crate::error::Error;
use crate::output::{Document, clean};
use crate::session::{PATIENCE, Session, refused};

/// Arguments of `node logs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The node.
    node: String,
    /// Only what this service and those below it said, such as root.consensus.
    #[arg(long, default_value = "", value_name = "NAME")]
    name: String,
    /// Leave out the services below.
    #[arg(long)]
    alone: bool,
    /// Leave out what matters less.
    #[arg(long, value_enum, default_value_t = Severity::Info)]
    severity: Severity,
    /// Whether to print lines that programs wrote without saying how much they matter.
    #[arg(long, value_enum, default_value_t = Raw::Both)]
    raw: Raw,
    /// Only so many of the lines that are there.
    #[arg(short = 'n', long, value_name = "N")]
    tail: Option<u32>,
    /// Go on with what comes.
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
    /// The ordinary course of things, and worse.
    Info,
    /// What went on without something, and worse.
    Warning,
    /// What someone should look at.
    Error,
    /// What ended its writer.
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
    let channel = session.node(&target).await?;
    let raw = match arguments.raw {
        Raw::Both => v1::logs_request::Raw::Unspecified,
        Raw::Only => v1::logs_request::Raw::Only,
        Raw::None => v1::logs_request::Raw::None,
    };
    let request = v1::LogsRequest {
        name: arguments.name,
        children: !arguments.alone,
        minimum: v1::Severity::from(arguments.severity).into(),
        raw: raw.into(),
        backlog: arguments.tail.map_or(-1, i64::from),
        follow: arguments.follow,
        boot: arguments.boot,
    };
    let asked = NodeManagementClient::new(channel).logs(request).await;
    let mut stream = asked.map_err(|status| refused("read the log", &status))?.into_inner();
    while let Some(answer) =
        stream.message().await.map_err(|status| refused("go on with the log", &status))?
    {
        for entry in &answer.entries {
            global.out.stream(&document(entry)?)?;
        }
        if answer.lost > 0 {
            global.out.remark(&format!("{} lines were lost on the way", answer.lost));
        }
    }
    Ok(())
}

fn document(entry: &Entry) -> Result<Document, Error> {
    let view = View {
        name: &entry.name,
        severity: word(entry.severity().as_str_name(), "SEVERITY_"),
        uptime_seconds: entry.uptime_seconds,
        time_unix_nanos: entry.time_unix_nanos,
        source: &entry.source,
        message: &entry.message,
        fields: &entry.fields,
        raw: entry.raw,
    };
    Document::new(&view, line(entry))
}

/// As on the serial line of the machine.
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
