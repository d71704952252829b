//! The modules of a crate of services use each other as its root promises.
//!
//! The tables have every existing edge, from the bottom up: a new edge is a line here,
//! which somebody has to want, and an edge that is gone leaves the table. The compiler
//! checks uses across crates.

use std::collections::{BTreeMap, BTreeSet};

use crate::references::references;
use crate::sources::Sources;

type Edges = BTreeMap<String, BTreeSet<String>>;

/// A crate, by its root; and each of its modules with those that it uses: only modules above
/// it, except for [`KNOTS`].
struct Table {
    root: &'static str,
    modules: &'static [(&'static str, &'static str)],
}

const TABLES: [Table; 3] = [
    Table {
        root: "src/machine/src/lib.rs",
        modules: &[
            ("tpm", ""),
            ("storage", ""),
            ("update", "storage"),
            ("install", "storage"),
            ("parameters", "storage"),
            ("mirror", "install parameters storage"),
            ("volumes", "install parameters storage"),
            ("network", "parameters"),
            ("time", "network parameters storage"),
        ],
    },
    Table {
        root: "src/control/src/lib.rs",
        modules: &[("consensus", ""), ("curator", "consensus"), ("cluster", "consensus curator")],
    },
    Table {
        root: "src/node/src/lib.rs",
        modules: &[
            // The consequences of a membership, and what operators ask of this node.
            ("firewall", ""),
            ("forwarding", ""),
            ("shipping", ""),
            ("maintenance", "firewall"),
            ("management", "firewall forwarding shipping"),
            ("agent", "firewall forwarding management shipping"),
            ("roles", ""),
            // The screen of the node.
            ("console", "shipping"),
            // The process, and the tree in it.
            ("injection", ""),
            (
                "root",
                "agent console daemon firewall forwarding injection maintenance management roles \
                 shipping",
            ),
            ("daemon", "injection maintenance root"),
        ],
    },
];

/// Modules that know each other: `daemon` is the process around the tree that `root`
/// plants, and has services of its own in it.
const KNOTS: [(&str, &str); 1] = [("root", "daemon")];

#[test]
fn every_edge_between_modules_is_in_its_table_and_the_other_way_round() {
    for Table { root, modules } in TABLES {
        let table = modules.iter().map(|(module, uses)| {
            let uses = uses.split_whitespace().map(str::to_owned).collect();
            ((*module).to_owned(), uses)
        });
        let (table, found) = (table.collect::<Edges>(), edges(root));
        let listed = |edges: &Edges| {
            let lines = edges.iter().flat_map(|(module, uses)| {
                uses.iter().map(move |used| format!("{module} uses {used}"))
            });
            lines.collect::<BTreeSet<_>>()
        };
        let (allowed, found_edges) = (listed(&table), listed(&found));
        let new: Vec<_> = found_edges.difference(&allowed).collect();
        let gone: Vec<_> = allowed.difference(&found_edges).collect();
        assert!(new.is_empty(), "{root}: the table does not have these edges: {new:#?}");
        assert!(gone.is_empty(), "{root}: these edges are gone, and leave the table: {gone:#?}");
        assert!(table.keys().eq(found.keys()), "a module has come or gone: {:?}", found.keys());
    }
}

#[test]
fn a_module_uses_only_what_stands_above_it() {
    for Table { modules, .. } in TABLES {
        let mut above = BTreeSet::new();
        for &(module, uses) in modules {
            for used in uses.split_whitespace() {
                let knot = KNOTS.contains(&(module, used));
                assert!(above.contains(used) != knot, "{module} uses {used}");
            }
            above.insert(module);
        }
    }
}

/// The modules that each module of a crate uses.
fn edges(root: &str) -> Edges {
    let mut edges = Edges::new();
    for (file, named) in references(&Sources::read(root)) {
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
