//! Describes a failure that a machine cannot recover from, for the screen.

/// Everything that the guru meditation shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guru {
    /// The stable code, `#SSCC.DDDD`.
    pub code: String,
    /// The stage that failed.
    pub stage: String,
    /// The failure first, then what caused it, the root last.
    pub causes: Vec<String>,
    /// What was tried before giving up.
    pub tried: Vec<String>,
    /// What the person in front of the machine should do next.
    pub next: String,
    /// The last log lines, the newest last.
    pub log: Vec<String>,
    /// The version of the system.
    pub version: String,
    /// The image that it was started from.
    pub image: String,
    /// Which boot in a row this is that failed, from 1.
    pub attempt: u32,
    /// How many of them may fail before the machine holds.
    pub attempts_max: u32,
    /// What happens if nobody presses a key.
    pub countdown: Countdown,
}

/// What happens if nobody presses a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Countdown {
    /// The machine reboots by itself.
    Reboot {
        /// Seconds until then.
        seconds: u32,
    },
    /// Nothing, because a person asked for it.
    Held,
    /// Nothing, because too many boots in a row have failed.
    Exhausted,
}

impl Default for Countdown {
    fn default() -> Self {
        Self::Reboot { seconds: 0 }
    }
}
