//! Priorities, which Linux keeps for a thread, and POSIX for a process.
//!
//! Source: `setpriority(2)`, *C library/kernel differences*.

/// Sets the nice value of the calling thread alone, from -20 (first) to 19 (last). On
/// failure the thread is slower or delays others, but still correct: so errors are
/// ignored.
pub fn set_priority(nice: i32) {
    rustix::process::setpriority_process(Some(rustix::thread::gettid()), nice).ok();
}
