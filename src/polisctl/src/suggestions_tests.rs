//! Every command that a message, a screen or an error suggests: in which situation and to which
//! readers, and which test types it there.
//!
//! The commands are found in the sources, so one that is added without a situation fails.
//! Those that `polisctl` itself suggests are read from its output here, and typed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::loopback::{Cluster, NODE};
use super::rights;
use super::testing::{World, closed_port};
use polis_tui::ratatui::buffer::Buffer;
use polis_tui::ratatui::layout::Rect;
use polis_tui::{Page, Snapshot, View, samples};
use polis_wire::rpc::Role;
use polis_wire::rpc::testing::node_id;

/// A suggested command, with `_` for what a person or the program fills in; when it is
/// suggested, and to which readers; the tests that type it then.
type Suggestion = (&'static str, &'static str, &'static [Reader], &'static [&'static str]);

/// The reader of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    /// A person at a machine, at its log, or without a certificate: their role is not known.
    Local,
    /// A user of `polisctl`, with at least the role for the command that prints the text.
    User(Role),
}

const LOCAL: &[Reader] = &[Reader::Local];
const USERS: &[Reader] = &[Reader::User(Role::Viewer)];
const OPERATORS: &[Reader] = &[Reader::User(Role::Operator)];
const OWNERS: &[Reader] = &[Reader::User(Role::Owner)];
const ALL: &[Reader] = &[Reader::Local, Reader::User(Role::Viewer)];
const ROLES: [Role; 3] = [Role::Viewer, Role::Operator, Role::Owner];

const NO_CONTEXT: &str = "without_a_context_the_told_commands_lead_to_one";
const BAD_CONTEXT: &str = "a_context_that_cannot_be_used_tells_what_mends_it";
const ENDED: &str = "a_certificate_that_has_ended_tells_the_way_to_another_one";
const KEYS: &str = "a_recovery_key_tells_the_command_for_the_next_step";
const NO_SUCH: &str = "what_is_not_there_is_found_by_the_told_command";
const STATUS: &str = "each_command_of_the_state_of_a_cluster_works_while_it_is_shown";
const INVITED: &str = "a_new_user_comes_in_by_the_told_command";
const DETOURS: &str = "the_detours_of_a_context_are_shown_and_removed";
const NO_KEY: &str = "without_an_owner_key_the_told_command_makes_one";
const NO_CONTROLLER: &str = "without_a_controller_the_told_command_gives_a_node_the_role";
const SHARE: &str = "a_cluster_stores_no_share_of_a_key_by_the_told_command";
const LOG_TARGETS: &str = "targets_of_logs_are_checked_before_the_cluster_is_asked";
const PROXY: &str = "a_proxy_is_checked_before_the_cluster_is_asked";
const SNAPSHOT_TARGET: &str =
    "a_target_of_snapshots_is_checked_before_the_cluster_is_asked_and_its_key_is_never_printed";
const ATTESTATION_POLICY: &str = "an_attestation_policy_is_checked_before_the_cluster_is_asked";
const KUBERNETES_NAMES: &str =
    "names_of_kubernetes_are_checked_before_the_cluster_is_asked_and_shown";
const ATTESTED: &str = "a_machine_enters_only_with_a_start_and_a_maker_of_the_policy";
const SHIPPED: &str = "a_snapshot_is_listed_fetched_and_checked";
const WATCHED: &str = "an_outage_is_shown_and_does_not_end_a_watch_and_a_first_failure_does";
const AT: &str = "a_command_with_an_address_asks_nothing_of_a_node_that_was_not_named";
const OPERATES: &str = "an_owner_operates_the_cluster_and_lets_others_do_so";
const OWNS: &str = "ownership_is_taken_only_of_the_cluster_that_was_compared_and_by_its_key";
const FIRMWARE: &str =
    "an_announced_firmware_update_needs_no_recovery_key_and_one_that_was_not_does";
const WIPES: &str = "parameters_wipe_a_removed_node_by_its_full_id_alone";
const RESET: &str = "a_node_is_reset_only_after_a_question_and_told_before_it_is_removed";
const NAMED: &str = "a_node_is_given_a_name_and_loses_it";
const REPLACED: &str = "a_dead_voter_is_replaced_and_removed_nodes_learn_it";
const LOST: &str = "a_cluster_that_is_lost_begins_again_from_a_snapshot_and_an_old_disk_comes_back";
const OUTAGE: &str =
    "three_voters_and_their_workers_keep_every_acknowledged_write_through_each_outage";
const THREE: &str =
    "three_machines_from_nothing_become_three_voters_and_come_back_after_a_cold_start";
const ATTENDED: &str =
    "an_attended_machine_waits_after_a_reboot_until_its_owner_opens_it_from_afar";
const OPERATED: &str = "an_owner_sees_the_cluster_its_logs_and_its_screen_and_reboots_the_machine";
const UPDATED: &str = "a_node_takes_another_system_and_goes_back_from_one_that_panics";
const CARRIED: &str = "an_update_of_the_cluster_tells_how_it_goes_on";
const ONE_WAY: &str = "an_update_that_cannot_be_undone_says_so_and_asks_for_its_option";
const KUBECTL: &str = "a_context_names_the_cluster_and_the_way_to_a_credential";
const PARTS: &str = "an_api_server_that_starts_says_what_it_waits_for";
const INSTALLS: &str = "an_installation_names_a_disk_and_the_data_that_it_may_overwrite";
const WRITTEN: &str = "what_bootstrap_writes_is_what_show_prints";
const ROTATED: &str = "a_rotation_is_begun_after_a_question_and_waited_for_and_the_context_follows";
const NETWORK: &str = "a_network_that_the_node_gives_up_is_a_failure_with_its_cause";
const FIREWALL: &str = "a_firewall_is_confirmed_once_every_node_was_reached_through_it";
const MAINTAINED: &str =
    "a_machine_without_parameters_gets_them_by_its_code_and_then_obeys_its_owner_alone";
const REGISTRY: &str = "a_registry_is_set_listed_and_deleted";
const SETTINGS: &str = "a_file_that_is_wrong_is_refused_by_its_place_before_anything_is_sent";
const WORKLOADS: &str = "a_demo_answers_by_its_name_and_its_pods_end_with_the_machine";

const TOLD: &[Suggestion] = &[
    (
        "--context _ cluster take-ownership",
        "a context without a certificate; an owner's that has ended",
        ALL,
        &[BAD_CONTEXT, ENDED],
    ),
    (
        "--context _ context import FILE --key _",
        "the certificate of another user has ended",
        USERS,
        &[ENDED],
    ),
    ("--endpoint _ cluster take-ownership", "no context", LOCAL, &[NO_CONTEXT]),
    (
        "--endpoint _ cluster take-ownership --fingerprint _",
        "page Boot of a cluster without an owner",
        LOCAL,
        &[OWNS],
    ),
    ("cluster configure", "a trial of a firewall that is over", OWNERS, &[FIREWALL]),
    (
        "cluster configure --attestation-image",
        "parameters that name an attestation policy",
        ALL,
        &[ATTESTATION_POLICY],
    ),
    (
        "cluster configure --attestation-image FILE",
        "a machine that the attestation policy keeps out",
        OPERATORS,
        &[ATTESTED],
    ),
    (
        "cluster configure --cold-start attended",
        "page Boot and log of a machine whose disk keeps a share of its own key",
        LOCAL,
        &[SHARE],
    ),
    ("cluster configure --firewall-source", "a firewall without sources", USERS, &[FIREWALL]),
    (
        "cluster configure --kubernetes-name",
        "parameters that name names of Kubernetes",
        ALL,
        &[KUBERNETES_NAMES],
    ),
    ("cluster configure --log-target", "parameters that name targets of logs", ALL, &[LOG_TARGETS]),
    (
        "cluster configure --proxy",
        "parameters that name a proxy, a store that its proxy keeps from the cluster",
        ALL,
        &[PROXY],
    ),
    (
        "cluster configure --snapshot-credentials FILE",
        "a store that does not know the key of the cluster",
        ALL,
        &[SNAPSHOT_TARGET],
    ),
    (
        "cluster configure --snapshot-target",
        "parameters that name a target of snapshots",
        ALL,
        &[SNAPSHOT_TARGET],
    ),
    ("cluster export", "a file that has no settings of a cluster", USERS, &[SETTINGS]),
    ("cluster registry set _", "a pull of an image that failed", USERS, &[REGISTRY]),
    (
        "cluster rotate-ca",
        "the authorities were never rotated; page PKI of one that ends",
        ALL,
        &[ROTATED],
    ),
    ("cluster rotate-ca status", "a rotation that goes on without its command", OWNERS, &[ROTATED]),
    ("cluster status", "no terminal; no leader; a departure", USERS, &[OPERATES, OUTAGE]),
    ("cluster take-ownership", "a call without a certificate", USERS, &[BAD_CONTEXT, OWNS]),
    ("cluster ticket", "parameters without a ticket", LOCAL, &[OPERATES]),
    ("cluster ticket rotate", "a machine was deleted before it committed", OPERATORS, &[OPERATES]),
    (
        "cluster update FILE",
        "an update that waits for its bundle; a setting that the leader has not taken",
        USERS,
        &[CARRIED],
    ),
    ("cluster update abort", "the same; a node that did not take it", USERS, &[CARRIED]),
    ("cluster update resume", "a paused update; a node that did not take it", USERS, &[CARRIED]),
    ("cluster update status", "an update that goes on", USERS, &[CARRIED]),
    ("cluster wait", "no leader", USERS, &[OPERATES]),
    ("context import _ --key FILE", "a new user", OWNERS, &[INVITED]),
    ("context import ann.json --key ann.key", "the help of user create", LOCAL, &[INVITED]),
    ("context remove _", "a damaged context", LOCAL, &[BAD_CONTEXT]),
    ("context set _ --key FILE", "the key of another certificate", USERS, &[BAD_CONTEXT]),
    ("context show _", "a detour that is not there", USERS, &[DETOURS]),
    ("context use NAME", "no context in use", LOCAL, &[NO_CONTEXT]),
    ("etcd decrypt", "guru 0804: the snapshot on the ESP is encrypted", LOCAL, &[LOST]),
    ("etcd members", "a member that has no quorum", LOCAL, &[OUTAGE, OPERATED]),
    ("etcd snapshot", "guru 0801: most voters lost their data", LOCAL, &[LOST]),
    ("etcd snapshot -o FILE", "an update that cannot be undone", OWNERS, &[ONE_WAY]),
    ("etcd status", "the store is full; guru 0708: the store is another one", ALL, &[WATCHED]),
    ("key create -o FILE", "a new user without a key", USERS, &[INVITED]),
    ("key create -o ann.key", "the help of user create", LOCAL, &[INVITED]),
    ("kubernetes kubeconfig", "a caller without a certificate on port 6444", LOCAL, &[KUBECTL]),
    ("kubernetes status", "no API server is ready", USERS, &[PARTS]),
    ("maintenance describe _ _", "a guru meditation with a network", LOCAL, &[MAINTAINED]),
    ("node announce-firmware-update NODE", "guru 0412: the TPM refuses", LOCAL, &[FIRMWARE]),
    (
        "node approve _",
        "a machine that waits: its screen, F2, the dashboard",
        ALL,
        &[STATUS, THREE],
    ),
    ("node decommission NODE", "a member is to be deleted", OPERATORS, &[THREE]),
    ("node decommission _", "parameters that wipe a member", OPERATORS, &[WIPES, THREE]),
    ("node delete", "guru 0801: a voter lost its log", LOCAL, &[REPLACED]),
    (
        "node delete NODE --force",
        "one of three is dead, another is to leave",
        OPERATORS,
        &[REPLACED],
    ),
    ("node delete _ --force", "a node whose heartbeat is overdue", ALL, &[STATUS, REPLACED]),
    ("node list", "an unknown node; the words of a waiting machine", USERS, &[NO_SUCH]),
    ("node logs", "a claim whose volume cannot be made", LOCAL, &[OPERATED]),
    ("node logs NODE --name consensus.etcd", "etcd is too slow", LOCAL, &[OPERATED]),
    ("node name NODE --remove", "the name of another node", OPERATORS, &[NAMED]),
    ("node network _", "a network that was given up", OPERATORS, &[NETWORK]),
    ("node recovery-key _", "F1 while a key is not saved", LOCAL, &[KEYS]),
    ("node recovery-key forget _", "a key that was shown", OWNERS, &[KEYS]),
    ("node recovery-key show", "the log of a node whose key is not saved", LOCAL, &[KEYS]),
    (
        "node recovery-key show _",
        "an unsaved key in the state of the cluster",
        USERS,
        &[KEYS, STATUS],
    ),
    ("node reset _", "parameters that wipe a member", OPERATORS, &[WIPES, RESET]),
    ("node roles NODE --add consensus-member", "the last voter is to go", OPERATORS, &[THREE]),
    ("node roles NODE --add kubernetes-controller", "no controller", USERS, &[NO_CONTROLLER]),
    ("node roles _ --add consensus-member", "page etcd of a single voter", LOCAL, &[THREE]),
    ("node roles _ --add _", "page Workloads of a node without a role", LOCAL, &[WORKLOADS]),
    ("node roles _ --remove _", "page Workloads of a node that cannot serve", LOCAL, &[WORKLOADS]),
    (
        "node roles _ --remove consensus-member",
        "a voter that is to be wiped; a former voter",
        ALL,
        &[THREE, STATUS],
    ),
    ("node services _", "an unknown name of a log", USERS, &[NO_SUCH]),
    (
        "node status NODE",
        "a bundle that the node refused, a node that is not back; one that started differently",
        OPERATORS,
        &[UPDATED],
    ),
    ("node status NODE --at HOST", "no leader", USERS, &[AT]),
    ("node unlock NODE --at ADDRESS_", "a machine that waits for its key", LOCAL, &[ATTENDED]),
    ("node update NODE FILE", "something stands against the plan of an update", OWNERS, &[UPDATED]),
    ("owner create", "no key of an owner", LOCAL, &[NO_KEY]),
    ("owner create -o FILE", "the key of another user", OWNERS, &[OPERATES]),
    ("parameters bootstrap", "guru 0601, 0606; a founder without an address", LOCAL, &[WRITTEN]),
    (
        "parameters bootstrap --install-disk",
        "guru 0431: not exactly one disk to install to",
        LOCAL,
        &[INSTALLS],
    ),
    (
        "parameters bootstrap --storage",
        "guru 0712: a snapshot of another policy",
        LOCAL,
        &[WRITTEN],
    ),
    ("parameters register", "guru 0711: a removed node; a former voter", ALL, &[OPERATES, STATUS]),
    (
        "parameters register --install-disk",
        "guru 0431: not exactly one disk to install to",
        LOCAL,
        &[INSTALLS],
    ),
    ("parameters register --wipes", "guru 0711: a removed node", ALL, &[WIPES]),
    ("parameters register --wipes _", "guru 0714: the disk of a removed node", LOCAL, &[WIPES]),
    ("parameters register --wipes _ -o FILE", "a machine that cannot be reset", OWNERS, &[WIPES]),
    ("snapshot list", "a snapshot that a bucket lacks", LOCAL, &[SHIPPED]),
    ("update inspect FILE", "a bundle that the node refused", OWNERS, &[UPDATED]),
    ("user create", "a user without a certificate", USERS, &[OPERATES, ENDED]),
    (
        "user create ann --role operator --key ann.pub -o ann.json",
        "the help of user create",
        LOCAL,
        &[INVITED],
    ),
    ("user create NAME --role owner", "the last owner", OWNERS, &[OPERATES]),
    ("user list", "a role that may not", USERS, &[OPERATES]),
];

/// Sources that give commands to programs, or show them as samples.
const OTHERS: [&str; 4] = ["completion.rs", "testing.rs", "loopback", "samples"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(folders: &[&str]) -> Vec<(PathBuf, String)> {
    let mut folders: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

/// The commands that the texts of a source suggest, without comments and tests.
fn suggested_in(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code: String = code.lines().filter(is_code).map(|line| format!("{line}\n")).collect();
    // A string goes on after a backslash at the end of its line.
    let mut pieces = code.split("\\\n");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    pieces.for_each(|piece| text.push_str(piece.trim_start()));
    let known = super::command();
    let mut found = BTreeSet::new();
    for (at, name) in text.match_indices("polisctl ") {
        let rest = &text[at + name.len()..];
        let end = rest.find(['`', '"', '\\', ';', ':', ',', ')', '<', '\n']).unwrap_or(rest.len());
        let command = rest[..end].trim();
        let first = command.split(' ').next().unwrap_or_default();
        let is_command = known.find_subcommand(first).is_some() || first.starts_with("--");
        // The usage of a command, as clap prints it.
        let is_usage = rest[end..].starts_with('<');
        if is_command && !is_usage && command.contains(' ') {
            found.insert(filled(command));
        }
    }
    found
}

/// A command with `_` for each value that the program fills in.
fn filled(command: &str) -> String {
    let mut words = Vec::new();
    for word in command.split_whitespace() {
        words.push(match word.split_once('{') {
            Some((before, _)) => format!("{before}_"),
            None if word == "HOST" && words.last().is_some_and(|last| last == "--endpoint") => {
                "_".to_owned()
            }
            None => word.to_owned(),
        });
    }
    words.join(" ")
}

#[test]
fn every_told_command_has_a_situation_and_a_test_that_types_it_there() {
    let mut suggested = BTreeSet::new();
    for (path, text) in sources(&["src", "tui/src"]) {
        let shown = path.display().to_string();
        if !shown.ends_with("tests.rs") && !OTHERS.iter().any(|other| shown.contains(other)) {
            suggested.extend(suggested_in(&text));
        }
    }
    let known: BTreeSet<String> = TOLD.iter().map(|(command, ..)| (*command).to_owned()).collect();
    let new: Vec<_> = suggested.difference(&known).collect();
    assert!(new.is_empty(), "suggested without a situation: {new:#?}");
    let gone: Vec<_> = known.difference(&suggested).collect();
    assert!(gone.is_empty(), "not suggested any more: {gone:#?}");

    let tests = sources(&["src", "tests", "qemu/src"]);
    let words = |command: &str| -> Vec<String> {
        let words = command.split(' ').filter(|word| word.starts_with(char::is_lowercase));
        words.take(2).map(str::to_owned).collect()
    };
    for (command, situation, readers, shown_by) in TOLD {
        assert!(!situation.is_empty() && !shown_by.is_empty(), "{command}");
        assert!(!readers.is_empty(), "{command}");
        for test in *shown_by {
            let at = |(_, text): &&(PathBuf, String)| text.contains(&format!("fn {test}("));
            let Some((_, text)) = tests.iter().find(at) else {
                panic!("`{command}`: test {test} is missing");
            };
            // A test that follows what is suggested finds the command in the output.
            let follows = text.contains("fn follow(");
            let words = words(command);
            let spelled = [words.join(" "), words.join("\", \"")];
            let typed = spelled.iter().any(|command| text.contains(command.as_str()));
            let by_fleet = text.contains("cluster.found()") || text.contains("Fleet");
            assert!(follows || typed || by_fleet, "{test} does not type `{command}`");
        }
    }
}

/// Types each command in back quotes of an output, after `fill` has put in what a person
/// would, and returns what was suggested.
#[track_caller]
fn follow(world: &World, output: &str, fill: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut suggested = Vec::new();
    for (at, name) in output.match_indices("`polisctl ") {
        let rest = &output[at + name.len()..];
        let command = rest.split('`').next().unwrap_or_default().replace('\n', " ");
        suggested.push(command.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    for command in &suggested {
        let Some(typed) = fill(command) else { continue };
        let words: Vec<&str> = typed.split_whitespace().collect();
        let ended = world.asks(&words, "yes\n");
        assert_eq!(ended.status, 0, "suggested: {command}\ntyped: {typed}\n{}", ended.stderr);
    }
    suggested
}

#[test]
fn without_a_context_the_told_commands_lead_to_one() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let at = cluster.address();
    world.runs(&["context", "remove", "home", "--yes"]);
    let refused = world.refuses(&["node", "list"]);
    let suggested = follow(&world, &refused, |command| {
        let typed = command.replace("HOST", &at);
        // The other way out is for a user with a context.
        (!command.contains("context use")).then(|| format!("{typed} --owner-key @owner.key"))
    });
    assert_eq!(suggested, ["--endpoint HOST cluster take-ownership", "context use NAME"]);
    world.runs(&["node", "list"]);

    let named = world.run(&["node", "list", "--context", "work"]);
    assert!(named.stderr.contains("there are: "), "{}", named.stderr);
    let name = world.runs(&["context", "list", "-o", "json"]);
    let name: serde_json::Value = serde_json::from_str(&name).unwrap();
    let name = name[0]["name"].as_str().unwrap().to_owned();
    world.runs(&["context", "set", "spare", "--key", "@owner.key"]);
    std::fs::remove_file(world.path("polis/current")).unwrap();
    let refused = world.refuses(&["node", "list"]);
    follow(&world, &refused, |command| {
        command.contains("context use").then(|| command.replace("NAME", &name))
    });
    world.runs(&["node", "list"]);
}

#[test]
fn a_context_that_cannot_be_used_tells_what_mends_it() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    world.runs(&["context", "set", "new", "--endpoint", &cluster.address(), "--key", "@owner.key"]);
    let refused = world.refuses(&["node", "list", "--context", "new"]);
    let suggested =
        follow(&world, &refused, |command| Some(format!("{command} --owner-key @owner.key")));
    assert_eq!(suggested, ["--context new cluster take-ownership"]);
    world.runs(&["node", "list", "--context", "new"]);

    world.runs(&["owner", "create", "-o", "@other.key"]);
    world.runs(&["context", "set", "home", "--key", "@other.key"]);
    let refused = world.refuses(&["node", "list", "--context", "home"]);
    let suggested = follow(&world, &refused, |command| Some(command.replace("FILE", "@owner.key")));
    assert_eq!(suggested, ["context set home --key FILE"]);
    world.runs(&["node", "list", "--context", "home"]);

    let file = world.path("polis/contexts/home/context.json");
    super::contexts::write(&file, b"{ nonsense").unwrap();
    let refused = world.refuses(&["node", "list", "--context", "home"]);
    let suggested = follow(&world, &refused, |command| Some(command.to_owned()));
    assert_eq!(suggested, ["context remove home"]);
    assert!(!file.exists());
}

#[test]
fn a_certificate_that_has_ended_tells_the_way_to_another_one() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    cluster.ends_the_certificate(&world, Role::Owner);
    let refused = world.refuses(&["node", "list"]);
    assert!(refused.contains("the certificate of context home ended on 2023-12-14"), "{refused}");
    let suggested = follow(&world, &refused, |command| Some(command.to_owned()));
    assert_eq!(suggested, ["--context home cluster take-ownership"]);
    world.runs(&["node", "list"]);

    let create = ["user", "create", "ann", "--role", "viewer", "--key", "@owner.key"];
    world.runs(&[&create[..], &["-o", "@ann.json"]].concat());
    cluster.ends_the_certificate(&world, Role::Viewer);
    let refused = world.refuses(&["node", "list"]);
    // Which an owner has typed.
    let suggested = follow(&world, &refused, |command| {
        (command != "user create").then(|| command.replace("FILE", "@ann.json"))
    });
    assert_eq!(suggested[0], "user create");
    world.runs(&["node", "list"]);

    let damaged = world.refuses(&["context", "import", "@owner.key", "--key", "@owner.key"]);
    assert_eq!(follow(&world, &damaged, |_command| None), ["user create"]);
}

#[test]
fn a_recovery_key_tells_the_command_for_the_next_step() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let refused = world.asks(&["node", "recovery-key", "forget", &id], "ZZZZ\n");
    assert_eq!(refused.status, 1, "{}", refused.stderr);
    let suggested = follow(&world, &refused.stderr, |command| Some(command.to_owned()));
    assert_eq!(suggested, [format!("node recovery-key show {id}")]);
    let shown = world.run(&["node", "recovery-key", &id]);
    super::contexts::write(&world.path("saved"), shown.stdout.as_bytes()).unwrap();
    let suggested = follow(&world, &shown.stderr, |command| {
        Some(format!("{command} --recovery-key-file @saved"))
    });
    assert_eq!(suggested, [format!("node recovery-key forget {id}")]);
    assert!(cluster.asked().contains(&"ConfirmRecoveryKey".to_owned()));
}

#[test]
fn a_cluster_stores_no_share_of_a_key_by_the_told_command() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    world.runs(&["cluster", "configure", "--cold-start", "attended"]);
    assert_eq!(cluster.asked(), ["ConfigureCluster"]);
}

