//! `polisctl audit`: lists the entries of the audit log, and checks that the log is whole.
//!
//! The leader hands out the entries; this program checks their chain itself, so a leader
//! cannot say that it is whole.

use std::time::Duration;

use polis_base::hex;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::{AuditEntry, AuditHead, GetAuditRequest};
use serde::Serialize;
use tokio::time::sleep;
use tonic::{Code, Response};

use super::error::{Error, Exit};
use super::output::{Document, Text, fields, or_dash};
use super::session::{Session, refused};
use super::table::table;
use super::text::clean;
use super::{Global, units};
use polis_wire::audit::{Mark, check};
use polis_wire::rpc::client::Repeat;

/// Arguments of `audit`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Go on with new entries, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Copy, Debug, clap::Subcommand)]
enum Command {
    /// Check that no entry was removed or changed; print the newest as NUMBER:HASH.
    Verify {
        /// Also check that this entry, noted from an earlier `verify`, is still there.
        #[arg(long, value_name = "NUMBER:HASH")]
        from: Option<Mark>,
    },
}

/// Between two attempts to reach a leader that is followed.
const RETRY: Duration = Duration::from_secs(2);

/// An entry, as programs read it.
#[derive(Debug, Serialize)]
struct View {
    number: u64,
    /// RFC 3339, by the clock of the leader, or of the node `at`.
    time: Option<units::Time>,
    who: String,
    key: String,
    from: String,
    call: String,
    what: String,
    /// `OK`, or the code of gRPC.
    result: String,
    reason: String,
    repeats: u64,
    /// The node that was called, and that reported it; empty for a call of the leader.
    at: String,
    node: String,
    hash: String,
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let mut session = Session::open(global).await?;
    match arguments.command {
        Some(Command::Verify { from }) => verify(&session, from, global).await,
        None if arguments.follow => {
            // A person ends it.
            session.go_on();
            follow(&session, global).await
        }
        None => {
            let (_, entries) = read(&session).await?;
            let views: Vec<_> = entries.iter().map(view).collect();
            let rows: Vec<_> = views.iter().map(row).collect();
            let head = ["NUMBER", "TIME", "WHO", "FROM", "AT", "CALL", "WHAT", "RESULT"];
            global.out.print(&Document::new(&views, table(&head, &rows))?)
        }
    }
}

async fn verify(session: &Session, noted: Option<Mark>, global: &Global) -> Result<(), Error> {
    let (head, entries) = read(session).await?;
    check(&head, &entries, noted).map_err(|broken| {
        Error::from(broken).context("the audit log of the cluster is not whole").or_help(
            "each entry is also a line that begins with `audit:` in the log of the node that led; \
             compare them, and find out who can write etcd",
        )
    })?;
    let mark = entries.last().and_then(|entry| {
        Some(Mark { number: entry.number, hash: entry.hash.as_slice().try_into().ok()? })
    });
    let value = serde_json::json!({
        "entries": entries.len(),
        "first": entries.first().map(|entry| entry.number),
        "newest": mark.map(|mark| mark.number),
        "hash": mark.map(|mark| hex::encode(&mark.hash)),
    });
    let gone = match head.first {
        0 | 1 => "all of them are here".to_owned(),
        first => format!("those before {first} are gone by their age"),
    };
    let next = match mark {
        None => "there is no entry yet",
        Some(_) => "keep it outside the cluster: --from compares with it later",
    };
    let lines = [
        ("entries", format!("{}, whole; {gone}", entries.len())),
        ("newest", mark.map_or_else(|| "-".to_owned(), |mark| mark.to_string())),
        ("next", next.to_owned()),
    ];
    global.out.print(&Document::new(&value, fields(&lines))?)
}

