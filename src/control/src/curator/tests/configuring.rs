//! The configuration of the cluster: its fixed part, firewall and registries.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::cluster_configuration::TpmMode;
use prost::Message as _;

use super::{firewall, founded, noon};
use crate::curator::configuration;
use crate::curator::error::Error;
use crate::curator::store::{CONFIGURATION, REGISTRIES};
use polis_wire::pki::{Store as _, Write};

#[tokio::test]
async fn what_a_running_cluster_is_built_on_cannot_change() {
    let (store, _) = founded().await;
    let desired = v1::ClusterConfiguration {
        cold_start: v1::cluster_configuration::ColdStart::Attended.into(),
        ..store.configuration().await.unwrap()
    };
    let written = store.configure(desired.clone(), None, noon()).await.unwrap();
    assert_eq!(written.cold_start, desired.cold_start);
    // A field that is left out stays.
    let same = v1::ClusterConfiguration { cluster_domain: String::new(), ..written.clone() };
    assert_eq!(store.configure(same, None, noon()).await.unwrap(), written);
    let other = v1::ClusterConfiguration { cluster_domain: "x.org".to_owned(), ..written.clone() };
    assert!(matches!(store.configure(other, None, noon()).await, Err(Error::Fixed { .. })));
    let strange = v1::ClusterConfiguration { tpm_mode: 77, ..written.clone() };
    assert!(matches!(store.configure(strange, None, noon()).await, Err(Error::Field(_))));
    let networks = |pods: &str, services: &str| v1::ClusterConfiguration {
        pod_network: pods.to_owned(),
        service_network: services.to_owned(),
        ..written.clone()
    };
    // Those that it has, by default or by name, may be named again.
    let again = networks("10.192.0.0/11", "10.224.0.0/16");
    assert_eq!(store.configure(again, None, noon()).await.unwrap(), written);
    for other in [networks("172.16.0.0/12", ""), networks("", "172.16.0.0/12"), networks("x", "")] {
        let refused = store.configure(other, None, noon()).await;
        assert!(matches!(refused, Err(Error::Fixed { .. })), "{refused:?}");
    }
    assert_eq!(store.configuration().await.unwrap(), written);
}

#[tokio::test]
async fn a_change_that_names_no_network_keeps_those_of_the_cluster() {
    let (store, memory) = founded().await;
    // Each overlaps a default one.
    let founded = v1::ClusterConfiguration {
        pod_network: "10.224.0.0/12".to_owned(),
        service_network: "10.192.0.0/16".to_owned(),
        ..store.configuration().await.unwrap()
    };
    let write = Write::Put(CONFIGURATION.to_owned(), founded.encode_to_vec());
    memory.commit(Vec::new(), vec![write]).await.unwrap();
    let attended = v1::cluster_configuration::ColdStart::Attended;
    let wish = v1::ClusterConfiguration { cold_start: attended.into(), ..Default::default() };
    let written = store.configure(wish, None, noon()).await.unwrap();
    assert_eq!(written.pod_network, founded.pod_network);
    assert_eq!(written.service_network, founded.service_network);
    let one = v1::ClusterConfiguration { service_network: founded.service_network, ..written };
    let one = v1::ClusterConfiguration { pod_network: String::new(), ..one };
    store.configure(one, None, noon()).await.unwrap();
    let wish =
        v1::ClusterConfiguration { pod_network: "10.192.0.0/11".to_owned(), ..Default::default() };
    let Err(Error::Fixed { field, value }) = store.configure(wish, None, noon()).await else {
        panic!("it is fixed")
    };
    assert_eq!((field, &*value), ("pod_network", "10.224.0.0/12"));
}

