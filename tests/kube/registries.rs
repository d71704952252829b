//! containerd pulls from a registry of this story, with the configuration, the environment and
//! the files of hosts that a worker gives it: by a mirror, with an authority and a user of its
//! own, and through the proxy of the cluster.
//!
//! containerd runs as root, in a mount namespace of its own. It starts once in a story: each
//! change of the registries counts for the next pull.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result};
use polis_base::files::Root;
use polis_base::sys::clock;
use polis_proto::v1;
use polis_tests::{Story, patiently, skip, story};
use polis_wire::parameters;
use polis_wire::registry::Registry;
use polis_workload::runtime::config::{self, Gvisor};
use polis_workload::runtime::registries;
use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::registry::{Content, Server, authority, digest, head};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads an_image_is_pulled_by_a_mirror_with_its_authority_and_user).takes(15),
    story!(threads an_image_is_pulled_through_the_proxy_of_the_cluster).takes(15),
];

/// A registry that does not answer, so that only the mirror can: nothing listens on port 1.
const UPSTREAM: &str = "127.0.0.1:1";
/// A registry that only the proxy reaches.
const OUTSIDE: &str = "registry.example";
/// `ann:open sesame` in base64.
const AUTHORIZATION: &str = "Basic YW5uOm9wZW4gc2VzYW1l";
const PASSWORD: &str = "open sesame";
/// A pull, or the start of containerd, on a busy host.
const PATIENCE: Duration = Duration::from_secs(60);

async fn an_image_is_pulled_by_a_mirror_with_its_authority_and_user() -> Result<()> {
    let Some(program) = program() else {
        return skip("target/go/bin/containerd is not there: an image with Kubernetes builds it");
    };
    if !rustix::process::geteuid().is_root() {
        return skip("containerd needs root");
    }
    let mirror = Server::start("127.0.0.1", Some(AUTHORIZATION), content()).await?;
    let base = tempfile::tempdir()?;
    let tree = Root::at(base.path());
    let variables = config::environment(&tree, None);
    let containerd = Containerd::start(&program, &tree, base.path(), variables).await?;
    let image = |name: &str| format!("{UPSTREAM}/{name}:1");
    let set = |entries: &[v1::Registry]| {
        let read = entries.iter().map(|one| Registry::read_at(one, clock::now()).unwrap());
        let files = registries::files(&read.collect::<Vec<_>>());
        registries::write(&tree.ephemeral.registries, &files).unwrap();
    };
    let upstream = v1::Registry {
        host: UPSTREAM.to_owned(),
        mirrors: vec![format!("{}/copies", mirror.address)],
        ..Default::default()
    };
    let trusted = v1::Registry {
        host: mirror.address.to_string(),
        ca: mirror.authority.clone(),
        username: "ann".to_owned(),
        password: PASSWORD.to_owned(),
        ..Default::default()
    };

    set(&[upstream.clone(), v1::Registry { ca: authority().0, ..trusted.clone() }]);
    let refused = containerd.pull(&image("app")).await.unwrap_err();
    for word in ["x509: certificate signed by unknown authority", &mirror.address.to_string()] {
        assert!(refused.message().contains(word), "{word}: {refused}");
    }
    assert_eq!(mirror.served(), 0, "no request before the certificate is trusted");

    set(&[upstream.clone(), v1::Registry { password: "other".to_owned(), ..trusted.clone() }]);
    let refused = containerd.pull(&image("app")).await.unwrap_err();
    assert!(refused.message().contains("authorization failed"), "{refused}");

    set(&[upstream, trusted]);
    let pulled = containerd.pull(&image("app")).await?;
    assert!(pulled.starts_with("sha256:"), "{pulled}");
    let asked = mirror.requests.lock().unwrap().clone();
    assert!(asked.iter().any(|line| line.contains("/v2/copies/app/manifests/1?ns=")), "{asked:?}");

    let log = containerd.stop()?;
    assert!(!log.contains(PASSWORD) && !log.contains(AUTHORIZATION), "a secret is in the log");
    Ok(())
}

