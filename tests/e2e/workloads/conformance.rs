//! The conformance tests of Kubernetes with pods, by `cargo xtask conformance`.
//!
//! A story has a cluster, serves the images of the tests to it, and calls that command.
//! One story founds a machine for the quickest of them, with networks of pods and Services of its
//! own. The command calls the other one, for the tests that a person selects and the cluster of
//! `cargo xtask run --kubernetes`.
//!
//! The command makes the images and selects the tests. It prints each test with its result, so
//! the output of the story names those that failed.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_proto::v1::{ClusterConfiguration, ClusterNetworks, NodeParameters};
use polis_qemu::Config;
use polis_tests::{Story, block_on, skip, story};
use polis_wire::pod_network::Networks;
use prost::Message as _;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};

use super::kubectl::Kubectl;
use super::{ACCESS, IN_DEMO, large, takes_both_roles, visited};
use crate::owner::Owner;
use crate::registry::{self, Content, Server};
use crate::suite;
use crate::world::{World, founding, home};

/// The layout with the images of the tests.
const IMAGES: &str = "POLIS_CONFORMANCE_IMAGES";
/// The folder of the cluster of `cargo xtask run --kubernetes`.
const CLUSTER: &str = "POLIS_CONFORMANCE_CLUSTER";

/// The loopback interface of this host, for a machine.
const HOST: &str = "10.0.2.2";
/// The registry in the names of the images.
const REGISTRY: &str = "registry.k8s.io";
/// The network of pods that the machine is founded with, with room for four nodes.
const PODS: &str = "172.28.0.0/22";
/// That of Services.
const SERVICES: &str = "192.168.224.0/20";
/// The media type of a blob that is not a manifest.
const BLOB: &str = "application/octet-stream";

/// The stories of this file. The suite waits five minutes for a pod that does not start; its
/// report, which names the tests that failed, comes after the last one.
pub(crate) const STORIES: &[Story] = &[
    story!(the_quickest_tests_with_pods_pass_on_a_machine)
        .cluster()
        .takes(420)
        .at_most(Duration::from_secs(40 * 60)),
    story!(tests_with_pods_pass_on_a_cluster),
];

fn the_quickest_tests_with_pods_pass_on_a_machine() -> Result<()> {
    let world = World::of_full("conformance")?;
    let Some(images) = set(IMAGES) else {
        return skip(
            "no images of its pods were made: `cargo xtask test` makes them where target/go/bin \
             has e2e, agnhost and kubectl, which `cargo xtask conformance` builds, and the host \
             has the programs that they copy (docs/workloads.md, Conformance)",
        );
    };
    let owner = Owner::with_ports(&world.path("owner"), &[ACCESS])?;
    let networks = Networks { pods: PODS.parse()?, services: SERVICES.parse()? };
    let fw_cfg = world.fw_cfg(&parameters(networks).encode_to_vec())?;
    let config = large(&world, &owner, Config { fw_cfg, ..world.bare("") })?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    takes_both_roles(&owner, &mut machine, &founded.node)?;
    let kubectl = Kubectl::of(&world, &owner)?;
    kubectl.serves()?;
    let operate = |args: &[&str]| owner.run(args).map(drop);
    block_on(true, pass(&images, &world.path("kubeconfig"), operate))?;
    // The pods of the tests are gone. Those of the demo get their addresses in the same way.
    visited(&kubectl, &founded.node)?;
    has_addresses_of(networks, &kubectl)
}

/// Parameters that found a cluster with these networks.
fn parameters(networks: Networks) -> NodeParameters {
    let ClusterNetworks { pod_network, service_network } = networks.to_message();
    founding(ClusterConfiguration {
        storage_security_policy: StorageSecurityPolicy::NeedsInsecure.into(),
        pod_network,
        service_network,
        ..ClusterConfiguration::default()
    })
}

/// Checks that the pods and the Service of the demo have addresses of these networks, and the
/// Service `kubernetes` the first one.
fn has_addresses_of(networks: Networks, kubectl: &Kubectl) -> Result<()> {
    let addresses = |what: &[&str], path: &str| -> Result<Vec<Ipv4Addr>> {
        let output = format!("jsonpath={{{path}}}");
        let printed = kubectl.run(&[what, &["--output", output.as_str()]].concat(), "")?;
        let words = printed.split_whitespace();
        words.map(|word| word.parse::<Ipv4Addr>().with_context(|| word.to_owned())).collect()
    };
    let pods = addresses(&["get", "pods", IN_DEMO], ".items[*].status.podIP")?;
    let inside = pods.iter().all(|address| networks.pods.has(*address));
    ensure!(inside && !pods.is_empty(), "the pods of the demo, in {PODS}, have {pods:?}");
    let demo = addresses(&["get", "service", "demo", IN_DEMO], ".spec.clusterIP")?;
    let inside = demo.iter().all(|address| networks.services.has(*address));
    ensure!(inside && demo.len() == 1, "the Service of the demo, in {SERVICES}, has {demo:?}");
    let first = addresses(&["get", "service", "kubernetes"], ".spec.clusterIP")?;
    ensure!(first == [networks.first_service()], "the Service `kubernetes` has {first:?}");
    Ok(())
}

fn tests_with_pods_pass_on_a_cluster() -> Result<()> {
    let (Some(images), Some(cluster)) = (set(IMAGES), set(CLUSTER)) else {
        return skip("`cargo xtask conformance --stage pods` runs it");
    };
    let operate = |args: &[&str]| operate(&cluster, args);
    block_on(true, pass(&images, &cluster.join("kubeconfig"), operate))
}

