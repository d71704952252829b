//! Power cuts at random moments of the first boot: the next boot reaches home.
//!
//! Each of ten stories draws its moment from its own tenth of the boot, so that
//! together they cover all of it. The moment is a share of this very boot, not
//! a time: a slow host is cut at the same place as a quick one. The seed is
//! printed; `POLIS_SEED=<seed>` draws the same shares again.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::world::{BOOT, World, home};

/// How many moments there are.
const MOMENTS: u32 = 10;

/// From the start of the kernel to `POLIS boot` nothing is written. Of what
/// follows until `ready`, in a first boot, this is the usual length, as a
/// multiple of what came before.
const REST: f64 = 2.5;

macro_rules! moments {
    ($($name:ident $number:literal)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            cut($number)
        }
    )*};
}

moments! {
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

fn cut(number: u32) -> Result<()> {
    let world = World::new(&format!("power-cut-{number}"))?;
    let seed = match std::env::var("POLIS_SEED") {
        Ok(seed) => seed.parse().context("POLIS_SEED is no number")?,
        Err(_absent) => rand::random(),
    };
    let share = share(seed, number);
    println!("POLIS_SEED={seed}: moment {number} is at {share:.3} of the boot");
    std::fs::write(world.path("seed"), format!("{seed}\n"))?;

    let config = world.founder("")?;
    let mut machine = world.boot(&config)?;
    let boot = machine.wait_for("boot", BOOT, |_| true)?;
    let moment = boot.at.mul_f64(1.0 + REST * share);
    let left = moment.saturating_sub(machine.started().elapsed());
    // Comes to its deadline, as a rule: that is the moment. A boot that is
    // quicker than usual is cut at `ready`.
    let early = until_ready(&mut machine, left);
    let last = machine.lines().last().map(ToString::to_string).unwrap_or_default();
    machine.kill();
    println!("cut {moment:.1?} after the start (ready before: {early}), behind: {last}");

    let mut machine = world.boot(&config)?;
    home(&mut machine)?;
    // What was finished is whole: the third boot has nothing left to found.
    let mut again = {
        machine.kill();
        world.boot(&config)?
    };
    home(&mut again)?;
    Ok(())
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

/// A share of the boot in tenth `number`, drawn by `seed`.
fn share(seed: u64, number: u32) -> f64 {
    // One step of SplitMix64: any generator does, as long as a seed gives the
    // same share tomorrow.
    let mut bits = seed.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let high = u32::try_from((bits ^ (bits >> 31)) >> 32).unwrap_or_default();
    let within = f64::from(high) / (f64::from(u32::MAX) + 1.0);
    (f64::from(number - 1) + within) / f64::from(MOMENTS)
}

#[test]
fn every_tenth_of_a_boot_has_its_moment_and_a_seed_repeats_it() -> Result<()> {
    for seed in [0, 1, u64::MAX] {
        for number in 1..=MOMENTS {
            let share = share(seed, number);
            let tenth = f64::from(number - 1) / 10.0..f64::from(number) / 10.0;
            ensure!(tenth.contains(&share), "{share} for {number} with {seed}");
        }
    }
    ensure!(share(7, 3).to_bits() == share(7, 3).to_bits());
    ensure!(share(7, 3).to_bits() != share(8, 3).to_bits());
    Ok(())
}
