//! Whole command lines against a node on loopback.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::time::Duration;

use crate::loopback::{Cluster, NAME, NODE, RECOVERY_KEY};
use crate::output::Streams;
use crate::testing::{World, closed_port};
use polis_wire::rpc::testing::node_id;

/// Every command that talks to a node itself, without the node and its address.
const OF_A_NODE: [&[&str]; 6] = [
    &["node", "attest"],
    &["node", "reboot"],
    &["node", "poweroff"],
    &["node", "status"],
    &["node", "services"],
    &["node", "logs"],
];

/// The option that skips the question.
fn sure(command: &[&str]) -> &'static [&'static str] {
    if ["reboot", "poweroff"].contains(&command[1]) { &["--yes"] } else { &[] }
}

#[test]
fn a_command_with_an_address_asks_nothing_of_a_node_that_was_not_named() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let at = cluster.address();
    let found = node_id(NODE).to_string();
    let another = node_id(2).to_string();
    for command in OF_A_NODE {
        for named in [&another[6..10], &another[..12], &another[6..], &*another] {
            let output = world.refuses(&[command, &[named, "--at", &at], sure(command)].concat());
            assert!(output.contains(&found) && output.contains(named), "{command:?}: {output}");
            assert_eq!(cluster.asked(), [""; 0], "{command:?} of {named}");
        }
        for named in [&found[6..10], &found[..12], &*found] {
            world.runs(&[command, &[named, "--at", &at], sure(command)].concat());
            assert_eq!(cluster.asked().len(), 1, "{command:?} of {named}");
        }
    }
    let ended = world.run(&["node", "reboot", "abc", "--yes", "--at", &at]);
    assert_eq!((ended.status, &*ended.stdout), (2, ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("\"abc\" is not a node ID"), "{}", ended.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
}

#[test]
fn the_end_of_a_machine_names_the_node_in_full() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let found = node_id(NODE).to_string();
    let output =
        world.runs(&["node", "reboot", &found[6..10], "--at", &cluster.address(), "--yes"]);
    assert_eq!(output, format!("{found} reboots\n"));
    assert_eq!(cluster.asked(), ["Reboot"]);
}

#[test]
fn a_machine_without_a_certificate_of_the_cluster_may_wait_for_its_key() {
    let (world, elsewhere) = (World::new(), World::new());
    let _cluster = Cluster::new(&world);
    // Like a machine that waits for its key, it shows a certificate of no CA that is known.
    let waits = Cluster::new(&elsewhere);
    let key = polis_base::recovery::form::write(&RECOVERY_KEY);
    crate::contexts::write(&world.path("recovery"), key.as_bytes()).unwrap();
    let id = node_id(NODE).to_string();
    let refused = |at: &str| {
        let unlock = ["node", "unlock", &*id, "--recovery-key-file", "@recovery", "--at", at];
        world.refuses(&unlock)
    };
    let foreign = refused(&waits.address());
    let help = "help: a node that waits for its key shows a fingerprint on its screen";
    assert!(foreign.contains(help) && foreign.contains("another cluster"), "{foreign}");
    assert_eq!(waits.asked(), [""; 0]);
    let (_bound, closed) = closed_port();
    let absent = refused(&closed);
    assert!(absent.contains("check that the machine is on"), "{absent}");
    assert!(!absent.contains("--fingerprint"), "{absent}");
}

/// The refusal of a command that asks, without a terminal.
const NOT_ASKED: &str = "error: the command asks for confirmation, and this is not a terminal\n\
                         help: confirm with --yes, or see the effect with --dry-run\n";

