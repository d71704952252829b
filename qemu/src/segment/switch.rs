//! The switch of a segment: a listening socket and two threads a port.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::capture::Capture;
use crate::frame::{read, write_frame};
use crate::ipv6::{self, Outcome};
use crate::plug::Port;
use crate::scratch::Scratch;
use crate::vlan;

/// Frames that wait for one port; more are lost.
const QUEUE: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct State {
    /// The port where each hardware address was last seen.
    learnt: BTreeMap<[u8; 6], Port>,
    pub(super) lines: BTreeMap<Port, SyncSender<Parcel>>,
    pub(super) cut: BTreeSet<(Port, Port)>,
    pub(super) delays: BTreeMap<Port, Duration>,
    pub(super) capture: Option<Capture>,
    /// The VLAN of each port whose frames have its tag.
    pub(super) trunks: BTreeMap<Port, u16>,
    /// Bytes from each port, a frame once for each port that got it.
    pub(super) delivered: BTreeMap<Port, u64>,
    /// In a segment with IPv6 only.
    pub(super) router: Option<ipv6::Router>,
}

/// A frame, and when it may leave.
pub(super) struct Parcel {
    due: Instant,
    pub(super) frame: Arc<[u8]>,
}

impl State {
    /// Sends `frame`, which came in at `from`, to its destination.
    pub(super) fn pass(&mut self, from: Port, frame: &Arc<[u8]>) {
        let untagged = match self.trunks.get(&from) {
            None => Arc::clone(frame),
            Some(id) => match vlan::untagged(frame, *id) {
                Some(frame) => frame.into(),
                None => return,
            },
        };
        let frame = &untagged;
        let Some((&to, rest)) = frame.split_first_chunk::<6>() else { return };
        let Some(&sender) = rest.first_chunk::<6>() else { return };
        self.learnt.insert(sender, from);
        let Some(router) = &self.router else { return self.switch(from, to, frame) };
        if from == Port::Gateway {
            let Some(frame) = router.forwarded(frame) else { return };
            return self.switch(from, to, &frame.into());
        }
        match router.sent(frame) {
            Outcome::Pass => self.switch(from, to, frame),
            Outcome::Answer(answer) => {
                let Some(&to) = answer.first_chunk() else { return };
                self.switch(Port::Gateway, to, &answer.into());
            }
            Outcome::Gateway(frame) => self.send(from, Port::Gateway, &frame.into()),
            Outcome::Lost => {}
        }
    }

    fn switch(&mut self, from: Port, to: [u8; 6], frame: &Arc<[u8]>) {
        let group = to[0] & 1 == 1;
        match self.learnt.get(&to) {
            Some(&port) if !group => self.send(from, port, frame),
            _ => {
                let ports: Vec<Port> = self.lines.keys().copied().collect();
                for port in ports {
                    // The gateway speaks IPv6, too, and would be a second router.
                    if self.router.is_some() && port == Port::Gateway {
                        continue;
                    }
                    if port != from && (group || port != Port::Gateway) {
                        self.send(from, port, frame);
                    }
                }
            }
        }
    }

    fn send(&mut self, from: Port, to: Port, frame: &Arc<[u8]>) {
        if from == to || self.cut.contains(&pair(from, to)) {
            return;
        }
        let delay = |port| self.delays.get(&port).copied().unwrap_or_default();
        let parcel =
            Parcel { due: Instant::now() + delay(from) + delay(to), frame: Arc::clone(frame) };
        let Some(line) = self.lines.get(&to) else { return };
        let tagged = self.trunks.get(&to).and_then(|id| vlan::tagged(frame, *id));
        let parcel = match tagged {
            Some(tagged) => Parcel { frame: tagged.into(), ..parcel },
            None => parcel,
        };
        // Full: the frame is lost, as on any switch.
        if line.try_send(parcel).is_err() {
            return;
        }
        *self.delivered.entry(from).or_default() += u64::try_from(frame.len()).unwrap_or(u64::MAX);
        if let Some(capture) = &mut self.capture {
            capture.add(from, to, frame);
        }
    }
}

/// The switch: a listening socket and two threads a port.
#[derive(Debug)]
pub(super) struct Switch {
    pub(super) state: Arc<Mutex<State>>,
    /// Holds the sockets.
    dir: Scratch,
}

impl Switch {
    pub(super) fn start(machines: u8) -> io::Result<Self> {
        let dir = Scratch::new()?;
        let switch = Self { state: Arc::default(), dir };
        // One more than there are machines: see `Segment::spare`.
        let ports = (0..=machines).map(Port::Machine).chain([Port::Gateway]);
        for port in ports {
            let listener = UnixListener::bind(switch.socket(port))?;
            let (line, parcels) = sync_channel(QUEUE);
            switch.lock().lines.insert(port, line);
            let state = Arc::clone(&switch.state);
            thread::spawn(move || serve(port, &listener, &state, parcels));
        }
        Ok(switch)
    }

    pub(super) fn socket(&self, port: Port) -> PathBuf {
        self.dir.path().join(match port {
            Port::Machine(machine) => machine.to_string(),
            Port::Gateway => "gateway".to_owned(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // Each port's writer ends with its line, and wakes the accepting thread.
        self.lock().lines.clear();
        let ports = fs_entries(self.dir.path());
        for socket in ports {
            let _refused = UnixStream::connect(socket);
        }
    }
}

fn fs_entries(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

pub(super) fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // No code here panics with the lock held, and the table of addresses is always
    // consistent.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An unordered pair.
pub(super) fn pair(a: Port, b: Port) -> (Port, Port) {
    (a.min(b), a.max(b))
}

/// Serves one port, one machine after another, until the segment ends.
fn serve(
    port: Port,
    listener: &UnixListener,
    state: &Arc<Mutex<State>>,
    parcels: Receiver<Parcel>,
) {
    let plugged: Arc<Mutex<Option<UnixStream>>> = Arc::default();
    let out = Arc::clone(&plugged);
    thread::spawn(move || write(&parcels, &out));
    for line in listener.incoming() {
        let (Ok(mut line), true) = (line, lock(state).lines.contains_key(&port)) else { return };
        let copy = line.try_clone().ok();
        *plugged.lock().unwrap_or_else(PoisonError::into_inner) = copy;
        let state = Arc::clone(state);
        thread::spawn(move || {
            // The end of the line is the end of the machine.
            while let Ok(frame) = read(&mut line) {
                lock(&state).pass(port, &frame);
            }
        });
    }
}

/// Writes due frames, until the segment ends.
#[expect(
    clippy::disallowed_methods,
    reason = "the rule is for the node's runtime; this is a thread of its own"
)]
fn write(parcels: &Receiver<Parcel>, plugged: &Mutex<Option<UnixStream>>) {
    while let Ok(Parcel { due, frame }) = parcels.recv() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let line = plugged.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut line) = line.as_ref() else { continue };
        // A machine that is gone loses its frames.
        let _gone = write_frame(&mut line, &frame);
    }
}
