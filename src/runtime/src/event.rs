//! Event values: the newest value of something, watched by many.
//!
//! A watcher sees the newest value, never a queue of them, so a slow watcher
//! costs nothing and a late one misses nothing that still matters.
//!
//! Write with `send_replace`, `send_modify` or `send_if_modified`: `send` drops
//! the value if it has no receivers. Read with `borrow_and_update().clone()`, wait
//! with [`until`].

use tokio::sync::watch;

/// The service that owned a value ended, so the value will never change again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the owner of {0} ended")]
pub struct Closed(pub &'static str);

/// Waits until `pick` returns a result for the newest value. Cancel-safe.
///
/// # Errors
///
/// [`Closed`] with `name` when the owner of the value is gone.
pub async fn until<T, U>(
    value: &mut watch::Receiver<T>,
    name: &'static str,
    mut pick: impl FnMut(&T) -> Option<U>,
) -> Result<U, Closed> {
    loop {
        if let Some(found) = pick(&value.borrow_and_update()) {
            return Ok(found);
        }
        value.changed().await.map_err(|_closed| Closed(name))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_value_that_is_there_already_is_found_at_once() {
        let (_owner, mut value) = watch::channel(7);
        assert_eq!(until(&mut value, "seven", |v| (*v == 7).then_some("found")).await, Ok("found"));
    }

    #[tokio::test]
    async fn a_lost_owner_is_an_error() {
        let (owner, mut value) = watch::channel(7);
        drop(owner);
        let found = until(&mut value, "eight", |v| (*v == 8).then_some(())).await;
        assert_eq!(found, Err(Closed("eight")));
    }
}
