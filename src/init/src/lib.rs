//! The library of `init`: process 1, from the initramfs to the last line.
//!
//! ```text
//! stage1 --> stage2 --> node runs --+--> off
//!   |          |         ^          |
//!   |          |         +-- key ---|--+
//!   +----------+---- report --------+--> guru --> off
//! ```
//!
//! `init` is synchronous and single-threaded except for the loading of modules, the start of
//! processors, and work with a disk, which may never end. It is
//! one process from the initramfs on: its program stays in memory, so it keeps running
//! when the disk fails.
//!
//! Invariants:
//! - Only [`shutdown`] ends the machine, and only `init` calls it.
//! - Every failure, even a panic of `init` itself, is written to the serial line.
//!
//! What this module does not do: anything that `node` can do.

pub mod alias;
pub mod attempts;
pub mod boot_path;
pub mod buttons;
pub mod coldplug;
pub mod command_line;
pub mod deadline;
pub mod disk;
mod drivers;
pub mod early;
pub mod error;
mod esp;
pub mod extra;
mod firmware;
pub mod gpt;
pub mod guru;
pub mod heartbeat;
pub mod kernel_log;
pub mod last_words;
pub mod life;
pub mod loader;
pub mod machine;
pub mod maintenance;
pub mod modprobe;
pub mod modules;
pub mod mounts;
pub mod node;
pub mod port;
pub mod processors;
pub mod record;
pub mod relay;
pub mod screen;
mod search;
pub mod shutdown;
mod source;
pub mod stage1;
pub mod stage2;
mod tables;
pub mod threads;
mod trial;
pub mod uart;
mod verified;

use std::io::Write as _;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use polis_base::serial::{Severity, log_line};
use polis_base::stage::Stage;
use polis_base::sys::{clock, poll};
use polis_base::trapdoor::{Report, code};

use self::guru::Action;
use self::machine::Machine;
use self::stage2::End;

/// The message of the last panic, for the report.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// The program `init`: process 1, or `modprobe` when the kernel asks for a module.
#[must_use]
pub fn main(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let name = arguments.next().unwrap_or_default();
    if Path::new(&name).file_name().is_some_and(|name| name == "modprobe") {
        return match modprobe::run(arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(lines) => complain(&lines),
        };
    }
    if !rustix::process::getpid().is_init() {
        return complain(&["this program runs only as process 1 of a machine".to_owned()]);
    }
    panic::set_hook(Box::new(|info| note_panic(&info.to_string())));
    live()
}

fn complain(lines: &[String]) -> ExitCode {
    for line in lines {
        // If standard error fails, the message is lost.
        writeln!(std::io::stderr(), "error: {line}").ok();
    }
    ExitCode::FAILURE
}

/// The life of process 1.
fn live() -> ! {
    let mut machine = Machine::default();
    let end = guarded(&mut machine, |machine| {
        let ended = if Path::new(stage1::MARK).exists() {
            stage1::run(machine).and_then(|start| stage2::run(machine, start))
        } else {
            Err(error::Error::Own {
                what: "start outside of the initramfs",
                source: std::io::ErrorKind::Unsupported.into(),
            })
        };
        ended.unwrap_or_else(|error| End::Guru(error.report()))
    });
    let mut end = end.unwrap_or_else(|text| End::Guru(panicked(text)));
    let reason = loop {
        let report = match end {
            End::Off(reason) => break reason,
            End::Guru(report) => report,
        };
        let key = match guarded(&mut machine, |machine| guru::meditate(machine, report)) {
            Ok(Action::End(reason)) => break reason,
            Ok(Action::Unlock(key)) => key,
            Err(text) => hold(&mut machine, &text),
        };
        let again = guarded(&mut machine, |machine| stage2::again(machine, &key));
        end = match again {
            Ok(ended) => ended.unwrap_or_else(|error| End::Guru(error.report())),
            Err(text) => End::Guru(panicked(text)),
        };
    };
    let ended = guarded(&mut machine, |machine| shutdown::end(machine, reason));
    hold(&mut machine, &ended.err().unwrap_or_default())
}

/// Runs `work`; the message of a panic is its error.
fn guarded<T>(machine: &mut Machine, work: impl FnOnce(&mut Machine) -> T) -> Result<T, String> {
    // After a panic, the state is only read for the report.
    panic::catch_unwind(AssertUnwindSafe(|| work(machine))).map_err(|_payload| {
        PANIC.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    })
}

/// Writes a panic's message at once, to every output that works.
fn note_panic(text: &str) {
    let line = log_line(clock::uptime(), Severity::Fatal, "init", text);
    for uart in uart::ports(Path::new(port::SYS)) {
        port::line_now(&Path::new("/dev").join(uart.name), &line);
    }
    if let Ok(mut log) = std::fs::File::options().write(true).open("/dev/kmsg") {
        log.write_all(format!("{line}\n").as_bytes()).ok();
    }
    *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
}

fn panicked(text: String) -> Report {
    let cause = "init, the first process, has a bug".to_owned();
    Report::new(code::INIT_PANICKED, vec![cause, text])
}

/// Holds the machine when even the guru meditation failed. Ctrl-Alt-Del resets it.
fn hold(machine: &mut Machine, text: &str) -> ! {
    let line = polis_base::serial::EventLine::new("guru")
        .field("code", code::INIT_PANICKED)
        .field("stage", Stage::System)
        .field("cause", text)
        .field("next", "Reset the machine.");
    machine.port.come_back();
    machine.port.force(line);
    rustix::system::reboot(rustix::system::RebootCommand::CadOn).ok();
    loop {
        machine.pet();
        machine::reap();
        machine.port.flush();
        poll::sleep(Duration::from_secs(1));
    }
}