#[tokio::test]
async fn a_registry_is_set_changed_and_deleted() {
    let (store, memory) = founded().await;
    let registry = |host: &str, username: &str| v1::Registry {
        host: host.to_owned(),
        username: username.to_owned(),
        password: username.to_owned(),
        ..Default::default()
    };
    let bad = store.set_registry(&registry("no-dot", ""), noon()).await;
    assert!(matches!(bad, Err(Error::Field(_))), "{bad:?}");
    for host in ["b.example", "a.example"] {
        store.set_registry(&registry(host, "ann"), noon()).await.unwrap();
    }
    let hosts = async || {
        let read = store.read::<v1::Registries>(REGISTRIES).await.unwrap();
        let all = read.unwrap_or_default().registries;
        all.into_iter().map(|one| (one.host, one.username)).collect::<Vec<_>>()
    };
    let pair = |host: &str, name: &str| (host.to_owned(), name.to_owned());
    assert_eq!(hosts().await, [pair("a.example", "ann"), pair("b.example", "ann")]);
    // An absent one reads as none.
    store.set_registry(&registry("b.example", ""), noon()).await.unwrap();
    assert_eq!(hosts().await, [pair("a.example", "ann"), pair("b.example", "")]);
    let before = memory.get(REGISTRIES).await.unwrap().unwrap().revision;
    store.set_registry(&registry("b.example", ""), noon()).await.unwrap();
    let after = memory.get(REGISTRIES).await.unwrap().unwrap().revision;
    assert_eq!(before, after, "the same again writes nothing");
    store.delete_registry("a.example").await.unwrap();
    let again = store.delete_registry("a.example").await;
    assert!(matches!(again, Err(Error::RegistryUnknown { .. })), "{again:?}");
    for number in 1..polis_wire::registry::REGISTRIES_MAX {
        let host = format!("r{number}.example");
        store.set_registry(&registry(&host, ""), noon()).await.unwrap();
    }
    let full = store.set_registry(&registry("z.example", ""), noon()).await.unwrap_err();
    assert!(full.to_string().contains("delete one first"), "{full}");
    store.set_registry(&registry("b.example", "bob"), noon()).await.unwrap();
}