#[test]
fn what_is_not_there_is_found_by_the_told_command() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let refused = world.refuses(&["node", "describe", "ffff"]);
    let suggested = follow(&world, &refused, |command| Some(command.to_owned()));
    assert_eq!(suggested, ["node list"]);
    let refused = world.refuses(&["node", "logs", &id, "--name", "cruator"]);
    let suggested = follow(&world, &refused, |command| Some(command.to_owned()));
    assert_eq!(suggested, [format!("node services {id}")]);
    drop(cluster);
}

#[test]
fn each_command_of_the_state_of_a_cluster_works_while_it_is_shown() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let (_bound, closed) = closed_port();
    cluster.has_a_crowd(&world, &closed);
    for columns in [80, 120] {
        let shown = world.run_in(columns, &["cluster", "status"]);
        assert_eq!(shown.status, 0, "{}", shown.stderr);
        let suggested = follow(&world, &shown.stdout, |command| Some(completed(command)));
        let wanted = [
            "node delete polis-",
            "node approve polis-",
            "node recovery-key show polis-",
            "node roles polis-",
            "parameters register",
        ];
        for wanted in wanted {
            assert!(
                suggested.iter().any(|suggested| suggested.starts_with(wanted)),
                "{wanted}: {suggested:?}"
            );
        }
    }
    let asked = cluster.asked();
    for call in ["DeleteNode", "ApproveNode", "GetRecoveryKey"] {
        assert!(asked.iter().any(|asked| asked == call), "{call}: {asked:?}");
    }
}

