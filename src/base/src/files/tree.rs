//! The tree of the node's files and directories, as one type.
//!
//! Code calls `root.data.etcd.peer_pki.key.write(..)`; paths are spelled out only here.
//!
//! ```text
//! esp        the EFI system partition: small, FAT, readable before anything else
//! data       the data partition: there once `storage::Status` is ready
//! ephemeral  memory: gone with the boot
//! ```
//!
//! Invariants:
//! - No two entries have the same path.
//! - A file with a secret is mode 0600 in a directory of mode 0700. The credentials of etcd
//!   are 0640 in directories of 0710, with the group of etcd's user. The files of a program of
//!   Kubernetes are 0640 with the group of its user, in directories that the group of all these
//!   programs may enter.
//!
//! What this module does not do: mount. Writing to `data` before storage is
//! ready fails, since the directories are only made on the mounted partition.

use std::path::{Path, PathBuf};

use super::error::Error;
use super::file::{Dir, File, SIZE_MAX};
use super::kubernetes::{Kubernetes, KubernetesRun};
use super::owner::Group;
use super::sockets::Sockets;
use crate::users;

/// The size of the ESP: whatever fits on it, the end of a bootstrap overwrites all of it.
const SNAPSHOT_SIZE_MAX: u64 = 512 << 20;

/// The whole tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The EFI system partition.
    pub esp: Esp,
    /// The data partition.
    pub data: Data,
    /// The memory of this boot.
    pub ephemeral: Ephemeral,
}

impl Root {
    /// The tree of a running node.
    #[must_use]
    pub fn live() -> Self {
        Self::at(Path::new("/"))
    }

    /// A tree below `base`, for tests.
    #[must_use]
    pub fn at(base: &Path) -> Self {
        Self {
            esp: Esp::at(base.join("esp")),
            data: Data::at(base.join("data")),
            ephemeral: Ephemeral::at(base.join("ephemeral")),
        }
    }

    /// Makes every directory: all mounts must be in place.
    ///
    /// # Errors
    ///
    /// The first directory that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        self.esp.create()?;
        self.ephemeral.create()?;
        self.data.create()
    }
}

/// `/esp`: files that the machine needs before its data partition is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Esp {
    /// The mount point.
    pub mount: Dir,
    /// The kernel images that the loader chooses from.
    pub kernels: Dir,
    /// The directory of all files of Polis.
    pub polis: Dir,
    /// The node parameters, put there by the creator of the disk.
    pub parameters: File,
    /// The node parameters that a caller gave to the machine in maintenance.
    pub given_parameters: File,
    /// The node parameters that a metadata service gave, for later boots: see `parameters` of
    /// `polis-machine`.
    pub user_data: File,
    /// The data with which a member rejoins its cluster; see `cluster::sealed`.
    pub sealed_configuration: File,
    /// Where the cluster can be reached.
    pub cluster_directory: File,
    /// The journal of the cluster manager's next step; see `cluster::sealed`.
    pub cluster_journal: File,
    /// The initial content of a cluster that is founded, put there by an operator; see
    /// `consensus::restore`.
    pub etcd_snapshot: File,
    /// The share of the disk's key with which this machine unlocks its disk alone; see
    /// `cluster::unlock::keeper`.
    pub cold_start: File,
    /// The share that a change of keys puts in force.
    pub cold_start_next: File,
    /// The secrets that a change of keys puts in force; see `cluster::sealed`.
    pub key_change: File,
    /// The network that was confirmed, and the last order of another; see `network::change`.
    pub network: File,
    /// The failures of the machine, written by `init`.
    pub guru: Guru,
}

impl Esp {
    fn at(base: PathBuf) -> Self {
        let polis = base.join("polis");
        let file = |name: &str| File::in_place(polis.join(name));
        Self {
            parameters: File::given(polis.join("parameters.pb"), SIZE_MAX),
            given_parameters: file("given_parameters.pb"),
            user_data: file("user_data.pb"),
            sealed_configuration: file("sealed_configuration.pb"),
            cluster_directory: file("cluster_directory.pb"),
            cluster_journal: file("cluster_journal.pb"),
            etcd_snapshot: File::given(polis.join("etcd_snapshot.db"), SNAPSHOT_SIZE_MAX),
            cold_start: file("cold_start.pb"),
            cold_start_next: file("cold_start_next.pb"),
            key_change: file("key_change.pb"),
            network: file("network.pb"),
            guru: Guru::at(&polis.join("guru")),
            kernels: Dir::public(base.join("EFI/Linux")),
            mount: Dir::public(base),
            polis: Dir::private(polis.clone()),
        }
    }

