//! Whether a machine has the memory and the disk that a role of Kubernetes needs. Pure.
//!
//! Without this, kubelet would end again and again, and workloads would have no quota. The
//! figures are those of the node's last report; a figure that a node has not reported is not
//! checked.

use polis_proto::v1;
use polis_wire::node_roles::{RESERVED_CONTROLLER, RESERVED_SYSTEM, RESERVED_WORKER};

const MIB: u64 = 1 << 20;

/// The resource that a machine has too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// The machine has too little memory for the roles.
    #[error(
        "the machine has {has} MiB of memory, and these roles of Kubernetes need {needs} MiB: give \
         it more, or the role to another node"
    )]
    Memory {
        /// MiB that the machine reported.
        has: u64,
        /// MiB that the roles need together.
        needs: u64,
    },
    /// The data partition has no room for workloads.
    #[error(
        "the data partition of the node has {has} MiB, and a worker needs {needs} MiB: give the \
         machine a disk of 5 GiB or more, or the role to another node"
    )]
    Disk {
        /// MiB that the node reported.
        has: u64,
        /// MiB that a worker needs.
        needs: u64,
    },
}

/// Memory in MiB beyond what is reserved: what kubelet keeps free, and one small pod.
const BEYOND: u32 = 200;

/// The smallest data partition of a worker: what the node keeps for itself, the images of the
/// system and one more, and the journal of the file system.
const DATA_MIN: u64 = 2300 * MIB;

/// Checks the roles that a node is given beside those that it had.
///
/// # Errors
///
/// [`Shortage`].
pub(super) fn check(
    had: &v1::NodeRoles,
    roles: &v1::NodeRoles,
    status: Option<&v1::NodeStatus>,
) -> Result<(), Shortage> {
    let controls = roles.kubernetes_controller.is_some();
    let works = roles.kubernetes_worker.is_some();
    let begins_to_work = works && had.kubernetes_worker.is_none();
    let begins = begins_to_work || controls && had.kubernetes_controller.is_none();
    let Some(status) = status.filter(|_| begins) else { return Ok(()) };

    let mut needs = RESERVED_SYSTEM + BEYOND;
    needs += if works { RESERVED_WORKER } else { 0 };
    needs += if controls { RESERVED_CONTROLLER } else { 0 };
    let has = status.memory_bytes;
    if has != 0 && has < u64::from(needs) * MIB {
        return Err(Shortage::Memory { has: has / MIB, needs: needs.into() });
    }
    let has = status.data_bytes;
    if begins_to_work && has != 0 && has < DATA_MIN {
        return Err(Shortage::Disk { has: has / MIB, needs: DATA_MIN / MIB });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use polis_proto::v1::node_roles::{ConsensusMember, KubernetesController, KubernetesWorker};

    use super::*;

    fn roles(controls: bool, works: bool) -> v1::NodeRoles {
        v1::NodeRoles {
            consensus_member: Some(ConsensusMember {}),
            kubernetes_controller: controls.then_some(KubernetesController {}),
            kubernetes_worker: works.then_some(KubernetesWorker {}),
        }
    }

    fn machine(memory: u64, data: u64) -> v1::NodeStatus {
        v1::NodeStatus {
            memory_bytes: memory * MIB,
            data_bytes: data * MIB,
            ..v1::NodeStatus::default()
        }
    }

    #[test]
    fn each_role_needs_its_memory_and_both_need_both() {
        let none = roles(false, false);
        for (wanted, needs) in
            [(roles(false, true), 800), (roles(true, false), 1100), (roles(true, true), 1500)]
        {
            let small = machine(needs - 1, 1 << 20);
            let refused = check(&none, &wanted, Some(&small)).unwrap_err();
            assert_eq!(refused, Shortage::Memory { has: needs - 1, needs });
            let large = machine(needs, 1 << 20);
            assert_eq!(check(&none, &wanted, Some(&large)), Ok(()));
        }
    }

    #[test]
    fn a_worker_needs_a_disk_and_a_controller_alone_none_of_its_own() {
        let small = machine(1 << 20, 1536);
        let refused = check(&roles(false, false), &roles(false, true), Some(&small));
        assert_eq!(refused, Err(Shortage::Disk { has: 1536, needs: 2300 }));
        assert_eq!(check(&roles(false, false), &roles(true, false), Some(&small)), Ok(()));
    }

    #[test]
    fn roles_that_a_node_has_and_figures_that_it_has_not_reported_are_no_reason() {
        let small = machine(1, 1);
        let all = roles(true, true);
        assert_eq!(check(&all, &all, Some(&small)), Ok(()), "it keeps what it has");
        assert_eq!(check(&roles(true, false), &roles(false, false), Some(&small)), Ok(()));
        for unknown in [None, Some(&machine(0, 0))] {
            assert_eq!(check(&roles(false, false), &all, unknown), Ok(()));
        }
    }
}
