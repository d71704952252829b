//! `polisctl kubernetes kubeconfig`: a context for kubectl, in a file that may have others.
//!
//! It leads to the first name of Kubernetes in the cluster's configuration, which every controller
//! has a certificate for, or to one controller where the cluster has no name.
//!
//! Invariants:
//! - Entries that this program did not write stay as they are, and so do those that another
//!   program adds meanwhile: kubectl and other users of its library take the same lock.
//! - The file holds no secret: kubectl asks `polisctl` for the key.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64ct::{Base64, Encoding as _};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};

use super::{Member, controllers, said, serving};
use crate::Global;
use crate::contexts;
use crate::error::{Error, Explain as _};
use crate::output::{Document, fields};
use crate::session::Session;
use polis_wire::endpoint::{Endpoint, KUBERNETES_PORT};
use polis_wire::parameters;
use polis_wire::pki;

/// The last words of the command that a context of ours runs.
const CREDENTIAL: [&str; 2] = ["kubernetes", "credential"];

/// The help with a file that cannot be added to.
const ELSEWHERE: &str = "correct it, or write to another file: -o FILE";

/// The hint that kubectl prints if the command is missing.
const HINT: &str = "polisctl prints the credential of a user of Polis. If it was moved, run \
                    `polisctl kubernetes kubeconfig` again.";

/// A name in the certificate of every API server. A client names no address when it connects, so
/// the access proxy would show it the certificate of a node.
const SERVICE: &str = "kubernetes.default.svc";

/// Where each namespace has the authorities of the API servers.
const AUTHORITIES: &str = "/api/v1/namespaces/kube-system/configmaps/kube-root-ca.crt";

/// How long to wait for another program that has the file locked; each has it for milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// How often to try to lock the file meanwhile.
const LOCK_POLL: Duration = Duration::from_millis(50);

/// A context of ours.
struct Entry<'a> {
    name: &'a str,
    api: ApiServer,
    /// The command that prints the credential.
    program: String,
    arguments: Vec<String>,
}

/// Where kubectl connects to, and the certificate that it expects there.
struct ApiServer {
    /// Host and port.
    server: String,
    /// The name in the certificate.
    named: String,
    /// The authorities for the certificate, in PEM.
    ca: String,
}

impl ApiServer {
    /// To this controller, whose certificate of the cluster has its ID and no address.
    fn of_controller(controller: &Member, session: &Session) -> Result<Self, Error> {
        let ca = session.context.ca.as_deref().unwrap_or_default();
        Ok(Self {
            server: session.kubernetes_at(&controller.target)?.to_string(),
            named: controller.id.clone(),
            ca: pki::certificate_pem(ca),
        })
    }

    /// To a name of all controllers. One of them says who signs for their API servers.
    async fn of_name(name: String, from: &Member, session: &Session) -> Result<Self, Error> {
        let answer = session.kubernetes(&from.target, AUTHORITIES).await?;
        let object: Option<Value> = serde_json::from_slice(&answer.body).ok();
        let ca = object.as_ref().and_then(|object| object["data"]["ca.crt"].as_str());
        let ca = ca.filter(|ca| pki::certificates_der(ca.as_bytes()).is_some());
        let Some(ca) = ca.filter(|_| answer.status == 200) else {
            return Err(Error::new(said(&answer.body))
                .context(format!("{} does not name the authorities of Kubernetes", from.id))
                .or_help(
                    "repeat the command: a new cluster has them after some seconds; or name \
                          a controller itself: --direct",
                ));
        };
        let named = match name.parse::<IpAddr>() {
            Ok(_address) => SERVICE.to_owned(),
            Err(_name) => name.clone(),
        };
        let server = Endpoint { host: name, port: KUBERNETES_PORT }.to_string();
        Ok(Self { server, named, ca: ca.to_owned() })
    }
}

/// The first name of Kubernetes in the configuration of the cluster.
async fn first_name(session: &Session) -> Result<Option<String>, Error> {
    let configuration = session.cluster_info().await?.configuration.unwrap_or_default();
    let message = configuration.kubernetes.unwrap_or_default();
    let names = parameters::kubernetes_names(&message, "kubernetes");
    let names = names.doing(|| "cannot read the names of Kubernetes".to_owned())?;
    Ok(names.into_iter().next())
}

