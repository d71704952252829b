//! The users that this node serves, kept on its disk: a node that starts while it reaches no
//! leader serves the users of its last boot.
//!
//! ```text
//! [unknown] --kept list--> [kept] --from the leader, or the records--> [known] --> kept
//! ```
//!
//! Invariants:
//! - A kept list never takes the place of one that this node received in this boot.
//! - A list that cannot be read is none: no user is served until the leader answers.

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use prost::Message as _;
use tokio::time::timeout;
use tracing::{info, warn};

use super::Service;
use super::kept::keep;
use polis_base::files::{self, File};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::rpc::{self, Users};

/// Between two attempts to write the list.
const AGAIN: Duration = Duration::from_secs(30);

/// Keeps the list until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut cluster = service.outputs.cluster.subscribe();
    let mut lists = service.outputs.access_list.subscribe();
    // The data partition is open from then on.
    let home = until(&mut cluster, "the cluster", |status| status.is_member().then_some(()));
    let Some(home) = ctx.until_cancelled(home).await else { return Ok(()) };
    home?;
    let file = service.config.users.clone();
    let mut kept = blocking(move || read(&file)).await;
    if let Some(users) = &kept {
        service.outputs.access_list.send_if_modified(|list| {
            let unknown = list.users.is_none();
            if unknown {
                info!(users = users.len(), "the users that this node serves are those it kept");
                Arc::make_mut(list).users = Some(users.clone());
            }
            unknown
        });
    }
    ctx.healthy();
    loop {
        let known = lists.borrow_and_update().users.clone();
        if known.is_some() && known != kept {
            let record = record(known.iter().flatten());
            if keep(&service.config.users, record.encode_to_vec(), "the users").await {
                kept.clone_from(&known);
            }
        }
        // The disk may have room again then: a user who was revoked must not stay in the file.
        let again = if known.is_none() || known == kept { Duration::MAX } else { AGAIN };
        let changed = timeout(again, lists.changed());
        match ctx.until_cancelled(changed).await {
            Some(Ok(changed)) => changed.map_err(|_closed| Closed("the access list"))?,
            Some(Err(_elapsed)) => {}
            None => return Ok(()),
        }
    }
}

fn read(file: &File) -> Option<Users> {
    let warned = |error: &(dyn std::error::Error + 'static)| {
        warn!(error, "cannot read the users of this node; it serves none until it receives them");
    };
    let bytes = file.read().inspect_err(|error: &files::Error| warned(error)).ok()??;
    let users = v1::Users::decode(bytes.as_slice()).inspect_err(|error| warned(error)).ok()?;
    Some(rpc::users(&users.users))
}

fn record<'a>(users: impl Iterator<Item = (&'a String, &'a rpc::Listed)>) -> v1::Users {
    let user = |(name, listed): (&String, &rpc::Listed)| v1::User {
        name: name.clone(),
        role: v1::UserRole::from(listed.role).into(),
        public_key: listed.key.to_vec(),
        revoked: false,
    };
    v1::Users { users: users.map(user).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::files::Root;
    use polis_wire::rpc::{Listed, Role};

    #[test]
    fn a_kept_list_reads_back_and_a_damaged_one_is_none() {
        let disk = tempfile::tempdir().unwrap();
        let root = Root::at(disk.path());
        root.create().unwrap();
        let file = root.data.node.users;
        assert_eq!(read(&file), None);
        let listed = Listed { key: [7; 32], role: Role::Operator };
        let users = Users::from([("ann".to_owned(), listed)]);
        file.write(&record(users.iter()).encode_to_vec()).unwrap();
        assert_eq!(read(&file), Some(users));
        file.write(&[0xff; 20]).unwrap();
        assert_eq!(read(&file), None);
    }
}