#[test]
fn an_update_of_the_cluster_tells_how_it_goes_on() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let release = ed25519_dalek::SigningKey::from_bytes(&[3; 32]);
    super::contexts::write(&world.path("update"), &super::update::tests::bundle(&release)).unwrap();
    let fill = |command: &str| Some(command.replace("FILE", "@update"));
    let last = world.runs(&["cluster", "update", "status"]);
    assert!(last.contains("0.9.0") && last.contains("done"), "{last}");
    let shown = world.runs(&["cluster", "update", "@update", "--dry-run"]);
    assert!(shown.contains("One node gets version 1.0.0") && shown.contains("web-1"), "{shown}");
    assert_eq!(cluster.asked(), ["PlanUpdate 1.0.0"]);
    world.runs(&["cluster", "update", "@update", "--yes"]);
    let asked = ["PlanUpdate 1.0.0", "BeginUpdate 1.0.0", "StoreBundle 1.0.0"];
    assert_eq!(cluster.asked(), asked);
    let status = world.runs(&["cluster", "status"]);
    assert!(status.contains("loading to version 1.0.0, 0 of 1 nodes done"), "{status}");
    assert!(follow(&world, &status, fill).contains(&"cluster update status".to_owned()));
    // By its name, and since when.
    let shown = world.runs(&["cluster", "update", "status"]);
    assert!(shown.contains("web-1 (polis-") && shown.contains("yet for "), "{shown}");
    let suggested = follow(&world, &shown, |command| {
        (!command.ends_with("abort")).then(|| command.replace("FILE", "@update"))
    });
    assert_eq!(suggested, ["cluster update FILE", "cluster update abort"]);
    let paused = world.runs(&["cluster", "update", "pause"]);
    assert!(paused.contains("paused, 0 of 1 nodes done"), "{paused}");
    assert_eq!(follow(&world, &paused, fill), ["cluster update resume"]);
    let failed = world.runs(&["cluster", "update", "status"]);
    let suggested = follow(&world, &failed, fill);
    assert_eq!(suggested, ["cluster update resume", "cluster update abort"]);
    let ended = world.runs(&["cluster", "update", "status", "--output", "json"]);
    let ended: serde_json::Value = serde_json::from_str(&ended).unwrap();
    assert_eq!(ended["state"], "aborted", "{ended}");
    assert!(!world.runs(&["cluster", "status"]).contains("cluster update"));
}

