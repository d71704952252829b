//! The licence terms of the Go modules that a program is linked from.
//!
//! `go list` names every package of a program, with its module. The terms are the files
//! by their usual names in the folder of the package and in those above it, up to the
//! module's: a module may contain code of others, with terms of its own.
//!
//! Invariants:
//! - A program whose modules do not all have terms is not built.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::error::{At as _, Error, Result};

/// The output of `go list` for a package: its module and version, the module's folder, its
/// own folder. Packages of Go itself and of ours print no module.
pub(super) const FORMAT: &str = "{{with .Module}}{{if not .Main}}\
    {{with .Replace}}{{.Path}}@{{.Version}}{{else}}{{.Path}}@{{.Version}}{{end}}\
    \t{{.Dir}}\t{{$.Dir}}{{end}}{{end}}";

/// The beginnings of the names of files with terms, in capitals.
const NAMES: &[&str] = &["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "PATENTS"];

/// Texts by path: `<module>@<version>/<file>`.
pub(super) type Terms = BTreeMap<String, String>;

/// Reads the terms of all packages that `go list` has printed in [`FORMAT`].
pub(super) fn collect(listed: &str) -> Result<Terms> {
    let mut terms = Terms::new();
    let mut modules: BTreeMap<&str, bool> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for line in listed.lines() {
        let mut fields = line.split('\t');
        let (Some(module), Some(root), Some(package)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let root = Path::new(root);
        let mut folder = Some(Path::new(package));
        while let Some(inside) = folder.filter(|folder| folder.starts_with(root)) {
            if !seen.insert(inside) {
                break;
            }
            for file in files(inside)? {
                let name = file.strip_prefix(root).unwrap_or(&file).display();
                let text = fs::read(&file).at("read", &file)?;
                let text = String::from_utf8_lossy(&text).into_owned();
                terms.insert(format!("{module}/{name}"), text);
                modules.insert(module, true);
            }
            folder = inside.parent();
        }
        modules.entry(module).or_insert(false);
    }
    match modules.iter().find(|(_, has)| !**has) {
        Some((module, _)) => Err(Error::NoTerms { module: (*module).to_owned() }),
        None => Ok(terms),
    }
}

/// The files with terms in one folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).at("list", folder)? {
        let entry = entry.at("list", folder)?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let code = Path::new(&name).extension().is_some_and(|extension| extension == "GO");
        if NAMES.iter().any(|start| name.starts_with(start)) && !code && entry.path().is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_those_of_the_module_and_of_the_code_of_others_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("x@v1");
        fs::create_dir_all(root.join("third/party")).unwrap();
        fs::create_dir_all(root.join("unused")).unwrap();
        for (path, text) in [
            ("LICENSE", "free"),
            ("license.go", "package x"),
            ("third/Notice.txt", "of others"),
            ("unused/COPYING", "not linked"),
        ] {
            fs::write(root.join(path), text).unwrap();
        }
        let line = |package: &str| {
            format!("example.org/x@v1\t{}\t{}\n", root.display(), root.join(package).display())
        };
        let terms = collect(&format!("\n{}", line("third/party"))).unwrap();
        let expected = [
            ("example.org/x@v1/LICENSE", "free"),
            ("example.org/x@v1/third/Notice.txt", "of others"),
        ];
        assert_eq!(terms, expected.map(|(path, text)| (path.to_owned(), text.to_owned())).into());
        fs::remove_file(root.join("LICENSE")).unwrap();
        let error = collect(&line("")).unwrap_err();
        assert_eq!(error.to_string(), "the Go module example.org/x@v1 has no licence terms");
    }
}
