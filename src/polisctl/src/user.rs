//! `polisctl user`: the users of the cluster.
//!
//! ```text
//! they:  polisctl owner create -o my.key        my.pub --> the owner
//! owner: polisctl user create ann --role operator --key my.pub -o ann.json --> they
//! they:  polisctl context import ann.json --key my.key
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use polis_proto::v1;
use polis_proto::v1::aaa_client::AaaClient;
use serde::{Deserialize, Serialize};

use super::ask::{DryRun, Go, Sure};
use super::contexts::{self, Context, Settings};
use super::error::{Error, Explain as _};
use super::output::{Document, fields, or_dash};
use super::session::Session;
use super::table::table;
use super::text::word;
use super::watch::Watch;
use super::{Global, cluster, key, output, ownership, units};
use polis_base::hex;
use polis_wire::pki::{self, Facts};
use polis_wire::rpc::client::Repeat;

/// The usage of `create`: what clap writes has the name last.
const USAGE: &str = "polisctl user create [OPTIONS] <NAME> --role <ROLE> --key <FILE>\n           \
    --out <FILE>";

/// The way of a new user, for the help of `create`.
const STEPS: &str = "A new user, here ann, takes three steps:\n  \
    1. ann, who keeps ann.key and gives ann.pub to an owner:\n     \
       polisctl key create -o ann.key\n  \
    2. an owner, who gives ann.json to ann:\n     \
       polisctl user create ann --role operator --key ann.pub -o ann.json\n  \
    3. ann:\n     \
       polisctl context import ann.json --key ann.key";

/// Commands about users.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Make a user or renew its certificate, and write a file for its context.
    #[command(
        override_usage = USAGE,
        after_help = STEPS
    )]
    Create {
        /// 1 to 64 of a-z, 0-9, dot and dash.
        name: String,
        /// Its role.
        #[arg(long, value_enum)]
        role: Role,
        /// The user's public key, which the user makes with `key create`.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
        /// The file for `context import`, which contains no secret; `-` is standard output.
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// List the users.
    List(Watch),
    /// End a user's access at once.
    Revoke {
        /// Its name.
        name: String,
        #[command(flatten)]
        sure: Sure,
    },
}

/// The roles of users.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(super) enum Role {
    /// Read.
    Viewer,
    /// Read, operate and approve nodes.
    Operator,
    /// Everything.
    Owner,
}

impl From<Role> for v1::UserRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Viewer => Self::Viewer,
            Role::Operator => Self::Operator,
            Role::Owner => Self::Owner,
        }
    }
}

/// The file that a user imports: everything except the key.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Invitation {
    cluster_domain: String,
    user: String,
    endpoints: Vec<String>,
    /// Detours, as in the owner's context.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    via: BTreeMap<String, String>,
    /// Addresses of nodes, as the owner's context has learnt them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    nodes: BTreeMap<String, Vec<String>>,
    /// PEM.
    ca: String,
    /// PEM.
    certificate: String,
}

#[derive(Debug, Serialize)]
struct View {
    name: String,
    role: String,
    revoked: bool,
    /// When its newest certificate ends; `null`: it has none, or an older leader does not say.
    certificate_ends: Option<units::Time>,
    public_key: String,
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::Create { name, role, key, out, dry_run } => {
            let may = word(v1::UserRole::from(role).as_str_name(), "USER_ROLE_");
            let effect = format!("The user {name} gets a certificate of the role {may}.");
            match dry_run.of(global, &effect)? {
                Go::On => create(name, role, &key, &out, global).await,
                Go::NoFurther => Ok(()),
            }
        }
        Command::List(watch) => list(watch, global).await,
        Command::Revoke { name, sure } => {
            let effect = format!(
                "The user {name} loses all access to the cluster at once. Where it is the only \
                 owner who can read a recovery key, save that key first."
            );
            if sure.of(global, &effect)? == Go::NoFurther {
                return Ok(());
            }
            let session = Session::open(global).await?;
            session
                .call("revoke the user", Repeat::Allowed, |channel| {
                    let request = v1::RevokeUserRequest { name: name.clone() };
                    async move { AaaClient::new(channel).revoke_user(request).await }
                })
                .await?;
            let value = serde_json::json!({ "revoked": name });
            global.out.print(&Document::new(&value, format!("{name} no longer has access"))?)
        }
    }
}

