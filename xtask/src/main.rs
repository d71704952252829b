//! The entry point for building, running, testing and measuring Polis.
//!
//! One file a command: each has an `Args` that clap fills and a `run` that does the work.
//! This file only selects the command and prints its error.
//!
//! Exit status: 0 done; 1 refused or failed, with `error:`, the causes and
//! `help:`; 2 wrong usage (clap's own).
#![expect(clippy::print_stdout, reason = "a command line tool talks on its standard output")]
#![expect(clippy::print_stderr, reason = "progress and errors belong on the standard error")]
#![expect(
    clippy::disallowed_methods,
    reason = "a build tool on a host starts and reaps its own processes"
)]

mod bench;
mod conformance;
mod gallery;
mod host;
mod image;
mod keys;
mod kubernetes;
mod link;
mod lock;
mod operator;
mod parameters;
mod progress;
mod run;
mod tail;
mod terminal;
mod test;
mod trees;

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
    let outcome = match Cli::parse().command {
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
            report(&error);
            if error.is::<host::Usage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// Prints an error, its causes and the next step, in the form of every command.
fn report(error: &anyhow::Error) {
    let named = error.downcast_ref::<host::Help>().map(ToString::to_string);
    let known = error.downcast_ref::<polis_image::Error>().and_then(polis_image::Error::help);
    let of_keys = error.downcast_ref::<signing::Error>().and_then(signing::Error::help);
    let help = named.or(known).or(of_keys);
    let mut chain =
        error.chain().map(ToString::to_string).filter(|text| Some(text) != help.as_ref());
    if let Some(first) = chain.next() {
        eprintln!("error: {first}");
    }
    for cause in chain {
        eprintln!("  cause: {cause}");
    }
    if let Some(help) = help {
        eprintln!("help: {help}");
    }
}
