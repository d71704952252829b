//! The step from the Kubernetes that a node runs to the one that a bundle brings.
//!
//! API servers of one cluster may be one minor version apart, and objects that a newer one has
//! written may be unreadable for an older one. kubelet may be three minor versions older than an
//! API server, and never newer. An update of the cluster has the API servers first, so a
//! kubelet without an API server on its node must only not become too old for them.
//!
//! `docs/updates.md` has the table of steps that are taken and refused (*Another Kubernetes*).
//!
//! Source: <https://kubernetes.io/releases/version-skew-policy/>.

use semver::Version;

/// Minor versions that an API server gets at a time.
const API_SERVER_STEP: u64 = 1;
/// Minor versions by which kubelet may be older than an API server.
const KUBELET_LAG: u64 = 3;

/// The program of Kubernetes on a node that limits the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KubernetesProgram {
    /// An API server, with or without kubelet beside it.
    ApiServer,
    /// kubelet, without an API server on its node.
    Kubelet,
}

/// The Kubernetes of a node that a bundle has to suit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesTarget {
    /// Its version.
    pub runs: Version,
    /// The program that limits the step.
    pub program: KubernetesProgram,
}

/// Why a node must not get the Kubernetes of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubernetesRefusal {
    /// It is older.
    #[error("the bundle has Kubernetes {found}, which is of an older minor version than {running}")]
    Older {
        /// Its version.
        found: Version,
        /// That of the node.
        running: Version,
    },
    /// API servers are updated by one minor version at a time.
    #[error(
        "the bundle has Kubernetes {found}, and the API server is of {running}: API servers are \
         updated by one minor version at a time"
    )]
    SkipsMinor {
        /// Its version.
        found: Version,
        /// That of the API server.
        running: Version,
    },
    /// kubelet would be too old for the API servers until the turn of its node.
    #[error(
        "the bundle has Kubernetes {found}, and kubelet is of {running}: kubelet may be three \
         minor versions older than the API servers"
    )]
    KubeletTooOld {
        /// Its version.
        found: Version,
        /// That of kubelet.
        running: Version,
    },
}

impl KubernetesRefusal {
    /// The next step for the operator.
    #[must_use]
    pub fn help(&self) -> String {
        let named = |major: u64, minor: u64| format!("Kubernetes {major}.{minor}");
        match self {
            Self::Older { running, .. } => {
                format!("name a bundle with {}", named(running.major, running.minor))
            }
            Self::SkipsMinor { running, .. } => {
                let next = running.minor.saturating_add(API_SERVER_STEP);
                format!("update to a version with {} first", named(running.major, next))
            }
            Self::KubeletTooOld { found, .. } => {
                let before = found.minor.saturating_sub(API_SERVER_STEP);
                let before = named(found.major, before);
                format!("update that node alone to a version with {before} first")
            }
        }
    }
}

impl KubernetesTarget {
    /// Whether the Kubernetes of a bundle may come.
    ///
    /// # Errors
    ///
    /// [`KubernetesRefusal`].
    pub fn takes(&self, brings: &Version) -> Result<(), KubernetesRefusal> {
        let (found, running) = (brings.clone(), self.runs.clone());
        if minor(brings) < minor(&self.runs) {
            return Err(KubernetesRefusal::Older { found, running });
        }
        let newer_by =
            |max: u64| brings.major != self.runs.major || brings.minor - self.runs.minor > max;
        match self.program {
            KubernetesProgram::ApiServer if newer_by(API_SERVER_STEP) => {
                Err(KubernetesRefusal::SkipsMinor { found, running })
            }
            KubernetesProgram::Kubelet if newer_by(KUBELET_LAG) => {
                Err(KubernetesRefusal::KubeletTooOld { found, running })
            }
            KubernetesProgram::ApiServer | KubernetesProgram::Kubelet => Ok(()),
        }
    }

    /// Whether a bundle with this Kubernetes raises its minor version.
    #[must_use]
    pub fn rises(&self, brings: &Version) -> bool {
        minor(brings) > minor(&self.runs)
    }
}

/// The part of a version that the rules are about.
fn minor(version: &Version) -> (u64, u64) {
    (version.major, version.minor)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(runs: &str, program: KubernetesProgram) -> KubernetesTarget {
        KubernetesTarget { runs: runs.parse().unwrap(), program }
    }

    #[test]
    fn an_api_server_takes_one_minor_version_at_a_time_and_kubelet_three() {
        for (runs, brings, api_server, kubelet) in [
            ("1.37.2", "1.37.2", "taken", "taken"),
            ("1.37.2", "1.37.0", "taken", "taken"),
            ("1.37.2", "1.38.0", "taken", "taken"),
            ("1.9.5", "1.10.0", "taken", "taken"),
            ("1.37.2", "1.39.0", "skips", "taken"),
            ("1.37.2", "1.40.9", "skips", "taken"),
            ("1.37.2", "1.41.0", "skips", "too old"),
            ("1.37.2", "2.0.0", "skips", "too old"),
            ("1.37.2", "2.38.0", "skips", "too old"),
            ("1.37.2", "1.36.9", "older", "older"),
            ("1.10.0", "1.9.9", "older", "older"),
            ("2.0.0", "1.99.0", "older", "older"),
        ] {
            let brings = brings.parse().unwrap();
            let outcome = |program| match target(runs, program).takes(&brings) {
                Ok(()) => "taken",
                Err(KubernetesRefusal::Older { .. }) => "older",
                Err(KubernetesRefusal::SkipsMinor { .. }) => "skips",
                Err(KubernetesRefusal::KubeletTooOld { .. }) => "too old",
            };
            let outcomes = [KubernetesProgram::ApiServer, KubernetesProgram::Kubelet].map(outcome);
            assert_eq!(outcomes, [api_server, kubelet], "{runs} -> {brings}");
        }
    }

    #[test]
    fn a_refused_step_names_both_versions_and_the_next_step() {
        let refused = |program, brings: &str| {
            let refusal = target("1.37.2", program).takes(&brings.parse().unwrap()).unwrap_err();
            let text = refusal.to_string();
            assert!(text.contains(brings) && text.contains("1.37.2"), "{text}");
            refusal.help()
        };
        let (api_server, kubelet) = (KubernetesProgram::ApiServer, KubernetesProgram::Kubelet);
        assert_eq!(refused(api_server, "1.36.0"), "name a bundle with Kubernetes 1.37");
        let skips = refused(api_server, "1.39.1");
        assert_eq!(skips, "update to a version with Kubernetes 1.38 first");
        let too_old = refused(kubelet, "1.41.0");
        assert_eq!(too_old, "update that node alone to a version with Kubernetes 1.40 first");
    }

    proptest! {
        #[test]
        fn a_step_that_is_taken_never_leads_down_and_no_further_than_the_program_may(
            runs in (0..3_u64, 0..9_u64, any::<u64>()), to in (0..3_u64, 0..9_u64, any::<u64>()),
            api_server in any::<bool>(),
        ) {
            let program = match api_server {
                true => KubernetesProgram::ApiServer,
                false => KubernetesProgram::Kubelet,
            };
            let target = KubernetesTarget { runs: Version::new(runs.0, runs.1, runs.2), program };
            let brings = Version::new(to.0, to.1, to.2);
            let max = if api_server { 1 } else { 3 };
            let allowed = to.0 == runs.0 && (runs.1..=runs.1 + max).contains(&to.1);
            prop_assert_eq!(target.takes(&brings).is_ok(), allowed);
            prop_assert_eq!(target.rises(&brings), (to.0, to.1) > (runs.0, runs.1));
        }
    }
}
