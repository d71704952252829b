//! A client that shares no code with us: Python's own TLS, somebody else's gRPC.
//!
//! Its libraries come from the network's package index into a folder of the
//! build. Where that cannot be reached the story is skipped, and the runner
//! lists it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_tests::{Story, skip, story, workspace};
use serde_json::Value;

use crate::ctl;

/// The parts of the client.
const PACKAGES: [&str; 3] = ["grpclib==0.4.9", "protobuf==7.36.2", "h2==4.4.1"];
/// Longest that the packages may take to come.
const FETCH: Duration = Duration::from_secs(150);

fn target() -> PathBuf {
    workspace().join("target")
}

async fn run(program: &Path, arguments: &[&str]) -> Result<String, String> {
    #[expect(clippy::disallowed_methods, reason = "a test on a host reaps its own children")]
    let mut command = tokio::process::Command::new(program);
    let output = command.args(arguments).kill_on_drop(true).output();
    let name = program.display();
    let output = tokio::time::timeout(FETCH, output)
        .await
        .map_err(|_elapsed| format!("{name} takes longer than {FETCH:?}"))?
        .map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let printed = String::from_utf8_lossy(&output.stderr);
    let last = printed.trim().lines().last().unwrap_or_default();
    Err(format!("{name} ended with {}: {last}", output.status))
}

/// A Python with the packages; the reason, where there cannot be one.
async fn python() -> Result<PathBuf, String> {
    let folder = target().join("independent");
    let python = folder.join("bin/python");
    let wanted = PACKAGES.join("\n");
    let stamp = folder.join("packages");
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(python);
    }
    let place = folder.display().to_string();
    run(Path::new("python3"), &["-m", "venv", "--clear", &place]).await?;
    let mut install = vec!["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    install.extend(PACKAGES);
    run(&python, &install).await?;
    std::fs::write(&stamp, wanted).map_err(|error| error.to_string())?;
    Ok(python)
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads a_client_that_knows_nothing_lists_the_services_and_reads_what_the_cluster_is)];

async fn a_client_that_knows_nothing_lists_the_services_and_reads_what_the_cluster_is()
-> anyhow::Result<()> {
    let python = match python().await {
        Ok(python) => python,
        Err(reason) => {
            return skip(&format!("no independent client here: {reason}"));
        }
    };
    let (machine, node, cluster, curator, person) = ctl::cluster().await;
    person.owns(&cluster).await;
    let context = person.path("polis/contexts/cluster.internal");
    let file = |name: &str| context.join(name).display().to_string();
    let (host, port) = (curator.address.ip().to_string(), curator.address.port().to_string());
    let key = person.path("polis/owner.key").display().to_string();
    let script = workspace().join("tests/etcd/independent.py");
    let script = script.display().to_string();
    let (ca, certificate, name) = (file("ca.pem"), file("certificate.pem"), machine.name());
    let printed = run(&python, &[&script, &host, &port, &name, &ca, &certificate, &key]).await;
    let printed: Value = serde_json::from_str(&printed.unwrap()).unwrap();
    let services: Vec<&str> =
        printed["services"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for service in
        ["polis.v1.Aaa", "polis.v1.Curator", "polis.v1.CuratorLocal", "polis.v1.Management"]
    {
        assert!(services.contains(&service), "{service} is not among {services:?}");
    }
    assert_eq!(printed["info"]["leader"], name);
    assert_eq!(printed["info"]["nodesUp"], 1);
    curator.supervisor.stop().await;
    node.stop().await;
    Ok(())
}
