//! The writes of an installation on disks in plain files: whole, cut at every step, and from a
//! medium that is damaged.

use std::io::Seek as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use polis_layout::esp;
use polis_layout::partitions::ESP_SIZE;
use uuid::Uuid;

use super::super::content::{Content, look};
use super::super::{boot_files, plan};
use super::*;

const ID: [u8; 16] = [7; 16];
const SIZE: u64 = 8 << 30;
/// Blocks of a system with a tree of two levels.
const BLOCKS: usize = 300;

/// The files of a medium.
struct Medium {
    system: System,
    source: File,
    bytes: Vec<u8>,
    esp: Vec<u8>,
    plan: Plan,
}

impl Medium {
    fn new() -> Self {
        let data: Vec<u8> =
            (0..BLOCKS * BLOCK).map(|at| u8::try_from((at / 7 + at) % 251).unwrap()).collect();
        let (root, tree) = verity::tree(&data, b"salt");
        let blocks = BLOCKS as u64;
        let system = System { root_hash: root.to_vec(), salt: b"salt".to_vec(), blocks };
        let bytes = [data, tree].concat();
        assert_eq!(system.length(), bytes.len() as u64);
        let source = tempfile::tempfile().unwrap();
        source.write_all_at(&bytes, 0).unwrap();
        let plan = plan::plan(SIZE, 512, system.length(), Uuid::from_u128(3), &ID).unwrap();
        let loader = (esp::LOADER.to_owned(), vec![5; 3 << 20]);
        let esp = boot_files::build("seed", 512, vec![loader], b"parameters").unwrap();
        Self { system, source, bytes, esp, plan }
    }

    fn install(&self, disk: &File, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        let Self { system, source, esp, plan, .. } = self;
        apply(disk, &Job { plan, system, source, esp }, progress)
    }

    /// Fails unless the disk has all of it.
    fn is_on(&self, disk: &File) {
        assert_eq!(table::read(disk).unwrap(), self.plan.table);
        let mut system = vec![0; self.bytes.len()];
        disk.read_exact_at(&mut system, self.plan.system).unwrap();
        assert!(system == self.bytes);
        let mut bytes = vec![0; self.esp.len()];
        disk.read_exact_at(&mut bytes, self.plan.esp.start).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file.set_len(ESP_SIZE).unwrap();
        let content = |path| {
            let mut file = file.try_clone().unwrap();
            file.rewind().unwrap();
            esp::read(file, path).unwrap().unwrap()
        };
        assert_eq!(content(esp::PARAMETERS), b"parameters");
        assert!(content(esp::LOADER) == vec![5; 3 << 20]);
        assert_eq!(look(disk, &ID).unwrap(), Content::Installed);
    }
}

fn disk() -> File {
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(SIZE).unwrap();
    disk
}

#[test]
fn an_installed_disk_has_the_system_and_the_files_of_the_medium() {
    let (medium, disk) = (Medium::new(), disk());
    // Data of an earlier use, in every place that matters.
    for range in medium.plan.clear.iter().chain([&medium.plan.esp]) {
        disk.write_all_at(&[0xaa; 8192], range.start).unwrap();
    }
    let mut phases = Vec::new();
    let mut last = (0, 0);
    let mut progress = |now: Progress| {
        if phases.last() != Some(&now.phase) {
            phases.push(now.phase);
        }
        last = (now.bytes, now.total);
        assert!(now.bytes <= now.total, "{now:?}");
    };
    medium.install(&disk, &mut progress).unwrap();
    assert_eq!(phases, [Phase::Write, Phase::Verify, Phase::Boot]);
    medium.is_on(&disk);
    for range in &medium.plan.clear {
        let mut bytes = vec![0; 8192];
        disk.read_exact_at(&mut bytes, range.start).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "{range:?}");
    }
}

#[test]
fn an_installation_that_is_cut_at_any_step_is_begun_again_and_finished() {
    let medium = Medium::new();
    let mut steps = 0;
    medium.install(&disk(), &mut |_progress| steps += 1).unwrap();
    assert!(steps > 8, "{steps}");
    for cut in 1..=steps {
        let (disk, mut step) = (disk(), 0);
        let cut_off = catch_unwind(AssertUnwindSafe(|| {
            medium.install(&disk, &mut |_progress| {
                step += 1;
                if step == cut {
                    resume_unwind(Box::new("the power goes"));
                }
            })
        }));
        assert!(cut_off.is_err());
        let found = look(&disk, &ID).unwrap();
        // The first step has written nothing, the last one everything.
        let expected = match cut {
            1 => Content::Empty,
            cut if cut == steps => Content::Installed,
            _ => Content::Unfinished,
        };
        assert_eq!(found, expected, "step {cut} of {steps}");
        medium.install(&disk, &mut |_progress| {}).unwrap();
        medium.is_on(&disk);
    }
}

#[test]
fn a_damaged_medium_leaves_a_disk_that_does_not_start() {
    for (at, what) in [(5 * BLOCK, "system"), (BLOCKS * BLOCK, "hash tree of the system")] {
        let (medium, disk) = (Medium::new(), disk());
        medium.source.write_all_at(b"other", at as u64).unwrap();
        let error = medium.install(&disk, &mut |_progress| {}).unwrap_err();
        assert!(matches!(error, Error::Differs(found) if found == what), "{error:?}");
        assert_eq!(look(&disk, &ID).unwrap(), Content::Unfinished);
    }
}
