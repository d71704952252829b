//! `polisctl kubernetes`: the way of a user into Kubernetes, and its state.
//!
//! Kubernetes controllers let users of Polis in on port 6444, by the same certificates as
//! every other port. `kubectl` gets them from `polisctl kubernetes credential`, which its
//! configuration names.
//!
//! ```text
//! kubeconfig --> a controller that serves --> FILE: context, server, CA, how to get a credential
//! kubectl    --> FILE --> credential --> certificate and key --> [6444]
//! ```
//!
//! What this module does not do: talk to Kubernetes for anything but `status` and the authorities
//! in a kubeconfig.

mod kubeconfig;
mod pods;
mod status;

pub(super) use self::kubeconfig::usual as usual_file;

use std::path::PathBuf;
use std::time::Duration;

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::Global;
use super::error::{Error, Explain as _};
use super::session::{self, Session, Target};
use super::watch::Watch;
use super::{output, units};
use polis_base::sys::clock;
use polis_wire::pki::{self, Facts};

/// The parts of a role in the tree of services of a node.
#[derive(Debug)]
struct Branch {
    /// The parts are right below it.
    path: &'static str,
    /// Parts at other places, by their whole names.
    others: &'static [&'static str],
    /// The parts, in the order in which they wait for each other.
    order: &'static [&'static str],
    /// Services beside the parts that are none.
    helpers: &'static [&'static str],
}

const CONTROLLER: Branch = Branch {
    path: "root.workload.controller.",
    others: &["root.workload.mesh"],
    order: &[
        "certificates",
        "apiserver",
        "reconciler",
        "controller-manager",
        "scheduler",
        "access",
        // No other part waits for it.
        "mesh",
    ],
    helpers: &["tokens", "audit"],
};

const WORKER: Branch = Branch {
    path: "root.workload.worker.",
    others: &["root.workload.mesh", "root.runtime.containerd"],
    order: &[
        "mesh",
        "worker-certificates",
        "api-balancer",
        "pod-network",
        "containerd",
        "policy",
        "kubelet",
        "node",
        "kube-proxy",
        "dns",
        "csi",
    ],
    helpers: &["drain", "registries"],
};

/// The state of a service that does its work.
const HEALTHY: &str = "healthy";

/// Between two looks at controllers that are waited for.
const RETRY: Duration = Duration::from_millis(500);

/// Commands about Kubernetes.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Write a context for kubectl into a file, beside those that it has.
    Kubeconfig {
        /// The file [default: the first one in KUBECONFIG, else .kube/config].
        #[arg(short, long, value_name = "FILE", value_parser = output::file())]
        out: Option<PathBuf>,
        /// Name a controller itself, and not the first name of Kubernetes in the configuration
        /// of the cluster.
        #[arg(long)]
        direct: bool,
    },
    /// Print the certificate and the key of the user for kubectl, which runs this by itself.
    Credential,
    /// Show the parts of each controller and worker, the nodes, and the pods that are not well.
    Status(Watch),
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::Kubeconfig { out, direct } => {
            Box::pin(kubeconfig::write(out, direct, global)).await
        }
        Command::Credential => credential(global).await,
        Command::Status(watch) => status::run(watch, global).await,
    }
}

/// The help with a damaged context.
const AGAIN: &str = "the owner takes ownership again: `polisctl cluster take-ownership`; others \
                     ask the owner for a new certificate";

/// Prints an `ExecCredential` of kubectl: it reads that and nothing else.
async fn credential(global: &Global) -> Result<(), Error> {
    let session = Session::open(global).await?;
    let own = session.credentials();
    let facts = Facts::read(&own.certificate)
        .ok_or_else(|| Error::new("the certificate of the context is damaged").or_help(AGAIN))?;
    let key = SigningKey::from_pkcs8_der(&own.key)
        .map_err(|_damaged| Error::new("the key of the context is damaged").or_help(AGAIN))?;
    // A program that runs for weeks asks again when a new certificate can be had.
    let ends = match facts.renewal_due(clock::now()) {
        true => facts.not_after,
        false => facts.renew_at(),
    };
    let credential = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {
            "expirationTimestamp": units::rfc3339(ends),
            "clientCertificateData": pki::certificate_pem(&own.certificate),
            "clientKeyData": pki::key_pem(&key).as_str(),
        },
    });
    global.out.raw(format!("{credential}\n").as_bytes())
}

