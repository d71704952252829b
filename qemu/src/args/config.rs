//! The description of a machine: its parts, the backends of its disk and its card, and its
//! behaviour at a reset.

use std::path::PathBuf;
use std::time::SystemTime;

use crate::plug::Plug;

/// How the guest's instructions are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// By the processor.
    Kvm,
    /// By translation, with a host thread a processor.
    Tcg,
    /// By translation, all processors in turn on one host thread. Before 8.1,
    /// QEMU's threads raced while the kernel patched its own code, and about
    /// one boot in sixty with four processors ended in `Oops: int3`; with two,
    /// one in some hundreds: see `SEVERAL`.
    TcgSingle,
}

/// In words, for people.
impl std::fmt::Display for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kvm => "by the processor (KVM)",
            Self::Tcg => "by translation (TCG)",
            Self::TcgSingle => "by translation on one thread (TCG)",
        })
    }
}

/// How the kernel gets into memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// UEFI from two flash chips; it finds the kernel on the disk's ESP.
    Uefi {
        /// The read-only chip.
        code: PathBuf,
        /// The chip with the variables: a copy that belongs to this machine.
        vars: PathBuf,
        /// Whether `code` is a Secure Boot build, which needs system management mode.
        secure: bool,
        /// Appended to the kernel command line by the stub; empty for nothing.
        append: String,
    },
    /// UEFI, which takes kernel and initramfs from QEMU and not from a disk: what
    /// a measurement of a kernel behind firmware needs.
    UefiDirect {
        /// The read-only chip.
        code: PathBuf,
        /// The chip with the variables: a copy that belongs to this machine.
        vars: PathBuf,
        /// The kernel.
        kernel: PathBuf,
        /// Its initramfs.
        initramfs: PathBuf,
        /// The whole kernel command line.
        cmdline: String,
    },
    /// QEMU itself places kernel and initramfs: no firmware variables, some seconds less.
    Direct {
        /// The kernel.
        kernel: PathBuf,
        /// Its initramfs.
        initramfs: PathBuf,
        /// The whole kernel command line.
        cmdline: String,
    },
}

/// The bus of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// `virtio-blk`, the quickest.
    Virtio,
    /// An NVMe controller with one namespace.
    Nvme,
    /// A SATA disk on the chipset's own controller.
    Ahci,
    /// A USB stick on an xHCI controller.
    Usb,
}

/// Whether the guest's flushes are flushed on the host too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Flushes end in the host's page cache. A raw disk survives the death of
    /// QEMU all the same, since the page cache is the host's and not QEMU's;
    /// only the host's own power cut would lose writes.
    Unsafe,
    /// Flushes reach the host's disk: for a machine that is kept.
    Writeback,
}

/// The disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// A raw image, or qcow2 by its extension.
    pub file: PathBuf,
    /// How the guest sees it.
    pub bus: Bus,
    /// How far a flush goes.
    pub cache: Cache,
}

/// The network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// `virtio-net`.
    Virtio,
    /// Intel 82574L.
    E1000e,
    /// Intel 82551, whose driver needs firmware from a file.
    I82551,
    /// Intel 82576. Exists since QEMU 8.0: see `host::has_device`.
    Igb,
    /// No card.
    None,
}

/// A card beside the usual one. The first two have a network and a DHCP server of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Card {
    /// `virtio-net`, before the usual one on the bus; the server names no gateway.
    NoWayOut,
    /// On USB, as a management controller's; the server names a gateway.
    Usb,
    /// `virtio-net`, plugged into a segment: another leg of the machine.
    Leg(Plug),
}

/// The network that the card is plugged into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// QEMU's own NAT, which answers DHCP. The machine is alone there.
    Nat,
    /// A segment with other machines.
    Segment(Plug),
}

/// The serial port of the guest that is read here, and that the waits of a story look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Serial {
    /// `ttyS0`.
    First,
    /// `ttyS1`, of a machine that has no `ttyS0`.
    Only,
    /// `ttyS1`, beside a `ttyS0` that leads nowhere: the firmware names it in this file, an ACPI
    /// table with its header.
    Named(PathBuf),
}

/// The screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Screen {
    /// The standard VGA card.
    Std,
    /// `virtio-vga`.
    Virtio,
    /// No card: tty1 is a dummy.
    None,
}

/// The reaction of QEMU when the guest resets itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// The machine starts again.
    Restart,
    /// QEMU ends.
    Exit,
}

/// A port of the guest that can be reached on the host's loopback interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// On the host.
    pub host: u16,
    /// In the guest.
    pub guest: u16,
}

/// A file that the guest reads through the firmware configuration device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FwCfg {
    /// For example `opt/polis/parameters.pb`.
    pub name: String,
    /// Read when QEMU starts.
    pub file: PathBuf,
}

