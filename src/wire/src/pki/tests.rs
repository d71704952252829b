//! The library against a map, with the races that matter.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use super::store::memory::Memory;
use super::*;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub(super) fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

pub(super) fn authority() -> Arc<Certificate> {
    Arc::new(Certificate {
        issuer: Issuer::Itself,
        name: "etcd-peers".to_owned(),
        template: Template::EtcdAuthority,
        mode: Mode::Managed,
    })
}

fn desired(name: &str, template: Template, mode: Mode) -> Certificate {
    let issuer = Issuer::Authority(authority());
    Certificate { issuer, name: name.to_owned(), template, mode }
}

pub(super) fn peer(name: &str, mode: Mode) -> Certificate {
    desired(name, Template::EtcdPeer { host: Host::Name(name.to_owned()) }, mode)
}

#[test]
fn a_moment_that_only_a_stranger_s_certificate_can_name_has_a_text_too() {
    assert_eq!(moment(noon()), "2027-01-15 08:00 UTC");
    assert_eq!(moment(SystemTime::UNIX_EPOCH - DAY), "1970-01-01 00:00 UTC");
    let last = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    assert_eq!(moment(last), "9999-12-31 23:59 UTC");
    assert_eq!(moment(last + DAY), "a time after the year 9999");
}

fn verifies(der: &[u8], issuer_der: &[u8]) -> bool {
    let (_, certificate) = X509Certificate::from_der(der).unwrap();
    let (_, issuer) = X509Certificate::from_der(issuer_der).unwrap();
    certificate.verify_signature(Some(issuer.public_key())).is_ok()
}

#[tokio::test]
async fn an_authority_says_what_the_design_says() {
    let pki = Namespace::new(Memory::default(), "");
    let made = pki.ensure(&authority(), noon()).await.unwrap();
    let (_, ca) = X509Certificate::from_der(&made.der).unwrap();
    assert_eq!(ca.raw_serial(), [1]);
    assert!(ca.is_ca());
    let usage = ca.key_usage().unwrap().unwrap().value;
    assert!(usage.key_cert_sign() && usage.crl_sign() && usage.digital_signature());
    let extended = ca.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.client_auth && extended.server_auth && extended.ocsp_signing);
    assert!(verifies(&made.der, &made.der));
    let crl = pki.crl(&authority()).await.unwrap().unwrap();
    assert_eq!((crl.number, crl.revoked.len()), (1, 0));
}

#[tokio::test]
async fn a_peer_carries_its_name_and_the_name_that_only_peers_have() {
    let pki = Namespace::new(Memory::default(), "");
    let made = pki.ensure(&peer("polis-a", Mode::External([7; 32])), noon()).await.unwrap();
    assert!(made.key.is_none());
    assert!(verifies(&made.der, &made.issuer_der));
    let (_, peer) = X509Certificate::from_der(&made.der).unwrap();
    let names = &peer.subject_alternative_name().unwrap().unwrap().value.general_names;
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["DNSName(polis-a)", "DNSName(etcd-peer.polis.internal)"]);
    let usage = peer.key_usage().unwrap().unwrap().value;
    assert!(usage.digital_signature() && usage.key_encipherment() && !usage.key_cert_sign());
    let extended = peer.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.client_auth && extended.server_auth);
}

#[tokio::test]
async fn a_key_of_another_kind_is_not_taken_for_one_of_ed25519() {
    const ED25519: [u8; 5] = [0x06, 0x03, 0x2b, 0x65, 0x70];
    let pki = Namespace::new(Memory::default(), "");
    let made = pki.ensure(&peer("a", Mode::External([7; 32])), noon()).await.unwrap();
    assert_eq!(Facts::read(&made.der).unwrap().public_key, [7; 32]);
    let named = made.der.windows(ED25519.len()).enumerate();
    let named: Vec<_> = named.filter(|(_, bytes)| **bytes == ED25519).map(|(at, _)| at).collect();
    let mut der = made.der;
    for at in named {
        // X25519, whose keys have the same length (RFC 8410).
        der[at + 4] = 0x6e;
    }
    assert!(X509Certificate::from_der(&der).is_ok());
    assert_eq!(Facts::read(&der), None);
}