#[test]
fn an_update_that_cannot_be_undone_says_so_and_asks_for_its_option() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let release = ed25519_dalek::SigningKey::from_bytes(&[3; 32]);
    super::contexts::write(&world.path("update"), &super::update::tests::bundle(&release)).unwrap();
    let runs = |version: &str| version.clone_into(&mut cluster.etcd_cluster.lock().unwrap());
    let said = "The bundle has etcd 3.5.16, and the cluster runs 3.4: once every member has the \
                newer one, this cannot be undone.";
    let node = ["node", "update", "web-1", "@update", "--no-reboot"];
    for (command, began) in [
        (&["cluster", "update", "@update"][..], "BeginUpdate 1.0.0, one way"),
        (&node[..], "Update 1.0.0, one way"),
    ] {
        let with = |options: &[&'static str]| [command, options].concat();
        let began = |asked: Vec<String>| asked.iter().any(|call| call == began);
        runs("3.4");
        let shown = world.runs(&with(&["--dry-run"]));
        assert!(shown.contains(&format!("{said} The command needs --one-way.")), "{shown}");
        let shown = world.runs(&with(&["--dry-run", "--one-way"]));
        assert!(shown.contains(said) && !shown.contains("needs"), "{shown}");
        let refused = world.refuses(&with(&["--yes"]));
        assert!(refused.contains("this cannot be undone"), "{refused}");
        let file = |command: &str| Some(command.replace("FILE", "@saved"));
        assert_eq!(follow(&world, &refused, file), ["etcd snapshot -o FILE"]);
        std::fs::remove_file(world.path("saved")).unwrap();
        assert!(!began(cluster.asked()));
        world.runs(&with(&["--yes", "--one-way"]));
        assert!(began(cluster.asked()), "{command:?}");
        // No option helps here.
        for (version, help) in [("3.6", "a bundle with etcd 3.6"), ("3.3", "with etcd 3.4 first")] {
            runs(version);
            let refused = world.refuses(&with(&["--yes", "--one-way"]));
            assert!(refused.contains(help), "{refused}");
        }
        // And nothing is said where nothing changes, or nothing is known.
        for version in ["3.5", ""] {
            runs(version);
            let shown = world.runs(&with(&["--dry-run"]));
            assert!(!shown.contains("etcd"), "{shown}");
        }
    }
}

