//! Gives the alert rules and the expressions of the dashboard to `promtool`, the checker of
//! Prometheus.
//!
//! `promtool` reads rules only, so each expression of the dashboard becomes a rule of a
//! temporary file. The unit tests of `polisctl` compare names and labels with the code.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::image;

/// The checker, which Debian has in its package `prometheus`.
pub(super) const PROMTOOL: &str = "promtool";

/// The alert rules, and the dashboard.
const ALERTS: &str = "docs/prometheus/alerts.yml";
const DASHBOARD: &str = "docs/prometheus/dashboard.json";

/// Prints what `promtool` says.
///
/// # Errors
///
/// When it refuses a rule or an expression, or the dashboard cannot be read.
pub(super) fn check(promtool: &Path) -> Result<()> {
    let root = image::workspace();
    let dashboard = std::fs::read_to_string(root.join(DASHBOARD));
    let dashboard = dashboard.with_context(|| format!("cannot read {DASHBOARD}"))?;
    let rules = rules(&serde_json::from_str(&dashboard)?)?;
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    // JSON is YAML.
    let file = folder.path().join("dashboard.json");
    std::fs::write(&file, rules.to_string()).context("cannot write the rules")?;
    let mut command = Command::new(promtool);
    let status = command.args(["check", "rules"]).arg(root.join(ALERTS)).arg(file).status();
    let status = status.with_context(|| format!("cannot start {}", promtool.display()))?;
    ensure!(status.success(), "promtool ended with {status}");
    Ok(())
}

/// The expressions of a dashboard as rules that are called by their panel.
fn rules(dashboard: &Value) -> Result<Value> {
    let panels = dashboard["panels"].as_array().context("the dashboard has no panels")?;
    let mut rules = Vec::new();
    for (panel, shown) in panels.iter().enumerate() {
        let targets = shown["targets"].as_array().map(Vec::as_slice).unwrap_or_default();
        for (target, shown) in targets.iter().enumerate() {
            let expression = shown["expr"].as_str();
            let expression =
                expression.with_context(|| format!("target {target} of panel {panel} has none"))?;
            // Rules of one name and one expression would be refused.
            rules.push(json!({ "record": format!("panel{panel}:{target}"), "expr": expression }));
        }
    }
    ensure!(!rules.is_empty(), "the dashboard has no expressions");
    Ok(json!({ "groups": [{ "name": "dashboard", "rules": rules }] }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_expression_of_the_dashboard_is_a_rule() {
        let root = image::workspace();
        let text = std::fs::read_to_string(root.join(DASHBOARD)).unwrap();
        let made = rules(&serde_json::from_str(&text).unwrap()).unwrap();
        let made = made["groups"][0]["rules"].as_array().unwrap();
        assert_eq!(made.len(), text.matches("\"expr\"").count());
        assert_eq!(made[0]["expr"], "sum(up{job=\"polis\"})");
        assert!(rules(&json!({ "panels": [] })).is_err(), "nothing would be checked");
        assert!(rules(&json!({ "panels": [{ "targets": [{}] }] })).is_err());
    }
}
