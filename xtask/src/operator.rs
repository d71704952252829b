//! The operator of a run: sets up `polisctl` for its cluster.
//!
//! The host reaches the machine through forwarded ports, which a context in the machine's
//! folder contains. Ownership is taken when the serial line reports the node as ready: the
//! same line has the fingerprint of the CA, and the serial port cannot be intercepted.
//!
//! ```text
//! serial.log --`POLIS ready ... ca=`--> polisctl cluster take-ownership --> context
//! target/run/<name>/polisctl  ==  target/polisctl --config target/run/<name>/operator
//! ```

use std::env;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::args::Forward;
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::image;
use crate::parameters;
use crate::tail::Tail;

/// The ports of a node, and the preferred ports of this host for them.
const PORTS: [(u16, u16); 4] = [(7835, 17835), (7839, 17839), (7840, 17840), (6444, 16444)];
/// The address that QEMU's NAT assigns to its only machine.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// Between two reads of the end of the serial log.
const LOOK: Duration = Duration::from_millis(200);

/// `polisctl`, with the ports to reach the machine.
#[derive(Debug)]
pub(crate) struct Operator {
    dir: PathBuf,
    name: String,
    /// `polisctl` with the context of the machine.
    pub(crate) polisctl: polis_qemu::Operator,
    /// The forwarded ports of the machine.
    pub(crate) forwards: Vec<Forward>,
}

/// The ports of this host that are forwarded to a machine: the preferred ones, or any free
/// ones if they are in use.
fn forwards() -> Result<Vec<Forward>> {
    PORTS.iter().map(|&(guest, wished)| Ok(Forward { host: free_port(wished)?, guest })).collect()
}

/// The wished port of this host, or any free one if it is in use.
pub(crate) fn free_port(wished: u16) -> Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, wished))
        .or_else(|_taken| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .and_then(|bound| bound.local_addr())
        .map(|address| address.port())
        .context("cannot find a free port on this host")
}

/// The command to operate the cluster in `dir`.
pub(crate) fn script(dir: &Path) -> PathBuf {
    dir.join("polisctl")
}

/// The folder of the operator's contexts for the cluster in `dir`.
pub(crate) fn contexts(dir: &Path) -> PathBuf {
    dir.join("operator")
}

/// Builds `polisctl`, and creates the folder of contexts of the cluster in `dir` and the
/// script for the operator. Returns the program and the folder.
pub(crate) fn install(dir: &Path, kept: bool) -> Result<(PathBuf, PathBuf)> {
    let built = image::polisctl()?;
    let program = image::workspace().join("target/polisctl");
    put(&built, &program)
        .with_context(|| format!("cannot put polisctl at {}", program.display()))?;
    let config = contexts(dir);
    if !kept && config.exists() {
        fs::remove_dir_all(&config)
            .with_context(|| format!("cannot remove {}", config.display()))?;
    }
    let lines = format!(
        "#!/bin/sh\n# polisctl for the cluster of this folder.\nexec {} --config {} \"$@\"\n",
        quoted(&program),
        quoted(&config)
    );
    let file = script(dir);
    fs::write(&file, lines)
        .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok((program, config))
}

/// Puts a program in place: a copy beside it and a rename, since the old one may be running. The
/// copy has a name of its own, since another run may put the same program in place.
fn put(built: &Path, program: &Path) -> Result<()> {
    let folder = program.parent().unwrap_or(Path::new("."));
    let copy = NamedTempFile::new_in(folder)?.into_temp_path();
    fs::copy(built, &copy)?;
    Ok(copy.persist(program)?)
}

impl Operator {
    /// Builds `polisctl` and makes a context for the machine in `dir`.
    pub(crate) fn prepare(dir: &Path, name: &str, kept: bool) -> Result<Self> {
        let (program, config) = install(dir, kept)?;
        let operator = Self {
            dir: dir.to_owned(),
            name: name.to_owned(),
            polisctl: polis_qemu::Operator::new(&program, &config, name),
            forwards: forwards()?,
        };
        operator.make_context()?;
        Ok(operator)
    }

