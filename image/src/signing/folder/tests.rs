use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    sync::OnceLock,
};

use polis_base::hex;
use zeroize::Zeroizing;

use super::files::{appear, private_file};
use super::{ImageSigner, Keys, Private, ensure_free, revoke, revoked, show};
use crate::signing::{Error, Passphrase, Purpose, authenticode};

/// Keys for all tests of this crate: making them takes a second.
pub(crate) fn keys() -> &'static Keys {
    static KEYS: OnceLock<Keys> = OnceLock::new();
    KEYS.get_or_init(|| Keys::generate().unwrap())
}

/// Those of another owner.
pub(crate) fn other_keys() -> &'static Keys {
    static KEYS: OnceLock<Keys> = OnceLock::new();
    KEYS.get_or_init(|| Keys::generate().unwrap())
}

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(Zeroizing::new(text.to_owned())).unwrap()
}

#[test]
fn keys_are_stored_encrypted_and_private_and_read_back() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("keys");
    keys().store(&folder, &passphrase("correct horse")).unwrap();
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    for purpose in Purpose::ALL {
        let path = folder.join(private_file(purpose));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600, "{purpose}");
        let text = fs::read_to_string(path).unwrap();
        assert!(text.starts_with("-----BEGIN ENCRYPTED PRIVATE KEY-----"), "{purpose}");
    }
    let signer = ImageSigner::open(&folder, &passphrase("correct horse")).unwrap();
    assert_eq!(signer.fingerprint(), keys().image_signer().unwrap().fingerprint());
    let wrong = ImageSigner::open(&folder, &passphrase("correct horsf")).unwrap_err();
    assert!(matches!(wrong, Error::Passphrase { .. }), "{wrong}");
    // Nothing else is left beside it.
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
}

#[test]
fn a_folder_with_content_and_another_file_are_left_alone() {
    let parent = tempfile::tempdir().unwrap();
    let (full, file) = (parent.path().join("full"), parent.path().join("file"));
    let link = parent.path().join("link");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("mine"), "x").unwrap();
    fs::write(&file, "x").unwrap();
    fs::create_dir(parent.path().join("empty")).unwrap();
    std::os::unix::fs::symlink("empty", &link).unwrap();
    let draft = parent.path().join("draft");
    fs::create_dir(&draft).unwrap();
    for path in [&full, &file, &link] {
        let taken = keys().store(path, &passphrase("x")).unwrap_err();
        assert!(matches!(taken, Error::Taken { .. }), "{taken}");
        assert!(taken.help().unwrap().contains("an empty one"));
        // Also where it appears while the keys are made.
        let taken = appear(&draft, path).unwrap_err();
        assert!(matches!(taken, Error::Taken { .. }), "{taken}");
    }
    assert_eq!(fs::read_to_string(full.join("mine")).unwrap(), "x");
    assert_eq!(fs::read_to_string(file).unwrap(), "x");
    assert!(fs::symlink_metadata(link).unwrap().is_symlink());
}

#[test]
fn a_place_where_no_folder_can_be_made_is_found_before_the_keys_are_made() {
    let parent = tempfile::tempdir().unwrap();
    ensure_free(&parent.path().join("keys")).unwrap();
    let absent = parent.path().join("absent");
    let error = ensure_free(&absent.join("keys")).unwrap_err();
    assert!(matches!(&error, Error::File { path, .. } if *path == absent), "{error}");
}

#[test]
fn an_empty_folder_takes_the_keys_and_becomes_private() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("keys");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    keys().store(&folder, &passphrase("x")).unwrap();
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    ImageSigner::open(&folder, &passphrase("x")).unwrap();
}

#[test]
fn a_build_needs_the_signature_and_the_policy_key_alone() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("keys");
    keys().store(&folder, &passphrase("x")).unwrap();
    fs::remove_file(folder.join("platform.key")).unwrap();
    fs::remove_file(folder.join("exchange.key")).unwrap();
    ImageSigner::open(&folder, &passphrase("x")).unwrap();
    let shown = show(&folder).unwrap();
    let private: Vec<_> = shown.iter().map(|key| key.private == Private::Here).collect();
    assert_eq!(private, [false, false, true, true, true]);
    assert!(shown[2].name.starts_with("CN=Polis signature key "), "{}", shown[2].name);
    assert!(shown[4].name.starts_with("Ed25519 "), "{}", shown[4].name);
    // The policy key of another owner, or none.
    let policy = folder.join("policy.pub");
    let right = fs::read(&policy).unwrap();
    other_keys().store(&parent.path().join("other"), &passphrase("x")).unwrap();
    fs::copy(parent.path().join("other/policy.pub"), &policy).unwrap();
    let refused = ImageSigner::open(&folder, &passphrase("x")).unwrap_err();
    assert!(matches!(refused, Error::Mismatch { .. }), "{refused}");
    fs::write(&policy, right).unwrap();
    fs::remove_file(folder.join("policy.key")).unwrap();
    let refused = ImageSigner::open(&folder, &passphrase("x")).unwrap_err();
    assert!(refused.help().unwrap().contains("keys show"), "{refused}");
}

