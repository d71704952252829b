//! The errors of calls that were refused or not answered, with the next step.

use polis_base::cause;
use polis_wire::rpc::REASON;
use polis_wire::rpc::client::DialError;
use tonic::{Code, Status};

use crate::error::Error;

/// The error of a connection that failed, with help for the operator.
pub(crate) fn unreached(error: DialError) -> Error {
    let help = error.help();
    let late = matches!(error, DialError::Silent { .. });
    let error = if late { Error::late(error.into()) } else { Error::from(error) };
    error.or_help(help)
}

/// The error of a refused call, with help for the operator.
pub(crate) fn refused(what: &str, status: &Status) -> Error {
    let message = match status.message() {
        "" => status.code().description(),
        message => message,
    };
    let mut error = anyhow::Error::msg(message.to_owned());
    let source = std::error::Error::source(status);
    if let Some(source) = source {
        error = anyhow::Error::msg(cause::line(source)).context(message.to_owned());
    }
    let error = error.context(format!("cannot {what}"));
    let reason = status.metadata().get(REASON).and_then(|reason| reason.to_str().ok());
    let late = matches!(status.code(), Code::DeadlineExceeded | Code::Unavailable);
    let error = if late { Error::late(error) } else { Error::from(error) };
    // The servers say only in words which of these it is.
    let reason = match reason.unwrap_or_default() {
        "quorum" if message.contains("can be reached") => "quorum-silent",
        // A node refuses these before the call has a reason of its own.
        "" if message.contains(" streams open here") => "streams",
        "" if message.starts_with("too many calls ") => "calls",
        reason => reason,
    };
    match help(status.code(), reason) {
        Some(help) => error.or_help(help),
        None => error,
    }
}

