//! The rules of `storage::plan`, as examples and under random disks.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const ID: Uuid = Uuid::from_bytes([7; 16]);

fn partition(number: u32, first_mib: u64, size_mib: u64) -> Partition {
    Partition {
        number,
        name: format!("POLIS-{number}"),
        type_id: Uuid::from_bytes([1; 16]),
        id: Uuid::from_u128(number.into()),
        first: first_mib * 2048,
        last: (first_mib + size_mib) * 2048 - 1,
        attributes: 0,
    }
}

/// ESP and system on the first 200 MiB of a disk.
fn disk(size_mib: u64) -> Table {
    let partitions = vec![partition(1, 1, 64), partition(2, 65, 135)];
    Table { disk: Uuid::nil(), block_size: 512, blocks: size_mib * 2048, partitions }
}

/// The same with the data partition as an earlier boot made it.
fn with_data(size_mib: u64, data_mib: u64, attributes: u64) -> Table {
    let mut table = disk(size_mib);
    let data = Partition {
        name: NAME.to_owned(),
        type_id: TYPE_ID,
        id: ID,
        attributes,
        ..partition(3, 200, data_mib)
    };
    table.partitions.push(data);
    table
}

fn xfs(id: Uuid, in_progress: bool, size_mib: u64) -> Content {
    Content::Xfs(Xfs { id, label: LABEL.to_owned(), in_progress, size: size_mib * MIB })
}

fn luks(ours: bool, by_us: bool, kind: Option<Kind>) -> Content {
    Content::Luks(Luks {
        id: Some(if ours { ID } else { Uuid::nil() }),
        label: "somebody".to_owned(),
        subsystem: if by_us { SUBSYSTEM } else { "" }.to_owned(),
        whole: true,
        kind,
    })
}

fn decide(table: &Table, content: &Content) -> Result<Plan, Refusal> {
    let mut last = 0xff00;
    let id = || {
        last += 1;
        Uuid::from_u128(last)
    };
    plan(table, place(table, ID)?, content, id)
}

#[test]
fn a_disk_that_an_installer_has_made_keeps_its_identities() {
    let mut table = disk(2048);
    table.disk = Uuid::from_u128(5);
    table.partitions[1].attributes = INSTALLED;
    let Plan::Create { table: written, .. } = decide(&table, &Content::Blank).unwrap() else {
        panic!("not created")
    };
    assert_eq!(written.disk, table.disk);
    assert_eq!(written.partitions[..2], table.partitions[..]);
}

#[test]
fn a_partition_of_another_system_keeps_its_id() {
    let mut table = disk(2048);
    "EFI system partition".clone_into(&mut table.partitions[1].name);
    let Plan::Create { table: written, .. } = decide(&table, &Content::Blank).unwrap() else {
        panic!("not created")
    };
    assert_ne!(written.partitions[0].id, table.partitions[0].id);
    assert_eq!(written.partitions[1], table.partitions[1]);
}

#[test]
fn a_first_boot_makes_a_marked_partition_in_all_of_the_free_space() {
    let table = disk(2048);
    let Plan::Create { table: written, partition } = decide(&table, &Content::Blank).unwrap()
    else {
        panic!("not created")
    };
    assert_eq!((partition.first, partition.number), (200 * 2048, 3));
    // The last MiB holds the backup table.
    assert_eq!(partition.last, 2047 * 2048 - 1);
    assert_eq!(partition.attributes, BEING_MADE);
    assert_eq!(written.partitions.last(), Some(&partition));
    // The partitions of the image keep their places, and differ from every copy of them.
    let ids: Vec<_> = [written.disk, written.partitions[0].id, written.partitions[1].id]
        .map(|id| id.as_u128())
        .into();
    assert_eq!(ids, [0xff01, 0xff02, 0xff03]);
    for (before, after) in table.partitions.iter().zip(&written.partitions) {
        assert_eq!(Partition { id: before.id, ..after.clone() }, *before);
    }
}

