//! Tests of encrypted disks: which keys open them, and which of those may be lost.

use super::*;

/// The same bootstrap, encrypted.
fn encrypted(tpm: TpmMode, cold_start: ColdStart) -> Option<Cluster> {
    let mut desired = bootstrap();
    desired.configuration.storage = StoragePolicy::Unspecified;
    desired.configuration.tpm = tpm;
    desired.configuration.cold_start = cold_start;
    Some(Cluster::Bootstrap(desired))
}

fn automatic() -> Option<Cluster> {
    encrypted(TpmMode::BestEffort, ColdStart::Automatic)
}

impl Machine {
    /// A member whose disk is authenticated, and its recovery key.
    async fn member(self, configured: Option<Cluster>) -> (Self, String) {
        let ended = self.boot(configured, usize::MAX).await;
        assert!(matches!(ended, End::Home(_)), "{ended:?}");
        let saved = self.saved_recovery_key();
        (self, saved)
    }

    /// Boots with a recovery key until it is home, then without one, as the same node.
    async fn recovers(mut self, saved: String) -> Self {
        let node = self.etcd.contents().keys().find(|key| key.starts_with("nodes/")).cloned();
        self.recovery = Some(saved);
        let status = self.boot_home().await;
        assert_eq!(node, status.node.map(|node| format!("nodes/{node}")));
        self.recovery = None;
        assert_eq!(self.boot_home().await.node, status.node);
        self
    }
}

#[tokio::test]
async fn an_authenticated_disk_joins_alone_with_each_place_of_the_share() {
    for (machine, keeper) in [
        (Machine::with_tpm(), Keeper::Tpm),
        (Machine { firmware: true, ..Machine::new() }, Keeper::Firmware),
        (Machine::new(), Keeper::Disk),
    ] {
        let (machine, _saved) = machine.member(automatic()).await;
        assert_eq!(machine.partition.lock().unwrap().as_ref().unwrap().kind, Kind::Authenticated);
        let status = machine.boot_home().await;
        let keys = status.keys.unwrap();
        assert_eq!((keys.keeper, keys.sealed), (Some(keeper), keeper == Keeper::Tpm));
        assert!(keys.recovery_key_unsaved);
    }
}

#[tokio::test]
async fn a_power_cut_after_any_step_of_an_encrypted_bootstrap_loses_no_key() {
    for tpm in [Tpms::One(1, 1), Tpms::None] {
        for cold_start in [ColdStart::Automatic, ColdStart::Attended] {
            for steps in 1..=Step::ALL.len() {
                let configured = encrypted(TpmMode::BestEffort, cold_start);
                let machine = Machine::new();
                machine.set(tpm);
                let cut = machine.boot(configured.clone(), steps).await;
                assert!(matches!(cut, End::Cut), "{steps} steps: {cut:?}");
                let ended = machine.boot(configured, usize::MAX).await;
                assert!(matches!(ended, End::Home(_)), "{steps} steps: {ended:?}");
                // The owner's key opens the disk, and no journal is left.
                let key = form::read(&machine.saved_recovery_key()).unwrap();
                let slot = machine.partition.lock().unwrap().clone().unwrap().slots[1].clone();
                assert_eq!(slot, *RecoveryKey::new(key).text(), "{steps} steps");
                assert_eq!(machine.root().esp.cluster_journal.read().unwrap(), None);
                let share = machine.root().esp.cold_start.read().unwrap();
                assert_eq!(share.is_some(), cold_start == ColdStart::Automatic);
                machine.boot_home().await;
            }
        }
    }
}

