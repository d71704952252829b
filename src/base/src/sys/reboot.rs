//! The end of the machine. Only `init` uses it.

use std::io;

use rustix::system::RebootCommand;

/// How the machine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It starts again.
    Reboot,
    /// It is switched off.
    PowerOff,
}

impl Reason {
    /// The word on the serial line and on the control channel.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::PowerOff => "poweroff",
        }
    }

    /// The reason of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Reboot, Self::PowerOff].into_iter().find(|reason| reason.name() == name)
    }
}

/// Ends the machine now. File systems must be unmounted or synchronised before.
/// Returns only if the kernel refuses.
pub fn end(reason: Reason) -> io::Error {
    let command = match reason {
        Reason::Reboot => RebootCommand::Restart,
        Reason::PowerOff => RebootCommand::PowerOff,
    };
    match rustix::system::reboot(command) {
        Ok(()) => io::Error::other("the kernel did not stop the machine"),
        Err(errno) => errno.into(),
    }
}

/// Makes Ctrl-Alt-Del a `SIGINT` to process 1 in place of a reset.
///
/// # Errors
///
/// When the caller may not.
pub fn catch_ctrl_alt_del() -> io::Result<()> {
    Ok(rustix::system::reboot(RebootCommand::CadOff)?)
}
