//! The rotation of an authority, against a map.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

use super::store::memory::Memory;
use super::tests::{authority, noon, peer};
use super::*;

/// A namespace with a certificate of its first authority.
async fn begun() -> (Namespace<Memory>, Memory, Issued) {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    let first = pki.ensure(&peer("a", Mode::External([7; 32])), noon()).await.unwrap();
    (pki, memory, first)
}

async fn known(pki: &Namespace<Memory>) -> Authorities {
    pki.authorities(&authority()).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_rotation_lets_another_authority_sign_and_trusts_the_old_one_until_it_is_concluded() {
    let (pki, memory, first) = begun().await;
    assert_eq!(known(&pki).await, Authorities::sole(first.issuer_der.clone()));
    let old_key = memory.contents()["authorities/etcd-peers/key"].clone();
    assert!(pki.rotate(&authority(), 1, noon()).await.unwrap());

    let both = known(&pki).await;
    assert_eq!(both.leaving.as_ref(), Some(&first.issuer_der));
    assert!(both.succeed(&first.issuer_der) && both.succeed(&both.signing));
    let old = Authorities::sole(first.issuer_der.clone());
    assert!(!old.succeed(&both.signing), "what came later leads to nothing earlier");
    let kept = memory.contents();
    assert!(!kept.values().any(|value| *value == old_key), "the old key is deleted");

    let renewed = pki.renew(&peer("a", Mode::External([7; 32])), noon()).await.unwrap().unwrap();
    assert!(both.signed(&renewed.der) && !both.signed(&first.der));
    assert_eq!(Facts::read(&renewed.der).unwrap().public_key, [7; 32]);
    let again = pki.renew(&peer("a", Mode::External([7; 32])), noon()).await.unwrap();
    assert!(again.is_none(), "once");

    assert!(pki.conclude(&authority(), Pin::None).await.unwrap());
    let after = known(&pki).await;
    assert_eq!((after.leaving.as_ref(), &after.former), (None, &vec![first.issuer_der.clone()]));
    assert!(!after.trusted().any(|der| der == first.issuer_der));
    assert!(after.contains(&first.issuer_der) && after.succeed(&first.issuer_der));
}

#[tokio::test]
async fn a_rotation_is_begun_and_concluded_once() {
    let (pki, _memory, _first) = begun().await;
    assert!(!pki.conclude(&authority(), Pin::None).await.unwrap(), "nothing was begun");
    assert!(pki.rotate(&authority(), 1, noon()).await.unwrap());
    let both = known(&pki).await;
    assert!(!pki.rotate(&authority(), 1, noon()).await.unwrap());
    assert_eq!(known(&pki).await, both);
    assert!(pki.conclude(&authority(), Pin::None).await.unwrap());
    assert!(!pki.conclude(&authority(), Pin::None).await.unwrap());
    assert!(!pki.rotate(&authority(), 1, noon()).await.unwrap(), "it is over");
}

#[tokio::test]
async fn of_two_rotations_at_once_one_takes_place() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    pki.ensure(&authority(), noon()).await.unwrap();
    let both = Arc::new(tokio::sync::Barrier::new(2));
    let paused = || Namespace::new(memory.pausing(Arc::clone(&both)), "");
    let (one, two) = (paused(), paused());
    let (a, b) = (authority(), authority());
    let (one, two) = tokio::join!(one.rotate(&a, 1, noon()), two.rotate(&b, 1, noon()));
    let begun = [&one, &two].iter().filter(|done| matches!(done, Ok(true))).count();
    let lost = [&one, &two].iter().filter(|done| matches!(done, Err(Error::Lost { .. }))).count();
    assert_eq!((begun, lost), (1, 1), "{one:?} {two:?}");
    assert_eq!(known(&pki).await.rotations, 1);
}

#[tokio::test]
async fn revocations_outlive_a_rotation() {
    let (pki, _memory, first) = begun().await;
    pki.revoke(&authority(), "a", Reason::Left, noon()).await.unwrap();
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    let serial = |der: &[u8]| Facts::read(der).unwrap().serial;
    let crl = pki.crl(&authority()).await.unwrap().unwrap();
    assert!(crl.revokes(&serial(&first.der)));
    assert_eq!(crl.number, 3);
    // Also a certificate that a former authority signed and that was not renewed.
    let other = pki.ensure(&peer("b", Mode::External([8; 32])), noon()).await.unwrap();
    pki.rotate(&authority(), 2, noon()).await.unwrap();
    pki.revoke(&authority(), "b", Reason::Left, noon()).await.unwrap();
    assert!(pki.crl(&authority()).await.unwrap().unwrap().revokes(&serial(&other.der)));
}

