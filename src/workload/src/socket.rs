//! The sockets by which programs of this machine call this process.

use std::io;
use std::path::Path;

use tokio::net::UnixListener;

/// Listens at `path`, in place of the socket of an earlier run: its clients see the new one appear,
/// and connect again. Blocks.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => UnixListener::bind(path),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_socket_takes_the_place_of_an_earlier_one_and_not_of_a_directory() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("own.sock");
        for _run in 0..2 {
            let listener = listen(&path).unwrap();
            let (client, accepted) = tokio::join!(UnixStream::connect(&path), listener.accept());
            drop((client.unwrap(), accepted.unwrap()));
        }
        listen(base.path()).unwrap_err();
        assert!(path.exists());
    }
}
