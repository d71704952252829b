//! A further disk of the machine, which a pod has by a *local* volume.

use std::fs::File;

use anyhow::{Result, ensure};
use polis_proto::v1::{DiskSelector, DiskVolume, NodeParameters};
use polis_qemu::args::{Cache, Disk};
use polis_qemu::{Bus, Config};
use prost::Message as _;

use super::kubectl::Kubectl;
use super::trial::{Trial, demo};
use super::volumes::pod;
use super::{GONE, KUBECTL};
use crate::console::terminal_parameters;
use crate::world::World;

/// Size of the disk.
const SIZE: u64 = 1 << 30;

/// Of what the pod writes; as `kubectl` and the demo name it.
const WRITTEN: &str = "64Mi";

/// `config` with a further disk, which its parameters make a volume.
pub(super) fn attached(world: &World, config: Config) -> Result<Config> {
    let second =
        Disk { file: world.path("disk-further.img"), bus: Bus::Virtio, cache: Cache::Unsafe };
    File::create(&second.file)?.set_len(SIZE)?;
    let serial = "polis-second".to_owned();
    let disk = Some(DiskSelector { serial, ..DiskSelector::default() });
    let volumes = vec![DiskVolume { name: "db".to_owned(), disk }];
    let parameters = NodeParameters { volumes, ..terminal_parameters() };
    Ok(Config {
        second_disk: Some(second),
        fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
        ..config
    })
}

/// A pod of `node` writes to the volume.
pub(super) fn written(kubectl: &Kubectl, node: &str) -> Result<()> {
    kubectl.apply(&objects(node))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/database", KUBECTL], "")?;
    Trial::run(kubectl, "database", &["write", "/box/kept", WRITTEN])?.is_whole()
}

/// The pod has what it wrote, and is deleted with its objects.
pub(super) fn kept(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["wait", "--for=condition=Ready", "pod/database", KUBECTL], "")?;
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
