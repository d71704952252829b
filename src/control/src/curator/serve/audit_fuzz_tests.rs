//! Fuzz target of what an entry of the audit log says of a request.

use polis_fuzz::{Accepted, Target};
use polis_proto::v1;
use prost::Message as _;

use super::{CALLS, what};

#[test]
fn audited_requests() {
    let user = v1::CreateUserRequest { name: "ann".to_owned(), role: 2, ..Default::default() };
    let roles = v1::UpdateNodeRolesRequest {
        node_id: "polis-0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a".to_owned(),
        ..Default::default()
    };
    let samples = [user.encode_to_vec(), roles.encode_to_vec()];
    Target::new("control.audited_requests").samples(samples).run(|input| {
        for (path, _) in CALLS {
            assert!(what(path, input).len() <= 3 * input.len() + 128, "{path}");
        }
        Accepted::Yes
    });
}
