//! The options of `cargo xtask image`, as clap reads them.

use std::path::PathBuf;

use clap::{ValueEnum, builder::NonEmptyStringValueParser};
use polis_image::Variant;
use semver::Version;

use crate::keys::PassphraseFrom;

/// The programs of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Programs {
    /// The packages that every node needs, without workloads: quick to build.
    Base,
    /// The same, with containerd and Kubernetes.
    #[default]
    Full,
}

impl From<Programs> for Variant {
    fn from(programs: Programs) -> Self {
        match programs {
            Programs::Base => Self::Base,
            Programs::Full => Self::Full,
        }
    }
}

#[derive(Debug, clap::Args)]
#[command(mut_arg("passphrase_file", |argument| argument.requires("keys")))]
pub(super) struct Build {
    /// The programs of the image.
    #[arg(long, value_enum, default_value_t)]
    pub(super) variant: Programs,
    /// Write the image here as well.
    #[arg(long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
    /// Format of the file.
    #[arg(long, value_enum, default_value_t)]
    pub(super) format: FileFormat,
    /// Sign with the keys of this folder, which `cargo xtask keys create` makes.
    #[arg(long, value_name = "DIR")]
    pub(super) keys: Option<PathBuf>,
    #[command(flatten)]
    pub(super) passphrase: PassphraseFrom,
    /// Write an update bundle as well, signed with the release key of --keys [default: of keys
    /// for trying, made in target/keys].
    #[arg(long, value_name = "FILE")]
    pub(super) bundle: Option<PathBuf>,
    /// The version that the image has [default: that of the sources].
    #[arg(long, value_name = "V", value_parser = version)]
    pub(super) version: Option<Version>,
    /// Put this parameters file on the ESP.
    #[arg(long, value_name = "FILE")]
    pub(super) parameters: Option<PathBuf>,
    /// Size of the disk in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = polis_image::SIZE_DEFAULT)]
    pub(super) size: u64,
    #[command(flatten)]
    pub(super) packages: Packages,
    /// Lock the packages that are current now, then build.
    #[arg(long)]
    pub(super) update_payload: bool,
}

/// The source of Debian's packages, for every command that builds an image.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Packages {
    /// Take Debian's packages from this mirror instead of the host's.
    #[arg(long, value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
    pub(super) mirror: Option<String>,
    /// Refuse packages that are not of the lock file; without this option, the build uses
    /// the current versions and lists them.
    #[arg(long)]
    pub(super) locked: bool,
    /// Try this archive of old versions first for packages that the mirror no longer has
    /// [default: POLIS_SNAPSHOT].
    #[arg(long, value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
    pub(super) snapshot: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum FileFormat {
    #[default]
    Raw,
    Qcow2,
}

/// Reads the version of an image.
fn version(text: &str) -> Result<Version, String> {
    let version = Version::parse(text).map_err(|error| {
        format!("{error}; allowed is a semantic version, as 1.2.3 or 1.2.3-rc.1")
    })?;
    polis_image::check_version(&version)?;
    Ok(version)
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::super::tests::parsed;

    #[test]
    fn a_bundle_may_name_keys_and_a_version() {
        let alone = parsed(&["--bundle", "file"]).unwrap();
        assert!(alone.bundle.is_some() && alone.keys.is_none());
        parsed(&["--bundle", "file", "--keys", "keys", "--version", "2.0.0"]).unwrap();
    }

    #[test]
    fn a_url_that_is_empty_is_wrong_usage() {
        for option in ["--mirror", "--snapshot"] {
            let error = parsed(&[option, ""]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(option), "{error}");
        }
    }

    #[test]
    fn a_passphrase_without_keys_is_wrong_usage_and_the_error_names_them() {
        let error = parsed(&["--passphrase-file", "file"]).unwrap_err();
        assert_eq!((error.exit_code(), error.kind()), (2, ErrorKind::MissingRequiredArgument));
        assert!(error.to_string().contains("--keys <DIR>"), "{error}");
        parsed(&["--passphrase-file", "file", "--keys", "keys"]).unwrap();
    }

    #[test]
    fn a_version_alone_is_that_of_the_image_and_a_bad_one_is_wrong_usage() {
        let version = parsed(&["--version", "1.2.3-rc.1"]).unwrap().version.unwrap();
        assert_eq!(version.to_string(), "1.2.3-rc.1");
        let long = format!("1.2.3-{}", "a".repeat(64));
        for (bad, reason) in [
            ("1.2.3+4", "has a `+`"),
            // A bundle with it would be refused at the end of the build.
            ("1.2.3-rc1", "as in 1.2.0-rc.9"),
            (&*long, "longer than 64"),
            ("1.2", "semantic version"),
            ("", "semantic"),
        ] {
            let error = parsed(&["--version", bad]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
