//! `polisctl completion`: scripts for shells, and the node IDs and names that they
//! complete.
//!
//! clap knows the commands and the options. The script asks for the names of a cluster by
//! `polisctl completion nodes`, which prints IDs and names and nothing else, also where no leader
//! answers: a shell is waiting.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::ValueEnum as _;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap_complete::Shell;
use tokio::time::timeout;

use super::Global;
use super::error::Error;
use super::output::Document;
use super::session::Session;

/// Longest that a shell waits for the cluster.
const ANSWER: Duration = Duration::from_secs(2);

/// The script to print.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A script.
    Shell(Shell),
    /// The IDs and the names of the nodes.
    Nodes,
}

/// Reads the name of a shell, or `nodes`.
pub(super) fn target() -> impl TypedValueParser<Value = Target> {
    let shells = Shell::value_variants().iter().filter_map(Shell::to_possible_value);
    let values = shells.chain([PossibleValue::new("nodes").hide(true)]);
    PossibleValuesParser::new(values).map(|word| match Shell::from_str(&word, false) {
        Ok(shell) => Target::Shell(shell),
        Err(_nodes) => Target::Nodes,
    })
}

/// The commands whose next word is a node, as a pattern of shells and regular expressions.
const OF_A_NODE: &str = "describe|status|services|firewall|network|attest|approve|roles|label|taint|name|\
                         reboot|poweroff|update|announce-firmware-update|decommission|reset|delete|logs|recovery-key|unlock|show|forget";

/// Those of them that take several nodes.
const OF_NODES: [&str; 2] = ["approve", "logs"];

/// The script of a shell.
pub(super) fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut super::command(), "polisctl", &mut script);
    let nodes = match shell {
        Shell::Bash => bash(),
        Shell::Zsh => zsh(),
        Shell::Fish => fish(),
        _ => String::new(),
    };
    script.extend_from_slice(nodes.as_bytes());
    script
}

fn bash() -> String {
    let further = OF_NODES.map(|command| format!("*\" node\"*\" {command} \"*")).join("|");
    format!(
        r#"
_polisctl_nodes() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local line=" ${{COMP_WORDS[*]:0:COMP_CWORD}} " node=
    case "$line" in
        *" node "*|*" console "*)
            case "$before" in
                {OF_A_NODE}|console) node=1 ;;
                -*|=) ;;
                *) case "$line" in {further}) node=1 ;; esac ;;
            esac ;;
    esac
    if [[ -n "$node" && "$word" != [-=]* ]]; then
        COMPREPLY=( $(compgen -W "$(polisctl completion nodes 2>/dev/null)" -- "$word") )
        return 0
    fi
    _polisctl "$@"
}}
complete -F _polisctl_nodes -o nosort -o bashdefault -o default polisctl
"#
    )
}

fn zsh() -> String {
    let is_before = |command: &str| format!("${{words[(i){command}]}} < CURRENT");
    let further = OF_NODES.map(is_before).join(" || ");
    format!(
        r#"
_polisctl_nodes() {{
    local before="${{words[CURRENT-1]}}" node=
    if (( ${{words[(I)node]}} || ${{words[(I)console]}} )); then
        if [[ "$before" == ({OF_A_NODE}|console) ]]; then
            node=1
        elif [[ "$before" != -* ]] && (( ${{words[(I)node]}} && ({further}) )); then
            node=1
        fi
    fi
    if [[ -n "$node" && "${{words[CURRENT]}}" != -* ]]; then
        compadd -- ${{(f)"$(polisctl completion nodes 2>/dev/null)"}}
    else
        _polisctl "$@"
    fi
}}
compdef _polisctl_nodes polisctl
"#
    )
}

fn fish() -> String {
    let words = OF_A_NODE.replace('|', " ");
    format!(
        "\ncomplete -c polisctl -f -n '__fish_seen_subcommand_from node; and \
         __fish_seen_subcommand_from {words}' -a '(polisctl completion nodes 2>/dev/null)'\n\
         complete -c polisctl -f -n '__fish_seen_subcommand_from console' \
         -a '(polisctl completion nodes 2>/dev/null)'\n"
    )
}

