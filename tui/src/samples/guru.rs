//! Failures that open the trapdoor.

use crate::guru::{Countdown, Guru};

/// A machine that was given no parameters.
#[must_use]
pub fn guru() -> Guru {
    Guru {
        code: "#0601.0000".to_owned(),
        stage: "parameters".to_owned(),
        causes: vec!["this machine has no node parameters".to_owned()],
        tried: [
            "fw_cfg item opt/polis/parameters.pb: absent",
            "polis/parameters.pb on the ESP: absent",
            "SMBIOS OEM string (type 11): absent",
            "user-data on a disk labelled cidata: absent",
            "openstack/latest/user_data on a disk labelled config-2: absent",
        ]
        .map(str::to_owned)
        .into(),
        next: "Put node parameters at polis/parameters.pb on the ESP, in fw_cfg, in an SMBIOS \
               OEM string, or on a disk labelled cidata or config-2, then reboot. `polisctl \
               parameters bootstrap` (a new cluster) and `polisctl parameters register` (one \
               that runs) write them."
            .to_owned(),
        log: [
            "[    1.551] I root: Polis 0.1.0, slot A, image 5d41402abc4b2a76",
            "[    2.702] I root.storage: found the ESP on /dev/vda1",
            "[    2.720] I root.parameters: looking in fw_cfg",
            "[    2.731] I root.parameters: looking on the ESP",
            "[   12.740] F root.parameters: this machine has no node parameters",
        ]
        .map(str::to_owned)
        .into(),
        version: "0.1.0".to_owned(),
        image: "5d41402abc4b2a76".to_owned(),
        attempt: 2,
        attempts_max: 4,
        countdown: Countdown::Reboot { seconds: 42 },
        unlock: false,
        maintenance: String::new(),
    }
}

/// A disk that its recovery key would open.
#[must_use]
pub fn guru_locked() -> Guru {
    Guru {
        code: "#0412.0000".to_owned(),
        stage: "storage".to_owned(),
        causes: vec![
            "the TPM refuses the node's half of the key".to_owned(),
            "PCR 7 (Secure Boot) has changed since the key was sealed".to_owned(),
        ],
        tried: Vec::new(),
        log: [
            "[    1.551] I root: Polis 0.1.0, slot A, image 5d41402abc4b2a76",
            "[    2.702] I root.storage: found the data partition on /dev/vda4",
            "[    2.951] F root.storage: the TPM refuses the node's half of the key",
        ]
        .map(str::to_owned)
        .into(),
        next: "Undo the change of the firmware's settings and reboot, or press U and type the recovery key of this machine.".to_owned(),
        unlock: true,
        ..guru()
    }
}

/// A guru whose every text is longer than the screen.
#[must_use]
pub fn guru_overflowing() -> Guru {
    let long = "a chain of causes that goes on and on, with-a-word-that-has-no-end-".repeat(6);
    Guru {
        causes: vec![long.clone(); 9],
        tried: vec![long.clone(); 5],
        log: (0..500).map(|number| format!("[{number:>9}.000] I root.{number}: {long}")).collect(),
        attempt: 4,
        countdown: Countdown::Exhausted,
        ..guru()
    }
}

/// A guru whose names are longer than anybody would choose them.
#[must_use]
pub fn guru_wide() -> Guru {
    let name = "a-name-longer-than-any-that-a-person-would-choose-or-send--\u{6f22}";
    Guru {
        stage: name.to_owned(),
        version: name.to_owned(),
        image: name.to_owned(),
        causes: vec![name.repeat(4), format!("{name}: No such file or directory (os error 2)")],
        tried: vec![name.to_owned()],
        log: vec![format!("[    2.740] F root.{name}: {}", name.repeat(3))],
        ..guru()
    }
}

/// A machine that was given no parameters, and that can be reached.
#[must_use]
pub fn guru_in_maintenance() -> Guru {
    let command = "polisctl maintenance describe 10.0.2.15 --code MYKT-F9X7-MYKT-F9X7-Z01G";
    Guru { maintenance: command.to_owned(), ..guru() }
}
