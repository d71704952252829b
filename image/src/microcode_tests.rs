//! The archive of microcode has what the packages have, and a fault in a file is found.

use proptest::prelude::*;

use super::*;

/// An update of Intel of 1 KiB with these first numbers of its data, and with a checksum.
fn update(data: &[u32]) -> Vec<u8> {
    with_header([1, 7, 0x0925_2026, 0xb06f2, 0, 1, 1, 1024 - 48, 1024, 0, 0, 0], data)
}

/// An update whose header does not say how long it is: 2 KiB.
fn old() -> Vec<u8> {
    with_header([1, 7, 0x0925_2004, 0xf29, 0, 1, 1, 0, 0, 0, 0, 0], &[9])
}

/// An update of Intel of 1 KiB with a table of one further processor after its data.
fn with_table() -> Vec<u8> {
    let mut bytes = with_header([1, 7, 0x0925_2026, 0xb06f2, 0, 1, 1, 944, 1024, 0, 0, 0], &[3]);
    // Only zeros, which the checksum does not change.
    bytes.truncate(48 + 944);
    let checksum = u32::from_le_bytes(bytes[16..20].try_into().unwrap());
    // Each processor has the same sum of its signature, its platforms and its checksum.
    let mut table = [1, 0, 0, 0, 0, 0xb06f5, 1, checksum.wrapping_sub(3)];
    let sum = table.iter().fold(0_u32, |sum, number| sum.wrapping_add(*number));
    table[1] = 0_u32.wrapping_sub(sum);
    bytes.extend(table.iter().flat_map(|number| number.to_le_bytes()));
    bytes
}

fn with_header(header: [u32; 12], data: &[u32]) -> Vec<u8> {
    let bytes = if header[7] == 0 { 2048 } else { 1024 };
    let mut numbers = [&header[..], data].concat();
    let sum = numbers.iter().fold(0_u32, |sum, number| sum.wrapping_add(*number));
    numbers[4] = 0_u32.wrapping_sub(sum);
    numbers.resize(bytes / 4, 0);
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// A container of AMD with a table and updates that have these bytes after their headers.
fn container(updates: &[&[u8]]) -> Vec<u8> {
    let number = |number: usize| u32::try_from(number).unwrap().to_le_bytes();
    let mut container = [number(CONTAINER), number(TABLE), number(16)].concat();
    container.extend([0x17; 16]);
    for update in updates {
        container.extend(number(UPDATE));
        container.extend(number(64 + update.len()));
        container.extend([0; 64]);
        container.extend_from_slice(update);
    }
    container
}

/// Files of both packages: four updates of Intel, one of them in two files, and three of AMD.
fn payload(root: &Path) {
    let write = |path: &str, content: &[u8]| {
        let path = root.join(FOLDER).join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    write("intel-ucode/06-b7-01", &[update(&[1]), update(&[2])].concat());
    write("intel-ucode/06-b7-04", &[update(&[2]), with_table()].concat());
    write("intel-ucode/0f-02-09.initramfs", &old());
    write("amd-ucode/microcode_amd_fam19h.bin", &container(&[b"zen3", b"zen4!!"]));
    write("amd-ucode/microcode_amd.bin", &container(&[b"old"]));
    write("amd-ucode/microcode_amd.bin.asc", b"a signature");
}

/// An archive of four updates of Intel and three of AMD.
pub(crate) fn archive() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    payload(folder.path());
    super::archive(folder.path()).unwrap()
}

#[test]
fn the_archive_has_each_update_once_in_the_order_of_the_files_and_aligned() {
    let archive = archive();
    assert!(archive.len().is_multiple_of(4));
    let intel = [update(&[1]), update(&[2]), with_table(), old()].concat();
    let amd = [container(&[b"old"]), container(&[b"zen3", b"zen4!!"])].concat();
    for (path, content) in [
        ("kernel/x86/microcode/GenuineIntel.bin", &intel),
        ("kernel/x86/microcode/AuthenticAMD.bin", &amd),
    ] {
        assert_eq!(cpio::find(&archive, path).unwrap(), content, "{path}");
        let place = archive.windows(content.len()).position(|bytes| bytes == content);
        assert!(place.unwrap().is_multiple_of(16), "{path}");
    }
    let list = "device amd64-microcode 3.1 00\ndevice intel-microcode 3.2 00\n";
    let found = of(&archive, list);
    let [first, second] = &found[..] else { panic!("{found:?}") };
    assert_eq!((first.vendor, first.bytes), (Vendor::Intel, intel.len()));
    assert_eq!((second.vendor, second.bytes), (Vendor::Amd, amd.len()));
    assert_eq!((&first.updates, &second.updates), (&Ok(4), &Ok(3)));
    assert_eq!([&first.version, &second.version].map(Option::as_deref), [Some("3.2"), Some("3.1")]);
}

#[test]
fn a_package_without_a_file_or_with_a_damaged_one_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    payload(folder.path());
    let files = folder.path().join(FOLDER);
    let refused = || super::archive(folder.path()).unwrap_err();
    // An update of AMD without a container, which would be read as one of the container before.
    fs::write(files.join("amd-ucode/z.bin"), &container(&[b"old"])[28..]).unwrap();
    let error = refused();
    assert!(error.to_string().contains("amd-ucode/z.bin is not a valid file of"), "{error}");
    assert!(error.help().unwrap().contains("image/src/microcode.rs"));
    for name in ["z.bin", "microcode_amd.bin", "microcode_amd_fam19h.bin"] {
        fs::remove_file(files.join("amd-ucode").join(name)).unwrap();
    }
    let error = refused().to_string();
    assert!(error.ends_with("AuthenticAMD.bin is not a valid file of microcode: it has no update"));
    fs::remove_dir_all(files.join("amd-ucode")).unwrap();
    assert!(refused().to_string().ends_with("amd-ucode"));
}

