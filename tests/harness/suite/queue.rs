//! The queue of the stories: places, and the order in which they are given.
//!
//! There are as many places as processors, or a multiple of that in a suite whose stories
//! mostly wait. A story of one machine takes one, a story of a cluster three, or all where
//! there are fewer. Clusters come first, so that the places do not have to be emptied for
//! them one by one; among equals the longest comes first, so that no long one is left when
//! the others have ended. In a run whose time is limited, stories of one machine come with the
//! shortest first: as many as possible have their turn. There, the longest of all come last, and
//! only if their expected time is left: one of them takes the time of ten others.
//!
//! Every story waits: for an election, a heartbeat, a countdown, a program. A story of one
//! machine uses little more than half of a processor. So while all places are taken, stories
//! of one machine run *beside* them, at a lower priority: they get what the others leave
//! over, and the others do not starve. One runs beside a cluster, which uses most of its
//! places, and for each two places one, and one more, where no cluster runs. On two
//! processors that is one cluster with one story beside it, and then two stories with two
//! beside them.
//!
//! This module only computes.

use std::time::Duration;

use super::story::Story;

/// Seconds from which on a story comes last in a run whose time is limited.
const LONG: u32 = 500;

/// A story that waits for its turn, or has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) story: Story,
    /// Which try this is, from 1.
    pub(crate) try_number: u32,
}

/// How a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// On its own places.
    Placed,
    /// Beside a cluster, at a lower priority.
    Beside,
}

#[derive(Debug)]
pub(crate) struct Queue {
    waiting: Vec<Job>,
    places: u32,
    limited: bool,
    running: Vec<(u32, Turn)>,
    /// How many of these are stories of clusters.
    clusters: u32,
}

impl Queue {
    pub(crate) fn new(stories: &[Story], places: u32, limited: bool) -> Self {
        let waiting = stories.iter().map(|story| Job { story: *story, try_number: 1 }).collect();
        let (places, running) = (places.max(1), Vec::new());
        let mut queue = Self { waiting, places, limited, running, clusters: 0 };
        queue.sort();
        queue
    }

    /// The next first.
    fn sort(&mut self) {
        // Stable: equals stay in the order of their files.
        self.waiting.sort_by_key(|Job { story, .. }| {
            let cost = i64::from(story.cost);
            let cost = if self.limited && story.places == 1 { -cost } else { cost };
            let last = self.limited && is_long(story);
            std::cmp::Reverse((!last, story.places.min(self.places), cost))
        });
    }

    fn needs(&self, job: &Job) -> u32 {
        job.story.places.min(self.places)
    }

    /// Takes the next story that may start now.
    pub(crate) fn next(&mut self) -> Option<(Job, Turn)> {
        let taken: u32 = self.held(Turn::Placed);
        let beside: u32 = self.held(Turn::Beside);
        let beside_max = if self.clusters > 0 { 1 } else { 1 + self.places / 2 };
        let turn = |job: &Job| {
            if taken + self.needs(job) <= self.places {
                return Some(Turn::Placed);
            }
            // A cluster needs its places, also where there is only one.
            (job.story.places == 1 && beside < beside_max).then_some(Turn::Beside)
        };
        let (at, turn) =
            self.waiting.iter().enumerate().find_map(|(at, job)| Some((at, turn(job)?)))?;
        let job = self.waiting.remove(at);
        self.running.push((self.needs(&job), turn));
        self.clusters += u32::from(job.story.places > 1);
        Some((job, turn))
    }

    fn held(&self, turn: Turn) -> u32 {
        self.running.iter().filter(|(_, its)| *its == turn).map(|(places, _)| places).sum()
    }

    /// Gives back the places of a job.
    pub(crate) fn ended(&mut self, job: &Job, turn: Turn) {
        let held = (self.needs(job), turn);
        if let Some(at) = self.running.iter().position(|running| *running == held) {
            self.running.swap_remove(at);
            self.clusters -= u32::from(job.story.places > 1);
        }
    }

    /// Puts a story back for another try.
    pub(crate) fn again(&mut self, job: Job) {
        self.waiting.push(Job { try_number: job.try_number + 1, ..job });
        self.sort();
    }

    /// Takes out the stories that have not had a turn and for which `left` is too short: all of
    /// them, once it is over.
    pub(crate) fn without_time(&mut self, left: Duration) -> Vec<Story> {
        let lacks = |story: &Story| {
            left.is_zero() || is_long(story) && left < Duration::from_secs(u64::from(story.cost))
        };
        let (out, waiting) =
            self.waiting.drain(..).partition(|job| job.try_number == 1 && lacks(&job.story));
        self.waiting = waiting;
        Vec::into_iter(out).map(|job| job.story).collect()
    }

    /// Whether every story has had its turn and has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }
}

