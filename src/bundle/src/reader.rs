//! Reading a bundle, front to back, as if an enemy had written it.

use std::io::{self, Read, Write};

use ed25519_dalek::{Signature, VerifyingKey};
use sha2::{Digest as _, Sha256};

use crate::{
    KEY, LENGTH, MAGIC, MANIFEST_MAX, SIGNATURE,
    manifest::Manifest,
    refusal::{PartName, Refusal},
    signed,
};

/// How much of a part is read at a time.
const CHUNK: usize = 1 << 20;

/// Why a bundle could not be read to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It breaks a rule.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It cannot be read.
    #[error("cannot read the bundle")]
    Read(#[source] io::Error),
    /// A part cannot be stored.
    #[error("cannot write its {part}")]
    Write {
        /// The part.
        part: PartName,
        /// The error of the place.
        source: io::Error,
    },
}

/// A bundle whose manifest is signed, and whose parts are still to be read.
#[derive(Debug)]
pub struct Bundle<R> {
    reader: Counted<R>,
    head: Vec<u8>,
    signer: VerifyingKey,
    manifest: Manifest,
}

impl<R: Read> Bundle<R> {
    /// Reads the beginning of a bundle. Without an expected signer, the bundle is only known
    /// to be as its own signer left it.
    ///
    /// # Errors
    ///
    /// It breaks a rule, or cannot be read.
    pub fn open(reader: R, expected: Option<&VerifyingKey>) -> Result<Self, Error> {
        let mut reader = Counted { reader, count: 0 };
        let magic: [u8; MAGIC.len()] = reader.array()?;
        if magic[..MAGIC.len() - 1] != MAGIC[..MAGIC.len() - 1] {
            return Err(Refusal::Foreign.into());
        }
        if magic != MAGIC {
            return Err(Refusal::Format { format: magic[MAGIC.len() - 1] }.into());
        }
        let key: [u8; KEY] = reader.array()?;
        let signature: [u8; SIGNATURE] = reader.array()?;
        let length_bytes = reader.array::<LENGTH>()?;
        let length = u32::from_le_bytes(length_bytes);
        let length = usize::try_from(length).ok().filter(|length| *length <= MANIFEST_MAX);
        // The length is not believed yet; a long one is refused as what it is, changed.
        let mut manifest = vec![0; length.ok_or(Refusal::Signature)?];
        reader.fill(&mut manifest)?;
        let head = [&magic[..], &key, &signature, &length_bytes, &manifest].concat();
        if let Some(expected) = expected.filter(|expected| *expected.as_bytes() != key) {
            let (found, expected) = (digits(&key), digits(expected.as_bytes()));
            return Err(Refusal::Signer { found, expected }.into());
        }
        let signer = VerifyingKey::from_bytes(&key).map_err(|_not_a_point| Refusal::Signature)?;
        signer
            .verify_strict(&signed(&manifest), &Signature::from_bytes(&signature))
            .map_err(|_forged| Refusal::Signature)?;
        let manifest = Manifest::parse(&manifest)?;
        Ok(Self { reader, head, signer, manifest })
    }

    /// Its bytes before the parts, as they were read. The hashes of the parts are in them, so
    /// two bundles with the same head are the same.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// The manifest of the bundle.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The key that signed it.
    pub fn signer(&self) -> &VerifyingKey {
        &self.signer
    }

    /// Begins the parts with the bytes of `there`, which were received before, and continues
    /// with those of the reader.
    pub fn resumed<T: Read>(self, there: T) -> Bundle<io::Chain<T, R>> {
        let Self { reader: Counted { reader, count }, head, signer, manifest } = self;
        Bundle { reader: Counted { reader: there.chain(reader), count }, head, signer, manifest }
    }

