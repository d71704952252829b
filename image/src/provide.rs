//! The payload as a step of a build: fetched where it is not cached, and reported.

use std::time::Instant;

use crate::{
    error::Result,
    payload::{Payload, Source},
    step::{Observer, Report},
};

/// Fetches the payload, and reports packages that differ from the lock.
pub(crate) fn provide(source: &Source, observer: &dyn Observer) -> Result<Payload> {
    let start = Instant::now();
    let lock = source.read()?;
    let (payload, why) = match source.ready(&lock) {
        Some(payload) => (payload, None),
        None => {
            observer.begin("payload");
            (source.prepare(&lock, observer)?, Some("not in the cache".to_owned()))
        }
    };
    observer.step(&Report { name: "payload", time: start.elapsed(), why });
    for moved in &payload.moved {
        observer.moved(moved);
    }
    Ok(payload)
}
