//! The part of the kernel's interface that needs the async runtime: child
//! processes, the control channel, and readiness of descriptors.

#[cfg(any(test, feature = "testing"))]
pub mod acts;
pub mod cgroup;
pub mod confine;
pub mod control;
mod limits;
pub mod process;
pub mod readiness;
