//! The role that a command needs, by the access table that the nodes enforce.
//!
//! A text that names a command is written once for all readers. Where it is printed, [`for_reader`]
//! adds the role to each command that the reader's own role does not permit, so that an
//! operator learns the role for it instead of trying it.
//!
//! What this module does not do: permit or refuse anything. The nodes do.

use polis_wire::rpc::{Role, Table};

/// The commands that need more than the role viewer, each with the RPC that needs the most. A
/// command below one of them needs the same, unless it has its own entry, which may be of a
/// viewer. An option in a name may stand anywhere in a command.
const CALLS: [(&str, &str); 41] = [
    ("audit", "/polis.v1.Management/GetAudit"),
    ("cluster apply", "/polis.v1.Management/ConfigureCluster"),
    ("cluster configure", "/polis.v1.Management/ConfigureCluster"),
    ("cluster registry delete", "/polis.v1.Management/DeleteRegistry"),
    ("cluster registry set", "/polis.v1.Management/SetRegistry"),
    ("cluster rotate-ca", "/polis.v1.Management/RotateAuthorities"),
    ("cluster rotate-ca status", "/polis.v1.Management/GetRotation"),
    ("cluster ticket", "/polis.v1.Management/GetRegisterTicket"),
    ("cluster update", "/polis.v1.Management/BeginUpdate"),
    ("cluster update abort", "/polis.v1.Management/ControlUpdate"),
    ("cluster update pause", "/polis.v1.Management/ControlUpdate"),
    ("cluster update resume", "/polis.v1.Management/ControlUpdate"),
    ("cluster update status", "/polis.v1.Management/GetUpdate"),
    ("cluster update wait", "/polis.v1.Management/GetUpdate"),
    ("etcd snapshot", "/polis.v1.Management/SnapshotEtcd"),
    ("node announce-firmware-update", "/polis.v1.NodeManagement/AnnounceFirmwareUpdate"),
    ("node approve", "/polis.v1.Management/ApproveNode"),
    ("node attest", "/polis.v1.NodeManagement/Attest"),
    ("node decommission", "/polis.v1.Management/DecommissionNode"),
    ("node delete", "/polis.v1.Management/DeleteNode"),
    ("node label", "/polis.v1.Management/UpdateNodeLabels"),
    ("node name", "/polis.v1.Management/NameNode"),
    // Without any of these options, it only shows the network.
    ("node network --bond", "/polis.v1.Management/ConfigureNodeNetwork"),
    ("node network --from-parameters", "/polis.v1.Management/ConfigureNodeNetwork"),
    ("node network --interface", "/polis.v1.Management/ConfigureNodeNetwork"),
    ("node network --nameserver", "/polis.v1.Management/ConfigureNodeNetwork"),
    ("node network --ntp", "/polis.v1.Management/ConfigureNodeNetwork"),
    ("node network --vlan", "/polis.v1.Management/ConfigureNodeNetwork"),
    ("node poweroff", "/polis.v1.NodeManagement/Reboot"),
    ("node reboot", "/polis.v1.NodeManagement/Reboot"),
    ("node recovery-key", "/polis.v1.Management/GetRecoveryKey"),
    ("node recovery-key forget", "/polis.v1.Management/ConfirmRecoveryKey"),
    ("node recovery-key passphrase", NO_CALL),
    ("node reset", "/polis.v1.NodeManagement/Reset"),
    ("node roles", "/polis.v1.Management/UpdateNodeRoles"),
    ("node taint", "/polis.v1.Management/UpdateNodeTaints"),
    ("node unlock", "/polis.v1.NodeManagement/Unlock"),
    ("node update", "/polis.v1.NodeManagement/Update"),
    ("parameters register", "/polis.v1.Management/GetRegisterTicket"),
    ("user create", "/polis.v1.Aaa/CreateUser"),
    ("user revoke", "/polis.v1.Aaa/RevokeUser"),
];

/// In place of an RPC: the command asks no cluster.
const NO_CALL: &str = "";

/// The least role that permits a command, given without the name of the program. `None` for
/// a command that every user may type, and for one that needs no certificate.
pub(super) fn least_role(command: &str) -> Option<Role> {
    let mut words = command.split_whitespace().peekable();
    // Options of the program stand before the command, each with a value.
    while words.next_if(|word| word.starts_with('-')).is_some() {
        words.next();
    }
    let words: Vec<&str> = words.collect();
    let is_meant = |(name, _): &&(&str, &str)| {
        let (options, path): (Vec<_>, Vec<_>) =
            name.split(' ').partition(|word| word.starts_with("--"));
        let has = |option: &&str| words.iter().any(|word| word.split('=').next() == Some(*option));
        words.starts_with(&path) && options.iter().all(has)
    };
    let (_, path) = CALLS.iter().filter(is_meant).max_by_key(|(name, _)| name.len())?;
    let table = Table::polis().ok()?;
    table.rule(path).ok()?.least_role().filter(|role| *role > Role::Viewer)
}

