//! Encryption to the holders of Ed25519 keys, in the `age` format, version 1: what the cluster
//! stores or hands out for its owners, and must not be able to read again.
//!
//! ```text
//! Ed25519 public key  --to Montgomery form--> Recipient --+
//!                                                         v
//! plaintext --chunks of 64 KiB, ChaCha20-Poly1305--> header | chunks
//!                                                         v
//! Ed25519 private key --its scalar----------> Identity ---+--> plaintext
//! ```
//!
//! The format is that of `age-encryption.org/v1` with recipients of the kind `X25519` (C2SP,
//! specification `age.md`), so every program for it opens such a file. The crate `age` brings 84
//! more crates into the node, translations, NIST curves and post-quantum schemes among them;
//! this module needs four primitives, which `ring` and `curve25519-dalek` already bring.
//!
//! Invariants:
//! - A file that was cut off, extended or changed anywhere does not decrypt.
//! - Each file has a new key, from the random generator of the kernel.
//!
//! What this module does not do: passphrases, armour, other kinds of recipients; a stanza of
//! another kind is skipped.

use std::io::{self, BufRead, BufReader, Read, Write};

use base64ct::{Base64Unpadded, Encoding as _};
use curve25519_dalek::montgomery::MontgomeryPoint;
use ed25519_dalek::{SigningKey, VerifyingKey};
use rand::TryRng as _;
use rand::rngs::{SysError, SysRng};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::hmac;
use zeroize::Zeroizing;

const VERSION: &str = "age-encryption.org/v1";
const X25519: &str = "X25519";

/// Plaintext of one chunk, in bytes; only the last chunk is shorter.
const CHUNK: usize = 64 * 1024;
const TAG: usize = 16;
const FILE_KEY: usize = 16;
const NONCE: usize = 16;

/// A line of a body has at most this many characters, and the last line fewer.
const COLUMNS: usize = 64;

/// The largest header that is read; one for a hundred recipients has 10 KB.
const HEADER_MAX: usize = 64 * 1024;

/// Why nothing was decrypted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The content is in another format.
    #[error("it is not in the age format")]
    Foreign,
    /// The header does not follow the format.
    #[error("line {line} of its header is damaged")]
    Header {
        /// The line, from 1.
        line: usize,
    },
    /// Every recipient is another one.
    #[error("this key is not among those that it is encrypted to ({recipients})")]
    OtherRecipients {
        /// How many it is encrypted to.
        recipients: usize,
    },
    /// The key fits, and the content was changed or cut off.
    #[error("it was changed or cut off after {good} bytes")]
    Damaged {
        /// The bytes of plaintext before the damage.
        good: u64,
    },
    /// The file cannot be read.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
    /// The plaintext cannot be written.
    #[error("the plaintext cannot be written")]
    Write(#[source] io::Error),
}

/// The recipient of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipient(MontgomeryPoint);

impl Recipient {
    /// The holder of this Ed25519 key; `None` if it is not a point of the curve, or is
    /// one of small order, for which each secret is the same.
    #[must_use]
    pub fn of_key(key: &[u8; 32]) -> Option<Self> {
        let key = VerifyingKey::from_bytes(key).ok().filter(|key| !key.is_weak())?;
        Some(Self(key.to_montgomery()))
    }
}

/// A share for which each secret is the same: no honest writer makes one.
struct SmallOrder;

/// The private half of a [`Recipient`].
pub struct Identity {
    scalar: Zeroizing<[u8; 32]>,
    recipient: MontgomeryPoint,
}

impl Identity {
    /// The holder of this key.
    #[must_use]
    pub fn of_key(key: &SigningKey) -> Self {
        let scalar = Zeroizing::new(key.to_scalar_bytes());
        Self { recipient: MontgomeryPoint::mul_base_clamped(*scalar), scalar }
    }

