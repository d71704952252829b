//! `polisctl snapshot`: the snapshots of etcd that a cluster has sent to a bucket. Needs no
//! cluster: that is what they are for.
//!
//! ```text
//! list                            fetch
//! bucket --names, sizes--> table  bucket --object--> unfinished file --SHA-256 of its name--> file
//! ```
//!
//! Invariants:
//! - A file has its name only if its SHA-256 is the one in the name of the object.
//!
//! What this module does not do: decrypt one (`etcd decrypt`).

use std::io;
use std::path::{Path, PathBuf};

use polis_base::hex;
use polis_base::sys::clock;
use polis_tui::bytes;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::error::Error;
use super::output::{self, Document};
use super::session::{Limit, within};
use super::table::table;
use super::unfinished::{Unfinished, must_be_new};
use super::units::Time;
use super::{Global, bucket};
use polis_wire::outside;
use polis_wire::s3::{self, Client};
use polis_wire::snapshot::object::Name;

/// Where systems have the public authorities.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Commands about the snapshots of etcd in a bucket.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the snapshots of etcd in a bucket.
    List(Place),
    /// Fetch a snapshot of etcd from a bucket, and check it. It stays encrypted.
    #[command(
        override_usage = "polisctl snapshot fetch [OPTIONS] --out <FILE> --target <URL>\n           \
                                --credentials <FILE> [NAME]"
    )]
    Fetch {
        /// The snapshot, as `list` shows it [default: the newest].
        name: Option<String>,
        /// The path of the new file.
        #[arg(short, long, value_name = "FILE", value_parser = output::file())]
        out: PathBuf,
        #[command(flatten)]
        place: Place,
    },
}

/// A bucket, and the key of it.
#[derive(Debug, clap::Args)]
pub(super) struct Place {
    /// The bucket, as the cluster has it: s3+https://HOST[:PORT]/BUCKET[/PREFIX], with
    /// `,region=REGION` and `,ca=FILE` behind it where the cluster has them.
    #[arg(long, value_name = "URL")]
    target: String,
    /// A file with the key of that store, or `-` for standard input: the access key ID and the
    /// secret access key on two lines, or a file of AWS's tools.
    #[arg(long, value_name = "FILE")]
    credentials: PathBuf,
}

/// A snapshot in a bucket.
#[derive(Debug, Serialize)]
struct View {
    /// The folder of its cluster and its own name.
    object: String,
    /// The folder alone.
    cluster: String,
    /// Its own name, without the checksum.
    name: String,
    begun: Time,
    revision: u64,
    bytes: u64,
    sha256: String,
    #[serde(skip)]
    read: Name,
}

/// Runs the command.
pub(super) async fn run(command: Command, global: &Global) -> Result<(), Error> {
    match command {
        Command::List(place) => {
            let limit = global.timeout.map(Limit::new);
            let views = place.list(&place.client()?, limit, global).await?;
            let row = |view: &View| {
                let begun = view.begun.to_string();
                vec![view.name.clone(), view.cluster.clone(), begun, bytes(view.bytes)]
            };
            let rows: Vec<_> = views.iter().map(row).collect();
            let heads = ["SNAPSHOT", "CLUSTER", "BEGUN", "SIZE"];
            global.out.print(&Document::new(&views, table(&heads, &rows))?)
        }
        Command::Fetch { name, out, place } => {
            must_be_new(&out)?;
            fetch(name.as_deref(), &out, &place, global).await
        }
    }
}

impl Place {
    fn client(&self) -> Result<Client, Error> {
        let there = BUNDLES.iter().find(|file| Path::new(file).exists());
        Ok(Client {
            bucket: bucket::bucket(&self.target, "--target")?,
            credentials: bucket::credentials(&self.credentials)?,
            bundle: PathBuf::from(there.unwrap_or(&BUNDLES[0])),
            clock: clock::now,
        })
    }

    /// The snapshots, in the order of their clusters and times.
    async fn list(
        &self,
        client: &Client,
        limit: Option<Limit>,
        global: &Global,
    ) -> Result<Vec<View>, Error> {
        const WHAT: &str = "list the snapshots";
        let listed = async { client.list("", "").await.map_err(|error| explained(error, WHAT)) };
        let listed = within(limit, WHAT, Box::pin(listed));
        let objects = global.out.waiting(&format!("waiting: {WHAT}"), listed).await?;
        let view = |object: &s3::Object| {
            let (cluster, name) = object.key.rsplit_once('/')?;
            let read = Name::parse(name)?;
            let (short, _checksum) = name.rsplit_once('-')?;
            Some(View {
                object: object.key.clone(),
                cluster: cluster.to_owned(),
                name: short.to_owned(),
                begun: Time(read.time()),
                revision: read.revision,
                bytes: object.size,
                sha256: hex::encode(&read.sha256),
                read,
            })
        };
        Ok(objects.iter().filter_map(view).collect())
    }
}

