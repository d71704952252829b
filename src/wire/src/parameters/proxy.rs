//! The HTTP proxy of the cluster, from its configuration: for connections to servers outside.
//!
//! ```text
//! http://HOST:PORT       a connection through it is a tunnel, with TLS to the server
//! ```
//!
//! Programs that read the environment, and the node itself, reach the same servers without it:
//! [`Proxy::direct`] is `NO_PROXY` in the format of Go, and [`Proxy::leading_to`] applies it.
//!
//! Invariants:
//! - Loopback, pods, Services and the names of both domains are reached without the proxy. The
//!   leader names those that differ between clusters.
//! - No part has a character that would end a line of HTTP, or an entry of `NO_PROXY`.
//! - A proxy has no user: its password would be in the environment of a program.
//!
//! What this module does not do: connect (`outside`).

use std::net::IpAddr;

use polis_proto::v1;

use super::Cidr;
use super::error::Error;
use super::text::{self, At as _, Refusal};
use crate::endpoint::Endpoint;

const SCHEME: &str = "http://";
/// Entries of an owner: each lengthens the environment of a program.
const DIRECT_MAX: usize = 64;
/// Entries of the leader: a domain and two networks, and room for more.
const OWN_MAX: usize = 8;
/// Names and networks inside the machine, or inside the cluster, of every cluster.
const ALWAYS: [&str; 4] = ["localhost", "127.0.0.0/8", "::1", "cluster.local"];

/// A proxy, and the servers that are reached without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Where it listens.
    pub endpoint: Endpoint,
    direct: Vec<Direct>,
}

/// Servers that are reached without a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Direct {
    /// A DNS name and the names below it.
    Name(String),
    Network(Cidr),
}

impl Proxy {
    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{SCHEME}{}", self.endpoint)
    }

    /// The servers that are reached without it: names, each with those below it, and networks.
    #[must_use]
    pub fn direct(&self) -> Vec<String> {
        self.direct.iter().map(Direct::text).collect()
    }

    /// The proxy on the way to this host; `None`: it is reached directly.
    #[must_use]
    pub fn leading_to(&self, host: &str) -> Option<&Endpoint> {
        let address = host.parse::<IpAddr>().ok().map(|address| address.to_canonical());
        let host = host.to_ascii_lowercase();
        let is_direct = self.direct.iter().any(|direct| match direct {
            Direct::Name(name) => host
                .strip_suffix(name.as_str())
                .is_some_and(|before| before.is_empty() || before.ends_with('.')),
            Direct::Network(network) => address.is_some_and(|it| network.contains(it)),
        });
        (!is_direct).then_some(&self.endpoint)
    }
}

impl Direct {
    fn text(&self) -> String {
        match self {
            Self::Name(name) => name.clone(),
            Self::Network(network) => network.to_string(),
        }
    }

    /// Reads an entry.
    fn read(text: &str) -> Result<Self, Refusal> {
        let allowed = "a DNS name, which is also for the names below it, an IP address, or a \
                       network without host bits, such as 192.0.2.0/24; without a port";
        let refused = || Refusal::of(text, allowed);
        if let Ok(address) = text.parse::<IpAddr>().map(|address| address.to_canonical()) {
            let length = if address.is_ipv4() { 32 } else { 128 };
            return Cidr::new(address, length).map(Self::Network).ok_or_else(refused);
        }
        if text.contains('/') {
            let network = text.parse::<Cidr>().ok().filter(|cidr| *cidr == cidr.network());
            return network.map(Self::Network).ok_or_else(refused);
        }
        text::host(text).map_err(|_invalid| refused())?;
        Ok(Self::Name(text.to_ascii_lowercase()))
    }

    /// Reads an entry of the cluster itself. Its domain may have digits alone, which are a mistyped
    /// address in an entry of an owner.
    fn of_cluster(text: &str) -> Result<Self, Refusal> {
        match text::cluster_domain(text) {
            Ok(()) => Ok(Self::Name(text.to_owned())),
            Err(_no_domain) => Self::read(text),
        }
    }
}

