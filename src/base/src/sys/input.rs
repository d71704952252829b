//! The power button: an input device with a power key.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// `struct input_event` with 64-bit times: 16 bytes of time, type, code, value.
const EVENT_SIZE: usize = 24;
/// `EV_KEY`.
const KIND_KEY: u16 = 1;
/// `KEY_POWER`.
const KEY_POWER: u16 = 116;
/// The value of a key that goes down; 0 is up, 2 is a repetition.
const DOWN: i32 = 1;

/// Whether a device has a power key, by its `capabilities/key` in `/sys`: words
/// of 64 bits in hexadecimal, the highest first.
#[must_use]
pub fn has_power_key(capabilities: &str) -> bool {
    let word = usize::from(KEY_POWER / 64);
    let Some(bits) = capabilities.split_whitespace().rev().nth(word) else { return false };
    u64::from_str_radix(bits, 16).is_ok_and(|bits| bits >> (KEY_POWER % 64) & 1 == 1)
}

/// Whether these bytes of a device contain a press of the power key.
fn pressed(bytes: &[u8]) -> bool {
    bytes.chunks_exact(EVENT_SIZE).any(|event| {
        let kind = u16::from_ne_bytes([event[16], event[17]]);
        let code = u16::from_ne_bytes([event[18], event[19]]);
        let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
        kind == KIND_KEY && code == KEY_POWER && value == DOWN
    })
}

/// The result of a read of a button.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The power key went down.
    Pressed,
    /// Something else, or nothing.
    Nothing,
    /// The device is gone.
    Gone,
}

/// An input device with a power key.
#[derive(Debug)]
pub struct Button {
    file: File,
}

impl Button {
    /// Opens `/dev/input/eventN`.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path)?;
        Ok(Self { file })
    }

    /// Reads what has happened. Never blocks.
    pub fn read(&mut self) -> Received {
        let mut buffer = [0; EVENT_SIZE * 64];
        match self.file.read(&mut buffer) {
            Ok(0) => Received::Gone,
            Ok(length) if pressed(&buffer[..length]) => Received::Pressed,
            Ok(_) => Received::Nothing,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Received::Nothing,
                _ => Received::Gone,
            },
        }
    }
}

impl AsFd for Button {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: i32) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(code.to_ne_bytes());
        bytes.extend(value.to_ne_bytes());
        bytes
    }

    #[test]
    fn a_power_button_differs_from_a_mouse() {
        assert!(has_power_key("10000000000000 0"));
        assert!(has_power_key("402000000 3803078f800d001 feffffdfffefffff fffffffffffffffe"));
        assert!(!has_power_key("70000 0 0 0 0"));
        assert!(!has_power_key(""));
        assert!(!has_power_key("zz 0"));
    }

    #[test]
    fn only_the_press_of_the_power_key_counts() {
        assert!(pressed(&[event(4, 4, 9), event(1, 116, 1)].concat()));
        assert!(!pressed(&event(1, 116, 0)));
        assert!(!pressed(&event(1, 30, 1)));
        assert!(!pressed(&event(1, 116, 1)[..20]));
    }
}
