//! Fuzz target of the answers of a store.

use polis_fuzz::{Accepted, Target};

use super::*;

const REFUSAL: &str = "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code><Message>no</Message>\
                       <Region>eu-central-1</Region></Error>";

#[test]
fn answers() {
    let samples = [tests::LISTING, REFUSAL];
    Target::new("wire.s3_answer").samples(samples).run(|input| {
        let text = String::from_utf8_lossy(input);
        let Refusal { code, message, region } = refusal(&text);
        for word in [&code, &message, &region] {
            assert!(word.chars().count() <= QUOTE_MAX && !word.contains(is_control));
        }
        match page(&text) {
            Ok(page) => {
                assert!(page.objects.len() <= NODES_MAX as usize);
                Accepted::Yes
            }
            Err(why) => {
                assert!(why.chars().count() <= QUOTE_MAX && !why.contains(is_control));
                if code.is_empty() { Accepted::No } else { Accepted::Yes }
            }
        }
    });
}
