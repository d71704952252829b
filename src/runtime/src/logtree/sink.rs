//! Takes the output lines of a child process into the log tree.

use std::borrow::Cow;

use super::{Body, Levelled, Origin, Parser, Tree};

/// What is known of one program's lines and of no other's: it may weigh one anew.
pub type Rule = fn(&mut Levelled);

/// Where the lines of one program go. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sink {
    tree: Tree,
    name: String,
    parser: Parser,
    rule: Option<Rule>,
}

impl Sink {
    pub(super) fn new(tree: Tree, name: String, parser: Parser) -> Self {
        Self { tree, name, parser, rule: None }
    }

    /// The same, with a rule of the program for the lines that were understood.
    #[must_use]
    pub fn ruled(self, rule: Rule) -> Self {
        Self { rule: Some(rule), ..self }
    }

    /// The dotted name of the writer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds one line, without its line feed, and returns what was understood of
    /// it; nothing of an empty one. What the parser does not know becomes raw.
    pub fn line(&self, bytes: &[u8]) -> Option<Body> {
        let mut body = text(bytes).map(|text| self.parser.parse(&text))?;
        if let (Some(rule), Body::Levelled(levelled)) = (self.rule, &mut body) {
            rule(levelled);
        }
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
