//! `cargo xtask link`: cuts, delays and repairs the links of a cluster that `cargo xtask
//! run --nodes N` runs.
//!
//! ```text
//!  link cut 3                              run --nodes 3
//!      |     one line: what is to be done      |
//!      +--------------- socket --------------->+--> the links of the segment
//!      +<--------------------------------------+
//!            one line: what is so now, or `error: ` and why not
//! ```
//!
//! The socket is in a folder of [`Scratch`], since its path is limited to 107 bytes; the file
//! `links` in the folder of the run contains it.
//!
//! What this module does not do: change the links itself. The segment does, in the process
//! of `run`.

use std::fmt;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use polis_qemu::scratch::Scratch;
use polis_qemu::segment::Links;
use polis_qemu::{Fleet, Port};

use crate::host::Help;
use crate::image;
use crate::run;

/// The longest line in bytes: a few numbers.
const LINE_MAX: u64 = 256;
/// Deadline of an answer, which the other end sends at once.
const PATIENCE: Duration = Duration::from_secs(5);
/// The prefix of an error in an answer.
const REFUSED: &str = "error: ";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    order: Order,
    /// Name of the run.
    #[arg(long, global = true, default_value = "polis", value_parser = run::name)]
    name: String,
}

/// The commands. Nodes count from 1, as on every screen.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
enum Order {
    /// Cut a node off from all other nodes, or from one. The host still reaches it.
    Cut {
        /// Which node.
        node: u8,
        /// The other node; all nodes by default.
        other: Option<u8>,
    },
    /// Make every link of a node slower, each way.
    Slow {
        /// Which node.
        node: u8,
        /// By how much.
        #[arg(value_parser = clap::value_parser!(u64).range(1..=10_000))]
        milliseconds: u64,
    },
    /// Undo every cut and every delay.
    Heal,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut { node, other: Some(other) } => write!(f, "cut {node} {other}"),
            Self::Cut { node, other: None } => write!(f, "cut {node}"),
            Self::Slow { node, milliseconds } => write!(f, "slow {node} {milliseconds}"),
            Self::Heal => f.write_str("heal"),
        }
    }
}

impl FromStr for Order {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> Result<Self> {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        Ok(match words[..] {
            ["cut", node] => Self::Cut { node: node.parse()?, other: None },
            ["cut", node, other] => Self::Cut { node: node.parse()?, other: Some(other.parse()?) },
            ["slow", node, by] => Self::Slow { node: node.parse()?, milliseconds: by.parse()? },
            ["heal"] => Self::Heal,
            _ => return Err(anyhow!("{line:?} is not a command")),
        })
    }
}

impl Order {
    /// Applies the command to `links`, which connect this number of `nodes`, and returns
    /// the new state as text.
    fn carry_out(&self, links: &Links, nodes: u8) -> Result<String> {
        let port = |node: u8| {
            let known = (1..=nodes).contains(&node);
            ensure!(known, "node {node} does not exist; this run has the nodes 1 to {nodes}");
            Ok(Fleet::port(usize::from(node - 1)))
        };
        Ok(match *self {
            Self::Cut { node, other: None } => {
                links.part(port(node)?);
                format!("node {node} is cut off from every other node; the host still reaches it")
            }
            Self::Cut { node, other: Some(other) } => {
                let [one, two]: [Port; 2] = [port(node)?, port(other)?];
                ensure!(one != two, "a node has no link to itself: name two nodes");
                links.cut(one, two);
                format!("the link between node {node} and node {other} is cut")
            }
            Self::Slow { node, milliseconds } => {
                links.slow(port(node)?, Duration::from_millis(milliseconds));
                format!("traffic of node {node} is delayed by {milliseconds} ms")
            }
            Self::Heal => {
                links.heal();
                "every link is up, without delay".to_owned()
            }
        })
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let name = &args.name;
    let dir = image::workspace().join("target/run").join(name);
    let answer = ask(&dir, &args.order).with_context(|| {
        let other = if name == "polis" { String::new() } else { format!(" --name {name}") };
        Help(format!("start one with `cargo xtask run --nodes 3{other}`, and leave it running"))
    });
    match answer?.strip_prefix(REFUSED) {
        Some(why) => Err(anyhow!("{why}")),
        None => Ok(()),
    }
}

/// Sends `order` to the run in `dir`; prints the new state.
fn ask(dir: &Path, order: &Order) -> Result<String> {
    let absent = || format!("no cluster of several nodes runs in {}", dir.display());
    let socket = std::fs::read_to_string(place(dir)).with_context(absent)?;
    let mut line = UnixStream::connect(&socket).with_context(absent)?;
    line.set_read_timeout(Some(PATIENCE))?;
    writeln!(line, "{order}")?;
    let mut answer = String::new();
    BufReader::new(line.take(LINE_MAX)).read_line(&mut answer).with_context(absent)?;
    let answer = answer.trim_end().to_owned();
    // The run may end between the two.
    ensure!(!answer.is_empty(), absent());
    if !answer.starts_with(REFUSED) {
        println!("{answer}");
    }
    Ok(answer)
}

/// The file with the path of the socket of the run in `dir`.
fn place(dir: &Path) -> PathBuf {
    dir.join("network/links")
}

/// Accepts commands for `links`, for as long as the value lives.
#[derive(Debug)]
pub(crate) struct Server {
    _folder: Scratch,
}

impl Server {
    /// Opens the socket for the run in `dir` with this number of `nodes`.
    pub(crate) fn open(dir: &Path, links: Links, nodes: u8) -> Result<Self> {
        let folder = Scratch::new().context("cannot make a folder for a socket")?;
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket)
            .with_context(|| format!("cannot listen on {}", socket.display()))?;
        let place = place(dir);
        std::fs::write(&place, socket.as_os_str().as_encoded_bytes())
            .with_context(|| format!("cannot write {}", place.display()))?;
        thread::spawn(move || {
            for line in listener.incoming().flatten() {
                // The client may have closed the connection.
                let _gone = serve(line, &links, nodes);
            }
        });
        Ok(Self { _folder: folder })
    }
}

