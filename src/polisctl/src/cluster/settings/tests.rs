//! Tests of complete command lines: what is exported, applied and refused.

use std::os::unix::fs::PermissionsExt as _;

use polis_wire::identity::Fingerprint;

use super::{AGAIN, mended};
use crate::error::Error;
use crate::kernel::tests::kernel as image;
use crate::loopback::{Cluster, Takes};
use crate::testing::World;

/// What no output may have.
const MARKER: &str = "s3cr3t-of-the-cluster";

const APPLY: [&str; 3] = ["cluster", "apply", "@settings"];

fn certificate() -> String {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
}

/// Writes the file of settings.
fn write(world: &World, text: &str) {
    std::fs::write(world.path("settings"), text).unwrap();
}

/// The same with the field that says what it is.
fn write_settings(world: &World, text: &str) {
    write(world, &format!("format: polis-settings-v1\n{text}"));
}

/// A cluster with a value for every setting, and the secrets of its owner.
fn configured(world: &World) -> Cluster {
    let cluster = Cluster::new(world);
    let secret = |name: &str, text: String| {
        std::fs::write(world.path(name), text).unwrap();
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(world.path(name), mode).unwrap();
    };
    secret("key", format!("AKIATEST\n{MARKER}\n"));
    secret("password", format!("{MARKER}\n"));
    std::fs::write(world.path("ca.pem"), certificate()).unwrap();
    std::fs::write(world.path("a.efi"), image(b"a kernel")).unwrap();
    std::fs::write(world.path("maker.der"), cluster.authority()).unwrap();
    let target = format!("otlp+https://logs.example,ca={}", world.path("ca.pem").display());
    let bucket = "s3+https://s3.example/bucket,region=eu-central-1";
    for options in [
        &["--tpm", "required", "--storage", "encrypted", "--cold-start", "attended"][..],
        &["--time-server", "ntp.example,nts", "--kubernetes-name", "api.example"],
        &["--log-target", target.as_str()],
        &["--snapshot-target", bucket, "--snapshot-credentials", "@key"],
        &["--attestation-image", "@a.efi", "--attestation-maker", "@maker.der"],
        &["--proxy", "http://proxy.example:3128", "--no-proxy", "near.example"],
        &["--firewall-source", "192.0.2.0/24", "--firewall-port", "tcp/443"],
    ] {
        world.runs(&[&["cluster", "configure"][..], options].concat());
    }
    let set = ["cluster", "registry", "set", "registry.example:5000", "--ca", "@ca.pem"];
    let user = ["--username", "ann", "--password-file", "@password"];
    world.runs(&[&set[..], &["--mirror", "mirror.example/hub"], &user].concat());
    cluster.asked();
    cluster
}

#[test]
fn what_is_exported_and_applied_again_differs_in_nothing_and_has_no_secret() {
    let world = World::new();
    let cluster = configured(&world);
    let said = world.runs(&["cluster", "export", "-o", "@settings"]);
    assert!(said.contains("@settings"), "{said}");
    let yaml = std::fs::read_to_string(world.path("settings")).unwrap();
    assert_eq!(world.runs(&["cluster", "export"]), yaml);
    for line in [
        "format: polis-settings-v1",
        "cluster_domain: cluster.internal",
        "pod_network: 10.192.0.0/11",
        "service_network: 10.224.0.0/16",
        "tpm_mode: required",
        "storage_security_policy: encrypted",
        "cold_start: attended",
        "ntp.example,nts",
        "otlp+https://logs.example:4318/v1/logs",
        "api.example",
        "region: eu-central-1",
        "credentials: unchanged",
        "a.efi",
        "http://proxy.example:3128",
        "near.example",
        "192.0.2.0/24",
        "tcp/443",
        "mirror.example/hub",
        "username: ann",
        "password: unchanged",
        "-----BEGIN CERTIFICATE-----",
    ] {
        assert!(yaml.contains(line), "{line}: {yaml}");
    }
    let json = world.runs(&["cluster", "export", "--output", "json"]);
    for text in [yaml, json] {
        assert!(!text.contains(MARKER) && !text.contains("AKIATEST"), "{text}");
        write(&world, &text);
        for option in ["--yes", "--dry-run"] {
            let printed = world.runs(&[&APPLY[..], &[option]].concat());
            assert!(printed.starts_with("Nothing differs"), "{printed}");
        }
    }
    let asked = world.run(&[&APPLY[..], &["--output", "json"]].concat());
    assert_eq!(asked.status, 0, "without a difference there is no question: {}", asked.stderr);
    let value: serde_json::Value = serde_json::from_str(&asked.stdout).unwrap();
    assert_eq!(value["changes"], serde_json::json!([]));
    assert_eq!(cluster.asked(), [""; 0]);
}