/// A node with a role of Kubernetes.
#[derive(Debug)]
struct Member {
    id: String,
    target: Target,
    /// Why the node cannot carry the role; empty where it can.
    fault: String,
}

/// The nodes with the role of a controller, those with heartbeats first.
async fn controllers(session: &Session) -> Result<Vec<Member>, Error> {
    let nodes = members(session, |roles| roles.kubernetes_controller.is_some()).await?;
    if nodes.is_empty() {
        return Err(Error::new("no node of the cluster is a Kubernetes controller").or_help(
            "give a voter the role: `polisctl node roles NODE --add kubernetes-controller`",
        ));
    }
    Ok(nodes)
}

/// The nodes with the role of a worker, those with heartbeats first.
async fn workers(session: &Session) -> Result<Vec<Member>, Error> {
    members(session, |roles| roles.kubernetes_worker.is_some()).await
}

async fn members(
    session: &Session,
    has_role: fn(&v1::NodeRoles) -> bool,
) -> Result<Vec<Member>, Error> {
    let mut nodes = session.nodes(&[]).await?;
    nodes.retain(|node| {
        node.state() == v1::NodeState::Up && node.roles.as_ref().is_some_and(has_role)
    });
    nodes.sort_by_key(|node| node.health() != v1::NodeHealth::Healthy);
    let member = |node: v1::NodeInfo| {
        Ok(Member {
            target: session::target(&node)?,
            fault: node.status.map(|status| status.workload_fault).unwrap_or_default(),
            id: node.id,
        })
    };
    nodes.into_iter().map(member).collect()
}

/// Why the API server of a controller does not serve; `None` if it does.
async fn unready(session: &Session, controller: &Member) -> Result<Option<String>, Error> {
    if !controller.fault.is_empty() {
        return Ok(Some(controller.fault.clone()));
    }
    let answer = match session.kubernetes(&controller.target, "/readyz").await {
        Ok(answer) => answer,
        // Before the proxy listens, the node itself knows what is missing.
        Err(error) => {
            let missing = waits_for(session, controller, None).await;
            return Ok(Some(missing.unwrap_or(error.summary())));
        }
    };
    match answer.status {
        200 => Ok(None),
        401 | 403 => Err(Error::new(said(&answer.body))
            .context(format!("{} does not let this user in", controller.id))),
        // An API server that runs says itself why it does not serve: without etcd, the parts
        // behind it fail as well.
        _ => {
            let missing = waits_for(session, controller, Some("apiserver")).await;
            Ok(Some(missing.unwrap_or(said(&answer.body))))
        }
    }
}

/// A part of a role.
#[derive(Debug, serde::Serialize)]
struct Part {
    name: String,
    state: String,
    restarts: u32,
    /// Why it ended last.
    cause: String,
}

/// The parts of a role, as the node itself reports them.
async fn parts(session: &Session, member: &Member, branch: &Branch) -> Result<Vec<Part>, Error> {
    Ok(branch.parts(services(session, &member.target).await?))
}

/// The tree of services of a node, as the node itself reports it.
async fn services(
    session: &Session,
    target: &Target,
) -> Result<Vec<v1::services_response::Service>, Error> {
    let mut client = NodeManagementClient::new(session.node(target).await?);
    let answer = client.services(v1::ServicesRequest {});
    Ok(session.within("list the services", answer).await?.into_inner().services)
}

