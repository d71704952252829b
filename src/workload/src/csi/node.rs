//! The driver as kubelet calls it: mounts volumes into pods and unmounts them, and reports how
//! full they are.
//!
//! ```text
//! kubelet --publish--> directory at the target --> bind of the content --> flags
//!         --unpublish--> unmounted --> directory removed
//! ```
//!
//! Invariants:
//! - A target lies in kubelet's directory of pods, and no part of its path is a link.
//! - A target is removed only as an empty directory: no call here removes content.
//! - Each call may be repeated.
//! - At most [`CALLS_MAX`] calls use a thread, those that kubelet has given up among them.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use polis_proto::csi::identity_server::Identity;
use polis_proto::csi::node_server::Node;
use polis_proto::csi::volume_capability::AccessType;
use polis_proto::csi::volume_capability::access_mode::Mode;
use polis_proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, NodeExpandVolumeRequest, NodeExpandVolumeResponse,
    NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse, NodeGetInfoRequest,
    NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, PluginCapability, ProbeRequest,
    ProbeResponse, VolumeCapability, VolumeUsage, node_service_capability, plugin_capability,
    volume_usage,
};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};
use tracing::info;

use super::mounting::{Flags, Mounts};
use super::names::DRIVER;
use super::store::Store;
use super::volume_id::VolumeId;
use polis_base::cause;
use polis_base::sys::quota::Usage;
use polis_runtime::supervisor::blocking;
use polis_wire::identity::NodeId;

/// The file system of the data partition.
const FILE_SYSTEM: &str = "xfs";

/// Calls at once. kubelet makes one for each volume of each pod that it starts, each on a
/// connection of its own, and a disk that hangs keeps them all: this is half of the threads
/// of the node that may block.
pub(super) const CALLS_MAX: usize = 4;

