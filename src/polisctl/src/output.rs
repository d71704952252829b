//! The output of commands: columns for people, one document for programs.
//!
//! Every command makes one [`Document`]: a value that serializes, and a text for people.
//! `--output` selects which of them is printed.
//!
//! Invariants:
//! - With `--output json` or `yaml`, standard output has one document and
//!   nothing else, so that a program can read it to its end.
//! - Names and texts from other machines cannot control the terminal.
//! - A command that a text names, and that the role of its reader does not permit, names
//!   the role that does.
//! - Progress is written to standard error, and only if that is a terminal.

use std::fmt;
use std::io::{self, BufRead, IsTerminal, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use clap::builder::{PathBufValueParser, TypedValueParser};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::error::{Error, Explain as _, OutputClosed, OutputFailed};
use super::rights;
use super::table::Table;
use super::text::{clean, clean_lines, cut, fit, width};
use polis_wire::rpc::Role;

/// How a document is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// For people.
    #[default]
    Table,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
}

/// Whether the path of a file that a command writes stands for standard output.
pub(super) fn is_stdout(file: &Path) -> bool {
    file == Path::new("-") || file == Path::new("/dev/stdout")
}

/// Reads the path of a file of a command that has a document, too.
pub(super) fn file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|file| match is_stdout(&file) {
        true => Err("standard output has the document of this command; allowed is a file"),
        false => Ok(file),
    })
}

/// The result of a command.
#[derive(Clone, Debug)]
pub(super) struct Document {
    value: serde_json::Value,
    text: Text,
}

/// Output for a person: paragraphs and tables, which fit into the terminal.
#[derive(Clone, Debug, Default)]
pub(super) struct Text(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Plain(String),
    Table(Table),
}

impl Text {
    /// The same with a table after it.
    pub(super) fn then(mut self, table: Table) -> Self {
        self.0.push(Part::Table(table));
        self
    }

    /// The same with lines after it.
    pub(super) fn and(mut self, text: impl Into<String>) -> Self {
        self.0.push(Part::Plain(clean_lines(&text.into())));
        self
    }

    /// As it is written for a reader, in a terminal with so many columns or anywhere else.
    fn lines(&self, columns: Option<usize>, reader: Option<Role>) -> String {
        let part = |part: &Part| match (part, columns) {
            (Part::Plain(text), Some(columns)) => fit(&rights::for_reader(text, reader), columns),
            (Part::Plain(text), None) => rights::for_reader(text, reader),
            (Part::Table(table), columns) => {
                let table = table.with_cells(|cell| rights::for_reader(cell, reader));
                columns.map_or_else(|| table.to_string(), |columns| table.fit(columns))
            }
        };
        self.0.iter().map(part).collect()
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self::default().and(text)
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self::default().and(text)
    }
}

impl From<Table> for Text {
    fn from(table: Table) -> Self {
        Self::default().then(table)
    }
}

impl Document {
    /// A value, and the text for people.
    pub(super) fn new(value: &impl Serialize, text: impl Into<Text>) -> Result<Self, Error> {
        let value = serde_json::to_value(value).doing(|| "cannot make the document".to_owned())?;
        Ok(Self { value, text: text.into() })
    }

    /// The value for programs.
    pub(super) fn value(&self) -> &serde_json::Value {
        &self.value
    }

    /// The document in `format`, with a line feed at its end unless it is empty. A table
    /// is as wide as its cells.
    #[cfg(test)]
    pub(super) fn render(&self, format: Format) -> Result<String, Error> {
        self.render_in(format, None, None)
    }

    /// The same; text for people fits into `columns`, and names the role for what its reader
    /// may not do.
    fn render_in(
        &self,
        format: Format,
        columns: Option<usize>,
        reader: Option<Role>,
    ) -> Result<String, Error> {
        let mut text = match format {
            Format::Table => self.text.lines(columns, reader),
            Format::Json => serde_json::to_string_pretty(&self.value)?,
            Format::Yaml => serde_saphyr::to_string(&self.value)?,
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        Ok(text)
    }
}

/// Far above the length of any answer.
const ANSWER_MAX: u64 = 1024;

/// Standard output, standard error and the keyboard, or their substitutes in tests.
#[derive(Clone)]
pub(super) struct Streams {
    stdout: Arc<Mutex<dyn Write + Send>>,
    stderr: Arc<Mutex<dyn Write + Send>>,
    /// The keyboard; `None` without a terminal.
    person: Option<Arc<Mutex<dyn BufRead + Send>>>,
    /// The width of the terminal that standard output is; `None` where it is none.
    columns: Option<usize>,
    /// The same of standard error.
    stderr_columns: Option<usize>,
    /// Whether the size of that terminal can be asked for again.
    live: bool,
    /// Receives what progress lines say, in place of a terminal.
    signs: Option<Arc<Mutex<dyn Write + Send>>>,
    /// The role of the reader, once a command has opened a context with a certificate.
    reader: Arc<OnceLock<Role>>,
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Streams")
    }
}

