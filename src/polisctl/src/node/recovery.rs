//! `polisctl node recovery-key`: the recovery key of a node's disk.
//!
//! The cluster keeps a copy until an owner has saved the key, encrypted to those who were owners
//! when the node committed: this program decrypts it. The cluster has no record of whether it was
//! ever shown. So the command that deletes the copy asks for a proof: the operator
//! types one group of the key, which is compared with the cluster's copy.
//!
//! A disk in another computer is opened without Polis: slot 1 of its LUKS header takes the key as
//! hexadecimal digits, which `passphrase` makes of the saved text.
//!
//! Invariants:
//! - The cluster's copy is deleted only for an operator who has the key.
//! - A saved key comes from a terminal without echo, from a file or from standard input; never from
//!   the command line, which every process on the machine can read.

use std::path::{Path, PathBuf};

use polis_proto::v1;
use polis_proto::v1::management_client::ManagementClient;
use rand::RngExt as _;
use zeroize::Zeroizing;

use super::called;
use crate::ask::{DryRun, Go};
use crate::error::{Error, Explain as _};
use crate::output::{Document, Format};
use crate::session::Session;
use crate::{Global, ask, key};
use polis_base::hex;
use polis_base::recovery::form;
use polis_wire::age;
use polis_wire::rpc::client::Repeat;

/// Arguments of `node recovery-key`.
#[derive(Debug, clap::Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "polisctl node recovery-key [OPTIONS] <NODE>\n       \
                      polisctl node recovery-key [OPTIONS] <COMMAND>"
)]
pub(crate) struct Arguments {
    /// The node whose key to print.
    #[arg(required = true)]
    node: Option<String>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Print the key.
    Show {
        /// The node.
        node: String,
    },
    /// Delete the cluster's copy of a saved key.
    ///
    /// Asks for a part of the key: the cluster does not know whether it was ever shown, and
    /// without its copy it cannot show it again.
    Forget {
        /// The node.
        node: String,
        /// A file with the saved key, for use without a terminal.
        #[arg(long, value_name = "FILE")]
        recovery_key_file: Option<PathBuf>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Print the passphrase by which a saved key opens the disk in another computer.
    ///
    /// `cryptsetup open --key-slot 1 --key-file -` reads it from standard input. It has no line
    /// feed, which cryptsetup would count. Needs no cluster.
    Passphrase {
        /// A file with the saved key; `-` is standard input [default: asked for].
        #[arg(long, value_name = "FILE")]
        recovery_key_file: Option<PathBuf>,
    },
}

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    match (arguments.command, arguments.node) {
        (Some(Command::Forget { node, recovery_key_file, dry_run }), _) => {
            let effect =
                format!("The cluster deletes its copy of the recovery key of {node} for good.");
            match dry_run.of(global, &effect)? {
                Go::On => forget(&node, recovery_key_file.as_deref(), global).await,
                Go::NoFurther => Ok(()),
            }
        }
        (Some(Command::Passphrase { recovery_key_file }), _) => {
            passphrase(recovery_key_file.as_deref(), global)
        }
        (Some(Command::Show { node }), _) | (None, Some(node)) => show(&node, global).await,
        (None, None) => Err(Error::usage("name the node")),
    }
}

/// The key of a node in the cluster's records.
async fn read(session: &Session, node_id: &str) -> Result<Zeroizing<String>, Error> {
    let request = v1::GetRecoveryKeyRequest { node_id: node_id.to_owned() };
    let answer = session.call("read the recovery key", Repeat::Allowed, |channel| {
        let request = request.clone();
        async move { ManagementClient::new(channel).get_recovery_key(request).await }
    });
    let encrypted = answer.await?.encrypted_recovery_key;
    let mut key = Zeroizing::new(Vec::with_capacity(form::SIZE));
    age::decrypt(session.identity(), &*encrypted, &mut *key).map_err(|error| {
        let help = match &error {
            age::Error::OtherRecipients { .. } => {
                "an owner of the time when the node joined can read it; if all of them are gone, \
                 decommission the node, and register it again with an empty disk"
            }
            _ => {
                "its record in etcd is damaged: decommission the node, and register it again with \
                 an empty disk"
            }
        };
        let cannot = format!("cannot read the recovery key of {node_id}");
        Error::from(anyhow::Error::new(error)).context(cannot).or_help(help)
    })?;
    let key = <&[u8; form::SIZE]>::try_from(key.as_slice());
    let key = key.doing(|| format!("the recovery key of {node_id} is damaged"))?;
    Ok(form::write(key))
}

