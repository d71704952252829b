//! The cluster's own objects: who may do what, and in which order they are applied.

use super::*;
use crate::runtime::config;

#[test]
fn each_role_of_the_cluster_has_its_binding() {
    let lines: Vec<_> = all()
        .into_iter()
        .filter(|object| object.content["kind"] == "ClusterRoleBinding")
        .map(|object| {
            let role = object.content["roleRef"]["name"].as_str().unwrap().to_owned();
            let subjects = object.content["subjects"].as_array().unwrap().clone();
            let names: Vec<_> = subjects.iter().map(|one| one["name"].as_str().unwrap()).collect();
            format!("{role}: {}", names.join(" "))
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    system:kubelet-api-admin: polis:apiserver-kubelet-client
    cluster-admin: polis:owners
    admin: polis:operators
    view: polis:viewers
    polis:cluster-viewer: polis:operators polis:viewers
    ");
}

#[test]
fn the_rights_of_a_worker_name_its_node() {
    let id = |key: u8| NodeId::from_public_key(&[key; 32]);
    let named = |nodes: &[NodeId]| {
        let objects = workers(nodes).into_iter();
        let users = objects.map(|object| {
            let subjects = object.content["subjects"].as_array().unwrap().clone();
            let kinds = subjects.iter().all(|one| one["kind"] == "User");
            assert!(kinds, "{object:?}");
            let names = subjects.iter().map(|one| one["name"].as_str().unwrap().to_owned());
            (object.content["roleRef"]["name"].clone(), names.collect::<Vec<_>>())
        });
        users.collect::<Vec<_>>()
    };
    let one = id(1);
    assert_eq!(
        named(&[one]),
        [
            // kubelet waits for the program that reads with the first.
            (json!("polis:policy"), vec![format!("polis:policy:{one}")]),
            (json!("polis:worker"), vec![format!("system:node:{one}")]),
            (json!("system:node-proxier"), vec![format!("polis:kube-proxy:{one}")]),
            (json!("polis:dns"), vec![format!("polis:dns:{one}")]),
            (json!("polis:csi"), vec![format!("polis:csi:{one}")]),
        ]
    );
    // Without a worker, the list is empty and not absent: it replaces the former one.
    assert!(named(&[]).iter().all(|(_, users)| users.is_empty()));
}

#[test]
fn a_binding_is_in_place_with_its_role_and_exactly_its_subjects() {
    let id = |key: u8| NodeId::from_public_key(&[key; 32]);
    let nodes = [vec![id(1), id(2)], vec![id(3)], Vec::new()];
    let [two, other, none] = nodes.map(|nodes| workers(&nodes));
    let found: Vec<_> = two.iter().map(|object| object.content.clone()).collect();
    assert!(two.iter().all(|one| is_bound(one, &found)));
    for one in other.iter().chain(&none) {
        assert!(!is_bound(one, &found), "{}", one.path);
    }
    let mut changed = found.clone();
    changed[0]["roleRef"]["name"] = json!("cluster-admin");
    assert!(!is_bound(&two[0], &changed) && !is_bound(&two[0], &[]));
    // As the API server shows it.
    let mut empty = none[0].content.clone();
    empty.as_object_mut().unwrap().remove("subjects");
    assert!(is_bound(&none[0], &[empty]));
    let (path, query) = BINDINGS.split_once('?').unwrap();
    assert_eq!(query, format!("labelSelector={}%3Dtrue", LABEL.replace('/', "%2F")));
    assert!(two.iter().all(|one| one.path.starts_with(path)));
}

#[test]
fn every_object_has_the_label_and_its_own_path() {
    let objects = || all().into_iter().chain(workers(&[]));
    let mut paths: Vec<_> = objects().map(|object| object.path).collect();
    let count = paths.len();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), count);
    for object in objects() {
        assert_eq!(object.content["metadata"]["labels"][LABEL], "true", "{object:?}");
    }
}

#[test]
fn a_policy_is_in_force_before_the_rights_that_it_restricts() {
    let paths: Vec<_> = all().into_iter().map(|object| object.path).collect();
    let at = |end: &str| paths.iter().position(|path| path.ends_with(end)).unwrap();
    let in_force = |policy: &str| at(&format!("/validatingadmissionpolicybindings/{policy}"));
    for policy in [GUARD, CRITICAL] {
        assert!(in_force(policy) < at(&format!("/clusterrolebindings/{OPERATORS}")), "{policy}");
    }
    for policy in [CSI_VOLUMES, CSI_CLAIMS, CSI_CAPACITIES] {
        assert!(in_force(policy) < at(&format!("/clusterroles/{CSI}")), "{policy}");
    }
}

