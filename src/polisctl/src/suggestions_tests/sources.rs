//! The commands that the sources suggest, and the tests that type them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::suggested::SUGGESTED;

/// Sources that give commands to programs, or show them as samples.
const OTHERS: [&str; 4] = ["completion.rs", "testing.rs", "loopback", "samples"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(folders: &[&str]) -> Vec<(PathBuf, String)> {
    let mut folders: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

/// The commands that the texts of a source suggest, without comments and tests.
fn suggested_in(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code: String = code.lines().filter(is_code).map(|line| format!("{line}\n")).collect();
    // A string goes on after a backslash at the end of its line.
    let mut pieces = code.split("\\\n");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    pieces.for_each(|piece| text.push_str(piece.trim_start()));
    let known = crate::command();
    let mut found = BTreeSet::new();
    for (at, name) in text.match_indices("polisctl ") {
        let rest = &text[at + name.len()..];
        let end = rest.find(['`', '"', '\\', ';', ':', ',', ')', '<', '\n']).unwrap_or(rest.len());
        let command = rest[..end].trim();
        let first = command.split(' ').next().unwrap_or_default();
        let is_command = known.find_subcommand(first).is_some() || first.starts_with("--");
        // The usage of a command, as clap prints it.
        let is_usage = rest[end..].starts_with('<');
        if is_command && !is_usage && command.contains(' ') {
            found.insert(filled(command));
        }
    }
    found
}

/// A command with `_` for each value that the program fills in.
pub(super) fn filled(command: &str) -> String {
    let mut words = Vec::new();
    for word in command.split_whitespace() {
        words.push(match word.split_once('{') {
            Some((before, _)) => format!("{before}_"),
            None if word == "HOST" && words.last().is_some_and(|last| last == "--endpoint") => {
                "_".to_owned()
            }
            None => word.to_owned(),
        });
    }
    words.join(" ")
}

#[test]
fn every_suggested_command_has_a_situation_and_a_test_that_types_it_there() {
    let mut suggested = BTreeSet::new();
    for (path, text) in sources(&["src", "tui/src"]) {
        let shown = path.strip_prefix(root()).unwrap().display().to_string();
        let is_test = shown.ends_with("tests.rs") || shown.contains("tests/");
        if !is_test && !OTHERS.iter().any(|other| shown.contains(other)) {
            suggested.extend(suggested_in(&text));
        }
    }
    let known: BTreeSet<String> =
        SUGGESTED.iter().map(|(command, ..)| (*command).to_owned()).collect();
    let new: Vec<_> = suggested.difference(&known).collect();
    assert!(new.is_empty(), "suggested without a situation: {new:#?}");
    let gone: Vec<_> = known.difference(&suggested).collect();
    assert!(gone.is_empty(), "not suggested any more: {gone:#?}");

    let tests = sources(&["src", "tests", "qemu/src"]);
    let words = |command: &str| -> Vec<String> {
        let words = command.split(' ').filter(|word| word.starts_with(char::is_lowercase));
        words.take(2).map(str::to_owned).collect()
    };
    for (command, situation, readers, shown_by) in SUGGESTED {
        assert!(!situation.is_empty() && !shown_by.is_empty(), "{command}");
        assert!(!readers.is_empty(), "{command}");
        for test in *shown_by {
            let at = |(_, text): &&(PathBuf, String)| text.contains(&format!("fn {test}("));
            let Some((_, text)) = tests.iter().find(at) else {
                panic!("`{command}`: test {test} is missing");
            };
            // A test that follows what is suggested finds the command in the output.
            let follows = text.contains("fn follow(");
            let words = words(command);
            let spelled = [words.join(" "), words.join("\", \"")];
            let typed = spelled.iter().any(|command| text.contains(command.as_str()));
            let by_fleet = text.contains("cluster.found()") || text.contains("Fleet");
            assert!(follows || typed || by_fleet, "{test} does not type `{command}`");
        }
    }
}
