//! Machines on one segment become one cluster, come back as one, open each other's
//! disks, and let one of them go.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis::identity::NodeKey;
use polis::rpc::Credentials;
use polis::rpc::client::{Candidate, Client, Patience, Repeat};
use polis_proto::v1;
use polis_proto::v1::aaa_client::AaaClient;
use polis_proto::v1::cluster_configuration::{ColdStart, StorageSecurityPolicy};
use polis_proto::v1::management_client::ManagementClient;
use polis_proto::v1::node_parameters::Cluster;
use polis_proto::v1::{ClusterBootstrap, ClusterConfiguration, NodeParameters};
use polis_qemu::args::{Disk, FwCfg, Link};
use polis_qemu::disk::copy;
use polis_qemu::{Config, Machine, Segment};
use prost::Message as _;

use crate::world::{self, BOOT, SOON, World};

/// The private half of [`world::OWNER`], from the same section of RFC 8032.
const OWNER: [u8; 32] = [
    0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec, 0x2c, 0xc4,
    0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60,
];

/// A founder on a segment, and its owner.
struct Site {
    world: World,
    segment: Segment,
    blank: Disk,
    configs: Vec<Config>,
    founder: world::Identity,
    operator: Operator,
    /// Nodes, and the ports of this host that lead to their curators: any may lead.
    ways: Vec<(String, u16)>,
    register: Vec<u8>,
    runtime: tokio::runtime::Runtime,
}

impl Site {
    /// Founds a cluster as `parameters` say. The founder is on.
    fn found(story: &str, machines: u8, parameters: &NodeParameters) -> Result<(Self, Machine)> {
        let world = World::new(story)?;
        let mut segment = Segment::start(machines, &world.path("network"))?;
        // Copied before the founder, whose disk is the same file, writes on it.
        let disk = world.disk(None)?;
        let blank = Disk { file: world.path("blank.img"), ..disk.clone() };
        copy(&disk.file, &blank.file)?;
        let config = Config {
            disk: Some(disk),
            fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
            link: Link::Segment(segment.plug(0)),
            ..world.bare("")
        };
        let mut first = world.boot(&config)?;
        let founder = world::home(&mut first)?;
        let (node, address) = at(&first)?;
        let host = polis_qemu::host::free_port()?;
        segment.forward(host, address, 7835)?;
        let runtime = tokio::runtime::Runtime::new()?;
        let operator = runtime.block_on(Operator::enter(&node, host, &first))?;
        let register = runtime.block_on(operator.register(&node, address))?;
        let (configs, ways) = (vec![config], vec![(node, host)]);
        let site =
            Self { world, segment, blank, configs, founder, operator, ways, register, runtime };
        Ok((site, first))
    }

    /// Lets one more machine in; it is ready, and has no role.
    fn let_in(&mut self) -> Result<Machine> {
        let number = u8::try_from(self.configs.len())?;
        let parameters = self.world.path(&format!("parameters-{number}.pb"));
        std::fs::write(&parameters, &self.register)?;
        let file = self.world.path(&format!("disk-{number}.img"));
        copy(&self.blank.file, &file)?;
        let config = Config {
            disk: Some(Disk { file, ..self.blank.clone() }),
            fw_cfg: vec![FwCfg { name: "opt/polis/parameters.pb".to_owned(), file: parameters }],
            link: Link::Segment(self.segment.plug(number)),
            ..self.world.bare("")
        };
        let mut machine = self.world.boot(&config)?;
        let foreign = machine.wait_for("cluster", BOOT, |event| event.is("state", "foreign"))?;
        let node = foreign.text("node").to_owned();
        let waits = machine.wait_for("stage", SOON, |event| {
            event.is("name", "cluster") && event.text("for").contains("fingerprint")
        })?;
        let text = waits.text("for");
        let words = text.split("fingerprint is ").nth(1).and_then(|rest| rest.split(';').next());
        let words = words.context("no fingerprint")?;
        self.runtime.block_on(self.operator.approve(&node, words))?;
        machine.wait_for("ready", BOOT, |_| true)?;
        self.configs.push(config);
        let (node, address) = at(&machine)?;
        let host = polis_qemu::host::free_port()?;
        self.segment.forward(host, address, 7835)?;
        self.ways.push((node, host));
        self.operator = self.operator.by(&self.ways)?;
        Ok(machine)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _removed = std::fs::remove_file(&self.blank.file);
    }
}