impl Streams {
    /// Those of this process.
    pub(super) fn process() -> Self {
        let columns = columns(io::stdout());
        let streams = Self {
            columns,
            stderr_columns: self::columns(io::stderr()),
            live: columns.is_some(),
            ..Self::new(io::stdout(), io::stderr())
        };
        match io::stdin().is_terminal() && io::stderr().is_terminal() {
            true => streams.with_person(io::BufReader::new(io::stdin())),
            false => streams,
        }
    }

    /// Any two streams, without a keyboard.
    pub(super) fn new(
        stdout: impl Write + Send + 'static,
        stderr: impl Write + Send + 'static,
    ) -> Self {
        let (stdout, stderr) = (Arc::new(Mutex::new(stdout)), Arc::new(Mutex::new(stderr)));
        Self {
            stdout,
            stderr,
            person: None,
            columns: None,
            stderr_columns: None,
            live: false,
            signs: None,
            reader: Arc::default(),
        }
    }

    /// From now on, texts name the role for the commands that `role` does not permit.
    pub(super) fn read_by(&self, role: Role) {
        // A command acts as one user.
        let _first = self.reader.set(role);
    }

    /// The role of the reader, if it is known.
    fn reader(&self) -> Option<Role> {
        self.reader.get().copied()
    }

    /// The same, with `answers` as the typed lines.
    pub(super) fn with_person(self, answers: impl BufRead + Send + 'static) -> Self {
        Self { person: Some(Arc::new(Mutex::new(answers))), ..self }
    }

    /// The same; standard output and standard error are a terminal with so many columns.
    #[cfg(test)]
    pub(super) fn with_columns(self, columns: usize) -> Self {
        Self { columns: Some(columns), stderr_columns: Some(columns), ..self }
    }

    /// The same; `signs` receives what progress lines say, a line each.
    #[cfg(test)]
    pub(super) fn with_signs(self, signs: impl Write + Send + 'static) -> Self {
        Self { signs: Some(Arc::new(Mutex::new(signs))), ..self }
    }

    /// The present size of the terminal: columns, and rows.
    fn size(&self) -> (Option<usize>, usize) {
        let asked = self.live.then(|| rustix::termios::tcgetwinsize(io::stdout()));
        match asked.and_then(Result::ok) {
            Some(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (Some(size.ws_col.into()), size.ws_row.into())
            }
            _ => (self.columns, usize::MAX),
        }
    }

    /// The width of the terminal that standard output is; `None` where it is none.
    pub(super) fn columns(&self) -> Option<usize> {
        self.columns
    }

    /// Whether a question can be asked.
    pub(super) fn has_person(&self) -> bool {
        self.person.is_some()
    }

    /// Reads a typed line.
    pub(super) fn line(&self) -> io::Result<String> {
        let mut line = String::new();
        if let Some(person) = &self.person {
            let mut person = person.lock().unwrap_or_else(PoisonError::into_inner);
            (&mut *person).take(ANSWER_MAX).read_line(&mut line)?;
        }
        Ok(line)
    }

    /// Writes to standard output, and flushes it.
    pub(super) fn stdout(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = self.stdout.lock().unwrap_or_else(PoisonError::into_inner);
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    /// Writes to standard error; lines fit into its terminal. An error of that write is
    /// ignored.
    pub(super) fn stderr(&self, text: &str) {
        let text = rights::for_reader(text, self.reader());
        let text = match self.stderr_columns {
            Some(columns) => fit(&text, columns),
            None => text,
        };
        let mut stderr = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let _lost = stderr.write_all(text.as_bytes());
    }
}

/// The width of a stream that is a terminal and reports its size.
fn columns(stream: impl IsTerminal + rustix::fd::AsFd) -> Option<usize> {
    let size = stream.is_terminal().then(|| rustix::termios::tcgetwinsize(&stream));
    let columns = usize::from(size.and_then(Result::ok)?.ws_col);
    // A terminal of unknown size reports zero.
    (columns > 0).then_some(columns)
}

/// The output of a command.
#[derive(Clone, Debug)]
pub(super) struct Out {
    /// How documents are printed.
    pub(super) format: Format,
    /// The streams.
    pub(super) streams: Streams,
}

impl Out {
    /// Prints the document of a command.
    pub(super) fn print(&self, document: &Document) -> Result<(), Error> {
        let Streams { columns, .. } = self.streams;
        self.raw(document.render_in(self.format, columns, self.streams.reader())?.as_bytes())
    }

