//! Checks every `cargo xtask` command that a page, a message or a comment mentions.

use std::path::PathBuf;

use clap::CommandFactory as _;

use crate::{Cli, image};

/// Every text of the repository that may mention one.
fn texts() -> Vec<(PathBuf, String)> {
    let root = image::workspace();
    let places = ["benches", "docs", "image", "proto", "qemu", "src", "tests", "tui", "xtask"];
    let mut folders: Vec<PathBuf> = places.iter().map(|place| root.join(place)).collect();
    let mut files = vec![root.join("README.md"), root.join("CHANGELOG.md")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.extension().and_then(|kind| kind.to_str());
            if path.is_dir() {
                folders.push(path);
            } else if matches!(kind, Some("md" | "rs" | "proto" | "yaml" | "yml")) {
                files.push(path);
            }
        }
    }
    // It has wrong commands on purpose.
    files.retain(|path| !path.ends_with("xtask/src/mentions_tests.rs"));
    let read = |path: PathBuf| (path.clone(), std::fs::read_to_string(path).unwrap());
    files.into_iter().map(read).collect()
}

/// The text after `cargo xtask ` between back quotes, or on a line of its own as in a block of
/// commands.
fn mentions(text: &str) -> Vec<String> {
    const START: &str = "cargo xtask ";
    const QUOTED: &str = "`cargo xtask ";
    let quoted = text.match_indices(QUOTED).filter_map(|(at, start)| {
        let rest = &text[at + start.len()..];
        rest.split_once('`').map(|(command, _)| command.to_owned())
    });
    let lines = text.lines().filter_map(|line| line.strip_prefix(START));
    let lines = lines.map(|line| line.split('#').next().unwrap_or_default().to_owned());
    quoted.chain(lines).collect()
}

/// The words of a mention, of several alternatives the first, without the marks of optional and
/// repeated words, of comments, of strings that continue in the next line, and of what a message
/// fills in.
fn words(mention: &str) -> Vec<String> {
    let plain = |word: &str| {
        let word = word.split(['{', '|']).next().unwrap_or_default();
        word.trim_matches(['[', ']', '\\']).trim_end_matches("...").to_owned()
    };
    let words = mention.split_whitespace().filter(|word| !["///", "//!", "//"].contains(word));
    words.map(plain).filter(|word| !word.is_empty()).collect()
}

/// The error in a mention: an unknown command or option, or an unknown value of one that has
/// few. Words in capitals are placeholders.
fn mistake(mention: &str) -> Option<String> {
    let mut root = Cli::command();
    // Gives options of a group to its commands.
    root.build();
    let mut command = &root;
    let fits = |arg: &clap::Arg, value: &str| {
        let possible = arg.get_possible_values();
        let is_placeholder = value.starts_with(|c: char| c.is_ascii_uppercase());
        possible.is_empty()
            || is_placeholder
            || possible.iter().any(|one| one.matches(value, false))
    };
    let mut words = words(mention).into_iter();
    while let Some(word) = words.next() {
        if let Some(below) = command.find_subcommand(&word) {
            command = below;
            continue;
        }
        let name = command.get_name();
        let (arg, value) = match word.strip_prefix("--") {
            Some(option) => {
                let mut options = command.get_arguments();
                let Some(arg) = options.find(|arg| arg.get_long() == Some(option)) else {
                    return Some(format!("`{name}` has no option `{word}`"));
                };
                (arg, if arg.get_action().takes_values() { words.next() } else { None })
            }
            None => {
                let Some(arg) = command.get_positionals().next() else {
                    return Some(format!("`{name}` has no command `{word}`"));
                };
                (arg, Some(word))
            }
        };
        if let Some(value) = value.filter(|value| !fits(arg, value)) {
            return Some(format!("`{name}` does not take `{value}`"));
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
fn a_command_that_does_not_exist_is_found() {
    for wrong in [
        "iamge",
        "run --node 3",
        "image --variant large",
        "image inspekt FILE",
        "bench etcd",
        "keys DIR",
        "link cut 3 --milliseconds 5",
    ] {
        assert!(mistake(wrong).is_some(), "{wrong}");
    }
    assert_eq!(mistake("link slow 2 200 --name other"), None);
    assert_eq!(mistake("bench [build|image] [--runs N] [--beside FOLDER]"), None);
    assert_eq!(words("run\n    /// --nodes 3{other}"), ["run", "--nodes", "3"]);
    let text = "see `cargo xtask image \\\n    inspect FILE`\ncargo xtask run   # boots it\n";
    assert_eq!(mentions(text), ["image \\\n    inspect FILE", "run   "]);
}
