//! The audit log of the API server in the log of the node: copies the requests of
//! users, so that operators can read them and the log targets of the cluster receive them.
//!
//! ```text
//! API server --> /data/kubernetes/audit/audit.log   all events of the policy, rotated by it
//!                     |  once a second
//!                     v
//!                is it copied? --> budget --> log tree, under the name of this service
//!                                    \--> the number of lines that were left out
//! ```
//!
//! The file is the record. The copy has the changes, the reads of Secrets and ConfigMaps, and every
//! connection into a container; of the cluster's own programs it has only refused requests and
//! such connections, since a kubelet and the controllers write all the time. It has the source of
//! the lines of the audit log of Polis, so that the same readers may read it, and no screen shows
//! it.
//!
//! Invariants:
//! - The API server never waits for this service: it writes into its file.
//! - The copy has neither a content nor a query of a request: the command of an `exec` may have a
//!   password in it.
//! - The copy is bounded. Requests that were refused and those of service accounts have bounds of
//!   their own, so that neither callers without a token nor pods displace the lines of users.
//! - The API server owns the file: no link is followed, and the memory for a line is bounded.
//! - A caller chooses its program name, and of a refused request also each part of the path. These
//!   texts are cut, and cannot look like another line or another field.
//!
//! What this module does not do: decide what the file has (`configuration`).

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::sleep;
use tracing::warn;

use super::configuration;
use super::credentials::MASTERS;
use polis_base::cause;
use polis_base::files;
use polis_base::serial::{Severity, is_control};
use polis_control::curator::audit::LINES;
use polis_runtime::logtree::{Body, Levelled, Origin, Tree};
use polis_runtime::supervisor::{Context, blocking};

/// Between two looks at the file.
const LOOK: Duration = Duration::from_secs(1);

/// Bytes of one look: a whole file of the API server, since a file that is ended while an earlier
/// one is read is left out. Callers without a token can fill one in seconds, with long paths.
const LOOK_MAX: usize = 16 << 20;

/// Bytes of one read.
const PIECE: u64 = 16 << 10;

/// Bytes of a line; a longer one, whose path or program name is as long, is left out.
const LINE_MAX: usize = 64 << 10;

/// Lines that are copied at once: a chart of a thousand objects, and a quarter of what the tree
/// keeps of a name.
const DONE_MAX: u32 = 2048;

/// The same for service accounts: each pod with a token may create reviews of its own rights.
const ACCOUNTS_MAX: u32 = 1024;

/// The same for requests that were refused.
const REFUSED_MAX: u32 = 256;

/// The beginning of the user name of a service account.
const ACCOUNT: &str = "system:serviceaccount:";

/// Bytes of a text of a line: more than the longest name of a service account.
const TEXT_MAX: usize = 512;

/// Looks after which a budget gets a part of its lines back: about 100 lines a minute of what
/// users did, and half as many of service accounts.
const REFILL_LOOKS: u32 = 10;
const REFILL_PARTS: u32 = 128;

/// Answers to callers who have not proved who they are, or may not do what they asked for.
const REFUSALS: [i32; 2] = [401, 403];

/// The stage of a request that has its answer.
const COMPLETE: &str = "ResponseComplete";

/// Why the file was not read.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// It cannot be opened, or is not a file.
    #[error(transparent)]
    Open(#[from] files::Error),
    /// The disk has failed.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The service. A run begins at the end of the file.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The place of the file.
    pub(super) data: files::Kubernetes,
}

impl Service {
    /// Copies until cancelled, which has to come after the end of the API server.
    pub(super) async fn run(self, ctx: Context) -> Result<(), Infallible> {
        let mut follower = Follower::new(self.data, ctx.logs().clone(), ctx.name());
        let mut last = cause::Last::default();
        let mut ended = false;
        loop {
            let (back, looked) = blocking(move || {
                let looked = follower.look();
                (follower, looked)
            })
            .await;
            follower = back;
            ctx.healthy();
            match looked {
                Ok(()) => last.clear(),
                Err(error) => {
                    let error = cause::line(&error);
                    if last.is_new(&error) {
                        warn!(error, "cannot copy the audit log of Kubernetes");
                    }
                }
            }
            if ended {
                follower.copier.refill();
                return Ok(());
            }
            // One more look after the end: at the last lines of the API server.
            ended = ctx.until_cancelled(sleep(LOOK)).await.is_none();
        }
    }
}

/// The place in the file.
#[derive(Debug)]
struct Follower {
    data: files::Kubernetes,
    /// The file that is read, which may have another name by now; `None` before there is one.
    file: Option<BufReader<File>>,
    /// Whether the first look has succeeded: a file that is there then is read from its end, a
    /// later one from its beginning.
    begun: bool,
    /// The beginning of a line.
    line: Vec<u8>,
    /// Whether the rest of a line that is too long comes.
    skips: bool,
    /// [`LOOK_MAX`]; smaller in tests.
    look_max: usize,
    looks: u32,
    copier: Copier,
}