#[test]
fn a_new_user_comes_in_by_the_told_command() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let without = ["user", "create", "ann", "--role", "viewer", "--key", "@ann.pub"];
    let refused = world.refuses(&[&without[..], &["-o", "@ann.json"]].concat());
    let suggested = follow(&world, &refused, |command| Some(command.replace("FILE", "@ann.key")));
    assert_eq!(suggested, ["key create -o FILE"]);
    assert!(world.path("ann.pub").exists(), "the half that the owner gets");
    let help = world.runs(&["user", "create", "--help"]);
    for step in ["key create -o ann.key", "user create ann", "context import ann.json"] {
        assert!(help.contains(&format!("polisctl {step}")), "{help}");
    }
    let create = ["user", "create", "ann", "--role", "viewer", "--key", "@owner.key"];
    let created = world.runs(&[&create[..], &["-o", "@ann.json"]].concat());
    let suggested = follow(&world, &created, |command| Some(command.replace("FILE", "@owner.key")));
    assert_eq!(suggested, ["context import @ann.json --key FILE"]);
    world.runs(&["node", "list", "--context", "cluster.internal"]);
    drop(cluster);
}

#[test]
fn without_an_owner_key_the_told_command_makes_one() {
    let world = World::new();
    let write = ["parameters", "bootstrap", "-o", "@node.pb"];
    let suggested = follow(&world, &world.refuses(&write), |command| Some(command.to_owned()));
    assert_eq!(suggested, ["owner create"]);
    world.runs(&write);
}

