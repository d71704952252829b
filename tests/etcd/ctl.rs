//! A person at `polisctl`, against a real curator with a real etcd.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use polis_control::consensus::Start;
use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use polis_tests::{Story, story};
use polis_wire::identity::Fingerprint;
use polis_wire::rpc::client::{Expect, Trust, dial};
use serde_json::Value;
use tonic::Code;

use crate::curators::{Cluster, Curator, leader};
use crate::harness::{Machine, Node};

/// A folder of contexts and keys, and the program.
pub(crate) struct Person {
    folder: tempfile::TempDir,
    endpoint: String,
}

/// How a command ended.
#[derive(Debug)]
struct Ended {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Person {
    fn new(curator: &Curator) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), endpoint: curator.address.to_string() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `polisctl`. A `@name` among the arguments is a file in the folder.
    async fn run(&self, arguments: &[&str]) -> Ended {
        #[expect(clippy::disallowed_methods, reason = "a test on a host reaps its own children")]
        let mut command = tokio::process::Command::new(polis_tests::polisctl().unwrap());
        command.env_clear().env("XDG_CONFIG_HOME", self.folder.path());
        for argument in arguments {
            match argument.strip_prefix('@') {
                Some(name) => command.arg(self.path(name)),
                None => command.arg(OsStr::new(argument)),
            };
        }
        let output = command.stdin(std::process::Stdio::null()).output().await.unwrap();
        Ended {
            status: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The document of a command that must end well.
    async fn json(&self, arguments: &[&str]) -> Value {
        let ended = self.run(&[arguments, &["--output", "json"]].concat()).await;
        assert_eq!(ended.status, 0, "{arguments:?}: {}", ended.stderr);
        serde_json::from_str(&ended.stdout).unwrap()
    }

    /// The output of a command that must be refused.
    async fn refused(&self, arguments: &[&str]) -> String {
        let ended = self.run(arguments).await;
        assert_eq!((ended.status, &*ended.stdout), (1, ""), "{arguments:?}: {}", ended.stderr);
        ended.stderr
    }

    async fn take(&self, more: &[&str]) -> Ended {
        let take = ["cluster", "take-ownership", "--endpoint", &self.endpoint];
        self.run(&[&take, more].concat()).await
    }

    /// Takes ownership as the first thing.
    pub(crate) async fn owns(&self, cluster: &Cluster) {
        let words = Fingerprint::of_certificate(&cluster.authority).words();
        let taken = self.take(&["--fingerprint", &words]).await;
        assert_eq!(taken.status, 0, "{}", taken.stderr);
    }

    fn certificate(&self) -> String {
        let file = self.path("polis/contexts/cluster.internal/certificate.pem");
        std::fs::read_to_string(file).unwrap()
    }

    /// The content of the context.
    fn context(&self) -> (PathBuf, Value) {
        let file = self.path("polis/contexts/cluster.internal/context.json");
        let settings = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        (file, settings)
    }
}

/// A cluster of one, its curator, and its owner's key in the hands of a person.
pub(crate) async fn cluster() -> (Machine, Node, Cluster, Curator, Person) {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    let (cluster, own) = Cluster::found(&machine, &node).await;
    let curator = Curator::start(&machine, &node, own);
    leader(&[&curator], Duration::from_secs(20)).await;
    let person = Person::new(&curator);
    let pem = cluster.owner.to_pkcs8_pem().unwrap();
    std::fs::create_dir(person.path("polis")).unwrap();
    write_private(&person.path("polis/owner.key"), pem.as_bytes());
    (machine, node, cluster, curator, person)
}

fn write_private(file: &std::path::Path, bytes: &[u8]) {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file =
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(file).unwrap();
    file.write_all(bytes).unwrap();
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads ownership_is_taken_only_of_the_cluster_that_was_compared_and_by_its_key),
    story!(threads an_owner_operates_the_cluster_and_lets_others_do_so),
    story!(threads a_certificate_is_renewed_when_two_thirds_of_its_life_are_over),
];

async fn ownership_is_taken_only_of_the_cluster_that_was_compared_and_by_its_key() {
    let (_machine, node, cluster, curator, person) = cluster().await;
    let ca = Fingerprint::of_certificate(&cluster.authority);
    let words = ca.words();

    let asked = person.take(&[]).await;
    assert_eq!(asked.status, 1);
    assert!(asked.stderr.contains("was not verified"), "{}", asked.stderr);
    assert!(asked.stderr.contains("--fingerprint WORDS"), "{}", asked.stderr);

    let other = person.take(&["--fingerprint", "zoo-zoo-zoo-zoo"]).await;
    assert_eq!(other.status, 1);
    assert!(other.stderr.contains(&words), "{}", other.stderr);
    assert!(other.stderr.contains("the connection is intercepted"), "{}", other.stderr);
    assert!(!person.path("polis/contexts").exists(), "nothing is kept of what was not trusted");

    let foreign = rcgen_ca();
    std::fs::write(person.path("foreign.pem"), foreign).unwrap();
    let foreign = person.take(&["--ca", "@foreign.pem", "--timeout", "3s"]).await;
    assert_ne!(foreign.status, 0);
    assert!(foreign.stderr.contains("UnknownIssuer"), "{}", foreign.stderr);

    let untrusted = person.run(&["owner", "create", "-o", "@stranger.key"]).await;
    assert_eq!(untrusted.status, 0);
    let untrusted = person.take(&["--fingerprint", &words, "--owner-key", "@stranger.key"]).await;
    assert_eq!(untrusted.status, 1);
    assert!(untrusted.stderr.contains("this key is not the owner's"), "{}", untrusted.stderr);

    let taken = person.take(&["--fingerprint", &words]).await;
    assert_eq!(taken.status, 0, "{}", taken.stderr);
    let first = person.certificate();
    // The same certificate again; now the CA is known, and nothing is asked.
    let again = person.run(&["cluster", "take-ownership"]).await;
    assert_eq!(again.status, 0, "{}", again.stderr);
    assert_eq!(person.certificate(), first);
    // All digits do as well.
    let again = person.take(&["--fingerprint", &ca.to_string()]).await;
    assert_eq!(again.status, 0, "{}", again.stderr);
    assert_eq!(person.certificate(), first);

    // A call without a certificate is refused, and the message names what it needs.
    let address = curator.address;
    let trust = Trust::in_one(cluster.authority.clone());
    let host = address.ip().to_string();
    let connection = dial(&host, address.port(), Expect::AnyNode, &trust, None).await.unwrap();
    let refused = ManagementClient::new(connection.channel)
        .get_cluster_info(v1::GetClusterInfoRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert!(refused.message().contains("this call needs"), "{}", refused.message());

    curator.supervisor.stop().await;
    node.stop().await;
}

fn rcgen_ca() -> String {
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, "another cluster");
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    parameters.self_signed(&key).unwrap().pem()
}

async fn an_owner_operates_the_cluster_and_lets_others_do_so() {
    let (machine, node, cluster, curator, person) = cluster().await;
    let words = Fingerprint::of_certificate(&cluster.authority).words();
    person.owns(&cluster).await;
    let id = machine.name();

    // As it was when the cluster had other curators.
    let (file, settings) = person.context();
    let mut stale = settings.clone();
    stale.as_object_mut().unwrap().remove("nodes");
    std::fs::write(file, stale.to_string()).unwrap();
    person.json(&["cluster", "status"]).await;
    assert_eq!(person.context().1, settings, "where the curators are now is remembered");

    let info = person.json(&["cluster", "info"]).await;
    assert_eq!((&info["leader"], &info["nodes"]["up"]), (&Value::from(&*id), &Value::from(1)));
    assert_eq!(info["pod_network"], "172.16.0.0/13");
    assert_eq!(info["service_network"], "172.24.0.0/16");
    let nodes = person.json(&["node", "list"]).await;
    assert_eq!(nodes[0]["id"], id);
    assert_eq!(nodes[0]["heartbeat_age_ms"], Value::Null, "no node beats here: {nodes}");
    let configured = person.json(&["cluster", "configure", "--cold-start", "attended"]).await;
    assert_eq!(configured["cold_start"], "attended");
    assert_eq!(configured["storage_security_policy"], info["storage_security_policy"]);
    let servers = ["cluster", "configure", "--time-server", "192.0.2.9,nts"];
    let configured = person.json(&servers).await;
    assert_eq!(configured["time_servers"][0], "192.0.2.9,nts");
    assert_eq!(configured["cold_start"], "attended");
    let none = person.json(&["cluster", "configure", "--no-time-servers"]).await;
    assert_eq!(none["time_servers"], Value::Array(Vec::new()));
    let nothing = person.run(&["cluster", "configure"]).await;
    assert_eq!(nothing.status, 2, "{}", nothing.stderr);
    let labelled = person.json(&["node", "label", &id[6..12], "rack=7", "absent-"]).await;
    assert_eq!(labelled["labels"]["rack"], "7");
    let listed = person.json(&["node", "list", "--label", "rack=8"]).await;
    assert_eq!(listed, Value::Array(Vec::new()));
    let members = person.json(&["etcd", "members"]).await;
    assert_eq!(members[0]["node_id"], id);
    assert_eq!(members[0]["role"], "voter");

    let ticket = person.json(&["cluster", "ticket"]).await;
    assert_eq!(person.json(&["cluster", "ticket"]).await, ticket);
    let rotated = person.json(&["cluster", "ticket", "rotate", "--lifetime", "2h", "--yes"]).await;
    assert_ne!(rotated["ticket"], ticket["ticket"]);
    assert!(rotated["ends"].is_string());
    person.json(&["parameters", "register", "-o", "@joins.pb"]).await;
    let shown = person.json(&["parameters", "show", "@joins.pb"]).await;
    assert_eq!(shown["cluster_register"]["ca_words"], words);

    let saved = person.json(&["etcd", "snapshot", "-o", "@etcd.db"]).await;
    let size = std::fs::metadata(person.path("etcd.db")).unwrap().len();
    assert_eq!(saved["bytes"], size);
    let again = person.refused(&["etcd", "snapshot", "-o", "@etcd.db"]).await;
    assert!(again.contains("exists already"), "{again}");

    // The last member stays, and the refusal gives the reason and the next step.
    let remove = ["node", "roles", &id, "--remove", "consensus-member", "--yes"];
    let last = person.refused(&remove).await;
    assert!(last.contains("help: let another node vote first"), "{last}");
    let up = person.refused(&["node", "delete", &id, "--yes"]).await;
    assert!(up.contains("help: decommission it first"), "{up}");

    let ann = Person::new(&curator);
    assert_eq!(ann.run(&["owner", "create", "-o", "@ann.key"]).await.status, 0);
    let key = ann.path("ann.pub").display().to_string();
    let invitation = ann.path("ann.json").display().to_string();
    let create = ["user", "create", "ann", "--role", "viewer", "--key", &key, "-o", &invitation];
    person.json(&create).await;
    ann.json(&["context", "import", &invitation, "--key", "@ann.key"]).await;
    assert_eq!(ann.json(&["node", "list"]).await[0]["id"], machine.name());
    let refused = ann.refused(&["cluster", "ticket"]).await;
    assert!(refused.contains("this call needs") && refused.contains("viewer ann"), "{refused}");
    person.json(&["user", "revoke", "ann", "--yes"]).await;
    let users = person.json(&["user", "list"]).await;
    let ann_is = users.as_array().unwrap().iter().find(|user| user["name"] == "ann").unwrap();
    assert_eq!(ann_is["revoked"], true);
    let ended = ann.run(&["node", "list", "--timeout", "5s"]).await;
    assert_ne!(ended.status, 0, "a revoked user still sees {}", ended.stdout);

    curator.supervisor.stop().await;
    // The cluster has no leader now: a command that waits exits with a status of its
    // own.
    let late = person.run(&["cluster", "wait", "--timeout", "2s"]).await;
    assert_eq!(late.status, 3, "{}", late.stderr);
    assert!(late.stderr.contains("not healthy after 2.0 s"), "{}", late.stderr);
    // It also names the node that it waits for, where a machine hangs.
    let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = hung.local_addr().unwrap().to_string();
    let wait = ["cluster", "wait", "--timeout", "5s", "--endpoint", &silent];
    let late = person.run(&wait).await;
    assert_eq!(late.status, 3, "{}", late.stderr);
    let whom = format!("{silent} does not answer within 4 seconds");
    assert!(late.stderr.contains(&whom), "{}", late.stderr);
    node.stop().await;
}

async fn a_certificate_is_renewed_when_two_thirds_of_its_life_are_over() {
    let (machine, node, cluster, curator, person) = cluster().await;
    person.owns(&cluster).await;
    assert_eq!(person.run(&["owner", "create", "-o", "@ann.key"]).await.status, 0);
    let created = person.json(&["owner", "show", "@ann.pub"]).await;
    let digits = created["public_key"].as_str().unwrap();
    let key: Vec<u8> =
        (0..32).map(|at| u8::from_str_radix(&digits[2 * at..][..2], 16).unwrap()).collect();
    let key: [u8; 32] = key.try_into().unwrap();
    // Users' certificates live 30 days.
    let days = |days: u64| Duration::from_secs(days * 24 * 60 * 60);
    let now = polis_base::sys::clock::now();
    let role = v1::UserRole::Operator;
    let file = person.path("polis/contexts/ann/certificate.pem");
    let invite = async |name: &str, certificate: &[u8]| {
        let invitation = serde_json::json!({
            "cluster_domain": "cluster.internal",
            "user": name,
            "endpoints": [person.endpoint],
            "ca": polis_wire::pki::certificate_pem(&cluster.authority),
            "certificate": polis_wire::pki::certificate_pem(certificate),
        });
        std::fs::write(person.path("ann.json"), invitation.to_string()).unwrap();
        let import = ["--context", "ann", "context", "import", "@ann.json", "--key", "@ann.key"];
        person.json(&import).await;
        std::fs::read_to_string(&file).unwrap()
    };

    let young = cluster.store.create_user("young", role, &key, now - days(10)).await.unwrap();
    let before = invite("young", &young.der).await;
    assert_eq!(person.json(&["node", "list"]).await[0]["id"], machine.name());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), before, "there is time");

    // One key belongs to one user at a time.
    cluster.store.revoke_user("young", now).await.unwrap();
    let old = cluster.store.create_user("old", role, &key, now - days(25)).await.unwrap();
    let before = invite("old", &old.der).await;
    assert_eq!(person.json(&["node", "list"]).await[0]["id"], machine.name());
    let after = std::fs::read_to_string(&file).unwrap();
    assert_ne!(after, before, "two thirds are over");
    person.json(&["node", "list"]).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), after, "once is enough");

    cluster.store.revoke_user("old", now).await.unwrap();
    let ended = cluster.store.create_user("ended", role, &key, now - days(40)).await.unwrap();
    invite("ended", &ended.der).await;
    let printed = person.refused(&["node", "list"]).await;
    assert!(printed.contains("ended on") && printed.contains("only an owner may"), "{printed}");
    assert!(printed.contains("--context ann context import FILE --key "), "{printed}");

    curator.supervisor.stop().await;
    node.stop().await;
}
