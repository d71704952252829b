use super::*;

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    root
}

#[test]
fn files_and_records_are_copied_and_kernel_images_that_are_gone_go() {
    let from = tree(&[
        ("EFI/BOOT/BOOTX64.EFI", "loader"),
        ("EFI/Linux/polis-2.efi", "new"),
        ("EFI/Linux/polis.new", "half"),
        ("loader/random-seed", "own"),
    ]);
    let to = tree(&[("EFI/Linux/polis-1.efi", "old"), ("loader/random-seed", "another")]);
    let journal = Path::new("polis/cluster_journal.pb");
    fs::create_dir_all(from.path().join("polis")).unwrap();
    fs::create_dir_all(to.path().join("polis")).unwrap();
    in_place::write(&from.path().join(journal), Some(b"step")).unwrap();
    let files = look(from.path()).unwrap().into_keys().collect();
    sync(from.path(), to.path(), &files).unwrap();
    prune(from.path(), to.path()).unwrap();
    let names: Vec<_> = look(to.path()).unwrap().into_keys().collect();
    let wanted = ["EFI/BOOT/BOOTX64.EFI", "EFI/Linux/polis-2.efi", "polis/cluster_journal.pb"];
    assert_eq!(names, wanted.map(PathBuf::from));
    let found = in_place::read(&to.path().join(journal)).unwrap();
    assert_eq!((found.content.as_deref(), found.alike), (Some(&b"step"[..]), true));
    assert_eq!(fs::read(to.path().join("loader/random-seed")).unwrap(), b"another");
}

#[test]
fn a_file_of_the_other_esp_is_read_only_where_it_may_be_the_same() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    let loader = Path::new(esp::LOADER);
    let (from, to) = (tree(&[(esp::LOADER, "loader")]), tree(&[(esp::LOADER, "before")]));
    let copied = || sync(from.path(), to.path(), &BTreeSet::from([loader.to_owned()])).unwrap();
    let found = || fs::read(to.path().join(loader)).unwrap();
    copied();
    assert_eq!(found(), b"loader", "as long, and another one");
    // To read a pipe without a writer would wait, as the memory for a file of any length would end.
    fs::remove_file(to.path().join(loader)).unwrap();
    let mode = Mode::from_raw_mode(0o600);
    mknodat(CWD, to.path().join(loader), FileType::Fifo, mode, 0).unwrap();
    copied();
    assert_eq!(found(), b"loader");
}

#[test]
fn an_esp_without_a_loader_has_no_kernel_image_removed() {
    let (empty, to) = (tree(&[]), tree(&[("EFI/Linux/polis-1.efi", "old")]));
    assert!(prune(empty.path(), to.path()).is_err());
    assert!(to.path().join("EFI/Linux/polis-1.efi").exists());
}

#[test]
fn an_esp_with_more_files_than_any_is_given_up_before_all_are_known() {
    let root = tree(&[("EFI/BOOT/BOOTX64.EFI", "loader")]);
    let write = |at: usize| fs::write(root.path().join(format!("EFI/{at}")), "").unwrap();
    // The loader and its folder are entries, too.
    (2..ENTRIES_MAX).for_each(write);
    assert_eq!(look(root.path()).unwrap().len(), ENTRIES_MAX - 1);
    write(ENTRIES_MAX);
    let error = look(root.path()).unwrap_err();
    assert_eq!(error.to_string(), "it has too many files");
}

#[test]
fn an_esp_is_newer_by_its_records_and_kernel_images_and_not_by_reports_and_tries() {
    let one = tree(&[("EFI/Linux/polis-2+3.efi", "new"), ("polis/guru/x", "")]);
    let other = tree(&[("EFI/Linux/polis-2+2-1.efi", "new"), ("polis/guru/x", "")]);
    let newer = || newer_at(one.path(), other.path()).unwrap();
    let write = |root: &tempfile::TempDir, path: &str, content: &[u8]| {
        assert!(is_record(Path::new(path)), "{path}");
        in_place::write(&root.path().join(path), Some(content)).unwrap();
    };
    assert!(newer().is_nothing());
    write(&one, "polis/guru/attempts", b"2");
    assert!(newer().is_nothing(), "reports");
    write(&other, "polis/key_change.pb", b"key");
    let found = newer();
    assert_eq!(found.records, [("polis/key_change.pb".into(), Some(b"key".to_vec()))]);
    put(one.path(), &found.records).unwrap();
    assert!(newer().is_nothing(), "they were taken");
    // One that is damaged is not newer.
    fs::write(other.path().join("polis/key_change.pb"), "torn").unwrap();
    assert!(newer().is_nothing());
    fs::write(other.path().join("EFI/Linux/polis-3.efi"), "newer").unwrap();
    assert!(newer().is_nothing(), "firmware does not start it");
    fs::create_dir_all(other.path().join("EFI/BOOT")).unwrap();
    fs::write(other.path().join("EFI/BOOT/mirror.new"), "half").unwrap();
    fs::write(other.path().join(esp::LOADER), "loader").unwrap();
    assert!(newer().programs && newer().records.is_empty());
    fs::create_dir_all(one.path().join("EFI/BOOT")).unwrap();
    fs::write(one.path().join(esp::LOADER), "loader").unwrap();
    fs::write(one.path().join("EFI/Linux/polis-3.efi"), "newer").unwrap();
    assert!(newer().is_nothing(), "the copy that was not finished does not count");
}