#[test]
fn an_archive_without_the_file_of_a_vendor_is_refused() {
    let mut tree = Tree::default();
    tree.text(Vendor::Intel.path(), old());
    let error = check(&tree.archive().unwrap()).unwrap_err().to_string();
    assert!(error.ends_with("it is not in the archive"), "{error}");
    tree.text(Vendor::Amd.path(), container(&[b"new"]));
    check(&tree.archive().unwrap()).unwrap();
    tree.text(Vendor::Amd.path(), "new");
    assert!(check(&tree.archive().unwrap()).is_err());
}

#[test]
fn a_fault_in_a_file_of_intel_is_named_with_its_place() {
    let file = [update(&[1]), with_table(), old()].concat();
    assert_eq!(of_intel(&file).unwrap(), [update(&[1]), with_table(), old()]);
    let fault = |at: usize, number: u32| {
        let mut damaged = file.clone();
        damaged[at..at + 4].copy_from_slice(&number.to_le_bytes());
        of_intel(&damaged).unwrap_err()
    };
    assert_eq!(fault(1024, 2), "its update at byte 1024 has no header of version 1");
    assert_eq!(fault(20, 2), "its update at byte 0 has no header of version 1");
    for lengths in [fault(32, 1000), fault(32, 0), fault(28, 977), fault(28, 1024)] {
        assert_eq!(lengths, "its update at byte 0 has lengths that do not fit together");
    }
    // In the data, and in the table after it.
    for at in [1024 + 48, 2048 - 4, 2048 + 48] {
        assert!(fault(at, 0x55).ends_with("do not add up to 0"), "{at}");
    }
    // A table that adds up, but whose count or whose entry is another.
    for place in [2016, 2016 + 28] {
        let mut damaged = file.clone();
        for (at, change) in [(place, 1), (2016 + 4, u32::MAX)] {
            let number = u32::from_le_bytes(damaged[at..at + 4].try_into().unwrap());
            damaged[at..at + 4].copy_from_slice(&number.wrapping_add(change).to_le_bytes());
        }
        let fault = of_intel(&damaged).unwrap_err();
        assert!(fault.ends_with("has a table of processors that does not fit it"), "{fault}");
    }
    for length in 1..file.len() {
        let whole = [1024, 2048].contains(&length);
        assert_eq!(of_intel(&file[..length]).is_ok(), whole, "{length}");
    }
    assert_eq!(Vendor::Intel.updates(b"").unwrap_err(), "it has no update");
}

#[test]
fn a_fault_in_a_file_of_amd_is_named_with_its_place() {
    let file = [container(&[b"one", b"two"]), container(&[b"three"])].concat();
    assert_eq!(of_amd(&file).unwrap().len(), 3);
    assert_eq!(file[..4], *b"DMA\0");
    let second = container(&[b"one", b"two"]).len();
    let mut damaged = file.clone();
    damaged[second] = 0;
    let fault = of_amd(&damaged).unwrap_err();
    let expected = "is neither an update nor the start of a container";
    assert_eq!(fault, format!("its section at byte {second} {expected}"));
    // A table without an entry, and an update without the end of its header.
    for (place, at, bytes) in [(8, 0, 15_u8), (28 + 4, 28, 63)] {
        let mut damaged = file.clone();
        damaged[place] = bytes;
        let fault = of_amd(&damaged).unwrap_err();
        assert_eq!(fault, format!("its section at byte {at} is cut short"));
    }
    // After the first table, the first update, the second one, and the second table.
    let ends = [28, 28 + 75, second, second + 28];
    for length in 1..file.len() {
        assert_eq!(of_amd(&file[..length]).is_ok(), ends.contains(&length), "{length}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_refused_or_read_and_never_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..64), lengths in any::<[u32; 2]>(),
    ) {
        let _outcome = of_intel(&bytes);
        let _outcome = of_amd(&bytes);
        let mut intel = update(&[1]);
        let lengths = lengths.map(u32::to_le_bytes).concat();
        intel[28..36].copy_from_slice(&lengths);
        let _outcome = of_intel(&intel);
        let mut amd = container(&[b"one"]);
        amd[8..12].copy_from_slice(&lengths[..4]);
        let _outcome = of_amd(&amd);
    }
}
