//! Fuzz target of the firmware's table of the serial console (ACPI SPCR).

use polis_fuzz::Target;

use super::tests::{sealed, table};
use super::{Console, TABLE_MIN};

#[test]
fn console_tables() {
    let samples = [table(1, 0x2f8, 6), table(0, 0xfe03_0000, 0)];
    Target::new("init.spcr").samples(samples).run(|input| {
        let raw = Console::parse(input);
        let fits = input.len() >= TABLE_MIN;
        let sealed = if fits { Console::parse(&sealed(input.to_vec())) } else { None };
        raw.or(sealed).is_some().into()
    });
}