async fn list(watch: Watch, global: &Global) -> Result<(), Error> {
    let mut session = Session::open(global).await?;
    if watch.is_on() {
        session.go_on();
    }
    let read = async || {
        let answer = session.call("list the users", Repeat::Allowed, |channel| async move {
            AaaClient::new(channel).list_users(v1::ListUsersRequest {}).await
        });
        let v1::ListUsersResponse { users, certificate_ends } = answer.await?;
        let ends = |user: &v1::User| certificate_ends.get(&user.name).copied();
        let views: Vec<_> = users.iter().map(|user| view(user, ends(user))).collect();
        let row = |view: &View| {
            let revoked = if view.revoked { "yes" } else { "no" };
            vec![
                view.name.clone(),
                view.role.clone(),
                revoked.to_owned(),
                or_dash(&units::text(view.certificate_ends)),
                view.public_key.clone(),
            ]
        };
        let rows: Vec<_> = views.iter().map(row).collect();
        let heads = ["NAME", "ROLE", "REVOKED", "CERTIFICATE ENDS", "PUBLIC KEY"];
        Document::new(&views, table(&heads, &rows))
    };
    watch.run(global, read).await
}

fn view(user: &v1::User, ends: Option<i64>) -> View {
    View {
        name: user.name.clone(),
        role: word(user.role().as_str_name(), "USER_ROLE_"),
        revoked: user.revoked,
        certificate_ends: ends.and_then(units::since_1970).map(units::Time),
        public_key: hex::encode(&user.public_key),
    }
}

async fn create(
    name: String,
    role: Role,
    key: &Path,
    out: &Path,
    global: &Global,
) -> Result<(), Error> {
    let public_key = key::read_public(key, &global.passphrase).help(|| {
        format!("{name} makes a key with `polisctl key create -o FILE`, and gives you FILE.pub")
    })?;
    let is_stdout = output::is_stdout(out);
    match is_stdout {
        true => global.out.gives("the file of the user")?,
        false => key::keep(out)?,
    }
    let session = Session::open(global).await?;
    let info = session.cluster_info().await?;
    let request = v1::CreateUserRequest {
        name: name.clone(),
        role: v1::UserRole::from(role).into(),
        public_key: public_key.to_vec(),
    };
    let answer = session
        .call("make the user", Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { AaaClient::new(channel).create_user(request).await }
        })
        .await?;
    // Endpoints of the command line take precedence, as for the command itself.
    let settings = match global.endpoints.is_empty() {
        true => session.context.settings.clone(),
        false => Settings {
            endpoints: global.endpoints.iter().map(ToString::to_string).collect(),
            ..session.context.settings.clone()
        },
    };
    let invitation = Invitation {
        cluster_domain: cluster::info::domain(&info),
        user: name.clone(),
        endpoints: settings.endpoints,
        via: settings.via,
        nodes: settings.nodes,
        ca: pki::certificate_pem(&answer.ca_certificate),
        certificate: pki::certificate_pem(&answer.certificate),
    };
    let json = serde_json::to_string_pretty(&invitation)?;
    if is_stdout {
        return global.out.raw(format!("{json}\n").as_bytes());
    }
    contexts::write(out, json.as_bytes())?;
    let ends = Facts::read(&answer.certificate).map(|facts| units::Time(facts.not_after));
    let file = out.to_string_lossy();
    let value = serde_json::json!({ "user": name, "file": file, "certificate_ends": ends });
    let lines = [
        ("user", name),
        ("certificate ends", units::text(ends)),
        ("next", format!("the user runs `polisctl context import {} --key FILE`", out.display())),
    ];
    global.out.print(&Document::new(&value, fields(&lines))?)
}