#[test]
fn a_disk_with_too_little_room_is_refused_with_numbers() {
    let refusal = decide(&disk(600), &Content::Blank).unwrap_err();
    assert_eq!(refusal, Refusal::TooSmall { free: 399 * MIB });
    assert_eq!(
        refusal.to_string(),
        "the disk is too small: it has 399 MiB free, and 512 MiB are needed"
    );
    assert!(decide(&disk(713), &Content::Blank).is_ok());
    assert!(matches!(decide(&disk(712), &Content::Blank), Err(Refusal::TooSmall { .. })));
}

#[test]
fn a_mirror_with_too_little_room_on_the_other_disk_is_refused_with_numbers() {
    let Place::Free(partition) = place(&disk(4096), ID).unwrap() else { panic!("it is made") };
    let limited = |end_mib: u64| {
        let mut partition = partition.clone();
        limit(&mut partition, end_mib * 2048 - 1, 512).map(|()| partition.blocks() / 2048)
    };
    assert_eq!(limited(712), Ok(512));
    // The own disk ends before it.
    assert_eq!(limited(9000), Ok(partition.blocks() / 2048));
    assert_eq!(limited(711), Err(Refusal::OtherTooSmall { free: 511 * MIB }));
    assert_eq!(limited(100), Err(Refusal::OtherTooSmall { free: 0 }));
    assert_eq!(
        limited(711).unwrap_err().to_string(),
        "the other disk of the mirror is too small: it has room for 511 MiB of the data \
         partition, and 512 MiB are needed"
    );
}

#[test]
fn what_is_recognised_in_the_free_space_is_left_alone() {
    let table = disk(2048);
    for content in [xfs(ID, false, 1000), xfs(ID, true, 1000), Content::Other("LUKS")] {
        assert!(matches!(decide(&table, &content), Err(Refusal::Occupied { .. })), "{content:?}");
    }
    // Old bytes in no known format are not.
    assert!(matches!(decide(&table, &Content::Unknown), Ok(Plan::Create { .. })));
}

#[test]
fn a_complete_partition_is_mounted() {
    let table = with_data(1001, 800, 0);
    let plan = decide(&table, &xfs(ID, false, 800)).unwrap();
    let partition = table.partitions[2].clone();
    assert_eq!(plan, Plan::Mount { partition, unmark: false, grow: None });
}

#[test]
fn a_boot_that_was_cut_before_the_mark_was_off_is_not_formatted_again() {
    let table = with_data(1001, 800, BEING_MADE);
    let plan = decide(&table, &xfs(ID, false, 800)).unwrap();
    assert!(matches!(plan, Plan::Mount { unmark: true, .. }), "{plan:?}");
}

#[test]
fn a_boot_that_was_cut_while_formatting_formats_again() {
    let table = with_data(1001, 800, BEING_MADE);
    for content in [Content::Blank, Content::Unknown, xfs(ID, true, 800)] {
        assert!(matches!(decide(&table, &content), Ok(Plan::Finish { .. })), "{content:?}");
    }
}

#[test]
fn a_complete_partition_that_cannot_be_read_is_never_formatted() {
    let table = with_data(1001, 800, 0);
    for content in [Content::Blank, Content::Unknown, xfs(ID, true, 800)] {
        let refusal = decide(&table, &content).unwrap_err();
        assert_eq!(refusal, Refusal::Damaged { number: 3 }, "{content:?}");
    }
}

#[test]
fn another_file_system_in_the_data_partition_is_left_alone_marked_or_not() {
    for attributes in [0, BEING_MADE] {
        let table = with_data(1001, 800, attributes);
        for content in [xfs(Uuid::nil(), false, 800), Content::Other("ext")] {
            assert!(matches!(decide(&table, &content), Err(Refusal::Foreign { number: 3, .. })));
        }
    }
}

#[test]
fn a_larger_disk_lets_the_partition_grow() {
    let table = with_data(4096, 800, 0);
    let Plan::Mount { grow, .. } = decide(&table, &xfs(ID, false, 800)).unwrap() else {
        panic!("not mounted")
    };
    assert_eq!(grow, Some(4095 * 2048 - 1));
    // A boot that was cut between the partition and the file system finishes.
    let table = with_data(4096, 3895, 0);
    let Plan::Mount { grow, .. } = decide(&table, &xfs(ID, false, 800)).unwrap() else {
        panic!("not mounted")
    };
    assert_eq!(grow, Some(4095 * 2048 - 1));
}

