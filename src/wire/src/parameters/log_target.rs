//! A target of logs: where every node sends its log, from the configuration of the cluster.
//!
//! ```text
//! syslog+tls://HOST[:PORT]            RFC 5424 messages over TLS (RFC 5425), port 6514
//! otlp+https://HOST[:PORT][/PATH]     OTLP over HTTP, port 4318, path /v1/logs
//! ```
//!
//! Invariants:
//! - Two texts for the same place have the same URL, so a target has one cursor.
//! - Neither host nor path has a character that would end a line of HTTP.
//!
//! What this module does not do: send anything (`forwarding` of the node).

use super::Proxy;
use super::text::{self, Refusal};
use crate::endpoint::Endpoint;
use crate::outside::Server;
use crate::registry::Authority;

/// Bytes of a path.
const PATH_MAX: usize = 128;
/// The path of OTLP where the target names none.
const PATH: &str = "/v1/logs";

/// How logs are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogProtocol {
    /// RFC 5424 messages over TLS.
    Syslog,
    /// OTLP over HTTPS.
    Otlp,
}

impl LogProtocol {
    const ALL: [Self; 2] = [Self::Syslog, Self::Otlp];

    fn scheme(self) -> &'static str {
        match self {
            Self::Syslog => "syslog+tls://",
            Self::Otlp => "otlp+https://",
        }
    }

    fn port(self) -> u16 {
        match self {
            Self::Syslog => 6514,
            Self::Otlp => 4318,
        }
    }
}

/// A target of logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogTarget {
    /// How it is spoken to.
    pub protocol: LogProtocol,
    /// Where it listens.
    pub endpoint: Endpoint,
    /// The path of its requests; empty for syslog.
    pub path: String,
    /// The authorities for its certificate; none: the public ones.
    pub authorities: Vec<Authority>,
}

impl LogTarget {
    /// Reads its URL.
    pub(super) fn read(url: &str) -> Result<Self, Refusal> {
        let refused = || {
            let allowed = "syslog+tls://HOST[:PORT] or otlp+https://HOST[:PORT][/PATH], with a \
                           host that is an IP address or a DNS name";
            Refusal::of(url, allowed)
        };
        let known = LogProtocol::ALL.into_iter();
        let mut found = known.filter_map(|it| Some((it, url.strip_prefix(it.scheme())?)));
        let (protocol, rest) = found.next().ok_or_else(refused)?;
        let (place, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let mut endpoint = Endpoint::parse(place, protocol.port()).map_err(|_invalid| refused())?;
        text::host(&endpoint.host).map_err(|_invalid| refused())?;
        endpoint.host.make_ascii_lowercase();
        let path = match (protocol, path) {
            (LogProtocol::Syslog, "" | "/") => "",
            (LogProtocol::Syslog, _) => return Err(Refusal::of(url, "no path behind the port")),
            (LogProtocol::Otlp, "" | "/") => PATH,
            (LogProtocol::Otlp, path) => path,
        };
        let plain = |c: u8| c.is_ascii_alphanumeric() || b"-._~/".contains(&c);
        if path.len() > PATH_MAX || !path.bytes().all(plain) {
            let allowed = format!(
                "a path of letters, digits, dots, dashes, underscores, tildes and slashes, at \
                 most {PATH_MAX} characters"
            );
            return Err(Refusal::of(url, allowed));
        }
        Ok(Self { protocol, endpoint, path: path.to_owned(), authorities: Vec::new() })
    }

    /// Its name: the URL with all that may be left out.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}{}{}", self.protocol.scheme(), self.endpoint, self.path)
    }