async fn an_image_is_pulled_through_the_proxy_of_the_cluster() -> Result<()> {
    let Some(program) = program() else {
        return skip("target/go/bin/containerd is not there: an image with Kubernetes builds it");
    };
    if !rustix::process::geteuid().is_root() {
        return skip("containerd needs root");
    }
    let outside = Server::start(OUTSIDE, None, content()).await?;
    let base = tempfile::tempdir()?;
    let tree = Root::at(base.path());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let place = "proxy.example:3128";
    let message = v1::ProxyConfiguration { url: format!("http://{place}"), ..Default::default() };
    let named = parameters::proxy(&message, "proxy")?.context("the message has a proxy")?;
    // The proxy of a cluster is never on loopback; that of the story is.
    let address = listener.local_addr()?.to_string();
    let variables = config::environment(&tree, Some(&named)).into_iter();
    let variables = variables.map(|(name, value)| (name, value.replace(place, &address)));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let pulls = async {
        let containerd =
            Containerd::start(&program, &tree, base.path(), variables.collect()).await?;
        let trusted = v1::Registry {
            host: OUTSIDE.to_owned(),
            ca: outside.authority.clone(),
            ..Default::default()
        };
        let trusted = Registry::read_at(&trusted, clock::now())?;
        registries::write(&tree.ephemeral.registries, &registries::files(&[trusted]))?;
        let pulled = containerd.pull(&format!("{OUTSIDE}/copies/app:1")).await?;
        assert!(pulled.starts_with("sha256:"), "{pulled}");
        // On the node itself, nothing answers, and the proxy is not asked.
        containerd.pull(&format!("{UPSTREAM}/app:1")).await.unwrap_err();
        anyhow::Ok(())
    };
    tokio::select! {
        // Cancel-safe, both: the story ends with the first of them.
        pulled = pulls => pulled?,
        () = proxy(listener, outside.address, Arc::clone(&asked)) => {
            anyhow::bail!("the proxy has ended");
        }
    }
    let asked = asked.lock().unwrap().clone();
    let tunnel = format!("CONNECT {OUTSIDE}:443 HTTP/1.1");
    assert!(!asked.is_empty() && asked.iter().all(|line| *line == tunnel), "{asked:?}");
    assert!(outside.served() > 0);
    Ok(())
}

/// A proxy all of whose tunnels lead to one place; `asked` has the first line of each request.
async fn proxy(listener: TcpListener, to: SocketAddr, asked: Arc<Mutex<Vec<String>>>) {
    let mut tunnels = JoinSet::new();
    while let Ok((mut stream, _from)) = listener.accept().await {
        let asked = Arc::clone(&asked);
        tunnels.spawn(async move {
            let Ok(head) = head(&mut stream).await else { return };
            asked.lock().unwrap().push(head.lines().next().unwrap_or_default().to_owned());
            let Ok(mut server) = TcpStream::connect(to).await else { return };
            let _gone = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
            // Either end may be the first to close it.
            let _ended = copy_bidirectional(&mut stream, &mut server).await;
        });
    }
}

/// containerd, beside the program `kube`.
fn program() -> Option<PathBuf> {
    let kube = PathBuf::from(std::env::var_os("POLIS_KUBE")?);
    Some(kube.with_file_name("containerd")).filter(|path| path.is_file())
}

/// A running containerd.
struct Containerd {
    child: Child,
    log: PathBuf,
    channel: Channel,
}

