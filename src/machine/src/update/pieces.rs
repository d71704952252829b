//! A bundle that arrives in pieces, as the thread that works with it reads it.

use std::io::{self, Read};

use tokio::sync::mpsc;

/// Pieces on the way to the thread: enough that neither side waits for the other's next step.
pub const PIECES: usize = 4;

/// The pieces of a bundle. Blocks until the next one is there; the end of the sender is the end
/// of the bundle, and one that was cut short is refused by its manifest.
#[derive(Debug)]
pub struct Pieces {
    received: mpsc::Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
}

impl Pieces {
    /// The pieces that come out of a channel.
    #[must_use]
    pub fn new(received: mpsc::Receiver<Vec<u8>>) -> Self {
        Self { received, piece: Vec::new(), at: 0 }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() {
            let Some(piece) = self.received.blocking_recv() else { return Ok(0) };
            (self.piece, self.at) = (piece, 0);
        }
        let count = buffer.len().min(self.piece.len() - self.at);
        buffer[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_are_one_text() {
        let (sender, received) = mpsc::channel(PIECES);
        for piece in [&b"ab"[..], b"", b"cdefg", b"h"] {
            sender.blocking_send(piece.to_vec()).unwrap();
        }
        drop(sender);
        let mut pieces = Pieces::new(received);
        let mut three = [0; 3];
        assert_eq!((pieces.read(&mut three).unwrap(), &three[..2]), (2, &b"ab"[..]));
        let mut rest = Vec::new();
        pieces.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"cdefgh");
    }
}