    /// The server that it connects to, through the proxy of the cluster if it is of HTTPS: a
    /// proxy may acknowledge data that a syslog receiver never gets.
    #[must_use]
    pub fn server(&self, proxy: Option<&Proxy>) -> Server {
        let proxy = proxy.filter(|_| self.protocol == LogProtocol::Otlp);
        Server {
            endpoint: self.endpoint.clone(),
            authorities: self.authorities.clone(),
            proxy: proxy.and_then(|proxy| proxy.leading_to(&self.endpoint.host)).cloned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use polis_proto::v1;
    use proptest::prelude::*;

    use super::super::{Error, log_targets};
    use super::*;

    fn targets(all: &[(&str, &str)]) -> Result<Vec<LogTarget>, Error> {
        let target = |(url, ca): &(&str, &str)| v1::LogTarget {
            url: (*url).to_owned(),
            ca: (*ca).to_owned(),
        };
        let targets = all.iter().map(target).collect();
        log_targets(v1::LogConfiguration { targets, ..Default::default() }, "log")
    }

    fn certificate() -> String {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
    }

    #[test]
    fn a_target_has_one_name_however_it_is_written() {
        for (url, named) in [
            ("syslog+tls://Logs.Example", "syslog+tls://logs.example:6514"),
            ("syslog+tls://192.0.2.1:10514/", "syslog+tls://192.0.2.1:10514"),
            ("otlp+https://[fd00::1]", "otlp+https://[fd00::1]:4318/v1/logs"),
            ("otlp+https://a.example:443/x/v1/logs", "otlp+https://a.example:443/x/v1/logs"),
        ] {
            assert_eq!(LogTarget::read(url).unwrap().url(), named);
            assert_eq!(LogTarget::read(named).unwrap().url(), named);
        }
    }

    #[test]
    fn an_invalid_target_is_refused_with_its_place() {
        for url in [
            "",
            "logs.example",
            "syslog://logs.example",
            "http://logs.example",
            "syslog+tls://",
            "syslog+tls://a:0",
            "syslog+tls://1.2.3",
            "syslog+tls://user@a.example",
            "syslog+tls://a.example/path",
            "otlp+https://a.example/x?y",
            "otlp+https://a.example/x y",
            "otlp+https://a.example/x\r\nHost: b",
        ] {
            let refused = targets(&[("otlp+https://good.example", ""), (url, "")]).unwrap_err();
            let text = refused.to_string();
            assert!(text.contains("log.targets[1].url"), "{url:?}: {text}");
        }
        let twice = [("syslog+tls://a.example", ""), ("syslog+tls://A.example:6514", "")];
        assert!(targets(&twice).unwrap_err().to_string().contains("each target once"));
        let names: Vec<_> = (0..5).map(|i| format!("syslog+tls://n{i}.example")).collect();
        let many: Vec<_> = names.iter().map(|name| (name.as_str(), "")).collect();
        assert!(targets(&many).unwrap_err().to_string().contains("at most 4"));
        assert_eq!(targets(&many[1..]).unwrap().len(), 4);
    }

    #[test]
    fn a_target_of_https_outside_is_reached_through_the_proxy() {
        let message = v1::ProxyConfiguration {
            url: "http://proxy.example:3128".to_owned(),
            direct: vec!["inside.example".to_owned()],
            ..Default::default()
        };
        let proxy = super::super::proxy(&message, "proxy").unwrap().unwrap();
        for (url, is_through) in [
            ("otlp+https://logs.example", true),
            ("otlp+https://logs.inside.example", false),
            ("otlp+https://127.0.0.1", false),
            ("syslog+tls://logs.example", false),
        ] {
            let target = LogTarget::read(url).unwrap();
            let through = target.server(Some(&proxy)).proxy;
            assert_eq!(through, is_through.then(|| proxy.endpoint.clone()), "{url}");
            assert_eq!(target.server(None).proxy, None, "{url}");
        }
    }

    #[test]
    fn authorities_are_certificates() {
        let ca = format!("{}{}", certificate(), certificate());
        let read = targets(&[("syslog+tls://a.example", &ca)]).unwrap();
        assert_eq!(read[0].authorities.len(), 2);
        for bad in ["noise", "-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n"] {
            let refused = targets(&[("syslog+tls://a.example", bad)]).unwrap_err().to_string();
            assert!(refused.contains("log.targets[0].ca"), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn an_accepted_url_is_one_line_and_reads_back(
            url in "(syslog\\+tls|otlp\\+https)://[a-zA-Z0-9.:\\[\\] /?#@%-]{0,40}", noise in ".{0,60}",
        ) {
            for text in [url, noise] {
                if let Ok(read) = LogTarget::read(&text) {
                    let named = read.url();
                    prop_assert!(!named.contains(|c: char| c.is_whitespace() || c.is_control()));
                    prop_assert_eq!(LogTarget::read(&named).unwrap(), read);
                }
            }
        }
    }
}
