//! The entry point for building, running, testing and measuring Polis.
//!
//! One file a command: each has an `Args` that clap fills and a `run` that does the work.
//! This file only selects the command and prints its error.
//!
//! Exit status: 0 done; 1 refused or failed, with `error:`, the causes and
//! `help:`; 2 wrong usage; 3 timed out waiting.
#![expect(
    clippy::disallowed_methods,
    reason = "a build tool on a host starts and reaps its own processes"
)]

// In place of the macros of `std`, which panic where the reader has closed the output.
macro_rules! print {
    ($($text:tt)*) => { crate::output::write(std::io::stdout(), format_args!($($text)*)) };
}
macro_rules! println {
    ($($text:tt)*) => { print!("{}\n", format_args!($($text)*)) };
}
macro_rules! eprint {
    ($($text:tt)*) => { crate::output::write(std::io::stderr(), format_args!($($text)*)) };
}
macro_rules! eprintln {
    ($($text:tt)*) => { eprint!("{}\n", format_args!($($text)*)) };
}

mod bench;
mod conformance;
mod gallery;
mod host;
mod image;
mod keys;
mod kubernetes;
mod link;
mod lock;
#[cfg(test)]
mod mentions_tests;
mod operator;
mod output;
mod parameters;
mod progress;
mod run;
mod tail;
mod terminal;
mod test;
mod trees;

use std::io::{self, ErrorKind};
use std::iter;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use polis_image::signing;

/// Builds, runs, tests and measures Polis.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build the disk image, or inspect one.
    Image(image::Args),
    /// Make the keys that sign images and updates, or list them.
    Keys(keys::Args),
    /// Build the image and boot it in QEMU as a new cluster.
    Run(run::Args),
    /// Cut, delay or repair the links of a cluster that `run --nodes N` runs.
    Link(link::Args),
    /// Check the sources and run the tests.
    Test(test::Args),
    /// Run the conformance tests of Kubernetes.
    Conformance(conformance::Args),
    /// Draw every screen of the console for the documentation.
    Gallery(gallery::Args),
    /// Run the measurements of the documentation.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) if error.use_stderr() => {
            eprint!("{}", of_clap(&error.render().to_string()));
            return ExitCode::from(2);
        }
        Err(answer) => {
            // Help and version. A reader that closed the output is not an error.
            let _closed = answer.print();
            return ExitCode::SUCCESS;
        }
    };
    let outcome = match command {
        Command::Image(args) => image::run(args),
        Command::Keys(args) => keys::run(args),
        Command::Run(args) => run::run(args),
        Command::Link(args) => link::run(&args),
        Command::Test(args) => test::run(args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Gallery(args) => gallery::run(&args),
        Command::Bench(args) => bench::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint!("{}", rendered(&error));
            ExitCode::from(status(&error))
        }
    }
}

/// The exit status of a command that ended with this error.
fn status(error: &anyhow::Error) -> u8 {
    let machine = error.downcast_ref::<polis_qemu::Error>();
    if error.is::<host::Usage>() {
        2
    } else if error.is::<host::Late>() || machine.is_some_and(polis_qemu::Error::is_late) {
        3
    } else {
        1
    }
}

/// An error, its causes and the next step, in the form of every command.
fn rendered(error: &anyhow::Error) -> String {
    let named = error.downcast_ref::<host::Help>().map(ToString::to_string);
    let known = error.downcast_ref::<polis_image::Error>().and_then(polis_image::Error::help);
    let of_keys = error.downcast_ref::<signing::Error>().and_then(signing::Error::help);
    let help = named.or(known).or(of_keys).unwrap_or_else(|| general(error).to_owned());
    let chain = error.chain().map(ToString::to_string).filter(|text| *text != help);
    let labels = iter::once("error").chain(iter::repeat("cause"));
    let lines = labels.zip(chain).map(|(label, text)| format!("{label}: {text}\n"));
    lines.chain([format!("help: {help}\n")]).collect()
}

/// The next step where nothing closer to the error is known.
const GENERAL: &str =
    "`--help` after the command explains it; docs/testing.md and docs/images.md say more";

/// The beginning of the last line of an error of clap.
const CLAP_HELP: &str = "\n\nFor more information, try ";

/// Messages of the standard library about a text that is not a number, and their replacements.
const NUMBERS: [(&str, &str); 3] = [
    (": invalid digit found in string", ": allowed is a whole number"),
    (": cannot parse integer from empty string", ": allowed is a whole number"),
    (": number too large to fit in target type", ": the number is too large"),
];

/// An error of clap in the form of every other one, with `help:` at its end. The list of commands,
/// which clap prints where one is missing, stays as it is.
fn of_clap(text: &str) -> String {
    if !text.starts_with("error: ") {
        return text.to_owned();
    }
    let said = text.rsplit_once(CLAP_HELP).map_or(text, |(said, _)| said);
    let said = NUMBERS.iter().fold(said.to_owned(), |said, (raw, words)| said.replace(raw, words));
    format!("{}\n\nhelp: {GENERAL}\n", said.trim_end())
}

