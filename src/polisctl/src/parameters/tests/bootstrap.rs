//! What `parameters bootstrap` writes, and what is shown of it.

use polis_proto::v1;
use prost::Message as _;

use super::{BOOTSTRAP, NODE, ca, with, world};

#[test]
fn what_bootstrap_writes_is_what_show_prints() {
    let world = world();
    let everything = [
        "--domain",
        "home.example",
        "--tpm",
        "required",
        "--storage",
        "authenticated",
        "--cold-start",
        "attended",
        "--time-server",
        "192.0.2.123",
        "--time-server",
        "ntp.example.com,nts",
        "--label",
        "rack=7",
        "--label",
        "example.com/role=",
        "--interface",
        "eth0,dhcp",
        "--interface",
        "52:54:00:12:34:56,address=192.0.2.7/24,address=2001:db8::7/64,route=0.0.0.0/0@192.0.2.1@100,mtu=9000",
        "--nameserver",
        "192.0.2.53",
        "--ntp",
        "time.example.com",
        "--console",
        "hvc0",
    ];
    insta::assert_snapshot!(world.runs(&with(&BOOTSTRAP, &everything)), @r"257 bytes in @p.pb (message)");
    insta::assert_snapshot!(world.runs(&["parameters", "show", "@p.pb"]), @r"
    format        message
    does          bootstrap a new cluster
    owner key     d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a
    domain        home.example
    TPM           required
    storage       authenticated
    cold start    attended
    time          192.0.2.123
                  ntp.example.com,nts
    pods          10.192.0.0/11
    Services      10.224.0.0/16
    labels        example.com/role=, rack=7
    interfaces    eth0, DHCP
                  52:54:00:12:34:56, 192.0.2.7/24, 2001:db8::7/64, 0.0.0.0/0 by 192.0.2.1 at metric 100, MTU 9000
    nameservers   192.0.2.53
    time servers  time.example.com
    console       tty1, hvc0
    ");
    insta::assert_snapshot!(world.runs(&["parameters", "show", "@p.pb", "--output", "json"]), @r#"
    {
      "cluster_bootstrap": {
        "cluster_configuration": {
          "cluster_domain": "home.example",
          "cold_start": "attended",
          "pod_network": "10.192.0.0/11",
          "service_network": "10.224.0.0/16",
          "storage_security_policy": "authenticated",
          "time_servers": [
            "192.0.2.123",
            "ntp.example.com,nts"
          ],
          "tpm_mode": "required"
        },
        "labels": {
          "example.com/role": "",
          "rack": "7"
        },
        "owner_public_key": "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
      },
      "console_tui": [
        "hvc0"
      ],
      "format": "message",
      "network": {
        "interfaces": [
          {
            "addresses": [],
            "dhcp": true,
            "match": "eth0",
            "mtu": null,
            "routes": []
          },
          {
            "addresses": [
              "192.0.2.7/24",
              "2001:db8::7/64"
            ],
            "dhcp": false,
            "match": "52:54:00:12:34:56",
            "mtu": 9000,
            "routes": [
              {
                "destination": "0.0.0.0/0",
                "gateway": "192.0.2.1",
                "metric": 100
              }
            ]
          }
        ],
        "nameservers": [
          "192.0.2.53"
        ],
        "ntp_servers": [
          "time.example.com"
        ]
      }
    }
    "#);
    insta::assert_snapshot!(world.runs(&["parameters", "check", "@p.pb"]), @r"@p.pb: valid parameters (message), to bootstrap a new cluster");
}

#[test]
fn a_new_cluster_has_the_networks_that_it_is_given() {
    let world = world();
    let chosen = ["--pod-network", "172.16.0.0/13", "--service-network", "172.24.0.0/16"];
    world.runs(&with(&BOOTSTRAP, &chosen));
    let shown = world.runs(&["parameters", "show", "@p.pb"]);
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(shown.contains("pods 172.16.0.0/13 Services 172.24.0.0/16"), "{shown}");
    let refused = |more: &[&str]| world.refuses(&with(&BOOTSTRAP, more));
    insta::assert_snapshot!(refused(&["--pod-network", "10.200.0.0/24"]), @r#"
    error: cluster_bootstrap.cluster_configuration.pod_network is "10.200.0.0/24"; allowed is an IPv4 network of /8 to /23 without host bits, such as 10.192.0.0/11
    help: docs/parameters.md lists every field and its values
    "#);
    insta::assert_snapshot!(refused(&["--pod-network", "10.224.0.0/12"]), @r"
    error: cluster_bootstrap.cluster_configuration.service_network is 10.224.0.0/16; allowed is a network apart from that of pods, which is 10.224.0.0/12; an empty one has its default
    help: docs/parameters.md lists every field and its values
    ");
    let inside = with(&chosen, &["--interface", "eth0,address=172.17.0.7/16"]);
    insta::assert_snapshot!(refused(&inside), @r"
    error: cluster_bootstrap.cluster_configuration.pod_network is 172.16.0.0/13; allowed is a network without 172.17.0.7, the address of this machine
    help: docs/parameters.md lists every field and its values
    ");
}

#[test]
fn an_installation_names_a_disk_and_the_data_that_it_may_overwrite() {
    let world = world();
    let disk = ["--install-disk", "transport=nvme,min-size=100G"];
    world.runs(&with(&BOOTSTRAP, &disk));
    let shown = world.runs(&["parameters", "show", "@p.pb"]);
    let wanted =
        "installs      to the disk with transport=nvme,min-size=100G, if it is empty, once";
    assert!(shown.contains(wanted), "{shown}");
    let checked = world.runs(&["parameters", "check", "@p.pb"]);
    let wanted =
        "to install to the disk with transport=nvme,min-size=100G, then bootstrap a new cluster";
    assert!(checked.contains(wanted), "{checked}");
    let read = || {
        let bytes = std::fs::read(world.path("p.pb")).unwrap();
        v1::NodeParameters::decode(&*bytes).unwrap().install.unwrap()
    };
    let first = read();
    for (word, wipe) in [("any-data", 1), ("member", 2)] {
        world.runs(&with(&BOOTSTRAP, &[&disk[..], &["--install-wipe", word]].concat()));
        let again = read();
        assert_eq!((again.wipe, &again.disk), (wipe, &first.disk));
        assert_ne!(again.id, first.id, "each file is an installation of its own");
    }
    let shown = world.runs(&["parameters", "show", "@p.pb", "--output", "json"]);
    assert!(shown.contains("\"wipe\": \"member\""), "{shown}");
    // A machine that joins a cluster is installed in the same way.
    std::fs::write(world.path("ca.pem"), polis_wire::pki::certificate_pem(&ca())).unwrap();
    let node = format!("{NODE}=192.0.2.1");
    let register = ["parameters", "register", "--ticket", "5e", "--ca", "@ca.pem", "--node", &node];
    world.runs(&with(&register, &[&disk[..], &["-o", "@p.pb"]].concat()));
    assert_eq!(read().disk, first.disk);
}

#[test]
fn a_further_disk_is_named_with_its_volume() {
    let world = world();
    let volumes = ["--volume", "db:serial=S4EW", "--volume", "log:transport=nvme,min-size=1T"];
    world.runs(&with(&BOOTSTRAP, &volumes));
    let shown = world.runs(&["parameters", "show", "@p.pb"]);
    for wanted in
        ["db, on the disk with serial=S4EW", "log, on the disk with transport=nvme,min-size=1T"]
    {
        assert!(shown.contains(wanted), "{shown}");
    }
    let shown = world.runs(&["parameters", "show", "@p.pb", "--output", "json"]);
    assert!(shown.contains("\"db\": \"serial=S4EW\""), "{shown}");
}

#[test]
fn the_disk_of_a_mirror_is_named() {
    let world = world();
    world.runs(&with(&BOOTSTRAP, &["--mirror-disk", "transport=nvme,min-size=1T"]));
    let shown = world.runs(&["parameters", "show", "@p.pb"]);
    assert!(shown.contains("on the disk with transport=nvme,min-size=1T"), "{shown}");
    let shown = world.runs(&["parameters", "show", "@p.pb", "--output", "json"]);
    assert!(shown.contains("\"mirror\": \"transport=nvme,min-size=1T\""), "{shown}");
}

#[test]
fn parameters_on_standard_output_are_no_document_beside_them() {
    let world = world();
    let mut bootstrap = BOOTSTRAP.to_vec();
    let out = bootstrap.iter().position(|word| *word == "@p.pb").unwrap();
    bootstrap[out] = "-";
    let ended = world.run(&[&bootstrap[..], &["--output", "json"]].concat());
    assert_eq!((ended.status, ended.stdout.as_str()), (2, ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("help: write the parameters to a file"), "{}", ended.stderr);
    assert_eq!(world.run(&bootstrap).status, 0);
}

#[test]
fn what_is_not_said_is_left_to_the_node() {
    let world = world();
    world.runs(&BOOTSTRAP);
    let bytes = std::fs::read(world.path("p.pb")).unwrap();
    let message = v1::NodeParameters::decode(&*bytes).unwrap();
    assert_eq!((message.network, message.console), (None, None));
    insta::assert_snapshot!(world.runs(&["parameters", "show", "@p.pb", "--output", "yaml"]), @r"
    cluster_bootstrap:
      cluster_configuration:
        cluster_domain: cluster.internal
        cold_start: automatic
        pod_network: 10.192.0.0/11
        service_network: 10.224.0.0/16
        storage_security_policy: unspecified
        time_servers: []
        tpm_mode: best-effort
      labels: {}
      owner_public_key: d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a
    console_tui: []
    format: message
    network:
      interfaces: []
      nameservers: []
      ntp_servers: []
    ");
}

#[test]
fn without_an_owner_key_the_one_that_was_made_is_taken() {
    let world = world();
    let bootstrap = ["parameters", "bootstrap", "-o", "@p.pb"];
    insta::assert_snapshot!(world.refuses(&bootstrap), @r"
    error: cannot read @polis/owner.key
    cause: No such file or directory (os error 2)
    help: name the owner's key with --owner-key, or make one: `polisctl owner create`
    ");
    world.runs(&["owner", "create"]);
    world.runs(&bootstrap);
}

#[test]
fn parameters_never_take_the_place_of_a_private_key() {
    let world = world();
    world.runs(&["owner", "create", "-o", "@ann.key"]);
    let key = std::fs::read(world.path("ann.key")).unwrap();
    let bootstrap = ["parameters", "bootstrap", "--owner-key", "@ann.pub", "-o", "@ann.key"];
    insta::assert_snapshot!(world.refuses(&bootstrap), @r"
    error: @ann.key exists already; a key is never overwritten
    help: use that key, or name another file: `-o FILE`
    ");
    assert_eq!(std::fs::read(world.path("ann.key")).unwrap(), key);
    // Another file is replaced, as by the command before.
    world.runs(&BOOTSTRAP);
    world.runs(&BOOTSTRAP);
}
