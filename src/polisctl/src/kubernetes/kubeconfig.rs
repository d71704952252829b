//! `polisctl kubernetes kubeconfig`: a context for kubectl, in a file that may have others.
//!
//! Invariants:
//! - Entries that this program did not write stay as they are.
//! - The file holds no secret: kubectl asks `polisctl` for the key.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use base64ct::{Base64, Encoding as _};
use serde_json::{Map, Value, json};

use super::{controllers, serving};
use crate::Global;
use crate::contexts;
use crate::error::{Error, Explain as _};
use crate::output::{Document, fields};
use crate::session::Session;
use polis_wire::pki;

/// The last words of the command that a context of ours runs.
const CREDENTIAL: [&str; 2] = ["kubernetes", "credential"];

/// The help with a file that cannot be added to.
const ELSEWHERE: &str = "correct it, or write to another file: -o FILE";

/// The hint that kubectl prints if the command is missing.
const HINT: &str = "polisctl prints the credential of a user of Polis. If it was moved, run \
                    `polisctl kubernetes kubeconfig` again.";

/// A context of ours.
struct Entry<'a> {
    name: &'a str,
    server: String,
    /// The node, whose certificate has its ID and no address.
    node: &'a str,
    ca: &'a [u8],
    /// The command that prints the credential.
    program: String,
    arguments: Vec<String>,
}

/// Writes it.
pub(super) async fn write(out: Option<PathBuf>, global: &Global) -> Result<(), Error> {
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
    let entry = Entry {
        name,
        server: format!("https://{}", session.kubernetes_at(&controller.target)?),
        node: &controller.id,
        ca: session.context.ca.as_deref().unwrap_or_default(),
        program: program()?,
        arguments: arguments(name, global)?,
    };
    // Again: the wait for a controller may have been long.
    let whole = merged(read(&file)?, &entry)
        .doing(|| format!("cannot add to {}", file.display()))
        .help(|| "write to another file: -o FILE".to_owned())?;
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        contexts::private_folder(folder)?;
    }
    contexts::write(&file, serde_saphyr::to_string(&whole)?.as_bytes())?;
    let Entry { server, node, .. } = entry;
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
        ("node", node.to_owned()),
        ("next", next),
    ];
    global.out.print(&Document::new(&value, fields(&lines))?)
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
        "server": entry.server,
        "tls-server-name": entry.node,
        "certificate-authority-data": Base64::encode_string(pki::certificate_pem(entry.ca).as_bytes()),
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
        let entry = Entry {
            name: "a",
            server: String::new(),
            node: "n",
            ca: &[],
            program: String::new(),
            arguments: Vec::new(),
        };
        let new = merged(Some(old), &entry).unwrap();
        assert_eq!(new["contexts"][0]["context"]["namespace"], "n");
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
