//! Parameters that a machine must refuse: each ends in a guru meditation of its
//! own, in words, with a next step, on the screen, and never in a loop of reboots.

use anyhow::{Context as _, Result, ensure};
use polis_proto::v1::node_parameters::Cluster;
use polis_proto::v1::{
    ClusterBootstrap, ClusterDirectory, ClusterRegister, NodeParameters, cluster_directory,
};
use polis_qemu::deadline::Deadline;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::Flash;
use polis_qemu::line::{Line, fatal};
use polis_qemu::screen::{is_black, is_red};
use polis_qemu::{Config, Event, Machine};
use polis_tests::{Story, story};
use prost::Message as _;

use crate::config_drive;
use crate::world::{BOOT, OWNER, SOON, World, bootstrap, guru, with_cluster};

/// Attempts that end by themselves; the one after them holds.
const REBOOTS: usize = 3;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_machine_without_parameters_says_where_it_looked_and_fills_its_screen).takes(35),
    story!(truncated_parameters_on_a_config_drive_are_called_malformed_there).takes(30),
    story!(noise_in_an_oem_string_of_smbios_is_called_malformed_there),
    story!(an_unknown_field_is_named),
    story!(an_owner_key_of_31_bytes_is_called_too_short),
    story!(an_empty_ticket_is_refused_before_anything_else_of_a_registration),
    story!(a_hundred_kilobytes_of_random_bytes_are_refused_unread),
    story!(a_machine_reboots_three_times_after_a_guru_meditation_and_then_holds).takes(60),
    story!(a_kernel_that_panics_in_every_boot_is_counted_and_holds_the_fourth_time).takes(90),
];

fn a_machine_without_parameters_says_where_it_looked_and_fills_its_screen() -> Result<()> {
    let world = World::new("guru-absent")?;
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), "")?;
    let config = Config {
        disk: Some(world.disk(None)?),
        ..Config::new(firmware, accelerator(Preference::Auto, 1))
    };
    let mut machine = world.boot(&config)?;
    let guru = guru(&mut machine, "0601")?;
    names_each_place(&guru)?;
    shows_red(&mut machine)
}

/// Checks that the guru meditation of a machine without parameters says where it looked.
fn names_each_place(guru: &Event) -> Result<()> {
    ensure!(guru.is("stage", "parameters"), "{guru}");
    let text = format!("{} {}", guru.text("cause"), guru.text("next"));
    for place in ["fw_cfg", "SMBIOS", "ESP", "cidata", "config-2"] {
        ensure!(text.contains(place), "{place} is not named: {guru}");
    }
    Ok(())
}

fn truncated_parameters_on_a_config_drive_are_called_malformed_there() -> Result<()> {
    let world = World::new("guru-truncated")?;
    let (disc, whole) = (world.path("config-2.iso"), bootstrap().encode_to_vec());
    config_drive::write(&disc, &whole[..whole.len() / 2])?;
    let config = Config { disk: Some(world.disk(None)?), disc: Some(disc), ..world.bare("") };
    let guru = refused(&world, &config, "0604", &["cut short"])?;
    let next = guru.text("next");
    ensure!(next.contains("config-2"), "the next step names another place: {guru}");
    Ok(())
}

fn noise_in_an_oem_string_of_smbios_is_called_malformed_there() -> Result<()> {
    let world = World::new("guru-smbios")?;
    // A config drive with valid ones comes later, and the machine must not fall back to it.
    let disc = world.path("config-2.iso");
    config_drive::write(&disc, &bootstrap().encode_to_vec())?;
    let config = Config {
        disk: Some(world.disk(None)?),
        disc: Some(disc),
        oem_strings: vec!["polis-parameters-v1:%noise%".to_owned()],
        ..world.bare("")
    };
    let mut machine = world.boot(&config)?;
    let guru = guru(&mut machine, "0604")?;
    ensure!(guru.text("cause").contains("base64"), "the cause does not name base64: {guru}");
    ensure!(guru.text("next").contains("SMBIOS"), "the next step names another place: {guru}");
    Ok(())
}

fn an_unknown_field_is_named() -> Result<()> {
    let mut bytes = bootstrap().encode_to_vec();
    // Field 99 as a number: what a newer version might have.
    bytes.extend([0x98, 0x06, 0x01]);
    refuses("guru-unknown-field", &bytes, "0605", &["99"])
}

fn an_owner_key_of_31_bytes_is_called_too_short() -> Result<()> {
    let short =
        ClusterBootstrap { owner_public_key: OWNER[..31].to_vec(), ..ClusterBootstrap::default() };
    let bytes = with_cluster(short).encode_to_vec();
    refuses("guru-owner-key", &bytes, "0609", &["owner_public_key", "31", "32"])
}