#[tokio::test]
async fn each_way_to_lose_a_key_has_a_code_touches_nothing_and_is_mended_by_the_recovery_key() {
    type Harm = fn(&Machine);
    let harms: [(Harm, polis_base::trapdoor::Code); 6] = [
        (|m| m.root().esp.sealed_configuration.remove().unwrap(), code::CLUSTER_SEALED_LOST),
        (
            |m| m.root().esp.sealed_configuration.write(b"polis sc, or so").unwrap(),
            code::CLUSTER_SEALED_DAMAGED,
        ),
        (
            |m| {
                let (shares, like) = (m.shares(), m.secrets());
                shares.keep(Slot::Current, &like, &Half::random().unwrap()).map(drop).unwrap();
            },
            code::STORAGE_KEY_WRONG,
        ),
        (|m| m.set(Tpms::One(2, 1)), code::STORAGE_TPM_CLEARED),
        (|m| m.set(Tpms::None), code::STORAGE_TPM_ABSENT),
        (|m| m.set(Tpms::One(1, 2)), code::STORAGE_TPM_REFUSES),
    ];
    for (harm, expected) in harms {
        let (machine, saved) = Machine::with_tpm().member(automatic()).await;
        harm(&machine);
        let before = machine.partition.lock().unwrap().clone();
        let report = machine.boot_refused(automatic()).await;
        assert_eq!(report.code, expected);
        assert!(report.unlock, "{expected}");
        assert_eq!(*machine.partition.lock().unwrap(), before, "{expected}: the disk was touched");

        let machine =
            Machine { recovery: Some(form::write(&[1; form::SIZE]).to_string()), ..machine };
        let report = machine.boot_refused(None).await;
        assert_eq!(report.code, code::STORAGE_RECOVERY_KEY_WRONG);
        assert!(report.unlock);
        assert_eq!(*machine.partition.lock().unwrap(), before, "{expected}: the disk was touched");

        let machine = machine.recovers(saved).await;
        let after = machine.partition.lock().unwrap().clone().unwrap();
        assert_ne!(after.slots[0], before.unwrap().slots[0], "{expected}: new halves");
        let root = machine.root();
        assert_eq!(root.esp.key_change.read().unwrap(), None);
        assert_eq!(root.esp.cold_start_next.read().unwrap(), None);
        let (half, _) = machine.shares().fetch(Slot::Current).unwrap().unwrap();
        assert_eq!(machine.cluster_unlock_key(), half.bytes(), "etcd knows the new half");
    }
}

#[tokio::test]
async fn a_machine_that_is_attended_waits_for_the_recovery_key_and_keeps_no_share() {
    let configured = encrypted(TpmMode::BestEffort, ColdStart::Attended);
    let (machine, _saved) = Machine::new().member(configured).await;
    for _boot in 0..2 {
        let status = machine.boot_home().await;
        assert_eq!(status.keys.unwrap().keeper, None);
        assert_eq!(machine.root().esp.cold_start.read().unwrap(), None);
    }
}

#[tokio::test]
async fn a_lost_share_is_reported_even_if_nothing_needs_it() {
    let (machine, saved) = Machine::new().member(automatic()).await;
    machine.root().esp.cold_start.remove().unwrap();
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_SHARE_ABSENT);
    machine.recovers(saved).await;
}

#[tokio::test]
async fn a_cluster_that_demands_a_tpm_gets_one_or_nothing() {
    let required = encrypted(TpmMode::Required, ColdStart::Automatic);
    let machine = Machine::new();
    let report = machine.boot_refused(required.clone()).await;
    assert_eq!(report.code, code::STORAGE_TPM_ABSENT);
    assert!(!report.unlock, "no disk to unlock");
    assert!(!machine.has_data());
    assert_eq!(machine.root().esp.cluster_journal.read().unwrap(), None);

    // A member whose TPM is lost opens by its recovery key, each time.
    let (mut machine, saved) = Machine::with_tpm().member(required).await;
    machine.set(Tpms::None);
    let before = machine.partition.lock().unwrap().clone();
    machine.recovery = Some(saved);
    machine.boot_home().await;
    assert_eq!(*machine.partition.lock().unwrap(), before, "nothing is sealed to nothing");
    machine.recovery = None;
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_ABSENT);
    machine.set(Tpms::One(1, 1));
    machine.boot_home().await;
}