fn explained(error: s3::Error, what: &str) -> Error {
    let (help, is_late) = (error.help(), is_late(&error));
    let error = anyhow::Error::new(error);
    let error = if is_late { Error::late(error) } else { Error::from(error) };
    let error = error.context(format!("cannot {what}"));
    match help {
        Some(help) => error.or_help(help),
        None => error,
    }
}

/// Whether the store has not answered in time.
fn is_late(error: &s3::Error) -> bool {
    match error {
        s3::Error::Silent { .. } | s3::Error::Connect(outside::Error::Silent { .. }) => true,
        s3::Error::Connect(outside::Error::Connect { source, .. }) => {
            source.kind() == io::ErrorKind::TimedOut
        }
        _ => false,
    }
}

/// The one that is meant.
fn chosen<'a>(views: &'a [View], name: Option<&str>) -> Result<&'a View, Error> {
    let listing = "`polisctl snapshot list` shows what is there";
    if let Some(name) = name {
        let is_it = |view: &&View| {
            let View { object, cluster, name: short, read, .. } = view;
            let names = [object, short, &format!("{cluster}/{short}"), &read.to_string()];
            names.into_iter().any(|known| known == name)
        };
        let found: Vec<_> = views.iter().filter(is_it).collect();
        return match found[..] {
            [view] => Ok(view),
            [] => Err(Error::new(format!("the bucket has no snapshot {name:?}")).or_help(listing)),
            _ => {
                let error = Error::new(format!("the bucket has several snapshots {name:?}"));
                Err(error.or_help("write CLUSTER/SNAPSHOT, or the whole name of the object"))
            }
        };
    }
    let newest = views.iter().max_by_key(|view| view.read);
    let newest = newest.ok_or_else(|| {
        Error::new("the bucket has no snapshot below this prefix")
            .or_help("check the bucket and the prefix of --target against the cluster's")
    })?;
    if views.iter().any(|view| view.cluster != newest.cluster) {
        let error = Error::new("the bucket has snapshots of several clusters");
        return Err(error.or_help(format!("name the one that is meant; {listing}")));
    }
    Ok(newest)
}