#[test]
fn without_a_controller_the_told_command_gives_a_node_the_role() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let refused = world.refuses(&["kubernetes", "kubeconfig", "-o", "@kubeconfig"]);
    let suggested = follow(&world, &refused, |command| Some(command.replace("NODE", &id)));
    assert_eq!(suggested, ["node roles NODE --add kubernetes-controller"]);
    assert_eq!(cluster.asked(), ["UpdateNodeRoles"]);
}

/// A command with what a person adds: where the node is, since the cluster of the test has no
/// directory, and a file.
fn completed(command: &str) -> String {
    match command {
        "parameters register" => {
            format!("{command} --node {}=192.0.2.1 -o @{}", node_id(NODE), "joins.pb")
        }
        command => command.to_owned(),
    }
}

/// The commands of an output, in back quotes, and whether each names the role that may type it.
fn marked(output: &str) -> Vec<(String, bool)> {
    let text = output.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for (at, name) in text.match_indices("`polisctl ") {
        let Some((command, after)) = text[at + name.len()..].split_once('`') else { continue };
        let is_marked = ROLES.iter().any(|role| match rights::mark(*role) {
            "" => false,
            mark => after.starts_with(mark),
        });
        found.push((command.to_owned(), is_marked));
    }
    found
}

#[test]
fn each_reader_of_a_told_command_may_type_it_or_reads_who_may() {
    let (mut situations, mut others) = (0, 0);
    for (command, situation, readers, _) in TOLD {
        for reader in *readers {
            let Reader::User(least) = *reader else {
                situations += 1;
                continue;
            };
            for role in ROLES.into_iter().filter(|role| *role >= least) {
                situations += 1;
                let shown = rights::for_reader(&format!("see `polisctl {command}`"), Some(role));
                let suggested = marked(&shown);
                let is_other = !rights::permits(role, command);
                assert_eq!(suggested, [((*command).to_owned(), is_other)], "{situation}, {role}");
                others += usize::from(is_other);
            }
        }
    }
    assert!(situations > TOLD.len() && others > 5, "{situations} situations, {others} marked");
}

