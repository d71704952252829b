//! The key of an S3-compatible store: an identifier, and a secret that signs requests.
//!
//! An owner has it as a file of two lines, or as the file of AWS's own tools:
//!
//! ```text
//! AKIAIOSFODNN7EXAMPLE          [default]
//! wJalrXUtnFEMI/K7MDENG/..      aws_access_key_id = AKIAIOSFODNN7EXAMPLE
//!                               aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/..
//! ```
//!
//! Invariants:
//! - No text that can be printed has the secret, messages about a damaged file among them.
//! - Neither part has a character that would end a line of HTTP.

use std::fmt;

use zeroize::Zeroizing;

/// Bytes of an identifier, and of a secret: stores use 20 and 40.
const LENGTH_MAX: usize = 128;

/// Why there are no credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(&'static str);

/// A key of a store.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Which key it is.
    pub access_key_id: String,
    /// The key that signs.
    pub secret_access_key: Zeroizing<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = &self.access_key_id;
        f.debug_struct("Credentials").field("access_key_id", id).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Checks both parts.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn new(access_key_id: &str, secret_access_key: &str) -> Result<Self, Invalid> {
        let plain = |c: u8| c.is_ascii_graphic() && !b"/,;".contains(&c);
        if !(1..=LENGTH_MAX).contains(&access_key_id.len()) || !access_key_id.bytes().all(plain) {
            return Err(Invalid(
                "the access key ID is not one: allowed are 1 to 128 printable characters, without \
                 blanks, slashes, commas and semicolons",
            ));
        }
        if !(1..=LENGTH_MAX).contains(&secret_access_key.len())
            || !secret_access_key.bytes().all(|c| c.is_ascii_graphic())
        {
            return Err(Invalid(
                "the secret access key is not one: allowed are 1 to 128 printable characters, \
                 without blanks",
            ));
        }
        Ok(Self {
            access_key_id: access_key_id.to_owned(),
            secret_access_key: Zeroizing::new(secret_access_key.to_owned()),
        })
    }

    /// Reads a file: two lines, or a file of AWS's tools with one section.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let is_remark = |line: &&str| line.is_empty() || line.starts_with(['#', ';']);
        let lines = || text.lines().map(str::trim).filter(|line| !is_remark(line));
        if !lines().any(|line| line.starts_with("[") || line.starts_with("aws_")) {
            let parts: Vec<_> = lines().take(3).collect();
            let [id, secret] = parts[..] else {
                return Err(Invalid(
                    "the file of the credentials is not one: allowed are two lines, the access key \
                     ID and the secret access key, or the lines aws_access_key_id = ID and \
                     aws_secret_access_key = SECRET",
                ));
            };
            return Self::new(id, secret);
        }
        if lines().filter(|line| line.starts_with('[')).count() > 1 {
            return Err(Invalid(
                "the file of the credentials has more than one section; copy the one that is meant \
                 into a file of its own",
            ));
        }
        let value = |name: &str| {
            let mut values = lines().filter_map(|line| {
                let (key, value) = line.split_once('=')?;
                (key.trim() == name).then(|| value.trim())
            });
            values.next()
        };
        if value("aws_session_token").is_some() {
            return Err(Invalid(
                "the credentials are temporary (aws_session_token): the cluster needs a key that \
                 does not end",
            ));
        }
        let missing = "the file of the credentials lacks aws_access_key_id or \
                       aws_secret_access_key";
        let id = value("aws_access_key_id").ok_or(Invalid(missing))?;
        Self::new(id, value("aws_secret_access_key").ok_or(Invalid(missing))?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_file_has_two_lines_or_is_that_of_the_tools_of_aws() {
        let good = Credentials::new("AKIA1", "se/cr+et=").unwrap();
        for text in [
            "AKIA1\nse/cr+et=\n",
            "# of the bucket\r\n\r\n  AKIA1 \r\nse/cr+et=",
            "[default]\naws_access_key_id = AKIA1\naws_secret_access_key=se/cr+et=\n",
            "aws_secret_access_key = se/cr+et=\naws_access_key_id=AKIA1\nregion = eu-central-1\n",
        ] {
            assert_eq!(Credentials::parse(text).as_ref(), Ok(&good), "{text:?}");
        }
        for (text, said) in [
            ("", "two lines"),
            ("AKIA1", "two lines"),
            ("a\nb\nc", "two lines"),
            ("a b\nsecret", "access key ID"),
            ("a/b\nsecret", "access key ID"),
            ("id\nsec ret", "secret access key"),
            ("[a]\naws_access_key_id = 1\n[b]\n", "more than one section"),
            ("[a]\naws_access_key_id = 1\n", "lacks"),
            ("aws_access_key_id=1\naws_secret_access_key=2\naws_session_token=3", "temporary"),
        ] {
            let refused = Credentials::parse(text).unwrap_err().to_string();
            assert!(refused.contains(said), "{text:?}: {refused}");
        }
    }

    proptest! {
        #[test]
        fn no_text_about_credentials_has_the_secret(
            id in "[A-Z]{1,8}", secret in "[a-z0-9+=]{12,40}", rest in "[ -~\n]{0,20}",
        ) {
            let text = format!("{id}\n{secret}\n{rest}");
            let said = match Credentials::parse(&text) {
                Ok(read) => format!("{read:?}"),
                Err(invalid) => format!("{invalid} {invalid:?}"),
            };
            prop_assert!(!said.contains(&secret), "{said}");
        }

        #[test]
        fn any_file_is_read_or_refused(text in any::<String>()) {
            if let Ok(read) = Credentials::parse(&text) {
                let again = Credentials::new(&read.access_key_id, &read.secret_access_key);
                prop_assert_eq!(again.unwrap(), read);
            }
        }
    }
}