    /// Writes raw bytes, for output that is neither table nor document.
    pub(super) fn raw(&self, bytes: &[u8]) -> Result<(), Error> {
        self.streams.stdout(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => OutputClosed.into(),
            _ => OutputFailed(error).into(),
        })
    }

    /// Fails unless standard output may have the content of a file in place of a document.
    pub(super) fn gives(&self, what: &str) -> Result<(), Error> {
        if self.format == Format::Table {
            return Ok(());
        }
        let error = Error::usage(format!(
            "-o - writes {what} to standard output, where --output has a document; allowed is one \
             of both"
        ));
        Err(error.or_help(format!("write {what} to a file, as with -o FILE")))
    }

    /// Entries that are all there: a line each for people, one document for programs.
    pub(super) fn entries(&self, documents: Vec<Document>) -> Result<(), Error> {
        if self.format == Format::Table {
            return documents.iter().try_for_each(|document| self.print(document));
        }
        let values = documents.into_iter().map(|document| document.value).collect();
        self.print(&Document { value: serde_json::Value::Array(values), text: Text::default() })
    }

    /// One entry of a stream without an end: a line for people, a document a line for
    /// programs.
    pub(super) fn stream(&self, document: &Document) -> Result<(), Error> {
        match self.format {
            Format::Table => self.print(document),
            Format::Json => self.raw(format!("{}\n", document.value).as_bytes()),
            Format::Yaml => {
                let text = document.render_in(Format::Yaml, None, None)?;
                self.raw(format!("---\n{text}").as_bytes())
            }
        }
    }

    /// A text with the role for each command that its reader may not type.
    pub(super) fn for_reader(&self, text: &str) -> String {
        rights::for_reader(text, self.streams.reader())
    }

    /// Whether a document is drawn for a person on a terminal.
    pub(super) fn is_screen(&self) -> bool {
        self.format == Format::Table && self.streams.columns.is_some()
    }

    /// Replaces the screen of the terminal by `head` and as much of the document as fits.
    pub(super) fn redraw(&self, head: &str, document: &Document) -> Result<(), Error> {
        let (columns, rows) = self.streams.size();
        let text = document.render_in(Format::Table, columns, self.streams.reader())?;
        self.raw(screenful(head, &text, columns.unwrap_or(usize::MAX), rows).as_bytes())
    }

    /// Awaits `work`; shows what the command waits for once that takes longer than a
    /// moment. Cancel-safe if `work` is.
    pub(super) async fn waiting<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            // Cancel-safe: the work goes on below.
            done = &mut work => return done,
            // Cancel-safe: only waits.
            () = tokio::time::sleep(MOMENT) => {}
        }
        let progress = self.progress();
        progress.says(what);
        work.await
    }

    /// A remark for a person, on standard error.
    pub(super) fn remark(&self, text: &str) {
        self.streams.stderr(&format!("{}\n", clean_lines(text)));
    }

    /// A progress line; invisible without a terminal.
    pub(super) fn progress(&self) -> Progress {
        let bar = if io::stderr().is_terminal() {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        Progress(bar, self.streams.signs.clone())
    }
}

/// The cursor to the first cell, and the screen cleared.
const REDRAW: &str = "\u{1b}[H\u{1b}[2J";

/// Rows of a redrawn screen beside the document: the head, an empty one, how many lines
/// are left out.
const REDRAW_BESIDE: usize = 3;

/// A whole screen of so many columns and rows: `head`, and as much of `text` as fits below it.
/// The terminal breaks a line that is wider, as one with a long command.
fn screenful(head: &str, text: &str, columns: usize, rows: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    // Below the head and an empty line; the cursor has the last row.
    let room = rows.saturating_sub(REDRAW_BESIDE);
    let needed = |line: &str| width(line).div_ceil(columns.max(1)).max(1);
    let ends = lines.iter().scan(0_usize, |used, line| {
        *used += needed(line);
        Some(*used)
    });
    let shown = ends.take_while(|end| *end <= room).count();
    let mut screen = format!("{REDRAW}{}\n\n", cut(&clean(head), columns));
    for line in &lines[..shown] {
        screen.push_str(line);
        screen.push('\n');
    }
    let more = match lines.len() - shown {
        0 => String::new(),
        1 => "… 1 more line".to_owned(),
        more => format!("… {more} more lines"),
    };
    screen + &cut(&more, columns)
}

