//! The arguments of QEMU, from a description of a machine ([`Config`]).
//!
//! [`argv`] is a pure function: the same description gives the same arguments,
//! and a snapshot test reads them. Each flag with a non-obvious purpose has a comment
//! here.
//!
//! What this module does not do: look at the host (`host`), make files
//! (`disk`, `image`), or start anything (`machine`).

mod config;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use time::OffsetDateTime;

use crate::plug::Plug;

pub use self::config::{
    Accelerator, Bus, Cache, Card, Config, Devices, Disk, DiskFault, Firmware, Forward, FwCfg,
    Link, Memory, Network, Reset, Screen, Serial,
};

/// The sockets on which the launcher listens and to which QEMU connects. That way round
/// the launcher does not poll, and the guest's first output is not lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sockets {
    /// The machine protocol.
    pub qmp: PathBuf,
    /// The other end of the guest's `hvc0`.
    pub console: PathBuf,
    /// The other end of the guest's `ttyS1`.
    pub unread_port: PathBuf,
    /// The TPM: here QEMU only connects, too.
    pub tpm: PathBuf,
}

/// The card's address behind NAT. One machine a network, so one address is enough,
/// and a lease that is asked for again is the same lease.
const MAC: &str = "52:54:00:70:6f:6c";

/// The network behind NAT of a machine with a metadata service. QEMU answers only inside of it,
/// and a machine rejects a link-local lease: so it is as large that both have a place there.
const METADATA_NET: &str = "168.0.0.0/7";

/// The slots of a machine whose disk and card come later.
const DISK_SLOT: &str = "disk-slot";
const CARD_SLOT: &str = "card-slot";

/// The arguments for QEMU, without the program's own name.
#[must_use]
pub fn argv(config: &Config, sockets: &Sockets) -> Vec<OsString> {
    let mut args = Args::default();
    machine(&mut args, config);
    firmware(&mut args, &config.firmware, words(config));
    if config.devices != Devices::FromStart {
        // Only such a slot takes a device while the machine runs.
        for (number, slot) in (1..).zip([DISK_SLOT, CARD_SLOT]) {
            let place = format!("chassis={number},slot={number},addr={:#x}", 15 + number);
            args.flag("-device", format!("pcie-root-port,id={slot},{place}"));
        }
    }
    if config.bays {
        for (number, name) in (11..).zip([DISK, SECOND]) {
            let place = format!("chassis={number},slot={number},addr={:#x}", 7 + number);
            args.flag("-device", format!("pcie-root-port,id={name}{BAY},{place}"));
        }
    }
    match &config.disk {
        Some(disk) if config.devices != Devices::Absent => self::disk(&mut args, config, disk),
        _ => {}
    }
    if let Some(disk) = &config.second_disk {
        args.flag("-drive", drive(SECOND, disk, &format!("file={}", path(&disk.file))));
        attach(
            &mut args,
            disk.bus,
            SECOND,
            format!("{}{}", bay(config, SECOND), boot_index(config, 1)),
        );
    }
    if config.silent_disk {
        silent_disk(&mut args);
    }
    if let Some(file) = &config.disc {
        let file = path(file);
        args.flag("-drive", format!("if=none,id=disc,media=cdrom,format=raw,file={file}"));
        // The last of its six ports: no disk is there.
        args.flag("-device", "ide-cd,bus=ide.5,drive=disc");
    }
    cards(&mut args, config);
    network(&mut args, config);
    // Behind `-nodefaults`, so that the machine has exactly the configured card.
    args.flag(
        "-vga",
        match config.screen {
            Screen::Std => "std",
            Screen::Virtio => "virtio",
            Screen::None => "none",
        },
    );
    // No window: the picture of the card is read over QMP.
    args.flag("-display", "none");
    for item in &config.fw_cfg {
        args.flag("-fw_cfg", format!("name={},file={}", item.name, path(&item.file)));
    }
    for text in &config.oem_strings {
        args.flag("-smbios", format!("type=11,value={}", text.replace(',', ",,")));
    }
    for fields in &config.smbios {
        args.flag("-smbios", fields);
    }
    channels(&mut args, config, sockets);
    if config.tpm.is_some() {
        for (name, value) in crate::tpm::args(&sockets.tpm) {
            args.flag(name, value);
        }
    }
    if config.watchdog {
        args.flag("-device", "i6300esb");
        args.flag("-action", "watchdog=reset");
    }
    if let Some(file) = &config.last_words {
        let file = path(file);
        args.flag(
            "-object",
            format!("memory-backend-file,id=erst,mem-path={file},size=64K,share=on"),
        );
        args.flag("-device", "acpi-erst,memdev=erst");
    }
    if let Some(plugin) = &config.plugin {
        args.flag("-plugin", plugin);
    }
    if config.reset == Reset::Exit {
        args.word("-no-reboot");
    }
    args.0
}

