//! Every command of the command line's own definition, with good and bad input, with and
//! without a terminal: a command that is added without a case here fails the test.

use std::time::{Duration, Instant};

use super::loopback::{Cluster, NODE, RECOVERY_KEY};
use super::testing::{Ended, World, closed_port};
use polis_wire::rpc::testing::node_id;

/// What a command needs, and what it prints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing but files.
    Local,
    /// The same, and what it prints is for another program.
    Script,
    /// A cluster.
    Remote,
    /// A cluster, and its only output is a table.
    Table,
    /// A cluster and a terminal of its own, which no test has.
    Screen,
}

/// Every command, in an order in which each finds what it needs. `ID` is the node, `AT`
/// where it is; a `@name` is a file.
const CASES: &[(&str, &[&str], Kind)] = &[
    ("owner create", &["-o", "@new.key"], Kind::Local),
    ("owner show", &["@new.key"], Kind::Local),
    ("parameters bootstrap", &["--owner-key", "@new.pub", "-o", "@node.pb"], Kind::Local),
    ("parameters show", &["@node.pb"], Kind::Local),
    ("parameters check", &["@node.pb"], Kind::Local),
    ("parameters register", &["--node", "ID=192.0.2.1", "-o", "@joins.pb"], Kind::Remote),
    ("cluster take-ownership", &[], Kind::Remote),
    ("cluster info", &[], Kind::Remote),
    ("cluster status", &[], Kind::Remote),
    ("cluster health", &[], Kind::Remote),
    ("cluster wait", &[], Kind::Remote),
    ("cluster registry list", &[], Kind::Remote),
    ("cluster registry set", &["a.example", "--mirror", "b.example/hub"], Kind::Remote),
    ("cluster registry delete", &["a.example", "--yes"], Kind::Remote),
    ("cluster ticket rotate", &["--yes"], Kind::Remote),
    ("cluster configure", &["--tpm", "disabled"], Kind::Remote),
    ("node list", &[], Kind::Table),
    ("get nodes", &[], Kind::Table),
    ("node describe", &["ID"], Kind::Remote),
    ("node status", &["ID"], Kind::Remote),
    ("node services", &["ID"], Kind::Table),
    ("node approve", &["ID", "--unchecked"], Kind::Remote),
    ("node roles", &["ID", "--remove", "consensus-member", "--yes"], Kind::Remote),
    ("node label", &["ID", "a=b"], Kind::Remote),
    ("node name", &["ID", "mail-1"], Kind::Remote),
    ("node reboot", &["ID", "--yes"], Kind::Remote),
    ("node poweroff", &["ID", "--yes"], Kind::Remote),
    ("node decommission", &["ID", "--yes"], Kind::Remote),
    ("node reset", &["ID", "--at", "AT", "--yes"], Kind::Remote),
    ("node delete", &["ID", "--yes"], Kind::Remote),
    ("node logs", &["ID", "--since", "2h"], Kind::Remote),
    ("node recovery-key show", &["ID"], Kind::Remote),
    ("node recovery-key forget", &["ID", "--recovery-key-file", "@recovery"], Kind::Remote),
    ("node unlock", &["ID", "--at", "AT", "--recovery-key-file", "@recovery"], Kind::Remote),
    (
        "user create",
        &["ann", "--role", "viewer", "--key", "@owner.key", "-o", "@ann.json"],
        Kind::Remote,
    ),
    ("user list", &[], Kind::Remote),
    ("user revoke", &["ann", "--yes"], Kind::Remote),
    ("etcd members", &[], Kind::Table),
    ("etcd status", &[], Kind::Remote),
    ("etcd snapshot", &["-o", "@etcd.db"], Kind::Remote),
    ("kubernetes kubeconfig", &["-o", "@kubeconfig"], Kind::Remote),
    ("kubernetes credential", &[], Kind::Local),
    ("kubernetes status", &[], Kind::Table),
    ("events", &["--since", "1h"], Kind::Table),
    ("top", &[], Kind::Table),
    ("support", &["-o", "@support.tar"], Kind::Remote),
    ("dashboard", &[], Kind::Screen),
    ("console", &["ID"], Kind::Screen),
    ("completion", &["bash"], Kind::Script),
    ("version", &[], Kind::Local),
    ("context set", &["other", "--key", "@owner.key"], Kind::Local),
    ("context import", &["@ann.json", "--key", "@owner.key"], Kind::Local),
    ("context show", &["home"], Kind::Local),
    ("context list", &[], Kind::Local),
    ("context use", &["home"], Kind::Local),
    ("context remove", &["home", "--yes"], Kind::Local),
];