/// So long a command may be silent: shorter than a person begins to wonder, longer than an
/// ordinary answer, which would only make the line flicker.
const MOMENT: Duration = Duration::from_millis(400);

/// How often a spinner turns.
const TURN: Duration = Duration::from_millis(120);

/// A line on standard error that is removed when the command has its result.
pub(super) struct Progress(ProgressBar, Option<Arc<Mutex<dyn Write + Send>>>);

impl Progress {
    /// Shows what the command waits for.
    pub(super) fn says(&self, text: &str) {
        if let Some(signs) = &self.1 {
            let mut signs = signs.lock().unwrap_or_else(PoisonError::into_inner);
            let _lost = writeln!(signs, "{text}");
        }
        self.0.set_message(clean(text));
        self.0.enable_steady_tick(TURN);
    }

    /// Prints something else on the terminal while the line is not there.
    pub(super) fn suspend(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Between a name and its value.
const GAP: usize = 2;

/// Names and values, a line each; a value of several lines stays in its column.
pub(super) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or_default() + GAP;
    let mut text = String::new();
    for (name, value) in fields {
        let mut lines = value.lines();
        let first = clean(lines.next().unwrap_or_default());
        text.push_str(format!("{name:width$}{first}").trim_end());
        text.push('\n');
        for line in lines {
            text.push_str(format!("{:width$}{}", "", clean(line)).trim_end());
            text.push('\n');
        }
    }
    text
}

/// A dash for an empty text.
pub(super) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Pair {
        name: &'static str,
        count: u32,
        list: Vec<&'static str>,
    }

    fn document() -> Document {
        let pair = Pair { name: "a: b", count: 3, list: vec!["x", "true"] };
        Document::new(&pair, "for people").unwrap()
    }

    #[test]
    fn a_document_is_one_value_in_every_format() {
        insta::assert_snapshot!(document().render(Format::Table).unwrap(), @"for people");
        insta::assert_snapshot!(document().render(Format::Json).unwrap(), @r#"
        {
          "count": 3,
          "list": [
            "x",
            "true"
          ],
          "name": "a: b"
        }
        "#);
        insta::assert_snapshot!(document().render(Format::Yaml).unwrap(), @r#"
        count: 3
        list:
        - x
        - "true"
        name: "a: b"
        "#);
    }

    #[test]
    fn text_for_people_cannot_control_the_terminal_and_keeps_its_lines() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\u{202e}b\n\nc\n";
        let document = Document::new(&hostile, hostile).unwrap();
        assert_eq!(document.render(Format::Table).unwrap(), "a?[2J?31m ?b\n\nc\n");
        let value: String = serde_json::from_str(&document.render(Format::Json).unwrap()).unwrap();
        assert_eq!(value, hostile);
    }

    #[test]
    fn a_redrawn_screen_keeps_its_head_and_shows_what_is_cut() {
        let screen = |text, columns, rows| {
            let whole = screenful("the head of it", text, columns, rows);
            whole.strip_prefix(REDRAW).unwrap().to_owned()
        };
        assert_eq!(screen("a\nb\n", 80, 5), "the head of it\n\na\nb\n");
        assert_eq!(screen("a\nb\n", 80, 4), "the head of it\n\na\n… 1 more line");
        // The terminal breaks the first line in two.
        let wide = "0123456789ab\nb\n\nd\n";
        assert_eq!(screen(wide, 10, 6), "the head..\n\n0123456789ab\nb\n… 2 more..");
        assert_eq!(screen(wide, 10, 3), "the head..\n\n… 4 more..");
        assert_eq!(screen(wide, 1, 0), ".\n\n.");
        // So does it with one whose characters take two columns each.
        let wide = "\u{6f22}\u{5b57}\u{6f22}\nb\n";
        assert_eq!(screen(wide, 5, 5), "the..\n\n\u{6f22}\u{5b57}\u{6f22}\n… 1..");
    }

    #[test]
    fn a_value_of_several_lines_stays_in_its_column() {
        insta::assert_snapshot!(fields(&[("a", "1\n2".to_owned()), ("long name", "3".to_owned())]), @r"
        a          1
                   2
        long name  3
        ");
    }
}
