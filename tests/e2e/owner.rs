//! The owner of a story's cluster, with `polisctl` in hand.

use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use ed25519_dalek::SigningKey;
use polis_qemu::Operator;
use polis_qemu::args::Forward;
use polis_tests::polisctl;
use polis_wire::pki;
use polis_wire::rpc::Credentials;
use serde_json::Value;

/// The private half of [`crate::world::OWNER`].
pub(crate) const SECRET: [u8; 32] = [
    0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec, 0x2c, 0xc4,
    0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60,
];

/// The owner's name for the cluster.
const CONTEXT: &str = "story";

/// The ports of a node that `polisctl` calls.
const PORTS: [u16; 2] = [7835, 7839];

/// The address that QEMU's NAT gives to its only machine.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

/// The owner, and the ways to the only node of the cluster.
pub(crate) struct Owner {
    config: PathBuf,
    pub(crate) forwards: Vec<Forward>,
}

impl Owner {
    /// An owner who keeps contexts in `dir`.
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        Self::with_ports(dir, &[])
    }

    /// The same, with ways to `more` ports of the node.
    pub(crate) fn with_ports(dir: &Path, more: &[u16]) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let forwards = PORTS.iter().chain(more).map(|&guest| {
            let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            Ok(Forward { host: bound.local_addr()?.port(), guest })
        });
        let owner =
            Self { config: dir.join("operator"), forwards: forwards.collect::<Result<_>>()? };
        let key = private(&dir.join("owner.key"), &pki::key_pem(&SigningKey::from_bytes(&SECRET)))?;
        let mut args = vec!["context".to_owned(), "set".to_owned(), CONTEXT.to_owned()];
        args.extend(["--key".to_owned(), key.display().to_string()]);
        for Forward { host, guest } in &owner.forwards {
            if *guest == PORTS[0] {
                args.extend(["--endpoint".to_owned(), format!("127.0.0.1:{host}")]);
            }
            args.extend(["--via".to_owned(), format!("{GUEST}:{guest}=127.0.0.1:{host}")]);
        }
        owner.run(&args)?;
        Ok(owner)
    }

    /// Gets the owner's certificate from the cluster whose CA has this fingerprint.
    pub(crate) fn take(&self, ca: &str) -> Result<()> {
        self.run(&["cluster", "take-ownership", "--fingerprint", ca]).map(drop)
    }

    /// Where a port of the node is on this host.
    pub(crate) fn at(&self, guest: u16) -> Result<String> {
        let forward = self.forwards.iter().find(|forward| forward.guest == guest);
        let host = forward.with_context(|| format!("no way to port {guest}"))?.host;
        Ok(format!("127.0.0.1:{host}"))
    }

    /// The credentials that the owner shows to servers, once ownership is taken.
    pub(crate) fn credentials(&self) -> Result<Credentials> {
        let der = |name: &str| {
            let file = self.config.join("contexts").join(CONTEXT).join(name);
            let text = fs::read(&file).with_context(|| format!("no {}", file.display()))?;
            let (_, pem) = x509_parser::pem::parse_x509_pem(&text)?;
            anyhow::Ok(pem.contents)
        };
        Ok(Credentials {
            certificate: der("certificate.pem")?,
            key: pki::key_der(&SigningKey::from_bytes(&SECRET)).into(),
            authorities: Some(pki::Authorities::sole(der("ca.pem")?).into()),
        })
    }

    /// The command that a shell runs for `polisctl` with these arguments.
    pub(crate) fn command_line(&self, args: &[&str]) -> Result<String> {
        let (program, config) = (polisctl()?, self.config.display());
        let program = program.display();
        Ok(format!("'{program}' --config '{config}' --context {CONTEXT} {}", args.join(" ")))
    }

    /// Runs `polisctl`; returns its output.
    pub(crate) fn run(&self, args: &[impl AsRef<OsStr>]) -> Result<String> {
        self.run_within("2m", args)
    }

    /// The same, within a time of its own.
    pub(crate) fn run_within(&self, time: &str, args: &[impl AsRef<OsStr>]) -> Result<String> {
        let timeout = ["--timeout", time].map(OsStr::new).into_iter();
        let args: Vec<&OsStr> = timeout.chain(args.iter().map(AsRef::as_ref)).collect();
        Ok(self.operator()?.run(&args)?)
    }

    /// Runs `polisctl`; returns the document that it prints for programs.
    pub(crate) fn document(&self, args: &[&str]) -> Result<Value> {
        Ok(self.operator()?.document(&[&["--timeout", "2m"][..], args].concat())?)
    }

    fn operator(&self) -> Result<Operator> {
        Ok(Operator::new(&polisctl()?, &self.config, CONTEXT))
    }
}

/// A file as `polisctl` demands it for secrets.
pub(crate) fn private(path: &Path, content: &str) -> Result<PathBuf> {
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(path.to_owned())
}
