//! Writes metrics as text that Prometheus reads.
//!
//! Numbers are read when somebody asks, from event values and counters that
//! exist anyway; so nothing is registered, and nothing runs between two reads.
//! `prometheus-client` keeps a registry of counters of its own, which would copy these
//! values, or need a collector for each; its text is OpenMetrics.

use std::fmt::{self, Display, Write as _};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Goes up, until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by class.
    Histogram,
}

/// A page of metrics.
#[derive(Debug, Default)]
pub(super) struct Page(String);

/// The samples of one metric.
pub(super) struct Family<'a> {
    page: &'a mut Page,
    name: &'static str,
}

impl Page {
    /// Begins a metric; `name` is whole, with its unit.
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Family<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.put(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        Family { page: self, name }
    }

    /// A metric with one sample.
    pub(super) fn one(&mut self, name: &'static str, kind: Kind, help: &str, value: impl Display) {
        self.family(name, kind, help).sample(&[], value);
    }

    /// The text.
    pub(super) fn into_text(self) -> String {
        self.0
    }

    fn put(&mut self, text: fmt::Arguments<'_>) {
        // Writing into a string cannot fail.
        let _infallible = self.0.write_fmt(text);
    }
}

impl Family<'_> {
    /// Adds a sample.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        self.suffixed("", labels, value)
    }

    /// Adds a sample of a part of a histogram: `_bucket`, `_sum` or `_count`.
    pub(super) fn suffixed(
        &mut self,
        suffix: &str,
        labels: &[(&str, &str)],
        value: impl Display,
    ) -> &mut Self {
        let name = self.name;
        self.page.put(format_args!("{name}{suffix}"));
        for (n, (label, text)) in labels.iter().enumerate() {
            let open = if n == 0 { '{' } else { ',' };
            self.page.put(format_args!("{open}{label}=\"{}\"", Escaped(text)));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        self.page.put(format_args!("{close} {value}\n"));
        self
    }
}

/// A label's value: it may hold anything.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_what_prometheus_reads() {
        let mut page = Page::default();
        page.one("polis_up", Kind::Gauge, "Whether it is up.", 1);
        let mut family = page.family("polis_x_total", Kind::Counter, "Things.");
        family.sample(&[("a", "b"), ("c", "say \"d\\e\"\n")], 2).sample(&[], 0.5);
        assert_eq!(
            page.into_text(),
            "# HELP polis_up Whether it is up.\n# TYPE polis_up gauge\npolis_up 1\n\
             # HELP polis_x_total Things.\n# TYPE polis_x_total counter\n\
             polis_x_total{a=\"b\",c=\"say \\\"d\\\\e\\\"\\n\"} 2\npolis_x_total 0.5\n"
        );
    }
}
