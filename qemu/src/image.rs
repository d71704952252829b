//! Finds what `cargo xtask image` built, by its manifest.
