//! The OEM strings of the SMBIOS table, in which a hypervisor may hand over parameters.
//!
//! The kernel shows the table in sysfs as the firmware left it. Firmware is not checked by
//! anyone, so a damaged structure ends the search and is not an error: everything before it
//! counts, and nothing reads past the end.
//!
//! ```text
//! type  length  handle  ... length bytes in all ...  "one\0" "two\0" "\0"
//! 11                                                 the OEM strings
//! 127                                                the end of the table
//! ```

/// The most bytes of the table that are looked at. Tables have some kilobytes.
pub(super) const TABLE_MAX: u64 = 1 << 20;

/// The type of the structure with OEM strings; a table may have several.
const OEM_STRINGS: u8 = 11;

/// The type of the last structure.
const END: u8 = 127;

/// The OEM strings of a table, up to the first damage.
pub(super) fn oem_strings(table: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    let mut rest = table;
    while let Some((kind, strings, next)) = structure(rest) {
        match kind {
            OEM_STRINGS => found.extend(strings),
            END => break,
            _ => {}
        }
        rest = next;
    }
    found
}

/// The type of a structure, its strings, and what follows it.
type Structure<'a> = (u8, Vec<&'a [u8]>, &'a [u8]);

/// The first structure of `table`.
fn structure(table: &[u8]) -> Option<Structure<'_>> {
    let (&[kind, length, _, _], _) = table.split_first_chunk::<4>()?;
    if length < 4 {
        return None;
    }
    let mut rest = table.get(usize::from(length)..)?;
    let mut strings = Vec::new();
    loop {
        let end = rest.iter().position(|byte| *byte == 0)?;
        let (string, next) = rest.split_at(end);
        rest = next.get(1..)?;
        if !string.is_empty() {
            strings.push(string);
            continue;
        }
        // A structure without strings ends with two zeros, too.
        if strings.is_empty() {
            rest = rest.strip_prefix(&[0])?;
        }
        return Some((kind, strings, rest));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn structure(kind: u8, body: &[u8], strings: &[&str]) -> Vec<u8> {
        let length = u8::try_from(4 + body.len()).unwrap();
        let mut bytes = vec![kind, length, 0, 0];
        bytes.extend(body);
        for string in strings {
            bytes.extend(string.as_bytes());
            bytes.push(0);
        }
        bytes.extend(if strings.is_empty() { &[0, 0][..] } else { &[0] });
        bytes
    }

    pub(super) fn table() -> Vec<u8> {
        [
            structure(0, &[7; 20], &["SeaBIOS", "1.16"]),
            structure(OEM_STRINGS, &[2], &["one", "two"]),
            structure(32, &[0; 7], &[]),
            structure(OEM_STRINGS, &[1], &["three"]),
            structure(END, &[], &[]),
            structure(OEM_STRINGS, &[1], &["behind the end"]),
        ]
        .concat()
    }

    #[test]
    fn every_oem_string_before_the_end_is_found() {
        assert_eq!(oem_strings(&table()), [&b"one"[..], b"two", b"three"]);
    }

    #[test]
    fn a_table_that_is_cut_short_gives_whole_strings_only() {
        let table = table();
        for end in 0..table.len() {
            for string in oem_strings(&table[..end]) {
                assert!([&b"one"[..], b"two", b"three"].contains(&string), "{end}");
            }
        }
    }

    #[test]
    fn a_structure_shorter_than_its_header_ends_the_search() {
        for length in 0..4 {
            let bad = [11, length, 0, 0, b'x', 0, 0];
            assert!(oem_strings(&bad).is_empty());
            assert_eq!(oem_strings(&[&structure(11, &[1], &["one"])[..], &bad].concat()), [b"one"]);
        }
    }

    #[test]
    fn a_length_past_the_end_ends_the_search() {
        assert!(oem_strings(&[11, 255, 0, 0, b'x', 0, 0]).is_empty());
    }

    proptest! {
        #[test]
        fn noise_is_survived(noise in proptest::collection::vec(0..16_u8, 0..200)) {
            for string in oem_strings(&noise) {
                prop_assert!(!string.is_empty() && !string.contains(&0));
            }
        }
    }
}

#[cfg(test)]
#[path = "smbios_fuzz_tests.rs"]
mod fuzz_tests;
