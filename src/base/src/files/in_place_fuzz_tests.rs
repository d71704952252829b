//! Fuzz target of the copies of a file that is written in place on the ESP.

use polis_fuzz::{Accepted, Target};

use super::{decode, encode};

#[test]
fn copies() {
    let copy = |content: Option<&[u8]>| encode(content, 512).unwrap().to_vec();
    let samples = [copy(None), copy(Some(b"")), copy(Some(b"a record\n")), copy(Some(&[9; 300]))];
    Target::new("base.in_place").samples(samples).run(|input| {
        let Some(content) = decode(input) else { return Accepted::No };
        let again = encode(content, input.len()).unwrap();
        assert_eq!(*again, input, "a copy has one spelling");
        Accepted::Yes
    });
}
