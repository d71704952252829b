//! Fuzz targets of the curator: the records that it reads from etcd, and the requests that it
//! converts.

use std::collections::BTreeMap;

use polis_fuzz::{Accepted, Target};
use polis_proto::v1;
use prost::Message;

use super::attesting::Questions;
use super::directory::{Directory, Leader};
use super::{access_list, bounds, convert, store};
use crate::consensus::client::{Change, Kv, Mirror};
use polis_machine::parameters;
use polis_wire::attestation::software::Software;
use polis_wire::identity::NodeId;
use polis_wire::registry::Registry;

const ID: &str = "polis-0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a";

fn status() -> v1::NodeStatus {
    v1::NodeStatus {
        external_address: "10.0.2.7".to_owned(),
        version: "0.1.0".to_owned(),
        image: "0123456789abcdef".to_owned(),
        curator_port: 7835,
        network: Some(v1::NetworkReport {
            links: vec![v1::NetworkLink { name: "eth0".to_owned(), ..Default::default() }],
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Each record of the store: its key, and a value of it.
fn records() -> Vec<(String, Vec<u8>)> {
    let node = v1::Node {
        public_key: vec![7; 32],
        state: v1::NodeState::Up.into(),
        labels: [("rack".to_owned(), "1".to_owned())].into(),
        status: Some(status()),
        join_key: vec![8; 32],
        ..Default::default()
    };
    let user = v1::User { name: "ann".to_owned(), public_key: vec![9; 32], ..Default::default() };
    let leader = v1::Leader {
        node_id: ID.to_owned(),
        address: "10.0.2.7".to_owned(),
        port: 7835,
        since: 1_800_000_000,
    };
    let configuration =
        v1::ClusterConfiguration { cluster_domain: "a.example".to_owned(), ..Default::default() };
    let registries = v1::Registries {
        registries: vec![v1::Registry { host: "a.example".to_owned(), ..Default::default() }],
    };
    vec![
        (format!("{}{ID}", store::NODES), node.encode_to_vec()),
        (format!("{}ann", store::USERS), user.encode_to_vec()),
        (format!("{}7", store::LEADERS), leader.encode_to_vec()),
        (store::CONFIGURATION.to_owned(), configuration.encode_to_vec()),
        (store::REGISTRIES.to_owned(), registries.encode_to_vec()),
        (store::UPDATE.to_owned(), v1::ClusterUpdate::default().encode_to_vec()),
        (store::crl_key(), vec![0x30, 0]),
    ]
}

/// A change for each record: the number of its key, then its content.
fn packed((number, (_key, value)): (u8, &(String, Vec<u8>))) -> Vec<u8> {
    [&[number][..], value].concat()
}

#[test]
fn records_of_the_store() {
    let records = records();
    let samples: Vec<_> = (0..).zip(&records).map(packed).collect();
    Target::new("control.records").samples(samples).run(|input| {
        let Some((number, value)) = input.split_first() else { return Accepted::No };
        let (key, _) = &records[usize::from(*number) % records.len()];
        let put = |key: &String, value: &[u8]| {
            let kv =
                Kv { key: key.clone(), value: value.to_vec(), created: 1, modified: 1, lease: 0 };
            Change::Put(kv)
        };
        let mirror = Mirror { entries: BTreeMap::new(), revision: 1 };
        let mut directory = Directory::default();
        directory.apply(&mirror, &[put(key, value)]);
        // Once more, over the record that was there.
        let mut after = directory.clone();
        after.apply(&mirror, &[put(key, value)]);
        assert_eq!(after.leader(), directory.leader());
        assert!(directory.nodes().count() + directory.users().count() <= 1);
        let _access = access_list::of(&directory, &mut access_list::Revoked::default());
        if let Some(leader) = Leader::read(value) {
            assert_eq!(Leader::read(&leader.to_message().encode_to_vec()), Some(leader));
        }
        for (id, known) in directory.nodes() {
            let _shown = convert::info(id, known, &super::health::Heartbeats::default());
        }
        directory.apply(&mirror, &[Change::Gone(key.clone())]);
        assert_eq!(directory.nodes().count() + directory.users().count(), 0);
        Accepted::Yes
    });
}

/// Decodes a request, and checks it as its handler does.
type Check = fn(&[u8]) -> bool;

fn checked<M: Message + Default>(bytes: &[u8], check: impl FnOnce(M) -> bool) -> bool {
    M::decode(bytes).is_ok_and(check)
}

const CHECKS: [Check; 9] = [
    |bytes| {
        checked(bytes, |call: v1::UpdateNodeStatusRequest| {
            convert::mesh_key(&call.wireguard_public_key, "wireguard_public_key").is_ok()
                && bounds::status(call.status).is_ok_and(|status| status.version.len() <= 64)
        })
    },
    |bytes| {
        checked(bytes, |call: v1::UpdateNodeLabelsRequest| {
            let id = convert::node_id(&call.node_id, "node_id");
            let Ok(set) = convert::labels(call.set, "set", 2) else { return false };
            let gone = convert::gone(call.remove, &set);
            gone.is_ok_and(|gone| gone.iter().all(|name| !set.contains_key(name))) && id.is_ok()
        })
    },
    |bytes| {
        checked(bytes, |call: v1::NameNodeRequest| {
            convert::name(&call.name, "name").is_ok()
                && convert::node_id(&call.node_id, "node_id").is_ok()
        })
    },
    |bytes| {
        checked(bytes, |call: v1::ConfigureClusterRequest| {
            let message = call.configuration.unwrap_or_default();
            parameters::configuration(message, "configuration").is_ok()
        })
    },
    |bytes| {
        checked(bytes, |call: v1::SetRegistryRequest| {
            Registry::read(&call.registry.unwrap_or_default()).is_ok()
        })
    },
    |bytes| {
        checked(bytes, |report: v1::UpdateReport| {
            let bounded = bounds::update_report(report);
            bounded.version.len() <= 64 && bounded.cause.len() <= 1024
        })
    },
    |bytes| {
        checked(bytes, |call: v1::ConfigureNodeNetworkRequest| {
            convert::network_order(call.configuration).is_ok_and(|order| order.number != 0)
        })
    },
    |bytes| {
        checked(bytes, |call: v1::ProveTpmRequest| {
            let (questions, id) = (Questions::default(), NodeId::from_public_key(&[7; 32]));
            let asked = call.keys.is_some_and(|keys| questions.ask(id, keys).is_ok());
            let judged = questions.judge(id, &call.boot_id, call.answer.unwrap_or_default(), 1);
            // Nothing is proved without the secret of the question.
            assert_eq!(judged.map(|proof| proof.is_ok()), asked.then_some(false));
            assert!(bounds::tpm_fault(call.fault).len() <= 1024);
            bounds::boot_id(call.boot_id, "boot_id").is_ok_and(|boot_id| boot_id.len() <= 64)
        })
    },
    |bytes| {
        checked(bytes, |call: v1::UpdateNodeTaintsRequest| {
            convert::taints(&call.set, &call.remove).is_ok()
                && convert::node_id(&call.node_id, "node_id").is_ok()
        })
    },
];

#[test]
fn requests() {
    let labels = v1::UpdateNodeLabelsRequest {
        node_id: ID.to_owned(),
        set: [("rack".to_owned(), "1".to_owned())].into(),
        remove: vec!["side".to_owned()],
    };
    let name = v1::NameNodeRequest { node_id: ID.to_owned(), name: "node-1".to_owned() };
    let registry = v1::Registry {
        host: "a.example".to_owned(),
        mirrors: vec!["mirror.example".to_owned()],
        ..Default::default()
    };
    let report = v1::UpdateReport {
        version: "0.2.0".to_owned(),
        cause: "ü".repeat(20),
        ..Default::default()
    };
    let firewall = v1::FirewallConfiguration {
        sources: vec!["192.0.2.0/24".to_owned(), "2001:db8::7".to_owned()],
        ports: vec!["tcp/443".to_owned(), "udp/5000-5100".to_owned()],
    };
    let configuration = v1::ClusterConfiguration {
        cluster_domain: "a.example".to_owned(),
        firewall: Some(firewall),
        snapshots: Some(v1::SnapshotConfiguration {
            url: "s3+https://s3.example/bucket/polis".to_owned(),
            region: "eu-central-1".to_owned(),
            ..Default::default()
        }),
        attestation: Some(v1::AttestationPolicy {
            systems: vec![v1::attestation_policy::System {
                name: "polis-1.update".to_owned(),
                kernel_image: vec![7; 32],
            }],
            makers: Vec::new(),
        }),
        ..Default::default()
    };
    let card = v1::network_configuration::Card { r#match: "eth0".to_owned(), ..Default::default() };
    let bond = v1::network_configuration::Bond {
        name: "bond0".to_owned(),
        members: vec![card],
        ..Default::default()
    };
    let ordered = v1::NetworkConfiguration { bonds: vec![bond], ..Default::default() };
    let network =
        v1::ConfigureNodeNetworkRequest { node_id: ID.to_owned(), configuration: Some(ordered) };
    let proof = v1::ProveTpmRequest {
        boot_id: "5f3a0c11".to_owned(),
        keys: Some(Software::default().keys().into_message()),
        answer: Some(v1::TpmAnswer { secret: vec![7; 32], ..Default::default() }),
        fault: "ü".repeat(20),
    };
    let taint = v1::NodeTaint {
        key: "gpu".to_owned(),
        value: "a100".to_owned(),
        effect: v1::node_taint::Effect::NoSchedule.into(),
    };
    let taints = v1::UpdateNodeTaintsRequest {
        node_id: ID.to_owned(),
        set: vec![taint],
        remove: vec![v1::NodeTaint { key: "side".to_owned(), ..Default::default() }],
    };
    let credentials = v1::SnapshotCredentials {
        access_key_id: "AKIA".to_owned(),
        secret_access_key: "secret".to_owned(),
    };
    let samples = [
        v1::UpdateNodeStatusRequest { status: Some(status()), wireguard_public_key: vec![7; 32] }
            .encode_to_vec(),
        labels.encode_to_vec(),
        name.encode_to_vec(),
        v1::ConfigureClusterRequest {
            configuration: Some(configuration),
            snapshot_credentials: Some(credentials),
        }
        .encode_to_vec(),
        v1::SetRegistryRequest { registry: Some(registry) }.encode_to_vec(),
        report.encode_to_vec(),
        network.encode_to_vec(),
        proof.encode_to_vec(),
        taints.encode_to_vec(),
    ];
    let samples: Vec<_> =
        (0_u8..).zip(samples).map(|(number, bytes)| [&[number][..], &bytes].concat()).collect();
    Target::new("control.requests").samples(samples).run(|input| {
        let Some((number, bytes)) = input.split_first() else { return Accepted::No };
        let text = String::from_utf8_lossy(bytes);
        if let Ok(id) = convert::node_id(&text, "id") {
            assert_eq!(id.to_string().parse::<NodeId>().ok(), Some(id));
        }
        let _answers = (convert::key(bytes, "key", 1), convert::address(&text, "address"));
        CHECKS[usize::from(*number) % CHECKS.len()](bytes).into()
    });
}