    /// Reads the parts to their ends, and writes them to their places. The written
    /// bytes count only if this succeeds. `progress` gets the bytes of each piece.
    ///
    /// # Errors
    ///
    /// A part is not what was signed, the bundle is too short or too long, or something
    /// cannot be read or written.
    pub fn parts(
        mut self,
        places: [&mut dyn Write; 2],
        progress: &mut dyn FnMut(u64),
    ) -> Result<Manifest, Error> {
        let mut chunk = vec![0; CHUNK];
        for ((part, described), place) in self.manifest.parts().into_iter().zip(places) {
            let mut hash = Sha256::new();
            let mut left = described.size;
            while left > 0 {
                let piece = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
                let piece = &mut chunk[..piece];
                self.reader.fill(piece)?;
                hash.update(&*piece);
                place.write_all(piece).map_err(|source| Error::Write { part, source })?;
                left -= piece.len() as u64;
                progress(piece.len() as u64);
            }
            if digits(&hash.finalize()) != described.sha256 {
                return Err(Refusal::Changed { part }.into());
            }
        }
        self.reader.end()?;
        Ok(self.manifest)
    }
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A reader that knows how far it is.
#[derive(Debug)]
struct Counted<R> {
    reader: R,
    count: u64,
}

impl<R: Read> Counted<R> {
    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while done < buffer.len() {
            match self.reader.read(&mut buffer[done..]) {
                Ok(0) => return Err(Refusal::Short { has: self.count }.into()),
                Ok(count) => {
                    done += count;
                    self.count += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Read(error)),
            }
        }
        Ok(())
    }

    fn array<const SIZE: usize>(&mut self) -> Result<[u8; SIZE], Error> {
        let mut array = [0; SIZE];
        self.fill(&mut array)?;
        Ok(array)
    }