    /// The files that the image must have at their full size, `in_place::SIZE`, as paths
    /// on the ESP: see `in_place`.
    #[must_use]
    pub fn in_place() -> Vec<PathBuf> {
        let Self {
            mount: _,
            kernels: _,
            polis: _,
            parameters: _,
            etcd_snapshot: _,
            given_parameters,
            user_data,
            sealed_configuration,
            cluster_directory,
            cluster_journal,
            cold_start,
            cold_start_next,
            key_change,
            network,
            guru: Guru { attempts, reports },
        } = Self::at(PathBuf::new());
        let records = [
            sealed_configuration,
            cluster_directory,
            cluster_journal,
            cold_start,
            cold_start_next,
            key_change,
            network,
            given_parameters,
            user_data,
            attempts,
        ];
        records.into_iter().chain(reports).map(|file| file.path().to_owned()).collect()
    }

    /// Makes the directories.
    ///
    /// # Errors
    ///
    /// The first that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        self.polis.create()
    }
}

/// The ledger of failed boots, and the last reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guru {
    /// The counters.
    pub attempts: File,
    /// A ring of reports.
    pub reports: [File; 8],
}

impl Guru {
    fn at(base: &Path) -> Self {
        let file = |name: &str| File::in_place(base.join(name));
        Self {
            attempts: file("attempts"),
            reports: std::array::from_fn(|number| file(&format!("guru-{number}.txt"))),
        }
    }
}

/// `/data`: files that must survive a reboot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    /// The mount point.
    pub mount: Dir,
    /// The identity and roles of this node.
    pub node: Node,
    /// The etcd member.
    pub etcd: Etcd,
    /// The container runtime.
    pub containerd: Dir,
    /// Kubernetes.
    pub kubernetes: Kubernetes,
    /// The root of kubelet: pods, and their volumes without a name.
    pub kubelet: Dir,
    /// The sockets of kubelet's plugins in it.
    pub kubelet_plugins: Dir,
    /// The files that containers write.
    pub pod_logs: Dir,
    /// The content of `/var/lib` on a worker, where pods with a `hostPath` keep their data.
    pub host_paths: Dir,
    /// The mesh between the nodes.
    pub mesh: Dir,
    /// The node's private key in it, 32 bytes.
    pub mesh_key: File,
    /// The places of the nodes in it, by the last message of a leader: `v1.MeshPlaces`.
    pub mesh_places: File,
    /// Volumes of workloads.
    pub volumes: Dir,
    /// The mount points of the volumes of further disks.
    pub disks: Dir,
    /// Logs of this and former boots.
    pub logs: Dir,
    /// The update bundle that the node keeps for the others; see `update::store`.
    pub update: Dir,
    /// The parts of an authenticated device that were never written: see
    /// `storage::wipe`.
    pub unwritten: File,
}

impl Data {
    fn at(base: PathBuf) -> Self {
        Self {
            node: Node::at(base.join("node")),
            etcd: Etcd::at(base.join("etcd")),
            containerd: Dir::private(base.join("containerd")),
            kubernetes: Kubernetes::at(base.join("kubernetes")),
            kubelet: Dir::private(base.join("kubernetes/kubelet")),
            kubelet_plugins: Dir::private(base.join("kubernetes/kubelet/plugins_registry")),
            pod_logs: Dir::private(base.join("kubernetes/log")),
            host_paths: Dir::public(base.join("kubernetes/host")),
            mesh: Dir::private(base.join("kubernetes/network")),
            mesh_key: File::private(base.join("kubernetes/network/key")),
            mesh_places: File::private(base.join("kubernetes/network/places.pb")),
            volumes: Dir::private(base.join("volumes")),
            disks: Dir::private(base.join("disks")),
            logs: Dir::private(base.join("logs")),
            update: Dir::private(base.join("update")),
            unwritten: File::private(base.join(".unwritten")),
            mount: Dir::public(base),
        }
    }

    /// Makes the directories that belong to no role.
    ///
    /// # Errors
    ///
    /// The first that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        for directory in [
            &self.node.dir,
            &self.node.credentials.dir,
            &self.etcd.dir,
            &self.etcd.data,
            &self.etcd.peer_pki.dir,
            &self.etcd.snapshots,
            &self.logs,
            &self.update,
        ] {
            directory.create()?;
        }
        Ok(())
    }
}

