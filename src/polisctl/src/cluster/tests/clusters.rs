//! What is shown of a cluster and of its members of etcd.

use super::{consensus, info};
use crate::cluster::info::Info;
use crate::etcd;
use crate::output::Document;

#[test]
fn info_says_how_to_find_and_to_trust_the_cluster() {
    use crate::output::Format;
    let document = Info::document(&info()).unwrap();
    insta::assert_snapshot!(document.render(Format::Table).unwrap(), @r"
    domain      cluster.internal
    leader      polis-01
    nodes       2 up, 0 standby, 1 new, 0 decommissioned
    CA          scissors-lecture-lamp-unique
                ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad
    storage     authenticated, by default
    TPM         best-effort
    cold start  automatic, by default
    time        none: the voters agree on a time of their own
    pods        10.192.0.0/11
    Services    10.224.0.0/16
    logs go to  -
    snapshots   -
    Kubernetes  -
    proxy       -
    TPM policy  -
    firewall    callers have any address
    directory   polis-01 at 192.0.2.1
    ");
    insta::assert_snapshot!(document.render(Format::Json).unwrap(), @r#"
    {
      "attestation_policy": null,
      "ca_fingerprint": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
      "ca_words": "scissors-lecture-lamp-unique",
      "cluster_domain": "cluster.internal",
      "cold_start": "unspecified",
      "directory": [
        {
          "addresses": [
            "192.0.2.1"
          ],
          "id": "polis-01"
        }
      ],
      "firewall_ports": [],
      "firewall_sources": [],
      "firewall_trial": false,
      "kubernetes_names": [],
      "leader": "polis-01",
      "log_targets": [],
      "no_proxy": [],
      "nodes": {
        "decommissioned": 0,
        "new": 1,
        "standby": 0,
        "up": 2
      },
      "pod_network": "10.192.0.0/11",
      "proxy": "",
      "service_network": "10.224.0.0/16",
      "snapshot_target": "",
      "storage_security_policy": "unspecified",
      "time_servers": [],
      "tpm_mode": "best-effort"
    }
    "#);
}

#[test]
fn etcd_is_a_table_and_a_document() {
    let status = etcd::Status::of(&consensus());
    insta::assert_snapshot!(Document::new(&(), status.text()).unwrap().render(crate::output::Format::Table).unwrap(), @r"
    members   1 voter, 1 learning; the loss of one stops the cluster
    leader    polis-01010101010101010101010101010101
    term      4
    revision  77
    quota     2.0 GiB
    alarms    -

    NODE                                    ROLE     ANSWERS  INDEX  APPLIED  DATABASE               PEER URL
    polis-01010101010101010101010101010101  leader   yes      421    420      5.0 MiB, 1.0 MiB used  https://polis-01:7834
    polis-02020202020202020202020202020202  learner  yes      -      -        -                      https://polis-02:7834
    ");
}
