//! The options of `cluster configure` about snapshots of etcd: where the leader sends them, and
//! the key that it sends them with.

use std::path::PathBuf;

use polis_proto::v1;
use polis_wire::parameters;

use crate::bucket;
use crate::error::{Error, Explain as _};

const OPTION: &str = "--snapshot-target";

/// The options of the target of snapshots.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Target {
    /// The bucket of an S3-compatible store that the leader sends every hourly snapshot of etcd
    /// to, encrypted to the owners: s3+https://HOST[:PORT]/BUCKET[/PREFIX]; behind it
    /// `,region=REGION` if that is not us-east-1, and `,ca=FILE` with the authorities for its
    /// certificate, in PEM.
    #[arg(long = "snapshot-target", value_name = bucket::FORM)]
    target: Option<String>,
    /// A file with the key of that store, or `-` for standard input: the access key ID and the
    /// secret access key on two lines, or a file of AWS's tools.
    #[arg(long, value_name = "FILE", conflicts_with = "no_snapshot_target")]
    snapshot_credentials: Option<PathBuf>,
    /// Send snapshots nowhere, and forget the key.
    #[arg(long, conflicts_with = "target")]
    no_snapshot_target: bool,
}

impl Target {
    pub(super) fn is_empty(&self) -> bool {
        self.target.is_none() && self.snapshot_credentials.is_none() && !self.no_snapshot_target
    }

    /// The given options.
    pub(super) fn options(&self) -> Vec<String> {
        let target = self.target.iter().map(|target| format!("{OPTION} {target}"));
        let file = self.snapshot_credentials.iter();
        let key = file.map(|file| format!("--snapshot-credentials {}", file.display()));
        let none = self.no_snapshot_target.then(|| "--no-snapshot-target".to_owned());
        target.chain(key).chain(none).collect()
    }

    /// The target, if it is named; checked as the leader does.
    pub(super) fn named(&self) -> Result<Option<v1::SnapshotConfiguration>, Error> {
        if self.no_snapshot_target {
            return Ok(Some(v1::SnapshotConfiguration::default()));
        }
        let Some(text) = &self.target else { return Ok(None) };
        let configuration = bucket::configuration(text, OPTION)?;
        bucket::checked(&configuration, OPTION)?;
        Ok(Some(configuration))
    }

    /// The key, if it is given.
    pub(super) fn credentials(&self) -> Result<Option<v1::SnapshotCredentials>, Error> {
        let Some(file) = &self.snapshot_credentials else { return Ok(None) };
        let key = bucket::credentials(file)?;
        Ok(Some(v1::SnapshotCredentials {
            access_key_id: key.access_key_id.clone(),
            secret_access_key: key.secret_access_key.to_string(),
        }))
    }
}

/// The target of a cluster, with its region and the subjects of its authorities.
pub(super) fn shown(configuration: &v1::ClusterConfiguration) -> String {
    let snapshots = configuration.snapshots.clone().unwrap_or_default();
    let read = parameters::snapshot_target(&snapshots, "snapshots");
    let read = read.doing(|| "the target of snapshots cannot be read".to_owned());
    let Some(bucket) = read.ok().flatten() else { return String::new() };
    let authorities = bucket.server.authorities.iter();
    let subjects: Vec<_> = authorities.map(|it| it.subject.as_str()).collect();
    let certified = match &subjects[..] {
        [] => String::new(),
        subjects => format!(", certified by {}", subjects.join(", ")),
    };
    format!("{}, region {}{certified}", bucket.url(), bucket.region)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn a_target_of_snapshots_is_checked_before_the_cluster_is_asked_and_its_key_is_never_printed() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let secret = |name: &str, text: &str, mode: u32| {
            let file = world.path(name);
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        secret("key", "AKIATEST\ns3cr3t-of-the-bucket\n", 0o600);
        secret("open", "AKIATEST\ns3cr3t-of-the-bucket\n", 0o644);
        secret("short", "s3cr3t-of-the-bucket\n", 0o600);
        let good = "s3+https://s3.example/bucket/polis,region=eu-central-1";
        let configure = ["cluster", "configure"];
        for (options, said) in [
            (&["--snapshot-target", "s3+http://s3.example/bucket"][..], "not encrypted"),
            (&["--snapshot-target", "s3.example/bucket"], "s3+https://HOST"),
            (&["--snapshot-target", good, "--snapshot-credentials", "@open"], "others may read"),
            (&["--snapshot-target", good, "--snapshot-credentials", "@short"], "two lines"),
            (&["--snapshot-target", good, "--snapshot-credentials", "@none"], "none"),
        ] {
            let printed = world.refuses(&[&configure[..], options].concat());
            assert!(printed.contains(said), "{options:?}: {printed}");
            assert!(!printed.contains("s3cr3t"), "{printed}");
        }
        let unknown = ["--snapshot-target", "s3+https://s3.example/bucket,key=x"];
        let ended = world.run(&[&configure[..], &unknown].concat());
        assert_eq!(ended.status, 2);
        assert!(ended.stderr.contains("region=REGION"), "{}", ended.stderr);
        assert_eq!(cluster.asked(), [""; 0]);
        let set = ["--snapshot-target", good, "--snapshot-credentials", "@key"];
        let dry = world.runs(&[&configure[..], &set, &["--dry-run"]].concat());
        assert!(dry.contains(good) && !dry.contains("s3cr3t"), "{dry}");
        let printed = world.runs(&[&configure[..], &set].concat());
        assert!(!printed.contains("s3cr3t"), "{printed}");
        world.runs(&["cluster", "configure", "--no-snapshot-target"]);
        assert_eq!(cluster.asked(), ["ConfigureCluster"; 2]);
    }
}