impl Follower {
    fn new(data: files::Kubernetes, tree: Tree, name: &str) -> Self {
        let copier = Copier {
            tree,
            name: name.to_owned(),
            done: Budget::new(DONE_MAX),
            accounts: Budget::new(ACCOUNTS_MAX),
            refused: Budget::new(REFUSED_MAX),
            unreadable: 0,
        };
        let (file, line, look_max) = (None, Vec::new(), LOOK_MAX);
        Self { data, file, begun: false, line, skips: false, look_max, looks: 0, copier }
    }

    /// Copies the lines since the last look. Blocks.
    fn look(&mut self) -> Result<(), Error> {
        self.looks += 1;
        if self.looks == REFILL_LOOKS {
            self.looks = 0;
            self.copier.refill();
        }
        let path = self.data.audit_log();
        let failed = |source| Error::Read { path: path.clone(), source };
        if !self.begun {
            self.file = self.data.open_audit_log()?.map(BufReader::new);
            if let Some(file) = &mut self.file {
                file.seek(SeekFrom::End(0)).map_err(failed)?;
            }
            self.begun = true;
        }
        let mut room = self.look_max;
        if !self.read(&mut room).map_err(failed)? {
            return Ok(());
        }
        let Some(newest) = self.data.open_audit_log()? else { return Ok(()) };
        // A file that has another name by now was ended before, and perhaps after it was read.
        if self.is_open(&newest).map_err(failed)? || !self.read(&mut room).map_err(failed)? {
            return Ok(());
        }
        self.file = Some(BufReader::new(newest));
        (self.line, self.skips) = (Vec::new(), false);
        self.read(&mut room).map_err(failed)?;
        Ok(())
    }

    /// Whether this is the file that is read. Its number is not given to another one meanwhile.
    fn is_open(&self, newest: &File) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        let (ours, newest) = (file.get_ref().metadata()?, newest.metadata()?);
        Ok((ours.dev(), ours.ino()) == (newest.dev(), newest.ino()))
    }

    /// Reads on, as long as there is room for bytes; returns whether it came to the end.
    fn read(&mut self, room: &mut usize) -> io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(true) };
        while *room > 0 {
            let count = file.by_ref().take(PIECE).read_until(b'\n', &mut self.line)?;
            if count == 0 {
                return Ok(true);
            }
            *room = room.saturating_sub(count);
            let is_whole = self.line.ends_with(b"\n");
            self.skips |= self.line.len() > LINE_MAX;
            match (is_whole, self.skips) {
                (true, false) => self.copier.line(&self.line),
                (true, true) => self.copier.unreadable += 1,
                (false, _) => {}
            }
            if is_whole || self.skips {
                self.line.clear();
            }
            self.skips &= !is_whole;
        }
        Ok(false)
    }
}

/// Lines that may still be copied, and those that were not.
#[derive(Debug)]
struct Budget {
    max: u32,
    left: u32,
    left_out: u64,
}

impl Budget {
    fn new(max: u32) -> Self {
        Self { max, left: max, left_out: 0 }
    }

    fn take(&mut self) -> bool {
        let fits = self.left > 0;
        self.left = self.left.saturating_sub(1);
        self.left_out += u64::from(!fits);
        fits
    }

    /// Returns how many lines were left out since the last time.
    fn refill(&mut self) -> u64 {
        self.left = (self.left + self.max / REFILL_PARTS).min(self.max);
        std::mem::take(&mut self.left_out)
    }
}

/// Writes lines of the file into the log tree.
#[derive(Debug)]
struct Copier {
    tree: Tree,
    name: String,
    done: Budget,
    accounts: Budget,
    refused: Budget,
    /// Lines that are no events, or too long.
    unreadable: u64,
}

impl Copier {
    fn line(&mut self, line: &[u8]) {
        let Ok(event) = serde_json::from_slice::<Event>(line) else {
            self.unreadable += 1;
            return;
        };
        if !event.is_copied() {
            return;
        }
        let budget = if event.is_refused() {
            &mut self.refused
        } else if event.user.username.starts_with(ACCOUNT) {
            &mut self.accounts
        } else {
            &mut self.done
        };
        if budget.take() {
            self.write(event.into_line());
        }
    }

