//! `polisctl etcd`: the members of etcd, and a snapshot of it as a file.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_tui::bytes;
use serde::Serialize;

use super::error::{Error, Explain as _};
use super::output::{self, Document, Text, fields, or_dash};
use super::session::{Session, refused};
use super::table::{Table, table};
use super::unfinished::{Unfinished, must_be_new};
use super::units::{Time, since_1970, text};
use super::watch::Watch;
use super::{Global, key};
use polis_wire::age::{self, Identity};
use polis_wire::rpc::client::Repeat;
use polis_wire::snapshot::Checksum;

/// Commands about etcd.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the members.
    Members(Watch),
    /// Print the state of etcd as the leader's member reports it.
    Status(Watch),
    /// Save a snapshot of etcd in a file that only the owners can read.
    ///
    /// It is encrypted to the keys of the owners, in the age format.
    Snapshot {
        /// The path of the new file.
        #[arg(short, long, value_name = "FILE", value_parser = output::file())]
        out: PathBuf,
    },
    /// Decrypt a snapshot, for the machine that begins the cluster again.
    ///
    /// The new file contains every secret of the cluster. Needs no cluster.
    Decrypt {
        /// The snapshot.
        file: PathBuf,
        /// The path of the new file.
        #[arg(short, long, value_name = "FILE", value_parser = output::file())]
        out: PathBuf,
        /// The key of an owner [default: that of the context, or owner.key in the folder of
        /// polisctl].
        #[arg(long, value_name = "FILE")]
        owner_key: Option<PathBuf>,
    },
}

/// The state of etcd.
#[derive(Debug, Serialize)]
pub(super) struct Status {
    cluster_id: String,
    leader: String,
    term: u64,
    revision: u64,
    quota_bytes: u64,
    tolerates: u32,
    alarms: Vec<String>,
    members: Vec<Member>,
}

#[derive(Debug, Serialize)]
struct Member {
    id: String,
    node_id: String,
    /// A person's name for the node; `null`: none.
    name: Option<String>,
    role: &'static str,
    leader: bool,
    answers: bool,
    /// The leader, as this member knows it.
    follows: String,
    index: u64,
    applied_index: u64,
    db_bytes: u64,
    db_used_bytes: u64,
    /// The age of these figures; `null`: not reported yet.
    told_age_ms: Option<u64>,
    peer_urls: Vec<String>,
    /// The snapshots on its node's disk; `null`: not reported yet.
    snapshots: Option<Snapshots>,
}

/// The snapshots that a voter keeps on its own disk.
#[derive(Debug, Serialize)]
struct Snapshots {
    kept: u32,
    /// When the newest was begun; `null`: there is none.
    newest_at: Option<Time>,
    newest_bytes: u64,
    newest_revision: u64,
    /// Why the last attempt failed, or which files do not count; empty: all is well.
    problem: String,
}

impl Snapshots {
    fn of(message: &v1::LocalSnapshots) -> Self {
        Self {
            kept: message.kept,
            newest_at: since_1970(message.newest_at).map(Time),
            newest_bytes: message.newest_bytes,
            newest_revision: message.newest_revision,
            problem: message.problem.clone(),
        }
    }

    fn cells(&self) -> Vec<String> {
        let if_any = |text: String| if self.newest_at.is_some() { text } else { "-".to_owned() };
        vec![
            self.kept.to_string(),
            or_dash(&text(self.newest_at)),
            if_any(bytes(self.newest_bytes)),
            if_any(self.newest_revision.to_string()),
            or_dash(&self.problem),
        ]
    }
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    if let Command::Snapshot { out } | Command::Decrypt { out, .. } = &command {
        must_be_new(out)?;
    }
    if let Command::Decrypt { file, out, owner_key } = &command {
        return decrypt(file, out, owner_key.as_deref(), global);
    }
    let mut session = Session::open(global).await?;
    if let Command::Members(watch) | Command::Status(watch) = &command
        && watch.is_on()
    {
        session.go_on();
    }
    match command {
        Command::Members(watch) => {
            let read = async || {
                let status = named(&session).await?;
                Document::new(&status.members, status.table())
            };
            watch.run(global, read).await
        }
        Command::Status(watch) => {
            let read = async || {
                let status = named(&session).await?;
                Document::new(&status, status.text())
            };
            watch.run(global, read).await
        }
        Command::Snapshot { out } => snapshot(&session, &out, global).await,
        Command::Decrypt { .. } => Ok(()),
    }
}

