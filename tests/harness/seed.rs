//! The seed: draws the stories of a sample, and the moments within a story.
//!
//! One number, the seed, decides all of it. `cargo xtask test` takes it from the commit,
//! so each commit is tested at other moments and every run of it at the same ones.

use std::env;
use std::str::FromStr;

use anyhow::{Context as _, Result};

/// The variable with the seed.
pub const SEED: &str = "POLIS_SEED";

/// The variable that is there when every moment is to be shown.
pub const ALL: &str = "POLIS_ALL";

/// The variable with the number of power cuts in a story.
pub(crate) const CUTS: &str = "POLIS_CUTS";

/// How often a story cuts the power: `POLIS_CUTS`, or `all` in a run of everything, or
/// `drawn`.
///
/// # Errors
/// When the variable is not a number.
pub fn cuts(drawn: u32, all: u32) -> Result<u32> {
    let usual = if draws_all() { all } else { drawn };
    Ok(number(CUTS)?.unwrap_or(usual))
}

/// Whether this run shows every moment, not a sample.
#[must_use]
pub fn draws_all() -> bool {
    env::var_os(ALL).is_some()
}

/// The seed of this run. A story prints it, so that the same moments can be had again.
///
/// # Errors
/// When the variable is not a number.
pub fn seed() -> Result<u64> {
    Ok(number(SEED)?.unwrap_or_else(rand::random))
}

fn number<T: FromStr>(name: &str) -> Result<Option<T>> {
    let Some(text) = env::var_os(name) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.map(Some).with_context(|| format!("{name} is to be a number, and is {text:?}"))
}

/// Which of `count` things are drawn, `drawn` of them, in ascending order.
#[must_use]
pub fn pick(seed: u64, salt: &str, count: usize, drawn: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    all.sort_by_key(|number| mixed(seed ^ hash(salt), *number as u64));
    all.truncate(drawn);
    all.sort_unstable();
    all
}

/// A share in part `number`, from 1, of `parts` equal parts of a whole.
#[must_use]
pub fn share(seed: u64, number: u32, parts: u32) -> f64 {
    let high = u32::try_from(mixed(seed, u64::from(number)) >> 32).unwrap_or_default();
    let within = f64::from(high) / (f64::from(u32::MAX) + 1.0);
    (f64::from(number - 1) + within) / f64::from(parts)
}

/// One step of SplitMix64: any generator does, as long as a seed gives the same number
/// tomorrow.
fn mixed(seed: u64, number: u64) -> u64 {
    let mut bits = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// FNV-1a: `std`'s may differ from one release of Rust to the next.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_boot_has_its_moment_and_a_seed_repeats_it() {
        for seed in [0, 1, u64::MAX] {
            for (parts, number) in [3, 4, 10].iter().flat_map(|n| (1..=*n).map(move |i| (*n, i))) {
                let share = share(seed, number, parts);
                let all = f64::from(parts);
                let part = f64::from(number - 1) / all..f64::from(number) / all;
                assert!(part.contains(&share), "{share} for {number} of {parts} with {seed}");
            }
        }
        assert_eq!(share(7, 3, 10).to_bits(), share(7, 3, 10).to_bits());
        assert_ne!(share(7, 3, 10).to_bits(), share(8, 3, 10).to_bits());
    }

    #[test]
    fn a_sample_has_its_size_a_seed_repeats_it_and_seeds_reach_everything() {
        let mut seen = [false; 10];
        for seed in 0..100 {
            let drawn = pick(seed, "moments", 10, 2);
            assert_eq!(drawn, pick(seed, "moments", 10, 2));
            assert!(drawn.len() == 2 && drawn[0] < drawn[1], "{drawn:?}");
            drawn.iter().for_each(|number| seen[*number] = true);
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(pick(7, "x", 3, 9), [0, 1, 2]);
        assert!((0..50).any(|seed| pick(seed, "a", 10, 1) != pick(seed, "b", 10, 1)));
    }
}