#[tokio::test]
async fn a_node_is_a_server_and_a_client_and_a_user_only_a_client() {
    let pki = Namespace::new(Memory::default(), "pki/");
    for (template, server, client, days) in [
        (Template::Node, true, true, 90),
        (Template::Curator { node: "x".to_owned() }, true, false, 10),
        (Template::User { role: "viewer" }, false, true, 30),
    ] {
        let made = pki.ensure(&desired("x", template, Mode::Ephemeral), noon()).await.unwrap();
        let (_, certificate) = X509Certificate::from_der(&made.der).unwrap();
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert_eq!((usage.server_auth, usage.client_auth), (server, client));
        assert!(!certificate.is_ca());
        assert_eq!(Facts::read(&made.der).unwrap().not_after, noon() + DAY * days);
    }
}

#[tokio::test]
async fn peers_take_each_other_s_certificates_for_as_long_as_their_authority_lives() {
    let pki = Namespace::new(Memory::default(), "");
    let made = pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();
    let ends = |der: &[u8]| Facts::read(der).unwrap().not_after;
    assert_eq!(ends(&made.der), ends(&made.issuer_der));
}

#[tokio::test]
async fn peers_and_their_authority_are_valid_by_a_clock_that_is_years_behind_their_maker_s() {
    let pki = Namespace::new(Memory::default(), "");
    let made = pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();
    for der in [&made.der, &made.issuer_der] {
        let facts = Facts::read(der).unwrap();
        assert!(facts.not_before < noon() - DAY * 365 * 9, "{facts:?}");
        assert!(!facts.renewal_due(noon() - DAY * 365 * 9), "{facts:?}");
        assert!(!facts.renewal_due(noon() + DAY * 365 * 3), "{facts:?}");
    }
}

#[tokio::test]
async fn ensuring_twice_gives_the_same_certificate_and_key() {
    let pki = Namespace::new(Memory::default(), "pki/");
    let first = pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();
    let again = pki.ensure(&peer("a", Mode::Managed), noon() + DAY).await.unwrap();
    assert_eq!(first.der, again.der);
    assert_eq!(first.key.unwrap().to_bytes(), again.key.unwrap().to_bytes());
}

#[tokio::test]
async fn an_ephemeral_certificate_is_new_each_time_and_still_listed() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    let first = pki.ensure(&peer("a", Mode::Ephemeral), noon()).await.unwrap();
    let again = pki.ensure(&peer("a", Mode::Ephemeral), noon()).await.unwrap();
    assert_ne!(first.der, again.der);
    let contents = memory.contents();
    let listed = contents.iter().filter(|(key, _)| key.contains("/issued/"));
    assert_eq!(listed.count(), 2);
    assert!(!contents.keys().any(|key| key.starts_with("certificates/")));
}

#[tokio::test]
async fn of_two_at_once_one_wins_and_the_loser_may_try_again() {
    let memory = Memory::default();
    Namespace::new(memory.clone(), "").ensure(&authority(), noon()).await.unwrap();
    // Both have read that the certificate is absent before either of them writes.
    let pause = Arc::new(tokio::sync::Barrier::new(2));
    let racing = Namespace::new(memory.pausing(pause), "");
    let desired = peer("a", Mode::Managed);
    let (one, two) = tokio::join!(racing.ensure(&desired, noon()), racing.ensure(&desired, noon()));
    let (won, lost) = match (one, two) {
        (Ok(won), Err(lost)) | (Err(lost), Ok(won)) => (won, lost),
        other => panic!("one must win: {other:?}"),
    };
    assert!(matches!(lost, Error::Lost { .. }) && lost.retriable());
    let again = Namespace::new(memory.clone(), "").ensure(&desired, noon()).await.unwrap();
    assert_eq!(again.der, won.der);
    assert_eq!(memory.contents().keys().filter(|key| key.contains("/issued/")).count(), 1);
}

