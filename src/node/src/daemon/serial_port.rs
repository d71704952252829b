//! The lines for the serial port: written to standard output, where `init` reads.
//!
//! A thread of its own, so that lines get out even while the runtime is busy, and a
//! slow `init` does not slow the node: the queue before it is bounded.

use std::io;

use rustix::stdio::stdout;
use tokio::sync::mpsc;

use polis_base::serial::{Severity, log_line};
use polis_runtime::lines::Lines;
use polis_runtime::supervisor::ROOT;

/// Lines that are written with one system call.
const BATCH: usize = 64;

/// Starts the writer. It ends with the process.
pub(super) fn start(lines: Lines, queue: mpsc::Receiver<String>) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("serial".to_owned()).stack_size(64 * 1024);
    thread.spawn(move || write(&lines, queue)).map(|_detached| ())
}

fn write(lines: &Lines, mut queue: mpsc::Receiver<String>) {
    let mut batch = Vec::new();
    let mut text = String::new();
    loop {
        let count = queue.blocking_recv_many(&mut batch, BATCH);
        if count == 0 {
            return;
        }
        text.clear();
        for line in batch.drain(..) {
            text.push_str(&line);
            text.push('\n');
        }
        let dropped = lines.take_dropped();
        if dropped > 0 {
            let message = format!("{dropped} lines for the serial port were dropped: it is slow");
            text.push_str(&log_line(
                polis_base::sys::clock::uptime(),
                Severity::Warning,
                ROOT,
                &message,
            ));
            text.push('\n');
        }
        put(text.as_bytes());
        lines.written(count as u64);
    }
}

/// Writes all of it. If `init` is gone, nothing reads the port, and nothing can be
/// done.
fn put(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(stdout(), bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}
