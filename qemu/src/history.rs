//! A history of acknowledged writes, checked against the data that a cluster still holds.
//!
//! `polis.exercise=append` makes each node write numbered keys and print on its serial
//! line each number that etcd has acknowledged, and after each boot the numbers that it
//! finds. A [`History`] gathers both from the serial logs, however the machines ended,
//! and [`History::check`] finds the first contradiction.
//!
//! ```text
//! serial.log of each node --read--> acknowledgements, listings --check--> Summary | Violation
//! ```
//!
//! The checks:
//! - An acknowledged number is in every listing of its revision or later, with
//!   the revision that was acknowledged: it is there, once.
//! - The numbers of a writer are acknowledged in order, at growing revisions, and
//!   found without holes.
//! - A number that was found once is found in every later listing, unchanged.
//! - A write after a listing gets a later revision than the listing.
//!
//! A line that was cut off with its machine is ignored.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::line::Event;

/// Numbers that may be found beyond the last acknowledged one: a power cut loses lines
/// that were printed and not yet sent.
const UNREPORTED_MAX: u64 = 20;

/// The reports of all writers.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// In the order in which each writer reported them.
    acknowledged: BTreeMap<String, Vec<Written>>,
    listings: Vec<Listing>,
}

#[derive(Clone, Copy, Debug)]
struct Written {
    number: u64,
    revision: u64,
    /// The newest revision that its machine had seen before it wrote this.
    after: u64,
}

#[derive(Clone, Debug, Default)]
struct Listing {
    as_of: u64,
    count: usize,
    /// Writer and number to revision.
    held: BTreeMap<(String, u64), u64>,
}

/// A history without a contradiction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Acknowledged numbers, of each writer.
    pub acknowledged: BTreeMap<String, usize>,
    /// How many listings were read.
    pub listings: usize,
    /// Acknowledged numbers that are newer than every listing.
    pub unread: usize,
}

/// A contradiction in a history.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An acknowledged write is missing.
    #[error(
        "{number} of {writer} was acknowledged at revision {revision} but is missing from the \
         listing of revision {as_of}"
    )]
    Lost {
        /// The writer.
        writer: String,
        /// The number.
        number: u64,
        /// As acknowledged.
        revision: u64,
        /// The revision of the listing that lacks it.
        as_of: u64,
    },
    /// It is present, but at another revision.
    #[error(
        "{number} of {writer} was acknowledged at revision {revision} but found at {found}: it was \
         written twice"
    )]
    Twice {
        /// The writer.
        writer: String,
        /// The number.
        number: u64,
        /// The first reported revision.
        revision: u64,
        /// The revision found later.
        found: u64,
    },
    /// A number was found, and later missing.
    #[error("{number} of {writer} was found at revision {before} but not at {as_of}")]
    Vanished {
        /// The writer.
        writer: String,
        /// The number.
        number: u64,
        /// Of the listing that has it.
        before: u64,
        /// Of the listing that lacks it.
        as_of: u64,
    },
    /// A number is missing below another.
    #[error("{writer} wrote {number} last, but {missing} is missing")]
    Hole {
        /// The writer.
        writer: String,
        /// The highest.
        number: u64,
        /// The lowest that is missing.
        missing: u64,
    },
    /// A later write has no later revision.
    #[error(
        "{number} of {writer} was acknowledged at revision {revision}, which is not after {after}"
    )]
    Order {
        /// The writer.
        writer: String,
        /// The number.
        number: u64,
        /// Its revision.
        revision: u64,
        /// The revision that it should follow.
        after: u64,
    },
    /// A number was acknowledged after a higher one.
    #[error("{writer} reported {number} after {before}")]
    Backwards {
        /// The writer.
        writer: String,
        /// The number.
        number: u64,
        /// The number acknowledged before.
        before: u64,
    },
    /// A number was found that no writer can have written.
    #[error("{number} of {writer} was found, but {last} was acknowledged last")]
    Invented {
        /// The writer.
        writer: String,
        /// The number.
        number: u64,
        /// The last that was acknowledged.
        last: u64,
    },
    /// Lines of a listing were lost: it cannot be checked.
    #[error("the listing of revision {as_of} announces {announced} numbers but has {count}")]
    Unheard {
        /// Of the listing.
        as_of: u64,
        /// The number of entries that it announces.
        count: usize,
        /// The number of entries that were printed.
        announced: usize,
    },
}

