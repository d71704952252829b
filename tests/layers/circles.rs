//! No two concepts need each other: circles of files that name each other.
//!
//! A module and the modules inside it are one concept: a file may name the items of the
//! modules that contain it, and those may name its own. So a circle is a fault unless it
//! is gone once the names of one of its files, which contains all the others, are left
//! out.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::Graph;
use petgraph::algo::tarjan_scc;

use crate::references::{References, references};
use crate::sources::{Names, Sources};

/// The root of every crate that people wrote: `proto` is generated.
const ROOTS: [&str; 20] = [
    "benches/curator/main.rs",
    "image/src/lib.rs",
    "qemu/src/lib.rs",
    "src/base/src/lib.rs",
    "src/control/src/lib.rs",
    "src/demo/src/lib.rs",
    "src/init/src/lib.rs",
    "src/machine/src/lib.rs",
    "src/node/src/lib.rs",
    "src/polisctl/src/lib.rs",
    "src/runtime/src/lib.rs",
    "src/wire/src/lib.rs",
    "src/workload/src/lib.rs",
    "tests/e2e/main.rs",
    "tests/etcd/main.rs",
    "tests/harness/lib.rs",
    "tests/kube/main.rs",
    "tests/tpm/main.rs",
    "tui/src/lib.rs",
    "xtask/src/main.rs",
];

#[test]
fn no_circle_of_files_crosses_concepts() {
    let mut found = Vec::new();
    for root in ROOTS {
        let sources = Sources::read(root);
        let graph = references(&sources);
        for circle in circles(&graph, &modules(&sources)) {
            found.push(format!("{root}: {}", picture(&graph, &circle)));
        }
    }
    assert!(found.is_empty(), "{} circles:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_circle_of_two_concepts_is_found_and_one_of_a_module_and_its_parts_is_not() {
    let circle = |code: &str| {
        let sources = Sources::of(code);
        circles(&references(&sources), &modules(&sources))
    };
    let parts = "mod a { use self::b::B; pub struct A; mod b { use super::A; pub struct B; } }";
    assert_eq!(circle(parts), Vec::<BTreeSet<String>>::new());
    let two = "mod a { use crate::b::B; pub struct A; } mod b { use crate::a::A; pub struct B; }";
    assert_eq!(circle(two), [["a", "b"].map(str::to_owned).into()]);
    let siblings = format!("mod c {{ {two} }}").replace("crate::", "super::");
    assert_eq!(circle(&siblings), [["c/a", "c/b"].map(str::to_owned).into()]);
    let around = "mod a { use crate::c::C; pub struct A; mod b { use super::A; pub struct B; } }
                  mod c { use crate::a::b::B; pub struct C; }";
    assert_eq!(circle(around), [["a", "a/b", "c"].map(str::to_owned).into()]);
}

/// The module of each file, as the names from the root.
fn modules(sources: &Sources) -> BTreeMap<String, Names> {
    let mut modules = BTreeMap::new();
    for (id, module) in sources.modules.iter().enumerate() {
        // A block in a file comes after the module of the file itself.
        modules.entry(module.file.clone()).or_insert_with(|| sources.path(id));
    }
    modules
}

/// The circles that cross concepts.
fn circles(graph: &References, modules: &BTreeMap<String, Names>) -> Vec<BTreeSet<String>> {
    let mut found = Vec::new();
    for circle in components(graph) {
        let contains =
            |outer: &String| circle.iter().all(|file| modules[file].starts_with(&modules[outer]));
        match circle.iter().find(|file| contains(file)) {
            None => found.push(circle),
            Some(outer) => {
                let rest = circle.iter().map(|file| {
                    let names = graph[file].intersection(&circle).filter(|named| *named != outer);
                    (file.clone(), names.cloned().collect())
                });
                found.extend(circles(&rest.collect(), modules));
            }
        }
    }
    found
}

/// The largest sets of files in which each leads to each other.
fn components(graph: &References) -> Vec<BTreeSet<String>> {
    let mut arrows = Graph::<&String, ()>::new();
    let nodes: BTreeMap<_, _> = graph.keys().map(|file| (file, arrows.add_node(file))).collect();
    for (file, names) in graph {
        for named in names {
            arrows.add_edge(nodes[file], nodes[named], ());
        }
    }
    let sets = tarjan_scc(&arrows).into_iter().filter(|set| set.len() > 1);
    sets.map(|set| set.into_iter().map(|node| arrows[node].clone()).collect()).collect()
}

/// A circle with its arrows, a line for each file.
fn picture(graph: &References, circle: &BTreeSet<String>) -> String {
    let lines = circle.iter().map(|file| {
        let names: Vec<_> = graph[file].intersection(circle).map(String::as_str).collect();
        format!("\n    {file} names {}", names.join(", "))
    });
    lines.collect()
}
