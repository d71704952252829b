//! Simulates a cluster of many nodes around one real curator with one real etcd.
//!
//! `cargo xtask bench curator` starts it twice, so that what serves and what asks
//! are two processes that can be measured apart.
//!
//! ```text
//! curator-load serve FOLDER ETCD NODES          etcd, curator; a line `ready MILLISECONDS`, then
//!                                               until stdin ends
//! curator-load load FOLDER WATCHERS SECONDS     a line `measuring`, then one of JSON with values
//! ```
#![expect(clippy::print_stdout, reason = "it reports to the process that started it")]

mod load;
mod serve;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use polis_wire::pki::Authorities;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::{Connection, Expect, Trust, dial};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use zeroize::Zeroizing;

/// The callers, as one process leaves them for the other.
#[derive(Debug, Serialize, Deserialize)]
struct Callers {
    address: String,
    authority: Vec<u8>,
    operator: Caller,
    nodes: Vec<Caller>,
    /// The node whose record the operator changes.
    changed: String,
}

/// A certificate and its key.
#[derive(Debug, Serialize, Deserialize)]
struct Caller {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl Caller {
    fn credentials(&self, authority: &[u8]) -> Credentials {
        Credentials {
            certificate: self.certificate.clone(),
            key: Arc::new(Zeroizing::new(self.key.clone())),
            authorities: Some(Authorities::sole(authority.to_vec()).into()),
        }
    }
}

impl Callers {
    /// A connection of this caller to the curator.
    async fn connect(&self, caller: &Caller) -> Result<Connection> {
        let (host, port) = self.address.rsplit_once(':').context("not an address")?;
        let trust = Trust::in_one(self.authority.clone());
        let credentials = caller.credentials(&self.authority);
        let port = port.parse().context("not a port")?;
        // The server refuses newcomers while it is busy with others.
        let mut attempts = 0;
        loop {
            match dial(host, port, Expect::AnyNode, &trust, Some(&credentials)).await {
                Ok(connection) => return Ok(connection),
                Err(error) if attempts == 5 => return Err(error).context("cannot connect"),
                Err(_) => attempts += 1,
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

fn callers_at(folder: &Path) -> PathBuf {
    folder.join("callers.json")
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: &String| text.parse::<usize>().context("not a number");
    // As many sockets as there are callers.
    polis_base::sys::files::allow(32 << 10).context("cannot raise the limit of open files")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot make a runtime")?;
    match arguments.iter().collect::<Vec<_>>()[..] {
        [mode, folder, etcd, nodes] if mode == "serve" => {
            runtime.block_on(serve::run(Path::new(folder), Path::new(etcd), number(nodes)?))
        }
        [mode, folder, watchers, seconds] if mode == "load" => runtime.block_on(load::run(
            Path::new(folder),
            number(watchers)?,
            Duration::from_secs(number(seconds)? as u64),
        )),
        _ => bail!("usage: curator-load serve FOLDER ETCD NODES | load FOLDER WATCHERS SECONDS"),
    }
}