async fn fetch(
    name: Option<&str>,
    out: &Path,
    place: &Place,
    global: &Global,
) -> Result<(), Error> {
    const WHAT: &str = "fetch one of the snapshots";
    let client = place.client()?;
    let limit = global.timeout.map(Limit::new);
    let views = place.list(&client, limit, global).await?;
    let view = chosen(&views, name)?;
    let mut file = Unfinished::begin(out)?;
    let (mut digest, mut size) = (Sha256::new(), 0);
    let progress = global.out.progress();
    let mut sink = |piece: &[u8]| {
        digest.update(piece);
        size += piece.len() as u64;
        progress.says(&format!("{} of {}", bytes(size), bytes(view.bytes)));
        file.write(piece).map_err(|error| io::Error::other(error.summary()))
    };
    let got = async {
        let got = client.get(&view.object, view.bytes, &mut sink).await;
        got.map_err(|error| explained(error, WHAT))
    };
    within(limit, WHAT, Box::pin(got)).await?;
    drop(progress);
    if hex::encode(&digest.finalize()) != view.sha256 {
        let error = Error::new(format!(
            "{}/{} is damaged: its SHA-256 is not the one in its name",
            view.cluster, view.name
        ));
        return Err(error.or_help("fetch another one; `polisctl snapshot list` shows them"));
    }
    file.finish()?;
    let value = serde_json::json!({ "file": out.to_string_lossy(), "snapshot": view });
    let text = format!(
        "{} in {}, begun at {}: an owner decrypts it with `polisctl etcd decrypt`",
        bytes(view.bytes),
        out.display(),
        view.begun
    );
    global.out.print(&Document::new(&value, text)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use polis_wire::s3::testing::{Fault, KEY, SECRET, Store};

    use super::*;
    use crate::error::Exit;
    use crate::testing::World;

    /// A world with the files that reach a store.
    fn world(store: &Store) -> (World, String) {
        let world = World::new();
        std::fs::write(world.path("ca.pem"), &store.ca).unwrap();
        let key = world.path("key");
        std::fs::write(&key, format!("{KEY}\n{SECRET}\n")).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        let url = store.url(store.address.port(), "x");
        let ca = world.path("ca.pem").display().to_string();
        (world, format!("{url},region=eu-test-1,ca={ca}"))
    }

    /// Puts a snapshot into the store, and returns its name.
    fn sent(store: &Store, cluster: &str, at: u64, content: &[u8]) -> String {
        let name = Name { at, revision: at / 7, sha256: Sha256::digest(content).into() };
        let key = format!("{cluster}/{name}");
        store.with(|state| state.objects.insert(format!("x/{key}"), content.to_vec()));
        key
    }

    #[test]
    fn a_store_that_does_not_answer_is_a_timeout() {
        let store = Store::start("127.0.0.1");
        let (world, target) = world(&store);
        let listens = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let [store, silent] =
            [store.address, listens.local_addr().unwrap()].map(|at| at.port().to_string());
        let target = target.replace(&store, &silent);
        let place = ["--target", &*target, "--credentials", "@key", "--timeout", "1s"];
        for command in [&["snapshot", "list"][..], &["snapshot", "fetch", "--out", "@new"]] {
            let ended = world.run(&[command, &place].concat());
            assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
            let said = "error: cannot list the snapshots\ncause: timed out after 1.0 s\nhelp: ";
            assert!(ended.stderr.starts_with(said), "{}", ended.stderr);
            assert!(ended.sign.is_some_and(|sign| sign < Duration::from_secs(1)), "no sign");
        }
        let late = s3::Error::Silent { url: "s3".to_owned(), seconds: 15 };
        assert_eq!(explained(late, "list").exit(), Exit::TimedOut);
    }

    #[test]
    fn a_snapshot_is_listed_fetched_and_checked() {
        let store = Store::start("127.0.0.1");
        let (world, target) = world(&store);
        let place = ["--target", &*target, "--credentials", "@key"];
        let list = [&["snapshot", "list"][..], &place].concat();
        let fetch = |more: &[&str]| {
            let command = [&["snapshot", "fetch"][..], more, &place].concat();
            command.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let run = |command: Vec<String>| {
            let command: Vec<_> = command.iter().map(String::as_str).collect();
            world.runs(&command)
        };
        let refuses = |command: Vec<String>| {
            let command: Vec<_> = command.iter().map(String::as_str).collect();
            world.refuses(&command)
        };
        let none = refuses(fetch(&["--out", "@a"]));
        assert!(none.contains("no snapshot below this prefix"), "{none}");
        assert!(none.contains("help: check the bucket and the prefix of --target"), "{none}");
        let first = sent(&store, "c-1", 1_795_694_400, b"first");
        let second = sent(&store, "c-1", 1_795_698_000, b"second");
        store.with(|state| state.objects.insert("x/c-1/notes".to_owned(), b"x".to_vec()));
        let listed = world.runs(&list);
        assert_eq!(listed.lines().count(), 3, "{listed}");
        assert!(listed.contains("20261126T130000Z-256528285  c-1"), "{listed}");
        assert!(listed.contains("2026-11-26 12:00:00 UTC"), "{listed}");
        let json = world.runs(&[&list[..], &["--output", "json"]].concat());
        assert!(json.contains(&second), "{json}");
        let said = run(fetch(&["--out", "@newest"]));
        assert!(said.contains("polisctl etcd decrypt"), "{said}");
        assert_eq!(std::fs::read(world.path("newest")).unwrap(), b"second");
        run(fetch(&["20261126T120000Z-256527771", "--out", "@first"]));
        assert_eq!(std::fs::read(world.path("first")).unwrap(), b"first");

        store.with(|state| state.objects.insert(format!("x/{first}"), b"fir5t".to_vec()));
        let damaged = refuses(fetch(&[&first, "--out", "@damaged"]));
        assert!(damaged.contains("is damaged"), "{damaged}");
        assert!(!world.path("damaged").exists());
        let there = refuses(fetch(&["--out", "@first"]));
        assert!(there.contains("exists already"), "{there}");
        sent(&store, "c-2", 1_795_698_001, b"other");
        let several = refuses(fetch(&["--out", "@b"]));
        assert!(several.contains("several clusters"), "{several}");
        store.with(|state| state.fault = Some(Fault::Refuses(403, "AccessDenied", "")));
        let denied = world.refuses(&list);
        assert!(denied.contains("AccessDenied") && denied.contains("s3:GetObject"), "{denied}");
        assert!(!denied.contains(SECRET), "{denied}");
    }
}
