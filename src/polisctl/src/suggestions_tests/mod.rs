//! Every command that a message, a screen or an error suggests: in which situation and to which
//! readers, and which test types it there.
//!
//! The commands are found in the sources, so one that is added without a situation fails.
//! Those that `polisctl` itself suggests are read from its output here, and typed.

mod sources;
mod suggested;

use std::collections::BTreeSet;

use self::sources::filled;
use self::suggested::{Reader, SUGGESTED};
use super::loopback::{Cluster, NODE};
use super::rights;
use super::testing::{World, closed_port};
use polis_tui::ratatui::buffer::Buffer;
use polis_tui::ratatui::layout::Rect;
use polis_tui::{Page, Snapshot, View, samples};
use polis_wire::rpc::Role;
use polis_wire::rpc::testing::node_id;

const ROLES: [Role; 3] = [Role::Viewer, Role::Operator, Role::Owner];

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
fn without_a_context_the_suggested_commands_lead_to_one() {
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
fn a_cluster_stores_no_share_of_a_key_by_the_suggested_command() {
    let world = World::new();
    let cluster = Cluster::new(&world);
    world.runs(&["cluster", "configure", "--cold-start", "attended"]);
    assert_eq!(cluster.asked(), ["ConfigureCluster"]);
}

#[test]
fn what_is_not_there_is_found_by_the_suggested_command() {
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
fn a_new_user_comes_in_by_the_suggested_command() {
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
fn without_an_owner_key_the_suggested_command_makes_one() {
    let world = World::new();
    let write = ["parameters", "bootstrap", "-o", "@node.pb"];
    let suggested = follow(&world, &world.refuses(&write), |command| Some(command.to_owned()));
    assert_eq!(suggested, ["owner create"]);
    world.runs(&write);
}

#[test]
fn without_a_controller_the_suggested_command_gives_a_node_the_role() {
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
fn each_reader_of_a_suggested_command_may_type_it_or_reads_who_may() {
    let (mut situations, mut others) = (0, 0);
    for (command, situation, readers, _) in SUGGESTED {
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
    assert!(situations > SUGGESTED.len() && others > 5, "{situations} situations, {others} marked");
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
fn what_is_suggested_to_each_role_works_for_it_or_names_the_role_for_which_it_works() {
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
