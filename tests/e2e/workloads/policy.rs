//! NetworkPolicies: the client that a policy names is answered, the other one is refused, and
//! without the policy both are answered.
//!
//! The clients are pods that stay, so each question is one `kubectl exec`; a client that is
//! refused gives up by itself, so the loops here need no pause.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::deadline::Deadline;

use super::IN_DEMO;
use super::kubectl::Kubectl;

/// Two pods of the demo that ask others.
pub(super) const CLIENTS: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: friend, namespace: default, labels: {role: friend}}
spec:
  automountServiceAccountToken: false
  containers:
    - {name: demo, image: 'polis.internal/demo:1', imagePullPolicy: IfNotPresent}
---
apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: default, labels: {role: stranger}}
spec:
  automountServiceAccountToken: false
  containers:
    - {name: demo, image: 'polis.internal/demo:1', imagePullPolicy: IfNotPresent}
";

/// Lets friends in to the demo, and no other pod.
pub(super) const ONLY_FRIENDS: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: only-friends, namespace: demo}
spec:
  podSelector: {matchLabels: {app: demo}}
  policyTypes: [Ingress]
  ingress:
    - from:
        - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}
          podSelector: {matchLabels: {role: friend}}
      ports: [{port: 8080, protocol: TCP}]
";

/// Lets the friend out to no address.
const NO_WAY_OUT: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: no-way-out, namespace: default}
spec:
  podSelector: {matchLabels: {role: friend}}
  policyTypes: [Egress]
";

/// The demo by the name of its Service.
pub(super) const DEMO: &str = "demo.demo.svc.cluster.local:80";

/// Longest from a change of a policy until every node decides by it.
const KNOWN: Duration = Duration::from_secs(180);

/// The result of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The server answered.
    Answered,
    /// Its name was found, and it did not accept the connection.
    Refused,
}

/// Asks `server` from within `pod`. Every other failure, such as a name that is not found, is
/// an error.
pub(super) fn asks(kubectl: &Kubectl, pod: &str, server: &str) -> Result<Outcome> {
    match kubectl.run(&["exec", pod, "--", "/demo", "get", server], "") {
        Ok(answer) => {
            ensure!(answer.contains("pod "), "{server} gave another answer: {answer}");
            Ok(Outcome::Answered)
        }
        Err(error) if format!("{error:#}").contains("connection timed out") => Ok(Outcome::Refused),
        Err(error) => Err(error),
    }
}

/// Asks until `outcome` is what comes of it.
pub(super) fn becomes(
    kubectl: &Kubectl,
    pod: &str,
    server: &str,
    outcome: Outcome,
) -> Result<Duration> {
    let (begun, mut late) = (Instant::now(), Deadline::within(KNOWN));
    while asks(kubectl, pod, server)? != outcome {
        ensure!(!late.is_over(), "{pod} to {server} is not {outcome:?} after {KNOWN:?}");
    }
    Ok(begun.elapsed())
}

/// Shows that policies decide between the pods of a cluster that has [`DEMO`] and [`CLIENTS`].
pub(super) fn decide(kubectl: &Kubectl) -> Result<()> {
    for pod in ["friend", "stranger"] {
        let without = asks(kubectl, pod, DEMO)?;
        ensure!(without == Outcome::Answered, "{pod} without a policy: {without:?}");
    }
    kubectl.apply(ONLY_FRIENDS)?;
    let took = becomes(kubectl, "stranger", DEMO, Outcome::Refused)?;
    println!("the policy was in force after {:.1} s", took.as_secs_f64());
    let friend = asks(kubectl, "friend", DEMO)?;
    ensure!(friend == Outcome::Answered, "the friend with the policy: {friend:?}");
    let stranger = asks(kubectl, "stranger", DEMO)?;
    ensure!(stranger == Outcome::Refused, "the stranger with the policy: {stranger:?}");

    // The name is found, since a client that finds none fails in another way.
    kubectl.apply(NO_WAY_OUT)?;
    becomes(kubectl, "friend", DEMO, Outcome::Refused)?;
    kubectl.run(&["delete", "networkpolicy", "no-way-out"], "")?;
    kubectl.run(&["delete", "networkpolicy", "only-friends", IN_DEMO], "")?;
    for pod in ["friend", "stranger"] {
        becomes(kubectl, pod, DEMO, Outcome::Answered)?;
    }
    Ok(())
}

/// Shows that the probes of kubelet reach a pod although a policy lets no caller in, and that the
/// API server, which is another user of the node, does not.
pub(super) fn spare_the_probes(kubectl: &Kubectl) -> Result<()> {
    const DENY: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: demo}
spec:
  podSelector: {}
  policyTypes: [Ingress]
";
    // It begins under the policy, so no connection to it is older.
    const PROBED: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: probed, namespace: demo}
spec:
  automountServiceAccountToken: false
  containers:
    - name: demo
      image: 'polis.internal/demo:1'
      imagePullPolicy: IfNotPresent
      readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 2}
";
    kubectl.apply(DENY)?;
    becomes(kubectl, "friend", DEMO, Outcome::Refused)?;
    kubectl.apply(PROBED)?;
    let probed = kubectl.ready(&["pod/probed", IN_DEMO]);
    probed.context("the probes of kubelet do not reach the pod")?;
    let path = "/api/v1/namespaces/demo/pods/probed:8080/proxy/";
    let answer = kubectl.run(&["get", "--raw", path, "--request-timeout=10s"], "");
    ensure!(answer.is_err(), "the API server reaches the pod: {answer:?}");
    kubectl.run(&["delete", "networkpolicy", "deny", IN_DEMO], "")?;
    becomes(kubectl, "friend", DEMO, Outcome::Answered)?;
    let answer = kubectl.raw(path)?;
    ensure!(answer.contains("pod "), "the API server reaches the pod: {answer}");
    kubectl.run(&["delete", "pod", "probed", IN_DEMO, "--now"], "")?;
    Ok(())
}
