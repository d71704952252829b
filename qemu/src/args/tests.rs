//! Each machine's whole command line, as a person would read it.

use std::time::{Duration, SystemTime};

use super::*;
use crate::plug::Plug;

fn sockets() -> Sockets {
    Sockets {
        qmp: "/run/q".into(),
        console: "/run/c".into(),
        unread_port: "/run/u".into(),
        tpm: "/run/t".into(),
    }
}

/// One flag with its value a line, as a person would write the command.
fn show(config: &Config) -> String {
    let mut text = String::new();
    for arg in argv(config, &sockets()) {
        let arg = arg.into_string().unwrap();
        let flag = arg.starts_with('-') && !text.is_empty();
        text.push_str(if flag { "\n" } else { " " });
        text.push_str(&arg);
    }
    text.trim_start().to_owned()
}

fn direct() -> Firmware {
    Firmware::Direct {
        kernel: "vmlinuz".into(),
        initramfs: "initramfs.cpio".into(),
        cmdline: "console=ttyS0 quiet".to_owned(),
    }
}

fn uefi(secure: bool) -> Firmware {
    Firmware::Uefi {
        code: "code.fd".into(),
        vars: "vars.fd".into(),
        secure,
        append: "polis.guru-countdown=1".to_owned(),
    }
}

#[test]
fn of_two_translated_processors_one_boots() {
    for firmware in [direct(), uefi(false)] {
        let begins_with_one = |accelerator, cpus| {
            let config = Config { cpus, ..Config::new(firmware.clone(), accelerator) };
            show(&config).contains("maxcpus=1 tsc=reliable")
        };
        assert!(begins_with_one(Accelerator::Tcg, 2));
        assert!(!begins_with_one(Accelerator::Tcg, 1));
        assert!(!begins_with_one(Accelerator::Kvm, 2));
    }
}

#[test]
fn a_clock_is_set_to_the_second() {
    let clock = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_793_496_907));
    let config = Config { clock, ..Config::new(direct(), Accelerator::Tcg) };
    assert!(show(&config).contains("-rtc base=2026-11-01T01:35:07\n"), "{}", show(&config));
    assert!(!show(&Config::new(direct(), Accelerator::Tcg)).contains("-rtc"));
}

fn with_disk(firmware: Firmware, bus: Bus) -> Config {
    let disk = Disk { file: "a,b.img".into(), bus, cache: Cache::Unsafe };
    Config { disk: Some(disk), ..Config::new(firmware, Accelerator::Tcg) }
}

