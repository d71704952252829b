//! Makes snapshots to look at: what tests and galleries draw.

use std::time::Duration;

use crate::guru::{Countdown, Guru};
use crate::snapshot::{
    Address, Authority, Certificate, Cluster, Crl, Etcd, Header, Interface, LogEntry, Logs, Member,
    Network, Pki, Service, ServiceState, Severity, Snapshot, Stage, StageState, Standing, Warning,
};

/// The longest time that can travel.
const FOR_EVER: Duration = Duration::from_millis(u64::MAX);

const NODE: &str = "polis-8e9e05c52164694d3f1a77c0b2d95e06";

/// One of each.
#[must_use]
pub fn all() -> [Snapshot; 4] {
    [empty(), ordinary(), failing(), overflowing()]
}

/// A machine of which nothing is known yet.
#[must_use]
pub fn empty() -> Snapshot {
    Snapshot {
        header: Header {
            version: "0.1.0".to_owned(),
            slot: "A".to_owned(),
            uptime: Duration::from_millis(310),
            clock: "2026-02-17 14:03:22 UTC".to_owned(),
            ..Header::default()
        },
        ..Snapshot::default()
    }
}

/// A cluster of one, some minutes after its first boot.
#[must_use]
pub fn ordinary() -> Snapshot {
    let mut snapshot = empty();
    snapshot.header.node = Some(NODE.to_owned());
    snapshot.header.cluster = Cluster::Home;
    snapshot.header.address = Some("10.0.2.15".to_owned());
    snapshot.header.uptime = Duration::from_secs(192);
    snapshot.ready = Some(Duration::from_millis(9_412));
    snapshot.warnings = vec![Warning {
        text: "The data partition is not encrypted: whoever has the disk can read it.".to_owned(),
        help: None,
    }];
    snapshot.stages = [
        ("kernel", 0, 910),
        ("initramfs", 910, 640),
        ("system", 1_550, 1_120),
        ("storage", 2_700, 2_400),
        ("network", 2_680, 1_230),
        ("parameters", 2_690, 40),
        ("cluster", 3_910, 5_490),
        ("consensus", 5_100, 4_180),
    ]
    .map(|(name, started, elapsed)| stage(name, StageState::Done, started, elapsed))
    .into();
    snapshot.network = Network {
        interfaces: vec![interface("eth0", true, &[("10.0.2.15/24", "DHCP", Some(85_200))])],
        gateway: Some("10.0.2.2".to_owned()),
        nameservers: vec!["10.0.2.3".to_owned()],
        time_servers: vec!["2.debian.pool.ntp.org".to_owned()],
        waiting: None,
    };
    snapshot.etcd = Some(Etcd {
        state: "voter".to_owned(),
        members: vec![member(NODE, 0x8e9e_05c5_2164_694d)],
        term: 3,
        index: 12_345,
        applied: 12_345,
        db_size: 20_480 * 641,
        db_quota: 2 << 30,
        survives: Some(0),
        ..Etcd::default()
    });
    snapshot.pki = Some(Pki {
        authorities: vec![
            Authority {
                name: "cluster CA".to_owned(),
                fingerprint: std::array::from_fn(|at| u8::try_from(at * 37 % 251).unwrap_or(0)),
                ends: "2036-02-15".to_owned(),
                days_left: 3_650,
                issued: Some(7),
                crl: Some(Crl { number: 3, entries: 1, age: Duration::from_secs(190) }),
                ..Authority::default()
            },
            Authority {
                name: "etcd CA".to_owned(),
                fingerprint: std::array::from_fn(|at| u8::try_from(at * 91 % 253).unwrap_or(0)),
                ends: "2036-02-15".to_owned(),
                days_left: 3_650,
                issued: Some(7),
                crl: Some(Crl { number: 3, entries: 1, age: Duration::from_secs(190) }),
                ..Authority::default()
            },
        ],
        certificates: vec![
            certificate("node", "cluster CA", 72, 20),
            certificate("etcd peer", "etcd CA", 58, 35),
        ],
    });
    snapshot.services = [
        (0, "root"),
        (1, "storage"),
        (1, "network"),
        (1, "parameters"),
        (1, "cluster"),
        (2, "consensus"),
        (3, "etcd"),
        (3, "autopromoter"),
        (3, "crl"),
        (2, "identity"),
        (1, "console"),
    ]
    .map(|(depth, name)| service(depth, name))
    .into();
    snapshot.logs = logs(&[
        (1_551, Severity::Info, "root", "Polis 0.1.0, slot A, image 5d41402abc4b2a76"),
        (2_702, Severity::Info, "root.storage", "made the data partition on /dev/vda, 7.4 GiB"),
        (2_711, Severity::Warning, "root.storage", "the data partition is not encrypted"),
        (3_909, Severity::Info, "root.network", "eth0 has 10.0.2.15/24 by DHCP for 86400 s"),
        (5_102, Severity::Info, "root.cluster.consensus", "starting etcd without a PKI"),
        (
            9_281,
            Severity::Info,
            "root.cluster.consensus",
            "etcd is serving, member 8e9e05c52164694d, voter",
        ),
        (9_412, Severity::Info, "root.cluster", "home, as the only member of a new cluster"),
    ]);
    snapshot
}

