//! The modules of a crate, each with its imports and the paths that its code names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt as _;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Ident, ImplItem, Item, ItemMod, Lit, Meta, UseTree};

/// A module, by its place in [`Sources::modules`].
pub(crate) type Id = usize;

/// A path as it is written: `["super", "Error"]`.
pub(crate) type Names = Vec<String>;

/// A crate.
pub(crate) struct Sources {
    /// The root first, and each module after the one that contains it.
    pub(crate) modules: Vec<Module>,
}

/// A module, which is a file or a block in one.
pub(crate) struct Module {
    /// The file, relative to the folder of the root.
    pub(crate) file: String,
    pub(crate) parent: Option<Id>,
    pub(crate) children: BTreeMap<String, Id>,
    pub(crate) imports: Vec<Import>,
    /// Paths of two and more words in code, those in the arguments of macros included.
    pub(crate) paths: BTreeSet<Names>,
    /// The items that the module defines itself.
    pub(crate) items: BTreeSet<String>,
}

/// One name that a `use` brings in.
pub(crate) struct Import {
    pub(crate) path: Names,
    /// The name in this module, or `None` for all names of the path (`*`).
    pub(crate) name: Option<String>,
}

impl Sources {
    /// Reads the crate with the root `root`, relative to the workspace.
    pub(crate) fn read(root: &str) -> Self {
        let root = workspace().join(root);
        let folder = root.parent().expect("a root is in a folder").to_owned();
        let mut sources = Self { modules: Vec::new() };
        sources.add(&folder, &root, &folder, None);
        sources
    }

    /// A crate of one file with modules in it, for the tests.
    pub(crate) fn of(code: &str) -> Self {
        let mut sources = Self { modules: Vec::new() };
        let root = sources.module("lib.rs".to_owned(), None);
        let file = syn::parse_file(code).expect("the code of a test is valid");
        Reader { sources: &mut sources, module: root, children: None }.visit_file(&file);
        for id in 1..sources.modules.len() {
            sources.modules[id].file = sources.path(id).join("/");
        }
        sources
    }

    /// The names of the modules from the root to `id`, the root left out.
    pub(crate) fn path(&self, id: Id) -> Names {
        let module = &self.modules[id];
        let Some(parent) = module.parent else { return Names::new() };
        let mut path = self.path(parent);
        let name = self.modules[parent].children.iter().find(|(_, child)| **child == id);
        path.push(name.expect("a parent knows its children").0.clone());
        path
    }

    /// Adds the module in `file`, and the modules that it declares, whose files are in
    /// `children`.
    fn add(&mut self, folder: &Path, file: &Path, children: &Path, parent: Option<Id>) -> Id {
        let relative = file.strip_prefix(folder).expect("a module is below its root");
        let id = self.module(relative.display().to_string(), parent);
        let code = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let parsed = syn::parse_file(&code).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let place = Place { folder, file, children };
        Reader { sources: self, module: id, children: Some(place) }.visit_file(&parsed);
        id
    }

    fn module(&mut self, file: String, parent: Option<Id>) -> Id {
        self.modules.push(Module {
            file,
            parent,
            children: BTreeMap::new(),
            imports: Vec::new(),
            paths: BTreeSet::new(),
            items: BTreeSet::new(),
        });
        self.modules.len() - 1
    }
}

/// The folder of the workspace.
pub(crate) fn workspace() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    folder.expect("this crate is two folders deep").to_owned()
}

/// Where the files of the modules of a module are.
#[derive(Clone, Copy)]
struct Place<'a> {
    folder: &'a Path,
    file: &'a Path,
    children: &'a Path,
}

/// Reads one module.
struct Reader<'a> {
    sources: &'a mut Sources,
    module: Id,
    /// `None` in a test without files.
    children: Option<Place<'a>>,
}

