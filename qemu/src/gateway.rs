//! The gateway of a segment: a QEMU without a guest, used for its NAT.
//!
//! It answers DHCP (16 leases from 10.0.2.15 on) and name queries, and forwards
//! ports of the host's loopback interface to machines.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::json;

use crate::machine::{self, Error};
use crate::qmp;
use crate::scratch::Scratch;

/// The running gateway. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Gateway {
    child: Child,
    qmp: qmp::Client,
    _socket: Scratch,
}

impl Gateway {
    /// Starts it at the switch that listens on `port`.
    pub(crate) fn start(port: &Path, dir: &Path) -> Result<Self, Error> {
        let host = |doing: String| move |source| Error::Host { doing, source };
        fs::create_dir_all(dir).map_err(host(format!("make {}", dir.display())))?;
        let runtime = Scratch::new().map_err(host("make a folder for a socket".to_owned()))?;
        let socket = runtime.path().join("qmp");
        let listener = machine::listen(&socket)?;
        let log = dir.join("gateway.log");
        let stderr = File::create(&log).map_err(host(format!("make {}", log.display())))?;
        let netdev =
            format!("stream,id=line,server=off,addr.type=unix,addr.path={}", port.display());
        let chardev = format!("socket,id=qmp,server=off,path={}", socket.display());
        let mut child = machine::command()
            .args(["-nodefaults", "-no-user-config", "-machine", "none", "-display", "none"])
            .args(["-netdev", "user,id=nat"])
            .args(["-netdev", "hubport,id=inside,hubid=0,netdev=nat"])
            .args(["-netdev", &netdev])
            .args(["-netdev", "hubport,id=outside,hubid=0,netdev=line"])
            .args(["-chardev", &chardev, "-mon", "chardev=qmp,mode=control"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .map_err(host("start QEMU".to_owned()))?;
        let session = machine::accept(&listener, &mut child)
            .and_then(|stream| qmp::Client::new(stream).map_err(Error::from));
        match session {
            Ok(qmp) => Ok(Self { child, qmp, _socket: runtime }),
            Err(error) => {
                machine::end(&mut child);
                let output = fs::read_to_string(&log).unwrap_or_default();
                Err(if output.is_empty() { error } else { Error::Refused { output } })
            }
        }
    }

    /// Forwards the host's loopback port `host` to `port` of `address`.
    pub(crate) fn forward(&mut self, host: u16, address: Ipv4Addr, port: u16) -> Result<(), Error> {
        let line = format!("hostfwd_add nat tcp:127.0.0.1:{host}-{address}:{port}");
        let arguments = json!({ "command-line": line });
        let answer = self.qmp.execute("human-monitor-command", arguments)?;
        // The human monitor prints nothing on success.
        match answer.as_str().unwrap_or_default().trim() {
            "" => Ok(()),
            reason => {
                let reason = reason.to_owned();
                Err(qmp::Error::Refused { command: line, reason }.into())
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        machine::end(&mut self.child);
    }
}
