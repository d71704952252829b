//! The floor of `bench kubernetes`: the programs of the full image, started by a script.
//!
//! ```text
//! initramfs: busybox, first.sh --> root in memory, `/usr` of the system --> start.sh
//!                                                                             |
//!        this host: the demo, by kubectl <-- POLIS script step=... <----------+
//! ```
//!
//! The machine has the kernel, the system, the memory and the processors of a node. It lacks what
//! takes time and what Kubernetes works without: users have fixed tokens, programs make their own
//! certificates and do not check those of others, Secrets are not encrypted, programs are not
//! confined or watched, and NetworkPolicies are not enforced. Steps have the names of a node's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use polis_image::{Manifest, Tree};
use polis_qemu::args::{Cache, Disk, Firmware, Forward};
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::cheap;
use polis_qemu::{Bus, Config, Machine};
use rcgen::KeyPair;
use serde_json::json;

use super::LONG;
use crate::bench::floor;
use crate::kubernetes::{self, Client, DISK, MEMORY_FIRST, Steps};
use crate::{host, image, operator, run};

/// The shell and the small programs of the machine.
pub(in crate::bench) const NEEDS: &[host::Need] =
    // The other package with this program needs libraries, and gives way to this one.
    &[host::Need { what: "/usr/share/doc/busybox-static", package: "busybox-static" }];
const BUSYBOX: &str = "/bin/busybox";

/// The modules for the system on a virtio disk, in the order of their dependencies; the script
/// loads the others from it.
const MODULES: [&str; 4] = [
    "kernel/crypto/crc32c_generic",
    "kernel/lib/libcrc32c",
    "kernel/fs/erofs/erofs",
    "kernel/drivers/block/virtio_blk",
];

/// The files that its programs read. A user's name for Kubernetes is in the second column of
/// `tokens.csv`, and that of its kubeconfig in the third.
const FILES: [(&str, &str); 6] = [
    ("tokens.csv", include_str!("script/tokens.csv")),
    ("containerd.toml", include_str!("script/containerd.toml")),
    ("kubelet.json", include_str!("script/kubelet.json")),
    ("kube-proxy.json", include_str!("script/kube-proxy.json")),
    ("pods.conflist", include_str!("script/pods.conflist")),
    ("Corefile", include_str!("script/Corefile")),
];

/// The port of the API server.
const API: u16 = 6443;

/// Starts it from an empty disk; returns its steps, which count from an etcd that answers.
pub(super) fn once(manifest: &Manifest, folder: &Path, cpus: u32) -> Result<Steps> {
    run::make_folder(folder)?;
    let tokens = tokens()?;
    let initramfs = folder.join("script.cpio");
    fs::write(&initramfs, tree(manifest, &tokens)?.archive()?)
        .context("cannot write the initramfs of the script")?;
    let data = folder.join("disk.img");
    floor::make_disk(&data, DISK)?;
    // Everything in the machine may write to its disks.
    let system = folder.join("system.img");
    polis_qemu::disk::copy(&manifest.path(&manifest.system), &system)
        .context("cannot copy the system")?;
    let disk =
        |file: &Path| Some(Disk { file: file.to_owned(), bus: Bus::Virtio, cache: Cache::Unsafe });
    let host = operator::free_port(16443)?;
    let accelerator = accelerator(Preference::Auto, cpus);
    let config = Config {
        disk: disk(&data),
        second_disk: disk(&system),
        memory: MEMORY_FIRST,
        cpus,
        forwards: vec![Forward { host, guest: API }],
        ..Config::new(
            Firmware::Direct {
                kernel: manifest.path(&manifest.kernel),
                initramfs,
                // Interfaces keep the kernel's names.
                cmdline: format!("{} {}", floor::cmdline(manifest), cheap(accelerator)),
            },
            accelerator,
        )
    };
    let kubeconfig = folder.join("kubeconfig");
    fs::write(&kubeconfig, self::kubeconfig(&format!("127.0.0.1:{host}"), &tokens["admin"]))
        .with_context(|| format!("cannot write {}", kubeconfig.display()))?;
    let client = Client::new(folder, &kubeconfig)?;

    let mut machine = Machine::start(&config, folder)?;
    let mut at = |step: &str| -> Result<Duration> {
        let event = machine.wait_for("script", LONG, |event| {
            event.get("step") == Some(step) || event.get("ended").is_some()
        })?;
        match event.get("ended") {
            Some(program) => bail!("{program} has ended; serial.log has its last words"),
            None => Ok(event.at),
        }
    };
    let etcd = at("etcd")?;
    let mut steps = Steps::default();
    let mut done = |what: &str, at: Duration| {
        let since = at.saturating_sub(etcd);
        println!("script: {:6.1} s  {what}", since.as_secs_f64());
        steps.0.push((what.to_owned(), since));
    };
    done(&kubernetes::part_ready("apiserver", 1), at("apiserver")?);
    at("all")?;
    client.wait("create", &["node/script"])?;
    client.wait("condition=Ready", &["node/script"])?;
    // A node waits for the controller manager's first work, too.
    client.wait("create", &["serviceaccount/default"])?;
    let started = machine.started();
    done(&kubernetes::serves(1), started.elapsed());
    client.demo(|what| done(what, started.elapsed())).with_context(|| {
        let ended = machine.seen(|event| event.get("ended").is_some());
        let ended: Vec<_> = ended.iter().filter_map(|event| event.get("ended")).collect();
        format!("programs of the script that have ended: {ended:?}")
    })?;
    drop(machine);
    for disk in [data, system] {
        fs::remove_file(&disk).with_context(|| format!("cannot remove {}", disk.display()))?;
    }
    Ok(steps)
}

