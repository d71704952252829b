//! How a process ended, in words.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::Signal;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit(pub(super) ExitStatus);

impl Exit {
    /// Whether it ended with status 0.
    #[must_use]
    pub fn is_success(self) -> bool {
        self.0.success()
    }

    /// Its exit status, unless a signal ended it.
    #[must_use]
    pub fn code(self) -> Option<i32> {
        self.0.code()
    }

    /// The number of the signal that ended it.
    #[must_use]
    pub fn signal(self) -> Option<i32> {
        self.0.signal()
    }
}

impl fmt::Display for Exit {
    /// In words, to be read after the name of the program.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.code(), self.0.signal()) {
            (Some(code), _) => write!(f, "ended with status {code}"),
            (None, Some(signal)) => match signal_name(signal) {
                Some(name) => write!(f, "was killed by signal {signal} ({name})"),
                None => write!(f, "was killed by signal {signal}"),
            },
            (None, None) => f.write_str("ended in an unknown way"),
        }
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    const NAMED: [(Signal, &str); 9] = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::ILL, "SIGILL"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::TERM, "SIGTERM"),
    ];
    NAMED.iter().find(|(known, _)| known.as_raw() == signal).map(|(_, name)| *name)
}