/// Reads the state of etcd from the leader.
pub(super) async fn read(session: &Session) -> Result<v1::ConsensusStatus, Error> {
    session
        .call("read the state of etcd", Repeat::Allowed, |channel| async move {
            ManagementClient::new(channel).get_etcd_status(v1::GetEtcdStatusRequest {}).await
        })
        .await
}

/// The same with the names of the nodes.
async fn named(session: &Session) -> Result<Status, Error> {
    let status = Status::of(&read(session).await?);
    Ok(status.with_names(&session.nodes(&[]).await?))
}

/// The alarm that members have different data.
pub(super) const CORRUPT: &str = "CORRUPT";

/// The alarm that the database of a member is full.
const NO_SPACE: &str = "NOSPACE";

/// The number of answering voters above the quorum.
fn spare(members: &[v1::ConsensusMember]) -> u32 {
    let voters = || members.iter().filter(|member| !member.learner);
    let answering = voters().filter(|member| member.answers).count();
    let spare = answering.saturating_sub(voters().count() / 2 + 1);
    u32::try_from(spare).unwrap_or(u32::MAX)
}

impl Status {
    pub(super) fn of(status: &v1::ConsensusStatus) -> Self {
        // As etcd prints it; zero means unknown.
        let number = |id: u64| if id == 0 { String::new() } else { format!("{id:x}") };
        let member = |member: &v1::ConsensusMember| Member {
            id: format!("{:x}", member.id),
            node_id: member.node_id.clone(),
            name: None,
            role: if member.learner { "learner" } else { "voter" },
            leader: member.id == status.leader,
            answers: member.answers,
            follows: number(member.leader),
            index: member.index,
            applied_index: member.applied_index,
            db_bytes: member.db_bytes,
            db_used_bytes: member.db_used_bytes,
            told_age_ms: u64::try_from(member.told_age_ms).ok(),
            peer_urls: member.peer_urls.clone(),
            snapshots: member.snapshots.as_ref().map(Snapshots::of),
        };
        Self {
            cluster_id: format!("{:x}", status.cluster_id),
            leader: number(status.leader),
            term: status.term,
            revision: status.revision,
            quota_bytes: status.quota_bytes,
            // Never more than the answering voters allow, even if an older curator reports
            // more.
            tolerates: status.tolerates.min(spare(&status.members)),
            alarms: status.alarms.clone(),
            members: status.members.iter().map(member).collect(),
        }
    }

    /// The same with the names of its nodes.
    pub(super) fn with_names(mut self, nodes: &[v1::NodeInfo]) -> Self {
        for member in &mut self.members {
            let node = nodes.iter().find(|node| node.id == member.node_id);
            member.name = node.map(|node| node.name.clone()).filter(|name| !name.is_empty());
        }
        self
    }

    /// In one line: the voters, those that answer, and how many may still fail.
    pub(super) fn summary(&self) -> String {
        let voters = self.members.iter().filter(|member| member.role == "voter").count();
        let learners = self.members.len() - voters;
        let silent =
            self.members.iter().filter(|member| member.role == "voter" && !member.answers).count();
        let mut text = match (voters, silent) {
            (1, 0) => "1 voter".to_owned(),
            (_, 0) => format!("{voters} voters"),
            _ => format!("{} of {voters} voters answer", voters - silent),
        };
        if learners > 0 {
            text.push_str(&format!(", {learners} learning"));
        }
        if voters == silent {
            return text;
        }
        match self.tolerates {
            0 if silent == 0 => text.push_str("; the loss of one stops the cluster"),
            0 => text.push_str("; the loss of one more stops the cluster"),
            1 if silent == 0 => text.push_str("; one may fail"),
            more if silent == 0 => text.push_str(&format!("; {more} may fail")),
            more => text.push_str(&format!("; {more} more may fail")),
        }
        text
    }