/// Whether the role permits a command.
#[cfg(test)]
pub(super) fn permits(role: Role, command: &str) -> bool {
    least_role(command).is_none_or(|least| role >= least)
}

/// The mark behind a command that needs at least this role.
pub(super) fn mark(least: Role) -> &'static str {
    match least {
        Role::Viewer => "",
        Role::Operator => " (only an operator or an owner may)",
        Role::Owner => " (only an owner may)",
    }
}

/// A text with the role behind each command, `polisctl …` in back quotes, that the reader may
/// not type. The text of an unknown reader stays as it is.
pub(super) fn for_reader(text: &str, reader: Option<Role>) -> String {
    let Some(reader) = reader else { return text.to_owned() };
    let (mut marked, mut rest) = (String::with_capacity(text.len()), text);
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let Some((command, after)) = after.split_once('`') else { break };
        marked.push_str(before);
        marked.push_str(BEGIN);
        marked.push_str(command);
        marked.push('`');
        if let Some(least) = least_role(command).filter(|least| reader < *least) {
            marked.push_str(mark(least));
        }
        rest = after;
    }
    marked.push_str(rest);
    marked
}

/// The beginning of a command in a text.
const BEGIN: &str = concat!("`", "polisctl ");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_in_the_access_table_and_serves_no_viewer() {
        let table = Table::polis().unwrap();
        for (command, path) in CALLS {
            let least = match path {
                NO_CALL => None,
                path => table.rule(path).unwrap().least_role(),
            };
            let above = CALLS.iter().any(|(name, _)| command.starts_with(&format!("{name} ")));
            assert!(least > Some(Role::Viewer) || above, "{command}: {least:?}");
            let needed = least.filter(|role| *role > Role::Viewer);
            assert_eq!(least_role(command), needed, "{command}");
        }
        assert_eq!(least_role("cluster update status --watch"), None);
        assert_eq!(least_role("cluster update FILE"), Some(Role::Owner));
    }

    #[test]
    fn a_command_is_found_behind_options_and_above_its_arguments() {
        for (command, least) in [
            ("node recovery-key", Some(Role::Owner)),
            ("node recovery-key show polis-1", Some(Role::Owner)),
            ("node recovery-key passphrase --recovery-key-file FILE", None),
            ("node network polis-1 --output json", None),
            ("node network polis-1 --vlan=bond0,id=7", Some(Role::Operator)),
            ("--context home node delete NODE --force", Some(Role::Operator)),
            ("cluster ticket rotate", Some(Role::Owner)),
            ("node roles NODE --add consensus-member", Some(Role::Owner)),
            ("cluster registry list", None),
            ("--endpoint HOST cluster take-ownership", None),
            ("node list", None),
            ("nonsense", None),
        ] {
            assert_eq!(least_role(command), least, "{command}");
        }
    }

    #[test]
    fn each_option_that_orders_a_network_needs_an_operator() {
        let command = crate::command();
        let network = command.find_subcommand("node").unwrap().find_subcommand("network").unwrap();
        let options = network.get_arguments().filter_map(clap::Arg::get_long);
        for option in options.filter(|option| *option != "dry-run") {
            let order = format!("node network polis-1 --{option}");
            assert_eq!(least_role(&order), Some(Role::Operator), "{order}");
        }
    }

    #[test]
    fn what_a_reader_may_not_type_is_told_with_the_role_that_may() {
        let text = "a `polisctl node list`, `polisctl node delete x`; `polisctl user create`. `";
        let as_viewer = "a `polisctl node list`, `polisctl node delete x` (only an operator or an \
                         owner may); `polisctl user create` (only an owner may). `";
        let as_operator = "a `polisctl node list`, `polisctl node delete x`; `polisctl user \
                           create` (only an owner may). `";
        assert_eq!(for_reader(text, Some(Role::Viewer)), as_viewer);
        assert_eq!(for_reader(text, Some(Role::Operator)), as_operator);
        assert_eq!(for_reader(text, Some(Role::Owner)), text);
        assert_eq!(for_reader(text, None), text);
        let open = format!("{BEGIN}node delete");
        assert_eq!(for_reader(&open, Some(Role::Viewer)), open);
    }
}
