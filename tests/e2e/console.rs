//! Stories of the console: on the screen, and on a terminal at the end of a line.

use std::io::{ErrorKind, Read as _, Write as _};
use std::num::NonZero;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_proto::v1::{ConsoleConfiguration, NodeParameters};
use polis_qemu::deadline::{self, Deadline};
use polis_qemu::{Config, Machine, screen};
use polis_tests::{Story, story};
use prost::Message as _;

use crate::world::{BOOT, POWER_BUTTON, SOON, World, bootstrap, home, this_boot};

/// How often a terminal looks for its input.
const LOOK: Duration = Duration::from_millis(50);

/// The pages, and words that each of them has on a machine that founded a cluster.
const PAGES: [(&str, &str); 8] = [
    ("Boot", "after the kernel started"),
    ("Cluster", "polis-"),
    ("etcd", "it is the only voter"),
    ("PKI", "SHA-256"),
    ("Services", "services are healthy"),
    ("Logs", "Following"),
    ("Network", "This node has the address"),
    ("Workloads", "no Kubernetes role"),
];

/// A person's terminal at the other end of a line: it has a size, knows it, and
/// receives no other question.
pub(crate) struct Terminal {
    line: UnixStream,
    parser: vt100::Parser,
}

impl Terminal {
    pub(crate) fn new(machine: &mut Machine, [rows, columns]: [u16; 2]) -> Result<Self> {
        let line = machine.take_console().context("the machine has no console")?;
        line.set_read_timeout(Some(LOOK))?;
        let [rows, columns] = [size(rows)?, size(columns)?];
        Ok(Self { line, parser: vt100::Parser::new(rows, columns, 0) })
    }

    fn resize(&mut self, [rows, columns]: [u16; 2]) -> Result<()> {
        self.parser.screen_mut().set_size(size(rows)?, size(columns)?);
        Ok(())
    }

