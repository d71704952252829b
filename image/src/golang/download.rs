//! The download of a program's Go modules, through the module proxy of the host.
//!
//! Go compares each module with `go.sum`, and keeps it for every later build.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use super::{
    catalog::Code,
    toolchain::{Network, Toolchain},
};
use crate::{
    error::{At as _, Error, Result},
    program,
    step::{Observer, Unit},
};

/// How often the progress of a download is checked.
const TICK: Duration = Duration::from_millis(200);

/// Fetches the modules of the program in `folder`, unless they are there.
pub(super) fn modules(toolchain: &Toolchain, folder: &Path, observer: &dyn Observer) -> Result<()> {
    let go = |network: Network, arguments: &[String]| {
        let mut go = toolchain.go(folder, Code::Go, network);
        program::run(go.args(["mod", "download"]).args(arguments))
    };
    if go(Network::Off, &[]).is_ok() {
        return Ok(());
    }
    let path = folder.join("go.sum");
    let sums = fs::read_to_string(&path).at("read", &path)?;
    let archives = toolchain.modules().join("cache/download");
    let mut missing = archives_of(&sums);
    missing.retain(|(_, archive)| !archives.join(archive).exists());
    // One alone first: without a way to the proxy, each would wait for its own timeout.
    let first = missing.first().map(|(module, _)| module.clone());
    let first = first.map_or(Ok(Vec::new()), |first| go(Network::Proxy, &[first]));
    let total = missing.len() as u64;
    let arrived =
        || missing.iter().filter(|(_, archive)| archives.join(archive).exists()).count() as u64;
    let outcome = first.and_then(|_| {
        while_waiting(
            || go(Network::Proxy, &[]),
            || {
                let done = arrived().min(total.saturating_sub(1));
                observer.progress("Go modules", done, total, Unit::Modules);
            },
        )
    });
    observer.progress("Go modules", total, total, Unit::Modules);
    match outcome {
        Ok(_) => Ok(()),
        Err(Error::Program { output, .. }) => {
            let name = folder.file_name().unwrap_or_default();
            let program = name.to_string_lossy().into_owned();
            Err(Error::Modules { program, output })
        }
        Err(other) => Err(other),
    }
}

/// Does `work` in a thread and calls `tick` meanwhile.
fn while_waiting<T: Send>(work: impl FnOnce() -> T + Send, mut tick: impl FnMut()) -> T {
    let (sender, receiver) = mpsc::sync_channel::<()>(1);
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let done = work();
            // The receiver sees the end of the channel.
            drop(sender);
            done
        });
        while receiver.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
            tick();
        }
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The modules whose content `go.sum` lists: each as `<path>@<version>`, with the path of
/// its archive below Go's folder of downloads.
fn archives_of(sums: &str) -> Vec<(String, PathBuf)> {
    let archive = |line: &str| {
        let mut words = line.split(' ');
        let (module, version) = (words.next()?, words.next()?);
        if version.ends_with("/go.mod") {
            return None;
        }
        let path = format!("{}/@v/{}.zip", escaped(module), escaped(version));
        Some((format!("{module}@{version}"), PathBuf::from(path)))
    };
    sums.lines().filter_map(archive).collect()
}

/// A module's path as Go writes it on disk: not every file system knows capitals.
fn escaped(path: &str) -> String {
    path.chars().fold(String::new(), |mut text, letter| {
        if letter.is_ascii_uppercase() {
            text.push('!');
        }
        text.push(letter.to_ascii_lowercase());
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archives_of_a_module_are_those_whose_content_is_listed() {
        let sums = "example.org/A/b v1.0.0 h1:x=\nexample.org/A/b v1.0.0/go.mod h1:y=\n\
                    example.org/c v0.1.0/go.mod h1:z=\n";
        let expected = [("example.org/A/b@v1.0.0", "example.org/!a/b/@v/v1.0.0.zip")];
        let expected = expected.map(|(name, path)| (name.to_owned(), PathBuf::from(path)));
        assert_eq!(archives_of(sums), expected);
    }

    #[test]
    fn work_is_waited_for_and_its_result_returned() {
        let mut ticks = 0;
        let done = while_waiting(|| thread::current().id(), || ticks += 1);
        assert_ne!(done, thread::current().id());
    }
}
