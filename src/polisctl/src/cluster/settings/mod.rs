//! `polisctl cluster export` and `apply`: the settings of a cluster as one file, for operators who
//! keep them under version control.
//!
//! ```text
//! export:  cluster --> Settings --> file
//! apply:   file --> Settings --+--> Difference --> question --> configure, registries
//!          cluster ------------+
//! ```
//!
//! Invariants:
//! - A setting that a file does not name stays as it is.
//! - No secret is in a file, in a difference or in an error.
//! - Only what differs is sent, and nothing before the operator has agreed.
//! - A command that succeeds has read the settings of the file from the cluster.
//!
//! What this module does not do: settings of nodes, such as labels and roles (`node`).

mod difference;
mod file;

use std::io;
use std::path::{Path, PathBuf};

use polis_base::sys::clock;
use polis_proto::v1;

use self::difference::{Change, Difference};
use self::file::Settings;
use super::{firewall, registry};
use crate::ask::{Go, Sure};
use crate::error::{Error, Exit, Explain as _};
use crate::output::{self, Document, Format};
use crate::session::Session;
use crate::{Global, contexts, key};
use polis_wire::identity::Fingerprint;

/// Bytes of the largest file: every registry of a cluster, each field at its limit.
const FILE_MAX: u64 = 4 << 20;

/// The help of a command that failed after it sent a part.
const AGAIN: &str = "repeat the command: it sends what still differs";

/// The next step after a refusal of the leader that has none of its own.
const REFUSED: &str = "change in the file what the cause names, and apply it again: what the \
                       cluster has by then is not sent again";

/// The reasons why a setting was sent and the cluster does not have it.
const NOT_TAKEN: &str = "a leader of an earlier version leaves out settings that it does not know: \
                         update the cluster (`polisctl cluster update FILE`), and apply the file \
                         again; or another user has changed them meanwhile";

