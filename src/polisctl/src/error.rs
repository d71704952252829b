//! The errors of commands: exit status, causes and help.

use std::fmt::Write as _;
use std::io::ErrorKind;

use polis_base::cause;
use polis_wire::rpc::client::DialError;

/// The reader of standard output has closed it. A connection to a node that breaks has the same
/// kind of I/O error, and is a failure.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub(super) struct OutputClosed;

/// Standard output takes no more, though it has a reader: a disk is full.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub(super) struct OutputFailed(#[source] pub(super) std::io::Error);

/// Why a command ended.
#[derive(Debug)]
pub(super) struct Error {
    exit: Exit,
    cause: anyhow::Error,
    help: Option<String>,
}

/// The exit status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// Refused or failed.
    Failed = 1,
    /// Wrong usage.
    Usage = 2,
    /// Timed out waiting.
    TimedOut = 3,
}

impl Error {
    /// Refused or failed, without a cause.
    pub(super) fn new(what: impl Into<String>) -> Self {
        anyhow::Error::msg(what.into()).into()
    }

    /// Wrong usage that clap does not detect.
    pub(super) fn usage(what: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, ..Self::new(what) }
    }

    /// Timed out waiting.
    pub(super) fn timed_out(what: impl Into<String>) -> Self {
        Self { exit: Exit::TimedOut, ..Self::new(what) }
    }

    /// A timeout with its cause.
    pub(super) fn late(cause: anyhow::Error) -> Self {
        Self { exit: Exit::TimedOut, cause, help: None }
    }

    /// The same as the last thing that was seen before a wait timed out.
    pub(super) fn after_a_wait(self) -> Self {
        Self { exit: Exit::TimedOut, ..self }
    }

    /// The same with help, unless an error closer to the cause has some.
    pub(super) fn or_help(mut self, help: impl Into<String>) -> Self {
        self.help.get_or_insert_with(|| help.into());
        self
    }

    /// The same with this help in place of other help.
    pub(super) fn with_help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// The same in case of a timeout.
    pub(super) fn help_if_late(self, help: impl Into<String>) -> Self {
        if self.exit == Exit::TimedOut { self.with_help(help) } else { self }
    }

    /// The same with this help before the one that it has: the likelier of two ways on.
    pub(super) fn help_first(mut self, first: &str) -> Self {
        self.help = Some(match self.help.take() {
            Some(help) => format!("{first}; or {help}"),
            None => first.to_owned(),
        });
        self
    }

    /// The same as the cause of another failure.
    pub(super) fn context(self, what: impl Into<String>) -> Self {
        Self { cause: self.cause.context(what.into()), ..self }
    }

    /// The error and its causes on one line.
    pub(super) fn summary(&self) -> String {
        super::text::clean(&super::text::spelled(&cause::line(self.cause.as_ref())))
    }

    /// The exit status of the program.
    pub(super) fn exit(&self) -> Exit {
        self.exit
    }

    /// Whether the reader closed the output, as `head` does, which is not a failure.
    pub(super) fn is_output_closed(&self) -> bool {
        self.cause.chain().any(|cause| cause.is::<OutputClosed>())
    }

    /// Whether standard output takes no more, for either reason: another call to a node does not
    /// help.
    pub(super) fn is_of_output(&self) -> bool {
        self.is_output_closed() || self.cause.chain().any(|cause| cause.is::<OutputFailed>())
    }

    /// Whether the two ends of a connection did not accept each other's certificates.
    pub(super) fn is_handshake(&self) -> bool {
        let is_it = |cause: &(dyn std::error::Error + 'static)| {
            matches!(cause.downcast_ref(), Some(DialError::Handshake { .. }))
        };
        self.cause.chain().any(is_it)
    }

    /// The same with a general next step, unless it has one.
    pub(super) fn helpful(self) -> Self {
        let of = |cause: &(dyn std::error::Error + 'static)| {
            cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind)
        };
        let help = self.cause.chain().find_map(of).and_then(help_of).unwrap_or(GENERAL);
        self.or_help(help)
    }

    /// `error:`, the causes, `help:`.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for (depth, cause) in cause::chain(self.cause.as_ref()).iter().enumerate() {
            let cause = super::text::clean(&super::text::spelled(cause));
            let label = if depth == 0 { "error" } else { "cause" };
            // Writing to a string cannot fail.
            let _written = writeln!(text, "{label}: {cause}");
        }
        if let Some(help) = &self.help {
            let _written = writeln!(text, "help: {}", super::text::clean_lines(help));
        }
        text
    }
}

impl<E: Into<anyhow::Error>> From<E> for Error {
    fn from(cause: E) -> Self {
        Self { exit: Exit::Failed, cause: cause.into(), help: None }
    }
}

/// The next step where an error has none of its own.
const GENERAL: &str = "`--help` after a command explains it; docs/polisctl.md lists all commands";

/// The next step after an error of the kernel, where one suits every command.
fn help_of(kind: ErrorKind) -> Option<&'static str> {
    Some(match kind {
        ErrorKind::NotFound => "check the path",
        ErrorKind::NotADirectory => "check the path: a part of it is not a folder",
        ErrorKind::IsADirectory => "name a file: this is a folder",
        ErrorKind::PermissionDenied => "check the permissions of the file and its folders",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "make room there, or name a place on another disk; then repeat the command"
        }
        ErrorKind::ReadOnlyFilesystem => "name a place that can be written",
        _ => return None,
    })
}

/// The beginning of the last line of an error of clap.
const CLAP_HELP: &str = "\n\nFor more information, try ";

