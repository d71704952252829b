//! The `tracing` layer, which files the events of a service under the service's name.
//!
//! The supervisor runs each service inside a span called [`SPAN`] whose field
//! `name` is the dotted name; an event belongs to the innermost such span. Events
//! outside of any such span belong to the root.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::{Body, Levelled, Origin, Tree};
use polis_base::serial::Severity;

/// The name of the span that a service runs in.
pub const SPAN: &str = "service";
/// How the targets begin whose events are kept from `Debug` on; libraries only from `Info` on.
const OURS: &str = "polis_";
/// The DHCP client, which logs each packet that it cannot read, and any machine of the segment can
/// send these without end: kept from `Warn` on.
const DHCP_CLIENT: &str = "mozim";
/// The name of events outside of any service.
const ROOT: &str = "root";

/// Sends every event of this process into `tree`. A second call has no effect.
pub fn install(tree: Tree) {
    let _already_installed = tracing_subscriber::registry().with(ToTree(tree)).try_init();
}

/// The layer. Public for tests that install it for one scope only.
#[derive(Clone, Debug)]
pub struct ToTree(pub Tree);

/// The dotted name, kept with the span.
struct Service(String);

impl<S> Layer<S> for ToTree
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn enabled(&self, metadata: &Metadata<'_>, _ctx: Context<'_, S>) -> bool {
        let kept = match metadata.target().split("::").next() {
            Some(ours) if ours.starts_with(OURS) => Level::DEBUG,
            Some(DHCP_CLIENT) => Level::WARN,
            Some(_) | None => Level::INFO,
        };
        *metadata.level() <= kept
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        if attributes.metadata().name() != SPAN {
            return;
        }
        let mut visitor = Fields::default();
        attributes.record(&mut visitor);
        let name = visitor.fields.into_iter().find(|(key, _)| key == "name");
        if let (Some((_, name)), Some(span)) = (name, ctx.span(id)) {
            span.extensions_mut().insert(Service(name));
        }
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let metadata = event.metadata();
        let severity = match *metadata.level() {
            Level::ERROR => Severity::Error,
            Level::WARN => Severity::Warning,
            Level::INFO => Severity::Info,
            Level::DEBUG | Level::TRACE => Severity::Debug,
        };
        let mut visitor = Fields::default();
        event.record(&mut visitor);
        let body = Body::Levelled(Levelled {
            severity,
            source: metadata.target().to_owned(),
            stamp: None,
            message: visitor.message,
            fields: visitor.fields,
        });
        let scope = ctx.event_scope(event);
        let name = scope
            .into_iter()
            .flatten()
            .find_map(|span| span.extensions().get::<Service>().map(|service| service.0.clone()));
        self.0.append(name.as_deref().unwrap_or(ROOT), Origin::Service, body);
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    fields: Vec<(String, String)>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: String) {
        // `log.*` repeats the event's own metadata.
        if field.name() == "message" {
            self.message = value;
        } else if !field.name().starts_with("log.") {
            self.fields.push((field.name().to_owned(), value));
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Query;
    use super::*;
    use tracing::{debug, info, info_span, trace, warn};

    #[test]
    fn an_event_is_filed_under_the_innermost_service() {
        let tree = Tree::new(None);
        let subscriber = tracing_subscriber::registry().with(ToTree(tree.clone()));
        tracing::subscriber::with_default(subscriber, || {
            info!("outside");
            let outer = info_span!("service", name = "root.a");
            let _in_outer = outer.enter();
            let inner = info_span!("service", name = "root.a.b");
            let _in_inner = inner.enter();
            let _in_other = info_span!("request", name = "not a service").entered();
            warn!(attempts = 3, error = %"disk full", "cannot write");
        });
        let lines: Vec<_> = tree
            .backlog(&Query::all())
            .iter()
            .map(|entry| {
                format!("{} {} {}", entry.body.severity().letter(), entry.name, entry.body)
            })
            .collect();
        assert_eq!(
            lines,
            ["I root outside", "W root.a.b cannot write attempts=3 error=\"disk full\""]
        );
    }

    #[test]
    fn of_our_crates_lines_are_kept_from_debug_on_and_of_libraries_from_info_on() {
        let tree = Tree::new(None);
        let subscriber = tracing_subscriber::registry().with(ToTree(tree.clone()));
        tracing::subscriber::with_default(subscriber, || {
            debug!("ours");
            trace!("one of very many of ours");
            debug!(target: "rtnetlink", "a library's");
        });
        let lines: Vec<_> =
            tree.backlog(&Query::all()).iter().map(|entry| entry.body.to_string()).collect();
        assert_eq!(lines, ["ours"]);
    }

    #[test]
    fn packets_that_the_dhcp_client_cannot_read_do_not_fill_the_log() {
        let tree = Tree::new(None);
        let subscriber = tracing_subscriber::registry().with(ToTree(tree.clone()));
        tracing::subscriber::with_default(subscriber, || {
            info!(target: "mozim::dhcpv4::option", "an option cannot be read");
            warn!(target: "mozim::dhcpv4::lease", "no server is named");
            info!(target: "rtnetlink", "another library");
        });
        let lines: Vec<_> =
            tree.backlog(&Query::all()).iter().map(|entry| entry.body.to_string()).collect();
        assert_eq!(lines, ["no server is named", "another library"]);
    }
}