/// The arguments of `export`.
#[derive(Debug, clap::Args)]
pub(crate) struct Export {
    /// The file [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// The arguments of `apply`.
#[derive(Debug, clap::Args)]
pub(crate) struct Apply {
    /// The file, in YAML or JSON; `-` is standard input.
    file: PathBuf,
    #[command(flatten)]
    sure: Sure,
}

/// Prints or writes the settings of the cluster.
pub(super) async fn export(arguments: &Export, global: &Global) -> Result<(), Error> {
    if let Some(file) = &arguments.out {
        key::keep(file)?;
    }
    let session = Session::open(global).await?;
    let (configuration, registries) = present(&session).await?;
    let settings = Settings::of(&configuration, &registries)
        .doing(|| "the settings of the cluster cannot be exported".to_owned())?;
    let Some(file) = arguments.out.as_deref().filter(|file| !output::is_stdout(file)) else {
        return match global.out.format {
            Format::Json => global.out.print(&Document::new(&settings, "")?),
            Format::Table | Format::Yaml => global.out.raw(settings.yaml()?.as_bytes()),
        };
    };
    contexts::write(file, settings.yaml()?.as_bytes())?;
    let value = serde_json::json!({ "file": file.to_string_lossy() });
    let text = format!("the settings of the cluster are in {}", file.display());
    global.out.print(&Document::new(&value, text)?)
}

/// Changes the settings of the cluster to those of a file.
pub(super) async fn apply(arguments: &Apply, global: &Global) -> Result<(), Error> {
    let Apply { file, sure } = arguments;
    let wished = read(file)?;
    let session = Session::open(global).await?;
    let (configuration, registries) = present(&session).await?;
    let difference = Difference::of(&wished, &configuration, &registries, clock::now())
        .doing(|| format!("the settings in {} cannot be applied", file.display()))?;
    let is_same = difference.changes.is_empty();
    let lines: String =
        difference.changes.iter().map(|change| format!("{}\n", change.line())).collect();
    let value = serde_json::json!({ "dry_run": sure.is_dry_run(), "changes": difference.changes });
    let end = match (is_same, sure.is_dry_run()) {
        (true, _) => "Nothing differs: the cluster has the settings of the file.",
        (false, true) => "Nothing was changed: this was a dry run.",
        (false, false) => "The cluster has the settings of the file now.",
    };
    if !is_same && !sure.is_dry_run() {
        let cluster = named(&session);
        let effect = format!("These settings of {cluster} change:\n{lines}The others stay.");
        if sure.of(global, &effect)? == Go::NoFurther {
            return Ok(());
        }
        Box::pin(send(difference, &session, global)).await?;
        Box::pin(check_taken(&wished, &session)).await?;
    }
    global.out.print(&Document::new(&value, format!("{lines}{end}"))?)
}

/// The cluster, as a question names it.
fn named(session: &Session) -> String {
    let ca = session.context.ca.as_deref().unwrap_or_default();
    let words = Fingerprint::of_certificate(ca).words();
    format!("the cluster of context {} (CA {words})", session.context.name)
}

/// The configuration and the registries of the cluster.
async fn present(
    session: &Session,
) -> Result<(v1::ClusterConfiguration, Vec<v1::Registry>), Error> {
    let configuration = session.cluster_info().await?.configuration.unwrap_or_default();
    Ok((configuration, registry::listed(session).await?))
}

/// Reads a file of settings.
fn read(file: &Path) -> Result<Settings, Error> {
    let bytes = if file == Path::new("-") {
        contexts::read_open(FILE_MAX, io::stdin().lock(), file)?
    } else {
        contexts::read_up_to(FILE_MAX, file)?.ok_or_else(|| {
            Error::new(format!("{} does not exist", file.display())).or_help("check the path")
        })?
    };
    let read = String::from_utf8(bytes).map_err(|_error| Error::new("it is not text (UTF-8)"));
    read.and_then(|text| Settings::read(&text))
        .doing(|| format!("cannot use {} as a file of settings", file.display()))
        .help(|| "docs/polisctl.md lists the settings".to_owned())
}

/// Sends what differs. The configuration is first: the leader refuses it as a whole or not at all.
/// Registries are deleted before others are set, which may be as many as a cluster has room for.
async fn send(difference: Difference, session: &Session, global: &Global) -> Result<(), Error> {
    let Difference { configuration, set, deleted, .. } = difference;
    if configuration != v1::ClusterConfiguration::default() {
        let has_firewall = configuration.firewall.is_some();
        let request = v1::ConfigureClusterRequest {
            configuration: Some(configuration),
            snapshot_credentials: None,
        };
        let configured = super::send(&request, session).await.map_err(mended)?;
        if has_firewall {
            let confirmed = firewall::confirm(&configured, session, global).await;
            confirmed.map_err(|error| error.or_help(AGAIN))?;
        }
    }
    for host in &deleted {
        registry::remove(host, session).await.map_err(mended)?;
    }
    for registry in &set {
        registry::put(registry, session).await.map_err(mended)?;
    }
    Ok(())
}

/// The error of a call with the next step: a call without an answer is repeated, and a refusal has
/// its own.
fn mended(error: Error) -> Error {
    match error.exit() {
        Exit::TimedOut => error.help_first(AGAIN),
        Exit::Failed | Exit::Usage => error.or_help(REFUSED),
    }
}

/// Reads the settings of the cluster again, and fails if some are not those of the file.
async fn check_taken(wished: &Settings, session: &Session) -> Result<(), Error> {
    let unknown = || "the settings were sent, and cannot be compared with the cluster".to_owned();
    let (configuration, registries) = present(session).await.doing(unknown)?;
    let left = Difference::of(wished, &configuration, &registries, clock::now()).doing(unknown)?;
    if left.changes.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> = left.changes.iter().map(Change::line).collect();
    let text = format!("the cluster has not taken these settings: {}", lines.join("; "));
    Err(Error::new(text).or_help(NOT_TAKEN))
}

#[cfg(test)]
mod tests;