/// A store whose authority is rotated between the first look into it and the second one.
struct Rotating {
    memory: Memory,
    looks: AtomicU32,
}

impl Rotating {
    async fn look(&self) {
        if self.looks.fetch_add(1, Ordering::Relaxed) == 1 {
            let pki = Namespace::new(self.memory.clone(), "");
            assert!(pki.rotate(&authority(), 1, noon()).await.unwrap());
        }
    }
}

impl Store for Rotating {
    async fn read<const N: usize>(&self, keys: [&str; N]) -> anyhow::Result<[Option<Entry>; N]> {
        self.look().await;
        self.memory.read(keys).await
    }

    async fn list(&self, prefix: &str) -> anyhow::Result<Vec<(String, Entry)>> {
        self.look().await;
        self.memory.list(prefix).await
    }

    async fn commit(&self, guards: Vec<Guard>, writes: Vec<Write>) -> anyhow::Result<bool> {
        self.memory.commit(guards, writes).await
    }
}

#[tokio::test]
async fn a_revocation_at_the_moment_of_a_rotation_is_signed_by_the_new_authority() {
    let (pki, memory, first) = begun().await;
    let rotating = Namespace::new(Rotating { memory, looks: AtomicU32::new(0) }, "");
    rotating.revoke_surely(&authority(), "a", Reason::Left, noon()).await.unwrap();
    let known = known(&pki).await;
    assert_eq!(known.rotations, 1);
    let crl = pki.crl(&authority()).await.unwrap().unwrap();
    assert!(crl.revokes(&Facts::read(&first.der).unwrap().serial));
    let (_, list) = CertificateRevocationList::from_der(&crl.der).unwrap();
    let (_, signing) = X509Certificate::from_der(&known.signing).unwrap();
    assert!(list.verify_signature(signing.public_key()).is_ok());
}

#[tokio::test]
async fn bridges_lead_over_five_rotations() {
    let (pki, _memory, first) = begun().await;
    for rotation in 1..=5 {
        pki.rotate(&authority(), rotation, noon()).await.unwrap();
        pki.conclude(&authority(), Pin::None).await.unwrap();
    }
    let last = known(&pki).await;
    assert_eq!((last.former.len(), last.bridges.len()), (5, 5));
    assert!(last.succeed(&first.issuer_der));
    assert_eq!(Authorities::from_record(&last.to_record()), Some(last.clone()));
    pki.rotate(&authority(), 6, noon()).await.unwrap();
    pki.conclude(&authority(), Pin::None).await.unwrap();
    pki.rotate(&authority(), 7, noon()).await.unwrap();
    let later = known(&pki).await;
    assert!(!later.contains(&first.issuer_der), "there is an end");
    assert!(Authorities::from_record(&later.to_record()).is_some());
}

#[tokio::test]
async fn an_authority_that_is_younger_than_the_cluster_takes_part_in_each_rotation_once() {
    let (pki, _memory, _first) = begun().await;
    assert!(pki.rotate(&authority(), 7, noon()).await.unwrap());
    assert!(!pki.rotate(&authority(), 7, noon()).await.unwrap());
    pki.conclude(&authority(), Pin::None).await.unwrap();
    assert!(!pki.rotate(&authority(), 7, noon()).await.unwrap());
    assert!(pki.rotate(&authority(), 8, noon()).await.unwrap());
    assert_eq!(known(&pki).await.rotations, 2);
}

#[tokio::test]
async fn a_holder_that_has_not_followed_is_found_by_its_name() {
    let (pki, _memory, _first) = begun().await;
    let name = |kept: &Kept| kept.name.clone();
    let kept = pki.kept_by_holders(&authority(), noon()).await.unwrap();
    assert_eq!(kept.iter().map(name).collect::<Vec<_>>(), ["a"]);
    assert!(kept[0].issued.is_some());
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    assert_eq!(pki.kept_by_holders(&authority(), noon()).await.unwrap()[0].issued, None);
    pki.ensure(&peer("a", Mode::External([7; 32])), noon()).await.unwrap();
    assert!(pki.kept_by_holders(&authority(), noon()).await.unwrap()[0].issued.is_some());
    let ended = noon() + std::time::Duration::from_secs(100 * 365 * 24 * 60 * 60);
    assert_eq!(pki.kept_by_holders(&authority(), ended).await.unwrap(), []);
}