#[tokio::test]
async fn a_certificate_of_another_key_is_not_handed_out() {
    let pki = Namespace::new(Memory::default(), "");
    pki.ensure(&peer("a", Mode::External([7; 32])), noon()).await.unwrap();
    let other = pki.ensure(&peer("a", Mode::External([8; 32])), noon()).await;
    assert!(matches!(other, Err(Error::OtherKey { .. })), "{other:?}");
}

#[tokio::test]
async fn revoking_adds_every_certificate_of_the_name_once() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    let node = desired("a", Template::Node, Mode::Managed);
    let old = pki.ensure(&node, noon()).await.unwrap();
    let new = pki.renew(&node, noon() + DAY * 80).await.unwrap().unwrap();
    let other = pki.ensure(&peer("b", Mode::Managed), noon()).await.unwrap();
    let later = noon() + DAY * 81;
    let revoke = || pki.revoke(&REVOKER, "a", Reason::Left, later);
    assert_eq!(revoke().await.unwrap(), 2);
    assert_eq!(revoke().await.unwrap(), 0);
    let crl = pki.crl(&authority()).await.unwrap().unwrap();
    assert_eq!(crl.number, 2);
    let serial = |der: &[u8]| Facts::read(der).unwrap().serial;
    assert!(crl.revokes(&serial(&old.der)) && crl.revokes(&serial(&new.der)));
    assert!(!crl.revokes(&serial(&other.der)));
    assert_eq!((crl.revoked[0].at, crl.revoked[0].reason), (later, Reason::Left));
    // The next one is not born revoked.
    let fresh = pki.ensure(&peer("a", Mode::Managed), later).await.unwrap();
    assert!(!crl.revokes(&serial(&fresh.der)));
}

#[tokio::test]
async fn a_certificate_that_is_renewed_at_the_moment_of_its_revocation_is_revoked_too() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    let wish = peer("a", Mode::External([7; 32]));
    pki.ensure(&wish, noon()).await.unwrap();
    // By a certificate of another authority, which is due at once.
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    let both = Arc::new(tokio::sync::Barrier::new(2));
    let paused = || Namespace::new(memory.pausing(Arc::clone(&both)), "");
    let (one, two) = (paused(), paused());
    let (revoked, renewed) =
        tokio::join!(one.revoke(&REVOKER, "a", Reason::Left, noon()), two.renew(&wish, noon()),);
    assert!(revoked.is_ok() != renewed.is_ok(), "one of the two: {revoked:?} {renewed:?}");
    pki.revoke(&REVOKER, "a", Reason::Left, noon()).await.unwrap();
    let crl = pki.crl(&authority()).await.unwrap().unwrap();
    for (key, der) in memory.contents().iter().filter(|(key, _)| key.contains("/issued/")) {
        assert!(crl.revokes(&Facts::read(der).unwrap().serial), "{key} is still good");
    }
}

static REVOKER: std::sync::LazyLock<Arc<Certificate>> = std::sync::LazyLock::new(authority);

#[tokio::test]
async fn a_certificate_is_renewed_after_two_thirds_and_keeps_its_key() {
    let pki = Namespace::new(Memory::default(), "");
    let node = desired("a", Template::Node, Mode::Managed);
    let old = pki.ensure(&node, noon()).await.unwrap();
    let early = pki.renew(&node, noon() + DAY * 59).await.unwrap();
    assert!(early.is_none());
    let new = pki.renew(&node, noon() + DAY * 60).await.unwrap().unwrap();
    assert_eq!(new.key.unwrap().to_bytes(), old.key.unwrap().to_bytes());
    assert_ne!(new.der, old.der);
    let read = pki.ensure(&node, noon()).await.unwrap();
    assert_eq!(read.der, new.der);
}

