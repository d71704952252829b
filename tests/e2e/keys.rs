//! The keepers of an authenticated disk: the machine itself opens it, as long as
//! everything is as it was; only the recovery key opens it as soon as one thing is not,
//! and each such thing has words of its own.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use polis_proto::v1::{ClusterConfiguration, ColdStartShare};
use polis_qemu::args::FwCfg;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::Flash;
use polis_qemu::{Config, Machine, disk};
use polis_tests::{Sample, Story, draws_all, pick, seed, story};
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use crate::esp;
use crate::owner::{Owner, private};
use crate::storage::data;
use crate::world::{DISK_SIZE_SMALL, Identity, SOON, World, founding, guru, home, says, virtio};

const SEALED: &str = "polis/sealed_configuration.pb";
const SHARE: &str = "polis/cold_start.pb";

/// The defaults of `cluster_bootstrap`: authenticated, a TPM where there is one, and home
/// without help.
pub(crate) fn ordinary() -> Vec<u8> {
    founding(ClusterConfiguration::default()).encode_to_vec()
}

/// A machine that was home and is off, with the keeper of its key.
struct Member {
    world: World,
    config: Config,
    identity: Identity,
    /// As the owner wrote it down.
    recovery: String,
}

impl Member {
    /// Founds a cluster, and keeps its recovery key.
    fn found(story: &str, tpm: bool, keeper: &str) -> Result<Self> {
        Self::found_with(story, tpm, keeper, |_owner, _identity, _machine| Ok(()))
    }

    /// The same; `last` is what the owner does before the machine is off.
    fn found_with(
        story: &str,
        tpm: bool,
        keeper: &str,
        last: impl FnOnce(&Owner, &Identity, &mut Machine) -> Result<()>,
    ) -> Result<Self> {
        let world = World::new(story)?;
        let owner = Owner::new(&world.path("owner"))?;
        let mut config = Config {
            disk: Some(world.disk_of_size(DISK_SIZE_SMALL, None)?),
            fw_cfg: world.fw_cfg(&ordinary())?,
            forwards: owner.forwards.clone(),
            tpm: tpm.then(|| world.path("tpm")),
            ..world.bare("")
        };
        if tpm {
            // On a machine with a TPM, the kernel that was unpacked beforehand found no
            // fw_cfg device.
            config.firmware = world.image.direct("");
        }
        let mut machine = world.boot(&config)?;
        let identity = home(&mut machine)?;
        says(&machine, "kind=authenticated")?;
        says(&machine, &format!("keeper={keeper}"))?;
        owner.take(&identity.ca)?;
        let recovery = owner.run(&["node", "recovery-key", &identity.node])?;
        ensure!(recovery.len() == 69, "no recovery key of 14 groups: {recovery:?}");
        let saved = private(&world.path("saved"), &recovery)?.display().to_string();
        let forget = ["node", "recovery-key", "forget", &identity.node];
        owner.run(&[&forget[..], &["--recovery-key-file", &saved]].concat())?;
        machine.wait_until_text("is saved", SOON)?;
        last(&owner, &identity, &mut machine)?;
        machine.kill();
        // The founding parameters are gone: only the disk leads home now.
        let config = Config { fw_cfg: Vec::new(), forwards: Vec::new(), ..config };
        Ok(Self { world, config, identity, recovery })
    }

    fn disk(&self) -> Result<&Path> {
        Ok(&self.config.disk.as_ref().context("no disk")?.file)
    }

    /// A copy of the machine that something can be done to.
    fn copy(&self, name: &str) -> Result<Copy> {
        let file = self.world.path(&format!("{name}.img"));
        disk::copy(self.disk()?, &file)?;
        let copied = self.world.path(&format!("{name}-tpm"));
        let tpm = self.config.tpm.as_ref().map(|state| copy_tpm(state, copied)).transpose()?;
        let config = Config { disk: Some(virtio(file.clone())), tpm, ..self.config.clone() };
        Ok(Copy { file, config })
    }
}

/// Copies the state of a TPM that is off.
pub(crate) fn copy_tpm(state: &Path, to: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(state)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(to)
}

/// The uses of the recovery key on a machine that is locked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mend {
    /// Nothing: another harm of the same run shows it.
    Not,
    /// It opens the disk.
    Once,
    /// It opens the disk, and the next boot joins without it.
    ForGood,
}

