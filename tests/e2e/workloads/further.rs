//! A further disk of the machine, which a pod has by a *local* volume.

use anyhow::{Result, ensure};
use polis_proto::v1::NodeParameters;
use polis_qemu::Config;
use prost::Message as _;

use super::GONE;
use super::kubectl::Kubectl;
use super::trial::{Trial, demo};
use super::volumes::pod;
use crate::console::terminal_parameters;
use crate::further_disk::second_disk;
use crate::world::World;

/// Size of the disk.
const SIZE: u64 = 1 << 30;

/// Of what the pod writes; as `kubectl` and the demo name it.
const WRITTEN: &str = "64Mi";

/// `config` with a further disk, which its parameters make a volume.
pub(super) fn attached(world: &World, config: Config) -> Result<Config> {
    let parameters = NodeParameters { volumes: second_disk("db"), ..terminal_parameters() };
    Ok(Config {
        second_disk: Some(world.empty_disk("disk-further.img", SIZE)?),
        fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
        ..config
    })
}

/// A pod of `node` writes to the volume.
pub(super) fn written(kubectl: &Kubectl, node: &str) -> Result<()> {
    kubectl.apply(&objects(node))?;
    kubectl.ready(&["pod/database"])?;
    Trial::run(kubectl, "database", &["write", "/box/kept", WRITTEN])?.is_whole()
}

/// The pod has what it wrote, and is deleted with its objects.
pub(super) fn kept(kubectl: &Kubectl) -> Result<()> {
    kubectl.ready(&["pod/database"])?;
    let read = demo(kubectl, "database", &["read", "/box/kept"])?;
    ensure!(read.contains("as they were written"), "{read}");
    println!("on the further disk: {}", read.trim());
    kubectl.delete(&["pod/database"], GONE)?;
    kubectl.delete(&["pvc/database"], GONE)?;
    kubectl.delete(&["pv/database"], GONE)
}

/// The volume as an operator announces it, a claim for it, and a pod with the claim.
fn objects(node: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: PersistentVolume
metadata: {{name: database}}
spec:
  accessModes: [ReadWriteOnce]
  capacity: {{storage: 900Mi}}
  persistentVolumeReclaimPolicy: Retain
  storageClassName: further-disk
  local: {{path: /data/disks/db/content}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: [{node}]}}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: database}}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: further-disk
  resources: {{requests: {{storage: 900Mi}}}}
---
{}",
        pod("database")
    )
}
