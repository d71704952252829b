//! The limits on callers, which keep one caller from taking the resources of others.
//!
//! ```text
//! accepted --> [handshakes] --no certificate of the cluster--> [untrusted]
//!                   |                                              |
//!                   +--certificate of the cluster--> [known]       +--> closed when idle
//! ```
//!
//! Each stage has its own room. Where the room of handshakes or of untrusted callers is
//! full, the one that has been there longest makes way: a genuine caller passes in a
//! moment, and a caller that only holds a place loses it. The known are few and named:
//! the newest of one that has all of its own places is rejected. Where the room is full,
//! the newest of the one with the most places makes way for one that has fewer.
//!
//! Pure: time comes in as a parameter.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// The limits of one server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest that a TLS handshake may take: slow lines need two round trips.
    pub handshake: Duration,
    /// Handshakes under way, in all: 64 KiB each at worst.
    pub handshakes: usize,
    /// The same, from one address. Many machines may share one.
    pub handshakes_per_address: usize,
    /// Connections of callers without a certificate of the cluster, in all.
    pub untrusted: usize,
    /// The same, from one address.
    pub untrusted_per_address: usize,
    /// Connections of nodes and users, in all: ten thousand nodes with room to spare.
    pub known: usize,
    /// The same, of one node or user.
    pub known_per_name: usize,
    /// Calls under way on an untrusted connection.
    pub untrusted_streams: u32,
    /// Calls under way on a connection of a node or user.
    pub streams: u32,
    /// Longest request of an untrusted caller: a certificate and some labels are a tenth of it.
    pub untrusted_message: usize,
    /// Longest request of a node or user; also tonic's own bound.
    pub message: usize,
    /// Bytes of the requests of one connection that are being received, in all: two of the longest.
    /// A caller may have three thousand calls under way, and send none of them to its end.
    pub messages: usize,
    /// Calls a second of untrusted callers, from one address, and how many may come at once.
    pub untrusted_rate: (u32, u32),
    /// Calls a second of all untrusted callers, and how many may come at once.
    pub untrusted_rates: (u32, u32),
    /// Calls a second of one node or user, and how many may come at once.
    pub known_rate: (u32, u32),
    /// Longest that a call may take until it answers; a stream until it begins.
    pub deadline: Duration,
    /// Longest that a caller may leave an answer lying.
    pub stall: Duration,
    /// An untrusted connection without a call is closed after that.
    pub untrusted_idle: Duration,
    /// Any connection without a call is closed after that.
    pub idle: Duration,
    /// Between two questions whether the other end is still there.
    pub keep_alive: Duration,
    /// How long the answer to that may take.
    pub keep_alive_answer: Duration,
    /// Longest that calls may go on once the server is to stop.
    pub stop: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            handshakes: 512,
            handshakes_per_address: 256,
            untrusted: 256,
            untrusted_per_address: 32,
            known: 12 << 10,
            known_per_name: 32,
            untrusted_streams: 8,
            streams: 100,
            untrusted_message: 64 << 10,
            message: 4 << 20,
            messages: 8 << 20,
            untrusted_rate: (10, 30),
            untrusted_rates: (200, 400),
            known_rate: (500, 1000),
            deadline: Duration::from_secs(30),
            stall: Duration::from_secs(60),
            untrusted_idle: Duration::from_secs(30),
            idle: Duration::from_secs(30 * 60),
            keep_alive: Duration::from_secs(20),
            keep_alive_answer: Duration::from_secs(20),
            stop: Duration::from_secs(3),
        }
    }
}

/// Lets so many through in a second, and so many at once after a pause.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    rate: u32,
    burst: u32,
    level: f64,
    at: Duration,
}

impl Bucket {
    pub(super) fn new((rate, burst): (u32, u32)) -> Self {
        Self { rate, burst, level: f64::from(burst), at: Duration::ZERO }
    }

    /// Takes one, if there is one at `now` (since any fixed moment).
    pub(super) fn take(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.level = (self.level + passed * f64::from(self.rate)).min(f64::from(self.burst));
        let there = self.level >= 1.0;
        if there {
            self.level -= 1.0;
        }
        there
    }

    /// Whether it is as full as a new one.
    fn is_full(&self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.level + passed * f64::from(self.rate) >= f64::from(self.burst)
    }
}

/// Long messages of streams that one node or user, or the untrusted callers of one address, may
/// have under way: a node has two or three streams, and an event of the curator is a megabyte. The
/// others wait for their turn.
pub(super) const ANSWERS_MAX: usize = 32;

