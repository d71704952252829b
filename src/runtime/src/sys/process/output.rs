//! The output of a child, line by line: into the log, and the last lines for an error message.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::task::JoinSet;

use crate::logtree::{self, Body, Sink};

/// Bytes of one line of output; a longer one is split.
const LINE_MAX: u64 = 16 * 1024;
/// Lines kept for the error message of a failed program.
const TAIL_MAX: usize = 12;

/// The last lines, oldest first.
type Tail = Arc<Mutex<VecDeque<Body>>>;

/// The tasks that read the pipes of a child.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// Aborted on drop; they end by themselves with the pipes.
    tasks: JoinSet<()>,
    tail: Tail,
}

impl Readers {
    /// Reads a pipe to its end, into this log.
    pub(super) fn read(
        &mut self,
        pipe: impl AsyncRead + Unpin + Send + 'static,
        sink: Option<Sink>,
    ) {
        self.tasks.spawn(read_lines(pipe, sink, Arc::clone(&self.tail)));
    }

    /// The last lines, oldest first.
    pub(super) fn tail(&self) -> Vec<Body> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Waits for the end of each pipe. Cancel-safe.
    pub(super) async fn ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn read_lines(pipe: impl AsyncRead + Unpin, sink: Option<Sink>, tail: Tail) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut pipe).take(LINE_MAX).read_until(b'\n', &mut line).await {
            // A broken pipe is an end like any other.
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let body = match &sink {
            Some(sink) => sink.line(&line),
            None => logtree::text(&line).map(|text| Body::Raw(text.into_owned())),
        };
        let Some(body) = body else { continue };
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.len() == TAIL_MAX {
            tail.pop_front();
        }
        tail.push_back(body);
    }
}
