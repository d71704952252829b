//! The step from the etcd that a cluster runs to the one that a bundle brings.
//!
//! etcd has a *cluster version*: the major and minor number that all of its members have at
//! least. It rises by itself once the last member has a newer one, the data gets the format of
//! the newer one, and a member that is older than the cluster version ends at its start. Members
//! may be one minor version apart, and no more.
//!
//! `docs/updates.md` has the table of steps that are taken and refused (*Another etcd*).
//!
//! Source: <https://etcd.io/docs/v3.5/upgrades/upgrading-etcd/>.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use semver::Version;

/// The cluster version of an etcd, such as `3.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClusterVersion {
    major: u64,
    minor: u64,
}

/// Why the etcd of a bundle does not come to a cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdRefusal {
    /// It could not join those that run.
    #[error("the bundle has etcd {found}, which cannot run in a cluster with etcd {running}")]
    Older {
        /// Its version.
        found: Version,
        /// That of the cluster.
        running: ClusterVersion,
    },
    /// etcd is updated by one minor version at a time.
    #[error(
        "the bundle has etcd {found}, and the cluster runs {running}: etcd is updated by one minor \
         version at a time"
    )]
    SkipsMinor {
        /// Its version.
        found: Version,
        /// That of the cluster.
        running: ClusterVersion,
    },
    /// There would be no way back, and no owner has allowed that.
    #[error(
        "the bundle has etcd {found}, and the cluster runs {running}: once every member has the \
         newer one, this cannot be undone"
    )]
    OneWay {
        /// Its version.
        found: Version,
        /// That of the cluster.
        running: ClusterVersion,
    },
}

impl EtcdRefusal {
    /// The next step for the operator.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Self::Older { running, .. } => format!("name a bundle with etcd {running}"),
            Self::SkipsMinor { running, .. } => match running.next() {
                Some(next) => format!("update to a version with etcd {next} first"),
                None => "update to a version between them first".to_owned(),
            },
            Self::OneWay { .. } => {
                "take a snapshot (`polisctl etcd snapshot -o FILE`), then repeat the command with \
                 --one-way"
                    .to_owned()
            }
        }
    }
}

/// The etcd of the cluster that a bundle has to suit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EtcdTarget {
    /// Its cluster version; `None` where it is not known, as on a node without a member.
    pub runs: Option<ClusterVersion>,
    /// Whether an owner allowed a step that cannot be undone.
    pub one_way: bool,
}

impl ClusterVersion {
    /// The cluster version of a cluster whose members all have this version.
    #[must_use]
    pub fn of(version: &Version) -> Self {
        Self { major: version.major, minor: version.minor }
    }

    /// The cluster version that may follow this one.
    fn next(self) -> Option<Self> {
        let Self { major, minor } = self;
        Some(Self { major, minor: minor.checked_add(1)? })
    }
}

impl EtcdTarget {
    /// Whether the etcd of a bundle may come.
    ///
    /// # Errors
    ///
    /// [`EtcdRefusal`].
    pub fn takes(self, brings: &Version) -> Result<(), EtcdRefusal> {
        let Some(running) = self.runs else { return Ok(()) };
        let (next, found) = (ClusterVersion::of(brings), brings.clone());
        match next.cmp(&running) {
            Ordering::Equal => Ok(()),
            Ordering::Less => Err(EtcdRefusal::Older { found, running }),
            Ordering::Greater if running.next() != Some(next) => {
                Err(EtcdRefusal::SkipsMinor { found, running })
            }
            Ordering::Greater if self.one_way => Ok(()),
            Ordering::Greater => Err(EtcdRefusal::OneWay { found, running }),
        }
    }
}

impl fmt::Display for ClusterVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A text is not a cluster version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cluster version of etcd is two numbers, such as 3.5")]
pub struct NoClusterVersion;

/// `3.5`, and `3.5.0`, as etcd spells it.
impl FromStr for ClusterVersion {
    type Err = NoClusterVersion;