#[tokio::test]
async fn a_certificate_from_the_future_is_renewed_at_once() {
    let pki = Namespace::new(Memory::default(), "");
    pki.ensure(&peer("a", Mode::Managed), noon() + DAY * 4000).await.unwrap();
    assert!(pki.renew(&peer("a", Mode::Managed), noon()).await.unwrap().is_some());
}

#[tokio::test]
async fn only_an_authority_signs() {
    let pki = Namespace::new(Memory::default(), "");
    let leaf = Arc::new(peer("a", Mode::Managed));
    let below = Certificate { issuer: Issuer::Authority(leaf), ..peer("b", Mode::Managed) };
    let made = pki.ensure(&below, noon()).await;
    assert!(matches!(made, Err(Error::NoAuthority { .. })), "{made:?}");
}

#[tokio::test]
async fn a_name_cannot_leave_its_folder() {
    let pki = Namespace::new(Memory::default(), "");
    for bad in ["", "a/b", "../a", "a b", "ä", &"x".repeat(129)] {
        let made = pki.ensure(&peer(bad, Mode::Managed), noon()).await;
        assert!(matches!(made, Err(Error::Name { .. })), "{bad:?}: {made:?}");
    }
}

#[tokio::test]
async fn the_overview_shows_what_there_is_and_no_secret() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    let ca = pki.ensure(&authority(), noon()).await.unwrap();
    pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();
    pki.ensure(&peer("b", Mode::External([7; 32])), noon()).await.unwrap();
    pki.revoke(&authority(), "a", Reason::KeyCompromise, noon()).await.unwrap();
    pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();

    let mut overview = Overview::default();
    overview.add("polis:etcd-pki", &memory.contents(), |_| Renewal::ByUser);
    let [shown] = overview.authorities.as_slice() else { panic!("{overview:?}") };
    assert_eq!((shown.issued, shown.crl_number), (3, 2));
    assert_eq!(
        shown.fingerprint,
        polis_base::hex::encode(&Facts::read(&ca.der).unwrap().fingerprint)
    );
    assert_eq!(shown.revoked[0].subject.as_deref(), Some("a"));
    let [a, b] = overview.certificates.as_slice() else { panic!("{overview:?}") };
    assert!(a.managed && !b.managed && !a.revoked && !b.revoked);
    assert_eq!((a.name.as_str(), a.issuer.as_str()), ("a", "etcd-peers"));
}

#[test]
fn pem_is_what_other_programs_read() {
    let key = ed25519_dalek::SigningKey::from_bytes(&[1; 32]);
    let text = key_pem(&key);
    assert!(text.starts_with("-----BEGIN PRIVATE KEY-----\n"), "{}", text.as_str());
    assert!(text.ends_with("-----END PRIVATE KEY-----\n"));
    assert!(certificate_pem(&[0; 100]).lines().all(|line| line.len() <= 64));
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_no_certificate_and_no_crl(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert_eq!(Facts::read(&bytes), None);
        prop_assert_eq!(Crl::read(&bytes), None);
        let entries = BTreeMap::from([
            ("authorities/a/certificate".to_owned(), bytes.clone()),
            ("certificates/a/b/certificate".to_owned(), bytes),
        ]);
        let mut overview = Overview::default();
        overview.add("x", &entries, |_| Renewal::WhenUsed);
        prop_assert_eq!(overview, Overview::default());
    }

    #[test]
    fn a_bent_certificate_never_panics(at in any::<prop::sample::Index>(), bits in 1..=255_u8) {
        let signer = template::Signer::create(
            "a",
            &Template::EtcdAuthority,
            &ed25519_dalek::SigningKey::from_bytes(&[1; 32]),
            noon(),
        )
        .unwrap();
        let mut der = signer.der;
        let at = at.index(der.len());
        der[at] ^= bits;
        let _read = Facts::read(&der);
    }
}

