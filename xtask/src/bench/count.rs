//! Counters of a translated guest: instructions and translated blocks.
//!
//! A busy host changes them less than any time: only by what threads do that wait for a processor
//! or a lock. They are counted by a plugin of QEMU's translator (`count.c`), which the compiler
//! that cargo links with makes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

const SOURCE: &str = "xtask/src/bench/count.c";

/// The plugin, compiled.
#[derive(Clone, Debug)]
pub(super) struct Plugin(PathBuf);

impl Plugin {
    /// Compiles the plugin into `folder`.
    pub(super) fn make(folder: &Path) -> Result<Self> {
        let file = folder.join("count.so");
        let source = crate::image::workspace().join(SOURCE);
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-shared", "-fPIC", "-Wall", "-o"]).arg(&file).arg(source);
        let status = compiler.status().context("cannot start cc")?;
        ensure!(status.success(), "cc ended with {status} at {SOURCE}");
        Ok(Self(file))
    }

    /// The argument of QEMU, for counters in `file`.
    pub(super) fn argument(&self, file: &Path) -> String {
        format!("{},out={}", self.0.display(), file.display())
    }
}

/// Billions of instructions and thousands of translated blocks so far.
pub(super) fn read(file: &Path) -> Result<[f64; 2]> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut counters = bytes.as_chunks::<8>().0.iter().copied().map(u64::from_ne_bytes);
    let blocks = counters.next().context("there are no counters")?;
    let instructions: u64 = counters.sum();
    #[expect(clippy::cast_precision_loss, reason = "counts below 2^53")]
    let counters = [instructions as f64 / 1e9, blocks as f64 / 1e3];
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_compiles_and_counters_are_read_in_the_order_of_the_host() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = Plugin::make(folder.path()).unwrap();
        assert!(plugin.argument(Path::new("/x")).ends_with("count.so,out=/x"));
        let file = folder.path().join("counters");
        let counters = [1500, 2_500_000_000u64, 500_000_000].map(u64::to_ne_bytes).concat();
        fs::write(&file, &counters).unwrap();
        assert_eq!(read(&file).unwrap(), [3.0, 1.5]);
        fs::write(&file, "").unwrap();
        assert!(read(&file).is_err());
    }
}
