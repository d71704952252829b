//! The control plane comes up, keeps Secrets, survives the death of its parts, and goes.

use polis_base::users::{self, KUBERNETES, User};
use polis_tests::{Story, story};
use polis_workload::{Part, PartState};
use serde_json::{Value, json};

use crate::harness::eventually;
use crate::world::{Controller, SOON, becomes, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads a_controller_becomes_ready_and_ends_with_its_role).takes(30),
    story!(threads parts_that_are_killed_come_back_and_say_how_they_ended).takes(40),
];

const SECRET: &str = "words that must not be readable in etcd";

async fn a_controller_becomes_ready_and_ends_with_its_role() {
    let mut controller = Controller::ready().await;
    // Every part has waited for the one before it.
    let ready: Vec<_> =
        controller.lines().into_iter().filter(|line| line.ends_with("state=ready")).collect();
    let at = |part: &str| {
        let line = format!("part={part} state=ready");
        ready.iter().position(|one| *one == line).unwrap_or_else(|| panic!("{line}: {ready:?}"))
    };
    assert!(at("certificates") < at("apiserver"), "{ready:?}");
    assert!(at("apiserver") < at("reconciler"), "{ready:?}");
    assert!(at("reconciler") < at("controller-manager"), "{ready:?}");
    assert!(at("reconciler") < at("scheduler"), "{ready:?}");
    assert_eq!(at("all"), ready.len() - 1, "{ready:?}");

    every_program_is_confined(&controller);
    both_hold_their_leases(&controller).await;
    services_have_addresses_of_the_network_of_the_cluster(&controller).await;
    a_secret_is_encrypted_in_etcd(&controller).await;
    a_pod_above_baseline_is_refused(&controller).await;
    a_pod_that_nothing_evicts_is_refused_outside_of_the_system(&controller).await;
    who_reads_a_secret_is_in_the_audit_log(&controller).await;
    what_a_user_changes_is_in_the_log_of_the_node(&controller).await;

    controller.take_role();
    controller.waits("nothing to be asked for", |status| status.parts.is_empty()).await;
    let lines = controller.lines();
    assert_eq!(lines.last().unwrap(), "part=all state=stopped", "{lines:?}");
    assert!(controller.master().get("/readyz").await.is_err(), "the API server has ended");
    controller.stop().await;
}

/// As the kernel shows it.
fn every_program_is_confined(controller: &Controller) {
    let programs = [
        (Part::ApiServer, users::API_SERVER),
        (Part::ControllerManager, users::CONTROLLER_MANAGER),
        (Part::Scheduler, users::SCHEDULER),
    ];
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not tested: the users of the programs, which only root can change");
    }
    for (part, User { id, .. }) in programs {
        let pid = controller.pid(part).as_raw_nonzero();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let status = status.replace('\t', " ");
        let mut expected = vec!["NoNewPrivs: 1".to_owned(), "Seccomp: 2".to_owned()];
        if is_root {
            let none = "0000000000000000";
            expected.extend([format!("Uid: {id} {id} {id} {id}"), format!("CapPrm: {none}")]);
            expected.extend([format!("Groups: {}", KUBERNETES.id), format!("CapBnd: {none}")]);
        }
        for line in expected {
            assert!(status.lines().any(|it| it.trim_end() == line), "{line} in\n{status}");
        }
    }
}

async fn both_hold_their_leases(controller: &Controller) {
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    // The parts are ready before their election has ended.
    let held = |lease: &Value| {
        lease["spec"]["holderIdentity"].as_str().is_some_and(|holder| !holder.is_empty())
    };
    for part in ["kube-controller-manager", "kube-scheduler"] {
        becomes(&controller.master(), &format!("{leases}/{part}"), "its holder", held).await;
    }
}

async fn services_have_addresses_of_the_network_of_the_cluster(controller: &Controller) {
    let service = "/api/v1/namespaces/default/services/kubernetes";
    let first = |service: &Value| service["spec"]["clusterIP"] == "172.24.0.1";
    becomes(&controller.master(), service, "the first address of Services", first).await;
}

async fn a_secret_is_encrypted_in_etcd(controller: &Controller) {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
        "stringData": {"words": SECRET},
    });
    let made = controller.create("/api/v1/namespaces/default/secrets", &secret).await;
    assert_eq!(made.status, 201, "{}", String::from_utf8_lossy(&made.body));
    let mut etcd = controller.etcd.etcd().await;
    let stored = etcd.get("/registry/secrets/default/s", None).await.unwrap();
    let value = stored.kvs().first().unwrap().value();
    assert!(value.starts_with(b"k8s:enc:secretbox:v1:1:"), "{}", String::from_utf8_lossy(value));
    assert!(!String::from_utf8_lossy(value).contains(SECRET));
    let read = controller.master().get("/api/v1/namespaces/default/secrets/s").await.unwrap();
    assert_eq!(read.status, 200);
}

