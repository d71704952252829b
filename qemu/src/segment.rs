//! One Ethernet segment for several machines: a learning switch, and a gateway that
//! answers DHCP and forwards the host's ports. Needs no rights on the host.
//!
//! ```text
//!  machine 0 --+                          each port: a unix socket on which the
//!  machine 1 --+-- switch -- gateway      switch listens; a frame is its length
//!  machine 2 --+   (here)    (a QEMU      in four bytes, big-endian, and itself
//!                             without a guest)
//! ```
//!
//! The gateway is QEMU's own NAT. It treats every IP packet that it sees as its own and
//! resets unknown connections, even between other machines; so the switch never floods
//! a unicast frame to it.
//!
//! A segment can have IPv6 only: then the switch has a router, and the gateway stays for the
//! host's ports alone (`six`).
//!
//! A port can be a trunk, as one to a machine with VLANs: its frames have the tag of one VLAN, and
//! the switch takes it off and puts it on; what has no tag or another one is lost.
//!
//! Links are cut, slowed and healed here, pair by pair, while the machines keep their
//! carrier: like a broken switch between two racks. A pulled cable is `set_link` of the
//! machine's own protocol. The frames that the switch delivers can be captured here, too.
//!
//! Invariants:
//! - A port that does not drain loses frames, as on a real switch, and does not slow
//!   other ports.
//! - A machine that comes back to its port takes it over; the old line is closed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::capture::{Capture, Captured};
use crate::frame::{read, write_frame};
use crate::gateway::Gateway;
use crate::lease;
use crate::machine::Error;
use crate::plug::{Plug, Port};
use crate::scratch::Scratch;
use crate::six::{self, Outcome};
use crate::vlan;

/// Frames that wait for one port; more are lost.
const QUEUE: usize = 4096;

/// A running segment. Ends when dropped.
#[derive(Debug)]
pub struct Segment {
    switch: Switch,
    gateway: Gateway,
    dir: PathBuf,
    /// The address that the gateway gives to each machine.
    addresses: Vec<Ipv4Addr>,
}

impl Segment {
    /// Starts a segment for `machines` machines. The gateway's log goes to `dir`.
    ///
    /// # Errors
    /// When QEMU is missing, or a socket cannot be made.
    pub fn start(machines: u8, dir: &Path) -> Result<Self, Error> {
        let switch = Switch::start(machines).map_err(|source| Error::Host {
            doing: "make the sockets of a network".to_owned(),
            source,
        })?;
        let gateway = Gateway::start(&switch.socket(Port::Gateway), dir)?;
        let mut segment = Self { switch, gateway, dir: dir.to_owned(), addresses: Vec::new() };
        for machine in 0..machines {
            let mac = segment.plug(machine).hardware_address();
            let offered = segment.offered(machine, mac)?;
            segment.addresses.push(offered);
        }
        Ok(segment)
    }

    fn offered(&self, machine: u8, mac: [u8; 6]) -> Result<Ipv4Addr, Error> {
        lease::offered(&self.plug(machine).socket, mac).map_err(|source| Error::Host {
            doing: format!("get an address for machine {machine}"),
            source,
        })
    }

    /// Gives each machine another address than at the start, as a DHCP server that
    /// has lost its leases may. The machines are off; no port is forwarded
    /// afterwards.
    ///
    /// # Errors
    /// When QEMU is missing, or the gateway has too few addresses for so many machines.
    pub fn renumber(&mut self) -> Result<(), Error> {
        self.gateway = Gateway::start(&self.switch.socket(Port::Gateway), &self.dir)?;
        let machines = (0_u8..).zip(0..self.addresses.len());
        // It gives its addresses in order, so dummy machines take those of the start.
        for (machine, _) in machines.clone() {
            let untrusted = [0x52, 0x54, 0, 0x70, 0, machine];
            self.offered(machine, untrusted)?;
        }
        for (machine, place) in machines {
            self.addresses[place] = self.offered(machine, self.plug(machine).hardware_address())?;
        }
        Ok(())
    }

    /// Takes IPv4 and DHCP away from the machines, for good, and gives them a router of IPv6. They
    /// make their addresses of its prefix.
    pub fn only_ipv6(&self) {
        self.route(six::Addresses::Prefix);
    }

    /// The same, with addresses by DHCPv6.
    pub fn only_dhcpv6(&self) {
        self.route(six::Addresses::Dhcpv6);
    }

