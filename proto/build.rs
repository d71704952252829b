//! Compiles the `.proto` files in pure Rust, so the host needs no `protoc` for them.

use std::path::PathBuf;
use std::{env, fs};

use prost::Message;

/// Every file of the API; each imports nothing outside this folder.
const FILES: [&str; 3] =
    ["polis/v1/node.proto", "polis/v1/parameters.proto", "polis/v1/sealed.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=polis");
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    Ok(())
}