async fn a_pod_above_baseline_is_refused(controller: &Controller) {
    let pod = |host_network: bool| {
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "p"},
            "spec": {"hostNetwork": host_network, "containers": [{"name": "c", "image": "i"}]},
        })
    };
    // The account of the namespace is made a moment after the namespace.
    let account = "/api/v1/namespaces/default/serviceaccounts/default";
    let is_there = |found: &Value| found["kind"] == "ServiceAccount";
    becomes(&controller.master(), account, "the account", is_there).await;
    let pods = "/api/v1/namespaces/default/pods";
    let plain = controller.create(pods, &pod(false)).await;
    assert_eq!(plain.status, 201, "{}", String::from_utf8_lossy(&plain.body));
    let above = controller.create(pods, &pod(true)).await;
    let said = String::from_utf8_lossy(&above.body).into_owned();
    assert_eq!(above.status, 403, "{said}");
    assert!(said.contains("baseline"), "{said}");
}

async fn a_pod_that_nothing_evicts_is_refused_outside_of_the_system(controller: &Controller) {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "critical"},
        "spec": {
            "priorityClassName": "system-node-critical",
            "containers": [{"name": "c", "image": "i"}],
        },
    });
    // The API server compiles a policy a moment after it was applied.
    let refused = async || {
        let made = controller.create("/api/v1/namespaces/default/pods", &pod).await;
        made.status == 403 && String::from_utf8_lossy(&made.body).contains("polis-critical-pods")
    };
    wait_until(SOON, "the refusal of a pod that nothing evicts", refused).await;
    let account = "/api/v1/namespaces/kube-system/serviceaccounts/default";
    let is_there = |found: &Value| found["kind"] == "ServiceAccount";
    becomes(&controller.master(), account, "the account of the system", is_there).await;
    let system = controller.create("/api/v1/namespaces/kube-system/pods", &pod).await;
    assert_eq!(system.status, 201, "{}", String::from_utf8_lossy(&system.body));
}

async fn who_reads_a_secret_is_in_the_audit_log(controller: &Controller) {
    let log = controller.site.data.audit_log();
    eventually("the line in the audit log", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.lines().any(|line| {
            line.contains("\"verb\":\"get\"")
                && line.contains("/api/v1/namespaces/default/secrets/s")
                && line.contains("polis:reconciler")
        })
    })
    .await;
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains(SECRET), "the audit log has contents");
}

async fn what_a_user_changes_is_in_the_log_of_the_node(controller: &Controller) {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "of-ann"},
        "stringData": {"words": SECRET},
    });
    let headers = [
        ("content-type", "application/json"),
        ("impersonate-user", "ann"),
        ("impersonate-group", "system:masters"),
    ];
    let path = "/api/v1/namespaces/default/secrets";
    let body = secret.to_string().into_bytes();
    let made = controller.master().request(http::Method::POST, path, &headers, body).await.unwrap();
    assert_eq!(made.status, 201, "{}", String::from_utf8_lossy(&made.body));
    let who = "kubernetes: create secrets by=polis:reconciler as=ann as_groups=system:masters";
    eventually("the change in the log of the node", || {
        let lines = controller.audited();
        lines.iter().any(|line| {
            line.starts_with(who)
                && line.contains(" namespace=default ")
                && line.contains(" code=201 ")
        })
    })
    .await;
    let lines = controller.audited();
    assert!(lines.iter().all(|line| !line.contains(SECRET)), "{lines:#?}");
    // What the cluster's own programs may do and did is in the file alone.
    let is_routine = |line: &str| line.contains(" by=system:kube-") && line.contains(" code=20");
    assert!(!lines.iter().any(|line| is_routine(line)), "{lines:#?}");
}

async fn parts_that_are_killed_come_back_and_say_how_they_ended() {
    let controller = Controller::ready().await;
    for part in [Part::Scheduler, Part::ApiServer] {
        let before = controller.pid(part);
        controller.kill(part);
        let failed = controller
            .waits("its death to be known", |status| {
                matches!(status.parts.get(&part), Some(PartState::Failed { .. }))
            })
            .await;
        let Some(PartState::Failed { cause }) = failed.parts.get(&part) else { panic!("{part:?}") };
        assert!(cause.contains("was killed by signal 9 (SIGKILL)"), "{cause}");
        controller.waits("it to be back", |status| status.is_ready(part)).await;
        assert_ne!(controller.pid(part), before);
    }
    // etcd that is gone for a moment does not cost a restart.
    let before = [Part::ApiServer, Part::ControllerManager].map(|part| controller.pid(part));
    controller.etcd.kill();
    controller.etcd.waits("to have lost its etcd", |status| status.clients.is_none()).await;
    controller.etcd.voter().await;
    let master = controller.master();
    let ready = async || master.check("/readyz").await.is_ok();
    wait_until(SOON, "the API server is back with etcd", ready).await;
    assert_eq!(controller.pid(Part::ApiServer), before[0]);
    controller.stop().await;
}