#[tokio::test]
async fn a_user_carries_a_role_and_no_name_that_it_could_serve_under() {
    let pki = Namespace::new(Memory::default(), "pki/");
    let template = Template::User { role: "operator" };
    let made =
        pki.ensure(&desired("alice", template, Mode::External([7; 32])), noon()).await.unwrap();
    assert_eq!(Facts::read(&made.der).unwrap().unit.as_deref(), Some("operator"));
    let (_, certificate) = X509Certificate::from_der(&made.der).unwrap();
    assert!(certificate.subject_alternative_name().unwrap().is_none());
}

fn kubernetes_authority() -> Arc<Certificate> {
    Arc::new(Certificate {
        issuer: Issuer::Itself,
        name: "kubernetes".to_owned(),
        template: Template::KubernetesAuthority,
        mode: Mode::Managed,
    })
}

fn of_kubernetes(name: &str, template: Template) -> Certificate {
    let issuer = Issuer::Authority(kubernetes_authority());
    Certificate { issuer, name: name.to_owned(), template, mode: Mode::External([7; 32]) }
}

fn subject(user: &str, group: Option<&str>) -> KubernetesSubject {
    KubernetesSubject { user: user.to_owned(), group: group.map(str::to_owned) }
}

#[tokio::test]
async fn a_client_of_kubernetes_has_the_user_and_the_group_of_its_template() {
    let pki = Namespace::new(Memory::default(), "");
    let kubelet = subject("system:node:a", Some("system:nodes"));
    let template = Template::KubernetesClient { subject: kubelet };
    let made = pki.ensure(&of_kubernetes("kubelet-a", template), noon()).await.unwrap();
    let (_, certificate) = X509Certificate::from_der(&made.der).unwrap();
    assert_eq!(certificate.subject().to_string(), "O=system:nodes, CN=system:node:a");
    assert_eq!(certificate.issuer().to_string(), "CN=polis-kubernetes");
    let usage = certificate.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.client_auth && !usage.server_auth && !certificate.is_ca());
    assert_eq!(Facts::read(&made.der).unwrap().not_after, noon() + DAY * 3);
    assert!(verifies(&made.der, &made.issuer_der));
}

#[tokio::test]
async fn a_certificate_of_kubernetes_is_revoked_by_its_name_although_it_is_not_its_subject() {
    let node = crate::identity::NodeId::from_public_key(&[7; 32]);
    for purpose in WorkerPurpose::ALL {
        let pki = Namespace::new(Memory::default(), "");
        // Each has a key of its own, and some have one subject.
        let wish = |of: WorkerPurpose, key: u8| of.certificate(node, None, [key; 32]);
        let mut others = Vec::new();
        for (other, key) in WorkerPurpose::ALL.into_iter().zip(10..) {
            if other != purpose {
                others.push(pki.ensure(&wish(other, key), noon()).await.unwrap());
            }
        }
        let first = pki.ensure(&wish(purpose, 1), noon()).await.unwrap();
        let renewed = pki.renew(&wish(purpose, 1), noon() + DAY * 2).await.unwrap().unwrap();
        let name = wish(purpose, 1).name;
        let revoke = async || {
            let (authority, reason) = (kubernetes_authority(), Reason::Unspecified);
            pki.revoke(&authority, &name, reason, noon() + DAY * 2).await.unwrap()
        };
        assert_eq!(revoke().await, 2, "{purpose:?}");
        assert_eq!(revoke().await, 0, "{purpose:?}");
        let crl = pki.crl(&kubernetes_authority()).await.unwrap().unwrap();
        let is_revoked = |issued: &Issued| crl.revokes(&Facts::read(&issued.der).unwrap().serial);
        assert!(is_revoked(&first) && is_revoked(&renewed), "{purpose:?}");
        assert!(!others.iter().any(is_revoked), "{purpose:?}");
        let anew = pki.ensure(&wish(purpose, 2), noon() + DAY * 2).await.unwrap();
        assert!(!is_revoked(&anew), "{purpose:?}");
    }
}

