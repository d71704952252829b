//! The option `--proxy` of `cluster configure`: how nodes reach servers outside of the cluster.

use polis_proto::v1;
use polis_wire::parameters::{self, FieldError};

use crate::error::{Error, Explain as _};

/// Where the message is, in the errors about its fields.
const ROOT: &str = "proxy";

/// Paths in the message, and the options that set the same fields.
const OPTIONS: [(&str, &str); 2] = [("proxy.url", "--proxy"), ("proxy.direct", "--no-proxy")];

/// The options of the proxy.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Proxy {
    /// The HTTP proxy of a site without direct internet, http://HOST:PORT without a user: for
    /// pulls of images, snapshots of etcd and logs by HTTPS. It replaces the current proxy with
    /// its --no-proxy. Workers restart containerd; pods continue.
    #[arg(long, value_name = "URL")]
    proxy: Option<String>,
    /// A DNS name, which is also for the names below it, an IP address or a network that is
    /// reached without the proxy; repeatable, or with commas, at most 64. Loopback, pods,
    /// Services and the domain of the cluster need no entry.
    #[arg(long = "no-proxy", value_name = "HOST", requires = "proxy", value_delimiter = ',')]
    direct: Vec<String>,
    /// Remove the proxy: nodes reach every server directly.
    #[arg(long, conflicts_with = "proxy")]
    without_proxy: bool,
}

impl Proxy {
    pub(super) fn is_empty(&self) -> bool {
        self.proxy.is_none() && !self.without_proxy
    }

    /// The given options.
    pub(super) fn options(&self) -> Vec<String> {
        let proxy = self.proxy.iter().map(|url| format!("--proxy {url}"));
        let direct = self.direct.iter().map(|entry| format!("--no-proxy {entry}"));
        let none = self.without_proxy.then(|| "--without-proxy".to_owned());
        proxy.chain(direct).chain(none).collect()
    }

    /// The proxy, if there are any options; checked as the leader does.
    pub(super) fn named(&self) -> Result<Option<v1::ProxyConfiguration>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let url = self.proxy.clone().unwrap_or_default();
        if url.is_empty() && !self.without_proxy {
            return Err(Error::usage("--proxy takes a URL; --without-proxy removes it"));
        }
        let named = v1::ProxyConfiguration { url, direct: self.direct.clone(), own: Vec::new() };
        let checked = parameters::proxy(&named, ROOT).map_err(by_option);
        checked.doing(|| "this proxy cannot be set".to_owned())?;
        Ok(Some(named))
    }
}

/// An error about a field of the message, with the option that sets the field.
fn by_option(error: parameters::Error) -> parameters::Error {
    match error {
        parameters::Error::Field(field) => {
            let mut path = field.path.clone();
            for (there, option) in OPTIONS {
                path = path.replace(there, option);
            }
            parameters::Error::Field(FieldError { path, ..field })
        }
        other => other,
    }
}

/// The URL of the proxy of a cluster, empty without one, and what is reached without it beside the
/// cluster itself.
pub(super) fn shown(configuration: &v1::ClusterConfiguration) -> (String, Vec<String>) {
    let message = configuration.proxy.clone().unwrap_or_default();
    (message.url, message.direct)
}

#[cfg(test)]
mod tests {
    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn a_proxy_is_checked_before_the_cluster_is_asked() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let configure = ["cluster", "configure", "--proxy"];
        for (bad, said) in [
            (&["proxy.example:3128"][..], "http://HOST:PORT"),
            (&["proxy.example:3128"], "cause: --proxy is \"proxy.example:3128\"; allowed is"),
            (&["https://proxy.example:3128"], "is not supported"),
            (&["http://ann:hidden@proxy.example:3128"], "requires authentication"),
            (&["http://proxy.example:3128", "--no-proxy", "*.example"], "a DNS name"),
            (
                &["http://proxy.example:3128", "--no-proxy", "a.example,*.example"],
                "cause: --no-proxy[1] is \"*.example\"; allowed is",
            ),
        ] {
            let printed = world.refuses(&[&configure[..], bad].concat());
            assert!(printed.contains(said), "{bad:?}: {printed}");
            assert!(!printed.contains("hidden"), "{printed}");
        }
        for (odd, said) in [
            (&["--proxy", ""][..], "--without-proxy"),
            (&["--proxy", "", "--no-proxy", "a.example"], "--without-proxy"),
            (&["--proxy", "http://proxy.example:3128", "--without-proxy"], "--without-proxy"),
            (&["--no-proxy", "a.example"], "--proxy"),
        ] {
            let ended = world.run(&[&configure[..2], odd].concat());
            assert_eq!(ended.status, 2, "{odd:?}: {}", ended.stderr);
            assert!(ended.stderr.contains(said), "{odd:?}: {}", ended.stderr);
        }
        assert_eq!(cluster.asked(), [""; 0]);
        let good = ["http://proxy.example:3128", "--no-proxy", "a.example,192.0.2.0/24"];
        let good = [&configure[..], &good[..]].concat();
        let shown = world.runs(&[&good[..], &["--dry-run"]].concat());
        assert!(shown.contains("192.0.2.0/24"), "{shown}");
        world.runs(&good);
        world.runs(&["cluster", "configure", "--without-proxy"]);
        assert_eq!(cluster.asked(), ["ConfigureCluster"; 2]);
    }
}
