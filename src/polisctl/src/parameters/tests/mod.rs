//! Tests of the commands that write, show and check node parameters.

mod bootstrap;
mod formats;
mod refusals;
mod register;

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

fn ca() -> Vec<u8> {
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, "cluster");
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    parameters.self_signed(&key).unwrap().der().to_vec()
}