#[test]
fn a_header_of_ours_waits_for_a_key_and_grows_before_it() {
    let table = with_data(4096, 800, 0);
    for kind in [Kind::Encrypted, Kind::Authenticated] {
        let plan = decide(&table, &luks(true, true, Some(kind))).unwrap();
        let partition = table.partitions[2].clone();
        assert_eq!(plan, Plan::Unlock { partition, kind, grow: Some(4095 * 2048 - 1) });
    }
    let full = with_data(1001, 800, 0);
    let plan = decide(&full, &luks(true, true, Some(Kind::Encrypted))).unwrap();
    assert!(matches!(plan, Plan::Unlock { grow: None, .. }), "{plan:?}");
}

#[test]
fn a_header_of_ours_on_a_marked_partition_is_made_again() {
    let table = with_data(1001, 800, BEING_MADE);
    for kind in [None, Some(Kind::Encrypted)] {
        let plan = decide(&table, &luks(true, true, kind)).unwrap();
        assert!(matches!(plan, Plan::Finish { .. }), "{plan:?}");
    }
}

#[test]
fn a_foreign_header_is_left_alone_marked_or_not() {
    for attributes in [0, BEING_MADE] {
        let table = with_data(1001, 800, attributes);
        for (ours, by_us) in [(false, true), (true, false), (false, false)] {
            let refusal = decide(&table, &luks(ours, by_us, Some(Kind::Encrypted))).unwrap_err();
            assert!(matches!(refusal, Refusal::Foreign { number: 3, .. }), "{refusal:?}");
            assert!(refusal.to_string().contains("a LUKS2 header \"somebody\""), "{refusal}");
        }
    }
    let refusal = decide(&disk(2048), &luks(true, true, None)).unwrap_err();
    assert!(matches!(refusal, Refusal::Occupied { .. }), "{refusal:?}");
}

#[test]
fn a_header_of_ours_with_ciphers_that_we_never_use_is_not_opened() {
    let table = with_data(1001, 800, 0);
    let refusal = decide(&table, &luks(true, true, None)).unwrap_err();
    assert_eq!(refusal, Refusal::Weakened { number: 3 });
}

#[test]
fn two_data_partitions_are_refused() {
    let mut table = with_data(4096, 800, 0);
    let twin = Partition {
        number: 4,
        first: 3000 * 2048,
        last: 3500 * 2048,
        ..table.partitions[2].clone()
    };
    table.partitions.push(twin);
    let refusal = decide(&table, &Content::Blank).unwrap_err();
    assert_eq!(refusal, Refusal::Ambiguous { first: 3, second: 4 });
}

#[test]
fn only_a_partition_that_was_given_up_is_cleared_and_only_of_what_is_ours() {
    let table = with_data(1001, 800, 0);
    let marked = given_up(&table).unwrap();
    assert_eq!(marked.partitions[..2], table.partitions[..2]);
    assert_eq!(given_up(&disk(1001)), None);
    let torn = Content::Luks(Luks {
        id: Some(ID),
        label: String::new(),
        subsystem: String::new(),
        whole: false,
        kind: None,
    });
    let ours = [
        Content::Blank,
        Content::Unknown,
        xfs(ID, false, 800),
        luks(true, true, Some(Kind::Authenticated)),
        torn,
    ];
    for content in ours {
        let plan = decide(&marked, &content).unwrap();
        assert_eq!(plan, Plan::Clear { partition: marked.partitions[2].clone() }, "{content:?}");
        let unmarked = decide(&table, &content);
        assert!(!matches!(unmarked, Ok(Plan::Clear { .. })), "{content:?}");
    }
    for content in [xfs(Uuid::nil(), false, 800), luks(false, true, None), Content::Other("ext")] {
        let refusal = decide(&marked, &content);
        assert!(matches!(refusal, Err(Refusal::Foreign { number: 3, .. })), "{content:?}");
    }
}

