//! Power cuts of a simulated disk that may lose any sector of an unflushed write, and the
//! files themselves.

use proptest::prelude::*;

use super::*;

/// The unit that a disk writes whole or not at all.
const SECTOR: usize = 512;
/// Small copies: more cuts in the same time.
const SIZE_SMALL: usize = 4 * SECTOR;

/// A disk whose power goes during a write.
struct Simulated {
    copies: [Vec<u8>; 2],
    /// How many writes finish before the power goes; the sectors of the next one that
    /// reach the disk. `None` for a disk with power.
    cut: Option<(usize, [bool; 4])>,
}

impl Simulated {
    fn at(which: Which) -> usize {
        match which {
            Which::First => 0,
            Which::Second => 1,
        }
    }

    fn content(&self) -> Result<Option<Vec<u8>>, Damaged> {
        Copies::read(self).unwrap().content()
    }

    fn holds(&self, text: &[u8]) -> bool {
        self.copies.iter().any(|copy| copy.windows(text.len()).any(|part| part == text))
    }
}

impl Medium for Simulated {
    fn read(&self, which: Which) -> io::Result<Zeroizing<Vec<u8>>> {
        Ok(Zeroizing::new(self.copies[Self::at(which)].clone()))
    }

    fn write(&mut self, which: Which, copy: &[u8]) -> io::Result<()> {
        let target = &mut self.copies[Self::at(which)];
        assert_eq!(copy.len(), target.len());
        let Some((left, reached)) = &mut self.cut else {
            target.copy_from_slice(copy);
            return Ok(());
        };
        if *left > 0 {
            *left -= 1;
            target.copy_from_slice(copy);
            return Ok(());
        }
        for (place, reached) in reached.iter().enumerate() {
            if *reached {
                let sector = place * SECTOR..(place + 1) * SECTOR;
                target[sector.clone()].copy_from_slice(&copy[sector]);
            }
        }
        Err(io::Error::other("the power is gone"))
    }
}

/// A content that fills most of a copy, so that each sector counts.
fn content(number: u8) -> Vec<u8> {
    [&[number; 5][..], &[b'.'; SIZE_SMALL - SEAL - 10], &[number; 5]].concat()
}

proptest! {
    #[test]
    fn power_cuts_at_any_moments_leave_the_old_content_or_the_new(
        writes in prop::collection::vec(
            (prop::option::of(1_u8..9), prop::option::of((0_usize..4, any::<[bool; 4]>())), any::<bool>()),
            1..30,
        )
    ) {
        let mut disk = Simulated { copies: [vec![0; SIZE_SMALL], vec![0; SIZE_SMALL]], cut: None };
        let mut now = None;
        for (new, cut, mended) in writes {
            let new = new.map(content);
            disk.cut = cut;
            let copy = encode(new.as_deref(), SIZE_SMALL).unwrap();
            let written = replace(&mut disk, &copy);
            disk.cut = None;
            let found = disk.content().expect("no cut damages both copies");
            if written.is_ok() {
                prop_assert_eq!(&found, &new);
                let other = now.filter(|old| Some(old) != new.as_ref());
                prop_assert!(!other.is_some_and(|old: Vec<u8>| disk.holds(&old)));
            } else {
                prop_assert!(found == now || found == new);
            }
            if mended {
                settle(&mut disk).unwrap();
                prop_assert_eq!(&disk.content().unwrap(), &found);
                prop_assert_eq!(&disk.copies[0], &disk.copies[1]);
            }
            now = found;
        }
    }

    #[test]
    fn arbitrary_bytes_are_content_only_with_their_own_seal(
        bytes in prop::collection::vec(any::<u8>(), 0..2 * SIZE_SMALL),
        flipped in 0..SIZE_SMALL,
    ) {
        prop_assert!(bytes.iter().all(|byte| *byte == 0) || decode(&bytes).is_none());
        let mut copy = encode(Some(&bytes[..bytes.len().min(SIZE_SMALL - SEAL)]), SIZE_SMALL).unwrap();
        prop_assert!(decode(&copy).is_some());
        copy[flipped] ^= 1;
        prop_assert!(decode(&copy).is_none());
    }
}

fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    (folder, path)
}

#[test]
fn a_file_reads_back_keeps_its_size_and_is_cleared() {
    let (_folder, path) = folder();
    assert_eq!(read(&path).unwrap(), Found { content: None, alike: true });
    write(&path, None).unwrap();
    assert!(!path.exists(), "nothing to clear, nothing to make");
    for content in [&b"first"[..], b"", b"longer than the first"] {
        write(&path, Some(content)).unwrap();
        assert_eq!(read(&path).unwrap(), Found { content: Some(content.to_vec()), alike: true });
    }
    write(&path, None).unwrap();
    assert_eq!(read(&path).unwrap(), Found { content: None, alike: true });
    assert_eq!(std::fs::read(&path).unwrap(), vec![0; 2 * COPY]);
}

#[test]
fn a_report_is_text_from_the_first_byte_to_the_last() {
    let (_folder, path) = folder();
    write(&path, Some(b"code: #0707\n")).unwrap();
    let text = String::from_utf8(std::fs::read(&path).unwrap()).unwrap();
    assert!(text.starts_with("code: #0707\n\n\n"), "{}", &text[..40]);
    assert!(text.contains("\nend of this copy: 0000000012 bytes, SHA-256 "));
    assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()));
}

#[test]
fn more_than_fits_is_refused_and_changes_nothing() {
    let (_folder, path) = folder();
    write(&path, Some(&vec![7; CONTENT_MAX])).unwrap();
    let more = write(&path, Some(&vec![8; CONTENT_MAX + 1]));
    assert!(matches!(more, Err(Error::TooLarge { .. })));
    assert_eq!(read(&path).unwrap().content, Some(vec![7; CONTENT_MAX]));
}

#[test]
fn one_damaged_copy_is_mended_and_two_are_damage() {
    let (_folder, path) = folder();
    write(&path, Some(b"content")).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for place in [3, COPY + 3] {
        let mut bytes = whole.clone();
        bytes[place] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let found = read(&path).unwrap();
        assert_eq!(found, Found { content: Some(b"content".to_vec()), alike: false });
        mend(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
    let mut bytes = whole;
    bytes[3] ^= 1;
    bytes[COPY + 3] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(read(&path), Err(Error::Damaged { .. })));
    mend(&path).unwrap();
    assert!(matches!(read(&path), Err(Error::Damaged { .. })), "mended without content");
    write(&path, Some(b"new")).unwrap();
    assert_eq!(read(&path).unwrap().content, Some(b"new".to_vec()));
}

#[test]
fn a_file_of_another_size_is_damaged_until_it_is_written() {
    let (_folder, path) = folder();
    for foreign in [&b""[..], b"a person's", &vec![7; 3 * COPY]] {
        std::fs::write(&path, foreign).unwrap();
        assert!(matches!(read(&path), Err(Error::Damaged { .. })));
        write(&path, Some(b"new")).unwrap();
        assert_eq!(read(&path).unwrap().content, Some(b"new".to_vec()));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), super::SIZE);
    }
}

#[test]
fn a_directory_in_the_place_of_a_file_stops_no_write() {
    let (_folder, path) = folder();
    std::fs::create_dir_all(path.join("deep")).unwrap();
    assert!(matches!(read(&path), Err(Error::NotAFile { .. })));
    write(&path, Some(b"content")).unwrap();
    assert_eq!(read(&path).unwrap().content, Some(b"content".to_vec()));
}
