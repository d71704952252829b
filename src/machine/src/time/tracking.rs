//! The state of the clock and of its sources: questions and answers on chronyd's command
//! socket.
//!
//! The format is that of `candm.h` in the sources of chrony 4.6, version 6 of the protocol: all
//! numbers are big-endian, and a request is as long as its longest answer.
//!
//! ```text
//! request   version 1, type 1, 0 0, command, attempt 0, sequence, 0 0, index, padding
//! answer    version 1, type 2, 0 0, command, reply, status 0, 0 0 0, sequence, 0 0, data
//! address   16, family 2, pad 2
//! tracking  reference ID 4, address 20, stratum 2, leap 2, reference time 4 + 4 + 4,
//!           nine numbers of 4: see `Tracking::read`
//! sources   their number 4
//! source    address 20, poll 2, stratum 2, state 2, mode 2, flags 2, reachability 2, age 4,
//!           three numbers of 4: see `source`
//! ```
//!
//! chronyd has dropped its rights and speaks with servers of others, so its answers are read
//! like those of an untrusted machine.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::net::UnixDatagram;
use tokio::time::timeout;

use super::{Source, State, Status};

/// Version of the protocol.
const VERSION: u8 = 6;
/// Type of a request, and of an answer.
const TYPES: [u8; 2] = [1, 2];
/// Bytes of the longest answer, and so of each request.
const LENGTH: usize = 104;
/// Where the data of an answer begins; that of a request begins eight bytes before.
const DATA: usize = 28;

/// The sources that are read: far more than servers and voters can be.
const SOURCES_MAX: u32 = 64;

/// A question, with the number and the length of its answer.
#[derive(Clone, Copy, Debug)]
struct Question {
    command: u16,
    reply: u16,
    length: usize,
}

/// `REQ_TRACKING`.
const TRACKING: Question = Question { command: 33, reply: 5, length: LENGTH };
/// `REQ_N_SOURCES`.
const SOURCES: Question = Question { command: 14, reply: 2, length: 32 };
/// `REQ_SOURCE_DATA`.
const SOURCE: Question = Question { command: 15, reply: 3, length: 76 };

/// How long an answer may take: chronyd is on this machine, and never blocks for long.
const ANSWER: Duration = Duration::from_secs(2);

/// The stratum of a voter that lends its own clock, and its followers are above. Servers that
/// are of use outside are below it.
pub(super) const STRATUM_OWN: u16 = 10;

/// From this stratum on, a clock is not synchronised (RFC 5905).
const STRATUM_NONE: u16 = 16;

/// `LEAP_Unsynchronised`.
const LEAP_NONE: u16 = 3;

/// The age at which the last measurement says nothing of the present any more: three of the
/// longest intervals between two (`plan`).
const STALE: Duration = Duration::from_secs(30 * 60);