/// Prints the IDs and the names of all nodes, a line each; the IDs that the context knows, where no
/// leader answers in time.
pub(super) async fn nodes(global: &Global) -> Result<(), Error> {
    let session = Session::prepare(global, ANSWER)?;
    let known = session.known_nodes();
    let known = known.iter().filter_map(|target| target.meant.id()).map(|id| id.to_string());
    let mut ids: BTreeSet<String> = known.collect();
    if let Ok(Ok(nodes)) = timeout(ANSWER, session.nodes(&[])).await {
        let names = nodes.into_iter().flat_map(|node| [node.id, node.name]);
        ids = names.filter(|name| !name.is_empty()).collect();
    }
    let lines: String = ids.iter().map(|id| format!("{id}\n")).collect();
    global.out.print(&Document::new(&ids, lines)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Cluster, NAME, NODE};
    use crate::testing::World;
    use polis_wire::rpc::testing::node_id;

    #[test]
    fn every_shell_gets_a_completion() {
        for shell in Shell::value_variants() {
            assert!(!script(*shell).is_empty(), "{shell}");
        }
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = String::from_utf8(script(shell)).unwrap();
            assert!(text.contains("polisctl completion nodes"), "{shell}");
        }
    }

    #[test]
    fn every_command_that_takes_a_node_is_completed() {
        let command = crate::command();
        let node = command.find_subcommand("node").unwrap();
        let listed: Vec<&str> = OF_A_NODE.split('|').collect();
        for below in node.get_subcommands() {
            let takes = |command: &clap::Command, id: &str| {
                command.get_positionals().any(|argument| argument.get_id() == id)
            };
            for command in below.get_subcommands().chain([below]) {
                let (name, several) = (command.get_name(), takes(command, "nodes"));
                if several || takes(command, "node") {
                    assert!(listed.contains(&name), "{name}");
                }
                assert_eq!(several, OF_NODES.contains(&name), "{name}");
            }
        }
    }

    #[test]
    fn ids_and_names_of_the_nodes_are_printed_with_or_without_a_leader() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        assert_eq!(world.runs(&["completion", "nodes"]), format!("{id}\n{NAME}\n"));
        let gone = node_id(2).to_string();
        cluster.knows(&world, &[(&gone, "192.0.2.2")]);
        cluster.lose_the_leader();
        assert_eq!(world.runs(&["completion", "nodes"]), format!("{gone}\n"));
        let json = world.runs(&["completion", "nodes", "--output", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value, serde_json::json!([gone]));
    }

    /// A shell that is there reads its script.
    #[test]
    fn bash_completes_an_id() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        let id = node_id(NODE).to_string();
        std::fs::write(world.path("script"), script(Shell::Bash)).unwrap();
        for (words, is_node) in [
            ("node reboot polis-", true),
            ("node reboot web-1 polis-", false),
            // A command that takes several nodes takes them after options, too.
            ("node approve polis-", true),
            ("node approve web-1 polis-", true),
            ("node approve web-1 --maker file polis-", true),
            ("node --timeout 9s logs web-1 web-2 polis-", true),
            ("node approve web-1 --maker polis-", false),
            ("maintenance logs polis-", false),
        ] {
            let count = words.split(' ').count();
            let shell = format!(
                "polisctl() {{ echo {id}; }}; source {}; _polisctl() {{ COMPREPLY=(other); }}; \
                 COMP_WORDS=(polisctl {words}); COMP_CWORD={count}; _polisctl_nodes polisctl; \
                 echo \"${{COMPREPLY[0]}}\"",
                world.path("script").display()
            );
            #[expect(clippy::disallowed_methods, reason = "a test asks a real shell")]
            let ended = std::process::Command::new("bash").args(["-c", &shell]).output().unwrap();
            let said = String::from_utf8_lossy(&ended.stdout);
            let stderr = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(said.trim(), if is_node { &*id } else { "other" }, "{words}: {stderr}");
        }
    }
}