#[tokio::test]
async fn a_server_of_kubernetes_speaks_for_its_hosts_and_is_no_client() {
    let pki = Namespace::new(Memory::default(), "");
    let template = Template::KubernetesServer {
        subject: subject("kube-apiserver", None),
        hosts: vec![Host::Name("kubernetes".to_owned()), Host::Address([10, 224, 0, 1].into())],
    };
    let made = pki.ensure(&of_kubernetes("apiserver-a", template), noon()).await.unwrap();
    let (_, certificate) = X509Certificate::from_der(&made.der).unwrap();
    assert_eq!(certificate.subject().to_string(), "CN=kube-apiserver");
    let names = &certificate.subject_alternative_name().unwrap().unwrap().value.general_names;
    let [GeneralName::DNSName("kubernetes"), GeneralName::IPAddress([10, 224, 0, 1])] =
        names.as_slice()
    else {
        panic!("{names:?}")
    };
    let usage = certificate.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.server_auth && !usage.client_auth);
    assert_eq!(Facts::read(&made.der).unwrap().not_after, noon() + DAY * 3);
}

#[tokio::test]
async fn a_server_of_kubernetes_has_another_certificate_once_it_lacks_a_host() {
    let node = crate::identity::NodeId::from_public_key(&[7; 32]);
    let addresses: [std::net::IpAddr; 2] = [[192, 0, 2, 7].into(), "2001:db8::7".parse().unwrap()];
    let wish = |at| WorkerPurpose::KubeletServer.certificate(node, at, [1; 32]);
    let pki = Namespace::new(Memory::default(), "");
    let first = pki.ensure(&wish(None), noon()).await.unwrap();
    let mut last = first.clone();
    for address in addresses {
        assert!(pki.lacks_host(&wish(Some(address))).await.unwrap());
        let next = pki.renew(&wish(Some(address)), noon()).await.unwrap().unwrap();
        let expected = [Host::Name(node.to_string()), Host::Address(address)];
        assert_eq!(super::parse::hosts(&next.der), expected);
        assert!(!pki.lacks_host(&wish(Some(address))).await.unwrap());
        assert!(pki.renew(&wish(Some(address)), noon()).await.unwrap().is_none());
        last = next;
    }
    // A host too many stays until the certificate ends.
    assert!(pki.has_former_host(&wish(None)).await.unwrap());
    assert!(!pki.has_former_host(&wish(Some(addresses[1]))).await.unwrap());
    assert!(pki.renew(&wish(None), noon()).await.unwrap().is_none());
    let due = pki.renew(&wish(None), noon() + DAY * 2).await.unwrap().unwrap();
    assert_eq!(super::parse::hosts(&due.der), [Host::Name(node.to_string())]);
    let keys = [&first, &last, &due].map(|issued| Facts::read(&issued.der).unwrap().public_key);
    assert_eq!(keys, [[1; 32]; 3]);
    // A client has none, and an unknown certificate lacks none.
    let client = WorkerPurpose::Kubelet.certificate(node, Some(addresses[0]), [2; 32]);
    assert!(!pki.lacks_host(&client).await.unwrap());
    assert!(!pki.has_former_host(&client).await.unwrap());
}