/// Streams that one node or user may have open, on all its connections: four on each, where an
/// honest caller has two or three in all. A stream keeps the buffers of its longest message until
/// it ends, which may be a megabyte.
pub(super) const STREAMS_MAX: usize = 128;

/// How many callers are remembered: more than untrusted callers can be connected.
const CALLERS_MAX: usize = 1024;

/// The unit by which untrusted callers are counted: an IPv4 address, or an IPv6 network of 64
/// bits, in which one machine may take any number of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin(IpAddr);

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                IpAddr::from((u128::from(address) & (u128::MAX << 64)).to_be_bytes())
            }
            address @ IpAddr::V4(_) => address,
        })
    }
}

/// The calls of callers, by caller and in all.
#[derive(Debug)]
pub(super) struct Rates<K> {
    each: (u32, u32),
    all: Option<Bucket>,
    callers: BTreeMap<K, Bucket>,
}

impl Rates<Origin> {
    /// Of callers without a certificate of the cluster.
    pub(super) fn untrusted(limits: &Limits) -> Self {
        let all = Some(Bucket::new(limits.untrusted_rates));
        Self { each: limits.untrusted_rate, all, callers: BTreeMap::new() }
    }
}

impl Rates<String> {
    /// Of nodes and users. The cluster bounds their number, so they share no bucket.
    pub(super) fn known(limits: &Limits) -> Self {
        Self { each: limits.known_rate, all: None, callers: BTreeMap::new() }
    }
}

impl<K: Ord> Rates<K> {
    /// Whether this caller may call at `now`.
    pub(super) fn take(&mut self, caller: K, now: Duration) -> bool {
        if self.callers.len() >= CALLERS_MAX && !self.callers.contains_key(&caller) {
            self.callers.retain(|_, bucket| !bucket.is_full(now));
            if self.callers.len() >= CALLERS_MAX {
                // Certificates of the cluster bound the number of known callers.
                return self.all.is_none();
            }
        }
        let each = self.each;
        let bucket = self.callers.entry(caller).or_insert_with(|| Bucket::new(each));
        bucket.take(now) && self.all.as_mut().is_none_or(|all| all.take(now))
    }
}

/// The handling of a new connection when the room is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The oldest occupant makes way.
    Replace,
    /// The newest occupant of the kind with the most places makes way for a kind that has
    /// fewer, and the newcomer of any other kind is rejected.
    Share,
}

/// A room for so many connections, and for so many of one kind.
#[derive(Clone, Debug)]
pub(super) struct Room<K> {
    inner: Arc<Mutex<Places<K>>>,
}

#[derive(Debug)]
struct Places<K> {
    max: usize,
    max_each: usize,
    full: Full,
    next: u64,
    /// In the order in which they came.
    taken: BTreeMap<u64, (K, CancellationToken)>,
    each: BTreeMap<K, Part>,
}

/// The part of a room that one kind has taken.
#[derive(Debug)]
struct Part {
    places: usize,
    quota: Quota,
}

/// What the connections of one kind share. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Quota {
    /// The long messages that it may still have under way.
    pub(super) answers: Arc<Semaphore>,
    /// The streams that it may still open.
    pub(super) streams: Arc<Semaphore>,
}

impl Quota {
    fn new() -> Self {
        let [answers, streams] =
            [ANSWERS_MAX, STREAMS_MAX].map(|max| Arc::new(Semaphore::new(max)));
        Self { answers, streams }
    }
}

/// A place in a room; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Place<K: Ord + Clone> {
    room: Room<K>,
    number: u64,
    /// Cancelled when another caller needs the place.
    pub(super) lost: CancellationToken,
    /// What its kind shares.
    pub(super) quota: Quota,
}

impl<K: Ord + Clone> Room<K> {
    pub(super) fn new(max: usize, max_each: usize, full: Full) -> Self {
        let places =
            Places { max, max_each, full, next: 0, taken: BTreeMap::new(), each: BTreeMap::new() };
        Self { inner: Arc::new(Mutex::new(places)) }
    }

