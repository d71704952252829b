//! Test harness: runs command lines in a folder of their own.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::output::Streams;

/// A folder with contexts, keys and files.
pub(super) struct World {
    folder: tempfile::TempDir,
}

/// How a command ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) status: u8,
    pub(super) stdout: String,
    pub(super) stderr: String,
    /// When the command first wrote anything, a progress line included; without the time in
    /// which its thread was ready and no processor was free.
    pub(super) sign: Option<Duration>,
}

/// An address without a listener: bound, so that no other process gets the port.
pub(super) fn closed_port() -> (OwnedFd, String) {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let bound = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let any = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0);
    bind(&bound, &any).unwrap();
    let address = std::net::SocketAddr::try_from(getsockname(&bound).unwrap()).unwrap();
    (bound, address.to_string())
}

/// The output of a command on a stream, and the time when any stream was written first.
#[derive(Clone)]
struct Written(Arc<Mutex<Vec<u8>>>, Begun, Arc<Mutex<Option<Duration>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        self.2.lock().unwrap().get_or_insert_with(|| self.1.took());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// When a command began. A command does all its work on one thread, so what the kernel calls
/// the run delay of that thread is what a busy host has added.
#[derive(Clone, Copy)]
struct Begun(Instant, Duration);

impl Begun {
    fn now() -> Self {
        Self(Instant::now(), Self::delay())
    }

    fn took(self) -> Duration {
        self.0.elapsed().saturating_sub(Self::delay().saturating_sub(self.1))
    }

    fn delay() -> Duration {
        let read = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let nanos = read.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        Duration::from_nanos(nanos.unwrap_or_default())
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// A file in the folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The global options of a command without any.
    pub(super) fn global(&self) -> super::Global {
        super::Global {
            context: None,
            endpoints: Vec::new(),
            timeout: None,
            passphrase: super::Passphrase { file: None },
            contexts: super::Contexts::find(Some(self.path("polis")), |_name| None).unwrap(),
            kubeconfig: None,
            colours: polis_base::canvas::Colours::On,
            out: super::Out {
                format: super::Format::Table,
                streams: Streams::new(io::sink(), io::sink()),
            },
        }
    }

    /// Runs `polisctl` without a terminal; a `@name` among the arguments becomes a path in
    /// the folder, and the folder's path reads `@` in the output.
    pub(super) fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments, None, None)
    }

    /// The same in a terminal with so many columns, without input.
    pub(super) fn run_in(&self, columns: usize, arguments: &[&str]) -> Ended {
        self.start(arguments, Some(""), Some(columns))
    }

    /// The same on a terminal, with `answers` as the typed lines.
    pub(super) fn asks(&self, arguments: &[&str], answers: &str) -> Ended {
        self.start(arguments, Some(answers), None)
    }

    fn start(&self, arguments: &[&str], answers: Option<&str>, columns: Option<usize>) -> Ended {
        let program = std::iter::once(OsString::from("polisctl"));
        let arguments = arguments.iter().map(|argument| match argument.strip_prefix('@') {
            Some(name) => self.path(name).into_os_string(),
            None => OsString::from(argument),
        });
        let home = self.folder.path().display().to_string();
        let variable = |name: &str| (name == "XDG_CONFIG_HOME").then(|| OsString::from(&home));
        let (begun, first) = (Begun::now(), Arc::default());
        let written = || Written(Arc::default(), begun, Arc::clone(&first));
        let (stdout, stderr) = (written(), written());
        let mut streams = Streams::new(stdout.clone(), stderr.clone()).with_signs(written());
        if let Some(answers) = answers {
            streams = streams.with_person(io::Cursor::new(answers.to_owned()));
        }
        if let Some(columns) = columns {
            streams = streams.with_columns(columns);
        }
        let status = super::run(program.chain(arguments), variable, &streams);
        let text = |written: &Written| {
            let text = String::from_utf8_lossy(&written.0.lock().unwrap()).into_owned();
            text.replace(&format!("{home}/"), "@")
        };
        let sign = *first.lock().unwrap();
        Ended { status, stdout: text(&stdout), stderr: text(&stderr), sign }
    }

    /// The same for a command that must succeed.
    #[track_caller]
    pub(super) fn runs(&self, arguments: &[&str]) -> String {
        let ended = self.run(arguments);
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        ended.stdout
    }

    /// The same for a command that must fail; returns its error.
    #[track_caller]
    pub(super) fn refuses(&self, arguments: &[&str]) -> String {
        let ended = self.run(arguments);
        assert_eq!((ended.status, &*ended.stdout), (1, ""), "{}", ended.stderr);
        ended.stderr
    }
}
