//! Fuzz target of the first sectors of a disk that may carry user data.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use polis_fuzz::Target;

use super::tests::{fat, iso};
use super::{FileSystem, recognise};

#[test]
fn labels_of_config_disks() {
    let disk = tempfile::tempfile().unwrap();
    // The descriptor of ISO 9660 stands far behind the beginning, so each is cut out.
    let samples = [fat("CIDATA"), fat("config-2"), iso("cidata")[32_768..32_840].to_vec()];
    Target::new("machine.config_disk").samples(samples).length_max(512).run(|input| {
        put(&disk, 0, input);
        let found = || recognise(|buffer, at| disk.read_exact_at(buffer, at));
        let fat = found();
        assert!(fat.is_none_or(|(_, kind)| kind == FileSystem::Fat));
        put(&disk, 32_768, input);
        (fat.is_some() || found().is_some()).into()
    });
}

fn put(disk: &File, at: u64, bytes: &[u8]) {
    disk.set_len(0).unwrap();
    disk.set_len(40_000).unwrap();
    disk.write_all_at(bytes, at).unwrap();
}