fn help(code: Code, reason: &str) -> Option<&'static str> {
    Some(match (reason, code) {
        ("quorum", _) => {
            "let another node vote first: `polisctl node roles NODE --add consensus-member`, then \
             `polisctl cluster wait`"
        }
        ("quorum-silent", _) => {
            "a dead voter keeps the others from leaving: delete it first, `polisctl node delete \
             NODE --force`; or switch it on"
        }
        ("unmanaged-pods", _) => {
            "nothing makes such a pod anew: delete it, or have it evicted all the same: --force"
        }
        ("drain", _) => {
            "the node takes pods again; end the pods or change their disruption budget, allow \
             more time: --drain-timeout, or go on with pods left: --force"
        }
        ("drain-taken", _) => "wait for the other command, and repeat this one",
        ("gate", _) => {
            "read the machine's screen: it shows a code (--code), or a fingerprint and wants the \
             key of its owner (--owner-key), or of an owner of its cluster (--context)"
        }
        ("home", _) => {
            "remove the node from its cluster and wipe its data partition first; see \
             docs/maintenance.md"
        }
        ("fw-cfg", _) => "change them in the configuration of the hypervisor",
        ("parameters", _) => "replace them: --replace",
        ("not-owner", _) => "name the owner's key with --owner-key",
        ("fingerprint", _) => {
            "compare with the machine's screen again; do not approve a fingerprint that differs"
        }
        ("proved-anew", _) => {
            "the machine may have another TPM, or run another system, than you have seen: repeat \
             the command, which reads the newest proof"
        }
        ("attestation-policy", _) => {
            "start the machine with a system of the policy and without additions: it proves its \
             TPM anew at each start; or set another policy: `polisctl cluster configure \
             --attestation-image FILE`, with each image and each maker that is to be in it, since \
             these options replace the whole policy"
        }
        ("still-up", _) => {
            "decommission it first: `polisctl node decommission NODE`; or, if the machine is \
             lost, add --force"
        }
        ("no-tpm", _) => {
            "nothing can be proved about such a machine; if it has a TPM 2.0, switch it on in the \
             setup of the firmware"
        }
        ("tpm-keys", _) => {
            "the node named other keys a moment before: repeat the command; if it fails again, do \
             not trust the machine"
        }
        ("last-owner", _) => "make another owner first: `polisctl user create NAME --role owner`",
        ("name-taken", _) => {
            "choose another name, or take it away from that node: `polisctl node name NODE --remove`"
        }
        ("user-taken", _) => "pick another name, or revoke that user first",
        ("key-taken", _) => "make another key: `polisctl owner create -o FILE`",
        ("decommissioned", _) => {
            "a removed node cannot return; with parameters by `polisctl parameters register \
             --wipes` its machine wipes the disk, and registers again"
        }
        ("update-refused", _) => {
            "`polisctl update inspect FILE` prints what the bundle is for and who signed it, and \
             `polisctl node status NODE` what runs"
        }
        ("update-one-way", _) => {
            "take a snapshot (`polisctl etcd snapshot -o FILE`), then repeat the command with \
             --one-way"
        }
        ("update-no-key", _) => {
            "build the image with `cargo xtask image --keys DIR` and write it to the disk, once: a \
             node takes the bundles that the keys of its image signed"
        }
        ("update-no-loader", _) => {
            "start the machine from its own disk by UEFI: only the loader there starts another \
             system"
        }
        ("update-busy", _) => "wait for the other command, and repeat this one",
        ("update-trial", _) => "wait until the node is ready, which keeps its system",
        ("update-no-space", _) => {
            "make room on the data partition of that node, or give it a larger disk"
        }
        ("update-plan", _) => {
            "mend it and repeat the command: `polisctl cluster status` shows every node; one node \
             alone takes the bundle by `polisctl node update NODE FILE`"
        }
        ("update-going-on", _) => "`polisctl cluster update status` shows it",
        ("update-restarts", _) => "`polisctl cluster update status` shows when the node is back",
        ("rotation-restarts", _) => "`polisctl cluster rotate-ca status` shows when it is done",
        ("no-rotation", _) => "`polisctl cluster rotate-ca` begins one",
        ("no-update", _) => "`polisctl cluster update FILE` begins one",
        ("update-failed", _) => {
            "the system that runs was not touched: repeat the command; if it fails again, check \
             the disk"
        }
        (_, Code::Unauthenticated) => {
            "get a certificate: owners by `polisctl cluster take-ownership`, others from the owner \
             by `polisctl user create`"
        }
        (_, Code::PermissionDenied) => "ask a user with that role: `polisctl user list`",
        (_, Code::Unavailable | Code::DeadlineExceeded) => {
            "`polisctl cluster status` shows the nodes that answer without a leader, and what each \
             waits for; `polisctl cluster wait` waits for one; check the endpoints, or allow more \
             time: --timeout; a node alone answers `polisctl node status NODE --at HOST`"
        }
        // The only refusals of a store with this code.
        ("store" | "damaged", Code::ResourceExhausted) => {
            "`polisctl etcd status` shows whether the store is full or has another alarm"
        }
        ("streams", Code::ResourceExhausted) => {
            "end a console, a dashboard, or a command with --follow or --watch that this user has \
             open, on any machine; then repeat the command"
        }
        ("calls", Code::ResourceExhausted) => {
            "repeat the command; let a script that calls in a loop wait between its calls"
        }
        ("pod-network-full", _) => {
            "`polisctl node list` shows which nodes have roles of Kubernetes, and which are gone"
        }
        (_, Code::ResourceExhausted) => {
            "a limit is reached, which the message names: wait until other calls have ended, and \
             repeat the command"
        }
        (_, Code::Unimplemented) => "the cluster's version does not support this call",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_does_not_answer_is_a_timeout_and_a_closed_port_is_a_failure() {
        let (host, port) = ("192.0.2.1".to_owned(), 7839);
        let silent = unreached(DialError::Silent { host: host.clone(), port });
        assert_eq!(silent.exit(), crate::error::Exit::TimedOut);
        insta::assert_snapshot!(silent.render(), @r"
        error: 192.0.2.1:7839 does not answer within 4 seconds
        help: check that the machine is on and ready, and that the port is open
        ");
        let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let closed = unreached(DialError::Connect { host, port, source });
        assert_eq!(closed.exit(), crate::error::Exit::Failed);
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let status = Status::unauthenticated("this call needs a user");
        let error = refused("list the users", &status);
        insta::assert_snapshot!(error.render(), @r"
        error: cannot list the users
        cause: this call needs a user
        help: get a certificate: owners by `polisctl cluster take-ownership`, others from the owner by `polisctl user create`
        ");
        assert_eq!(error.exit(), crate::error::Exit::Failed);
        let error = refused("list the users", &Status::unavailable("no leader was found in time"));
        assert_eq!(error.exit(), crate::error::Exit::TimedOut);
        let first = "help: `polisctl cluster status` shows the nodes that answer without a leader";
        assert!(error.render().contains(first), "{}", error.render());
    }

    #[test]
    fn each_limit_has_its_own_next_step() {
        let help = |text: &str, reason: Option<&'static str>| {
            let mut status = Status::resource_exhausted(text);
            if let Some(reason) = reason {
                status.metadata_mut().insert(REASON, reason.parse().unwrap());
            }
            refused("read the log", &status).render()
        };
        let store = help("cannot list: the database of etcd is full", Some("damaged"));
        assert!(store.contains("help: `polisctl etcd status` shows whether"), "{store}");
        let streams = "owner ann has 128 streams open here; end some of them first";
        let calls = "too many calls of owner ann; wait a second";
        let requests = "the requests that this connection has begun to send are too long together";
        for (text, wanted) in [
            (streams, "help: end a console, a dashboard, or a command with --follow"),
            (calls, "help: repeat the command; let a script"),
            (requests, "help: a limit is reached, which the message names"),
        ] {
            let shown = help(text, None);
            assert!(shown.contains(wanted) && !shown.contains("etcd status"), "{shown}");
        }
        let network = help("the pod network is full", Some("pod-network-full"));
        assert!(network.contains("help: `polisctl node list` shows which"), "{network}");
    }

    #[test]
    fn the_word_of_a_refusal_picks_the_advice() {
        let mut status = Status::failed_precondition("two voters would be left");
        status.metadata_mut().insert(REASON, "quorum".parse().unwrap());
        let text = refused("take the roles away", &status).render();
        assert!(text.contains("help: let another node vote first"), "{text}");
        let text = "without n2, 2 of 2 voters must answer, of which 1 can be reached; missing: n3";
        let mut status = Status::failed_precondition(text);
        status.metadata_mut().insert(REASON, "quorum".parse().unwrap());
        let text = refused("decommission the node", &status).render();
        assert!(text.contains("`polisctl node delete NODE --force`"), "{text}");
        assert!(!text.contains("let another node vote first"), "{text}");
    }
}
