//! An emulated TPM 2.0 beside a machine, or for a test alone.
//!
//! The TPM is `swtpm`; its state is in a folder, so one folder is one TPM: the same
//! over any number of boots, cleared when the folder is removed.
//!
//! Invariants:
//! - It ends with its machine, with its value and with this process.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The program.
pub const SWTPM: &str = "swtpm";

/// A TPM that is switched on.
#[derive(Debug)]
pub struct Tpm {
    child: Child,
}

impl Tpm {
    /// Switches on the TPM whose state is in `state`, for a QEMU that connects to
    /// `socket`. The listener is made here, so that QEMU can connect without waiting.
    ///
    /// # Errors
    ///
    /// When the program is missing.
    pub fn for_machine(state: &Path, socket: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        Self::start(state, listener.into(), &["--ctrl", "type=unixio,fd=3"])
    }

    /// Switches on the TPM whose state is in `state`, and connects to it: one
    /// write is one command.
    ///
    /// # Errors
    ///
    /// When the program is missing.
    pub fn alone(state: &Path) -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let args = ["--fd", "3", "--flags", "not-need-init,startup-clear"];
        Ok((Self::start(state, theirs.into(), &args)?, ours))
    }

    fn start(state: &Path, socket: OwnedFd, args: &[&str]) -> io::Result<Self> {
        fs::create_dir_all(state)?;
        let log = state.join("log");
        let child = command()
            .args(["socket", "--tpm2", "--terminate", "--tpmstate"])
            .arg(format!("dir={}", state.display()))
            .arg("--log")
            .arg(format!("file={}", log.display()))
            .args(args)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { child })
    }

    /// Clears the state of the TPM in `state`, as its owner can.
    ///
    /// # Errors
    ///
    /// When the folder cannot be removed.
    pub fn clear(state: &Path) -> io::Result<()> {
        fs::remove_dir_all(state)
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        // Fails only if it has already ended.
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// The TPM under `setpriv`, like QEMU. It does not accept a socket as its standard
/// input, so a shell moves that to descriptor 3, and becomes the TPM.
#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
fn command() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "sh", "-c"]);
    command.args([r#"exec "$0" "$@" 3<&0 0</dev/null"#, SWTPM]);
    command
}

/// The arguments of QEMU for a TPM that listens on `socket`.
pub(crate) fn args(socket: &Path) -> [(&'static str, String); 3] {
    let socket = socket.display().to_string().replace(',', ",,");
    [
        ("-chardev", format!("socket,id=tpm,path={socket}")),
        ("-tpmdev", "emulator,id=tpm,chardev=tpm".to_owned()),
        // The interface of machines with a TPM in their firmware.
        ("-device", "tpm-crb,tpmdev=tpm".to_owned()),
    ]
}
