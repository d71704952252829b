//! The selection of the stories of a run: those that a filter names, or all but those
//! that a sample leaves out.

use std::collections::BTreeMap;

use super::story::Story;
use crate::seed::pick;

/// The wishes for a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// A story is wanted if its name contains one of these, or without filters.
    pub(crate) filters: Vec<String>,
    /// No sample is drawn.
    pub(crate) all: bool,
    pub(crate) seed: u64,
}

/// The stories to run, and how many of the wanted ones a sample leaves out. A story that
/// a filter names runs, drawn or not: the person has chosen.
pub(crate) fn select(stories: &[Story], wanted: &Wanted) -> (Vec<Story>, usize) {
    let Wanted { filters, all, seed } = wanted;
    if !filters.is_empty() {
        let named = |story: &&Story| filters.iter().any(|filter| story.name().contains(filter));
        return (stories.iter().filter(named).copied().collect(), 0);
    }
    if *all {
        return (stories.to_vec(), 0);
    }
    let mut samples: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for sample in stories.iter().filter_map(|story| story.sample) {
        samples.entry(sample.of).or_insert((0, sample.drawn)).0 += 1;
    }
    let mut drawn: BTreeMap<&str, (Vec<usize>, usize)> = samples
        .into_iter()
        .map(|(of, (count, drawn))| (of, (pick(*seed, of, count, drawn), 0)))
        .collect();
    let selected: Vec<Story> = stories
        .iter()
        .filter(|story| {
            let Some(sample) = story.sample else { return true };
            // Each name was put in above.
            drawn.get_mut(sample.of).is_none_or(|(numbers, next)| {
                *next += 1;
                numbers.contains(&(*next - 1))
            })
        })
        .copied()
        .collect();
    let left = stories.len() - selected.len();
    (selected, left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::story::Sample;

    const B: Sample = Sample { of: "b", drawn: 1 };
    const NOTHING: fn() -> anyhow::Result<()> = || Ok(());
    const STORIES: [Story; 5] = [
        Story::new("e2e::a", "plain", NOTHING),
        Story::new("e2e::b", "first", NOTHING).one_of(B),
        Story::new("e2e::b", "second", NOTHING).one_of(B),
        Story::new("e2e::b", "third", NOTHING).one_of(B),
        Story::new("e2e::c", "whole", NOTHING).of_all(),
    ];

    fn names(wanted: &Wanted) -> (Vec<String>, usize) {
        let (selected, left) = select(&STORIES, wanted);
        (selected.iter().map(Story::name).collect(), left)
    }

    #[test]
    fn each_sample_runs_its_number_of_stories_and_other_seeds_run_others() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..50 {
            let (selected, left) = names(&Wanted { seed, ..Wanted::default() });
            assert_eq!((selected.len(), left), (2, 3), "{selected:?}");
            assert_eq!(selected[0], "a::plain");
            assert_eq!(names(&Wanted { seed, ..Wanted::default() }).0, selected);
            seen.insert(selected[1].clone());
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    }

    #[test]
    fn a_run_of_everything_and_a_filter_leave_nothing_out() {
        assert_eq!(names(&Wanted { all: true, ..Wanted::default() }).0.len(), STORIES.len());
        let filters = vec!["second".to_owned(), "c::".to_owned()];
        let (selected, left) = names(&Wanted { filters, ..Wanted::default() });
        assert_eq!((selected, left), (vec!["b::second".to_owned(), "c::whole".to_owned()], 0));
    }
}