    fn route(&self, addresses: six::Addresses) {
        let machines = (0_u8..).zip(&self.addresses).map(|(machine, four)| six::Machine {
            four: *four,
            hardware: self.plug(machine).hardware_address(),
        });
        let router = six::Router { machines: machines.collect(), addresses };
        self.switch.lock().router = Some(router);
    }

    /// Carries VLAN `id` alone on these ports, tagged. The others are in it without a tag.
    pub fn trunk(&self, ports: &[Port], id: u16) {
        self.switch.lock().trunks.extend(ports.iter().map(|port| (*port, id)));
    }

    /// The address that a machine gets by DHCP, or from the router, at every boot until
    /// [`Segment::renumber`].
    ///
    /// # Panics
    /// When the number is not that of a machine of the segment.
    #[must_use]
    pub fn address(&self, machine: u8) -> IpAddr {
        let machine = usize::from(machine);
        match &self.switch.lock().router {
            Some(router) => router.machines[machine].six(router.addresses).into(),
            None => self.addresses[machine].into(),
        }
    }

    /// Where machine number `machine` is plugged in.
    #[must_use]
    pub fn plug(&self, machine: u8) -> Plug {
        Plug { socket: self.switch.socket(Port::Machine(machine)), machine }
    }

    /// A port of the segment without a machine.
    #[must_use]
    pub fn spare(&self) -> Plug {
        self.plug(u8::try_from(self.addresses.len()).unwrap_or(u8::MAX))
    }

    /// Forwards the host's loopback port `host` to `port` of the machine with
    /// `address`.
    ///
    /// # Errors
    /// When no machine has the address, the port is taken, or the gateway is gone.
    pub fn forward(&mut self, host: u16, address: IpAddr, port: u16) -> Result<(), Error> {
        let four = match address {
            IpAddr::V4(four) => Some(four),
            IpAddr::V6(six) => {
                let switch = self.switch.lock();
                switch.router.as_ref().and_then(|router| {
                    let mut machines = router.machines.iter();
                    let machine = machines.find(|machine| machine.six(router.addresses) == six);
                    machine.map(|machine| machine.four)
                })
            }
        };
        let four = four.ok_or_else(|| Error::Host {
            doing: format!("forward a port to {address}"),
            source: io::ErrorKind::AddrNotAvailable.into(),
        })?;
        self.gateway.forward(host, four, port)
    }

    /// The means to cut, slow and heal its links, and to see what is on them.
    #[must_use]
    pub fn links(&self) -> Links {
        Links { state: Arc::clone(&self.switch.state) }
    }
}

/// The links of a segment, usable from any thread. After the segment has ended, a cut
/// has no effect; the default belongs to no segment.
#[derive(Clone, Debug, Default)]
pub struct Links {
    state: Arc<Mutex<State>>,
}

impl Links {
    /// Cuts the link between two ports; frames on it are lost from now on.
    pub fn cut(&self, a: Port, b: Port) {
        lock(&self.state).cut.insert(pair(a, b));
    }

    /// Cuts `port` off from all others, the gateway among them.
    pub fn isolate(&self, port: Port) {
        let mut state = lock(&self.state);
        let others: Vec<Port> =
            state.lines.keys().copied().filter(|other| *other != port).collect();
        state.cut.extend(others.into_iter().map(|other| pair(port, other)));
    }

    /// Cuts `machine` off from all others, except the gateway: the host reaches it.
    pub fn part(&self, machine: Port) {
        let mut state = lock(&self.state);
        let others: Vec<Port> = state.lines.keys().copied().collect();
        let others = others.into_iter().filter(|other| ![machine, Port::Gateway].contains(other));
        state.cut.extend(others.map(|other| pair(machine, other)));
    }

    /// Makes every link to and from `port` slower by `delay`.
    pub fn slow(&self, port: Port, delay: Duration) {
        lock(&self.state).delays.insert(port, delay);
    }

    /// Captures every frame that is delivered from now on; a former capture is dropped.
    pub fn capture(&self) {
        lock(&self.state).capture = Some(Capture::default());
    }

    /// Ends the capture, and returns its frames; nothing without a capture.
    ///
    /// # Errors
    /// The number of frames for which it had no room.
    pub fn captured(&self) -> Result<Vec<Captured>, usize> {
        lock(&self.state).capture.take().unwrap_or_default().end()
    }

    /// The bytes of all frames that came from `port` and were delivered, since the start.
    #[must_use]
    pub fn bytes_from(&self, port: Port) -> u64 {
        lock(&self.state).delivered.get(&port).copied().unwrap_or_default()
    }

    /// Undoes every cut and every delay.
    pub fn heal(&self) {
        let mut state = lock(&self.state);
        state.cut.clear();
        state.delays.clear();
    }
}