#[test]
fn what_differs_is_shown_and_that_alone_is_sent_after_a_question() {
    let world = World::new();
    let cluster = configured(&world);
    write_settings(
        &world,
        "tpm_mode: disabled\n\
         kubernetes_names: [API.example]\n\
         snapshot_target: null\n\
         attestation_policy: null\n\
         proxy: http://other.example:3128\n\
         no_proxy: [far.example]\n\
         registries:\n\
         - host: a.example\n  \
           mirrors: [b.example]\n",
    );
    let open = world.refuses(&APPLY);
    assert!(open.contains("confirm with --yes"), "{open}");
    let dry = world.runs(&[&APPLY[..], &["--dry-run"]].concat());
    for line in [
        "tpm_mode: required -> disabled\n",
        "snapshot_target: (credentials unchanged, region eu-central-1, url s3+https://s3.example",
        "proxy: http://proxy.example:3128 -> http://other.example:3128\n",
        "no_proxy: near.example -> far.example\n",
        "registries[a.example]: none -> (host a.example, mirrors b.example)\n",
        "registries[registry.example:5000]: (ca certificate ",
        "password unchanged, username ann) -> none\n",
        "this was a dry run",
    ] {
        assert!(dry.contains(line), "{line}: {dry}");
    }
    for word in ["kubernetes_names", "time_servers", "firewall", MARKER] {
        assert!(!dry.contains(word), "{word}: {dry}");
    }
    let asked = world.asks(&APPLY, "no\n");
    assert_eq!((asked.status, &*asked.stdout), (1, ""));
    assert!(asked.stderr.contains("tpm_mode: required -> disabled"), "{}", asked.stderr);
    let words = Fingerprint::of_certificate(&cluster.authority()).words();
    let cluster_of = format!("the cluster of context home (CA {words})");
    assert!(asked.stderr.contains(&cluster_of), "{cluster_of}: {}", asked.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
    let asked = world.asks(&APPLY, "yes\n");
    assert_eq!(asked.status, 0, "{}", asked.stderr);
    assert!(asked.stdout.contains("tpm_mode: required -> disabled\n"), "{}", asked.stdout);
    let calls =
        ["ConfigureCluster", "DeleteRegistry registry.example:5000", "SetRegistry a.example"];
    assert_eq!(cluster.asked(), calls);
    let again = world.runs(&[&APPLY[..], &["--yes"]].concat());
    assert!(again.starts_with("Nothing differs"), "{again}");
    let now = world.runs(&["cluster", "export"]);
    for kept in ["cold_start: attended", "ntp.example,nts", "logs.example", "192.0.2.0/24"] {
        assert!(now.contains(kept), "{kept}: {now}");
    }
}

#[test]
fn a_setting_that_the_leader_does_not_take_is_named() {
    let world = World::new();
    let cluster = configured(&world);
    cluster.takes(Takes::AllButTheProxy);
    write_settings(&world, "cold_start: automatic\nproxy: http://other.example:3128\n");
    let refused = world.refuses(&[&APPLY[..], &["--yes"]].concat());
    let left = "not taken these settings: proxy: http://proxy.example:3128 -> http://other.example";
    assert!(refused.contains(left), "{refused}");
    assert!(refused.contains("help: a leader of an earlier version"), "{refused}");
    assert!(!refused.contains("cold_start"), "{refused}");
    assert_eq!(cluster.asked(), ["ConfigureCluster"]);
    cluster.takes(Takes::All);
    world.runs(&[&APPLY[..], &["--yes"]].concat());
}

#[test]
fn a_refusal_leads_to_the_file_and_a_call_without_an_answer_to_the_same_command() {
    let world = World::new();
    let cluster = configured(&world);
    cluster.takes(Takes::Nothing);
    write_settings(&world, "proxy: http://other.example:3128\n");
    let refused = world.refuses(&[&APPLY[..], &["--yes"]].concat());
    assert!(refused.contains("cause: this proxy is not allowed"), "{refused}");
    assert!(refused.contains("help: change in the file what the cause names"), "{refused}");
    assert!(!refused.contains(AGAIN), "{refused}");
    let own = mended(Error::new("x").or_help("ask an owner")).render();
    assert_eq!(own, "error: x\nhelp: ask an owner\n");
    let late = mended(Error::timed_out("x").or_help("wait")).render();
    assert_eq!(late, format!("error: x\nhelp: {AGAIN}; or wait\n"));
}

#[test]
fn a_firewall_of_a_file_is_confirmed_through_it_and_the_ports_stay() {
    let world = World::new();
    let cluster = configured(&world);
    write_settings(&world, "firewall_sources: [198.51.100.0/24]\n");
    let printed = world.runs(&[&APPLY[..], &["--yes"]].concat());
    let line = "firewall_sources: 192.0.2.0/24 -> 198.51.100.0/24\n";
    assert!(printed.starts_with(line), "{printed}");
    assert_eq!(cluster.asked(), ["ConfigureCluster", "GetFirewall", "ConfirmFirewall"]);
    let now = world.runs(&["cluster", "export"]);
    assert!(now.contains("198.51.100.0/24") && now.contains("tcp/443"), "{now}");
    write_settings(&world, "firewall_sources: []\n");
    let printed = world.runs(&[&APPLY[..], &["--dry-run"]].concat());
    assert!(printed.starts_with("firewall_sources: 198.51.100.0/24 -> none\n"), "{printed}");
}

#[test]
fn a_proxy_that_is_taken_away_takes_what_is_reached_without_it() {
    let world = World::new();
    let _cluster = configured(&world);
    write_settings(&world, "proxy: null\n");
    let printed = world.runs(&[&APPLY[..], &["--dry-run"]].concat());
    let lines = "proxy: http://proxy.example:3128 -> none\nno_proxy: near.example -> none\n";
    assert!(printed.starts_with(lines), "{printed}");
}

#[test]
fn a_file_that_is_wrong_is_refused_by_its_place_before_anything_is_sent() {
    let world = World::new();
    let cluster = configured(&world);
    let secret = format!("registries:\n- host: a.example\n  username: ann\n  password: {MARKER}\n");
    let key = format!("snapshot_target:\n  url: s3+https://a/bucket\n  credentials: {MARKER}\n");
    let unknown = format!("snapshot_target:\n  secret_access_key: {MARKER}\n");
    let start = "attestation_policy:\n  images: [{name: a, register_11: '00'}]\n";
    let digits = "attestation_policy:\n  images: [{name: a, register_11: 0z}]\n";
    let open = "registries:\n- host: a.example\n  mirrors: ['http://b.example']\n";
    let user = "registries:\n- host: a.example\n  username: ann\n";
    let hosts = (0..33).map(|number| format!("- host: a{number}.example\n")).collect::<String>();
    let many = format!("registries:\n{hosts}");
    for (text, said) in [
        ("tpm: required\n", "unknown field `tpm`"),
        ("tpm: required\n", "line 2"),
        (&*unknown, "unknown field `secret_access_key`"),
        ("tpm_mode: required\ntpm_mode: disabled\n", "duplicate"),
        ("tpm_mode: perhaps\n", "tpm_mode is \"perhaps\"; allowed is one of required, "),
        ("storage_security_policy: none\n", "storage_security_policy is \"none\"; allowed is one"),
        ("cold_start: warm\n", "allowed is one of automatic, attended"),
        ("time_servers: [a b]\n", "time_servers[0]"),
        ("log_targets:\n- url: logs.example\n", "log_targets[0].url"),
        ("kubernetes_names: ['*.example']\n", "kubernetes_names[0]"),
        ("snapshot_target:\n  url: s3.example/bucket\n", "snapshot_target.url"),
        (digits, "attestation_policy.images[0].register_11"),
        (start, "attestation_policy.images[0].register_11"),
        ("attestation_policy:\n  makers: [noise]\n", "attestation_policy.makers[0]"),
        ("proxy: https://proxy.example:3128\n", "proxy is "),
        ("no_proxy: ['*.example']\n", "no_proxy[0]"),
        ("proxy: null\nno_proxy: [a.example]\n", "proxy is empty; allowed is the URL of a proxy, "),
        ("proxy: null\nno_proxy: [a.example]\n", "or an empty `no_proxy`"),
        ("firewall_sources: [10.0.0.1/8]\n", "firewall_sources[0]"),
        ("firewall_ports: [tcp/7839]\n", "firewall_ports[0]"),
        ("firewall_sources:\n# - 10.0.0.0/8\n", "allowed is `[]` for an empty one"),
        ("registries: null\n", "allowed is `[]` for an empty one"),
        (&*many, "registries is 33 entries; allowed is at most 32"),
        (open, "registries[0].mirrors"),
        ("registries:\n- host: a.example\n- host: a.example\n", "each host once"),
        (&*secret, "allowed is `unchanged`"),
        (&*key, "allowed is `unchanged`"),
        // What no file can set.
        ("cluster_domain: other.internal\n", "allowed is cluster.internal"),
        ("cluster_domain: other.internal\n", "cannot change"),
        ("pod_network: 172.16.0.0/13\n", "pod_network is 172.16.0.0/13; allowed is 10.192.0.0/11"),
        ("service_network: 192.168.0.0/24\n", "leave service_network out"),
        ("pod_network: 10.0.0.1/16\n", "pod_network is \"10.0.0.1/16\"; allowed is an IPv4"),
        ("snapshot_target:\n  url: s3+https://s3.example/other\n", "--snapshot-credentials FILE"),
        (user, "`polisctl cluster registry set a.example`"),
    ] {
        write_settings(&world, text);
        for option in ["--yes", "--dry-run"] {
            let printed = world.refuses(&[&APPLY[..], &[option]].concat());
            assert!(printed.contains(said), "{text}{said}: {printed}");
            assert!(!printed.contains(MARKER), "{printed}");
        }
    }
    for (text, said) in [
        ("tpm_mode: required\n", "the field `format` is missing"),
        ("format: polis-settings-v2\nsomething: new\n", "allowed is polis-settings-v1"),
        ("", "the field `format` is missing"),
        ("- a list\n", "as a file of settings"),
        ("{\"format\": \"polis-settings-v1\", \"tpm\": 1}", "unknown field `tpm`"),
    ] {
        write(&world, text);
        let printed = world.refuses(&[&APPLY[..], &["--yes"]].concat());
        assert!(printed.contains(said), "{text}{said}: {printed}");
    }
    assert_eq!(cluster.asked(), [""; 0]);
}