fn set(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from)
}

/// Runs the tests against the cluster of this kubeconfig, with the images of a layout; `operate`
/// is `polisctl` for the cluster.
async fn pass(
    images: &Path,
    kubeconfig: &Path,
    operate: impl Fn(&[&str]) -> Result<()>,
) -> Result<()> {
    let list = std::env::var(suite::COMMAND).context(suite::COMMAND)?;
    let server = Server::start(HOST, None, content(images)?).await?;
    let mirror = format!("{HOST}:{}", server.address.port());
    let folder = tempfile::tempdir()?;
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, &server.authority)?;
    let ca = ca.display().to_string();
    let registry = |args: &[&str]| operate(&[&["cluster", "registry"], args].concat());
    let kubeconfig = by_name(kubeconfig, folder.path()).await?;
    registry(&["set", &mirror, "--ca", &ca])?;
    registry(&["set", REGISTRY, "--mirror", &mirror])?;
    let mut command = suite::command(&list, &kubeconfig)?;
    let status = tokio::task::spawn_blocking(move || command.status()).await?;
    for entry in [REGISTRY, &mirror] {
        registry(&["delete", entry, "--yes"])?;
    }
    let status = status.context("cannot start the command of the tests")?;
    ensure!(status.success(), "conformance tests failed ({status}): see the lines with FAILED");
    Ok(())
}

/// A kubeconfig of the cluster whose server is named as its certificate says. The suite takes
/// the server of a kubeconfig, and forgets under which name its certificate is to be checked; a
/// proxy on this host leads that name to the forwarded port.
async fn by_name(kubeconfig: &Path, folder: &Path) -> Result<PathBuf> {
    let file = folder.join("kubeconfig");
    std::fs::copy(kubeconfig, &file)?;
    let kubectl = Kubectl::new(file.clone());
    let config = |args: &[&str]| kubectl.run(&[&["config"], args].concat(), "");
    let fact = |path: &str| {
        let path = format!("jsonpath={{.clusters[0].{path}}}");
        config(&["view", "--minify", "--output", &path])
    };
    let cluster = fact("name")?;
    let (server, name) = (fact("cluster.server")?, fact("cluster.tls-server-name")?);
    let address = server.strip_prefix("https://").context("the server has no address")?.to_owned();
    let port = address.rsplit_once(':').map_or("443", |(_, port)| port).to_owned();
    let proxy = tunnel(address).await?;
    config(&["set", &format!("clusters.{cluster}.server"), &format!("https://{name}:{port}")])?;
    config(&["set", &format!("clusters.{cluster}.proxy-url"), &format!("http://{proxy}")])?;
    config(&["unset", &format!("clusters.{cluster}.tls-server-name")])?;
    Ok(file)
}

/// Starts a proxy (RFC 9110, CONNECT) that connects each caller to `target`.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
async fn tunnel(target: String) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let target = target.clone();
            tokio::spawn(async move {
                if registry::head(&mut client).await.is_err() {
                    return;
                }
                let Ok(mut server) = TcpStream::connect(target).await else { return };
                let open = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                if open.is_ok() {
                    let _gone = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
    });
    Ok(address)
}

/// Runs `polisctl` for the cluster in this folder.
#[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
fn operate(cluster: &Path, args: &[&str]) -> Result<()> {
    let mut command = Command::new(cluster.join("polisctl"));
    let output = command.args(args).output().context("cannot start polisctl")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, said.trim());
    Ok(())
}

/// The images of a layout of the Open Container Initiative, each below its repository. Most of
/// them have the same layer.
fn content(folder: &Path) -> Result<Content> {
    let read = |path: &Path| {
        std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let mut blobs: BTreeMap<String, Arc<[u8]>> = BTreeMap::new();
    let mut blob = |descriptor: &Value| -> Result<(String, Arc<[u8]>)> {
        let digest = descriptor["digest"].as_str().context("a descriptor without a digest")?;
        let bytes = match blobs.get(digest) {
            Some(bytes) => Arc::clone(bytes),
            None => read(&folder.join("blobs").join(digest.replace(':', "/")))?.into(),
        };
        blobs.insert(digest.to_owned(), Arc::clone(&bytes));
        Ok((digest.to_owned(), bytes))
    };
    let index: Value = serde_json::from_slice(&read(&folder.join("index.json"))?)?;
    let mut content = Content::new();
    for image in index["manifests"].as_array().context("index.json lists no image")? {
        let name = image["annotations"]["io.containerd.image.name"].as_str();
        let name = name.context("an image has no name")?;
        let parts = name.split_once('/').and_then(|(_host, rest)| rest.rsplit_once(':'));
        let (repository, tag) =
            parts.with_context(|| format!("{name} has no registry or no tag"))?;
        let kind = image["mediaType"].as_str().unwrap_or(BLOB);
        let (digest, manifest) = blob(image)?;
        let text: Value = serde_json::from_slice(&manifest)?;
        for reference in [tag, &digest] {
            let path = format!("/v2/{repository}/manifests/{reference}");
            content.insert(path, (kind.to_owned(), Arc::clone(&manifest)));
        }
        for part in text["layers"].as_array().into_iter().flatten().chain([&text["config"]]) {
            let (digest, bytes) = blob(part)?;
            let path = format!("/v2/{repository}/blobs/{digest}");
            content.insert(path, (BLOB.to_owned(), bytes));
        }
    }
    Ok(content)
}