#[tokio::test]
async fn a_tpm_that_must_not_be_used_is_not() {
    let disabled = encrypted(TpmMode::Disabled, ColdStart::Automatic);
    let (machine, _saved) = Machine::with_tpm().member(disabled).await;
    machine.set(Tpms::None);
    assert_eq!(machine.boot_home().await.keys.unwrap().keeper, Some(Keeper::Disk));
}

#[tokio::test]
async fn a_weaker_partition_in_the_place_of_the_node_s_is_not_used() {
    let (machine, _saved) = Machine::new().member(automatic()).await;
    machine.partition.lock().unwrap().as_mut().unwrap().kind = Kind::Insecure;
    let report = machine.boot_refused(None).await;
    assert_eq!(report.code, code::STORAGE_KIND_DIFFERS);
}

#[tokio::test]
async fn a_change_of_keys_that_was_cut_opens_with_the_old_or_the_new_ones() {
    let (machine, saved) = Machine::new().member(automatic()).await;
    let old = machine.root().esp.sealed_configuration.read().unwrap().unwrap();
    let share = machine.root().esp.cold_start.read().unwrap().unwrap();
    let machine = {
        machine.root().esp.sealed_configuration.remove().unwrap();
        machine.recovers(saved).await
    };
    let esp = machine.root().esp;
    let (new, new_share) = (
        esp.sealed_configuration.read().unwrap().unwrap(),
        esp.cold_start.read().unwrap().unwrap(),
    );
    let secrets = Sealed::from_record(&new).unwrap().secrets.unwrap();
    let change = crate::cluster::sealed::change_to_record(&secrets);
    // Cut after the slot was changed, and then between each two steps after that.
    for (sealed, share) in
        [(Some(&old), &share), (Some(&new), &share), (Some(&new), &new_share), (None, &share)]
    {
        match sealed {
            Some(sealed) => esp.sealed_configuration.write(sealed).unwrap(),
            None => esp.sealed_configuration.remove().unwrap(),
        }
        esp.cold_start.write(share).unwrap();
        esp.cold_start_next.write(&new_share).unwrap();
        esp.key_change.write(&change).unwrap();
        machine.boot_home().await;
        assert_eq!(esp.key_change.read().unwrap(), None);
        assert_eq!(esp.cold_start_next.read().unwrap(), None);
        machine.boot_home().await;
    }
    // Cut before that: a change that never came into force is removed.
    let (secrets, half) = (Secrets::random().unwrap(), Half::random().unwrap());
    let secrets = Guarded::Plain(secrets);
    machine.shares().keep(Slot::Next, &secrets, &half).unwrap();
    esp.key_change.write(&crate::cluster::sealed::change_to_record(&secrets)).unwrap();
    machine.boot_home().await;
    assert_eq!(esp.key_change.read().unwrap(), None);
}

#[tokio::test]
async fn a_change_of_keys_is_known_until_its_share_is_removed() {
    let (machine, _saved) = Machine::new().member(automatic()).await;
    let esp = machine.root().esp;
    esp.key_change.write(&crate::cluster::sealed::change_to_record(&machine.secrets())).unwrap();
    // The share is not removed: nothing is written through a link.
    let place = esp.cold_start_next.path();
    std::os::unix::fs::symlink("nowhere", place).unwrap();
    machine.boot_refused(None).await;
    assert!(esp.key_change.read().unwrap().is_some(), "no later start would remove the share");
    std::fs::remove_file(place).unwrap();
    machine.shares().keep(Slot::Next, &machine.secrets(), &Half::random().unwrap()).unwrap();
    machine.boot_home().await;
    assert_eq!(esp.key_change.read().unwrap(), None);
    assert_eq!(esp.cold_start_next.read().unwrap(), None);
}