async fn show(node: &str, global: &Global) -> Result<(), Error> {
    let session = Session::open(global).await?;
    let node_id = session.find(node).await?.id;
    let key = read(&session, &node_id).await?;
    global.out.remark(&format!(
        "Write it down and keep it away from the machine. Then delete the cluster's copy: \
         `polisctl node recovery-key forget {node_id}`"
    ));
    let value = serde_json::json!({ "node": node_id, "recovery_key": *key });
    global.out.print(&Document::new(&value, key.as_str())?)
}

async fn forget(node: &str, file: Option<&Path>, global: &Global) -> Result<(), Error> {
    let instead = "name the saved key: --recovery-key-file FILE";
    let saved = match file {
        Some(file) => {
            let text = key::read_private(file)?;
            Some(form::read(&text).doing(|| format!("{} contains no key", file.display()))?)
        }
        None if global.out.streams.has_person() => None,
        None => return Err(ask::no_person(instead)),
    };
    let mut session = Session::open(global).await?;
    let found = session.find(node).await?;
    let (name, node_id) = (called(&found), found.id);
    let key = read(&session, &node_id).await?;
    let knows = match saved {
        Some(saved) => *saved == *form::read(&key)?,
        None => {
            let groups: Vec<&str> = key.split('-').collect();
            let number = rand::rng().random_range(0..groups.len());
            let question = format!(
                "The cluster deletes its copy of the recovery key of {name} for good. Type \
                 group {} of {} of the saved key:",
                number + 1,
                groups.len()
            );
            let typed = Zeroizing::new(ask::answer(global, &question, instead)?);
            session.begin_anew();
            is_group(&typed, groups[number])
        }
    };
    if !knows {
        return Err(Error::new(format!(
            "that is not the recovery key of {name}: the cluster keeps its copy"
        ))
        .or_help(format!("save it first: `polisctl node recovery-key show {node_id}`")));
    }
    let request = v1::ConfirmRecoveryKeyRequest { node_id: node_id.clone() };
    session
        .call("delete the recovery key", Repeat::Allowed, |channel| {
            let request = request.clone();
            async move { ManagementClient::new(channel).confirm_recovery_key(request).await }
        })
        .await?;
    let value = serde_json::json!({ "node": node_id, "confirmed": true });
    let text = format!("the cluster has deleted its copy of the recovery key of {name}");
    global.out.print(&Document::new(&value, text)?)
}

/// The text of a saved key, from a file or standard input; else asked for. A mistyped one is
/// rejected.
pub(super) fn saved_text(file: Option<&Path>) -> Result<Zeroizing<String>, Error> {
    let text = match file {
        Some(file) => key::read_secret(file)?,
        None => key::typed("Recovery key: ")
            .doing(|| "cannot read the recovery key".to_owned())
            .help(|| "without a terminal, use --recovery-key-file".to_owned())?,
    };
    form::read(&text).help(|| "compare it with the saved key, group by group".to_owned())?;
    Ok(text)
}

/// Prints what slot 1 of a disk takes for a saved key: its bytes as 64 hexadecimal digits.
fn passphrase(file: Option<&Path>, global: &Global) -> Result<(), Error> {
    let key = form::read(&saved_text(file)?)?;
    let passphrase = Zeroizing::new(hex::encode(&*key));
    match global.out.format {
        Format::Table => global.out.raw(passphrase.as_bytes()),
        Format::Json | Format::Yaml => {
            let value = serde_json::json!({ "passphrase": *passphrase });
            global.out.print(&Document::new(&value, "")?)
        }
    }
}

