//! A summary of a process's threads, for the report of a hanging one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::process::Pid;

/// The number of threads examined; a runaway process has thousands.
const THREADS_MAX: usize = 64;
/// The longest name that the kernel gives; longer ones are foreign.
const WORD_MAX: usize = 40;

/// The threads of `process` in one line, alike ones counted, from `/proc` (at `proc`):
/// name, state, and where in the kernel each sleeps.
#[must_use]
pub fn of(proc: &Path, process: Pid) -> String {
    let tasks = proc.join(process.as_raw_pid().to_string()).join("task");
    let mut alike: BTreeMap<String, usize> = BTreeMap::new();
    for task in fs::read_dir(tasks).into_iter().flatten().flatten().take(THREADS_MAX) {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if let Some(thread) = thread(&read("stat"), &read("wchan")) {
            *alike.entry(thread).or_default() += 1;
        }
    }
    if alike.is_empty() {
        return "the kernel reports nothing about its threads".to_owned();
    }
    let each = alike.into_iter().map(|(thread, count)| match count {
        1 => thread,
        count => format!("{count} × {thread}"),
    });
    format!("its threads: {}", each.collect::<Vec<_>>().join(", "))
}

/// `12 (node) S 1 ...` and `futex_wait_queue`; `0` is a thread that runs.
fn thread(stat: &str, wchan: &str) -> Option<String> {
    let (head, rest) = stat.rsplit_once(") ")?;
    let (_number, name) = head.split_once(" (")?;
    let state = rest.chars().next().filter(char::is_ascii_alphabetic)?;
    let wchan = word(wchan);
    let place = if wchan.is_empty() || wchan == "0" { String::new() } else { format!(" {wchan}") };
    Some(format!("{} {state}{place}", word(name)))
}

fn word(text: &str) -> String {
    text.trim().chars().filter(|c| c.is_ascii_graphic()).take(WORD_MAX).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn alike_threads_are_counted() {
        let proc = tempfile::tempdir().unwrap();
        let threads = [
            (7, "7 (node) S 1 7", "futex_wait_queue"),
            (8, "8 (node) S 1 7", "futex_wait_queue"),
            (9, "9 (a (b) c) D 1 7", "xfs_buf_iowait\n"),
            (10, "10 (serial) R 1 7", "0"),
        ];
        for (number, stat, wchan) in threads {
            let task = proc.path().join(format!("7/task/{number}"));
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("stat"), stat).unwrap();
            fs::write(task.join("wchan"), wchan).unwrap();
        }
        let process = Pid::from_raw(7).unwrap();
        assert_eq!(
            of(proc.path(), process),
            "its threads: a(b)c D xfs_buf_iowait, 2 × node S futex_wait_queue, serial R"
        );
        let gone = Pid::from_raw(8).unwrap();
        assert_eq!(of(proc.path(), gone), "the kernel reports nothing about its threads");
    }

    #[test]
    fn this_process_has_threads() {
        let output = of(Path::new("/proc"), rustix::process::getpid());
        assert!(output.starts_with("its threads: "), "{output}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(stat in any::<String>(), wchan in any::<String>()) {
            let _said = thread(&stat, &wchan);
            let _said = thread(&format!("1 ({stat}) S 1"), &wchan);
        }
    }
}
