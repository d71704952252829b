//! The keys of the data partition: holds them in memory, and shows them only on
//! request.
//!
//! The cluster manager derives a [`Passphrase`] or has a [`RecoveryKey`] and hands
//! it to `storage` in a [`Wanted`]. Slot 0 of the partition's LUKS header takes the
//! one, slot 1 the other.
//!
//! Invariants:
//! - Keys in this module are wiped from memory with their last copy, and print as `…`.
//! - It leaves the process only through the pipe that `cryptsetup` reads.
//!
//! What this module does not do: derive, seal, store or ask for keys (`cluster`).

use std::fmt;

use zeroize::Zeroizing;

/// Bytes of a key: 256 bits, so nothing has to be made expensive to guess.
pub const SIZE: usize = 32;

/// The key of slot 0: made of the node's and the cluster's unlock keys.
#[derive(Clone)]
pub struct Passphrase(Zeroizing<[u8; SIZE]>);

/// The key of slot 1: the owner keeps it.
#[derive(Clone)]
pub struct RecoveryKey(Zeroizing<[u8; SIZE]>);

impl Passphrase {
    /// From the bytes that were derived. `cryptsetup` gets them in hexadecimal.
    #[must_use]
    pub fn new(bytes: Zeroizing<[u8; SIZE]>) -> Self {
        Self(bytes)
    }

    /// The bytes that `cryptsetup` reads.
    #[must_use]
    pub fn text(&self) -> Zeroizing<Vec<u8>> {
        hexadecimal(&self.0)
    }
}

impl RecoveryKey {
    /// From its bytes. `cryptsetup` gets them in hexadecimal.
    #[must_use]
    pub fn new(bytes: Zeroizing<[u8; SIZE]>) -> Self {
        Self(bytes)
    }

    /// Its bytes, for the code that shows it to its owner.
    #[must_use]
    pub fn bytes(&self) -> &[u8; SIZE] {
        &self.0
    }

    /// The bytes that `cryptsetup` reads.
    #[must_use]
    pub fn text(&self) -> Zeroizing<Vec<u8>> {
        hexadecimal(&self.0)
    }
}

/// Without a newline, so nothing depends on how one is read.
fn hexadecimal(bytes: &[u8; SIZE]) -> Zeroizing<Vec<u8>> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    // Allocated once: the former buffers of a growing vector are not wiped.
    let mut text = Zeroizing::new(Vec::with_capacity(2 * SIZE));
    text.extend(digits.map(|digit| DIGITS[usize::from(digit)]));
    text
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl fmt::Debug for RecoveryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The keys of a new partition.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Slot 0.
    pub passphrase: Passphrase,
    /// Slot 1; a volume of a further disk has none.
    pub recovery: Option<RecoveryKey>,
}

/// The keys to try on a locked partition.
#[derive(Clone, Debug)]
pub enum Key {
    /// Slot 0.
    Passphrase(Passphrase),
    /// Slot 1.
    Recovery(RecoveryKey),
}

impl Key {
    /// The slot that it belongs to.
    #[must_use]
    pub fn slot(&self) -> u8 {
        match self {
            Self::Passphrase(_) => 0,
            Self::Recovery(_) => 1,
        }
    }

    /// The bytes that `cryptsetup` reads.
    #[must_use]
    pub fn text(&self) -> Zeroizing<Vec<u8>> {
        match self {
            Self::Passphrase(passphrase) => passphrase.text(),
            Self::Recovery(recovery) => recovery.text(),
        }
    }
}

/// A partition that is to be made.
#[derive(Clone, Debug)]
pub enum Make {
    /// Without protection.
    Insecure,
    /// Encrypted.
    Encrypted(Keys),
    /// Encrypted, and every change by somebody else is noticed.
    Authenticated(Keys),
}

impl Make {
    /// Which kind that is.
    #[must_use]
    pub fn kind(&self) -> super::Kind {
        match self {
            Self::Insecure => super::Kind::Insecure,
            Self::Encrypted(_) => super::Kind::Encrypted,
            Self::Authenticated(_) => super::Kind::Authenticated,
        }
    }

    /// The key that opens it.
    #[must_use]
    pub fn keys(&self) -> Option<&Keys> {
        match self {
            Self::Insecure => None,
            Self::Encrypted(keys) | Self::Authenticated(keys) => Some(keys),
        }
    }
}

/// The request of the cluster manager to storage.
///
/// The owner of the channel puts `None` back once the partition is ready, so that no
/// copy of a key stays behind in it.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// Answers [`super::Status::Absent`]: make the partition.
    Make(Make),
    /// Answers [`super::Status::Locked`] and [`super::Status::Refused`]: open it.
    /// To try another key, send another value.
    Open {
        /// The key to try.
        key: Key,
        /// The key that slot 0 gets then, before anything is mounted.
        rekey: Option<Passphrase>,
    },
    /// Answers every status of a partition that is there: mark it, so that the next boot
    /// wipes it. [`super::Status::GivenUp`] follows.
    GiveUp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_prints_as_nothing_and_reads_as_hexadecimal() {
        let bytes = || Zeroizing::new([0xa7; SIZE]);
        let recovery = RecoveryKey::new(bytes());
        let keys = Keys { passphrase: Passphrase::new(bytes()), recovery: Some(recovery.clone()) };
        let wanted = Wanted::Make(Make::Authenticated(keys.clone()));
        let printed = format!("{wanted:?}");
        assert_eq!(
            printed, "Make(Authenticated(Keys { passphrase: …, recovery: Some(…) }))",
            "{printed}"
        );
        assert_eq!(*keys.passphrase.text(), "a7".repeat(SIZE).into_bytes());
        assert_eq!(*Key::Recovery(recovery).text(), "a7".repeat(SIZE).into_bytes());
    }
}
