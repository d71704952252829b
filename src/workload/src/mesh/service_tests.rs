//! The service in a network namespace of its own, as root: a kernel of a test host may have
//! no WireGuard, and the service must say so.

use rtnetlink::LinkVeth;
use rustix::thread::UnshareFlags;

use super::*;
use crate::mesh::PublicKey;
use crate::parts;
use polis_wire::node_roles::Role;
use polis_wire::pod_network::Prefix;

fn id(node: u8) -> NodeId {
    NodeId::from_public_key(&[node; 32])
}

fn home() -> cluster::Status {
    let (node, state) = (Some(id(1)), cluster::State::Home);
    cluster::Status { node, state, ..cluster::Status::default() }
}

#[test]
fn only_a_node_that_knows_its_roles_removes_a_mesh() {
    let role = |role| Some(Role::record(&[role]));
    let with = |state, roles| {
        wanted(&cluster::Status { state, ..home() }, roles, &runtime::Status::Stopped)
    };
    for kubernetes in [Role::KubernetesController, Role::KubernetesWorker] {
        for state in [cluster::State::Home, cluster::State::Split] {
            assert_eq!(with(state, role(kubernetes)), Wanted::Mesh(id(1)));
        }
        // At the start of the process, the former mesh goes on.
        assert_eq!(with(cluster::State::Unknown, role(kubernetes)), Wanted::Stays);
        assert_eq!(with(cluster::State::Disowning, role(kubernetes)), Wanted::Nothing);
    }
    assert_eq!(with(cluster::State::Home, None), Wanted::Stays);
    assert_eq!(with(cluster::State::Home, role(Role::ConsensusMember)), Wanted::Nothing);
}

#[test]
fn the_mesh_stays_until_the_last_pod_has_ended() {
    let disowning = cluster::Status { state: cluster::State::Disowning, ..home() };
    let serving = runtime::Status::Serving(runtime::Health::default());
    let pods_left =
        [runtime::Status::Unknown, runtime::Status::Starting, serving, runtime::Status::Ending];
    for cluster in [home(), disowning] {
        let with = |containerd| wanted(&cluster, Some(v1::NodeRoles::default()), containerd);
        for containerd in &pods_left {
            assert_eq!(with(containerd), Wanted::Stays, "{containerd:?}");
        }
        assert_eq!(with(&runtime::Status::Stopped), Wanted::Nothing);
        assert_eq!(with(&runtime::Status::Absent), Wanted::Nothing);
    }
}

#[tokio::test(start_paused = true)]
async fn a_pass_without_an_answer_ends_with_the_reason() {
    let error = in_time(std::future::pending()).await.unwrap_err();
    assert_eq!(error.to_string(), "the kernel or nft has not answered within 60 seconds");
}

/// The record of the node with its key.
fn record(key: PublicKey) -> Option<Arc<Nodes>> {
    let info = v1::NodeInfo {
        state: v1::NodeState::Up.into(),
        cluster_network: Some(v1::ClusterNetwork {
            wireguard_public_key: key.bytes().to_vec(),
            pod_prefix: "10.192.3.0/24".to_owned(),
        }),
        ..Default::default()
    };
    Some(Arc::new(Nodes::from([(id(1), info)])))
}

#[test]
fn a_node_waits_for_its_place_then_has_the_mesh_or_says_why_not() {
    in_a_network_of_its_own(story());
}

#[test]
fn a_node_that_no_leader_answers_has_the_mesh_of_the_last_boot() {
    in_a_network_of_its_own(story_without_a_leader());
}

#[test]
fn a_run_removes_what_one_before_it_has_left_between_two_steps() {
    in_a_network_of_its_own(story_of_a_removal());
}

