//! `polisctl etcd`: the members of etcd, and a snapshot of it as a file.

use std::path::{Path, PathBuf};

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_tui::bytes;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::Global;
use super::error::Error;
use super::output::{Document, Text, fields, or_dash};
use super::session::{Session, refused};
use super::table::{Table, table};
use super::unfinished::Unfinished;
use super::watch::Watch;
use polis_wire::rpc::client::Repeat;

/// Commands about etcd.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the members.
    Members(Watch),
    /// Print the state of etcd as the leader's member reports it.
    Status(Watch),
    /// Save a snapshot of etcd in a file, which contains every secret of the cluster.
    Snapshot {
        /// The path of the new file.
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
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
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    if let Command::Snapshot { out } = &command
        && out.symlink_metadata().is_ok()
    {
        return Err(
            Error::new(format!("{} exists already", out.display())).or_help("name another file")
        );
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

    /// Everything as text.
    pub(super) fn text(&self) -> Text {
        Text::from(self.fields()).and("\n").then(self.table())
    }

    fn fields(&self) -> String {
        let leads = self.members.iter().find(|member| member.leader);
        let leader = leads.map_or(self.leader.as_str(), |member| member.node_id.as_str());
        fields(&[
            ("members", self.summary()),
            ("leader", or_dash(leader)),
            ("term", self.term.to_string()),
            ("revision", self.revision.to_string()),
            ("quota", bytes(self.quota_bytes)),
            ("alarms", or_dash(&self.alarms.join(", "))),
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
        let mut rows: Vec<_> = self.members.iter().map(row).collect();
        let mut heads = vec!["NODE", "ROLE", "ANSWERS", "INDEX", "APPLIED", "DATABASE", "PEER URL"];
        if self.members.iter().any(|member| member.name.is_some()) {
            heads.insert(1, "NAME");
            for (row, member) in rows.iter_mut().zip(&self.members) {
                row.insert(1, or_dash(member.name.as_deref().unwrap_or_default()));
            }
        }
        table(&heads, &rows)
    }
}

async fn snapshot(session: &Session, out: &Path, global: &Global) -> Result<(), Error> {
    let mut file = Unfinished::begin(out)?;
    let client = session.client();
    let asked = client.call(Repeat::Allowed, |channel| async move {
        let mut leader = ManagementClient::new(channel);
        Ok(leader.snapshot_etcd(v1::SnapshotEtcdRequest {}).await?.into_inner())
    });
    let mut stream = session.within("save etcd", asked).await?;
    let progress = global.out.progress();
    let mut sum = Sum::default();
    let received = |status: tonic::Status| refused("save etcd", &status);
    while let Some(chunk) = stream.message().await.map_err(received)? {
        file.write(&chunk.data)?;
        sum.add(&chunk.data);
        progress.says(&format!("{} of etcd", bytes(sum.size)));
    }
    drop(progress);
    let size = sum.size;
    if !sum.whole() {
        let error = Error::new(format!("only {} arrived", bytes(size)));
        return Err(error.context("cannot save etcd").or_help("nothing was written; try again"));
    }
    file.finish()?;
    let value = serde_json::json!({ "file": out, "bytes": size });
    let text =
        format!("{} in {}: it holds every secret of the cluster", bytes(size), out.display());
    global.out.print(&Document::new(&value, text)?)
}

/// Whether a snapshot is complete: etcd appends the SHA-256 of its content. When it is
/// needed, another one may be impossible to get.
#[derive(Debug, Default)]
struct Sum {
    size: u64,
    before: Sha256,
    last: Vec<u8>,
}

impl Sum {
    const LENGTH: usize = 32;

    fn add(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        self.last.extend_from_slice(bytes);
        let over = self.last.len().saturating_sub(Self::LENGTH);
        self.before.update(&self.last[..over]);
        self.last.drain(..over);
    }

    fn whole(self) -> bool {
        self.last == self.before.finalize().as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_snapshot_that_was_cut_short_is_not_whole() {
        let data: Vec<u8> = (0..=255).cycle().take(2000).collect();
        let whole = [&*data, &Sha256::digest(&data)].concat();
        let is_whole = |bytes: &[u8], piece: usize| {
            let mut sum = Sum::default();
            bytes.chunks(piece).for_each(|piece| sum.add(piece));
            assert_eq!(sum.size, bytes.len() as u64);
            sum.whole()
        };
        for piece in [1, 31, 32, 33, 512, 4096] {
            assert!(is_whole(&whole, piece), "in pieces of {piece}");
            assert!(!is_whole(&whole[..whole.len() - 1], piece));
            assert!(!is_whole(&data, piece));
        }
        assert!(!Sum::default().whole(), "an empty file is not a snapshot");
    }
}