    /// A place for one of `kind`; `None` if the room is full.
    pub(super) fn enter(&self, kind: K) -> Option<Place<K>> {
        let mut places = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let crowded = places.of(&kind) >= places.max_each;
        if crowded || places.taken.len() >= places.max {
            let leaving = places.making_way(&kind, crowded)?;
            places.leave(leaving);
        }
        let number = places.next;
        places.next += 1;
        let lost = CancellationToken::new();
        places.taken.insert(number, (kind.clone(), lost.clone()));
        let part = places.each.entry(kind);
        let part = part.or_insert_with(|| Part { places: 0, quota: Quota::new() });
        part.places += 1;
        let quota = part.quota.clone();
        Some(Place { room: self.clone(), number, lost, quota })
    }

    /// How many places are taken.
    #[cfg(test)]
    fn taken(&self) -> usize {
        let places = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(places.each.values().map(|part| part.places).sum::<usize>(), places.taken.len());
        places.taken.len()
    }
}

impl<K: Ord + Clone> Places<K> {
    /// How many places this kind has.
    fn of(&self, kind: &K) -> usize {
        self.each.get(kind).map_or(0, |part| part.places)
    }

    /// The place that a newcomer of `kind` takes over; `None`: the newcomer is rejected.
    /// `crowded` says whether its kind has all places that one may have.
    fn making_way(&self, kind: &K, crowded: bool) -> Option<u64> {
        let mut taken = self.taken.iter();
        let leaving = match self.full {
            Full::Replace => taken.find(|(_, (other, _))| !crowded || other == kind),
            Full::Share => {
                let (most, part) = self.each.iter().max_by_key(|(_, part)| part.places)?;
                // Two kinds with as many would take one place from each other without end.
                if crowded || part.places <= self.of(kind) + 1 {
                    return None;
                }
                taken.rfind(|(_, (other, _))| other == most)
            }
        };
        leaving.map(|(number, _)| *number)
    }

    fn leave(&mut self, number: u64) {
        let Some((kind, lost)) = self.taken.remove(&number) else { return };
        lost.cancel();
        if let Some(part) = self.each.get_mut(&kind) {
            part.places -= 1;
            if part.places == 0 {
                self.each.remove(&kind);
            }
        }
    }
}

