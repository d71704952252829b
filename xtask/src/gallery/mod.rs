//! `cargo xtask gallery`: draws every screen of the console into `docs/gallery`.
//!
//! The screens are drawn by the code that draws them on a machine, from the samples that
//! its tests use, so that the documentation shows the real screens. `--check` compares and
//! writes nothing; `cargo xtask test` runs it.
//!
//! What this module does not do: choose the content: it draws the samples of `polis_tui`.

mod svg;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use polis_tui::guru::{self, Guru};
use polis_tui::ratatui::buffer::Buffer;
use polis_tui::ratatui::layout::Rect;
use polis_tui::{Key, Page, Snapshot, View, samples};

use crate::{host, image};

/// The folder of the gallery.
const FOLDER: &str = "docs/gallery";

/// The smallest supported terminal, and a common one.
const SMALL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (120, 40);

/// The description of each sample, for the list.
const WORDS: [(&str, &str); 9] = [
    ("empty", "The first moment: nothing is known yet."),
    ("booting", "A boot that waits for the network, after one that failed."),
    ("registering", "A machine that waits for approval."),
    ("ordinary", "A cluster of three, two weeks after it was founded."),
    ("worker", "A node of that cluster that has no part in consensus."),
    ("busy", "A cluster that grows: a learner copies, a node waits for approval."),
    ("failing", "Cut off from the cluster, with every kind of failure."),
    ("overflowing", "Values that are too long, too large, or hostile."),
    ("crowd", "A hundred nodes."),
];

/// Arguments of `cargo xtask gallery`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only check whether the gallery is up to date.
    #[arg(long)]
    check: bool,
}

/// Says whether the gallery shows what the code draws.
///
/// # Errors
/// When a file differs.
pub(crate) fn check() -> Result<()> {
    run(&Args { check: true })
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = image::workspace().join(FOLDER);
    let wanted = files()?;
    let found = read(&folder)?;
    let stale: BTreeSet<&String> = wanted
        .keys()
        .chain(found.keys())
        .filter(|name| wanted.get(*name) != found.get(*name))
        .collect();
    if args.check {
        if let Some(first) = stale.first() {
            let help = "redraw and inspect it: cargo xtask gallery".to_owned();
            return Err(anyhow!("{FOLDER}/{first} is out of date")).context(host::Help(help));
        }
        println!("gallery: {} files are up to date", wanted.len());
        return Ok(());
    }
    for name in found.keys().filter(|name| !wanted.contains_key(*name)) {
        fs::remove_file(folder.join(name)).with_context(|| format!("cannot remove {name}"))?;
    }
    for (name, text) in &wanted {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&folder))
            .and_then(|()| fs::write(&path, text))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!("gallery: {} files in {FOLDER}, {} of them changed", wanted.len(), stale.len());
    Ok(())
}