#[tokio::test]
async fn only_the_right_recovery_key_ends_an_interrupted_change_that_cannot_be_used_now() {
    let (machine, saved) = Machine::with_tpm().member(automatic()).await;
    let esp = machine.root().esp;
    let records =
        || [&esp.sealed_configuration, &esp.cold_start].map(|file| file.read().unwrap().unwrap());
    let [old, old_share] = records();
    esp.cold_start.remove().unwrap();
    let mut machine = machine.recovers(saved.clone()).await;
    let [new, new_share] = records();
    let secrets = Sealed::from_record(&new).unwrap().secrets.unwrap();
    let cut_after_the_slot_was_changed = || {
        esp.sealed_configuration.write(&old).unwrap();
        esp.cold_start.write(&old_share).unwrap();
        esp.cold_start_next.write(&new_share).unwrap();
        esp.key_change.write(&crate::cluster::sealed::change_to_record(&secrets)).unwrap();
    };

    cut_after_the_slot_was_changed();
    // The TPM opens neither at this start.
    machine.set(Tpms::One(1, 2));
    machine.recovery = Some(form::write(&[1; form::SIZE]).to_string());
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_RECOVERY_KEY_WRONG);
    machine.recovery = None;
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
    machine.set(Tpms::One(1, 1));
    machine.boot_home().await;
    assert_eq!(esp.key_change.read().unwrap(), None);

    cut_after_the_slot_was_changed();
    machine.set(Tpms::One(1, 2));
    let machine = machine.recovers(saved).await;
    assert_eq!(esp.key_change.read().unwrap(), None);
    assert_eq!(esp.cold_start_next.read().unwrap(), None);
    let (half, _) = machine.shares().fetch(Slot::Current).unwrap().unwrap();
    assert_eq!(machine.cluster_unlock_key(), half.bytes(), "etcd knows the new half");
}

impl Machine {
    /// A member with a TPM, whose owner has announced a firmware update.
    async fn announced() -> (Self, String) {
        let (mut machine, saved) = Self::with_tpm().member(automatic()).await;
        machine.seals = Some(Binding::TpmAlone);
        let keys = machine.boot_home().await.keys.unwrap();
        assert!(keys.firmware_update_announced);
        machine.seals = None;
        assert_eq!(machine.bindings(), [Some(Binding::TpmAlone); 2]);
        (machine, saved)
    }

    /// The conditions under which the secrets and the share open.
    fn bindings(&self) -> [Option<Binding>; 2] {
        let share = self.shares().find(Slot::Current).unwrap();
        [self.secrets().binding(), share.and_then(|(share, _)| share.binding())]
    }
}

#[tokio::test]
async fn an_announced_firmware_update_needs_no_recovery_key_and_the_next_one_does() {
    let (machine, saved) = Machine::announced().await;
    machine.set(Tpms::One(1, 2));
    for _start in 0..2 {
        assert!(!machine.boot_home().await.keys.unwrap().firmware_update_announced);
        assert_eq!(machine.bindings(), [Some(Binding::Registers); 2]);
    }
    machine.set(Tpms::One(1, 1));
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
    machine.recovers(saved).await;
}

#[tokio::test]
async fn an_announcement_opens_the_disk_for_no_other_tpm() {
    let (machine, _saved) = Machine::announced().await;
    machine.set(Tpms::One(2, 1));
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_CLEARED);
    assert_eq!(machine.bindings(), [Some(Binding::TpmAlone); 2]);
    machine.set(Tpms::One(1, 2));
    machine.boot_home().await;
}

#[tokio::test]
async fn a_cancelled_announcement_leaves_the_disk_as_before() {
    let (mut machine, saved) = Machine::announced().await;
    // The start itself ends the announcement: the owner announces again, and cancels at once.
    for binding in [Binding::TpmAlone, Binding::Registers, Binding::Registers] {
        machine.seals = Some(binding);
        let keys = machine.boot_home().await.keys.unwrap();
        assert_eq!(keys.firmware_update_announced, binding == Binding::TpmAlone);
        assert_eq!(machine.bindings(), [Some(binding); 2]);
    }
    machine.seals = None;
    machine.set(Tpms::One(1, 2));
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
    machine.recovers(saved).await;
}