    /// The key of the file, if this stanza holds it for this identity.
    fn unwrap(
        &self,
        share: &[u8; 32],
        body: &[u8],
    ) -> Result<Option<Zeroizing<[u8; FILE_KEY]>>, SmallOrder> {
        let share = MontgomeryPoint(*share);
        let secret = Zeroizing::new(share.mul_clamped(*self.scalar).to_bytes());
        if *secret == [0; 32] {
            return Err(SmallOrder);
        }
        let key = wrapping_key(&secret, &share, &self.recipient);
        let mut body = Zeroizing::new(body.to_vec());
        let opened = key.open_in_place(counted(0, false), Aad::empty(), &mut body).ok();
        Ok(opened.and_then(|key| <[u8; FILE_KEY]>::try_from(&*key).ok()).map(Zeroizing::new))
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

/// Writes a file in pieces.
pub struct Encryptor {
    key: LessSafeKey,
    chunk: u64,
    /// Plaintext that is not encrypted yet: whether a chunk is the last one is part of it.
    pending: Zeroizing<Vec<u8>>,
}

impl Encryptor {
    /// Begins a file, and returns its first bytes.
    ///
    /// # Errors
    ///
    /// When the kernel gives no random bytes.
    pub fn begin(recipients: &[Recipient]) -> Result<(Self, Vec<u8>), SysError> {
        let ephemeral: Vec<_> =
            recipients.iter().map(|_recipient| random::<32>()).collect::<Result<_, _>>()?;
        let file_key = random::<FILE_KEY>()?;
        Ok(Self::with(recipients, &file_key, &ephemeral, *random::<NONCE>()?))
    }

    fn with(
        recipients: &[Recipient],
        file_key: &[u8; FILE_KEY],
        ephemeral: &[Zeroizing<[u8; 32]>],
        nonce: [u8; NONCE],
    ) -> (Self, Vec<u8>) {
        let mut header = format!("{VERSION}\n");
        for (recipient, secret) in recipients.iter().zip(ephemeral) {
            let share = MontgomeryPoint::mul_base_clamped(**secret);
            let shared = Zeroizing::new(recipient.0.mul_clamped(**secret).to_bytes());
            let mut body = Vec::with_capacity(FILE_KEY + TAG);
            body.extend_from_slice(file_key);
            seal(&wrapping_key(&shared, &share, &recipient.0), counted(0, false), &mut body);
            let share = Base64Unpadded::encode_string(share.as_bytes());
            // 32 bytes are 43 characters: one line.
            let body = Base64Unpadded::encode_string(&body);
            header.push_str(&format!("-> {X25519} {share}\n{body}\n"));
        }
        header.push_str("---");
        let mac = hmac::sign(&header_key(file_key), header.as_bytes());
        header.push_str(&format!(" {}\n", Base64Unpadded::encode_string(mac.as_ref())));
        let mut begun = header.into_bytes();
        begun.extend_from_slice(&nonce);
        let key = payload_key(file_key, &nonce);
        (Self { key, chunk: 0, pending: Zeroizing::new(Vec::with_capacity(CHUNK + TAG)) }, begun)
    }

    /// The same file once more, for a reader that must know its checksum before its content:
    /// only at its beginning, and only for the same plaintext. One of both must not leave the
    /// machine, since the same key hides both.
    #[must_use]
    pub fn again(&self) -> Self {
        Self { key: self.key.clone(), chunk: self.chunk, pending: self.pending.clone() }
    }

    /// Takes plaintext, and returns what can be written by now.
    #[must_use]
    pub fn push(&mut self, plaintext: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut rest = plaintext;
        while !rest.is_empty() {
            if self.pending.len() == CHUNK {
                self.seal_pending(false, &mut out);
            }
            let (now, later) = rest.split_at(rest.len().min(CHUNK - self.pending.len()));
            self.pending.extend_from_slice(now);
            rest = later;
        }
        out
    }

    /// The end of the file.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let mut out = Vec::new();
        self.seal_pending(true, &mut out);
        out
    }

    fn seal_pending(&mut self, last: bool, out: &mut Vec<u8>) {
        let mut chunk = std::mem::replace(&mut *self.pending, Vec::with_capacity(CHUNK + TAG));
        seal(&self.key, counted(self.chunk, last), &mut chunk);
        self.chunk += 1;
        out.extend_from_slice(&chunk);
    }
}

impl std::fmt::Debug for Encryptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encryptor").field("chunk", &self.chunk).finish_non_exhaustive()
    }
}

/// A whole file in memory.
///
/// # Errors
///
/// When the kernel gives no random bytes.
pub fn encrypt(recipients: &[Recipient], plaintext: &[u8]) -> Result<Vec<u8>, SysError> {
    let (mut encryptor, mut file) = Encryptor::begin(recipients)?;
    file.extend(encryptor.push(plaintext));
    file.extend(encryptor.finish());
    Ok(file)
}

/// Whether content begins as a file in the age format does.
#[must_use]
pub fn is_encrypted(content: &[u8]) -> bool {
    content.strip_prefix(VERSION.as_bytes()).is_some_and(|rest| rest.starts_with(b"\n"))
}