    /// Checks that nothing follows.
    fn end(&mut self) -> Result<(), Error> {
        let end = self.count;
        match self.fill(&mut [0]) {
            Err(Error::Refused(Refusal::Short { .. })) => Ok(()),
            Ok(()) => Err(Refusal::Long { end }.into()),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::{Signer as _, SigningKey};
    use proptest::prelude::*;
    use semver::Version;

    use super::*;
    use crate::{
        EtcdRefusal, EtcdTarget, KubernetesProgram, KubernetesRefusal, KubernetesTarget, Part,
        Target, write,
    };

    const KERNEL: &[u8] = &[7; 3000];
    const SYSTEM: &[u8] = &[9; 5000];

    fn key() -> SigningKey {
        SigningKey::from_bytes(&[1; 32])
    }

    fn manifest() -> Manifest {
        Manifest {
            version: Version::new(1, 2, 0),
            security_level: 3,
            architecture: "x86_64".to_owned(),
            variant: "full".to_owned(),
            image: "0123456789abcdef".to_owned(),
            from: Version::new(1, 0, 0),
            etcd: Version::new(3, 6, 4),
            kubernetes: Some(Version::new(1, 38, 0)),
            kernel: Part::of(KERNEL).unwrap(),
            system: Part::of(SYSTEM).unwrap(),
        }
    }

    fn bundle_of(manifest: &Manifest) -> Vec<u8> {
        let mut bundle = Vec::new();
        write(&mut bundle, manifest, &key(), [&mut &*KERNEL, &mut &*SYSTEM]).unwrap();
        bundle
    }

    fn bundle() -> Vec<u8> {
        bundle_of(&manifest())
    }

    /// Reads a bundle to its end, for the owner of the key.
    fn read(bundle: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Refusal> {
        let refused = |error| match error {
            Error::Refused(refusal) => refusal,
            other => panic!("{other}"),
        };
        let (mut kernel, mut system) = (Vec::new(), Vec::new());
        Bundle::open(bundle, Some(&key().verifying_key()))
            .and_then(|bundle| bundle.parts([&mut kernel, &mut system], &mut |_bytes| ()))
            .map_err(refused)?;
        Ok((kernel, system))
    }

    #[test]
    fn what_was_written_is_read_back_and_the_same_parts_give_the_same_bytes() {
        assert_eq!(read(&bundle()), Ok((KERNEL.to_vec(), SYSTEM.to_vec())));
        assert!(bundle() == bundle());
        let bundle = bundle();
        let open = Bundle::open(&*bundle, None).unwrap();
        assert_eq!((open.manifest(), open.signer()), (&manifest(), &key().verifying_key()));
    }

    #[test]
    fn a_bundle_in_two_pieces_is_read_as_one_and_a_wrong_first_piece_is_refused() {
        let bundle = bundle();
        let head = Bundle::open(&*bundle, None).unwrap().head().to_vec();
        assert!(head == bundle[..bundle.len() - KERNEL.len() - SYSTEM.len()]);
        for at in [0, 1, KERNEL.len(), KERNEL.len() + 10, KERNEL.len() + SYSTEM.len()] {
            let (there, rest) = bundle[head.len()..].split_at(at);
            let read = |there: &[u8]| {
                let open = Bundle::open(head.chain(rest), None).unwrap().resumed(there);
                open.parts([&mut io::sink(), &mut io::sink()], &mut |_bytes| ())
            };
            assert_eq!(read(there).unwrap(), manifest(), "{at}");
            let mut wrong = there.to_vec();
            let Some(last) = wrong.last_mut() else { continue };
            *last ^= 1;
            let refused = read(&wrong).unwrap_err();
            assert!(matches!(refused, Error::Refused(Refusal::Changed { .. })), "{at}");
        }
    }

    #[test]
    fn a_bundle_that_is_cut_short_says_where() {
        let bundle = bundle();
        for length in (0..bundle.len()).step_by(37).chain([bundle.len() - 1]) {
            let has = length as u64;
            assert_eq!(read(&bundle[..length]), Err(Refusal::Short { has }), "{length} bytes");
        }
        let end = bundle.len() as u64;
        assert_eq!(read(&[&bundle[..], &[0]].concat()), Err(Refusal::Long { end }));
    }

    #[test]
    fn a_flipped_byte_names_the_part_that_it_is_in() {
        let bundle = bundle();
        let flipped = |at: usize| {
            let mut bundle = bundle.clone();
            bundle[at] ^= 1;
            read(&bundle).unwrap_err()
        };
        let (parts, end) = (bundle.len() - KERNEL.len() - SYSTEM.len(), bundle.len());
        assert_eq!(flipped(0), Refusal::Foreign);
        assert_eq!(flipped(15), Refusal::Format { format: 0 });
        assert!(matches!(flipped(20), Refusal::Signer { .. }));
        assert_eq!(flipped(16 + 32), Refusal::Signature);
        assert_eq!(flipped(16 + 32 + 63), Refusal::Signature);
        // A longer or shorter manifest is another one; a huge one is not waited for.
        assert_eq!(flipped(16 + 32 + 64), Refusal::Signature);
        assert_eq!(flipped(16 + 32 + 64 + 3), Refusal::Signature);
        for at in 16 + 32 + 64 + 4..parts {
            assert_eq!(flipped(at), Refusal::Signature, "byte {at} of the manifest");
        }
        for at in [parts, parts + 1500, parts + KERNEL.len() - 1] {
            assert_eq!(flipped(at), Refusal::Changed { part: PartName::Kernel });
        }
        for at in [parts + KERNEL.len(), end - 1] {
            assert_eq!(flipped(at), Refusal::Changed { part: PartName::System });
        }
    }

    #[test]
    fn a_bundle_of_another_signer_is_refused_by_both_keys() {
        let other = SigningKey::from_bytes(&[2; 32]);
        let mut bundle = Vec::new();
        write(&mut bundle, &manifest(), &other, [&mut &*KERNEL, &mut &*SYSTEM]).unwrap();
        let Err(Refusal::Signer { found, expected }) = read(&bundle) else { panic!() };
        assert_eq!(found, digits(other.verifying_key().as_bytes()));
        assert_eq!(expected, digits(key().verifying_key().as_bytes()));
        // The right key in the file does not help.
        bundle[16..48].copy_from_slice(key().verifying_key().as_bytes());
        assert_eq!(read(&bundle), Err(Refusal::Signature));
    }

    #[test]
    fn a_manifest_that_is_signed_still_has_to_keep_the_rules() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        let reason = |text: &str| match Manifest::parse(text.as_bytes()) {
            Err(Refusal::Manifest { reason }) => reason,
            other => panic!("{text}: {other:?}"),
        };
        for (from, to, why) in [
            ("{\"version\"", "{\"version\":\"1.2.0\",\"version\"", "duplicate field `version`"),
            ("{\"version\"", "{\"etcd\":\"3.6.4\",\"version\"", "duplicate field `etcd`"),
            ("{\"version\"", "{\"\\u0065tcd\":\"3.6.4\",\"version\"", "duplicate field `etcd`"),
            ("\"size\":3000", "\"size\":3000,\"size\":3000", "duplicate field `size`"),
            ("{\"version\"", "{\"more\":,\"version\"", "expected value"),
            (":3,\"arch", ":\"3\",\"arch", "invalid type: string \"3\", expected u32"),
            ("\"full\"", "7", "invalid type: integer `7`, expected a string"),
            ("\"full\"", "\"\"", "variant has 1 to 32"),
            ("\"full\"", "\"Full\"", "variant has 1 to 32"),
            ("\"x86_64\"", "\"x86\\u001b\"", "architecture has 1 to 32"),
            ("\"1.0.0\"", "\"1.3.0\"", "from is 1.3.0, after version 1.2.0"),
            ("\"1.2.0\"", "\"1.2.0+3\"", "version 1.2.0+3 has a `+`"),
            ("\"1.2.0\"", "\"1.2.0-rc9\"", "version 1.2.0-rc9 sorts in another way for loaders"),
            ("\"1.2.0\"", "\"1.2.0-9\"", "version 1.2.0-9 sorts in another way"),
            ("\"1.2.0\"", "\"1.2.0-rc.a\"", "as in 1.2.0-rc.9 for 1.2.0-rc9"),
            ("\"1.2.0\"", "\"1.2.0-rc-1\"", "version 1.2.0-rc-1 sorts in another way"),
            ("\"1.2.0\"", "\"1.2.0-RC.1\"", "version 1.2.0-RC.1 has a capital letter"),
            ("\"1.2.0\"", "\"1.2.0-rC\"", "version 1.2.0-rC has a capital letter"),
            ("\"1.0.0\"", "\"1.0\"", "unexpected end"),
            ("\"3.6.4\"", "\"3.6\"", "unexpected end"),
            ("\"etcd\":\"3.6.4\",", "", "missing field `etcd`"),
            ("\"1.38.0\"", "\"1.38\"", "unexpected end"),
            ("\"1.38.0\"", "null", "invalid type: null, expected semver version"),
            ("\"size\":3000", "\"size\":0", "kernel image is empty"),
            ("\"size\":3000", "\"size\":-1", "invalid value"),
            ("\"size\":3000", "\"size\":18446744073709551615", "kernel image has 1844674407370955"),
            ("\"size\":5000", "\"size\":1099511627777", "system has 1099511627777 bytes, more"),
            ("\"sha256\":\"", "\"sha256\":\"0", "is not 64 digits"),
        ] {
            let reason = reason(&text.replacen(from, to, 1));
            assert!(reason.contains(why), "{reason}");
        }
        for version in ["1.2.0-rc", "1.2.0-rc.9", "1.2.0-rc.10", "1.2.0-beta.2.1"] {
            let text = text.replacen("1.2.0", version, 1);
            let read = Manifest::parse(text.as_bytes()).unwrap();
            assert_eq!(read.version.to_string(), version);
        }
        let base = text.replacen("\"kubernetes\":\"1.38.0\",", "", 1);
        assert_eq!(Manifest::parse(base.as_bytes()).unwrap().kubernetes, None);
        let wrong = Manifest { variant: "a b".to_owned(), ..manifest() };
        let parts: [&mut dyn Read; 2] = [&mut &*KERNEL, &mut &*SYSTEM];
        assert!(write(&mut Vec::new(), &wrong, &key(), parts).is_err());
        // And so has a part that is not the one that was measured.
        let parts: [&mut dyn Read; 2] = [&mut &*KERNEL, &mut &*KERNEL];
        assert!(write(&mut Vec::new(), &manifest(), &key(), parts).is_err());
    }

    /// A bundle of any text that its key has signed as a manifest, in this format.
    fn signed_as(format: u8, manifest: &str) -> Vec<u8> {
        let mut signed = signed(manifest.as_bytes());
        signed[MAGIC.len() - 1] = format;
        let signature = key().sign(&signed).to_bytes();
        let (magic, rest) = signed.split_at(MAGIC.len());
        let public = key().verifying_key().to_bytes();
        [magic, &public, &signature, rest, KERNEL, SYSTEM].concat()
    }

    #[test]
    fn a_field_that_this_version_does_not_know_is_signed_and_ignored() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        for (from, to) in [
            ("{\"version\"", "{\"more\":1,\"version\""),
            ("\"etcd\"", "\"more\":[{\"etcd\":\"3.4.0\"},\"\\\\\",\"},\\\"{\"],\"etcd\""),
            ("\"size\":3000", "\"more\":null,\"size\":3000"),
            ("\"},\"system\"", "\",\"more\":{}},\"system\""),
            ("\"}}", "\"},\"more\":\"version\"}"),
        ] {
            let further = text.replacen(from, to, 1);
            assert_ne!(further, text);
            let bundle = signed_as(1, &further);
            assert_eq!(read(&bundle), Ok((KERNEL.to_vec(), SYSTEM.to_vec())), "{further}");
            let open = Bundle::open(&*bundle, None).unwrap();
            assert_eq!(open.manifest(), &manifest(), "{further}");
            assert!(open.head() == &bundle[..bundle.len() - KERNEL.len() - SYSTEM.len()]);
            // The signature covers ignored fields, too.
            let more = bundle.windows(4).position(|bytes| bytes == b"more").unwrap();
            let mut changed = bundle.clone();
            changed[more] ^= 1;
            assert_eq!(read(&changed), Err(Refusal::Signature), "{further}");
        }
    }

    #[test]
    fn order_blanks_and_escapes_do_not_change_what_a_signed_manifest_says() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        let hash = manifest().kernel.sha256;
        let object = format!("{{\"size\":3000,\"sha256\":\"{hash}\"}}");
        let turned = format!("{{\"sha256\":\"{hash}\",\"size\":3000}}");
        let array = format!("[3000,\"{hash}\"]");
        for (from, to) in [
            ("{\"version\"", "\n{ \"version\""),
            ("{\"version\"", "{\"more\":1, \"version\""),
            ("{\"version\"", "{\"v\\u0065rsion\""),
            ("\"full\"", "\"f\\u0075ll\""),
            (object.as_str(), turned.as_str()),
            (object.as_str(), array.as_str()),
        ] {
            let other = text.replacen(from, to, 1);
            assert_ne!(other, text);
            let bundle = signed_as(1, &other);
            assert_eq!(read(&bundle), Ok((KERNEL.to_vec(), SYSTEM.to_vec())), "{other}");
            let open = Bundle::open(&*bundle, None).unwrap();
            assert_eq!(open.manifest(), &manifest(), "{other}");
            // Others receive the bytes that were signed.
            assert!(open.head() == &bundle[..bundle.len() - KERNEL.len() - SYSTEM.len()]);
        }
    }

