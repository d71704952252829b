//! Sets how many files a process may have open.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process have `wanted` files open, or as many as it may.
///
/// # Errors
///
/// When the kernel refuses both.
pub fn allow(wanted: u64) -> io::Result<()> {
    let limits = getrlimit(Resource::Nofile);
    if limits.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    let maximum = limits.maximum.map(|maximum| maximum.max(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    let bounded = || {
        // Without the right to raise the bound, up to the bound.
        let current = limits.maximum.map(|maximum| maximum.min(wanted)).or(Some(wanted));
        setrlimit(Resource::Nofile, Rlimit { current, maximum: limits.maximum })
    };
    Ok(raised.or_else(|_refused| bounded())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gets_as_many_files_as_it_may_have() {
        let before = getrlimit(Resource::Nofile);
        allow(before.current.unwrap_or(0)).unwrap();
        assert_eq!(getrlimit(Resource::Nofile), before, "it has them already");
        let wanted = before.maximum.unwrap_or(4096);
        allow(wanted).unwrap();
        let after = getrlimit(Resource::Nofile).current;
        assert!(after.is_none_or(|current| current >= wanted), "{after:?}");
    }
}