#[tokio::test]
async fn a_power_cut_between_the_share_and_the_secrets_locks_nothing() {
    let (machine, _saved) = Machine::with_tpm().member(automatic()).await;
    let esp = machine.root().esp;
    let records =
        || [&esp.cold_start, &esp.sealed_configuration].map(|file| file.read().unwrap().unwrap());
    let write = |share: &[u8], sealed: &[u8]| {
        esp.cold_start.write(share).unwrap();
        esp.sealed_configuration.write(sealed).unwrap();
    };
    let [bound_share, bound] = records();
    let mut machine = Machine { seals: Some(Binding::TpmAlone), ..machine };
    machine.boot_home().await;
    machine.seals = None;
    let [free_share, free] = records();
    // The announcement is cut, and the end of one: started as before, both open.
    for (share, sealed) in [(&free_share, &bound), (&bound_share, &free)] {
        write(share, sealed);
        machine.boot_home().await;
        assert_eq!(machine.bindings(), [Some(Binding::Registers); 2]);
    }
    // Only an announcement that was answered lets other firmware start.
    write(&free_share, &bound);
    machine.set(Tpms::One(1, 2));
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
    write(&free_share, &free);
    machine.boot_home().await;
    assert_eq!(machine.bindings(), [Some(Binding::Registers); 2]);
}

#[tokio::test]
async fn an_attended_machine_and_one_without_a_tpm_take_an_announcement_too() {
    let configured = encrypted(TpmMode::BestEffort, ColdStart::Attended);
    let (mut machine, _saved) = Machine::with_tpm().member(configured).await;
    machine.seals = Some(Binding::TpmAlone);
    machine.boot_home().await;
    assert_eq!(machine.bindings(), [Some(Binding::TpmAlone), None]);
    machine.seals = None;
    machine.set(Tpms::One(1, 2));
    machine.boot_home().await;
    assert_eq!(machine.bindings(), [Some(Binding::Registers), None]);

    let (mut machine, _saved) = Machine::new().member(automatic()).await;
    let before = machine.root().esp.sealed_configuration.read().unwrap();
    machine.seals = Some(Binding::TpmAlone);
    assert!(!machine.boot_home().await.keys.unwrap().firmware_update_announced);
    assert_eq!(machine.root().esp.sealed_configuration.read().unwrap(), before);
    assert_eq!(machine.bindings(), [None; 2]);
}

impl Machine {
    /// Which policy key signed the running system.
    fn runs_system_of(&self, signer: &[u8]) {
        *self.tpm.signer.lock().unwrap() = signer.to_vec();
    }

    /// The policy keys that the secrets and the share are bound to.
    fn signers(&self) -> [Vec<u8>; 2] {
        let share = self.shares().find(Slot::Current).unwrap().unwrap().0;
        [self.secrets().signer().to_vec(), share.signer().to_vec()]
    }

    /// The name by which the loader starts the kernel image from now on.
    fn starts(&self, name: &str) {
        let path = "StubImageIdentifier-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
        let units = name.encode_utf16().flat_map(u16::to_le_bytes);
        let content: Vec<u8> = [6, 0, 0, 0].into_iter().chain(units).collect();
        std::fs::write(self.efivars().join(path), content).unwrap();
    }
}

/// The names of a kernel image that is good, of one on trial, and of one whose try the loader
/// could not count.
const GOOD: &str = r"\polis-1.efi";
const ON_TRIAL: &str = r"\polis-1+0-1.efi";
const UNCOUNTED: &str = r"\polis-1+1.efi";

/// A policy key, another one, and none.
const OWN: &[u8] = &[9];
const OTHER: &[u8] = &[8];
const NONE: &[u8] = &[];