#[tokio::test]
async fn two_who_configure_different_things_do_not_undo_each_other() {
    use v1::cluster_configuration::ColdStart;
    let (store, _) = founded().await;
    let before = store.configuration().await.unwrap();
    // Each call changes one field, whatever it has read before.
    let tpm = v1::ClusterConfiguration { tpm_mode: TpmMode::Required.into(), ..Default::default() };
    store.configure(tpm, None, noon()).await.unwrap();
    let cold_start =
        v1::ClusterConfiguration { cold_start: ColdStart::Attended.into(), ..Default::default() };
    let written = store.configure(cold_start, None, noon()).await.unwrap();
    assert_eq!(written.tpm_mode(), TpmMode::Required);
    assert_eq!(written.cold_start(), ColdStart::Attended);
    assert_eq!(written.storage_security_policy, before.storage_security_policy);
    // Time servers stay until others, or none, are named.
    let servers = vec![v1::NtpServer { host: "192.0.2.1".to_owned(), nts: true }];
    let time = |servers: &[v1::NtpServer]| v1::ClusterConfiguration {
        time: Some(v1::TimeConfiguration { servers: servers.to_vec() }),
        ..Default::default()
    };
    store.configure(time(&servers), None, noon()).await.unwrap();
    let written = store.configure(v1::ClusterConfiguration::default(), None, noon()).await.unwrap();
    assert_eq!(written.time.unwrap().servers, servers);
    let written = store.configure(time(&[]), None, noon()).await.unwrap();
    assert_eq!(written.time.unwrap().servers, []);
    let log = |url: &str| v1::ClusterConfiguration {
        log: Some(v1::LogConfiguration {
            targets: vec![v1::LogTarget { url: url.to_owned(), ca: String::new() }],
            ..Default::default()
        }),
        ..Default::default()
    };
    store.configure(log("syslog+tls://logs.example"), None, noon()).await.unwrap();
    let written = store.configure(v1::ClusterConfiguration::default(), None, noon()).await.unwrap();
    assert_eq!(written.log, log("syslog+tls://logs.example").log);
    assert!(matches!(store.configure(log("syslog://a"), None, noon()).await, Err(Error::Field(_))));
    // The names of Kubernetes as well.
    let names = |names: &[&str]| v1::ClusterConfiguration {
        kubernetes: Some(v1::KubernetesConfiguration {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        }),
        ..Default::default()
    };
    store.configure(names(&["api.example"]), None, noon()).await.unwrap();
    let written = store.configure(v1::ClusterConfiguration::default(), None, noon()).await.unwrap();
    assert_eq!(written.kubernetes, names(&["api.example"]).kubernetes);
    let written = store.configure(names(&[]), None, noon()).await.unwrap();
    assert_eq!(written.kubernetes, names(&[]).kubernetes);
    let bad = store.configure(names(&["*.example"]), None, noon()).await;
    assert!(matches!(bad, Err(Error::Field(_))));
    // And the proxy, with the parts of the cluster that only a watch has.
    let proxy = |url: &str, direct: &[&str]| v1::ClusterConfiguration {
        proxy: Some(v1::ProxyConfiguration {
            url: url.to_owned(),
            direct: direct.iter().map(|entry| (*entry).to_owned()).collect(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let one = proxy("http://proxy.example:3128", &["a.example"]);
    store.configure(one.clone(), None, noon()).await.unwrap();
    let written = store.configure(v1::ClusterConfiguration::default(), None, noon()).await.unwrap();
    assert_eq!(written.proxy, one.proxy);
    let sent = configuration::proxy(&written);
    assert_eq!(sent.own, [&*written.cluster_domain, "10.192.0.0/11", "10.224.0.0/16"]);
    let again = v1::ClusterConfiguration { proxy: Some(sent), ..Default::default() };
    assert_eq!(store.configure(again, None, noon()).await.unwrap().proxy, one.proxy);
    let bad = store.configure(proxy("proxy.example", &[]), None, noon()).await;
    assert!(matches!(bad, Err(Error::Field(_))));
    let written = store.configure(proxy("", &[]), None, noon()).await.unwrap();
    assert_eq!(written.proxy, None);
    assert_eq!(configuration::proxy(&written), v1::ProxyConfiguration::default());
    let bad = [v1::NtpServer { host: "a\nallow".to_owned(), nts: false }];
    assert!(matches!(store.configure(time(&bad), None, noon()).await, Err(Error::Field(_))));
}

#[tokio::test]
async fn a_firewall_is_tried_until_it_is_confirmed_or_its_time_is_over() {
    let (store, _) = founded().await;
    let later = |seconds| noon() + Duration::from_secs(seconds);
    let (one, wish) = firewall("192.0.2.0/24");
    let written = store.configure(wish.clone(), None, noon()).await.unwrap();
    let trial = written.firewall_trial.clone().unwrap();
    assert_eq!((written.firewall, trial.configuration), (None, Some(one.clone())));
    // A call that is repeated does not begin it again.
    let again = store.configure(wish.clone(), None, later(60)).await.unwrap();
    assert_eq!(again.firewall_trial.unwrap().until, trial.until);
    // Its time is over, and then it begins again.
    let late = store.confirm_firewall(one.clone(), later(120)).await;
    assert!(matches!(late, Err(Error::NoTrial)));
    let begun = store.configure(wish.clone(), None, later(130)).await.unwrap();
    assert_eq!(begun.firewall_trial.unwrap().until, trial.until + 130);
    // Only the one that is tried can be confirmed.
    let (other, _) = firewall("198.51.100.0/24");
    assert!(matches!(store.confirm_firewall(other, later(140)).await, Err(Error::NoTrial)));
    let kept = store.confirm_firewall(one.clone(), later(140)).await.unwrap();
    assert_eq!((kept.firewall.as_ref(), kept.firewall_trial.as_ref()), (Some(&one), None));
    assert_eq!(store.confirm_firewall(one.clone(), later(150)).await.unwrap(), kept, "once more");
    // The confirmed one needs no trial, and ends another one.
    let (_, wider) = firewall("0.0.0.0/0");
    assert!(store.configure(wider, None, later(200)).await.unwrap().firewall_trial.is_some());
    assert_eq!(store.configure(wish, None, later(201)).await.unwrap(), kept);
}

#[tokio::test]
async fn a_firewall_that_makes_no_sense_is_refused() {
    let (store, _) = founded().await;
    for bad in ["192.0.2.1/24", "any", "224.0.0.0/4", "127.0.0.1", "10.0.0.0/33", ""] {
        let wish = firewall(bad).1;
        let refused = store.configure(wish, None, noon()).await;
        assert!(matches!(refused, Err(Error::Field(_))), "{bad}: {refused:?}");
    }
    let wish = |ports: &[&str]| v1::ClusterConfiguration {
        firewall: Some(v1::FirewallConfiguration {
            sources: Vec::new(),
            ports: ports.iter().map(|port| (*port).to_owned()).collect(),
        }),
        ..Default::default()
    };
    for bad in [&["tcp/7839"][..], &["tcp/443", "tcp/443"], &["443"]] {
        let refused = store.configure(wish(bad), None, noon()).await;
        assert!(matches!(refused, Err(Error::Field(_))), "{bad:?}: {refused:?}");
    }
    // Callers cannot say which configuration is on trial.
    let trial = v1::ClusterConfiguration {
        firewall_trial: Some(v1::FirewallTrial::default()),
        ..Default::default()
    };
    assert!(matches!(store.configure(trial, None, noon()).await, Err(Error::Field(_))));
}
