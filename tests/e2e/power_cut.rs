//! Power cuts at random moments of the first boot: the next boot reaches home.
//!
//! Each story draws its moment from its own part of the boot, so that together those of
//! a kind of disk cover all of it. An ordinary run draws some of them, and `--all` runs
//! all. The moment is a share of this very boot, not a time: a slow host is cut at the
//! same place as a quick one. The seed is printed; `POLIS_SEED=<seed>` draws the same
//! stories and the same shares again.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use polis_tests::{Sample, Story, seed, share, story};

use crate::storage::{Kind, bootstrap_config, is_ready_as};
use crate::world::{BOOT, World, home, on_esp};

/// From the start of the kernel to `POLIS boot` nothing is written. Of what
/// follows until `ready`, in a first boot, this is the usual length, as a
/// multiple of what came before.
fn rest(kind: Kind) -> f64 {
    match kind {
        Kind::Insecure => 2.5,
        Kind::Encrypted => 3.5,
        // The partition is written once before it counts.
        Kind::Authenticated => 6.0,
    }
}

/// The stories: of the moments of a kind each has its own, and a run draws some.
macro_rules! moments {
    ($($kind:ident of $moments:literal, $promise:literal: $drawn:literal drawn, $cost:literal s {
        $($name:ident $number:literal)*
    })*) => {
        /// The stories of this file.
        pub(crate) const STORIES: &[Story] =
            &[$($(story!($name).takes($cost).one_of(Sample { of: $promise, drawn: $drawn }),)*)*];

        $($(
            fn $name() -> Result<()> {
                cut(Kind::$kind, $number, $moments)
            }
        )*)*
    };
}

moments! {
    Insecure of 10, "first boot, insecure": 2 drawn, 40 s {
        a_first_boot_that_is_cut_in_its_1st_tenth_is_finished_by_the_next 1
        a_first_boot_that_is_cut_in_its_2nd_tenth_is_finished_by_the_next 2
        a_first_boot_that_is_cut_in_its_3rd_tenth_is_finished_by_the_next 3
        a_first_boot_that_is_cut_in_its_4th_tenth_is_finished_by_the_next 4
        a_first_boot_that_is_cut_in_its_5th_tenth_is_finished_by_the_next 5
        a_first_boot_that_is_cut_in_its_6th_tenth_is_finished_by_the_next 6
        a_first_boot_that_is_cut_in_its_7th_tenth_is_finished_by_the_next 7
        a_first_boot_that_is_cut_in_its_8th_tenth_is_finished_by_the_next 8
        a_first_boot_that_is_cut_in_its_9th_tenth_is_finished_by_the_next 9
        a_first_boot_that_is_cut_in_its_10th_tenth_is_finished_by_the_next 10
    }
    Encrypted of 3, "first boot, encrypted": 1 drawn, 55 s {
        an_encrypted_first_boot_that_is_cut_in_its_1st_third_is_finished_by_the_next 1
        an_encrypted_first_boot_that_is_cut_in_its_2nd_third_is_finished_by_the_next 2
        an_encrypted_first_boot_that_is_cut_in_its_3rd_third_is_finished_by_the_next 3
    }
    Authenticated of 4, "first boot, authenticated": 1 drawn, 90 s {
        an_authenticated_first_boot_that_is_cut_in_its_1st_quarter_is_finished_by_the_next 1
        an_authenticated_first_boot_that_is_cut_in_its_2nd_quarter_is_finished_by_the_next 2
        an_authenticated_first_boot_that_is_cut_in_its_3rd_quarter_is_finished_by_the_next 3
        an_authenticated_first_boot_that_is_cut_in_its_4th_quarter_is_finished_by_the_next 4
    }
}

fn cut(kind: Kind, number: u32, moments: u32) -> Result<()> {
    let world = World::new(&format!("power-cut-{}-{number}", kind.name()))?;
    let seed = seed()?;
    let share = share(seed, number, moments);
    println!("POLIS_SEED={seed}: moment {number} of {moments} is at {share:.3} of the boot");
    std::fs::write(world.path("seed"), format!("{seed}\n"))?;

    // From the start, so that a cut disk stays as it is.
    let config = on_esp(bootstrap_config(&world, kind, "")?)?;
    let mut machine = world.boot(&config)?;
    let boot = machine.wait_for("boot", BOOT, |_| true)?;
    let moment = boot.at.mul_f64(1.0 + rest(kind) * share);
    let left = moment.saturating_sub(machine.started().elapsed());
    // Comes to its deadline, as a rule, at the moment of the cut. A boot that is
    // quicker than usual is cut at `ready`.
    let early = until_ready(&mut machine, left);
    let last = machine.lines().last().map(ToString::to_string).unwrap_or_default();
    machine.kill();
    println!("cut {moment:.1?} after the start (ready before: {early}), behind: {last}");

    // Stage 1 reads the disk behind the moment at which the others were saved.
    let config = world.past_stage_1(config)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    is_ready_as(&machine, kind)?;
    // The founding is complete: the third boot has nothing left to found.
    machine.kill();
    let mut machine = world.boot(&config)?;
    let again = home(&mut machine)?;
    ensure!(again == founded, "the third boot founds another: {again:?}, {founded:?}");
    is_ready_as(&machine, kind)
}

fn until_ready(machine: &mut polis_qemu::Machine, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    while let Some(line) = machine.next_line(deadline.saturating_duration_since(Instant::now())) {
        if line.event().is_some_and(|event| event.word == "ready") {
            return true;
        }
    }
    false
}
