//! Checks that the alert rules and the dashboard for Prometheus name metrics that a node
//! has. They name the command to run, so they are checked beside the other
//! texts for operators (`mentions_tests`).

use std::collections::BTreeSet;
use std::path::Path;

fn file(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join(path)).unwrap()
}

fn alerts() -> String {
    file("docs/prometheus/alerts.yml")
}

/// The expressions of the rules and of the dashboard.
fn expressions() -> Vec<String> {
    let alerts = alerts();
    let rules = alerts.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let dashboard: serde_json::Value =
        serde_json::from_str(&file("docs/prometheus/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let shown = targets.map(|target| target["expr"].as_str().unwrap().to_owned());
    rules.map(str::to_owned).chain(shown).collect()
}

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The words of a text that begin with `polis_`, each with what follows it.
fn metrics_in(text: &str) -> Vec<(&str, &str)> {
    let begins = text.match_indices("polis_").map(|(at, _)| at);
    let whole = begins.filter(|at| !text[..*at].ends_with(is_part));
    whole
        .map(|at| {
            let rest = &text[at..];
            rest.split_at(rest.find(|c: char| !is_part(c)).unwrap_or(rest.len()))
        })
        .collect()
}

/// The code that writes the page, without its tests.
fn code() -> String {
    file("src/node/src/management/metrics.rs")
}

#[test]
fn every_metric_and_label_of_the_rules_and_the_dashboard_is_on_the_page_of_a_node() {
    let code = code();
    let there: BTreeSet<&str> = metrics_in(&code).into_iter().map(|(name, _)| name).collect();
    assert!(there.len() > 30, "{there:?}");
    let expressions = expressions();
    let mut used = BTreeSet::new();
    for expression in &expressions {
        for (name, rest) in metrics_in(expression) {
            let parts = ["_bucket", "_sum", "_count"].iter();
            let mut families = parts.filter_map(|part| name.strip_suffix(part));
            let family = families.find(|family| there.contains(family)).unwrap_or(name);
            assert!(there.contains(family), "metric {name} is missing: {expression}");
            used.insert(family);
            let matchers = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
            for matcher in matchers.iter().flat_map(|(matchers, _)| matchers.split(',')) {
                let (label, value) = matcher.split_once('=').unwrap();
                assert!(
                    code.contains(&format!("(\"{label}\", ")),
                    "no label {label}: {expression}"
                );
                assert!(value.starts_with('"') && value.ends_with('"'), "{expression}");
            }
        }
    }
    assert!(used.len() > 20, "{used:?}");
    // The page of the manual has them all, too.
    let manual = file("docs/metrics.md");
    for name in used {
        let written = manual.contains(name)
            || name.strip_prefix("polis_etcd").is_some_and(|end| manual.contains(end))
            || name.strip_prefix("polis_rpc").is_some_and(|end| manual.contains(end));
        assert!(written, "{name} is not in the manual");
    }
}

#[test]
fn the_values_of_states_in_the_rules_exist() {
    let states = file("src/runtime/src/supervisor/tree.rs");
    let cluster = file("src/control/src/cluster/state.rs");
    let etcd = file("src/control/src/consensus/status.rs");
    let drain = file("src/workload/src/drain/state.rs");
    let uses = code();
    let mut checked = 0;
    for expression in expressions() {
        for (name, rest) in metrics_in(&expression) {
            let source = match name {
                "polis_services" => &states,
                "polis_cluster_state" => &cluster,
                "polis_workload_drain" => &drain,
                "polis_etcd_standing" => &etcd,
                "polis_certificate_remaining_seconds" => &uses,
                _ => continue,
            };
            let matcher = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
            let Some((_, value)) = matcher.and_then(|(one, _)| one.split_once('=')) else {
                continue;
            };
            assert!(source.contains(value), "no value {value} of {name}: {expression}");
            checked += 1;
        }
    }
    assert!(checked >= 6, "{checked}");
}

#[test]
fn every_alert_says_what_is_wrong_how_bad_it_is_and_what_to_do() {
    let alerts = alerts();
    let rules: Vec<&str> = alerts.split("- alert: ").skip(1).collect();
    let names: BTreeSet<_> = rules.iter().filter_map(|rule| rule.lines().next()).collect();
    assert_eq!(names.len(), rules.len(), "two rules have one name");
    assert_eq!(alerts.matches("expr: ").count(), rules.len());
    for rule in rules {
        for part in ["expr: ", "severity: ", "summary: ", "action: "] {
            assert_eq!(rule.matches(part).count(), 1, "{part} in {rule}");
        }
        let severity = rule.split("severity: ").nth(1).and_then(|rest| rest.lines().next());
        assert!(["warning", "critical"].contains(&severity.unwrap()), "{rule}");
    }
}
