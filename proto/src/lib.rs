//! The messages of Polis, generated from `polis/v1/*.proto`, and those of the programs that
//! it calls or that call it. No logic lives here.

#[cfg(test)]
mod contract_tests;
#[cfg(test)]
mod secret_tests;

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
        ClusterRegister ColdStartShare CommitNodeRequest GetRecoveryKeyResponse
        GetRegisterTicketResponse GiveParametersRequest JoinNodeResponse Node RegisterNodeRequest
        RegisterTicket Registry SealedConfiguration SealedSecrets SnapshotCredentials UnlockRequest
    }
}

/// The calls of a node to containerd, as `containerd/` defines them.
pub mod containerd {
    /// Blobs.
    pub mod types {
        include!(concat!(env!("OUT_DIR"), "/containerd.types.rs"));
    }

    /// The services.
    pub mod services {
        /// The store of blobs.
        pub mod content {
            /// Version 1.
            pub mod v1 {
                include!(concat!(env!("OUT_DIR"), "/containerd.services.content.v1.rs"));
            }
        }

        /// The store of images.
        pub mod images {
            /// Version 1.
            pub mod v1 {
                include!(concat!(env!("OUT_DIR"), "/containerd.services.images.v1.rs"));
            }
        }

        /// The objects that the garbage collector spares.
        pub mod leases {
            /// Version 1.
            pub mod v1 {
                include!(concat!(env!("OUT_DIR"), "/containerd.services.leases.v1.rs"));
            }
        }
    }
}

/// The calls of a node to the container runtime interface of Kubernetes, as `runtime/` defines
/// them.
pub mod cri {
    include!(concat!(env!("OUT_DIR"), "/runtime.v1.rs"));
}

/// The calls of kubelet to a storage driver of its node, as `csi/` defines them.
pub mod csi {
    include!(concat!(env!("OUT_DIR"), "/csi.v1.rs"));
}

/// The calls of an API server to the signer of its tokens, as `externaljwt/` has them.
pub mod externaljwt {
    include!(concat!(env!("OUT_DIR"), "/v1.rs"));
}

/// The logs that a node sends by OTLP, as `opentelemetry/` has them.
pub mod otlp {
    include!(concat!(env!("OUT_DIR"), "/opentelemetry.rs"));
}

/// How kubelet meets a plugin, as `pluginregistration/` has it.
pub mod plugin {
    include!(concat!(env!("OUT_DIR"), "/pluginregistration.rs"));
}

/// The encoded `FileDescriptorSet` of all files, for reflection and strict parsing.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