#[test]
fn the_scheduler_asks_for_the_room_that_a_storage_driver_may_show() {
    assert_eq!(csi_driver()["spec"]["storageCapacity"], true);
    let role = csi_role().content;
    let verbs = |resource: &str| {
        let rules = role["rules"].as_array().unwrap().iter();
        let found = rules.filter(|rule| rule["resources"] == json!([resource]));
        found.map(|rule| rule["verbs"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(verbs("csistoragecapacities"), [json!(["get", "create", "patch"])]);
    // It takes its node off a claim by way of the status.
    assert_eq!(verbs("persistentvolumeclaims"), [json!(["get", "list", "watch"])]);
    assert_eq!(verbs("persistentvolumeclaims/status"), [json!(["patch"])]);
    for (policy, group, resource, operations) in [
        (csi_claims(), "", "persistentvolumeclaims/status", json!(["UPDATE"])),
        (csi_capacities(), "storage.k8s.io", "csistoragecapacities", json!(["CREATE", "UPDATE"])),
    ] {
        let spec = &policy.content["spec"];
        let rule = &spec["matchConstraints"]["resourceRules"][0];
        assert_eq!(rule["apiGroups"], json!([group]), "{spec}");
        assert_eq!(rule["resources"], json!([resource]), "{spec}");
        assert_eq!(rule["operations"], operations, "{spec}");
    }
}

#[test]
fn a_pod_that_nothing_evicts_is_for_namespaces_of_an_owner_alone() {
    let spec = critical().content["spec"].clone();
    assert_eq!(
        spec["validations"][0]["expression"],
        "!has(object.spec.priorityClassName) || !(object.spec.priorityClassName in \
         ['system-cluster-critical', 'system-node-critical'])"
    );
    let constraints = &spec["matchConstraints"];
    // A namespace without the second label is not left out either.
    let left_out: Vec<_> = constraints["namespaceSelector"]["matchExpressions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["operator"].as_str().unwrap(), one["values"][0].as_str().unwrap()))
        .collect();
    assert_eq!(left_out, [("NotIn", "kube-system"), ("NotIn", "privileged")]);
    assert_eq!(constraints["resourceRules"][0]["resources"], json!(["pods"]));
}

#[test]
fn the_runtime_classes_are_handlers_of_containerd() {
    let classes = all().into_iter().filter(|object| object.content["kind"] == "RuntimeClass");
    let named: Vec<_> = classes
        .map(|object| {
            let name = object.content["metadata"]["name"].as_str().unwrap().to_owned();
            (name, object.content["handler"].as_str().unwrap().to_owned())
        })
        .collect();
    let shim = std::path::Path::new(gvisor::CONFIGURATION);
    let root = polis_base::files::Root::live();
    let text = config::containerd(&root, shim, config::Gvisor::Here);
    assert_eq!(named.len(), 2);
    for (name, handler) in named {
        assert!(text.contains(&format!(".runtimes.{handler}]")), "{name}: {handler}");
    }
}

#[test]
fn operators_and_viewers_read_every_class_that_their_objects_name() {
    let role = cluster_viewer().content;
    let rules = role["rules"].as_array().unwrap().iter();
    let read: Vec<_> = rules.flat_map(|rule| rule["resources"].as_array().unwrap()).collect();
    // A claim names two, an Ingress and a pod the others.
    let classes = [
        "storageclasses",
        "volumeattributesclasses",
        "ingressclasses",
        "runtimeclasses",
        "priorityclasses",
    ];
    for class in classes {
        assert!(read.iter().any(|resource| **resource == class), "{class}: {role}");
    }
}

#[test]
fn the_role_for_the_whole_cluster_reads_no_secrets_and_writes_nothing() {
    let viewer = cluster_viewer().content.to_string();
    assert!(!viewer.contains("secrets") && !viewer.contains('*'), "{viewer}");
    assert!(!viewer.contains("create") && !viewer.contains("delete"), "{viewer}");
}