/// A machine with trouble of every kind, early and late.
#[must_use]
pub fn failing() -> Snapshot {
    let mut snapshot = ordinary();
    snapshot.header.cluster = Cluster::Unknown;
    snapshot.header.address = None;
    snapshot.header.uptime = Duration::from_millis(15_880);
    snapshot.ready = None;
    snapshot.previous_failure = Some(
        "#0802.0009 etcd ended by signal 9 three times in a row (image 5d41402abc4b2a76)"
            .to_owned(),
    );
    snapshot.stages.truncate(4);
    snapshot.stages.push(stage(
        "network",
        StageState::Waiting {
            what: "a DHCP lease on eth0; is the cable in, and is there a DHCP server?".to_owned(),
            since: Duration::from_millis(12_040),
        },
        2_680,
        13_200,
    ));
    let mut disk = stage("storage", StageState::Started, 2_700, 13_180);
    disk.progress = Some(62);
    snapshot.stages[3] = disk;
    for name in ["parameters", "cluster", "consensus"] {
        snapshot.stages.push(stage(name, StageState::Pending, 0, 0));
    }
    snapshot.network = Network {
        interfaces: vec![interface("eth0", true, &[]), interface("enp0s20f0u1", false, &[])],
        waiting: Some(
            "a DHCP lease on eth0; is the cable in, and is there a DHCP server?".to_owned(),
        ),
        ..Network::default()
    };
    if let Some(etcd) = &mut snapshot.etcd {
        let mut second = member("polis-0b7d3a9915c04e218f6610aa3c5d7e94", 0x0b7d_3a99_15c0_4e21);
        second.own = false;
        second.leader = false;
        second.answers = false;
        let mut third = member("", 0xfe12_9001_d4c8_b3a7);
        third.url = "https://polis-5c2e90b1f7d84a6399d01b8e4f3a2c75:7834".to_owned();
        third.own = false;
        third.leader = false;
        third.standing = Standing::Learner { caught_up: Some(71) };
        etcd.members.extend([second, third]);
        etcd.applied = 12_021;
        etcd.db_size = 1_900 << 20;
        etcd.alarms = vec!["NOSPACE on 8e9e05c52164694d".to_owned()];
        etcd.survives = None;
    }
    if let Some(pki) = &mut snapshot.pki {
        pki.authorities[1].days_left = 120;
        pki.certificates[1] = certificate("etcd peer", "etcd CA", 12, 87);
        let mut old = certificate("metrics", "cluster CA", -3, 100);
        old.renews = None;
        pki.certificates.push(old);
        pki.authorities[1].crl = None;
    }
    for (at, state, restarts, cause) in [
        (2, ServiceState::Starting, 0, None),
        (
            6,
            ServiceState::Restarting,
            4,
            Some(
                "etcd ended by signal 9 (killed), after 1.2 s; its last line was: context deadline exceeded",
            ),
        ),
        (7, ServiceState::Done, 0, None),
        (9, ServiceState::Dead, 11, Some("panic: no key")),
    ] {
        let service = &mut snapshot.services[at];
        service.state = state;
        service.restarts = restarts;
        service.cause = cause.map(str::to_owned);
        service.since = Duration::from_millis(2_300);
    }
    let more = logs(&[
        (11_020, Severity::Error, "root.cluster.consensus", "etcd ended by signal 9"),
        (
            11_021,
            Severity::Debug,
            "root.supervisor",
            "root.cluster.consensus.etcd runs again in 1.4 s",
        ),
        (
            12_300,
            Severity::Warning,
            "root.network",
            "eth0: no answer to DHCPDISCOVER after 5 attempts; the next one is in 16 s, and the link has been up for 9.1 s",
        ),
        (13_000, Severity::Fatal, "root.identity", "panic: no key"),
    ]);
    let known = snapshot.logs.total;
    snapshot.logs.entries.extend(more.entries.into_iter().map(|mut entry| {
        entry.number += known;
        entry
    }));
    snapshot.logs.total += more.total;
    snapshot.logs.dropped = 34;
    snapshot
}

