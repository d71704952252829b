//! Fuzz targets of update bundles: as they arrive, and with a manifest that its key signed.

use ed25519_dalek::{Signer as _, SigningKey};
use polis_fuzz::{Accepted, Target};
use semver::Version;

use crate::{Bundle, MAGIC, Manifest, Part, signed, write};

const KERNEL: &[u8] = &[7; 300];
const SYSTEM: &[u8] = &[9; 500];
/// A buffer of one piece of a part, and room.
const MEMORY: usize = (1 << 20) + (256 << 10);

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
        from: "1.0.0-rc.1".parse().unwrap(),
        etcd: Version::new(3, 5, 16),
        kubernetes: Some(Version::new(1, 37, 2)),
        kernel: Part::of(KERNEL).unwrap(),
        system: Part::of(SYSTEM).unwrap(),
    }
}

/// Whether a bundle is whole for its own signer.
fn read(bytes: &[u8]) -> Option<Manifest> {
    let (mut kernel, mut system) = (Vec::new(), Vec::new());
    let bundle = Bundle::open(bytes, None).ok()?;
    let manifest = bundle.parts([&mut kernel, &mut system], &mut |_bytes| ()).ok()?;
    assert_eq!(
        [kernel.len() as u64, system.len() as u64],
        [manifest.kernel.size, manifest.system.size]
    );
    Some(manifest)
}

#[test]
fn bundles() {
    let mut bundle = Vec::new();
    write(&mut bundle, &manifest(), &key(), [&mut &*KERNEL, &mut &*SYSTEM]).unwrap();
    Target::new("bundle.file").samples([bundle.clone()]).memory(MEMORY).run(|input| {
        let accepted = read(input).is_some();
        assert_eq!(accepted, input == bundle, "one file has the signature of this key");
        accepted.into()
    });
}

#[test]
fn signed_manifests() {
    let sample = manifest().encode().unwrap();
    let text = String::from_utf8(sample.clone()).unwrap();
    // Of a later version.
    let further = text.replace(",\"", ",\"more\":[{\"a\":\"}\\\"\"},7],\"").into_bytes();
    Target::new("bundle.manifest").samples([sample, further]).memory(MEMORY).run(|input| {
        let signature = key().sign(&signed(input)).to_bytes();
        let length = u32::try_from(input.len()).unwrap().to_le_bytes();
        let public = key().verifying_key().to_bytes();
        let bytes = [&MAGIC[..], &public, &signature, &length, input, KERNEL, SYSTEM].concat();
        let Ok(bundle) = Bundle::open(&*bytes, None) else { return Accepted::No };
        let again = bundle.manifest().encode().unwrap();
        assert_eq!(Manifest::parse(&again).as_ref(), Ok(bundle.manifest()));
        let _changed = read(&bytes);
        Accepted::Yes
    });
}

#[test]
fn kernel_images() {
    let sections: [(&str, &[u8]); 3] = [(".osrel", b"os"), (".linux", &[7; 64]), (".sbat", b"s")];
    let sample = crate::measure::tests::image(&sections);
    Target::new("bundle.kernel_image").samples([sample]).run(|input| {
        let Ok(registers) = crate::registers(input) else { return Accepted::No };
        assert!(registers.keys().eq(&[11, 12, 13]));
        Accepted::Yes
    });
}
