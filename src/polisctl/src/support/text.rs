//! The text of a log in an archive: its newest lines, without what could be a key.

use std::borrow::Cow;

use polis_base::recovery::form;

/// The text in place of a word that could be a key.
const LEFT_OUT: &str = "(left out: it could be a key)";
/// So many hexadecimal digits are a secret of 32 bytes, or a hash that a report can miss.
const DIGITS: usize = 64;
/// So many characters of base64 are a secret of 32 bytes.
const BASE64: usize = 43;

/// The last lines of a text that may be longer.
#[derive(Debug)]
pub(super) struct Newest {
    text: String,
    bytes_max: usize,
    cut: bool,
}

impl Newest {
    /// Keeps the newest lines in at most `bytes_max`.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { text: String::new(), bytes_max, cut: false }
    }

    /// Appends a line.
    pub(super) fn push(&mut self, line: &str) {
        self.text.push_str(&without_keys(line));
        self.text.push('\n');
        // Seldom, and not for each line: removing from the front moves the rest.
        if self.text.len() > 2 * self.bytes_max {
            self.shorten();
        }
    }

    /// The text.
    pub(super) fn into_text(mut self) -> String {
        self.shorten();
        match self.cut {
            true => format!("(older lines are left out)\n{}", self.text),
            false => self.text,
        }
    }

    fn shorten(&mut self) {
        let Some(excess) = self.text.len().checked_sub(self.bytes_max).filter(|more| *more > 0)
        else {
            return;
        };
        let begin = self.text.bytes().skip(excess).position(|byte| byte == b'\n');
        let begin = begin.map_or(self.text.len(), |at| excess + at + 1);
        self.text.drain(..begin);
        self.cut = true;
    }
}

/// Whether a word could be a secret of 32 bytes or more in base64: a line of a key, a token.
/// Paths and IDs have fewer kinds of characters, or are shorter.
fn is_base64_secret(word: &str) -> bool {
    let kinds = [u8::is_ascii_uppercase, u8::is_ascii_lowercase, u8::is_ascii_digit];
    word.len() >= BASE64 && kinds.iter().all(|kind| word.bytes().any(|byte| kind(&byte)))
}

/// The document without words that could be keys in any of its texts.
pub(super) fn clear_keys(value: &mut serde_json::Value) {
    use serde_json::Value;
    match value {
        Value::String(text) => *text = without_keys(text).into_owned(),
        Value::Array(all) => all.iter_mut().for_each(clear_keys),
        Value::Object(all) => all.values_mut().for_each(clear_keys),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The line without words that could be keys. No part of the system logs one; this is for
/// the programs whose lines it passes on.
fn without_keys(line: &str) -> Cow<'_, str> {
    if line.contains("PRIVATE KEY") {
        return Cow::Borrowed(LEFT_OUT);
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let is_key = |word: &str| {
        let digits = word.len() >= DIGITS && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits || form::read(word).is_ok()
    };
    let is_base64 = |c: char| c.is_ascii_alphanumeric() || "+/-_".contains(c);
    if line.split(|c: char| !is_base64(c)).any(is_base64_secret) {
        return Cow::Borrowed(LEFT_OUT);
    }
    if !line.split(|c: char| !is_word(c)).any(is_key) {
        return Cow::Borrowed(line);
    }
    let parts = line.split_inclusive(|c: char| !is_word(c));
    let kept = parts.map(|part| {
        let word = part.trim_end_matches(|c: char| !is_word(c));
        if is_key(word) { format!("{LEFT_OUT}{}", &part[word.len()..]) } else { part.to_owned() }
    });
    Cow::Owned(kept.collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_that_could_be_keys_are_left_out_and_nothing_else() {
        let key = form::write(&[7; 32]);
        let hex = "a5".repeat(32);
        let line = format!("key={} ticket=\"{hex}\" node=polis-{}", *key, &hex[..32]);
        let kept = without_keys(&line);
        assert!(!kept.contains(&key[..9]) && !kept.contains(&hex[..40]), "{kept}");
        assert!(kept.starts_with("key=(left out") && kept.ends_with(&hex[..32]), "{kept}");
        for plain in ["", "eth0: link is up, 1000 Mbit/s", "polis-01 é ü", &hex[..63]] {
            assert_eq!(without_keys(plain), plain);
        }
        assert_eq!(without_keys("-----BEGIN PRIVATE KEY-----"), LEFT_OUT);
    }

    proptest! {
        #[test]
        fn a_long_log_keeps_its_newest_lines_within_its_bound(
            lines in prop::collection::vec("[a-zé ]{0,40}", 0..60), bytes_max in 0..500_usize,
        ) {
            let mut newest = Newest::new(bytes_max);
            lines.iter().for_each(|line| newest.push(line));
            let text = newest.into_text();
            let text = text.strip_prefix("(older lines are left out)\n").unwrap_or(&text);
            prop_assert!(text.len() <= bytes_max);
            let whole: String = lines.iter().map(|line| format!("{line}\n")).collect();
            prop_assert!(whole.ends_with(text));
            prop_assert!(whole.len() > bytes_max || text == whole);
        }
    }
}