#[test]
fn a_command_that_disturbs_says_what_it_does_to_whom_and_asks_first() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let commands: [(&[&str], &str, &str); 7] = [
        (&["node", "reboot", &id], &id, "Reboot"),
        (&["node", "poweroff", &id], &id, "PowerOff"),
        (&["node", "decommission", &id], &id, "DecommissionNode"),
        (&["node", "delete", &id, "--force"], &id, "DeleteNode"),
        (&["node", "roles", &id, "--remove", "consensus-member"], &id, "UpdateNodeRoles"),
        (&["user", "revoke", "ann"], "ann", "RevokeUser ann"),
        (&["cluster", "ticket", "rotate"], "every machine", "GetRegisterTicket"),
    ];
    for (command, whom, call) in commands {
        let output = world.refuses(command);
        assert_eq!(output, NOT_ASKED, "{command:?}");
        for no in ["", "\n", "n\n", "no\n"] {
            let ended = world.asks(command, no);
            assert_eq!((ended.status, &*ended.stdout), (1, ""), "{}", ended.stderr);
            let question = ended.stderr.lines().next().unwrap_or_default();
            assert!(question.contains(whom), "it does not say to whom: {question}");
            assert!(question.contains("Go on? [yes/no]"), "{question}");
            assert!(ended.stderr.contains("nothing was changed"), "{}", ended.stderr);
        }
        assert_eq!(cluster.asked(), [""; 0], "{command:?}");
        for yes in ["y\n", "yes\n", "Y\n"] {
            let ended = world.asks(command, yes);
            assert_eq!(ended.status, 0, "{}", ended.stderr);
            assert_eq!(cluster.asked(), [call]);
        }
        let ended = world.run(&[command, &["--yes"]].concat());
        assert_eq!((ended.status, &*ended.stderr), (0, ""));
        assert_eq!(cluster.asked(), [call]);
    }
    // A role that is added takes nothing away, and a context belongs to the person.
    world.runs(&["node", "roles", &id, "--add", "consensus-member"]);
    let remove = ["context", "remove", "home"];
    assert_eq!(world.refuses(&remove), NOT_ASKED);
    assert_eq!(world.asks(&remove, "n\n").status, 1);
    assert!(world.runs(&["context", "list"]).contains("home"));
    assert_eq!(world.asks(&remove, "y\n").status, 0);
    assert!(!world.runs(&["context", "list"]).contains("home"));
}

#[test]
fn a_node_is_reset_only_after_a_question_and_told_before_it_is_removed() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let (id, at) = (node_id(NODE).to_string(), cluster.address());
    let reset = ["node", "reset", NAME, "--at", &at];
    assert_eq!(world.refuses(&reset), NOT_ASKED);
    let ended = world.asks(&reset, "no\n");
    assert_eq!(ended.status, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains(&id), "{}", ended.stderr);
    assert!(ended.stderr.contains("wipes its keys and its data partition"), "{}", ended.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
    world.runs(&[&reset[..], &["--dry-run"]].concat());
    assert_eq!(cluster.asked(), [""; 0]);
    assert_eq!(world.asks(&reset, "y\n").status, 0);
    assert_eq!(cluster.asked(), ["Reset", "DecommissionNode"]);
    // A machine that does not answer gets its parameters; nothing is decommissioned for it.
    let (_bound, closed) = crate::testing::closed_port();
    let refused = world.refuses(&["node", "reset", &id, "--at", &closed, "--yes"]);
    assert!(refused.contains(&format!("register --wipes {id}")), "{refused}");
    let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = hung.local_addr().unwrap().to_string();
    let ended = world.run(&["node", "reset", &id, "--at", &silent, "--yes", "--timeout", "3s"]);
    assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("register --wipes {id}")), "{}", ended.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
}

#[test]
fn parameters_wipe_a_removed_node_by_its_full_id_alone() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let (member, removed) = (node_id(NODE).to_string(), node_id(2).to_string());
    let write = |id: &str| {
        let node = format!("{member}=192.0.2.1");
        world.run(&["parameters", "register", "--node", &node, "--wipes", id, "-o", "@w.pb"])
    };
    for part in [&removed[..12], &removed[6..], NAME] {
        let ended = write(part);
        assert_eq!(ended.status, 2, "{}", ended.stderr);
        assert!(ended.stderr.contains("the full ID of the node is needed"), "{}", ended.stderr);
    }
    let ended = write(&member);
    assert_eq!(ended.status, 1);
    assert!(ended.stderr.contains("still belongs to the cluster"), "{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("polisctl node reset {member}")), "{}", ended.stderr);
    assert!(!world.path("w.pb").exists());
    assert_eq!(write(&removed).status, 0);
    let shown = world.runs(&["parameters", "show", "@w.pb"]);
    assert!(shown.contains(&format!("wipes         the data partition of {removed}")), "{shown}");
    drop(cluster);
}

#[test]
fn nodes_are_listed_under_the_names_that_fingers_know() {
    let world = World::new();
    let _cluster = Cluster::new(&world);
    let list = world.runs(&["node", "list", "-o", "json"]);
    for command in [&["get", "nodes"][..], &["node", "ls"], &["get", "node"]] {
        assert_eq!(world.runs(&[command, &["-o", "json"]].concat()), list, "{command:?}");
    }
}