    /// Reads the output, and answers a question about the place of the cursor.
    fn listen(&mut self) -> Result<()> {
        let mut bytes = [0; 65536];
        match self.line.read(&mut bytes) {
            Ok(0) => bail!("the machine hung up"),
            Ok(length) => {
                let (sent, mut asked) = (&bytes[..length], false);
                for byte in sent {
                    self.parser.process(&[*byte]);
                    // Asked after a jump to the corner, and answered from there.
                    asked |= *byte == b'n';
                }
                if asked {
                    let (rows, columns) = self.parser.screen().size();
                    write!(self.line, "\x1b[{rows};{columns}R")?;
                }
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn press(&mut self, keys: &str) -> Result<()> {
        Ok(self.line.write_all(keys.as_bytes())?)
    }

    fn screen(&self) -> String {
        self.parser.screen().contents()
    }

    /// Looks until the screen has `text` on it.
    fn wait_for(&mut self, text: &str) -> Result<()> {
        let mut deadline = Deadline::within(SOON);
        while !self.screen().contains(text) {
            ensure!(!deadline.is_over(), "{text:?} is not on\n{}", self.screen());
            self.listen()?;
        }
        Ok(())
    }

    /// Goes to two pages, one after the other; returns the time that both took, by the clock of
    /// deadlines.
    pub(crate) fn answers(&mut self) -> Result<Duration> {
        let begun = deadline::own().now();
        for number in [2, 8] {
            let (page, _) = PAGES[number - 1];
            self.press(&format!("{number}"))?;
            self.wait_for(&format!("[F{number} {page}]"))?;
        }
        Ok(deadline::own().now() - begun)
    }
}

fn size(cells: u16) -> Result<NonZero<u16>> {
    NonZero::new(cells).context("a terminal without a cell")
}

/// A machine whose console is on `hvc0` too, and on a serial port without a reader.
pub(crate) fn with_terminal(world: &World, append: &str) -> Result<Config> {
    let parameters = terminal_parameters();
    // First the machine, then its parameters: both write the same file.
    let bootstrap_config = world.bootstrap_config(append)?;
    Ok(Config {
        console: true,
        unread_port: true,
        fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
        ..bootstrap_config
    })
}

/// The parameters of that machine.
pub(crate) fn terminal_parameters() -> NodeParameters {
    NodeParameters {
        console: Some(ConsoleConfiguration { tui: ["hvc0", "ttyS1"].map(str::to_owned).into() }),
        ..bootstrap()
    }
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_person_at_the_end_of_a_line_sees_every_page_and_ends_the_machine).takes(60),
    story!(an_unread_line_blocks_nothing_and_shows_the_newest_to_a_new_reader).takes(50),
    story!(every_stage_of_a_boot_is_on_the_screen).takes(50),
];

fn a_person_at_the_end_of_a_line_sees_every_page_and_ends_the_machine() -> Result<()> {
    let world = World::new("console-line")?;
    let mut machine = world.boot(&with_terminal(&world, "")?)?;
    let mut terminal = Terminal::new(&mut machine, [30, 100])?;
    terminal.wait_for("POLIS")?;
    while machine.seen(|event| event.word == "ready").is_empty() {
        // A screen is looked at while its machine boots.
        terminal.listen()?;
        let _line = machine.next_line(LOOK);
    }
    for (number, (page, words)) in (1..).zip(PAGES) {
        terminal.press(&format!("{number}"))?;
        terminal.wait_for(&format!("[F{number} {page}]"))?;
        terminal.wait_for(words)?;
    }
    // The size that the terminal reported, not an assumed one.
    let last = terminal.parser.screen().rows(0, 100).last().unwrap_or_default();
    ensure!(last.contains("[F8 Workloads]"), "another size than 30 rows:\n{}", terminal.screen());

    terminal.resize([40, 132])?;
    terminal.press("1")?;
    terminal.wait_for("Load")?;
    let last = |terminal: &Terminal| terminal.parser.screen().rows(0, 132).last();
    let mut deadline = Deadline::within(SOON);
    while !last(&terminal).is_some_and(|row| row.contains("[F1 Boot]")) {
        ensure!(!deadline.is_over(), "not grown:\n{}", terminal.screen());
        terminal.listen()?;
    }

    terminal.press("6/voter\r")?;
    terminal.wait_for("with \"voter\"")?;
    terminal.press("PR")?;
    terminal.wait_for("yes, reboot it now")?;
    terminal.wait_for("only voter")?;
    // Before that, the question cannot have been read, and no answer counts.
    let read = Instant::now() + 2 * polis_tui::READ;
    while Instant::now() < read {
        terminal.listen()?;
    }
    terminal.press("Y")?;
    let off = machine.wait_for("off", SOON, |_| true)?;
    ensure!(off.is("reason", "reboot"), "another end: {off}");
    let output = machine.lines().into_iter().find(|line| line.text.contains("actor=console"));
    ensure!(output.is_some(), "the log does not name the user that rebooted the machine");
    Ok(())
}

fn an_unread_line_blocks_nothing_and_shows_the_newest_to_a_new_reader() -> Result<()> {
    let world = World::new("console-unread")?;
    let mut machine = world.boot(&with_terminal(&world, "")?)?;
    let identity = home(&mut machine)?;
    let mut terminal = Terminal::new(&mut machine, [24, 80])?;
    terminal.wait_for(&identity.node)?;
    terminal.wait_for("after the kernel started")?;
    // A port does not hold up the end either, which discards what the port holds.
    machine.wait_until_text("the console is on /dev/ttyS1", SOON)?;
    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.qmp.power_button()?;
    machine.wait_for("off", SOON, |event| event.is("reason", "poweroff"))?;
    let lines = machine.lines();
    let hung = lines.iter().find(|line| line.text.contains("can't be ended"));
    ensure!(hung.is_none(), "{}", hung.map_or("", |line| &line.text));
    Ok(())
}

fn every_stage_of_a_boot_is_on_the_screen() -> Result<()> {
    let world = World::new("console-screen")?;
    let mut machine = world.boot(&world.bootstrap_config("")?)?;
    for stage in ["system", "storage", "consensus"] {
        let wanted = |event: &polis_qemu::Event| event.is("name", stage);
        machine.wait_for("stage", BOOT, wanted)?;
        machine.picture(&format!("stage-{stage}"))?;
    }
    machine.wait_for("ready", BOOT, |_| true)?;
    // Some seconds later a driver has taken over the screen from the firmware's.
    machine.wait_for("memory", SOON, |_| true)?;
    let shown = |machine: &mut Machine, name: &str| -> Result<()> {
        let mut deadline = Deadline::within(SOON);
        // The bars at the top and at the bottom are blue.
        while machine.picture(name)?.share(screen::is_blue) < 0.05 {
            ensure!(!deadline.is_over(), "no console on the screen: {name}.png");
            let _line = machine.next_line(Duration::from_millis(200));
        }
        Ok(())
    };
    shown(&mut machine, "ready")?;
    for (key, (page, _)) in ["f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8"].into_iter().zip(PAGES)
    {
        machine.qmp.press(&[key])?;
        // The next picture is drawn within a second, and the clock with it.
        let _line = machine.next_line(Duration::from_millis(1500));
        shown(&mut machine, &format!("page-{}", page.to_lowercase()))?;
    }
    machine.qmp.press(&["f10"])?;
    let _line = machine.next_line(Duration::from_millis(1500));
    shown(&mut machine, "power")?;
    ensure!(this_boot(&machine).iter().all(|event| event.word != "guru"), "a guru on the way");
    Ok(())
}
