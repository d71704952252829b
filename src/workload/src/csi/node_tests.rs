//! The driver over its socket, as kubelet calls it; the table of mounts is in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use polis_proto::csi::identity_client::IdentityClient;
use polis_proto::csi::node_client::NodeClient;
use polis_proto::csi::volume_capability::{AccessMode, BlockVolume, MountVolume};
use polis_proto::csi::{CapacityRange, VolumeCapability};
use polis_proto::plugin::registration_client::RegistrationClient;
use polis_proto::plugin::{InfoRequest, RegistrationStatus};
use polis_runtime::supervisor::Context;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::csi::claims::tests::{UID, node};
use crate::csi::registration::{Registered, Registration};
use crate::csi::store::tests::{Fake, store};
use crate::csi::{SOCKET, serve};
use polis_base::files::Dir;

/// Mounts that exist in this table only. A bind mount is a link in place of its target,
/// and so leads to the same directory.
#[derive(Debug, Default)]
struct Table(Mutex<BTreeMap<PathBuf, Vec<Flags>>>);

impl Table {
    fn flags(&self, target: &Path) -> Vec<Flags> {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.get(target).cloned().unwrap_or_default()
    }

    fn set(&self, target: &Path, flags: Vec<Flags>) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(target.to_owned(), flags);
    }
}

impl Mounts for Table {
    fn at(&self, target: &Path) -> std::io::Result<usize> {
        Ok(self.flags(target).len())
    }

    fn bind(&self, source: &Path, target: &Path, flags: Flags) -> std::io::Result<()> {
        std::fs::remove_dir(target)?;
        std::os::unix::fs::symlink(source, target)?;
        self.set(target, vec![flags]);
        Ok(())
    }

    fn remount(&self, target: &Path, flags: Flags) -> std::io::Result<()> {
        self.set(target, vec![flags]);
        Ok(())
    }

    fn unmount(&self, target: &Path) -> std::io::Result<()> {
        let mut flags = self.flags(target);
        flags.pop();
        if flags.is_empty() {
            std::fs::remove_file(target)?;
            std::fs::create_dir(target)?;
        }
        self.set(target, flags);
        Ok(())
    }
}

/// A kernel that takes its time, and counts the calls that wait for it.
#[derive(Debug, Default)]
struct Slow {
    waiting: AtomicUsize,
    most: AtomicUsize,
}

impl Mounts for Slow {
    #[expect(clippy::disallowed_methods, reason = "the mounts are asked where it may block")]
    fn at(&self, _target: &Path) -> std::io::Result<usize> {
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(waiting, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(0)
    }

    fn bind(&self, _source: &Path, _target: &Path, _flags: Flags) -> std::io::Result<()> {
        Ok(())
    }

    fn remount(&self, _target: &Path, _flags: Flags) -> std::io::Result<()> {
        Ok(())
    }

    fn unmount(&self, _target: &Path) -> std::io::Result<()> {
        Ok(())
    }
}

/// A driver that serves.
struct World {
    folder: tempfile::TempDir,
    plugin: Plugin,
    table: Arc<Table>,
    heard: watch::Receiver<Registered>,
    /// The pod's directory for the volume, without the target in it.
    pod: PathBuf,
}

impl World {
    /// Serves while `story` goes on.
    async fn with<F: Future<Output = ()>>(story: impl FnOnce(Arc<Self>, Channel) -> F) {
        let folder = tempfile::tempdir().unwrap();
        let table = Arc::new(Table::default());
        let pods = folder.path().canonicalize().unwrap().join("pods");
        let pod = pods.join("1/volumes/kubernetes.io~csi/pvc");
        std::fs::create_dir_all(&pod).unwrap();
        let plugin = Plugin {
            node: node(),
            store: store(folder.path(), &Fake::new()),
            pods,
            mounts: table.clone(),
            turns: Arc::new(Semaphore::new(CALLS_MAX)),
        };
        let registered = watch::Sender::default();
        let heard = registered.subscribe();
        let plugins = Dir::private(folder.path().join("plugins"));
        let world = Arc::new(Self { folder, plugin: plugin.clone(), table, heard, pod });
        let (ctx, handles) = Context::for_test();
        let socket = world.socket();
        let story = async {
            let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
            // The socket has a name before the driver listens.
            let channel = loop {
                match endpoint.connect().await {
                    Ok(channel) => break channel,
                    Err(_) => tokio::task::yield_now().await,
                }
            };
            story(world.clone(), channel).await;
            handles.cancel().await;
        };
        let served = serve(&plugins, plugin, Registration { registered }, &ctx);
        let (served, ()) = tokio::join!(served, story);
        served.unwrap();
        assert!(!world.socket().exists(), "kubelet forgets the driver with its socket");
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("plugins").join(SOCKET)
    }

    fn target(&self) -> PathBuf {
        self.pod.join("mount")
    }

