//! The option `--log-target` of `cluster configure`: where every node sends its log.

use std::path::Path;

use polis_proto::v1;
use polis_wire::parameters;

use crate::bucket;
use crate::error::{Error, Explain as _};

/// The options of the targets of logs.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Targets {
    /// Where every node sends its log: syslog+tls://HOST[:PORT] or
    /// otlp+https://HOST[:PORT][/PATH]; `,ca=FILE` behind it has the authorities for its
    /// certificate, in PEM. Repeatable, at most four: the targets replace those that there were.
    #[arg(long = "log-target", value_name = "URL[,ca=FILE]")]
    targets: Vec<String>,
    /// Send logs nowhere.
    #[arg(long, conflicts_with = "targets")]
    no_log_targets: bool,
}

impl Targets {
    pub(super) fn is_empty(&self) -> bool {
        self.targets.is_empty() && !self.no_log_targets
    }

    /// The given options.
    pub(super) fn options(&self) -> Vec<String> {
        let targets = self.targets.iter().map(|target| format!("--log-target {target}"));
        let none = self.no_log_targets.then(|| "--no-log-targets".to_owned());
        targets.chain(none).collect()
    }

    /// The targets, if they are named; checked as the leader does.
    pub(super) fn named(&self) -> Result<Option<v1::LogConfiguration>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let targets = self.targets.iter().map(|text| target(text)).collect::<Result<_, _>>()?;
        let named = v1::LogConfiguration { targets, ..Default::default() };
        let checked = parameters::log_targets(named.clone(), "--log-target");
        checked.doing(|| "these targets of logs cannot be set".to_owned())?;
        Ok(Some(named))
    }
}

fn target(text: &str) -> Result<v1::LogTarget, Error> {
    let Some((url, file)) = text.split_once(",ca=") else {
        return Ok(v1::LogTarget { url: text.to_owned(), ca: String::new() });
    };
    Ok(v1::LogTarget { url: url.to_owned(), ca: bucket::authorities(Path::new(file))? })
}

/// The targets of a cluster, with the subjects of their authorities.
pub(super) fn shown(configuration: &v1::ClusterConfiguration) -> Vec<String> {
    let log = configuration.log.clone().unwrap_or_default();
    let targets = parameters::log_targets(log, "log").unwrap_or_default();
    let target = |target: &parameters::LogTarget| {
        let subjects: Vec<_> = target.authorities.iter().map(|it| it.subject.as_str()).collect();
        match &subjects[..] {
            [] => target.url(),
            subjects => format!("{}, certified by {}", target.url(), subjects.join(", ")),
        }
    };
    targets.iter().map(target).collect()
}

#[cfg(test)]
mod tests {
    use crate::loopback::Cluster;
    use crate::testing::World;

    fn certificate() -> String {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
    }

    #[test]
    fn targets_of_logs_are_checked_before_the_cluster_is_asked() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        std::fs::write(world.path("noise"), "noise").unwrap();
        std::fs::write(world.path("empty"), "").unwrap();
        std::fs::write(world.path("ca.pem"), certificate()).unwrap();
        let configure = ["cluster", "configure", "--log-target"];
        let path = |name: &str| world.path(name).display().to_string();
        for (target, said) in [
            ("logs.example".to_owned(), "syslog+tls://HOST"),
            ("syslog+tls://logs.example:0".to_owned(), "syslog+tls://HOST"),
            (format!("syslog+tls://logs.example,ca={}", path("noise")), "no certificate in it"),
            (format!("syslog+tls://logs.example,ca={}", path("empty")), "is empty"),
            (format!("syslog+tls://logs.example,ca={}", path("none")), "none"),
        ] {
            let printed = world.refuses(&[&configure[..], &[&target]].concat());
            assert!(printed.contains(said), "{target}: {printed}");
        }
        assert_eq!(cluster.asked(), [""; 0]);
        let good = format!("otlp+https://logs.example,ca={}", path("ca.pem"));
        world.runs(&[&configure[..], &[&good]].concat());
        world.runs(&["cluster", "configure", "--no-log-targets"]);
        assert_eq!(cluster.asked(), ["ConfigureCluster"; 2]);
    }
}