#[tokio::test]
async fn what_has_ended_leaves_the_list_and_later_the_crl() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    // More than fit into one transaction of etcd.
    for _ in 0..150 {
        pki.ensure(&desired("old", Template::Node, Mode::Ephemeral), noon()).await.unwrap();
    }
    pki.ensure(&desired("gone", Template::Node, Mode::Ephemeral), noon()).await.unwrap();
    pki.revoke(&authority(), "gone", Reason::Left, noon()).await.unwrap();
    let later = noon() + DAY * 60;
    for name in ["new", "valid"] {
        pki.ensure(&desired(name, Template::Node, Mode::Ephemeral), later).await.unwrap();
    }
    pki.revoke(&authority(), "valid", Reason::KeyCompromise, later).await.unwrap();
    let listed = || {
        let listed = memory.contents().into_iter().filter(|(key, _)| key.contains("/issued/"));
        let mut names: Vec<_> = listed.map(|(_, der)| Facts::read(&der).unwrap().subject).collect();
        names.sort();
        names
    };
    let crl = || async {
        let crl = pki.crl(&authority()).await.unwrap().unwrap();
        (crl.number, crl.revoked.iter().map(|entry| entry.reason).collect::<Vec<_>>())
    };

    assert_eq!(pki.prune(&authority(), noon() + DAY * 91).await.unwrap(), 0);
    assert_eq!(crl().await, (3, vec![Reason::Left, Reason::KeyCompromise]));
    // A CRL from after the end of a revoked certificate names it once more.
    assert_eq!(pki.prune(&authority(), noon() + DAY * 92).await.unwrap(), 150);
    assert_eq!(crl().await, (4, vec![Reason::Left, Reason::KeyCompromise]));
    assert_eq!(listed(), ["gone", "new", "valid"]);
    assert_eq!(pki.prune(&authority(), noon() + DAY * 92).await.unwrap(), 1);
    assert_eq!(crl().await, (5, vec![Reason::KeyCompromise]));
    assert_eq!(listed(), ["new", "valid"]);
    // Nothing has ended since: no CRL is signed.
    assert_eq!(pki.prune(&authority(), noon() + DAY * 92).await.unwrap(), 0);
    assert_eq!(crl().await, (5, vec![Reason::KeyCompromise]));
    // Without the authority there is nothing to shorten.
    assert_eq!(pki.prune(&kubernetes_authority(), later).await.unwrap(), 0);
}

#[tokio::test]
async fn a_certificate_that_is_revoked_at_the_moment_of_its_pruning_keeps_its_known_end() {
    let later = noon() + DAY * 92;
    for prune_is_first in [true, false] {
        let memory = Memory::default();
        let pki = Namespace::new(memory.clone(), "");
        pki.ensure(&desired("gone", Template::Node, Mode::Ephemeral), noon()).await.unwrap();
        let both = Arc::new(tokio::sync::Barrier::new(2));
        let paused = || Namespace::new(memory.pausing(Arc::clone(&both)), "");
        let (one, two) = (paused(), paused());
        let revoke = one.revoke(&REVOKER, "gone", Reason::Left, later);
        let prune = two.prune(&REVOKER, later);
        // The last one at the barrier goes on first.
        let (revoked, pruned) = if prune_is_first {
            tokio::join!(revoke, prune)
        } else {
            let (pruned, revoked) = tokio::join!(prune, revoke);
            (revoked, pruned)
        };
        assert!(revoked.is_ok() != pruned.is_ok(), "one of the two: {revoked:?} {pruned:?}");
        let listed = memory.contents().into_iter().filter(|(key, _)| key.contains("/issued/"));
        let listed: Vec<_> = listed.map(|(_, der)| Facts::read(&der).unwrap().serial).collect();
        let crl = pki.crl(&authority()).await.unwrap().unwrap();
        for entry in &crl.revoked {
            assert!(listed.contains(&entry.serial), "an entry without a known end");
        }
    }
}

#[tokio::test]
async fn an_entry_of_the_crl_without_a_known_end_stays() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    pki.ensure(&desired("gone", Template::Node, Mode::Ephemeral), noon()).await.unwrap();
    pki.revoke(&authority(), "gone", Reason::Left, noon()).await.unwrap();
    let listed = memory.contents().into_keys().find(|key| key.contains("/issued/")).unwrap();
    assert!(memory.commit(Vec::new(), vec![Write::Delete(listed)]).await.unwrap());
    for _ in 0..2 {
        assert_eq!(pki.prune(&authority(), noon() + DAY * 400).await.unwrap(), 0);
    }
    assert_eq!(pki.crl(&authority()).await.unwrap().unwrap().revoked.len(), 1);
}
