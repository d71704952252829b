//! Fuzz targets of the answers of a TPM: single answers, and a whole conversation.

use polis_fuzz::{Accepted, Target};

use super::tests::{Answers, blob};
use super::*;
use polis_wire::attestation::Credential;

/// An answer with the length that its head has to have, and success.
fn framed(bytes: &[u8]) -> Vec<u8> {
    let whole = u32::try_from(bytes.len() + 10).unwrap().to_be_bytes();
    [&[0x80, 0x02][..], &whole, &[0; 4], bytes].concat()
}

/// The storage root key as a TPM answers with it: a point of P-256.
fn root() -> Vec<u8> {
    // The base point.
    let x =
        polis_base::hex::decode("6b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296");
    let y =
        polis_base::hex::decode("4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5");
    let sized =
        |bytes: &[u8]| [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat();
    let template = [0; 22];
    let public = [&template[..], &sized(&x.unwrap()), &sized(&y.unwrap())].concat();
    let parameters = sized(&public);
    let length = u32::try_from(parameters.len()).unwrap().to_be_bytes();
    [&0x8000_0001_u32.to_be_bytes()[..], &length, &parameters, &[0; 5]].concat()
}

#[test]
fn tpm_answers() {
    // A TPM that gives one answer to all never proves a session.
    let samples = [root(), vec![0; 60]];
    Target::new("machine.tpm").samples(samples).run(|input| {
        for answer in [input.to_vec(), framed(input)] {
            assert!(unseal(&mut Answers(vec![answer]), None, b"test", &blob()).is_err());
        }
        Accepted::Yes
    });
}

#[test]
fn tpm_conversations() {
    // Each answer is a length of one byte, and so many bytes.
    let piece = |bytes: &[u8]| [&[u8::try_from(bytes.len()).unwrap()][..], bytes].concat();
    let nonce = [&0x0200_0000_u32.to_be_bytes()[..], &[0, 32], &[7; 32]].concat();
    let selection = [&[0; 4][..], &[0, 0, 0, 1, 0, 0x0b, 3, 0x80, 0, 0]].concat();
    let conversation = [root(), selection, nonce.clone(), Vec::new(), nonce.clone(), nonce];
    let sample: Vec<u8> = conversation.iter().flat_map(|answer| piece(answer)).collect();
    Target::new("machine.tpm_conversation").samples([sample]).run(|input| {
        let mut answers = Vec::new();
        let mut rest = input;
        while let Some((length, more)) = rest.split_first() {
            let (answer, more) = more.split_at(usize::from(*length).min(more.len()));
            answers.push(framed(answer));
            rest = more;
        }
        answers.push(framed(&[]));
        let sealed = Blob { pcrs: vec![7, 12], ..blob() };
        assert!(unseal(&mut Answers(answers.clone()), None, b"test", &sealed).is_err());
        assert!(seal(&mut Answers(answers.clone()), None, &[7, 12], b"test", b"secret").is_err());
        let policy = [7; 32];
        let system = SignedSystem { policy, signature: vec![5; 256], key: vec![1; 278] };
        let signed = seal(&mut Answers(answers.clone()), Some(&system), &[7], b"test", b"secret");
        assert!(signed.is_err());
        // The answers of no session prove anything, and nothing depends on them alone.
        let _confirmed = confirm(&mut Answers(answers.clone()), &system);
        // A verifier judges what is returned here.
        let credential = Credential { blob: vec![1; 68], secret: vec![2; 68] };
        let _keys = keys(&mut Answers(answers.clone()));
        let _proof = prove(&mut Answers(answers), &credential, &[3; 32], &[7, 12]);
        Accepted::Yes
    });
}