impl Branch {
    /// Of all services of a node, the parts. A part of a newer version comes last.
    fn parts(&self, services: Vec<v1::services_response::Service>) -> Vec<Part> {
        let part = |service: v1::services_response::Service| {
            let name = self.name(&service.name)?.to_owned();
            let (state, restarts, cause) = (service.state, service.restarts, service.cause);
            Some(Part { name, state, restarts, cause })
        };
        let mut parts: Vec<_> = services.into_iter().filter_map(part).collect();
        let place = |part: &Part| self.order.iter().position(|name| *name == part.name);
        parts.sort_by_key(|part| place(part).unwrap_or(self.order.len()));
        parts
    }

    /// The name of the part that this service is; `None` for any other service.
    fn name<'a>(&self, service: &'a str) -> Option<&'a str> {
        if self.others.contains(&service) {
            return service.rsplit('.').next();
        }
        let name = service.strip_prefix(self.path).filter(|name| !name.contains('.'))?;
        // It only shows the state of the one at the other place.
        let follows = self.others.iter().any(|other| other.rsplit('.').next() == Some(name));
        (!follows && !self.helpers.contains(&name)).then_some(name)
    }
}

/// The first part that the others wait for, if the node says; of those up to `last`.
async fn waits_for(session: &Session, controller: &Member, last: Option<&str>) -> Option<String> {
    let parts = parts(session, controller, &CONTROLLER).await.ok()?;
    first_missing(up_to(&parts, last))
}

/// The parts up to and with this one; all of them without it.
fn up_to<'a>(parts: &'a [Part], last: Option<&str>) -> &'a [Part] {
    let at = last.and_then(|last| parts.iter().position(|part| part.name == last));
    &parts[..at.map_or(parts.len(), |at| at + 1)]
}

fn first_missing(parts: &[Part]) -> Option<String> {
    let Part { name, state, cause, .. } = parts.iter().find(|part| part.state != HEALTHY)?;
    Some(match cause.is_empty() {
        true => format!("waits for {name}, which is {state}"),
        false => format!("waits for {name}, which is {state}: {cause}"),
    })
}

/// The first controller that serves. With `--timeout` it waits for one until then.
async fn serving<'a>(
    session: &Session,
    controllers: &'a [Member],
    global: &Global,
) -> Result<&'a Member, Error> {
    let end = global.timeout.map(|timeout| Instant::now() + timeout);
    let progress = global.out.progress();
    loop {
        let mut reasons = Vec::new();
        for controller in controllers {
            match unready(session, controller).await? {
                None => return Ok(controller),
                Some(reason) => reasons.push(format!("{}: {reason}", controller.id)),
            }
        }
        let reasons = reasons.join("; ");
        let again = Instant::now() + RETRY;
        if end.is_none_or(|end| again >= end) {
            return Err(Error::timed_out(reasons)
                .context("no API server of the cluster is ready")
                .or_help("`polisctl kubernetes status` shows every part; or wait: --timeout 5m"));
        }
        progress.says(&reasons);
        sleep_until(again).await;
    }
}

/// The message of a `Status` object, or the failed checks, or the beginning of the text.
fn said(body: &[u8]) -> String {
    let status: Option<Value> = serde_json::from_slice(body).ok();
    let message = status.as_ref().and_then(|status| status["message"].as_str());
    if let Some(message) = message {
        return message.to_owned();
    }
    let text = String::from_utf8_lossy(body);
    let failed: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("[-]")).collect();
    match failed.is_empty() {
        true => text.trim().chars().take(200).collect(),
        false => failed.join(", "),
    }
}

/// The fields that are read of a list of pods or nodes. The record of who has set which field
/// (`managedFields`) is not: the writer of an object may nest it more deeply than `serde_json`
/// reads.
#[derive(Debug, Default, serde::Deserialize, serde::Serialize)]
#[serde(default)]
struct List {
    metadata: Value,
    items: Option<Vec<Object>>,
}

#[derive(Debug, Default, serde::Deserialize, serde::Serialize)]
#[serde(default)]
struct Object {
    metadata: Metadata,
    spec: Value,
    status: Value,
}

#[derive(Debug, Default, serde::Deserialize, serde::Serialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    namespace: Value,
    name: Value,
    deletion_timestamp: Value,
}

