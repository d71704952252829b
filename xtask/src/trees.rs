//! Checks what `init` and `polisctl` link: no async runtime, and no crate of the node.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};

/// A program's package, the packages that must not be in its tree, and why.
const RULES: [(&str, &[&str], &str); 2] = [
    (
        "polis-init",
        &["tokio", "async-std", "smol", "mio", "polis-runtime", "polis-wire", "polis-machine"],
        "nothing that can break a runtime may break PID 1",
    ),
    (
        "polisctl",
        &["polis-machine", "polis-init", "etcd-client", "rtnetlink", "mozim"],
        "the operator's program knows the node by its API only",
    ),
];

/// Prints the size of each tree.
///
/// # Errors
///
/// When a tree has a package that its rule excludes, or cargo fails.
pub(crate) fn check() -> Result<()> {
    for (package, excluded, reason) in RULES {
        let tree = dependencies(package)?;
        let crates = tree.len() - 1;
        println!("{package}: {crates} crates");
        let found: Vec<_> = excluded.iter().filter(|name| tree.contains(**name)).collect();
        ensure!(found.is_empty(), "{package} links {found:?}: {reason}");
    }
    Ok(())
}

/// The names in the tree of `package`, itself included.
fn dependencies(package: &str) -> Result<BTreeSet<String>> {
    let output = crate::image::cargo(&crate::image::workspace())
        .args(["tree", "--package", package, "--edges", "normal", "--prefix", "none"])
        .output()
        .context("cannot start cargo")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo tree ended with {}: {}", output.status, stderr.trim());
    let names = read(&String::from_utf8_lossy(&output.stdout));
    ensure!(names.contains(package), "cargo tree does not name {package}");
    Ok(names)
}

/// The first word of each line.
fn read(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_counted_once() {
        let text = "polis-init v0.1.0 (/x)\nrustix v1.1.6\nlibc v0.2.1\nrustix v1.1.6 (*)\n";
        assert_eq!(read(text), ["libc", "polis-init", "rustix"].map(str::to_owned).into());
    }
}
