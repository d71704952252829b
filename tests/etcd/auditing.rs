//! The audit log: every call of a user who changes something is in it, and a change of the
//! log itself in etcd is found.

use std::time::Duration;

use polis_proto::v1::aaa_client::AaaClient;
use polis_proto::v1::curator_client::CuratorClient;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::{self, AuditEntry, AuditHead};
use polis_tests::{Story, story};
use polis_wire::audit::{Broken, Mark, check};
use polis_wire::identity::NodeKey;
use polis_wire::rpc::client::{Client, Repeat};
use prost::Message as _;
use tonic::{Code, Response, Status};

use crate::calls::{delete, ticket, write};
use crate::curators::{BootstrapNode, Cluster, Curator, credentials};
use crate::harness::Machine;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads every_change_is_in_the_audit_log_and_a_change_of_the_log_is_found).takes(10)];

const ENTRIES: &str = "polis:curator/audit/entries/";

/// The log as an operator reads it.
pub(crate) async fn log(client: &Client) -> Result<(AuditHead, Vec<AuditEntry>), Status> {
    client
        .call(Repeat::Allowed, |channel| async move {
            let request = v1::GetAuditRequest { from: 0, follow: false };
            let mut pages = ManagementClient::new(channel).get_audit(request).await?.into_inner();
            let (mut head, mut entries) = (AuditHead::default(), Vec::new());
            while let Some(page) = pages.message().await? {
                head = page.head.unwrap_or_default();
                entries.extend(page.entries);
            }
            Ok((head, entries))
        })
        .await
}

/// A new user, and its client.
async fn user(
    cluster: &Cluster,
    curator: &Curator,
    owner: &Client,
    name: &str,
    role: v1::UserRole,
) -> Client {
    let key = NodeKey::generate().unwrap();
    let public_key = key.identity().public_key.to_vec();
    let request = v1::CreateUserRequest { name: name.to_owned(), role: role.into(), public_key };
    let issued =
        owner
            .call(Repeat::Allowed, |channel| {
                let request = request.clone();
                async move {
                    AaaClient::new(channel).create_user(request).await.map(Response::into_inner)
                }
            })
            .await
            .unwrap();
    cluster.client(&[curator], credentials(&key, issued.certificate, issued.ca_certificate))
}

/// A user asks for another certificate before that is due.
async fn renews_early(user: &Client) {
    for _ in 0..3 {
        user.call(Repeat::Allowed, |channel| async move {
            AaaClient::new(channel).renew(v1::RenewRequest {}).await
        })
        .await
        .unwrap();
    }
}

/// A node tells of a call twice, and cannot fill the log or write in the name of another.
async fn reports_calls(node: &Client, operator: &Client, name: &str) {
    let report = |calls: Vec<AuditEntry>| {
        node.call(Repeat::Allowed, move |channel| {
            let request = v1::ReportCallsRequest { calls: calls.clone() };
            async move { CuratorClient::new(channel).report_calls(request).await }
        })
    };
    let call = |number: i64| AuditEntry {
        time_unix_ms: number,
        who: "operator otto".to_owned(),
        call: "Reboot".to_owned(),
        at: "polis-of-another".to_owned(),
        ..AuditEntry::default()
    };
    report(vec![call(1), call(2)]).await.unwrap();
    report(vec![call(2), call(3)]).await.unwrap();
    let (head, entries) = log(operator).await.unwrap();
    assert_eq!(check(&head, &entries, None), Ok(()));
    let reported = |entries: &[AuditEntry]| {
        let reported = entries.iter().filter(|entry| !entry.at.is_empty());
        let reported = reported.map(|entry| (entry.at.clone(), entry.time_unix_ms));
        reported.collect::<Vec<_>>()
    };
    let expected = [1, 2, 3].map(|number| (name.to_owned(), number));
    assert_eq!(reported(&entries), expected);
    let foreign = AuditEntry { call: "ApproveNode".to_owned(), ..call(4) };
    assert_eq!(report(vec![foreign]).await.unwrap_err().code(), Code::InvalidArgument);
    let many = report((0..17).map(call).collect()).await.unwrap_err();
    assert_eq!(many.code(), Code::InvalidArgument, "{many}");
    let mut number = 100;
    let exhausted = loop {
        match report((number..number + 16).map(call).collect()).await {
            Ok(_done) => number += 16,
            Err(status) => break status,
        }
    };
    assert_eq!(exhausted.code(), Code::ResourceExhausted, "{exhausted}");
    let (_, entries) = log(operator).await.unwrap();
    // Five were counted before, and the next sixteen would be more than 120.
    assert_eq!(reported(&entries).len(), 3 + 7 * 16);
}

