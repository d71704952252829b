//! Takes the output lines of a child process into the log tree.

use std::borrow::Cow;

use super::{Body, Origin, Parser, Tree};

/// Where the lines of one program go. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sink {
    tree: Tree,
    name: String,
    parser: Parser,
}

impl Sink {
    pub(super) fn new(tree: Tree, name: String, parser: Parser) -> Self {
        Self { tree, name, parser }
    }

    /// The dotted name of the writer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds one line, without its line feed, and returns what was understood of
    /// it; nothing of an empty one. What the parser does not know becomes raw.
    pub fn line(&self, bytes: &[u8]) -> Option<Body> {
        let body = text(bytes).map(|text| self.parser.parse(&text))?;
        self.tree.append(&self.name, Origin::Program, body.clone());
        Some(body)
    }
}

/// A line of output as text; `None` if it is empty.
#[must_use]
pub fn text(line: &[u8]) -> Option<Cow<'_, str>> {
    let line = line.trim_ascii_end();
    (!line.is_empty()).then(|| String::from_utf8_lossy(line))
}
