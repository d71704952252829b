//! The answers of a store, which are XML: the names of objects, and why a request was refused.
//!
//! This module only reads texts that its caller has bounded. A document type is refused, and so
//! are more elements than an honest answer has.

use polis_base::serial::is_control;
use roxmltree::{Document, Node, ParsingOptions};

/// Elements and texts of an answer: a thousand objects with ten facts each, and blanks between.
const NODES_MAX: u32 = 64 << 10;
/// Characters of a word of the store that messages quote.
const QUOTE_MAX: usize = 200;

/// One object, by its whole key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) key: String,
    pub(super) size: u64,
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) objects: Vec<Listed>,
    /// Whether another page follows.
    pub(super) more: bool,
}

/// Why a store refused a request, in its own words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// Its code, such as `AccessDenied`; empty: it gave none.
    pub code: String,
    /// Its message.
    pub message: String,
    /// The region of the bucket, where another one was asked for.
    pub region: String,
}

/// Reads a page of a listing; the error says what is wrong with it.
pub(super) fn page(text: &str) -> Result<Page, String> {
    let document = parsed(text)?;
    let root = document.root_element();
    if root.tag_name().name() != "ListBucketResult" {
        return Err(format!("it is a {}", quoted(root.tag_name().name())));
    }
    let object = |node: Node<'_, '_>| {
        let key = child(node, "Key").ok_or("an object has no key")?;
        let size = child(node, "Size").and_then(|size| size.trim().parse().ok());
        Ok(Listed { key: key.to_owned(), size: size.ok_or("an object has no size")? })
    };
    let contents = root.children().filter(|node| node.tag_name().name() == "Contents");
    let objects = contents.map(object).collect::<Result<_, &str>>()?;
    let more = child(root, "IsTruncated").is_some_and(|text| text.trim() == "true");
    Ok(Page { objects, more })
}

/// Reads a refusal; a body that cannot be read says nothing.
pub(super) fn refusal(text: &str) -> Refusal {
    let Ok(document) = parsed(text) else { return Refusal::default() };
    let root = document.root_element();
    let word = |name| child(root, name).map(quoted).unwrap_or_default();
    Refusal { code: word("Code"), message: word("Message"), region: word("Region") }
}

fn parsed(text: &str) -> Result<Document<'_>, String> {
    let options = ParsingOptions { nodes_limit: NODES_MAX, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).map_err(|error| quoted(&error.to_string()))
}

/// The text of a child with this name, in whichever namespace.
fn child<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    let found = node.children().find(|child| child.tag_name().name() == name)?;
    Some(found.text().unwrap_or_default())
}

/// A word of the store, within bounds and on one line.
pub(super) fn quoted(text: &str) -> String {
    let plain = |c: char| if is_control(c) { ' ' } else { c };
    text.trim().chars().take(QUOTE_MAX).map(plain).collect()
}

#[cfg(test)]
#[path = "xml_fuzz_tests.rs"]
mod fuzz_tests;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) const LISTING: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
  <Name>bucket</Name><Prefix>p/</Prefix><IsTruncated>true</IsTruncated>
  <Contents><Key>p/a&amp;b</Key><LastModified>2026-11-26T12:00:00.000Z</LastModified>
    <ETag>&quot;d41d8cd98f00b204e9800998ecf8427e&quot;</ETag><Size>7</Size></Contents>
  <Contents><Key>p/c</Key><Size> 18446744073709551615 </Size></Contents>
</ListBucketResult>"#;

    #[test]
    fn a_listing_has_keys_and_sizes() {
        let read = page(LISTING).unwrap();
        let objects =
            [("p/a&b", 7), ("p/c", u64::MAX)].map(|(key, size)| Listed { key: key.into(), size });
        assert_eq!(read, Page { objects: objects.into(), more: true });
        let empty = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
        assert_eq!(page(empty).unwrap(), Page::default());
    }

    #[test]
    fn what_is_no_listing_is_refused_with_the_reason() {
        for (text, said) in [
            ("", ""),
            ("<html><body>a proxy</body></html>", "it is a html"),
            ("<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>", "no key"),
            (
                "<ListBucketResult><Contents><Key>a</Key><Size>-1</Size></Contents></ListBucketResult>",
                "no size",
            ),
            ("<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult/>", ""),
        ] {
            let refused = page(text).unwrap_err();
            assert!(refused.contains(said), "{text}: {refused}");
        }
        let many = format!("<ListBucketResult>{}</ListBucketResult>", "<a/>".repeat(70_000));
        assert!(page(&many).is_err());
        let deep = "<a>".repeat(100_000);
        assert!(page(&deep).is_err());
    }

    #[test]
    fn a_refusal_has_a_code_a_message_and_a_region() {
        let text = "<Error><Code>AuthorizationHeaderMalformed</Code><Message>the\nregion</Message>\
                    <Region>eu-central-1</Region></Error>";
        let read = refusal(text);
        assert_eq!((&*read.code, &*read.message), ("AuthorizationHeaderMalformed", "the region"));
        assert_eq!(read.region, "eu-central-1");
        assert_eq!(refusal("no XML"), Refusal::default());
    }

    #[test]
    fn words_of_a_store_neither_turn_the_text_around_nor_begin_a_line() {
        let text = "<Error><Code>a\u{202e}b</Code><Message>c\u{2028}d\u{85}e</Message></Error>";
        let read = refusal(text);
        assert_eq!((&*read.code, &*read.message), ("a b", "c d e"));
    }

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(
            text in any::<String>(), at in 0..LISTING.len(), byte in any::<u8>(),
        ) {
            let mut changed = LISTING.as_bytes().to_vec();
            changed[at] = byte;
            for text in [text.as_str(), &String::from_utf8_lossy(&changed)] {
                if let Err(said) = page(text) {
                    prop_assert!(said.chars().count() <= QUOTE_MAX);
                    prop_assert!(!said.contains(is_control));
                }
                let Refusal { code, message, region } = refusal(text);
                let words = [code, message, region].concat();
                prop_assert!(!words.contains(is_control));
            }
        }
    }
}