fn machine(args: &mut Args, config: &Config) {
    // No floppy, no default card, no default monitor: only the devices listed here.
    args.word("-nodefaults");
    // A configuration file of the host's user must not change a test.
    args.word("-no-user-config");
    let smm = match config.firmware {
        // The flash of a Secure Boot build is written from system management mode only.
        Firmware::Uefi { secure: true, .. } => ",smm=on",
        Firmware::Uefi { .. } | Firmware::UefiDirect { .. } | Firmware::Direct { .. } => "",
    };
    let backend = if config.memory_file.is_some() { ",memory-backend=ram" } else { "" };
    args.flag("-machine", format!("q35{smm}{backend}"));
    args.flag(
        "-accel",
        match config.accelerator {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg,thread=multi",
            Accelerator::TcgSingle => "tcg,thread=single",
        },
    );
    args.flag(
        "-cpu",
        match config.accelerator {
            Accelerator::Kvm => "host",
            // The newest model whose features QEMU translates well: later ones add
            // vector instructions, and the kernel then tests slow ciphers at boot.
            // Without `rdrand` the kernel's random numbers are not ready for minutes.
            // Every processor of the last ten years has `aes`; translated, it still
            // encrypts a disk twice as fast as without.
            Accelerator::Tcg | Accelerator::TcgSingle => "Nehalem,+rdrand,+aes",
        },
    );
    args.flag("-smp", config.cpus.to_string());
    args.flag("-m", config.memory.to_string());
    if let Some(memory) = &config.memory_file {
        memory_file(args, config.memory, memory);
    }
    if let Some(clock) = config.clock {
        let clock = OffsetDateTime::from(clock);
        args.flag("-rtc", format!("base={}T{}", clock.date(), hms(clock.time())));
    }
    // The second source of early randomness: the firmware seeds the kernel from it.
    args.flag("-device", "virtio-rng-pci");
}

fn memory_file(args: &mut Args, mebibytes: u32, memory: &Memory) {
    let (file, share) = match memory {
        Memory::Own(file) => (file, "on"),
        Memory::Saved(file) => (file, "off"),
    };
    let file = path(file);
    args.flag(
        "-object",
        format!("memory-backend-file,id=ram,size={mebibytes}M,mem-path={file},share={share}"),
    );
    // Another number in each machine: on it the kernel reseeds its random numbers.
    args.flag("-device", "vmgenid,guid=auto");
    if matches!(memory, Memory::Saved(_)) {
        args.word("-S");
        args.flag("-incoming", "defer");
    }
}

/// As QEMU takes it: whole seconds, two digits each.
fn hms(time: time::Time) -> String {
    let (hour, minute, second) = time.as_hms();
    format!("{hour:02}:{minute:02}:{second:02}")
}

/// Has the kernel boot on one processor, and process 1 start the others: the kernel patches, at
/// the end of its boot, the code that every processor reads its clock with, and there
/// translating threads raced. The clock of a translated processor is that of the host; compared
/// with a slow one, it would be given up on a busy host. The last word saves a pass over all
/// locks when the second processor starts.
///
/// Behind firmware, these words are in register 12 of a TPM: a machine whose proof has to fit its
/// image has one processor, or KVM.
const SEVERAL: &str = "maxcpus=1 tsc=reliable noreplace-smp";

