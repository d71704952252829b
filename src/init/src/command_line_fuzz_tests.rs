//! Fuzz target of what `init` reads of the kernel command line.

use polis_fuzz::Target;

use super::{CommandLine, countdown, init_deadline};

#[test]
fn command_lines() {
    let line = format!(
        "console=ttyS0 polis.verity={} polis.verity-salt=706F polis.verity-blocks=512 \
         polis.guru-countdown=9 polis.node-deadline=15 polis.init-deadline=20 quiet",
        "ab".repeat(32)
    );
    Target::new("init.command_line").samples([line]).run(|input| {
        let line = String::from_utf8_lossy(input);
        let _always_an_answer = (countdown(&line), init_deadline(&line));
        CommandLine::parse(&line).is_ok().into()
    });
}
