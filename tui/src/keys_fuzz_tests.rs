//! Fuzz target of the bytes of a terminal.

use polis_fuzz::{Accepted, Target};

use super::{Key, Parser};

/// Every form of key that the parser knows, one behind the other.
const KEYS: &[u8] = b"q\x1b[[A\x1b[15~\x1bOP\x1b[1;5A\x1b[Z\x1b\t\x1b[24;80R\x9b65535;65535R\x01\
                      \x7f\r\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x1b[5~\x1b[H\x1b";

#[test]
fn key_sequences() {
    Target::new("tui.keys").samples([KEYS]).run(|input| {
        let mut whole = Parser::default();
        let keys = whole.feed(input);
        assert!(keys.len() <= 2 * input.len());
        // The same bytes give the same keys, however reads split them.
        let mut split = Parser::default();
        let apart: Vec<Key> = input.iter().flat_map(|byte| split.feed(&[*byte])).collect();
        assert_eq!(apart, keys);
        assert_eq!(split.idle(), whole.idle());
        Accepted::Yes
    });
}
