//! The choice of kernel modules: all that a node may need, and the few that reach a disk.
//!
//! Debian's kernel has four thousand modules. The root keeps those that the lists below
//! do not leave out, the initramfs the few that lead to a disk. Most are packed as
//! Debian ships them, and the kernel unpacks them; those that a boot waits for are
//! stored unpacked, since unpacking costs more than reading them.
//!
//! Invariants:
//! - The dependencies of a kept module are kept, even from a folder left out.
//! - The index files name kept modules only.
//!
//! What this module does not do: read modules. Kmod's `depmod` did that, and this
//! module filters its text output.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::{Error, Result};

/// Folders (below `kernel/`) of modules that a node does not use.
const LEFT_OUT: &[&str] = &[
    // Devices for people: sound, cameras, television, gamepads, braille, touch screens.
    "sound",
    "drivers/accessibility",
    "drivers/input/gameport",
    "drivers/input/joystick",
    "drivers/input/tablet",
    "drivers/input/touchscreen",
    "drivers/media",
    "drivers/soundwire",
    "drivers/slimbus",
    // Radios.
    "drivers/bluetooth",
    "drivers/bcma",
    "drivers/gnss",
    "drivers/net/ieee802154",
    "drivers/net/wireless",
    "drivers/net/wwan",
    "drivers/nfc",
    "drivers/ssb",
    "net/6lowpan",
    "net/bluetooth",
    "net/ieee802154",
    "net/mac80211",
    "net/mac802154",
    "net/nfc",
    "net/rfkill",
    "net/wireless",
    // Graphics beyond a text screen; the ones that stay drive servers' and hypervisors' screens.
    "drivers/accel",
    "drivers/gpu/drm/amd",
    "drivers/gpu/drm/gma500",
    "drivers/gpu/drm/i915",
    "drivers/gpu/drm/nouveau",
    "drivers/gpu/drm/radeon",
    "drivers/gpu/drm/vgem",
    "drivers/gpu/drm/xe",
    // Laptops, phones, sensors, laboratory and factory buses.
    "drivers/comedi",
    "drivers/counter",
    "drivers/extcon",
    "drivers/firewire",
    "drivers/iio",
    "drivers/isdn",
    "drivers/leds/flash",
    "drivers/memstick",
    "drivers/net/can",
    "drivers/net/hamradio",
    "drivers/parport",
    "drivers/pcmcia",
    "drivers/platform/chrome",
    "drivers/platform/surface",
    "drivers/power",
    "drivers/staging",
    "drivers/usb/gadget",
    "drivers/usb/atm",
    "drivers/usb/image",
    "drivers/usb/misc",
    "drivers/w1",
    "net/can",
    // Networks of the past, and fabrics that need user-space libraries we do not ship.
    "drivers/atm",
    "drivers/infiniband",
    "drivers/net/arcnet",
    "drivers/net/fddi",
    "drivers/net/hippi",
    "drivers/net/plip",
    "drivers/net/ppp",
    "drivers/net/slip",
    "drivers/net/wan",
    "net/appletalk",
    "net/atm",
    "net/ax25",
    "net/batman-adv",
    "net/dccp",
    "net/l2tp",
    "net/lapb",
    "net/netrom",
    "net/phonet",
    "net/rds",
    "net/rose",
    "net/rxrpc",
    "net/smc",
    "net/tipc",
    "net/x25",
    // Flash chips without a controller, and being a target of others.
    "drivers/mtd",
    "drivers/target",
    // File systems that volumes of a node do not use.
    "fs/9p",
    "fs/adfs",
    "fs/affs",
    "fs/afs",
    "fs/bcachefs",
    "fs/befs",
    "fs/bfs",
    "fs/btrfs",
    "fs/ceph",
    "fs/coda",
    "fs/cramfs",
    "fs/dlm",
    "fs/ecryptfs",
    "fs/efs",
    "fs/exfat",
    "fs/f2fs",
    "fs/freevxfs",
    "fs/gfs2",
    "fs/hfs",
    "fs/hfsplus",
    "fs/hpfs",
    "fs/jffs2",
    "fs/jfs",
    "fs/minix",
    "fs/nilfs2",
    "fs/ntfs3",
    "fs/ocfs2",
    "fs/omfs",
    "fs/orangefs",
    "fs/qnx4",
    "fs/qnx6",
    "fs/reiserfs",
    "fs/romfs",
    "fs/smb",
    "fs/sysv",
    "fs/ubifs",
    "fs/ufs",
    "fs/zonefs",
];

