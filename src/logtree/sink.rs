//! Takes the output lines of a child process into the log tree.

use super::{Origin, Parser, Tree};

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

    /// Adds one line, without its line feed. Anything is accepted: what the
    /// parser does not understand becomes a raw entry.
    pub fn line(&self, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let text = text.trim_end_matches(['\r', '\n']);
        if !text.is_empty() {
            self.tree.append(&self.name, Origin::Program, self.parser.parse(text));
        }
    }
}
