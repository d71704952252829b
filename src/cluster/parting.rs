//! Removes what a member of etcd leaves on its node when the cluster has taken it out.
//!
//! ```text
//! leaving written -> etcd's data, keys, certificates removed -> voter removed -> leaving removed
//! ```
//!
//! Half of it looks like a disk that lost a member, which is an error for a person.
//! So the node first writes down that it leaves, and the next boot finishes that
//! before it looks for a member.
//!
//! Invariants:
//! - `leaving` is written only on the word of a leader that the member is out of etcd:
//!   whoever finds it may remove what is left.

use polis_proto::v1;
use prost::Message as _;

use crate::consensus;
use crate::storage::file;
use crate::storage::tree::Data;

/// Removes the member of etcd from the disk. Blocks.
///
/// # Errors
///
/// The first part that cannot be removed; the next boot goes on.
pub fn part(data: &Data) -> Result<(), file::Error> {
    data.node.leaving.write(b"")?;
    go_on(data)
}

/// Goes on with what was cut off, if something was; says whether it was. Blocks.
pub(super) fn finish(data: &Data) -> Result<bool, file::Error> {
    let begun = data.node.leaving.read()?.is_some();
    if begun {
        go_on(data)?;
    }
    Ok(begun)
}

fn go_on(data: &Data) -> Result<(), file::Error> {
    consensus::forget(&data.etcd)?;
    // A founder may have no list yet, and without one it would look for its member.
    if data.node.roles.read()?.is_none() {
        data.node.roles.write(&v1::NodeRoles::default().encode_to_vec())?;
    }
    data.node.voter.remove()?;
    data.node.leaving.remove()
}