    /// What an alarm is about, and the next step. A member makes no room while members have
    /// different data.
    pub(super) fn remedy(&self) -> Option<(&'static str, &'static str)> {
        let is_raised = |alarm: &str| self.alarms.iter().any(|raised| raised == alarm);
        if is_raised(CORRUPT) {
            return Some((
                "other data",
                "etcd does not say whose data is wrong: bootstrap the cluster\n\
                 again from a snapshot that is older than the difference: docs/disaster.md",
            ));
        }
        is_raised(NO_SPACE).then_some((
            "full etcd",
            "the members make room within minutes; if the alarm stays, remove what the\n\
             cluster does not need, such as old objects of Kubernetes: docs/consensus.md",
        ))
    }

    /// Everything as text.
    pub(super) fn text(&self) -> Text {
        let text = Text::from(self.fields()).and("\n").then(self.table());
        match self.members.iter().any(|member| member.snapshots.is_some()) {
            true => text.and("\n").then(self.snapshots()),
            // An older system has no snapshots on its disk.
            false => text,
        }
    }

    /// The snapshots on the disks of the nodes.
    fn snapshots(&self) -> Table {
        let row = |member: &Member| {
            let cells = member.snapshots.as_ref().map(Snapshots::cells);
            let cells = cells.unwrap_or_else(|| vec!["-".to_owned(); 5]);
            [vec![or_dash(&member.node_id)], cells].concat()
        };
        let rows = self.members.iter().map(row).collect();
        let heads = ["NODE", "SNAPSHOTS", "NEWEST", "SIZE", "REVISION", "PROBLEM"];
        self.with_name_column(&heads, rows)
    }