/// The words of the kernel command line that depend on how it is run.
fn words(config: &Config) -> &'static str {
    match config.accelerator {
        Accelerator::Tcg if config.cpus > 1 => SEVERAL,
        Accelerator::Kvm | Accelerator::Tcg | Accelerator::TcgSingle => "",
    }
}

/// A command line with more words.
pub(crate) fn with(line: &str, words: &str) -> String {
    format!("{line} {words}").trim().to_owned()
}

fn firmware(args: &mut Args, firmware: &Firmware, words: &str) {
    match firmware {
        Firmware::Uefi { code, vars, secure, append } => {
            if *secure {
                // Secure Boot builds refuse flash that ordinary code could write.
                args.flag("-global", "driver=cfi.pflash01,property=secure,value=on");
            }
            flash(args, code, vars);
            let append = with(append, words);
            if !append.is_empty() {
                // systemd's stub appends this string to the command line that
                // is built into the kernel image: no image a test is needed.
                let extra = format!("io.systemd.stub.kernel-cmdline-extra={append}");
                args.flag("-smbios", format!("type=11,value={}", extra.replace(',', ",,")));
            }
        }
        Firmware::UefiDirect { code, vars, kernel, initramfs, cmdline } => {
            flash(args, code, vars);
            self::kernel(args, kernel, initramfs, &with(cmdline, words));
        }
        Firmware::Direct { kernel, initramfs, cmdline } => {
            self::kernel(args, kernel, initramfs, &with(cmdline, words));
        }
    }
}

fn flash(args: &mut Args, code: &Path, vars: &Path) {
    let code = path(code);
    args.flag("-drive", format!("if=pflash,unit=0,format=raw,readonly=on,file={code}"));
    args.flag("-drive", format!("if=pflash,unit=1,format=raw,file={}", path(vars)));
}

fn kernel(args: &mut Args, kernel: &Path, initramfs: &Path, cmdline: &str) {
    args.flag("-kernel", kernel);
    args.flag("-initrd", initramfs);
    args.flag("-append", cmdline);
}

fn disk(args: &mut Args, config: &Config, disk: &Disk) {
    let file = path(&disk.file);
    args.flag(
        "-drive",
        match (&config.recording, config.disk_fault) {
            (None, None) => drive(DISK, disk, &format!("file={file}")),
            (Some(log), _) => {
                let disk = Disk { cache: Cache::Writeback, ..disk.clone() };
                drive(DISK, &disk, &recorded(&file, &path(log)))
            }
            // The layer between the format and the file fails what the rule matches;
            // `report` on the drive passes the error to the guest, as a broken disk would.
            (None, Some(DiskFault::Write { sector })) => drive(
                DISK,
                disk,
                &format!(
                    "werror=report,{},file.inject-error.0.event=write_aio,\
                     file.inject-error.0.iotype=write,file.inject-error.0.errno=5,\
                     file.inject-error.0.sector={sector},file.inject-error.0.once=on",
                    debugged(&file)
                ),
            ),
            (None, Some(DiskFault::Flush)) => drive(DISK, disk, &debugged(&file)),
        },
    );
    if config.devices != Devices::FromStart {
        return;
    }
    let merging =
        if merges(config) || disk.bus != Bus::Virtio { "" } else { ",request-merging=off" };
    let rest = format!("{merging}{}{}", bay(config, DISK), boot_index(config, 0));
    attach(args, disk.bus, DISK, rest);
}

/// A disk that is longer at each request than any story.
fn silent_disk(args: &mut Args) {
    const LATENCY: Duration = Duration::from_secs(24 * 60 * 60);
    let latency = LATENCY.as_nanos();
    args.flag(
        "-drive",
        format!(
            "if=none,id=silent,format=raw,file.driver=null-co,file.size={},\
             file.latency-ns={latency}",
            64 << 20
        ),
    );
    // QEMU would read the first sector to guess the geometry, and wait itself.
    let geometry = "cyls=130,heads=16,secs=63";
    args.flag("-device", format!("virtio-blk-pci,drive=silent,serial=polis-silent,{geometry}"));
}