/// Decrypts `file` into `out`, and returns the size of the plaintext. After an error, what was
/// written is the beginning of the plaintext, and not the whole.
///
/// # Errors
///
/// [`Error`].
pub fn decrypt(identity: &Identity, file: impl Read, mut out: impl Write) -> Result<u64, Error> {
    let mut file = BufReader::with_capacity(CHUNK + TAG, file);
    let file_key = read_header(identity, &mut file)?;
    let mut nonce = [0; NONCE];
    let mut good = 0;
    file.read_exact(&mut nonce).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::Damaged { good },
        _ => Error::Read(error),
    })?;
    let key = payload_key(&file_key, &nonce);
    let mut chunk = Zeroizing::new(Vec::with_capacity(CHUNK + TAG));
    for number in 0.. {
        chunk.clear();
        let sealed = (&mut file).take((CHUNK + TAG) as u64).read_to_end(&mut chunk);
        sealed.map_err(Error::Read)?;
        let last = file.fill_buf().map_err(Error::Read)?.is_empty();
        let counted = counted(number, last);
        let opened = key.open_in_place(counted, Aad::empty(), &mut chunk);
        let plaintext = opened.map_err(|_mismatch| Error::Damaged { good })?;
        // Only an empty file ends with an empty chunk: there is one way to write each file.
        if plaintext.is_empty() && number > 0 {
            return Err(Error::Damaged { good });
        }
        out.write_all(plaintext).map_err(Error::Write)?;
        good += plaintext.len() as u64;
        if last {
            break;
        }
    }
    Ok(good)
}

/// The lines of a header, as they are read.
struct Lines<'a, R> {
    file: &'a mut R,
    /// Everything that was read.
    header: Vec<u8>,
    line: usize,
}

impl<R: BufRead> Lines<'_, R> {
    /// The next line without its end.
    fn next(&mut self) -> Result<String, Error> {
        self.line += 1;
        let damaged = || Error::Header { line: self.line };
        let begun = self.header.len();
        let room = (HEADER_MAX - begun) as u64;
        let read = (&mut *self.file).take(room).read_until(b'\n', &mut self.header);
        read.map_err(Error::Read)?;
        let line = self.header[begun..].strip_suffix(b"\n").ok_or_else(damaged)?;
        String::from_utf8(line.to_vec()).map_err(|_not_text| damaged())
    }

    fn damaged(&self) -> Error {
        Error::Header { line: self.line }
    }

    /// The body of a stanza, which ends with a line that is not full.
    fn body(&mut self) -> Result<Vec<u8>, Error> {
        let mut body = Vec::new();
        loop {
            let line = self.next()?;
            let part = Base64Unpadded::decode_vec(&line).map_err(|_invalid| self.damaged())?;
            body.extend(part);
            match line.len() {
                COLUMNS => {}
                0..COLUMNS => return Ok(body),
                _ => return Err(self.damaged()),
            }
        }
    }
}

/// Reads the header up to the nonce, and returns the key of the file.
fn read_header(
    identity: &Identity,
    file: &mut impl BufRead,
) -> Result<Zeroizing<[u8; FILE_KEY]>, Error> {
    let mut lines = Lines { file, header: Vec::new(), line: 0 };
    match lines.next() {
        Ok(line) if line == VERSION => {}
        Ok(_) | Err(Error::Header { .. }) => return Err(Error::Foreign),
        Err(error) => return Err(error),
    }
    let (mut found, mut recipients) = (None, 0);
    let mac = loop {
        let line = lines.next()?;
        if let Some(mac) = line.strip_prefix("--- ") {
            break Base64Unpadded::decode_vec(mac).map_err(|_invalid| lines.damaged())?;
        }
        let stanza = line.strip_prefix("-> ").ok_or_else(|| lines.damaged())?;
        recipients += 1;
        let words: Vec<&str> = stanza.split(' ').collect();
        let is_word = |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_graphic());
        if !words.iter().all(is_word) {
            return Err(lines.damaged());
        }
        let share = match words[..] {
            [X25519, share] => Base64Unpadded::decode_vec(share).ok(),
            [X25519, ..] => None,
            _ => {
                lines.body()?;
                continue;
            }
        };
        let share = share.and_then(|share| <[u8; 32]>::try_from(share).ok());
        let share = share.ok_or_else(|| lines.damaged())?;
        let body = lines.body()?;
        if body.len() != FILE_KEY + TAG {
            return Err(lines.damaged());
        }
        let unwrapped = identity.unwrap(&share, &body).map_err(|SmallOrder| lines.damaged())?;
        found = found.or(unwrapped);
    };
    let file_key = found.ok_or(Error::OtherRecipients { recipients })?;
    // The code covers the header up to the dashes of its own line.
    let end = lines.header.iter().rposition(|byte| *byte == b' ').unwrap_or_default();
    hmac::verify(&header_key(&file_key), &lines.header[..end], &mac)
        .map_err(|_mismatch| Error::Damaged { good: 0 })?;
    Ok(file_key)
}

