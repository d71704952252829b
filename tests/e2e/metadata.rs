//! A stand-in for the metadata service of Amazon EC2, at the address that a real one has.
//!
//! ```text
//! machine --TCP--> 169.254.169.254:80, QEMU's NAT --starts--> this program as a relay
//!                                                                | unix socket
//!                                                                v
//!                                                          thread of the story
//! ```
//!
//! QEMU starts a program for each connection to such an address; the relay passes its bytes to the
//! story, which counts the requests.

use std::ffi::OsStr;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, thread};

use anyhow::{Context as _, Result};

/// The first argument of this program as a relay.
const RELAY: &str = "metadata-relay";

/// The token of every session.
const TOKEN: &str = "AQAEAI-story==";

/// Bytes of a request that are read.
const HEAD_MAX: usize = 4096;

/// A running stand-in. Its thread ends with the story.
pub(crate) struct Ec2 {
    socket: PathBuf,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Ec2 {
    /// Serves this user data; `socket` is made.
    pub(crate) fn start(socket: &Path, user_data: Vec<u8>) -> Result<Self> {
        let listener = UnixListener::bind(socket).context("cannot make the socket")?;
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A machine that is switched off leaves a request without its end.
                if let Err(error) = serve(stream, &user_data, &seen) {
                    eprintln!("a request to the metadata service: {error}");
                }
            }
        });
        Ok(Self { socket: socket.to_owned(), requests })
    }

    /// The fields of the SMBIOS table of an instance.
    pub(crate) fn smbios() -> Vec<String> {
        vec!["type=0,vendor=Amazon EC2".to_owned(), "type=1,manufacturer=Amazon EC2".to_owned()]
    }

    /// The command that QEMU starts for each connection.
    pub(crate) fn command(&self) -> Result<Option<String>> {
        let program = env::current_exe()?;
        Ok(Some(format!("'{}' {RELAY} '{}'", program.display(), self.socket.display())))
    }

    /// The first lines of the requests, with a word on the token.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn serve(mut stream: UnixStream, user_data: &[u8], seen: &Mutex<Vec<String>>) -> io::Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_MAX {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let has = |header: &str| head.lines().any(|line| line.eq_ignore_ascii_case(header));
    let line = head.lines().next().unwrap_or_default();
    let session = has(&format!("x-aws-ec2-metadata-token: {TOKEN}"));
    let word = if session { "with a token" } else { "without" };
    seen.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{line}, {word}"));
    let (status, body) = match line {
        "PUT /latest/api/token HTTP/1.1" if has("x-aws-ec2-metadata-token-ttl-seconds: 60") => {
            ("200 OK", TOKEN.as_bytes())
        }
        "GET /latest/user-data HTTP/1.1" if session => ("200 OK", user_data),
        "GET /latest/user-data HTTP/1.1" => ("401 Unauthorized", &b""[..]),
        _ => ("400 Bad Request", &b""[..]),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body].concat())
}

/// Passes the bytes of one connection on, if this program was started for that.
pub(crate) fn relay() -> Option<ExitCode> {
    let mut args = env::args_os().skip(1);
    if args.next()? != OsStr::new(RELAY) {
        return None;
    }
    let socket = args.next()?;
    Some(match pass(Path::new(&socket)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{RELAY}: {error}");
            ExitCode::FAILURE
        }
    })
}

fn pass(socket: &Path) -> io::Result<()> {
    let mut server = UnixStream::connect(socket)?;
    let mut request = server.try_clone()?;
    thread::spawn(move || {
        // Ends with the machine's end of the connection.
        let copied = io::copy(&mut io::stdin(), &mut request);
        copied.and_then(|_length| request.shutdown(Shutdown::Write))
    });
    let mut answer = io::stdout();
    io::copy(&mut server, &mut answer)?;
    answer.flush()
}
