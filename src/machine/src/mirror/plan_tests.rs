use proptest::prelude::*;

use super::*;

/// A mirror whose disks come and go: what each says, and the writes that it has.
#[derive(Clone, Debug, Default)]
struct World {
    disks: [Option<Disk>; 2],
    variable: Option<Stamp>,
    /// Numbers of the writes that were acknowledged.
    acknowledged: Vec<u64>,
    writes: u64,
    nonces: u64,
}

#[derive(Clone, Debug)]
struct Disk {
    seen: Seen,
    has: Vec<u64>,
}

/// A boot of it.
#[derive(Clone, Debug)]
struct Act {
    /// The disks that are there.
    present: [bool; 2],
    power: Power,
    /// Whether the variable is lost before.
    forgets: bool,
    /// The disk that is pulled while both are used.
    pull: Option<Leg>,
}

impl World {
    fn new() -> Self {
        let record = begun(0);
        let seen = Seen { record, dropped_other: false };
        let disks = [Some(Disk { seen, has: Vec::new() }), None];
        Self { disks, variable: Some(record.stamp), ..Self::default() }
    }

    fn seen(&self, leg: Leg, present: [bool; 2]) -> Option<Seen> {
        self.disks[leg.index()].as_ref().filter(|_| present[leg.index()]).map(|disk| disk.seen)
    }

    /// Writes the next use to the disks in it and to the variable.
    fn raise(&mut self, source: Leg, used: Used, power: &mut Power) -> Result<(), Ended> {
        self.nonces += 1;
        let before = self.disks[source.index()].as_ref().unwrap().seen.record;
        if self.variable != Some(before.stamp) {
            power.spend()?;
            self.variable = Some(before.stamp);
        }
        let new = next(&before, used, source, self.nonces);
        for leg in [source, source.other()].into_iter().filter(|leg| used.has(*leg)) {
            power.spend()?;
            let disk = self.disks[leg.index()].as_mut().unwrap();
            let fails = power.fails.take_if(|_| leg != source);
            // Of two copies, the first may be written before the second fails.
            if fails != Some(Half::Old) {
                disk.seen.record = Record { leg, ..new };
            }
            if fails.is_some() {
                return Err(Ended::Failed);
            }
        }
        power.spend()?;
        self.variable = Some(new.stamp);
        Ok(())
    }

    /// A write that is acknowledged once each of these has it.
    fn write(&mut self, used: Used) {
        self.writes += 1;
        for leg in Leg::ALL.into_iter().filter(|leg| used.has(*leg)) {
            self.disks[leg.index()].as_mut().unwrap().has.push(self.writes);
        }
        self.acknowledged.push(self.writes);
    }

    /// Fills `leg` anew, if it is there or an empty disk is, and has both used.
    fn fill(&mut self, leg: Leg, power: &mut Power) -> Result<(), Ended> {
        let source = self.disks[leg.other().index()].clone().unwrap();
        if let Some(target) = &self.disks[leg.index()] {
            let lost: Vec<_> = target.has.iter().filter(|w| !source.has.contains(w)).collect();
            assert!(lost.is_empty(), "{lost:?} are overwritten: {self:?}");
        }
        power.spend()?;
        let seen = Seen { record: filling(&source.seen.record), dropped_other: false };
        self.disks[leg.index()] = Some(Disk { seen, has: Vec::new() });
        power.spend()?;
        self.disks[leg.index()].as_mut().unwrap().has = source.has;
        self.disks[leg.other().index()].as_mut().unwrap().seen.dropped_other = false;
        if power.pulls_target {
            return self.drop_leg(leg, power);
        }
        match self.raise(leg.other(), Used::Both, power) {
            Ok(()) => self.write(Used::Both),
            Err(Ended::Failed) => self.lose(leg, power)?,
            Err(Ended::Cut) => return Err(Ended::Cut),
        }
        Ok(())
    }

    /// The kernel drops `leg`, the node notes that unless the power goes.
    fn drop_leg(&mut self, leg: Leg, power: &mut Power) -> Result<(), Ended> {
        let left = leg.other();
        self.disks[left.index()].as_mut().unwrap().seen.dropped_other = true;
        self.write(Used::Only(left));
        self.lose(leg, power)
    }

    /// The node goes on without `leg`.
    fn lose(&mut self, leg: Leg, power: &mut Power) -> Result<(), Ended> {
        let left = leg.other();
        self.raise(left, Used::Only(left), power)?;
        self.write(Used::Only(left));
        Ok(())
    }
}

/// What becomes of the writes of a boot.
#[derive(Clone, Debug)]
struct Power {
    /// It goes after so many records.
    cut: Option<usize>,
    /// The next record of the disk that is not the source fails, and what it has then.
    fails: Option<Half>,
    /// The disk that is filled is pulled at the end of that.
    pulls_target: bool,
}

/// What a disk has whose record could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Old,
    New,
}

/// Why a series of records ended before its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The power went.
    Cut,
    /// A disk took no record; the node goes on.
    Failed,
}

