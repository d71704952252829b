//! The configuration files that the command lines name. Pure.
//!
//! All of them are JSON, which Kubernetes reads wherever it reads YAML.

use std::net::SocketAddr;

use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::credentials::{MASTERS, RECONCILER};
use polis_base::files::{File, Pair};
use polis_wire::pki::{CSI_GROUP, DNS_GROUP, POLICY_GROUP, PROXY_GROUP};

/// The version of the API server's own configuration files.
const VERSION: &str = "apiserver.config.k8s.io/v1";

/// The name of everything in a kubeconfig: it has one cluster and one user.
const NAME: &str = "polis";

/// The paths of health checks, the only ones for anonymous callers.
const HEALTH: [&str; 3] = ["/livez", "/readyz", "/healthz"];

/// Subresources that lead into containers and nodes, and to servers in pods. Over a WebSocket each
/// is a `get`.
const WAYS_IN: [&str; 6] =
    ["pods/exec", "pods/attach", "pods/portforward", "pods/proxy", "services/proxy", "nodes/proxy"];

/// The verbs that change nothing.
pub(super) const READS: [&str; 3] = ["get", "list", "watch"];

/// The users of the programs of a controller, whose reads the audit log leaves out.
const PROGRAMS: [&str; 3] =
    ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"];

/// The groups of the programs of workers, and of the controllers in the controller manager, for
/// the same.
const PROGRAM_GROUPS: [&str; 6] = [
    "system:nodes",
    PROXY_GROUP,
    DNS_GROUP,
    CSI_GROUP,
    POLICY_GROUP,
    "system:serviceaccounts:kube-system",
];

/// The namespace of Polis' own pods, which Pod Security does not restrict.
const SYSTEM_NAMESPACE: &str = "kube-system";

/// The kubeconfig of a client of the API server at `address`. It names files, which clients read
/// again when they change, so a renewed certificate needs no restart.
pub(super) fn kubeconfig(address: SocketAddr, ca: &File, client: &Pair) -> Vec<u8> {
    let cluster = json!({
        "server": format!("https://{address}"),
        "certificate-authority": ca.path(),
    });
    let user = json!({
        "client-certificate": client.certificate.path(),
        "client-key": client.key.path(),
    });
    bytes(&json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NAME, "cluster": cluster}],
        "users": [{"name": NAME, "user": user}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": NAME}}],
        "current-context": NAME,
    }))
}

/// Authentication: only health checks may be anonymous.
pub(super) fn authentication() -> Vec<u8> {
    let conditions: Vec<_> = HEALTH.iter().map(|path| json!({"path": path})).collect();
    bytes(&json!({
        "apiVersion": VERSION,
        "kind": "AuthenticationConfiguration",
        "anonymous": {"enabled": true, "conditions": conditions},
    }))
}

/// Pod Security at *baseline*, for every namespace that does not ask for another level.
pub(super) fn admission() -> Vec<u8> {
    let mut defaults = serde_json::Map::new();
    for mode in ["enforce", "audit", "warn"] {
        defaults.insert(mode.to_owned(), json!("baseline"));
        defaults.insert(format!("{mode}-version"), json!("latest"));
    }
    bytes(&json!({
        "apiVersion": VERSION,
        "kind": "AdmissionConfiguration",
        "plugins": [{
            "name": "PodSecurity",
            "configuration": {
                "apiVersion": "pod-security.admission.config.k8s.io/v1",
                "kind": "PodSecurityConfiguration",
                "defaults": defaults,
                "exemptions": {
                    "usernames": [],
                    "runtimeClasses": [],
                    "namespaces": [SYSTEM_NAMESPACE],
                },
            },
        }],
    }))
}

/// Secrets are encrypted in etcd with `key`, 32 bytes in base64.
pub(super) fn encryption(key: &str) -> Zeroizing<Vec<u8>> {
    let keys = json!([{"name": "1", "secret": key}]);
    Zeroizing::new(bytes(&json!({
        "apiVersion": VERSION,
        "kind": "EncryptionConfiguration",
        "resources": [{
            "resources": ["secrets"],
            // The last one reads what was written before there was a key.
            "providers": [{"secretbox": {"keys": keys}}, {"identity": {}}],
        }],
    })))
}

