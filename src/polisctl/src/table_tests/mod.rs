//! Every command of the command line's own definition, with good and bad input, with and
//! without a terminal: a command that is added without a case here fails the test.

mod cases;

use std::time::{Duration, Instant};

use ed25519_dalek::SigningKey;
use sha2::{Digest as _, Sha256};

use self::cases::{CASES, Kind};
use super::loopback::{Cluster, NODE, RECOVERY_KEY};
use super::rights;
use super::testing::{Ended, World, closed_port};
use super::update::tests::bundle;
use polis_wire::rpc::Role;
use polis_wire::rpc::testing::node_id;

/// All commands that do something, from the definition.
fn leaves(command: &clap::Command, path: &str, found: &mut Vec<(String, clap::Command)>) {
    for below in command.get_subcommands() {
        let path = format!("{path} {}", below.get_name());
        let needs_one = below.is_subcommand_required_set() || below.is_arg_required_else_help_set();
        if !below.has_subcommands() || !needs_one {
            found.push((path.trim_start().to_owned(), below.clone()));
        }
        leaves(below, &path, found);
    }
}

fn all_leaves() -> Vec<(String, clap::Command)> {
    let mut there = Vec::new();
    leaves(&super::command(), "", &mut there);
    there
}

/// A case as a command line.
fn line(path: &str, arguments: &[&str], cluster: &Cluster) -> Vec<String> {
    let id = node_id(NODE).to_string();
    let filled = |word: &&str| match *word {
        "ID" => id.clone(),
        "AT" => cluster.address(),
        "BUCKET" => cluster.bucket(),
        "KEY" => cluster.fingerprint(),
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

/// The faults of the commands of a table, so that a run names all of them.
#[derive(Default)]
struct Faults(Vec<String>);

impl Faults {
    fn expect(&mut self, is_right: bool, path: &str, ended: &Ended) {
        if !is_right {
            let Ended { status, stdout, stderr, .. } = ended;
            self.0.push(format!("{path}: status {status}\n{stdout}{stderr}"));
        }
    }

    /// No line is wider than the terminal.
    fn expect_fits(&mut self, columns: Option<usize>, path: &str, ended: &Ended) {
        let lines = ended.stdout.lines().chain(ended.stderr.lines());
        let wide = |line: &&str| columns.is_some_and(|columns| line.chars().count() > columns);
        self.0.extend(lines.filter(wide).map(|line| format!("{path} at {columns:?}: {line}")));
    }

    #[track_caller]
    fn none(self) {
        assert!(self.0.is_empty(), "{} faults:\n{}", self.0.len(), self.0.join("\n"));
    }
}

/// Calls that change nothing.
const READS: [&str; 12] = [
    "CheckParameters",
    "Describe",
    "ReadLog",
    "Attest",
    "GetStatus",
    "GetFirewall",
    "Services",
    "Logs",
    "Console",
    "GetRecoveryKey",
    "GetRegisterTicket",
    "PlanUpdate",
];

/// The calls since the last query that change something.
fn changes(cluster: &Cluster) -> Vec<String> {
    let is_read = |call: &String| READS.iter().any(|read| call.starts_with(read));
    cluster.asked().into_iter().filter(|call| !is_read(call)).collect()
}

fn prepared() -> (World, Cluster) {
    let world = World::new();
    let mut cluster = Cluster::new(&world);
    cluster.has_controller(&world);
    cluster.has_bucket(&world);
    let founds = ["parameters", "bootstrap", "--owner-key", "@owner.key", "-o", "@given.pb"];
    assert_eq!(world.run(&founds).status, 0);
    let key = polis_base::recovery::form::write(&RECOVERY_KEY);
    super::contexts::write(&world.path("recovery"), key.as_bytes()).unwrap();
    super::contexts::write(&world.path("wrong"), b"nothing that fits").unwrap();
    let settings = "format: polis-settings-v1\ntpm_mode: required\n";
    super::contexts::write(&world.path("settings"), settings.as_bytes()).unwrap();
    let snapshot = [super::loopback::SNAPSHOT, &Sha256::digest(super::loopback::SNAPSHOT)].concat();
    super::contexts::write(&world.path("snapshot.age"), &super::loopback::encrypted(&snapshot))
        .unwrap();
    let release = SigningKey::from_bytes(&[3; 32]);
    let digits = polis_base::hex::encode(release.verifying_key().as_bytes());
    super::contexts::write(&world.path("update"), &bundle(&release)).unwrap();
    super::contexts::write(&world.path("release.pub"), digits.as_bytes()).unwrap();
    let other = SigningKey::from_bytes(&[4; 32]);
    let digits = polis_base::hex::encode(other.verifying_key().as_bytes());
    super::contexts::write(&world.path("other.pub"), digits.as_bytes()).unwrap();
    (world, cluster)
}

#[test]
fn every_command_has_a_case_and_what_it_takes_is_tried_with_wrong_input() {
    let there = all_leaves();
    for (path, command) in &there {
        let case = CASES.iter().find(|case| case.0 == path);
        let Some((_, _, _, wrong)) = case else { panic!("`{path}` has no case") };
        let takes = command.get_arguments().any(|arg| {
            arg.get_action().takes_values() && !arg.is_global_set() && arg.get_id() != "output"
        });
        assert_eq!(takes, !wrong.is_empty(), "`{path}` takes input: {takes}");
    }
    for (path, ..) in CASES {
        assert!(there.iter().any(|(command, _)| command == path), "`{path}` is missing");
    }
}

#[test]
fn the_help_of_every_command_fits_into_80_columns() {
    let world = World::new();
    let groups = [
        "",
        "parameters",
        "owner",
        "context",
        "cluster",
        "node",
        "maintenance",
        "get",
        "user",
        "etcd",
        "snapshot",
        "update",
    ];
    let paths = all_leaves().into_iter().map(|(path, _)| path);
    let mut faults = Faults::default();
    for path in paths.chain(groups.map(str::to_owned)).chain(["kubernetes".to_owned()]) {
        for help in ["--help", "-h"] {
            let line: Vec<String> =
                path.split_whitespace().map(str::to_owned).chain([help.to_owned()]).collect();
            for columns in [None, Some(80), Some(100)] {
                let ended = run(&world, columns, &line);
                faults.expect(ended.status == 0, &path, &ended);
                faults.expect_fits(columns.or(Some(80)), &path, &ended);
            }
        }
    }
    faults.none();
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
    let mut faults = Faults::default();
    for (columns, format) in formats {
        let (world, cluster) = prepared();
        for (path, arguments, kind, _) in CASES {
            let mut line = line(path, arguments, &cluster);
            line.extend(format.iter().map(|&word| word.to_owned()));
            let ended = run(&world, columns, &line);
            if (*kind == Kind::Screen || *path == "completion") && !format.is_empty() {
                let refused = ended.status == 2 && ended.stderr.contains("prints no document");
                faults.expect(refused && ended.stdout.is_empty(), path, &ended);
                continue;
            }
            if *kind == Kind::Screen {
                let refused = ended.status == 1 && ended.stderr.contains("needs a terminal");
                faults.expect(refused && ended.stdout.is_empty(), path, &ended);
                continue;
            }
            // cryptsetup counts a line feed.
            let is_whole = ended.stdout.ends_with('\n') || path.ends_with(" passphrase");
            faults.expect(ended.status == 0 && is_whole, path, &ended);
            if format.is_empty() && *kind != Kind::Script {
                faults.expect_fits(columns, path, &ended);
            }
            if format.ends_with(&["json"]) && *kind != Kind::Script {
                let value = serde_json::from_str::<serde_json::Value>(&ended.stdout);
                faults.expect(value.is_ok(), path, &ended);
            }
        }
    }
    faults.none();
}

#[test]
fn no_command_is_wider_than_the_terminal_with_the_longest_names_and_dead_nodes() {
    let (world, cluster) = prepared();
    let (_bound, closed) = closed_port();
    cluster.has_a_crowd(&world, &closed);
    let lists = ["cluster", "node list", "get", "etcd", "user list", "kubernetes", "events", "top"];
    let mut faults = Faults::default();
    for columns in [80, 100, 120] {
        for (path, arguments, kind, _) in CASES {
            let is_list = *kind != Kind::Script && lists.iter().any(|list| path.starts_with(list));
            if !is_list || *path == "cluster wait" {
                continue;
            }
            std::fs::remove_file(world.path("etcd.db")).unwrap_or_default();
            let ended = run(&world, Some(columns), &line(path, arguments, &cluster));
            // A node that does not answer may be a failure.
            faults.expect(ended.status < 2, path, &ended);
            faults.expect_fits(Some(columns), path, &ended);
        }
    }
    faults.none();
}

#[test]
fn every_command_rejects_what_it_does_not_know_with_status_2() {
    let (world, cluster) = prepared();
    let mut faults = Faults::default();
    for (path, arguments, _, _) in CASES {
        for wrong in [&["--nonsense"][..], &["--timeout", "5"], &["a", "b", "c", "d=e=", "f"]] {
            let mut line = line(path, arguments, &cluster);
            // A command that takes any number of words takes these, too.
            if wrong.len() > 2 && ["node approve", "node label", "node logs"].contains(path) {
                continue;
            }
            line.extend(wrong.iter().map(|&word| word.to_owned()));
            for columns in [None, Some(80), Some(120)] {
                let ended = run(&world, columns, &line);
                let refused = ended.status == 2 && ended.stderr.starts_with("error: ");
                faults.expect(refused && ended.stdout.is_empty(), path, &ended);
                faults.expect_fits(columns, path, &ended);
            }
        }
    }
    faults.none();
    assert_eq!(cluster.asked(), [""; 0], "nothing was asked");
}

#[test]
fn every_command_refuses_wrong_input_and_changes_nothing() {
    let (world, cluster) = prepared();
    let mut faults = Faults::default();
    for (path, _, kind, wrong) in CASES {
        for (arguments, status, said) in *wrong {
            // Without a terminal it says that first.
            if *kind == Kind::Screen && *status == 1 {
                continue;
            }
            for columns in [None, Some(80), Some(120)] {
                let ended = run(&world, columns, &line(path, arguments, &cluster));
                let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
                let refused = ended.status == *status && ended.stderr.starts_with("error: ");
                let says = words(&ended.stderr).contains(said);
                let what = format!("{path} {arguments:?}");
                faults.expect(refused && says && ended.stdout.is_empty(), &what, &ended);
                faults.expect_fits(columns, path, &ended);
            }
        }
    }
    faults.none();
    assert_eq!(changes(&cluster), [""; 0], "something was changed");
}

/// Commands that change something without a dry run: the first shows the comparison before
/// it acts.
const WITHOUT_DRY_RUN: [&str; 1] = ["cluster take-ownership"];

#[test]
fn every_command_that_changes_the_cluster_has_a_dry_run_that_does_not() {
    let (world, cluster) = prepared();
    let mut changing = 0;
    for (path, arguments, _, _) in CASES.iter().filter(|case| case.2 == Kind::Remote) {
        let (_, command) = all_leaves().into_iter().find(|(leaf, _)| leaf == path).unwrap();
        let has = |long: &str| command.get_arguments().any(|arg| arg.get_long() == Some(long));
        let mut line = line(path, arguments, &cluster);
        if has("dry-run") {
            line.push("--dry-run".to_owned());
            let ended = run(&world, None, &line);
            assert_eq!(ended.status, 0, "{path}: {}", ended.stderr);
            assert!(ended.stdout.contains("dry run"), "{path}: {}", ended.stdout);
            assert_eq!(changes(&cluster), [""; 0], "{path}");
            line.pop();
        }
        let ended = run(&world, None, &line);
        assert_eq!(ended.status, 0, "{path}: {}", ended.stderr);
        if !changes(&cluster).is_empty() && !WITHOUT_DRY_RUN.contains(path) {
            assert!(has("dry-run"), "{path} has no dry run");
            changing += 1;
        }
    }
    assert!(changing > 10, "only {changing} change something");
}

#[test]
fn every_command_is_refused_to_the_roles_below_the_one_that_the_access_table_names() {
    let mut faults = Faults::default();
    let mut refused = 0;
    for role in [Role::Viewer, Role::Operator, Role::Owner] {
        let (world, cluster) = prepared();
        cluster.lets_in_as(&world, role);
        for (path, arguments, kind, _) in CASES {
            // The holder of the owner's key becomes the user of a new context by it.
            if matches!(kind, Kind::Local | Kind::Screen) || *path == "cluster take-ownership" {
                continue;
            }
            let line = line(path, arguments, &cluster);
            let ended = run(&world, None, &line);
            let is_refused = ended.stderr.contains("this call needs the certificate of");
            let permits = rights::permits(role, &line.join(" "));
            let is_right = is_refused == (ended.status != 0) && is_refused != permits;
            faults.expect(is_right, &format!("{path} as {role}"), &ended);
            refused += usize::from(is_refused);
        }
    }
    faults.none();
    assert!(refused > 20, "only {refused} were refused");
}

/// The word of a command line that is the address of its machine, for a command that asks no
/// cluster for it.
fn names_itself(path: &str) -> Option<usize> {
    match path {
        "node unlock" => Some(4),
        path if path.starts_with("maintenance ") => Some(2),
        _ => None,
    }
}

#[test]
fn every_command_whose_cluster_is_gone_ends_on_time_with_a_reason() {
    let (world, cluster) = prepared();
    let (_bound, closed) = closed_port();
    let ended = of_remote(|path, arguments| {
        let mut line = line(path, arguments, &cluster);
        names_itself(path).into_iter().for_each(|at| line[at].clone_from(&closed));
        line.extend(["--timeout", "1500ms", "--endpoint", &closed].map(str::to_owned));
        let begun = Instant::now();
        (run(&world, Some(80), &line), begun.elapsed())
    });
    let mut faults = Faults::default();
    for (path, (ended, took)) in ended {
        let says = [1, 3].contains(&ended.status) && ended.stderr.contains("error: ");
        let on_time = took < Duration::from_secs(8);
        faults.expect(says && on_time && ended.stdout.is_empty(), path, &ended);
        faults.expect_fits(Some(80), path, &ended);
    }
    faults.none();
}

/// The results of `run` for each command that asks a cluster, all at once, since they wait.
fn of_remote<T: Send>(
    run: impl Fn(&str, &'static [&'static str]) -> T + Sync,
) -> Vec<(&'static str, T)> {
    let run = &run;
    std::thread::scope(|scope| {
        let remote = CASES.iter().filter(|case| !matches!(case.2, Kind::Local | Kind::Script));
        let begun: Vec<_> = remote
            .map(|(path, arguments, _, _)| (*path, scope.spawn(move || run(path, arguments))))
            .collect();
        begun.into_iter().map(|(path, ended)| (path, ended.join().unwrap())).collect()
    })
}

/// An address that accepts connections and never answers.
fn silent_port() -> (std::net::TcpListener, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Longest that a command may be silent: it says what it waits for after 400 ms.
const SIGN_MAX: Duration = Duration::from_secs(1);

#[test]
fn every_command_gives_a_sign_of_life_within_a_second_while_nothing_answers() {
    let (world, cluster) = prepared();
    let (_listens, silent) = silent_port();
    let ended = of_remote(|path, arguments| {
        let mut line = line(path, arguments, &cluster);
        names_itself(path).into_iter().for_each(|at| line[at].clone_from(&silent));
        line.extend(["--timeout", "4s", "--endpoint", &silent].map(str::to_owned));
        run(&world, None, &line)
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
