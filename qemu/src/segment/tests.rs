//! Tests of the switch over sockets without machines, and of the addresses of a segment.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::switch::{State, Switch, lock, pair};
use super::{Links, Segment};
use crate::frame::{read, write_frame};
use crate::plug::Port;
use crate::vlan;

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
