//! `polisctl cluster take-ownership`: exchanges the owner's key for a certificate.
//!
//! ```text
//! the machine's screen --person--> fingerprint --+
//! a curator, not trusted yet ------> its CA -----+--> the same? --yes--> TLS with that CA only
//!                                                        |                  | Escrow, with proof
//!                                                        no                 v  of the key
//!                                                        v                context: CA, certificate
//!                                                     refused
//! ```
//!
//! Invariants:
//! - From an unverified connection only the CA is used, and only after its comparison.
//! - A context that has a CA never gets another one.

use std::path::PathBuf;

use ed25519_dalek::SigningKey;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use polis_proto::v1;
use polis_proto::v1::aaa_client::AaaClient;
use polis_proto::v1::curator_local_client::CuratorLocalClient;
use polis_proto::v1::management_client::ManagementClient;
use serde::Serialize;
use tokio::sync::watch;

use super::contexts::{Context, read_certificate};
use super::error::{Error, Explain as _};
use super::output::{Document, fields};
use super::session::{
    ENDPOINT, Limit, PATIENCE, access_list, candidates, credentials, dialled, refused, successor,
    within,
};
use super::{Global, ask, key, units};
use polis_wire::endpoint::Endpoint;
use polis_wire::identity::{Fingerprint, Spoken};
use polis_wire::pki::{Crl, Facts};
use polis_wire::rpc::client::{Candidate, Client, Expect, Repeat, Trust};

/// Arguments of `cluster take-ownership`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The owner's private key [default: that of the context, or of `owner create`].
    #[arg(long, value_name = "FILE")]
    owner_key: Option<PathBuf>,
    /// The CA's fingerprint as the machine's screen shows it: four words, or 64 hexadecimal
    /// digits.
    #[arg(long, value_name = "WORDS|HEX")]
    fingerprint: Option<Spoken>,
    /// The CA, in PEM or DER, from a trusted source.
    #[arg(long, value_name = "FILE", conflicts_with = "fingerprint")]
    ca: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Taken {
    context: String,
    user: String,
    ca_fingerprint: String,
    certificate_ends: Option<units::Time>,
}

/// The user of a key.
const OWNER: &str = "owner";

/// Runs the command.
pub(super) async fn run(arguments: Arguments, global: &Global) -> Result<(), Error> {
    let known = match &global.context {
        Some(name) => global.contexts.find_context(name)?,
        // The endpoints may belong to a new cluster: only `--context` selects an old
        // context.
        None if global.endpoints.is_empty() => global.contexts.context(None)?,
        None => None,
    };
    if known.is_none() && global.endpoints.is_empty() {
        return Err(Error::new("no address of the cluster is known").or_help(ENDPOINT));
    }
    let context = known.unwrap_or_else(|| Context::new(global.context.as_deref().unwrap_or("new")));
    let key_file = match arguments.owner_key {
        Some(file) => std::path::absolute(file)?,
        None if !context.settings.key.as_os_str().is_empty() => context.settings.key.clone(),
        None => std::path::absolute(global.contexts.owner_key())?,
    };
    let candidates = candidates(global, &context)?;
    let key = key::read(&key_file, &global.passphrase)
        .help(|| "name the owner's key with --owner-key".to_owned())?;

    let mut limit = global.timeout.map(Limit::new);
    let progress = global.out.progress();
    let (ca, taken) = match (&context.ca, &arguments.ca) {
        (Some(ca), None) => (ca.clone(), None),
        (None, Some(file)) => (read_certificate(file)?, None),
        (Some(ca), Some(file)) if *ca == read_certificate(file)? => (ca.clone(), None),
        (Some(_), Some(_)) => return Err(another_cluster(&context.name)),
        (None, None) => {
            progress.says("asking for the cluster's CA");
            // On the heap: the futures of several commands contain this one.
            let shown = Box::pin(shown_ca(&candidates, limit)).await?;
            drop(progress);
            compare(global, &shown, arguments.fingerprint.as_ref())?;
            if arguments.fingerprint.is_none() {
                limit = limit.map(Limit::anew);
            }
            (shown.ca, Some(shown.at))
        }
    };
    if let (Some(spoken), None) = (&arguments.fingerprint, &taken)
        && !Fingerprint::of_certificate(&ca).is(spoken)
    {
        return Err(another_cluster(&context.name));
    }
    let progress = global.out.progress();
    progress.says("proving the owner's key");
    let certified = Box::pin(escrow(candidates, &key, &ca, context.crl.clone(), limit));
    let certified = within(limit, "take ownership", certified).await?;
    drop(progress);
    let context = named(global, context, certified, key_file)?;
    saved(global, context)
}

/// A context never gets another CA.
pub(super) fn another_cluster(name: &str) -> Error {
    Error::new(format!("context {name} belongs to a cluster with another CA"))
        .or_help("give the new cluster a context of its own: --context NAME")
}