/// All entries, and the ends of their chain.
async fn read(session: &Session) -> Result<(AuditHead, Vec<AuditEntry>), Error> {
    let (head, mut entries) = session
        .call("read the audit log", Repeat::Allowed, |channel| async move {
            let request = GetAuditRequest { from: 0, follow: false };
            let mut pages = ManagementClient::new(channel).get_audit(request).await?.into_inner();
            let (mut head, mut entries) = (AuditHead::default(), Vec::new());
            while let Some(page) = pages.message().await? {
                head = page.head.unwrap_or_default();
                entries.extend(page.entries);
            }
            Ok(Response::new((head, entries)))
        })
        .await?;
    // Removed for their age while the pages were read.
    entries.retain(|entry| head.number == 0 || entry.number >= head.first);
    Ok((head, entries))
}

/// Prints entries without end; goes on at the next leader.
async fn follow(session: &Session, global: &Global) -> Result<(), Error> {
    let (mut from, mut is_out) = (0, false);
    loop {
        let begun = session.call("read the audit log", Repeat::Allowed, |channel| async move {
            let request = GetAuditRequest { from, follow: true };
            ManagementClient::new(channel).get_audit(request).await
        });
        let mut pages = match begun.await {
            Ok(pages) => pages,
            // An outage after the first entries does not end it.
            Err(error) if error.exit() == Exit::TimedOut && from > 0 => {
                if !std::mem::replace(&mut is_out, true) {
                    global.out.remark(&error.summary());
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        is_out = false;
        let ended = loop {
            match pages.message().await {
                Ok(Some(page)) => {
                    for entry in &page.entries {
                        from = entry.number.saturating_add(1);
                        global.out.stream(&line(entry)?)?;
                    }
                }
                Ok(None) => break None,
                Err(status) => break Some(status),
            }
        };
        if let Some(status) = ended {
            if matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated) {
                return Err(refused("read the audit log", &status));
            }
            global.out.remark(&format!("the leader ended the stream: {}", status.message()));
        }
        sleep(RETRY).await;
    }
}

fn line(entry: &AuditEntry) -> Result<Document, Error> {
    let view = view(entry);
    // An entry is one line: a text of a caller cannot forge another.
    Document::new(&view, Text::from(clean(&row(&view).join("  "))))
}

fn view(entry: &AuditEntry) -> View {
    let time = entry.time_unix_ms.saturating_mul(1_000_000);
    View {
        number: entry.number,
        time: units::nanos_since_1970(time).map(units::Time),
        who: entry.who.clone(),
        key: entry.key.clone(),
        from: entry.from.clone(),
        call: entry.call.clone(),
        what: entry.what.clone(),
        result: code(Code::from_i32(entry.code)),
        reason: entry.reason.clone(),
        repeats: entry.repeats,
        at: entry.at.clone(),
        node: entry.node.clone(),
        hash: hex::encode(&entry.hash),
    }
}

fn row(view: &View) -> Vec<String> {
    let mut result = view.result.clone();
    if !view.reason.is_empty() {
        result = format!("{result}: {}", view.reason);
    }
    if view.repeats > 0 {
        result = format!("{result} ({} more of this kind)", view.repeats);
    }
    vec![
        view.number.to_string(),
        units::text(view.time),
        or_dash(&view.who),
        or_dash(&view.from),
        or_dash(&view.at),
        view.call.clone(),
        or_dash(&view.what),
        result,
    ]
}

/// A code of gRPC as its documentation writes it.
fn code(code: Code) -> String {
    if code == Code::Ok {
        return "OK".to_owned();
    }
    let mut text = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_ascii_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(letter.to_ascii_uppercase());
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::*;
    use crate::loopback::Cluster;
    use crate::output::{Format, Streams};
    use crate::session::PATIENCE;
    use crate::testing::World;
    use polis_wire::audit::{BEGINNING, hash};

    /// A log of two entries: one that was done and one that was refused.
    pub(crate) fn log() -> (AuditHead, Vec<AuditEntry>) {
        let mut done = AuditEntry {
            number: 1,
            time_unix_ms: 1_700_000_000_000,
            who: "owner ann".to_owned(),
            from: "192.0.2.7".to_owned(),
            call: "GetRecoveryKey".to_owned(),
            what: "polis-1".to_owned(),
            previous: BEGINNING.to_vec(),
            ..AuditEntry::default()
        };
        done.hash = hash(&done).to_vec();
        let mut denied = AuditEntry {
            number: 2,
            who: "viewer bob".to_owned(),
            call: "DeleteNode".to_owned(),
            what: String::new(),
            code: Code::PermissionDenied.into(),
            reason: "this call needs more".to_owned(),
            repeats: 3,
            previous: done.hash.clone(),
            ..done.clone()
        };
        denied.hash = hash(&denied).to_vec();
        let hash = denied.hash.clone();
        (AuditHead { number: 2, hash, first: 1, before: BEGINNING.to_vec() }, vec![done, denied])
    }

    #[test]
    fn a_log_is_listed_with_who_did_what_to_what_from_where() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        insta::assert_snapshot!(world.runs(&["audit"]));
        let json = world.runs(&["audit", "--output", "json"]);
        let entries: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(entries[0]["result"], "OK");
        assert_eq!(entries[1]["result"], "PERMISSION_DENIED");
        assert_eq!(entries[1]["repeats"], 3);
    }

    #[test]
    fn an_entry_that_is_followed_is_one_line_whatever_its_caller_wrote() {
        let (_, mut entries) = log();
        entries[1].reason = "x\u{1b}[2J\n3  2023-11-14  owner ann".to_owned();
        let text = line(&entries[1]).unwrap().render(Format::Table).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("x?[2J 3  2023") && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn verify_prints_the_newest_entry_and_finds_one_that_was_changed() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        insta::assert_snapshot!(world.runs(&["audit", "verify"]));
        let (head, entries) = log();
        let mark = Mark { number: 1, hash: hash(&entries[0]) }.to_string();
        world.runs(&["audit", "verify", "--from", &mark]);
        let other = Mark { number: 1, hash: [1; 32] }.to_string();
        insta::assert_snapshot!(world.refuses(&["audit", "verify", "--from", &other]));
        let mut changed = entries.clone();
        changed[0].who = "owner bob".to_owned();
        cluster.has_audit(head.clone(), changed);
        insta::assert_snapshot!(world.refuses(&["audit", "verify"]));
        cluster.has_audit(head, entries[1..].to_vec());
        let text = world.refuses(&["audit", "verify"]);
        assert!(text.contains("entry 1 of the audit log is missing"), "{text}");
        cluster.has_audit(AuditHead::default(), vec![]);
        assert!(world.runs(&["audit", "verify"]).contains("there is no entry yet"));
    }

    /// Knows whether anything was printed.
    struct Printed(watch::Sender<bool>);

    impl std::io::Write for Printed {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.send_replace(true);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_log_that_is_followed_goes_on_without_a_leader_once_it_has_begun() {
        const ENOUGH: Duration = Duration::from_secs(7);
        let world = World::new();
        let cluster = Cluster::new(&world);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (printed, seen) = watch::channel(false);
        let mut global = world.global();
        global.out.streams = Streams::new(Printed(printed), std::io::sink());
        let followed = || {
            let mut seen = seen.clone();
            runtime.block_on(async {
                let mut session = Session::prepare(&global, PATIENCE).unwrap();
                session.limit_calls(Duration::from_secs(3));
                let followed = timeout(ENOUGH, follow(&session, &global));
                let lost = async {
                    seen.wait_for(|printed| *printed).await.unwrap();
                    cluster.lose_the_leader();
                };
                tokio::join!(followed, timeout(ENOUGH, lost)).0
            })
        };
        assert!(followed().is_err(), "it goes on");
        let first = followed().unwrap().unwrap_err();
        assert_eq!(first.exit(), Exit::TimedOut, "{}", first.render());
    }

    #[test]
    fn a_code_is_written_as_everywhere() {
        assert_eq!(code(Code::Ok), "OK");
        assert_eq!(code(Code::FailedPrecondition), "FAILED_PRECONDITION");
    }
}
