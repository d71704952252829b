//! Parameters as a message, as text and as a disk: written, read again, and damaged.

use super::{BOOTSTRAP, ca, with, world};
use crate::parameters::image;

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