fn contents() -> impl Strategy<Value = Content> {
    prop_oneof![
        Just(Content::Blank),
        Just(Content::Unknown),
        Just(Content::Other("LUKS")),
        (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(ours, by_us, known)| luks(
            ours,
            by_us,
            known.then_some(Kind::Encrypted)
        )),
        (any::<bool>(), any::<bool>(), 0_u64..5000).prop_map(|(ours, in_progress, size)| {
            xfs(if ours { ID } else { Uuid::nil() }, in_progress, size)
        }),
    ]
}

proptest! {
    #[test]
    fn no_plan_formats_what_is_not_ours_or_touches_another_partition(
        size in 201_u64..8000,
        data in prop::option::of((1_u64..4000, any::<bool>())),
        content in contents(),
        block_size in prop::sample::select(vec![512_u64, 4096]),
    ) {
        let mut table = match data {
            Some((data, marked)) if 200 + data < size => {
                with_data(size, data, if marked { BEING_MADE } else { 0 })
            }
            _ => disk(size),
        };
        let scale = block_size / 512;
        table.block_size = block_size;
        table.blocks /= scale;
        for partition in &mut table.partitions {
            partition.first /= scale;
            partition.last = (partition.last + 1) / scale - 1;
        }
        let before = table.partitions.clone();
        let Ok(plan) = decide(&table, &content) else { return Ok(()) };

        let partition = plan.partition().clone();
        let end = match &plan {
            // Nothing in these tables was given up.
            Plan::Clear { .. } => return Err(TestCaseError::fail("it is cleared")),
            Plan::Create { .. } | Plan::Finish { .. } => {
                prop_assert!(!matches!(content, Content::Other(_)));
                if let Content::Xfs(xfs) = &content {
                    prop_assert!(xfs.in_progress && xfs.id == ID);
                }
                if let Content::Luks(luks) = &content {
                    prop_assert!(luks.id == Some(ID) && luks.subsystem == SUBSYSTEM);
                    let finishes = matches!(plan, Plan::Finish { .. });
                    prop_assert!(finishes);
                }
                prop_assert!(partition.attributes & BEING_MADE != 0);
                partition.last
            }
            Plan::Mount { grow, .. } | Plan::Unlock { grow, .. } => {
                grow.unwrap_or(partition.last)
            }
        };
        prop_assert!(end >= partition.last);
        prop_assert!(end <= table.last_usable());
        if let Plan::Create { .. } = plan {
            prop_assert!(partition.blocks() * block_size >= SIZE_MIN);
        }
        for other in before.iter().filter(|other| other.number != partition.number) {
            prop_assert!(end < other.first || other.last < partition.first);
        }
    }
}

#[test]
fn the_records_of_a_mirror_come_before_the_data_which_no_larger_disk_grows() {
    let id = Uuid::from_u128(77);
    let (table, partition) = reserve(&disk(2000), id).unwrap();
    assert_eq!((partition.number, partition.first, partition.blocks()), (3, 200 * 2048, 4 * 2048));
    assert!(backing::is_mirrored(&table) && !backing::is_mirrored(&disk(2000)));
    let Plan::Create { table, partition } = decide(&table, &Content::Blank).unwrap() else {
        panic!("not made")
    };
    assert_eq!((partition.number, partition.first), (4, 204 * 2048));
    assert_eq!(backing::record(&table).unwrap().id, id, "the identity of the mirror has changed");
    let larger = Table { blocks: 9000 * 2048, ..table };
    let larger = Table {
        partitions: larger
            .partitions
            .into_iter()
            .map(|it| Partition {
                attributes: 0,
                id: if it.number == 4 { ID } else { it.id },
                ..it
            })
            .collect(),
        ..larger
    };
    let plan = decide(&larger, &luks(true, true, Some(Kind::Encrypted))).unwrap();
    assert!(matches!(plan, Plan::Unlock { grow: None, .. }), "{plan:?}");
    assert_eq!(last_of_both(&larger, Some(500 * 2048)), 500 * 2048 - 1);
}