    fn publish(&self) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: format!("pvc-{UID}"),
            target_path: self.target().display().to_string(),
            volume_capability: Some(VolumeCapability {
                access_type: Some(AccessType::Mount(MountVolume::default())),
                access_mode: Some(AccessMode { mode: Mode::SingleNodeMultiWriter.into() }),
            }),
            readonly: false,
        }
    }

    fn unpublish(&self) -> NodeUnpublishVolumeRequest {
        let NodePublishVolumeRequest { volume_id, target_path, .. } = self.publish();
        NodeUnpublishVolumeRequest { volume_id, target_path }
    }

    fn make(&self) -> VolumeId {
        let id = VolumeId::of_claim(UID).unwrap();
        self.plugin.store.make(&id, "default/data", 1 << 30).unwrap();
        id
    }
}

#[tokio::test]
async fn kubelet_finds_the_driver_and_what_it_can() {
    World::with(|world, channel| async move {
        let mut registration = RegistrationClient::new(channel.clone());
        let info = registration.get_info(InfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", DRIVER));
        assert_eq!((info.endpoint.as_str(), info.supported_versions), ("", vec!["1.0.0".into()]));
        let status = |plugin_registered, error: &str| RegistrationStatus {
            plugin_registered,
            error: error.to_owned(),
        };
        registration.notify_registration_status(status(false, "why")).await.unwrap();
        assert_eq!(*world.heard.borrow(), Registered::No { cause: "why".to_owned() });
        registration.notify_registration_status(status(true, "")).await.unwrap();
        assert_eq!(*world.heard.borrow(), Registered::Yes);
        let mut identity = IdentityClient::new(channel.clone());
        let info = identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.name, DRIVER);
        identity.probe(ProbeRequest {}).await.unwrap();
        let can = identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await.unwrap();
        assert_eq!(can.into_inner().capabilities.len(), 1);
        let mut driver = NodeClient::new(channel);
        let info = driver.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.node_id, node().to_string());
        let can = driver.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap();
        assert_eq!(can.into_inner().capabilities.len(), 3);
    })
    .await;
}

/// kubelet's gRPC library escapes the path of the socket into `:authority`, which the library
/// here refuses in general: so the request is made of bytes, as kubelet sends them.
#[tokio::test]
async fn a_call_with_the_authority_of_kubelet_is_answered() {
    World::with(|world, _channel| async move {
        let socket = world.socket();
        let escaped = socket.display().to_string().replace('/', "%2F");
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        let mut block = Vec::new();
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/pluginregistration.Registration/GetInfo"),
            (":authority", escaped.as_str()),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ] {
            // A literal that is not indexed; RFC 7541, 6.2.2.
            block.push(0);
            for text in [name, value] {
                assert!(text.len() < 127, "one byte holds the length");
                block.push(u8::try_from(text.len()).unwrap());
                block.extend_from_slice(text.as_bytes());
            }
        }
        let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
            let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
            [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
        };
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(4, 0, 0, &[]));
        bytes.extend(frame(1, 4, 1, &block));
        // An empty message of gRPC, and the end of the request.
        bytes.extend(frame(0, 1, 1, &[0; 5]));
        stream.write_all(&bytes).await.unwrap();
        let mut answer = Vec::new();
        while !answer.windows(DRIVER.len()).any(|part| part == DRIVER.as_bytes()) {
            let count = stream.read_buf(&mut answer).await.unwrap();
            assert_ne!(count, 0, "{:?}", String::from_utf8_lossy(&answer));
        }
    })
    .await;
}