    fn refill(&mut self) {
        let counts = [
            ("done", self.done.refill()),
            ("accounts", self.accounts.refill()),
            ("refused", self.refused.refill()),
            ("unreadable", std::mem::take(&mut self.unreadable)),
        ];
        if counts.iter().all(|(_, count)| *count == 0) {
            return;
        }
        let text = "kubernetes: more requests are in the file of this controller alone";
        let mut line = Levelled::new(Severity::Info, text);
        let fields = counts.into_iter().map(|(key, count)| (key.to_owned(), count.to_string()));
        line.fields.extend(fields);
        self.write(line);
    }

    fn write(&self, mut line: Levelled) {
        LINES.clone_into(&mut line.source);
        self.tree.append(&self.name, Origin::Program, Body::Levelled(line));
    }
}

/// An event of the audit log (`audit.k8s.io/v1`), as far as a line has it.
#[derive(Debug, Deserialize)]
struct Event {
    #[serde(rename = "auditID")]
    id: String,
    stage: String,
    verb: String,
    user: User,
    #[serde(rename = "impersonatedUser")]
    impersonated: Option<User>,
    #[serde(rename = "requestURI", default)]
    uri: String,
    #[serde(rename = "sourceIPs", default)]
    sources: Vec<String>,
    #[serde(rename = "userAgent", default)]
    agent: String,
    #[serde(rename = "objectRef")]
    object: Option<Object>,
    #[serde(rename = "responseStatus")]
    response: Option<Response>,
    #[serde(rename = "stageTimestamp", default)]
    at: String,
}

/// A caller.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
    groups: Vec<String>,
}

/// An object, or all of its kind.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Object {
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
    api_group: String,
}

/// The answer without its content.
#[derive(Debug, Deserialize)]
struct Response {
    #[serde(default)]
    code: i32,
}

impl Event {
    fn is_refused(&self) -> bool {
        self.response.as_ref().is_some_and(|response| REFUSALS.contains(&response.code))
    }

    /// Whether it is a line of the log.
    fn is_copied(&self) -> bool {
        let resource = self.object.as_ref().map_or("", |object| object.resource.as_str());
        let subresource = self.object.as_ref().map_or("", |object| object.subresource.as_str());
        if self.is_refused() || configuration::is_way_in(resource, subresource) {
            return true;
        }
        // The cluster's own programs never impersonate a user.
        let is_own = self.impersonated.is_none()
            && configuration::is_own(&self.user.username, &self.user.groups);
        let is_read = configuration::READS.contains(&self.verb.as_str());
        !is_own && (!is_read || ["secrets", "configmaps"].contains(&resource))
    }

    /// Its line, without a source.
    fn into_line(self) -> Levelled {
        let object = self.object.unwrap_or_default();
        let what = match (&*object.resource, &*object.subresource) {
            // Without its query, which may have a password in it.
            ("", _) => self.uri.split('?').next().unwrap_or_default().to_owned(),
            (resource, "") => resource.to_owned(),
            (resource, subresource) => format!("{resource}/{subresource}"),
        };
        let impersonated = self.impersonated.unwrap_or_default();
        let [verb, what] = [&self.verb, &what].map(|text| plain(text).replace(' ', "?"));
        let mut line = Levelled::new(Severity::Info, format!("kubernetes: {verb} {what}"));
        line.stamp = Some(plain(&self.at));
        let fields = [
            ("by", self.user.username),
            ("as", impersonated.username),
            ("as_groups", groups(impersonated.groups)),
            ("group", object.api_group),
            ("namespace", object.namespace),
            ("name", object.name),
            ("code", self.response.map(|it| it.code.to_string()).unwrap_or_default()),
            ("from", self.sources.join(",")),
            ("agent", self.agent),
            ("stage", if self.stage == COMPLETE { String::new() } else { self.stage }),
            ("id", self.id),
        ];
        let fields = fields.into_iter().filter(|(_, value)| !value.is_empty());
        line.fields.extend(fields.map(|(key, value)| (key.to_owned(), plain(&value))));
        line
    }
}

/// The names of groups, with commas between them. The group that may do everything is the first: no
/// long name keeps it out of the line.
fn groups(mut groups: Vec<String>) -> String {
    groups.sort_by_key(|group| group != MASTERS);
    let groups = groups.iter().map(|group| plain(group).replace(',', "?"));
    groups.collect::<Vec<_>>().join(",")
}

/// The beginning of a text, without what ends a line or a quoted value.
fn plain(text: &str) -> String {
    let is_special = |c: char| c == '"' || c != ' ' && c.is_whitespace() || is_control(c);
    let beginning = text.char_indices().take_while(|(at, c)| at + c.len_utf8() <= TEXT_MAX);
    beginning.map(|(_, c)| if is_special(c) { '?' } else { c }).collect()
}

#[cfg(test)]
#[path = "audit_tests.rs"]
mod tests;