/// All commands that do something, from the definition.
fn leaves(command: &clap::Command, path: &str, found: &mut Vec<String>) {
    for below in command.get_subcommands() {
        let path = format!("{path} {}", below.get_name());
        match below.has_subcommands() {
            true => leaves(below, &path, found),
            false => found.push(path.trim_start().to_owned()),
        }
    }
}

/// A case as a command line.
fn line(path: &str, arguments: &[&str], cluster: &Cluster) -> Vec<String> {
    let id = node_id(NODE).to_string();
    let filled = |word: &&str| match *word {
        "ID" => id.clone(),
        "AT" => cluster.address(),
        word => word.replace("ID=", &format!("{id}=")),
    };
    path.split(' ').map(str::to_owned).chain(arguments.iter().map(filled)).collect()
}

fn run(world: &World, columns: Option<usize>, line: &[String]) -> Ended {
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    match columns {
        None => world.run(&line),
        Some(columns) => world.run_in(columns, &line),
    }
}

fn prepared() -> (World, Cluster) {
    let world = World::new();
    let mut cluster = Cluster::new(&world);
    cluster.has_controller(&world);
    let key = polis_base::recovery::form::write(&RECOVERY_KEY);
    super::contexts::write(&world.path("recovery"), key.as_bytes()).unwrap();
    (world, cluster)
}

#[test]
fn every_command_has_a_case() {
    let mut there = Vec::new();
    leaves(&super::command(), "", &mut there);
    let mut cases: Vec<&str> = CASES.iter().map(|(path, _, _)| *path).collect();
    there.sort();
    cases.sort_unstable();
    assert_eq!(there, cases);
}

#[test]
fn every_command_does_its_work_in_every_width_and_format() {
    let formats: [(Option<usize>, &[&str]); 5] = [
        (None, &[]),
        (Some(80), &[]),
        (Some(120), &[]),
        (None, &["--output", "json"]),
        (None, &["--output", "yaml"]),
    ];
    for (columns, format) in formats {
        let (world, cluster) = prepared();
        for (path, arguments, kind) in CASES.iter().filter(|case| case.2 != Kind::Screen) {
            let mut line = line(path, arguments, &cluster);
            line.extend(format.iter().map(|&word| word.to_owned()));
            let ended = run(&world, columns, &line);
            assert_eq!(ended.status, 0, "{path} {format:?}: {}", ended.stderr);
            assert!(ended.stdout.ends_with('\n'), "{path} {format:?}: {:?}", ended.stdout);
            if *kind == Kind::Table && format.is_empty() {
                let widest = ended.stdout.lines().map(|line| line.chars().count()).max();
                let most = columns.unwrap_or(usize::MAX);
                assert!(widest <= Some(most), "{path} at {columns:?}:\n{}", ended.stdout);
            }
            if format.ends_with(&["json"]) && *kind != Kind::Script {
                let value = serde_json::from_str::<serde_json::Value>(&ended.stdout);
                assert!(value.is_ok(), "{path}: {value:?}: {}", ended.stdout);
            }
        }
    }
}

