//! The target of snapshots: the bucket that the leader sends snapshots of etcd to, from the
//! configuration of the cluster.
//!
//! ```text
//! s3+https://HOST[:PORT]/BUCKET[/PREFIX]      port 443
//! ```
//!
//! Invariants:
//! - Two texts for the same place have the same URL.
//! - No part has a character that would end a line of HTTP, or leads out of the prefix.
//!
//! What this module does not do: read credentials (`s3::Credentials`), or send anything
//! (`shipping` of the node).

use polis_proto::v1;

use super::error::Error;
use super::text::{self, At as _, Refusal};
use crate::endpoint::Endpoint;
use crate::outside::Server;
use crate::registry::{self, Authority};
use crate::s3::{Bucket, HTTPS, REGION};

const SCHEME: &str = "s3+https://";
/// Bytes of a prefix.
const PREFIX_MAX: usize = 128;
/// Bytes of the name of a region.
const REGION_MAX: usize = 32;

/// Reads the target of snapshots; `path` is its position as errors report it. `None`: snapshots
/// go nowhere.
///
/// # Errors
///
/// [`Error::Field`].
pub fn snapshot_target(
    message: &v1::SnapshotConfiguration,
    path: &str,
) -> Result<Option<Bucket>, Error> {
    let v1::SnapshotConfiguration { url, region, ca } = message;
    if url.is_empty() {
        let nothing = Refusal::described("something", "nothing beside an empty url");
        return match region.is_empty() && ca.is_empty() {
            true => Ok(None),
            false => Err(nothing).at(format!("{path}.url"), 1),
        };
    }
    let mut bucket = read(url).at(format!("{path}.url"), 1)?;
    if !region.is_empty() {
        checked_region(region).at(format!("{path}.region"), 2)?;
        bucket.region.clone_from(region);
    }
    bucket.server.authorities = authorities(ca).at(format!("{path}.ca"), 3)?;
    Ok(Some(bucket))
}

/// Reads certificates in PEM.
fn authorities(pem: &str) -> Result<Vec<Authority>, Refusal> {
    let allowed = "the certificates of authorities in PEM, or nothing for the public ones";
    registry::authorities(pem).map_err(|invalid| Refusal::described(invalid, allowed))
}

/// Reads a URL.
fn read(url: &str) -> Result<Bucket, Refusal> {
    let allowed = "s3+https://HOST[:PORT]/BUCKET[/PREFIX], with a host that is an IP address or a \
                   DNS name";
    if ["http://", "s3+http://", "s3://"].iter().any(|scheme| url.starts_with(scheme)) {
        let why = format!("{allowed}; a connection that is not encrypted is never made");
        return Err(Refusal::of(url, why));
    }
    let refused = || Refusal::of(url, allowed);
    let rest = url.strip_prefix(SCHEME).ok_or_else(refused)?;
    let (place, path) = rest.split_once('/').ok_or_else(refused)?;
    let mut endpoint = Endpoint::parse(place, HTTPS).map_err(|_invalid| refused())?;
    text::host(&endpoint.host).map_err(|_invalid| refused())?;
    endpoint.host.make_ascii_lowercase();
    let (name, prefix) = path.split_once('/').unwrap_or((path, ""));
    if !is_bucket(name) {
        let allowed = "a bucket of 3 to 63 lower-case letters, digits, and inner dots and hyphens";
        return Err(Refusal::of(url, allowed));
    }
    let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    let is_part = |part: &str| !matches!(part, "" | "." | "..") && part.bytes().all(plain);
    if prefix.len() > PREFIX_MAX || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
        let allowed = format!(
            "a prefix of letters, digits, dots, hyphens and underscores, with single slashes \
             between them, at most {PREFIX_MAX} characters"
        );
        return Err(Refusal::of(url, allowed));
    }
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    let server = Server { endpoint, authorities: Vec::new(), proxy: None };
    Ok(Bucket { server, name: name.to_owned(), prefix, region: REGION.to_owned() })
}