/// Modules of the initramfs that are in it unpacked, since most boots need
/// them. Stage 1 loads the drivers of devices that are there, and the rest by name.
const INITRAMFS_PLAIN: &[&str] = &[
    // The way to the system: partition, verity with its hash, file system, firmware variables.
    "blake2b_generic",
    "dm_verity",
    "efivarfs",
    "erofs",
    // The modules that `node` needs at once: the ESP, which also counts attempts, the
    // parameters, and the file system of the data partition.
    "nls_cp437",
    "qemu_fw_cfg",
    "vfat",
    "xfs",
    // Disks of most machines, virtual or not.
    "ahci",
    "nvme",
    "sd_mod",
    "virtio_blk",
    "virtio_pci",
    "virtio_scsi",
];

/// Modules of the initramfs that are in it packed: each costs the machines that
/// need it a moment, and would cost every other machine its size.
const INITRAMFS_PACKED: &[&str] = &[
    // Disks of other hypervisors.
    "hv_storvsc",
    "vmw_pvscsi",
    "xen_blkfront",
    // Other disks.
    "ata_piix",
    "megaraid_sas",
    "mmc_block",
    "mpt3sas",
    "sdhci_acpi",
    "sdhci_pci",
    "uas",
    "usb_storage",
    "vmd",
    // USB, for disks and for an operator's keyboard.
    "ehci_pci",
    "hid_generic",
    "ohci_pci",
    "uhci_hcd",
    "usbhid",
    "xhci_pci",
];

/// Modules of the root that are in it unpacked, for the file system to compress: a boot
/// waits for them. LZ4 unpacks several times as fast as XZ.
const ROOT_PLAIN: &[&str] = &[
    // The data partition: its ciphers, plain and fast, its integrity, its file system.
    "aegis128",
    "aegis128_aesni",
    "aesni_intel",
    "dm_crypt",
    "dm_integrity",
    "xfs",
    "xts",
    // The firewall.
    "nf_tables",
    "nft_ct",
    // The network cards of most virtual machines.
    "e1000e",
    "igb",
    "virtio_net",
];

/// Modules that the root must have, even if a list leaves out their folder one day: the
/// node, or a program of Kubernetes, asks for them by name or alias, or the node is tested on
/// their hardware.
const ROOT: &[&str] = &[
    "aegis128",
    "aegis128_aesni",
    "aesni_intel",
    "dm_crypt",
    "dm_integrity",
    "e1000e",
    "efi_pstore",
    "i6300esb",
    "igb",
    "nf_conntrack_netlink",
    "nf_tables",
    "nfnetlink_queue",
    "nft_chain_nat",
    "nft_ct",
    "nft_fib_inet",
    "nft_masq",
    "nft_nat",
    "nft_numgen",
    "nft_queue",
    "nft_reject_inet",
    "nls_cp437",
    "overlay",
    "qemu_fw_cfg",
    "softdog",
    "veth",
    "vfat",
    "virtio_gpu",
    "virtio_net",
    "virtio_rng",
    "wireguard",
    "xfs",
    "xts",
];

/// How a module's file is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Plain, as the kernel maps it.
    Plain,
    /// Packed, as Debian ships it.
    Packed,
}

/// Modules that were chosen: path below the kernel's folder → form.
pub(crate) type Kept = BTreeMap<String, Form>;

/// The output of `depmod` about the modules of one kernel.
#[derive(Debug)]
pub(crate) struct Index {
    /// Module path below the kernel's folder → paths that it depends on, nearest first.
    dependencies: BTreeMap<String, Vec<String>>,
    /// Module name → path.
    paths: BTreeMap<String, String>,
    builtin: BTreeSet<String>,
    aliases: String,
    soft: String,
}

impl Index {
    /// Reads the texts of `modules.{dep,alias,softdep,builtin}`.
    pub(crate) fn parse(dep: &str, alias: &str, softdep: &str, builtin: &str) -> Self {
        let dependencies: BTreeMap<_, _> = dep
            .lines()
            .filter_map(|line| {
                let (path, needs) = line.split_once(':')?;
                Some((path.to_owned(), needs.split_whitespace().map(str::to_owned).collect()))
            })
            .collect();
        let paths = dependencies.keys().map(|path| (name(path), path.clone())).collect();
        Self {
            dependencies,
            paths,
            builtin: builtin.lines().map(name).collect(),
            aliases: alias.to_owned(),
            soft: softdep.to_owned(),
        }
    }