#[tokio::test]
async fn a_volume_is_mounted_once_and_unmounted_whole() {
    World::with(|world, channel| async move {
        let mut driver = NodeClient::new(channel);
        let missing = driver.node_publish_volume(world.publish()).await.unwrap_err();
        assert_eq!(missing.code(), Code::NotFound);
        let id = world.make();
        let plain = Flags::read(&[]).unwrap();
        for _again in 0..2 {
            driver.node_publish_volume(world.publish()).await.unwrap();
            assert_eq!(world.table.flags(&world.target()), [plain]);
        }
        std::fs::write(world.target().join("file"), "words").unwrap();
        // Cut off between the mount and its flags: the next call sets them.
        let mut request = world.publish();
        request.readonly = true;
        driver.node_publish_volume(request).await.unwrap();
        assert_eq!(world.table.flags(&world.target()), [plain.read_only()]);
        for _again in 0..2 {
            driver.node_unpublish_volume(world.unpublish()).await.unwrap();
            assert!(!world.target().exists());
        }
        let content = world.plugin.store.content(&id);
        assert_eq!(std::fs::read_to_string(content.join("file")).unwrap(), "words");
        // The pod's directory is gone, too.
        std::fs::remove_dir(&world.pod).unwrap();
        driver.node_unpublish_volume(world.unpublish()).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn an_unpublish_never_removes_content() {
    World::with(|world, channel| async move {
        world.make();
        // Not mounted, and not empty.
        std::fs::create_dir(world.target()).unwrap();
        std::fs::write(world.target().join("file"), "words").unwrap();
        let mut driver = NodeClient::new(channel);
        let error = driver.node_unpublish_volume(world.unpublish()).await.unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(world.target().join("file").is_file());
    })
    .await;
}

#[tokio::test]
async fn hostile_requests_are_refused() {
    World::with(|world, channel| async move {
        world.make();
        let mut driver = NodeClient::new(channel);
        let pods = world.plugin.pods.display().to_string();
        let link = world.plugin.pods.join("link");
        std::os::unix::fs::symlink("/etc", &link).unwrap();
        for target in [
            String::new(),
            "/etc".to_owned(),
            "mount".to_owned(),
            pods.clone(),
            format!("{pods}/1"),
            format!("{pods}/1/../../volumes"),
            format!("{pods}/../volumes/x"),
            format!("{pods}/link/cron.d"),
        ] {
            let request =
                NodePublishVolumeRequest { target_path: target.clone(), ..world.publish() };
            let error = driver.node_publish_volume(request).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{target}: {error}");
            let volume_id = world.publish().volume_id;
            let request = NodeUnpublishVolumeRequest { volume_id, target_path: target.clone() };
            let error = driver.node_unpublish_volume(request).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{target}: {error}");
        }
        // The last part of the path is a link, or a file.
        let outside = world.folder.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, world.target()).unwrap();
        let error = driver.node_publish_volume(world.publish()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains("is not a directory"), "{error}");
        assert_eq!(world.table.flags(&world.target()), []);
        let error = driver.node_unpublish_volume(world.unpublish()).await.unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(outside.is_dir());
        std::fs::remove_file(world.target()).unwrap();
        std::fs::write(world.target(), "").unwrap();
        let error = driver.node_publish_volume(world.publish()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        std::fs::remove_file(world.target()).unwrap();
        for volume_id in ["", "pvc-", "../../etc", "pvc-../../../etc"] {
            let volume_id = volume_id.to_owned();
            let request = NodePublishVolumeRequest { volume_id, ..world.publish() };
            let error = driver.node_publish_volume(request).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        }
        let refused = async |change: fn(&mut NodePublishVolumeRequest), words: &str| {
            let mut request = world.publish();
            change(&mut request);
            let error = driver.clone().node_publish_volume(request).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            assert!(error.message().contains(words), "{error}");
        };
        refused(|request| request.volume_capability = None, "missing").await;
        refused(
            |request| {
                let capability = request.volume_capability.as_mut().unwrap();
                capability.access_type = Some(AccessType::Block(BlockVolume {}));
            },
            "no block volumes",
        )
        .await;
        refused(
            |request| {
                let capability = request.volume_capability.as_mut().unwrap();
                let fs_type = "ext4".to_owned();
                let mount = MountVolume { fs_type, mount_flags: Vec::new() };
                capability.access_type = Some(AccessType::Mount(mount));
            },
            "leave fsType out",
        )
        .await;
        refused(
            |request| {
                let capability = request.volume_capability.as_mut().unwrap();
                let mount_flags = vec!["suid".to_owned()];
                let mount = MountVolume { fs_type: String::new(), mount_flags };
                capability.access_type = Some(AccessType::Mount(mount));
            },
            "\"suid\" is not allowed",
        )
        .await;
        refused(
            |request| {
                let capability = request.volume_capability.as_mut().unwrap();
                capability.access_mode =
                    Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() });
            },
            "on one node",
        )
        .await;
        assert!(!world.target().exists());
    })
    .await;
}

#[tokio::test]
async fn a_volume_tells_how_full_it_is_and_how_large_it_became() {
    World::with(|world, channel| async move {
        let id = world.make();
        let mut driver = NodeClient::new(channel);
        driver.node_publish_volume(world.publish()).await.unwrap();
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_string(),
            volume_path: world.target().display().to_string(),
        };
        let usage = driver.node_get_volume_stats(request).await.unwrap().into_inner().usage;
        let totals: Vec<_> = usage.iter().map(|one| one.total).collect();
        assert_eq!(totals, [1 << 30, 1 << 16]);
        assert!(usage.iter().all(|one| one.available == one.total - one.used), "{usage:?}");
        let expand = |required_bytes| NodeExpandVolumeRequest {
            volume_id: id.to_string(),
            volume_path: world.target().display().to_string(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
        };
        let error = driver.node_expand_volume(expand(2 << 30)).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        world.plugin.store.enlarge(&id, 2 << 30).unwrap();
        let done = driver.node_expand_volume(expand(2 << 30)).await.unwrap().into_inner();
        assert_eq!(done.capacity_bytes, 2 << 30);
    })
    .await;
}

#[tokio::test]
async fn many_calls_at_once_take_no_more_threads_than_a_few() {
    World::with(|world, _channel| async move {
        let slow = Arc::new(Slow::default());
        let plugin = Plugin { mounts: slow.clone(), ..world.plugin.clone() };
        let call = |_| plugin.node_unpublish_volume(Request::new(world.unpublish()));
        for done in futures::future::join_all((0..3 * CALLS_MAX).map(call)).await {
            done.unwrap();
        }
        let most = slow.most.load(Ordering::Relaxed);
        assert!((1..=CALLS_MAX).contains(&most), "{most}");
    })
    .await;
}
