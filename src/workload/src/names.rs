//! The names under which clients reach Kubernetes, in the cluster's configuration: read for the
//! certificate of the API server, and watched.
//!
//! A controller is a voter of etcd, so it reads its own member.
//!
//! What this module does not do: check what an operator gives (`parameters`), or make certificates
//! (`certificates`).

use prost::Message as _;
use tokio::sync::watch;

use polis_control::consensus::client::{Client, Kv};
use polis_control::curator;
use polis_control::curator::store::{CONFIGURATION, Error};
use polis_proto::v1;
use polis_runtime::event::{Closed, until};
use polis_wire::parameters;
use polis_wire::pki::{Host, Store};

/// The names in the cluster's configuration; none of a cluster without one.
pub(super) async fn read<S: Store + Clone>(
    records: &curator::Store<S>,
) -> Result<Vec<Host>, anyhow::Error> {
    match records.configuration().await {
        Err(Error::Missing { .. }) => Ok(Vec::new()),
        read => hosts(read?),
    }
}

/// Waits until the cluster's configuration has other names than `known`. While it cannot be read,
/// [`read`] says so.
pub(super) async fn until_other(etcd: &Client, known: &[Host]) {
    let record = watch::Sender::new(None);
    let mut newest = record.subscribe();
    tokio::select! {
        // Cancel-safe: follows again from a listing.
        never = Box::pin(etcd.follow_key(CONFIGURATION, &record)) => match never {},
        // Cancel-safe: waits for an event value, whose sender is above.
        _other = other(&mut newest, known) => {}
    }
}

/// The same with the record as it is followed.
async fn other(
    record: &mut watch::Receiver<Option<Option<Kv>>>,
    known: &[Host],
) -> Result<(), Closed> {
    until(record, "the cluster's configuration", |record| {
        let record = record.as_ref()?.as_ref();
        let record = record.map(|record| record.value.as_slice()).unwrap_or_default();
        let configuration = v1::ClusterConfiguration::decode(record).ok()?;
        hosts(configuration).is_ok_and(|now| now != known).then_some(())
    })
    .await
}

/// The names in this configuration.
fn hosts(configuration: v1::ClusterConfiguration) -> Result<Vec<Host>, anyhow::Error> {
    let message = configuration.kubernetes.unwrap_or_default();
    let names = parameters::kubernetes_names(&message, "kubernetes")?;
    let host = |name: String| match name.parse() {
        Ok(address) => Host::Address(address),
        Err(_name) => Host::Name(name),
    };
    Ok(names.into_iter().map(host).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use polis_wire::pki::Write;
    use polis_wire::pki::memory::Memory;
    use tokio::time::timeout;

    use super::*;

    /// A configuration with these names.
    fn named(names: &[&str]) -> v1::ClusterConfiguration {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let kubernetes = Some(v1::KubernetesConfiguration { names });
        v1::ClusterConfiguration { kubernetes, ..Default::default() }
    }

    #[tokio::test]
    async fn the_names_are_those_of_the_configuration() {
        let memory = Memory::default();
        let records = curator::Store::new(memory.clone());
        assert_eq!(read(&records).await.unwrap(), [], "a cluster without a record");
        let written = async |names: &[&str]| {
            let write = Write::Put(CONFIGURATION.to_owned(), named(names).encode_to_vec());
            assert!(memory.commit(Vec::new(), vec![write]).await.unwrap());
        };
        written(&["API.example", "192.0.2.10", "2001:db8::1"]).await;
        let expected = [
            Host::Name("api.example".to_owned()),
            Host::Address([192, 0, 2, 10].into()),
            Host::Address("2001:db8::1".parse().unwrap()),
        ];
        assert_eq!(read(&records).await.unwrap(), expected);
        written(&["a b"]).await;
        let error = format!("{:#}", read(&records).await.unwrap_err());
        assert!(error.contains("kubernetes.names[0]"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_returns_once_the_configuration_has_other_names_and_not_before() {
        let (followed, mut record) = watch::channel(None);
        let known = [Host::Name("api.example".to_owned())];
        let written = |record: v1::ClusterConfiguration| {
            let (key, value) = (CONFIGURATION.to_owned(), record.encode_to_vec());
            Some(Some(Kv { key, value, created: 1, modified: 2, lease: 0 }))
        };
        let (same, invalid) = (named(&["API.example"]), named(&["a b"]));
        let other_field =
            v1::ClusterConfiguration { cluster_domain: "b.example".to_owned(), ..same.clone() };
        for record_of in [None, written(same), written(other_field), written(invalid)] {
            followed.send_replace(record_of);
            let waits = timeout(Duration::from_secs(60), other(&mut record, &known)).await;
            assert!(waits.is_err());
        }
        for record_of in [written(named(&["b.example"])), Some(None)] {
            followed.send_replace(record_of);
            let ends = timeout(Duration::from_secs(60), other(&mut record, &known)).await;
            ends.unwrap().unwrap();
        }
    }
}
