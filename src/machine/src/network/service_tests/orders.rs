//! Networks that the cluster orders: on trial, confirmed, reverted, refused.

use std::net::IpAddr;

use tokio::time::Instant;

use super::{fixed, in_namespace, loaded, until, while_running};
use crate::network::Order;

#[test]
fn an_order_is_in_force_at_once_and_confirmed_by_a_later_proof() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(fixed("192.0.2.7/24")));
        let again = service.clone();
        let new = IpAddr::from([192, 0, 2, 8]);
        while_running(service, async |mut status| {
            until(&mut status, |s| s.primary.is_some()).await;
            let order = Order { number: 7, network: Some(fixed("192.0.2.8/24")) };
            wire.order.send_replace(Some(order));
            let trying = until(&mut status, |s| s.primary == Some(new)).await;
            assert_eq!((trying.change.word(), trying.change.number), ("trying", 7));
            assert_eq!(trying.addresses(), [new], "the former address is gone");
            wire.proof.send_replace(Some(Instant::now()));
            until(&mut status, |s| s.change.word() == "confirmed").await;
        })
        .await;
        // It stays, and the order is not taken up again.
        while_running(again, async |mut status| {
            let status = until(&mut status, |s| s.primary == Some(new)).await;
            assert_eq!(status.change.word(), "confirmed");
        })
        .await;
    });
}

#[test]
fn a_service_that_starts_again_in_a_trial_has_the_former_network() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(fixed("192.0.2.7/24")));
        let again = service.clone();
        let (old, new) = (IpAddr::from([192, 0, 2, 7]), IpAddr::from([192, 0, 2, 8]));
        while_running(service, async |mut status| {
            until(&mut status, |s| s.primary == Some(old)).await;
            let order = Order { number: 7, network: Some(fixed("192.0.2.8/24")) };
            wire.order.send_replace(Some(order));
            until(&mut status, |s| s.primary == Some(new)).await;
        })
        .await;
        while_running(again, async |mut status| {
            let status = until(&mut status, |s| s.addresses() == [old]).await;
            assert_eq!(status.change.word(), "reverted");
            assert!(status.change.cause.contains("started again"), "{:?}", status.change);
        })
        .await;
    });
}

#[test]
fn an_order_that_the_machine_cannot_have_is_refused_and_changes_nothing() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(fixed("192.0.2.7/24")));
        while_running(service, async |mut status| {
            until(&mut status, |s| s.primary.is_some()).await;
            let mut network = fixed("192.0.2.8/24");
            network.interfaces[0].card.driver = Some("e1000e".to_owned());
            wire.order.send_replace(Some(Order { number: 7, network: Some(network) }));
            let refused = until(&mut status, |s| s.change.word() == "refused").await;
            assert!(refused.change.cause.contains("there is eth0"), "{:?}", refused.change);
            assert_eq!(refused.primary, Some(IpAddr::from([192, 0, 2, 7])));
        })
        .await;
    });
}