/// `/data/node`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The directory itself.
    pub dir: Dir,
    /// The node's key and certificate.
    pub credentials: Credentials,
    /// The last roles of the node that it knew.
    pub roles: File,
    /// The networks of pods and Services of the cluster: `v1.ClusterNetworks`.
    pub networks: File,
    /// The firewall of the cluster that was confirmed when the node last received one.
    pub firewall: File,
    /// The users that had access when the node last received them.
    pub users: File,
    /// The last time that another clock confirmed: seconds since 1970, as a line.
    pub clock: File,
    /// Calls that the audit log does not have yet: `v1.CallJournal`.
    pub calls: File,
    /// The targets of logs of the cluster in the last message: `v1.LogConfiguration`.
    pub log_targets: File,
    /// The time servers of the cluster in the last message: `v1.TimeConfiguration`.
    pub time_servers: File,
    /// The proxy of the cluster in the last message: `v1.ProxyConfiguration`.
    pub proxy: File,
    /// How far each target has the log; see `forwarding` of the node.
    pub log_cursors: File,
    /// The volumes of further disks, with their keys; see `volumes` of `polis-machine`.
    pub volumes: File,
    /// The parts of the workload stack that were ready when an update was installed; see `update`
    /// of `polis-machine`.
    pub trial: File,
    /// Present from the first vote of this node's member of etcd until it leaves: a
    /// member that loses its vote's data must not enter again as the same member.
    pub voter: File,
    /// Present while this node removes the member of etcd that the cluster took out.
    pub leaving: File,
}

impl Node {
    fn at(base: PathBuf) -> Self {
        Self {
            credentials: Credentials::at(base.join("credentials")),
            roles: File::private(base.join("roles.pb")),
            networks: File::private(base.join("networks.pb")),
            firewall: File::private(base.join("firewall.pb")),
            users: File::private(base.join("users.pb")),
            clock: File::private(base.join("clock")),
            calls: File::private(base.join("calls.pb")),
            log_targets: File::private(base.join("log_targets.pb")),
            time_servers: File::private(base.join("time_servers.pb")),
            proxy: File::private(base.join("proxy.pb")),
            log_cursors: File::private(base.join("log_cursors.json")),
            volumes: File::private(base.join("volumes.json")),
            trial: File::private(base.join("trial.json")),
            voter: File::private(base.join("voter")),
            leaving: File::private(base.join("leaving")),
            dir: Dir::private(base),
        }
    }
}

/// `/data/node/credentials`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The directory itself.
    pub dir: Dir,
    /// The node's Ed25519 private key, PKCS#8 in DER: the node's identity.
    pub key: File,
    /// The node's certificate, signed by the cluster CA, PEM.
    pub certificate: File,
    /// The cluster's CA and those before it: `v1.Authorities`.
    pub authorities: File,
}

impl Credentials {
    fn at(base: PathBuf) -> Self {
        Self {
            key: File::private(base.join("key.der")),
            certificate: File::private(base.join("cert.pem")),
            authorities: File::private(base.join("authorities.pb")),
            dir: Dir::private(base),
        }
    }
}

/// `/data/etcd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// The directory itself.
    pub dir: Dir,
    /// etcd's data directory.
    pub data: Dir,
    /// Its write-ahead log, inside of it: a node with entries in one was a member; see
    /// `consensus::wal`.
    pub log: Dir,
    /// The credentials that the member shows its peers.
    pub peer_pki: PeerPki,
    /// Serial numbers of revoked peer certificates, PEM.
    pub peer_crl: File,
    /// Present while a bootstrap is not finished; see `consensus::bootstrap`.
    pub bootstrapping: File,
    /// Present while this member is the only one; see `consensus::service`.
    pub alone: File,
    /// The ring of local snapshots.
    pub snapshots: Dir,
}

impl Etcd {
    fn at(base: PathBuf) -> Self {
        Self {
            data: Dir::private(base.join("data")),
            log: Dir::private(base.join("data/member/wal")),
            peer_pki: PeerPki::at(base.join("peer_pki")),
            peer_crl: File::private(base.join("peer.crl")).shared_with(Group::Etcd),
            bootstrapping: File::private(base.join("bootstrapping")),
            alone: File::private(base.join("alone")),
            snapshots: Dir::private(base.join("snapshots")),
            dir: Dir::private(base).passed_by(Group::Etcd),
        }
    }

    /// Lets the user of etcd own its data and read its credentials: new files belong to
    /// root, and so does everything that an earlier system left. Call it before each start
    /// of etcd, and never while one runs. Safe to repeat, after an end anywhere. Blocks.
    ///
    /// # Errors
    ///
    /// The first part that the kernel refuses.
    pub fn admit(&self) -> Result<(), Error> {
        self.dir.settle()?;
        self.peer_pki.dir.settle()?;
        for file in [&self.peer_pki.ca, &self.peer_pki.cert, &self.peer_pki.key, &self.peer_crl] {
            file.settle()?;
        }
        self.data.give(users::ETCD)
    }
}

/// `/data/etcd/peer_pki`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerPki {
    /// The directory itself.
    pub dir: Dir,
    /// The certificate of the CA of the etcd peers, PEM.
    pub ca: File,
    /// This member's certificate, PEM.
    pub cert: File,
    /// This member's private key, PEM.
    pub key: File,
}