#[test]
fn what_was_revoked_is_enrolled_and_not_signed_again() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("keys");
    let passphrase = passphrase("x");
    keys().store(&folder, &passphrase).unwrap();
    let open = || ImageSigner::open(&folder, &passphrase).unwrap();
    let program = crate::uki::build(&crate::uki::tests::stub(), &[]).unwrap();
    let before = open();
    let signed = before.sign("program", &program).unwrap();
    assert_eq!(before.enrolment().len(), 3);
    let hash = authenticode::hash(&signed).unwrap();
    assert_eq!(revoke(&folder, &passphrase, &[hash, [5; 32]]).unwrap(), 2);
    let list = fs::read(folder.join("dbx.auth")).unwrap();
    assert_eq!(revoke(&folder, &passphrase, &[hash]).unwrap(), 0);
    assert_eq!(fs::read(folder.join("dbx.auth")).unwrap(), list);
    let mut expected = [hex::encode(&hash), "05".repeat(32)];
    expected.sort();
    assert_eq!(revoked(&folder).unwrap(), expected);
    let after = open();
    assert_eq!(after.enrolment()[3], ("dbx.auth".to_owned(), list.clone()));
    assert_ne!(after.fingerprint(), before.fingerprint());
    let refused = after.sign("program", &program).unwrap_err();
    assert!(matches!(&refused, Error::Revoked { name } if name == "program"), "{refused}");
    assert!(refused.help().unwrap().contains("another version"));
    // The list of another owner, and a damaged one.
    let other = parent.path().join("other");
    other_keys().store(&other, &passphrase).unwrap();
    fs::write(other.join("dbx.auth"), &list).unwrap();
    let foreign = revoked(&other).unwrap_err().to_string();
    assert!(foreign.ends_with("it is of another owner"), "{foreign}");
    fs::write(folder.join("dbx.auth"), &list[..list.len() - 1]).unwrap();
    let damaged = ImageSigner::open(&folder, &passphrase).unwrap_err();
    assert!(matches!(damaged, Error::Malformed { .. }), "{damaged}");
    // It cannot be written without the exchange key, which a build does not need.
    fs::write(folder.join("dbx.auth"), &list).unwrap();
    fs::remove_file(folder.join("exchange.key")).unwrap();
    let refused = revoke(&folder, &passphrase, &[[6; 32]]).unwrap_err();
    assert!(refused.help().unwrap().contains("backup"), "{refused}");
    open();
}

#[test]
fn a_damaged_folder_names_the_file() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("keys");
    keys().store(&folder, &passphrase("x")).unwrap();
    let refused = || ImageSigner::open(&folder, &passphrase("x")).unwrap_err();
    let certificate = folder.join("signature.crt");
    let right = fs::read(&certificate).unwrap();
    fs::copy(folder.join("platform.crt"), &certificate).unwrap();
    assert!(matches!(refused(), Error::Mismatch { .. }));
    fs::copy(folder.join("release.pub"), &certificate).unwrap();
    assert!(refused().to_string().ends_with("it is a PUBLIC KEY"));
    fs::write(&certificate, vec![b'x'; 70_000]).unwrap();
    assert!(refused().to_string().contains("larger than"));
    fs::write(&certificate, right).unwrap();
    let key = folder.join("signature.key");
    fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
    assert!(refused().help().unwrap().starts_with("chmod 600 "));
    fs::remove_file(&key).unwrap();
    assert!(refused().help().unwrap().contains("keys show"));
    // The help must not name the command that has just failed.
    fs::remove_file(folder.join("platform.crt")).unwrap();
    assert!(show(&folder).unwrap_err().help().unwrap().contains("backup"));
    let help = show(parent.path()).unwrap_err().help().unwrap();
    assert!(help.contains("keys create") && !help.contains("keys show"), "{help}");
}

#[test]
fn a_passphrase_is_neither_empty_nor_printed() {
    assert!(matches!(Passphrase::new(Zeroizing::default()), Err(Error::Length { length: 0 })));
    assert!(!format!("{:?} {:?}", passphrase("horse"), keys()).contains("horse"));
}

#[test]
fn openssl_reads_the_private_keys_and_agrees_about_the_public_halves() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("keys");
    keys().store(&folder, &passphrase("horse")).unwrap();
    for purpose in Purpose::ALL {
        let mut openssl = crate::program::host("openssl");
        openssl.args(["pkey", "-passin", "pass:horse", "-pubout", "-outform", "DER", "-in"]);
        let Ok(output) = openssl.arg(folder.join(private_file(purpose))).output() else {
            println!("skipped: this host has no openssl");
            return;
        };
        let pair = keys().pairs.iter().find(|pair| pair.purpose == purpose).unwrap();
        assert!(output.status.success(), "{purpose}");
        // A certificate has the public key in it.
        let inside = pair.public.windows(output.stdout.len()).any(|part| part == output.stdout);
        assert!(inside, "{purpose}");
    }
}
