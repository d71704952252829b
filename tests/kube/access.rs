//! What the roles of the cluster may do in Kubernetes.

use std::time::Duration;

use http::Method;
use polis_node::workload::Api;
use polis_tests::{Story, patiently, story};
use serde_json::{Value, json};

use crate::world::Controller;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads the_roles_of_the_cluster_may_do_what_the_table_says).takes(30)];

/// Longer than the roles of a new cluster take to be whole.
const PATIENCE: Duration = Duration::from_secs(120);

/// What somebody asks for.
struct Question {
    name: &'static str,
    method: Method,
    path: &'static str,
    body: Option<Value>,
}

fn questions() -> Vec<Question> {
    let get = |name, path| Question { name, method: Method::GET, path, body: None };
    let config_map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "c"},
    });
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "n"},
    });
    let post = |name, path, body| Question { name, method: Method::POST, path, body: Some(body) };
    vec![
        get("list config maps", "/api/v1/namespaces/default/configmaps"),
        get("list nodes", "/api/v1/nodes"),
        get("list secrets", "/api/v1/namespaces/default/secrets"),
        get("list cluster roles", "/apis/rbac.authorization.k8s.io/v1/clusterroles"),
        post("create a config map", "/api/v1/namespaces/default/configmaps", config_map),
        post("create a namespace", "/api/v1/namespaces", namespace),
        Question {
            name: "delete config maps",
            method: Method::DELETE,
            path: "/api/v1/namespaces/default/configmaps?labelSelector=none",
            body: None,
        },
        get("logs of a pod", "/api/v1/namespaces/default/pods/none/log"),
        Question {
            name: "exec in a pod",
            method: Method::POST,
            path: "/api/v1/namespaces/default/pods/none/exec?command=x",
            body: None,
        },
    ]
}

/// Asks as somebody whom `api` names.
async fn asked(api: &Api, question: &Question, who: &[(&str, &str)]) -> u16 {
    let mut headers = vec![("content-type", "application/json")];
    headers.extend(who);
    let body = question.body.as_ref().map(Value::to_string).unwrap_or_default();
    let answer = api.request(question.method.clone(), question.path, &headers, body.into_bytes());
    answer.await.unwrap().status
}

/// What a status code says about permission: a pod that does not exist was looked for.
fn word(status: u16) -> &'static str {
    match status {
        200 | 201 | 404 | 400 => "yes",
        403 => "no",
        401 => "who?",
        _ => "?",
    }
}

/// The answers to every question, a row each: for owners, operators, viewers, and others.
async fn table(proxy: &Api) -> Vec<String> {
    let mut table = Vec::new();
    for question in questions() {
        let mut row = vec![format!("{:<20}", question.name)];
        for group in ["polis:owners", "polis:operators", "polis:viewers", "polis:others"] {
            let who = [("x-remote-user", "polis:somebody"), ("x-remote-group", group)];
            row.push(word(asked(proxy, &question, &who).await).to_owned());
        }
        table.push(row.join(" "));
    }
    table
}

async fn the_roles_of_the_cluster_may_do_what_the_table_says() {
    let controller = Controller::ready().await;
    let proxy = controller.api("auth-proxy");
    let expected = [
        "list config maps     yes yes yes no",
        "list nodes           yes yes yes no",
        "list secrets         yes yes no no",
        "list cluster roles   yes no no no",
        "create a config map  yes yes no no",
        "create a namespace   yes no no no",
        "delete config maps   yes yes no no",
        "logs of a pod        yes yes yes no",
        "exec in a pod        yes yes no no",
    ];
    // The controller manager fills the roles `admin` and `view` of a new cluster by and by.
    let mut found = Vec::new();
    let filled = async {
        loop {
            found = table(&proxy).await;
            if found == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let filled = patiently(PATIENCE, filled).await;
    println!("                     owner operator viewer other\n{}", found.join("\n"));
    assert!(filled.is_ok(), "expected was\n{}", expected.join("\n"));

    // Only a proxy names a user: the headers of anybody else, and of nobody, count for nothing.
    let owner = [("x-remote-user", "polis:somebody"), ("x-remote-group", "polis:owners")];
    let nodes = &questions()[1];
    let scheduler = controller.api("scheduler");
    let own = asked(&scheduler, &questions()[3], &[]).await;
    assert_eq!(asked(&scheduler, &questions()[3], &owner).await, own);
    assert_eq!(own, 403);
    let nobody = Api { client: None, ..controller.master() };
    assert_eq!(asked(&nobody, nodes, &owner).await, 401);
    assert_eq!(asked(&nobody, nodes, &[]).await, 401);
    // A component of Kubernetes is no proxy, nor is a proxy a component.
    assert_eq!(asked(&proxy, nodes, &[]).await, 401);
    controller.stop().await;
}