/// Writes it; with `direct` to a controller itself.
pub(super) async fn write(
    out: Option<PathBuf>,
    direct: bool,
    global: &Global,
) -> Result<(), Error> {
    let Some(file) = out.or_else(|| global.kubeconfig.clone()) else {
        return Err(Error::new("neither KUBECONFIG nor HOME names a file")
            .or_help("name the file: -o FILE"));
    };
    // A file that cannot be used ends the command before the cluster is asked.
    read(&file)?;
    let session = Session::open(global).await?;
    let nodes = controllers(&session).await?;
    let controller = serving(&session, &nodes, global).await?;
    let name = &session.context.name;
    let all = if direct { None } else { first_name(&session).await? };
    // With a name, any controller answers.
    let node = all.is_none().then_some(controller.id.as_str());
    let api = match all {
        Some(all) => ApiServer::of_name(all, controller, &session).await?,
        None => ApiServer::of_controller(controller, &session)?,
    };
    let server = format!("https://{}", api.server);
    let arguments = arguments(name, global)?;
    let entry = Entry { name, api, program: program()?, arguments };
    add(&file, &entry).await?;
    let next = match global.kubeconfig.as_ref() == Some(&file) {
        true => "`kubectl get namespaces`".to_owned(),
        false => format!("`kubectl --kubeconfig {} get namespaces`", file.display()),
    };
    let shown = file.to_string_lossy();
    let value = json!({"file": shown, "context": name, "server": server, "node": node});
    let lines = [
        ("file", file.display().to_string()),
        ("context", format!("{name}, now in use")),
        ("server", server),
        ("node", node.unwrap_or("any controller").to_owned()),
        ("next", next),
    ];
    global.out.print(&Document::new(&value, fields(&lines))?)
}

/// Adds an entry to a file, which no other program changes meanwhile.
async fn add(file: &Path, entry: &Entry<'_>) -> Result<(), Error> {
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        contexts::private_folder(folder)?;
    }
    let _lock = Lock::take(file).await?;
    // Again: the wait for a controller may have been long.
    let whole = merged(read(file)?, entry)
        .doing(|| format!("cannot add to {}", file.display()))
        .help(|| "write to another file: -o FILE".to_owned())?;
    contexts::write(file, serde_saphyr::to_string(&whole)?.as_bytes())
}

/// The lock of a kubeconfig, as kubectl takes it: a file beside it, with `.lock` behind its name,
/// that the holder creates and removes. A device or a pipe, which keeps no entries, has none.
struct Lock(Option<PathBuf>);

impl Lock {
    /// Waits until no other program has it.
    async fn take(file: &Path) -> Result<Self, Error> {
        if fs::metadata(file).is_ok_and(|there| !there.is_file()) {
            return Ok(Self(None));
        }
        let mut path = file.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let until = Instant::now() + LOCK_WAIT;
        loop {
            match File::create_new(&path) {
                Ok(_created) => return Ok(Self(Some(path))),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).doing(|| format!("cannot create {}", path.display()));
                }
            }
            if Instant::now() >= until {
                let what = format!("another program has {} locked", file.display());
                let path = path.display();
                let help = format!("repeat the command; if no program changes it, remove {path}");
                return Err(Error::timed_out(what).or_help(help));
            }
            sleep(LOCK_POLL).await;
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // One that stays is named by the next command.
            let _removed = fs::remove_file(path);
        }
    }
}

