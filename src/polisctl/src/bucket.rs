//! The bucket of the snapshots of etcd as an operator names it, and the file of its key.
//!
//! What this module does not do: speak to a store (`snapshot`), or set a target (`cluster`).

use std::path::Path;

use polis_proto::v1;
use polis_wire::parameters;
use polis_wire::s3::{Bucket, Credentials};

use super::error::{Error, Explain as _};
use super::{contexts, key};

/// How a bucket is written.
pub(super) const FORM: &str = "URL[,region=REGION][,ca=FILE]";

/// Reads a bucket as it is written; `option` is where that was.
pub(super) fn configuration(text: &str, option: &str) -> Result<v1::SnapshotConfiguration, Error> {
    let mut parts = text.split(',');
    let url = parts.next().unwrap_or_default().to_owned();
    let mut configuration = v1::SnapshotConfiguration { url, ..Default::default() };
    for part in parts {
        match part.split_once('=') {
            Some(("region", region)) => region.clone_into(&mut configuration.region),
            Some(("ca", file)) => configuration.ca = authorities(Path::new(file))?,
            _ => {
                let text = format!("{option}: {part:?} is not allowed; allowed is {FORM}");
                return Err(Error::usage(text));
            }
        }
    }
    Ok(configuration)
}

/// The same, checked as the leader does.
pub(super) fn bucket(text: &str, option: &str) -> Result<Bucket, Error> {
    checked(&configuration(text, option)?, option)
}

/// The bucket of a configuration, checked as the leader does.
pub(super) fn checked(
    configuration: &v1::SnapshotConfiguration,
    option: &str,
) -> Result<Bucket, Error> {
    let read = parameters::snapshot_target(configuration, option);
    let read = read.doing(|| "this bucket cannot be used".to_owned())?;
    read.ok_or_else(|| Error::usage(format!("{option} is empty; allowed is {FORM}")))
}

/// Reads the authorities for the certificate of a server, in PEM.
pub(super) fn authorities(file: &Path) -> Result<String, Error> {
    let (name, bytes) = (file.display(), contexts::read_file(file)?);
    let ca = String::from_utf8(bytes)
        .map_err(|_error| Error::new(format!("{name} is not PEM")))
        .help(|| "`openssl x509 -inform der -in FILE` writes a certificate in PEM".to_owned())?;
    if ca.trim().is_empty() {
        return Err(Error::new(format!("{name} is empty; it must have a certificate in PEM"))
            .or_help("name the file with the certificate of the authority"));
    }
    Ok(ca)
}

/// Reads the key of a bucket from a file that others cannot read, or from standard input.
pub(super) fn credentials(file: &Path) -> Result<Credentials, Error> {
    let text = key::read_secret(file)?;
    let name = if file.to_str() == Some(key::STDIN) { "standard input" } else { "the file" };
    Credentials::parse(&text).doing(|| format!("{name} of the credentials cannot be used")).help(
        || {
            "write the access key ID on the first line and the secret access key on the second"
                .to_owned()
        },
    )
}