    #[test]
    fn a_bundle_that_a_reader_must_understand_has_another_format() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        assert!(signed_as(1, &text) == bundle());
        let mut later = signed_as(2, &text.replacen('{', "{\"more\":1,", 1));
        let refused = read(&later).unwrap_err();
        assert_eq!(refused, Refusal::Format { format: 2 });
        assert!(refused.help().contains("update to a version between"), "{}", refused.help());
        // The number is signed: no reader can be made to take it for a bundle of the first format.
        later[MAGIC.len() - 1] = 1;
        assert_eq!(read(&later), Err(Refusal::Signature));
    }

    #[test]
    fn a_machine_takes_what_suits_it_and_names_the_rule_that_is_broken() {
        let target = Target {
            version: Version::new(1, 1, 0),
            security_level: 3,
            architecture: "x86_64".to_owned(),
            variant: "full".to_owned(),
            etcd: EtcdTarget { runs: Some("3.6".parse().unwrap()), one_way: false },
            kubernetes: None,
            slot: 5000,
            esp: 3000,
        };
        let refused = |target: &Target| manifest().suits(target).unwrap_err();
        assert_eq!(manifest().suits(&target), Ok(()));
        let same = Target { version: Version::new(1, 2, 0), ..target.clone() };
        assert!(matches!(refused(&same), Refusal::Older { .. }));
        let arm = Target { architecture: "aarch64".to_owned(), ..target.clone() };
        assert!(matches!(refused(&arm), Refusal::Architecture { .. }));
        let base = Target { variant: "base".to_owned(), ..target.clone() };
        assert!(matches!(refused(&base), Refusal::Variant { .. }));
        let newer = Target { version: Version::new(1, 2, 1), ..target.clone() };
        assert!(matches!(refused(&newer), Refusal::Older { .. }));
        let safer = Target { security_level: 4, ..target.clone() };
        assert_eq!(refused(&safer), Refusal::Level { found: 3, running: 4 });
        let ancient = Target { version: Version::new(0, 9, 0), ..target.clone() };
        assert_eq!(refused(&ancient).help(), "update to version 1.0.0 first");
        let before = Some("3.5".parse().unwrap());
        let one_way =
            |one_way| Target { etcd: EtcdTarget { runs: before, one_way }, ..target.clone() };
        assert!(matches!(refused(&one_way(false)), Refusal::Etcd(EtcdRefusal::OneWay { .. })));
        assert_eq!(manifest().suits(&one_way(true)), Ok(()));
        let after = EtcdTarget { runs: Some("3.7".parse().unwrap()), one_way: true };
        let after = Target { etcd: after, ..target.clone() };
        assert!(matches!(refused(&after), Refusal::Etcd(EtcdRefusal::Older { .. })));
        let api_server = |runs| {
            let program = KubernetesProgram::ApiServer;
            let runs = Version::new(1, runs, 2);
            Target { kubernetes: Some(KubernetesTarget { runs, program }), ..target.clone() }
        };
        assert_eq!(manifest().suits(&api_server(37)), Ok(()));
        let skips = refused(&api_server(36));
        let is_skip = matches!(skips, Refusal::Kubernetes(KubernetesRefusal::SkipsMinor { .. }));
        assert!(is_skip, "{skips}");
        assert_eq!(skips.help(), "update to a version with Kubernetes 1.37 first");
        let without = Manifest { kubernetes: None, ..manifest() };
        assert_eq!(without.suits(&api_server(36)), Ok(()), "there is nothing to compare");
        let small = Target { slot: 4999, ..target.clone() };
        let system = Refusal::Large { part: PartName::System, size: 5000, room: 4999 };
        assert_eq!(refused(&small), system);
        let full = Target { esp: 2999, ..target };
        let kernel = Refusal::Large { part: PartName::Kernel, size: 3000, room: 2999 };
        assert_eq!(refused(&full), kernel);
    }

    #[test]
    fn a_place_that_is_full_is_named() {
        let bundle = bundle();
        let open = Bundle::open(&*bundle, None).unwrap();
        let mut full: &mut [u8] = &mut [0; 100];
        let outcome = open.parts([&mut io::sink(), &mut full], &mut |_bytes| ());
        assert!(matches!(outcome, Err(Error::Write { part: PartName::System, .. })));
    }

    proptest! {
        #[test]
        fn noise_is_refused_and_never_a_panic(
            at in 0..8500_usize, noise in prop::collection::vec(any::<u8>(), 1..40),
        ) {
            let right = bundle();
            let mut bundle = right.clone();
            let at = at.min(bundle.len() - 1);
            let end = (at + noise.len()).min(bundle.len());
            bundle[at..end].copy_from_slice(&noise[..end - at]);
            prop_assert!(bundle == right || read(&bundle).is_err());
        }

        #[test]
        fn any_manifest_is_read_or_refused(text in "\\PC{0,200}") {
            let _outcome = Manifest::parse(text.as_bytes());
        }
    }
}
