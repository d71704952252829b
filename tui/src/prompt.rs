//! The prompt: takes one line of text, in the row where the keys are.

use crate::Key;

/// Longest text: more than a person searches for.
const MAX: usize = 60;

/// The purpose of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    /// Entries with the text in them.
    Search,
    /// Entries of a service and those below it.
    Below,
}

impl For {
    pub(crate) fn lead(self) -> &'static str {
        match self {
            Self::Search => "with ",
            Self::Below => "of ",
        }
    }
}

/// A line that is being typed.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) what: For,
    pub(crate) text: String,
    before: String,
}

/// The effect of a key on the line.
pub(crate) enum Outcome {
    /// It goes on; the text may be another.
    Typing,
    /// It is done, or given up: then the text is the one before.
    Done,
}

impl Prompt {
    /// Begins with the text that is in force.
    pub(crate) fn new(what: For, text: &str) -> Self {
        Self { what, text: text.to_owned(), before: text.to_owned() }
    }

    pub(crate) fn key(&mut self, key: Key) -> Outcome {
        match key {
            Key::Enter => return Outcome::Done,
            Key::Esc | Key::Ctrl('c') => {
                self.text.clone_from(&self.before);
                return Outcome::Done;
            }
            Key::Ctrl('u') => self.text.clear(),
            Key::Backspace => drop(self.text.pop()),
            Key::Char(c) if self.text.chars().count() < MAX => self.text.push(c),
            _ => {}
        }
        Outcome::Typing
    }
}