/// Outputs that suggest commands, with a node that is late, one that waits, unsaved recovery keys
/// and no controller of Kubernetes. `LATE` is the first, `NEW` the second; `HERE` is well.
const TELLING: [&[&str]; 8] = [
    &["cluster", "status"],
    &["node", "describe", "LATE"],
    &["node", "describe", "NEW"],
    &["node", "describe", "ffff"],
    &["kubernetes", "kubeconfig", "-o", "@kubeconfig"],
    &["parameters", "register", "--wipes", "HERE", "-o", "@node.pb"],
    &["node", "recovery-key", "LATE"],
    &["cluster", "ticket", "rotate", "--yes"],
];

#[test]
fn what_each_role_is_told_works_for_it_or_names_the_role_for_which_it_works() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let (_bound, closed) = closed_port();
    cluster.has_a_crowd(&world, &closed);
    let (here, late, new) =
        (node_id(NODE).to_string(), node_id(2).to_string(), node_id(4).to_string());
    let (mut own, mut of_others) = (BTreeSet::new(), BTreeSet::new());
    for role in ROLES {
        cluster.lets_in_as(&world, role);
        let mut suggested = BTreeSet::new();
        for line in TELLING {
            let filled: Vec<&str> = line
                .iter()
                .map(|word| match *word {
                    "HERE" => &*here,
                    "LATE" => &*late,
                    "NEW" => &*new,
                    word => word,
                })
                .collect();
            for columns in [80, 120] {
                let shown = world.run_in(columns, &filled);
                suggested.extend(marked(&format!("{} {}", shown.stdout, shown.stderr)));
            }
            // A command that a user may not run has the same mark in the output without a terminal.
            let shown = world.run(&filled);
            suggested.extend(marked(&format!("{} {}", shown.stdout, shown.stderr)));
        }
        for (command, is_marked) in suggested {
            // A person names the node, and has saved the key that is to be forgotten.
            let typed = completed(&command.replace("NODE", &here));
            let key = polis_base::recovery::form::write(&super::loopback::RECOVERY_KEY);
            super::contexts::write(&world.path("saved"), key.as_bytes()).unwrap();
            let saved: &[&str] = match typed.starts_with("node recovery-key forget") {
                true => &["--recovery-key-file", "@saved"],
                false => &[],
            };
            let words: Vec<&str> = typed.split(' ').chain(saved.iter().copied()).collect();
            let ended = world.asks(&words, "yes\n");
            let is_refused = ended.stderr.contains("this call needs the certificate of");
            assert_eq!(is_refused, is_marked, "{role}: {command}\n{}", ended.stderr);
            match is_marked {
                true => {
                    of_others.insert((role.as_str(), rights::least_role(&command)));
                    cluster.lets_in_as(&world, rights::least_role(&command).unwrap());
                    let ended = world.asks(&words, "yes\n");
                    assert_eq!(ended.status, 0, "{command}\n{}", ended.stderr);
                    cluster.lets_in_as(&world, role);
                }
                false => {
                    own.insert(role.as_str());
                }
            }
        }
    }
    assert_eq!(own.len(), ROLES.len(), "{own:?}");
    let expected = [
        ("operator", Some(Role::Owner)),
        ("viewer", Some(Role::Operator)),
        ("viewer", Some(Role::Owner)),
    ];
    assert_eq!(of_others, BTreeSet::from(expected));
}

