//! A client of QEMU's machine protocol: it acts as a hand on the power switch, a
//! keyboard or a camera in front of the screen.
//!
//! One command at a time, each answered before the next is sent. Events in between are
//! dropped: the serial line is the better source.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::args::BAY;

/// QEMU answers at once, except while its host is very busy or a screen is being written.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// QEMU has ended, or hangs.
    #[error("cannot speak to QEMU while sending `{command}`")]
    Lost {
        /// The command.
        command: String,
        /// The socket's complaint.
        source: io::Error,
    },
    /// QEMU rejected the command.
    #[error("QEMU refuses `{command}`: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's reason.
        reason: String,
    },
}

/// A session with one QEMU.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    answers: BufReader<UnixStream>,
}

impl Client {
    /// Takes over a fresh connection: reads the greeting and leaves negotiation.
    ///
    /// # Errors
    /// When QEMU does not answer, or not in its protocol.
    pub fn new(stream: UnixStream) -> Result<Self, Error> {
        const NEGOTIATE: &str = "qmp_capabilities";
        let lost = |source| Error::Lost { command: NEGOTIATE.to_owned(), source };
        stream.set_read_timeout(Some(ANSWER_MAX)).map_err(lost)?;
        stream.set_write_timeout(Some(ANSWER_MAX)).map_err(lost)?;
        let answers = BufReader::new(stream.try_clone().map_err(lost)?);
        let mut client = Self { stream, answers };
        client.message().map_err(lost)?;
        client.execute(NEGOTIATE, Value::Null)?;
        Ok(client)
    }

    /// Sends one command and waits for its result.
    ///
    /// # Errors
    /// When QEMU refuses or is gone.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let lost = |source| Error::Lost { command: command.to_owned(), source };
        let mut request = json!({ "execute": command });
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        writeln!(self.stream, "{request}").map_err(lost)?;
        loop {
            let mut answer = self.message().map_err(lost)?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason given").to_owned();
                return Err(Error::Refused { command: command.to_owned(), reason });
            }
        }
    }

    fn message(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// The reset button.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.execute("system_reset", Value::Null).map(drop)
    }

    /// The power button: the guest handles it.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub fn power_button(&mut self) -> Result<(), Error> {
        self.execute("system_powerdown", Value::Null).map(drop)
    }

    /// Stops the processors. Writes under way reach the disk before this returns.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub fn stop(&mut self) -> Result<(), Error> {
        self.execute("stop", Value::Null).map(drop)
    }

    /// Plugs the network cable, or pulls it: the guest sees its carrier come or go.
    ///
    /// # Errors
    /// When the machine has no network card, or QEMU is gone.
    pub fn cable(&mut self, plugged: bool) -> Result<(), Error> {
        self.execute("set_link", json!({ "name": "net", "up": plugged })).map(drop)
    }

    /// Has the first disk hold the next flush of its cache, and with it all that follow; or
    /// releases them. Its machine has [`DiskFault::Flush`](crate::args::DiskFault::Flush).
    ///
    /// # Errors
    /// When the machine has no such disk, or QEMU is gone.
    pub fn hold_flushes(&mut self, hold: bool) -> Result<(), Error> {
        let what = if hold { "break flush_to_os held" } else { "resume held" };
        let line = format!("qemu-io disk \"{what}\"");
        let said = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        // It says nothing unless something is wrong.
        match said.as_str().map(str::trim) {
            None | Some("") => Ok(()),
            Some(reason) if !hold && reason.starts_with("Resuming") => Ok(()),
            Some(reason) => Err(Error::Refused { command: line, reason: reason.to_owned() }),
        }
    }

    /// Pulls a disk (`disk`, `second`) out of its bay: its machine has bays. The guest lets it go
    /// a moment later.
    ///
    /// # Errors
    /// When no such disk is there, or QEMU is gone.
    pub fn pull(&mut self, disk: &str) -> Result<(), Error> {
        self.execute("device_del", json!({ "id": disk })).map(drop)
    }

    /// Pushes the disk in `file`, a raw image, into the empty bay of `disk`, with this serial
    /// number.
    ///
    /// # Errors
    /// When the bay is not empty, or QEMU is gone.
    pub fn push(&mut self, disk: &str, file: &Path, serial: &str) -> Result<(), Error> {
        let node = format!("{disk}-pushed");
        let backend = json!({ "node-name": node, "driver": "raw", "discard": "unmap",
            "cache": { "no-flush": true },
            "file": { "driver": "file", "filename": file } });
        self.execute("blockdev-add", backend)?;
        let device = json!({ "driver": "virtio-blk-pci", "drive": node, "id": disk,
            "serial": serial, "bus": format!("{disk}{BAY}") });
        self.execute("device_add", device).map(drop)
    }

    /// Ends QEMU in order.
    ///
    /// # Errors
    /// When QEMU is gone already.
    pub fn quit(&mut self) -> Result<(), Error> {
        self.execute("quit", Value::Null).map(drop)
    }

    /// Presses keys together, by QEMU's names: `["ctrl", "alt", "delete"]`.
    ///
    /// # Errors
    /// When a name is unknown, or QEMU is gone.
    pub fn press(&mut self, keys: &[&str]) -> Result<(), Error> {
        let keys: Vec<Value> =
            keys.iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
        self.execute("send-key", json!({ "keys": keys })).map(drop)
    }

    /// Writes the content of the screen to `file`, in `format` (`png` or `ppm`).
    ///
    /// # Errors
    /// When the machine has no screen, or the file cannot be written.
    pub fn screendump(&mut self, file: &Path, format: &str) -> Result<(), Error> {
        let arguments = json!({ "filename": file, "format": format });
        self.execute("screendump", arguments).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A QEMU that answers each line it receives with the next of `answers`.
    fn fake(answers: &'static [&'static str]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut received = BufReader::new(theirs.try_clone().unwrap()).lines();
            let mut theirs = theirs;
            writeln!(theirs, r#"{{"QMP": {{"version": {{}}}}}}"#).unwrap();
            for answer in answers {
                received.next().unwrap().unwrap();
                writeln!(theirs, "{answer}").unwrap();
            }
        });
        ours
    }

    #[test]
    fn events_before_an_answer_are_passed_over() {
        let mut client = Client::new(fake(&[
            r#"{"return": {}}"#,
            "{\"event\": \"RESET\"}\n{\"return\": {\"status\": \"running\"}}",
        ]))
        .unwrap();
        let answer = client.execute("query-status", Value::Null).unwrap();
        assert_eq!(answer["status"], "running");
    }

    #[test]
    fn a_refusal_carries_qemu_s_words() {
        let refusal = r#"{"error": {"class": "GenericError", "desc": "no console"}}"#;
        let answers: &[&str] = Box::leak(Box::new([r#"{"return": {}}"#, refusal]));
        let mut client = Client::new(fake(answers)).unwrap();
        let error = client.screendump(Path::new("x.png"), "png").unwrap_err();
        assert_eq!(error.to_string(), "QEMU refuses `screendump`: no console");
    }

    #[test]
    fn a_qemu_that_ended_is_recognised() {
        let mut client = Client::new(fake(&[r#"{"return": {}}"#])).unwrap();
        assert!(matches!(client.reset(), Err(Error::Lost { .. })));
    }
}