impl History {
    /// Adds the reports of a node, boot after boot, from its serial log.
    pub fn read(&mut self, log: &str) {
        let mut open = Listing::default();
        let mut seen = 0;
        for line in log.lines() {
            let Some(event) = parse_event(line) else { continue };
            let number = |key: &str| event.get(key).and_then(|text| text.parse::<u64>().ok());
            let writer = event.text("writer").to_owned();
            if let (Some(acknowledged), Some(revision)) =
                (number("acknowledged"), number("revision"))
            {
                let written = Written { number: acknowledged, revision, after: seen };
                self.acknowledged.entry(writer).or_default().push(written);
            } else if let (Some(holds), Some(as_of)) = (event.get("holds"), number("as_of")) {
                if open.as_of != as_of {
                    // The listing before it was cut off with its machine.
                    open = Listing { as_of, ..Listing::default() };
                }
                for pair in holds.split_ascii_whitespace() {
                    let pair = pair.split_once('@');
                    let Some((number, revision)) = pair else { continue };
                    if let (Ok(number), Ok(revision)) = (number.parse(), revision.parse()) {
                        open.held.insert((writer.clone(), number), revision);
                    }
                }
            } else if let (Some(listed), Some(as_of)) = (number("listed"), number("as_of")) {
                if open.as_of != as_of {
                    open = Listing { as_of, ..Listing::default() };
                }
                open.count = usize::try_from(listed).unwrap_or(usize::MAX);
                self.listings.push(std::mem::take(&mut open));
                seen = as_of;
            }
        }
    }

    /// Searches for a contradiction.
    ///
    /// # Errors
    /// The first one.
    pub fn check(&self) -> Result<Summary, Violation> {
        let mut listings: Vec<&Listing> = self.listings.iter().collect();
        listings.sort_by_key(|listing| listing.as_of);
        for (writer, all) in &self.acknowledged {
            in_order(writer, all)?;
        }
        let mut before: Option<&Listing> = None;
        for listing in &listings {
            self.check_listing(listing)?;
            if let Some(before) = before {
                grown(before, listing)?;
            }
            before = Some(listing);
        }
        let newest = listings.last().map_or(0, |listing| listing.as_of);
        let all = self.acknowledged.values().flatten();
        Ok(Summary {
            acknowledged: self
                .acknowledged
                .iter()
                .map(|(writer, all)| (writer.clone(), all.len()))
                .collect(),
            listings: listings.len(),
            unread: all.filter(|written| written.revision > newest).count(),
        })
    }

    fn check_listing(&self, listing: &Listing) -> Result<(), Violation> {
        let Listing { as_of, count, held } = listing;
        if held.len() != *count {
            return Err(Violation::Unheard { as_of: *as_of, count: *count, announced: held.len() });
        }
        for (writer, all) in &self.acknowledged {
            for Written { number, revision, .. } in all {
                let (number, revision) = (*number, *revision);
                let writer = writer.clone();
                match held.get(&(writer.clone(), number)) {
                    Some(found) if *found == revision => {}
                    Some(found) => {
                        let found = *found;
                        return Err(Violation::Twice { writer, number, revision, found });
                    }
                    None if revision <= *as_of => {
                        return Err(Violation::Lost { writer, number, revision, as_of: *as_of });
                    }
                    None => {}
                }
            }
        }
        let mut highest: BTreeMap<&str, u64> = BTreeMap::new();
        for (writer, number) in held.keys() {
            let before = highest.insert(writer, *number).unwrap_or(0);
            if *number != before + 1 {
                let writer = writer.clone();
                return Err(Violation::Hole { writer, number: *number, missing: before + 1 });
            }
        }
        for (writer, number) in highest {
            let all = self.acknowledged.get(writer);
            let last = all.and_then(|all| all.last()).map_or(0, |written| written.number);
            if number > last + UNREPORTED_MAX {
                return Err(Violation::Invented { writer: writer.to_owned(), number, last });
            }
        }
        Ok(())
    }
}

