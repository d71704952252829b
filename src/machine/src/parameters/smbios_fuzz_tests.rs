//! Fuzz target of the SMBIOS table, and of parameters in it.

use polis_fuzz::{Accepted, Target};

use super::oem_strings;
use super::tests::table;
use crate::parameters::message;

#[test]
fn smbios_tables() {
    Target::new("machine.smbios").samples([table()]).run(|input| {
        let strings = oem_strings(input);
        let bytes: usize = strings.iter().map(|string| string.len() + 1).sum();
        assert!(bytes <= input.len(), "strings do not overlap");
        for string in &strings {
            assert!(!string.is_empty() && !string.contains(&0));
            let _text = message(string.to_vec());
        }
        Accepted::from(!strings.is_empty())
    });
}
