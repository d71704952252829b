//! The command line: what the derives say, and what they cannot.
//!
//! Invariants:
//! - An option of every command may stand in front of each command and behind the last one. What
//!   is repeated, as `--endpoint`, adds up.
//! - `-o` is short for `--output`, except behind a command that writes a file with it.
//! - An argument of one command is refused in front of a command below it, which would ignore it.
//!
//! What this module does not do: perform a command.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory as _, FromArgMatches as _};

use super::Cli;
use polis_wire::endpoint::Endpoint;

/// The command line: what the derives say, and `-o` for the output of every command that
/// does not write a file with it.
pub(super) fn command() -> Command {
    let command = Cli::command();
    let output = option(&command, "output").short(None);
    with_long_output(command, &output)
}

/// An option of every command.
fn option(command: &Command, id: &str) -> Arg {
    command.get_arguments().find(|arg| arg.get_id() == id).cloned().expect("the options have it")
}

fn with_long_output(mut command: Command, output: &Arg) -> Command {
    let writes = |arg: &Arg| arg.get_short() == Some('o') && arg.get_id() != "output";
    if command.get_arguments().any(writes) {
        // An argument that is there is not taken from the command above.
        return command.arg(output.clone());
    }
    let below: Vec<String> =
        command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
    for name in below {
        command = command.mut_subcommand(name, |below| with_long_output(below, output));
    }
    command
}

/// The name of the option `--endpoint` in the definition.
const ENDPOINTS: &str = "endpoints";

/// The definition with a `--endpoint` of its own for each command. Of an option that all commands
/// share, clap keeps the values behind the last one alone, and forgets those in front of it.
fn repeatable(command: Command) -> Command {
    let endpoint = option(&command, ENDPOINTS).global(false);
    with_endpoint(command.mut_arg(ENDPOINTS, |arg| arg.global(false)), &endpoint)
}

fn with_endpoint(command: Command, endpoint: &Arg) -> Command {
    command.mut_subcommands(|below| with_endpoint(below.arg(endpoint.clone()), endpoint))
}

/// The endpoints in front of each command and behind the last one.
fn endpoints(matches: &ArgMatches) -> Vec<Endpoint> {
    let own = matches.get_many::<Endpoint>(ENDPOINTS).into_iter().flatten().cloned();
    let below = matches.subcommand().map(|(_name, below)| endpoints(below));
    own.chain(below.unwrap_or_default()).collect()
}

/// An argument of a command that stands in front of a command below it, which does not have it;
/// and the name of that command.
fn stray(command: &Command, matches: &ArgMatches) -> Option<(String, String)> {
    let (name, below) = matches.subcommand()?;
    let is_own = |arg: &&Arg| !arg.is_global_set() && arg.get_id() != ENDPOINTS;
    let is_given =
        |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    match command.get_arguments().filter(is_own).find(is_given) {
        Some(arg) => Some((arg.to_string(), name.to_owned())),
        None => stray(command.find_subcommand(name)?, below),
    }
}

/// Reads a command line, for help of so many columns. The options of every command may stand
/// anywhere, those of one command only behind it.
pub(super) fn read(
    arguments: impl IntoIterator<Item = OsString>,
    width: usize,
) -> Result<Cli, clap::Error> {
    let mut definition = repeatable(command()).term_width(width);
    let matches = definition.try_get_matches_from_mut(arguments)?;
    if let Some((argument, below)) = stray(&definition, &matches) {
        let text = format!("the subcommand '{below}' cannot be used with '{argument}'");
        return Err(definition.error(ErrorKind::ArgumentConflict, text));
    }
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.options.endpoints = endpoints(&matches);
    Ok(cli)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn an_option_of_every_command_may_stand_anywhere_and_endpoints_add_up() {
        let world = World::new();
        let set = ["context", "--endpoint", "fd00::1", "set", "home", "--endpoint", "[fd00::2]:1"];
        world.runs(&[&["--endpoint", "192.0.2.1"][..], &set].concat());
        let json = world.runs(&["context", "show", "home", "-o", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let added = ["192.0.2.1:7835", "[fd00::1]:7835", "[fd00::2]:1"];
        assert_eq!(value["endpoints"], serde_json::json!(added));
        // Also in front of a command below one that has arguments of its own.
        for line in [
            &["cluster", "update", "-o", "json", "status"][..],
            &["cluster", "update", "--endpoint", "192.0.2.1", "abort", "--yes"],
            &["cluster", "rotate-ca", "--timeout", "1s", "status"],
            &["node", "recovery-key", "--context", "home", "show", "abcd"],
        ] {
            let refused = world.refuses(line);
            assert!(refused.contains("does not know the CA"), "{line:?}: {refused}");
        }
    }

    #[test]
    fn an_argument_of_one_command_is_refused_in_front_of_another() {
        let world = World::new();
        for (line, argument) in [
            (&["cluster", "update", "@bundle", "status"][..], "'<FILE>'"),
            (&["cluster", "update", "--yes", "abort"], "'--yes'"),
            (&["cluster", "rotate-ca", "--no-wait", "status"], "'--no-wait'"),
            (&["node", "recovery-key", "abcd", "show", "abcd"], "'<NODE>'"),
            (&["audit", "--follow", "-o", "json", "verify"], "'--follow'"),
        ] {
            let ended = world.run(line);
            assert_eq!((ended.status, &*ended.stdout), (2, ""), "{line:?}: {}", ended.stderr);
            let said = format!("cannot be used with {argument}");
            assert!(ended.stderr.contains(&said), "{line:?}: {}", ended.stderr);
            assert!(ended.stderr.contains("\nhelp: "), "{line:?}: {}", ended.stderr);
        }
        let ended = world.run(&["node", "logs", "abcd", "ef01", "--at", "192.0.2.1"]);
        assert_eq!(ended.status, 2, "{}", ended.stderr);
    }

    #[test]
    fn o_is_short_for_output_except_where_it_names_a_file() {
        let world = World::new();
        let json = world.runs(&["-o", "json", "context", "list"]);
        assert_eq!(json, world.runs(&["context", "list", "--output", "json"]));
        assert_eq!(json, world.runs(&["context", "list", "-o", "json"]));
        world.runs(&["owner", "create", "-o", "@json"]);
        assert!(world.path("json").exists(), "it is a file there");
        world.runs(&["owner", "create", "-o", "@other", "--output", "json"]);
        assert!(world.path("other").exists());
        // Without a file and before the command, it is the format.
        let said = world.runs(&["-o", "json", "owner", "create"]);
        assert!(serde_json::from_str::<serde_json::Value>(&said).is_ok(), "{said}");
    }
}
