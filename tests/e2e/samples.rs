//! Samples over several files: stories of machines that show shares of one promise, of which
//! an ordinary run draws some. `docs/testing.md` (Samples) says what shows that promise in the
//! runs that draw another story.

use polis_tests::Sample;

/// Three voters come to be, and lose no acknowledged write whatever befalls them.
pub(crate) const VOTERS: Sample = Sample { of: "voters", drawn: 2 };
/// A machine enters a cluster, or opens its disk, by the leave of that cluster alone.
pub(crate) const ADMISSION: Sample = Sample { of: "admission", drawn: 1 };
/// A cluster on each kind of network.
pub(crate) const NETWORK: Sample = Sample { of: "network", drawn: 1 };
/// A node with more than one disk.
pub(crate) const DISKS: Sample = Sample { of: "disks", drawn: 1 };
/// The chain from the firmware's keys to the data partition.
pub(crate) const TRUST: Sample = Sample { of: "trust", drawn: 2 };
