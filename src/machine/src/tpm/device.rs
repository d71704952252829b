//! The machine's own TPM: opens it.
//!
//! The kernel's resource manager stands between: the objects that one open file makes
//! in the TPM are its own, and go when it is closed.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use super::{Error, Transport};

/// The length of the longest answer.
const ANSWER_MAX: usize = 4096;

/// The TPM as the kernel shows it.
#[derive(Debug)]
pub struct Device(File);

impl Device {
    /// Opens the resource manager of the first TPM in `dev`, usually `/dev`. A TPM of
    /// version 1.2 does not have one.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`] or [`Error::Transport`].
    pub fn open(dev: &Path) -> Result<Self, Error> {
        match File::options().read(true).write(true).open(dev.join("tpmrm0")) {
            Ok(file) => Ok(Self(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::Absent),
            Err(error) => Err(Error::Transport(error)),
        }
    }
}

impl Transport for Device {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        // One write is one command, and one read is one answer.
        let written = self.0.write(command)?;
        if written != command.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut answer = vec![0; ANSWER_MAX];
        let length = self.0.read(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "on a thread that may block; a TPM does not signal the end of its work"
    )]
    fn wait(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}