impl<K: Ord + Clone> Drop for Place<K> {
    fn drop(&mut self) {
        self.room.inner.lock().unwrap_or_else(PoisonError::into_inner).leave(self.number);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_bucket_lets_a_burst_through_and_then_its_rate() {
        let mut bucket = Bucket::new((2, 3));
        let mut take = |now| bucket.take(now);
        assert_eq!([(); 4].map(|()| take(seconds(0))), [true, true, true, false]);
        assert_eq!([(); 3].map(|()| take(seconds(1))), [true, true, false]);
        assert_eq!([(); 4].map(|()| take(seconds(60))), [true, true, true, false]);
    }

    #[test]
    fn one_untrusted_caller_does_not_use_up_the_calls_of_another() {
        let limits = Limits { untrusted_rate: (1, 2), ..Limits::default() };
        let mut untrusted = Rates::untrusted(&limits);
        let [a, b] = [1, 2].map(|host| Origin::from(IpAddr::from([10, 0, 0, host])));
        assert_eq!([(); 3].map(|()| untrusted.take(a, seconds(0))), [true, true, false]);
        assert!(untrusted.take(b, seconds(0)));
    }

    #[test]
    fn addresses_without_number_are_not_remembered_without_number() {
        let mut untrusted = Rates::untrusted(&Limits::default());
        let mut let_through = 0;
        for host in 0..10_000_u32 {
            let address = IpAddr::from(host.to_be_bytes());
            let_through += u32::from(untrusted.take(address.into(), seconds(0)));
        }
        assert!(untrusted.callers.len() <= CALLERS_MAX);
        assert!(let_through <= Limits::default().untrusted_rates.1);
        // Once they have been quiet, there is room for another.
        assert!(untrusted.take(IpAddr::from([255; 4]).into(), seconds(60)));
    }

    /// A machine has 2^64 addresses in its own network.
    #[test]
    fn callers_of_one_ipv6_network_are_one_caller() {
        let limits = Limits { untrusted_rate: (1, 2), ..Limits::default() };
        let mut untrusted = Rates::untrusted(&limits);
        let mut take =
            |address: &str| untrusted.take(address.parse::<IpAddr>().unwrap().into(), seconds(0));
        assert!(take("2001:db8::1") && take("2001:db8::2"));
        assert!(!take("2001:db8::3"));
        assert!(take("2001:db8:0:1::3"));
        // The same machine by both of its notations.
        assert!(take("192.0.2.1") && take("::ffff:192.0.2.1") && !take("192.0.2.1"));
    }

    #[test]
    fn a_node_that_calls_without_end_is_slowed_down_and_no_other() {
        let limits = Limits { known_rate: (1, 2), ..Limits::default() };
        let mut known = Rates::known(&limits);
        let mut take = |name: &str, now| known.take(name.to_owned(), seconds(now));
        assert_eq!([(); 3].map(|()| take("a", 0)), [true, true, false]);
        assert!(take("b", 0) && take("a", 1));
        for name in 0..2 * CALLERS_MAX {
            assert!(take(&name.to_string(), 1), "the {name}th");
        }
    }

    #[test]
    fn in_a_crowded_room_the_oldest_of_the_crowd_makes_way() {
        let room = Room::new(3, 2, Full::Replace);
        let other = room.enter("b").unwrap();
        let [first, second] = ["a", "a"].map(|kind| room.enter(kind).unwrap());
        let third = room.enter("a").unwrap();
        assert!(first.lost.is_cancelled());
        assert!(![&other, &second, &third].iter().any(|place| place.lost.is_cancelled()));
        // The room is full of several kinds: the oldest occupant goes.
        let fourth = room.enter("c").unwrap();
        assert!(other.lost.is_cancelled() && !fourth.lost.is_cancelled());
        // A holder that has lost its place does not free another's.
        drop((first, other));
        assert_eq!(room.taken(), 3);
    }

    #[test]
    fn in_a_shared_room_of_kinds_with_as_many_places_no_place_is_lost() {
        let room = Room::new(2, 1, Full::Share);
        let first = room.enter("a").unwrap();
        assert!(room.enter("a").is_none());
        let second = room.enter("b").unwrap();
        assert!(room.enter("c").is_none());
        assert!(!first.lost.is_cancelled() && !second.lost.is_cancelled());
        drop(first);
        assert!(room.enter("c").is_some());
    }

    #[test]
    fn kinds_that_fill_a_shared_room_make_way_for_one_that_has_fewer_places() {
        let room = Room::new(5, 3, Full::Share);
        let held = ["a", "b", "a", "a", "b"].map(|kind| room.enter(kind).unwrap());
        let lost = || held.each_ref().map(|place| place.lost.is_cancelled());
        let third = room.enter("c").unwrap();
        assert_eq!(lost(), [false, false, false, true, false], "the newest of a");
        // Each of them would only take the place of another that has as many then.
        assert!(["a", "b", "c"].into_iter().all(|kind| room.enter(kind).is_none()));
        let others = ["d", "e"].map(|kind| room.enter(kind).unwrap());
        assert_eq!(lost(), [false, false, true, true, true]);
        assert!(room.enter("f").is_none(), "each has one");
        assert!(!others.iter().chain([&third]).any(|place| place.lost.is_cancelled()));
        assert_eq!(room.taken(), 5);
    }

    proptest! {
        /// Whatever a few callers hold, one without a place gets one.
        #[test]
        fn a_shared_room_has_a_place_for_each_of_a_few_kinds(
            kinds in prop::collection::vec(0_u8..4, 0..40),
        ) {
            let room = Room::new(5, 3, Full::Share);
            let places: Vec<_> = kinds.into_iter().map(|kind| room.enter(kind)).collect();
            prop_assert!(room.taken() <= 5);
            let newcomer = room.enter(9);
            prop_assert!(newcomer.is_some_and(|place| !place.lost.is_cancelled()));
            drop(places);
        }

        #[test]
        fn a_room_never_holds_more_than_it_should(
            shares in any::<bool>(),
            steps in prop::collection::vec((0_u8..4, any::<bool>(), any::<prop::sample::Index>()), 0..200),
        ) {
            let room = Room::new(5, 3, if shares { Full::Share } else { Full::Replace });
            let mut places = Vec::new();
            for (kind, enter, which) in steps {
                if enter {
                    let place = room.enter(kind);
                    prop_assert!(shares || place.is_some());
                    places.extend(place.map(|place| (kind, place)));
                } else if !places.is_empty() {
                    places.swap_remove(which.index(places.len()));
                }
                let live = places.iter().filter(|(_, place)| !place.lost.is_cancelled());
                let live: Vec<_> = live.collect();
                prop_assert_eq!(room.taken(), live.len());
                prop_assert!(live.len() <= 5);
                for kind in 0..4 {
                    prop_assert!(live.iter().filter(|(of, _)| *of == kind).count() <= 3);
                }
            }
            drop(places);
            prop_assert_eq!(room.taken(), 0);
        }
    }
}
