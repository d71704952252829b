//! The program with real signals.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Child, Command, Stdio};

    use rustix::process::{Pid, Signal, kill_process};

    /// Starts it, and waits until it has blocked its signals.
    #[expect(
        clippy::disallowed_methods,
        reason = "a test has no supervisor, and reaps its own child"
    )]
    fn started() -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pause"));
        let mut child = command.stdin(Stdio::null()).spawn().unwrap();
        let path = format!("/proc/{}/status", child.id());
        loop {
            assert_eq!(child.try_wait().unwrap(), None);
            let status = fs::read_to_string(&path).unwrap();
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            if blocked.trim().bytes().any(|digit| digit != b'0') {
                return child;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn it_ends_well_when_it_is_asked_to() {
        for signal in [Signal::TERM, Signal::INT] {
            let mut child = started();
            kill_process(Pid::from_child(&child), signal).unwrap();
            assert!(child.wait().unwrap().success(), "{signal:?}");
        }
    }

    #[test]
    fn the_end_of_a_child_does_not_end_it() {
        let mut child = started();
        // As from a child that ended; the answer to the next signal shows that it lived.
        kill_process(Pid::from_child(&child), Signal::CHILD).unwrap();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
    }
}