/// How a disk fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// The first write to this place fails; later writes succeed.
    Write {
        /// In units of 512 bytes.
        sector: u64,
    },
    /// It holds a flush of its cache, and all that follow, for as long as the story wants
    /// (`qmp::Client::hold_flushes`).
    Flush,
}

/// The file behind the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Made by this machine, which can be saved.
    Own(PathBuf),
    /// Of a machine that was saved. This one starts with a private copy, and stands
    /// still until its state is loaded.
    Saved(PathBuf),
}

/// When the disk and the card come into the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// They are there when it is switched on.
    FromStart,
    /// It has two empty slots for them, and stops in stage 1: it is to be saved.
    Absent,
    /// The machine was saved in this folder with empty slots, and goes on once both are
    /// plugged in: see `template`.
    Plugged(PathBuf),
}

/// A machine. Start from [`Config::new`] and change the parts that the story is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The source of the kernel.
    pub firmware: Firmware,
    /// The disk, if there is one.
    pub disk: Option<Disk>,
    /// A second disk, which firmware turns to after the first.
    pub second_disk: Option<Disk>,
    /// Whether there is one more disk, virtio and behind the others, that takes requests and
    /// answers none. QEMU waits for it, too, when it is to end in order.
    pub silent_disk: bool,
    /// Whether its disks, which are virtio, can be pulled and pushed while it runs:
    /// `qmp::Client::pull`.
    pub bays: bool,
    /// The disc in the machine's CD-ROM drive, on the chipset's SATA controller, if it has one.
    pub disc: Option<PathBuf>,
    /// How the disk fails, if it does; it must be a raw one, and not recorded.
    pub disk_fault: Option<DiskFault>,
    /// An empty file for a recording of everything that is written to the disk, which
    /// must be a raw one.
    pub recording: Option<PathBuf>,
    /// How instructions are run.
    pub accelerator: Accelerator,
    /// Memory in MiB.
    pub memory: u32,
    /// The file behind it, of a machine that is saved or was: see `template`.
    pub memory_file: Option<Memory>,
    /// When the disk and the card come into the machine.
    pub devices: Devices,
    /// Virtual processors.
    pub cpus: u32,
    /// The network card.
    pub network: Network,
    /// More cards.
    pub cards: Vec<Card>,
    /// The network of the card.
    pub link: Link,
    /// Ports that the host can reach, behind [`Link::Nat`].
    pub forwards: Vec<Forward>,
    /// The screen.
    pub screen: Screen,
    /// Files for the firmware configuration device.
    pub fw_cfg: Vec<FwCfg>,
    /// OEM strings of the SMBIOS table.
    pub oem_strings: Vec<String>,
    /// Other fields of that table, as QEMU takes them: `type=1,manufacturer=Hetzner`.
    pub smbios: Vec<String>,
    /// The command that answers at the address of the metadata service of a cloud, behind
    /// [`Link::Nat`]: it is started for each connection, which is its standard input and output.
    pub metadata: Option<String>,
    /// Whether the machine has a watchdog, which resets it.
    pub watchdog: bool,
    /// The file of 64 KiB in which the firmware keeps the last words of a kernel (ACPI ERST), if
    /// it can; it may be empty.
    pub last_words: Option<PathBuf>,
    /// Whether the machine has a console beside the screen, the guest's `hvc0`.
    pub console: bool,
    /// The serial port that is read.
    pub serial: Serial,
    /// Whether the machine has a second serial port, the guest's `ttyS1`, whose other
    /// end is not read.
    pub unread_port: bool,
    /// The effect of a reset.
    pub reset: Reset,
    /// The folder of the machine's TPM, if it has one.
    pub tpm: Option<PathBuf>,
    /// The time of its clock when it starts; `None` for the host's time.
    pub clock: Option<SystemTime>,
    /// A plugin of the translator: its file and arguments, as QEMU takes them.
    pub plugin: Option<String>,
}

impl Config {
    /// An ordinary small machine: one processor, 512 MiB, virtio, the standard screen.
    #[must_use]
    pub fn new(firmware: Firmware, accelerator: Accelerator) -> Self {
        Self {
            firmware,
            disk: None,
            second_disk: None,
            silent_disk: false,
            bays: false,
            disc: None,
            disk_fault: None,
            recording: None,
            accelerator,
            memory: 512,
            memory_file: None,
            devices: Devices::FromStart,
            cpus: 1,
            network: Network::Virtio,
            cards: Vec::new(),
            link: Link::Nat,
            forwards: Vec::new(),
            screen: Screen::Std,
            fw_cfg: Vec::new(),
            oem_strings: Vec::new(),
            smbios: Vec::new(),
            metadata: None,
            watchdog: false,
            last_words: None,
            console: false,
            serial: Serial::First,
            unread_port: false,
            reset: Reset::Restart,
            tpm: None,
            clock: None,
            plugin: None,
        }
    }
}