/// The driver on one node. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    pub(super) node: NodeId,
    pub(super) store: Store,
    /// Where kubelet keeps the pods: every target lies in here.
    pub(super) pods: PathBuf,
    pub(super) mounts: Arc<dyn Mounts>,
    /// Turns for [`CALLS_MAX`] calls.
    pub(super) turns: Arc<Semaphore>,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Identity for Plugin {
    async fn get_plugin_info(
        &self,
        _request: Request<GetPluginInfoRequest>,
    ) -> Answer<GetPluginInfoResponse> {
        let vendor_version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Response::new(GetPluginInfoResponse { name: DRIVER.to_owned(), vendor_version }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<GetPluginCapabilitiesRequest>,
    ) -> Answer<GetPluginCapabilitiesResponse> {
        use plugin_capability::volume_expansion::Type;
        let online = plugin_capability::VolumeExpansion { r#type: Type::Online.into() };
        let online = plugin_capability::Type::VolumeExpansion(online);
        let capabilities = vec![PluginCapability { r#type: Some(online) }];
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _request: Request<ProbeRequest>) -> Answer<ProbeResponse> {
        Ok(Response::new(ProbeResponse {}))
    }
}

#[tonic::async_trait]
impl Node for Plugin {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let request = request.into_inner();
        self.call(move |plugin| plugin.publish(&request)).await?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        self.call(move |plugin| plugin.unpublish(&request)).await?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Answer<NodeGetVolumeStatsResponse> {
        use volume_usage::Unit;
        let request = request.into_inner();
        let id = volume(&request.volume_id)?;
        let usage = self.call(move |plugin| {
            plugin.target(&request.volume_path)?;
            plugin.usage(&id)
        });
        let usage = usage.await?;
        let usage = vec![
            used(usage.limits.bytes, usage.bytes, Unit::Bytes),
            used(usage.limits.inodes, usage.inodes, Unit::Inodes),
        ];
        Ok(Response::new(NodeGetVolumeStatsResponse { usage }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Answer<NodeExpandVolumeResponse> {
        let request = request.into_inner();
        let id = volume(&request.volume_id)?;
        let bytes = self.call(move |plugin| plugin.usage(&id)).await?.limits.bytes;
        let capacity_bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let wanted = request.capacity_range.map_or(0, |range| range.required_bytes);
        if wanted > capacity_bytes {
            // The provisioner enlarges it, before the object says so.
            return Err(Status::unavailable(format!(
                "the volume has {capacity_bytes} bytes and gets {wanted} as soon as the disk \
                 has room"
            )));
        }
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        use node_service_capability::rpc::Type;
        let capabilities = [Type::GetVolumeStats, Type::ExpandVolume, Type::SingleNodeMultiWriter]
            .map(|one| node_service_capability::Rpc { r#type: one.into() })
            .map(node_service_capability::Type::Rpc)
            .map(|one| NodeServiceCapability { r#type: Some(one) });
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    async fn node_get_info(
        &self,
        _request: Request<NodeGetInfoRequest>,
    ) -> Answer<NodeGetInfoResponse> {
        let node_id = self.node.to_string();
        Ok(Response::new(NodeGetInfoResponse { node_id, max_volumes_per_node: 0 }))
    }
}

impl Plugin {
    /// Does the work of a call where it may block, when it has its turn.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let plugin = self.clone();
        blocking(move || {
            // Held to the end, also when kubelet has given the call up.
            let _turn = turn;
            work(&plugin)
        })
        .await
    }

    /// Mounts a volume at the target. Blocks.
    fn publish(&self, request: &NodePublishVolumeRequest) -> Result<(), Status> {
        let id = volume(&request.volume_id)?;
        let target = self.target(&request.target_path)?;
        let flags = flags(request.volume_capability.as_ref(), request.readonly)?;
        self.usage(&id)?;
        let source = self.store.content(&id);
        match std::fs::create_dir(&target) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(internal("make", &target, &error)),
        }
        let mounted = self.mounts.at(&target).map_err(|e| internal("look at", &target, &e))?;
        if mounted == 0 {
            // A mount follows a link in the last part of its target, too.
            let entry = target.symlink_metadata();
            if !entry.map_err(|e| internal("look at", &target, &e))?.is_dir() {
                return Err(Status::invalid_argument(format!(
                    "{} is not a directory: a volume is mounted on nothing else",
                    target.display()
                )));
            }
            self.mounts
                .bind(&source, &target, flags)
                .map_err(|error| internal("mount the volume at", &target, &error))?;
            info!(volume = %id, target = %target.display(), "mounted");
            return Ok(());
        }
        if !same(&source, &target).map_err(|e| internal("look at", &target, &e))? {
            return Err(Status::already_exists("something else is mounted at the target"));
        }
        self.mounts
            .remount(&target, flags)
            .map_err(|error| internal("change the mount at", &target, &error))
    }

    /// Unmounts what is at the target, and removes the target. Blocks.
    fn unpublish(&self, request: &NodeUnpublishVolumeRequest) -> Result<(), Status> {
        let id = volume(&request.volume_id)?;
        let target = match self.target(&request.target_path) {
            // kubelet has removed the pod's directory.
            Err(status) if status.code() == tonic::Code::NotFound => return Ok(()),
            target => target?,
        };
        let mounted = self.mounts.at(&target).map_err(|e| internal("look at", &target, &e))?;
        for _mount in 0..mounted {
            self.mounts.unmount(&target).map_err(|e| internal("unmount", &target, &e))?;
        }
        match std::fs::remove_dir(&target) {
            Ok(()) => info!(volume = %id, target = %target.display(), "unmounted"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(internal("remove", &target, &error)),
        }
        Ok(())
    }

    fn usage(&self, id: &VolumeId) -> Result<Usage, Status> {
        let usage = self.store.usage(id).map_err(|error| Status::internal(cause::line(&error)))?;
        usage.ok_or_else(|| Status::not_found(format!("the volume {id} is not on this node")))
    }

    /// The path of a target, which lies in a directory of a pod that exists.
    fn target(&self, path: &str) -> Result<PathBuf, Status> {
        let refused = || {
            let pods = self.pods.display();
            Status::invalid_argument(format!("a volume is mounted below {pods} and nowhere else"))
        };
        let path = Path::new(path);
        let inside = path.strip_prefix(&self.pods).map_err(|_outside| refused())?;
        // `strip_prefix` knows no `..`; a target has a pod, a kind and a volume before it.
        let plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
        let parent = path.parent().filter(|_| plain && inside.components().count() > 1);
        let parent = parent.ok_or_else(refused)?;
        match parent.canonicalize() {
            Ok(real) if real == parent => Ok(path.to_owned()),
            Ok(_) => Err(refused()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(Status::not_found(format!("{} does not exist", parent.display())))
            }
            Err(error) => Err(internal("look at", parent, &error)),
        }
    }
}

fn volume(id: &str) -> Result<VolumeId, Status> {
    id.parse().map_err(|error: super::volume_id::NotAVolume| {
        Status::invalid_argument(format!("volume_id cannot be used: {error}"))
    })
}

/// The flags of a mount that is asked for like this.
fn flags(capability: Option<&VolumeCapability>, read_only: bool) -> Result<Flags, Status> {
    let capability =
        capability.ok_or_else(|| Status::invalid_argument("volume_capability is missing"))?;
    let Some(AccessType::Mount(mount)) = &capability.access_type else {
        return Err(Status::invalid_argument(format!(
            "{DRIVER} has no block volumes: a volume is a file system"
        )));
    };
    if !["", FILE_SYSTEM].contains(&mount.fs_type.as_str()) {
        return Err(Status::invalid_argument(format!(
            "a volume is {FILE_SYSTEM}: leave fsType out"
        )));
    }
    let flags = Flags::read(&mount.mount_flags)
        .map_err(|refused| Status::invalid_argument(refused.to_string()))?;
    let mode = capability.access_mode.as_ref().map(|mode| mode.mode());
    match mode.unwrap_or(Mode::Unknown) {
        Mode::SingleNodeWriter | Mode::SingleNodeSingleWriter | Mode::SingleNodeMultiWriter => {
            Ok(if read_only { flags.read_only() } else { flags })
        }
        Mode::SingleNodeReaderOnly => Ok(flags.read_only()),
        Mode::Unknown
        | Mode::MultiNodeReaderOnly
        | Mode::MultiNodeSingleWriter
        | Mode::MultiNodeMultiWriter => {
            Err(Status::invalid_argument("a volume is on one node: its access mode is not allowed"))
        }
    }
}

/// Whether two paths lead to one directory.
fn same(one: &Path, other: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

fn used(total: u64, used: u64, unit: volume_usage::Unit) -> VolumeUsage {
    let number = |number| i64::try_from(number).unwrap_or(i64::MAX);
    VolumeUsage {
        available: number(total.saturating_sub(used)),
        total: number(total),
        used: number(used),
        unit: unit.into(),
    }
}

fn internal(operation: &str, path: &Path, error: &std::io::Error) -> Status {
    Status::internal(format!("cannot {operation} {}: {error}", path.display()))
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
