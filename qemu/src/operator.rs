//! The operator of a cluster, who calls `polisctl` as a person does.
//!
//! A story runs the same program that people run, so it can only do things to its
//! cluster that they can do.
//!
//! `--timeout` is the program's own wall time. Here it is a deadline by the clock of
//! [`crate::deadline`] instead: the program gets as much wall time as that clock can
//! ever take, and is killed when the deadline has come.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::deadline::{Deadline, SLOWEST};
use crate::machine::{DEADLINE, Error, end};

/// A port of a node, and the port of this host that leads to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortForward {
    /// The node's address on its segment.
    pub address: IpAddr,
    /// The port there.
    pub port: u16,
    /// The port of the host's loopback interface.
    pub host: u16,
}

/// The port at which a node's curator listens.
pub const CURATOR: u16 = 7835;

/// `polisctl` with one context.
#[derive(Clone, Debug)]
pub struct Operator {
    program: PathBuf,
    config: PathBuf,
    context: String,
}

impl Operator {
    /// The program, its folder of contexts, and the name of the context.
    #[must_use]
    pub fn new(program: &Path, config: &Path, context: &str) -> Self {
        Self { program: program.into(), config: config.into(), context: context.to_owned() }
    }

    /// Makes or renews the context: the owner's key, and the ways to the nodes.
    ///
    /// # Errors
    /// When `polisctl` refuses.
    pub fn equip(&self, key: &Path, forwards: &[PortForward]) -> Result<(), Error> {
        let mut args = vec!["context".to_owned(), "set".to_owned(), self.context.clone()];
        args.extend(["--key".to_owned(), key.display().to_string()]);
        for PortForward { address, port, host } in forwards {
            if *port == CURATOR {
                args.extend(["--endpoint".to_owned(), format!("127.0.0.1:{host}")]);
            }
            args.extend([
                "--via".to_owned(),
                format!("{}=127.0.0.1:{host}", SocketAddr::new(*address, *port)),
            ]);
        }
        self.run(&args).map(drop)
    }

    /// Runs `polisctl`; returns its output.
    ///
    /// # Errors
    /// [`Error::Operator`] with its output if its status is not 0.
    pub fn run(&self, args: &[impl AsRef<OsStr>]) -> Result<String, Error> {
        let mut args: Vec<OsString> = args.iter().map(|arg| arg.as_ref().to_owned()).collect();
        let shown: Vec<_> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
        let deadline = stretched(&mut args).map(Deadline::within);
        let host = |source| Error::Host { doing: "run polisctl".to_owned(), source };
        let child = self.command(&args).spawn().map_err(host)?;
        let ended = finished(child, deadline).map_err(host)?;
        if ended.success {
            return Ok(ended.printed);
        }
        let (command, status, output) = (shown.join(" "), ended.status, ended.output);
        Err(Error::Operator { command, status, output })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the rule is for the node; this runs on the host"
    )]
    fn command(&self, args: &[OsString]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(self.options()).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The options before the arguments of a command. A timeout among those comes later, and
    /// takes precedence.
    fn options(&self) -> [OsString; 4] {
        let config = self.config.clone().into_os_string();
        ["--config".into(), config, "--context".into(), self.context.clone().into()]
    }

    /// The whole command line, for a caller that starts `polisctl` on a terminal of its own.
    #[must_use]
    pub fn words(&self, args: &[&str]) -> Vec<OsString> {
        let program = std::iter::once(self.program.clone().into_os_string());
        program.chain(self.options()).chain(args.iter().map(OsString::from)).collect()
    }

    /// The same, with the JSON document that it prints for programs.
    ///
    /// # Errors
    /// As [`Operator::run`], or when the output is not JSON.
    pub fn document(&self, args: &[&str]) -> Result<Value, Error> {
        let output = self.run(&[args, &["--output", "json"]].concat())?;
        serde_json::from_str(&output).map_err(|error| Error::Operator {
            command: args.join(" "),
            status: format!("no document ({error})"),
            output,
        })
    }
}

