//! The demo workload: a web server that says on which node, in which pod and under which
//! kernel it runs.
//!
//! It shows that pods, services and names work, and that a sandboxed pod has a kernel of
//! its own. Every path has the same answer, so any probe fits.
//!
//! ```text
//! node   polis-4f0c…          from the variable POLIS_NODE
//! pod    default/demo-7d4b    from POLIS_NAMESPACE and POLIS_POD
//! kernel 6.12.57+deb13-amd64  from /proc
//! ```
//!
//! [`get`] is the other side: a pod that asks the server by the name of its service.
//! [`trial`] fills what a pod has, on request, to see where its limits are.
//!
//! What this module does not do: keep connections open, or read a request's body.

mod client;
pub mod trial;

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

pub use self::client::get;

/// The port that it listens on.
pub const PORT: u16 = 8080;

/// Requests that are answered at once; the kernel queues a few more.
const THREADS: usize = 8;
/// A client that is slower holds a thread of the eight. On a machine that starts everything at
/// once, an API server takes seconds from its connection to its request.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a request's head.
const HEAD_MAX: usize = 8 << 10;
const UNKNOWN: &str = "unknown";

/// The facts in the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The ID of the node.
    pub node: String,
    /// Namespace and name of the pod.
    pub pod: String,
    /// The release of the kernel.
    pub kernel: String,
}

impl Facts {
    /// The facts of this process: its environment, which a pod fills by its `fieldRef`s,
    /// and its kernel.
    #[must_use]
    pub fn gather() -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let file = |path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let name = variable("POLIS_POD").or_else(|| file("/proc/sys/kernel/hostname"));
        let name = name.unwrap_or_else(|| UNKNOWN.to_owned());
        Self {
            node: variable("POLIS_NODE").unwrap_or_else(|| UNKNOWN.to_owned()),
            pod: match variable("POLIS_NAMESPACE") {
                Some(namespace) => format!("{namespace}/{name}"),
                None => name,
            },
            kernel: file("/proc/sys/kernel/osrelease").unwrap_or_else(|| UNKNOWN.to_owned()),
        }
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, pod, kernel } = self;
        write!(f, "node   {node}\npod    {pod}\nkernel {kernel}\n")
    }
}

/// Listens on every address of the pod.
///
/// # Errors
///
/// The error of the kernel.
pub fn listen() -> io::Result<TcpListener> {
    // The socket of IPv6 takes both; a kernel without IPv6 has only the other.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT))
        .or_else(|_no_ipv6| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))
}

/// Answers every request, in threads of its own.
///
/// # Errors
///
/// When a thread cannot be started.
pub fn serve(listener: TcpListener, facts: Facts) -> io::Result<()> {
    let shared = Arc::new((listener, facts.to_string()));
    for _ in 0..THREADS {
        let shared = Arc::clone(&shared);
        thread::Builder::new().spawn(move || {
            let (listener, text) = &*shared;
            loop {
                if let Ok((client, _address)) = listener.accept() {
                    // A client that went away needs no answer.
                    let _gone = answer(client, text);
                }
            }
        })?;
    }
    Ok(())
}

fn answer(mut client: TcpStream, text: &str) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let head = head(&mut client)?;
    client.write_all(response(&head, text).as_bytes())
}

/// Everything up to the first empty line, at most [`HEAD_MAX`] bytes.
fn head(client: &mut impl io::Read) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut byte = [0; 512];
    while head.len() < HEAD_MAX && !head.windows(4).any(|window| window == b"\r\n\r\n") {
        match client.read(&mut byte)? {
            0 => break,
            length => head.extend_from_slice(&byte[..length]),
        }
    }
    Ok(head)
}

fn response(head: &[u8], text: &str) -> String {
    let method = head.split(|byte| *byte == b' ').next().unwrap_or_default();
    let (status, body) = match method {
        b"GET" => ("200 OK", text),
        b"HEAD" => ("200 OK", ""),
        _ => ("405 Method Not Allowed", ""),
    };
    let length = if method == b"HEAD" { text.len() } else { body.len() };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn facts() -> Facts {
        Facts { node: "polis-1".to_owned(), pod: "default/demo".to_owned(), kernel: "6".to_owned() }
    }

    #[test]
    fn a_request_is_answered_with_the_facts() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        serve(listener, facts()).unwrap();
        // More than there are threads, so each of them answers again.
        for _ in 0..2 * THREADS {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(b"GET /any HTTP/1.1\r\nHost: demo\r\n\r\n").unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            assert_eq!(body, "node   polis-1\npod    default/demo\nkernel 6\n");
        }
    }

    #[test]
    fn only_questions_are_answered() {
        let text = facts().to_string();
        let length = format!("Content-Length: {}\r\n", text.len());
        let head = response(b"HEAD / HTTP/1.1\r\n\r\n", &text);
        assert!(head.contains(&length) && head.ends_with("\r\n\r\n"), "{head}");
        assert!(response(b"POST / HTTP/1.1\r\n\r\n", &text).starts_with("HTTP/1.1 405 "));
        assert!(response(b"", &text).starts_with("HTTP/1.1 405 "));
    }

    #[test]
    fn a_head_without_an_end_is_bounded() {
        let read = head(&mut io::repeat(b'x')).unwrap();
        assert!((HEAD_MAX..HEAD_MAX + 512).contains(&read.len()));
    }

    #[test]
    fn the_kernel_of_this_machine_is_known() {
        let facts = Facts::gather();
        assert!(facts.kernel.starts_with(|c: char| c.is_ascii_digit()), "{facts:?}");
        assert!(!facts.pod.is_empty());
    }
}