#[test]
fn a_table_in_a_terminal_is_no_wider_than_the_terminal() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    for columns in [80, 100] {
        for command in [&["node", "list"][..], &["context", "list"], &["node", "services", &id]] {
            let ended = world.run_in(columns, command);
            assert_eq!(ended.status, 0, "{}", ended.stderr);
            let widest = ended.stdout.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(columns), "{command:?}:\n{}", ended.stdout);
        }
    }
    // The beginning of an ID that is shown is one that a command accepts.
    let list = world.run_in(80, &["node", "list"]).stdout;
    let shown = list.lines().nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    assert!(shown.len() < id.len() && id.starts_with(&shown), "{shown}");
    world.runs(&["node", "describe", &shown]);
    assert!(world.runs(&["node", "list"]).contains(&id), "without a terminal an ID is whole");
    drop(cluster);
}

#[test]
fn a_dry_run_says_what_would_change_and_changes_nothing() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let commands: [(&[&str], &str); 16] = [
        (&["node", "approve", &id], &id),
        (&["node", "roles", &id, "--add", "consensus-member"], &id),
        (&["node", "roles", &id, "--remove", "consensus-member"], &id),
        (&["node", "label", &id, "a=b", "c-"], "a=b c-"),
        (&["node", "reboot", &id], "reboots"),
        (&["node", "poweroff", &id], "powers off"),
        (&["node", "decommission", &id], &id),
        (&["node", "delete", &id, "--force"], &id),
        (&["node", "recovery-key", "forget", &id], &id),
        (&["cluster", "configure", "--tpm", "disabled"], "--tpm disabled"),
        (&["cluster", "registry", "set", "a.example"], "a.example"),
        (&["cluster", "registry", "delete", "a.example"], "a.example"),
        (&["cluster", "ticket", "rotate"], "new ticket"),
        (&["cluster", "rotate-ca"], "another CA"),
        (&["user", "revoke", "ann"], "ann"),
        (&INVITE, "ann"),
    ];
    for (command, said) in commands {
        let text = world.runs(&[command, &["--dry-run"]].concat());
        assert!(text.contains(said) && text.contains("dry run"), "{command:?}: {text}");
        let json = world.runs(&[command, &["--dry-run", "--output", "json"]].concat());
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["dry_run"], true, "{command:?}");
        assert_eq!(cluster.asked(), [""; 0], "{command:?}");
    }
    let refused = world.refuses(&["node", "delete", &id, "--dry-run"]);
    assert!(refused.contains("it is a member") && refused.contains("--force"), "{refused}");
    world.runs(&["context", "remove", "home", "--dry-run"]);
    assert!(world.runs(&["context", "list"]).contains("home"));
}

#[test]
fn a_name_of_the_log_is_completed_and_an_unknown_one_is_an_error_with_near_names() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let logs = |name| ["node", "logs", &*id, "--name", name].map(str::to_owned);
    for (typed, name) in [("root.curator", "root.curator"), ("curator", "root.curator")] {
        world.runs(&logs(typed).each_ref().map(|word| &**word));
        assert_eq!(cluster.asked(), ["Services".to_owned(), format!("Logs {name}")]);
    }
    // The kernel is not a service; the one that copies its messages is meant in full alone.
    for name in ["kernel", "root.kernel"] {
        world.runs(&logs(name).each_ref().map(|word| &**word));
        assert_eq!(cluster.asked(), ["Services".to_owned(), format!("Logs {name}")]);
    }
    // A child process has no service, and its name is read from the log.
    world.refuses(&logs("chronyd").each_ref().map(|word| &**word));
    assert_eq!(cluster.asked(), ["Services", "Logs "]);
    let output = world.refuses(&logs("cruator").each_ref().map(|word| &**word));
    assert_eq!(
        output,
        format!(
            "error: no log has the name \"cruator\"\nhelp: near names: root.curator; `polisctl \
             node services {id}` lists all services\n"
        )
    );
    assert_eq!(cluster.asked(), ["Services", "Logs "]);
}

#[test]
fn a_log_begins_at_the_time_that_is_asked_for() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    for (since, there) in [("59s", false), ("61s", true), ("2h", true)] {
        let said = world.runs(&["node", "logs", &id, "--since", since]);
        assert_eq!(said.contains("hello"), there, "{since}: {said}");
        assert_eq!(cluster.asked(), ["GetStatus", "Logs "]);
    }
    let ended = world.run(&["node", "logs", &id, "--since", "10m", "--boot", "-1"]);
    assert_eq!(ended.status, 2, "{}", ended.stderr);
}

