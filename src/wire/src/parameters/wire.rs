//! A strict check of the encoded message for everything that the generated decoder
//! accepts silently: unknown fields, and both members of a `oneof`.
//!
//! The decoder skips unknown fields and keeps the last of a `oneof`, as protocol
//! buffers must. Parameters may not be read that leniently: a misspelt policy
//! would become the default. So the bytes are walked once along [`PARAMETERS`], a
//! table of every message; a test holds it against the `.proto` file. Reflection
//! would do the same with the descriptor pool in memory and a second copy of the
//! decoder in the binary.
//!
//! What this module does not do: check values (`validate`).

use prost::bytes::Buf as _;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::error::Error;

/// A field of a message; `fields` is empty unless it is a message itself.
struct Field {
    number: u32,
    name: &'static str,
    fields: &'static [Self],
}

const fn plain(number: u32, name: &'static str) -> Field {
    Field { number, name, fields: &[] }
}

const fn message(number: u32, name: &'static str, fields: &'static [Field]) -> Field {
    Field { number, name, fields }
}

/// A map entry, as the wire has it.
const ENTRY: &[Field] = &[plain(1, "key"), plain(2, "value")];

const NTP_SERVER: &[Field] = &[plain(1, "host"), plain(2, "nts")];

const TIME_CONFIGURATION: &[Field] = &[message(1, "servers", NTP_SERVER)];

const FIREWALL_CONFIGURATION: &[Field] = &[plain(1, "sources"), plain(2, "ports")];

const FIREWALL_TRIAL: &[Field] =
    &[message(1, "configuration", FIREWALL_CONFIGURATION), plain(2, "until")];

const LOG_TARGET: &[Field] = &[plain(1, "url"), plain(2, "ca")];

const LOG_CONFIGURATION: &[Field] =
    &[message(1, "targets", LOG_TARGET), plain(2, "cluster_domain")];

const SNAPSHOT_CONFIGURATION: &[Field] = &[plain(1, "url"), plain(2, "region"), plain(3, "ca")];

const SYSTEM: &[Field] = &[plain(1, "name"), plain(2, "kernel_image")];

const ATTESTATION_POLICY: &[Field] = &[message(1, "systems", SYSTEM), plain(2, "makers")];

const KUBERNETES_CONFIGURATION: &[Field] = &[plain(1, "names")];

const PROXY_CONFIGURATION: &[Field] = &[plain(1, "url"), plain(2, "direct"), plain(3, "own")];

const CLUSTER_CONFIGURATION: &[Field] = &[
    plain(1, "cluster_domain"),
    plain(2, "tpm_mode"),
    plain(3, "storage_security_policy"),
    plain(4, "cold_start"),
    message(5, "time", TIME_CONFIGURATION),
    message(6, "firewall", FIREWALL_CONFIGURATION),
    message(7, "firewall_trial", FIREWALL_TRIAL),
    message(12, "log", LOG_CONFIGURATION),
    message(16, "snapshots", SNAPSHOT_CONFIGURATION),
    message(20, "attestation", ATTESTATION_POLICY),
    message(24, "kubernetes", KUBERNETES_CONFIGURATION),
    message(26, "proxy", PROXY_CONFIGURATION),
    plain(27, "pod_network"),
    plain(28, "service_network"),
];

const CLUSTER_BOOTSTRAP: &[Field] = &[
    plain(1, "owner_public_key"),
    message(2, "cluster_configuration", CLUSTER_CONFIGURATION),
    message(3, "labels", ENTRY),
    plain(4, "name"),
];

const DIRECTORY_NODE: &[Field] = &[plain(1, "id"), plain(2, "addresses")];

const CLUSTER_DIRECTORY: &[Field] = &[message(1, "nodes", DIRECTORY_NODE)];

const CLUSTER_REGISTER: &[Field] = &[
    message(1, "cluster_directory", CLUSTER_DIRECTORY),
    plain(2, "register_ticket"),
    plain(3, "ca_certificate"),
    message(4, "labels", ENTRY),
    plain(5, "name"),
];

const ROUTE: &[Field] = &[plain(1, "destination"), plain(2, "gateway"), plain(3, "metric")];

const INTERFACE: &[Field] = &[
    plain(1, "match"),
    plain(2, "dhcp"),
    plain(3, "addresses"),
    message(4, "routes", ROUTE),
    plain(5, "mtu"),
    plain(6, "path"),
    plain(7, "driver"),
    plain(8, "primary"),
    plain(9, "ipv6"),
];

const CARD: &[Field] = &[plain(1, "match"), plain(2, "path"), plain(3, "driver")];

const SETTINGS: &[Field] = &[
    plain(1, "dhcp"),
    plain(2, "addresses"),
    message(3, "routes", ROUTE),
    plain(4, "mtu"),
    plain(5, "primary"),
    plain(6, "ipv6"),
];

const BOND: &[Field] = &[
    plain(1, "name"),
    message(2, "members", CARD),
    plain(3, "mode"),
    plain(4, "hash"),
    plain(5, "min_links"),
    message(6, "settings", SETTINGS),
];

const VLAN: &[Field] =
    &[plain(1, "bond"), message(2, "card", CARD), plain(3, "id"), message(4, "settings", SETTINGS)];