/// The audit policy: metadata of requests without their contents; no constant reads of the
/// components.
pub(super) fn audit_policy() -> Vec<u8> {
    let health: Vec<_> = HEALTH.iter().map(|path| format!("{path}*")).collect();
    let none = |rule: Value| {
        let mut rule = rule;
        rule["level"] = json!("None");
        rule
    };
    bytes(&json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": true,
        "rules": [
            none(json!({"nonResourceURLs": health})),
            none(json!({"resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]})),
            none(json!({"resources": [
                {"group": "", "resources": ["events"]},
                {"group": "events.k8s.io", "resources": ["events"]},
            ]})),
            // Every access to a Secret is recorded, and every way into a container.
            {"level": "Metadata", "resources": [{"group": "", "resources": ["secrets"]}]},
            {"level": "Metadata", "resources": [{"group": "", "resources": WAYS_IN}]},
            none(json!({
                "users": PROGRAMS,
                "verbs": READS,
            })),
            none(json!({
                "users": [RECONCILER],
                // A user of the cluster may have this name, and never this group.
                "userGroups": [MASTERS],
                "verbs": READS,
            })),
            none(json!({
                "userGroups": PROGRAM_GROUPS,
                "verbs": READS,
            })),
            {"level": "Metadata"},
        ],
    }))
}

/// Whether the audit policy takes a user of this name and these groups for a program of the
/// cluster itself.
pub(super) fn is_own(user: &str, groups: &[String]) -> bool {
    let has = |wanted: &str| groups.iter().any(|group| group == wanted);
    PROGRAMS.contains(&user)
        || PROGRAM_GROUPS.into_iter().any(has)
        || (user == RECONCILER && has(MASTERS))
}

/// Whether a request for this subresource leads into a container or past the API server.
pub(super) fn is_way_in(resource: &str, subresource: &str) -> bool {
    WAYS_IN.iter().any(|way| way.split_once('/') == Some((resource, subresource)))
}

/// JSON, indented.
fn bytes(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use polis_wire::identity::NodeId;
    use polis_wire::pki::{Template, WorkerPurpose};

    use super::super::credentials::Purpose;
    use super::super::site::live;
    use super::*;

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[test]
    fn a_kubeconfig_names_files() {
        let site = live();
        let pair = Purpose::Scheduler.pair(&site.data);
        insta::assert_snapshot!(text(&kubeconfig(site.api(), &site.run.ca, &pair)));
    }

    #[test]
    fn only_health_checks_are_anonymous() {
        insta::assert_snapshot!(text(&authentication()));
    }

    #[test]
    fn pod_security_is_baseline_outside_of_the_system_namespace() {
        insta::assert_snapshot!(text(&admission()));
    }

    #[test]
    fn secrets_are_written_encrypted() {
        insta::assert_snapshot!(text(&encryption("AAAA")));
    }

    #[test]
    fn the_audit_log_leaves_out_the_reads_of_every_program_of_a_node() {
        let policy = text(&audit_policy());
        let node = NodeId::from_public_key(&[7; 32]);
        for purpose in WorkerPurpose::ALL {
            let group = match purpose.certificate(node, None, [1; 32]).template {
                Template::KubernetesClient { subject }
                | Template::KubernetesServer { subject, .. } => subject.group.unwrap(),
                other => panic!("{other:?}"),
            };
            assert!(policy.contains(&format!("\"{group}\"")), "{group}: {policy}");
        }
    }

    #[test]
    fn the_audit_log_has_the_reads_of_a_user_with_the_name_of_the_reconciler() {
        let policy: Value = serde_json::from_slice(&audit_policy()).unwrap();
        let is_there = |rule: &&Value| rule["users"].to_string().contains("\"polis:");
        let rules: Vec<_> = policy["rules"].as_array().unwrap().iter().filter(is_there).collect();
        let expected = json!({
            "level": "None",
            "users": [RECONCILER],
            "userGroups": [MASTERS],
            "verbs": ["get", "list", "watch"],
        });
        assert_eq!(rules, [&expected]);
    }

    #[test]
    fn the_audit_log_has_every_way_into_a_container_whoever_takes_it() {
        let policy: Value = serde_json::from_slice(&audit_policy()).unwrap();
        let rules = policy["rules"].as_array().unwrap();
        for way in WAYS_IN {
            // The first rule that fits counts.
            let fits = |rule: &&Value| {
                let groups = rule["resources"].as_array().into_iter().flatten();
                let mut named = groups.filter_map(|one| one["resources"].as_array()).flatten();
                let all = rule["resources"].is_null() && rule["nonResourceURLs"].is_null();
                all || named.any(|resource| resource == way)
            };
            assert_eq!(rules.iter().find(fits).unwrap()["level"], "Metadata", "{way}");
        }
    }

    /// The level of a request by the rules of the policy, of which the first that fits counts, as
    /// the API server reads them.
    fn level(user: &str, groups: &[&str], verb: &str, what: &str) -> String {
        let policy: Value = serde_json::from_slice(&audit_policy()).unwrap();
        let has = |list: &Value, one: &str| list.as_array().unwrap().iter().any(|it| it == one);
        let fits = |rule: &&Value| {
            let resources = rule["resources"].as_array();
            let paths = rule["nonResourceURLs"].as_array();
            let place = match what.strip_prefix('/') {
                Some(_) => paths.is_some_and(|paths| {
                    let mut paths = paths.iter().map(|path| path.as_str().unwrap());
                    paths.any(|path| what.starts_with(path.trim_end_matches('*')))
                }),
                None => resources.is_some_and(|resources| {
                    let (resource, group) = what.split_once('.').unwrap_or((what, ""));
                    let named =
                        |it: &Value| it["group"] == group && has(&it["resources"], resource);
                    resources.iter().any(named)
                }),
            };
            (place || (resources.is_none() && paths.is_none()))
                && (rule["users"].is_null() || has(&rule["users"], user))
                && (rule["verbs"].is_null() || has(&rule["verbs"], verb))
                && (rule["userGroups"].is_null()
                    || groups.iter().any(|&group| has(&rule["userGroups"], group)))
        };
        let rule = policy["rules"].as_array().unwrap().iter().find(fits).unwrap();
        rule["level"].as_str().unwrap().to_owned()
    }

    #[test]
    fn the_audit_log_has_every_change_and_what_users_read() {
        let (user, node) = (("polis:ann", "polis:owners"), ("system:node:n", "system:nodes"));
        let controllers =
            ("system:serviceaccount:kube-system:job", "system:serviceaccounts:kube-system");
        let scheduler = ("system:kube-scheduler", "system:authenticated");
        for ((name, group), verb, what, expected) in [
            (user, "create", "deployments.apps", "Metadata"),
            (user, "delete", "namespaces", "Metadata"),
            (user, "get", "pods", "Metadata"),
            (user, "list", "configmaps", "Metadata"),
            (user, "create", "serviceaccounts/token", "Metadata"),
            (user, "get", "/metrics", "Metadata"),
            (user, "get", "/livez/ping", "None"),
            (user, "update", "leases.coordination.k8s.io", "None"),
            (user, "create", "events", "None"),
            (user, "create", "events.events.k8s.io", "None"),
            (node, "watch", "pods", "None"),
            (node, "get", "configmaps", "None"),
            (node, "get", "secrets", "Metadata"),
            (node, "patch", "nodes/status", "Metadata"),
            (node, "get", "pods/exec", "Metadata"),
            (controllers, "list", "jobs.batch", "None"),
            (controllers, "create", "pods", "Metadata"),
            (controllers, "get", "nodes/proxy", "Metadata"),
            (scheduler, "watch", "nodes", "None"),
            (scheduler, "create", "pods/binding", "Metadata"),
        ] {
            assert_eq!(level(name, &[group], verb, what), expected, "{name} {verb} {what}");
        }
    }

    #[test]
    fn the_programs_of_the_cluster_are_those_whose_reads_are_left_out() {
        for (user, group, expected) in [
            ("system:kube-scheduler", "system:authenticated", true),
            ("system:node:n", "system:nodes", true),
            (RECONCILER, MASTERS, true),
            (RECONCILER, "polis:operators", false),
            ("system:serviceaccount:default:bot", "system:serviceaccounts:default", false),
            ("polis:ann", "polis:owners", false),
        ] {
            assert_eq!(is_own(user, &[group.to_owned()]), expected, "{user} {group}");
            let read = level(user, &[group], "get", "pods");
            assert_eq!(read == "None", expected, "{user} {group}: {read}");
        }
    }

    #[test]
    fn the_audit_log_has_no_contents() {
        let policy = text(&audit_policy());
        assert!(!policy.contains("\"level\": \"Request"), "{policy}");
        insta::assert_snapshot!(policy);
    }
}
