//! The waits of the threads of a process, for the report of a hanging one.
//!
//! A line for all of them says where in the kernel each sleeps. Where it came from in the
//! program is in its stack: the words there that point into the program's code are return
//! addresses, the innermost call first, among some left over from calls that have returned.
//! Nothing else of the memory is reported, so no secret is.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::Pid;

use super::deadline;
use super::machine::Machine;

/// The number of threads examined; a runaway process has thousands.
const THREADS_MAX: usize = 64;
/// The longest name that the kernel gives; longer ones are foreign.
const WORD_MAX: usize = 40;
/// Bytes of a stack that are searched, and addresses of one that are reported.
const STACK_MAX: usize = 16 << 10;
const CALLS_MAX: usize = 48;

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

/// Where in its program each thread of `process` is, from `/proc` (at `proc`), a line each:
/// addresses that `addr2line` finds in the program's file, relative to its start. Waits for `time`
/// at most: a thread that changes the memory of the process, and waits for a disk, keeps a reader
/// of it waiting.
pub fn stacks(machine: &mut Machine, proc: &Path, process: Pid, time: Duration) -> Vec<String> {
    let proc = proc.to_owned();
    let stacks = deadline::within(machine, time, move || read_stacks(&proc, process));
    stacks.unwrap_or_else(|_late| vec!["the stacks of its threads cannot be read".to_owned()])
}

fn read_stacks(proc: &Path, process: Pid) -> Vec<String> {
    let process = proc.join(process.as_raw_pid().to_string());
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let exe = fs::read_link(process.join("exe")).unwrap_or_default();
    let exe = format!(" {}", exe.display());
    let Some(program) = program(&read(&process.join("maps")), &exe) else { return Vec::new() };
    let Ok(memory) = File::open(process.join("mem")) else { return Vec::new() };
    let mut lines = Vec::new();
    for task in fs::read_dir(process.join("task")).into_iter().flatten().flatten().take(THREADS_MAX)
    {
        let Some(top) = stack_pointer(&read(&task.path().join("syscall"))) else { continue };
        let mut stack = vec![0; STACK_MAX];
        // The stack may end before.
        let length = memory.read_at(&mut stack, top).unwrap_or_default();
        let calls = return_addresses(&stack[..length], &program);
        if !calls.is_empty() {
            let name = word(&read(&task.path().join("comm")));
            lines.push(format!("stack of thread {name}: {}", calls.join(" ")));
        }
    }
    lines
}

/// Where a program is in memory.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    start: u64,
    code: Range<u64>,
}

/// Where the file `exe` starts in a `maps`, and its code.
fn program(maps: &str, exe: &str) -> Option<Program> {
    let mut own: Option<u64> = None;
    for line in maps.lines().filter(|line| line.ends_with(exe)) {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next()?, words.next()?);
        let (start, end) = range.split_once('-')?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
        let base = *own.get_or_insert(start?);
        if rights.contains('x') {
            return Some(Program { start: base, code: start?..end? });
        }
    }
    None
}

/// The next to last word of a thread's `syscall`.
fn stack_pointer(syscall: &str) -> Option<u64> {
    let pointer = syscall.split_ascii_whitespace().rev().nth(1)?;
    u64::from_str_radix(pointer.strip_prefix("0x")?, 16).ok()
}

fn return_addresses(stack: &[u8], program: &Program) -> Vec<String> {
    let words = stack.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    let calls = words.filter(|word| program.code.contains(word)).take(CALLS_MAX);
    calls.map(|call| format!("{:#x}", call - program.start)).collect()
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

    #[test]
    fn a_stack_is_reported_by_the_addresses_of_code_alone() {
        let maps = "1000-2000 rw-p 00000000 00:00 0 [heap]\n3000-4000 rw-p 00000000 00:00 0\n\
                    5555000-5556000 r--p 00000000 08:01 7 /usr/bin/node\n\
                    5556000-5558000 r-xp 00001000 08:01 7 /usr/bin/node\n\
                    7000000-7001000 r-xp 00000000 08:01 9 /usr/lib/libc.so.6\n";
        let program = program(maps, " /usr/bin/node").unwrap();
        assert_eq!(program, Program { start: 0x0555_5000, code: 0x0555_6000..0x0555_8000 });
        let stack: Vec<u8> = [0x0555_6010_u64, 0x5ec2_e700, 0x0700_0010, 0x0555_7fff, 0x0555_8000]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        assert_eq!(return_addresses(&stack, &program), ["0x1010", "0x2fff"]);
        assert_eq!(return_addresses(&stack[..13], &program), ["0x1010"], "a cut stack");
        assert_eq!(
            stack_pointer("202 0x1 0x80 0x2 0x0 0x0 0x0 0x7ffd10 0x7f00\n"),
            Some(0x7f_fd10)
        );
        assert_eq!(stack_pointer("running\n"), None);
    }

    #[test]
    fn a_thread_that_waits_has_a_stack() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let named = std::thread::Builder::new().name("waits".to_owned());
        let waits = named.spawn(move || ended.recv()).unwrap();
        let process = rustix::process::getpid();
        // It takes a moment until it waits.
        let line = std::iter::repeat_with(|| read_stacks(Path::new("/proc"), process))
            .find_map(|lines| lines.into_iter().find(|line| line.contains("thread waits: 0x")));
        assert!(line.is_some());
        drop(end);
        assert!(waits.join().unwrap().is_err());
    }

    #[test]
    fn a_process_whose_memory_is_locked_keeps_no_guru_meditation_waiting() {
        let proc = tempfile::tempdir().unwrap();
        let process = proc.path().join("7");
        fs::create_dir(&process).unwrap();
        // To open a pipe waits for its other end, as a read of the file waits for the memory.
        let maps = process.join("maps");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600));
        rustix::fs::mknodat(rustix::fs::CWD, &maps, kind, mode, 0).unwrap();
        let (mut machine, process) = (Machine::default(), Pid::from_raw(7).unwrap());
        let stacks = stacks(&mut machine, proc.path(), process, Duration::from_millis(50));
        assert_eq!(stacks, ["the stacks of its threads cannot be read"]);
        File::options().write(true).open(maps).unwrap();
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(stat in any::<String>(), wchan in any::<String>()) {
            let _said = (thread(&stat, &wchan), program(&stat, &wchan), stack_pointer(&stat));
            let _said = thread(&format!("1 ({stat}) S 1"), &wchan);
        }
    }
}
