//! The table of failures: one row for each code, in the order of `docs/errors.md`.
//!
//! A row is `NAME = stage number: the next step for the operator;`, with `[locked]` where
//! the disk is whole and locked, and its recovery key opens it: a person at the guru
//! meditation may type it. A damaged or lost sealed configuration locks the disk, too,
//! where the disk is encrypted; the reporting service (`cluster`) decides that.
//!
//! `parameters` of the wire replaces `{place}` and `{field}` in the rows of its stage.

use super::Code;
use crate::stage::Stage;

/// The facts about a failure, known before it occurs.
pub(super) struct Failure {
    pub(super) code: Code,
    pub(super) locked: bool,
    pub(super) help: &'static str,
}

/// Makes a constant of each row, and the list of all.
macro_rules! failures {
    ($(
        $(#[$doc:meta])+
        $name:ident = $stage:ident $cause:literal $([$locked:ident])?: $help:expr;
    )+) => {
        $($(#[$doc])+ pub const $name: Code = Code::new(Stage::$stage, $cause);)+

        pub(super) const FAILURES: &[Failure] = &[$(Failure {
            code: $name,
            locked: !stringify!($($locked)?).is_empty(),
            help: $help,
        }),+];
    };
}

failures! {
    /// The kernel panicked, in every boot that the machine may try by itself.
    KERNEL_PANICKED = Kernel 1:
        "Read the kernel's last words, in the log and in polis/guru/ of the EFI system partition: \
         they name the driver or the hardware that failed. Then reboot.";
    /// The kernel's own file systems cannot be mounted in the initramfs.
    INITRAMFS_PREPARATION = Initramfs 1: REWRITE;
    /// The kernel command line lacks a word that Polis needs.
    COMMAND_LINE_INVALID = Initramfs 2:
        "Start the machine from EFI/BOOT/BOOTX64.EFI of the image, or with the command line of its \
         manifest.";
    /// No disk has appeared.
    DISK_ABSENT = Initramfs 3:
        "Check that a disk is connected and that its controller is enabled in the firmware; if so, \
         this kernel has no driver for it.";
    /// No disk has the ESP that the machine was started from.
    ESP_ABSENT = Initramfs 4:
        "Check that the disk that the machine was started from is still connected, or write the \
         image to it, which resets the machine.";
    /// The disk has no system partition, or none with the system of the kernel.
    SYSTEM_ABSENT = Initramfs 5:
        "Write the system partition of the same image again, or restore the partition table. \
         Writing the whole image to the disk resets the machine.";
    /// A block of the system partition is damaged.
    SYSTEM_DAMAGED = Initramfs 6: FAILING_SYSTEM;
    /// The kernel refuses to verify the system partition.
    VERITY_REFUSED = Initramfs 7: SAME_SYSTEM;
    /// The system cannot be mounted.
    SYSTEM_UNMOUNTABLE = Initramfs 8: SAME_SYSTEM;
    /// The system cannot become the root.
    SWITCH_FAILED = Initramfs 9: REWRITE;
    /// Several disks may be the one that the machine was started from.
    DISKS_ALIKE = Initramfs 10:
        "Disconnect or erase the disks that this machine must not run from, then reboot.";
    /// The disk that the machine was started from, or the partition of its system, does not answer.
    DISK_SILENT = Initramfs 11: SILENT;

    /// `node` returned without a request to stop.
    NODE_EXITED = System 1: REPORT;
    /// A signal killed `node`.
    NODE_KILLED = System 2: REPORT;
    /// The kernel was out of memory and killed `node`.
    NODE_OUT_OF_MEMORY = System 3: "Give the machine more memory, then reboot.";
    /// `node` cannot be started.
    NODE_NOT_STARTED = System 4: REWRITE_SYSTEM;
    /// A block of the system partition is damaged, seen while the machine ran.
    SYSTEM_DAMAGED_RUNNING = System 5: FAILING_SYSTEM;
    /// A file system that `node` needs cannot be mounted.
    TREE_INCOMPLETE = System 6: REWRITE_SYSTEM;
    /// A bug in `init`.
    INIT_PANICKED = System 7: REPORT;
    /// The kernel refuses `init` a resource that it requires.
    INIT_IMPAIRED = System 8: REWRITE;
    /// `node` runs and gives no sign of life any more.
    NODE_HUNG = System 9:
        "Check the disk, which may not answer any more, then reboot. If the failure returns, report \
         it with the file from polis/guru/ of the EFI system partition.";
    /// A system on trial did not get ready in time.
    TRIAL_NOT_READY = System 10: SYSTEM_BEFORE;
    /// A system on trial got ready, and its cluster is not healthy with it, or its workloads are
    /// not ready as before.
    TRIAL_UNHEALTHY = System 11: SYSTEM_BEFORE;
    /// The disk of the system does not answer before `node` runs.
    SYSTEM_SILENT = System 12: SILENT;
    /// The ESP, where the machine keeps its records, cannot be mounted.
    ESP_UNMOUNTABLE = System 13:
        "Check the disk and its cable, repair the EFI system partition with fsck.vfat from another \
         system, then reboot.";
    /// A service of `node` died more often than it may, up to the root of the tree.
    SERVICE_GAVE_UP = System 31: "read the last log lines and reboot; report this if it recurs";
    /// The main task of `node` panicked.
    NODE_PANICKED = System 32:
        "reboot; report this with the last log lines, which say where it happened";

    /// The disk cannot be read or written.
    STORAGE_DISK = Storage 1: CHECK_DISK;
    /// The partition table is damaged, unusual or full.
    STORAGE_PARTITION_TABLE = Storage 2:
        "repair the partition table from another system, then reboot; writing the image again \
         resets the machine";
    /// The disk has no room for a data partition.
    STORAGE_TOO_SMALL = Storage 3:
        "give the machine a larger disk, or write the image to one, then reboot";
    /// The free space for the data partition carries foreign data.
    STORAGE_OCCUPIED = Storage 4:
        "save its data if you need it, wipe the free space of the disk, then reboot";
    /// The data partition carries a foreign file system.
    STORAGE_FOREIGN = Storage 5: DELETE_FOREIGN;
    /// The data partition has no readable file system any more.
    STORAGE_DAMAGED = Storage 6: REPAIR;
    /// More than one partition claims to be the data partition.
    STORAGE_AMBIGUOUS = Storage 7: DELETE_FOREIGN;
    /// The file system of the data partition cannot be made.
    STORAGE_FORMAT = Storage 8: CHECK_DISK;
    /// The data partition cannot be mounted.
    STORAGE_MOUNT = Storage 9: REPAIR;
    /// A directory or file of the node cannot be made.
    STORAGE_FILE = Storage 10: CHECK_DISK;
    /// The TPM holds the node's half of the key and refuses it: the machine started
    /// other software, or with other settings.
    STORAGE_TPM_REFUSES = Storage 12 [locked]:
        "undo the change of the firmware's settings or of the kernel's command line and reboot, or \
         press U and type the recovery key of this machine; before the next firmware update, run \
         `polisctl node announce-firmware-update NODE`";
    /// The TPM was cleared or is another one: it cannot load the sealed data.
    STORAGE_TPM_CLEARED = Storage 13 [locked]:
        "insert the disk into its machine, or press U and type the recovery key of this machine";
    /// The node's half of the key is sealed to a TPM, but the machine has no TPM.
    STORAGE_TPM_ABSENT = Storage 14 [locked]:
        "switch the TPM on in the firmware's settings and reboot, or, where the disk is encrypted, \
         press U and type the recovery key of this machine";
    /// Both halves of the key are present, but do not open the disk.
    STORAGE_KEY_WRONG = Storage 15 [locked]:
        "restore the disk and the EFI system partition that belong together, or press U and type \
         the recovery key of this machine; nothing was changed";
    /// The recovery key that a person gave is mistyped, or another disk's.
    STORAGE_RECOVERY_KEY_WRONG = Storage 16 [locked]:
        "press U, check that the recovery key is this machine's and type it again; nothing was \
         changed";
    /// The data partition can neither be encrypted nor opened, and the key is not the
    /// cause.
    STORAGE_CIPHER = Storage 17:
        "read the output of cryptsetup, check the disk and its cable, then reboot: an unfinished \
         partition is made again, any other is left unchanged";
    /// A step of storage exceeded its deadline.
    STORAGE_LATE = Storage 18:
        "check the disk and its cable: it does not answer, or far too slowly; then reboot";
    /// The data partition failed while it was in use.
    STORAGE_FAILING = Storage 19:
        "check the disk named in the cause and its cable, then reboot: the next mount replays \
         acknowledged writes from the journal of the file system";
    /// The TPM that holds the node's half of the key fails, or does not answer.
    STORAGE_TPM_FAILS = Storage 21 [locked]:
        "switch the machine off and on again; if the TPM still fails and the disk is encrypted, \
         press U and type the recovery key of this machine";
    /// The cluster's half of the key is missing on a machine that is alone.
    STORAGE_SHARE_ABSENT = Storage 22 [locked]:
        "press U and type the recovery key of this machine; if the firmware stored the key, restore \
         its settings and reboot";
    /// The data partition has another kind of protection than this node's.
    STORAGE_KIND_DIFFERS = Storage 23: "insert the disk of this machine; this one was not used";
    /// A step of storage waits for random numbers, which this machine does not supply.
    STORAGE_RANDOM = Storage 24:
        "give the machine a source of random numbers, then reboot: a processor with RDRAND; in a \
         virtual machine a processor model that has it, or a virtio-rng device (QEMU: -device \
         virtio-rng-pci)";
    /// The disk of a mirror that is there has old data.
    MIRROR_OLD = Storage 25:
        "put in the other disk of the mirror, which has the newest data, or start the machine from \
         it; nothing was changed. A lost disk with the newest data means the loss of that data: \
         then install the machine anew";
    /// Both disks of a mirror have data that the other one lacks.
    MIRROR_SPLIT = Storage 26:
        "each disk of the mirror was used alone, or one is a copy: take out the disk whose data you \
         give up, start the machine, and wipe that disk in another machine; nothing was changed";

    /// Not exactly one disk fits what the parameters say to install to.
    INSTALL_DISK = Storage 31:
        "compare the disks above with install.disk of the parameters, write parameters that fit one \
         of them (`polisctl parameters bootstrap --install-disk`, or `polisctl parameters register \
         --install-disk`), then reboot; nothing was changed";
    /// The disk to install to carries data.
    INSTALL_OCCUPIED = Storage 32:
        "check that it is the right disk; if its data is to go, write the parameters with \
         `--install-wipe {word}`, then reboot; nothing was changed";
    /// An installation failed.
    INSTALL_FAILED = Storage 33:
        "check the disk named in the cause and the medium, then reboot: the installation begins \
         again";

    /// No place carries node parameters.
    PARAMETERS_ABSENT = Parameters 1: "put node parameters on the ESP, then reboot";
    /// Node parameters are present and cannot be read.
    PARAMETERS_UNREADABLE = Parameters 2: "Check the medium that carries {place}, then reboot.";
    /// Node parameters are larger than the allowed maximum.
    PARAMETERS_TOO_LARGE = Parameters 3: "Put only node parameters at {place}, then reboot.";
    /// Node parameters are damaged or cut short.
    PARAMETERS_MALFORMED = Parameters 4: "Write the node parameters at {place} again, then reboot.";
    /// Node parameters have a field that this version does not know.
    PARAMETERS_UNKNOWN_FIELD = Parameters 5:
        "Remove the field from {place}, or install a version that supports it, then reboot.";
    /// Node parameters choose neither bootstrap nor register.
    PARAMETERS_NOTHING_CHOSEN = Parameters 6:
        "Write {place} with `polisctl parameters bootstrap` for a new cluster, or with `polisctl \
         parameters register` for one that runs, then reboot.";
    /// Node parameters choose bootstrap and register at once.
    PARAMETERS_BOTH_CHOSEN = Parameters 7:
        "Set one of cluster_bootstrap and cluster_register in {place}, then reboot.";
    /// A field of the node parameters has a value that is not allowed.
    PARAMETERS_FIELD = Parameters 8: "Correct {field} in {place}, then reboot.";
    /// The owner's key in the node parameters is not usable.
    PARAMETERS_OWNER_KEY = Parameters 9:
        "Put the owner's raw Ed25519 public key into {place}, then reboot.";
    /// The register ticket in the node parameters is empty or too long.
    PARAMETERS_TICKET = Parameters 10:
        "Get the register ticket from a node of the cluster, put it into {place}, then reboot.";
    /// The CA certificate in the node parameters is not one.
    PARAMETERS_CA_CERTIFICATE = Parameters 11:
        "Get the cluster's CA certificate from a node of the cluster, put it into {place}, then \
         reboot.";

    /// This node was a member, but its disk does not hold one.
    CONSENSUS_MEMBER_ABSENT = Consensus 1: LOST_MEMBER;
    /// The member on the disk lacks a part.
    CONSENSUS_MEMBER_DAMAGED = Consensus 2: LOST_MEMBER;
    /// etcd itself reports that its database is damaged.
    CONSENSUS_DATABASE_DAMAGED = Consensus 3:
        "check the disk and the memory of this machine, which may be failing; if the cluster has \
         other members, they have all of its data: remove this node (`polisctl node delete NODE \
         --force`), give it parameters that wipe its disk with its volumes (`polisctl parameters \
         register --wipes` with its full ID), then reboot; if it was the only member, do not wipe \
         the disk, which has snapshots of the last day: see docs/disaster.md";
    /// A cluster was to be founded from a file that is not a snapshot.
    CONSENSUS_SNAPSHOT = Consensus 4:
        "copy the complete snapshot, as `polisctl etcd decrypt` writes it, to \
         polis/etcd_snapshot.db on the ESP again, or use a larger disk where the cause is too \
         little room, then reboot; without that file, the machine founds an empty cluster, which \
         has no data of the snapshot; no cluster was founded yet";

    /// The sealed configuration on the ESP is damaged.
    CLUSTER_SEALED_DAMAGED = Cluster 1:
        "restore polis/sealed_configuration.pb on the EFI system partition from a backup, or, where \
         the disk is encrypted, press U and type the recovery key of this machine; nothing was \
         changed";
    /// A data partition is in use, but the sealed configuration is missing.
    CLUSTER_SEALED_LOST = Cluster 2:
        "restore polis/sealed_configuration.pb on the EFI system partition from a backup, or, where \
         the disk is encrypted, press U and type the recovery key of this machine, or wipe the \
         first 16 MiB of the data partition and delete it to start over; nothing was changed";
    /// The sealed configuration is present, but the data partition is missing.
    CLUSTER_DATA_LOST = Cluster 3:
        "insert the disk of this machine, or delete polis/sealed_configuration.pb to start over";
    /// A bootstrap or a registration was under way, and its journal is damaged.
    CLUSTER_JOURNAL_DAMAGED = Cluster 4:
        "wipe the first 16 MiB of the data partition, which was never used, and delete it to start \
         over";
    /// The register ticket is wrong, was replaced, or has ended.
    CLUSTER_TICKET = Cluster 5:
        "make new parameters for this machine with the ticket that is valid now (`polisctl \
         parameters register`), then reboot";
    /// The key of this node is lost, damaged or another node's.
    CLUSTER_NODE_KEY = Cluster 6:
        "insert the disk of this machine; if its data is lost, wipe the first 16 MiB of the data \
         partition, delete it and polis/sealed_configuration.pb to start over";
    /// The node's own records cannot be read or written.
    CLUSTER_FILE = Cluster 7:
        "check the disk, and that the EFI system partition is not full or write-protected, then \
         reboot";
    /// The cluster's store is damaged or another cluster's.
    CLUSTER_STORE = Cluster 8:
        "if the cluster has other members, look at their state first (`polisctl etcd status`); \
         if this machine registers, give it parameters with the CA of its cluster (`polisctl \
         parameters register`); otherwise begin the cluster again from a snapshot \
         (docs/disaster.md), or wipe the first 16 MiB of the data partition, delete it and \
         polis/sealed_configuration.pb to start over without the data on this disk; then reboot; \
         nothing was changed";
    /// The directory leads to another cluster than the CA.
    CLUSTER_UNTRUSTED = Cluster 9:
        "give this machine the CA of the cluster that the directory leads to (`polisctl parameters \
         register`), then reboot; the ticket was not sent";
    /// The cluster knows this node, with other keys.
    CLUSTER_KNOWN = Cluster 10:
        "insert the disk of this node; if it is lost, remove the node from the cluster (`polisctl \
         node delete NODE --force`), then reboot";
    /// The node was decommissioned or deleted.
    CLUSTER_REMOVED = Cluster 11:
        "this node was removed from its cluster and cannot return; to use the machine again, give \
         it parameters that wipe its disk (`polisctl parameters register --wipes`), then reboot";
    /// The cluster refuses the node for another reason.
    CLUSTER_REFUSED = Cluster 12: "correct the cause, then reboot";
    /// The cluster's records lack this member.
    CLUSTER_UNKNOWN = Cluster 13 [locked]:
        "ask an operator whether this node was deleted; if it was not, press U and type the \
         recovery key of this machine; if it was, give it parameters that wipe its disk (`polisctl \
         parameters register --wipes`), then reboot";
    /// The parameters say to wipe another node than the removed one of this machine.
    CLUSTER_WIPES_OTHER = Cluster 14:
        "check which machine this is, and give it parameters that name its own node";
}

const REWRITE: &str =
    "Reboot. If the failure returns, write the image to the disk again, which resets the machine.";
const SILENT: &str = "Check the disk, its cable and its power, then switch the machine off and on. If only this partition \
     does not answer, start the system of the other slot; otherwise replace the disk.";
const SAME_SYSTEM: &str = "Write the system partition of the same image again. Writing the whole image would reset the \
     machine.";
const FAILING_SYSTEM: &str = "Check the disk, which may be failing, and write the system partition of the same image again. \
     Writing the whole image would reset the machine.";
const REWRITE_SYSTEM: &str = "Reboot. If the failure returns, write the system partition of the same image again; writing \
     the whole image would reset the machine.";
const SYSTEM_BEFORE: &str =
    "Wait: the machine starts the system that it had before the update by itself.";
const REPORT: &str = "Reboot. If the failure returns, report it with the file from polis/guru/ of the EFI system \
     partition.";
const CHECK_DISK: &str = "check the disk and its cable, replace it if it fails again, then reboot";
const DELETE_FOREIGN: &str = "save its data if you need it, wipe the first 16 MiB of the partition \
     and delete it, then reboot";
const REPAIR: &str = "repair the file system with xfs_repair from another system, or wipe the first \
     16 MiB of the partition and delete it to start over; nothing was changed";
const LOST_MEMBER: &str = "remove this node from the cluster (`polisctl node delete NODE --force`), give it parameters that \
     wipe its disk (`polisctl parameters register --wipes` with its full ID), then reboot; if it was \
     the only one, restore a snapshot of etcd";