/// The tokens of its users, by the names of their kubeconfigs.
fn tokens() -> Result<BTreeMap<String, String>> {
    let (_, table) = FILES[0];
    let line = |line: &str| {
        let mut cells = line.split(',');
        let (token, name) = (cells.next()?, cells.nth(1)?);
        Some((name.to_owned(), token.to_owned()))
    };
    table.lines().map(line).collect::<Option<_>>().context("bad tokens")
}

/// The content of its initramfs.
fn tree(manifest: &Manifest, tokens: &BTreeMap<String, String>) -> Result<Tree> {
    let mut tree = Tree::default();
    tree.device("dev/console", 5, 1);
    tree.folder("proc", 0o755);
    tree.folder("new", 0o755);
    tree.program("bin/busybox", BUSYBOX);
    tree.program("ctr", image::go_program("ctr"));
    let scripts = image::workspace().join("xtask/src/bench/kubernetes/script");
    tree.program("init", scripts.join("first.sh"));
    tree.program("start", scripts.join("start.sh"));
    floor::add_modules(&mut tree, manifest, &MODULES)?;
    for (name, text) in FILES {
        tree.text(&format!("script/{name}"), text);
    }
    for (user, token) in tokens {
        let text = kubeconfig(&format!("127.0.0.1:{API}"), token);
        tree.text(&format!("script/{user}.kubeconfig"), text);
    }
    let key = KeyPair::generate().context("cannot make a key")?;
    tree.text("script/service-account.key", key.serialize_pem());
    tree.text("script/service-account.pub", key.public_key_pem());
    Ok(tree)
}

/// The kubeconfig of the user with this token. The certificate of the API server is its own, and
/// of the machine alone.
fn kubeconfig(server: &str, token: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "script",
            "cluster": {"server": format!("https://{server}"), "insecure-skip-tls-verify": true},
        }],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "script", "context": {"cluster": "script", "user": "user"}}],
        "current-context": "script",
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_script_starts_every_processor_also_where_there_is_one() {
        let start = include_str!("script/start.sh");
        let from = start.find("for online in").unwrap();
        let to = from + start[from..].find("\ndone\n").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display().to_string();
        let text = start[from..to].replace("/sys/devices/system/cpu", &place) + "\ndone";
        let run = || Command::new("sh").args(["-e", "-c", &text]).status().unwrap().success();
        fs::create_dir(folder.path().join("cpu0")).unwrap();
        assert!(run(), "{text}");
        let online = folder.path().join("cpu1/online");
        fs::create_dir(folder.path().join("cpu1")).unwrap();
        fs::write(&online, "0").unwrap();
        assert!(run(), "{text}");
        assert_eq!(fs::read_to_string(online).unwrap(), "1\n");
    }

    #[test]
    fn every_program_of_the_script_has_its_user() {
        let tokens = tokens().unwrap();
        let start = include_str!("script/start.sh");
        let proxy = FILES.iter().find(|(name, _)| *name == "kube-proxy.json").unwrap().1;
        let dns = FILES.iter().find(|(name, _)| *name == "Corefile").unwrap().1;
        let text = [start, proxy, dns].concat();
        let named: Vec<_> = text
            .split(".kubeconfig")
            .filter_map(|before| before.rsplit('/').next())
            .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
            .collect();
        assert!(named.len() >= 5, "{named:?}");
        assert!(named.iter().all(|name| tokens.contains_key(*name)), "{named:?} {tokens:?}");
        assert!(tokens.contains_key("admin"));
    }
}