const NETWORK_CONFIGURATION: &[Field] = &[
    message(1, "interfaces", INTERFACE),
    plain(2, "nameservers"),
    plain(3, "ntp_servers"),
    message(4, "bonds", BOND),
    message(5, "vlans", VLAN),
];

const CONSOLE_CONFIGURATION: &[Field] = &[plain(1, "tui")];

const DISK_SELECTOR: &[Field] = &[
    plain(1, "transport"),
    plain(2, "model"),
    plain(3, "serial"),
    plain(4, "wwid"),
    plain(5, "path"),
    plain(6, "size_min"),
    plain(7, "size_max"),
];

const INSTALLATION: &[Field] =
    &[message(1, "disk", DISK_SELECTOR), plain(2, "wipe"), plain(3, "id")];

const DISK_VOLUME: &[Field] = &[plain(1, "name"), message(2, "disk", DISK_SELECTOR)];

/// `polis.v1.NodeParameters`.
const PARAMETERS: &[Field] = &[
    message(1, "cluster_bootstrap", CLUSTER_BOOTSTRAP),
    message(2, "cluster_register", CLUSTER_REGISTER),
    message(3, "network", NETWORK_CONFIGURATION),
    message(4, "console", CONSOLE_CONFIGURATION),
    plain(5, "wipes"),
    message(6, "install", INSTALLATION),
    message(7, "volumes", DISK_VOLUME),
    message(8, "mirror", DISK_SELECTOR),
];

/// Fails on the first field of encoded node parameters that is not allowed.
pub(super) fn check(bytes: &[u8]) -> Result<(), Error> {
    let mut chosen = 0;
    walk(bytes, PARAMETERS, &mut Vec::new(), &mut chosen)?;
    if chosen == 3 { Err(Error::BothChosen) } else { Ok(()) }
}

/// Walks one message. The table is not recursive, so neither is the depth unbounded.
fn walk(
    mut bytes: &[u8],
    fields: &'static [Field],
    path: &mut Vec<&'static str>,
    chosen: &mut u32,
) -> Result<(), Error> {
    while bytes.has_remaining() {
        let (number, wire_type) = decode_key(&mut bytes).map_err(Error::Malformed)?;
        let Some(field) = fields.iter().find(|field| field.number == number) else {
            let known: Vec<_> = fields.iter().map(|field| field.number.to_string()).collect();
            let (message, allowed) = (path.join("."), known.join(", "));
            return Err(Error::UnknownField { message, number, allowed });
        };
        if path.is_empty() && number <= 2 {
            // The members of the `oneof` are 1 and 2, and so are the bits.
            *chosen |= number;
        }
        if field.fields.is_empty() || wire_type != WireType::LengthDelimited {
            // Of the wrong type or cut short: the decoder names it.
            skip_field(wire_type, number, &mut bytes, DecodeContext::default())
                .map_err(Error::Malformed)?;
            continue;
        }
        let length = decode_varint(&mut bytes).map_err(Error::Malformed)?;
        let Some((inner, rest)) =
            usize::try_from(length).ok().and_then(|length| bytes.split_at_checked(length))
        else {
            return Err(Error::Truncated { field: field.name, missing: length });
        };
        path.push(field.name);
        walk(inner, field.fields, path, chosen)?;
        path.pop();
        bytes = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use prost_reflect::{DescriptorPool, Kind, MessageDescriptor};

    use super::*;

    #[track_caller]
    fn same(fields: &[Field], message: &MessageDescriptor) {
        let described: Vec<_> =
            message.fields().map(|f| (f.number(), f.name().to_owned())).collect();
        let table: Vec<_> = fields.iter().map(|f| (f.number, f.name.to_owned())).collect();
        assert_eq!(table, described, "{}", message.full_name());
        for (field, described) in fields.iter().zip(message.fields()) {
            match described.kind() {
                Kind::Message(inner) => same(field.fields, &inner),
                _ => assert!(field.fields.is_empty(), "{}", field.name),
            }
        }
    }

    #[test]
    fn the_table_is_the_proto_file() {
        let pool = DescriptorPool::decode(polis_proto::DESCRIPTORS).unwrap();
        same(PARAMETERS, &pool.get_message_by_name("polis.v1.NodeParameters").unwrap());
    }

    #[test]
    fn an_unknown_field_is_named_by_its_message_and_number_beside_the_known_ones() {
        // cluster_bootstrap { cluster_configuration { 9: 1 } }
        let bytes = [0x0a, 4, 0x12, 2, 9 << 3, 1];
        let error = check(&bytes).unwrap_err();
        assert!(
            matches!(&error, Error::UnknownField { message, number: 9, .. }
                if message == "cluster_bootstrap.cluster_configuration"),
            "{error:?}"
        );
        let error = check(&[9 << 3, 1]).unwrap_err();
        insta::assert_snapshot!(error, @"the node parameters have an unknown field number 9 in NodeParameters; allowed are 1, 2, 3, 4, 5, 6, 7, 8");
    }

    #[test]
    fn both_members_of_the_oneof_are_refused() {
        assert!(matches!(check(&[0x0a, 0, 0x12, 0]), Err(Error::BothChosen)));
        assert!(check(&[0x0a, 0, 0x1a, 0]).is_ok());
    }

    #[test]
    fn a_message_that_is_cut_short_is_refused() {
        assert!(matches!(check(&[0x0a, 5, 0x12]), Err(Error::Truncated { .. })));
    }
}