#[tokio::test]
async fn only_certificates_are_authorities() {
    let (pki, _memory, _first) = begun().await;
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    let known = known(&pki).await;
    let noise = || b"noise".to_vec();
    for bad in [
        Authorities { signing: noise(), ..known.clone() },
        Authorities { leaving: Some(noise()), ..known.clone() },
        Authorities { former: vec![noise()], ..known.clone() },
        Authorities { bridges: vec![noise()], ..known.clone() },
        Authorities { pinned: vec![noise()], ..known.clone() },
        Authorities { former: vec![known.signing.clone(); 6], ..known.clone() },
    ] {
        assert_eq!(Authorities::from_record(&bad.to_record()), None, "{bad:?}");
    }
    assert_eq!(Authorities::from_record(b""), None);
}

#[tokio::test]
async fn only_authorities_that_follow_replace_the_known_ones() {
    let (pki, _memory, first) = begun().await;
    let (other, ..) = begun().await;
    let sole = Authorities::sole(first.issuer_der.clone());
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    let both = known(&pki).await;
    pki.conclude(&authority(), Pin::None).await.unwrap();
    let after = known(&pki).await;
    pki.rotate(&authority(), 2, noon()).await.unwrap();
    pki.conclude(&authority(), Pin::None).await.unwrap();
    let later = known(&pki).await;
    for (new, old) in [
        (&sole, &sole),
        (&both, &sole),
        (&after, &sole),
        (&after, &both),
        (&later, &sole),
        (&later, &both),
    ] {
        assert!(new.follow(old), "{new:?} after {old:?}");
    }
    for (new, old) in [(&sole, &both), (&both, &after), (&both, &later), (&after, &later)] {
        assert!(!new.follow(old), "{new:?} after {old:?}");
    }
    // The message of a thief of the first key.
    let foreign = known(&other).await.signing;
    for bad in [
        Authorities { leaving: Some(foreign.clone()), ..sole.clone() },
        Authorities { leaving: Some(foreign.clone()), ..both.clone() },
        Authorities { rotations: u64::MAX, ..sole.clone() },
        Authorities { rotations: u64::MAX, ..both.clone() },
        Authorities { signing: foreign.clone(), ..both.clone() },
        Authorities { former: vec![foreign], ..sole.clone() },
    ] {
        assert!(!bad.follow(&sole), "{bad:?}");
    }
}

#[tokio::test]
async fn only_certificates_of_holders_that_were_away_are_pinned() {
    let (pki, _memory, away) = begun().await;
    let followed = BTreeSet::from(["b".to_owned()]);
    let present = || peer("b", Mode::External([8; 32]));
    let former = pki.ensure(&present(), noon()).await.unwrap();
    let gone = pki.ensure(&peer("c", Mode::External([9; 32])), noon()).await.unwrap();
    pki.revoke(&authority(), "c", Reason::Left, noon()).await.unwrap();
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    pki.renew(&present(), noon()).await.unwrap().unwrap();
    pki.conclude(&authority(), Pin::AllBut(&followed)).await.unwrap();
    assert_eq!(known(&pki).await.pinned, std::slice::from_ref(&away.der));
    assert!(away.der != former.der && away.der != gone.der);
    // Away again.
    pki.rotate(&authority(), 2, noon()).await.unwrap();
    assert_eq!(known(&pki).await.pinned, std::slice::from_ref(&away.der));
    pki.renew(&present(), noon()).await.unwrap().unwrap();
    pki.conclude(&authority(), Pin::AllBut(&followed)).await.unwrap();
    assert_eq!(known(&pki).await.pinned, [away.der]);
}

#[tokio::test]
async fn a_certificate_that_its_holder_may_not_have_written_does_not_replace_its_former_one() {
    let (pki, _memory, first) = begun().await;
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    // The holder loses its power right after etcd has its new certificate.
    let wish = peer("a", Mode::External([7; 32]));
    let second = pki.renew(&wish, noon()).await.unwrap().unwrap();
    pki.conclude(&authority(), Pin::AllBut(&BTreeSet::new())).await.unwrap();
    assert_eq!(known(&pki).await.pinned, std::slice::from_ref(&first.der));
    // It is off during the next rotation, too: its disk has one of the two.
    pki.rotate(&authority(), 2, noon()).await.unwrap();
    pki.conclude(&authority(), Pin::AllBut(&BTreeSet::new())).await.unwrap();
    let pinned: BTreeSet<_> = known(&pki).await.pinned.into_iter().collect();
    assert_eq!(pinned, BTreeSet::from([first.der, second.der]));
}
