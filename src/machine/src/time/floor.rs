//! The date of the image is the earliest that it can be: a clock before it is set to it.
//!
//! A machine without a battery starts in 1970, and its certificates would end before those of
//! all others begin.

use std::path::Path;

use tracing::warn;

use super::Status;
use polis_base::sys::clock;

/// Sets the clock forward to the date in `os_release` where it stands before it. Called before
/// any service starts, so a service never sees a date from before the image.
#[must_use]
pub fn raise(os_release: &Path) -> Status {
    // Without the file, the date of this code is the floor.
    let text = std::fs::read_to_string(os_release).unwrap_or_default();
    let Some(time) = clock::correction(clock::now(), clock::floor(&text)) else {
        return Status::default();
    };
    match clock::set(time) {
        Ok(()) => {
            warn!("the clock stood before the date of this image and is set to it");
            Status::at_floor()
        }
        Err(error) => {
            warn!("the clock stands before the date of this image and cannot be set: {error}");
            Status::default()
        }
    }
}