#[test]
fn a_direct_boot_has_no_boot_index_and_no_flash() {
    insta::assert_snapshot!(show(&with_disk(direct(), Bus::Virtio)), @r"
    -nodefaults
    -no-user-config
    -machine q35
    -accel tcg,thread=multi
    -cpu Nehalem,+rdrand,+aes
    -smp 1
    -m 512
    -device virtio-rng-pci
    -kernel vmlinuz
    -initrd initramfs.cpio
    -append console=ttyS0 quiet
    -drive if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file=a,,b.img
    -device virtio-blk-pci,drive=disk,serial=polis
    -netdev user,id=net
    -device virtio-net-pci,netdev=net,mac=52:54:00:70:6f:6c,romfile=
    -vga std
    -display none
    -chardev stdio,id=serial,signal=off
    -serial chardev:serial
    -chardev socket,id=qmp,server=off,path=/run/q
    -mon chardev=qmp,mode=control
    ");
}

#[test]
fn a_disk_that_never_answers_is_behind_the_others_and_not_read_by_qemu() {
    let silent_disk = true;
    let text = show(&Config { silent_disk, ..with_disk(direct(), Bus::Virtio) });
    let own = text.find("drive=disk,").unwrap();
    let silent = text.find("drive=silent,").unwrap();
    assert!(own < silent && text[silent..].contains("cyls="), "{text}");
    assert!(
        text.contains("file.driver=null-co,file.size=67108864,file.latency-ns=86400"),
        "{text}"
    );
}

#[test]
fn a_secure_boot_machine_has_guarded_flash_and_smm() {
    let config = Config {
        watchdog: true,
        console: true,
        unread_port: true,
        reset: Reset::Exit,
        screen: Screen::Virtio,
        network: Network::E1000e,
        forwards: vec![Forward { host: 18_000, guest: 7840 }],
        fw_cfg: vec![FwCfg { name: "opt/polis/parameters.pb".into(), file: "p.pb".into() }],
        ..with_disk(uefi(true), Bus::Nvme)
    };
    insta::assert_snapshot!(show(&config), @r"
    -nodefaults
    -no-user-config
    -machine q35,smm=on
    -accel tcg,thread=multi
    -cpu Nehalem,+rdrand,+aes
    -smp 1
    -m 512
    -device virtio-rng-pci
    -global driver=cfi.pflash01,property=secure,value=on
    -drive if=pflash,unit=0,format=raw,readonly=on,file=code.fd
    -drive if=pflash,unit=1,format=raw,file=vars.fd
    -smbios type=11,value=io.systemd.stub.kernel-cmdline-extra=polis.guru-countdown=1
    -drive if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file=a,,b.img
    -device nvme,drive=disk,serial=polis,bootindex=0
    -netdev user,id=net,hostfwd=tcp:127.0.0.1:18000-:7840
    -device e1000e,netdev=net,mac=52:54:00:70:6f:6c,romfile=
    -vga virtio
    -display none
    -fw_cfg name=opt/polis/parameters.pb,file=p.pb
    -chardev stdio,id=serial,signal=off
    -serial chardev:serial
    -chardev socket,id=qmp,server=off,path=/run/q
    -mon chardev=qmp,mode=control
    -device virtio-serial-pci
    -chardev socket,id=console,server=off,path=/run/c
    -device virtconsole,chardev=console
    -chardev socket,id=unread,server=off,path=/run/u
    -serial chardev:unread
    -device i6300esb
    -action watchdog=reset
    -no-reboot
    ");
}

#[test]
fn the_second_serial_port_is_read_where_there_is_no_first_or_the_firmware_names_it() {
    let show = |serial| show(&Config { serial, ..Config::new(direct(), Accelerator::Tcg) });
    let first = "-chardev stdio,id=serial,signal=off\n-serial chardev:serial\n";
    assert!(show(Serial::First).contains(first));
    let only = "signal=off\n-serial none\n-serial chardev:serial\n";
    assert!(show(Serial::Only).contains(only));
    let named = "signal=off\n-serial null\n-acpitable file=s,,1.aml\n-serial chardev:serial\n";
    assert!(show(Serial::Named("s,1.aml".into())).contains(named));
}

#[test]
fn more_cards_have_networks_of_their_own() {
    let cards = vec![Card::NoWayOut, Card::Usb];
    let shown = show(&Config { cards, ..Config::new(direct(), Accelerator::Tcg) });
    assert!(shown.contains(
        "-netdev user,id=card0,net=10.0.10.0/24,restrict=on\n\
         -device virtio-net-pci,netdev=card0,mac=52:54:00:70:6f:0a,romfile=\n\
         -netdev user,id=card1,net=10.0.11.0/24\n\
         -device qemu-xhci,id=usb-card1\n\
         -device usb-net,netdev=card1,bus=usb-card1.0,mac=52:54:00:70:6f:0b\n\
         -netdev user,id=net\n"
    ));
}

#[test]
fn a_machine_in_a_cloud_has_the_cloud_s_name_and_its_metadata_service_on_its_segment() {
    let shown = show(&Config {
        smbios: vec!["type=1,manufacturer=Hetzner".to_owned()],
        metadata: Some("'a,b' c".to_owned()),
        ..Config::new(direct(), Accelerator::Tcg)
    });
    assert!(shown.contains("\n-smbios type=1,manufacturer=Hetzner\n"), "{shown}");
    assert!(shown.contains(
        "-netdev user,id=net,net=168.0.0.0/7,guestfwd=tcp:169.254.169.254:80-cmd:'a,,b' c\n"
    ));
}

#[test]
fn a_saved_machine_has_its_memory_in_a_file_and_a_restored_one_a_copy_of_it() {
    let show =
        |memory_file| show(&Config { memory_file, ..Config::new(direct(), Accelerator::Tcg) });
    let saved = show(Some(Memory::Own("m,1".into())));
    assert!(saved.contains(
        "-machine q35,memory-backend=ram\n-accel tcg,thread=multi\n\
         -cpu Nehalem,+rdrand,+aes\n-smp 1\n-m 512\n\
         -object memory-backend-file,id=ram,size=512M,mem-path=m,,1,share=on\n\
         -device vmgenid,guid=auto\n-device virtio-rng-pci"
    ));
    let restored = show(Some(Memory::Saved("m,1".into())));
    assert!(
        restored
            .contains("mem-path=m,,1,share=off\n-device vmgenid,guid=auto\n-S\n-incoming defer\n")
    );
    assert!(!show(None).contains("vmgenid"));
}

#[test]
fn a_recorded_disk_has_its_flushes_in_the_recording() {
    let config = Config { recording: Some("l,1.log".into()), ..with_disk(direct(), Bus::Virtio) };
    let shown = show(&config);
    let drive = shown.lines().find(|line| line.starts_with("-drive")).unwrap();
    assert_eq!(
        drive,
        "-drive if=none,id=disk,format=raw,cache=writeback,discard=unmap,\
         file.driver=blklogwrites,file.file.driver=file,file.file.filename=a,,b.img,\
         file.file.cache.no-flush=on,file.log.driver=file,file.log.filename=l,,1.log,\
         file.log.cache.no-flush=on"
    );
    assert!(shown.contains("-device virtio-blk-pci,drive=disk,serial=polis,request-merging=off\n"));
}

#[test]
fn each_bus_names_its_own_controller() {
    let devices = |bus| {
        let shown = show(&with_disk(uefi(false), bus));
        shown.lines().filter(|line| line.contains("bootindex")).collect::<String>()
    };
    assert_eq!(devices(Bus::Virtio), "-device virtio-blk-pci,drive=disk,serial=polis,bootindex=0");
    assert_eq!(devices(Bus::Nvme), "-device nvme,drive=disk,serial=polis,bootindex=0");
    assert_eq!(devices(Bus::Ahci), "-device ide-hd,bus=ide.0,drive=disk,serial=polis,bootindex=0");
    assert_eq!(
        devices(Bus::Usb),
        "-device usb-storage,bus=xhci0.0,drive=disk,serial=polis,bootindex=0"
    );
}

#[test]
fn a_disc_is_in_a_drive_of_the_sata_controller() {
    let config = Config { disc: Some("a,b.iso".into()), ..with_disk(direct(), Bus::Virtio) };
    let shown = show(&config);
    let lines: Vec<_> = shown.lines().filter(|line| line.contains("=disc")).collect();
    assert_eq!(
        lines,
        [
            "-drive if=none,id=disc,media=cdrom,format=raw,file=a,,b.iso",
            "-device ide-cd,bus=ide.5,drive=disc",
        ]
    );
}

#[test]
fn a_machine_of_a_segment_has_a_line_and_an_address_of_its_own() {
    let plug = Plug { socket: "/run/2".into(), machine: 2 };
    let config = Config { link: Link::Segment(plug), ..Config::new(direct(), Accelerator::Tcg) };
    let shown = show(&config);
    assert!(shown.contains(
        "-netdev stream,id=net,server=off,addr.type=unix,addr.path=/run/2\n\
         -device virtio-net-pci,netdev=net,mac=52:54:00:70:6f:02,romfile="
    ));
    assert!(!shown.contains("user,id"));
}

#[test]
fn a_tpm_is_reached_by_its_socket() {
    let config = Config { tpm: Some("state".into()), ..Config::new(direct(), Accelerator::Kvm) };
    let shown = show(&config);
    let lines: Vec<_> = shown.lines().filter(|line| line.contains("tpm")).collect();
    assert_eq!(
        lines,
        [
            "-chardev socket,id=tpm,path=/run/t",
            "-tpmdev emulator,id=tpm,chardev=tpm",
            "-device tpm-crb,tpmdev=tpm",
        ]
    );
}

#[test]
fn a_machine_without_a_card_has_no_network_at_all() {
    let config = Config { network: Network::None, ..Config::new(direct(), Accelerator::Kvm) };
    assert!(show(&config).contains("-nic none"));
    assert!(!show(&config).contains("netdev"));
}

#[test]
fn a_machine_that_is_saved_in_stage_1_has_slots_and_nothing_in_them() {
    let config = Config { devices: Devices::Absent, ..with_disk(direct(), Bus::Virtio) };
    let shown = show(&config);
    for wanted in [
        "-device pcie-root-port,id=disk-slot,chassis=1,slot=1,addr=0x10\n",
        "-device pcie-root-port,id=card-slot,chassis=2,slot=2,addr=0x11\n",
        "-nic none\n",
    ] {
        assert!(shown.contains(wanted), "{wanted}: {shown}");
    }
    assert!(!shown.contains("virtio-blk") && !shown.contains("-drive"), "{shown}");
}

#[test]
fn what_is_plugged_into_the_slots_is_what_a_machine_has_from_the_start() {
    let from_start = Config {
        recording: Some("log".into()),
        link: Link::Segment(Plug { socket: "/s".into(), machine: 3 }),
        ..with_disk(direct(), Bus::Virtio)
    };
    let config = Config { devices: Devices::Plugged("saved".into()), ..from_start.clone() };
    // The back ends are there, in the same words, and the devices are not.
    let (before, after) = (show(&from_start), show(&config));
    for line in before.lines().filter(|line| line.starts_with("-drive") || line.contains("-netdev"))
    {
        assert!(after.contains(line), "{line}: {after}");
    }
    assert!(!after.contains("virtio-blk") && !after.contains("virtio-net"), "{after}");
    // And the devices have the same properties, behind their slot.
    for device in plugged(&config) {
        let device = device.as_object().unwrap();
        let driver = device["driver"].as_str().unwrap();
        let line = before.lines().find(|line| line.contains(driver)).unwrap();
        for (name, value) in
            device.iter().filter(|(name, _)| !["driver", "bus"].contains(&name.as_str()))
        {
            let value = match value {
                Value::Bool(on) => if *on { "on" } else { "off" }.to_owned(),
                other => other.as_str().unwrap().to_owned(),
            };
            assert!(line.contains(&format!(",{name}={value}")), "{name}={value}: {line}");
        }
    }
    assert_eq!(plugged(&config).len(), 2);
}
