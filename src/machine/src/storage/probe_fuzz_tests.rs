//! Fuzz target of the two ends of a stretch of a disk.

use polis_fuzz::{Accepted, Target};

use super::{Content, recognise};

#[test]
fn contents_of_a_disk() {
    let mut xfs = vec![0; 512];
    xfs[..4].copy_from_slice(b"XFSB");
    xfs[4..8].copy_from_slice(&4096_u32.to_be_bytes());
    xfs[108..118].copy_from_slice(b"polis-data");
    let mut ext = vec![0; 2048];
    ext[0x438..0x43a].copy_from_slice(b"\x53\xef");
    Target::new("machine.probe").samples([xfs, ext]).run(|input| {
        let zeros = input.iter().all(|byte| *byte == 0);
        assert_eq!(recognise(input, &[]) == Content::Blank, zeros);
        let _as_tail = recognise(&[], input);
        Accepted::Yes
    });
}