fn listed(text: &[u8]) -> Result<Value, serde_json::Error> {
    let list: List = serde_json::from_slice(text)?;
    serde_json::to_value(list)
}

/// A list of Kubernetes.
async fn read(session: &Session, controller: &Member, path: &str) -> Result<Value, Error> {
    let answer = session.kubernetes(&controller.target, path).await?;
    if answer.status != 200 {
        return Err(Error::new(said(&answer.body)).context(format!("cannot read {path}")));
    }
    listed(&answer.body).doing(|| format!("cannot understand {path}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    fn part(name: &str, state: &str, cause: &str) -> Part {
        let [name, state, cause] = [name, state, cause].map(str::to_owned);
        Part { name, state, restarts: 0, cause }
    }

    #[test]
    fn what_a_controller_waits_for_is_its_first_part_that_does_not_work() {
        let parts = [
            part("certificates", "healthy", ""),
            part("apiserver", "dead", "bind: in use"),
            part("scheduler", "starting", ""),
        ];
        assert_eq!(
            first_missing(&parts).as_deref(),
            Some("waits for apiserver, which is dead: bind: in use")
        );
        assert_eq!(first_missing(&parts[..1]), None);
        let names = |last| up_to(&parts, last).iter().map(|part| &*part.name).collect::<Vec<_>>();
        assert_eq!(names(Some("apiserver")), ["certificates", "apiserver"]);
        assert_eq!(names(Some("mesh")), ["certificates", "apiserver", "scheduler"]);
        assert_eq!(names(None).len(), 3);
    }

    #[test]
    fn the_parts_of_a_worker_are_at_three_places_and_in_order() {
        let service = |name: &str| v1::services_response::Service {
            name: name.to_owned(),
            state: HEALTHY.to_owned(),
            ..Default::default()
        };
        let services = [
            "root.runtime",
            "root.runtime.containerd",
            "root.runtime.pods",
            "root.workload.controller.apiserver",
            "root.workload.mesh",
            "root.workload.worker",
            "root.workload.worker.containerd",
            "root.workload.worker.csi",
            "root.workload.worker.drain",
            "root.workload.worker.future",
            "root.workload.worker.kubelet",
            "root.workload.worker.registries",
            "root.workload.worker.worker-certificates",
        ];
        let parts = WORKER.parts(services.map(service).to_vec());
        let names: Vec<_> = parts.iter().map(|part| &*part.name).collect();
        let expected = ["mesh", "worker-certificates", "containerd", "kubelet", "csi", "future"];
        assert_eq!(names, expected);
    }

    /// A source of the node, which this program does not link.
    fn source(path: &str) -> String {
        let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text = std::fs::read_to_string(sources.join(path)).unwrap();
        text.split("#[cfg(test)]\nmod tests").next().unwrap().to_owned()
    }

    /// The names with which a source of the node starts services: those of the parts, of which
    /// `Part` has the names, and others.
    fn started(path: &str) -> [BTreeSet<String>; 2] {
        let parts = source("workload/src/parts.rs");
        let (source, mut names) = (source(path), [BTreeSet::new(), BTreeSet::new()]);
        for start in source.split("Part::").skip(1) {
            let part = start.split(|c: char| !c.is_alphanumeric()).next().unwrap();
            if start[part.len()..].starts_with(".name()") {
                let name = parts.split_once(&format!("Self::{part} => \"")).unwrap().1;
                names[0].insert(name.split('"').next().unwrap().to_owned());
            }
        }
        for start in source.split("ctx.spawn(\"").skip(1) {
            names[1].insert(start.split('"').next().unwrap().to_owned());
        }
        names
    }

    #[test]
    fn the_parts_and_the_helpers_are_those_that_a_node_starts() {
        let names = |list: &[&str]| -> BTreeSet<String> {
            list.iter().map(|&name| name.to_owned()).collect()
        };
        for (branch, path) in
            [(CONTROLLER, "workload/src/controller.rs"), (WORKER, "workload/src/worker/mod.rs")]
        {
            let [mut parts, helpers] = started(path);
            parts.insert("mesh".to_owned());
            assert_eq!(parts, names(branch.order), "{path}");
            assert_eq!(helpers, names(branch.helpers), "{path}");
        }
        // Each service at another place, by the services above it.
        let [mesh, roles] = started("workload/src/service.rs");
        assert!(mesh.contains("mesh") && roles.contains("worker") && roles.contains("controller"));
        assert!(started("workload/src/runtime/service.rs")[1].contains("containerd"));
        let root = &started("node/src/root/mod.rs")[1];
        for others in [CONTROLLER.others, WORKER.others] {
            for other in others {
                let words: Vec<&str> = other.split('.').collect();
                assert!(words.len() == 3 && root.contains(words[1]), "{other}");
            }
        }
    }

    #[test]
    fn an_answer_is_quoted_by_its_message_or_its_failed_checks() {
        assert_eq!(said(br#"{"kind":"Status","message":"no"}"#), "no");
        assert_eq!(said(b"[+]ping ok\n[-]etcd failed: x\nreadyz check failed"), "etcd failed: x");
        assert_eq!(said(b"404 page not found\n"), "404 page not found");
    }

    #[test]
    fn a_list_is_read_however_deep_the_record_of_the_writers_of_an_object_is() {
        let (begin, end) = (r#"{"f:a":"#.repeat(9_000), "}".repeat(9_000));
        let record = format!(r#"[{{"fieldsV1":{begin}{{}}{end}}}]"#);
        let pod = format!(r#"{{"metadata":{{"managedFields":{record},"name":"a"}}}}"#);
        let text = format!(r#"{{"metadata":{{"continue":"c"}},"items":[{pod}]}}"#);
        serde_json::from_str::<Value>(&text).unwrap_err();
        let list = listed(text.as_bytes()).unwrap();
        assert_eq!(list["metadata"]["continue"], "c");
        assert_eq!(list["items"][0]["metadata"]["name"], "a");
    }

    #[test]
    fn a_credential_is_what_kubectl_reads() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let printed = world.runs(&["kubernetes", "credential", "--output", "table"]);
        let credential: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(credential["apiVersion"], "client.authentication.k8s.io/v1");
        assert_eq!(credential["kind"], "ExecCredential");
        let status = &credential["status"];
        let pem = |field: &str| status[field].as_str().unwrap().to_owned();
        assert!(pem("clientKeyData").starts_with("-----BEGIN PRIVATE KEY-----\n"));
        let der = pki::certificate_der(pem("clientCertificateData").as_bytes()).unwrap();
        let facts = Facts::read(&der).unwrap();
        assert_eq!(facts.subject, "owner");
        assert_eq!(pem("expirationTimestamp"), units::rfc3339(facts.renew_at()));
        assert_eq!(cluster.asked(), [""; 0], "a certificate that is young needs no cluster");
    }

    #[test]
    fn without_a_controller_the_error_names_the_command_for_the_role() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        for command in [&["kubeconfig", "-o", "@kube"][..], &["status"]] {
            let printed = world.refuses(&[&["kubernetes"][..], command].concat());
            assert!(printed.contains("no node of the cluster is a Kubernetes"), "{printed}");
            assert!(printed.contains("--add kubernetes-controller"), "{printed}");
        }
    }

    #[test]
    fn an_api_server_that_starts_says_what_it_waits_for() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        cluster.api_server_starts();
        let ended = world.run(&["kubernetes", "kubeconfig", "-o", "@kube"]);
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
        let id = node_id(NODE);
        let cause = format!("{id}: waits for apiserver, which is starting: no quorum");
        assert!(ended.stderr.contains(&cause), "{}", ended.stderr);
        assert!(!world.path("kube").exists());
        let ended = world.run(&["kubernetes", "status"]);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        assert!(ended.stdout.contains("waits for apiserver"), "{}", ended.stdout);
    }
}