impl Containerd {
    #[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
    async fn start(
        program: &Path,
        tree: &Root,
        base: &Path,
        variables: Vec<(&'static str, String)>,
    ) -> Result<Self> {
        let ephemeral = &tree.ephemeral;
        for directory in [&ephemeral.containerd.dir, &ephemeral.containerd_scratch] {
            directory.create()?;
        }
        let text = config::containerd(tree, Path::new("/shim"), Gvisor::Lacking);
        // The two places that a node has at fixed paths.
        let text = text
            .replace("\"/var/lib/containerd\"", &format!("\"{}\"", base.join("root").display()))
            .replace("\"/run/containerd\"", &format!("\"{}\"", base.join("state").display()));
        ephemeral.containerd_config.write(text.as_bytes())?;
        let log = base.join("log");
        let output = std::fs::File::create(&log)?;
        let child = Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(program)
            .arg("--config")
            .arg(ephemeral.containerd_config.path())
            .env_clear()
            .envs(variables)
            .env("PATH", "/usr/bin:/usr/sbin:/bin:/sbin")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot start containerd by unshare(1)")?;
        let socket = format!("unix:{}", ephemeral.containerd.client().display());
        let channel = Endpoint::from_shared(socket)?.connect_lazy();
        let mut containerd = Self { child, log, channel };
        containerd.answers().await?;
        Ok(containerd)
    }

    /// Waits until its CRI answers.
    async fn answers(&mut self) -> Result<()> {
        let asked = async {
            loop {
                if let Some(status) = self.child.try_wait()? {
                    let log = std::fs::read_to_string(&self.log)?;
                    anyhow::bail!("containerd ended with {status}: {log}");
                }
                let request = cri::ListImagesRequest {};
                let answer = self.call::<_, cri::ListImagesResponse>("ListImages", request).await;
                if answer.is_ok() {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        patiently(PATIENCE, asked).await.context("containerd does not answer")?
    }

    /// Pulls an image; returns its ID.
    async fn pull(&self, image: &str) -> Result<String, Status> {
        let image = Some(cri::ImageSpec { image: image.to_owned() });
        let request = cri::PullImageRequest { image };
        let pulled = self.call::<_, cri::PullImageResponse>("PullImage", request);
        let pulled = patiently(PATIENCE, pulled).await;
        Ok(pulled.expect("containerd answers a pull")?.image_ref)
    }

    async fn call<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = tonic_prost::ProstCodec::<Q, A>::default();
        let path = format!("/runtime.v1.ImageService/{method}").parse().unwrap();
        Ok(grpc.unary(Request::new(request), path, codec).await?.into_inner())
    }

    /// Ends it; returns all that it has logged.
    fn stop(mut self) -> Result<String> {
        self.end();
        Ok(std::fs::read_to_string(&self.log)?)
    }

    fn end(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.end();
    }
}

/// The requests of the story to the image service of the container runtime interface.
mod cri {
    /// An image by its name.
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ImageSpec {
        #[prost(string, tag = "1")]
        pub(super) image: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct PullImageRequest {
        #[prost(message, optional, tag = "1")]
        pub(super) image: Option<ImageSpec>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct PullImageResponse {
        #[prost(string, tag = "1")]
        pub(super) image_ref: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ListImagesRequest {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ListImagesResponse {}
}

/// The image `app` below the repository `copies`. Its one layer is an empty archive.
fn content() -> Content {
    const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
    const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    let layer = vec![0; 1024];
    let mut content = Content::new();
    let name = "app";
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
    });
    let config = config.to_string().into_bytes();
    let descriptor = |kind: &str, bytes: &[u8]| -> Value {
        json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()})
    };
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor(CONFIG, &config), "layers": [descriptor(LAYER, &layer)],
    });
    let manifest = manifest.to_string().into_bytes();
    let at = |rest: String| format!("/v2/copies/{name}/{rest}");
    for (kind, bytes) in [(CONFIG, &config), (LAYER, &layer)] {
        let path = at(format!("blobs/{}", digest(bytes)));
        content.insert(path, (kind.to_owned(), bytes.as_slice().into()));
    }
    for reference in ["1", &digest(&manifest)] {
        let path = at(format!("manifests/{reference}"));
        content.insert(path, (MANIFEST.to_owned(), manifest.as_slice().into()));
    }
    content
}
