//! The end of a queue at a run that takes requests while it waits for them: the other end is
//! an event value, which is empty while no run waits.

use tokio::sync::{mpsc, watch};

/// Persons ask for one thing at a time.
const REQUESTS: usize = 1;

/// Takes requests for as long as the value lives.
#[derive(Debug)]
pub struct Waiting<'a, Open: Default, Request> {
    open: &'a watch::Sender<Open>,
    requests: mpsc::Receiver<Request>,
}

impl<'a, Open: Default, Request> Waiting<'a, Open, Request> {
    /// Publishes on `open` that requests are taken: `publish` makes the value, which keeps the
    /// sender that it is given.
    pub fn new(
        open: &'a watch::Sender<Open>,
        publish: impl FnOnce(mpsc::Sender<Request>) -> Open,
    ) -> Self {
        let (tx, requests) = mpsc::channel(REQUESTS);
        open.send_replace(publish(tx));
        Self { open, requests }
    }

    /// The next request. Cancel-safe. Never ends: the published value holds a sender.
    pub async fn next(&mut self) -> Request {
        match self.requests.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }
}

impl<Open: Default, Request> Drop for Waiting<'_, Open, Request> {
    fn drop(&mut self) {
        self.open.send_replace(Open::default());
    }
}
