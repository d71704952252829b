//! Disks and bundles of small parts have what was put on them, and damage to them is found.

use std::{os::unix::fs::FileExt as _, sync::Arc};

use polis_bundle::Bundle;
use proptest::prelude::*;

use super::*;
use crate::{
    Format, Manifest, Options, assemble,
    command_line::command_line,
    digest::sha256,
    manifest::{SIZE_DEFAULT, Sizes},
    microcode::Vendor,
    signing::{ImageSigner, Passphrase, ReleaseKey, keys},
    uki::Section,
    verity::Verity,
};

const PACKAGES: &str = "node etcd-server 3.5.16-4 00 locked=3.5.15-1\nnode xfsprogs 1 00\n\
                        device intel-microcode 3.2~deb13u1 00\n";

const OS_RELEASE: &str =
    "ID=polis\nVARIANT_ID=development\nPOLIS_VARIANT=full\nPOLIS_KUBERNETES=1.37.2\n";

/// Parts like those of a build, but small.
pub(crate) fn parts(folder: &Path) -> Manifest {
    let data = vec![0x5a; 200 * BLOCK];
    let (root, tree) = verity::tree(&data, &[1, 2]);
    let verity = Verity { root_hash: hex(&root), salt: "0102".to_owned(), blocks: 200 };
    let cmdline = command_line(&verity);
    let sections = [
        Section::new(".osrel", OS_RELEASE),
        Section::new(".cmdline", cmdline.as_str()),
        Section::new(".uname", "6.0"),
        Section::new(".pkgs", PACKAGES),
        Section::new(".linux", "kernel"),
    ];
    let image = uki::build(&uki::tests::stub(), &sections).unwrap();
    fs::write(folder.join("system.img"), [&data[..], &tree].concat()).unwrap();
    fs::write(folder.join("polis.efi"), image).unwrap();
    fs::write(folder.join("loader.efi"), uki::build(&uki::tests::stub(), &[]).unwrap()).unwrap();
    Manifest {
        folder: folder.to_owned(),
        kind: Kind::Development,
        variant: Variant::Full,
        moved: difference::marked(PACKAGES),
        version: "0".to_owned(),
        image_version: "0".to_owned(),
        kernel_release: "6.0".to_owned(),
        cmdline,
        kernel: "vmlinuz".into(),
        initramfs: "initramfs.cpio".into(),
        microcode: None,
        uki: "polis.efi".into(),
        loader: "loader.efi".into(),
        system: "system.img".into(),
        firmware: "firmware".into(),
        image: "polis.img".into(),
        sha256: String::new(),
        sizes: Sizes { erofs: data.len() as u64, verity: tree.len() as u64, ..Sizes::default() },
        verity,
    }
}

/// Little more than the partitions need.
const SMALL: u64 = 2600 << 20;

#[test]
fn what_was_put_together_is_found_in_the_file_alone() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = parts(folder.path());
    let out = folder.path().join("disk");
    let options = Options { parameters: Some(vec![7; 3]), ..Options::new(&out) };
    assemble(&manifest, &options).unwrap();
    fs::remove_file(folder.path().join("system.img")).unwrap();
    let found = inspect(&out).unwrap();
    assert_eq!(found.parameters, Some(3));
    assert_eq!(found.cmdline, manifest.cmdline);
    assert_eq!(found.packages, PACKAGES);
    assert_eq!(found.kind, Some(manifest.kind));
    assert_eq!(found.variant, Some(manifest.variant));
    assert_eq!(found.moved, manifest.moved);
    assert_eq!(found.moved[0].to_string(), "etcd-server 3.5.15-1 -> 3.5.16-4");
    assert_eq!(found.etcd, Some(Version::new(3, 5, 16)));
    assert_eq!(found.system, System::Intact);
    let names: Vec<_> = found.partitions.iter().map(|part| part.name.as_str()).collect();
    assert_eq!(names, ["POLIS-ESP", "POLIS-SYSTEM-A", "POLIS-SYSTEM-B"]);
    assert!(found.sections.contains(&(".linux".to_owned(), 6)));
    assert_eq!(fs::metadata(&out).unwrap().len(), SIZE_DEFAULT);
}

