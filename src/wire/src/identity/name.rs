//! The name that an operator gives to a node; programs show and accept it beside the ID.
//!
//! Certificates prove the ID, and records refer to the ID; a name only identifies the node
//! for people. The leader keeps names unique in a cluster.
//!
//! Invariants:
//! - A text that commands accept as a node ID, or as a prefix of one, is not a name.
//! - A name is a label of DNS.

use std::fmt;
use std::str::FromStr;

use super::PREFIX;

/// The longest name, in bytes: as long as a label of DNS.
const LENGTH_MAX: usize = 63;

/// A name that is allowed: 1 to 63 of a-z, 0-9 and dash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeName(String);

impl NodeName {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The reason why a text is not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidNodeName {
    /// A length or a character that is not allowed.
    #[error(
        "allowed are 1 to {LENGTH_MAX} of a-z, 0-9 and dash, beginning with a letter and not \
         ending with a dash"
    )]
    Form,
    /// Commands would read it as a node ID.
    #[error(
        "it could be read as a node ID: a name must not begin with {PREFIX:?} or have only \
         hexadecimal digits"
    )]
    LikeAnId,
}

impl FromStr for NodeName {
    type Err = InvalidNodeName;

    fn from_str(text: &str) -> Result<Self, InvalidNodeName> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let begins = text.starts_with(|c: char| c.is_ascii_lowercase());
        let formed = text.len() <= LENGTH_MAX && text.chars().all(allowed);
        if !begins || !formed || text.ends_with('-') {
            return Err(InvalidNodeName::Form);
        }
        let digits = text.chars().all(|c| c.is_ascii_hexdigit());
        if digits || text.starts_with(PREFIX) {
            return Err(InvalidNodeName::LikeAnId);
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_is_a_label_of_dns_that_no_id_begins_with() {
        let longest = "n".repeat(LENGTH_MAX);
        for good in ["n", "node-1", "dbs", "web2", "rack-7-left", "facade-g", &longest] {
            assert_eq!(good.parse::<NodeName>().unwrap().as_str(), good);
        }
        let long = format!("{longest}n");
        let formless = ["", "-", "1st", "Node", "a.b", "a b", "a-", "-a", "é", "a\n", &long];
        for bad in formless {
            assert_eq!(bad.parse::<NodeName>(), Err(InvalidNodeName::Form), "{bad:?}");
        }
        for bad in ["a", "db", "beef", "facade", "polis-1", "polis-x"] {
            assert_eq!(bad.parse::<NodeName>(), Err(InvalidNodeName::LikeAnId), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_name_is_an_id_or_the_beginning_of_one(key: [u8; 32], digits in 1..32_usize) {
            let id = super::super::NodeId::from_public_key(&key).to_string();
            let beginning = &id[PREFIX.len()..PREFIX.len() + digits];
            prop_assert!(id.parse::<NodeName>().is_err());
            prop_assert!(beginning.parse::<NodeName>().is_err());
        }

        #[test]
        fn arbitrary_text_is_a_name_or_refused(text in ".{0,80}") {
            if let Ok(name) = text.parse::<NodeName>() {
                prop_assert!(name.as_str().len() <= LENGTH_MAX && name.as_str().is_ascii());
            }
        }
    }
}
