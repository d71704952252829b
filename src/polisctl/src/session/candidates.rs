//! Where the curators of a cluster may be, by the context and the command line.

use polis_wire::endpoint::Endpoint;
use polis_wire::rpc::client::Candidate;

use crate::Global;
use crate::contexts::Context;
use crate::error::{Error, Explain as _};

/// What to do without a usable address.
pub(crate) const ENDPOINT: &str = "name the address of a curator: --endpoint HOST[:PORT]";

/// The candidates for curators.
pub(crate) fn candidates(global: &Global, context: &Context) -> Result<Vec<Candidate>, Error> {
    let named = |endpoint: &Endpoint| Candidate {
        node: None,
        host: endpoint.host.clone(),
        port: endpoint.port,
    };
    if !global.endpoints.is_empty() {
        return Ok(global.endpoints.iter().map(named).collect());
    }
    let mut candidates = Vec::new();
    for text in &context.settings.endpoints {
        let endpoint = text
            .parse::<Endpoint>()
            .doing(|| format!("context {} has no good endpoint", context.name))
            .help(|| ENDPOINT.to_owned())?;
        candidates.push(named(&endpoint));
    }
    // Endpoints of the command line are used unchanged.
    let anew = |one: &Candidate| {
        !candidates.iter().any(|named| (&named.host, named.port) == (&one.host, one.port))
    };
    let learnt: Vec<_> = learnt(context)?.into_iter().filter(anew).collect();
    candidates.extend(learnt);
    if candidates.is_empty() {
        return Err(
            Error::new(format!("context {} has no endpoint", context.name)).or_help(ENDPOINT)
        );
    }
    Ok(candidates)
}

/// The address to dial: a detour of the context, or the address itself.
pub(super) fn detour(context: &Context, address: &Endpoint) -> Result<Endpoint, Error> {
    match context.settings.via.get(&address.to_string()) {
        Some(other) => other.parse().doing(|| format!("the detour {other:?} has no address")),
        None => Ok(address.clone()),
    }
}

/// Curators of the cluster's directory.
fn learnt(context: &Context) -> Result<Vec<Candidate>, Error> {
    let mut candidates = Vec::new();
    for (id, addresses) in &context.settings.nodes {
        let Ok(node) = id.parse() else { continue };
        for address in addresses {
            let Ok(endpoint) = address.parse::<Endpoint>() else { continue };
            let Endpoint { host, port } = detour(context, &endpoint)?;
            candidates.push(Candidate { node: Some(node), host, port });
        }
    }
    Ok(candidates)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use polis_wire::identity::NodeId;

    #[test]
    fn a_curator_that_was_learnt_is_reached_through_its_forwarded_port() {
        let id = NodeId::from_public_key(&[1; 32]);
        let mut context = Context::new("home");
        context.settings.nodes =
            BTreeMap::from([(id.to_string(), vec!["10.0.2.16".into(), "10.0.2.17".into()])]);
        context.settings.via =
            BTreeMap::from([("10.0.2.16:7835".to_owned(), "127.0.0.1:17835".to_owned())]);
        let found = learnt(&context).unwrap();
        let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["127.0.0.1:17835", "10.0.2.17:7835"]);
        assert!(found.iter().all(|candidate| candidate.node == Some(id)));
    }
}