/// A CA that is not verified yet.
struct Shown {
    ca: Vec<u8>,
    at: Candidate,
}

/// Reads the CA from the first candidate that answers: all are asked at once. With `--timeout`
/// each is asked until then, since the cluster may be starting.
async fn shown_ca(candidates: &[Candidate], limit: Option<Limit>) -> Result<Shown, Error> {
    let asked = candidates.iter().map(|candidate| Box::pin(shown_by(candidate, limit)));
    let mut answers: FuturesUnordered<_> = asked.collect();
    let mut last = None;
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(shown) => return Ok(shown),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| {
        Error::new("no curator is known").or_help("name the address of a voter: --endpoint HOST")
    }))
}

async fn shown_by(candidate: &Candidate, limit: Option<Limit>) -> Result<Shown, Error> {
    let at = Endpoint { host: candidate.host.clone(), port: candidate.port };
    let connection = dialled(&at, Expect::AnyNode, &Trust::Unchecked, None, limit).await?;
    let mut curator = CuratorLocalClient::new(connection.channel);
    let asked = async {
        let answer = curator.get_ca_certificate(v1::GetCaCertificateRequest {}).await;
        answer.map_err(|status| refused("ask for the CA", &status))
    };
    let answer = within(limit, "ask for the CA", asked).await?.into_inner();
    if Facts::read(&answer.ca_certificate).is_none() {
        return Err(Error::new(format!("{candidate} sent an invalid CA"))
            .or_help("check the endpoint: another program may listen there"));
    }
    Ok(Shown { ca: answer.ca_certificate, at: candidate.clone() })
}

/// Trusts a CA by `--ca`, by `--fingerprint` or by a confirmation.
fn compare(global: &Global, shown: &Shown, spoken: Option<&Spoken>) -> Result<(), Error> {
    let fingerprint = Fingerprint::of_certificate(&shown.ca);
    let at = &shown.at;
    match spoken {
        Some(spoken) if fingerprint.is(spoken) => return Ok(()),
        Some(_) => {
            return Err(Error::new(format!(
                "the cluster at {at} has another CA: {}, {fingerprint}",
                fingerprint.words()
            ))
            .or_help(
                "check the endpoint, and read the fingerprint again from the machine's own \
                 screen; if they still differ, the connection is intercepted",
            ));
        }
        None => {}
    }
    let question = format!(
        "The cluster at {at} shows this CA:\n\n{}\n\
         Does the machine's own screen show the same, on page PKI (F4) under \"cluster CA\"?",
        as_on_the_page(&fingerprint)
    );
    ask::confirm(
        global,
        &question,
        "name the fingerprint on the machine's screen: --fingerprint WORDS, or the CA: --ca FILE",
    )
    .doing(|| format!("the CA of the cluster at {at} was not verified"))
}

/// A fingerprint with the names and in the order in which page PKI has it.
fn as_on_the_page(fingerprint: &Fingerprint) -> String {
    format!("    words    {}\n    SHA-256  {fingerprint}\n", fingerprint.words())
}

/// The result of the exchange.
struct Certified {
    /// DER of the CA that has signed it.
    ca: Vec<u8>,
    certificate: Vec<u8>,
    crl: Option<Crl>,
    directory: Option<v1::ClusterDirectory>,
    domain: String,
}

async fn escrow(
    candidates: Vec<Candidate>,
    key: &SigningKey,
    ca: &[u8],
    crl: Option<Crl>,
    limit: Option<Limit>,
) -> Result<Certified, Error> {
    let own = credentials(key, self_signed(key)?, Some(ca.to_vec()));
    let (_fixed, revoked) = watch::channel(access_list(crl));
    let left = || Limit::timeouts(limit, PATIENCE);
    let client = Client::fixed(candidates.clone(), own, left()).wary(revoked.clone());
    let answer = client.call(Repeat::Allowed, |channel| async move {
        Ok(AaaClient::new(channel).escrow(v1::EscrowRequest {}).await?.into_inner())
    });
    let answer = answer.await.map_err(|status| refused("take ownership", &status))?;
    let public = key.verifying_key().to_bytes();
    let fits = Facts::read(&answer.certificate).is_some_and(|facts| facts.public_key == public);
    if !fits {
        return Err(Error::new("the cluster issued a certificate for another key")
            .or_help("check the endpoint, and the CA on the machine's own screen"));
    }
    let ca = successor(ca, &answer)?;
    // Uses the new certificate, which proves that it works.
    let owner = credentials(key, answer.certificate.clone(), Some(ca.clone()));
    let client = Client::fixed(candidates, owner, left()).wary(revoked);
    let info = client.call(Repeat::Allowed, |channel| async move {
        let request = v1::GetClusterInfoRequest::default();
        Ok(ManagementClient::new(channel).get_cluster_info(request).await?.into_inner())
    });
    let info = info.await.map_err(|status| refused("use the new certificate", &status))?;
    Ok(Certified {
        ca,
        certificate: answer.certificate,
        crl: Crl::read(&info.crl),
        domain: super::cluster::info::domain(&info),
        directory: info.cluster_directory,
    })
}

