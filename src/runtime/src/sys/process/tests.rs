//! Child processes, with the shell of the build host.

use std::os::fd::AsRawFd as _;
use std::time::Duration;

use rustix::process::Pid;
use tracing::subscriber::set_default;
use tracing_subscriber::layer::SubscriberExt as _;

use super::command::Stdout;
use super::{Command, loads};
use crate::logtree::layer::ToTree;
use crate::logtree::{Item, Parser, Query, Tree};

fn sh(script: &str) -> Command {
    Command::new("/bin/sh").args(["-c", script])
}

#[tokio::test]
async fn the_environment_is_what_was_named_and_nothing_else() {
    let output = Command::new("/usr/bin/env").env("A", "1").run().await.unwrap();
    assert_eq!(String::from_utf8(output).unwrap(), "A=1\n");
}

#[tokio::test]
async fn what_it_writes_stands_in_the_log_tree_before_wait_returns() {
    let logs = Tree::new(None);
    let command = sh("echo one; echo two >&2; exit 3").log(logs.sink("root.sh", Parser::Raw));
    let mut child = command.spawn().await.unwrap();
    let exit = child.wait().await.unwrap();
    assert_eq!(exit.to_string(), "ended with status 3");
    let mut lines: Vec<_> =
        logs.backlog(&Query::all()).iter().map(|it| format!("{} {}", it.name, it.body)).collect();
    lines.sort();
    assert_eq!(lines, ["root.sh one", "root.sh two"]);
}

#[tokio::test]
async fn a_running_child_is_measured_under_the_name_of_its_log_and_an_ended_one_is_not() {
    let logs = Tree::new(None);
    let busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; read line";
    let command = sh(busy).input(Vec::new()).log(logs.sink("root.busy-test", Parser::Raw));
    let (mut child, _stdout) = command.start(Stdout::Logged).await.unwrap();
    let id = child.id().unwrap();
    let mut lines = logs.read(Query::all());
    let is_done = |item: &Item| matches!(item, Item::Entry(it) if it.body.to_string() == "done");
    while !lines.next().await.is_some_and(|item| is_done(&item)) {}
    let measured = |own| loads(own).into_iter().find(|load| load.id == id);
    let load = measured("root").unwrap();
    assert_eq!(load.name, "root.busy-test");
    assert!(load.cpu > Duration::from_millis(20), "{load:?}");
    assert!(load.memory > 64 << 10, "{load:?}");
    let own = loads("root").into_iter().find(|load| load.id == std::process::id()).unwrap();
    assert!(own.name == "root" && own.memory > 1 << 20, "{own:?}");
    // The end of its input ends it.
    child.feed().await.unwrap();
    child.wait().await.unwrap();
    assert_eq!(measured("root"), None, "its number may be another's by now");
}

#[tokio::test]
async fn a_failed_run_says_how_and_quotes_the_last_lines() {
    let error = sh("echo no space >&2; exit 1").run().await.unwrap_err();
    assert_eq!(error.to_string(), "/bin/sh ended with status 1: no space");
}

#[tokio::test]
async fn a_missing_program_is_named() {
    let error = Command::new("/no/such").run().await.unwrap_err();
    assert_eq!(error.to_string(), "cannot start /no/such");
}

#[tokio::test]
async fn input_reaches_the_program_and_no_message() {
    let command = Command::new("/bin/cat").input(b"secret".to_vec());
    assert!(!format!("{command:?}").contains("115") && format!("{command:?}").contains('…'));
    assert_eq!(command.run().await.unwrap(), b"secret");
}

#[tokio::test]
async fn an_input_larger_than_a_pipe_does_not_hang() {
    let bytes = vec![b'x'; 300_000];
    let output = Command::new("/bin/cat").input(bytes.clone()).run().await.unwrap();
    assert_eq!(output.len(), bytes.len());
}