/// The file that kubectl uses: the first one in `KUBECONFIG`, else the one in the home.
pub(crate) fn usual(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let named = variable("KUBECONFIG").unwrap_or_default();
    let first = std::env::split_paths(&named).find(|file| !file.as_os_str().is_empty());
    first.or_else(|| {
        let home = variable("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
        Some(home?.join(".kube/config"))
    })
}

/// This program, as kubectl starts it from any folder.
fn program() -> Result<String, Error> {
    let path = std::env::current_exe().doing(|| "cannot find this program's file".to_owned())?;
    utf8(&path)
}

fn arguments(context: &str, global: &Global) -> Result<Vec<String>, Error> {
    let folder = std::path::absolute(global.contexts.folder())?;
    let mut arguments = vec!["--config".to_owned(), utf8(&folder)?];
    if let Some(file) = &global.passphrase.file {
        arguments.extend(["--passphrase-file".to_owned(), utf8(&std::path::absolute(file)?)?]);
    }
    arguments.extend(["--context", context].map(str::to_owned));
    arguments.extend(CREDENTIAL.map(str::to_owned));
    Ok(arguments)
}

fn utf8(path: &Path) -> Result<String, Error> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        Error::new(format!("{} is not valid UTF-8", path.display()))
            .or_help("rename the file or the folder: kubectl reads its path from a file of UTF-8")
    })
}

/// The document in a file; `None` if the file is missing or empty.
fn read(file: &Path) -> Result<Option<Value>, Error> {
    if file.symlink_metadata().is_err() {
        return Ok(None);
    }
    let bytes = contexts::read_file(file)?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let text = std::str::from_utf8(&bytes)
        .doing(|| format!("cannot understand {}", file.display()))
        .help(|| ELSEWHERE.to_owned())?;
    let read = serde_saphyr::from_str::<Value>(text)
        .doing(|| format!("cannot understand {}", file.display()))
        .help(|| ELSEWHERE.to_owned())?;
    Ok(Some(read).filter(|value| !value.is_null()))
}

/// The document with our entry in it, in use.
fn merged(old: Option<Value>, entry: &Entry<'_>) -> Result<Value, Error> {
    let Value::Object(mut whole) = old.unwrap_or_else(|| json!({})) else {
        return Err(Error::new("it is not a kubeconfig").or_help(ELSEWHERE));
    };
    match whole.get("kind").map(|kind| kind == "Config") {
        None | Some(true) => {}
        Some(false) => return Err(Error::new("it is not a kubeconfig").or_help(ELSEWHERE)),
    }
    whole.insert("apiVersion".to_owned(), json!("v1"));
    whole.insert("kind".to_owned(), json!("Config"));
    let name = entry.name;
    let known = ["clusters", "users", "contexts"];
    let taken = known.iter().any(|list| find(&whole, list, name).is_some());
    let ours = find(&whole, "users", name).is_some_and(is_ours);
    if taken && !ours {
        return Err(Error::new(format!(
            "it has an entry {name:?} that this program has not written"
        ))
        .or_help(ELSEWHERE));
    }
    let namespace = find(&whole, "contexts", name)
        .and_then(|context| context["context"]["namespace"].as_str())
        .map(str::to_owned);
    let cluster = json!({
        "server": format!("https://{}", entry.api.server),
        "tls-server-name": entry.api.named,
        "certificate-authority-data": Base64::encode_string(entry.api.ca.as_bytes()),
    });
    let user = json!({"exec": {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": entry.program,
        "args": entry.arguments,
        "interactiveMode": "IfAvailable",
        "provideClusterInfo": false,
        "installHint": HINT,
    }});
    let mut context = json!({"cluster": name, "user": name});
    if let Some(namespace) = namespace {
        context["namespace"] = json!(namespace);
    }
    let entries = [
        ("clusters", "cluster", cluster),
        ("users", "user", user),
        ("contexts", "context", context),
    ];
    for (list, field, content) in entries {
        put(&mut whole, list, json!({"name": name, field: content}))?;
    }
    whole.insert("current-context".to_owned(), json!(name));
    Ok(Value::Object(whole))
}

/// The entry of a list with this name.
fn find<'a>(whole: &'a Map<String, Value>, list: &str, name: &str) -> Option<&'a Value> {
    whole.get(list)?.as_array()?.iter().find(|one| one["name"] == name)
}

/// Whether an entry of `users` asks this program for its credential.
fn is_ours(user: &Value) -> bool {
    let words = user["user"]["exec"]["args"].as_array().map(Vec::as_slice).unwrap_or_default();
    words.ends_with(&CREDENTIAL.map(Value::from))
}