    /// The modules for the root.
    pub(crate) fn root(&self) -> Result<Kept> {
        let wanted = self.dependencies.keys().filter(|path| !left_out(path)).cloned();
        let kept = self.choose(ROOT_PLAIN, wanted)?;
        match self.named(ROOT)?.into_iter().find(|path| !kept.contains_key(path)) {
            Some(path) => Err(Error::Absent { path: format!("{path} that is not left out") }),
            None => Ok(kept),
        }
    }

    /// The modules for the initramfs.
    pub(crate) fn initramfs(&self) -> Result<Kept> {
        self.choose(INITRAMFS_PLAIN, self.named(INITRAMFS_PACKED)?)
    }

    /// Some modules in plain form, others packed, and the dependencies of both.
    fn choose(&self, plain: &[&str], packed: impl IntoIterator<Item = String>) -> Result<Kept> {
        let mut kept: Kept =
            self.close(packed).into_iter().map(|path| (path, Form::Packed)).collect();
        kept.extend(self.close(self.named(plain)?).into_iter().map(|path| (path, Form::Plain)));
        Ok(kept)
    }

    /// Paths of modules by name. A built-in module has no path.
    fn named(&self, names: &[&str]) -> Result<Vec<String>> {
        let mut paths = Vec::new();
        for module in names {
            match self.paths.get(*module) {
                Some(path) => paths.push(path.clone()),
                None if self.builtin.contains(*module) => {}
                None => return Err(Error::Absent { path: format!("kernel module {module}") }),
            }
        }
        Ok(paths)
    }

    /// Adds the dependencies of modules, firm or soft, until the set is complete.
    fn close(&self, wanted: impl IntoIterator<Item = String>) -> BTreeSet<String> {
        let mut kept = BTreeSet::new();
        let mut queue: VecDeque<String> = wanted.into_iter().collect();
        while let Some(path) = queue.pop_front() {
            if kept.contains(&path) {
                continue;
            }
            queue.extend(self.dependencies.get(&path).into_iter().flatten().cloned());
            queue.extend(self.softly_needed(&name(&path)));
            kept.insert(path);
        }
        kept
    }

    /// The soft dependencies of a module that exist: by name or alias.
    fn softly_needed(&self, module: &str) -> Vec<String> {
        let mut paths = Vec::new();
        for line in self.soft.lines() {
            let mut words = line.split_whitespace();
            if words.next() != Some("softdep") || words.next() != Some(module) {
                continue;
            }
            let before = words.skip_while(|word| *word != "pre:").skip(1);
            for wanted in before.take_while(|word| *word != "post:") {
                let wanted = wanted.replace('-', "_");
                paths.extend(self.paths.get(&wanted).cloned());
                paths.extend(
                    aliases(&self.aliases)
                        .filter(|(alias, _)| alias.replace('-', "_") == wanted)
                        .filter_map(|(_, module)| self.paths.get(module).cloned()),
                );
            }
        }
        paths
    }

    /// `modules.dep` for these modules; `place` maps a module to its file's path there.
    pub(crate) fn dep(&self, kept: &Kept, place: impl Fn(&str, Form) -> String) -> String {
        let mut text = String::new();
        for (path, form) in kept {
            text += &place(path, *form);
            text.push(':');
            for needed in self.dependencies.get(path).into_iter().flatten() {
                // The dependencies of a kept module are kept.
                if let Some(form) = kept.get(needed) {
                    text.push(' ');
                    text += &place(needed, *form);
                }
            }
            text.push('\n');
        }
        text
    }

    /// `modules.alias` for these modules.
    pub(crate) fn alias(&self, kept: &Kept) -> String {
        let names: BTreeSet<String> = kept.keys().map(|path| name(path)).collect();
        aliases(&self.aliases)
            .filter(|(_, module)| names.contains(*module))
            .map(|(alias, module)| format!("alias {alias} {module}\n"))
            .collect()
    }

    /// `modules.softdep` for these modules.
    pub(crate) fn softdep(&self, kept: &Kept) -> String {
        let names: BTreeSet<String> = kept.keys().map(|path| name(path)).collect();
        self.soft
            .lines()
            .filter(|line| {
                line.split_whitespace().nth(1).is_some_and(|module| names.contains(module))
            })
            .map(|line| format!("{line}\n"))
            .collect()
    }
}

/// The lines of `modules.alias`: pattern and module.
fn aliases(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.strip_prefix("alias ")?.rsplit_once(' '))
}

/// The file's path in this form.
pub(crate) fn in_form(path: &str, form: Form) -> String {
    match form {
        Form::Plain => path.strip_suffix(".xz").unwrap_or(path).to_owned(),
        Form::Packed => path.to_owned(),
    }
}

