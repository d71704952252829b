//! Power cuts of a disk with a volatile cache, made from a recording of the disk.
//!
//! Killing QEMU loses no write of the guest. A real disk may lose each write since the last
//! flush, even an acknowledged one, in any order, and may keep half of one. [`Cut::draw`]
//! chooses such a moment and [`Cut::disk`] makes the disk that the next boot would find.
//! A write is torn between sectors, or between blocks of 4 KiB where
//! [`Cut::with_whole_blocks`] says so.
//!
//! Most windows between two flushes hold a write or two, and the making of a file
//! system is one window of many: a window is drawn in proportion to its writes.
//!
//! ```text
//! ... write flush | write write write  write ... flush ...
//!     for good    |   the window       ^ the power goes here
//! ```
//!
//! Invariants:
//! - Every disk contains the data covered by a flush or a durable write.
//! - The same recording and the same random numbers give the same disk.

use std::fmt;
use std::fs::File;
use std::io;
use std::iter;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::disk;
use crate::recording::{Recording, Request};

/// The unit that every disk writes whole or not at all.
const SECTOR: u64 = 512;

/// The unit of a disk with large physical sectors, and of most flash memory.
const BLOCK: u64 = 4096;

/// How much is copied at a time.
const CHUNK: u64 = 1 << 20;

/// Random numbers that a seed repeats: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `end`, or 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        // The remainder favours small numbers by less than one in 2^40 here.
        let end = end.max(1) as u64;
        usize::try_from(self.next() % end).unwrap_or_default()
    }

    fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }
}

/// The fate of the writes that are not covered by a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// It loses all of them.
    All,
    /// It loses each of them or not, at random.
    Half,
    /// The same, and it keeps some sectors of one write and not others.
    Torn,
}

/// A moment at which the power goes.
#[derive(Clone, Debug)]
pub struct Cut {
    /// The entries between the last flush and the next.
    pub window: Range<usize>,
    /// The first entry that never reached the disk.
    pub end: usize,
    /// The writes that are lost.
    pub loss: Loss,
    /// The bytes of the disk whose blocks of 4 KiB are each written whole; elsewhere a sector is.
    blocks: Range<u64>,
    /// Decides for each write whether it is lost.
    random: Random,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = (self.window.start, self.window.end);
        let reached = self.end - start;
        let lost = match self.loss {
            Loss::All => "all of them lost",
            Loss::Half => "any of them lost",
            Loss::Torn => "any of them lost and one torn",
        };
        write!(f, "behind entry {start}, {reached} of the {} before a flush, {lost}", end - start)
    }
}

/// A range of bytes on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    at: u64,
    length: u64,
    /// Their place in the recording; `None` for zeros.
    data: Option<u64>,
}

impl Cut {
    /// Draws a cut in one of the windows that lie within `among`; `None` without a
    /// window.
    pub fn draw(recording: &Recording, among: &Range<usize>, random: &mut Random) -> Option<Self> {
        let mut windows = recording.windows();
        windows.retain(|window| among.start <= window.start && window.end <= among.end);
        let mut place = random.below(windows.iter().map(Range::len).sum());
        let window = windows.into_iter().find(|window| {
            let found = place < window.len();
            place = place.saturating_sub(window.len());
            found
        })?;
        let loss = [Loss::All, Loss::Half, Loss::Torn][random.below(3)];
        let end = window.start + 1 + random.below(window.len());
        Some(Self { window, end, loss, blocks: 0..0, random: Random(random.next()) })
    }

    /// The same cut of a disk that tears no block of 4 KiB in this range of bytes.
    #[must_use]
    pub fn with_whole_blocks(self, blocks: Range<u64>) -> Self {
        Self { blocks, ..self }
    }

    /// No cut at all: the disk contains every recorded write.
    #[must_use]
    pub fn none(recording: &Recording) -> Self {
        let end = recording.entries().len();
        Self { window: end..end, end, loss: Loss::All, blocks: 0..0, random: Random(0) }
    }

    /// Makes the disk `out` from the disk as it was `before` the recording.
    ///
    /// # Errors
    /// When one of the files cannot be read or written.
    pub fn disk(
        &self,
        recording: &Recording,
        log: &Path,
        before: &Path,
        out: &Path,
    ) -> io::Result<()> {
        disk::copy(before, out)?;
        let (log, out) = (File::open(log)?, File::options().write(true).open(out)?);
        let mut buffer = Vec::new();
        for piece in self.pieces(recording) {
            let mut done = 0;
            while done < piece.length {
                let length = CHUNK.min(piece.length - done);
                buffer.clear();
                buffer.resize(usize::try_from(length).unwrap_or_default(), 0);
                if let Some(data) = piece.data {
                    log.read_exact_at(&mut buffer, data + done)?;
                }
                out.write_all_at(&buffer, piece.at + done)?;
                done += length;
            }
        }
        Ok(())
    }

