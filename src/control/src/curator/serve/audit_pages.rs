//! The stream of the audit log for its readers: `GetAudit`.
//!
//! A stream begins with the page that its reader asks for, ends with the newest entry unless it
//! follows the log, and ends with the term of its leader.
//!
//! What this module does not do: append entries (`audit`), or read a page (`curator::audit`).

use polis_proto::v1;
use tokio::sync::watch;
use tonic::Status;

use super::{Lead, Stream};
use crate::curator::audit::page_after;
use crate::curator::leader::Leadership;

impl Lead {
    /// The pages of the log.
    pub(super) fn audit(self, request: v1::GetAuditRequest) -> Stream<v1::GetAuditResponse> {
        let v1::GetAuditRequest { from, follow } = request;
        let newest = self.handlers.0.audit.follow();
        let leadership = self.handlers.0.leadership.clone();
        let reader = Reader { lead: self, newest, leadership, from, follow, waits: false };
        Box::pin(futures::stream::unfold(Some(reader), |reader| async move {
            let mut reader = reader?;
            match Box::pin(reader.next()).await {
                Ok(page) => page.map(|page| (Ok(page), Some(reader))),
                // The last message.
                Err(status) => Some((Err(status), None)),
            }
        }))
    }
}

/// The stream of one reader of the log.
struct Reader {
    lead: Lead,
    newest: watch::Receiver<u64>,
    leadership: watch::Receiver<Leadership>,
    /// The first entry that was not sent yet.
    from: u64,
    follow: bool,
    /// Whether all entries that there were are sent.
    waits: bool,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<v1::GetAuditResponse>, Status> {
        loop {
            if self.waits && !self.follow {
                return Ok(None);
            }
            if self.waits {
                tokio::select! {
                    // Cancel-safe, both: they wait for event values.
                    changed = self.newest.changed() => {
                        changed.map_err(|_closed| self.lead.handlers.not_leader())?;
                    }
                    changed = self.leadership.changed() => {
                        changed.map_err(|_closed| self.lead.handlers.not_leader())?;
                    }
                }
            }
            if self.leadership.borrow_and_update().term.as_ref() != Some(&self.lead.term) {
                return Err(self.lead.handlers.not_leader());
            }
            let _seen = *self.newest.borrow_and_update();
            let audit = &self.lead.handlers.0.audit;
            let page = self.lead.store().audit_page(audit, self.from).await;
            let (head, entries) = page.map_err(|error| self.lead.refuse(error))?;
            let waited = std::mem::replace(&mut self.waits, false);
            let after = page_after(self.from);
            // No page follows the last one, even if a damaged head has a higher number.
            if after > head.number || after == u64::MAX {
                self.waits = true;
                self.from = self.from.max(head.number.saturating_add(1));
            } else {
                // Of what was pruned there is nothing to read.
                self.from = after.max(head.first);
            }
            // A first answer has the ends of the chain also without an entry.
            if !entries.is_empty() || (self.waits && !waited) {
                return Ok(Some(v1::GetAuditResponse { head: Some(head), entries }));
            }
        }
    }
}