#[test]
fn three_machines_from_nothing_become_three_voters_and_come_back_after_a_cold_start() -> Result<()>
{
    let (mut site, first) = Site::found("three_machines_from_nothing", 3, &world::bootstrap())?;
    let mut machines = vec![first];
    for members in ["2", "3"] {
        let mut machine = site.let_in()?;
        let (node, _) = at(&machine)?;
        site.runtime.block_on(site.operator.enlist(&node))?;
        machine.wait_for("etcd", BOOT, |event| {
            event.is("state", "voter") && event.is("members", members)
        })?;
        machines.push(machine);
    }

    // All off, all on: nobody leads before they have found each other.
    drop(machines);
    let machines = site.configs.iter().map(|config| site.world.boot(config));
    let mut machines = machines.collect::<Result<Vec<Machine>>>()?;
    for machine in &mut machines {
        let ready = machine.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("ca", &site.founder.ca), "another cluster: {ready}");
        let etcd = machine.seen(|event| event.word == "etcd");
        let etcd = etcd.last().context("no etcd")?;
        ensure!(etcd.is("state", "voter") && etcd.is("members", "3"), "no vote: {etcd}");
    }

    let mut leaver = machines.pop().context("no machine")?;
    let (node, _) = at(&leaver)?;
    site.runtime.block_on(site.operator.retire(&node))?;
    leaver.wait("the end of a member of etcd", SOON, |line| {
        line.text.contains("nothing of the member of etcd is left").then_some(())
    })?;
    for machine in &mut machines {
        machine.wait_for("etcd", SOON, |event| event.is("members", "2"))?;
    }
    site.runtime.block_on(site.operator.decommission(&node))?;
    leaver.wait_for("cluster", SOON, |event| event.is("state", "disowning"))?;
    world::guru(&mut leaver, "0711")?;
    // It knows what it was, and that it is not any more.
    drop(leaver);
    let mut leaver = site.world.boot(site.configs.last().context("no configuration")?)?;
    leaver.wait_for("cluster", BOOT, |event| event.is("state", "disowning"))?;
    world::guru(&mut leaver, "0711")?;
    Ok(())
}

#[test]
fn an_encrypted_disk_is_opened_by_the_cluster_and_by_it_alone_until_the_node_is_deleted()
-> Result<()> {
    let configuration = ClusterConfiguration {
        storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
        cold_start: ColdStart::Attended.into(),
        ..ClusterConfiguration::default()
    };
    let parameters = world::with_cluster(ClusterBootstrap {
        owner_public_key: world::OWNER.to_vec(),
        cluster_configuration: Some(configuration),
        ..ClusterBootstrap::default()
    });
    let (mut site, _founder) = Site::found("opened_by_the_cluster", 2, &parameters)?;
    let machine = site.let_in()?;
    let (node, _) = at(&machine)?;
    drop(machine);

    // No keeper of the machine has a share: only a curator can give it.
    let config = site.configs.last().context("no configuration")?;
    let mut machine = site.world.boot(config)?;
    machine.wait("a question for the key", BOOT, |line| {
        line.text.contains("asking the cluster for its half").then_some(())
    })?;
    let ready = machine.wait_for("ready", BOOT, |_| true)?;
    ensure!(ready.is("node", &node), "another node: {ready}");

    // Whoever is deleted while it is off is told so, and its disk stays shut.
    drop(machine);
    site.runtime.block_on(site.operator.delete(&node))?;
    let mut machine = site.world.boot(config)?;
    world::guru(&mut machine, "0711")?;
    Ok(())
}

/// Which node a machine is, and where.
fn at(machine: &Machine) -> Result<(String, Ipv4Addr)> {
    let ready = machine.seen(|event| event.word == "ready");
    let ready = ready.last().context("no ready")?;
    Ok((ready.text("node").to_owned(), ready.text("address").parse()?))
}

/// The owner, with a certificate.
struct Operator {
    client: Client,
    credentials: Credentials,
}

/// A cluster may elect somebody, or two, before it answers.
const PATIENCE: Patience =
    Patience { attempt: Duration::from_secs(30), total: Duration::from_secs(120) };