fn in_a_network_of_its_own(story: impl Future<Output = ()>) {
    #[expect(deprecated, reason = "the other one is unsafe because of flags that are not used")]
    let entered = rustix::thread::unshare(UnshareFlags::NEWNET);
    if let Err(error) = entered {
        eprintln!("skipped: a network namespace needs root ({error})");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(Box::pin(story));
}

/// Waits until the kernel was asked for the mesh. Where it has WireGuard, the rules are what
/// fails: no program sets them.
async fn tried(status: &mut watch::Receiver<Status>) {
    let failed = |status: &Status| matches!(status.stage, Stage::Failed(_));
    let Stage::Failed(cause) = status.wait_for(failed).await.unwrap().stage.clone() else {
        panic!("it failed")
    };
    assert!(
        cause.starts_with("the kernel cannot make a WireGuard device")
            || cause.starts_with("cannot set the rules of the mesh"),
        "{cause}"
    );
}

async fn story_without_a_leader() {
    let base = tempfile::tempdir().unwrap();
    let root = files::Root::at(base.path());
    root.create().unwrap();
    let config = Config {
        nft: base.path().join("no-nft"),
        leader_max: Duration::from_millis(50),
        ..Config::live(&root)
    };
    for directory in &config.directories {
        directory.create().unwrap();
    }
    let key = PrivateKey::load_or_make(&config.key).unwrap().public();
    let last = record(key).unwrap();
    let mut kept = Kept::new(config.places.clone());
    kept.write(id(1), &last).await;
    let file = config.places.clone();
    let (ctx, handles) = Context::for_test();
    let (_cluster, cluster) = watch::channel(home());
    let worker = Role::record(&[Role::KubernetesWorker]);
    let (given, roles) = watch::channel(Some(worker));
    let (_networks, networks) = watch::channel(Networks::default());
    let (_network, network) = watch::channel(network::Status::default());
    let (known, nodes) = watch::channel(None);
    let (pods, containerd) = watch::channel(runtime::Status::Ending);
    let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
    let outputs = Outputs::default();
    let (mut status, mut shown) = (outputs.status.subscribe(), outputs.last.subscribe());
    let service =
        Service { config, cluster, roles, networks, network, nodes, containerd, outputs, parts };
    let story = async {
        tried(&mut status).await;
        let places = shown.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert_eq!(places.keys().collect::<Vec<_>>(), [&id(1)]);
        // The leader knows one more: its records count, and are those of the next boot.
        let mut records = Nodes::clone(&last);
        let mut other = records[&id(1)].clone();
        let network = other.cluster_network.as_mut().unwrap();
        (network.wireguard_public_key, network.pod_prefix) = (vec![7; 32], "10.192.4.0/24".into());
        records.insert(id(2), other);
        known.send_replace(Some(Arc::new(records)));
        drop(shown.wait_for(Option::is_none).await.unwrap());
        let kept = async || Kept::new(file.clone()).read().await.map(|places| places.len());
        while kept().await != Some(2) {
            sleep(Duration::from_millis(5)).await;
        }
        given.send_replace(Some(v1::NodeRoles::default()));
        pods.send_replace(runtime::Status::Stopped);
        while kept().await.is_some() {
            sleep(Duration::from_millis(5)).await;
        }
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    assert_eq!(ended, Ok(()));
}

async fn story_of_a_removal() {
    let base = tempfile::tempdir().unwrap();
    let (ctx, _handles) = Context::for_test();
    let live = Config::live(&files::Root::at(base.path()));
    let service = Service {
        // No program: the rules cannot be removed.
        config: Config { nft: base.path().join("no-nft"), ..live },
        cluster: watch::channel(home()).1,
        roles: watch::channel(None).1,
        networks: watch::channel(Networks::default()).1,
        network: watch::channel(network::Status::default()).1,
        nodes: watch::channel(None).1,
        containerd: watch::channel(runtime::Status::Stopped).1,
        outputs: Outputs::default(),
        parts: Parts::new(watch::Sender::default(), ctx.lines().clone()),
    };
    let new = || Run::new(&service.config);
    // A node that never had a mesh runs no program.
    service.remove(&mut new(), &ctx).await.unwrap();
    let (connection, links, _messages) = rtnetlink::new_connection().unwrap();
    let make = async {
        links.link().add(LinkVeth::new(DEVICE, "wire").build()).execute().await.unwrap();
    };
    tokio::select! {
        () = make => {}
        () = connection => panic!("the kernel closed the socket"),
    }
    for _run in 0..2 {
        let error = service.remove(&mut new(), &ctx).await.unwrap_err();
        assert!(matches!(error, Error::Rules(_)), "{error}");
    }
}

async fn story() {
    let base = tempfile::tempdir().unwrap();
    let root = files::Root::at(base.path());
    let (ctx, mut handles) = Context::for_test();
    let (_cluster, cluster) = watch::channel(home());
    let (given, roles) = watch::channel(None);
    let (_networks, networks) = watch::channel(Networks::default());
    let (_network, network) = watch::channel(network::Status::default());
    let (known, nodes) = watch::channel(None);
    let stack = watch::Sender::<parts::Status>::default();
    let outputs = Outputs::default();
    let (mut status, mut key) = (outputs.status.subscribe(), outputs.key.subscribe());
    let mut config = Config::live(&root);
    // No program: the rules are the last step.
    config.nft = base.path().join("no-nft");
    let parts = Parts::new(stack.clone(), ctx.lines().clone());
    let (pods, containerd) = watch::channel(runtime::Status::Ending);
    let service = Service {
        config,
        cluster,
        roles,
        networks,
        network,
        nodes,
        containerd,
        outputs: outputs.clone(),
        parts,
    };
    let story = async {
        given.send_replace(Some(Role::record(&[Role::KubernetesWorker])));
        let key = key.wait_for(Option::is_some).await.unwrap().unwrap();
        let waits = |status: &Status| matches!(status.stage, Stage::Waiting(_));
        drop(status.wait_for(waits).await.unwrap());
        assert_eq!(stack.borrow().parts[&Part::Mesh], PartState::Starting);
        let why = stack.borrow().waits[&Part::Mesh].clone();
        assert_eq!(why, "it waits for the records of the nodes, from a leader");
        known.send_replace(record(key));
        tried(&mut status).await;
        assert_eq!(*outputs.prefix.borrow(), None::<Prefix>);
        given.send_replace(Some(v1::NodeRoles::default()));
        pods.send_replace(runtime::Status::Stopped);
        drop(outputs.key.subscribe().wait_for(Option::is_none).await.unwrap());
        let mut stack = stack.subscribe();
        drop(stack.wait_for(|stack| stack.parts.is_empty()).await.unwrap());
        handles.cancel().await;
        handles.take_lines()
    };
    let (ended, lines) = tokio::join!(service.run(ctx), story);
    assert_eq!(ended, Ok(()));
    let states: Vec<_> = lines
        .iter()
        .filter(|line| line.contains("part=mesh"))
        .map(|line| line.split(" state=").nth(1).unwrap().split(' ').next().unwrap())
        .collect();
    assert_eq!(states, ["starting", "failed", "stopped"], "{lines:?}");
}