/// A certificate that only proves possession of its key.
pub(super) fn self_signed(key: &SigningKey) -> Result<Vec<u8>, Error> {
    let failed = || "cannot sign with the key".to_owned();
    let der = polis_wire::pki::key_der(key);
    let pair = rcgen::KeyPair::try_from(der.as_slice()).doing(failed)?;
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, OWNER);
    parameters.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    Ok(parameters.self_signed(&pair).doing(failed)?.der().to_vec())
}

/// The new context.
fn named(
    global: &Global,
    mut context: Context,
    certified: Certified,
    key_file: PathBuf,
) -> Result<Context, Error> {
    if global.context.is_none() && context.ca.is_none() {
        // A new name for a cluster without a context.
        let domain = super::contexts::name(&certified.domain).unwrap_or("polis".to_owned());
        let name = global.contexts.free_name(&domain, &certified.ca)?;
        if let Some(other) = global.contexts.find_context(&name)? {
            context.settings.via = other.settings.via;
        }
        context.name = name;
    }
    let settings = &mut context.settings;
    if !global.endpoints.is_empty() {
        settings.endpoints = global.endpoints.iter().map(ToString::to_string).collect();
    }
    settings.user = user(&certified.certificate);
    settings.key = key_file;
    settings.nodes = certified
        .directory
        .map(|directory| {
            directory.nodes.into_iter().map(|node| (node.id, node.addresses)).collect()
        })
        .unwrap_or_default();
    context.ca = Some(certified.ca);
    context.certificate = Some(certified.certificate);
    // A leader of an earlier version sends none.
    context.crl = certified.crl.or(context.crl);
    global.contexts.save(&context)?;
    global.contexts.set_current(&context.name)?;
    Ok(context)
}

/// The user of a certificate. Another owner than the first one may take ownership again.
fn user(certificate: &[u8]) -> String {
    Facts::read(certificate).map_or(OWNER.to_owned(), |facts| facts.subject)
}

fn saved(global: &Global, context: Context) -> Result<(), Error> {
    let ca = context.ca.as_deref().unwrap_or_default();
    let certificate = context.certificate.as_deref().and_then(Facts::read);
    let taken = Taken {
        user: context.settings.user,
        ca_fingerprint: Fingerprint::of_certificate(ca).to_string(),
        certificate_ends: certificate.map(|facts| units::Time(facts.not_after)),
        context: context.name,
    };
    let lines = [
        ("context", format!("{}, now the current context", taken.context)),
        ("user", taken.user.clone()),
        ("CA", format!("{}\n{}", Fingerprint::of_certificate(ca).words(), taken.ca_fingerprint)),
        (
            "certificate ends",
            format!("{}; renewed automatically when used", units::text(taken.certificate_ends)),
        ),
    ];
    global.out.print(&Document::new(&taken, fields(&lines))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::Cluster;
    use crate::testing::{World, closed_port};

    #[test]
    fn a_curator_that_does_not_listen_yet_is_asked_again_until_the_timeout() {
        let world = World::new();
        world.runs(&["owner", "create"]);
        let (_bound, closed) = closed_port();
        let take = ["cluster", "take-ownership", "--endpoint", &*closed, "--timeout", "1s"];
        let ended = world.run(&take);
        assert_eq!((ended.status, &*ended.stdout), (3, ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("cause: Connection refused"), "{}", ended.stderr);
    }

    #[test]
    fn without_an_address_the_error_names_the_option_and_no_context() {
        let world = World::new();
        world.runs(&["owner", "create"]);
        let refused = world.refuses(&["cluster", "take-ownership"]);
        assert_eq!(
            refused,
            "error: no address of the cluster is known\nhelp: name the address of a curator: \
             --endpoint HOST[:PORT]\n"
        );
    }

    #[test]
    fn an_endpoint_that_is_silent_does_not_hold_up_one_that_answers() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let listens = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = listens.local_addr().unwrap().to_string();
        let ca = Fingerprint::of_certificate(&cluster.authority()).to_string();
        // Less than a silent machine may take to connect.
        let take = ["--context", "again", "cluster", "take-ownership", "--timeout", "3500ms"];
        let how = ["--owner-key", "@owner.key", "--fingerprint", &ca];
        let at = ["--endpoint", &*silent, "--endpoint", &cluster.address()];
        let said = world.runs(&[&take[..], &how, &at].concat());
        assert!(said.contains("again, now the current context"), "{said}");
    }

    #[test]
    fn a_ca_is_shown_as_on_the_page_of_the_machine() {
        let fingerprint = Fingerprint::of_certificate(b"abc");
        insta::assert_snapshot!(as_on_the_page(&fingerprint), @r"
            words    scissors-lecture-lamp-unique
            SHA-256  ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad
        ");
    }
}
