//! The bus of an emulated TPM: runs commands, and keeps what went over it.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use polis_machine::tpm::Transport;
use polis_qemu::tpm::Tpm;

/// `TPM2_PolicyPCR`.
const POLICY_PCR: u32 = 0x17f;

/// A TPM that is on, and what went over its bus.
pub(crate) struct Bus {
    pub(crate) stream: UnixStream,
    pub(crate) seen: Vec<u8>,
    /// How often register 10 is extended right after a policy named registers, as the kernel of
    /// a machine does that loads a module at that time.
    pub(crate) disturbed: u32,
    _tpm: Tpm,
}

impl Bus {
    pub(crate) fn switch_on(state: &std::path::Path) -> Self {
        let (tpm, stream) = Tpm::alone(state).unwrap();
        // Longer than any answer takes on a busy host.
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { stream, seen: Vec::new(), disturbed: 0, _tpm: tpm }
    }

    /// Runs a command with the (empty) password of its first object; returns the answer's
    /// parameters.
    pub(crate) fn run(&mut self, code: u32, handles: &[u32], parameters: &[u8]) -> Vec<u8> {
        let mut command = vec![0x80, 2, 0, 0, 0, 0];
        command.extend(code.to_be_bytes());
        handles.iter().for_each(|handle| command.extend(handle.to_be_bytes()));
        command.extend([0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 1, 0, 0]);
        command.extend(parameters);
        let size = u32::try_from(command.len()).unwrap().to_be_bytes();
        command[2..6].copy_from_slice(&size);
        let answer = self.transmit(&command).unwrap();
        assert_eq!(answer[6..10], [0; 4], "the TPM refuses command {code:#x}");
        answer[14..].to_vec()
    }

    /// Extends a register, as the code that starts the machine does.
    pub(crate) fn measure(&mut self, pcr: u32) {
        let value = [&[0, 0, 0, 1, 0, 0x0b][..], &[7; 32]].concat();
        self.run(0x182, &[pcr], &value);
    }

    /// Keeps SHA-1 values of the registers alone from the next start on, as an old firmware's
    /// setup does (`TPM2_PCR_Allocate`).
    pub(crate) fn drop_sha256(&mut self) {
        let banks = [0, 0, 0, 2, 0, 4, 3, 0xff, 0xff, 0xff, 0, 0x0b, 3, 0, 0, 0];
        // The platform's hierarchy.
        let allocated = self.run(0x12b, &[0x4000_000c], &banks);
        assert_eq!(allocated[0], 1, "the TPM cannot have these banks");
    }

    /// Stores something where the maker of a TPM stores a certificate (`TPM2_NV_DefineSpace`,
    /// `TPM2_NV_Write`).
    pub(crate) fn store(&mut self, place: u32, content: &[u8]) {
        const OWNER: u32 = 0x4000_0001;
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        // The owner writes it, and a reader names the place.
        let attributes = 0x0206_0002_u32.to_be_bytes();
        let public = [&place.to_be_bytes()[..], &[0, 0x0b], &attributes, &[0, 0], &length].concat();
        self.run(0x12a, &[OWNER], &[&[0, 0, 0, 14][..], &public].concat());
        for (number, piece) in content.chunks(512).enumerate() {
            let size = u16::try_from(piece.len()).unwrap().to_be_bytes();
            let start = u16::try_from(number * 512).unwrap().to_be_bytes();
            self.run(0x137, &[OWNER, place], &[&size[..], piece, &start].concat());
        }
    }

    pub(crate) fn has_seen(&self, secret: &[u8]) -> bool {
        self.seen.windows(secret.len()).any(|window| window == secret)
    }
}

impl Transport for Bus {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        self.seen.extend(command);
        self.stream.write_all(command)?;
        let mut answer = vec![0; 10];
        self.stream.read_exact(&mut answer)?;
        let size = u32::from_be_bytes([answer[2], answer[3], answer[4], answer[5]]) as usize;
        answer.resize(size, 0);
        self.stream.read_exact(&mut answer[10..])?;
        self.seen.extend(&answer);
        if self.disturbed > 0 && command[6..10] == POLICY_PCR.to_be_bytes() {
            self.disturbed -= 1;
            self.measure(10);
        }
        Ok(answer)
    }

    /// This TPM tests itself at once.
    fn wait(&mut self, _time: Duration) {}
}
