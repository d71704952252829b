//! The arrows between the crates are those of the picture in `docs/architecture.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use crate::sources::workspace;

/// Each crate, and the crates that it links; what only its tests link is left out.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// The folders of the crates, and the names that the picture gives them.
const CRATES: [(&str, &str); 20] = [
    ("benches", "benches"),
    ("image", "image"),
    ("proto", "proto"),
    ("qemu", "qemu"),
    ("src/base", "base"),
    ("src/bundle", "bundle"),
    ("src/control", "control"),
    ("src/demo", "demo"),
    ("src/init", "init"),
    ("src/layout", "layout"),
    ("src/machine", "machine"),
    ("src/node", "node"),
    ("src/pause", "pause"),
    ("src/polisctl", "polisctl"),
    ("src/runtime", "runtime"),
    ("src/wire", "wire"),
    ("src/workload", "workload"),
    ("tests", "tests"),
    ("tui", "tui"),
    ("xtask", "xtask"),
];

#[test]
fn the_picture_of_the_crates_has_the_arrows_that_exist() {
    let page = fs::read_to_string(workspace().join("docs/architecture.md")).unwrap();
    let map = page.split("\n## Code map\n").nth(1).expect("the page has a code map");
    let picture = map.split("```").nth(1).expect("the code map begins with a picture");
    assert_eq!(drawn(picture), linked());
}

#[test]
fn arrows_are_read_from_a_picture_and_from_a_manifest() {
    let arrows = drawn("text\n a, b --> c d\n c    -->        nothing below\n c -->\n");
    let expected = [("a", "c d"), ("b", "c d"), ("c", "nothing below")];
    assert_eq!(arrows, expected.map(|(from, to)| (from.to_owned(), words(to))).into());
    let manifest = "[dependencies]\npolis-a.workspace = true\nother = \"1\"\n\
                    polis-b = { workspace = true }\n\n[dev-dependencies]\npolis-c = \"1\"\n";
    assert_eq!(links(manifest), words("a b"));
}

/// The arrows of a picture: lines of `name, name --> name name`.
fn drawn(picture: &str) -> Arrows {
    let mut arrows = Arrows::new();
    for (from, to) in picture.lines().filter_map(|line| line.split_once("-->")) {
        for name in from.split(',') {
            arrows.entry(name.trim().to_owned()).or_default().extend(words(to));
        }
    }
    arrows
}

fn words(text: &str) -> BTreeSet<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// The arrows of the manifests, crates that link no other left out.
fn linked() -> Arrows {
    let arrows = CRATES.map(|(folder, name)| {
        let manifest = workspace().join(folder).join("Cargo.toml");
        (name.to_owned(), links(&fs::read_to_string(manifest).unwrap()))
    });
    arrows.into_iter().filter(|(_, to)| !to.is_empty()).collect()
}

/// The crates of this workspace among the dependencies of a manifest.
fn links(manifest: &str) -> BTreeSet<String> {
    let after = manifest.split("\n[dependencies]\n").nth(1);
    let section = after.or(manifest.strip_prefix("[dependencies]\n")).unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.strip_prefix("polis-"));
    let end = |name: &str| name.find(['.', ' ', '=']).unwrap_or(name.len());
    names.map(|name| name[..end(name)].to_owned()).collect()
}