fn an_empty_ticket_is_refused_before_anything_else_of_a_registration() -> Result<()> {
    let node = cluster_directory::Node {
        id: "polis-00112233445566778899aabbccddeeff".to_owned(),
        addresses: vec!["10.0.2.2".to_owned()],
    };
    let register = ClusterRegister {
        cluster_directory: Some(ClusterDirectory { nodes: vec![node] }),
        ..ClusterRegister::default()
    };
    let parameters = NodeParameters {
        cluster: Some(Cluster::ClusterRegister(register)),
        ..NodeParameters::default()
    };
    refuses("guru-ticket", &parameters.encode_to_vec(), "0610", &["register_ticket"])
}

fn a_hundred_kilobytes_of_random_bytes_are_refused_unread() -> Result<()> {
    let input: Vec<u8> = (0..100_000).map(|_| rand::random()).collect();
    let world = World::new("guru-noise")?;
    // By fw_cfg, which has the length before the content; the others read the ESP.
    let config = with(&world, &input)?;
    refused(&world, &config, "0603", &["65536"]).map(drop)
}

fn refuses(story: &str, parameters: &[u8], code: &str, words: &[&str]) -> Result<()> {
    let world = World::new(story)?;
    let config = world.past_stage_1(with(&world, parameters)?)?;
    refused(&world, &config, code, words).map(drop)
}

/// A machine with these parameters.
fn with(world: &World, parameters: &[u8]) -> Result<Config> {
    Ok(Config {
        disk: Some(world.disk(None)?),
        fw_cfg: world.fw_cfg(parameters)?,
        ..world.bare("")
    })
}

fn refused(world: &World, config: &Config, code: &str, words: &[&str]) -> Result<Event> {
    let mut machine = world.boot(config)?;
    let guru = guru(&mut machine, code)?;
    for word in words {
        ensure!(guru.text("cause").contains(word), "`{word}` is not in the cause: {guru}");
    }
    ensure!(
        machine.seen(|event| event.word == "ready").is_empty(),
        "ready in spite of a guru meditation"
    );
    Ok(guru)
}

fn a_machine_reboots_three_times_after_a_guru_meditation_and_then_holds() -> Result<()> {
    let world = World::new("guru-reboots")?;
    let disk = Some(world.disk(None)?);
    let config = Config { disk, ..world.bare("polis.guru-countdown=1") };
    let mut machine = world.boot(&config)?;
    for attempt in 1..=REBOOTS {
        let guru = guru(&mut machine, "0601").with_context(|| format!("attempt {attempt}"))?;
        names_each_place(&guru)?;
        machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
        machine.wait_for("boot", BOOT, |_| true).with_context(|| format!("reboot {attempt}"))?;
    }
    guru(&mut machine, "0601").context("the last attempt")?;
    machine.wait_for_text("; holding;", SOON)?;
    let boots = machine.seen(|event| event.word == "boot").len();
    ensure!(boots == REBOOTS + 1, "{boots} boots");
    Ok(())
}

fn a_kernel_that_panics_in_every_boot_is_counted_and_holds_the_fourth_time() -> Result<()> {
    let world = World::new("guru-kernel")?;
    let config = Config {
        last_words: Some(world.path("erst")),
        ..world.bootstrap_config("polis.fault=kernel-panic panic=1 polis.guru-countdown=1")?
    };
    let mut machine = world.boot(&config)?;
    for attempt in 1..=REBOOTS {
        panics(&mut machine).with_context(|| format!("attempt {attempt}"))?;
        machine.wait_for("boot", BOOT, |_| true).with_context(|| format!("reboot {attempt}"))?;
        machine.wait_for_text("the kernel panicked: sysrq triggered crash", SOON)?;
        machine.wait_for_text("last words: ", SOON)?;
    }
    panics(&mut machine).context("the last attempt")?;
    let guru = guru(&mut machine, "0101")?;
    ensure!(guru.text("cause").contains("sysrq triggered crash"), "{guru}");
    machine.wait_for_text("; holding;", SOON)?;
    let boots = machine.seen(|event| event.word == "boot").len();
    ensure!(boots == REBOOTS + 2, "{boots} boots");
    Ok(())
}

/// Waits for a panic of the kernel, not for the report of the one before.
fn panics(machine: &mut Machine) -> Result<()> {
    let panic = |line: &Line| line.text.contains("Kernel panic") && fatal(&line.text).is_some();
    machine.wait("a panic of the kernel", BOOT, |line| panic(line).then_some(()))?;
    Ok(())
}

/// Waits until the screen shows a guru meditation: red on black, and not blank.
pub(crate) fn shows_red(machine: &mut Machine) -> Result<()> {
    /// Text and a border cover little of a screen, and always more than this.
    const RED_MIN: f64 = 0.005;
    let mut deadline = Deadline::within(SOON);
    loop {
        let picture = machine.picture("guru")?;
        let (red, black) = (picture.share(is_red), picture.share(is_black));
        if red >= RED_MIN && black > 0.5 {
            return Ok(());
        }
        ensure!(
            !deadline.is_over(),
            "no guru meditation on the screen: {:.1} % red, {:.1} % black; see guru.png",
            red * 100.0,
            black * 100.0
        );
        // The border blinks, and painting takes a moment after the line: look again
        // when the guest prints something, or at the next blink.
        machine.next_line(std::time::Duration::from_millis(300));
    }
}