/// Every file of the gallery, by its path in the folder.
fn files() -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let mut list = String::from(
        "# Gallery\n\nEvery screen of the [console](../console.md), drawn from samples by the \
         code that draws them on a machine.\n`cargo xtask gallery` redraws them; `cargo xtask \
         test` checks that they are up to date.\n",
    );
    for (name, snapshot) in samples::all() {
        let words = WORDS.iter().find(|(known, _)| *known == name).map_or("", |(_, words)| words);
        let _infallible =
            write!(list, "\n## {name}\n\n{words}\nAs text: [{name}.txt]({name}.txt).\n\n");
        let mut text = String::new();
        for page in Page::ALL {
            for size in [SMALL, LARGE] {
                let buffer = page_of(&snapshot, page, size);
                let file = file_name(name, page.title(), size);
                if size == SMALL {
                    let _infallible = writeln!(text, "{}\n\n{}", page.title(), plain(&buffer));
                    let _infallible = writeln!(list, "![{} page]({file})", page.title());
                }
                files.insert(file, svg::draw(&buffer));
            }
        }
        files.insert(format!("{name}.txt"), text);
    }
    let _infallible = write!(list, "\n## guru\n\nThe trapdoor.\n\n");
    for (name, guru) in gurus() {
        for size in [SMALL, LARGE] {
            let buffer = picture(size, |buffer| {
                guru::render(&guru, &guru::View::new(size.0, size.1), true, buffer);
            });
            let file = file_name("guru", name, size);
            if size == SMALL {
                let _infallible = writeln!(list, "![Guru meditation, {name}]({file})");
            }
            files.insert(file, svg::draw(&buffer));
        }
    }
    let _infallible = write!(list, "\n## dialogs\n\nOver a page.\n\n");
    for (name, page, keys) in dialogs() {
        let mut view = View::new(SMALL.0, SMALL.1);
        let snapshot = samples::ordinary();
        view.key(page.key(), &snapshot);
        for key in keys {
            let _command = view.key(key, &snapshot);
        }
        let buffer = picture(SMALL, |buffer| polis_tui::render(&snapshot, &view, buffer));
        let file = file_name("dialog", name, SMALL);
        let _infallible = writeln!(list, "![{name}]({file})");
        files.insert(file, svg::draw(&buffer));
    }
    files.insert("README.md".to_owned(), list);
    Ok(files)
}

fn gurus() -> [(&'static str, Guru); 5] {
    [
        ("ordinary", samples::guru()),
        ("locked", samples::guru_locked()),
        ("overflowing", samples::guru_overflowing()),
        ("wide", samples::guru_wide()),
        ("maintenance", samples::guru_in_maintenance()),
    ]
}

/// An overlay of a page: its name, the page and the keys that open it.
fn dialogs() -> [(&'static str, Page, Vec<Key>); 5] {
    let typed = |text: &str| text.chars().map(Key::Char).collect::<Vec<_>>();
    [
        ("help", Page::Boot, typed("?")),
        ("help-services", Page::Services, typed("?")),
        ("power", Page::Boot, vec![Key::F(10)]),
        ("reboot", Page::Boot, typed("PR")),
        ("search", Page::Logs, typed("/etcd")),
    ]
}

fn file_name(sample: &str, what: &str, (columns, rows): (u16, u16)) -> String {
    format!("{sample}-{}-{columns}x{rows}.svg", what.to_lowercase())
}

fn page_of(snapshot: &Snapshot, page: Page, (columns, rows): (u16, u16)) -> Buffer {
    let mut view = View::new(columns, rows);
    view.key(page.key(), snapshot);
    picture((columns, rows), |buffer| polis_tui::render(snapshot, &view, buffer))
}

fn picture((columns, rows): (u16, u16), draw: impl FnOnce(&mut Buffer)) -> Buffer {
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    draw(&mut buffer);
    buffer
}

/// The characters alone.
fn plain(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width).max(1);
    let rows = buffer.content().chunks(width);
    let row = |cells: &[polis_tui::ratatui::buffer::Cell]| {
        let row: String = cells.iter().map(|cell| cell.symbol()).collect();
        format!("{}\n", row.trim_end())
    };
    rows.map(row).collect()
}

/// The files in the folder, by name; empty without a folder.
fn read(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let Ok(entries) = fs::read_dir(folder) else { return Ok(files) };
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {FOLDER}"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let text = fs::read_to_string(entry.path())
            .with_context(|| format!("cannot read {FOLDER}/{name}"))?;
        files.insert(name, text);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_described_and_every_file_is_named_once() {
        let files = files().unwrap();
        let list = &files["README.md"];
        for (name, _) in samples::all() {
            assert!(WORDS.iter().any(|(known, _)| *known == name), "{name} has no words");
        }
        for name in files.keys().filter(|name| name.ends_with("-80x24.svg")) {
            assert_eq!(list.matches(&format!("({name})")).count(), 1, "{name}");
        }
    }
}