fn random<const N: usize>() -> Result<Zeroizing<[u8; N]>, SysError> {
    let mut bytes = Zeroizing::new([0; N]);
    SysRng.try_fill_bytes(bytes.as_mut())?;
    Ok(bytes)
}

/// The nonce of a chunk: its number, and whether it is the last one.
fn counted(chunk: u64, last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[3..11].copy_from_slice(&chunk.to_be_bytes());
    nonce[11] = u8::from(last);
    Nonce::assume_unique_for_key(nonce)
}

fn seal(key: &LessSafeKey, nonce: Nonce, data: &mut Vec<u8>) {
    // It fails above 256 GiB.
    let sealed = key.seal_in_place_append_tag(nonce, Aad::empty(), data);
    assert!(sealed.is_ok(), "a chunk has at most 64 KiB");
}

/// The length of every derived key.
#[derive(Clone, Copy)]
struct Length;

impl KeyType for Length {
    fn len(&self) -> usize {
        32
    }
}

fn derived(secret: &[u8], salt: &[u8], purpose: &str) -> Zeroizing<[u8; 32]> {
    let mut key = Zeroizing::new([0; 32]);
    let expanded = Salt::new(HKDF_SHA256, salt).extract(secret);
    let purpose = [purpose.as_bytes()];
    let filled = expanded.expand(&purpose, Length).and_then(|out| out.fill(key.as_mut()));
    assert!(filled.is_ok(), "HKDF gives up to 255 times 32 bytes");
    key
}

fn chacha(key: &[u8; 32]) -> LessSafeKey {
    let Ok(key) = UnboundKey::new(&CHACHA20_POLY1305, key) else {
        unreachable!("a key of ChaCha20-Poly1305 has 32 bytes")
    };
    LessSafeKey::new(key)
}

fn wrapping_key(
    secret: &[u8; 32],
    share: &MontgomeryPoint,
    recipient: &MontgomeryPoint,
) -> LessSafeKey {
    let salt = [share.as_bytes().as_slice(), recipient.as_bytes()].concat();
    chacha(&derived(secret, &salt, "age-encryption.org/v1/X25519"))
}

fn header_key(file_key: &[u8; FILE_KEY]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, derived(file_key, b"", "header").as_ref())
}

