//! The provisioner and an API server that does not show it the volumes.

use super::*;
use crate::api;
use crate::csi::claims::tests::node;
use crate::csi::store::tests::{Fake, store};
use polis_base::files::File;

#[test]
fn a_server_that_ends_each_watch_at_once_is_asked_no_more_often_than_one_that_fails() {
    let address = ([127, 0, 0, 1], 6445).into();
    assert_eq!(pause(&Ok(()), Duration::ZERO), RETRY);
    assert_eq!(pause(&Ok(()), Duration::from_secs(300)), Duration::ZERO);
    assert_eq!(pause(&Err(api::Error::Silent { address }.into()), Duration::from_secs(300)), RETRY);
}

/// It starts together with them; one that was there and is gone is a failure at once.
#[tokio::test(start_paused = true)]
async fn an_api_server_that_starts_for_minutes_is_no_failure_of_the_driver() {
    let folder = tempfile::tempdir().unwrap();
    let address = ([127, 0, 0, 1], 6445).into();
    let provisioner = Provisioner {
        api: Api { address, ca: File::private(folder.path().join("ca.pem")), client: None },
        node: node(),
        store: store(folder.path(), &Fake::new()),
        status: watch::Sender::default(),
    };
    let (begun, mut lost) = (Instant::now(), cause::Last::default());
    let mut after = |status: Status| {
        provisioner.status.send_replace(status);
        provisioner.failed(&api::Error::Silent { address }.into(), begun, &mut lost);
        provisioner.status.borrow().clone()
    };
    let failed =
        Status::Failed { cause: "127.0.0.1:6445 does not answer within 20 seconds".to_owned() };
    assert_eq!(after(Status::Starting), Status::Starting);
    assert_eq!(after(Status::Watching), failed);
    tokio::time::advance(API_STARTS).await;
    assert_eq!(after(Status::Starting), failed);
}