fn is_bucket(name: &str) -> bool {
    let letter = |c: &u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = name.as_bytes();
    (3..=63).contains(&bytes.len())
        && bytes.iter().all(|c| letter(c) || b".-".contains(c))
        && bytes.first().is_some_and(letter)
        && bytes.last().is_some_and(letter)
        && !name.contains("..")
}

fn checked_region(text: &str) -> Result<(), Refusal> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-_".contains(&c);
    match text.len() <= REGION_MAX && text.bytes().all(plain) {
        true => Ok(()),
        false => Err(Refusal::of(text, "a region such as eu-central-1, at most 32 characters")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(url: &str, region: &str, ca: &str) -> Result<Option<Bucket>, Error> {
        let [url, region, ca] = [url, region, ca].map(str::to_owned);
        snapshot_target(&v1::SnapshotConfiguration { url, region, ca }, "snapshots")
    }

    #[test]
    fn a_target_has_one_name_however_it_is_written() {
        for (url, named) in [
            ("s3+https://S3.Example/bucket", "s3+https://s3.example:443/bucket"),
            ("s3+https://s3.example:443/bucket/", "s3+https://s3.example:443/bucket"),
            ("s3+https://192.0.2.1:9000/my.bucket/a/b/", "s3+https://192.0.2.1:9000/my.bucket/a/b"),
            ("s3+https://[fd00::1]/b-1/polis", "s3+https://[fd00::1]:443/b-1/polis"),
        ] {
            assert_eq!(target(url, "", "").unwrap().unwrap().url(), named);
            assert_eq!(target(named, "", "").unwrap().unwrap().url(), named);
        }
        let read = target("s3+https://a.example/bucket/x", "eu-central-1", "").unwrap().unwrap();
        assert_eq!((&*read.region, &*read.prefix), ("eu-central-1", "x/"));
        assert_eq!(target("s3+https://a.example/bucket", "", "").unwrap().unwrap().region, REGION);
        assert_eq!(target("", "", "").unwrap(), None);
    }

    #[test]
    fn an_invalid_target_is_refused_with_its_place() {
        for url in [
            "bucket",
            "https://a.example/bucket",
            "s3+https://",
            "s3+https:///bucket",
            "s3+https://a.example",
            "s3+https://a.example/",
            "s3+https://a.example/b",
            "s3+https://a.example/Bucket",
            "s3+https://a.example/-bucket",
            "s3+https://a.example/bu..cket",
            "s3+https://user@a.example/bucket",
            "s3+https://a.example:0/bucket",
            "s3+https://a.example/bucket//x",
            "s3+https://a.example/bucket/../x",
            "s3+https://a.example/bucket/x?y",
            "s3+https://a.example/bucket/x y",
            "s3+https://a.example/bucket/x\r\nHost: b",
        ] {
            let refused = target(url, "", "").unwrap_err().to_string();
            assert!(refused.contains("snapshots.url"), "{url:?}: {refused}");
        }
        for url in ["s3+http://a.example/bucket", "http://a.example/bucket", "s3://bucket"] {
            let refused = target(url, "", "").unwrap_err().to_string();
            assert!(refused.contains("not encrypted"), "{url:?}: {refused}");
        }
        let good = "s3+https://a.example/bucket";
        let refused = target(good, "eu central", "").unwrap_err().to_string();
        assert!(refused.contains("snapshots.region"), "{refused}");
        let refused = target(good, "", "noise").unwrap_err().to_string();
        assert!(refused.contains("snapshots.ca"), "{refused}");
        assert!(target("", "eu-central-1", "").is_err());
    }

    proptest! {
        #[test]
        fn an_accepted_url_is_one_line_and_reads_back(
            url in "s3\\+https://[a-z0-9.:\\[\\]]{1,20}/[a-zA-Z0-9./ ?#@%-]{0,40}", noise in ".{0,60}",
        ) {
            for text in [url, noise] {
                if let Ok(bucket) = read(&text) {
                    let named = bucket.url();
                    prop_assert!(!named.contains(|c: char| c.is_whitespace() || c.is_control()));
                    prop_assert!(!named.contains("/../") && !named.contains("/./"));
                    prop_assert_eq!(read(&named).unwrap(), bucket);
                }
            }
        }
    }
}
