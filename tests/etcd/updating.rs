//! The journal of an update of the cluster, with three curators and a real etcd: nodes that only
//! send heartbeats take their turns, while an owner and a change of leaders come in between.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::cluster_update::State;
use polis_proto::v1::control_update_request::Control;
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::update_report::Phase;
use polis_tests::{Story, patiently, story};
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Client, Repeat};
use tonic::{Code, Status};

use crate::calls::{heartbeat, reason, take_consensus};
use crate::curators::leader;
use crate::harness::Machine;
use crate::voters::Voters;

const SIGNER: &str = "aa11";
/// Between two heartbeats of a node here.
const BEAT: Duration = Duration::from_millis(250);
/// Longest that the leader takes for a step, on a busy host.
const SOON: Duration = Duration::from_secs(45);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(
    threads an_update_of_the_cluster_goes_from_turn_to_turn_also_under_the_next_leader
)
.takes(40)];

/// A node as far as an update sees it: its heartbeats.
struct Pretended {
    name: String,
    client: Client,
    report: v1::UpdateReport,
}

impl Pretended {
    fn new(name: String, client: Client) -> Self {
        let report = v1::UpdateReport {
            boot_id: format!("first of {name}"),
            version: "1.0.0".to_owned(),
            ready: true,
            variant: "base".to_owned(),
            release_key: SIGNER.to_owned(),
            ..Default::default()
        };
        Self { name, client, report }
    }

    /// Sends heartbeats until the leader says what to do: right after a write it says nothing.
    async fn beat(&self) -> v1::UpdateOrders {
        loop {
            if let Some(orders) = self.beat_once().await {
                return orders;
            }
        }
    }

    async fn beat_once(&self) -> Option<v1::UpdateOrders> {
        let figures = v1::ConsensusFigures { leader: 1, ..Default::default() };
        let request = v1::HeartbeatRequest {
            consensus: Some(figures),
            update: Some(self.report.clone()),
            ..Default::default()
        };
        heartbeat(&self.client, request).await.update
    }

    /// Asks for the leave to restart in its turn, and waits for it.
    async fn may_restart(&mut self, turn: &v1::UpdateTurn) {
        self.report.turn = turn.began;
        self.report.set_phase(Phase::Ready);
        let leave = async {
            while !self.beat().await.restart {
                tokio::time::sleep(BEAT).await;
            }
        };
        patiently(SOON, leave).await.expect("the leave to restart in time");
    }

    /// Restarts with this version.
    fn takes(&mut self, version: &str) {
        self.report.version = version.to_owned();
        self.report.boot_id = format!("{} of {}", version, self.name);
        (self.report.turn, self.report.cause) = (0, String::new());
        self.report.set_phase(Phase::Unspecified);
    }
}

/// Beats until one of the nodes has a turn; returns which, and the turn.
async fn turn(nodes: &[Pretended]) -> (usize, v1::UpdateTurn) {
    let found = async {
        loop {
            let mut turns = Vec::new();
            for (at, node) in nodes.iter().enumerate() {
                let orders = node.beat().await;
                turns.extend(orders.turn.map(|turn| (at, turn)));
            }
            assert!(turns.len() <= 1, "two turns at once: {turns:?}");
            if let Some(turn) = turns.pop() {
                return turn;
            }
            tokio::time::sleep(BEAT).await;
        }
    };
    patiently(SOON, found).await.expect("a turn in time")
}

/// Beats until the update is as it is expected; no node may have a turn in the answers.
async fn settles(
    nodes: &[Pretended],
    owner: &Client,
    expected: impl Fn(&v1::GetUpdateResponse) -> bool,
) -> v1::ClusterUpdate {
    let found = async {
        loop {
            for node in nodes {
                node.beat().await;
            }
            let read = read(owner).await.unwrap();
            if expected(&read) {
                return read.update.unwrap();
            }
            tokio::time::sleep(BEAT).await;
        }
    };
    patiently(SOON, found).await.expect("the update settles in time")
}

fn bundle(version: &str) -> v1::UpdateBundle {
    v1::UpdateBundle {
        version: version.to_owned(),
        from: "1.0.0".to_owned(),
        image: "00ff".to_owned(),
        variant: "base".to_owned(),
        signer: SIGNER.to_owned(),
        etcd: "3.5.16".to_owned(),
        kubernetes: String::new(),
    }
}