fn payload_key(file_key: &[u8; FILE_KEY], nonce: &[u8; NONCE]) -> LessSafeKey {
    chacha(&derived(file_key, nonce, "payload"))
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    fn recipient(seed: u8) -> Recipient {
        Recipient::of_key(key(seed).verifying_key().as_bytes()).unwrap()
    }

    fn opened(seed: u8, file: &[u8]) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        let size = decrypt(&Identity::of_key(&key(seed)), file, &mut out)?;
        assert_eq!(size, out.len() as u64);
        Ok(out)
    }

    #[test]
    fn each_recipient_reads_what_was_written_and_others_do_not() {
        let recipients = [recipient(1), recipient(2)];
        for size in [0, 1, 32, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7] {
            let plaintext: Vec<u8> = (0..=255).cycle().take(size).collect();
            let file = encrypt(&recipients, &plaintext).unwrap();
            assert!(is_encrypted(&file));
            assert_eq!(opened(1, &file).unwrap(), plaintext, "{size}");
            assert_eq!(opened(2, &file).unwrap(), plaintext, "{size}");
            let refused = opened(3, &file).unwrap_err();
            assert!(matches!(refused, Error::OtherRecipients { recipients: 2 }), "{refused}");
        }
    }

    #[test]
    fn pieces_of_any_size_make_the_same_file() {
        let plaintext: Vec<u8> = (0..=250).cycle().take(2 * CHUNK + 100).collect();
        let made = |piece: usize| {
            let ephemeral = [Zeroizing::new([7; 32])];
            let (mut encryptor, mut file) =
                Encryptor::with(&[recipient(1)], &[8; FILE_KEY], &ephemeral, [9; NONCE]);
            plaintext.chunks(piece).for_each(|piece| file.extend(encryptor.push(piece)));
            file.extend(encryptor.finish());
            file
        };
        let whole = made(plaintext.len());
        assert_eq!(opened(1, &whole).unwrap(), plaintext);
        for piece in [1000, CHUNK - 1, CHUNK, CHUNK + 1] {
            assert_eq!(made(piece), whole, "{piece}");
        }
    }

    #[test]
    fn a_file_that_was_changed_or_cut_off_anywhere_does_not_decrypt() {
        let plaintext = vec![b'x'; CHUNK + 10];
        let file = encrypt(&[recipient(1)], &plaintext).unwrap();
        let begin = file.len() - plaintext.len() - 2 * TAG;
        let places = (0..begin).chain([begin, begin + CHUNK, file.len() - TAG, file.len() - 1]);
        for place in places {
            let mut changed = file.clone();
            changed[place] ^= 1;
            assert!(opened(1, &changed).is_err(), "byte {place}");
            assert!(opened(1, &file[..place]).is_err(), "cut off at {place}");
        }
        // At the end of a chunk, where the rest would be a whole file without the mark.
        assert!(opened(1, &file[..begin + CHUNK + TAG]).is_err());
        assert!(opened(1, &[&file[..], b"x"].concat()).is_err());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let file = encrypt(&[recipient(1)], b"plain").unwrap();
        assert!(matches!(opened(1, b"").unwrap_err(), Error::Foreign));
        assert!(matches!(opened(1, b"age-encryption.org/v2\n").unwrap_err(), Error::Foreign));
        let header = format!("{VERSION}\nsomething\n");
        let error = opened(1, header.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "line 2 of its header is damaged");
        for stanza in ["-> X25519", "-> X25519 AA AA", "-> X25519  AA", "-> other\u{e9}", "-> "] {
            let header = format!("{VERSION}\n{stanza}\nAA\n--- AA\n");
            let error = opened(1, header.as_bytes()).unwrap_err();
            assert!(matches!(error, Error::Header { line: 2 }), "{stanza:?}: {error}");
        }
        // A share of zeros.
        let zeros = Base64Unpadded::encode_string(&[0; 32]);
        let header = format!("{VERSION}\n-> X25519 {zeros}\n{zeros}\n--- {zeros}\n");
        assert!(matches!(opened(1, header.as_bytes()).unwrap_err(), Error::Header { line: 3 }));
        let endless = format!("{VERSION}\n-> other\n{}", "A".repeat(2 * HEADER_MAX));
        assert!(matches!(opened(1, endless.as_bytes()).unwrap_err(), Error::Header { line: 3 }));
        let mut changed = file.clone();
        *changed.last_mut().unwrap() ^= 1;
        let error = opened(1, &changed).unwrap_err();
        assert_eq!(error.to_string(), "it was changed or cut off after 0 bytes");
    }

    /// A file that the reference program (`age` 1.1.1) made for [`key`] 1.
    const REFERENCE: &str = "\
         YWdlLWVuY3J5cHRpb24ub3JnL3YxCi0+IFgyNTUxOSArOTM4YnFYb0xxaVBTT2ZmcjFYOFpZ\
         eVVXV1lKNHBYZ1MrdzJXekExOWd3CjlXVUNlMjZFUEVrU0szWHBIeHVVcmZTa0V6dER3WVcw\
         RlZsSDVpc1dQencKLS0tIENkdjh0bXNBTlRqMTl0a0o3TkREbXYvWUdOS1liUXQyUXFDdVZX\
         MS81VWMK7LAYDX3RAS5rT6GVGifE8WaqOvASD1RHNiovEIdoi78nzlYE7w==";

    #[test]
    fn a_file_of_the_reference_program_decrypts() {
        let file = base64ct::Base64::decode_vec(REFERENCE).unwrap();
        assert_eq!(opened(1, &file).unwrap(), b"polis");
    }

    /// The file was decrypted with the reference program (`age` 1.1.1), when this was written.
    #[test]
    fn the_file_that_the_reference_program_decrypted_is_made_again() {
        let ephemeral = [Zeroizing::new([2; 32])];
        let (mut encryptor, mut file) =
            Encryptor::with(&[recipient(1)], &[3; FILE_KEY], &ephemeral, [4; NONCE]);
        file.extend(encryptor.push(&[b'p'; 2 * CHUNK]));
        file.extend(encryptor.finish());
        let digest = polis_base::hex::encode(&Sha256::digest(&file));
        insta::assert_snapshot!(digest, @"35e4aa2b0f8c93ce240de205f5a75c7d48b2e3af8263db66ce30f0823a0a96dc");
    }

    #[test]
    fn a_key_of_small_order_is_not_a_recipient() {
        let mut identity = [0; 32];
        identity[0] = 1;
        assert_eq!(Recipient::of_key(&identity), None);
        assert!(Recipient::of_key(key(1).verifying_key().as_bytes()).is_some());
    }
}
