//! Tests of the whole service on a machine at rest, where only the test acts.

use std::time::Duration;

use polis_tui::snapshot::Cluster;
use polis_tui::{Page, View};
use tokio::time::Instant;

use super::*;
use polis_runtime::supervisor::Handles;

/// The senders of the inputs.
struct World {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    cluster: watch::Sender<cluster::Status>,
    handles: Handles,
    _owners: Box<dyn std::any::Any>,
}

fn start() -> World {
    let variable = |name: &str| match name {
        "POLIS_STAGES" => Some("kernel=0-4.5".to_owned()),
        "POLIS_CONTROL_FD" => Some("3".to_owned()),
        "POLIS_RECOVERY_FD" | "POLIS_MAINTENANCE" => None,
        name => Some(name.to_owned()),
    };
    let (orders, ordered) = watch::channel(None);
    let member = consensus::Service::new(consensus::Config::live(&files::Root::live()), ordered);
    let (known, reported) = watch::channel(None);
    let (network, addresses) = watch::channel(network::Status::default());
    let (mounted, storage) = watch::channel(storage::Status::Starting);
    let (clock, time) = watch::channel(polis_machine::time::Status::default());
    let (disk, health) = watch::channel(storage::Health::default());
    let (_further, volumes) = watch::channel(volumes::Status::new());
    let (_mirrored, mirror) = watch::channel(None);
    let (cluster, standing) = watch::channel(cluster::Status::default());
    let (received, cluster_nodes) = watch::channel(ClusterNodes::default());
    let (key, identity) = watch::channel(None);
    let (given, roles) = watch::channel(None);
    let (parts, workload) = watch::channel(polis_workload::Status::default());
    let (runs, containerd) = watch::channel(runtime::Status::default());
    let (listed, pods) = watch::channel(None);
    let (sent, shipping) = watch::channel(crate::shipping::Status::default());
    let (table, nodes) = watch::channel(None);
    let (own, credentials) = watch::channel(None);
    let service = Service {
        environment: Environment::from_variables(variable).unwrap(),
        inputs: Inputs {
            known: reported,
            network: addresses,
            storage,
            time,
            health,
            volumes,
            mirror,
            cluster: standing,
            consensus: member.status(),
            pki: member.overview(),
            cluster_nodes,
            identity,
            roles,
            workload,
            containerd,
            pods,
            shipping,
        },
        terminals: watch::Sender::default(),
        snapshot: watch::Sender::default(),
        members: members::Service {
            consensus: member.status(),
            members: member.members(),
            nodes,
            credentials,
            port: 0,
        },
        end: watch::Sender::default(),
    };
    let snapshot = service.snapshot.subscribe();
    let (ctx, handles) = Context::for_test();
    ctx.spawn("console", Policy::forever(), move |ctx| service.clone().run(ctx));
    let owners = (orders, member, known, network, mounted, disk, received, key, table, own);
    let owners = (owners, given, parts, runs, listed, sent, clock);
    World { snapshot, cluster, handles, _owners: Box::new(owners) }
}

/// Lets time pass until the machine is at rest.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(30)).await;
}

#[tokio::test(start_paused = true)]
async fn at_rest_the_clock_goes_and_pages_stand_still() {
    let mut world = start();
    settle().await;
    let minute = tokio::time::sleep(Duration::from_secs(60));
    tokio::pin!(minute);
    let views = Page::ALL.map(|page| {
        let mut view = View::new(80, 24);
        view.key(page.key(), &Snapshot::default());
        view
    });
    let mut shown = world.snapshot.borrow_and_update().clone();
    let (mut ticks, mut pictures) = (0, [0; Page::ALL.len()]);
    loop {
        tokio::select! {
            () = &mut minute => break,
            changed = world.snapshot.changed() => changed.unwrap(),
        }
        let new = world.snapshot.borrow_and_update().clone();
        ticks += 1;
        for (view, pictures) in views.iter().zip(&mut pictures) {
            *pictures += usize::from(view.sees_change(&shown, &new));
        }
        shown = new;
    }
    assert!((58..=62).contains(&ticks), "the clock went {ticks} times");
    let [boot, cluster, etcd, pki, _services, logs, network, workloads] = pictures;
    // The load is sampled every thirty seconds, and is on the first page.
    assert!(boot <= 3, "the Boot page was drawn {boot} times");
    assert_eq!((cluster, etcd, pki, logs, network, workloads), (0, 0, 0, 0, 0, 0));
    world.handles.cancel().await;
}

#[tokio::test(start_paused = true)]
async fn what_happens_at_rest_is_shown_at_once() {
    let mut world = start();
    settle().await;
    for (state, shown) in
        [(cluster::State::Split, Cluster::Split), (cluster::State::Home, Cluster::Home)]
    {
        let began = Instant::now();
        world.cluster.send_modify(|status| status.state = state);
        world.snapshot.wait_for(|snapshot| snapshot.header.cluster == shown).await.unwrap();
        assert!(began.elapsed() <= PACE_BOOTING, "{:?} for news", began.elapsed());
    }
    world.handles.cancel().await;
}
