//! The cases: every command, with arguments that are right and some that are wrong.

/// The inputs of a command, and its output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing but files.
    Local,
    /// The same, and what it prints is for another program.
    Script,
    /// A cluster.
    Remote,
    /// A cluster and a terminal of its own, which no test has.
    Screen,
}

/// Input that a command refuses, its exit status, and a part of what it says.
type Wrong = (&'static [&'static str], u8, &'static str);

/// A command with arguments that are right and some that are wrong.
type Case = (&'static str, &'static [&'static str], Kind, &'static [Wrong]);

/// Every command, in an order in which each finds what it needs. `ID` is the node, `AT`
/// where it is, `KEY` its fingerprint; `BUCKET` has a snapshot; a `@name` is a file. The wrong
/// input is what clap cannot know to be wrong, or a value that it refuses; options that do not
/// exist are tried with each.
pub(super) const CASES: &[Case] = &[
    (
        "owner create",
        &["-o", "@new.key"],
        Kind::Local,
        &[(&["-o", "@owner.key"], 1, "exists"), (&["-o", "@ann.pub"], 2, "a public half")],
    ),
    ("owner show", &["@new.key"], Kind::Local, &[(&["@wrong"], 1, "wrong")]),
    (
        "parameters bootstrap",
        &["--owner-key", "@new.pub", "-o", "@node.pb"],
        Kind::Local,
        &[
            (&["--owner-key", "@none", "-o", "@n.pb"], 1, "none"),
            (&["--owner-key", "@new.pub", "--name", "beef", "-o", "@n.pb"], 2, "beef"),
        ],
    ),
    ("parameters show", &["@node.pb"], Kind::Local, &[(&["@none"], 1, "none")]),
    ("parameters check", &["@node.pb"], Kind::Local, &[(&["@wrong"], 1, "wrong")]),
    (
        "parameters register",
        &["--node", "ID=192.0.2.1", "-o", "@joins.pb"],
        Kind::Remote,
        &[
            (&["--ticket", "xyz", "-o", "@n.pb"], 2, "ticket"),
            (&["--ca", "@wrong", "-o", "@n.pb"], 1, "wrong"),
        ],
    ),
    (
        "cluster take-ownership",
        &[],
        Kind::Remote,
        &[(&["--fingerprint", "zoo-zoo"], 2, "four words"), (&["--owner-key", "@none"], 1, "none")],
    ),
    ("cluster info", &[], Kind::Remote, &[]),
    ("cluster status", &[], Kind::Remote, &[]),
    ("cluster health", &[], Kind::Remote, &[]),
    (
        "cluster wait",
        &[],
        Kind::Remote,
        &[
            (&["--nodes", "many"], 2, "allowed is a whole number"),
            (&["--nodes", "16385"], 2, "16384"),
        ],
    ),
    ("cluster registry list", &[], Kind::Remote, &[]),
    (
        "cluster registry set",
        &["a.example", "--mirror", "b.example/hub"],
        Kind::Remote,
        &[(&["a.example", "--mirror", "b example"], 1, "b example")],
    ),
    (
        "cluster registry delete",
        &["a.example", "--yes"],
        Kind::Remote,
        &[(&["a.example/x", "--yes"], 1, "a.example/x")],
    ),
    ("cluster rotate-ca", &["--yes"], Kind::Remote, &[]),
    ("cluster rotate-ca status", &[], Kind::Remote, &[]),
    ("cluster ticket", &[], Kind::Remote, &[]),
    (
        "cluster ticket rotate",
        &["--yes"],
        Kind::Remote,
        &[(&["--yes", "--lifetime", "5"], 2, "unit")],
    ),
    (
        "cluster configure",
        &["--tpm", "disabled"],
        Kind::Remote,
        &[(&[], 2, "name"), (&["--tpm", "perhaps"], 2, "possible values")],
    ),
    ("cluster export", &[], Kind::Remote, &[(&["-o", "@owner.key"], 1, "exists already")]),
    (
        "cluster apply",
        &["@settings", "--yes"],
        Kind::Remote,
        &[
            (&["@none", "--yes"], 1, "does not exist"),
            (&["@wrong", "--yes"], 1, "as a file of settings"),
        ],
    ),
    // Before `cluster update`, whose update does not end here.
    ("cluster update wait", &[], Kind::Remote, &[]),
    (
        "cluster update",
        &["@update", "--yes"],
        Kind::Remote,
        &[(&[], 2, "FILE"), (&["@wrong", "--yes"], 1, "not an update bundle")],
    ),
    ("cluster update status", &[], Kind::Remote, &[]),
    ("cluster update pause", &[], Kind::Remote, &[]),
    ("cluster update resume", &[], Kind::Remote, &[]),
    ("cluster update abort", &["--yes"], Kind::Remote, &[]),
    (
        "node list",
        &[],
        Kind::Remote,
        &[(&["--state", "gone"], 2, "possible values"), (&["--label", "a"], 2, "KEY=VALUE")],
    ),
    ("get nodes", &[], Kind::Remote, &[(&["--state", "gone"], 2, "possible values")]),
    ("node describe", &["ID"], Kind::Remote, &[NO_NODE, (&["ab"], 1, "four digits")]),
    ("node status", &["ID"], Kind::Remote, &[NO_NODE, (&["ID", "--at", ":"], 2, "--at")]),
    ("node services", &["ID"], Kind::Remote, &[NO_NODE]),
    ("node firewall", &["ID"], Kind::Remote, &[NO_NODE]),
    (
        "node network",
        &["ID", "--from-parameters"],
        Kind::Remote,
        &[NO_NODE, (&["ID", "--vlan", "bond0,id=7"], 1, "a bond of this configuration")],
    ),
    (
        "node attest",
        &["ID"],
        Kind::Remote,
        &[
            NO_NODE,
            (&["ID", "--image", "@wrong"], 1, "nor a disk image"),
            (&["ID", "--maker", "@wrong"], 1, "holds no certificate"),
        ],
    ),
    (
        "node approve",
        &["ID", "--unchecked"],
        Kind::Remote,
        &[
            NO_NODE,
            (&["ID", "--fingerprint", "zoo"], 2, "four words"),
            (&["ID", "ffff", "--fingerprint", "KEY"], 2, "name one node"),
            (&["ID", "--unchecked", "--image", "@wrong"], 1, "nor a disk image"),
        ],
    ),
    (
        "node roles",
        &["ID", "--remove", "consensus-member", "--yes"],
        Kind::Remote,
        &[
            (&["ID"], 2, "--add ROLE"),
            (&["ID", "--add", "king"], 2, "possible values"),
            (
                &["ID", "--add", "kubernetes-worker", "--remove", "kubernetes-worker"],
                2,
                "with --add or with --remove alone",
            ),
        ],
    ),
    (
        "node label",
        &["ID", "a=b"],
        Kind::Remote,
        &[
            (&["ID", "a"], 2, "KEY=VALUE"),
            (&["ID", "a=b", "a-"], 2, "is both set and removed"),
            (&["ID", "kubernetes.io/os=a"], 2, "which Kubernetes or Polis sets itself"),
            (&["ffff", "a=b"], 1, "there is no node"),
        ],
    ),
    (
        "node taint",
        &["ID", "gpu=a100:NoSchedule", "old-"],
        Kind::Remote,
        &[
            (&["ID", "gpu"], 2, "is not KEY[=VALUE]:EFFECT"),
            (&["ID", "gpu:Never"], 2, "has the effect \"Never\""),
            (&["ID", "gpu:NoExecute", "gpu-"], 2, "a taint that is not set as well"),
            (&["ID", "node.kubernetes.io/x:NoExecute"], 2, "Kubernetes sets and removes itself"),
            (&["ffff", "gpu:NoExecute"], 1, "there is no node"),
        ],
    ),
    (
        "node name",
        &["ID", "mail-1"],
        Kind::Remote,
        &[(&["ID", "Mail"], 2, "Mail"), (&["ID"], 2, "NAME")],
    ),
    (
        "node reboot",
        &["ID", "--yes"],
        Kind::Remote,
        &[(&["ffff", "--yes"], 1, "there is no node"), (&["abc", "--at", "AT", "--yes"], 2, "abc")],
    ),
    (
        "node poweroff",
        &["ID", "--yes"],
        Kind::Remote,
        &[(&["ffff", "--yes"], 1, "there is no node")],
    ),
    (
        "node update",
        &["ID", "@update", "--no-reboot", "--yes"],
        Kind::Remote,
        &[
            (&["ffff", "@update", "--yes"], 1, "there is no node"),
            (&["ID", "@wrong", "--yes"], 1, "not an update bundle"),
        ],
    ),
    (
        "node announce-firmware-update",
        &["ID", "--at", "AT", "--yes"],
        Kind::Remote,
        &[(&["ffff", "--yes"], 1, "there is no node")],
    ),
    (
        "node decommission",
        &["ID", "--yes"],
        Kind::Remote,
        &[
            (&["ffff", "--yes"], 1, "there is no node"),
            (&["ID", "--yes", "--drain-timeout", "9"], 2, "unit"),
        ],
    ),
    (
        "node reset",
        &["ID", "--at", "AT", "--yes"],
        Kind::Remote,
        &[(&["ffff", "--yes"], 1, "there is no node")],
    ),
    (
        "node delete",
        &["ID", "--force", "--yes"],
        Kind::Remote,
        &[(&["ffff", "--yes"], 1, "there is no node")],
    ),
    (
        "node logs",
        &["ID", "--since", "2h"],
        Kind::Remote,
        &[
            NO_NODE,
            (&["ID", "--name", "cruator"], 1, "near names: root.curator"),
            (&["ID", "--boot", "1"], 2, "allowed are 0, this boot"),
            (&["ID", "--tail", "all"], 2, "allowed is a whole number"),
        ],
    ),
    ("node recovery-key", &["ID"], Kind::Remote, &[NO_NODE]),
    ("node recovery-key show", &["ID"], Kind::Remote, &[NO_NODE]),
    (
        "node recovery-key forget",
        &["ID", "--recovery-key-file", "@recovery"],
        Kind::Remote,
        &[(&["ID", "--recovery-key-file", "@wrong"], 1, "contains no key")],
    ),
    (
        "node recovery-key passphrase",
        &["--recovery-key-file", "@recovery"],
        Kind::Local,
        &[(&["--recovery-key-file", "@wrong"], 1, "recovery key")],
    ),
    (
        "node unlock",
        &["ID", "--at", "AT", "--recovery-key-file", "@recovery"],
        Kind::Remote,
        &[
            (&["ID", "--at", "AT", "--recovery-key-file", "@wrong"], 1, "recovery key"),
            (&["ID", "--fingerprint", "zoo"], 2, "zoo"),
        ],
    ),
    (
        "maintenance describe",
        &["AT", "--fingerprint", "KEY"],
        Kind::Remote,
        &[
            (&["AT", "--fingerprint", "zoo"], 2, "zoo"),
            (&["AT", "--code", "MYKT-F9X7-MYKT-F9X7-Z01H"], 2, "mistyped"),
        ],
    ),
    (
        "maintenance logs",
        &["AT", "--fingerprint", "KEY"],
        Kind::Remote,
        &[(&["AT", "--log", "all"], 2, "possible values")],
    ),
    (
        "maintenance parameters",
        &["AT", "@given.pb", "--fingerprint", "KEY", "--yes"],
        Kind::Remote,
        &[(&["AT", "@wrong", "--fingerprint", "KEY", "--yes"], 1, "wrong")],
    ),
    (
        "maintenance reboot",
        &["AT", "--fingerprint", "KEY", "--yes"],
        Kind::Remote,
        &[(&[":", "--yes"], 2, "HOST")],
    ),
    (
        "maintenance poweroff",
        &["AT", "--fingerprint", "KEY", "--yes"],
        Kind::Remote,
        &[(&["AT", "--fingerprint", "KEY", "--owner-key", "@none", "--yes"], 1, NO_OWNER_KEY)],
    ),
    (
        "user create",
        &["ann", "--role", "viewer", "--key", "@owner.key", "-o", "@ann.json"],
        Kind::Remote,
        &[
            (
                &["ann", "--role", "queen", "--key", "@owner.key", "-o", "@a.json"],
                2,
                "possible values",
            ),
            (&["ann", "--role", "viewer", "--key", "@wrong", "-o", "@a.json"], 1, "wrong"),
        ],
    ),
    ("user list", &[], Kind::Remote, &[]),
    ("user revoke", &["ann", "--yes"], Kind::Remote, &[(&[], 2, "NAME")]),
    ("etcd members", &[], Kind::Remote, &[]),
    ("audit", &[], Kind::Remote, &[]),
    ("audit verify", &[], Kind::Remote, &[(&["--from", "7"], 2, "NUMBER:HASH")]),
    ("etcd status", &[], Kind::Remote, &[]),
    ("etcd snapshot", &["-o", "@etcd.age"], Kind::Remote, &[(&["-o", "@recovery"], 1, "exists")]),
    (
        "etcd decrypt",
        &["@snapshot.age", "-o", "@etcd.db"],
        Kind::Local,
        &[
            (&["@none", "-o", "@new"], 1, "none"),
            (&["@wrong", "-o", "@new"], 1, "age format"),
            (&["@snapshot.age", "-o", "@recovery"], 1, "exists"),
            (&["@snapshot.age", "-o", "@new", "--owner-key", "@wrong"], 1, "wrong"),
        ],
    ),
    (
        "snapshot list",
        &["--target", "BUCKET", "--credentials", "@bucket.key"],
        Kind::Local,
        &[
            (&["--target", "BUCKET", "--credentials", "@wrong"], 1, "two lines"),
            (&["--target", "s3://bucket", "--credentials", "@bucket.key"], 1, "not encrypted"),
        ],
    ),
    (
        "snapshot fetch",
        &["-o", "@fetched.age", "--target", "BUCKET", "--credentials", "@bucket.key"],
        Kind::Local,
        &[
            (
                &["-o", "@recovery", "--target", "BUCKET", "--credentials", "@bucket.key"],
                1,
                "exists",
            ),
            (
                &["-o", "@new", "older", "--target", "BUCKET", "--credentials", "@bucket.key"],
                1,
                "no snapshot",
            ),
        ],
    ),
    (
        "kubernetes kubeconfig",
        &["-o", "@kubeconfig"],
        Kind::Remote,
        &[(&["-o", "@wrong"], 1, "wrong")],
    ),
    ("kubernetes credential", &[], Kind::Script, &[]),
    ("kubernetes status", &[], Kind::Remote, &[]),
    (
        "events",
        &["--since", "1h"],
        Kind::Remote,
        &[(&["--since", "1"], 2, "unit"), (&["--boots", "-1"], 2, "-1")],
    ),
    (
        "update inspect",
        &["@update", "--release-key", "@release.pub"],
        Kind::Local,
        &[
            (&["@none"], 1, "none"),
            (&["@wrong"], 1, "bundle"),
            (&["@update", "--release-key", "@other.pub"], 1, "expected"),
        ],
    ),
    ("top", &[], Kind::Remote, &[NO_NODE]),
    ("support", &["-o", "@support.tar"], Kind::Remote, &[(&["-o", "@recovery"], 1, "exists")]),
    ("dashboard", &[], Kind::Screen, &[]),
    (
        "console",
        &["ID"],
        Kind::Screen,
        &[(&["ID", "--at", ":"], 2, "--at"), (&["ID"], 1, "needs a terminal")],
    ),
    ("completion", &["bash"], Kind::Script, &[(&["ksh"], 2, "possible values")]),
    ("version", &[], Kind::Local, &[]),
    (
        "context set",
        &["other", "--key", "@owner.key"],
        Kind::Local,
        &[(&["a/b"], 2, "a/b"), (&["other", "--via", "192.0.2.1=x"], 2, "HOST:PORT")],
    ),
    (
        "context import",
        &["@ann.json", "--key", "@owner.key"],
        Kind::Local,
        &[(&["@wrong", "--key", "@owner.key"], 1, "wrong")],
    ),
    ("context show", &["home"], Kind::Local, &[(&["hone"], 1, "there is no context")]),
    ("context list", &[], Kind::Local, &[]),
    ("context use", &["home"], Kind::Local, &[(&["hone"], 1, "there are: home")]),
    (
        "context remove",
        &["home", "--yes"],
        Kind::Local,
        &[(&["hone", "--yes"], 1, "there is no context")],
    ),
];

/// The key is read before the machine is called.
const NO_OWNER_KEY: &str = "error: cannot read @none";

/// A node that no cluster has.
const NO_NODE: Wrong = (&["ffff"], 1, "there is no node \"ffff\"");
