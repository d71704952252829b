//! The names under which clients reach the API servers of Kubernetes, from the configuration of
//! the cluster.
//!
//! Invariants:
//! - Two texts for the same host are one name: DNS names are in lower case, addresses in their
//!   shortest form, and an IPv4 address in one of IPv6 (`::ffff:192.0.2.1`) is the IPv4 address.
//!
//! What this module does not do: put them into certificates (`certificates` of the workload).

use std::net::IpAddr;

use polis_proto::v1;

use super::error::Error;
use super::text::{self, At as _, Refusal};

/// Names of a cluster: each lengthens the certificate of every controller.
const NAMES_MAX: usize = 8;

/// Reads the names of Kubernetes; `path` is their position as errors report it. DNS names are in
/// lower case, addresses without brackets.
///
/// # Errors
///
/// [`Error::Field`].
pub fn kubernetes_names(
    message: &v1::KubernetesConfiguration,
    path: &str,
) -> Result<Vec<String>, Error> {
    text::at_most(message.names.len(), NAMES_MAX, "names").at(format!("{path}.names"), 1)?;
    let mut names = Vec::new();
    for (i, text) in message.names.iter().enumerate() {
        let name = name(text, &names).at(format!("{path}.names[{i}]"), 1)?;
        names.push(name);
    }
    Ok(names)
}

fn name(text: &str, known: &[String]) -> Result<String, Refusal> {
    text::host(text).map_err(|_invalid| {
        Refusal::of(text, "an IP address, or a DNS name of letters, digits, dots and hyphens")
    })?;
    let name = match text.parse::<IpAddr>().map(|address| address.to_canonical()) {
        Ok(it) if it.is_unspecified() || it.is_loopback() || it.is_multicast() => {
            return Err(Refusal::of(text, "an address that other machines reach"));
        }
        Ok(address) => address.to_string(),
        Err(_name) => text.to_ascii_lowercase(),
    };
    if known.contains(&name) {
        return Err(Refusal::of(text, "each name once"));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(names: &[&str]) -> Result<Vec<String>, Error> {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        kubernetes_names(&v1::KubernetesConfiguration { names }, "kubernetes")
    }

    #[test]
    fn a_host_has_one_name_however_it_is_written() {
        let named = read(&["API.Example", "192.0.2.10", "2001:DB8:0::1"]).unwrap();
        assert_eq!(named, ["api.example", "192.0.2.10", "2001:db8::1"]);
        assert_eq!(read(&["::ffff:192.0.2.10"]).unwrap(), ["192.0.2.10"]);
        assert!(read(&["192.0.2.10", "::ffff:192.0.2.10"]).is_err(), "one name twice");
        assert_eq!(read(&[]).unwrap(), [""; 0]);
    }

    #[test]
    fn a_name_that_is_no_host_is_refused_with_its_position() {
        let long = "a.".repeat(127) + "a";
        for (bad, allowed) in [
            ("", "a DNS name"),
            ("*.example", "a DNS name"),
            ("api_1.example", "a DNS name"),
            ("-api.example", "a DNS name"),
            ("api.example.", "a DNS name"),
            ("api.example:6443", "a DNS name"),
            ("https://api.example", "a DNS name"),
            ("192.0.2", "a DNS name"),
            ("[2001:db8::1]", "a DNS name"),
            (long.as_str(), "a DNS name"),
            ("127.0.0.1", "other machines"),
            ("::", "other machines"),
            ("224.0.0.1", "other machines"),
            ("::ffff:127.0.0.1", "other machines"),
            ("GOOD.example", "each name once"),
        ] {
            let Error::Field(refused) = read(&["good.example", bad]).unwrap_err() else {
                panic!("{bad}")
            };
            assert_eq!((&*refused.path, refused.number), ("kubernetes.names[1]", 1), "{bad}");
            assert!(refused.allowed.contains(allowed), "{bad}: {}", refused.allowed);
        }
    }

    #[test]
    fn a_cluster_has_eight_names_at_most() {
        let names: Vec<_> = (0..9).map(|number| format!("a{number}.example")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        assert_eq!(read(&names[..8]).unwrap().len(), 8);
        let Error::Field(refused) = read(&names).unwrap_err() else { panic!("nine names") };
        assert_eq!((&*refused.path, &*refused.value), ("kubernetes.names", "9 names"));
    }
}
