//! Fuzz target of the kernel's last words, as firmware kept them.

use polis_fuzz::{Accepted, Target};

use super::{LINE_MAX, clean, parse};

#[test]
fn last_words() {
    let samples = ["Panic#2 Part1\n<4>[    1.0] first\n<0>[    2.0] Kernel panic - not syncing"];
    Target::new("init.last_words").samples(samples).run(|input| {
        let text = String::from_utf8_lossy(input);
        let Some((_panic, number, text)) = parse(&text) else { return Accepted::No };
        assert!(number >= 1);
        for line in text.lines().map(clean) {
            assert!(line.chars().count() <= LINE_MAX && !line.contains(char::is_control));
        }
        Accepted::Yes
    });
}
