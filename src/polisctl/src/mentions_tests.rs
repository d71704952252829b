//! Checks every `polisctl …` command that a message, a screen or a page mentions.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::command as whole;

/// Every text of the repository that an operator may read.
fn texts() -> Vec<(PathBuf, String)> {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders: Vec<PathBuf> =
        ["docs", "src", "tui/src", "proto"].iter().map(|folder| root.join(folder)).collect();
    let mut files = vec![root.join("README.md"), root.join("CHANGELOG.md")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.extension().and_then(|kind| kind.to_str());
            if path.is_dir() {
                folders.push(path);
            } else if matches!(kind, Some("md" | "rs" | "proto" | "yml")) {
                files.push(path);
            }
        }
    }
    // These contain wrong commands, or parts of some, on purpose.
    let is_exempt = |path: &Path| {
        path.ends_with(file!()) || path.iter().any(|part| part == "suggestions_tests")
    };
    files.retain(|path| !is_exempt(path));
    let read = |path: PathBuf| (path.clone(), std::fs::read_to_string(path).unwrap());
    files.into_iter().map(read).collect()
}

/// The text after `polisctl ` between back quotes, or on a line of its own as in a block of
/// commands. A Rust string continues in the next line after a backslash.
fn mentions(text: &str) -> Vec<String> {
    let text = text.replace("\\\n", " ");
    let mut found = Vec::new();
    for (at, _) in text.match_indices("`polisctl ") {
        let rest = &text[at + 1..];
        found.extend(rest.split_once('`').map(|(command, _)| command.to_owned()));
    }
    let lines = text.lines().filter(|line| line.starts_with("polisctl "));
    found.extend(lines.map(|line| line.split('#').next().unwrap_or_default().to_owned()));
    found
}

/// The error in a mention: an unknown command or option, or an invalid value. Names in
/// capitals and in braces are placeholders.
fn mistake(mention: &str) -> Option<String> {
    let stands_for_another = |word: &str| !word.starts_with(|c: char| c.is_ascii_lowercase());
    let root = whole();
    let mut command = &root;
    let mut words = mention.split_whitespace().skip(1).peekable();
    while let Some(word) = words.next() {
        if let Some(below) = command.find_subcommand(word) {
            command = below;
            continue;
        }
        let Some(option) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
            // A command with subcommands may also take a node.
            let is_node = command.get_positionals().next().is_some() && word.starts_with("polis-");
            if command.has_subcommands() && !is_node && !stands_for_another(word) {
                return Some(format!("`{}` has no command `{word}`", command.get_name()));
            }
            continue;
        };
        let (name, mut value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let long = name.strip_prefix('-');
        let is_meant = |arg: &&clap::Arg| match long {
            Some(long) => arg.get_long() == Some(long),
            None => arg.get_short().is_some_and(|short| name.starts_with(short)),
        };
        let of_all = root.get_arguments().filter(|arg| arg.is_global_set());
        let Some(arg) = command.get_arguments().chain(of_all).find(is_meant) else {
            return Some(format!("`{}` has no option `{word}`", command.get_name()));
        };
        if !arg.get_action().takes_values() {
            continue;
        }
        if value.is_none() {
            value = words.next();
        }
        let taken = arg.get_possible_values();
        let value = value.unwrap_or_default();
        let fits = taken.iter().any(|one| one.matches(value, false));
        if !taken.is_empty() && !value.is_empty() && !fits && !stands_for_another(value) {
            return Some(format!("`{word}` does not take `{value}`"));
        }
    }
    None
}

#[test]
fn every_mentioned_command_exists() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (path, text) in texts() {
        for mention in mentions(&text) {
            seen += 1;
            let mistake = mistake(&mention);
            wrong.extend(mistake.map(|why| format!("{}: {mention}: {why}", path.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 100, "only {seen} were found");
}

#[test]
fn a_command_that_there_is_not_is_found() {
    for wrong in [
        "polisctl node role NODE",
        "polisctl node roles NODE --add consensus",
        "polisctl etcd status --all",
        "polisctl node delete -q NODE",
        "polisctl node recovery-key NODE --confirm",
        "polisctl node recovery-key confirm NODE",
    ] {
        assert!(mistake(wrong).is_some(), "{wrong}");
    }
    assert_eq!(mistake("polisctl --endpoint HOST node delete NODE --force --yes"), None);
    assert_eq!(mistake("polisctl node logs {name} -n 5 --output json"), None);
    let wrapped = "see `polisctl \\\n    etcd status`;\npolisctl node list   # all\n";
    assert_eq!(mentions(wrapped), ["polisctl      etcd status", "polisctl node list   "]);
}

/// The names of all commands below `command`, with the path to each.
fn leaves(command: &clap::Command, path: &str, found: &mut Vec<(String, clap::Command)>) {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let path = format!("{path} {}", below.get_name());
        if below.has_subcommands() {
            leaves(below, &path, found);
        } else {
            found.push((path.trim_start().to_owned(), below.clone()));
        }
    }
}

/// The page has a table of the commands: `| `group command ARGUMENTS`, … | what |`.
/// A second command of a row may leave out the group.
#[test]
fn the_page_of_the_program_has_every_command_and_every_option() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/polisctl.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut commands = Vec::new();
    leaves(&whole(), "", &mut commands);
    for (path, command) in commands {
        let (group, name) = path.split_once(' ').unwrap_or(("", &path));
        let is_row = |line: &&str| {
            let of_group = line.starts_with(&format!("| `{group} "));
            let here = [format!("`{path}"), format!("`{name}")];
            line.starts_with(&format!("| `{path}"))
                || of_group && here.iter().any(|command| line.contains(command))
        };
        let rows: Vec<&str> = page.lines().filter(is_row).collect();
        assert!(!rows.is_empty(), "no row for `{path}`");
        let words: BTreeSet<&str> = rows
            .iter()
            .flat_map(|row| row.split(|c: char| c != '-' && !c.is_alphanumeric()))
            .collect();
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(long) = arg.get_long() else { continue };
            let short = arg.get_short().map(|short| format!("-{short}"));
            // Shared options and the fields of the parameters are documented elsewhere.
            let named = page.contains(&format!("--{long}"))
                || short.is_some_and(|short| words.contains(short.as_str()));
            assert!(named, "`{path}`: the page does not name `--{long}`");
        }
    }
}
