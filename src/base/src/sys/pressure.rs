//! How long work has waited for the machine: the kernel's pressure stall information.
//!
//! Source: `Documentation/accounting/psi.rst` of the kernel, the files of `/proc/pressure`.

use std::io;
use std::time::Duration;

/// What tasks wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// A processor.
    Cpu,
    /// A disk.
    Io,
}

/// For how long, since the machine started, at least one task has waited.
///
/// # Errors
///
/// A kernel without these files, or whose file says nothing.
pub fn waited(resource: Resource) -> io::Result<Duration> {
    let path = match resource {
        Resource::Cpu => "/proc/pressure/cpu",
        Resource::Io => "/proc/pressure/io",
    };
    let text = std::fs::read_to_string(path)?;
    parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, path))
}

fn parse(text: &str) -> Option<Duration> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split_ascii_whitespace().find_map(|word| word.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_at_least_one_task_is_read() {
        let text = "some avg10=0.37 avg60=0.46 avg300=0.58 total=2018640731\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(parse(text), Some(Duration::from_micros(2_018_640_731)));
        for text in ["", "full total=7\n", "some avg10=0.37\n", "some total=\n", "some total=-1\n"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