/// Compares by the rules for a full key: in any case, with `O` for `0`, and `I` and `L` for
/// `1`.
fn is_group(typed: &str, group: &str) -> bool {
    let read = |c: char| match c.to_ascii_uppercase() {
        'O' => '0',
        'I' | 'L' => '1',
        c => c,
    };
    let typed = typed.chars().filter(|c| !c.is_whitespace() && *c != '-').map(read);
    !group.is_empty() && typed.eq(group.chars())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contexts;
    use crate::loopback::{Cluster, NODE, RECOVERY_KEY};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    fn group_asked_for(question: &str) -> usize {
        let rest = question.split_once("Type group ").unwrap().1;
        rest.split_once(' ').unwrap().0.parse().unwrap()
    }

    #[test]
    fn a_key_that_was_not_saved_is_not_deleted() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let forget = ["node", "recovery-key", "forget", &*id];

        let printed = world.refuses(&forget);
        assert_eq!(
            printed,
            "error: the command asks a question, and this is not a terminal\nhelp: name the saved \
             key: --recovery-key-file FILE\n"
        );
        assert_eq!(cluster.asked(), [""; 0], "nothing was read");

        for typed in ["", "\n", "y\n", "yes\n", "ZZZZ\n", "0\n"] {
            let ended = world.asks(&forget, typed);
            assert_eq!((ended.status, &*ended.stdout), (1, ""), "{}", ended.stderr);
            assert!(ended.stderr.contains("recovery-key show"), "{}", ended.stderr);
            assert_eq!(cluster.asked(), ["GetRecoveryKey"], "{typed:?}");
        }

        let file = world.path("other");
        contexts::write(&file, form::write(&[8; form::SIZE]).as_bytes()).unwrap();
        world.refuses(&[&forget[..], &["--recovery-key-file", "@other"]].concat());
        assert_eq!(cluster.asked(), ["GetRecoveryKey"]);

        // The former command, without a question.
        let ended = world.run(&["node", "recovery-key", &id, "--confirm"]);
        assert_eq!(ended.status, 2, "{}", ended.stderr);
    }

    #[test]
    fn the_holder_of_the_key_may_delete_the_copy_of_the_cluster() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        let forget = ["node", "recovery-key", "forget", &*id];
        let key = form::write(&RECOVERY_KEY).to_string();
        for show in [&["node", "recovery-key", &*id][..], &["node", "recovery-key", "show", &id]] {
            let ended = world.run(show);
            assert_eq!((ended.status, ended.stdout.trim()), (0, &*key), "{}", ended.stderr);
            assert!(ended.stderr.contains(&forget.join(" ")), "{}", ended.stderr);
        }
        cluster.asked();

        contexts::write(&world.path("saved"), key.to_lowercase().as_bytes()).unwrap();
        world.runs(&[&forget[..], &["--recovery-key-file", "@saved"]].concat());
        assert_eq!(cluster.asked(), ["GetRecoveryKey", "ConfirmRecoveryKey"]);

        // The group of another place is refused.
        let groups: Vec<&str> = key.split('-').collect();
        let ended = (0..1000).find_map(|_attempt| {
            let ended = world.asks(&forget, &format!("{}\n", groups[4].to_lowercase()));
            let number = group_asked_for(&ended.stderr);
            assert_eq!(ended.status == 0, groups[number - 1] == groups[4], "{}", ended.stderr);
            (ended.status == 0).then_some(ended)
        });
        assert!(ended.unwrap().stdout.contains("has deleted its copy"));
    }

    #[test]
    fn a_saved_key_becomes_what_slot_1_takes_and_a_mistyped_one_is_refused() {
        let world = World::new();
        let key = form::write(&RECOVERY_KEY);
        let saved = |text: &str| contexts::write(&world.path("saved"), text.as_bytes()).unwrap();
        let passphrase = ["node", "recovery-key", "passphrase", "--recovery-key-file", "@saved"];

        // As a person writes it down, and as an editor ends a line.
        saved(&format!("{}\n", key.to_lowercase().replace('-', " ").replace('0', "o")));
        let ended = world.run(&passphrase);
        let digits = "07".repeat(form::SIZE);
        assert_eq!((ended.status, &*ended.stdout, &*ended.stderr), (0, &*digits, ""));
        let json = world.runs(&[&passphrase[..], &["--output", "json"]].concat());
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value, serde_json::json!({ "passphrase": digits }));

        for (text, said) in [
            (key.replacen('0', "U", 1), "character 1, not counting dashes and spaces"),
            (key.replacen('W', "X", 1), "its checksum does not match"),
            (key[..key.len() - 1].to_owned(), "has 56 letters and digits, not 55"),
            (String::new(), "has 56 letters and digits, not 0"),
        ] {
            saved(&text);
            let printed = world.refuses(&passphrase);
            assert!(printed.contains(said), "{text}: {printed}");
            assert!(printed.contains("help: compare it with the saved key"), "{printed}");
        }
        // The key itself is no argument.
        let ended = world.run(&["node", "recovery-key", "passphrase", &key]);
        assert_eq!((ended.status, &*ended.stdout), (2, ""), "{}", ended.stderr);
    }

    #[test]
    fn a_group_is_read_as_a_key_is() {
        for typed in ["01AB", "oiab\n", " OL-ab "] {
            assert!(is_group(typed, "01AB"), "{typed}");
        }
        for typed in ["", "01A", "01ABC", "10AB"] {
            assert!(!is_group(typed, "01AB"), "{typed}");
        }
        assert!(!is_group("", ""));
    }
}
