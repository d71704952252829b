//! The name of a volume: `pvc-` and the UID of the claim that it was made for.
//!
//! Names come from the API server and from kubelet, and become names of directories: nothing
//! but this form is accepted, so no name leaves the directory of volumes.

use std::fmt;
use std::str::FromStr;

/// The beginning of the name of each volume.
const PREFIX: &str = "pvc-";

/// The groups of digits in a UID, and what separates them.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

/// The name of a volume, its directory and its object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeId(String);

/// The text is not the name of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a volume is named pvc- and the UID of its claim, in lower case")]
pub struct NotAVolume;

impl VolumeId {
    /// The volume for the claim with this UID.
    ///
    /// # Errors
    ///
    /// [`NotAVolume`] for a UID that the API server does not give.
    pub fn of_claim(uid: &str) -> Result<Self, NotAVolume> {
        let mut groups = uid.split('-');
        let digits = |group: &str| group.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        let whole = GROUPS.into_iter().all(|length| {
            groups.next().is_some_and(|group| group.len() == length && digits(group))
        });
        if whole && groups.next().is_none() {
            Ok(Self(format!("{PREFIX}{uid}")))
        } else {
            Err(NotAVolume)
        }
    }

    /// The UID of its claim.
    #[must_use]
    pub fn claim(&self) -> &str {
        self.0.strip_prefix(PREFIX).unwrap_or_default()
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VolumeId {
    type Err = NotAVolume;

    fn from_str(name: &str) -> Result<Self, NotAVolume> {
        Self::of_claim(name.strip_prefix(PREFIX).ok_or(NotAVolume)?)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a77";

    #[test]
    fn a_name_is_that_of_its_claim() {
        let id = VolumeId::of_claim(UID).unwrap();
        assert_eq!(id.to_string(), format!("pvc-{UID}"));
        assert_eq!(id.to_string().parse(), Ok(id.clone()));
        assert_eq!(id.claim(), UID);
    }

    #[test]
    fn other_names_are_no_volumes() {
        let long = "a".repeat(1000);
        for name in [
            "",
            "pvc-",
            UID,
            "pvc-..",
            "pvc-../../../../../../../../../../etc",
            "pvc-0F3A51C2-7B1D-4C55-9A0E-2F6D1B8E4A77",
            "pvc-0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a7",
            "pvc-0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a77-",
            "pvc-0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a77/",
            "pvc-0f3a51c2/7b1d-4c55-9a0e-2f6d1b8e4a77",
            "pvc-0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a7\0",
            ".trash-0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a77",
            long.as_str(),
        ] {
            assert_eq!(name.parse::<VolumeId>(), Err(NotAVolume), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn a_name_is_one_part_of_a_path(name in ".*") {
            if let Ok(id) = name.parse::<VolumeId>() {
                prop_assert_eq!(id.as_str().len(), 40);
                prop_assert!(!id.as_str().contains(['/', '.', '\0']));
            }
        }
    }
}