    /// The table, with the names of the nodes where one has a name.
    fn with_name_column(&self, heads: &[&'static str], mut rows: Vec<Vec<String>>) -> Table {
        let mut heads = heads.to_vec();
        if self.members.iter().any(|member| member.name.is_some()) {
            heads.insert(1, "NAME");
            for (row, member) in rows.iter_mut().zip(&self.members) {
                row.insert(1, or_dash(member.name.as_deref().unwrap_or_default()));
            }
        }
        table(&heads, &rows)
    }

    fn fields(&self) -> String {
        let leads = self.members.iter().find(|member| member.leader);
        let leader = leads.map_or(self.leader.as_str(), |member| member.node_id.as_str());
        let alarms = or_dash(&self.alarms.join(", "));
        let alarms = match self.remedy() {
            Some((_about, remedy)) => format!("{alarms}\n{remedy}"),
            None => alarms,
        };
        fields(&[
            ("members", self.summary()),
            ("leader", or_dash(leader)),
            ("term", self.term.to_string()),
            ("revision", self.revision.to_string()),
            ("quota", bytes(self.quota_bytes)),
            ("alarms", alarms),
        ])
    }

    fn table(&self) -> Table {
        let row = |member: &Member| {
            // The figures of a member without a report are all zero.
            let if_reported =
                |text: String| if member.told_age_ms.is_some() { text } else { "-".to_owned() };
            let used = bytes(member.db_used_bytes);
            vec![
                or_dash(&member.node_id),
                if member.leader { "leader" } else { member.role }.to_owned(),
                if member.answers { "yes" } else { "no" }.to_owned(),
                if_reported(member.index.to_string()),
                if_reported(member.applied_index.to_string()),
                if_reported(format!("{}, {used} used", bytes(member.db_bytes))),
                member.peer_urls.join(","),
            ]
        };
        let rows = self.members.iter().map(row).collect();
        let heads = ["NODE", "ROLE", "ANSWERS", "INDEX", "APPLIED", "DATABASE", "PEER URL"];
        self.with_name_column(&heads, rows)
    }
}

async fn snapshot(session: &Session, out: &Path, global: &Global) -> Result<(), Error> {
    const WHAT: &str = "save etcd";
    let mut file = Unfinished::begin(out)?;
    let client = session.client();
    let asked = client.call(Repeat::Allowed, |channel| async move {
        let mut leader = ManagementClient::new(channel);
        Ok(leader.snapshot_etcd(v1::SnapshotEtcdRequest {}).await?.into_inner())
    });
    let mut stream = session.within(WHAT, asked).await?;
    let progress = global.out.progress();
    let mut size = 0;
    let received = |status: tonic::Status| refused(WHAT, &status);
    let receiving = async {
        // The leader checks the snapshot: a stream that ends without an error is whole.
        while let Some(chunk) = stream.message().await.map_err(received)? {
            file.write(&chunk.data)?;
            size += chunk.data.len() as u64;
            progress.says(&format!("{} of etcd", bytes(size)));
        }
        Ok::<(), Error>(())
    };
    session.in_time(WHAT, receiving).await?;
    drop(progress);
    file.finish()?;
    let value = serde_json::json!({ "file": out.to_string_lossy(), "bytes": size });
    let text = format!(
        "{} in {}: it holds every secret of the cluster, encrypted to its owners",
        bytes(size),
        out.display()
    );
    global.out.print(&Document::new(&value, text)?)
}

/// Decrypts a snapshot into a file that a machine can begin with.
fn decrypt(
    file: &Path,
    out: &Path,
    owner_key: Option<&Path>,
    global: &Global,
) -> Result<(), Error> {
    let key_file = match owner_key {
        Some(key) => key.to_owned(),
        None => match global.contexts.context(global.context.as_deref())? {
            Some(context) => context.settings.key,
            None => global.contexts.owner_key(),
        },
    };
    let cannot = || format!("cannot decrypt {}", file.display());
    let encrypted = File::open(file).doing(cannot)?;
    let key = key::read(&key_file, &global.passphrase)
        .map_err(|error| error.or_help("name the key of an owner: --owner-key FILE"))?;
    let mut plain = Plain { file: Unfinished::begin(out)?, checksum: Checksum::default() };
    age::decrypt(&Identity::of_key(&key), encrypted, &mut plain).map_err(|error| {
        let help = match &error {
            age::Error::Foreign => {
                "`polisctl etcd snapshot` saves an encrypted one; a decrypted one is used as it is"
            }
            age::Error::OtherRecipients { .. } => {
                "name the key of a person who was an owner when it was taken: --owner-key FILE"
            }
            age::Error::Write(_) => "nothing was written; make room there, or name another file",
            _ => "nothing was written; copy it again from where it was saved, or take another one",
        };
        Error::from(anyhow::Error::new(error)).context(cannot()).or_help(help)
    })?;
    let Plain { file: plain, checksum } = plain;
    if !checksum.is_whole() {
        let error = Error::new("its content does not end with the checksum of etcd");
        return Err(error.context(cannot()).or_help("nothing was written; take another snapshot"));
    }
    plain.finish()?;
    let size = checksum.size();
    let value = serde_json::json!({ "file": out.to_string_lossy(), "bytes": size });
    let text = format!(
        "{} in {}: every secret of the cluster can be read in it; delete it after use",
        bytes(size),
        out.display()
    );
    global.out.print(&Document::new(&value, text)?)
}

/// A decrypted snapshot on its way into its file.
struct Plain {
    file: Unfinished,
    checksum: Checksum,
}

impl io::Write for Plain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).map_err(|error| io::Error::other(error.summary()))?;
        self.checksum.add(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, SNAPSHOT};
    use crate::testing::World;

    #[test]
    fn the_snapshots_on_the_disks_of_the_nodes_are_shown_with_their_problems() {
        let member = |id: u64, snapshots| v1::ConsensusMember {
            id,
            node_id: format!("node-{id}"),
            snapshots,
            ..Default::default()
        };
        let taken = v1::LocalSnapshots {
            kept: 24,
            newest_at: 1_795_665_600,
            newest_bytes: 8 << 20,
            newest_revision: 1234,
            problem: String::new(),
        };
        let failed =
            v1::LocalSnapshots { problem: "too little room".to_owned(), ..Default::default() };
        let members = vec![member(1, Some(taken)), member(2, Some(failed)), member(3, None)];
        let status = Status::of(&v1::ConsensusStatus { members, ..Default::default() });
        insta::assert_snapshot!(status.snapshots(), @r"
        NODE    SNAPSHOTS  NEWEST                   SIZE     REVISION  PROBLEM
        node-1  24         2026-11-26 04:00:00 UTC  8.0 MiB  1234      -
        node-2  0          -                        -        -         too little room
        node-3  -          -                        -        -         -
        ");
        let shown = serde_json::to_value(&status).unwrap();
        let first = &shown["members"][0]["snapshots"];
        assert_eq!(first["newest_at"], "2026-11-26T04:00:00Z");
        assert_eq!(shown["members"][1]["snapshots"]["newest_at"], serde_json::Value::Null);
        assert_eq!(shown["members"][2]["snapshots"], serde_json::Value::Null);
    }

    #[test]
    fn an_alarm_has_the_next_step() {
        let status = |alarms: &[&str]| {
            let alarms = alarms.iter().map(|&alarm| alarm.to_owned()).collect();
            Status::of(&v1::ConsensusStatus { alarms, ..Default::default() })
        };
        assert_eq!(status(&[]).remedy(), None);
        let full = status(&["NOSPACE"]).fields();
        assert!(full.contains("NOSPACE\n"), "{full}");
        assert!(full.contains("make room within minutes"), "{full}");
        assert!(full.contains("docs/consensus.md"), "{full}");
        let corrupt = status(&["NOSPACE", "CORRUPT"]);
        let (about, remedy) = corrupt.remedy().unwrap();
        assert_eq!(about, "other data");
        assert!(remedy.ends_with("older than the difference: docs/disaster.md"), "{remedy}");
        let fields = corrupt.fields();
        assert!(fields.contains("NOSPACE, CORRUPT\n"), "{fields}");
        assert!(fields.contains("docs/disaster.md"), "{fields}");
    }

    #[test]
    fn a_snapshot_whose_stream_stops_is_a_timeout_and_leaves_no_file() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        cluster.etcd_is_silent();
        let ended = world.run(&["etcd", "snapshot", "-o", "@etcd.age", "--timeout", "3s"]);
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
        assert!(ended.stderr.starts_with("error: cannot save etcd"), "{}", ended.stderr);
        assert!(!world.path("etcd.age").exists());
    }

    fn summary(answers: &[bool]) -> String {
        let members =
            answers.iter().map(|&answers| v1::ConsensusMember { answers, ..Default::default() });
        // The answer of a curator that counts dead members.
        let status =
            v1::ConsensusStatus { members: members.collect(), tolerates: 2, ..Default::default() };
        Status::of(&status).summary()
    }

    #[test]
    fn a_voter_that_does_not_answer_is_not_one_that_may_fail_yet() {
        assert_eq!(summary(&[true]), "1 voter; the loss of one stops the cluster");
        assert_eq!(summary(&[true; 3]), "3 voters; one may fail");
        let one_off = summary(&[true, true, false]);
        assert_eq!(one_off, "2 of 3 voters answer; the loss of one more stops the cluster");
        assert_eq!(summary(&[false]), "0 of 1 voters answer");
        assert_eq!(summary(&[false; 3]), "0 of 3 voters answer");
        let two_off = summary(&[true, true, true, true, false]);
        assert_eq!(two_off, "4 of 5 voters answer; 1 more may fail");
    }

    #[test]
    fn a_snapshot_is_read_by_an_owner_and_by_no_other_key() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        world.runs(&["etcd", "snapshot", "-o", "@etcd.age"]);
        let saved = std::fs::read(world.path("etcd.age")).unwrap();
        assert!(!saved.windows(SNAPSHOT.len()).any(|bytes| bytes == SNAPSHOT));

        world.runs(&["owner", "create", "-o", "@other.key"]);
        let decrypt = ["etcd", "decrypt", "@etcd.age", "-o", "@etcd.db"];
        let refused = world.refuses(&[&decrypt[..], &["--owner-key", "@other.key"]].concat());
        assert!(refused.contains("is not among those") && refused.contains("--owner-key FILE"));
        assert!(!world.path("etcd.db").exists());

        let cut = &saved[..saved.len() - 1];
        crate::contexts::write(&world.path("cut.age"), cut).unwrap();
        let refused = world.refuses(&["etcd", "decrypt", "@cut.age", "-o", "@etcd.db"]);
        assert!(refused.contains("changed or cut off"), "{refused}");

        let said = world.runs(&decrypt);
        assert!(said.contains("delete it after use"), "{said}");
        assert!(std::fs::read(world.path("etcd.db")).unwrap().starts_with(SNAPSHOT));
    }
}