    fn from_str(text: &str) -> Result<Self, NoClusterVersion> {
        let number = |digits: &str| {
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| plain).ok_or(NoClusterVersion)
        };
        let parts: Vec<&str> = text.splitn(4, '.').collect();
        let (&[major, minor] | &[major, minor, "0"]) = &parts[..] else {
            return Err(NoClusterVersion);
        };
        Ok(Self { major: number(major)?, minor: number(minor)? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Words for the outcomes.
    fn outcome(refused: Result<(), EtcdRefusal>) -> &'static str {
        match refused {
            Ok(()) => "taken",
            Err(EtcdRefusal::Older { .. }) => "older",
            Err(EtcdRefusal::SkipsMinor { .. }) => "skips",
            Err(EtcdRefusal::OneWay { .. }) => "one way",
        }
    }

    #[test]
    fn every_step_of_etcd_is_taken_asked_for_or_refused() {
        // With the consent of an owner, and without it.
        for (runs, brings, with, without) in [
            ("3.5", "3.5.16", "taken", "taken"),
            ("3.5", "3.5.0", "taken", "taken"),
            ("3.5", "3.5.99", "taken", "taken"),
            ("3.5", "3.6.0", "taken", "one way"),
            ("3.5", "3.6.4", "taken", "one way"),
            ("3.9", "3.10.0", "taken", "one way"),
            ("3.5", "3.7.0", "skips", "skips"),
            ("3.5", "3.15.0", "skips", "skips"),
            ("3.5", "4.0.0", "skips", "skips"),
            ("3.5", "4.6.0", "skips", "skips"),
            ("3.6", "3.5.16", "older", "older"),
            ("3.10", "3.9.0", "older", "older"),
            ("4.0", "3.9.0", "older", "older"),
            ("4.0", "3.1.0", "older", "older"),
        ] {
            let brings = brings.parse().unwrap();
            let takes = |one_way| {
                let runs = Some(runs.parse().unwrap());
                outcome(EtcdTarget { runs, one_way }.takes(&brings))
            };
            assert_eq!([takes(true), takes(false)], [with, without], "{runs} -> {brings}");
        }
        // A node without a member has nothing to compare with.
        for one_way in [true, false] {
            let target = EtcdTarget { runs: None, one_way };
            assert_eq!(target.takes(&Version::new(9, 9, 9)), Ok(()));
        }
    }

    #[test]
    fn a_refused_step_names_both_versions_and_the_next_step() {
        let refused = |brings: &str| {
            let runs = Some("3.5".parse().unwrap());
            let target = EtcdTarget { runs, one_way: false };
            let refusal = target.takes(&brings.parse().unwrap()).unwrap_err();
            (refusal.to_string(), refusal.help())
        };
        let (text, help) = refused("3.4.9");
        assert!(text.contains("3.4.9") && text.contains("3.5"), "{text}");
        assert_eq!(help, "name a bundle with etcd 3.5");
        let (text, help) = refused("3.7.1");
        assert!(text.contains("3.7.1") && text.contains("3.5"), "{text}");
        assert_eq!(help, "update to a version with etcd 3.6 first");
        let (text, help) = refused("3.6.1");
        assert!(text.contains("cannot be undone"), "{text}");
        assert!(help.contains("--one-way"), "{help}");
    }

    #[test]
    fn a_cluster_version_is_two_numbers() {
        let read = |text: &str| text.parse::<ClusterVersion>().map(|version| version.to_string());
        assert_eq!(read("3.5"), Ok("3.5".to_owned()));
        assert_eq!(read("3.5.0"), Ok("3.5".to_owned()));
        for wrong in ["", "3", "3.", ".5", "3.5.1", "3.5.0.0", "+3.5", "3.5\n", "not_decided", "-"]
        {
            assert_eq!(read(wrong), Err(NoClusterVersion), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn one_step_at_a_time_leads_up_and_none_leads_down(
            major in 0..9_u64, minor in 0..9_u64, to in (0..9_u64, 0..9_u64),
            patch in any::<u64>(), one_way in any::<bool>(),
        ) {
            let running = ClusterVersion { major, minor };
            let brings = Version::new(to.0, to.1, patch);
            let next = ClusterVersion::of(&brings);
            match (EtcdTarget { runs: Some(running), one_way }).takes(&brings) {
                Ok(()) => prop_assert!(next == running || one_way && to == (major, minor + 1)),
                Err(EtcdRefusal::OneWay { .. }) => {
                    prop_assert!(!one_way && to == (major, minor + 1));
                }
                Err(EtcdRefusal::Older { .. }) => prop_assert!(next < running),
                Err(EtcdRefusal::SkipsMinor { .. }) => {
                    prop_assert!(next > running && to != (major, minor + 1));
                }
            }
        }

        #[test]
        fn any_text_is_a_cluster_version_or_none(text in "\\PC{0,20}") {
            if let Ok(version) = text.parse::<ClusterVersion>() {
                prop_assert_eq!(version.to_string().parse(), Ok(version));
            }
        }
    }
}