#[test]
fn the_microcode_before_the_initramfs_is_found_with_the_versions_of_its_packages() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = parts(folder.path());
    let (kernel, out) = (folder.path().join("polis.efi"), folder.path().join("disk"));
    let plain = fs::read(&kernel).unwrap();
    let inspected = |initrd: &[u8]| {
        let image = uki::build(&plain, &[Section::new(".initrd", initrd)]).unwrap();
        fs::write(&kernel, image).unwrap();
        assemble(&manifest, &Options { size: SMALL, ..Options::new(&out) }).unwrap();
        inspect(&out).unwrap()
    };
    let archive = microcode::tests::archive();
    let mut initramfs = crate::Tree::default();
    initramfs.text("init", "program");
    let initramfs = initramfs.archive().unwrap();
    let found = inspected(&[&archive[..], &initramfs].concat());
    let [intel, amd] = &found.microcode[..] else { panic!("{:?}", found.microcode) };
    assert_eq!((intel.vendor, &intel.updates), (Vendor::Intel, &Ok(4)));
    assert_eq!(intel.version.as_deref(), Some("3.2~deb13u1"));
    assert_eq!((amd.vendor, &amd.updates), (Vendor::Amd, &Ok(3)));
    assert_eq!(amd.version, None);
    // The register covers it.
    let without = inspected(&initramfs);
    assert!(without.microcode.is_empty(), "{without:?}");
    assert_ne!(without.registers[&11], found.registers[&11]);
    // The last byte of Intel's file: it follows that of AMD in the archive.
    let mut damaged = archive.clone();
    let end = archive.windows(6).rposition(|bytes| bytes == b"070701").unwrap();
    damaged[end - 1] ^= 1;
    let found = inspected(&[&damaged[..], &initramfs].concat());
    assert!(found.microcode[0].updates.as_ref().unwrap_err().contains("add up"), "{found:?}");
    assert_eq!(found.microcode[1].updates, Ok(3));
}

#[test]
fn the_same_parts_give_the_same_disk() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = parts(folder.path());
    let disk = |name: &str, parameters: &[u8]| {
        let out = folder.path().join(name);
        let parameters = Some(parameters.to_vec());
        let options = Options { parameters, size: SMALL, ..Options::new(&out) };
        assemble(&manifest, &options).unwrap();
        sha256(&out).unwrap()
    };
    assert_eq!(disk("a", b"one"), disk("another", b"one"));
    assert_ne!(disk("a", b"one"), disk("b", b"two"));
}

#[test]
fn a_disk_in_the_format_of_qemu_touches_no_file_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = parts(folder.path());
    let [out, beside] = ["disk", "disk.raw"].map(|name| folder.path().join(name));
    fs::write(&beside, "of a person").unwrap();
    let files = || fs::read_dir(folder.path()).unwrap().count();
    let before = files();
    let options = Options { size: SMALL, format: Format::Qcow2, ..Options::new(&out) };
    // A host may have no `qemu-img`.
    let made = assemble(&manifest, &options).is_ok();
    assert_eq!(fs::read(&beside).unwrap(), b"of a person");
    assert_eq!((out.exists(), files()), (made, before + usize::from(made)));
    if made {
        assert_eq!(inspect(&out).unwrap().system, System::Intact);
    }
}

/// The kernel image of a signed disk.
fn esp_kernel(disk: &Path) -> Vec<u8> {
    let start = inspect(disk).unwrap().partitions[0].place;
    let window = Window::new(File::open(disk).unwrap(), start.0, start.1);
    esp::read(window, "EFI/Linux/polis-0.efi").unwrap().unwrap()
}

