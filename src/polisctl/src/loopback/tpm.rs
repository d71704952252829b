//! The TPM of the node's machine.

use polis_proto::v1;
use tonic::Status;

use super::KERNEL;
use polis_wire::attestation::Registers;
use polis_wire::attestation::software::Software;
use polis_wire::rpc::REASON;

/// The TPM of the node's machine.
pub(super) struct Tpm {
    /// `None`: it has none.
    pub(super) software: Option<Software>,
    /// The attestation key that the node names; `None`: that of its TPM.
    pub(super) pretended: Option<Vec<u8>>,
    pub(super) registers: Registers,
    /// What the record of the node has of it.
    pub(super) recorded: Option<v1::TpmAttestation>,
    /// What it has proved for a new certificate; `None`: the node does not ask for one.
    pub(super) returning: Option<v1::TpmAttestation>,
}

impl Default for Tpm {
    fn default() -> Self {
        let kernel = crate::kernel::tests::kernel(KERNEL);
        let mut registers: Registers = (0..24).map(|number| (number, [7; 32])).collect();
        registers.extend(polis_bundle::registers(&kernel).unwrap());
        let software = Some(Software::default());
        Self { software, pretended: None, registers, recorded: None, returning: None }
    }
}

/// The refusal of a machine without a TPM.
pub(super) fn no_tpm() -> Status {
    let mut status = Status::failed_precondition("this machine has no TPM 2.0");
    status.metadata_mut().insert(REASON, "no-tpm".parse().unwrap());
    status
}