#[tokio::test]
async fn a_run_ends_with_its_program_whoever_holds_its_pipes() {
    // A job in the background has no input of its own without the second descriptor.
    let script = "exec 3<&0; sleep 30 <&3 & echo up";
    let begun = std::time::Instant::now();
    let output = sh(script).input(vec![b'x'; 300_000]).run().await.unwrap();
    assert_eq!(output, b"up\n");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_child_enters_its_control_group_before_it_runs() {
    let group = tempfile::tempdir().unwrap();
    let members = group.path().join("cgroup.procs");
    std::fs::write(&members, "").unwrap();
    let script = format!("cat {}", members.display());
    let seen = sh(&script).env("PATH", "/usr/bin:/bin").cgroup(group.path()).run().await.unwrap();
    // To the kernel, 0 is the process that writes.
    assert_eq!(seen, b"0");
}

#[tokio::test]
async fn a_missing_control_group_is_named() {
    let error = sh("exit 0").cgroup("/no/such").run().await.unwrap_err();
    assert_eq!(error.to_string(), "cannot start /bin/sh in the control group /no/such");
}

#[tokio::test]
async fn a_child_gets_no_descriptor_that_a_library_left_open_for_it() {
    let file = tempfile::tempfile().unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let number = file.as_raw_fd();
    let own = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
    let script = format!("/usr/bin/readlink /proc/$$/fd/0 /proc/$$/fd/{number}; true");
    let childs = String::from_utf8(sh(&script).run().await.unwrap()).unwrap();
    assert_eq!(childs.lines().next(), Some("/dev/null"), "the input is shown: {childs}");
    assert!(!childs.contains(own.to_str().unwrap()), "{childs}");
}

#[tokio::test]
async fn a_child_has_its_own_score_and_bound_of_open_files() {
    let script = "read score < /proc/self/oom_score_adj; echo $score $(ulimit -Sn) $(ulimit -Hn)";
    let seen = sh(script).oom_score_adj(321).open_files(77).run().await.unwrap();
    assert_eq!(seen, b"321 77 77\n");
    let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    assert_ne!(score.trim(), "321");
}

#[tokio::test]
async fn a_child_has_its_own_bound_of_processes() {
    // The shell starts no process of its own, which this bound could forbid.
    let script = "while read -r line; do case $line in 'Max processes'*) echo $line;; esac; \
                  done < /proc/self/limits";
    let seen = sh(script).processes(77).run().await.unwrap();
    assert_eq!(seen, b"Max processes 77 77 processes\n");
}

#[tokio::test]
async fn terminate_asks_first() {
    let mut child =
        sh("trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done").spawn().await.unwrap();
    while child.tail().is_empty() {
        tokio::task::yield_now().await;
    }
    let exit = child.terminate(Duration::from_secs(20)).await.unwrap();
    assert_eq!(exit.code(), Some(7));
}

#[tokio::test]
async fn terminate_kills_what_does_not_listen() {
    let mut child =
        sh("trap '' TERM; echo up; while :; do sleep 0.05; done").spawn().await.unwrap();
    while child.tail().is_empty() {
        tokio::task::yield_now().await;
    }
    let exit = child.terminate(Duration::from_millis(100)).await.unwrap();
    assert_eq!(exit.to_string(), "was killed by signal 9 (SIGKILL)");
}

#[tokio::test]
async fn terminate_blames_no_child_for_the_pipe_that_another_holds() {
    let logs = Tree::new(None);
    let mut child = sh("sleep 5 & echo up").spawn().await.unwrap();
    while child.inner.try_wait().unwrap().is_none() {
        tokio::task::yield_now().await;
    }
    let _default = set_default(tracing_subscriber::registry().with(ToTree(logs.clone())));
    let exit = child.terminate(Duration::from_millis(100)).await.unwrap();
    assert!(exit.is_success(), "{exit}");
    let said: Vec<_> = logs.backlog(&Query::all()).iter().map(|it| it.body.to_string()).collect();
    assert!(said.iter().all(|line| !line.contains("killed")), "{said:?}");
}

#[tokio::test]
async fn a_dropped_child_is_gone() {
    let mut pipe = std::io::pipe().unwrap();
    let child = sh("sleep 600").spawn().await.unwrap();
    let id = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    drop(child);
    drop(pipe.1);
    std::io::Read::read_to_end(&mut pipe.0, &mut Vec::new()).unwrap();
    // The runtime reaps it; until then it is a zombie that can be signalled.
    while rustix::process::test_kill_process(id).is_ok() {
        sh("exit 0").run().await.unwrap();
    }
}

#[tokio::test]
async fn a_line_without_an_end_is_taken_apart() {
    let logs = Tree::new(None);
    let script = "seq 30000 | tr '\\n' ' ' | head -c 100000";
    let mut child = sh(script)
        .env("PATH", "/usr/bin:/bin")
        .log(logs.sink("root.sh", Parser::Raw))
        .spawn()
        .await
        .unwrap();
    child.wait().await.unwrap();
    assert_eq!(logs.backlog(&Query::all()).len(), 100_000_usize.div_ceil(16 * 1024));
}
