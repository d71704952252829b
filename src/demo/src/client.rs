//! The client of the demo: asks a server by its name and returns the answer.
//!
//! A pod that runs it shows that names, services and the network of pods work, from where
//! they are used.
//!
//! It waits for a server that is deployed together with it: if it ended, kubelet would start its
//! container again after ten seconds, then after twenty and forty.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use polis_base::sys::poll;

/// For each step: to connect, to send, and for each part of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a server may take until it has a name and accepts connections.
const AWAITED: Duration = Duration::from_secs(60);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// Bytes of an answer; the server's are shorter.
const ANSWER_MAX: u64 = 64 << 10;

/// Asks `HOST:PORT` and returns the body of the answer.
///
/// The name is resolved by the resolver of the C library, with the search domains that
/// kubelet writes into `/etc/resolv.conf`. Every address is tried, in order, and again for up to a
/// minute while there is no such name or nothing accepts. A connection without an answer is not
/// tried again: that is how a NetworkPolicy refuses one.
///
/// # Errors
///
/// The last address's failure; [`io::ErrorKind::InvalidData`] for an answer other than 200.
pub fn get(server: &str) -> io::Result<String> {
    ask(connect_within(server, AWAITED)?, server)
}

/// Connects to the server, for as long as it may take until it accepts connections.
fn connect_within(server: &str, time: Duration) -> io::Result<TcpStream> {
    let begun = Instant::now();
    loop {
        match connect(server) {
            Err(error) if may_come(&error) && begun.elapsed() < time => poll::sleep(PAUSE),
            ended => return ended,
        }
    }
}

/// Whether another try may reach the server.
fn may_come(error: &io::Error) -> bool {
    !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::TimedOut)
}

fn connect(server: &str) -> io::Result<TcpStream> {
    let none = || io::Error::new(io::ErrorKind::NotFound, format!("{server} has no address"));
    let mut failed = none();
    for address in server.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn ask(mut stream: TcpStream, host: &str) -> io::Result<String> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut answer)?;
    body(&answer).map(str::to_owned)
}

fn body(answer: &str) -> io::Result<&str> {
    let refused = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return Err(refused("the answer has no end of its head"));
    };
    let status = head.lines().next().unwrap_or_default();
    match status.split(' ').nth(1) {
        Some("200") => Ok(body),
        _ => Err(refused(status)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::{Facts, serve};

    #[test]
    fn the_server_is_asked_by_its_name() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let facts = Facts { node: "n".to_owned(), pod: "p".to_owned(), kernel: "k".to_owned() };
        serve(listener, facts).unwrap();
        assert_eq!(get(&format!("localhost:{port}")).unwrap(), "node   n\npod    p\nkernel k\n");
    }

    #[test]
    fn a_server_that_comes_later_is_awaited() {
        // An address of its own: no other test takes the port meanwhile.
        let server = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 80), 0)).unwrap();
        let address = server.local_addr().unwrap();
        drop(server);
        let refused = connect_within(&address.to_string(), Duration::ZERO).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let facts = Facts { node: "n".to_owned(), pod: "p".to_owned(), kernel: "k".to_owned() };
        let comes = std::thread::spawn(move || {
            poll::sleep(PAUSE / 2);
            serve(TcpListener::bind(address).unwrap(), facts).unwrap();
        });
        assert_eq!(get(&address.to_string()).unwrap(), "node   n\npod    p\nkernel k\n");
        comes.join().unwrap();
    }

    #[test]
    fn a_connection_that_a_policy_refuses_is_not_tried_again() {
        assert!(!may_come(&io::ErrorKind::TimedOut.into()));
        assert!(!may_come(&io::ErrorKind::InvalidInput.into()));
        // The resolver's own errors have no kind.
        assert!(may_come(&io::Error::other("failed to lookup address information")));
        assert!(may_come(&io::ErrorKind::ConnectionRefused.into()));
    }

    #[test]
    fn an_answer_that_is_not_200_is_an_error() {
        assert_eq!(body("HTTP/1.1 200 OK\r\nA: b\r\n\r\nx").unwrap(), "x");
        let error = body("HTTP/1.1 503 Service Unavailable\r\n\r\nx").unwrap_err();
        assert!(error.to_string().contains("503"));
        assert!(body("HTTP/1.1 200 OK\r\n").is_err());
        assert!(get("localhost").is_err());
    }
}