async fn every_change_is_in_the_audit_log_and_a_change_of_the_log_is_found() {
    let machine = Machine::new();
    let BootstrapNode { node, cluster, curator, own, owner } = BootstrapNode::start(&machine).await;
    let viewer = user(&cluster, &curator, &owner, "vera", v1::UserRole::Viewer).await;
    let operator = user(&cluster, &curator, &owner, "otto", v1::UserRole::Operator).await;
    // The first changes the label, and the others change nothing.
    for _ in 0..50 {
        write(&operator, &machine.name(), 7).await.unwrap();
    }
    let ticket = ticket(&owner).await;
    renews_early(&viewer).await;
    // Refused by the record, and by the role, again and again.
    let refused = delete(&operator, &machine.name(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    for _ in 0..20 {
        let refused = delete(&viewer, &machine.name(), false).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
    }
    assert_eq!(log(&viewer).await.unwrap_err().code(), Code::PermissionDenied);

    // A service writes the refusals, a moment later.
    let (head, entries) = loop {
        let (head, entries) = log(&operator).await.unwrap();
        if entries.iter().filter(|entry| entry.code != 0).count() == 2 {
            break (head, entries);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(check(&head, &entries, None), Ok(()));
    let has = |who: &str, call: &str, what: &str, code: Code| {
        let found = entries.iter().find(|entry| {
            (&*entry.who, &*entry.call, &*entry.what, entry.code) == (who, call, what, code.into())
        });
        let found = found.unwrap_or_else(|| panic!("no {who} {call} {what}: {entries:?}"));
        assert!(!found.from.is_empty() && found.key.len() == 64, "{found:?}");
        assert_eq!((found.node.as_str(), found.time_unix_ms > 0), (&*machine.name(), true));
    };
    has("owner owner", "CreateUser", "viewer vera", Code::Ok);
    has("owner owner", "CreateUser", "operator otto", Code::Ok);
    let labels = format!("{} +number=7", machine.name());
    has("operator otto", "UpdateNodeLabels", &labels, Code::Ok);
    has("owner owner", "GetRegisterTicket", "the ticket", Code::Ok);
    has("operator otto", "DeleteNode", &machine.name(), Code::FailedPrecondition);
    // Rejected before a byte of it was read.
    has("viewer vera", "DeleteNode", "", Code::PermissionDenied);
    assert!(entries.iter().any(|entry| entry.call == "Escrow"), "how the owner came in");
    assert!(!entries.iter().any(|entry| entry.call == "Renew"), "nothing was changed");
    // The second one at once; where a minute ended meanwhile, a number and one more.
    let labelled = entries.iter().filter(|entry| entry.call == "UpdateNodeLabels").count();
    assert!((2..=4).contains(&labelled), "{entries:?}");
    // The ticket itself is in none of them.
    for entry in &entries {
        let bytes = entry.encode_to_vec();
        assert!(!bytes.windows(ticket.len()).any(|window| window == ticket), "{entry:?}");
    }

    reports_calls(&cluster.client(&[&curator], own), &operator, &machine.name()).await;
    let (_, entries) = log(&operator).await.unwrap();

    // A writer of etcd changes an entry, and then removes it.
    let etcd = node.etcd().await;
    let mut kv = etcd.kv_client();
    let key = format!("{ENTRIES}{:020}", 2);
    let changed = AuditEntry { who: "owner mallory".to_owned(), ..entries[1].clone() };
    kv.put(key.as_str(), changed.encode_to_vec(), None).await.unwrap();
    let (head, now) = log(&owner).await.unwrap();
    assert_eq!(check(&head, &now, None), Err(Broken::Changed { number: 2 }));
    kv.delete(key.as_str(), None).await.unwrap();
    let (head, now) = log(&owner).await.unwrap();
    assert_eq!(check(&head, &now, None), Err(Broken::Missing { number: 2 }));
    // The log goes on, and the gap stays.
    write(&operator, &machine.name(), 8).await.unwrap();
    let (head, now) = log(&owner).await.unwrap();
    assert!(head.number > u64::try_from(entries.len()).unwrap());
    assert_eq!(check(&head, &now, None), Err(Broken::Missing { number: 2 }));
    kv.put(key.as_str(), entries[1].encode_to_vec(), None).await.unwrap();
    let (head, now) = log(&owner).await.unwrap();
    let newest = now.last().unwrap();
    let mark = Mark { number: newest.number, hash: newest.hash.clone().try_into().unwrap() };
    assert_eq!(check(&head, &now, Some(mark)), Ok(()));

    // A reader that follows receives the next entry at once.
    let mut management = ManagementClient::new(owner.leader().await.unwrap().connection.channel);
    let request = v1::GetAuditRequest { from: mark.number + 1, follow: true };
    let mut pages = management.get_audit(request).await.unwrap().into_inner();
    let first = pages.message().await.unwrap().unwrap();
    assert!(first.entries.iter().all(|entry| entry.number > mark.number));
    write(&operator, &machine.name(), 9).await.unwrap();
    let page = pages.message().await.unwrap().unwrap();
    assert_eq!(page.entries[0].call, "UpdateNodeLabels");

    curator.supervisor.stop().await;
    node.stop().await;
}