/// A full disk, and behind it a reader that has left.
struct Full(bool);

impl io::Write for Full {
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        let again = std::mem::replace(&mut self.0, true);
        Err(if again { ErrorKind::BrokenPipe } else { ErrorKind::StorageFull }.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_log_that_cannot_be_written_is_not_followed() {
    let world = World::new();
    let _cluster = Cluster::new(&world);
    let (home, id) = (world.path("").into_os_string(), node_id(NODE).to_string());
    let variable = |name: &str| (name == "XDG_CONFIG_HOME").then(|| home.clone());
    let words = ["polisctl", "node", "logs", &*id, "--follow"].map(OsString::from);
    let streams = Streams::new(Full(false), io::sink());
    assert_eq!(crate::run(words, variable, &streams), 1);
}

/// Makes a user with the person's own key.
const INVITE: [&str; 9] =
    ["user", "create", "ann", "--role", "viewer", "--key", "@owner.key", "-o", "@ann.json"];

/// Every text in a document, with the path to it.
fn texts(path: &str, value: &serde_json::Value, found: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::String(text) => found.push((path.to_owned(), text.clone())),
        serde_json::Value::Array(all) => all.iter().for_each(|one| texts(path, one, found)),
        serde_json::Value::Object(all) => {
            all.iter().for_each(|(name, one)| texts(&format!("{path}.{name}"), one, found));
        }
        _ => {}
    }
}

#[test]
fn a_time_in_a_document_is_rfc_3339() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let commands: [(&[&str], &str); 6] = [
        (&["node", "describe", &id], ".registered_at"),
        (&["node", "list"], ".registered_at"),
        (&["node", "logs", &id], ".time"),
        (&["cluster", "ticket", "rotate", "--lifetime", "2h", "--yes"], ".ends"),
        (&["context", "show"], ".certificate_ends"),
        (&INVITE, ".certificate_ends"),
    ];
    for (command, field) in commands {
        let output = world.runs(&[command, &["--output", "json"]].concat());
        let mut found = Vec::new();
        texts("", &serde_json::from_str(&output).unwrap(), &mut found);
        let time = found.iter().find(|(path, _)| path == field);
        let Some((_, time)) = time else { panic!("{command:?} has no {field}: {output}") };
        let plain = [(4, "-"), (7, "-"), (10, "T"), (13, ":"), (16, ":")];
        assert!(plain.iter().all(|(at, mark)| time[*at..].starts_with(mark)), "{time}");
        assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
    }
    assert!(cluster.asked().contains(&"CreateUser ann".to_owned()));
}

#[test]
fn a_time_that_a_person_gives_ends_on_time_with_a_status_of_its_own() {
    let world = World::new();
    let _cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    // One machine accepts connections and stays silent; the other's port has no listener.
    let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = hung.local_addr().unwrap().to_string();
    let (_bound, closed) = crate::testing::closed_port();
    let commands: [&[&str]; 6] = [
        &["node", "status", &id, "--at", &silent],
        &["node", "status", &id, "--at", &closed],
        &["node", "reboot", &id, "--yes", "--at", &silent],
        &["node", "status", &id, "--endpoint", &silent],
        &["node", "list", "--endpoint", &silent],
        &["cluster", "info", "--endpoint", &closed],
    ];
    for command in commands {
        let begun = tokio::time::Instant::now();
        let ended = world.run(&[command, &["--timeout", "1500ms"]].concat());
        let took = begun.elapsed();
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{command:?}: {}", ended.stderr);
        // One attempt at a silent machine takes four seconds.
        assert!(took < Duration::from_secs(3), "{command:?} took {took:?}");
    }
    let ended = world.run(&["node", "list", "--timeout", "5"]);
    assert_eq!(ended.status, 2);
    assert!(ended.stderr.contains("a number with the unit ms, s, m, h or d"), "{}", ended.stderr);
}

#[test]
fn a_name_is_as_good_as_an_id_and_compares_the_same_certificate() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let at = cluster.address();
    for command in OF_A_NODE {
        for there in [&[][..], &["--at", &at]] {
            world.runs(&[command, &[NAME], there, sure(command)].concat());
            assert_eq!(cluster.asked().len(), 1, "{command:?} {there:?}");
            let ended = world.run(&[command, &["web-2"], there, sure(command)].concat());
            assert_eq!(ended.status, 1, "{command:?} {there:?}");
            assert!(ended.stderr.contains("there is no node \"web-2\""), "{}", ended.stderr);
            assert_eq!(cluster.asked(), [""; 0], "{command:?} {there:?}");
        }
    }
    // Only a leader knows which node has the name: nothing is sent on a guess.
    cluster.lose_the_leader();
    let ended = world.run(&["node", "reboot", NAME, "--at", &at, "--yes", "--timeout", "2s"]);
    assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("use the ID of the node"), "{}", ended.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
}

