//! The sink that files a child process's output lines in the log tree.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use polis_base::sys::clock;

use super::repeats::Repeats;
use super::{Body, Levelled, Origin, Parser, Tree};

/// A rule for the lines of one program: it may change their severity.
pub type Rule = fn(&mut Levelled);

/// The destination of one program's lines. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sink {
    file: Arc<File>,
    parser: Parser,
    rule: Option<Rule>,
}

/// The state that all clones share. Its end writes what was only counted.
#[derive(Debug)]
struct File {
    tree: Tree,
    name: String,
    repeats: Mutex<Repeats>,
}

impl Drop for File {
    fn drop(&mut self) {
        let rest = self.repeats.get_mut().unwrap_or_else(PoisonError::into_inner).rest();
        rest.into_iter().for_each(|body| self.tree.append(&self.name, Origin::Program, body));
    }
}

impl Sink {
    pub(super) fn new(tree: Tree, name: String, parser: Parser) -> Self {
        let repeats = Mutex::default();
        Self { file: Arc::new(File { tree, name, repeats }), parser, rule: None }
    }

    /// The same, with a rule for the lines that the parser recognised.
    #[must_use]
    pub fn ruled(self, rule: Rule) -> Self {
        Self { rule: Some(rule), ..self }
    }

    /// The dotted name of the writer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.file.name
    }

    /// Adds one line, without its line feed, and returns the parsed body; `None` for an
    /// empty line. A line that the parser does not recognise becomes raw; one that repeats
    /// a recent one is counted.
    pub fn line(&self, bytes: &[u8]) -> Option<Body> {
        let mut body = text(bytes).map(|text| self.parser.parse(&text))?;
        if let (Some(rule), Body::Levelled(levelled)) = (self.rule, &mut body) {
            rule(levelled);
        }
        let File { tree, name, repeats } = &*self.file;
        // The lock covers the writing: the streams of one program keep their order.
        let mut repeats = repeats.lock().unwrap_or_else(PoisonError::into_inner);
        for body in repeats.filter(clock::uptime(), body.clone()) {
            tree.append(name, Origin::Program, body);
        }
        Some(body)
    }
}

/// A line of output as text; `None` if it is empty.
#[must_use]
pub fn text(line: &[u8]) -> Option<Cow<'_, str>> {
    let line = line.trim_ascii_end();
    (!line.is_empty()).then(|| String::from_utf8_lossy(line))
}
