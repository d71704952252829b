//! The only home of `unsafe` code, raw system calls and child processes.
//!
//! Each file wraps one part of the kernel's interface in safe functions.

pub mod clock;
