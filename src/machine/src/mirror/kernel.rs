//! What the kernel says of the device of a mirror: its target `raid`, as text. Pure.
//!
//! ```text
//! raid raid1 2 Aa 1024/8192 recover 0 0 -
//!              ^^ ^ copied ^ what it does
//!              A: whole, a: not yet, D or -: dropped
//! ```

use super::plan::Leg;

/// A disk below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// It has all data.
    Whole,
    /// It is being filled, or compared after a power cut.
    Syncing,
    /// The kernel uses it no more.
    Dropped,
}

/// The state of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    health: [Health; 2],
    /// Hundredths of what is copied.
    pub(super) percent: u8,
}

impl Device {
    /// Reads the kernel's text; `None` for a device of another kind.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        if [words.next()?, words.next()?, words.next()?] != ["raid", "raid1", "2"] {
            return None;
        }
        let mut health = words.next()?.chars().map(|sign| match sign {
            'A' => Health::Whole,
            'a' => Health::Syncing,
            _ => Health::Dropped,
        });
        let health = [health.next()?, health.next()?];
        let (done, total) = words.next()?.split_once('/')?;
        let (done, total): (u64, u64) = (done.parse().ok()?, total.parse().ok()?);
        let percent = done.saturating_mul(100).checked_div(total).unwrap_or_default();
        Some(Self { health, percent: u8::try_from(percent.min(100)).unwrap_or(100) })
    }

    /// How a disk does.
    pub(super) fn of(self, leg: Leg) -> Health {
        self.health[leg.index()]
    }

    /// Whether both disks have all data.
    pub(super) fn is_whole(self) -> bool {
        self.health == [Health::Whole; 2]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_kernel_s_words_are_read() {
        let whole = Device::parse("raid raid1 2 AA 4096/4096 idle 0 0 -").unwrap();
        assert!(whole.is_whole() && whole.percent == 100);
        let filling = Device::parse("raid raid1 2 Aa 1024/4096 recover 0 0 -").unwrap();
        assert_eq!(filling.of(Leg::First), Health::Whole);
        assert_eq!((filling.of(Leg::Second), filling.percent), (Health::Syncing, 25));
        for sign in ["DA", "-A"] {
            let text = format!("raid raid1 2 {sign} 4096/4096 idle 0 0 -");
            assert_eq!(Device::parse(&text).unwrap().of(Leg::First), Health::Dropped);
        }
        assert_eq!(Device::parse("linear "), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(raid raid1 2 )?[ -~]{0,40}") {
            let _state = Device::parse(&text);
        }
    }
}