fn is_long(story: &Story) -> bool {
    story.cost >= LONG
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn single(name: &'static str, cost: u32) -> Story {
        Story::new("e2e::x", name, || Ok(())).takes(cost)
    }

    fn started(queue: &mut Queue) -> Vec<(Job, Turn)> {
        std::iter::from_fn(|| queue.next()).collect()
    }

    fn names(started: &[(Job, Turn)]) -> Vec<(String, Turn)> {
        started.iter().map(|(job, turn)| (job.story.name().replace("x::", ""), *turn)).collect()
    }

    fn placed(name: &str) -> (String, Turn) {
        (name.to_owned(), Turn::Placed)
    }

    fn beside(name: &str) -> (String, Turn) {
        (name.to_owned(), Turn::Beside)
    }

    #[test]
    fn the_longest_come_first_and_two_run_beside_the_two_with_places() {
        let [a, b, c] = [single("a", 50), single("b", 20), single("c", 5)];
        let stories = [single("e", 3), single("d", 4), c, a, b];
        let mut queue = Queue::new(&stories, 2, false);
        let running = started(&mut queue);
        assert_eq!(names(&running), [placed("a"), placed("b"), beside("c"), beside("d")]);
        // The place goes to the next, while those beside stay where they are.
        queue.ended(&running[1].0, running[1].1);
        let next = started(&mut queue);
        assert_eq!(names(&next), [placed("e")]);
        for (job, turn) in [&running[0], &running[2], &running[3], &next[0]] {
            assert!(!queue.is_over());
            queue.ended(job, *turn);
        }
        assert!(queue.is_over());
    }

    #[test]
    fn on_two_processors_a_cluster_has_both_and_one_story_beside_it() {
        let cluster = |name, cost| single(name, cost).cluster();
        let stories = [single("a", 9), single("b", 8), cluster("c", 3), cluster("d", 4)];
        let mut queue = Queue::new(&stories, 2, false);
        let first = started(&mut queue);
        assert_eq!(names(&first), [placed("d"), beside("a")]);
        // The next cluster does not wait for the story beside the last one.
        queue.ended(&first[0].0, first[0].1);
        let second = started(&mut queue);
        assert_eq!(names(&second), [placed("c")]);
        // Behind the clusters it goes on beside those that have the places.
        queue.ended(&second[0].0, second[0].1);
        let third = started(&mut queue);
        assert_eq!(names(&third), [placed("b")]);
        queue.ended(&first[1].0, first[1].1);
        queue.ended(&third[0].0, third[0].1);
        assert!(queue.is_over());
    }

    #[test]
    fn on_four_processors_a_cluster_takes_three_and_the_fourth_is_used() {
        let stories = [single("a", 9), single("b", 8), single("c", 3).cluster()];
        let mut queue = Queue::new(&stories, 4, false);
        assert_eq!(names(&started(&mut queue)), [placed("c"), placed("a"), beside("b")]);
    }

    #[test]
    fn on_one_processor_everything_has_its_turn() {
        let stories = [single("a", 9), single("b", 8), single("c", 3).cluster()];
        let mut queue = Queue::new(&stories, 1, false);
        // A cluster never runs beside another story, though it has one place like it here.
        let first = started(&mut queue);
        assert_eq!(names(&first), [placed("a"), beside("b")]);
        queue.ended(&first[0].0, first[0].1);
        assert_eq!(names(&started(&mut queue)), [placed("c")]);
    }

    #[test]
    fn a_repeated_story_comes_in_its_order() {
        let stories = [single("a", 9), single("b", 8), single("c", 7)];
        let mut queue = Queue::new(&stories, 1, false);
        let first = queue.next().unwrap();
        queue.ended(&first.0, first.1);
        queue.again(first.0);
        let again = queue.next().unwrap().0;
        assert_eq!((again.story.name().as_str(), again.try_number), ("x::a", 2));
    }

    #[test]
    fn with_a_limit_the_shortest_of_one_machine_come_first() {
        let clusters = [single("c", 3).cluster(), single("d", 4).cluster()];
        let mut queue =
            Queue::new(&[&clusters[..], &[single("a", 9), single("b", 8)]].concat(), 2, true);
        assert_eq!(names(&started(&mut queue)), [placed("d"), beside("b")]);
    }

    #[test]
    fn what_has_had_no_turn_is_left_and_a_second_try_goes_on() {
        let mut queue = Queue::new(&[single("a", 9), single("b", 8), single("c", 7)], 1, false);
        let first = started(&mut queue);
        queue.ended(&first[0].0, first[0].1);
        queue.again(first[0].0);
        let left: Vec<_> = queue.without_time(Duration::ZERO).iter().map(Story::name).collect();
        assert_eq!(left, ["x::c"]);
        assert_eq!(names(&started(&mut queue)), [placed("a")]);
    }

    #[test]
    fn with_a_limit_the_long_come_last_and_only_while_their_time_is_left() {
        let long = single("long", LONG).cluster();
        let stories = [long, single("a", 9), single("b", LONG - 1).cluster()];
        let mut queue = Queue::new(&stories, 2, true);
        let first = started(&mut queue);
        assert_eq!(names(&first), [placed("b"), beside("a")]);
        let enough = Duration::from_secs(LONG.into());
        assert!(queue.without_time(enough).is_empty());
        let out = queue.without_time(enough - Duration::from_secs(1));
        assert_eq!(out.iter().map(Story::name).collect::<Vec<_>>(), ["x::long"]);
        // What has begun is not taken out, and without a limit nothing asks.
        for (job, turn) in &first {
            queue.ended(job, *turn);
        }
        assert!(queue.is_over());
        let mut queue = Queue::new(&stories, 2, false);
        assert_eq!(names(&started(&mut queue)), [placed("long"), beside("a")]);
    }

    #[test]
    fn a_repeated_cluster_gets_its_places_while_others_wait() {
        let stories = [single("a", 9), single("b", 8), single("e", 7), single("c", 3).cluster()];
        let mut queue = Queue::new(&stories, 2, false);
        let first = started(&mut queue);
        assert_eq!(names(&first), [placed("c"), beside("a")]);
        queue.ended(&first[0].0, first[0].1);
        queue.again(first[0].0);
        assert_eq!(names(&started(&mut queue)), [placed("c")]);
    }
}