/// The file with a layer above it that can fail or hold requests.
fn debugged(file: &str) -> String {
    format!("file.driver=blkdebug,file.image.driver=file,file.image.filename={file}")
}

/// The name of the first disk.
const DISK: &str = "disk";
/// The name of the second one.
const SECOND: &str = "second";
/// How the names of their bays end.
pub(crate) const BAY: &str = "-bay";

/// The bay of a disk, and the name of the device in it.
fn bay(config: &Config, name: &str) -> String {
    if config.bays { format!(",id={name},bus={name}{BAY}") } else { String::new() }
}

/// The content of a disk: `file` says where it is.
fn drive(name: &str, disk: &Disk, file: &str) -> String {
    let format = match disk.file.extension() {
        Some(extension) if extension == "qcow2" => "qcow2",
        _ => "raw",
    };
    let cache = match disk.cache {
        Cache::Unsafe => "unsafe",
        Cache::Writeback => "writeback",
    };
    // `discard` lets a trimmed file system give space back to the sparse file.
    format!("if=none,id={name},format={format},cache={cache},discard=unmap,{file}")
}

/// When firmware turns to a disk. With `-kernel`, a boot index would put the disk's boot
/// sector before the kernel.
fn boot_index(config: &Config, index: u32) -> String {
    match config.firmware {
        Firmware::Uefi { .. } => format!(",bootindex={index}"),
        _ => String::new(),
    }
}

/// Puts a disk on its bus. `rest` goes to the device.
fn attach(args: &mut Args, bus: Bus, name: &str, rest: String) {
    // The first disk's serial number does not depend on how many there are.
    let (serial, port) = if name == DISK { ("polis", 0) } else { ("polis-second", 1) };
    let rest = format!("drive={name},serial={serial}{rest}");
    match bus {
        Bus::Virtio => args.flag("-device", format!("virtio-blk-pci,{rest}")),
        Bus::Nvme => args.flag("-device", format!("nvme,{rest}")),
        // The ports of the SATA controller that every q35 has.
        Bus::Ahci => args.flag("-device", format!("ide-hd,bus=ide.{port},{rest}")),
        Bus::Usb => {
            args.flag("-device", format!("qemu-xhci,id=xhci{port}"));
            args.flag("-device", format!("usb-storage,bus=xhci{port}.0,{rest}"));
        }
    }
}

/// Whether QEMU may merge requests. Merged ones have as many parts as a system call takes,
/// and a recording adds one: they would fail. It also holds the guest's own writes that way.
fn merges(config: &Config) -> bool {
    config.recording.is_none()
}

/// The disk and the card of a machine with [`Devices::Plugged`], as `device_add` takes them.
/// Both are virtio: a machine with others does not start from a saved one.
#[must_use]
pub fn plugged(config: &Config) -> Vec<Value> {
    let disk = config.disk.as_ref().map(|_| {
        json!({ "driver": "virtio-blk-pci", "drive": "disk", "serial": "polis", "bus": DISK_SLOT,
            "request-merging": merges(config) })
    });
    let card = (config.network == Network::Virtio).then(|| {
        json!({ "driver": "virtio-net-pci", "netdev": "net", "mac": mac(config), "romfile": "",
            "bus": CARD_SLOT })
    });
    disk.into_iter().chain(card).collect()
}

/// The layer between the format and the file records the requests that pass. It sees
/// flushes only where the cache of the drive is not `unsafe`; the files below it skip
/// them, so they cost nothing all the same.
fn recorded(file: &str, log: &str) -> String {
    format!(
        "file.driver=blklogwrites,file.file.driver=file,file.file.filename={file},\
         file.file.cache.no-flush=on,file.log.driver=file,file.log.filename={log},\
         file.log.cache.no-flush=on"
    )
}

