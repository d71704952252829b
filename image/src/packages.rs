//! The list of Debian packages that an image is made of and made with.
//!
//! The list is explicit: dependencies are not followed, since maintainer scripts are
//! never run. [`crate::elf`] checks that it is complete, program by program.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::manifest::Variant;

/// The metapackage whose dependency is the kernel of the day.
pub(crate) const KERNEL: &str = "linux-image-amd64";

/// The purpose of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// The kernel and its modules.
    Kernel,
    /// Programs that firmware starts.
    Boot,
    /// Programs and data that a node uses.
    Node,
    /// Libraries that those programs need.
    Library,
    /// Firmware files that drivers load into network cards, disk controllers and others, and the
    /// microcode of processors.
    Device,
    /// Tools that build the image; not in it.
    Tool,
    /// Firmware for virtual machines; not in the image.
    Firmware,
}

impl Category {
    /// All of them, in the order of the lock file.
    pub(crate) const ALL: [Self; 7] = [
        Self::Kernel,
        Self::Boot,
        Self::Node,
        Self::Library,
        Self::Device,
        Self::Tool,
        Self::Firmware,
    ];

    /// The word in the lock file.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Boot => "boot",
            Self::Node => "node",
            Self::Library => "library",
            Self::Device => "device",
            Self::Tool => "tool",
            Self::Firmware => "firmware",
        }
    }

    /// Whether files of such a package are in the image.
    #[must_use]
    pub fn in_image(self) -> bool {
        match self {
            Self::Kernel | Self::Boot | Self::Node | Self::Library | Self::Device => true,
            Self::Tool | Self::Firmware => false,
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// Packages that belong together: those of every image, or those that only some have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// The smallest variant that has them.
    pub(crate) variant: Variant,
    /// Every package by name; the kernel's metapackage stands for its dependency.
    pub(crate) packages: &'static [(Category, &'static str)],
    /// Programs that go into the image. Their libraries follow from them.
    pub(crate) programs: &'static [&'static str],
    /// Programs that the builder runs.
    pub(crate) tools: &'static [&'static str],
}

/// The contents of a lock file. A payload has the parts of its variant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selection(pub(crate) &'static [Part]);

impl Selection {
    fn parts(self, variant: Variant) -> impl Iterator<Item = &'static Part> {
        self.0.iter().filter(move |part| part.variant <= variant)
    }

    /// The packages of a variant, with their categories.
    pub(crate) fn packages(
        self,
        variant: Variant,
    ) -> impl Iterator<Item = (Category, &'static str)> {
        self.parts(variant).flat_map(|part| part.packages).copied()
    }

    /// The programs of the packages that an image of this variant has.
    pub(crate) fn programs(self, variant: Variant) -> Vec<&'static str> {
        self.parts(variant).flat_map(|part| part.programs).copied().collect()
    }

    /// The programs that build an image of this variant.
    pub(crate) fn tools(self, variant: Variant) -> Vec<&'static str> {
        self.parts(variant).flat_map(|part| part.tools).copied().collect()
    }
}

/// The packages of all images.
pub(crate) const POLIS: Selection = Selection(&[
    Part { variant: Variant::Base, packages: PACKAGES, programs: PROGRAMS, tools: TOOLS },
    Part {
        variant: Variant::Full,
        packages: WORKLOAD_PACKAGES,
        programs: WORKLOAD_PROGRAMS,
        tools: WORKLOAD_TOOLS,
    },
]);