/// An unordered pair.
fn pair(a: Port, b: Port) -> (Port, Port) {
    (a.min(b), a.max(b))
}

/// A frame, and when it may leave.
struct Parcel {
    due: Instant,
    frame: Arc<[u8]>,
}

#[derive(Debug, Default)]
struct State {
    /// The port where each hardware address was last seen.
    learnt: BTreeMap<[u8; 6], Port>,
    lines: BTreeMap<Port, SyncSender<Parcel>>,
    cut: BTreeSet<(Port, Port)>,
    delays: BTreeMap<Port, Duration>,
    capture: Option<Capture>,
    /// The VLAN of each port whose frames have its tag.
    trunks: BTreeMap<Port, u16>,
    /// Bytes from each port, a frame once for each port that got it.
    delivered: BTreeMap<Port, u64>,
    /// In a segment with IPv6 only.
    router: Option<six::Router>,
}

impl State {
    /// Sends `frame`, which came in at `from`, to its destination.
    fn pass(&mut self, from: Port, frame: &Arc<[u8]>) {
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
struct Switch {
    state: Arc<Mutex<State>>,
    /// Holds the sockets.
    dir: Scratch,
}

impl Switch {
    fn start(machines: u8) -> io::Result<Self> {
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

    fn socket(&self, port: Port) -> PathBuf {
        self.dir.path().join(match port {
            Port::Machine(machine) => machine.to_string(),
            Port::Gateway => "gateway".to_owned(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
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

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // No code here panics with the lock held, and the table of addresses is always
    // consistent.
    state.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: u8 = 0xff;

    /// A frame from machine `from` to machine `to`, with `body` in it.
    fn frame(to: u8, from: u8, body: u8) -> Vec<u8> {
        let to = if to == GROUP { [GROUP; 6] } else { [2, 0, 0, 0, 0, to] };
        [&to[..], &[2, 0, 0, 0, 0, from], &[body]].concat()
    }

    fn put(line: &mut UnixStream, frame: &[u8]) {
        write_frame(line, frame).unwrap();
    }

    fn plug(switch: &Switch, port: Port) -> UnixStream {
        let line = UnixStream::connect(switch.socket(port)).unwrap();
        line.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        line
    }

    fn get(line: &mut UnixStream) -> u8 {
        read(line).unwrap().last().copied().unwrap()
    }

    /// Makes the switch learn both machines, and returns once it has.
    fn acquainted() -> (Switch, UnixStream, UnixStream) {
        let switch = Switch::start(2).unwrap();
        let mut a = plug(&switch, Port::Machine(0));
        let mut b = plug(&switch, Port::Machine(1));
        loop {
            // Until the other side is plugged in, frames to it are lost.
            put(&mut a, &frame(GROUP, 0, 1));
            b.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            if read(&mut b).is_ok() {
                break;
            }
        }
        b.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        put(&mut b, &frame(0, 1, 2));
        assert_eq!(get(&mut a), 2);
        (switch, a, b)
    }

    /// The next frame after those of `acquainted`.
    fn next(line: &mut UnixStream) -> u8 {
        loop {
            match get(line) {
                1 => {}
                body => return body,
            }
        }
    }

    #[test]
    fn unicast_goes_to_one_port_and_never_floods_the_gateway() {
        let mut state = State::default();
        let mut ends = BTreeMap::new();
        for port in [Port::Machine(0), Port::Machine(1), Port::Machine(2), Port::Gateway] {
            let (line, end) = sync_channel(10);
            state.lines.insert(port, line);
            ends.insert(port, end);
        }
        let got = |port| ends[&port].try_iter().count();
        let pass = |state: &mut State, from, frame: Vec<u8>| state.pass(from, &frame.into());
        pass(&mut state, Port::Machine(0), frame(1, 0, 0));
        assert_eq!(
            [Port::Machine(0), Port::Machine(1), Port::Machine(2), Port::Gateway].map(got),
            [0, 1, 1, 0]
        );
        pass(&mut state, Port::Machine(1), frame(0, 1, 0));
        assert_eq!(
            [Port::Machine(0), Port::Machine(1), Port::Machine(2), Port::Gateway].map(got),
            [1, 0, 0, 0]
        );
        pass(&mut state, Port::Machine(2), frame(GROUP, 2, 0));
        assert_eq!(
            [Port::Machine(0), Port::Machine(1), Port::Machine(2), Port::Gateway].map(got),
            [1, 1, 0, 1]
        );
    }

    #[test]
    fn a_cut_link_loses_frames_until_it_is_healed() {
        let mut state = State::default();
        let (line, end) = sync_channel(10);
        state.lines.insert(Port::Machine(1), line);
        let bodies = || end.try_iter().filter_map(|parcel| parcel.frame.last().copied());
        let pass = |state: &mut State, body| {
            state.pass(Port::Machine(0), &frame(GROUP, 0, body).into());
        };
        pass(&mut state, 1);
        state.cut.insert(pair(Port::Machine(1), Port::Machine(0)));
        pass(&mut state, 2);
        state.cut.clear();
        pass(&mut state, 3);
        assert_eq!(bodies().collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn a_trunk_has_the_tag_of_its_vlan_and_nothing_else_passes_it() {
        let mut state = State::default();
        let mut ends = BTreeMap::new();
        for port in [Port::Machine(0), Port::Machine(1)] {
            let (line, end) = sync_channel(10);
            state.lines.insert(port, line);
            ends.insert(port, end);
        }
        state.trunks.insert(Port::Machine(1), 7);
        let got = |port| ends[&port].try_iter().map(|it| it.frame.to_vec()).collect::<Vec<_>>();
        let plain = [frame(GROUP, 0, 1), vec![0; 60]].concat();
        state.pass(Port::Machine(0), &plain.clone().into());
        assert_eq!(got(Port::Machine(1)), [vlan::tagged(&plain, 7).unwrap()]);
        let answer = [frame(0, 1, 2), vec![0; 60]].concat();
        for (sent, passes) in [
            (vlan::tagged(&answer, 7).unwrap(), true),
            (vlan::tagged(&answer, 8).unwrap(), false),
            (answer.clone(), false),
        ] {
            state.pass(Port::Machine(1), &sent.into());
            let expected = passes.then(|| answer.clone());
            assert_eq!(got(Port::Machine(0)), expected.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_capture_has_what_was_delivered_while_it_lasted() {
        let mut state = State::default();
        let (line, _end) = sync_channel(1);
        state.lines.insert(Port::Machine(1), line);
        let state = Arc::new(Mutex::new(state));
        let links = Links { state: Arc::clone(&state) };
        let pass = |body| lock(&state).pass(Port::Machine(0), &frame(GROUP, 0, body).into());
        assert_eq!(links.captured(), Ok(Vec::new()));
        links.cut(Port::Machine(0), Port::Machine(1));
        links.capture();
        pass(1);
        links.heal();
        pass(2);
        // The queue of the port has one place.
        pass(3);
        let captured = links.captured().unwrap();
        let ends = captured.iter().map(|one| (one.from, one.to, one.frame.last().copied()));
        let expected = [(Port::Machine(0), Port::Machine(1), Some(2))];
        assert_eq!(ends.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_slow_link_delivers_late_and_in_order() {
        let (switch, mut a, mut b) = acquainted();
        switch.lock().delays.insert(Port::Machine(1), Duration::from_millis(50));
        let start = Instant::now();
        put(&mut a, &frame(1, 0, 5));
        put(&mut a, &frame(1, 0, 6));
        assert_eq!((next(&mut b), next(&mut b)), (5, 6));
        assert!(start.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn a_machine_that_comes_back_takes_its_port_over() {
        let (switch, mut a, b) = acquainted();
        drop(b);
        let mut b = plug(&switch, Port::Machine(1));
        b.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let start = Instant::now();
        // Frames of `acquainted` that the switch had not yet read arrive here as well.
        while read(&mut b).ok().and_then(|frame| frame.last().copied()) != Some(7) {
            assert!(start.elapsed() < Duration::from_secs(10), "no frame reached the new line");
            put(&mut a, &frame(1, 0, 7));
        }
    }

    #[test]
    fn addresses_follow_the_ports_and_can_be_forwarded_before_anybody_boots() {
        // A host without QEMU may run the quick tests.
        if crate::host::version().is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let mut segment = Segment::start(3, dir.path()).unwrap();
        let addresses = [0, 1, 2].map(|machine| segment.address(machine));
        assert_eq!(addresses, [15, 16, 17].map(|last| IpAddr::from([10, 0, 2, last])));
        let port = crate::host::free_port().unwrap();
        segment.forward(port, addresses[1], 7835).unwrap();
        segment.only_ipv6();
        let six = segment.address(1);
        assert_eq!(six.to_string(), "2001:db8:0:2:5054:ff:fe70:6f01");
        segment.forward(crate::host::free_port().unwrap(), six, 7835).unwrap();
        assert!(segment.forward(1, "2001:db8::1".parse().unwrap(), 7835).is_err());
    }
}