/// The name of a module, independent of its file's folder and form.
pub(crate) fn name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn left_out(path: &str) -> bool {
    let path = path.strip_prefix("kernel/").unwrap_or(path);
    LEFT_OUT
        .iter()
        .any(|folder| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/drivers/net/a.ko.xz: kernel/drivers/ssb/b-c.ko.xz kernel/lib/d.ko.xz
kernel/drivers/ssb/b-c.ko.xz: kernel/lib/d.ko.xz
kernel/drivers/ssb/x.ko.xz:
kernel/lib/d.ko.xz:
kernel/crypto/crc_fast.ko.xz:
kernel/sound/s.ko.xz:
";
    const ALIAS: &str =
        "# Aliases\nalias pci:v1d2 a\nalias pci:v3d4 s\nalias crypto-crc crc_fast\n";
    const SOFT: &str = "softdep d pre: crypto-crc none post: s\nsoftdep s pre: a\n";

    fn index() -> Index {
        let builtin: String =
            ROOT.iter().chain(ROOT_PLAIN).map(|name| format!("kernel/x/{name}.ko\n")).collect();
        Index::parse(DEP, ALIAS, SOFT, &builtin)
    }

    #[test]
    fn what_a_kept_module_needs_is_kept_even_from_a_folder_left_out() {
        let root = index().root().unwrap();
        assert!(root.contains_key("kernel/drivers/ssb/b-c.ko.xz"));
        assert!(!root.contains_key("kernel/drivers/ssb/x.ko.xz"));
        assert!(!root.contains_key("kernel/sound/s.ko.xz"));
    }

    #[test]
    fn what_must_be_loaded_before_a_module_is_found_by_alias_too() {
        let kept = index().close(["kernel/lib/d.ko.xz".to_owned()]);
        assert_eq!(
            kept.into_iter().collect::<Vec<_>>(),
            ["kernel/crypto/crc_fast.ko.xz", "kernel/lib/d.ko.xz"]
        );
    }

    #[test]
    fn what_a_plain_module_needs_is_plain_too() {
        let packed = ["kernel/sound/s.ko.xz".to_owned(), "kernel/lib/d.ko.xz".to_owned()];
        let kept = index().choose(&["b_c"], packed).unwrap();
        let packed: Vec<_> =
            kept.iter().filter(|(_, form)| **form == Form::Packed).map(|(path, _)| path).collect();
        // The soft dependency of `s` stays packed, as `s` does.
        assert_eq!(packed, ["kernel/drivers/net/a.ko.xz", "kernel/sound/s.ko.xz"]);
        assert_eq!(in_form("kernel/lib/d.ko.xz", kept["kernel/lib/d.ko.xz"]), "kernel/lib/d.ko");
    }

    #[test]
    fn the_index_files_name_kept_modules_only() {
        let index = index();
        let root = index.root().unwrap();
        assert_eq!(index.alias(&root), "alias pci:v1d2 a\nalias crypto-crc crc_fast\n");
        assert_eq!(index.softdep(&root), "softdep d pre: crypto-crc none post: s\n");
        let dep = index.dep(&root, |path, _| format!("{}.ko", name(path)));
        assert!(dep.contains("a.ko: b_c.ko d.ko\n"));
        assert!(!dep.contains("s.ko"));
    }

    #[test]
    fn a_module_of_the_initramfs_that_the_kernel_lacks_is_an_error() {
        assert!(matches!(index().initramfs(), Err(Error::Absent { .. })));
    }

    #[test]
    fn a_module_that_must_be_there_is_not_left_out_unnoticed() {
        let dep = "kernel/sound/xfs.ko.xz:\n";
        let builtin: String = ROOT
            .iter()
            .chain(ROOT_PLAIN)
            .filter(|name| **name != "nft_masq")
            .map(|name| format!("kernel/x/{name}.ko\n"))
            .collect();
        let error = Index::parse(dep, "", "", &builtin).root().unwrap_err();
        assert!(error.to_string().contains("nft_masq"), "{error}");
        let dep = "kernel/sound/nft_masq.ko.xz:\n";
        let error = Index::parse(dep, "", "", &builtin).root().unwrap_err();
        assert!(error.to_string().contains("sound/nft_masq"), "{error}");
    }

    #[test]
    fn no_folder_is_left_out_twice() {
        let unique: BTreeSet<_> = LEFT_OUT.iter().collect();
        assert_eq!(unique.len(), LEFT_OUT.len());
    }
}