impl Operator {
    async fn enter(node: &str, port: u16, machine: &Machine) -> Result<Self> {
        let ready = machine.seen(|event| event.word == "ready");
        let ca = ready.last().context("no ready")?.text("ca").to_owned();
        let candidate = Candidate { node: Some(node.parse()?), host: "127.0.0.1".to_owned(), port };
        let trust = polis::rpc::client::Trust::Unchecked;
        let expect = polis::rpc::client::Expect::AnyNode;
        let connection = polis::rpc::client::dial("127.0.0.1", port, expect, &trust, None).await?;
        let mut local = v1::curator_local_client::CuratorLocalClient::new(connection.channel);
        let told = local.get_ca_certificate(v1::GetCaCertificateRequest {}).await?.into_inner();
        let authority = told.ca_certificate;
        let found = polis::identity::Fingerprint::of_certificate(&authority).to_string();
        ensure!(found == ca, "another CA than the serial line names: {found}");
        let key = NodeKey::from_seed(&OWNER);
        let credentials = |certificate| -> Result<Credentials> {
            let key = Arc::new(key.to_pkcs8_der()?);
            Ok(Credentials { certificate, key, authority: Some(authority.clone()) })
        };
        let proof = credentials(key.proof()?)?;
        let escrow = Client::fixed(vec![candidate.clone()], proof, PATIENCE)
            .call(Repeat::Allowed, |channel| async move {
                Ok(AaaClient::new(channel).escrow(v1::EscrowRequest {}).await?.into_inner())
            })
            .await?;
        let credentials = credentials(escrow.certificate)?;
        let client = Client::fixed(vec![candidate], credentials.clone(), PATIENCE);
        Ok(Self { client, credentials })
    }

    /// The same, by other ways: nodes, and the ports of this host that lead to them.
    fn by(&self, ways: &[(String, u16)]) -> Result<Self> {
        let candidates = ways.iter().map(|(node, port)| {
            let host = "127.0.0.1".to_owned();
            Ok(Candidate { node: Some(node.parse()?), host, port: *port })
        });
        let credentials = self.credentials.clone();
        let candidates = candidates.collect::<Result<_>>()?;
        let client = Client::fixed(candidates, credentials.clone(), PATIENCE);
        Ok(Self { client, credentials })
    }

    /// Parameters for a machine that is to be let in.
    async fn register(&self, node: &str, address: Ipv4Addr) -> Result<Vec<u8>> {
        let (ticket, info) = self
            .client
            .call(Repeat::Allowed, |channel| async move {
                let mut management = ManagementClient::new(channel);
                let ticket =
                    management.get_register_ticket(v1::GetRegisterTicketRequest::default()).await?;
                let info = management.get_cluster_info(v1::GetClusterInfoRequest {}).await?;
                Ok((ticket.into_inner(), info.into_inner()))
            })
            .await?;
        let entry = v1::cluster_directory::Node {
            id: node.to_owned(),
            addresses: vec![address.to_string()],
        };
        let register = v1::ClusterRegister {
            cluster_directory: Some(v1::ClusterDirectory { nodes: vec![entry] }),
            register_ticket: ticket.ticket,
            ca_certificate: info.ca_certificate,
            labels: Default::default(),
        };
        let cluster = Some(Cluster::ClusterRegister(register));
        Ok(v1::NodeParameters { cluster, ..Default::default() }.encode_to_vec())
    }

    async fn approve(&self, node: &str, fingerprint: &str) -> Result<()> {
        let request = v1::ApproveNodeRequest {
            node_id: node.to_owned(),
            fingerprint: fingerprint.to_owned(),
        };
        self.client
            .call(Repeat::Allowed, |channel| {
                let request = request.clone();
                async move { ManagementClient::new(channel).approve_node(request).await }
            })
            .await?;
        Ok(())
    }

    async fn enlist(&self, node: &str) -> Result<()> {
        self.change_roles(node, true).await
    }

    async fn retire(&self, node: &str) -> Result<()> {
        self.change_roles(node, false).await
    }

    async fn decommission(&self, node: &str) -> Result<()> {
        let request = v1::DecommissionNodeRequest { node_id: node.to_owned() };
        self.client
            .call(Repeat::Allowed, |channel| {
                let request = request.clone();
                async move { ManagementClient::new(channel).decommission_node(request).await }
            })
            .await?;
        Ok(())
    }

    async fn delete(&self, node: &str) -> Result<()> {
        let request = v1::DeleteNodeRequest { node_id: node.to_owned(), force: true };
        self.client
            .call(Repeat::Allowed, |channel| {
                let request = request.clone();
                async move { ManagementClient::new(channel).delete_node(request).await }
            })
            .await?;
        Ok(())
    }

    /// Gives the role of a member of etcd, or takes it.
    async fn change_roles(&self, node: &str, give: bool) -> Result<()> {
        let role = v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        };
        let request = v1::UpdateNodeRolesRequest {
            node_id: node.to_owned(),
            add: give.then_some(role),
            remove: (!give).then_some(role),
        };
        self.client
            .call(Repeat::Allowed, |channel| {
                let request = request.clone();
                async move { ManagementClient::new(channel).update_node_roles(request).await }
            })
            .await?;
        Ok(())
    }
}
