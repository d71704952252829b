//! AWS Signature Version 4 of a request, in its header `authorization`.
//!
//! ```text
//! method, path, query, headers, SHA-256 of content -> canonical request ------SHA-256--+
//! secret --HMAC: date, region, s3, aws4_request-> key --HMAC: algorithm, time, scope,--+
//!                                                                         signature <--+
//! ```
//!
//! This module only computes: it reads no clock.
//!
//! Invariants:
//! - The signed request is the sent one: path and query are encoded here, once, for both.

use std::fmt::Write as _;
use std::time::SystemTime;

use ring::hmac;
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::Credentials;
use polis_base::hex;

/// SHA-256 of nothing.
pub(super) const NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

const TIME: &[BorrowedFormatItem<'_>] =
    format_description!("[year][month][day]T[hour][minute][second]Z");

/// The characters of a date at the beginning of a time.
const DATE: usize = 8;

/// A request before it is signed.
#[derive(Clone, Debug)]
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    /// Not encoded, with its first slash.
    pub(super) path: &'a str,
    /// Not encoded, in any order.
    pub(super) query: &'a [(&'a str, &'a str)],
    /// In lower case; `host` among them.
    pub(super) headers: &'a [(&'a str, &'a str)],
    /// SHA-256 of the content, in hexadecimal digits.
    pub(super) content: &'a str,
}

/// The headers that a signature adds to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signed {
    /// Path and query, encoded.
    pub(super) target: String,
    /// The value of `x-amz-date`.
    pub(super) time: String,
    /// The value of `authorization`.
    pub(super) authorization: String,
}

/// Signs a request at a time. `x-amz-date` and `x-amz-content-sha256` are added to its headers.
pub(super) fn sign(
    request: &Request<'_>,
    credentials: &Credentials,
    region: &str,
    at: SystemTime,
) -> Signed {
    // It fails for no time of four digits of a year; a clock beyond them is refused as skewed.
    let time = OffsetDateTime::from(at).format(TIME).unwrap_or_default();
    let date = time.get(..DATE).unwrap_or_default();
    let path = encoded(request.path, b"-._~/");
    let mut query: Vec<_> = request.query.iter().map(pair).collect();
    query.sort();
    let query = query.join("&");
    let mut headers = request.headers.to_vec();
    headers.extend([("x-amz-content-sha256", request.content), ("x-amz-date", &time)]);
    headers.sort_unstable();
    let names = headers.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
    let mut canonical = format!("{}\n{path}\n{query}\n", request.method);
    for (name, value) in &headers {
        canonical.push_str(&format!("{name}:{}\n", value.trim()));
    }
    canonical.push_str(&format!("\n{names}\n{}", request.content));
    let scope = format!("{date}/{region}/s3/aws4_request");
    let digest = hex::encode(&Sha256::digest(canonical.as_bytes()));
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{digest}");
    let signature = hex::encode(mac(&key(credentials, date, region), &text).as_ref());
    let id = &credentials.access_key_id;
    let authorization = format!(
        "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
    );
    let target = if query.is_empty() { path } else { format!("{path}?{query}") };
    Signed { target, time, authorization }
}

/// The key of a day.
fn key(credentials: &Credentials, date: &str, region: &str) -> hmac::Key {
    let secret = zeroize::Zeroizing::new(format!("AWS4{}", *credentials.secret_access_key));
    let first = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    [date, region, "s3", "aws4_request"]
        .iter()
        .fold(first, |key, part| hmac::Key::new(hmac::HMAC_SHA256, mac(&key, part).as_ref()))
}

fn mac(key: &hmac::Key, text: &str) -> hmac::Tag {
    hmac::sign(key, text.as_bytes())
}

fn pair((name, value): &(&str, &str)) -> String {
    format!("{}={}", encoded(name, b"-._~"), encoded(value, b"-._~"))
}

/// The text with every byte percent-encoded but letters, digits and `plain`.
fn encoded(text: &str, plain: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            out.push(char::from(byte));
        } else {
            // A text takes every write.
            let _written = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// 24 May 2013, as in the examples of the documentation of Amazon S3.
    fn at() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_369_353_600)
    }

    fn signature(
        method: &str,
        path: &str,
        query: &[(&str, &str)],
        more: &[(&str, &str)],
    ) -> String {
        let secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
        let credentials = Credentials::new("AKIAIOSFODNN7EXAMPLE", secret).unwrap();
        let content = match method {
            "PUT" => "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
            _ => NOTHING,
        };
        let headers = [&[("host", "examplebucket.s3.amazonaws.com")], more].concat();
        let request = Request { method, path, query, headers: &headers, content };
        let signed = sign(&request, &credentials, "us-east-1", at());
        assert_eq!(signed.time, "20130524T000000Z");
        let scope = "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,";
        assert!(signed.authorization.contains(scope), "{}", signed.authorization);
        signed.authorization.split_once("Signature=").unwrap().1.to_owned()
    }

    /// "Authenticating Requests: Using the Authorization Header", Amazon S3 API Reference.
    #[test]
    fn the_examples_of_the_documentation_of_amazon_have_the_signatures_there() {
        let get = signature("GET", "/test.txt", &[], &[("range", "bytes=0-9")]);
        assert_eq!(get, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
        let more = [
            ("date", "Fri, 24 May 2013 00:00:00 GMT"),
            ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
        ];
        let put = signature("PUT", "/test$file.text", &[], &more);
        assert_eq!(put, "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
        let lifecycle = signature("GET", "/", &[("lifecycle", "")], &[]);
        assert_eq!(lifecycle, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
        let list = signature("GET", "/", &[("prefix", "J"), ("max-keys", "2")], &[]);
        assert_eq!(list, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
    }

    #[test]
    fn path_and_query_are_encoded() {
        let credentials = Credentials::new("a", "b").unwrap();
        let query = [("start-after", "a b/c"), ("list-type", "2"), ("prefix", "é&=")];
        let request = Request {
            method: "GET",
            path: "/b/a b+c",
            query: &query,
            headers: &[],
            content: NOTHING,
        };
        let signed = sign(&request, &credentials, "r", at());
        let expected = "/b/a%20b%2Bc?list-type=2&prefix=%C3%A9%26%3D&start-after=a%20b%2Fc";
        assert_eq!(signed.target, expected);
    }
}
