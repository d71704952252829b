//! Machines that get their parameters from the metadata service of a cloud, or do not ask one.
//!
//! The other sources of parameters are in `first_boot` and `guru`.

use anyhow::{Result, ensure};
use polis_proto::v1::{ClusterBootstrap, NetworkConfiguration, NodeParameters};
use polis_qemu::Config;
use polis_tests::{Story, story};
use prost::Message as _;

use crate::metadata::Ec2;
use crate::world::{OWNER, World, bootstrap, guru, home, says, text, with_cluster};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(user_data_of_ec2_founds_a_cluster_and_a_node_with_a_home_asks_no_more).takes(70),
    story!(user_data_of_ec2_that_cannot_be_used_is_refused_by_its_field).takes(30),
    story!(a_machine_outside_of_a_known_cloud_asks_no_metadata_service).takes(30),
];

/// The requests of one question, in order.
const QUESTION: [&str; 2] =
    ["PUT /latest/api/token HTTP/1.1, without", "GET /latest/user-data HTTP/1.1, with a token"];

fn user_data_of_ec2_founds_a_cluster_and_a_node_with_a_home_asks_no_more() -> Result<()> {
    let world = World::new("sources-ec2")?;
    let network = NetworkConfiguration {
        nameservers: vec!["192.0.2.53".to_owned()],
        ..NetworkConfiguration::default()
    };
    let parameters = NodeParameters { network: Some(network), ..bootstrap() };
    let user_data = text(&parameters.encode_to_vec());
    let service = Ec2::start(&world.path("imds"), user_data.into_bytes())?;
    let config = instance(&world, &service)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    says(&machine, "node parameters from the metadata service of Amazon EC2")?;
    ensure!(service.requests() == QUESTION, "{:?}", service.requests());
    machine.kill();

    let mut machine = world.boot(&config)?;
    let again = home(&mut machine)?;
    ensure!(again == founded, "another node: {again:?}, {founded:?}");
    says(&machine, "node parameters from the copy on the ESP")?;
    ensure!(service.requests() == QUESTION, "it asked again: {:?}", service.requests());
    Ok(())
}

fn user_data_of_ec2_that_cannot_be_used_is_refused_by_its_field() -> Result<()> {
    let world = World::new("sources-wrong")?;
    let short =
        ClusterBootstrap { owner_public_key: OWNER[..31].to_vec(), ..ClusterBootstrap::default() };
    let user_data = text(&with_cluster(short).encode_to_vec());
    let service = Ec2::start(&world.path("imds"), user_data.into_bytes())?;
    let mut machine = world.boot(&instance(&world, &service)?)?;
    let guru = guru(&mut machine, "0609")?;
    for word in ["owner_public_key", "31", "32"] {
        ensure!(guru.text("cause").contains(word), "{word} is not in the cause: {guru}");
    }
    ensure!(guru.text("next").contains("user data of Amazon EC2"), "no place: {guru}");
    ensure!(service.requests() == QUESTION, "{:?}", service.requests());
    Ok(())
}

fn a_machine_outside_of_a_known_cloud_asks_no_metadata_service() -> Result<()> {
    let world = World::new("sources-unknown")?;
    let user_data = text(&bootstrap().encode_to_vec());
    let service = Ec2::start(&world.path("imds"), user_data.into_bytes())?;
    let config = Config {
        smbios: vec!["type=1,manufacturer=Amazon,product=EC2".to_owned()],
        ..instance(&world, &service)?
    };
    let mut machine = world.boot(&config)?;
    guru(&mut machine, "0601")?;
    says(&machine, "not asked, as the firmware names no cloud")?;
    ensure!(service.requests().is_empty(), "{:?}", service.requests());
    Ok(())
}

/// A machine without parameters of its own, in EC2.
fn instance(world: &World, service: &Ec2) -> Result<Config> {
    Ok(Config {
        disk: Some(world.disk(None)?),
        smbios: Ec2::smbios(),
        metadata: service.command()?,
        ..world.bare("")
    })
}
