//! The stream of one watcher: sends the changes of the directory.

use std::sync::Arc;

use polis_proto::v1;
use tokio::sync::watch;
use tonic::Status;

use super::{Handlers, Lead, Stream};
use crate::curator::configuration::{self, Firewalls};
use crate::curator::convert;
use crate::curator::directory::{Delta, Directory, Seen};
use crate::curator::leader::{Leadership, Term};
use crate::curator::pod_network::networks;
use polis_base::sys::clock;
use polis_wire::identity::NodeId;
use polis_wire::pki::Authorities;
use polis_wire::pod_network::Networks;

/// Nodes in one event.
const NODES_MAX: usize = 256;

struct Watcher {
    handlers: Handlers,
    directory: watch::Receiver<Directory>,
    leadership: watch::Receiver<Leadership>,
    term: Term,
    only: Option<NodeId>,
    /// The node that watches, if one does.
    caller: Option<NodeId>,
    seen: Seen,
    /// Whether every node that existed at the start has been sent.
    current: bool,
    /// The CRL that was sent last.
    crl: Arc<Vec<u8>>,
    /// The time servers that were sent last; `None` before the first event.
    time: Option<v1::TimeConfiguration>,
    /// The targets of logs that were sent last; `None` before the first event.
    log: Option<v1::LogConfiguration>,
    /// The proxy that was sent last; `None` before the first event.
    proxy: Option<v1::ProxyConfiguration>,
    /// The firewall and its trial that were sent last; `None` before the first event.
    firewall: Option<Firewalls>,
    /// The users that were sent last; `None` before the first event.
    users: Option<Arc<v1::Users>>,
    /// The authorities that were sent last.
    authorities: Option<Arc<Authorities>>,
}

/// The stream of one watcher, of `only` one node or of all.
pub(super) async fn watch(
    lead: Lead,
    only: Option<NodeId>,
    caller: Option<NodeId>,
) -> Result<Stream<v1::WatchEvent>, Status> {
    let directory = lead.current().await?;
    let Lead { handlers, term } = lead;
    let watcher = Watcher {
        leadership: handlers.0.leadership.clone(),
        handlers,
        directory,
        term,
        only,
        caller,
        seen: Seen::default(),
        current: false,
        crl: Arc::default(),
        time: None,
        log: None,
        proxy: None,
        firewall: None,
        users: None,
        authorities: None,
    };
    let stream = futures::stream::unfold(Some(watcher), |watcher| async move {
        let mut watcher = watcher?;
        match watcher.next().await {
            Ok(event) => Some((Ok(event), Some(watcher))),
            // The last message.
            Err(status) => Some((Err(status), None)),
        }
    });
    Ok(Box::pin(stream))
}

impl Watcher {
    async fn next(&mut self) -> Result<v1::WatchEvent, Status> {
        loop {
            if self.leadership.borrow_and_update().term.as_ref() != Some(&self.term) {
                return Err(self.handlers.not_leader());
            }
            let (delta, all, crl, time, log, proxy, firewall, users, authorities) = {
                let directory = self.directory.borrow_and_update();
                let (delta, all) = self.seen.delta(&directory, self.only, NODES_MAX);
                let configuration = directory.configuration();
                let time = configuration.time.clone().unwrap_or_default();
                let log = v1::LogConfiguration {
                    cluster_domain: configuration.cluster_domain.clone(),
                    ..configuration.log.clone().unwrap_or_default()
                };
                let proxy = configuration::proxy(configuration);
                let firewall = Firewalls::of(configuration);
                let (crl, users) = (directory.crl(), directory.admitted());
                (delta, all, crl, time, log, proxy, firewall, users, directory.authorities())
            };
            let caught_up = all && !self.current;
            let revoked = crl != self.crl;
            let new_time = (self.time.as_ref() != Some(&time)).then_some(time);
            let new_log = (self.log.as_ref() != Some(&log)).then_some(log);
            let new_proxy = (self.proxy.as_ref() != Some(&proxy)).then_some(proxy);
            let new_firewall = (self.firewall.as_ref() != Some(&firewall)).then_some(firewall);
            let new_users = (self.users.as_ref() != Some(&users)).then_some(users);
            let rotated = authorities != self.authorities;
            let news = revoked
                || rotated
                || new_time.is_some()
                || new_log.is_some()
                || new_proxy.is_some()
                || new_firewall.is_some()
                || new_users.is_some();
            if caught_up || news || delta != Delta::default() {
                self.current |= all;
                let sent_crl = if revoked { crl.to_vec() } else { Vec::new() };
                self.crl = crl;
                self.time = new_time.clone().or_else(|| self.time.take());
                self.log = new_log.clone().or_else(|| self.log.take());
                self.proxy = new_proxy.clone().or_else(|| self.proxy.take());
                // A trial that began before this event is shorter now.
                let order = new_firewall.as_ref().map(|new| new.order(clock::now()));
                self.firewall = new_firewall.or_else(|| self.firewall.take());
                let sent_users = new_users.as_deref().cloned();
                self.users = new_users.or_else(|| self.users.take());
                let sent = authorities.as_ref().filter(|_| rotated).map(|it| it.to_message());
                self.authorities = authorities;
                return Ok(v1::WatchEvent {
                    crl: sent_crl,
                    time: new_time,
                    log: new_log,
                    proxy: new_proxy,
                    firewall: order,
                    users: sent_users,
                    authorities: sent,
                    ..self.event(&delta)
                });
            }
            tokio::select! {
                // Cancel-safe, both: they wait for event values.
                changed = self.directory.changed() => {
                    changed.map_err(|_closed| self.handlers.not_leader())?;
                }
                changed = self.leadership.changed() => {
                    changed.map_err(|_closed| self.handlers.not_leader())?;
                }
            }
        }
    }

    /// The event of a change of nodes.
    fn event(&self, delta: &Delta) -> v1::WatchEvent {
        let heartbeats = &self.handlers.0.heartbeats;
        // Nodes need no proofs of others, and the keys in them name machines for life.
        let info = |(id, known): &(NodeId, _)| {
            let mut info = convert::without_proofs(convert::info(*id, known, heartbeats));
            if self.caller.is_some_and(|caller| caller != *id) {
                info.network_order = None;
                if let Some(status) = &mut info.status {
                    status.network = None;
                }
            }
            info
        };
        let networks = networks(self.directory.borrow().configuration());
        v1::WatchEvent {
            networks: networks.ok().map(Networks::to_message),
            nodes: delta.nodes.iter().map(info).collect(),
            gone: delta.gone.iter().map(ToString::to_string).collect(),
            current: self.current,
            ..v1::WatchEvent::default()
        }
    }
}