/// For each of a story's harms, the use of the recovery key: for one of them, which the
/// seed draws, everything; with `--all`, for each as `usual` says.
fn mends<const HARMS: usize>(story: &str, usual: [Mend; HARMS]) -> Result<[Mend; HARMS]> {
    if draws_all() {
        return Ok(usual);
    }
    let seed = seed()?;
    let drawn = pick(seed, story, HARMS, 1);
    println!("POLIS_SEED={seed}: harm {drawn:?} of {HARMS}, from 0, is mended");
    Ok(std::array::from_fn(|harm| match drawn.contains(&harm) {
        true => Mend::ForGood,
        false => Mend::Not,
    }))
}

/// A copy of a machine; its disk goes with it.
struct Copy {
    file: PathBuf,
    config: Config,
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _removed = fs::remove_file(&self.file);
    }
}

impl Copy {
    /// Boots it, waits for `code`, and checks that the data partition is untouched;
    /// then opens it with the recovery key, if that is asked for.
    fn locked(&self, member: &Member, code: &str, word: &str, mend: Mend) -> Result<()> {
        let world = &member.world;
        let before = header(&self.file)?;
        let mut machine = world.boot(&world.past_stage_1(self.config.clone())?)?;
        let guru = guru(&mut machine, code)?;
        ensure!(guru.is("unlock", "yes"), "the recovery key is not asked for: {guru}");
        ensure!(guru.text("next").contains("recovery key"), "it is not the next step: {guru}");
        ensure!(guru.text("cause").contains(word), "`{word}` is not in the cause: {guru}");
        machine.kill();
        ensure!(before == header(&self.file)?, "{code}: the data partition was changed");

        let file = world.path("recovery-key");
        fs::write(&file, &member.recovery)?;
        let given = vec![FwCfg { name: "opt/polis/recovery_key".to_owned(), file }];
        let boots = match mend {
            Mend::Not => vec![],
            Mend::Once => vec![given],
            Mend::ForGood => vec![given, Vec::new()],
        };
        for fw_cfg in boots {
            let mut machine = world.boot(&Config { fw_cfg, ..self.config.clone() })?;
            let back = home(&mut machine).with_context(|| format!("after {code}"))?;
            ensure!(back == member.identity, "another node after {code}: {back:?}");
            ensure!(
                machine.lines().iter().all(|line| !line.text.contains(&member.recovery)),
                "the recovery key is on the serial line"
            );
            machine.kill();
        }
        Ok(())
    }
}

/// The digest of the first part of the data partition: the header with its slots.
fn header(disk: &Path) -> Result<[u8; 32]> {
    const HEADER: u64 = 16 << 20;
    let (start, _) = data(disk)?;
    let mut file = fs::File::open(disk)?;
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(HEADER).read_to_end(&mut bytes)?;
    Ok(Sha256::digest(&bytes).into())
}

/// A share that is whole and is another disk's: half of it is made up.
fn strange_share() -> Vec<u8> {
    let message = ColdStartShare { cluster_unlock_key: vec![0x5a; 32], sealed: None };
    let payload = message.encode_to_vec();
    let length = u32::try_from(payload.len()).unwrap_or_default().to_le_bytes();
    let body = [&b"polis cs"[..], &[1, 0, 0, 0], &length, &payload].concat();
    let checksum = Sha256::digest(&body);
    [&body[..], &checksum].concat()
}

/// Each opens with the recovery key what lost its own.
const HARMS: Sample = Sample { of: "keys", drawn: 2 };

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(each_harm_to_the_keys_on_the_esp_has_a_code_and_the_recovery_key_mends_it)
        .takes(130)
        .one_of(HARMS),
    story!(each_harm_to_the_tpm_has_a_code_and_the_recovery_key_mends_it).takes(130).one_of(HARMS),
    story!(an_announced_firmware_update_needs_no_recovery_key_and_one_that_was_not_does)
        .takes(150)
        .one_of(HARMS),
    story!(firmware_keeps_the_share_of_a_machine_without_a_tpm).takes(110).one_of(HARMS),
];

fn each_harm_to_the_keys_on_the_esp_has_a_code_and_the_recovery_key_mends_it() -> Result<()> {
    let member = Member::found("keys-esp", false, "disk")?;
    let usual = [Mend::ForGood, Mend::Once, Mend::ForGood, Mend::Once];
    let [deleted, damaged, strange, no_share] = mends("keys-esp", usual)?;

    let copy = member.copy("deleted")?;
    esp::remove(&copy.file, SEALED)?;
    copy.locked(&member, "0702", "sealed configuration", deleted)?;

    let copy = member.copy("damaged")?;
    let mut copies = esp::bytes(&copy.file, SEALED)?.context("no sealed configuration")?;
    let second = copies.len() / 2;
    copies[40] ^= 1;
    copies[second + 40] ^= 1;
    esp::write(&copy.file, SEALED, &copies)?;
    copy.locked(&member, "0701", "checksum", damaged)?;

    let copy = member.copy("strange")?;
    esp::write_record(&copy.file, SHARE, &strange_share())?;
    copy.locked(&member, "0415", "both halves", strange)?;

    let copy = member.copy("no-share")?;
    esp::remove(&copy.file, SHARE)?;
    copy.locked(&member, "0422", "no key store of this machine has it", no_share)
}

