//! Files that appear whole or not at all: written under a name beside their own, then renamed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::error::{At as _, Result};

/// Lets `write` make a file at the path that it is given, and renames that file to `path`. After
/// an error nothing unfinished is left, and what was at `path` is still there.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let draft = name(path);
    let outcome = write(&draft).and_then(|()| fs::rename(&draft, path).at("put in place", path));
    if outcome.is_err() {
        // The unfinished file is useless; a failure to remove it does not matter to the caller.
        fs::remove_file(&draft).unwrap_or_default();
    }
    outcome
}

/// A name beside `path`, for an unfinished file.
pub(crate) fn name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_a_failure_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let [file, taken] = ["file", "taken"].map(|name| folder.path().join(name));
        let put = |to: &Path, text| replace(to, |draft| fs::write(draft, text).at("write", to));
        put(&file, "first").unwrap();
        replace(&file, |draft| {
            fs::write(draft, "half").at("write", draft)?;
            fs::read(folder.path().join("none")).map(drop).at("read", draft)
        })
        .unwrap_err();
        assert_eq!(fs::read_to_string(&file).unwrap(), "first");
        put(&file, "second").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "second");
        // A folder has the name.
        fs::create_dir(&taken).unwrap();
        put(&taken, "third").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