impl Reader<'_> {
    fn here(&mut self) -> &mut Module {
        &mut self.sources.modules[self.module]
    }

    fn child(&mut self, item: &ItemMod) {
        let name = item.ident.unraw().to_string();
        let id = match (&item.content, self.children) {
            (Some((_, items)), place) => {
                let file = self.here().file.clone();
                let id = self.sources.module(file, Some(self.module));
                let inner = place.map(|place| place.children.join(&name));
                let children = place
                    .zip(inner.as_deref())
                    .map(|(place, children)| Place { children, ..place });
                let mut reader = Reader { sources: self.sources, module: id, children };
                items.iter().for_each(|item| reader.visit_item(item));
                id
            }
            (None, Some(place)) => {
                let (file, children) = files(place, &name, &item.attrs);
                self.sources.add(place.folder, &file, &children, Some(self.module))
            }
            (None, None) => panic!("a test has no file of the module {name}"),
        };
        self.here().children.insert(name, id);
    }

    fn import(&mut self, tree: &UseTree, before: &[String]) {
        let with = |ident: &Ident| -> Names {
            before.iter().cloned().chain([ident.unraw().to_string()]).collect()
        };
        // `{self}` names the path before it.
        let named = |ident: &Ident| if ident == "self" { before.to_vec() } else { with(ident) };
        let (path, name) = match tree {
            UseTree::Path(path) => return self.import(&path.tree, &with(&path.ident)),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.import(tree, before));
            }
            UseTree::Glob(_) => (before.to_vec(), None),
            UseTree::Name(name) => {
                let path = named(&name.ident);
                let last = path.last().cloned();
                (path, last)
            }
            UseTree::Rename(name) => (named(&name.ident), Some(name.rename.unraw().to_string())),
        };
        self.here().imports.push(Import { path, name });
    }

    /// Paths among the tokens of a macro's arguments.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = Names::new();
        // How many colons stand after the last word of the path.
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.close(&mut path);
                    }
                    path.push(ident.unraw().to_string());
                    colons = 0;
                }
                TokenTree::Group(group) => {
                    self.close(&mut path);
                    self.tokens(group.stream());
                }
                _ => self.close(&mut path),
            }
        }
        self.close(&mut path);
    }

    fn close(&mut self, path: &mut Names) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.here().paths.insert(path);
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = head(item);
        if attributes.iter().any(is_of_tests) {
            return;
        }
        if let Some(name) = name {
            self.here().items.insert(name.unraw().to_string());
        }
        match item {
            Item::Mod(item) => self.child(item),
            Item::Use(item) => self.import(&item.tree, &[]),
            item => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !matches!(item, ImplItem::Fn(function) if function.attrs.iter().any(is_of_tests)) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut names = path.segments.iter().map(|part| part.ident.unraw().to_string()).collect();
        self.close(&mut names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
    }
}

/// The attributes of an item, and the name that it defines.
fn head(item: &Item) -> (&[Attribute], Option<&Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Impl(item) => (&item.attrs, None),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Mod(item) => (&item.attrs, None),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

/// Whether an item is there in tests only: `cfg(test)`, or `cfg(any(test, …))`.
fn is_of_tests(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let condition: String = list.tokens.to_string().split_whitespace().collect();
    list.path.is_ident("cfg") && (condition == "test" || condition.starts_with("any(test,"))
}

/// The file of the module `name`, and the folder of its own modules.
fn files(place: Place<'_>, name: &str, attributes: &[Attribute]) -> (PathBuf, PathBuf) {
    if let Some(path) = attributes.iter().find_map(path_attribute) {
        let folder = place.file.parent().expect("a file is in a folder");
        let file = folder.join(path);
        let children = file.parent().expect("a file is in a folder").to_owned();
        return (file, children);
    }
    let folder = place.children.join(name);
    let own = folder.join("mod.rs");
    let file = if own.is_file() { own } else { place.children.join(format!("{name}.rs")) };
    (file, folder)
}

fn path_attribute(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else { return None };
    match &pair.value {
        Expr::Lit(value) if pair.path.is_ident("path") => match &value.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}