#[test]
fn a_signed_disk_has_a_loader_and_says_who_signed_both() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = parts(folder.path());
    let signer = Arc::new(keys().image_signer().unwrap());
    let disk = |name: &str, signer: Option<Arc<ImageSigner>>| {
        let out = folder.path().join(name);
        assemble(&manifest, &Options { signer, size: SMALL, ..Options::new(&out) }).unwrap();
        out
    };
    let signed = disk("signed", Some(signer.clone()));
    let found = inspect(&signed).unwrap();
    // The same with the key whose bundles the node takes.
    let release = keys().release_key().unwrap().key().verifying_key();
    let keyed = manifest.cmdline.replace(&"0".repeat(64), &hex(release.as_bytes()));
    assert!(keyed != manifest.cmdline);
    assert_eq!(found.cmdline, keyed);
    let paths: Vec<_> = found.signatures.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["EFI/BOOT/BOOTX64.EFI", "EFI/Linux/polis-0.efi"]);
    for (path, signature) in &found.signatures {
        let Signature::Whole { subject, .. } = signature else { panic!("{path}") };
        assert!(subject.starts_with("CN=Polis signature key "), "{subject}");
    }
    assert_eq!(sha256(&signed).unwrap(), sha256(&disk("again", Some(signer.clone()))).unwrap());
    // The policy key approves the measurements of the whole image, signature or not.
    let kernel = esp_kernel(&signed);
    assert_eq!(found.authenticode, signing::authenticode_hash(&kernel).ok());
    assert_eq!(crate::authenticode_hash(&signed).ok(), found.authenticode);
    let sections = uki::sections(Path::new("x"), &kernel).unwrap();
    let section = |name: &str| {
        let mut found = sections.iter().filter(|section| section.name == name);
        let (first, second) = (found.next().unwrap(), found.next());
        assert_eq!(second, None, "{name}");
        String::from_utf8(first.content.clone()).unwrap()
    };
    let policy = polis_bundle::policy(&found.registers[&11]);
    assert_eq!(section(".pcrsig"), signer.approve(&policy).unwrap());
    assert_eq!(section(".pcrpkey"), signer.policy_key().unwrap());
    let plain = inspect(&disk("plain", None)).unwrap();
    let unsigned = |name: &str| plain.sections.iter().all(|(section, _)| section != name);
    assert!(unsigned(".pcrsig") && unsigned(".pcrpkey"));
    // The kernel image is measured, and not the loader: the two differ by the key in it.
    let [signed, plain_11] = [&found, &plain].map(|found| found.registers[&11]);
    assert!(signed != plain_11 && plain_11 != [0; 32]);
    assert_eq!(plain.signatures, [("EFI/BOOT/BOOTX64.EFI".to_owned(), Signature::Absent)]);
}

#[test]
fn a_bundle_has_the_signed_kernel_image_and_the_system() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = Manifest { version: "0.2.0".to_owned(), ..parts(folder.path()) };
    let passphrase = Passphrase::new("x".to_owned().into()).unwrap();
    let owner = folder.path().join("keys");
    keys().store(&owner, &passphrase).unwrap();
    let signer = ImageSigner::open(&owner, &passphrase).unwrap();
    let release = ReleaseKey::open(&owner, &passphrase).unwrap();
    let file = folder.path().join("update");
    crate::bundle(&manifest, &signer, &release, &file).unwrap();
    let bundle = Bundle::open(File::open(&file).unwrap(), None).unwrap();
    assert_eq!(bundle.manifest().variant, "full");
    assert_eq!(bundle.manifest().etcd, Version::new(3, 5, 16));
    assert_eq!(bundle.manifest().kubernetes, Some(Version::new(1, 37, 2)));
    let (mut kernel, mut system) = (Vec::new(), Vec::new());
    bundle.parts([&mut kernel, &mut system], &mut |_bytes| ()).unwrap();
    assert!(system == fs::read(folder.path().join("system.img")).unwrap());
    assert!(matches!(Signature::of(&kernel), Signature::Whole { .. }));
    // The hash by which firmware knows it, of the bundle and of the kernel image alone.
    let hash = crate::authenticode_hash(&file).unwrap();
    assert_eq!(hash, signing::authenticode_hash(&kernel).unwrap());
    let program = folder.path().join("polis.efi");
    assert_ne!(crate::authenticode_hash(&program).unwrap(), hash);
    assert!(crate::authenticode_hash(&folder.path().join("system.img")).is_err());
    // A malformed version, and one older than the oldest version that the bundle updates.
    for version in ["1", "0.0.1"] {
        let manifest = Manifest { version: version.to_owned(), ..manifest.clone() };
        assert!(crate::bundle(&manifest, &signer, &release, &file).is_err(), "{version}");
    }
    // A later build in the folder has replaced the kernel image, which starts its own system.
    let verity = Verity { root_hash: "ab".repeat(32), ..manifest.verity.clone() };
    let manifest = Manifest { verity, ..manifest };
    let other = crate::bundle(&manifest, &signer, &release, &file).unwrap_err();
    assert!(matches!(other, Error::OtherBuild { .. }), "{other}");
    assert!(other.help().is_some_and(|help| help.contains("repeat")), "{other}");
    // Nothing unfinished is left beside the bundle and the parts.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
}

#[test]
fn a_flipped_byte_of_the_system_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = parts(folder.path());
    let out = folder.path().join("disk");
    assemble(&manifest, &Options { size: SMALL, ..Options::new(&out) }).unwrap();
    let start = inspect(&out).unwrap().partitions[1].place.0;
    let disk = fs::OpenOptions::new().write(true).open(&out).unwrap();
    disk.write_all_at(&[0], start + 100_000).unwrap();
    assert!(matches!(inspect(&out).unwrap().system, System::Damaged { .. }));
    // Of the hash tree, which is behind the 200 blocks.
    disk.write_all_at(&[0x5a], start + 100_000).unwrap();
    assert_eq!(inspect(&out).unwrap().system, System::Intact);
    disk.write_all_at(&[0x5a; 8], start + 200 * BLOCK as u64).unwrap();
    assert_eq!(inspect(&out).unwrap().system, System::TreeDamaged);
}

