//! `polisctl cluster registry`: how workers reach registries of images.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use serde::Serialize;
use zeroize::Zeroizing;

use crate::ask::{DryRun, Go, Sure};
use crate::error::{Error, Explain as _};
use crate::output::{Document, or_dash};
use crate::session::Session;
use crate::table::table;
use crate::watch::Watch;
use crate::{Global, bucket, key, units};
use polis_base::sys::clock;
use polis_wire::registry::{self, Registry as Checked};
use polis_wire::rpc::client::Repeat;

/// The commands about registries.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Registry {
    /// List the registries that have an entry.
    List(Watch),
    /// Set how workers reach a registry; options left out are removed.
    ///
    /// Workers follow within seconds, and running pods do not notice. A mirror that has an
    /// entry of its own is reached with the authority and the user of that entry.
    Set {
        /// The host in names of images, with its port where that is not 443; `*` for every
        /// registry without an entry.
        host: String,
        /// A registry with copies of its images, tried before it; repeatable, in this order.
        #[arg(long = "mirror", value_name = "HOST[:PORT][/PATH]")]
        mirrors: Vec<String>,
        /// Certificates in PEM: the authorities for its certificate.
        #[arg(long, value_name = "FILE")]
        ca: Option<PathBuf>,
        /// The user to ask it as.
        #[arg(long, value_name = "NAME", requires = "password_file")]
        username: Option<String>,
        /// A file whose first line is the password or token of that user.
        #[arg(long, value_name = "FILE", requires = "username")]
        password_file: Option<PathBuf>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Delete the entry of a registry.
    Delete {
        /// Its host, as `list` shows it.
        host: String,
        #[command(flatten)]
        sure: Sure,
    },
}

/// A registry, as it is shown.
#[derive(Debug, Serialize)]
struct View {
    host: String,
    mirrors: Vec<String>,
    authorities: Vec<Authority>,
    username: String,
}

#[derive(Debug, Serialize)]
struct Authority {
    subject: String,
    ends: units::Time,
    ended: bool,
}

impl View {
    fn of(registry: &v1::Registry, now: SystemTime) -> Self {
        // The password is not in an answer, and without it a user is refused.
        let named = v1::Registry { username: String::new(), ..registry.clone() };
        let read = Checked::read(&named).map(|read| read.authorities).unwrap_or_default();
        let authority = |one: polis_wire::registry::Authority| Authority {
            subject: one.subject,
            ended: one.not_after <= now,
            ends: units::Time(one.not_after),
        };
        Self {
            host: registry.host.clone(),
            mirrors: registry.mirrors.clone(),
            authorities: read.into_iter().map(authority).collect(),
            username: registry.username.clone(),
        }
    }

    fn row(&self) -> Vec<String> {
        let authority = |one: &Authority| {
            let end = if one.ended { "ended on" } else { "until" };
            format!("{} {end} {}", one.subject, one.ends)
        };
        let authorities: Vec<_> = self.authorities.iter().map(authority).collect();
        vec![
            self.host.clone(),
            or_dash(&self.mirrors.join(", ")),
            or_dash(&authorities.join(", ")),
            or_dash(&self.username),
        ]
    }
}

fn document(registries: &[v1::Registry]) -> Result<Document, Error> {
    let now = clock::now();
    let views: Vec<_> = registries.iter().map(|registry| View::of(registry, now)).collect();
    let rows: Vec<_> = views.iter().map(View::row).collect();
    Document::new(&views, table(&["REGISTRY", "MIRRORS", "AUTHORITIES", "USER"], &rows))
}

/// Runs the command.
pub(super) async fn run(command: Registry, global: &Global) -> Result<(), Error> {
    match command {
        Registry::List(watch) => list(watch, global).await,
        Registry::Set { host, mirrors, ca, username, password_file, dry_run } => {
            let ca = ca.as_deref().map(bucket::authorities).transpose()?.unwrap_or_default();
            let password = password_file.as_deref().map(password).transpose()?;
            let registry = v1::Registry {
                host,
                mirrors,
                ca,
                username: username.unwrap_or_default(),
                password: password.map(|password| password.to_string()).unwrap_or_default(),
            };
            set(registry, dry_run, global).await
        }
        Registry::Delete { host, sure } => {
            let checked = registry::check_name(&host);
            checked.doing(|| format!("the registry {host:?} cannot be deleted"))?;
            let effect =
                format!("The cluster forgets the mirrors, authorities and user of {host}.");
            if sure.of(global, &effect)? == Go::NoFurther {
                return Ok(());
            }
            let session = Session::open(global).await?;
            remove(&host, &session).await?;
            let value = serde_json::json!({ "deleted": host });
            global.out.print(&Document::new(&value, format!("{host} has no entry any more"))?)
        }
    }
}