/// The next step where the error itself names none.
fn general(error: &anyhow::Error) -> &'static str {
    let of = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().map(io::Error::kind)
    };
    match error.chain().find_map(of) {
        Some(ErrorKind::NotFound) => "check the path",
        Some(ErrorKind::NotADirectory) => "check the path: a part of it is not a folder",
        Some(ErrorKind::IsADirectory) => "name a file: this is a folder",
        Some(ErrorKind::PermissionDenied) => "check the permissions of the file and its folders",
        Some(ErrorKind::StorageFull) => "make room there, for example by `cargo clean`",
        Some(ErrorKind::ReadOnlyFilesystem) => "name a place that can be written",
        _ => GENERAL,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use anyhow::anyhow;
    use polis_qemu::machine::Outcome;

    use super::*;

    #[test]
    fn the_exit_status_tells_wrong_usage_and_a_timeout_from_a_failure() {
        let wait = |outcome| {
            let text = String::new;
            polis_qemu::Error::Wait { what: text(), outcome, last: text(), log: text() }
        };
        let second = Duration::from_secs(1);
        let late = wait(Outcome::Late { within: second, silent: second });
        let late = run::gave_up("the node did not become ready", late.into());
        assert_eq!(status(&late), 3);
        assert!(rendered(&late).contains("\nhelp: the last `POLIS stage` lines"), "{late:?}");
        // A guest that went silent has crashed, which is a failure, also at the end of the time.
        let crashed = wait(Outcome::Silent { silent: second });
        let crashed = run::gave_up("the node did not become ready", crashed.into());
        assert_eq!(status(&crashed), 1);
        assert!(rendered(&crashed).contains("it crashed"), "{crashed:?}");
        assert!(rendered(&crashed).contains("\nhelp: the last lines say what"), "{crashed:?}");
        let guru = wait(Outcome::Guru { line: "POLIS guru".to_owned() });
        assert_eq!(status(&run::gave_up("the node did not become ready", guru.into())), 1);
        assert_eq!(status(&anyhow!(host::Late("nothing within 9 s".to_owned())).context("x")), 3);
        assert_eq!(status(&anyhow!(host::Usage("--keep".to_owned()))), 2);
        assert_eq!(status(&anyhow!("x")), 1);
    }

    #[test]
    fn the_command_lines_that_outsiders_know_are_understood() {
        for line in [
            "run",
            "run --nodes 3 --memory 1024 --uefi --accel auto --keep --headless",
            "run --direct --accel kvm",
            "run --accel tcg --until-ready",
            "run --kubernetes --nodes 3 --until-ready",
            "run --secure-boot",
            "test",
            "test unit FILTER",
            "test e2e FILTER",
            "image --out FILE --format raw --parameters FILE --size 4294967296",
            "image --format qcow2 --variant base",
            "image --variant full --locked --snapshot URL",
            "image --keys DIR --bundle FILE --version 1.2.3",
            "image --update-payload --mirror URL",
            "image inspect FILE",
            "keys create DIR",
            "bench",
            "bench boot",
            "conformance --stage api",
            "conformance --stage pods",
        ] {
            let words = std::iter::once("xtask").chain(line.split(' '));
            assert!(Cli::try_parse_from(words).is_ok(), "{line}");
        }
    }

    #[test]
    fn a_command_line_without_a_meaning_is_wrong_usage_and_names_the_next_step() {
        let said = |words: &[&str]| {
            let error = Cli::try_parse_from([&["xtask"], words].concat()).unwrap_err();
            assert!(error.exit_code() == 2 && error.use_stderr(), "{error}");
            of_clap(&error.render().to_string())
        };
        for (words, expected) in [
            (&["iamge"][..], "similar subcommand exists: 'image'"),
            (&["run", "--nodes", "17"], "17 is not in 1..=16"),
            (&["run", "--nodes", "three"], ": allowed is a whole number"),
            (&["image", "--size", "36893488147419103232"], ": the number is too large"),
            (&["run", "--uefi", "--direct"], "cannot be used with"),
            (&["image", "--format", "vmdk"], "possible values: raw, qcow2"),
        ] {
            let text = said(words);
            assert!(text.starts_with("error: ") && text.contains(expected), "{text}");
            assert!(text.ends_with(&format!("\n\nhelp: {GENERAL}\n")), "{text}");
            assert!(!text.contains("For more information"), "{text}");
        }
        // Without a command, the list of them is the help.
        let list = said(&[]);
        assert!(list.contains("Usage: cargo xtask") && !list.contains(GENERAL), "{list}");
    }

    #[test]
    fn an_error_ends_with_the_next_step_whether_it_names_one_or_not() {
        let helped = anyhow!("the disk is gone").context(host::Help("find it".to_owned()));
        let helped = helped.context("cannot boot");
        assert_eq!(
            rendered(&helped),
            "error: cannot boot\ncause: the disk is gone\nhelp: find it\n"
        );
        let absent =
            anyhow::Error::new(io::Error::from(ErrorKind::NotFound)).context("cannot read x");
        assert!(rendered(&absent).ends_with("\nhelp: check the path\n"), "{}", rendered(&absent));
        assert!(rendered(&anyhow!("x")).starts_with("error: x\nhelp: `--help` after"));
    }
}