#[test]
fn a_damaged_esp_is_named_with_its_file_and_is_neither_a_panic_nor_read_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("disk");
    let options = Options { size: SMALL, ..Options::new(&out) };
    assemble(&parts(folder.path()), &options).unwrap();
    let start = inspect(&out).unwrap().partitions[0].place.0;
    let disk = fs::OpenOptions::new().read(true).write(true).open(&out).unwrap();
    // Both tables of clusters, and the folders behind them.
    let mut head = vec![0; 2 << 20];
    disk.read_exact_at(&mut head, start).unwrap();
    let word = |at: usize| u64::from(u16::from_le_bytes([head[at], head[at + 1]]));
    // Behind the reserved sectors.
    let table = word(14) * SECTOR;
    let entry = head.windows(11).position(|name| name == b"BOOTX64 EFI").unwrap();
    let cluster = word(entry + 26);
    let refused = |edits: &[(u64, &[u8])]| {
        for (at, bytes) in edits {
            disk.write_all_at(bytes, start + at).unwrap();
        }
        let error = inspect(&out).unwrap_err().to_string();
        disk.write_all_at(&head, start).unwrap();
        assert!(error.starts_with(&format!("{} holds no image", out.display())), "{error}");
        error
    };
    // The largest file, in a circle of one cluster.
    let circle = u32::try_from(cluster).unwrap().to_le_bytes();
    let edits = [(entry as u64 + 28, &[0xff; 4][..]), (table + cluster * 4, &circle[..])];
    assert!(refused(&edits).ends_with("its file system is damaged"));
    // The number of the first cluster of its root, and the length of its table.
    refused(&[(44, &[0; 4][..])]);
    refused(&[(44, &[0xff; 4][..])]);
    refused(&[(36, &[0xff; 4][..])]);
    assert_eq!(inspect(&out).unwrap().system, System::Intact);
}

#[test]
fn a_disk_that_is_too_small_is_refused_with_a_size_that_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { size: 64 << 20, ..Options::new(folder.path().join("disk")) };
    let error = assemble(&parts(folder.path()), &options).unwrap_err();
    assert_eq!(error.help().unwrap(), "use a larger size: --size 3221225472");
}

#[test]
fn a_file_that_is_no_disk_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("noise");
    fs::write(&path, vec![0xa5; 1 << 20]).unwrap();
    assert!(matches!(inspect(&path), Err(Error::Foreign { .. })));
    for short in [&b""[..], b"QF"] {
        fs::write(&path, short).unwrap();
        assert!(matches!(inspect(&path), Err(Error::Foreign { .. })), "{short:?}");
    }
    fs::write(&path, b"").unwrap();
    assert!(inspect(&path).unwrap_err().to_string().ends_with("it is empty"));
    // A pipe would be waited for.
    let device = inspect(Path::new("/dev/null")).unwrap_err();
    assert!(device.to_string().ends_with("it is neither a file nor a disk"), "{device}");
    assert!(device.help().unwrap().contains("raw or qcow2"), "{device}");
}

#[test]
fn an_image_that_names_no_variant_is_a_base_image() {
    assert_eq!(variant("ID=polis\n"), Some(Variant::Base));
    assert_eq!(variant("ID=polis\nPOLIS_VARIANT=full\n"), Some(Variant::Full));
    assert_eq!(variant("POLIS_VARIANT=huge\n"), None);
}

#[test]
fn the_command_line_says_how_the_system_is_checked() {
    let line = "quiet polis.verity=ab polis.verity-salt=0aff polis.verity-blocks=3";
    let expected = Expected::parse(line).unwrap();
    assert_eq!(expected.salt, [0x0a, 0xff]);
    assert_eq!(expected.length, 12288);
}

proptest! {
    #[test]
    fn a_strange_command_line_is_refused_and_never_a_panic(
        salt in "\\PC{0,6}", blocks in any::<u64>(),
    ) {
        let line = format!("polis.verity=a polis.verity-salt={salt} polis.verity-blocks={blocks}");
        let _outcome = Expected::parse(&line);
    }
}
