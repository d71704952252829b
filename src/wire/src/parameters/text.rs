//! Validation of single values: names, labels, addresses, certificates.
//!
//! Every function takes a value from the file and returns it, or a [`Refusal`] that
//! names the allowed values. Lengths are in bytes; every allowed text is ASCII, so
//! those are characters too.

use std::net::IpAddr;

use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::error::{Error, FieldError};
use crate::endpoint::{CURATOR_PORT, Endpoint};

/// A value that is not allowed, before its position in the message is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) value: String,
    pub(super) allowed: String,
}

impl Refusal {
    /// Refuses a text, which is quoted, shortened and made printable.
    pub(super) fn of(value: &str, allowed: impl Into<String>) -> Self {
        Self { value: quoted(value), allowed: allowed.into() }
    }

    /// Refuses something that is described, for example by its length.
    pub(super) fn described(value: impl ToString, allowed: impl Into<String>) -> Self {
        Self { value: value.to_string(), allowed: allowed.into() }
    }
}

/// Adds to a rejected value its position in the message.
pub(super) trait At<T> {
    fn at(self, path: impl Into<String>, number: u16) -> Result<T, Error>;
}

impl<T> At<T> for Result<T, Refusal> {
    fn at(self, path: impl Into<String>, number: u16) -> Result<T, Error> {
        self.map_err(|refusal| Error::Field(located(refusal, path, number)))
    }
}

/// A rejected value with its position in the message.
pub(super) fn located(refusal: Refusal, path: impl Into<String>, number: u16) -> FieldError {
    FieldError { path: path.into(), number, value: refusal.value, allowed: refusal.allowed }
}

/// How much of a bad value is shown: enough to find it, not enough to fill a screen.
const SHOWN_MAX: usize = 48;

/// `value` in quotes, without control characters, shortened.
pub(super) fn quoted(value: &str) -> String {
    let mut shown: String = value.chars().take(SHOWN_MAX).collect();
    if shown.len() < value.len() {
        shown.push('…');
    }
    // `Debug` of a text escapes control characters and quotes.
    format!("{shown:?}")
}

/// Refuses more than `max` of something.
pub(super) fn at_most(count: usize, max: usize, what: &str) -> Result<(), Refusal> {
    if count > max {
        return Err(Refusal::described(format!("{count} {what}"), format!("at most {max}")));
    }
    Ok(())
}

/// Letters, digits and inner `-`: one part of a DNS name.
fn is_dns_label(text: &str, letter: fn(&u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    let inner = |c: &u8| letter(c) || c.is_ascii_digit() || *c == b'-';
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_dns_name(text: &str, length_max: usize, letter: fn(&u8) -> bool) -> bool {
    text.len() <= length_max && text.split('.').all(|label| is_dns_label(label, letter))
}

/// A lower-case RFC 1123 name of at most 80 characters.
pub(super) fn cluster_domain(text: &str) -> Result<(), Refusal> {
    if is_dns_name(text, 80, u8::is_ascii_lowercase) {
        return Ok(());
    }
    Err(Refusal::of(
        text,
        "a DNS name of lower-case letters, digits and inner hyphens, at most 80 characters",
    ))
}

/// An IP address or a DNS name.
pub(super) fn host(text: &str) -> Result<(), Refusal> {
    // Digits and dots alone would be a mistyped address, not a name.
    let all_numeric = text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let name = !all_numeric && is_dns_name(text, 253, u8::is_ascii_alphabetic);
    if name || text.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    Err(Refusal::of(text, "an IP address or a DNS name"))
}

/// An [`Endpoint`] whose host is an address or a name that DNS can have.
pub(super) fn endpoint(text: &str) -> Result<(), Refusal> {
    let read = Endpoint::parse(text, CURATOR_PORT);
    if read.is_ok_and(|endpoint| host(&endpoint.host).is_ok()) {
        return Ok(());
    }
    Err(Refusal::of(text, "a host name or IP address, and a port after a colon if it is another"))
}

/// A kernel interface name, other than loopback.
pub(super) fn interface_name(text: &str) -> Result<(), Refusal> {
    let known = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    let good = (1..=15).contains(&text.len())
        && text.bytes().all(known)
        && ![".", "..", "lo"].contains(&text);
    if good {
        return Ok(());
    }
    Err(Refusal::of(
        text,
        "a kernel interface name such as \"eth0\", or a MAC address in lower-case hex with colons",
    ))
}

/// The name of a terminal under `/dev`; without slashes or dots it stays there.
pub(super) fn terminal(text: &str) -> Result<(), Refusal> {
    if (1..=16).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_alphanumeric()) {
        return Ok(());
    }
    Err(Refusal::of(text, "a terminal's name such as \"ttyS1\": 1 to 16 letters and digits"))
}

/// Letters and digits, with `-`, `_` and `.` between them, at most 63.
fn is_label_name(text: &str) -> bool {
    let ends = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(c))
}

