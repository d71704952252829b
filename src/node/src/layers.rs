//! The check of the layers: the modules of this crate use each other as `lib.rs`
//! promises.
//!
//! The table has every existing edge, from the bottom up: a new edge is a line here,
//! which somebody has to want, and an edge that is gone leaves the table. Tests may use
//! any module. The compiler checks uses across crates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Edges = BTreeMap<String, BTreeSet<String>>;

/// Each module, and the modules that it uses: only modules above it, except for
/// [`KNOTS`].
const MODULES: &[(&str, &str)] = &[
    // The domains.
    ("tpm", ""),
    ("storage", ""),
    ("parameters", ""),
    ("network", "parameters"),
    ("consensus", ""),
    ("curator", "consensus network parameters"),
    ("cluster", "consensus curator network parameters storage tpm"),
    ("workload", "cluster consensus network storage"),
    ("agent", "cluster consensus network parameters storage workload"),
    ("roles", "cluster consensus curator network"),
    // The display of the node.
    ("management", "cluster consensus workload"),
    ("console", "cluster consensus network parameters storage workload"),
    // The process, and the tree in it.
    ("injection", "consensus"),
    (
        "root",
        "cluster consensus console curator daemon injection agent management network parameters \
         roles storage workload",
    ),
    ("daemon", "injection root storage"),
];

/// Modules that know each other: `daemon` is the process around the tree that `root`
/// plants, and has services of its own in it.
const KNOTS: [(&str, &str); 1] = [("root", "daemon")];

#[test]
fn every_edge_between_modules_is_in_the_table_and_the_other_way_round() {
    let table = MODULES.iter().map(|(module, uses)| {
        let uses = uses.split_whitespace().map(str::to_owned).collect();
        ((*module).to_owned(), uses)
    });
    let (table, found) = (table.collect::<Edges>(), edges());
    let listed = |edges: &Edges| {
        let lines = edges.iter().flat_map(|(module, uses)| {
            uses.iter().map(move |used| format!("{module} uses {used}"))
        });
        lines.collect::<BTreeSet<_>>()
    };
    let (allowed, found_edges) = (listed(&table), listed(&found));
    let new: Vec<_> = found_edges.difference(&allowed).collect();
    let gone: Vec<_> = allowed.difference(&found_edges).collect();
    assert!(new.is_empty(), "the layers do not have these edges: {new:#?}");
    assert!(gone.is_empty(), "these edges are gone, and leave the table: {gone:#?}");
    assert!(table.keys().eq(found.keys()), "a module has come or gone: {:?}", found.keys());
}

#[test]
fn a_module_uses_only_what_stands_above_it() {
    let mut above = BTreeSet::new();
    for &(module, uses) in MODULES {
        for used in uses.split_whitespace() {
            let knot = KNOTS.contains(&(module, used));
            assert!(above.contains(used) != knot, "{module} uses {used}");
        }
        above.insert(module);
    }
}

#[test]
fn uses_are_found_in_paths_and_in_groups() {
    let code =
        "use crate::{a, b::{self, x}};\n// crate::c\nfn f() { crate::d::g(); mycrate::e(); }";
    let tests = "\n#[cfg(test)]\nmod tests {\n    use crate::f;\n}\n";
    let found = uses(&format!("{code}{tests}"));
    assert_eq!(found, ["a", "b", "d"].map(str::to_owned).into());
}

/// The modules that the sources use, by top-level module.
fn edges() -> Edges {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut edges = Edges::new();
    for entry in std::fs::read_dir(&src).unwrap() {
        let path = entry.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if !["lib", "layers", "main"].contains(&module.as_str()) {
            let mut found = BTreeSet::new();
            collect(&path, &mut found);
            found.remove(&module);
            edges.insert(module, found);
        }
    }
    edges
}

fn collect(path: &Path, found: &mut BTreeSet<String>) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            collect(&entry.unwrap().path(), found);
        }
        return;
    }
    let name = path.file_stem().unwrap().to_str().unwrap();
    if !["tests", "testing"].contains(&name) && !name.ends_with("_tests") {
        found.extend(uses(&std::fs::read_to_string(path).unwrap()));
    }
}

/// The modules of this crate that `source` names, tests and comments left out.
fn uses(source: &str) -> BTreeSet<String> {
    let is_comment = |line: &&str| line.trim_start().starts_with("//");
    let code: Vec<_> = source.lines().filter(|line| !is_comment(line)).collect();
    let tests = code.windows(2).position(|lines| {
        lines[0] == "#[cfg(test)]" && lines[1].starts_with("mod ") && lines[1].ends_with('{')
    });
    let code = code[..tests.unwrap_or(code.len())].join("\n");
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(group) => found.extend(heads(group)),
            None => found.extend(word(rest)),
        }
    }
    found
}

/// The first words of the imports of a group.
fn heads(group: &str) -> Vec<String> {
    let mut depth = 0;
    let mut items = vec![String::new()];
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => items.push(String::new()),
            c => items.last_mut().unwrap().push(c),
        }
    }
    items.iter().filter_map(|item| word(item.trim_start())).collect()
}

fn word(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    // A macro or a constant of the crate is not a module.
    let word = &text[..end];
    word.starts_with(|c: char| c.is_ascii_lowercase()).then(|| word.to_owned())
}
