use super::*;
use crate::testing::World;

/// RFC 8032, section 7.1.
const OWNER: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
const NODE: &str = "polis-00000000000000000000000000000001";

fn world() -> World {
    let world = World::new();
    std::fs::write(world.path("owner"), OWNER).unwrap();
    world
}

const BOOTSTRAP: [&str; 6] = ["parameters", "bootstrap", "--owner-key", "@owner", "-o", "@p.pb"];

fn with<'a>(first: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [first, more].concat()
}

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
fn a_disk_that_nothing_selects_is_refused() {
    let world = world();
    for (more, status, words) in [
        (["--install-disk", "vendor=x"], 2, "\"vendor\" is not a key; the keys are transport"),
        (["--install-wipe", "member"], 2, "--install-disk"),
        (
            ["--install-disk", "min-size=2T,max-size=1T"],
            1,
            "install.disk.size_max is 1000000000000 bytes",
        ),
    ] {
        let ended = world.run(&with(&BOOTSTRAP, &more));
        assert_eq!(ended.status, status, "{}", ended.stderr);
        let shown = ended.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(shown.contains(words), "{shown}");
    }
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
fn a_refused_field_is_named_with_its_value_and_what_is_allowed() {
    let world = world();
    let refused = |more: &[&str]| world.refuses(&with(&BOOTSTRAP, more));
    insta::assert_snapshot!(refused(&["--domain", "Home"]), @r#"
    error: cluster_bootstrap.cluster_configuration.cluster_domain is "Home"; allowed is a DNS name of lower-case letters, digits and inner hyphens, at most 80 characters
    help: docs/parameters.md lists every field and its values
    "#);
    insta::assert_snapshot!(refused(&["--label", "a b=x"]), @r#"
    error: cluster_bootstrap.labels is "a b"; allowed is a key of 1 to 63 letters, digits and inner "-_.", with an optional DNS name and "/" before it
    help: docs/parameters.md lists every field and its values
    "#);
    insta::assert_snapshot!(refused(&["--interface", "eth0,mtu=100"]), @r"
    error: network.interfaces[0].mtu is 100; allowed is a number from 1280 to 65535
    help: docs/parameters.md lists every field and its values
    ");
    insta::assert_snapshot!(refused(&["--interface", "eth0,address=192.0.2.7"]), @r#"
    error: network.interfaces[0].addresses[0] is "192.0.2.7"; allowed is a host's address and the length of its network, such as 192.0.2.7/24
    help: docs/parameters.md lists every field and its values
    "#);
    insta::assert_snapshot!(refused(&["--interface", "eth0,route=0.0.0.0/0@fd00::1"]), @r#"
    error: network.interfaces[0].routes[0].gateway is "fd00::1"; allowed is an IP address of the destination's family
    help: docs/parameters.md lists every field and its values
    "#);
    insta::assert_snapshot!(refused(&["--nameserver", "dns.example"]), @r#"
    error: network.nameservers[0] is "dns.example"; allowed is an IP address
    help: docs/parameters.md lists every field and its values
    "#);
    insta::assert_snapshot!(refused(&["--console", "/dev/tty2"]), @r#"
    error: console.tui[0] is "/dev/tty2"; allowed is a terminal's name such as "ttyS1": 1 to 16 letters and digits
    help: docs/parameters.md lists every field and its values
    "#);
    assert!(!world.path("p.pb").exists());
}

#[test]
fn a_command_line_that_makes_no_sense_is_wrong_usage() {
    let world = world();
    let usage = |more: &[&str]| {
        let ended = world.run(&with(&BOOTSTRAP, more));
        assert_eq!(ended.status, 2, "{}", ended.stderr);
        ended.stderr
    };
    insta::assert_snapshot!(usage(&["--interface", "eth0,adress=192.0.2.7/24"]), @r#"
    error: --interface "eth0,adress=192.0.2.7/24": "adress=192.0.2.7/24" is not known
    help: after the name: dhcp, address=CIDR, route=CIDR@GATEWAY[@METRIC], mtu=BYTES, primary, ipv6=auto|slaac|dhcpv6|off
    "#);
    insta::assert_snapshot!(usage(&["--label", "rack"]), @r#"
    error: --label "rack" is not KEY=VALUE
    help: add a value: rack=VALUE
    "#);
    insta::assert_snapshot!(usage(&["--label", "a=1", "--label", "a=2"]), @r#"
    error: --label names "a" twice; allowed is each key once
    help: leave out the other values of this key
    "#);
    insta::assert_snapshot!(usage(&["--label", "kubernetes.io/os=linux"]), @r#"
    error: --label names "kubernetes.io/os", which Kubernetes or Polis sets itself; allowed is a key outside of kubernetes.io, k8s.io and polis.internal, or one in topology.kubernetes.io, node.kubernetes.io, node-restriction.kubernetes.io or, except for worker and control-plane, node-role.kubernetes.io
    help: docs/worker.md lists who sets which labels of a Node object
    "#);
    usage(&["--tpm", "maybe"]);
}

#[test]
fn a_wrong_value_of_an_option_is_named_with_the_allowed_ones() {
    let world = world();
    let refused = |option: &str, text: &str| {
        let ended = world.run(&with(&BOOTSTRAP, &[option, text]));
        assert_eq!((ended.status, &*ended.stdout), (2, ""), "{}", ended.stderr);
        ended.stderr
    };
    insta::assert_snapshot!(refused("--interface", "eth0,mtu=abc"), @r#"
    error: --interface "eth0,mtu=abc": mtu is "abc"; allowed is a number from 1280 to 65535
    help: after the name: dhcp, address=CIDR, route=CIDR@GATEWAY[@METRIC], mtu=BYTES, primary, ipv6=auto|slaac|dhcpv6|off
    "#);
    for (option, text, words) in [
        ("--interface", "eth0,ipv6=on", "ipv6 is \"on\"; allowed is auto, slaac, dhcpv6, off"),
        ("--interface", "eth0,route=0.0.0.0/0", "allowed is CIDR@GATEWAY, or"),
        ("--interface", "eth0,route=0.0.0.0/0@192.0.2.1@x", "allowed is CIDR@GATEWAY, or"),
        ("--interface", "eth0,dhcp=on", "\"dhcp=on\" is not known"),
        ("--interface", "eth0+eth1", "allowed is one of each"),
        ("--bond", "bond0,member=eth0,mode=x", "mode is \"x\"; allowed is active-backup, lacp"),
        ("--bond", "bond0,member=eth0,hash=", "allowed is layer2, layer2+3, layer3+4"),
        ("--bond", "bond0,min-links=-1", "allowed is a number from 0 to the number of members"),
        ("--vlan", "bond0,id=x", "id is \"x\"; allowed is a number from 1 to 4094"),
        ("--vlan", "bond0,id=7,mtu=x", "allowed is a number from 1280 to 65535"),
    ] {
        let ended = refused(option, text);
        assert!(ended.contains(words), "{text}: {ended}");
        assert!(ended.contains("\nhelp: "), "{text}: {ended}");
    }
    // Every other number is compared with the range, with the message.
    let ended = world.refuses(&with(&BOOTSTRAP, &["--interface", "eth0,mtu=70000"]));
    assert!(ended.contains("network.interfaces[0].mtu is 70000; allowed is a number"), "{ended}");
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

#[test]
fn a_damaged_file_is_refused_with_the_reason() {
    let world = world();
    std::fs::write(world.path("p.pb"), [0x0a, 0x20, 1]).unwrap();
    insta::assert_snapshot!(world.refuses(&["parameters", "check", "@p.pb"]), @r"
    error: @p.pb: invalid parameters
    cause: the node parameters are cut short: field cluster_bootstrap says 32 bytes, fewer follow; allowed is a whole message NodeParameters
    help: write the file again with `polisctl parameters bootstrap` or `polisctl parameters register`
    ");
    std::fs::write(world.path("p.pb"), vec![0; 70_000]).unwrap();
    insta::assert_snapshot!(world.refuses(&["parameters", "check", "@p.pb"]), @r"
    error: @p.pb: invalid parameters
    cause: the node parameters are too large; allowed are 65536 bytes
    help: name a file that `polisctl parameters bootstrap` or `polisctl parameters register` wrote
    ");
    let ended = world.refuses(&["parameters", "check", "@absent"]);
    assert!(ended.contains("cannot read"), "{ended}");
}

#[test]
fn each_format_is_written_and_read_again() {
    use std::os::unix::fs::MetadataExt as _;
    let world = world();
    world.runs(&BOOTSTRAP);
    let message = std::fs::read(world.path("p.pb")).unwrap();
    let write = |format: &str, file: &str| {
        let options = ["parameters", "bootstrap", "--owner-key", "@owner", "--format", format];
        world.runs(&with(&options, &["-o", file]))
    };
    let check = |file: &str| world.runs(&["parameters", "check", file]);
    insta::assert_snapshot!(write("message", "@p"), @"38 bytes in @p (message)");
    assert_eq!(std::fs::read(world.path("p")).unwrap(), message);
    insta::assert_snapshot!(write("text", "@p"), @"73 bytes in @p (text)");
    insta::assert_snapshot!(check("@p"), @"@p: valid parameters (text), to bootstrap a new cluster");
    let text = std::fs::read_to_string(world.path("p")).unwrap();
    assert_eq!(text, polis_wire::parameters::text(&message) + "\n");
    insta::assert_snapshot!(write("disk", "@p"), @"1048576 bytes in @p (disk)");
    insta::assert_snapshot!(check("@p"), @"@p: valid parameters (disk, user-data), to bootstrap a new cluster");
    assert_eq!(std::fs::metadata(world.path("p")).unwrap().mode() & 0o777, 0o600);
    let shown = world.runs(&["parameters", "show", "@p"]);
    assert!(shown.starts_with("format        disk, user-data\n"), "{shown}");
    let shown = world.runs(&["parameters", "check", "@p", "--output", "json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["format"], &shown["valid"]), (&"disk".into(), &true.into()));
    assert_eq!(write("text", "-"), text);
}

#[test]
fn parameters_that_are_too_large_as_text_are_refused_with_both_sizes() {
    let world = world();
    let nodes: Vec<String> = (1..=64)
        .map(|number| {
            let name = format!("{}.example", "a".repeat(60));
            format!("polis-{number:032x}={}", vec![name; 16].join(","))
        })
        .collect();
    std::fs::write(world.path("ca.pem"), polis_wire::pki::certificate_pem(&ca())).unwrap();
    let mut register = vec!["parameters", "register", "--ticket", "5e", "--ca", "@ca.pem"];
    register.extend(nodes.iter().flat_map(|node| ["--node", node]));
    let refused = world.refuses(&with(&register, &["-o", "@p", "--format", "text"]));
    assert!(refused.contains("bytes as text; allowed are 65536"), "{refused}");
    assert!(refused.contains("`--format message`"), "{refused}");
    assert!(!world.path("p").exists());
}

#[test]
fn text_that_is_too_large_for_ec2_is_written_with_a_warning() {
    let world = world();
    std::fs::write(world.path("ca.pem"), polis_wire::pki::certificate_pem(&ca())).unwrap();
    let write = |nodes: usize, format: &str, output: &str| {
        let address = format!("{}.example", "a".repeat(57));
        let nodes: Vec<String> = (0..nodes)
            .map(|number| format!("polis-{number:032x}={}", [&*address; 4].join(",")))
            .collect();
        let mut register = vec!["parameters", "register", "--ticket", "5e", "--ca", "@ca.pem"];
        register.extend(nodes.iter().flat_map(|node| ["--node", node]));
        world.runs(&with(&register, &["-o", "@p", "--format", format, "--output", output]))
    };
    let size = || std::fs::metadata(world.path("p")).unwrap().len();
    let warning = "it is too large for Amazon EC2, which takes 16384 bytes of user data";
    let written = write(64, "text", "table");
    assert!(size() > 16_384, "{}", size());
    assert!(written.contains(&format!("(text)\nwarning: {warning}")), "{written}");
    let written: serde_json::Value = serde_json::from_str(&write(64, "text", "json")).unwrap();
    assert_eq!(written["warning"], warning);
    assert!(!write(64, "message", "table").contains("warning"));
    assert!(!write(8, "text", "table").contains("warning"));
    assert!(size() < 16_384);
}

#[test]
fn a_wrong_file_of_each_format_is_refused_with_its_place_and_the_next_step() {
    let world = world();
    let refused = |file: &[u8]| {
        std::fs::write(world.path("p"), file).unwrap();
        world.refuses(&["parameters", "check", "@p"])
    };
    insta::assert_snapshot!(refused(b"polis-parameters-v1:%%"), @r"
    error: @p: invalid parameters
    cause: the node parameters are not base64 behind `polis-parameters-v1:`; allowed is the base64 (RFC 4648, with padding) of the file that polisctl writes
    help: `polisctl parameters bootstrap` and `polisctl parameters register` write the text with `--format text`
    ");
    let disk = |user_data: &[u8]| image::nocloud(user_data).unwrap();
    insta::assert_snapshot!(refused(&disk(b"polis-parameters-v1:%%")), @r"
    error: @p: invalid parameters
    cause: cannot use user-data on the disk
    cause: the node parameters are not base64 behind `polis-parameters-v1:`; allowed is the base64 (RFC 4648, with padding) of the file that polisctl writes
    help: `polisctl parameters bootstrap` and `polisctl parameters register` write the text with `--format text`
    ");
    insta::assert_snapshot!(refused(&disk(b"\x0a\x20\x01")), @r"
    error: @p: invalid parameters
    cause: cannot use user-data on the disk
    cause: the node parameters are cut short: field cluster_bootstrap says 32 bytes, fewer follow; allowed is a whole message NodeParameters
    help: write the file again with `polisctl parameters bootstrap` or `polisctl parameters register`
    ");
    insta::assert_snapshot!(refused(&disk(b"#cloud-config\n")), @r"
    error: @p: invalid parameters
    cause: user-data on the disk is for cloud-init, not node parameters
    help: `polisctl parameters bootstrap` and `polisctl parameters register` write a whole disk image with `--format disk`
    ");
    insta::assert_snapshot!(refused(&disk(b"")), @r"
    error: @p: invalid parameters
    cause: user-data on the disk is empty
    help: `polisctl parameters bootstrap` and `polisctl parameters register` write a whole disk image with `--format disk`
    ");
    insta::assert_snapshot!(refused(&disk(&[7; 70_000])), @r"
    error: @p: invalid parameters
    cause: cannot use user-data on the disk
    cause: the node parameters are too large; allowed are 65536 bytes
    help: name a file that `polisctl parameters bootstrap` or `polisctl parameters register` wrote
    ");
    // The label of the other kind of disk, on which the file is elsewhere.
    let mut other = disk(b"");
    other[43..54].copy_from_slice(b"CONFIG-2   ");
    insta::assert_snapshot!(refused(&other), @r"
    error: @p: invalid parameters
    cause: the disk has no file openstack/latest/user_data
    help: `polisctl parameters bootstrap` and `polisctl parameters register` write a whole disk image with `--format disk`
    ");
    insta::assert_snapshot!(refused(&disk(b"")[..2048]), @r"
    error: @p: invalid parameters
    cause: cannot use user-data on the disk
    cause: the image is cut short
    help: `polisctl parameters bootstrap` and `polisctl parameters register` write a whole disk image with `--format disk`
    ");
    let mut iso = vec![0; 40_000];
    iso[32_768..32_775].copy_from_slice(b"\x01CD001\x01");
    iso[32_808..32_814].copy_from_slice(b"cidata");
    iso[32_814..32_840].fill(b' ');
    insta::assert_snapshot!(refused(&iso), @r"
    error: @p: invalid parameters
    cause: it is an ISO 9660 image; allowed are the message, its text, and a disk image with FAT
    help: mount the image, and check its file user-data
    ");
}

fn ca() -> Vec<u8> {
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, "cluster");
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    parameters.self_signed(&key).unwrap().der().to_vec()
}

#[test]
fn what_register_writes_says_whom_to_ask_and_hides_the_ticket() {
    let world = world();
    std::fs::write(world.path("ca.pem"), polis_wire::pki::certificate_pem(&ca())).unwrap();
    let node = format!("{NODE}=192.0.2.1,node.example:17835");
    let register = [
        "parameters",
        "register",
        "--ticket",
        "5ec2e7",
        "--ca",
        "@ca.pem",
        "--node",
        &node,
        "-o",
        "@p.pb",
    ];
    world.runs(&register);
    let shown = world.runs(&["parameters", "show", "@p.pb", "--output", "json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let register = &shown["cluster_register"];
    assert_eq!(register["nodes"][0]["id"], NODE);
    assert_eq!(register["nodes"][0]["addresses"][1], "node.example:17835");
    assert_eq!(register["register_ticket_bytes"], 3);
    assert_eq!(register["ca_fingerprint"].as_str().unwrap().len(), 64);
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!(std::fs::metadata(world.path("p.pb")).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn without_a_context_a_registration_names_the_options_that_need_none() {
    let world = world();
    let node = format!("{NODE}=192.0.2.1");
    for given in [&[][..], &["--ticket", "5ec2e7", "--node", &*node]] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(
                world.refuses(&[&["parameters", "register", "-o", "@p.pb"], given].concat()),
                @r"
            error: no context is in use
            help: name --ticket, --ca and --node; or take ownership of a cluster: `polisctl --endpoint HOST cluster take-ownership`; or pick a context: `polisctl context use NAME`
            ");
        }
    }
    assert!(!world.path("p.pb").exists());
}

#[test]
fn a_ticket_that_is_no_ticket_is_refused() {
    let world = world();
    std::fs::write(world.path("ca.pem"), polis_wire::pki::certificate_pem(&ca())).unwrap();
    let node = format!("{NODE}=192.0.2.1");
    let register = |ticket: &str| {
        world.run(&[
            "parameters",
            "register",
            "--ticket",
            ticket,
            "--ca",
            "@ca.pem",
            "--node",
            &node,
            "-o",
            "@p.pb",
        ])
    };
    let ended = register("secret");
    assert_eq!((ended.status, &*ended.stdout), (2, ""));
    insta::assert_snapshot!(ended.stderr, @r"
    error: the ticket is not hexadecimal, two digits a byte
    help: `polisctl cluster ticket` prints the ticket
    ");
    let noise = world.path("noise");
    std::fs::write(&noise, [0xff; 9]).unwrap();
    let error = super::ticket(&format!("@{}", noise.display())).unwrap_err().render();
    assert!(error.starts_with("error: the ticket is not hexadecimal"), "{error}");
    let ended = register("");
    assert_eq!((ended.status, &*ended.stdout), (1, ""));
    insta::assert_snapshot!(ended.stderr, @r"
    error: cluster_register.register_ticket is empty; allowed is a ticket of 1 to 1024 bytes
    help: docs/parameters.md lists every field and its values
    ");
}
