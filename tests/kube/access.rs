//! The rights of Polis users in Kubernetes, through the proxy and with their certificates.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use polis_tests::{Story, patiently, story};
use polis_wire::pki;
use polis_wire::rpc::{Credentials, Role, provider};
use polis_workload::Api;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::world::{Controller, SOON, kube, kubeconfig, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads the_roles_of_the_cluster_may_do_what_the_table_says).takes(30),
    story!(threads what_a_revoked_user_has_open_ends_within_two_seconds).takes(20),
    story!(threads kubectl_comes_in_with_the_certificate_of_a_user).takes(20),
];

/// The longest that a revoked user may go on.
const CUT_MAX: Duration = Duration::from_secs(2);

const ROLES: [Role; 3] = [Role::Owner, Role::Operator, Role::Viewer];

const SECRETS: &str = "/api/v1/namespaces/default/secrets";

/// The request of a caller.
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
    let system_map = config_map.clone();
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "n"},
    });
    let post = |name, path, body| Question { name, method: Method::POST, path, body: Some(body) };
    vec![
        get("get a config map", "/api/v1/namespaces/default/configmaps/none"),
        get("list config maps", "/api/v1/namespaces/default/configmaps"),
        get("list nodes", "/api/v1/nodes"),
        get("list secrets", SECRETS),
        get("list cluster roles", "/apis/rbac.authorization.k8s.io/v1/clusterroles"),
        post("create a config map", "/api/v1/namespaces/default/configmaps", config_map),
        post("create a namespace", "/api/v1/namespaces", namespace),
        post("change the system", "/api/v1/namespaces/kube-system/configmaps", system_map),
        post(
            "be a controller",
            "/api/v1/namespaces/kube-system/serviceaccounts/default/token",
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}),
        ),
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
        Question {
            name: "port-forward",
            method: Method::POST,
            path: "/api/v1/namespaces/default/pods/none/portforward",
            body: None,
        },
    ]
}

/// The way of one user through the proxy.
struct User<'a> {
    controller: &'a Controller,
    own: Credentials,
}

impl<'a> User<'a> {
    async fn new(controller: &'a Controller, role: Role) -> Self {
        let own = controller.authority.user(role.as_str(), role, role as u8 + 10).await;
        Self { controller, own }
    }

    /// A connection as kubectl makes it.
    async fn connect(&self) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(self.controller.authority.der.clone())).unwrap();
        let key = PrivatePkcs8KeyDer::from(self.own.key.to_vec());
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![CertificateDer::from(self.own.certificate.clone())],
                PrivateKeyDer::Pkcs8(key),
            )
            .unwrap();
        let tcp = TcpStream::connect(self.controller.access).await.unwrap();
        let name = ServerName::try_from(Controller::server_name()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap()
    }

    /// The whole answer to one request, with its head.
    async fn asks(&self, question: &Question, headers: &str) -> String {
        let body = question.body.as_ref().map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{} {} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: \
             application/json\r\ncontent-length: {}\r\n{headers}\r\n{body}",
            question.method,
            question.path,
            body.len()
        );
        let mut connection = self.connect().await;
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = patiently(SOON, connection.read_to_end(&mut answer)).await.unwrap();
        let text = String::from_utf8_lossy(&answer).into_owned();
        assert!(read.is_ok() || !text.is_empty(), "{read:?}");
        text
    }
}

/// The status code of the answer to an owner who asks for the nodes through the proxy.
pub(crate) async fn of_an_owner(controller: &Controller) -> u16 {
    let list =
        Question { name: "list nodes", method: Method::GET, path: "/api/v1/nodes", body: None };
    code(&User::new(controller, Role::Owner).await.asks(&list, "").await)
}

/// The status code of an answer.
fn code(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default()
}

/// The meaning of a status code for permission: a pod that does not exist was looked for.
fn word(status: u16) -> &'static str {
    match status {
        200 | 201 | 404 | 400 => "yes",
        403 => "no",
        401 => "who?",
        _ => "?",
    }
}

/// The answers to every question, a row each: for owners, operators and viewers.
async fn table(users: &[User<'_>]) -> Vec<String> {
    let mut table = Vec::new();
    for question in questions() {
        let mut row = vec![format!("{:<20}", question.name)];
        for user in users {
            row.push(word(code(&user.asks(&question, "").await)).to_owned());
        }
        table.push(row.join(" "));
    }
    table
}

async fn users(controller: &Controller) -> Vec<User<'_>> {
    let mut users = Vec::new();
    for role in ROLES {
        users.push(User::new(controller, role).await);
    }
    users
}

