//! Parameters of a machine that has none of its own: from the metadata service of its cloud, or
//! from the copy of what that gave before.
//!
//! ```text
//! no place of the machine has any
//!        |
//!        +-- a home ----> the copy on the ESP, if there is one
//!        +-- no home ---> the firmware names a cloud?
//!                            | no: nothing is asked
//!                            v
//!                         [Asking] --trouble, wait longer--> [Asking]
//!                            |
//!                            +--> user data: copied to the ESP; none
//! ```
//!
//! A node with a home does not ask: the way to its cluster must not depend on a service of the
//! network. It needs the network of its parameters at every boot, so the copy has them.
//!
//! Invariants:
//! - Nothing is asked unless the firmware names a cloud, and never by a machine with a home.
//! - The copy counts only on a machine with a home, and is that of the parameters which led to it.
//!
//! What this module does not do: speak with the service (`metadata`).

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::decide::{Place, Read};
use super::service::{PATIENCE, RunError, Service, is_home};
use super::{BYTES_MAX, Error, Platform, Source, dmi, metadata, parse};
use crate::storage;
use polis_base::files;
use polis_base::stage::{Stage, State};
use polis_base::{cause, sys::clock};
use polis_runtime::event;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::Context;
use polis_wire::parameters::disk::foreign;

/// How long a machine without a route of IPv4 waits before it asks by IPv6.
const IPV4_FIRST: Duration = Duration::from_secs(5);

/// Before the service is asked again, the first time and at most. The first questions come before
/// the machine has an address.
const WAIT_MIN: Duration = Duration::from_millis(250);
const WAIT_MAX: Duration = Duration::from_secs(8);

/// The name of the place on a machine that asks no metadata service.
const PLACE: &str = "metadata service";

impl Service {
    /// Looks beyond the machine's own places, unless one of those has something (`own`).
    /// Cancel-safe.
    pub(super) async fn of_cloud(
        &mut self,
        own: bool,
        ctx: &Context,
    ) -> Result<Option<Place>, RunError> {
        if own { self.forget(ctx).await.map(|()| None) } else { self.look(ctx).await.map(Some) }
    }

    async fn look(&mut self, ctx: &Context) -> Result<Place, RunError> {
        let (sys, copy) = (self.config.sys.clone(), self.config.kept.clone());
        let reading = tokio::task::spawn_blocking(move || (dmi::read(&sys), copy.read()));
        let (dmi, kept) = reading.await.map_err(RunError::Thread)?;
        let platforms = dmi.platforms();
        let nothing = |note| Place::without(Source::Kept, PLACE, Some(note));
        if platforms.is_empty() && matches!(kept, Ok(None)) {
            return Ok(nothing("not asked, as the firmware names no cloud"));
        }
        if self.settled(ctx).await? {
            return Ok(match kept_of(kept) {
                Ok(None) => nothing("not asked, as this machine has a home"),
                kept => Place::new(Source::Kept, kept),
            });
        }
        let Some(platform) = platforms.first().copied() else {
            return Ok(nothing("not asked, as the firmware names no cloud"));
        };
        if let Some(other) = platforms.get(1) {
            warn!("the firmware names {platform} and {other}; only {platform} is asked");
        }
        let looked = fetched(platform, self.ask(platform, ctx).await);
        if let Ok(Some(message)) = &looked.read
            && parse(message).is_ok()
            && let Err(error) = self.config.kept.save(message.clone()).await
        {
            let cause = cause::line(&error);
            warn!("later boots will not know the network in the node parameters: {cause}");
        }
        Ok(looked)
    }

    /// Removes a copy that does not lead to the home which this machine is about to have.
    async fn forget(&mut self, ctx: &Context) -> Result<(), RunError> {
        let copy = self.config.kept.clone();
        let reading = tokio::task::spawn_blocking(move || copy.is_filled());
        if matches!(reading.await.map_err(RunError::Thread)?, Ok(false))
            || self.settled(ctx).await?
        {
            return Ok(());
        }
        let copy = self.config.kept.clone();
        let removed = tokio::task::spawn_blocking(move || copy.remove());
        if let Err(error) = removed.await.map_err(RunError::Thread)? {
            let cause = cause::line(&error);
            warn!("cannot remove the parameters that a metadata service once gave: {cause}");
        }
        Ok(())
    }

    /// Whether the machine has a home, once its disk says so. Cancel-safe.
    async fn settled(&mut self, ctx: &Context) -> Result<bool, RunError> {
        let settled = event::until(&mut self.storage, "the disk", |status| {
            (!matches!(status, storage::Status::Starting)).then(|| is_home(status))
        });
        tokio::pin!(settled);
        match tokio::time::timeout(PATIENCE, &mut settled).await {
            Ok(home) => Ok(home?),
            Err(_elapsed) => {
                let what = "the disk, which says whether this machine has a home and needs no \
                            other node parameters; the stage storage says what the disk waits for";
                ctx.stage(Stage::Parameters, State::Waiting(what.to_owned()));
                Ok(settled.await?)
            }
        }
    }

    /// Asks until there is an answer. Cancel-safe: a question may be repeated.
    async fn ask(&self, platform: Platform, ctx: &Context) -> Read {
        let address = self.config.metadata;
        info!("asks the metadata service of {platform} at {} for node parameters", address.ip());
        // Until the parameters are known, the network is that of a machine without any.
        self.asks.send_replace(true);
        let (start, since) = (Instant::now(), clock::uptime().as_secs());
        let (mut wait, mut last) = (WAIT_MIN, cause::Last::default());
        loop {
            let mut asked = metadata::ask(platform, address).await;
            // IPv4 comes first, also where a router is quicker than a DHCP server.
            if let (Err(metadata::Trouble::NoRoute), Some(address)) =
                (&asked, (self.config.metadata_v6)(platform))
                && start.elapsed() >= IPV4_FIRST
            {
                asked = metadata::ask(platform, address).await;
            }
            let trouble = match asked {
                Ok(answer) => return Ok(answer),
                Err(trouble) if trouble.is_too_large() => return Err(Error::TooLarge),
                Err(trouble) => cause::line(&trouble),
            };
            if start.elapsed() >= PATIENCE {
                if last.is_new(&trouble) {
                    warn!("the metadata service of {platform} gives no answer: {trouble}");
                }
                let what = format!(
                    "the metadata service of {platform} at {}, which is asked since second {since} \
                     of this boot: {trouble}. See that the machine has an address by DHCP and the \
                     service is on; or give the node parameters in another place, such as a disk \
                     labelled cidata, and reboot",
                    address.ip()
                );
                ctx.stage(Stage::Parameters, State::Waiting(what));
            }
            sleep(wait).await;
            wait = (wait * 2).min(WAIT_MAX);
        }
    }
}

/// The answer of a metadata service as a place; user data for others is not ours.
fn fetched(platform: Platform, answer: Read) -> Place {
    let source = Source::Metadata(platform);
    match answer {
        Ok(Some(bytes)) => match foreign(&bytes) {
            Some(note) => Place::without(source, source.place(), Some(note)),
            None => Place::new(source, Ok(Some(bytes))),
        },
        Ok(None) => Place::without(source, source.place(), None),
        Err(error) => Place::new(source, Err(error)),
    }
}

pub(super) fn kept_of(kept: Result<Option<Vec<u8>>, files::Error>) -> Read {
    match kept {
        Ok(Some(bytes)) if bytes.len() as u64 > BYTES_MAX => Err(Error::TooLarge),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(Error::Unreadable(error.into_io())),
    }
}