/// Reads the proxy of a cluster; `path` is its position as errors report it. `None`: the cluster
/// has none.
///
/// # Errors
///
/// [`Error::Field`].
pub fn proxy(message: &v1::ProxyConfiguration, path: &str) -> Result<Option<Proxy>, Error> {
    let v1::ProxyConfiguration { url, direct: entries, own } = message;
    text::at_most(entries.len(), DIRECT_MAX, "entries").at(format!("{path}.direct"), 2)?;
    text::at_most(own.len(), OWN_MAX, "entries").at(format!("{path}.own"), 3)?;
    if url.is_empty() {
        let nothing = Refusal::described("empty", "the URL of a proxy, or an empty `no_proxy`");
        return match entries.is_empty() {
            true => Ok(None),
            false => Err(nothing).at(format!("{path}.url"), 1),
        };
    }
    let endpoint = endpoint(url).at(format!("{path}.url"), 1)?;
    let mut direct = Vec::new();
    for text in ALWAYS.into_iter().chain(own.iter().map(String::as_str)) {
        direct.push(Direct::of_cluster(text).at(format!("{path}.own"), 3)?);
    }
    let mut named = Vec::new();
    for (i, text) in entries.iter().enumerate() {
        let path = format!("{path}.direct[{i}]");
        let entry = Direct::read(text).at(&*path, 2)?;
        if named.contains(&entry) {
            return Err(Refusal::of(text, "each entry once")).at(path, 2);
        }
        named.push(entry);
    }
    // An owner may name the entries of the leader, too.
    named.retain(|entry| !direct.contains(entry));
    direct.extend(named);
    Ok(Some(Proxy { endpoint, direct }))
}

