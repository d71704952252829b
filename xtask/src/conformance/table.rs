//! The table of the conformance tests (`table.txt`): what each test needs, and why.
//!
//! Invariants:
//! - A test that the table does not know, and a line of the table that decides nothing, are
//!   errors: no test is forgotten when Kubernetes changes.

use anyhow::{Context as _, Result, bail, ensure};

/// The needs of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// The control plane.
    Api,
    /// Workers.
    Pods,
    /// Something that Polis does not have.
    Never,
}

/// How long tests take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// As upstream marks them.
    Usual,
    /// Minutes, although upstream does not mark them as slow.
    Slow,
    /// The time of one pod that ends by itself: a story runs them on a machine.
    Quickest,
}

/// One line: what the tests need whose names begin so.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rule {
    beginning: &'static str,
    pub(super) need: Need,
    pace: Pace,
    pub(super) reason: &'static str,
}

impl Rule {
    /// Whether a test that this rule decides about takes minutes.
    pub(super) fn is_slow(&self, name: &str) -> bool {
        self.pace == Pace::Slow || name.contains("[Slow]")
    }
}

/// The whole table.
#[derive(Debug)]
pub(super) struct Table(Vec<Rule>);

impl Table {
    /// The table of the repository.
    ///
    /// # Errors
    ///
    /// A line of it cannot be read.
    pub(super) fn new() -> Result<Self> {
        Self::read(include_str!("table.txt"))
    }

    /// The beginnings of the names of the quickest tests with pods.
    pub(super) fn quickest(&self) -> Vec<String> {
        let quickest = self.0.iter().filter(|rule| rule.pace == Pace::Quickest);
        quickest.map(|rule| rule.beginning.to_owned()).collect()
    }

    /// Reads headings, `need: reason`, `need, slow: reason` or `need, quickest: reason`, each
    /// followed by indented beginnings of names.
    fn read(text: &'static str) -> Result<Self> {
        let mut rules: Vec<Rule> = Vec::new();
        let mut heading = None;
        for (number, line) in text.lines().enumerate() {
            let at = || format!("table.txt, line {}", number + 1);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some(beginning) = line.strip_prefix("  ") else {
                heading = Some(read_heading(line).with_context(at)?);
                continue;
            };
            let (need, pace, reason) = heading.with_context(at)?;
            let twice = rules.iter().any(|rule| rule.beginning == beginning);
            ensure!(!twice, "{}: {beginning} is listed twice", at());
            rules.push(Rule { beginning, need, pace, reason });
        }
        Ok(Self(rules))
    }

    /// The rule of each test: the one with the longest beginning that fits its name.
    ///
    /// # Errors
    ///
    /// No rule fits a test, or a rule decides about no test.
    pub(super) fn decide(&self, names: Vec<String>) -> Result<Vec<(String, &Rule)>> {
        let (mut decided, mut unknown) = (Vec::new(), Vec::new());
        for name in names {
            let fits = self.0.iter().filter(|rule| name.starts_with(rule.beginning));
            match fits.max_by_key(|rule| rule.beginning.len()) {
                Some(rule) => decided.push((name, rule)),
                None => unknown.push(name),
            }
        }
        if !unknown.is_empty() {
            bail!("table.txt does not say what these tests need: {}", unknown.join("; "));
        }
        let idle = |rule: &&Rule| !decided.iter().any(|(_, decides)| decides == rule);
        let idle: Vec<_> = self.0.iter().filter(idle).map(|rule| rule.beginning).collect();
        if !idle.is_empty() {
            bail!("these lines of table.txt decide about no test: {}", idle.join("; "));
        }
        Ok(decided)
    }
}

fn read_heading(line: &'static str) -> Result<(Need, Pace, &'static str)> {
    let (need, reason) = line.split_once(": ").context("expected `need: reason`")?;
    let (need, pace) = match need.split_once(", ") {
        None => (need, Pace::Usual),
        Some((need, "slow")) => (need, Pace::Slow),
        Some((need, "quickest")) => (need, Pace::Quickest),
        Some((_, other)) => bail!("`{other}` is neither slow nor quickest"),
    };
    let need = match need {
        "api" => Need::Api,
        "pods" => Need::Pods,
        "never" => Need::Never,
        other => bail!("`{other}` is none of api, pods, never"),
    };
    Ok((need, pace, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    const TEXT: &str = "# about\n\napi: the server\n  [a]\npods: a pod runs\n  [a] b\n";

    #[test]
    fn the_longest_beginning_decides() {
        let table = Table::read(TEXT).unwrap();
        let decided = table.decide(names(&["[a] b c", "[a] c"])).unwrap();
        assert_eq!(decided[0].1.need, Need::Pods);
        assert_eq!(decided[0].1.reason, "a pod runs");
        assert_eq!(decided[1].1.need, Need::Api);
    }

    #[test]
    fn a_test_is_slow_by_its_heading_or_by_the_mark_of_upstream() {
        let table = Table::read("api: the server\n  [a]\napi, slow: it waits\n  [a] b\n").unwrap();
        let decided = table.decide(names(&["[a] b", "[a] c", "[a] d [Slow]"])).unwrap();
        let slow: Vec<_> = decided.iter().map(|(name, rule)| rule.is_slow(name)).collect();
        assert_eq!(slow, [true, false, true]);
        assert_eq!(decided[0].1.need, Need::Api);
    }

    #[test]
    fn the_quickest_tests_are_those_of_their_heading() {
        let text = "pods: a pod runs\n  [a]\npods, quickest: it ends\n  [a] b\n  [a] c [x]\n";
        let table = Table::read(text).unwrap();
        assert_eq!(table.quickest(), ["[a] b", "[a] c [x]"]);
        assert!(table.0.iter().all(|rule| rule.need == Need::Pods && !rule.is_slow("[a] b")));
    }

    #[test]
    fn a_test_that_is_not_in_the_table_is_an_error_and_so_is_an_idle_line() {
        let table = Table::read(TEXT).unwrap();
        let error = table.decide(names(&["[a] b", "[a]", "[new] test"])).unwrap_err();
        assert!(error.to_string().ends_with("need: [new] test"), "{error}");
        let error = table.decide(names(&["[a] c"])).unwrap_err();
        assert!(error.to_string().ends_with("about no test: [a] b"), "{error}");
    }

    #[test]
    fn a_line_that_cannot_be_read_is_named() {
        for (text, expected) in [
            ("  [a]\n", "line 1"),
            ("api: x\n  [a]\n  [a]\n", "line 3: [a] is listed twice"),
            ("some: x\n", "`some` is none of api, pods, never"),
            ("api, some: x\n", "`some` is neither slow nor quickest"),
            ("api\n", "expected `need: reason`"),
        ] {
            let error = format!("{:#}", Table::read(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_table_of_the_repository_can_be_read() {
        let table = Table::new().unwrap();
        assert!(table.0.len() > 50);
        let quickest = table.0.iter().filter(|rule| rule.pace == Pace::Quickest);
        let needs: Vec<_> = quickest.map(|rule| rule.need).collect();
        // Their story has 40 minutes, and the suite waits five for a pod that does not start.
        assert_eq!(needs, [Need::Pods; 6]);
    }
}
