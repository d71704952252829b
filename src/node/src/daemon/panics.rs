//! The panic hook: logs where a panic happened, even if little else still works.
//!
//! The supervisor reports the death of the service; the place in the code is
//! known here only. Standard error goes to `init` without any help of ours.

use std::any::Any;
use std::panic;

/// Replaces the hook that prints in the format of the standard library.
pub(super) fn install() {
    panic::set_hook(Box::new(|info| {
        let text = text(info.payload());
        let place = info.location().map(|it| format!(" at {}:{}", it.file(), it.line()));
        super::complain(&format!("panicked{}: {text}", place.unwrap_or_default()));
    }));
}

/// The message of a panic, if it is text.
pub(super) fn text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("with a value that is not text")
}