fn network(args: &mut Args, config: &Config) {
    let model = match config.network {
        Network::Virtio => "virtio-net-pci",
        Network::E1000e => "e1000e",
        Network::I82551 => "i82551",
        Network::Igb => "igb",
        Network::None => {
            args.flag("-nic", "none");
            return;
        }
    };
    if config.devices == Devices::Absent {
        args.flag("-nic", "none");
        return;
    }
    match &config.link {
        Link::Nat => {
            let forwards = config.forwards.iter();
            let forwards: String = forwards
                .map(|Forward { host, guest }| format!(",hostfwd=tcp:127.0.0.1:{host}-:{guest}"))
                .collect();
            let metadata = config.metadata.as_ref().map(|command| {
                let command = command.replace(',', ",,");
                format!(",net={METADATA_NET},guestfwd=tcp:169.254.169.254:80-cmd:{command}")
            });
            let metadata = metadata.unwrap_or_default();
            args.flag("-netdev", format!("user,id=net{forwards}{metadata}"));
        }
        Link::Segment(plug) => args.flag("-netdev", segment("net", plug)),
    }
    if config.devices == Devices::FromStart {
        // No boot ROM: nothing here boots from the network, and the ROM may be missing on the
        // host.
        args.flag("-device", format!("{model},netdev=net,mac={},romfile=", mac(config)));
    }
}

/// The backend of a card in a segment. The switch listens: this QEMU cannot try again.
fn segment(id: &str, plug: &Plug) -> String {
    let socket = path(&plug.socket);
    format!("stream,id={id},server=off,addr.type=unix,addr.path={socket}")
}

/// The card's address.
fn mac(config: &Config) -> String {
    match &config.link {
        Link::Nat => MAC.to_owned(),
        Link::Segment(plug) => plug.mac(),
    }
}

/// Each has the network 10.0.10.0/24 or one behind it, or is in a segment.
fn cards(args: &mut Args, config: &Config) {
    for (number, card) in config.cards.iter().enumerate() {
        let (id, net) = (format!("card{number}"), 10 + number);
        let restrict = match card {
            // A server that keeps its network apart names no gateway.
            Card::NoWayOut => ",restrict=on",
            Card::Usb => "",
            Card::Leg(plug) => {
                args.flag("-netdev", segment(&id, plug));
                let mac = plug.mac();
                args.flag("-device", format!("virtio-net-pci,netdev={id},mac={mac},romfile="));
                continue;
            }
        };
        args.flag("-netdev", format!("user,id={id},net=10.0.{net}.0/24{restrict}"));
        let mac = format!("mac=52:54:00:70:6f:{net:02x}");
        match card {
            Card::NoWayOut => {
                args.flag("-device", format!("virtio-net-pci,netdev={id},{mac},romfile="));
            }
            Card::Leg(_) => {}
            Card::Usb => {
                args.flag("-device", format!("qemu-xhci,id=usb-{id}"));
                args.flag("-device", format!("usb-net,netdev={id},bus=usb-{id}.0,{mac}"));
            }
        }
    }
}

fn channels(args: &mut Args, config: &Config, sockets: &Sockets) {
    // The serial port is QEMU's standard output: its end is the machine's end.
    // Without `signal=off` QEMU would take the terminal's Ctrl-C for itself.
    args.flag("-chardev", "stdio,id=serial,signal=off");
    match &config.serial {
        Serial::First => {}
        Serial::Only => args.flag("-serial", "none"),
        Serial::Named(table) => {
            args.flag("-serial", "null");
            args.flag("-acpitable", format!("file={}", path(table)));
        }
    }
    args.flag("-serial", "chardev:serial");
    args.flag("-chardev", format!("socket,id=qmp,server=off,path={}", path(&sockets.qmp)));
    args.flag("-mon", "chardev=qmp,mode=control");
    if config.console {
        args.flag("-device", "virtio-serial-pci");
        let socket = path(&sockets.console);
        args.flag("-chardev", format!("socket,id=console,server=off,path={socket}"));
        args.flag("-device", "virtconsole,chardev=console");
    }
    if config.unread_port {
        let socket = path(&sockets.unread_port);
        args.flag("-chardev", format!("socket,id=unread,server=off,path={socket}"));
        args.flag("-serial", "chardev:unread");
    }
}

/// A path inside an option: QEMU reads a comma as the end of the value unless it is
/// doubled.
fn path(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn word(&mut self, word: &str) {
        self.0.push(word.into());
    }

    fn flag(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.push(name.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests;
