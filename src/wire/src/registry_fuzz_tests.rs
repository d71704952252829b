//! Fuzz target of the registries that an owner names.

use polis_fuzz::{Accepted, Target};
use polis_proto::v1;
use prost::Message as _;

use super::Registry;

#[test]
fn registries() {
    let named = v1::Registry {
        host: "registry.example:5000".to_owned(),
        mirrors: vec!["mirror.example/path".to_owned(), "10.0.0.7:5000".to_owned()],
        username: "ann".to_owned(),
        password: "secret".to_owned(),
        ..Default::default()
    };
    let every = v1::Registry {
        host: super::EVERY.to_owned(),
        mirrors: vec!["mirror.example".to_owned()],
        ..Default::default()
    };
    let samples = [named, every].map(|message| message.encode_to_vec());
    Target::new("wire.registry").samples(samples).run(|input| {
        let Ok(message) = v1::Registry::decode(input) else { return Accepted::No };
        let Ok(registry) = Registry::read(&message) else { return Accepted::No };
        assert!(Registry::read(&registry.to_message()).is_ok_and(|again| again == registry));
        Accepted::Yes
    });
}
