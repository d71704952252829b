//! The sink that files a child process's output lines in the log tree.

use std::borrow::Cow;

use super::{Body, Levelled, Origin, Parser, Tree};

/// A rule for the lines of one program: it may change their severity.
pub type Rule = fn(&mut Levelled);

/// The destination of one program's lines. Cheap to clone.
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

    /// The same, with a rule for the lines that the parser recognised.
    #[must_use]
    pub fn ruled(self, rule: Rule) -> Self {
        Self { rule: Some(rule), ..self }
    }

    /// The dotted name of the writer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds one line, without its line feed, and returns the parsed body; `None` for an
    /// empty line. A line that the parser does not recognise becomes raw.
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