/// Messages of the standard library about a text that is not a number, and their replacements.
const NUMBERS: [(&str, &str); 3] = [
    (": invalid digit found in string", ": allowed is a whole number"),
    (": cannot parse integer from empty string", ": allowed is a whole number"),
    (": number too large to fit in target type", ": the number is too large"),
];

/// An error of clap in the form of every other one: without colours, and with `help:` at its end.
/// The help of a group of commands, which clap prints where a command is missing, stays as it is.
pub(super) fn of_clap(text: &str) -> String {
    if !text.starts_with("error: ") {
        return text.to_owned();
    }
    let said = text.rsplit_once(CLAP_HELP).map_or(text, |(said, _)| said);
    let said = NUMBERS.iter().fold(said.to_owned(), |said, (raw, words)| said.replace(raw, words));
    format!("{}\n\nhelp: {GENERAL}\n", said.trim_end())
}

/// Adds context to a failure.
pub(super) trait Explain<T> {
    /// The operation that failed, with its object.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error>;
    /// The next step.
    fn help(self, help: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<Error>> Explain<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|error| error.into().context(what()))
    }

    fn help(self, help: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|error| error.into().or_help(help()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken() -> Result<(), std::io::Error> {
        Err(std::io::Error::other("the disk is gone"))
    }

    #[test]
    fn an_error_shows_its_causes_and_the_next_step() {
        let error = broken()
            .help(|| "find the disk".to_owned())
            .doing(|| "cannot read owner.key".to_owned())
            .unwrap_err();
        assert_eq!(
            error.render(),
            "error: cannot read owner.key\ncause: the disk is gone\nhelp: find the disk\n"
        );
        assert_eq!(error.exit(), Exit::Failed);
    }

    #[test]
    fn the_help_closest_to_the_cause_stays() {
        let error = Error::new("x").or_help("first").or_help("second").context("y");
        assert_eq!(error.render(), "error: y\ncause: x\nhelp: first\n");
    }

    #[test]
    fn a_likelier_way_on_comes_before_the_help_that_there_is() {
        let error = Error::new("x").or_help("switch it on").help_first("name it");
        assert_eq!(error.render(), "error: x\nhelp: name it; or switch it on\n");
        assert_eq!(Error::new("x").help_first("name it").render(), "error: x\nhelp: name it\n");
    }

    #[test]
    fn a_usage_error_of_clap_ends_with_the_next_step_and_a_list_of_commands_stays() {
        let said = "error: unknown\n\nUsage: x\n\nFor more information, try '--help'.\n";
        assert_eq!(of_clap(said), format!("error: unknown\n\nUsage: x\n\nhelp: {GENERAL}\n"));
        assert_eq!(of_clap("error: unknown\n"), format!("error: unknown\n\nhelp: {GENERAL}\n"));
        let commands = "Operates clusters.\n\nUsage: x\n";
        assert_eq!(of_clap(commands), commands);
    }

    #[test]
    fn each_error_has_a_next_step() {
        let help = |error: Error| error.helpful().help.unwrap();
        assert_eq!(help(Error::new("x").or_help("find it")), "find it");
        let of = |kind: ErrorKind| help(Error::from(std::io::Error::from(kind)));
        assert_eq!(of(ErrorKind::NotFound), "check the path");
        assert!(of(ErrorKind::PermissionDenied).contains("permissions"));
        assert!(of(ErrorKind::StorageFull).contains("make room"));
        assert!(of(ErrorKind::IsADirectory).contains("name a file"));
        assert!(of(ErrorKind::ReadOnlyFilesystem).contains("can be written"));
        let other = of(ErrorKind::InvalidData);
        assert!(other.contains("--help"), "{other}");
        assert!(help(Error::new("x")).contains("--help"));
    }

    #[test]
    fn a_connection_that_breaks_is_a_failure_and_a_closed_output_is_not() {
        let broken = std::io::Error::from(ErrorKind::BrokenPipe);
        assert!(!Error::from(broken).context("cannot reach the node").is_output_closed());
        assert!(Error::from(OutputClosed).is_output_closed());
    }

    #[test]
    fn a_full_disk_below_the_output_is_a_failure_of_it() {
        let full = || Error::from(OutputFailed(ErrorKind::StorageFull.into()));
        assert!(full().is_of_output() && !full().is_output_closed());
        assert!(Error::from(OutputClosed).is_of_output());
        assert!(!Error::from(std::io::Error::from(ErrorKind::StorageFull)).is_of_output());
        let printed = full().helpful().render();
        assert!(printed.starts_with("error: cannot write to standard output\n"), "{printed}");
        assert!(printed.contains("\ncause: "), "{printed}");
        assert!(printed.contains("help: make room there"), "{printed}");
    }

    #[test]
    fn what_came_from_outside_cannot_move_the_cursor() {
        assert_eq!(Error::new("a\u{1b}[2Jb\nc").render(), "error: a?[2Jb c\n");
        let helped = Error::new("a").or_help("b\u{1b}[2J\nc").render();
        assert_eq!(helped, "error: a\nhelp: b?[2J\nc\n");
    }

    #[test]
    fn an_alert_of_tls_is_in_words() {
        let error = Error::new("received fatal alert: HandshakeFailure").context("cannot reach x");
        assert!(!error.render().contains("HandshakeFailure"), "{}", error.render());
        assert!(!error.summary().contains("HandshakeFailure"), "{}", error.summary());
    }

    #[test]
    fn the_status_survives_what_is_added() {
        assert_eq!(Error::timed_out("x").context("y").or_help("z").exit(), Exit::TimedOut);
    }
}
