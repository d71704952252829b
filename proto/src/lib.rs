//! The messages of Polis, generated from `polis/v1/*.proto`. No logic lives here.

/// Version 1 of the messages.
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/polis.v1.rs"));

    /// Lets a message be printed without what is in it.
    macro_rules! unprintable {
        ($($message:ident)*) => {$(
            impl std::fmt::Debug for $message {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.debug_struct(stringify!($message)).finish_non_exhaustive()
                }
            }
        )*};
    }

    unprintable! {
        ColdStartShare CommitNodeRequest GetRecoveryKeyResponse GetRegisterTicketResponse
        JoinNodeResponse Node SealedConfiguration SealedSecrets UnlockRequest
    }
}

/// The encoded `FileDescriptorSet` of all files, for reflection and strict parsing.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