/// A clock is never said to be further off than a century, whatever chronyd sends.
const SECONDS_MAX: f64 = 100.0 * 366.0 * 86_400.0;

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tracking {
    /// The server; `None` where the clock is its own reference.
    reference: Option<IpAddr>,
    stratum: u16,
    leap: u16,
    /// When the last measurement was made, by this clock.
    updated: Duration,
    /// Microseconds that this clock is ahead.
    offset: i64,
    /// Bound of the error in microseconds.
    error: u64,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Silence {
    /// The socket cannot be used.
    #[error("cannot speak with chronyd")]
    Socket(#[source] io::Error),
    /// Nothing came in time.
    #[error("chronyd has not answered in {} seconds", ANSWER.as_secs())]
    Late,
    /// Something else came.
    #[error("chronyd's answer of {length} bytes is not one to the question of this node")]
    Strange {
        /// Its length.
        length: usize,
    },
}

/// The data of the answer to this question with this number.
fn data(question: Question, answer: &[u8], sequence: u32) -> Option<&[u8]> {
    let matches = answer.len() == question.length
        && answer[0] == VERSION
        && answer[1] == TYPES[1]
        && [4, 6, 8].map(|at| short(answer, at)) == [question.command, question.reply, 0]
        && word(answer, 16) == sequence;
    matches.then(|| &answer[DATA..])
}

/// An address of an answer; `None` where it is unspecified, or the name of a clock that is
/// not a server.
fn address(bytes: &[u8]) -> Option<IpAddr> {
    let octets: [u8; 16] = bytes[..16].try_into().ok()?;
    match short(bytes, 16) {
        1 => {
            let [a, b, c, d, ..] = octets;
            Some(IpAddr::V4(Ipv4Addr::new(a, b, c, d)))
        }
        2 => Some(IpAddr::V6(Ipv6Addr::from(octets))),
        _ => None,
    }
}

/// A source that answers: its address, and the microseconds that this clock is ahead of it by
/// the newest measurement, with what was corrected since.
fn source(data: &[u8]) -> Option<(IpAddr, i64)> {
    // One bit for each of the last eight questions, and the age of the newest measurement: a
    // source that has no time to give answers, too.
    let is_measured = short(data, 30) != 0 && word(data, 32) != u32::MAX;
    // Original measurement, the same corrected, its error.
    let ahead = micros(real(word(data, 40)));
    address(data).filter(|_| is_measured).map(|address| (address, ahead))
}

impl Tracking {
    /// Reads the data of the answer.
    fn read(data: &[u8]) -> Self {
        let reference = address(&data[4..]);
        let seconds = u64::from(word(data, 28)) << 32 | u64::from(word(data, 32));
        // Current correction, last offset, its average, frequency, its residual, its skew,
        // root delay, root dispersion, interval. A correction that is due makes the clock late.
        let number = |index: usize| real(word(data, 40 + 4 * index));
        Self {
            reference,
            stratum: short(data, 24),
            leap: short(data, 26),
            updated: Duration::from_secs(seconds),
            offset: micros(-number(0)),
            error: micros(number(6) / 2.0 + number(7)).unsigned_abs(),
        }
    }

    /// The status of the clock after this answer.
    pub(super) fn status(&self, before: Status, now: SystemTime) -> Status {
        let none = self.leap == LEAP_NONE || !(1..STRATUM_NONE).contains(&self.stratum);
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        if none || now.saturating_sub(self.updated) > STALE {
            return before.without_source();
        }
        Status {
            state: if self.stratum >= STRATUM_OWN { State::Cluster } else { State::Synced },
            source: self.reference.map_or(Source::Own, Source::Address),
            offset: Some(self.offset),
            error: Some(self.error),
        }
    }
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A number of chronyd: seven bits of exponent, then 25 of a coefficient, each in the
/// complement of two.
fn real(bits: u32) -> f64 {
    const COEFFICIENT: i32 = 25;
    let signed = bits.cast_signed();
    let exponent = signed >> COEFFICIENT;
    let coefficient = (signed << (32 - COEFFICIENT)) >> (32 - COEFFICIENT);
    f64::from(coefficient) * 2_f64.powi(exponent - COEFFICIENT)
}

/// Seconds as microseconds, within a century.
#[expect(clippy::cast_possible_truncation, reason = "a century of microseconds fits")]
fn micros(seconds: f64) -> i64 {
    (seconds.clamp(-SECONDS_MAX, SECONDS_MAX) * 1e6).round() as i64
}

/// A socket of this node beside that of chronyd.
#[derive(Debug)]
pub(super) struct Asker {
    socket: UnixDatagram,
    path: PathBuf,
    sequence: u32,
}

impl Asker {
    /// Connects the socket `own` to chronyd's at `daemon`.
    pub(super) fn connect(daemon: &Path, own: PathBuf) -> Result<Self, Silence> {
        // One that a former run left would be in the way.
        let _absent = fs::remove_file(&own);
        let socket = UnixDatagram::bind(&own).map_err(Silence::Socket)?;
        let asker = Self { socket, path: own, sequence: 0 };
        // chronyd, as a user of its own, must be able to answer. Only it and root can enter
        // the directory.
        fs::set_permissions(&asker.path, Permissions::from_mode(0o666)).map_err(Silence::Socket)?;
        asker.socket.connect(daemon).map_err(Silence::Socket)?;
        Ok(asker)
    }

    /// Asks for the state of the clock.
    pub(super) async fn tracking(&mut self) -> Result<Tracking, Silence> {
        self.ask(TRACKING, 0, Tracking::read).await
    }

    /// Asks what this clock is ahead of each source that answers, in microseconds.
    pub(super) async fn sources(&mut self) -> Result<BTreeMap<IpAddr, i64>, Silence> {
        let count = self.ask(SOURCES, 0, |data| word(data, 0)).await?;
        let mut sources = BTreeMap::new();
        for index in 0..count.min(SOURCES_MAX) {
            sources.extend(self.ask(SOURCE, index, source).await?);
        }
        Ok(sources)
    }

    async fn ask<T>(
        &mut self,
        question: Question,
        index: u32,
        read: impl Fn(&[u8]) -> T,
    ) -> Result<T, Silence> {
        self.sequence = self.sequence.wrapping_add(1);
        let sequence = self.sequence;
        let request = request(question.command, sequence, index);
        self.socket.send(&request).await.map_err(Silence::Socket)?;
        let mut answer = [0; LENGTH + 1];
        let answered = async {
            loop {
                let length = self.socket.recv(&mut answer).await.map_err(Silence::Socket)?;
                let answer = &answer[..length];
                if let Some(data) = data(question, answer, sequence) {
                    return Ok(read(data));
                }
                // The answer to a question that was given up: the next one is meant.
                let stale = length >= DATA && word(answer, 16) != sequence;
                if !stale {
                    return Err(Silence::Strange { length });
                }
            }
        };
        timeout(ANSWER, answered).await.unwrap_or(Err(Silence::Late))
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        let _absent = fs::remove_file(&self.path);
    }
}

fn request(command: u16, sequence: u32, index: u32) -> [u8; LENGTH] {
    let mut request = [0; LENGTH];
    request[0] = VERSION;
    request[1] = TYPES[0];
    request[4..6].copy_from_slice(&command.to_be_bytes());
    request[8..12].copy_from_slice(&sequence.to_be_bytes());
    request[20..24].copy_from_slice(&index.to_be_bytes());
    request
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use polis_base::hex;

    /// The answer of chronyd 4.6.1 about its own reference, to question 7.
    const OWN: &str = "06020000002100050000000000000000000000070000000000000000\
                       7f7f01010000000000000000000000000000000000000000000a0000\
                       000000006b0442b81080834b\
                       000000000000000000000000000000000000\
                       000000000000000000000000000000000000";

    pub(super) fn own() -> Vec<u8> {
        hex::decode(OWN).unwrap()
    }

    fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut answer = own();
        answer[at..at + bytes.len()].copy_from_slice(bytes);
        answer
    }

    fn read(answer: &[u8]) -> Option<Tracking> {
        data(TRACKING, answer, 7).map(Tracking::read)
    }

    fn at(updated: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(updated)
    }

    const UPDATED: u64 = 0x6b04_42b8;

    #[test]
    fn the_answer_of_chronyd_is_read() {
        let tracking = read(&own()).unwrap();
        assert_eq!((tracking.reference, tracking.stratum, tracking.leap), (None, 10, 0));
        let status = tracking.status(Status::at_floor(), at(UPDATED + 1));
        assert_eq!((status.state, status.source), (State::Cluster, Source::Own));
        assert_eq!((status.offset, status.error), (Some(0), Some(0)));
    }

    #[test]
    fn a_server_outside_is_told_from_the_time_of_the_cluster_by_its_stratum() {
        let follow = |stratum: u8| {
            let mut answer = with(DATA + 4, &[192, 0, 2, 1]);
            answer[DATA + 21] = 1;
            answer[DATA + 25] = stratum;
            read(&answer).unwrap().status(Status::default(), at(UPDATED))
        };
        let server = Source::Address("192.0.2.1".parse().unwrap());
        for (stratum, state) in [(1, State::Synced), (9, State::Synced), (10, State::Cluster)] {
            assert_eq!((follow(stratum).state, follow(stratum).source), (state, server));
        }
        assert_eq!(follow(0).state, State::Unset);
        assert_eq!(follow(16).state, State::Unset);
    }

    #[test]
    fn a_clock_without_a_fresh_measurement_has_lost_its_source() {
        let tracking = read(&own()).unwrap();
        let before = Status { state: State::Synced, ..Status::default() };
        let old = at(UPDATED) + STALE + Duration::from_secs(1);
        assert_eq!(tracking.status(before, old).state, State::Lost);
        assert_eq!(tracking.status(Status::at_floor(), old), Status::at_floor());
        let unsynchronised = read(&with(DATA + 26, &[0, 3])).unwrap();
        assert_eq!(unsynchronised.status(before, at(UPDATED)).state, State::Lost);
        // A clock that was set back since is before its last measurement.
        assert_eq!(tracking.status(before, at(0)).state, State::Cluster);
    }

    #[test]
    fn a_correction_that_is_due_makes_the_clock_late() {
        // 0x08800000: coefficient 2^23, exponent 4, so 2^23 * 2^(4 - 25) = 4.
        let tracking = read(&with(DATA + 40, &[0x08, 0x80, 0, 0])).unwrap();
        assert_eq!(tracking.offset, -4_000_000);
        // A delay of 4 s and a dispersion of 4 s.
        let answer = with(DATA + 64, &[0x08, 0x80, 0, 0, 0x08, 0x80, 0, 0]);
        assert_eq!(read(&answer).unwrap().error, 6_000_000);
    }

    #[test]
    fn numbers_have_a_sign_in_both_parts() {
        assert_eq!(real(0), 0.0);
        // Coefficient -2^24, the lowest, and exponent 1.
        assert_eq!(real(1 << 25 | 1 << 24), -1.0);
        // Coefficient 2^23 and exponent -1.
        assert_eq!(real(0x7f << 25 | 1 << 23), 0.125);
    }

    #[test]
    fn an_answer_to_another_question_is_not_taken() {
        assert!(data(TRACKING, &own(), 8).is_none());
        for (at, byte) in [(0, 5), (1, 1), (5, 34), (7, 6), (9, 1)] {
            assert!(read(&with(at, &[byte])).is_none(), "{at}");
        }
        assert!(read(&own()[..LENGTH - 1]).is_none());
        assert!(read(&[own(), vec![0]].concat()).is_none());
    }

    #[tokio::test]
    async fn a_question_is_answered_on_the_socket_and_silence_has_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("chronyd.sock");
        let daemon = UnixDatagram::bind(&place).unwrap();
        let mut asker = Asker::connect(&place, folder.path().join("node.sock")).unwrap();
        let answer = async {
            let mut question = [0; 200];
            let (length, from) = daemon.recv_from(&mut question).await.unwrap();
            assert_eq!(&question[..length], request(33, 1, 0));
            // A late answer to a former question comes first.
            let path = from.as_pathname().unwrap();
            daemon.send_to(&own(), path).await.unwrap();
            daemon.send_to(&with(16, &[0, 0, 0, 1]), path).await.unwrap();
        };
        let (tracking, ()) = tokio::join!(asker.tracking(), answer);
        assert_eq!(tracking.unwrap().stratum, 10);
        tokio::time::pause();
        assert!(matches!(asker.tracking().await, Err(Silence::Late)));
    }

    #[test]
    fn a_source_counts_while_it_answers_with_what_this_clock_is_ahead_of_it() {
        // Of 10.0.2.16, four seconds.
        let mut data = vec![0; SOURCE.length - DATA];
        data[..4].copy_from_slice(&[10, 0, 2, 16]);
        data[17] = 1;
        data[40..44].copy_from_slice(&[0x08, 0x80, 0, 0]);
        assert_eq!(source(&data), None);
        data[31] = 1;
        assert_eq!(source(&data), Some(("10.0.2.16".parse().unwrap(), 4_000_000)));
        data[32..36].fill(0xff);
        assert_eq!(source(&data), None, "it has no time to give");
    }

    #[tokio::test]
    async fn every_source_is_asked_for_and_no_more_than_there_can_be() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("chronyd.sock");
        let daemon = UnixDatagram::bind(&place).unwrap();
        let mut asker = Asker::connect(&place, folder.path().join("node.sock")).unwrap();
        let answers = async {
            for sequence in 1..=1 + SOURCES_MAX {
                let mut question = [0; 200];
                let (_length, from) = daemon.recv_from(&mut question).await.unwrap();
                let (question, index) = match sequence {
                    1 => (SOURCES, word(&question, 20)),
                    _ => (SOURCE, word(&question, 20)),
                };
                let mut answer = vec![0; question.length];
                answer[..2].copy_from_slice(&[VERSION, TYPES[1]]);
                answer[4..6].copy_from_slice(&question.command.to_be_bytes());
                answer[6..8].copy_from_slice(&question.reply.to_be_bytes());
                answer[16..20].copy_from_slice(&sequence.to_be_bytes());
                if sequence == 1 {
                    answer[DATA..DATA + 4].copy_from_slice(&u32::MAX.to_be_bytes());
                } else {
                    assert_eq!(index, sequence - 2);
                    let host = u8::try_from(index).unwrap();
                    answer[DATA..DATA + 4].copy_from_slice(&[10, 0, 0, host]);
                    answer[DATA + 17] = 1;
                    answer[DATA + 31] = 1;
                }
                daemon.send_to(&answer, from.as_pathname().unwrap()).await.unwrap();
            }
        };
        let (sources, ()) = tokio::join!(asker.sources(), answers);
        assert_eq!(sources.unwrap().len(), SOURCES_MAX as usize);
    }

    proptest! {
        #[test]
        fn whatever_is_answered_the_status_is_bounded(
            data in prop::collection::vec(any::<u8>(), LENGTH - DATA),
            now in 0..u64::from(u32::MAX),
        ) {
            let tracking = read(&with(DATA, &data)).unwrap();
            let status = tracking.status(Status::default(), at(now));
            prop_assert!(status.offset.unwrap_or(0).unsigned_abs() <= 3_200_000_000_000_000);
            prop_assert!(status.error.unwrap_or(0) <= 3_200_000_000_000_000);
        }

        #[test]
        fn arbitrary_bytes_do_no_harm(answer in prop::collection::vec(any::<u8>(), 0..300)) {
            for question in [TRACKING, SOURCES, SOURCE] {
                let _data = data(question, &answer, 7);
            }
        }
    }
}

#[cfg(test)]
#[path = "tracking_fuzz_tests.rs"]
mod fuzz_tests;