/// The text of a page of the console, large enough for all of it.
fn page(page: Page, snapshot: &Snapshot) -> String {
    let (columns, rows) = (120, 400);
    let mut view = View::new(columns, rows);
    view.key(page.key(), snapshot);
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    polis_tui::render(snapshot, &view, &mut buffer);
    let rows = buffer.content.chunks(usize::from(columns));
    let row = |cells: &[polis_tui::ratatui::buffer::Cell]| {
        cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
    };
    rows.map(row).collect::<Vec<_>>().join("\n")
}

/// So many lines above a command may name its user.
const LEAD: usize = 5;

#[test]
fn the_console_whose_reader_is_unknown_names_the_role_for_each_command() {
    let mut seen = BTreeSet::new();
    for (name, snapshot) in samples::all() {
        for shown in Page::ALL {
            let text = page(shown, &snapshot);
            let lines: Vec<&str> = text.lines().collect();
            for (at, line) in lines.iter().enumerate() {
                let Some((_, command)) = line.split_once("► polisctl ") else { continue };
                let Some(least) = rights::least_role(command) else { continue };
                let lead = lines[at.saturating_sub(LEAD)..at].join(" ").to_lowercase();
                assert!(lead.contains(least.as_str()), "{name}: {command}: no {least} in {lead}");
                seen.insert(filled(command).split(' ').take(2).collect::<Vec<_>>().join(" "));
            }
        }
    }
    let wanted = ["node approve", "node delete", "node recovery-key", "node roles"];
    assert_eq!(seen, BTreeSet::from(wanted.map(str::to_owned)));
}
