//! Compiles the `.proto` files in pure Rust, so the host needs no `protoc` for them.

use std::path::PathBuf;
use std::{env, fs};

use prost::Message;

/// Every file of the API; each imports nothing outside this folder.
const FILES: [&str; 14] = [
    "polis/v1/aaa.proto",
    "polis/v1/access.proto",
    "polis/v1/audit.proto",
    "polis/v1/consensus.proto",
    "polis/v1/curator.proto",
    "polis/v1/maintenance.proto",
    "polis/v1/management.proto",
    "polis/v1/node.proto",
    "polis/v1/node_management.proto",
    "polis/v1/parameters.proto",
    "polis/v1/pki.proto",
    "polis/v1/registry.proto",
    "polis/v1/sealed.proto",
    "polis/v1/update.proto",
];

/// The parts of the APIs of other programs that a node calls, or serves to them: fewer
/// messages than those have, with their names and numbers.
const FOREIGN: [&str; 9] = [
    "containerd/services/content.proto",
    "containerd/services/images.proto",
    "containerd/services/leases.proto",
    "containerd/types.proto",
    "csi/v1.proto",
    "externaljwt/v1.proto",
    "opentelemetry/logs.proto",
    "pluginregistration/v1.proto",
    "runtime/v1.proto",
];

/// Messages with secrets in them: `src/lib.rs` prints their names and nothing more.
const SECRET: [&str; 15] = [
    "polis.v1.ClusterRegister",
    "polis.v1.ColdStartShare",
    "polis.v1.CommitNodeRequest",
    "polis.v1.GetRecoveryKeyResponse",
    "polis.v1.GetRegisterTicketResponse",
    "polis.v1.GiveParametersRequest",
    "polis.v1.JoinNodeResponse",
    "polis.v1.Node",
    "polis.v1.RegisterNodeRequest",
    "polis.v1.RegisterTicket",
    "polis.v1.Registry",
    "polis.v1.SealedConfiguration",
    "polis.v1.SealedSecrets",
    "polis.v1.SnapshotCredentials",
    "polis.v1.UnlockRequest",
];

/// A crate that needs the messages only compiles no gRPC.
const SERVICES: &str = "#[cfg(feature = \"services\")]";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folders = [
        "polis",
        "containerd",
        "csi",
        "externaljwt",
        "opentelemetry",
        "pluginregistration",
        "runtime",
    ];
    for folder in folders {
        println!("cargo:rerun-if-changed={folder}");
    }
    let descriptors = protox::Compiler::new(["."])?
        .include_imports(true)
        .open_files(FILES)?
        // Keeps the options with the callers of each call: `prost-types` does not know them.
        .encode_file_descriptor_set();
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), &descriptors)?;
    let descriptors = prost_types::FileDescriptorSet::decode(descriptors.as_slice())?;
    let build = || {
        tonic_prost_build::configure()
            .btree_map(".")
            .client_mod_attribute(".", SERVICES)
            .server_mod_attribute(".", SERVICES)
            // A machine has these parameters once.
            .enum_attribute(
                "polis.v1.NodeParameters.cluster",
                "#[expect(clippy::large_enum_variant, reason = \"there is one of them\")]",
            )
    };
    build().skip_debug(SECRET).compile_fds(descriptors)?;
    // Compiled apart: no port serves them, so the table of permissions has no row for them.
    build().compile_fds(protox::compile(FOREIGN, ["."])?)?;
    Ok(())
}