    /// The command for the operator.
    pub(crate) fn script(&self) -> PathBuf {
        script(&self.dir)
    }

    fn make_context(&self) -> Result<()> {
        // A context takes no key that is not there.
        drop(parameters::owner_key(&self.dir)?);
        let mut command = Command::new(self.script());
        command.args(["context", "set", &self.name, "--key"]).arg(self.dir.join("owner.key"));
        for Forward { host, guest } in &self.forwards {
            if *guest == PORTS[0].0 {
                command.args(["--endpoint", &format!("127.0.0.1:{host}")]);
            }
            command.args(["--via", &format!("{GUEST}:{guest}=127.0.0.1:{host}")]);
        }
        run(&mut command).context("cannot make a context for polisctl")
    }

    /// Takes ownership when the serial log reports the node as ready, and calls `done` with
    /// the node's ID. Lives as long as this process.
    pub(crate) fn follow(&self, log: &Path, done: impl FnOnce(Result<String>) + Send + 'static) {
        let (script, name) = (self.script(), self.name.clone());
        // A machine that boots again appends to its log.
        let mut tail = Tail::at_end(log);
        thread::spawn(move || {
            let Ready { node, ca } = ready(&mut tail);
            let mut command = Command::new(script);
            command.args(["--context", &name, "--timeout", "2m", "cluster", "take-ownership"]);
            done(run(command.args(["--fingerprint", &ca])).map(|()| node));
        });
    }
}

/// The facts of a ready node that an operator needs.
#[derive(Debug, PartialEq, Eq)]
struct Ready {
    /// Its ID.
    node: String,
    /// The fingerprint of the CA.
    ca: String,
}