impl PeerPki {
    fn at(base: PathBuf) -> Self {
        Self {
            ca: File::private(base.join("ca.pem")).shared_with(Group::Etcd),
            cert: File::private(base.join("cert.pem")).shared_with(Group::Etcd),
            key: File::private(base.join("key.pem")).shared_with(Group::Etcd),
            dir: Dir::private(base).passed_by(Group::Etcd),
        }
    }
}

/// `/ephemeral`: sockets and the files that `/etc` links to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ephemeral {
    /// The mount point.
    pub mount: Dir,
    /// Sockets of the etcd member, which the API server reaches, too.
    pub consensus: Sockets,
    /// Where the ESP of the other disk of a mirror is mounted while it is written.
    pub mirror: Dir,
    /// Sockets of the curator.
    pub curator: Sockets,
    /// Sockets of the container runtime.
    pub containerd: Sockets,
    /// Its configuration.
    pub containerd_config: File,
    /// How each registry is reached; one directory a registry.
    pub registries: Dir,
    /// The content that containerd needs only while it works on it.
    pub containerd_scratch: Dir,
    /// The directory in which containerd looks for the configuration of the pod network.
    pub pod_network: Dir,
    /// That configuration; the node writes it when it has a prefix.
    pub pod_network_file: File,
    /// The addresses that pods have, which a program of the pod network books.
    pub pod_addresses: Dir,
    /// Kubernetes' files of this boot.
    pub kubernetes: KubernetesRun,
    /// The configuration of chronyd.
    pub chrony: File,
    /// The directory of its socket, which belongs to the user of chronyd.
    pub time: Dir,
    /// The directory of the four files that `/etc` links to: a confined program may read these
    /// and no others of this tree.
    pub etc: Dir,
    /// `/etc/hosts`.
    pub hosts: File,
    /// `/etc/hostname`.
    pub hostname: File,
    /// `/etc/machine-id`.
    pub machine_id: File,
    /// `/etc/resolv.conf`.
    pub resolv_conf: File,
}

impl Ephemeral {
    fn at(base: PathBuf) -> Self {
        let file = |name: &str| File::public(base.join(name));
        Self {
            consensus: Sockets::at(base.join("consensus"), "client.sock")
                .reached_by(Group::ApiServer),
            mirror: Dir::private(base.join("mirror")),
            curator: Sockets::at(base.join("curator"), "curator.sock"),
            containerd: Sockets::at(base.join("containerd"), "client.sock"),
            containerd_config: file("containerd/config.toml"),
            registries: Dir::private(base.join("containerd/certs.d")),
            containerd_scratch: Dir::private(base.join("containerd/tmp")),
            pod_network: Dir::private(base.join("cni/net.d")),
            pod_network_file: file("cni/net.d/10-polis.conflist"),
            pod_addresses: Dir::private(base.join("cni/ipam")),
            kubernetes: KubernetesRun::at(base.join("kubernetes")),
            chrony: file("chrony.conf"),
            time: Dir::private(base.join("time")),
            etc: Dir::public(base.join("etc")),
            hosts: file("etc/hosts"),
            hostname: file("etc/hostname"),
            machine_id: file("etc/machine-id"),
            resolv_conf: file("etc/resolv.conf"),
            mount: Dir::public(base),
        }
    }

    /// Makes the directories.
    ///
    /// # Errors
    ///
    /// The first that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        self.mount.create()?;
        self.etc.create()?;
        for sockets in [&self.consensus, &self.curator, &self.containerd] {
            sockets.dir.create()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_live_tree_is_at_the_mount_points() {
        let root = Root::live();
        assert_eq!(root.data.etcd.peer_pki.key.path(), Path::new("/data/etcd/peer_pki/key.pem"));
        assert_eq!(root.esp.parameters.path(), Path::new("/esp/polis/parameters.pb"));
        assert_eq!(
            root.ephemeral.consensus.client(),
            Path::new("/ephemeral/consensus/client.sock")
        );
    }

    #[test]
    fn the_image_has_every_file_of_the_esp_that_the_machine_writes() {
        let files = Esp::in_place();
        assert_eq!(files.len(), 18);
        assert_eq!(files[0], Path::new("polis/sealed_configuration.pb"));
        assert_eq!(files[17], Path::new("polis/guru/guru-7.txt"));
    }

    #[test]
    fn a_tree_elsewhere_works_once_it_is_created() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        assert!(root.data.etcd.peer_pki.key.write(b"key").is_err());
        root.create().unwrap();
        root.create().unwrap();
        root.data.etcd.peer_pki.key.write(b"key").unwrap();
        root.esp.sealed_configuration.write(b"sealed").unwrap();
        root.ephemeral.hosts.write(b"127.0.0.1 localhost\n").unwrap();
        assert_eq!(root.data.etcd.peer_pki.key.read().unwrap().as_deref(), Some(&b"key"[..]));
    }
}