impl Power {
    fn stays() -> Self {
        Self { cut: None, fails: None, pulls_target: false }
    }

    fn goes_after(cut: usize) -> Self {
        Self { cut: Some(cut), ..Self::stays() }
    }

    fn spend(&mut self) -> Result<(), Ended> {
        match &mut self.cut {
            Some(0) => Err(Ended::Cut),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn act() -> impl Strategy<Value = Act> {
    let present = prop_oneof![
        4 => Just([true, true]),
        2 => Just([true, false]),
        2 => Just([false, true]),
    ];
    let cut = prop_oneof![2 => (0_usize..9).prop_map(Some), 3 => Just(None)];
    let fails =
        prop_oneof![3 => Just(None), 1 => Just(Some(Half::Old)), 1 => Just(Some(Half::New))];
    let power = (cut, fails, prop::bool::weighted(0.2))
        .prop_map(|(cut, fails, pulls_target)| Power { cut, fails, pulls_target });
    let pull = prop::option::of(0_usize..2).prop_map(|at| at.map(|at| Leg::ALL[at]));
    (present, power, prop::bool::weighted(0.05), pull)
        .prop_map(|(present, power, forgets, pull)| Act { present, power, forgets, pull })
}

/// One boot; returns whether it was refused.
fn boot(world: &mut World, present: [bool; 2], mut power: Power, pull: Option<Leg>) -> bool {
    let [first, second] = Leg::ALL.map(|leg| world.seen(leg, present));
    let Ok(used) = plan(first, second, world.variable) else { return true };
    for leg in Leg::ALL.into_iter().filter(|leg| used.has(*leg)) {
        let has = &world.disks[leg.index()].as_ref().unwrap().has;
        let lost: Vec<_> = world.acknowledged.iter().filter(|w| !has.contains(w)).collect();
        assert!(lost.is_empty(), "{lost:?} are lost with {used:?}: {world:?}");
    }
    let source = if used.has(Leg::First) { Leg::First } else { Leg::Second };
    let _ended = run(world, source, used, present, &mut power, pull);
    false
}

/// What a boot does that was not refused.
fn run(
    world: &mut World,
    source: Leg,
    used: Used,
    present: [bool; 2],
    power: &mut Power,
    pull: Option<Leg>,
) -> Result<(), Ended> {
    match world.raise(source, used, power) {
        // A disk that takes no writes stops no boot.
        Err(Ended::Failed) => return world.lose(source.other(), power),
        raised => raised?,
    }
    world.write(used);
    let other = source.other().index();
    match (used, pull) {
        (Used::Both, Some(leg)) => world.drop_leg(leg, power),
        // An empty disk is taken where there is none yet.
        (Used::Only(_), _) if present[other] || world.disks[other].is_none() => {
            world.fill(source.other(), power)
        }
        (Used::Both, None) | (Used::Only(_), _) => Ok(()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_acknowledged_write_is_lost_and_none_is_overwritten(
        acts in prop::collection::vec(act(), 1..12),
    ) {
        let mut world = World::new();
        for Act { present, power, pull, .. } in acts {
            let there = [0, 1].map(|at| present[at] && world.disks[at].is_some());
            if there == [false, false] {
                continue;
            }
            // The one loss that nothing can notice: the kernel drops a disk, the power goes
            // before the variable says so, and the other disk never comes back.
            let unnoticed = [0, 1].map(|at| {
                let [one, other] = [&world.disks[at], &world.disks[1 - at]];
                let dropped = other.as_ref().is_some_and(|other| other.seen.dropped_other);
                let known = one.as_ref().is_some_and(|one| {
                    let record = one.seen.record;
                    [record.stamp, record.before].map(Some).contains(&world.variable)
                });
                dropped && known
            });
            if there[0] != there[1] && unnoticed[usize::from(there[1])] {
                continue;
            }
            boot(&mut world, there, power, pull);
        }
    }

    #[test]
    fn with_both_disks_every_boot_starts_whatever_was_cut_before(
        acts in prop::collection::vec(act(), 1..12),
    ) {
        let mut world = World::new();
        for Act { power, forgets, pull, .. } in acts {
            if forgets {
                world.variable = None;
            }
            let there = [0, 1].map(|at| world.disks[at].is_some());
            let refused = boot(&mut world, there, power, pull);
            prop_assert!(!refused, "{world:?}");
        }
    }

    #[test]
    fn one_disk_alone_starts_after_a_use_of_both_and_the_other_is_filled_from_it(
        leg in 0_usize..2,
        cut in prop::option::of(0_usize..4),
    ) {
        let leg = Leg::ALL[leg];
        let mut world = World::new();
        boot(&mut world, [true, false], Power::stays(), None);
        let power = cut.map_or(Power::stays(), Power::goes_after);
        prop_assert!(!boot(&mut world, [true, true], power, None));
        let alone = [leg == Leg::First, leg == Leg::Second];
        prop_assert!(!boot(&mut world, alone, Power::stays(), None), "{world:?}");
        // The other one alone is old.
        let other = [!alone[0], !alone[1]];
        prop_assert!(boot(&mut world, other, Power::stays(), None), "{world:?}");
        prop_assert!(!boot(&mut world, [true, true], Power::stays(), None), "{world:?}");
        let [first, second] = Leg::ALL.map(|leg| world.seen(leg, [true, true]));
        prop_assert_eq!(plan(first, second, world.variable), Ok(Used::Both));
    }
}

#[test]
fn two_disks_that_were_each_used_alone_are_refused() {
    let mut world = World::new();
    boot(&mut world, [true, false], Power::stays(), None);
    boot(&mut world, [true, false], Power::stays(), None);
    // Without the variable, as in two machines.
    for alone in [[true, false], [false, true]] {
        world.variable = None;
        world.acknowledged.clear();
        assert!(!boot(&mut world, alone, Power::stays(), None));
    }
    let [first, second] = Leg::ALL.map(|leg| world.seen(leg, [true, true]));
    let refused = plan(first, second, None).unwrap_err();
    assert!(matches!(refused, Refusal::Split { .. }), "{refused}");
}

#[test]
fn a_disk_that_the_kernel_dropped_is_old_before_the_node_has_noted_it() {
    let mut world = World::new();
    boot(&mut world, [true, false], Power::stays(), None);
    // Both records and the variable, and no more.
    boot(&mut world, [true, true], Power::goes_after(3), Some(Leg::First));
    let [first, second] = Leg::ALL.map(|leg| world.seen(leg, [true, true]));
    assert_eq!(plan(first, second, world.variable), Ok(Used::Only(Leg::Second)));
}

#[test]
fn a_disk_that_was_being_filled_is_not_used_alone() {
    let mut world = World::new();
    // The use, and the record of the disk that is filled.
    boot(&mut world, [true, false], Power::goes_after(3), None);
    let second = world.seen(Leg::Second, [true, true]);
    assert_eq!(plan(None, second, None), Err(Refusal::Unfilled));
    let first = world.seen(Leg::First, [true, true]);
    assert_eq!(plan(first, second, world.variable), Ok(Used::Only(Leg::First)));
}

#[test]
fn a_disk_whose_record_failed_half_way_is_old_once_it_is_lost() {
    for half in [Half::Old, Half::New] {
        let mut world = World::new();
        let power = Power { fails: Some(half), ..Power::stays() };
        // It is filled, takes no record of both, and is lost.
        boot(&mut world, [true, false], power, None);
        let second = world.seen(Leg::Second, [true, true]);
        assert!(plan(None, second, world.variable).is_err(), "{half:?}: {world:?}");
        let first = world.seen(Leg::First, [true, true]);
        assert_eq!(plan(first, second, world.variable), Ok(Used::Only(Leg::First)), "{half:?}");
        // And at the start of a use of both.
        assert!(!boot(&mut world, [true, true], Power::stays(), None));
        let power = Power { fails: Some(half), ..Power::stays() };
        assert!(!boot(&mut world, [true, true], power, None));
        let second = world.seen(Leg::Second, [true, true]);
        assert!(plan(None, second, world.variable).is_err(), "{half:?}: {world:?}");
    }
}

#[test]
fn of_several_disks_in_one_place_the_one_counts_that_has_the_data_of_the_other_place() {
    let seen = |record| Seen { record, dropped_other: false };
    let first = next(&begun(1), Used::Only(Leg::First), Leg::First, 2);
    let both = next(&first, Used::Both, Leg::First, 3);
    let second = Record { leg: Leg::Second, ..both };
    let unfilled = filling(&both);
    // Used once more, elsewhere.
    let apart = Record { leg: Leg::First, ..next(&both, Used::Only(Leg::First), Leg::First, 4) };
    let started = seen(Record { used: Used::Both, ..second });
    let beside = |others: &[Record]| {
        let others: Vec<Seen> = others.iter().copied().map(seen).collect();
        super::beside(started, &others, Some(both.stamp))
    };
    assert_eq!(beside(&[]), None);
    let of_first = Record { leg: Leg::First, used: Used::Only(Leg::Second), ..unfilled };
    assert_eq!(beside(&[of_first, both]), Some(1));
    assert_eq!(beside(&[both, of_first]), Some(0));
    // It knows the use of both, so its data is the newest.
    assert_eq!(beside(&[both, apart]), Some(1));
    // After another use it is a split, and counts no more.
    let later = next(&second, Used::Both, Leg::Second, 5);
    let started = seen(Record { leg: Leg::Second, ..next(&later, Used::Both, Leg::Second, 6) });
    let same = Record { leg: Leg::First, ..started.record };
    assert_eq!(super::beside(started, &[seen(apart), seen(same)], None), Some(1));
    assert!(are_copies(&same, &Record { before: begun(9).stamp, ..same }));
    assert!(!are_copies(&of_first, &of_first) && !are_copies(&same, &apart));
}