/// The next `POLIS ready`.
fn ready(tail: &mut Tail) -> Ready {
    loop {
        match tail.read() {
            Ok(Some(event)) if event.word == "ready" => {
                if let (Some(node), Some(ca)) = (event.get("node"), event.get("ca")) {
                    return Ready { node: node.to_owned(), ca: ca.to_owned() };
                }
            }
            Ok(Some(_other)) => {}
            // A log that cannot be read now is read later.
            Ok(None) | Err(_) => thread::sleep(LOOK),
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().context("cannot start polisctl")?;
    let printed = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "polisctl ended with {}: {}", output.status, printed.trim());
    Ok(())
}

/// The result of `cluster status` in one line. `None`, and a document without a state,
/// leave the state unknown.
fn verdict(status: Option<&Value>) -> String {
    let known = |status: &Value| -> Option<String> {
        if status.get("healthy")?.as_bool()? {
            let nodes = status.get("nodes")?.as_array()?.len();
            return Some(format!("cluster healthy, {nodes} nodes"));
        }
        let problems = status.get("problems")?.as_array()?;
        let first = problems.first().and_then(Value::as_str).unwrap_or("cluster not healthy");
        Some(match problems.len() {
            0 | 1 => first.to_owned(),
            all => format!("{first}, and {} more", all - 1),
        })
    };
    status.and_then(known).unwrap_or_else(|| "state of the cluster not known".to_owned())
}

/// Polls the state of a cluster, for as long as the value lives.
#[derive(Debug)]
pub(crate) struct Watch {
    _stop: mpsc::Sender<()>,
}

impl Watch {
    /// Calls `ask` for the document of `cluster status`, and `sender` with its state;
    /// `every` is the pause between two queries.
    pub(crate) fn start(
        every: Duration,
        ask: impl Fn() -> Option<Value> + Send + 'static,
        sender: impl Fn(&str) + Send + 'static,
    ) -> Self {
        let (stop, stopped) = mpsc::channel();
        thread::spawn(move || {
            loop {
                sender(&verdict(ask().as_ref()));
                if stopped.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Self { _stop: stop }
    }
}

/// The path relative to the current folder, if that is shorter.
pub(crate) fn shortest(path: &Path) -> String {
    let here = env::current_dir().unwrap_or_default();
    path.strip_prefix(here).unwrap_or(path).display().to_string()
}

/// The program at `path` as a person types it: [`shortest`], in quotes where a shell needs them.
pub(crate) fn typed(path: &Path) -> String {
    let short = shortest(path);
    // A shell looks up a name without a slash on its PATH.
    let short = if short.contains('/') { short } else { format!("./{short}") };
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if short.chars().all(plain) { short } else { quoted(Path::new(&short)) }
}

/// A path as one word of a shell.
pub(crate) fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;

    #[test]
    fn the_fingerprint_is_read_from_the_next_ready_line() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("serial.log");
        fs::write(&log, "POLIS ready node=x ca=old t=1\n").unwrap();
        let mut tail = Tail::at_end(&log);
        let new = "noise\n  12.345 POLIS ready node=polis-01 address=10.0.2.15 ca=0123 t=9.1\n";
        let before = fs::read_to_string(&log).unwrap();
        fs::write(&log, format!("{before}POLIS stage name=kernel state=done t=1\n{new}")).unwrap();
        let expected = Ready { node: "polis-01".to_owned(), ca: "0123".to_owned() };
        assert_eq!(ready(&mut tail), expected);
    }

    #[test]
    fn every_port_of_a_node_is_reached_at_a_port_of_its_own() {
        let forwards = forwards().unwrap();
        assert_eq!(forwards.iter().map(|f| f.guest).collect::<Vec<_>>(), [7835, 7839, 7840, 6444]);
        assert!(forwards.iter().all(|f| f.host != 0));
    }

    #[test]
    fn a_state_is_asked_for_again_and_is_unknown_without_an_answer() {
        let healthy = json!({ "healthy": true, "problems": [], "nodes": [{}, {}, {}] });
        let late = json!({ "healthy": false, "problems": ["x is late", "y", "z"], "nodes": [] });
        let silent = json!({ "healthy": false, "problems": [] });
        let answers = [Some(healthy.clone()), Some(late), None, Some(silent), Some(healthy)];
        let answers = Mutex::new(answers.into_iter());
        let (sender, receiver) = mpsc::channel();
        let watch = Watch::start(
            Duration::from_millis(1),
            move || answers.lock().unwrap().next().flatten(),
            // The receiver ends with the test.
            move |state| drop(sender.send(state.to_owned())),
        );
        let states: Vec<_> = receiver.iter().take(6).collect();
        let unknown = "state of the cluster not known";
        assert_eq!(
            states,
            [
                "cluster healthy, 3 nodes",
                "x is late, and 2 more",
                unknown,
                "cluster not healthy",
                "cluster healthy, 3 nodes",
                unknown
            ]
        );
        drop(watch);
        // The channel closes with the thread.
        assert!(receiver.iter().all(|state| state == unknown));
    }

    #[test]
    fn a_run_puts_polisctl_in_place_beside_another_run_that_does_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let [built, program] = ["built", "polisctl"].map(|name| dir.path().join(name));
        fs::write(&built, "a program").unwrap();
        fs::set_permissions(&built, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&program, "the old one").unwrap();
        // The copy of another run is not finished.
        let other = dir.path().join("polisctl.new");
        fs::write(&other, "a pro").unwrap();
        put(&built, &program).unwrap();
        assert_eq!(fs::read(&program).unwrap(), b"a program");
        assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read(&other).unwrap(), b"a pro");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }

    #[test]
    fn a_printed_command_line_can_be_pasted_wherever_the_sources_are() {
        assert_eq!(typed(Path::new("/src/run/a-1/polisctl")), "/src/run/a-1/polisctl");
        assert_eq!(typed(Path::new("/my src/polisctl")), "'/my src/polisctl'");
        let here = env::current_dir().unwrap();
        assert_eq!(typed(&here.join("target/polisctl")), "target/polisctl");
        assert_eq!(typed(&here.join("polisctl")), "./polisctl");
    }
}
