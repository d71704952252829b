//! Files and directories of a temporary tree.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::mpsc;
use std::time::Duration;

use super::*;

fn file(directory: &tempfile::TempDir) -> File {
    File::private(directory.path().join("key.pem"))
}

#[test]
fn a_file_reads_back_and_others_cannot_read_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory);
    assert_eq!(file.read().unwrap(), None);
    file.write(b"first").unwrap();
    file.write(b"second").unwrap();
    assert_eq!(file.read().unwrap().as_deref(), Some(&b"second"[..]));
    let mode = std::fs::metadata(file.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_write_leaves_nothing_beside_the_file_even_after_an_interrupted_one() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory);
    std::fs::write(directory.path().join(".key.pem.new"), "half").unwrap();
    file.write(b"whole").unwrap();
    let names: Vec<_> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names, ["key.pem"]);
    assert_eq!(file.read().unwrap().as_deref(), Some(&b"whole"[..]));
}

#[test]
fn a_file_that_a_person_gave_is_overwritten_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let file = File::given(directory.path().join("snapshot"), 3 * CHUNK as u64);
    assert!(!file.is_filled().unwrap());
    file.erase().unwrap();
    assert!(!file.path().exists());
    for size in [0, 100, HEAD, HEAD + 1, CHUNK + HEAD + 1] {
        std::fs::write(file.path(), vec![7; size]).unwrap();
        assert_eq!(file.is_filled().unwrap(), size > 0);
        file.erase().unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), vec![0; size]);
        assert!(!file.is_filled().unwrap());
    }
}

#[test]
fn a_file_above_its_bound_is_refused_both_ways() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory).at_most(4);
    file.write(b"four").unwrap();
    assert!(matches!(file.write(b"fives"), Err(Error::TooLarge { size_max: 4, .. })));
    std::fs::write(file.path(), "fives").unwrap();
    assert!(matches!(file.read(), Err(Error::TooLarge { size_max: 4, .. })));
}

#[test]
fn a_link_and_a_pipe_are_refused_and_do_not_hang() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory);
    std::os::unix::fs::symlink("/etc/passwd", file.path()).unwrap();
    assert!(matches!(file.read(), Err(Error::Io { operation: "open", .. })));
    std::fs::remove_file(file.path()).unwrap();
    rustix::fs::mknodat(
        CWD,
        file.path(),
        rustix::fs::FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    assert!(matches!(file.read(), Err(Error::NotAFile { .. })));
}

#[test]
fn many_writers_at_once_leave_one_whole_content() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory);
    std::thread::scope(|scope| {
        for letter in b'a'..=b'h' {
            let file = &file;
            scope.spawn(move || file.write(&[letter; 4096]).unwrap());
        }
    });
    let content = file.read().unwrap().unwrap();
    assert_eq!(content.len(), 4096);
    assert!(content.iter().all(|byte| *byte == content[0]));
}

#[test]
fn a_write_that_hangs_with_its_disk_keeps_only_the_next_one_of_its_file_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let (hung, other) = (file(&directory), File::in_place(directory.path().join("record")));
    let turn = Turn::of(hung.path());
    other.write(b"content").unwrap();
    assert_eq!(other.read().unwrap().as_deref(), Some(&b"content"[..]));
    let (done, ended) = mpsc::channel();
    std::thread::scope(|scope| {
        let hung = &hung;
        scope.spawn(move || done.send(hung.write(b"content").is_ok()).unwrap());
        assert!(ended.recv_timeout(Duration::from_millis(50)).is_err());
        drop(turn);
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(true));
    });
}

#[test]
fn a_directory_is_made_with_its_mode_and_may_be_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let made = Dir::private(directory.path().join("a/b"));
    assert!(made.is_empty().unwrap());
    made.create().unwrap();
    made.create().unwrap();
    let mode = std::fs::metadata(made.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    std::fs::write(made.path().join("file"), "").unwrap();
    assert!(!made.is_empty().unwrap());
}

#[test]
fn a_damaged_file_of_the_esp_is_read_as_damaged_and_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let file = File::in_place(directory.path().join("record"));
    file.write(b"content").unwrap();
    assert_eq!(file.read().unwrap().unwrap(), b"content");
    for damage in [&b"shortened by a repair"[..], &vec![0x5a; 256 << 10]] {
        std::fs::write(file.path(), damage).unwrap();
        for _again in 0..2 {
            assert!(matches!(file.read(), Err(Error::Damaged { .. })));
        }
        assert_eq!(std::fs::read(file.path()).unwrap(), damage);
    }
}