async fn begin(owner: &Client, version: &str, dry_run: bool) -> Result<v1::ClusterUpdate, Status> {
    let bundle = Some(bundle(version));
    asked(owner, v1::BeginUpdateRequest { bundle, dry_run, one_way: false }).await
}

async fn asked(
    owner: &Client,
    request: v1::BeginUpdateRequest,
) -> Result<v1::ClusterUpdate, Status> {
    owner
        .call(Repeat::Allowed, |channel| {
            let request = request.clone();
            async move {
                Ok(ManagementClient::new(channel).begin_update(request).await?.into_inner())
            }
        })
        .await
}

async fn control(owner: &Client, control: Control) -> Result<v1::ClusterUpdate, Status> {
    owner
        .call(Repeat::Allowed, |channel| async move {
            let request = v1::ControlUpdateRequest { control: control.into() };
            Ok(ManagementClient::new(channel).control_update(request).await?.into_inner())
        })
        .await
}

async fn read(owner: &Client) -> Result<v1::GetUpdateResponse, Status> {
    owner
        .call(Repeat::Allowed, |channel| async move {
            let request = v1::GetUpdateRequest {};
            Ok(ManagementClient::new(channel).get_update(request).await?.into_inner())
        })
        .await
}

async fn an_update_of_the_cluster_goes_from_turn_to_turn_also_under_the_next_leader() {
    let machines = [Machine::new(), Machine::new(), Machine::new()];
    let Voters { nodes: members, cluster, curators, own, owner } =
        Box::pin(Voters::start(&machines)).await;
    let names = machines.each_ref().map(Machine::name);
    let of = curators.each_ref();
    let pretended = |(name, own): (&String, Credentials)| {
        Pretended::new(name.clone(), cluster.client(&of, own))
    };
    let mut nodes: Vec<_> = names.iter().zip(own).map(pretended).collect();

    // Nothing is known of the nodes yet, and nothing was ever begun.
    let refused = begin(&owner, "1.1.0", true).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::FailedPrecondition, "update-plan"));
    assert_eq!(reason(&read(&owner).await.unwrap_err()), "no-update");
    assert_eq!(reason(&control(&owner, Control::Pause).await.unwrap_err()), "no-update");
    for node in &nodes {
        assert_eq!(node.beat().await, v1::UpdateOrders::default());
    }

    // A plan is only a plan.
    let planned = begin(&owner, "1.1.0", true).await.unwrap();
    assert_eq!((planned.steps.len(), planned.holder.as_str()), (3, names[0].as_str()));
    assert_eq!(planned.steps[2].node_id, names[0], "the leader is the last");
    assert_eq!(reason(&read(&owner).await.unwrap_err()), "no-update");
    let older = begin(&owner, "0.9.0", true).await.unwrap_err();
    assert!(older.message().contains("which is not newer"), "{older}");

    // The etcd of the bundle is compared with the one that runs.
    assert_eq!(planned.etcd, "3.5");
    let with_etcd = |etcd: &str, dry_run| {
        let bundle = Some(v1::UpdateBundle { etcd: etcd.to_owned(), ..bundle("1.1.0") });
        asked(&owner, v1::BeginUpdateRequest { bundle, dry_run, one_way: false })
    };
    assert_eq!(with_etcd("3.6.0", true).await.unwrap().steps.len(), 3);
    let refused = with_etcd("3.6.0", false).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::FailedPrecondition, "update-one-way"));
    for etcd in ["3.4.9", "3.7.0"] {
        let refused = with_etcd(etcd, true).await.unwrap_err();
        assert_eq!(reason(&refused), "update-plan", "{refused}");
    }
    assert_eq!(reason(&read(&owner).await.unwrap_err()), "no-update");

    // Begun, and begun again by a caller that got no answer.
    let begun = begin(&owner, "1.1.0", false).await.unwrap();
    assert_eq!(begun.state(), State::Loading);
    assert_eq!(begin(&owner, "1.1.0", false).await.unwrap(), begun);
    let other = begin(&owner, "1.2.0", false).await.unwrap_err();
    assert_eq!(reason(&other), "update-going-on");
    settles(&nodes, &owner, |read| read.waits_for.contains("does not have the bundle")).await;
    let keeps = nodes[0].beat().await;
    assert_eq!((keeps.keep.as_str(), keeps.turn), ("00ff", None));
    assert_eq!(nodes[1].beat().await, v1::UpdateOrders::default());

    // The first turn, in which the owner pauses the update.
    nodes[0].report.keeps = "00ff".to_owned();
    let (first_at, given) = turn(&nodes).await;
    assert_ne!(first_at, 0, "not the leader");
    assert_eq!(given.holder, names[0]);
    assert_eq!(given.boot_id, nodes[first_at].report.boot_id);
    control(&owner, Control::Pause).await.unwrap();
    assert_eq!(turn(&nodes).await.0, first_at, "a pause takes no turn away");
    assert!(!nodes[first_at].beat().await.restart, "it has not asked");
    nodes[first_at].may_restart(&given).await;
    // While etcd is about to miss this voter, no other leaves it.
    let other = (1..3).find(|at| *at != first_at).unwrap();
    let refused = take_consensus(&owner, &names[other]).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::FailedPrecondition, "update-restarts"));
    assert!(refused.message().starts_with(&names[first_at]), "{refused}");
    nodes[first_at].takes("1.1.0");
    let paused = settles(&nodes, &owner, |read| read.waits_for.contains("paused")).await;
    assert!(paused.paused && paused.state() == State::Running, "{paused:?}");
    for node in &nodes {
        assert_eq!(node.beat().await.turn, None, "a turn in a pause");
    }
    // Every node shows it, and the leader what it waits for.
    for (curator, leads) in curators.iter().zip([true, false, false]) {
        let mut update = curator.update.clone();
        let shown = update.wait_for(|shown| {
            let known = |shown: &v1::GetUpdateResponse| {
                shown.update.as_ref() == Some(&paused)
                    && shown.waits_for.contains("paused") == leads
            };
            shown.as_ref().is_some_and(known)
        });
        patiently(SOON, shown).await.expect("shown in time").unwrap();
    }
    control(&owner, Control::Resume).await.unwrap();

    // The second turn, in which the leader goes: the next one knows whose turn it is.
    let (second_at, given) = turn(&nodes).await;
    assert!(second_at != 0 && second_at != first_at);
    let [curator_one, curator_two, curator_three] = curators;
    curator_one.supervisor.stop().await;
    let heir = 1 + leader(&[&curator_two, &curator_three], SOON).await;
    let (again, same) = turn(&nodes).await;
    assert_eq!((again, &same), (second_at, &given), "another turn under the next leader");
    nodes[second_at].takes("1.1.0");

    // The node that led is not the last any more, unless all others are done.
    let third_at = loop {
        let (at, next) = turn(&nodes).await;
        if next.began != given.began {
            break at;
        }
        tokio::time::sleep(BEAT).await;
    };
    assert_eq!(third_at, 0);
    nodes[0].takes("1.1.0");
    let done = settles(&nodes, &owner, |read| {
        read.update.as_ref().is_some_and(|update| update.state() == State::Done)
    })
    .await;
    assert_eq!(done.steps.len(), 3);
    let keeps = nodes[0].beat().await;
    assert_eq!(keeps, v1::UpdateOrders::default(), "the bundle is needed no more");

    // The next update: a node does not take it, and no other gets a turn.
    let begun = begin(&owner, "1.2.0", false).await.unwrap();
    assert_eq!(begun.holder, names[heir]);
    nodes[heir].report.keeps = "00ff".to_owned();
    let (at, given) = turn(&nodes).await;
    assert_ne!(at, heir, "the leader of the moment is the last");
    nodes[at].report.turn = given.began;
    nodes[at].report.cause = "the new system did not stay: guru 0310".to_owned();
    nodes[at].report.set_phase(Phase::Failed);
    let failed = settles(&nodes, &owner, |read| read.waits_for.starts_with("an owner")).await;
    let cause = failed.steps.iter().find(|step| step.node_id == names[at]).unwrap().cause.clone();
    assert_eq!((failed.state(), cause), (State::Failed, nodes[at].report.cause.clone()));
    for node in &nodes {
        assert_eq!(node.beat().await.turn, None, "a turn after a failure");
    }
    // Another attempt is another turn.
    control(&owner, Control::Resume).await.unwrap();
    let (_, next) = turn(&nodes).await;
    assert!(next.began > given.began, "{next:?} after {given:?}");
    let aborted = control(&owner, Control::Abort).await.unwrap();
    assert_eq!(aborted.state(), State::Aborted);
    for node in &nodes {
        assert_eq!(node.beat().await, v1::UpdateOrders::default());
    }

    for curator in [curator_two, curator_three] {
        curator.supervisor.stop().await;
    }
    for node in members {
        node.stop().await;
    }
}
