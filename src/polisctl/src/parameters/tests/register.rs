//! What `parameters register` writes, and the tickets that it refuses.

use super::{NODE, ca, world};

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
    let error = crate::parameters::ticket(&format!("@{}", noise.display())).unwrap_err().render();
    assert!(error.starts_with("error: the ticket is not hexadecimal"), "{error}");
    let ended = register("");
    assert_eq!((ended.status, &*ended.stdout), (1, ""));
    insta::assert_snapshot!(ended.stderr, @r"
    error: cluster_register.register_ticket is empty; allowed is a ticket of 1 to 1024 bytes
    help: docs/parameters.md lists every field and its values
    ");
}
