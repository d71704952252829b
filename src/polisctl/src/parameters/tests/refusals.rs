//! Fields and options that are refused, each with what is allowed.

use super::{BOOTSTRAP, with, world};

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
