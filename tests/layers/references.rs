//! Which file names items of which file.
//!
//! A name stands for the file that defines it: one that goes through re-exports of a
//! `mod.rs` leads to the module inside. An import of a module names no item, so that only
//! the paths through it count.

use std::collections::{BTreeMap, BTreeSet};

use crate::sources::{Id, Module, Names, Sources};

/// Each file, and the files whose items it names, itself left out.
pub(crate) type References = BTreeMap<String, BTreeSet<String>>;

/// How many re-exports a name goes through at most. Names that lead back to themselves
/// exist where an import has the name of its crate (`use ring::ring`).
const HOPS: usize = 8;

/// The item that a path leads to.
#[derive(Clone, Copy, PartialEq)]
enum Target {
    Module(Id),
    /// An item of this module.
    Item(Id),
}

/// Reads the references between the files of a crate.
pub(crate) fn references(sources: &Sources) -> References {
    let mut found = References::new();
    for (id, module) in sources.modules.iter().enumerate() {
        let files = found.entry(module.file.clone()).or_default();
        files.extend(named(sources, id, module).map(|id| sources.modules[id].file.clone()));
        files.remove(&module.file);
    }
    found
}

/// The modules whose items the module `id` names.
fn named<'a>(
    sources: &'a Sources,
    id: Id,
    module: &'a Module,
) -> impl Iterator<Item = Id> + use<'a> {
    let imports = module.imports.iter().filter_map(move |import| {
        match (find(sources, id, &import.path, HOPS)?, &import.name) {
            (Target::Module(target), None) | (Target::Item(target), _) => Some(target),
            (Target::Module(_), Some(_)) => None,
        }
    });
    let paths = module.paths.iter().filter_map(move |path| match find(sources, id, path, HOPS)? {
        Target::Item(target) => Some(target),
        Target::Module(_) => None,
    });
    imports.chain(paths)
}

/// Follows `path` from the module `from`: `None` for what is outside of the crate.
fn find(sources: &Sources, from: Id, path: &[String], hops: usize) -> Option<Target> {
    let (first, rest) = path.split_first()?;
    let module = &sources.modules[from];
    match first.as_str() {
        "crate" => inside(sources, 0, rest, hops),
        "self" => inside(sources, from, rest, hops),
        "super" => {
            let parent = module.parent?;
            // `super::super` goes on from there.
            if rest.first().is_some_and(|word| word == "super") {
                return find(sources, parent, rest, hops);
            }
            inside(sources, parent, rest, hops)
        }
        name if has(module, name) || glob(sources, from, name, hops).is_some() => {
            inside(sources, from, path, hops)
        }
        _ => None,
    }
}

/// Follows `path` down from the module `at`.
fn inside(sources: &Sources, at: Id, path: &[String], hops: usize) -> Option<Target> {
    let Some((first, rest)) = path.split_first() else { return Some(Target::Module(at)) };
    let module = &sources.modules[at];
    if let Some(child) = module.children.get(first) {
        return inside(sources, *child, rest, hops);
    }
    if module.items.contains(first) {
        return Some(Target::Item(at));
    }
    let hops = hops.checked_sub(1)?;
    if let Some(import) = module.imports.iter().find(|import| import.name.as_ref() == Some(first)) {
        let path: Names = import.path.iter().chain(rest).cloned().collect();
        return find(sources, at, &path, hops);
    }
    if let Some(target) = glob(sources, at, first, hops) {
        return inside(sources, target, path, hops);
    }
    // Something that a macro defines.
    Some(Target::Item(at))
}

/// The module from which `use …::*` brings `name` to the module `at`.
fn glob(sources: &Sources, at: Id, name: &str, hops: usize) -> Option<Id> {
    let hops = hops.checked_sub(1)?;
    let module = &sources.modules[at];
    let globs = module.imports.iter().filter(|import| import.name.is_none());
    globs.filter_map(|import| find(sources, at, &import.path, hops)).find_map(|target| match target
    {
        Target::Module(target) if target != at => {
            has(&sources.modules[target], name).then_some(target)
        }
        Target::Module(_) | Target::Item(_) => None,
    })
}

/// Whether the module defines or imports this name.
fn has(module: &Module, name: &str) -> bool {
    module.children.contains_key(name)
        || module.items.contains(name)
        || module.imports.iter().any(|import| import.name.as_deref() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The references of a crate as lines, `a/b -> c`.
    fn lines(code: &str) -> Vec<String> {
        let found = references(&Sources::of(code));
        let lines = found
            .iter()
            .flat_map(|(file, files)| files.iter().map(move |named| format!("{file} -> {named}")));
        lines.collect()
    }

    #[test]
    fn a_name_leads_through_re_exports_to_the_file_that_defines_it() {
        let code = "mod a { mod b { pub struct B; } pub use self::b::B; }
                    mod c { use crate::a::B; }
                    mod d { use crate::a; fn f() { a::B::new() } }
                    mod e { use super::a::*; fn f() -> B { B::new() } }";
        let expected = ["a -> a/b", "c -> a/b", "d -> a/b", "e -> a", "e -> a/b"];
        assert_eq!(lines(code), expected);
    }

    #[test]
    fn groups_renames_and_arguments_of_macros_count() {
        let code = "mod a { pub fn f() {} }
                    mod b { pub fn g() {} pub struct B; }
                    mod c { use crate::{a::f as other, b::{self, B}}; }
                    mod d { fn f() { print!(\"{}\", crate::b::g()) } }
                    mod e { use crate::b as other; fn f() { select! { x = other::g() => {} } } }";
        assert_eq!(lines(code), ["c -> a", "c -> b", "d -> b", "e -> b"]);
    }

    #[test]
    fn an_import_of_a_module_alone_names_nothing() {
        let code = "mod a { pub fn f() {} } mod b { use crate::a; use std::fmt; }";
        assert_eq!(lines(code), <[&str; 0]>::default());
    }

    #[test]
    fn tests_comments_and_other_crates_do_not_count() {
        let code = "mod a { pub fn f() {} }
                    mod b {
                        // crate::a::f
                        #[cfg(test)] use crate::a::f;
                        #[cfg(test)] mod tests { use crate::a::f; }
                        #[cfg(any(test, feature = \"testing\"))] mod testing { use crate::a::f; }
                        struct B; impl B { #[cfg(test)] fn g() { crate::a::f() } }
                        fn h() { other::a::f() }
                    }
                    mod c { #[cfg(feature = \"x\")] mod d { use crate::a::f; } }";
        assert_eq!(lines(code), ["c/d -> a"]);
    }
}