/// Makes a context from a file of the owner.
pub(super) fn import(file: &Path, key_file: &Path, global: &Global) -> Result<(), Error> {
    let bytes = contexts::read_file(file)?;
    let invitation: Invitation = serde_json::from_slice(&bytes)
        .doing(|| format!("{} is not a file of `user create`", file.display()))
        .help(|| "name the file that an owner wrote by `polisctl user create`".to_owned())?;
    let ca = contexts::certificate(file, invitation.ca.as_bytes())?;
    let certificate = contexts::certificate(file, invitation.certificate.as_bytes())?;
    let key_file = std::path::absolute(key_file)?;
    // The private half: every later command proves it.
    let public = key::read(&key_file, &global.passphrase)?.verifying_key().to_bytes();
    if Facts::read(&certificate).is_none_or(|facts| facts.public_key != public) {
        return Err(Error::new(format!("the certificate is not for {}", key_file.display()))
            .or_help("name the key of which the owner has the public half"));
    }
    let name = match &global.context {
        Some(name) => name.clone(),
        None => {
            let domain = contexts::name(&invitation.cluster_domain).map_err(Error::new)?;
            global.contexts.free_name(&domain, &ca)?
        }
    };
    let known = global.contexts.find_context(&name)?;
    if known.as_ref().and_then(|known| known.ca.as_ref()).is_some_and(|known| *known != ca) {
        return Err(ownership::another_cluster(&name));
    }
    let mut context = known.unwrap_or_else(|| Context::new(&name));
    context.settings.endpoints = invitation.endpoints;
    context.settings.via.extend(invitation.via);
    context.settings.nodes = invitation.nodes;
    context.settings.user = invitation.user;
    context.settings.key = key_file;
    (context.ca, context.certificate) = (Some(ca), Some(certificate));
    global.contexts.save(&context)?;
    global.contexts.set_current(&name)?;
    let value = serde_json::json!({ "context": name, "user": context.settings.user });
    global.out.print(&Document::new(&value, format!("{name} is in use"))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contexts::Contexts;
    use crate::loopback::{Cluster, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn the_context_of_a_user_leads_wherever_the_owner_s_does() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let key = ["--key", "@owner.key"];
        let create = ["user", "create", "ann", "--role", "viewer", "-o", "@ann.json"];
        world.runs(&[&create[..], &key].concat());
        world.runs(&[&["--context", "ann", "context", "import", "@ann.json"][..], &key].concat());
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let (owner, ann) = (contexts.load("home").unwrap(), contexts.load("ann").unwrap());
        let user = "ann".to_owned();
        assert_eq!(ann.settings, Settings { user, ..owner.settings });
        assert_eq!(ann.ca, owner.ca);
        // The node's own address cannot be reached from here.
        cluster.asked();
        let id = node_id(NODE).to_string();
        world.runs(&["--context", "ann", "node", "status", &id]);
        assert_eq!(cluster.asked(), ["GetStatus"]);
    }

    #[test]
    fn a_list_of_users_says_when_each_certificate_ends() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        let listed = world.runs(&["user", "list"]);
        let words = |line: usize| listed.lines().nth(line).unwrap().split_whitespace();
        let heads = ["NAME", "ROLE", "REVOKED", "CERTIFICATE", "ENDS"];
        assert_eq!(words(0).collect::<Vec<_>>()[..5], heads);
        let ends = ["owner", "owner", "no", "2023-11-14", "22:13:20", "UTC"];
        assert_eq!(words(1).take(6).collect::<Vec<_>>(), ends);
        let listed: serde_json::Value =
            serde_json::from_str(&world.runs(&["user", "list", "--output", "json"])).unwrap();
        assert_eq!(listed[0]["certificate_ends"], "2023-11-14T22:13:20Z");
        // An older leader, and a user whose access was revoked.
        let user = v1::User { name: "ann".to_owned(), revoked: true, ..Default::default() };
        assert_eq!(view(&user, None).certificate_ends, None);
    }

    #[test]
    fn the_file_for_a_user_may_be_standard_output_without_a_document() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let create = ["user", "create", "ann", "--role", "viewer", "--key", "@owner.key"];
        let create = [&create[..], &["-o", "-"]].concat();
        let ended = world.run(&[&create[..], &["--output", "json"]].concat());
        assert_eq!((ended.status, &*ended.stdout), (2, ""), "{}", ended.stderr);
        assert_eq!(cluster.asked(), [""; 0]);
        let read: Invitation = serde_json::from_str(&world.runs(&create)).unwrap();
        assert_eq!(read.user, "ann");
    }

    #[test]
    fn the_file_for_a_user_never_takes_the_place_of_a_private_key() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let key = std::fs::read(world.path("owner.key")).unwrap();
        let create = ["user", "create", "ann", "--role", "viewer", "--key", "@owner.key"];
        let refused = world.refuses(&[&create[..], &["-o", "@owner.key"]].concat());
        assert!(refused.contains("never overwritten"), "{refused}");
        assert_eq!(std::fs::read(world.path("owner.key")).unwrap(), key);
        assert_eq!(cluster.asked(), [""; 0]);
    }

    #[test]
    fn two_clusters_of_one_name_get_contexts_of_two_names() {
        let (world, elsewhere) = (World::new(), World::new());
        let _first = Cluster::new(&world);
        let _second = Cluster::new(&elsewhere);
        let create = ["user", "create", "ann", "--role", "viewer", "-o", "@ann.json"];
        let key = ["--key", "@owner.key"];
        world.runs(&[&create[..], &key].concat());
        elsewhere.runs(&[&create[..], &key].concat());
        let other = elsewhere.path("ann.json").display().to_string();
        let import = |file: &str| {
            let said = world.runs(&["context", "import", file, "--key", "@owner.key"]);
            said.trim().trim_end_matches(" is in use").to_owned()
        };
        let first = import("@ann.json");
        assert_eq!(import(&other), format!("{first}-2"));
        // The same cluster keeps its context.
        assert_eq!(import("@ann.json"), first);
        assert_eq!(import(&other), format!("{first}-2"));
    }

    #[test]
    fn a_connection_that_fails_names_its_own_cause() {
        let (world, elsewhere) = (World::new(), World::new());
        let _cluster = Cluster::new(&world);
        let foreign = Cluster::new(&elsewhere);
        let id = node_id(NODE).to_string();
        let printed = world.refuses(&["node", "status", &id, "--at", &foreign.address()]);
        assert!(printed.contains("belongs to another cluster"), "{printed}");
        assert!(printed.contains(&foreign.address()) && !printed.contains("clock"), "{printed}");
        // A forwarded port without a target: connections are accepted and closed.
        let forwarded = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = forwarded.local_addr().unwrap().to_string();
        let ends = std::thread::spawn(move || drop(forwarded.accept().unwrap()));
        let printed = world.refuses(&["node", "status", &id, "--at", &at]);
        ends.join().unwrap();
        assert!(printed.contains("accepts connections and closes them"), "{printed}");
        assert!(!printed.contains("another cluster") && !printed.contains("clock"), "{printed}");
    }

    #[test]
    fn what_an_owner_wrote_before_there_were_detours_can_be_imported() {
        let text = r#"{"cluster_domain":"a","user":"b","endpoints":[],"ca":"","certificate":""}"#;
        let read: Invitation = serde_json::from_str(text).unwrap();
        assert!(read.via.is_empty() && read.nodes.is_empty());
    }
}