async fn the_roles_of_the_cluster_may_do_what_the_table_says() {
    let controller = Controller::ready().await;
    let users = users(&controller).await;
    let expected = [
        "get a config map     yes yes yes",
        "list config maps     yes yes yes",
        "list nodes           yes yes yes",
        "list secrets         yes yes no",
        "list cluster roles   yes no no",
        "create a config map  yes yes no",
        "create a namespace   yes no no",
        "change the system    yes no no",
        "be a controller      yes no no",
        "delete config maps   yes yes no",
        "logs of a pod        yes yes yes",
        "exec in a pod        yes yes no",
        "port-forward         yes yes no",
    ];
    // The controller manager fills the roles `admin` and `view` of a new cluster by and by.
    let mut found = Vec::new();
    let filled = async {
        loop {
            found = table(&users).await;
            if found == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let filled = patiently(SOON, filled).await;
    println!("                     owner operator viewer\n{}", found.join("\n"));
    assert!(filled.is_ok(), "expected was\n{}", expected.join("\n"));

    nobody_names_another_user(&controller, &users[2]).await;
    drop(users);
    controller.stop().await;
}

async fn nobody_names_another_user(controller: &Controller, viewer: &User<'_>) {
    let secrets = Question { name: "", method: Method::GET, path: SECRETS, body: None };
    for smuggled in [
        "x-remote-user: polis:owner\r\nx-remote-group: polis:owners\r\n",
        "X-Remote-Group: system:masters\r\n",
        "x_remote_group: system:masters\r\n",
        "x-remote-group: system:masters\r\nconnection: x-remote-group\r\n",
        "impersonate-user: polis:owner\r\nimpersonate-group: system:masters\r\n",
        "authorization: Bearer abc\r\n",
    ] {
        let answer = viewer.asks(&secrets, smuggled).await;
        assert_eq!(code(&answer), 403, "{smuggled}: {answer}");
        let refused = ["polis:viewer", "only an owner may act as another user"];
        assert!(refused.iter().any(|text| answer.contains(text)), "{smuggled}: {answer}");
    }
    // Without the proxy, the API server ignores these headers, with and without a certificate.
    let owner = [("x-remote-user", "polis:somebody"), ("x-remote-group", "polis:owners")];
    let status = async |api: &Api, headers: &[(&str, &str)]| {
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
        api.request(Method::GET, path, headers, Vec::new()).await.unwrap().status
    };
    let scheduler = controller.api("scheduler");
    assert_eq!(status(&scheduler, &[]).await, 403);
    assert_eq!(status(&scheduler, &owner).await, 403);
    let anonymous = Api { client: None, ..controller.master() };
    assert_eq!(status(&anonymous, &owner).await, 401);
    assert_eq!(status(&anonymous, &[]).await, 401);
    // A component of Kubernetes is not a proxy, and a proxy is not a component.
    assert_eq!(status(&controller.api("auth-proxy"), &[]).await, 401);
}

async fn what_a_revoked_user_has_open_ends_within_two_seconds() {
    let controller = Controller::ready().await;
    let viewer = User::new(&controller, Role::Viewer).await;
    let owner = User::new(&controller, Role::Owner).await;
    let path = "/api/v1/namespaces?watch=true";
    may_list_namespaces(&viewer).await;
    let plain = format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
    // The API server sends the same watch through a connection that was upgraded, as it does
    // with exec and port-forward.
    let upgraded = format!(
        "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         origin: https://a\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    );
    let mut open = Vec::new();
    for (user, request, head) in [
        (&viewer, &plain, "HTTP/1.1 200"),
        (&viewer, &upgraded, "HTTP/1.1 101"),
        (&owner, &upgraded, "HTTP/1.1 101"),
    ] {
        let mut connection = user.connect().await;
        connection.write_all(request.as_bytes()).await.unwrap();
        let text = read_past(&mut connection, "kube-system").await;
        assert!(text.starts_with(head) && text.contains("\"ADDED\""), "{text}");
        open.push(connection);
    }
    let mut other = open.pop().unwrap();
    let begun = Instant::now();
    controller.access_list.send_modify(|list| {
        Arc::make_mut(list).users.as_mut().unwrap().remove("viewer");
    });
    let cut = async {
        for (mut connection, what) in open.into_iter().zip(["watch", "upgraded watch"]) {
            // Its end may be an error: TLS need not be closed.
            let _end = connection.read_to_end(&mut Vec::new()).await;
            println!("{what} of a revoked user: ended after {:?}", begun.elapsed());
        }
    };
    patiently(CUT_MAX, cut).await.expect("what a revoked user has open ends");
    assert_eq!(controller.metrics.cut.get(), 2, "what management shows");
    // The other user's goes on: a new namespace comes through it.
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "new"}});
    assert_eq!(controller.create("/api/v1/namespaces", &namespace).await.status, 201);
    read_past(&mut other, "\"new\"").await;
    drop((other, viewer, owner));
    controller.stop().await;
}