/// Names, texts and numbers that are as long as they get, and some that attack.
#[must_use]
pub fn overflowing() -> Snapshot {
    let long = "a-name-that-nobody-would-choose-but-which-someone-will-send-one-day ".repeat(3);
    let evil = format!("{long}\u{1b}[2J\u{202e}\u{6f22}\u{5b57}\r\n\u{2713}");
    let mut snapshot = failing();
    snapshot.header.node = Some(evil.clone());
    snapshot.header.address = Some("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff".to_owned());
    snapshot.header.uptime = FOR_EVER;
    snapshot.header.cluster = Cluster::Disowning;
    snapshot.warnings = vec![Warning { text: evil.clone(), help: Some(evil.clone()) }; 3];
    snapshot.network.interfaces =
        vec![interface(&evil, true, &[(&evil, &evil, Some(u64::MAX / 1000))]); 3];
    snapshot.network.waiting = Some(evil.clone());
    snapshot.network.nameservers = vec![evil.clone(); 9];
    for stage in &mut snapshot.stages {
        stage.name = evil.clone();
        stage.elapsed = Duration::from_secs(86_400 * 400);
    }
    if let Some(etcd) = &mut snapshot.etcd {
        for member in &mut etcd.members {
            member.name = evil.clone();
            member.url = evil.clone();
        }
        etcd.index = u64::MAX;
        etcd.db_size = u64::MAX;
        etcd.alarms = vec![evil.clone()];
    }
    if let Some(pki) = &mut snapshot.pki {
        for authority in &mut pki.authorities {
            authority.name = evil.clone();
            authority.crl = Some(Crl { number: u64::MAX, entries: u64::MAX, age: FOR_EVER });
        }
        for certificate in &mut pki.certificates {
            certificate.name = evil.clone();
            certificate.issuer = evil.clone();
            certificate.days_left = i64::MIN;
        }
    }
    for (depth, service) in (0..).zip(&mut snapshot.services) {
        service.depth = depth * 7;
        service.name = evil.clone();
        service.cause = Some(evil.clone());
        service.restarts = u64::MAX;
        service.since = FOR_EVER;
    }
    for entry in &mut snapshot.logs.entries {
        entry.name = evil.clone();
        entry.text = evil.clone();
        entry.time = FOR_EVER;
    }
    snapshot
}

