//! What the stories share with each other, whatever they are told against.

use std::path::PathBuf;

/// The operator's program: `POLIS_POLISCTL`, else the one that cargo built beside the
/// stories (`cargo build --bin polisctl`; `cargo xtask test` does).
///
/// # Panics
///
/// When it is in neither place.
#[must_use]
pub fn polisctl() -> PathBuf {
    if let Some(program) = std::env::var_os("POLIS_POLISCTL") {
        return program.into();
    }
    let story = std::env::current_exe().expect("the kernel names the program that runs");
    let profile = story.ancestors().nth(2).expect("stories lie in PROFILE/deps");
    let program = profile.join("polisctl");
    assert!(program.exists(), "{} is missing: cargo build --bin polisctl", program.display());
    program
}