fn each_harm_to_the_tpm_has_a_code_and_the_recovery_key_mends_it() -> Result<()> {
    let member = Member::found("keys-tpm", true, "TPM")?;
    let usual = [Mend::Once, Mend::Once, Mend::ForGood];
    let [cleared, absent, changed] = mends("keys-tpm", usual)?;
    let world = &member.world;

    let copy = member.copy("cleared")?;
    polis_qemu::tpm::Tpm::clear(copy.config.tpm.as_ref().context("no TPM")?)?;
    copy.locked(&member, "0413", "cleared", cleared)?;

    let mut copy = member.copy("absent")?;
    copy.config.tpm = None;
    copy.locked(&member, "0414", "no TPM", absent)?;

    // Other firmware measures something else: here the state of Secure Boot.
    let mut copy = member.copy("changed")?;
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), "")?;
    copy.config.firmware = firmware;
    copy.locked(&member, "0412", "registers", changed)?;

    // And as it was, it still opens.
    let mut machine = world.boot(&member.config)?;
    let back = home(&mut machine)?;
    ensure!(back == member.identity, "another node: {back:?}");
    Ok(())
}

fn an_announced_firmware_update_needs_no_recovery_key_and_one_that_was_not_does() -> Result<()> {
    let announce = |owner: &Owner, identity: &Identity, machine: &mut Machine| {
        let command = ["node", "announce-firmware-update", &identity.node, "--yes"];
        let answer = owner.run(&command)?;
        ensure!(answer.contains("is ready for new firmware"), "{answer}");
        machine.wait_until_text("A FIRMWARE UPDATE IS ANNOUNCED", SOON)?;
        let status = owner.run(&["node", "status", &identity.node])?;
        ensure!(status.contains("whatever it measures"), "it is not shown: {status}");
        Ok(())
    };
    let member = Member::found_with("keys-update", true, "TPM", announce)?;
    let world = &member.world;
    // Other firmware, as an update brings it.
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), "")?;
    let updated = Config { firmware, ..member.config.clone() };
    let sealed = "is sealed to the registers of this start;";
    let mut machine = world.boot(&updated)?;
    let back = home(&mut machine)?;
    ensure!(back == member.identity, "another node: {back:?}");
    machine.wait_until_text(sealed, SOON)?;
    machine.kill();
    let mut machine = world.boot(&updated)?;
    let back = home(&mut machine)?;
    ensure!(back == member.identity, "another node at the second start: {back:?}");
    let again = machine.lines().iter().any(|line| line.text.contains(sealed));
    ensure!(!again, "the key was sealed again at the second start, too");
    machine.kill();
    // The former firmware is another one, too, and was not announced.
    let copy = member.copy("not-announced")?;
    copy.locked(&member, "0412", "registers", Mend::Not)
}

fn firmware_keeps_the_share_of_a_machine_without_a_tpm() -> Result<()> {
    let world = World::new("keys-firmware")?;
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), "")?;
    let config = Config {
        disk: Some(world.disk_of_size(DISK_SIZE_SMALL, Some(&ordinary()))?),
        ..Config::new(firmware, accelerator(Preference::Auto, 1))
    };
    let mut machine = world.boot(&config)?;
    let identity = home(&mut machine)?;
    says(&machine, "keeper=firmware")?;
    machine.wait_until_text("IS NOT SAVED YET", SOON)?;
    machine.kill();
    let file = &config.disk.as_ref().context("no disk")?.file;
    ensure!(esp::record(file, SHARE)?.is_none(), "the share is on the disk, too");
    let mut machine = world.boot(&config)?;
    let back = home(&mut machine)?;
    ensure!(back == identity, "after a power cut: {back:?}, before: {identity:?}");
    machine.kill();
    // The same disk in another machine.
    let elsewhere = world.image.uefi(Flash::Plain, &world.path("elsewhere"), "")?;
    let mut machine = world.boot(&Config { firmware: elsewhere, ..config })?;
    guru(&mut machine, "0422").map(drop)
}
