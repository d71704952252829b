//! Ethernet frames on a unix socket, as QEMU's `stream` cards send them: the length in four
//! bytes, big-endian, and the frame.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Longest frame that a card with an ordinary MTU sends, with all its offloads.
const FRAME_MAX: usize = 128 * 1024;

/// Sends a frame down a line.
pub(crate) fn write_frame(line: &mut impl io::Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).unwrap_or_default().to_be_bytes();
    line.write_all(&[&length[..], frame].concat())
}

/// The next frame of a line.
pub(crate) fn read(line: &mut UnixStream) -> io::Result<Arc<[u8]>> {
    let mut length = [0; 4];
    line.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > FRAME_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut frame = vec![0; length];
    line.read_exact(&mut frame)?;
    Ok(frame.into())
}
