//! What every command prints: a reader that closes the output early ends no command.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// Writes a text. The reader of a closed output, such as `head`, has what it wanted.
///
/// # Panics
///
/// As the macros of `std` do, where the output is lost in another way: a disk is full.
pub(crate) fn write(mut to: impl Write, text: Arguments<'_>) {
    if let Err(error) = to.write_fmt(text)
        && error.kind() != ErrorKind::BrokenPipe
    {
        panic!("cannot write the output: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_closed_output_ends_no_command_and_a_full_disk_does() {
        struct Fails(ErrorKind);
        impl Write for Fails {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let ends = |kind| {
            std::panic::catch_unwind(|| write(Fails(kind), format_args!("{}\n", 1))).is_err()
        };
        assert!(!ends(ErrorKind::BrokenPipe) && ends(ErrorKind::StorageFull));
        let mut open = Vec::new();
        write(&mut open, format_args!("{}\n", 1));
        assert_eq!(open, b"1\n");
    }
}
