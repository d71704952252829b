//! The send queue of a TCP connection.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// Bytes that the kernel of the other side has not acknowledged, with those that are not
/// sent yet.
///
/// # Errors
///
/// When the kernel refuses, for example for something other than a socket.
#[expect(unsafe_code, reason = "an ioctl")]
pub fn unacknowledged(socket: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    let socket = socket.as_fd();
    // SAFETY: the descriptor is open as long as it is borrowed, and this ioctl (SIOCOUTQ)
    // writes one int, for which there is room.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // It is never negative.
    Ok(u32::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn bytes_without_room_on_the_other_side_stay_in_the_queue_until_it_reads() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _from) = listener.accept().unwrap();
        assert_eq!(unacknowledged(&sender).unwrap(), 0);
        sender.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(length) = sender.write(&[7; 65536]) {
            sent += length;
        }
        assert!(unacknowledged(&sender).unwrap() > 0);
        receiver.read_exact(&mut vec![0; sent]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while unacknowledged(&sender).unwrap() > 0 {
            assert!(Instant::now() < deadline, "read, and not acknowledged");
            std::thread::yield_now();
        }
        assert!(unacknowledged(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