/// The packages of every image, see [`Part::packages`].
const PACKAGES: &[(Category, &str)] = &[
    (Category::Kernel, KERNEL),
    (Category::Boot, "systemd-boot-efi"),
    (Category::Node, "ca-certificates"),
    (Category::Node, "chrony"),
    (Category::Node, "cryptsetup-bin"),
    (Category::Node, "etcd-server"),
    (Category::Node, "nftables"),
    (Category::Node, "xfsprogs"),
    (Category::Library, "libargon2-1"),
    (Category::Library, "libblkid1"),
    (Category::Library, "libbsd0"),
    (Category::Library, "libc6"),
    (Category::Library, "libcap2"),
    (Category::Library, "libcryptsetup12"),
    (Category::Library, "libdevmapper1.02.1"),
    (Category::Library, "libedit2"),
    (Category::Library, "libffi8"),
    (Category::Library, "libgmp10"),
    (Category::Library, "libgnutls30t64"),
    (Category::Library, "libhogweed6t64"),
    (Category::Library, "libidn2-0"),
    (Category::Library, "libinih1"),
    (Category::Library, "libjansson4"),
    (Category::Library, "libjson-c5"),
    (Category::Library, "libmd0"),
    (Category::Library, "libmnl0"),
    (Category::Library, "libnettle8t64"),
    (Category::Library, "libnftables1"),
    (Category::Library, "libnftnl11"),
    (Category::Library, "libp11-kit0"),
    (Category::Library, "libpcre2-8-0"),
    (Category::Library, "libpopt0"),
    (Category::Library, "libseccomp2"),
    (Category::Library, "libselinux1"),
    (Category::Library, "libssl3t64"),
    (Category::Library, "libtasn1-6"),
    (Category::Library, "libtinfo6"),
    (Category::Library, "libudev1"),
    (Category::Library, "libunistring5"),
    (Category::Library, "liburcu8t64"),
    (Category::Library, "libuuid1"),
    (Category::Library, "libxtables12"),
    (Category::Device, "amd64-microcode"),
    (Category::Device, "firmware-ast"),
    (Category::Device, "firmware-bnx2"),
    (Category::Device, "firmware-bnx2x"),
    (Category::Device, "firmware-cavium"),
    (Category::Device, "firmware-intel-misc"),
    (Category::Device, "firmware-linux-free"),
    (Category::Device, "firmware-misc-nonfree"),
    (Category::Device, "firmware-myricom"),
    (Category::Device, "firmware-netronome"),
    (Category::Device, "firmware-netxen"),
    (Category::Device, "firmware-qlogic"),
    (Category::Device, "firmware-realtek"),
    (Category::Device, "intel-microcode"),
    (Category::Tool, "erofs-utils"),
    (Category::Tool, "kmod"),
    (Category::Tool, "libdeflate0"),
    (Category::Tool, "liblz4-1"),
    (Category::Tool, "liblzma5"),
    (Category::Tool, "libxxhash0"),
    (Category::Tool, "libzstd1"),
    (Category::Tool, "xz-utils"),
    (Category::Tool, "zlib1g"),
    (Category::Firmware, "ovmf"),
];

/// The programs of [`Part::programs`] in every image.
const PROGRAMS: &[&str] = &[
    "usr/bin/etcd",
    "usr/bin/etcdutl",
    "usr/sbin/chronyd",
    "usr/sbin/cryptsetup",
    "usr/sbin/mkfs.xfs",
    "usr/sbin/nft",
    "usr/sbin/xfs_growfs",
    "usr/sbin/xfs_repair",
];

/// The programs of [`Part::tools`] for every image.
const TOOLS: &[&str] = &["usr/bin/mkfs.erofs", "usr/bin/kmod", "usr/bin/xz"];

/// The packages that a node with workloads needs beside the programs of Go modules
/// ([`crate::golang`]), and those that build these: the Go toolchain, and for the one
/// program with C code the C library's and seccomp's development files.
const WORKLOAD_PACKAGES: &[(Category, &str)] = &[
    (Category::Node, "mount"),
    (Category::Library, "libmount1"),
    (Category::Tool, GO),
    (Category::Tool, GO_SOURCES),
    (Category::Tool, "libc6-dev"),
    (Category::Tool, "libseccomp-dev"),
    (Category::Tool, "linux-libc-dev"),
];

/// The package of the Go toolchain, from the suite of backports.
pub(crate) const GO: &str = "golang-1.26-go";
/// The package of Go's standard library.
pub(crate) const GO_SOURCES: &str = "golang-1.26-src";

/// kubelet runs them.
const WORKLOAD_PROGRAMS: &[&str] = &["usr/bin/mount", "usr/bin/umount"];

/// The programs of [`Part::tools`] for workloads.
const WORKLOAD_TOOLS: &[&str] = &["usr/lib/go-1.26/bin/go"];

/// Firmware files for virtual machines: with and without Secure Boot, and with
/// the usual keys enrolled.
pub(crate) const FIRMWARE: &[&str] = &[
    "OVMF_CODE_4M.fd",
    "OVMF_CODE_4M.ms.fd",
    "OVMF_CODE_4M.secboot.fd",
    "OVMF_VARS_4M.fd",
    "OVMF_VARS_4M.ms.fd",
];