/// A machine that was given no parameters.
#[must_use]
pub fn guru() -> Guru {
    Guru {
        code: "#0601.0000".to_owned(),
        stage: "parameters".to_owned(),
        causes: vec![
            "this machine was not told what to be".to_owned(),
            "no node parameters in fw_cfg or on the ESP".to_owned(),
            "/esp/polis/parameters.pb: No such file or directory (os error 2)".to_owned(),
        ],
        tried: vec![
            "fw_cfg opt/polis/parameters.pb: absent".to_owned(),
            "ESP polis/parameters.pb: absent".to_owned(),
        ],
        next: "Put node parameters on the ESP as polis/parameters.pb, or hand them to QEMU by fw_cfg, and reboot. \"polisctl parameters bootstrap\" writes them.".to_owned(),
        log: [
            "[    1.551] I root: Polis 0.1.0, slot A, image 5d41402abc4b2a76",
            "[    2.702] I root.storage: found the ESP on /dev/vda1",
            "[    2.720] I root.parameters: looking in fw_cfg",
            "[    2.731] I root.parameters: looking on the ESP",
            "[    2.740] F root.parameters: no node parameters in fw_cfg or on the ESP",
        ]
        .map(str::to_owned)
        .into(),
        version: "0.1.0".to_owned(),
        image: "5d41402abc4b2a76".to_owned(),
        attempt: 2,
        attempts_max: 3,
        countdown: Countdown::Reboot { seconds: 42 },
        unlock: false,
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
            "PCR 7 (Secure Boot) is not what it was when the key was sealed".to_owned(),
        ],
        tried: Vec::new(),
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
        attempt: 3,
        countdown: Countdown::Exhausted,
        ..guru()
    }
}

fn stage(name: &str, state: StageState, started: u64, elapsed: u64) -> Stage {
    let [started, elapsed] = [started, elapsed].map(Duration::from_millis);
    Stage { name: name.to_owned(), state, started, elapsed, progress: None }
}

fn interface(name: &str, carrier: bool, addresses: &[(&str, &str, Option<u64>)]) -> Interface {
    let address = |&(cidr, source, lease): &(&str, &str, Option<u64>)| Address {
        cidr: cidr.to_owned(),
        source: source.to_owned(),
        primary: true,
        lease: lease.map(Duration::from_secs),
    };
    Interface {
        name: name.to_owned(),
        mac: "52:54:00:12:34:56".to_owned(),
        driver: Some("virtio_net".to_owned()),
        carrier,
        asking: true,
        addresses: addresses.iter().map(address).collect(),
        ..Interface::default()
    }
}

fn member(name: &str, id: u64) -> Member {
    Member {
        name: name.to_owned(),
        id,
        url: format!("https://{name}:7834"),
        standing: Standing::Voter,
        leader: true,
        own: true,
        answers: true,
        ..Member::default()
    }
}

fn certificate(name: &str, issuer: &str, days_left: i64, used: u8) -> Certificate {
    Certificate {
        name: name.to_owned(),
        issuer: issuer.to_owned(),
        ends: "2026-04-30".to_owned(),
        days_left,
        renews: Some("2026-03-31".to_owned()),
        renew_at: 67,
        used,
        revoked: false,
    }
}

fn service(depth: u16, name: &str) -> Service {
    Service {
        depth,
        name: name.to_owned(),
        state: ServiceState::Healthy,
        since: Duration::from_secs(183),
        ..Service::default()
    }
}

fn logs(entries: &[(u64, Severity, &str, &str)]) -> Logs {
    let entry =
        |(number, &(millis, severity, name, text)): (u64, &(u64, Severity, &str, &str))| LogEntry {
            number,
            time: Duration::from_millis(millis),
            severity,
            name: name.to_owned(),
            text: text.to_owned(),
        };
    Logs {
        entries: (1..).zip(entries).map(entry).collect(),
        total: entries.len() as u64,
        dropped: 0,
    }
}
