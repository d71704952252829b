//! Fuzz target of the lines of the serial port and of the control channel.

use polis_fuzz::{Accepted, Target};

use super::EventLine;

#[test]
fn lines() {
    let samples = [
        "POLIS ready",
        "POLIS stage t=4.310 name=kernel state=done",
        "POLIS service path=root.storage state=dead cause=\"a \\\"b\\\" \\u001b \\n\" t=1.0",
    ];
    Target::new("base.serial").samples(samples).run(|input| {
        let text = String::from_utf8_lossy(input);
        let Some(line) = EventLine::parse(&text) else { return Accepted::No };
        assert_eq!(EventLine::parse(&line.to_string()).as_ref(), Some(&line));
        Accepted::Yes
    });
}