/// The event of an exercise in a line of a serial log, if the line is whole: the
/// time is its last word.
fn parse_event(line: &str) -> Option<Event> {
    let text = &line[line.find("POLIS exercise ")?..];
    let event = Event::parse(text.trim_end(), Duration::ZERO)?;
    let (_seconds, decimals) = event.get("t")?.split_once('.')?;
    (event.is("name", "append") && decimals.len() == 3).then_some(event)
}

fn in_order(writer: &str, all: &[Written]) -> Result<(), Violation> {
    let writer = || writer.to_owned();
    for Written { number, revision, after } in all {
        if revision <= after {
            let (number, revision, after) = (*number, *revision, *after);
            return Err(Violation::Order { writer: writer(), number, revision, after });
        }
    }
    for pair in all.windows(2) {
        let (before, now) = (pair[0], pair[1]);
        if now.number <= before.number {
            let (number, before) = (now.number, before.number);
            return Err(Violation::Backwards { writer: writer(), number, before });
        }
        if now.revision <= before.revision {
            let (number, revision, after) = (now.number, now.revision, before.revision);
            return Err(Violation::Order { writer: writer(), number, revision, after });
        }
    }
    Ok(())
}

/// Whether `later`, which was read later, contains everything in `before`.
fn grown(before: &Listing, later: &Listing) -> Result<(), Violation> {
    for ((writer, number), revision) in &before.held {
        let (writer, number, revision) = (writer.clone(), *number, *revision);
        match later.held.get(&(writer.clone(), number)) {
            Some(found) if *found == revision => {}
            Some(found) => {
                return Err(Violation::Twice { writer, number, revision, found: *found });
            }
            None => {
                let (before, as_of) = (before.as_of, later.as_of);
                return Err(Violation::Vanished { writer, number, before, as_of });
            }
        }
    }
    Ok(())
}