/// Reads a URL.
fn endpoint(url: &str) -> Result<Endpoint, Refusal> {
    let allowed = "http://HOST:PORT, with a host that is an IP address or a DNS name";
    // Before any other check: the text may have a password in it, and those quote it.
    if url.contains('@') {
        let why = format!("{allowed}; a proxy that requires authentication is not supported");
        return Err(Refusal::described("a URL with a user", why));
    }
    if url.starts_with("https://") {
        let why = format!(
            "{allowed}; TLS to the proxy is not supported: the connections through it have TLS up \
             to the server"
        );
        return Err(Refusal::of(url, why));
    }
    let refused = || Refusal::of(url, allowed);
    let rest = url.strip_prefix(SCHEME).ok_or_else(refused)?;
    let place = rest.strip_suffix('/').unwrap_or(rest);
    // No port is the port 0, which is refused: proxies have no usual one.
    let mut endpoint = Endpoint::parse(place, 0).map_err(|_invalid| refused())?;
    text::host(&endpoint.host).map_err(|_invalid| refused())?;
    endpoint.host.make_ascii_lowercase();
    let is_elsewhere = match endpoint.host.parse::<IpAddr>().map(|it| it.to_canonical()) {
        Ok(it) => !(it.is_unspecified() || it.is_loopback() || it.is_multicast()),
        Err(_name) => endpoint.host != "localhost",
    };
    match is_elsewhere {
        true => Ok(endpoint),
        false => Err(Refusal::of(url, "a host that every node reaches")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(url: &str, direct: &[&str]) -> Result<Option<Proxy>, Error> {
        let message = v1::ProxyConfiguration {
            url: url.to_owned(),
            direct: direct.iter().map(|&entry| entry.to_owned()).collect(),
            own: ["cluster.internal", "10.192.0.0/11", "10.224.0.0/16"].map(str::to_owned).into(),
        };
        proxy(&message, "proxy")
    }

    fn refused(url: &str, direct: &[&str]) -> (String, String) {
        match read(url, direct).unwrap_err() {
            Error::Field(refused) => (refused.path.clone(), refused.to_string()),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_proxy_has_one_url_however_it_is_written() {
        for (url, named) in [
            ("http://Proxy.Example:3128", "http://proxy.example:3128"),
            ("http://192.0.2.1:8080/", "http://192.0.2.1:8080"),
            ("http://[fd00::1]:80", "http://[fd00::1]:80"),
        ] {
            assert_eq!(read(url, &[]).unwrap().unwrap().url(), named);
            assert_eq!(read(named, &[]).unwrap().unwrap().url(), named);
        }
        assert_eq!(read("", &[]).unwrap(), None);
    }

    #[test]
    fn a_url_that_is_not_of_a_proxy_is_refused_with_what_is_allowed() {
        for (url, allowed) in [
            ("proxy.example:3128", "http://HOST:PORT"),
            ("socks5://proxy.example:1080", "http://HOST:PORT"),
            ("http://", "http://HOST:PORT"),
            ("http://:3128", "http://HOST:PORT"),
            ("http://proxy.example", "http://HOST:PORT"),
            ("http://fd00::1", "http://HOST:PORT"),
            ("http://proxy.example:0", "http://HOST:PORT"),
            ("http://proxy.example:70000", "http://HOST:PORT"),
            ("http://proxy.example:3128/path", "http://HOST:PORT"),
            ("http://proxy.example:3128//", "http://HOST:PORT"),
            ("http://proxy.example:3128\r\nX: y", "http://HOST:PORT"),
            ("http://1.2.3:3128", "http://HOST:PORT"),
            ("https://proxy.example:3128", "is not supported"),
            ("http://127.0.0.1:3128", "every node"),
            ("http://LOCALHOST:3128", "every node"),
            ("http://[::]:3128", "every node"),
            ("http://[::ffff:127.0.0.1]:3128", "every node"),
        ] {
            let (path, text) = refused(url, &[]);
            assert_eq!(path, "proxy.url", "{url:?}");
            assert!(text.contains(allowed), "{url:?}: {text}");
        }
        for scheme in ["http://", "https://", "socks5://", ""] {
            let (path, text) = refused(&format!("{scheme}ann:hidden@proxy.example:3128"), &[]);
            assert_eq!(path, "proxy.url");
            let names_it = text.contains("requires authentication");
            assert!(names_it && !text.contains("hidden"), "{text}");
        }
        let (path, text) = refused("", &["a.example"]);
        assert_eq!(path, "proxy.url");
        assert!(text.contains("an empty `no_proxy`") && !text.contains("direct"), "{text}");
    }

    #[test]
    fn an_entry_that_is_neither_name_nor_network_is_refused_with_its_position() {
        const URL: &str = "http://proxy.example:3128";
        for bad in [
            "",
            "*",
            "*.example",
            ".example",
            "a.example:443",
            "a.example,b.example",
            "192.0.2.1/24",
            "192.0.2.0/33",
            "192.0.2",
            "[fd00::1]",
            "http://a.example",
            "a b",
        ] {
            let (path, text) = refused(URL, &["good.example", bad]);
            assert_eq!(path, "proxy.direct[1]", "{bad:?}");
            assert!(text.contains("a DNS name"), "{bad:?}: {text}");
        }
        for twice in [
            ["a.example", "A.example"],
            ["192.0.2.1", "192.0.2.1/32"],
            ["192.0.2.1", "::ffff:192.0.2.1"],
        ] {
            assert!(refused(URL, &twice).1.contains("each entry once"), "{twice:?}");
        }
        let names: Vec<_> = (0..65).map(|number| format!("a{number}.example")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        assert!(read(URL, &names[1..]).is_ok());
        assert_eq!(refused(URL, &names).0, "proxy.direct");
    }

    #[test]
    fn the_cluster_itself_is_reached_without_the_proxy() {
        let direct = ["Example.com", "192.0.2.0/24", "198.51.100.7", "2001:db8::/32", "localhost"];
        let proxy = read("http://proxy.example:3128", &direct).unwrap().unwrap();
        assert_eq!(
            proxy.direct(),
            [
                "localhost",
                "127.0.0.0/8",
                "::1/128",
                "cluster.local",
                "cluster.internal",
                "10.192.0.0/11",
                "10.224.0.0/16",
                "example.com",
                "192.0.2.0/24",
                "198.51.100.7/32",
                "2001:db8::/32",
            ]
        );
        for host in [
            "localhost",
            "127.0.0.1",
            "::1",
            "10.193.0.7",
            "10.224.0.1",
            "::ffff:10.224.0.1",
            "registry.default.svc.cluster.local",
            "cluster.internal",
            "a.CLUSTER.internal",
            "example.com",
            "a.b.example.com",
            "192.0.2.9",
            "198.51.100.7",
            "2001:db8::7",
        ] {
            assert_eq!(proxy.leading_to(host), None, "{host}");
        }
        for host in ["example.org", "anexample.com", "10.225.0.1", "198.51.100.8", "fd00::1"] {
            assert_eq!(proxy.leading_to(host), Some(&proxy.endpoint), "{host}");
        }
    }

    #[test]
    fn a_cluster_whose_domain_has_digits_alone_has_a_proxy() {
        let of = |domain: &str, direct: &str| {
            let message = v1::ProxyConfiguration {
                url: "http://proxy.example:3128".to_owned(),
                direct: vec![direct.to_owned()],
                own: vec![domain.to_owned()],
            };
            proxy(&message, "proxy")
        };
        let read = of("2026", "a.example").unwrap().unwrap();
        assert_eq!(read.direct()[4..], ["2026", "a.example"]);
        assert_eq!(read.leading_to("node.2026"), None);
        assert!(of("a.example", "2026").is_err(), "an entry of an owner is a mistyped address");
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_one_line_and_reads_back(
            url in "http://[a-z0-9.:@/\\[\\]]{1,20}", entry in "[a-z0-9.:/*, ]{0,20}",
            noise in ".{0,40}",
        ) {
            for (url, entry) in [(&*url, &*entry), (&*noise, "a"), ("http://a:1", &*noise)] {
                if let Ok(Some(proxy)) = read(url, &[entry]) {
                    let direct = proxy.direct();
                    let parts = direct.iter().chain([&proxy.url()]).cloned().collect::<Vec<_>>();
                    let plain = |c: char| c.is_ascii_graphic() && c != ',' && c != '*';
                    prop_assert!(parts.iter().all(|part| part.chars().all(plain)));
                    let entries: Vec<_> = direct.iter().map(String::as_str).collect();
                    let again = read(&proxy.url(), &entries).unwrap().unwrap();
                    prop_assert_eq!(again, proxy);
                }
            }
        }
    }
}