#[test]
fn every_command_rejects_what_it_does_not_know_with_status_2() {
    let (world, cluster) = prepared();
    for (path, arguments, _) in CASES {
        for wrong in [&["--nonsense"][..], &["--timeout", "5"], &["a", "b", "c", "d=e=", "f"]] {
            let mut line = line(path, arguments, &cluster);
            // A command that takes any number of words takes these, too.
            if wrong.len() > 2 && ["node label", "node logs"].contains(path) {
                continue;
            }
            line.extend(wrong.iter().map(|&word| word.to_owned()));
            for columns in [None, Some(80)] {
                let ended = run(&world, columns, &line);
                assert_eq!((ended.status, &*ended.stdout), (2, ""), "{path}: {}", ended.stderr);
                assert!(ended.stderr.starts_with("error: "), "{path}: {}", ended.stderr);
            }
        }
    }
    assert_eq!(cluster.asked(), [""; 0], "nothing was asked");
}

#[test]
fn every_command_whose_cluster_is_gone_ends_on_time_with_a_reason() {
    let (world, cluster) = prepared();
    let (_bound, closed) = closed_port();
    for (path, arguments, kind) in CASES {
        if matches!(kind, Kind::Local | Kind::Script) {
            continue;
        }
        let mut line = line(path, arguments, &cluster);
        if *path == "node unlock" {
            line[4].clone_from(&closed);
        }
        line.extend(["--timeout", "1500ms", "--endpoint", &closed].map(str::to_owned));
        let begun = Instant::now();
        let ended = run(&world, None, &line);
        let took = begun.elapsed();
        assert!([1, 3].contains(&ended.status), "{path}: {} {}", ended.status, ended.stdout);
        assert_eq!(ended.stdout, "", "{path}");
        assert!(ended.stderr.starts_with("error: "), "{path}: {}", ended.stderr);
        assert!(took < Duration::from_secs(8), "{path} took {took:?}");
    }
}

/// An address that accepts connections and never answers.
fn silent_port() -> (std::net::TcpListener, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// A command is silent for 400 ms at most; all of them at once on a loaded machine need
/// longer, and a command without a sign has none before its timeout.
const SIGN_MAX: Duration = Duration::from_millis(2500);

#[test]
fn every_command_gives_a_sign_of_life_within_a_second_while_nothing_answers() {
    let (world, cluster) = prepared();
    let (_listens, silent) = silent_port();
    let ended: Vec<(&str, Ended)> = std::thread::scope(|scope| {
        let remote = CASES.iter().filter(|case| !matches!(case.2, Kind::Local | Kind::Script));
        let begun = remote.map(|(path, arguments, _)| {
            let mut line = line(path, arguments, &cluster);
            if *path == "node unlock" {
                line[4].clone_from(&silent);
            }
            line.extend(["--timeout", "4s", "--endpoint", &silent].map(str::to_owned));
            let world = &world;
            (path, scope.spawn(move || run(world, None, &line)))
        });
        let begun: Vec<_> = begun.collect();
        begun.into_iter().map(|(path, ended)| (*path, ended.join().unwrap())).collect()
    });
    for (path, ended) in ended {
        assert!([1, 3].contains(&ended.status), "{path}: {}", ended.stderr);
        let sign = ended.sign.unwrap();
        assert!(sign < SIGN_MAX, "{path}: {sign:?}: {}", ended.stderr);
    }
}

#[test]
fn health_tells_scripts_by_its_status() {
    let (world, cluster) = prepared();
    assert_eq!(world.runs(&["cluster", "health"]), "healthy\n");
    cluster.etcd_is_silent();
    let ended = world.run(&["cluster", "health", "-o", "json"]);
    assert_eq!(ended.status, 1, "{}", ended.stderr);
    let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(value["healthy"], false);
    assert!(value["problems"][0].as_str().unwrap().contains("does not answer"), "{value}");
    let (_bound, closed) = closed_port();
    let ended = world.run(&["cluster", "health", "--endpoint", &closed, "--timeout", "1500ms"]);
    assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
}
