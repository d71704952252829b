//! The partition tables of disks, as stories read them.

use std::path::Path;

use anyhow::{Context as _, Result};
use gpt::GptConfig;

/// First byte and length of a partition.
pub(crate) fn partition(disk: &Path, name: &str) -> Result<(u64, u64)> {
    let table = GptConfig::new().open(disk)?;
    let found = table.partitions().values().find(|partition| partition.name == name);
    let found = found.with_context(|| format!("no {name}"))?;
    let sector = *table.logical_block_size();
    Ok((found.bytes_start(sector)?, found.bytes_len(sector)?))
}

/// The names of the partitions of a disk.
pub(crate) fn partitions(disk: &Path) -> Result<Vec<String>> {
    let table = GptConfig::new().open(disk).context("the disk has no table")?;
    Ok(table.partitions().values().map(|partition| partition.name.clone()).collect())
}
