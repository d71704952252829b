//! The suggested commands, each with its situations, its readers, and the tests that type it.

use polis_wire::rpc::Role;

/// A suggested command, with `_` for what a person or the program fills in; when it is
/// suggested, and to which readers; the tests that type it then.
type Suggestion = (&'static str, &'static str, &'static [Reader], &'static [&'static str]);

/// The reader of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
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

const NO_CONTEXT: &str = "without_a_context_the_suggested_commands_lead_to_one";
const BAD_CONTEXT: &str = "a_context_that_cannot_be_used_tells_what_mends_it";
const ENDED: &str = "a_certificate_that_has_ended_tells_the_way_to_another_one";
const KEYS: &str = "a_recovery_key_tells_the_command_for_the_next_step";
const NO_SUCH: &str = "what_is_not_there_is_found_by_the_suggested_command";
const STATUS: &str = "each_command_of_the_state_of_a_cluster_works_while_it_is_shown";
const INVITED: &str = "a_new_user_comes_in_by_the_suggested_command";
const DETOURS: &str = "the_detours_of_a_context_are_shown_and_removed";
const NO_KEY: &str = "without_an_owner_key_the_suggested_command_makes_one";
const NO_CONTROLLER: &str = "without_a_controller_the_suggested_command_gives_a_node_the_role";
const SHARE: &str = "a_cluster_stores_no_share_of_a_key_by_the_suggested_command";
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
const AWAITED: &str = "a_command_that_waits_for_an_update_ends_with_it_or_with_its_time";
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

pub(super) const SUGGESTED: &[Suggestion] = &[
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
    ("cluster update wait", "a wait for an update that ran out of time", USERS, &[AWAITED]),
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
    ("node update NODE FILE", "the update cannot be planned", OWNERS, &[UPDATED]),
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