/// Puts an entry into a list, in the place of the one with its name.
fn put(whole: &mut Map<String, Value>, list: &str, entry: Value) -> Result<(), Error> {
    let found = whole.entry(list).or_insert(Value::Null);
    if found.is_null() {
        *found = json!([]);
    }
    let Value::Array(found) = found else {
        return Err(Error::new(format!("its field {list:?} is not a list")).or_help(ELSEWHERE));
    };
    match found.iter_mut().find(|one| one["name"] == entry["name"]) {
        Some(old) => *old = entry,
        None => found.push(entry),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    fn entry(name: &str) -> Entry<'_> {
        Entry {
            name,
            api: ApiServer { server: String::new(), named: "n".to_owned(), ca: String::new() },
            program: String::new(),
            arguments: CREDENTIAL.map(str::to_owned).to_vec(),
        }
    }

    fn parsed(world: &World, name: &str) -> Value {
        let text = std::fs::read_to_string(world.path(name)).unwrap();
        serde_saphyr::from_str(&text).unwrap()
    }

    #[test]
    fn a_context_names_the_cluster_and_the_way_to_a_credential() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        let printed = world.runs(&["kubernetes", "kubeconfig", "-o", "@kube/config"]);
        assert!(printed.contains("home, now in use"), "{printed}");
        let next = "kubectl --kubeconfig @kube/config get namespaces";
        assert!(printed.contains(next), "kubectl does not look there by itself: {printed}");
        let whole = parsed(&world, "kube/config");
        assert_eq!(whole["current-context"], "home");
        let target = &whole["clusters"][0]["cluster"];
        assert_eq!(target["server"], format!("https://{}", cluster.gateway()));
        assert_eq!(target["tls-server-name"], node_id(NODE).to_string());
        let ca = Base64::decode_vec(target["certificate-authority-data"].as_str().unwrap());
        assert!(String::from_utf8(ca.unwrap()).unwrap().starts_with("-----BEGIN CERTIFICATE"));
        let exec = &whole["users"][0]["user"]["exec"];
        let folder = world.path("polis").display().to_string();
        let words = ["--config", &folder, "--context", "home", "kubernetes", "credential"];
        assert_eq!(exec["args"], json!(words));
        let text = whole.to_string();
        assert!(!text.contains("PRIVATE"), "no secret: {text}");
    }

    #[test]
    fn a_context_leads_to_the_first_name_of_the_cluster_unless_a_controller_is_wanted() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        let target = |words: &[&str]| {
            world.runs(&[&["kubernetes", "kubeconfig", "-o", "@config"][..], words].concat());
            parsed(&world, "config")["clusters"][0]["cluster"].clone()
        };
        let configure = ["cluster", "configure", "--kubernetes-name"];
        let names = ["API.example", "--kubernetes-name", "192.0.2.10"];
        world.runs(&[&configure[..], &names].concat());
        let named = target(&[]);
        assert_eq!(named["server"], "https://api.example:6444");
        assert_eq!(named["tls-server-name"], "api.example");
        let ca = Base64::decode_vec(named["certificate-authority-data"].as_str().unwrap());
        assert_eq!(String::from_utf8(ca.unwrap()).unwrap(), cluster.authority_of_kubernetes());
        let direct = target(&["--direct"]);
        assert_eq!(direct["server"], format!("https://{}", cluster.gateway()));
        assert_eq!(direct["tls-server-name"], node_id(NODE).to_string());
        assert_ne!(direct["certificate-authority-data"], named["certificate-authority-data"]);
        world.runs(&[&configure[..], &["2001:db8::1"]].concat());
        let addressed = target(&[]);
        assert_eq!(addressed["server"], "https://[2001:db8::1]:6444");
        assert_eq!(addressed["tls-server-name"], SERVICE);
        world.runs(&["cluster", "configure", "--no-kubernetes-names"]);
        assert_eq!(target(&[]), direct);
    }

    #[test]
    fn what_a_file_has_already_stays() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        let old = "apiVersion: v1\nkind: Config\npreferences: {colors: true}\nclusters:\n- name: other\n  \
                   cluster: {server: 'https://192.0.2.7:6443'}\nusers:\n- name: other\n  user:\n    \
                   token: \"012\"\ncontexts:\n- name: other\n  context: {cluster: other, user: other}\n\
                   current-context: other\n";
        contexts::write(&world.path("config"), old.as_bytes()).unwrap();
        std::os::unix::fs::symlink(world.path("config"), world.path("link")).unwrap();
        for name in ["@config", "@link"] {
            let printed = world.runs(&["kubernetes", "kubeconfig", "-o", name]);
            assert!(printed.contains(name), "the file as it was named: {printed}");
        }
        assert!(world.path("link").symlink_metadata().unwrap().is_symlink());
        let whole = parsed(&world, "config");
        assert_eq!(whole["preferences"]["colors"], true);
        for list in ["clusters", "users", "contexts"] {
            let names: Vec<_> =
                whole[list].as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
            assert_eq!(names, ["other", "home"], "{list}");
        }
        assert_eq!(whole["users"][0]["user"]["token"], "012");
    }

    #[test]
    fn a_file_that_is_no_configuration_or_has_our_name_is_left_alone() {
        let world = World::new();
        let mut cluster = Cluster::new(&world);
        cluster.has_controller(&world);
        let foreign = "contexts: [{name: home, context: {cluster: a, user: b}}]\n";
        for text in ["kind: Pod\n", "- a\n", "a: [\n", foreign, "clusters: 3\n"] {
            contexts::write(&world.path("config"), text.as_bytes()).unwrap();
            let printed = world.refuses(&["kubernetes", "kubeconfig", "-o", "@config"]);
            assert!(printed.contains("help: "), "{printed}");
            assert_eq!(std::fs::read_to_string(world.path("config")).unwrap(), text);
        }
    }

    #[test]
    fn a_namespace_that_was_chosen_is_kept() {
        let old = json!({
            "users": [{"name": "a", "user": {"exec": {"args": CREDENTIAL}}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a", "namespace": "n"}}],
        });
        let new = merged(Some(old), &entry("a")).unwrap();
        assert_eq!(new["contexts"][0]["context"]["namespace"], "n");
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_programs_that_add_to_a_file_at_once_both_have_their_entry() {
        let world = World::new();
        let file = world.path("config");
        let first = async {
            let _lock = Lock::take(&file).await.unwrap();
            let whole = merged(read(&file).unwrap(), &entry("first")).unwrap();
            sleep(LOCK_POLL * 3).await;
            contexts::write(&file, serde_saphyr::to_string(&whole).unwrap().as_bytes()).unwrap();
        };
        let second = entry("second");
        let ((), added) = tokio::join!(first, add(&file, &second));
        added.unwrap();
        let whole = parsed(&world, "config");
        for list in ["clusters", "users", "contexts"] {
            let names: Vec<_> =
                whole[list].as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
            assert_eq!(names, ["first", "second"], "{list}");
        }
        assert!(!world.path("config.lock").exists());
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_stays_locked_is_left_alone_and_its_lock_is_named() {
        let world = World::new();
        let (file, lock) = (world.path("config"), world.path("config.lock"));
        fs::write(&lock, "").unwrap();
        let error = add(&file, &entry("home")).await.unwrap_err();
        assert_eq!(error.exit(), crate::error::Exit::TimedOut);
        let said = error.render();
        let remedy = format!("if no program changes it, remove {}\n", lock.display());
        assert!(said.contains("config locked") && said.ends_with(&remedy), "{said}");
        assert!(!file.exists() && lock.exists());
        // A device has no lock, and its folder gets no file.
        assert!(Lock::take(Path::new("/dev/null")).await.unwrap().0.is_none());
    }

    #[test]
    fn the_usual_file_is_the_one_of_kubectl() {
        let found = |pairs: &[(&str, &str)]| {
            usual(|name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.into()))
        };
        assert_eq!(found(&[("HOME", "/h")]), Some(PathBuf::from("/h/.kube/config")));
        assert_eq!(found(&[("HOME", "/h"), ("KUBECONFIG", ":/a:/b")]), Some(PathBuf::from("/a")));
        assert_eq!(found(&[]), None);
    }
}
