//! The loading of a kernel module.
//!
//! What this module does not do: choose one or order them (`boot::modules`).

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::path::Path;

use rustix::io::Errno;

/// The kernel unpacks the file itself. Not in `rustix`; from `linux/module.h`.
const INIT_COMPRESSED_FILE: i32 = 4;

/// Loads the module in the file `path`, plain or compressed, with `parameters` as on a kernel
/// command line (`name=value`, without the module's name).
/// A module that is loaded already is a success.
///
/// # Errors
///
/// The kernel's error; `ENODEV` often means that the hardware is not there.
pub fn load(path: &Path, parameters: &CStr) -> io::Result<()> {
    let file = File::open(path)?;
    let plain = path.extension().is_some_and(|extension| extension == "ko");
    let flags = if plain { 0 } else { INIT_COMPRESSED_FILE };
    match rustix::system::finit_module(&file, parameters, flags) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_that_is_not_there_is_an_error() {
        let error = load(Path::new("/nowhere/none.ko.xz"), c"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