#[test]
fn a_change_of_roles_waits_for_the_next_leader() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    cluster.lose_the_leader();
    // Longer than one search takes.
    cluster.leads_after(Duration::from_secs(3));
    let ended = world.run(&["node", "roles", &id, "--add", "kubernetes-worker"]);
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    assert_eq!(cluster.asked(), ["UpdateNodeRoles"]);
}

#[test]
fn a_node_is_given_a_name_and_loses_it() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let said = world.runs(&["node", "name", &id[6..12], "mail-1"]);
    assert!(said.contains("name          mail-1\n"), "{said}");
    assert_eq!(cluster.asked(), ["NameNode mail-1"]);
    world.runs(&["node", "name", NAME, "--remove"]);
    assert_eq!(cluster.asked(), ["NameNode "]);
    let said = world.runs(&["node", "name", NAME, "mail-1", "--dry-run"]);
    assert!(said.starts_with(&format!("{NAME} ({id}) gets the name mail-1.")), "{said}");
    for wrong in [&["beef"][..], &["Mail"], &["polis-1"], &[], &["mail-1", "--remove"]] {
        let ended = world.run(&[&["node", "name", &id], wrong].concat());
        assert_eq!((ended.status, &*ended.stdout), (2, ""), "{wrong:?}: {}", ended.stderr);
    }
    assert_eq!(cluster.asked(), [""; 0], "nothing was asked");
}

#[test]
fn a_question_and_a_list_show_the_name_beside_the_id() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let ended = world.asks(&["node", "decommission", NAME], "no\n");
    assert!(ended.stderr.contains(&format!("{NAME} ({id}) wipes")), "{}", ended.stderr);
    assert_eq!(cluster.asked(), [""; 0]);
    for list in [&["node", "list"][..], &["cluster", "status"], &["etcd", "members"]] {
        let said = world.runs(list);
        let row = format!("{id}  {NAME} ");
        assert!(said.contains(&row), "{list:?}: {said}");
    }
    let json = world.runs(&["node", "describe", NAME, "-o", "json"]);
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&value["id"], &value["name"]), (&id.into(), &NAME.into()));
}

#[test]
fn the_logs_of_several_nodes_are_merged_and_name_their_nodes() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let id = node_id(NODE).to_string();
    let merged = world.runs(&["node", "logs", NAME, &id]);
    let lines: Vec<&str> = merged.lines().collect();
    assert_eq!(lines.len(), 2, "{merged}");
    assert!(lines[0].starts_with("web-1 2023-11-14T22:13:20.1"), "{merged}");
    assert!(lines[1].starts_with(&format!("{id} 2023-11-14T")), "{merged}");
    let one = world.runs(&["node", "logs", NAME, "-t"]);
    assert!(one.starts_with("2023-11-14T22:13:20.1"), "{one}");
    let ended = world.run(&["node", "logs", NAME, &id, "--at", &cluster.address()]);
    assert_eq!(ended.status, 2, "{}", ended.stderr);
}

#[test]
fn a_watch_of_a_node_reads_the_user_s_key_once() {
    std::thread::scope(|scope| {
        for (command, call) in [("status", "GetStatus"), ("services", "Services")] {
            scope.spawn(move || watched_without_the_key(command, call));
        }
    });
}

/// A passphrase would be asked for where the file of the key is read, so it goes away after the
/// first call of a watch.
#[expect(clippy::disallowed_methods, reason = "the test has no runtime of its own")]
fn watched_without_the_key(command: &str, call: &str) {
    let world = World::new();
    let cluster = Cluster::new(&world);
    let line = ["node", command, NAME, "-w", "--timeout", "9s"];
    let ended = std::thread::scope(|scope| {
        let watch = scope.spawn(|| world.run(&line));
        let begun = std::time::Instant::now();
        while !cluster.asked().iter().any(|asked| asked == call) {
            assert!(begun.elapsed() < Duration::from_secs(8), "{command} asks nothing");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::fs::remove_file(world.path("owner.key")).unwrap();
        watch.join().unwrap()
    });
    assert_eq!((ended.status, &*ended.stderr), (0, ""), "{command}");
}