/// Waits until the controller manager has filled the roles of a new cluster.
async fn may_list_namespaces(user: &User<'_>) {
    let list = Question { name: "", method: Method::GET, path: "/api/v1/namespaces", body: None };
    let filled = async || code(&user.asks(&list, "").await) == 200;
    wait_until(SOON, "a viewer may list namespaces", filled).await;
}

/// Reads until these words have come.
async fn read_past(connection: &mut TlsStream<TcpStream>, words: &str) -> String {
    let mut text = Vec::new();
    let read = async {
        let mut part = vec![0; 4096];
        while !String::from_utf8_lossy(&text).contains(words) {
            let read = connection.read(&mut part).await;
            let so_far = String::from_utf8_lossy(&text);
            let count = read.unwrap_or_else(|error| panic!("{error} after {so_far}"));
            assert_ne!(count, 0, "{so_far}");
            text.extend_from_slice(&part[..count]);
        }
    };
    patiently(SOON, read).await.unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// kubectl, which the image builder makes beside the programs.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
fn program() -> Command {
    Command::new(kube().with_file_name("kubectl"))
}

async fn kubectl_comes_in_with_the_certificate_of_a_user() {
    let controller = Controller::ready().await;
    let folder = tempfile::tempdir().unwrap();
    let owner = User::new(&controller, Role::Owner).await;
    let pem = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let key = {
        use ed25519_dalek::pkcs8::DecodePrivateKey as _;
        pki::key_pem(&ed25519_dalek::SigningKey::from_pkcs8_der(&owner.own.key).unwrap())
    };
    let cluster = json!({
        "server": format!("https://{}", controller.access),
        "tls-server-name": Controller::server_name(),
        "certificate-authority": pem("ca", &pki::certificate_pem(&controller.authority.der)),
    });
    let user = json!({
        "client-certificate": pem("certificate", &pki::certificate_pem(&owner.own.certificate)),
        "client-key": pem("key", &key),
    });
    let file = pem("config", &kubeconfig(&cluster, &user));
    let kubectl = |words: &'static [&'static str]| {
        let mut command = program();
        command.arg("--kubeconfig").arg(&file).arg("--cache-dir").arg(folder.path().join("cache"));
        command.args(words);
        async move {
            let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap();
            let output = output.unwrap();
            let [out, error] = [&output.stdout, &output.stderr]
                .map(|text| String::from_utf8_lossy(text).into_owned());
            (output.status.success(), out, error)
        }
    };
    let (done, out, error) = kubectl(&["get", "namespaces", "-o", "name"]).await;
    assert!(done && out.contains("namespace/kube-system"), "{out}{error}");
    let (done, out, error) = kubectl(&["auth", "whoami", "-o", "json"]).await;
    assert!(done, "{error}");
    let who: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(who["status"]["userInfo"]["username"], "polis:owner");
    assert_eq!(who["status"]["userInfo"]["groups"][0], "polis:owners");
    // The person receives the API server's answer to an upgrade that it cannot make.
    let (done, _out, error) = kubectl(&["exec", "none", "--", "ls"]).await;
    assert!(!done && error.contains("pods \"none\" not found"), "{error}");
    controller.access_list.send_modify(|list| {
        Arc::make_mut(list).users.as_mut().unwrap().remove("owner");
    });
    let (done, _out, error) = kubectl(&["get", "namespaces"]).await;
    assert!(!done && error.contains("certificate"), "{error}");
    drop(owner);
    controller.stop().await;
}
