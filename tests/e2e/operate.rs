//! A person at `polisctl`, in front of a whole machine.

use std::io::{BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::Config;
use polis_qemu::deadline::receive;
use polis_tests::{Story, story};

use crate::fleet::ask_until;
use crate::owner::Owner;
use crate::world::{BOOT, SOON, World, home};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(an_owner_sees_the_cluster_its_logs_and_its_screen_and_reboots_the_machine).takes(60)];

fn an_owner_sees_the_cluster_its_logs_and_its_screen_and_reboots_the_machine() -> Result<()> {
    let world = World::new("operate")?;
    let owner = Owner::new(&world.path("owner"))?;
    let config = Config { forwards: owner.forwards.clone(), ..world.bootstrap_config("")? };
    let (mut machine, founded) = world.at_home(&config)?;
    owner.take(&founded.ca)?;
    let node = founded.node.as_str();

    let whole = owner.document(&["cluster", "wait"])?;
    ensure!(whole["healthy"] == true, "waited, and not healthy: {whole}");
    let info = owner.document(&["cluster", "info"])?;
    ensure!(info["leader"] == node && info["ca_fingerprint"] == *founded.ca, "{info}");
    let nodes = owner.document(&["node", "list"])?;
    ensure!(nodes[0]["id"] == node && nodes[0]["state"] == "up", "{nodes}");
    ensure!(nodes[0]["health"] == "healthy", "{nodes}");
    let age = nodes[0]["heartbeat_age_ms"].as_u64();
    ensure!(age.is_some_and(|age| age < 15_000), "no age of a node that is not late: {nodes}");
    let own = owner.document(&["node", "status", node])?;
    ensure!(own["ready"] == true && own["cluster_state"] == "home", "{own}");
    let services = owner.document(&["node", "services", node])?;
    let roles =
        services.as_array().and_then(|all| all.iter().find(|it| it["name"] == "root.roles"));
    ensure!(roles.is_some_and(|roles| roles["state"] == "healthy"), "{services}");
    let members = owner.document(&["etcd", "members"])?;
    ensure!(members[0]["node_id"] == node && members[0]["leader"] == true, "{members}");

    let lines = owner.document(&["node", "logs", node, "-n", "50"])?;
    let lines = lines.as_array().context("the log")?;
    ensure!((1..=50).contains(&lines.len()), "{} lines of 50", lines.len());
    ensure!(lines.iter().all(|line| line["name"].is_string()), "{lines:?}");
    let roles = owner.run(&["node", "logs", node, "--name", "root.roles"])?;
    ensure!(roles.contains("ready"), "the log of root.roles says nothing of `ready`:\n{roles}");

    looks_at_the_screen(&owner, node)?;
    is_too_small_for_kubernetes(&owner, node)?;

    owner.run(&["node", "reboot", node, "--yes"])?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after a reboot: {back:?}, before: {founded:?}");
    owner.document(&["cluster", "wait"])?;
    // The call ended the machine, which reports it after its start, and what `polisctl` asked
    // before it.
    ask_until("the reboot in the audit log", || {
        let log = owner.document(&["audit"])?;
        let entries = log.as_array().context("the audit log")?;
        let calls = entries.iter().filter(|entry| entry["at"] == node);
        let calls: Vec<_> =
            calls.map(|call| (call["call"].as_str(), call["what"].as_str())).collect();
        let expected = [(Some("Drain"), Some("")), (Some("Reboot"), Some("reboot"))];
        ensure!(expected.starts_with(&calls), "other calls of the node: {calls:?}");
        Ok((calls == expected).then_some(()))
    })?;
    owner.run(&["audit", "verify"])?;
    owner.run(&["node", "poweroff", node, "--yes"])?;
    machine.wait_for("off", SOON, |off| off.is("reason", "poweroff"))?;
    machine.wait_end(SOON)?;
    Ok(())
}

/// The machine has less memory and a smaller disk than a worker needs: the leader refuses that
/// role.
fn is_too_small_for_kubernetes(owner: &Owner, node: &str) -> Result<()> {
    ask_until("what the machine has", || {
        let node = owner.document(&["node", "describe", node])?;
        Ok((node["memory_bytes"].is_u64() && node["data_bytes"].is_u64()).then_some(()))
    })?;
    let worker = ["node", "roles", node, "--add", "kubernetes-worker"];
    let refused = owner.run(&worker).err().context("a worker without memory")?.to_string();
    ensure!(refused.contains("MiB of memory, and these roles"), "another reason: {refused}");
    Ok(())
}

/// Opens the console in a terminal of its own, waits until the node is on it, and
/// presses the key that leaves.
#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
fn looks_at_the_screen(owner: &Owner, node: &str) -> Result<()> {
    // `script` belongs to Debian's essential packages and brings a terminal.
    let mut child = Command::new("script")
        .args(["-qfec", &owner.command_line(&["console", node])?, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start script")?;
    let mut keys = child.stdin.take().context("no keys")?;
    let screen = child.stdout.take().context("no screen")?;
    let (seen, sees) = mpsc::channel();
    let wanted = node.as_bytes()[..16].to_vec();
    thread::spawn(move || {
        let mut shown = Vec::new();
        for byte in BufReader::new(screen).bytes().map_while(Result::ok) {
            shown.push(byte);
            if shown.ends_with(&wanted) {
                let _told = seen.send(());
            }
        }
        shown
    });
    let found = receive(&sees, BOOT);
    keys.write_all(b"q").context("cannot press a key")?;
    let status = child.wait()?;
    if found.is_err() {
        bail!("the console ended with {status} and never showed {node}");
    }
    ensure!(status.success(), "the console ended with {status}");
    Ok(())
}
