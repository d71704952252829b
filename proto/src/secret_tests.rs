//! The messages with secrets print their names and nothing more, also inside of others.

use crate::v1;

#[test]
fn a_message_with_a_ticket_does_not_print_it() {
    let ticket = vec![90_u8; 32];
    let register =
        v1::ClusterRegister { register_ticket: ticket.clone(), ..v1::ClusterRegister::default() };
    let parameters = v1::NodeParameters {
        cluster: Some(v1::node_parameters::Cluster::ClusterRegister(register)),
        ..v1::NodeParameters::default()
    };
    let request = v1::RegisterNodeRequest {
        register_ticket: ticket.clone(),
        ..v1::RegisterNodeRequest::default()
    };
    let record = v1::RegisterTicket { opaque: ticket, ..v1::RegisterTicket::default() };
    for (printed, name) in [
        (format!("{parameters:?}"), "ClusterRegister { .. }"),
        (format!("{request:?}"), "RegisterNodeRequest { .. }"),
        (format!("{record:?}"), "RegisterTicket { .. }"),
    ] {
        assert!(printed.contains(name) && !printed.contains("90, 90"), "{printed}");
    }
}