    /// The ranges on the disk, in the order in which they were written.
    fn pieces(&self, recording: &Recording) -> Vec<Piece> {
        let mut random = self.random.clone();
        // Drawn first, so that the torn write does not depend on the other losses.
        let torn = self.window.start + random.below(self.end - self.window.start);
        let mut pieces = Vec::new();
        for (number, entry) in recording.entries().iter().enumerate().take(self.end) {
            let (data, durable) = match entry.request {
                Request::Flush => continue,
                Request::Discard => (None, false),
                Request::Write { data, durable } => (Some(data), durable),
            };
            let piece = Piece { at: entry.at, length: entry.length, data };
            let open = number >= self.window.start && !durable;
            match self.loss {
                _ if !open => pieces.push(piece),
                Loss::All => {}
                Loss::Torn if number == torn => {
                    pieces.extend(units(piece, &self.blocks).filter(|_| random.coin()));
                }
                Loss::Half | Loss::Torn => pieces.extend(random.coin().then_some(piece)),
            }
        }
        pieces
    }
}

/// The parts of a piece that a disk writes whole: blocks in the range, sectors elsewhere.
fn units(piece: Piece, blocks: &Range<u64>) -> impl Iterator<Item = Piece> {
    let end = piece.at + piece.length;
    let cut_off = move |at: u64| {
        let unit = if blocks.contains(&at) { BLOCK } else { SECTOR };
        // The first and the last part of a piece may be shorter.
        let length = (unit - at % unit).min(end - at);
        let data = piece.data.map(|data| data + (at - piece.at));
        Piece { at, length, data }
    };
    let first = (piece.at < end).then(|| cut_off(piece.at));
    iter::successors(first, move |part| {
        let at = part.at + part.length;
        (at < end).then(|| cut_off(at))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::tests::{Operation, log};
    use proptest::prelude::*;
    use std::io::Cursor;

    const DISK: u64 = 64 * SECTOR;

    fn recording(operations: &[Operation]) -> Recording {
        Recording::read(&mut Cursor::new(log(operations)), DISK).unwrap()
    }

    fn write(sector: u64, byte: u8, sectors: usize) -> Operation {
        Operation::Write(sector, vec![byte; sectors * 512])
    }

    /// The disk that a cut leaves of a disk full of dots, a letter for each sector.
    fn left(cut: &Cut, operations: &[Operation]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("log"), log(operations)).unwrap();
        std::fs::write(path("before"), vec![b'.'; 64 * 512]).unwrap();
        cut.disk(&recording(operations), &path("log"), &path("before"), &path("out")).unwrap();
        let disk = std::fs::read(path("out")).unwrap();
        let sectors = disk.chunks(512).map(|sector| {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "half a sector");
            if sector[0] == 0 { '0' } else { char::from(sector[0]) }
        });
        sectors.collect::<String>().trim_end_matches('.').to_owned()
    }

    fn operations() -> Vec<Operation> {
        vec![
            write(0, b'a', 2),
            Operation::Flush,
            write(1, b'b', 2),
            Operation::Durable(4, vec![b'd'; 512]),
            write(6, b'e', 8),
            Operation::Discard(0, 1),
        ]
    }

    fn cut(loss: Loss, seed: u64) -> Cut {
        Cut { window: 2..6, end: 6, loss, blocks: 0..0, random: Random::new(seed) }
    }

    #[test]
    fn without_a_cut_the_disk_is_as_it_was_recorded() {
        let all = Cut::none(&recording(&operations()));
        assert_eq!(left(&all, &operations()), "0bb.d.eeeeeeee");
    }

    #[test]
    fn what_was_flushed_or_durable_stays_when_all_else_is_lost() {
        assert_eq!(left(&cut(Loss::All, 1), &operations()), "aa..d");
    }

    #[test]
    fn any_half_may_be_lost_and_nothing_is_in_pieces() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let left = left(&cut(Loss::Half, seed), &operations());
            assert!(left.contains('d'), "{left}");
            assert!(["", "eeeeeeee"].contains(&&*left.replace(|c| c != 'e', "")), "{left}");
            seen.insert(left);
        }
        // Three writes, each there or not.
        assert_eq!(seen.len(), 8);
    }

    #[test]
    fn one_write_is_torn_into_sectors() {
        let torn = (0..64).map(|seed| left(&cut(Loss::Torn, seed), &operations()));
        let torn: Vec<_> =
            torn.filter(|left| (1..8).contains(&left.matches('e').count())).collect();
        assert!(!torn.is_empty());
        assert!(torn.iter().all(|left| left.contains('d')), "{torn:?}");
    }

    #[test]
    fn where_blocks_are_whole_a_write_is_torn_between_them_alone() {
        let operations = [Operation::Flush, write(4, b'e', 24)];
        let mut seen = std::collections::BTreeSet::new();
        let mut outside = 0;
        for seed in 0..64 {
            let random = Random::new(seed);
            let cut = Cut { window: 1..2, end: 2, loss: Loss::Torn, blocks: 0..0, random };
            let left = left(&cut.with_whole_blocks(0..24 * SECTOR), &operations);
            let left = format!("{left:.<28}");
            let torn = |part: &str| part.contains('e') && part.contains('.');
            let blocks = [&left[4..8], &left[8..16], &left[16..24]];
            assert!(!blocks.into_iter().any(torn), "{left}");
            seen.insert(blocks.map(|block| block.contains('e')));
            outside += u32::from(torn(&left[24..]));
        }
        // Each of the three is there or not, whatever the others are.
        assert_eq!(seen.len(), 8);
        assert!(outside > 0, "outside the range, sectors are torn");
    }

    #[test]
    fn the_parts_of_a_write_are_blocks_in_their_range_and_sectors_elsewhere() {
        // All in sectors: a write and the range of whole blocks; the start and length of each part.
        let parts = |write: Range<u64>, blocks: Range<u64>| {
            let [at, end] = [write.start, write.end].map(|sector| sector * SECTOR);
            let piece = Piece { at, length: end - at, data: Some(7 + at) };
            let blocks = blocks.start * SECTOR..blocks.end * SECTOR;
            let parts = units(piece, &blocks).map(|part| {
                assert_eq!(part.data, Some(7 + part.at), "the data of another part");
                (part.at / SECTOR, part.length / SECTOR)
            });
            parts.collect::<Vec<_>>()
        };
        assert_eq!(parts(6..26, 8..24), [(6, 1), (7, 1), (8, 8), (16, 8), (24, 1), (25, 1)]);
        assert_eq!(parts(12..19, 8..24), [(12, 4), (16, 3)]);
        assert_eq!(parts(12..14, 8..24), [(12, 2)]);
        assert_eq!(parts(4..6, 0..0), [(4, 1), (5, 1)]);
    }

    #[test]
    fn a_window_of_many_writes_is_drawn_most_often_and_none_outside() {
        let mut operations = vec![write(0, b'a', 1), Operation::Flush];
        operations.extend((0..20).map(|n| write(n, b'b', 1)));
        operations.extend([Operation::Flush, write(0, b'c', 1), Operation::Flush]);
        let recording = recording(&operations);
        let mut random = Random::new(7);
        let mut drawn = [0; 3];
        for _ in 0..1000 {
            let cut = Cut::draw(&recording, &(0..operations.len()), &mut random).unwrap();
            assert!(cut.window.start < cut.end && cut.end <= cut.window.end);
            drawn[[0, 2, 23].iter().position(|start| *start == cut.window.start).unwrap()] += 1;
        }
        assert!(drawn[1] > 850 && drawn[0] > 10 && drawn[2] > 10, "{drawn:?}");
        let last = Cut::draw(&recording, &(22..operations.len()), &mut random).unwrap();
        assert_eq!(last.window, 23..24);
        assert!(Cut::draw(&recording, &(0..1), &mut random).is_some());
        assert!(Cut::draw(&recording, &(1..2), &mut random).is_none());
    }

    proptest! {
        #[test]
        fn a_seed_repeats_its_disk_and_keeps_what_was_flushed(seed in any::<u64>()) {
            let recording = recording(&operations());
            let draw = || Cut::draw(&recording, &(0..6), &mut Random::new(seed)).unwrap();
            let cut = draw();
            let kept = left(&cut, &operations());
            prop_assert_eq!(&kept, &left(&draw(), &operations()));
            if cut.window.start == 2 {
                // The flushed `a` may only be replaced by a write over it.
                prop_assert!(kept.starts_with("aa") || kept[..2].contains(['b', '0']), "{}", kept);
            }
        }
    }
}
