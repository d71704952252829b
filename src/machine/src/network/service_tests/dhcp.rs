//! Addresses by DHCP: when the service asks, and how long it has what it got.

use std::net::{IpAddr, Ipv4Addr};

use super::dhcp_server::{serve, serve_and_take_back, serve_without_patience};
use super::{INTERFACES, LEASED, SERVER, fixed, in_namespace, loaded, until, while_running};
use crate::network::Status;
use crate::network::dhcp::RENEW_MIN;
use crate::network::observe::observe;
use crate::parameters::{self, Cidr};
use polis_base::stage::{Stage, State};
use polis_runtime::event;
use polis_runtime::supervisor::Context;

#[test]
fn dhcp_gives_the_address_the_way_out_and_the_name_server() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            let story = async {
                let status = until(&mut status, |s| s.primary.is_some()).await;
                assert_eq!(status.primary, Some(IpAddr::V4(LEASED)));
                assert_eq!(status.gateway, Some(IpAddr::V4(SERVER)));
                assert_eq!(wire.resolv_conf(), "nameserver 10.7.0.1\n");
                assert_eq!(status.interfaces.len(), 1, "{:?}", status.interfaces);
                assert_eq!(status.interfaces[0].addresses.len(), 1);
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
    });
}

#[test]
fn an_address_that_its_server_takes_back_gives_way_to_another_before_its_lease_ends() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        let other = Ipv4Addr::new(10, 7, 0, 16);
        while_running(service, async |mut status| {
            let story = async {
                until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
                let status = until(&mut status, |s| s.primary == Some(IpAddr::V4(other))).await;
                assert_eq!(status.addresses(), [IpAddr::V4(other)], "the first one is gone");
            };
            tokio::select! { () = serve_and_take_back(LEASED, other) => {}, () = story => {} }
        })
        .await;
    });
}

#[test]
fn a_lease_is_not_renewed_within_five_seconds_whatever_its_server_says() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |_status| {
            let waited = serve_without_patience().await;
            assert!(waited >= RENEW_MIN, "{waited:?}");
        })
        .await;
    });
}

#[test]
fn a_late_cable_is_as_good_as_an_early_one() {
    in_namespace(|wire| async move {
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            let unplugged = until(&mut status, |s| !s.interfaces.is_empty()).await;
            assert!(unplugged.waiting.unwrap().contains("plug in the cable"));
            assert!(!unplugged.interfaces[0].asking);
            wire.cable(true).await;
            tokio::select! {
                () = serve(3600) => {}
                _ = until(&mut status, |s| s.primary.is_some()) => {}
            }
        })
        .await;
    });
}

#[test]
fn nothing_is_asked_before_the_parameters_are_known() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        while_running(service, async |mut status| {
            let status_now = until(&mut status, |s| s.interfaces.iter().any(|i| i.carrier)).await;
            assert!(status_now.interfaces.iter().all(|i| !i.asking));
            owner.send_replace(loaded(parameters::Network::default()));
            until(&mut status, |s| s.interfaces.iter().any(|i| i.asking)).await;
        })
        .await;
    });
}

#[test]
fn parameters_that_are_asked_for_over_dhcp_replace_its_network_by_theirs() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        wire.asks.send_replace(true);
        while_running(service, async |mut status| {
            let story = async {
                let by_dhcp = until(&mut status, |s| s.primary.is_some()).await;
                assert_eq!(by_dhcp.primary, Some(IpAddr::V4(LEASED)));
                // Parameters without a network change nothing.
                owner.send_replace(loaded(parameters::Network::default()));
                wire.asks.send_replace(false);
                tokio::task::yield_now().await;
                assert_eq!(status.borrow().primary, Some(IpAddr::V4(LEASED)));
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
    });
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        wire.asks.send_replace(true);
        while_running(service, async |mut status| {
            let story = async {
                until(&mut status, |s| s.primary.is_some()).await;
                let own: Cidr = "192.0.2.7/24".parse().unwrap();
                owner.send_replace(loaded(fixed("192.0.2.7/24")));
                let status = until(&mut status, |s| {
                    s.interfaces.iter().any(|interface| interface.addresses == [own])
                });
                let status = status.await;
                assert_eq!(status.primary, Some(own.address()));
                assert!(status.interfaces.iter().all(|interface| !interface.asking));
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
    });
}

#[test]
fn parameters_with_the_address_of_the_lease_before_them_have_it_without_an_end() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, owner) = wire.service(None);
        wire.asks.send_replace(true);
        while_running(service, async |mut status| {
            let story = async {
                until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
                owner.send_replace(loaded(fixed("10.7.0.15/24")));
                until(&mut status, |s| s.interfaces.iter().all(|link| !link.asking)).await;
            };
            tokio::select! { () = serve(3600) => {}, () = story => {} }
        })
        .await;
        let observed = observe(&wire.handle, INTERFACES).await.unwrap();
        let held = |(_, cidr): &(u32, Cidr)| cidr.address() == IpAddr::V4(LEASED);
        assert!(observed.addresses.iter().any(held));
        assert!(!observed.ending.iter().any(held), "{observed:?}");
    });
}

#[test]
fn a_restarted_service_keeps_the_address_and_gets_it_again() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        let again = service.clone();
        let served = async {
            while_running(service, async |mut status| {
                until(&mut status, |s| s.primary.is_some()).await;
            })
            .await;
            let observed = observe(&wire.handle, INTERFACES).await.unwrap();
            let held = |(_, cidr): &(u32, parameters::Cidr)| cidr.address() == IpAddr::V4(LEASED);
            assert!(observed.addresses.iter().any(held));
            assert!(observed.ending.iter().any(held), "it ends with the lease");
            again.status.send_replace(Status::default());
            while_running(again, async |mut status| {
                until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))).await;
            })
            .await;
        };
        tokio::select! { () = serve(3600) => {}, () = served => {} }
    });
}

#[test]
fn a_vanished_interface_takes_the_address_with_it() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            tokio::select! {
                () = serve(3600) => {}
                _ = until(&mut status, |s| s.primary.is_some()) => {}
            }
            let eth0 = wire.index("eth0").await;
            wire.handle.link().del(eth0).execute().await.unwrap();
            let gone = until(&mut status, |s| s.primary.is_none()).await;
            assert_eq!(gone.gateway, None);
        })
        .await;
    });
}

#[test]
fn the_stage_says_what_it_waits_for_and_then_that_it_is_done() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        let (ctx, mut handles) = Context::for_test();
        let story = async {
            let state = |stages: &polis_base::stage::Stages| {
                stages.get(&Stage::Network).map(|entry| entry.state.clone())
            };
            event::until(&mut handles.stages, "stages", |s| {
                matches!(state(s), Some(State::Waiting(what)) if what.contains("DHCP"))
                    .then_some(())
            })
            .await
            .unwrap();
            tokio::select! {
                () = serve(3600) => {}
                done = event::until(&mut handles.stages, "stages", |s| {
                    (state(s) == Some(State::Done)).then_some(())
                }) => done.unwrap(),
            }
        };
        tokio::select! {
            ended = service.run(ctx) => panic!("{ended:?}"),
            () = story => {}
        }
    });
}
