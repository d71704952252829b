//! The modules of the node use each other as `src/node/src/lib.rs` promises.
//!
//! The table has every existing edge, from the bottom up: a new edge is a line here,
//! which somebody has to want, and an edge that is gone leaves the table. The compiler
//! checks uses across crates.

use std::collections::{BTreeMap, BTreeSet};

use crate::references::references;
use crate::sources::Sources;

type Edges = BTreeMap<String, BTreeSet<String>>;

/// Each module, and the modules that it uses: only modules above it, except for
/// [`KNOTS`].
const MODULES: &[(&str, &str)] = &[
    // The domains.
    ("tpm", ""),
    ("storage", ""),
    ("update", "storage"),
    ("parameters", ""),
    ("network", "parameters"),
    ("consensus", ""),
    ("curator", "consensus network parameters"),
    ("cluster", "consensus curator network parameters storage tpm"),
    ("workload", "cluster consensus network storage"),
    ("agent", "cluster consensus network parameters storage update workload"),
    ("roles", "cluster consensus curator network"),
    // The display of the node.
    ("management", "cluster consensus update workload"),
    ("console", "cluster consensus network parameters storage workload"),
    // The process, and the tree in it.
    ("injection", "consensus workload"),
    (
        "root",
        "cluster consensus console curator daemon injection agent management network parameters \
         roles storage update workload",
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

/// The modules that each module uses.
fn edges() -> Edges {
    let mut edges = Edges::new();
    for (file, named) in references(&Sources::read("src/node/src/lib.rs")) {
        let Some(module) = top(&file) else { continue };
        let used = named.iter().filter_map(|file| top(file)).filter(|used| *used != module);
        edges.entry(module.to_owned()).or_default().extend(used.map(str::to_owned));
    }
    edges
}

/// The module below the root that a file belongs to.
fn top(file: &str) -> Option<&str> {
    let name = file.split(['/', '.']).next()?;
    (name != "lib").then_some(name)
}
