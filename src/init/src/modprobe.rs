//! The `modprobe` that the kernel runs when it needs a module by name or alias.
//!
//! The kernel runs `/sbin/modprobe -q -- NAME` in the middle of a system call
//! that needs one: mounting a file system, opening a socket, starting a cipher.

use std::collections::BTreeSet;

use super::modules::{Error, Modules};

/// Loads each of the names. Returns the messages about those that failed.
///
/// # Errors
///
/// One line for each name that could not be loaded.
pub fn run(arguments: impl Iterator<Item = String>) -> Result<(), Vec<String>> {
    // All options that the kernel passes only ask for silence.
    let names: Vec<String> = arguments.filter(|argument| !argument.starts_with('-')).collect();
    let mut modules = Modules::of_running_kernel()
        .map_err(|error| vec![format!("no modules for this kernel: {error}")])?;
    let failed: Vec<String> =
        names.iter().filter_map(|name| one(&mut modules, name).err()).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed) }
}

fn one(modules: &mut Modules, name: &str) -> Result<(), String> {
    match modules.load(name) {
        Ok(()) => return Ok(()),
        Err(Error::Absent { .. }) => {}
        Err(error) => return Err(describe(&error)),
    }
    let found = modules.find(&BTreeSet::from([name])).map_err(|error| error.to_string())?;
    let found: Vec<String> = found.into_values().flatten().collect();
    if found.is_empty() {
        return Err(format!("no module has the alias {name}"));
    }
    // Several modules may serve one alias (a cipher, fast and plain): one is enough.
    let results: Vec<_> = found.iter().map(|module| modules.load(module)).collect();
    if results.iter().any(Result::is_ok) {
        return Ok(());
    }
    Err(results.iter().filter_map(|result| result.as_ref().err()).map(describe).collect())
}

fn describe(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
