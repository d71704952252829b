//! The service with two cables, and its sockets while a cable is announced without end.

use std::net::{IpAddr, Ipv4Addr};

use futures::StreamExt as _;
use rtnetlink::packet_core::NetlinkPayload;
use rtnetlink::{LinkUnspec, LinkVeth};

use super::dhcp_server::{serve, serve_on};
use super::{LEASED, in_namespace, loaded, until, while_running};
use crate::network::Status;
use crate::network::service::sockets::Sockets;
use crate::parameters;

/// The address of the second card, and its way out.
const LEASED_TOO: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 15);
const SERVER_TOO: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 1);

/// More announcements than the queue has room for.
const FLOOD: u32 = 4096;

#[test]
fn an_unplugged_cable_keeps_the_address_until_the_other_card_has_one() {
    in_namespace(|wire| async move {
        wire.cable(true).await;
        let (service, _owner) = wire.service(loaded(parameters::Network::default()));
        while_running(service, async |mut status| {
            tokio::select! {
                () = serve(3600) => {}
                _status = until(&mut status, |s| s.primary == Some(IpAddr::V4(LEASED))) => {}
            }
            wire.handle.link().add(LinkVeth::new("eth1", "wire1").build()).execute().await.unwrap();
            let wire1 = LinkUnspec::new_with_index(wire.index("wire1").await).up().build();
            wire.handle.link().set(wire1).execute().await.unwrap();
            let plugged = |s: &Status| s.interfaces.iter().filter(|it| it.carrier).count() == 2;
            let both = until(&mut status, plugged).await;
            assert!(both.interfaces.iter().all(|it| it.name == "eth0" || !it.asking), "{both:?}");
            wire.cable(false).await;
            let story = async {
                let next = until(&mut status, |s| s.primary != Some(IpAddr::V4(LEASED))).await;
                assert_eq!(next.primary, Some(IpAddr::V4(LEASED_TOO)), "without a gap");
                assert_eq!(next.addresses(), [IpAddr::V4(LEASED_TOO)]);
            };
            tokio::select! {
                () = serve_on("wire1", LEASED_TOO, Some(SERVER_TOO), 3600) => {}
                () = story => {}
            }
        })
        .await;
    });
}

#[test]
fn a_flood_of_announcements_displaces_no_answer_and_its_loss_is_announced() {
    in_namespace(|wire| async move {
        let Sockets { requests, handle, announcements, mut notices } = Sockets::open().unwrap();
        let eth0 = wire.index("eth0").await;
        for round in 0..FLOOD {
            let mtu = LinkUnspec::new_with_index(eth0).mtu(1400 + round % 2).build();
            wire.handle.link().set(mtu).execute().await.unwrap();
        }
        let answered = async {
            let up = LinkUnspec::new_with_index(eth0).up().build();
            handle.link().set(up).execute().await.unwrap();
        };
        tokio::select! {
            () = requests => panic!("the kernel closed the socket"),
            () = answered => {}
        }
        let lost = async {
            while let Some((notice, _from)) = notices.next().await {
                if matches!(notice.payload, NetlinkPayload::Overrun(_)) {
                    return true;
                }
            }
            false
        };
        tokio::select! {
            () = announcements => panic!("the kernel closed the socket"),
            lost = lost => assert!(lost, "the flood is too small"),
        }
    });
}
