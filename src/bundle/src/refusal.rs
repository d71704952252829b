//! The rules that a bundle can break.

use std::fmt;

use semver::Version;

use crate::etcd::EtcdRefusal;
use crate::kubernetes::KubernetesRefusal;

/// A part of a bundle, in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartName {
    /// The unified kernel image.
    Kernel,
    /// The system with its hash tree.
    System,
}

impl fmt::Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kernel => "kernel image",
            Self::System => "system",
        })
    }
}

/// Why a bundle is not used. Sizes are in bytes, keys in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It does not begin as one.
    #[error("it is not an update bundle")]
    Foreign,
    /// It is of a format that this program does not know.
    #[error("it is an update bundle of format {format}, and format 1 is known")]
    Format {
        /// The format of the file.
        format: u8,
    },
    /// It ends too early.
    #[error("it is cut short: it ends after {has} bytes")]
    Short {
        /// Its length.
        has: u64,
    },
    /// Something follows the last part.
    #[error("it goes on behind its end, at byte {end}")]
    Long {
        /// Where it should end.
        end: u64,
    },
    /// Another key signed it.
    #[error("it was signed by {found}, and not by the expected key {expected}")]
    Signer {
        /// The key in the bundle.
        found: String,
        /// The key that should have signed it.
        expected: String,
    },
    /// Its signature does not hold.
    #[error("its manifest was changed after it was signed")]
    Signature,
    /// The manifest is signed, and still not one that this program reads.
    #[error("its manifest is malformed: {reason}")]
    Manifest {
        /// The fault.
        reason: String,
    },
    /// A part is not what was signed.
    #[error("its {part} was changed after it was signed")]
    Changed {
        /// The part.
        part: PartName,
    },
    /// It is for another kind of processor.
    #[error("it is for machines of the architecture {found}, and this one is {expected}")]
    Architecture {
        /// That of the bundle.
        found: String,
        /// That of the machine.
        expected: String,
    },
    /// It has other programs than the machine's image.
    #[error("it is of the variant {found}, and the machine runs {expected}")]
    Variant {
        /// That of the bundle.
        found: String,
        /// That of the machine.
        expected: String,
    },
    /// It is not newer than what runs: loaders start the newest.
    #[error("it is version {found}, which is not newer than {running}, which runs")]
    Older {
        /// The version of the bundle.
        found: Version,
        /// The version that runs.
        running: Version,
    },
    /// It has security holes that what runs does not have.
    #[error("its security level is {found}, and that of what runs is {running}")]
    Level {
        /// The level of the bundle.
        found: u32,
        /// The level of what runs.
        running: u32,
    },
    /// It does not update what runs.
    #[error("it updates versions from {from} on, and {running} runs")]
    From {
        /// The oldest version that it updates.
        from: Version,
        /// The version that runs.
        running: Version,
    },
    /// Its etcd does not suit that of the cluster.
    #[error(transparent)]
    Etcd(#[from] EtcdRefusal),
    /// Its Kubernetes does not suit that of the machine.
    #[error(transparent)]
    Kubernetes(#[from] KubernetesRefusal),
    /// A part does not fit.
    #[error("its {part} has {size} bytes, and there is room for {room}")]
    Large {
        /// The part.
        part: PartName,
        /// Its size.
        size: u64,
        /// The room for it.
        room: u64,
    },
}

impl Refusal {
    /// The next step for the operator.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Self::Foreign => "name a file that `cargo xtask image --bundle FILE` has written",
            Self::Format { .. } => {
                "use the polisctl of the bundle's version; a node that refuses it needs an update \
                 to a version between them first"
            }
            Self::Short { .. } | Self::Long { .. } | Self::Changed { .. } | Self::Signature => {
                "copy or download the bundle again, and compare its SHA-256 with its builder's"
            }
            Self::Signer { .. } => {
                "ask who built it; the key of a folder of keys is in its release.pub"
            }
            Self::Manifest { .. } => "build the bundle again",
            Self::Architecture { .. } | Self::Variant { .. } => {
                "name the bundle that was built for this machine"
            }
            Self::Older { .. } | Self::Level { .. } => "name a newer bundle",
            Self::From { from, .. } => return format!("update to version {from} first"),
            Self::Etcd(refusal) => return refusal.help(),
            Self::Kubernetes(refusal) => return refusal.help(),
            Self::Large { .. } => "build a smaller system: --variant base has no workloads",
        }
        .to_owned()
    }
}