#[tokio::test]
async fn a_signed_system_binds_the_key_to_its_policy_key_and_no_other_system_opens_it() {
    let (machine, saved) = Machine::with_tpm().member(automatic()).await;
    assert_eq!(machine.signers(), [NONE, NONE]);
    machine.runs_system_of(OWN);
    for _start in 0..2 {
        machine.boot_home().await;
        assert_eq!(machine.signers(), [OWN, OWN]);
        assert_eq!(machine.bindings(), [Some(Binding::Registers); 2]);
    }
    let before = machine.partition.lock().unwrap().clone();
    for other in [OTHER, NONE] {
        machine.runs_system_of(other);
        let report = machine.boot_refused(None).await;
        assert_eq!(report.code, code::STORAGE_TPM_REFUSES);
        assert!(report.unlock);
        assert_eq!(*machine.partition.lock().unwrap(), before);
    }
    // The recovery key opens it for the other system, and binds the new halves to that one.
    machine.runs_system_of(OTHER);
    let machine = machine.recovers(saved).await;
    assert_eq!(machine.signers(), [OTHER, OTHER]);
    machine.runs_system_of(OWN);
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
}

#[tokio::test]
async fn a_machine_that_is_founded_by_a_signed_system_is_bound_to_it_at_once() {
    let machine = Machine::with_tpm();
    machine.runs_system_of(OWN);
    let (machine, _saved) = machine.member(automatic()).await;
    assert_eq!(machine.signers(), [OWN, OWN]);
    machine.runs_system_of(NONE);
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
}

#[tokio::test]
async fn a_system_on_trial_leaves_the_way_back_to_one_that_is_not_signed() {
    let machine = Machine { firmware: true, ..Machine::with_tpm() };
    let (machine, _saved) = machine.member(automatic()).await;
    machine.runs_system_of(OWN);
    for trial in [ON_TRIAL, UNCOUNTED] {
        machine.starts(trial);
        machine.boot_home().await;
        assert_eq!(machine.signers(), [NONE, NONE], "{trial}");
    }
    // The trial failed.
    machine.runs_system_of(NONE);
    machine.starts(GOOD);
    machine.boot_home().await;
    // Another one did not, and the next start is none.
    machine.runs_system_of(OWN);
    machine.starts(ON_TRIAL);
    machine.boot_home().await;
    machine.starts(GOOD);
    machine.boot_home().await;
    assert_eq!(machine.signers(), [OWN, OWN]);
    // A trial of the same key changes nothing of that.
    machine.starts(ON_TRIAL);
    machine.boot_home().await;
    assert_eq!(machine.signers(), [OWN, OWN]);
}

#[tokio::test]
async fn a_power_cut_while_the_key_is_bound_to_a_signed_system_locks_nothing() {
    let (machine, _saved) = Machine::with_tpm().member(automatic()).await;
    let esp = machine.root().esp;
    let read = || [&esp.cold_start, &esp.sealed_configuration].map(|file| file.read().unwrap());
    let [_, sealed] = read();
    machine.runs_system_of(OWN);
    machine.boot_home().await;
    let [share, _] = read();
    // The share comes first.
    esp.cold_start.write(&share.unwrap()).unwrap();
    esp.sealed_configuration.write(&sealed.unwrap()).unwrap();
    assert_eq!(machine.signers(), [NONE, OWN]);
    machine.boot_home().await;
    assert_eq!(machine.signers(), [OWN, OWN]);
}

#[tokio::test]
async fn an_announced_firmware_update_lets_no_system_of_another_key_in() {
    let machine = Machine::with_tpm();
    machine.runs_system_of(OWN);
    let (mut machine, _saved) = machine.member(automatic()).await;
    machine.seals = Some(Binding::TpmAlone);
    assert!(machine.boot_home().await.keys.unwrap().firmware_update_announced);
    machine.seals = None;
    assert_eq!(machine.bindings(), [Some(Binding::TpmAlone); 2]);
    assert_eq!(machine.signers(), [OWN, OWN]);
    machine.set(Tpms::One(1, 2));
    machine.runs_system_of(OTHER);
    assert_eq!(machine.boot_refused(None).await.code, code::STORAGE_TPM_REFUSES);
    machine.runs_system_of(OWN);
    machine.boot_home().await;
    assert_eq!(machine.bindings(), [Some(Binding::Registers); 2]);
    assert_eq!(machine.signers(), [OWN, OWN]);
}