/// A label's key as Kubernetes has them: a name, with a DNS name and a slash before it.
pub(super) fn label_key(text: &str) -> Result<(), Refusal> {
    let good = match text.split_once('/') {
        None => is_label_name(text),
        Some((prefix, name)) => {
            is_dns_name(prefix, 253, u8::is_ascii_lowercase) && is_label_name(name)
        }
    };
    if good {
        return Ok(());
    }
    Err(Refusal::of(
        text,
        "a key of 1 to 63 letters, digits and inner \"-_.\", with an optional DNS name and \"/\" \
         before it",
    ))
}

/// A label's value as Kubernetes has them; it may be empty.
pub(super) fn label_value(text: &str) -> Result<(), Refusal> {
    if text.is_empty() || is_label_name(text) {
        return Ok(());
    }
    Err(Refusal::of(text, "nothing, or up to 63 letters, digits and inner \"-_.\""))
}

/// The certificate of an authority in DER, and nothing after it.
pub(super) fn authority(der: &[u8], max: usize) -> Result<X509Certificate<'_>, Refusal> {
    let allowed = format!("the DER of one X.509 CA certificate, at most {max} bytes");
    if der.is_empty() || der.len() > max {
        return Err(Refusal::described(format!("{} bytes", der.len()), allowed));
    }
    let Ok((rest, certificate)) = X509Certificate::from_der(der) else {
        return Err(Refusal::described(format!("{} bytes of something else", der.len()), allowed));
    };
    if !rest.is_empty() {
        let more = format!("a certificate with {} bytes after it", rest.len());
        return Err(Refusal::described(more, allowed));
    }
    let constraints = certificate.basic_constraints().ok().flatten();
    if !constraints.is_some_and(|constraints| constraints.value.ca) {
        return Err(Refusal::described("a certificate that is not a CA's", allowed));
    }
    Ok(certificate)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn holds(check: fn(&str) -> Result<(), Refusal>, good: &[&str], bad: &[&str]) {
        for text in good {
            assert_eq!(check(text), Ok(()), "{text:?}");
        }
        for text in bad {
            assert!(check(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_domain_is_a_lower_case_dns_name() {
        let (long, longer) = ("a.".repeat(39) + "ab", "a.".repeat(39) + "abc");
        holds(
            cluster_domain,
            &["a", "cluster.internal", "0.a-b.c", &long],
            &["", ".", "a.", "a..b", "-a", "a-.b", "A", "a_b", "ä", &longer, &"a".repeat(64)],
        );
    }

    #[test]
    fn an_endpoint_has_a_host_and_maybe_a_port() {
        holds(
            endpoint,
            &[
                "a",
                "A.b",
                "a:1",
                "10.0.0.1",
                "10.0.0.1:65535",
                "fd00::1",
                "[fd00::1]",
                "[fd00::1]:7835",
            ],
            &[
                "",
                ":1",
                "a:",
                "a:0",
                "a:65536",
                "a:+1",
                "a:1:2",
                "10.0.0",
                "10.0.0.256:1",
                "[10.0.0.1]:1",
                "[fd00::1]:",
                "a_b",
                "a b",
                "a/b",
                "user@a",
            ],
        );
    }

    #[test]
    fn names_of_devices_cannot_leave_their_folder() {
        holds(terminal, &["ttyS1", "hvc0"], &["", "../a", "tty/1", "a.b", &"a".repeat(17)]);
        holds(interface_name, &["eth0", "enp0s1.5"], &["", ".", "..", "lo", "a/b", "a b"]);
    }

    #[test]
    fn labels_are_those_of_kubernetes() {
        holds(
            label_key,
            &["a", "A_b.c-1", "example.com/role"],
            &["", "/a", "a/", "a/b/c", "-a", "a-", "Example.com/a", "ä", &"a".repeat(64)],
        );
        holds(label_value, &["", "a", "A_b.c-1"], &["-", "a/b", " ", &"a".repeat(64)]);
    }

    proptest! {
        #[test]
        fn a_refused_value_is_shown_on_one_short_line(text in any::<String>()) {
            for check in [cluster_domain, host, endpoint, interface_name, terminal, label_key] {
                if let Err(refusal) = check(&text) {
                    prop_assert!(!refusal.value.contains(char::is_control));
                    prop_assert!(refusal.value.chars().count() < 12 * SHOWN_MAX);
                }
            }
        }
    }
}