/// One command and one answer.
fn serve(mut line: UnixStream, links: &Links, nodes: u8) -> Result<()> {
    line.set_read_timeout(Some(PATIENCE))?;
    let mut order = String::new();
    BufReader::new((&line).take(LINE_MAX)).read_line(&mut order)?;
    let done = order.parse::<Order>().and_then(|order| order.carry_out(links, nodes));
    let answer = done.unwrap_or_else(|error| format!("{REFUSED}{error}"));
    Ok(writeln!(line, "{answer}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_read_as_it_was_written() {
        for order in [
            Order::Cut { node: 1, other: None },
            Order::Cut { node: 1, other: Some(7) },
            Order::Slow { node: 2, milliseconds: 250 },
            Order::Heal,
        ] {
            assert_eq!(order.to_string().parse::<Order>().unwrap(), order);
        }
        for wrong in ["", "cut", "cut x", "cut 1 2 3", "slow 1", "cut 900", "heal all"] {
            assert!(wrong.parse::<Order>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_run_is_asked_by_its_folder_and_says_what_it_does_not_have() {
        let dir = tempfile::tempdir().unwrap();
        let heal = Order::Heal;
        let error = ask(dir.path(), &heal).unwrap_err().to_string();
        assert!(error.contains("no cluster of several nodes runs"), "{error}");
        std::fs::create_dir(dir.path().join("network")).unwrap();
        let server = Server::open(dir.path(), Links::default(), 2).unwrap();
        let cut = |node, other| ask(dir.path(), &Order::Cut { node, other }).unwrap();
        assert!(cut(2, None).contains("node 2 is cut off"));
        assert!(cut(2, Some(2)).starts_with(REFUSED));
        assert!(cut(3, None).contains("this run has the nodes 1 to 2"));
        assert!(cut(0, None).starts_with(REFUSED));
        assert!(ask(dir.path(), &heal).unwrap().contains("every link is up"));
        drop(server);
        assert!(ask(dir.path(), &heal).is_err(), "the run has ended");
    }

    #[test]
    fn a_run_that_ends_before_it_answers_has_done_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("network")).unwrap();
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::fs::write(place(dir.path()), socket.as_os_str().as_encoded_bytes()).unwrap();
        let run = thread::spawn(move || {
            let (line, _address) = listener.accept().unwrap();
            // Reads the command, so that its sender does not fail.
            BufReader::new(line).read_line(&mut String::new()).unwrap();
        });
        let error = ask(dir.path(), &Order::Heal).unwrap_err().to_string();
        assert!(error.contains("no cluster of several nodes runs"), "{error}");
        run.join().unwrap();
    }
}