/// The last `--timeout` of a command line, which is made as long as the clock of
/// deadlines can ever take. `None` without one: the program's own default applies.
fn stretched(args: &mut [OsString]) -> Option<Duration> {
    let at = args.iter().rposition(|arg| arg == "--timeout")? + 1;
    let given = args.get(at).and_then(|text| duration(text.to_str()?))?;
    args[at] = format!("{}s", (given * SLOWEST).as_secs()).into();
    Some(given)
}

/// Whole seconds or minutes, as stories write them: `90s`, `2m`.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        _ => return None,
    };
    Some(Duration::from_secs(number.parse::<u64>().ok()?.checked_mul(seconds)?))
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    /// Whether its status is 0.
    pub success: bool,
    /// Its status in words, or that its deadline came.
    pub status: String,
    /// Its standard output.
    pub printed: String,
    /// Its standard error.
    pub output: String,
}

/// Waits for a program, whose output and errors must be pipes, and ends it when `deadline`
/// comes.
///
/// # Errors
/// When one of them is not a pipe, or the system does not say how the program ended.
pub fn finished(mut child: Child, mut deadline: Option<Deadline>) -> io::Result<Ended> {
    /// Without a deadline, the wait is renewed after this.
    const HOUR: Duration = Duration::from_secs(3600);
    let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
    let stdout = child.stdout.take().ok_or_else(missing)?;
    let stderr = child.stderr.take().ok_or_else(missing)?;
    let (closed, done) = mpsc::sync_channel::<()>(0);
    let read = |mut from: Box<dyn Read + Send>, closed| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _cut = from.read_to_end(&mut text);
            // When the last of these is dropped, the waiter below learns that both are
            // closed.
            drop::<mpsc::SyncSender<()>>(closed);
            String::from_utf8_lossy(&text).trim().to_owned()
        })
    };
    let stdout = read(Box::new(stdout), closed.clone());
    let stderr = read(Box::new(stderr), closed);
    let mut late = false;
    loop {
        let look = deadline.as_mut().map_or(Some(Instant::now() + HOUR), Deadline::look);
        let Some(look) = look else {
            late = true;
            break;
        };
        match done.recv_timeout(look.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) | Ok(()) => break,
        }
    }
    let (success, status) = if late {
        end(&mut child);
        (false, DEADLINE.to_owned())
    } else {
        let status = child.wait()?;
        (status.success(), status.to_string())
    };
    let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
    Ok(Ended { success, status, printed: text(stdout), output: text(stderr) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_was_asked_and_what_was_said() {
        let operator = Operator::new(Path::new("ls"), Path::new("/nonexistent"), "x");
        let error = operator.run(&["node", "list"]).unwrap_err().to_string();
        assert!(error.contains("polisctl node list"), "{error}");
        assert!(error.contains("--config"), "{error}");
    }

    fn args(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_last_timeout_is_the_deadline_and_the_program_gets_more() {
        let mut both = args(&["--timeout", "2m", "node", "list", "--timeout", "30s"]);
        assert_eq!(stretched(&mut both), Some(Duration::from_secs(30)));
        assert_eq!(both, args(&["--timeout", "2m", "node", "list", "--timeout", "240s"]));
        assert_eq!(stretched(&mut args(&["node", "list"])), None);
        assert_eq!(stretched(&mut args(&["node", "list", "--timeout"])), None);
        assert_eq!(stretched(&mut args(&["--timeout", "soon"])), None);
        assert_eq!(duration("é"), None);
    }

    #[test]
    fn a_program_that_does_not_end_is_ended_at_its_deadline_and_what_it_said_is_kept() {
        #[expect(clippy::disallowed_methods, reason = "a test may start a program")]
        let mut command = Command::new("sh");
        command.args(["-c", "echo printed; echo said >&2; exec sleep 600"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let began = Instant::now();
        let deadline = Deadline::within(Duration::from_millis(200));
        let ended = finished(command.spawn().unwrap(), Some(deadline)).unwrap();
        assert!(!ended.success && ended.status.contains("deadline"), "{}", ended.status);
        assert_eq!((ended.printed.as_str(), ended.output.as_str()), ("printed", "said"));
        assert!(began.elapsed() < Duration::from_secs(60));
    }
}