async fn list(watch: Watch, global: &Global) -> Result<(), Error> {
    let mut session = Session::open(global).await?;
    if watch.is_on() {
        session.go_on();
    }
    let read = async || document(&listed(&session).await?);
    watch.run(global, read).await
}

/// The registries that have an entry, without their passwords.
pub(super) async fn listed(session: &Session) -> Result<Vec<v1::Registry>, Error> {
    let answer = session.call("list the registries", Repeat::Allowed, |channel| async move {
        let request = v1::ListRegistriesRequest {};
        ManagementClient::new(channel).list_registries(request).await
    });
    Ok(answer.await?.registries)
}

/// Sets the entry of a registry; returns it as it is stored.
pub(super) async fn put(
    registry: &v1::Registry,
    session: &Session,
) -> Result<Option<v1::Registry>, Error> {
    let answer = session.call("set the registry", Repeat::Allowed, |channel| {
        let request = v1::SetRegistryRequest { registry: Some(registry.clone()) };
        async move { ManagementClient::new(channel).set_registry(request).await }
    });
    Ok(answer.await?.registry)
}

/// Deletes the entry of a registry.
pub(super) async fn remove(host: &str, session: &Session) -> Result<(), Error> {
    let answer = session.call("delete the registry", Repeat::Allowed, |channel| {
        let request = v1::DeleteRegistryRequest { host: host.to_owned() };
        async move { ManagementClient::new(channel).delete_registry(request).await }
    });
    answer.await.map(drop)
}

async fn set(registry: v1::Registry, dry_run: DryRun, global: &Global) -> Result<(), Error> {
    // The same check as the leader's, made before the password goes anywhere.
    let checked = Checked::read_at(&registry, clock::now());
    checked.doing(|| format!("the registry {:?} cannot be set", registry.host))?;
    let effect = format!("Workers reach {} as given here, and no longer as before.", registry.host);
    if dry_run.of(global, &effect)? == Go::NoFurther {
        return Ok(());
    }
    let session = Session::open(global).await?;
    let stored: Vec<_> = put(&registry, &session).await?.into_iter().collect();
    global.out.print(&document(&stored)?)
}

fn password(file: &Path) -> Result<Zeroizing<String>, Error> {
    let text = key::read_private(file)?;
    let line = text.lines().next().unwrap_or_default();
    if line.is_empty() {
        return Err(Error::new(format!("the first line of {} is empty", file.display()))
            .or_help("write the password on the first line"));
    }
    Ok(Zeroizing::new(line.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn a_registry_is_set_listed_and_deleted() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let password = world.path("password");
        std::fs::write(&password, "s3cret\n").unwrap();
        let set = ["cluster", "registry", "set", "registry.example:5000"];
        let user = ["--username", "ann", "--password-file", "@password"];
        let open = world.refuses(&[&set[..], &user].concat());
        assert!(open.contains("others may read this secret"), "{open}");
        std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o600)).unwrap();
        let arguments = [&set[..], &["--mirror", "mirror.example/hub"], &user].concat();
        let printed = world.runs(&arguments);
        assert!(printed.contains("mirror.example/hub") && printed.contains("ann"), "{printed}");
        for format in ["table", "json"] {
            let printed = world.runs(&["cluster", "registry", "list", "--output", format]);
            assert!(printed.contains("registry.example:5000"), "{printed}");
            assert!(!printed.contains("s3cret"), "{printed}");
        }
        world.runs(&["cluster", "registry", "delete", "registry.example:5000", "--yes"]);
        let asked = ["SetRegistry registry.example:5000", "DeleteRegistry registry.example:5000"];
        assert_eq!(cluster.asked(), asked);
    }

    #[test]
    fn what_cannot_be_is_refused_before_the_cluster_is_asked() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        std::fs::write(world.path("noise"), "noise").unwrap();
        std::fs::write(world.path("empty"), "\n").unwrap();
        let set = ["cluster", "registry", "set"];
        for (rest, said) in [
            (&["registry"][..], "folder of docker.io"),
            (&["a.example", "--mirror", "http://b.example"], "not encrypted"),
            (&["a.example", "--ca", "@noise"], "no certificate in it"),
            (&["a.example", "--ca", "@empty"], "is empty"),
        ] {
            let printed = world.refuses(&[&set[..], rest].concat());
            assert!(printed.contains(said), "{printed}");
        }
        assert_eq!(cluster.asked(), [""; 0]);
    }
}