/// The longest time between two of these, from `since` until `end`, which count as one
/// each; `None` if the end comes first.
#[must_use]
pub fn longest_gap(mut times: Vec<Instant>, since: Instant, end: Instant) -> Duration {
    if end <= since {
        return Duration::ZERO;
    }
    times.retain(|time| (since..end).contains(time));
    times.extend([since, end]);
    times.sort();
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    gaps.max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "polis-0a";
    const B: &str = "polis-0b";

    fn kept(writer: &str, number: u64, revision: u64) -> String {
        format!(
            "   9.1 POLIS exercise name=append writer={writer} acknowledged={number} revision={revision} t=9.100\n"
        )
    }

    fn found(as_of: u64, writers: &[(&str, &[(u64, u64)])]) -> String {
        let mut text = String::new();
        let mut count = 0;
        for (writer, numbers) in writers {
            let holds: Vec<String> =
                numbers.iter().map(|(number, revision)| format!("{number}@{revision}")).collect();
            count += holds.len();
            text.push_str(&format!(
                "   8.1 POLIS exercise name=append writer={writer} holds=\"{}\" as_of={as_of} t=8.100\n",
                holds.join(" ")
            ));
        }
        text.push_str(&format!(
            "   8.2 POLIS exercise name=append listed={count} as_of={as_of} t=8.200\n"
        ));
        text
    }

    fn check(logs: &[String]) -> Result<Summary, Violation> {
        let mut history = History::default();
        logs.iter().for_each(|log| history.read(log));
        history.check()
    }

    #[test]
    fn a_good_history_of_two_writers_is_summed_up() {
        let a = found(1, &[]) + &kept(A, 1, 2) + &kept(A, 2, 4);
        let b = found(1, &[])
            + &kept(B, 1, 3)
            + &kept(B, 2, 5)
            // A boot, which finds one number of A beyond its last report.
            + &found(7, &[(A, &[(1, 2), (2, 4), (3, 6)]), (B, &[(1, 3), (2, 5)])])
            + &kept(B, 3, 8);
        let summary = check(&[a, b]).unwrap();
        let counts = [(A.to_owned(), 2), (B.to_owned(), 3)].into_iter().collect();
        assert_eq!(summary, Summary { acknowledged: counts, listings: 3, unread: 1 });
    }

    #[test]
    fn a_lost_write_is_found() {
        let log = kept(A, 1, 2) + &kept(A, 2, 3) + &found(9, &[(A, &[(1, 2)])]);
        let lost = Violation::Lost { writer: A.to_owned(), number: 2, revision: 3, as_of: 9 };
        assert_eq!(check(&[log]), Err(lost));
    }

    #[test]
    fn a_write_that_came_after_a_listing_is_not_missed_in_it() {
        let log = kept(A, 1, 2) + &found(3, &[(A, &[(1, 2)])]) + &kept(A, 2, 4);
        assert!(check(&[log]).is_ok());
    }

    #[test]
    fn a_write_that_was_made_twice_is_found() {
        let log = kept(A, 1, 2) + &found(9, &[(A, &[(1, 7)])]);
        assert!(matches!(check(&[log]), Err(Violation::Twice { revision: 2, found: 7, .. })));
        let logs = [found(9, &[(A, &[(1, 7)])]), found(12, &[(A, &[(1, 11)])])];
        assert!(matches!(check(&logs), Err(Violation::Twice { revision: 7, found: 11, .. })));
    }

    #[test]
    fn what_was_found_once_must_not_vanish() {
        let logs = [found(12, &[]), found(9, &[(A, &[(1, 7)])])];
        let gone = Violation::Vanished { writer: A.to_owned(), number: 1, before: 9, as_of: 12 };
        assert_eq!(check(&logs), Err(gone));
    }

    #[test]
    fn revisions_and_numbers_only_grow() {
        let log = kept(A, 1, 5) + &kept(A, 2, 4);
        assert!(matches!(check(&[log]), Err(Violation::Order { revision: 4, after: 5, .. })));
        let log = kept(A, 2, 4) + &kept(A, 2, 5);
        assert!(matches!(check(&[log]), Err(Violation::Backwards { number: 2, before: 2, .. })));
        // Written after a listing, with an older revision.
        let log = found(9, &[]) + &kept(A, 1, 8);
        assert!(matches!(check(&[log]), Err(Violation::Order { revision: 8, after: 9, .. })));
    }

    #[test]
    fn a_hole_and_an_unwritten_number_are_found() {
        let log = found(9, &[(A, &[(1, 2), (3, 4)])]);
        assert!(matches!(check(&[log]), Err(Violation::Hole { missing: 2, .. })));
        let numbers: Vec<(u64, u64)> = (1..=UNREPORTED_MAX + 2).map(|n| (n, n + 1)).collect();
        let log = kept(A, 1, 2) + &found(99, &[(A, &numbers)]);
        assert!(matches!(check(&[log]), Err(Violation::Invented { last: 1, .. })));
    }

    #[test]
    fn a_listing_of_which_lines_are_missing_proves_nothing() {
        let whole = found(9, &[(A, &[(1, 2)]), (B, &[(1, 3)])]);
        let torn = whole.lines().skip(1).collect::<Vec<_>>().join("\n");
        assert_eq!(check(&[torn]), Err(Violation::Unheard { as_of: 9, count: 2, announced: 1 }));
    }

    #[test]
    fn a_line_that_was_cut_off_was_never_said() {
        let line = kept(A, 12, 345);
        for end in 0..line.len() - 2 {
            let torn = line[..end].to_owned();
            let summary = check(&[torn]).unwrap();
            assert_eq!(summary.acknowledged.len(), 0, "{end}");
        }
        // A listing that ends with its machine, and the next boot's.
        let cut = "8.1 POLIS exercise name=append writer=polis-0a holds=\"1@2\" as_of=5 t=8.100\n";
        let log = cut.to_owned() + &found(6, &[(A, &[(1, 2)])]);
        assert_eq!(check(&[log]).unwrap().listings, 1);
    }

    #[test]
    fn only_silence_of_all_writers_between_cut_and_vote_is_a_gap() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let times = || [5, 12, 14, 60].map(at).to_vec();
        let gap = |since, end| longest_gap(times(), at(since), at(end)).as_secs();
        assert_eq!(gap(10, 15), 2);
        assert_eq!(gap(10, 20), 6, "nothing was written before the vote");
        assert_eq!(gap(10, 70), 46);
        assert_eq!(gap(20, 10), 0, "it voted before anything was cut");
    }
}
