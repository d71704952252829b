//! Whether the kernel has random numbers to give.
//!
//! Early in a boot, `getrandom` blocks until the kernel has collected enough entropy: a
//! moment where the processor or a device supplies it, minutes or more where neither does.
//!
//! What this module does not do: return random numbers.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use super::poll::{Interest, wait};

/// Readable once the kernel's generator has its seed.
const DEVICE: &str = "/dev/random";

/// Whether a caller gets random numbers without a wait. True if that cannot be found out.
#[must_use]
pub fn is_ready() -> bool {
    let Ok(device) = File::open(DEVICE) else { return true };
    let ready = wait(&[(device.as_fd(), Interest::Read)], Some(Duration::ZERO));
    ready.ok().and_then(|ready| ready.first().copied()).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_up_has_random_numbers() {
        assert!(is_ready());
    }
}
